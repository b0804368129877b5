// The generations of the keeper's job and their ranks, as data. ranks.h starts and buries ranks,
// outputs.h drains what they write, rank_socket.h hears those with the SDK, endings.h ends generations.
// Owner thread only; nothing blocks. Finding a rank is a look into two maps, whatever their number.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/core/values/keeper_messages.h"
#include "runtime/keeper/cgroup.h"
#include "runtime/keeper/log_stream.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

// The streams of a dead rank, which others may hold open, are read for this long (fault P7).
inline constexpr int64_t kDrainMs = 2000;

// The control group that the processes of a generation are started in, until the last of them has ended.
struct ProcessGroup {
  Cgroup cgroup;
  uint64_t oom_kills = 0;  // told already
};

struct RankProcess {
  StartRank spec;
  Kept born;               // as which it was started
  std::string born_token;  // in its environment, and in that of what it starts
  pid_t pid = -1;          // ours to signal while > 0: only we reap it
  uint64_t start_time = 0;
  UniqueFd out_write, err_write, in_read;  // until it is started
  UniqueFd in;                             // to its stdin (StartRank::takes_input), until that is at its end
  int64_t in_heard_ms = 0;                 // when a client last had it
  LogStream out, err;
  uint64_t out_sent = 0, err_sent = 0;   // LogStream::total already told to the agent
  int out_refused = 0, err_refused = 0;  // LogStream::refused likewise
  std::shared_ptr<ProcessGroup> group;   // of the generation that started it
  Cgroup cgroup;                         // only with a memory limit of its own; else the group's
  UniqueFd report;
  uint64_t report_offset = 0, report_punched = 0;
  std::optional<Exited> exit;
  int64_t drain_until_ms = 0;
  bool acked = false;
  bool sdk = false;
  bool stays = false;     // it can go on in another generation
  bool released = false;  // nothing that it sends belongs to the generation any more (yet: spec.waits)
  bool asked = false;     // it waits, and was asked at the end of its generation whether it still answers
  bool termed = false;    // it got SIGTERM from us
  std::vector<ProcessEntry> apart;  // and so did these, which its shell runs in other process groups
  std::deque<RelayUp> relays;       // not acknowledged
  size_t relay_bytes = 0;
  uint64_t relay_id = 0;

  // It waits for a place, runs, and has not come up yet.
  bool MayCome() const { return spec.waits && !released && pid > 0 && !exit; }
  // Its generation waits for it no more, and it may be in the next one. One that came up long ago and does
  // not answer now would hold up all that go on with it.
  bool LetsGo() const { return !termed && ((released && !asked) || MayCome()); }
};

enum class Phase {
  kLive,
  kEnding,   // asked, within the grace
  kKilling,  // every descendant is killed until none is found
  kWriting,  // only its logs are not on disk yet
  kGone
};

struct GenerationRecord {
  BeginGeneration begin;
  std::map<int, std::unique_ptr<RankProcess>> ranks;
  // Counted as they happen: to look at every rank at each exit would be too much for thousands.
  size_t ended = 0;             // ranks that have exited and were reaped, or never started
  size_t unacked = 0;           // exits that no agent has acknowledged
  UniqueFd reports;             // the folder of all ranks' $GTRAIN_REPORT
  int reports_watch = -1;       // of it, with Outputs; -1: they are looked for every second
  bool others_reports = false;  // some processes have theirs in another folder, which nobody watches
  std::vector<int> to_start;    // started together at the end of the turn
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();
  Phase phase = Phase::kLive;
  bool ordered = false;  // ended by a command or the lease, not by its ranks' own exits
  bool keep = false;     // EndGeneration::keep
  uint32_t noticed = 0;  // Notice::number of the newest
  End mode = End::kReform;
  std::string reason;
  int64_t term_at_ms = 0;  // SDK ranks that were asked to stop get SIGTERM then; 0 = was sent
  int64_t kill_at_ms = 0;
  int64_t give_up_ms = 0;
  int64_t written_by_ms = 0;  // gone then, whether its logs are on disk or not (fault P8)
  int64_t next_scan_ms = 0;   // of the process table: not at every wake-up
  bool clean = true;
  std::string gone_message;

  bool AllEnded() const { return ended == ranks.size(); }
  // True when nothing of its processes is waited for: each has ended, or is kept and has let go of it. One
  // that got SIGTERM before it said that it stays has its grace.
  bool AllLetGo() const;
};

// A shell that leads its process group died of the signal for which its program, in the same group or one
// that it was told apart, still saves.
bool ItsGroupStillSaves(const GenerationRecord& record, const RankProcess& rank);

class Generations {
 public:
  // nullptr: there is none.
  GenerationRecord* Find(uint64_t generation);
  RankProcess* FindRank(uint64_t generation, int rank);
  GenerationRecord& Add(BeginGeneration begin);
  void Forget(uint64_t generation) { all_.erase(generation); }

  // In the order of their numbers: first is the number, second the record.
  auto begin() { return all_.begin(); }
  auto end() { return all_.end(); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }
  bool empty() const { return all_.empty(); }

  bool AnyIn(Phase phase) const;
  bool AnyLive() const;  // not all are gone

 private:
  std::map<uint64_t, GenerationRecord> all_;
};

}  // namespace gtrain::keeper
