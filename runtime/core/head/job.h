// Job: its record, the part of the record that is stored, and what the head knows of its newest generation.
// PURE. Private to runtime/core/head.
//
// HeadModel owns all jobs, and only the loop's thread uses them. A rank costs some 700 bytes, so 1,000 ranks
// are less than a megabyte.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/rate_limit.h"
#include "job/plan/place.h"
#include "job/spec/job_spec.h"
#include "runtime/core/head/exchange.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/goodput.h"
#include "runtime/core/head/job_sizing.h"
#include "runtime/core/values/effects.h"
#include "runtime/core/values/job_state.h"
#include "runtime/core/values/messages.h"
#include "runtime/core/values/records.h"

namespace gtrain::core {

struct RankLive {
  RankStatus status;
  bool started = false;
  int exit = -1;                        // its place in record.exits; -1: it has not ended
  std::optional<Instant> stepped_at;    // when its step was last another
  bool began_anew = false;              // its step fell since Job::low_step
  bool silent = false;                  // it does not go on, though the generation was re-formed
  std::optional<Instant> idle_since;    // while its agent says that it rests
  std::optional<RankStatus> pace_from;  // at the beginning of the stretch that is measured
  std::optional<double> busy;           // share of the last whole stretch in which it did not wait for others
  bool busy_new = false;                // since nodes were compared
  std::optional<Instant> measured_at;   // its newest report
  std::optional<Instant> joined_at;     // at the latest, by its own clock
  // By its own clock since it joined, less what it waited and was held up; of the step that it said with it.
  std::optional<std::pair<int64_t, double>> worked;
};

// A process that comes up beside the generation (newcomers.h).
struct WaitingRank {
  RankStatus status;   // joined: it could go on in the next one
  Instant since;       // it was started, as far as this head knows
  bool over = false;   // nobody waits for it
  bool ended = false;  // its exit was heard
};

// How the ranks of a node compare with those of the others of their job (progress.h).
struct NodePace {
  double score = 1;  // their own time a step over the others'
  int above = 0;     // comparisons in a row that found it slow; below zero: that did not
  bool slow = false;
};

// A node of a live generation that leaves, and what becomes of the ranks when (leaves.h).
struct JobLeave {
  NodeId node;
  std::string hostname, source;
  Instant at;       // the machine goes
  Instant tell_at;  // the ranks are told
  Instant end_at;   // the generation ends
};

// Which parts of a job's record the store holds once the current step is written, so that a change is written
// at the cost of its size. Code that changes a part whose size may stay the same says so here.
struct JobWritten {
  bool status = false;                // there is one, and what it counts
  bool submission = false;            // as in the record
  bool unreleased = true;             // as in the record; none is written of no nodes
  bool newest_fault = true;           // as in the record
  Generation grant;                   // whose it is; 0: none
  size_t exits = 0;                   // the first of them
  size_t packed = 0;                  // of these, how many lie in JobExitsRecords
  std::vector<Generation> faults;     // of these
  std::vector<std::string> obsolete;  // keys beside those of the record, to be deleted with the next write
};

// A job that stands still, since when, and for people which ranks are to blame.
struct StallVerdict {
  Instant since;
  std::string text;
};

// Keys of `status` and `why` beside the notes that ranks write of themselves (rank_notes.h).
inline constexpr char kStuckNote[] = "stuck";  // that the job stands still, and who holds it up
inline constexpr char kProgressNote[] =
    "progress";  // what the job file says of progress and cannot be measured

struct Job {
  JobRecord record;
  JobWritten written;
  spec::JobSpec spec;
  plan::Demand demand;
  std::optional<CheckpointRecord> checkpoint;
  std::string checkpoint_policy;                    // as the newest report said it
  std::map<std::string, std::string> notes_before;  // of earlier generations, of the owner and the storage
  std::map<std::string, std::string> rank_notes;    // of this generation: kind -> newest (rank_notes.h)
  std::optional<RateLimit> note_rate;               // of the events that its ranks cause by what they say
  std::optional<RateLimit> samples_rate;            // of the records of samples alone
  int notes_left_out = 0;                           // since the last one that was told

  // Live, of record.generation.
  std::vector<RankLive> ranks;  // index = rank
  // Among the ranks that have not ended: how many reported each step, and how many were not started. Kept
  // with each change, so that a round of n ranks costs n log n here and not n * n.
  std::map<int64_t, int> steps;
  int not_started = 0;
  int going_on = 0;                             // of its ranks, processes of the generation before
  int coming_up = 0;                            // ranks that are to join it
  int joined = 0;                               // of its ranks, as often as they have
  int per_node = 1;                             // of a job that counts nodes
  int busy_new = 0;                             // ranks that have something new to compare nodes by
  std::pair<Generation, int> nodes_with_ranks;  // of that generation's grant
  mutable absl::flat_hash_map<NodeId, size_t> place_hints;  // HoldsNode's
  GoodputLedger goodput;
  std::optional<Exchange> exchange;
  std::optional<Instant> start_deadline;   // all ranks started
  std::optional<Instant> return_deadline;  // processes that go on in it have joined
  std::optional<Instant> gone_deadline;    // all nodes released
  std::optional<Instant> fenced_at;        // until then ranks of a node that does not answer may write
  std::vector<int> ended_meanwhile;        // ranks whose exits this head heard while the generation was ended
  std::optional<Instant> not_before;       // backoff
  std::optional<Instant> left_at;          // the others are told which ranks ended with exit code 0
  std::optional<Instant> cause_at;         // a rank has said 75: until then another one may say why
  bool any_started = false;
  bool granted_here = false;  // by this head, since its start
  bool checkpointed = false;  // a checkpoint was committed in this generation
  std::optional<JobLeave> leave;
  uint32_t notices = 0;                  // that the ranks of this generation were told
  std::optional<Instant> told_at;        // of the leave that stands: when it comes, as the ranks know
  std::optional<Instant> excused_until;  // of one that was taken back: ranks may still act on it
  bool saved_since_told = false;         // a checkpoint was committed since they were told
  JobSizing sizing;
  std::optional<int64_t> top_step;  // highest any rank reported
  std::optional<int64_t> low_step;  // lowest of the ranks still running
  int began_anew = 0;               // of these, whose step fell since low_step
  double steps_per_second = 0;
  // From one step to the next as it is reported, also of an earlier generation; where no speed is known yet,
  // what the first step of this one took, with whatever came before it. Zero: not known.
  absl::Duration step_time;
  // low_step and when, of the stretch that it is measured over: a few tens. A deque would hold half a
  // kilobyte while it is empty, in each of 100,000 jobs that have ended.
  std::vector<std::pair<int64_t, Instant>> rate_over;
  std::optional<Instant> progress_at;
  int idle = 0;                                // ranks that rest
  Instant idle_from;                           // the last of them did from then on
  std::optional<StallVerdict> stalled, stuck;  // no step; neither output nor processor time
  std::string placement_reason;
  std::map<NodeId, std::vector<ProcessId>> kept;    // processes that wait there for the next generation
  std::map<NodeId, std::vector<ProcessId>> coming;  // likewise, and have not come up
  std::vector<WaitingRank> waiting;                 // as GenerationGrant::waiting
  bool stays = false;                               // its processes can go on, as far as this head knows
  std::optional<Instant> running_since;             // all of its ranks have started
  std::optional<Instant> join_at;                   // those that have come up join then, whoever else has not
  std::optional<Instant> pause_asked;               // its ranks were asked to pause for that
  bool no_room = false;                             // at the last look, for more than come up already
  std::string newcomer_ended;                       // why the last one did; empty: one has come up since
  int join_failures = 0;                            // in a row
  std::optional<Instant> keep_until;                // no longer, where no room is found
  bool interrupted = false;                         // formed anew before it had begun, since the last step
  std::set<ProcessId> hung;                         // that are to blame for its end: they do not go on
  std::map<std::pair<NodeId, NodeId>, std::string> broken_links;  // smaller id first; what a rank said
  std::map<NodeId, NodePace> paces;
  std::optional<Instant> links_at;  // which node to do without is decided then

  std::string location;   // where it saves checkpoints, one name for each directory; empty: nowhere
  size_t user_bytes = 0;  // of its job file and environment
  size_t kept_bytes = 0;  // once it is over: what OverJobs counts of it

  std::vector<Instant> fault_times;    // parallel to record.faults
  std::vector<Instant> avoided_until;  // parallel to record.avoided
  std::vector<Blocker> blocked_by;
  std::optional<Instant> run_mark;  // run_time is counted up to here
  Instant client_seen;
  std::map<Generation, GenerationGrant> past;           // for logs of earlier generations, newest 16
  std::deque<std::shared_ptr<const EmitEvent>> events;  // shared with the documents that tell them

  // Some of them have the state of the generation that ended: those that came up beside it have none.
  bool SurvivorsWait() const;
  bool ProcessesWait() const { return !kept.empty() || !coming.empty(); }
  // Between two generations, and its nodes stay its own.
  // Processes that wait for another generation have their memory and their GPUs.
  bool KeepsPlace() const {
    return record.state == JobState::kReconfiguring || record.waits_for_storage || ProcessesWait();
  }
  // A generation that is granted and not revoked.
  bool Live() const {
    return !IsFinal(record.state) && record.grant.has_value() && record.generation > record.revoked;
  }
  bool AllIdle() const { return idle > 0 && idle == static_cast<int>(ranks.size() - record.exits.size()); }
  // Wants a generation and has none.
  bool Wanting() const { return !IsFinal(record.state) && !Live() && record.ending == Ending::kNone; }
  bool HoldsNode(const NodeId& node) const;
  // True when a rank there has not ended, or waits beside the others; the generation must live.
  bool NeedsNode(const NodeId& node) const;
  // True when a generation that is over may still run processes there.
  bool Unreleased(const NodeId& node) const;
  // A job between two generations keeps its place, also while it waits for its storage: other jobs would need
  // the same storage, and what took the place might keep it for days.
  bool Occupies() const { return record.grant && (Live() || KeepsPlace()); }
  // True also when a generation that is over may still run processes there.
  bool HoldsRoomOn(const NodeId& node) const { return Occupies() || Unreleased(node); }
  // The grant of one of the newest generations; nullptr: it is not remembered.
  const GenerationGrant* GrantOf(Generation generation) const;
  // The processes of the live generation go on in the next one, as far as this head knows: no step is lost
  // but the one that is under way, and no checkpoint is read.
  bool ProcessesStay() const;
  // In what the job file counts: processes that wait although all of its ranks run.
  int Spares() const { return (spec.spares + demand.unit - 1) / demand.unit * demand.unit; }
  // The number of ranks or of nodes, whichever the job file counts, with those that are to join them.
  int SizeOf(const GenerationGrant& grant) const;
  int NodesWithRanks(const GenerationGrant& grant) const;
  int RanksOf(const GenerationGrant& grant) const;  // that, in ranks
  int Size() const { return SizeOf(*record.grant); }
  absl::Duration RunTime(Instant now) const {
    return run_mark ? record.run_time + (now - *run_mark) : record.run_time;
  }
  bool MayActOnNotice(Instant now) const { return told_at || (excused_until && now < *excused_until); }
  const RankExit* ExitOf(int rank) const;
  void SetStarted(RankLive& rank);
  void SetStatus(RankLive& rank, const RankStatus& status);
  void SetExit(RankLive& rank, RankExit exit);
  void CountStep(const RankLive& rank, int count);
};

// The bytes of a job that its user chose.
size_t BytesOfUser(const std::string& spec_text, const std::map<std::string, std::string>& env);
// Where a job saves its checkpoints, one name for each directory; empty: nowhere, perhaps because it only
// reads.
std::string LocationOf(const spec::JobSpec& spec);

// At most `bytes` of the text, cut between characters: sentences in records are bounded.
std::string Shortened(std::string text, size_t bytes);
// The last `bytes` of it.
std::string LastBytes(const std::string& text, size_t bytes);

}  // namespace gtrain::core
