// The core of a rank's session: membership of one generation, exchanges, flags, and when which report is
// sent. PURE. The shell is runtime/worker.
//
//   joining --table 0--> joined --revoked or keeper lost--> over
// Stop and preemption are flags beside the state: the program acts on them.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain::core {

// ---------------------------------------------------------------- in

// The program joins: exchange 0 carries `blob`.
struct WorkerJoin {
  std::string blob;
};
// The program starts the next exchange; its number is then exchanges() - 1.
struct WorkerExchange {
  std::string blob;
};
// The agent's answer to an exchange, one blob a rank.
struct WorkerTable {
  uint64_t sequence = 0;
  std::vector<std::string> blobs;
};
// The program gives up waiting for a table; first it asks which ranks are missing.
struct WorkerOverdue {
  uint64_t sequence = 0;
};
// The agent's answer to that.
struct WorkerMissing {
  uint64_t sequence = 0;
  std::vector<int> ranks;
};
// Ranks that ended with exit code 0 while this one runs.
struct WorkerLeft {
  std::vector<int> ranks;
};
// The generation was revoked, or the keeper is gone and nobody would tell us.
struct WorkerOver {
  std::string reason;
};
struct WorkerStop {
  std::string reason;
};
struct WorkerNotice {
  absl::Duration left;
};
// Collectives begun by this rank in this generation, all communicators together, and the time in those that
// had to wait for others. `stalled`: the time for which checkpoints held it up.
struct WorkerCollectives {
  uint64_t count = 0;
  absl::Duration waited, stalled;
};
struct WorkerProgress {
  int64_t step = 0;
  std::optional<double> loss;
  int64_t samples = 0;  // since the previous one
  // As of this report, so that the step comes with the waits that led to it; 0 collectives: none is known.
  WorkerCollectives counted = {};
};
struct WorkerCheckpoint {
  int64_t step = 0;
  std::string manifest;
  std::string policy;  // for people
};
// Nothing gets from this rank's machine to that of the rank `peer`, for which it waits.
struct WorkerLinkDown {
  int peer = 0;
  std::string text;  // what was tried and what came of it
};
struct WorkerNote {
  std::string kind;  // one of rank_notes.h
  std::string text;
};
// The head wants the ranks to stand still behind a step.
struct WorkerPause {};
// They do, or may, when they are asked to: of rank 0, for all.
struct WorkerPauses {
  bool paused = false;
};
struct WorkerTick {};

using WorkerEvent =
    std::variant<WorkerJoin, WorkerExchange, WorkerTable, WorkerOverdue, WorkerMissing, WorkerOver,
                 WorkerStop, WorkerNotice, WorkerProgress, WorkerCheckpoint, WorkerLinkDown, WorkerNote,
                 WorkerCollectives, WorkerTick, WorkerLeft, WorkerPause, WorkerPauses>;

// ---------------------------------------------------------------- out

struct SendJoined {
  bool operator==(const SendJoined&) const = default;
};
struct SendExchange {
  uint64_t sequence = 0;
  std::string blob;
  bool operator==(const SendExchange&) const = default;
};
struct SendOverdue {
  uint64_t sequence = 0;
  bool operator==(const SendOverdue&) const = default;
};
// How much of its time a rank waits for others, which says who is slow (fault N6), and for checkpoints. All
// since it joined.
struct RankPace {
  absl::Duration waited, joined, stalled;
  bool operator==(const RankPace&) const = default;
};
struct SendProgress {
  std::optional<int64_t> step;
  std::optional<double> loss;
  int64_t samples = 0;  // since the previous SendProgress
  uint64_t collective = 0;
  std::optional<RankPace> pace;  // of when `collective` was counted, or of the step
  bool operator==(const SendProgress&) const = default;
};
struct SendCheckpoint {
  int64_t step = 0;
  std::string manifest;
  std::string policy;
  bool operator==(const SendCheckpoint&) const = default;
};

struct SendLinkDown {
  int peer = 0;
  std::string text;
  bool operator==(const SendLinkDown&) const = default;
};
struct SendNote {
  std::string kind;
  std::string text;
  bool operator==(const SendNote&) const = default;
};

struct SendPause {
  bool paused = false;
  bool operator==(const SendPause&) const = default;
};

using WorkerEffect = std::variant<SendJoined, SendExchange, SendOverdue, SendProgress, SendCheckpoint,
                                  SendLinkDown, SendNote, SendPause>;

struct WorkerStepResult {
  std::vector<WorkerEffect> effects;  // in this order
  std::string why;
};

// Not thread-safe.
class WorkerCore {
 public:
  enum class State { kNew, kJoining, kJoined, kOver };

  explicit WorkerCore(int world) : world_(world) {}

  WorkerStepResult Step(const WorkerEvent& event, Instant now);
  // When to Step(WorkerTick) next; nullopt: nothing is held back.
  std::optional<Instant> NextDeadline() const;

  State state() const { return state_; }
  const std::string& over_reason() const { return over_reason_; }
  const std::optional<std::string>& stop_reason() const { return stop_reason_; }
  bool pause_requested() const { return pause_requested_; }
  std::optional<Instant> preempted_at() const { return preempted_at_; }
  uint64_t exchanges() const { return exchanges_; }
  // The table of an exchange once; nullopt until it has arrived.
  std::optional<std::vector<std::string>> TakeTable(uint64_t sequence);
  // The ranks an open exchange waits for, as last told after a WorkerOverdue; empty: not told.
  const std::vector<int>& missing() const { return missing_; }
  // Ranks that ended with exit code 0, as last told.
  const std::vector<int>& left() const { return left_; }
  // Tables that answered no open exchange: repeats after a reconnect of the agent.
  uint64_t tables_dropped() const { return tables_dropped_; }

 private:
  WorkerStepResult On(const WorkerJoin& e, Instant now);
  WorkerStepResult On(const WorkerExchange& e, Instant now);
  WorkerStepResult On(const WorkerTable& e, Instant now);
  WorkerStepResult On(const WorkerOverdue& e, Instant now);
  WorkerStepResult On(const WorkerMissing& e, Instant now);
  WorkerStepResult On(const WorkerLeft& e, Instant now);
  WorkerStepResult On(const WorkerOver& e, Instant now);
  WorkerStepResult On(const WorkerStop& e, Instant now);
  WorkerStepResult On(const WorkerNotice& e, Instant now);
  WorkerStepResult On(const WorkerProgress& e, Instant now);
  WorkerStepResult On(const WorkerCheckpoint& e, Instant now);
  WorkerStepResult On(const WorkerLinkDown& e, Instant now);
  WorkerStepResult On(const WorkerNote& e, Instant now);
  WorkerStepResult On(const WorkerCollectives& e, Instant now);
  WorkerStepResult On(const WorkerPause& e, Instant now);
  WorkerStepResult On(const WorkerPauses& e, Instant now);
  WorkerStepResult On(const WorkerTick& e, Instant now);
  void TakePace(const WorkerCollectives& counted, Instant now);
  WorkerStepResult ReportIfDue(Instant now);

  int world_;
  State state_ = State::kNew;
  std::string over_reason_;
  std::optional<std::string> stop_reason_;
  bool pause_requested_ = false;
  std::optional<Instant> preempted_at_;

  uint64_t exchanges_ = 0;
  std::map<uint64_t, std::optional<std::vector<std::string>>> open_;  // by sequence, until taken
  uint64_t tables_dropped_ = 0;
  std::optional<uint64_t> asked_;  // of the exchange that missing_ belongs to
  std::vector<int> missing_, left_;

  std::optional<SendProgress> held_;  // waits for its turn
  std::optional<Instant> reported_at_;
  uint64_t collective_ = 0;
  std::optional<Instant> joined_at_;
  std::optional<RankPace> pace_;
};

}  // namespace gtrain::core
