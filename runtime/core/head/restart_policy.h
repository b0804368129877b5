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

// A fault and when it was seen. What an earlier head saw is as old as the clock on the wall says, and as
// young as this head where that is not known.
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

// The rank could not read the storage and ended by itself; what its agent or keeper did to it is what they
// say.
bool MetStorageFault(const RankExit& exit);

// Whether a fault of this kind uses up a budget and counts as a restart.
bool Charged(FaultKind kind);

// False of a generation that ended as planned: its ranks saved and asked for it, or a machine was about to
// leave.
bool IsFault(const FaultRecord& fault);
// What people call the first fault of a job; null: there was none.
const FaultRecord* FirstFault(const std::vector<FaultRecord>& faults);

// `faults`: oldest first; the last one is the fault to judge. What lies before the newest fault at which the
// job had committed a higher step than at any before it is paid for: neither budgets nor the wait count it.
RestartVerdict DecideRestart(const spec::RestartBudget& budget, const std::vector<PastFault>& faults,
                             Instant now, Rng& rng);

// Whether the last fault, an exit code 75, may be free: the job has committed a higher step than it had at
// the exit 75 before.
bool SavedMore(const std::vector<FaultRecord>& faults);

// What a rank's end means, and the signature by which the same error is recognised.
FaultKind KindOf(const RankExit& exit);
std::string SignatureOf(const RankExit& exit);
// "exit code 1", "killed by signal 9 (KILL)", "out of memory", ...
std::string DescribeExit(const RankExit& exit);

}  // namespace gtrain::core
