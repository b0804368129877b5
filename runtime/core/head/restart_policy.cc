// Small rules in a fixed order, the first that forbids wins:
//   0. a higher committed step pays for all faults before the one it was followed by.
//   1. exit 93 is final, and so is a program or a Python module that is not there, if the job has not yet got
//      anywhere: it will not be there a second later.
//   2. a planned resize is free and waits for nothing; exit 75, an address in use and a machine that leaves
//      are free, but not endless without a step between them. The head calls an exit 75 a crash if nothing
//      earned it (SavedMore, a machine that leaves or is gone).
//   3. each kind (crash, OOM, infrastructure) counts against its own budget in a sliding window.
//   4. the same error twice in a row without getting further is a bug, not bad luck.
//   5. crashes in a row before any first step count against before_first_step.
//   6. losses of infrastructure in a row without progress wait too; the same named one thrice is final.
// A storage fault stands outside of all this: nothing is charged, and nothing but exit 93 ends the job. A
// restart that is allowed waits 0 s after the first crash that had made progress, else 1 s doubling to one
// minute, with jitter of a quarter so that jobs felled by one cause do not return in step.
#include "runtime/core/head/restart_policy.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/probe.h"
#include "base/units.h"

namespace gtrain::core {
namespace {

const char* SignalName(int signal) {
  switch (signal) {
    case 1:
      return "HUP";
    case 2:
      return "INT";
    case 3:
      return "QUIT";
    case 4:
      return "ILL";
    case 5:
      return "TRAP";
    case 6:
      return "ABRT";
    case 7:
      return "BUS";
    case 8:
      return "FPE";
    case 9:
      return "KILL";
    case 10:
      return "USR1";
    case 11:
      return "SEGV";
    case 12:
      return "USR2";
    case 13:
      return "PIPE";
    case 14:
      return "ALRM";
    case 15:
      return "TERM";
    case 24:
      return "XCPU";
    case 25:
      return "XFSZ";
    case 31:
      return "SYS";
    default:
      return "?";
  }
}

// The last line that says something, digits folded so that addresses and counters do not matter.
std::string LastLine(absl::string_view tail) {
  std::vector<absl::string_view> lines = absl::StrSplit(tail, '\n');
  for (auto it = lines.rbegin(); it != lines.rend(); ++it) {
    const absl::string_view line = absl::StripAsciiWhitespace(*it);
    if (line.empty()) continue;
    std::string folded;
    for (const char c : line.substr(0, 200)) {
      if (!absl::ascii_isdigit(static_cast<unsigned char>(c))) {
        folded.push_back(c);
      } else if (folded.empty() || folded.back() != '#') {
        folded.push_back('#');
      }
    }
    return folded;
  }
  return "";
}

struct Budget {
  int limit = 0;
  const char* name = "";
};

Budget BudgetOf(FaultKind kind, const spec::RestartBudget& budget) {
  switch (kind) {
    case FaultKind::kOom:
      return {budget.oom, "out-of-memory kill"};
    case FaultKind::kInfrastructure:
      return {kInfrastructureBudget, "infrastructure loss"};
    default:
      return {budget.budget, "crash"};
  }
}

int FreeInARow(const std::vector<PastFault>& faults) {
  int count = 0;
  for (auto it = faults.rbegin(); it != faults.rend(); ++it) {
    if (Charged(it->fault->kind) || it->fault->progressed) break;
    if (it->fault->kind != FaultKind::kStorage && !IsPlanned(*it->fault)) ++count;
  }
  return count;
}

int CountInWindow(const std::vector<PastFault>& faults, FaultKind kind, absl::Duration window, Instant now) {
  return static_cast<int>(std::count_if(faults.begin(), faults.end(), [&](const PastFault& past) {
    return past.fault->kind == kind && now - past.when <= window;
  }));
}

// The newest charged fault before the judged one.
const FaultRecord* Previous(const std::vector<PastFault>& faults) {
  for (auto it = faults.rbegin() + 1; it != faults.rend(); ++it) {
    if (Charged(it->fault->kind)) return it->fault;
  }
  return nullptr;
}

bool AsksToRunAgain(const FaultRecord& fault) {
  return fault.cause == ExitCause::kExited && fault.exit_code == kExitSaved;
}

int CrashesBeforeFirstStep(const std::vector<PastFault>& faults) {
  int count = 0;
  for (auto it = faults.rbegin(); it != faults.rend(); ++it) {
    if (!Charged(it->fault->kind) || it->fault->kind == FaultKind::kInfrastructure) continue;
    if (it->fault->progressed) break;
    if (AsksToRunAgain(*it->fault)) continue;  // it may save where nobody sees it: the budget is what ends it
    ++count;
  }
  return count;
}

// Returns the line of the last Python traceback in `tail` that names the exception.
std::string PythonException(absl::string_view tail) {
  constexpr absl::string_view kTraceback = "Traceback (most recent call last):\n";
  const size_t at = tail.rfind(kTraceback);
  if (at == absl::string_view::npos) return "";
  for (const absl::string_view line : absl::StrSplit(tail.substr(at + kTraceback.size()), '\n')) {
    if (!line.empty() && line[0] != ' ') return std::string(line.substr(0, 200));
  }
  return "";
}

// Names the command or module that the program needs and does not find; empty: its end does not say so.
std::string Missing(const FaultRecord& fault) {
  const bool ended = fault.cause == ExitCause::kExited;
  if (fault.exit_code == kExitNotFound && (ended || fault.cause == ExitCause::kStartFailed))
    return "a command that was not found is not tried again";
  if (!ended || fault.exit_code == 0) return "";
  const std::string exception = PythonException(fault.tail);
  if (!absl::StartsWith(exception, "ModuleNotFoundError: ") && !absl::StartsWith(exception, "ImportError: "))
    return "";
  return absl::StrCat(exception, "; a failed import is not tried again");
}

bool GotSomewhere(const PastFault& past) { return past.fault->progressed || past.fault->committed; }

// The newest fault that a higher committed step came before, which pays for all that are older.
size_t FirstOwed(const std::vector<PastFault>& faults) {
  std::optional<int64_t> highest;
  size_t owed = 0;
  for (size_t i = 0; i < faults.size(); ++i) {
    const std::optional<int64_t> committed = faults[i].fault->committed;
    if (!committed || (highest && *committed <= *highest)) continue;
    highest = committed;
    owed = i;
  }
  return owed;
}

absl::Duration Jittered(absl::Duration delay, Rng& rng) { return delay * (0.75 + 0.5 * rng.Unit()); }

// A lost node is replaced at once; losses in a row without progress wait longer each time, and the same
// named one (a keeper that cannot be started) soon is final.
RestartVerdict AfterLoss(const std::vector<PastFault>& faults, std::string reason, Rng& rng) {
  const FaultRecord& fault = *faults.back().fault;
  int row = 0, same = 0;
  bool alike = !fault.signature.empty();
  for (auto it = faults.rbegin(); it != faults.rend(); ++it) {
    if (it->fault->kind != FaultKind::kInfrastructure || it->fault->progressed) break;
    ++row;
    alike = alike && it->fault->signature == fault.signature;
    same += alike ? 1 : 0;
  }
  if (same >= kSameLossesInARow) {
    GT_PROBE("restart.same_loss_in_a_row");
    return {false, {}, absl::StrCat("the same loss ", same, " times in a row without progress")};
  }
  if (row <= 1) return {true, absl::ZeroDuration(), std::move(reason)};
  return {true, Jittered(std::min(kBackoffMax, absl::Seconds(1) * (1 << std::min(row - 2, 10))), rng),
          std::move(reason)};
}

// Nobody is charged for it, but many in a row without a step lead nowhere.
RestartVerdict AfterFreeEnd(const std::vector<PastFault>& faults, Rng& rng) {
  const FaultRecord& fault = *faults.back().fault;
  const char* what = fault.kind == FaultKind::kSaved       ? "exit code 75 (saved, run me again)"
                     : fault.kind == FaultKind::kPreempted ? "preemption"
                                                           : "MASTER_PORT was taken";
  const int row = FreeInARow(faults);
  if (row > kFreeRestartsInARow)
    return {false, {}, absl::StrCat(what, " ", row, " times in a row without a step")};
  return {true, Jittered(std::min(kBackoffMax, absl::Milliseconds(100) * (1 << std::min(row, 10))), rng),
          absl::StrCat(what, ", not charged")};
}

// Within the budget the same error twice, or crashes before every first step, are final all the same.
RestartVerdict AfterCrash(const spec::RestartBudget& budget, const std::vector<PastFault>& faults, int used,
                          std::string reason, Rng& rng) {
  const FaultRecord& fault = *faults.back().fault;
  const FaultRecord* previous = Previous(faults);
  if (previous != nullptr && !fault.signature.empty() && previous->signature == fault.signature &&
      fault.step.value_or(-1) <= previous->step.value_or(-1)) {
    return {false, {}, "the same error twice without progress"};
  }
  const int early = CrashesBeforeFirstStep(faults);
  if (early > budget.before_first_step) {
    return {false,
            {},
            absl::StrCat(early, " crashes in a row before a first step, allowed ", budget.before_first_step)};
  }
  absl::Duration delay = absl::ZeroDuration();
  if (used > 1 || !fault.progressed) {
    delay = Jittered(std::min(kBackoffMax, absl::Seconds(1) * (1 << std::min(used - 1, 10))), rng);
  }
  return {true, delay, std::move(reason)};
}

}  // namespace

absl::Duration StorageBackoff(int tries, Rng& rng) {
  const absl::Duration delay = absl::Seconds(1) * (1 << std::clamp(tries - 1, 0, 10));
  return std::min(kBackoffMax, Jittered(std::min(kBackoffMax, delay), rng));
}

bool MetStorageFault(const RankExit& exit) {
  if (exit.storage.empty()) return false;
  switch (exit.cause) {
    case ExitCause::kExited:
      return exit.exit_code != 0 && exit.exit_code != kExitNoRestart;
    case ExitCause::kSignal:
    case ExitCause::kOom:
      return true;
    default:
      return false;
  }
}

// The fault of a machine that leaves names its node.
bool IsPlanned(const FaultRecord& fault) {
  return fault.kind == FaultKind::kPreempted && fault.node.value.empty();
}

bool Charged(FaultKind kind) {
  return kind != FaultKind::kSaved && kind != FaultKind::kAddressInUse && kind != FaultKind::kPreempted &&
         kind != FaultKind::kStorage;
}

bool IsFault(const FaultRecord& fault) {
  return fault.kind != FaultKind::kSaved && fault.kind != FaultKind::kPreempted;
}

const FaultRecord* FirstFault(const std::vector<FaultRecord>& faults) {
  const auto it = std::ranges::find_if(faults, IsFault);
  return it == faults.end() ? nullptr : &*it;
}

const FaultRecord* LastFault(const std::vector<FaultRecord>& faults) {
  const auto it = std::find_if(faults.rbegin(), faults.rend(), IsFault);
  return it == faults.rend() ? nullptr : &*it;
}

bool SavedMore(const std::vector<FaultRecord>& faults) {
  GT_CHECK(!faults.empty());
  std::optional<int64_t> before;
  for (size_t i = 0; i + 1 < faults.size(); ++i) {
    const FaultRecord& fault = faults[i];
    if (AsksToRunAgain(fault) && fault.committed)
      before = std::max(before.value_or(*fault.committed), *fault.committed);
  }
  return faults.back().committed && (!before || *faults.back().committed > *before);
}

RestartVerdict DecideRestart(const spec::RestartBudget& budget, const std::vector<PastFault>& past,
                             Instant now, Rng& rng) {
  GT_CHECK(!past.empty());
  const std::vector<PastFault> faults(past.begin() + static_cast<ptrdiff_t>(FirstOwed(past)), past.end());
  const FaultRecord& fault = *faults.back().fault;
  if (fault.cause == ExitCause::kExited && fault.exit_code == kExitNoRestart) {
    return {false, {}, "exit code 93 asks not to be restarted"};
  }
  if (const std::string missing = Missing(fault);
      fault.kind == FaultKind::kCrash && !missing.empty() && std::ranges::none_of(past, GotSomewhere)) {
    GT_PROBE("restart.missing");
    return {false, {}, missing};
  }
  if (fault.kind == FaultKind::kStorage) {
    return {true, StorageBackoff(fault.tries, rng),
            absl::StrCat("tried ", fault.tries, fault.tries == 1 ? " time" : " times")};
  }
  if (IsPlanned(fault)) return {true, absl::ZeroDuration(), "a planned restart, not charged"};
  if (!Charged(fault.kind)) return AfterFreeEnd(faults, rng);
  const Budget limit = BudgetOf(fault.kind, budget);
  const int used = CountInWindow(faults, fault.kind, budget.window, now);
  if (used > limit.limit) {
    return {false,
            {},
            absl::StrCat("restart budget spent: ", limit.name, " ", used, " in ",
                         PrintDuration(budget.window), ", allowed ", limit.limit)};
  }
  std::string reason =
      absl::StrCat(limit.name, " ", used, " of ", limit.limit, " in ", PrintDuration(budget.window));
  if (fault.kind == FaultKind::kInfrastructure) return AfterLoss(faults, std::move(reason), rng);
  return AfterCrash(budget, faults, used, std::move(reason), rng);
}

FaultKind KindOf(const RankExit& exit) {
  if (MetStorageFault(exit)) return FaultKind::kStorage;
  switch (exit.cause) {
    case ExitCause::kOom:
      return FaultKind::kOom;
    case ExitCause::kAddressInUse:
      return FaultKind::kAddressInUse;
    case ExitCause::kLost:
    case ExitCause::kStopped:
      return FaultKind::kInfrastructure;
    case ExitCause::kExited:
      return exit.exit_code == kExitSaved ? FaultKind::kSaved : FaultKind::kCrash;
    default:
      return FaultKind::kCrash;
  }
}

std::string SignatureOf(const RankExit& exit) {
  // KILL and TERM come from outside; two of them say nothing about the program.
  if (exit.cause == ExitCause::kSignal && (exit.signal == 9 || exit.signal == 15)) return "";
  const std::string& evidence =
      exit.cause == ExitCause::kLost || exit.cause == ExitCause::kStartFailed || exit.tail.empty()
          ? exit.message
          : exit.tail;
  return absl::StrCat(Name(exit.cause), " ", exit.exit_code, " ", exit.signal, " ", LastLine(evidence));
}

std::string DescribeExit(const RankExit& exit) {
  switch (exit.cause) {
    case ExitCause::kExited:
      return absl::StrCat("exit code ", exit.exit_code);
    case ExitCause::kSignal:
      return absl::StrCat("killed by signal ", exit.signal, " (", SignalName(exit.signal), ")");
    case ExitCause::kOom:
      return "killed by the kernel for memory";
    case ExitCause::kStopped:
      return "stopped by its agent";
    case ExitCause::kStartFailed:
      return "could not be started";
    case ExitCause::kAddressInUse:
      return "MASTER_PORT was taken";
    case ExitCause::kLost:
      return exit.message.empty() ? "lost with its keeper" : "lost";
  }
  return "ended";
}

}  // namespace gtrain::core
