// The head's documents about jobs, read into plain values; docs/protocols/control-plane.md gives their shape.
// A field that is missing or of another type is left at its default: a newer head may say more or less.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::cli {

// What a rank is bound to.
struct RankBindings {
  std::vector<int> cpus;  // hardware threads, by the operating system; none: any
  std::vector<int> numa;  // the NUMA nodes of these
  std::vector<int> gpus;  // by the node's inventory
  std::vector<std::string> nics;
};

struct RankDoc {
  int rank = 0;
  std::string hostname;
  std::string state;  // "running", ...
  int64_t pid = 0;    // on its node; 0: none
  std::optional<int64_t> step;
  int local_rank = 0;
  std::string node;  // its id
  std::vector<int> gpus;
  std::optional<RankBindings> bindings = {};  // none: it was not asked for, or the head is older
};

struct FaultDoc {
  std::string message;
  std::string tail;  // what the rank wrote last
  uint64_t generation = 0;
  std::optional<int> rank;  // none: a node
  bool operator==(const FaultDoc&) const = default;
};

// Whether a job in this state, as documents name it, has ended for good.
inline bool IsOver(absl::string_view state) {
  return state == "SUCCEEDED" || state == "FAILED" || state == "CANCELLED";
}

struct JobDoc {
  std::string cluster;  // where AskJob gives it
  std::string id;
  std::string name;
  std::vector<std::string> labels;  // "KEY=VALUE"
  std::string state;                // "RUNNING", ...
  std::string reason;
  uint64_t generation = 0;
  int world_size = 0;
  std::vector<RankDoc> ranks;
  int restarts = 0;
  std::optional<int64_t> step, steps_total;
  std::optional<absl::Duration> eta;  // by the speed of the last steps
  std::optional<double> loss;
  bool diverged = false;  // the loss said last is not a finite number
  std::optional<double> samples_per_second;
  std::optional<double> steps_per_second;
  std::optional<int64_t> checkpoint_step;
  std::string restore;  // what this generation's state was restored from, or that it is nothing
  std::string stuck;    // that it seems to stand still, and who holds it up; empty: it does not
  std::optional<FaultDoc> first_fault;
  std::optional<FaultDoc> last_fault;  // where it is another one
  std::optional<FaultDoc> size_fault;  // for which the job does not grow by itself; `why` alone has it
  std::vector<std::string>
      notes;  // how often is saved and why, nodes that are slow or avoided: a sentence each
  std::string run_dir;
  std::optional<int> exit_code;
  std::string user;
  std::optional<absl::Time> submitted, started, ended;  // what the head's clock showed
  std::optional<absl::Duration> run_time;               // since it was first started

  bool Final() const { return IsOver(state); }
};

// For people: each fault, the last lines of what its rank wrote (ten that are not empty), and of all but the
// first where the rest is. Not cleaned for a terminal.
std::vector<std::string> FaultLines(const JobDoc& job);

// For people: what each rank is bound to, a line a rank. Not cleaned for a terminal.
std::vector<std::string> BindingLines(const JobDoc& job);

struct StatusDoc {
  std::string cluster;  // its id
  bool local = false;
  int nodes = 0;
  int omitted = 0;  // jobs that are over and not in the list
  std::vector<JobDoc> jobs;
};

struct EventDoc {
  uint64_t sequence = 0;
  uint64_t generation = 0;
  std::string kind;
  std::string text;
  std::optional<absl::Time> time;
};

struct EventsDoc {
  bool final = false;
  uint64_t next = 0;
  std::vector<EventDoc> events;
};

struct LogDoc {
  std::string text;
  uint64_t next_offset = 0;
  bool end = false;
  std::string note;
  std::optional<int> world_size = {};  // of the generation
  std::string hostname = {};           // where the rank ran
};

enum class Without { kRefuse, kNewest };  // a word and a live job: the newest that is over will do

// `word` as an id; else as a name: the only live job of that name, else the newest that is over; "" = the
// only live job. The error names the live ones where there are several; NotFound: no job is called so.
absl::StatusOr<JobDoc> ChooseJob(const StatusDoc& doc, const std::string& word, Without without);

absl::StatusOr<StatusDoc> ParseStatusDoc(absl::string_view json);
absl::StatusOr<JobDoc> ParseJobDoc(absl::string_view json);
absl::StatusOr<EventsDoc> ParseEventsDoc(absl::string_view json);
absl::StatusOr<LogDoc> ParseLogDoc(absl::string_view json);

// The part of JobDoc::restore that the user who launched should know; empty: training begins anew.
std::string RestoreNews(absl::string_view restore);

// Prints "step 120, loss 0.31, 850 samples/s, checkpoint at step 100", as far as it is known.
std::string PrintProgress(const JobDoc& job);

// "16:04:12", with the day if it is not today's.
std::string PrintClock(absl::Time at, absl::Time now);
// "45s", "12m03s", "3h12m", "2d04h".
std::string PrintSpan(absl::Duration span);

}  // namespace gtrain::cli
