// RestartPolicy: may a job have another generation after this fault, and when. PURE.
#pragma once
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "job/spec/job_spec.h"
#include "runtime/core/values/records.h"

namespace gtrain::core {

inline constexpr int kExitSaved = 75;             // saved, run me again: free where it was earned
inline constexpr int kExitNotFound = 127;         // the shell's: the command is not there
inline constexpr int kExitNoRestart = 93;         // do not restart
inline constexpr int kInfrastructureBudget = 20;  // node losses per window; generous: not the program's fault
inline constexpr int kSameLossesInARow = 3;
inline constexpr int kFreeRestartsInARow =
    20;  // exit 75, preemption or address in use without a step between
inline constexpr absl::Duration kBackoffMax = absl::Seconds(60);

// A fault and when it was seen. A fault that an earlier head saw is as old as the wall clock says, and as
// young as this head where its time is not known.
struct PastFault {
  const FaultRecord* fault = nullptr;
  Instant when;
};

struct RestartVerdict {
  bool restart = false;
  absl::Duration delay;
  std::string reason;  // "crash 2 of 10 in 1h, again in 2s" or why not
};

// A storage fault has none of the limits: the storage is waited for as long as it takes. `tries` counts the
// generations in a row that met it without progress, at least 1. At most kBackoffMax.
absl::Duration StorageBackoff(int tries, Rng& rng);

// Whether the rank could not read the storage and ended by itself; if its agent or keeper ended it, the cause
// in their report counts.
bool MetStorageFault(const RankExit& exit);

// Whether a fault of this kind uses up a budget and counts as a restart.
bool Charged(FaultKind kind);

// True for a planned change of the number of ranks, which a person asked for or a commit came before: nobody
// waits for it, it is no loop of the program's, and nothing is lost.
bool IsPlanned(const FaultRecord& fault);

// False for a generation that ended as planned: its ranks saved and asked for it, or a machine was about to
// leave.
bool IsFault(const FaultRecord& fault);
// Returns the fault that people call the first fault of a job; null: there was none.
const FaultRecord* FirstFault(const std::vector<FaultRecord>& faults);
const FaultRecord* LastFault(const std::vector<FaultRecord>& faults);

// `faults` are oldest first, and the last one is the fault to judge. Faults before the newest one at which
// the job had committed a higher step than at any before it are paid for: neither budgets nor the wait count
// them.
RestartVerdict DecideRestart(const spec::RestartBudget& budget, const std::vector<PastFault>& faults,
                             Instant now, Rng& rng);

// Whether the last fault, an exit code 75, may be free: the job has committed a higher step than it had at
// the exit 75 before.
bool SavedMore(const std::vector<FaultRecord>& faults);

// The kind of fault that a rank's end is, and the signature by which the same error is recognised.
FaultKind KindOf(const RankExit& exit);
std::string SignatureOf(const RankExit& exit);
// "exit code 1", "killed by signal 9 (KILL)", "out of memory", ...
std::string DescribeExit(const RankExit& exit);

}  // namespace gtrain::core
