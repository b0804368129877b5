// What `gtrain chaos` is to do, and the commands that do it beside a rank. Only reads files.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "job/spec/spot_trace.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

struct ChaosPlan {
  enum class Deed { kKill, kTerm, kStop, kSlow, kCut, kFill, kDrain, kTrace } deed = Deed::kKill;
  absl::Duration lasts;  // of kStop to kFill; kDrain and kTrace: from the notice until the machine goes
  absl::Duration every = absl::Seconds(5);
  std::optional<absl::Duration> all;  // then it ends
  std::optional<int> rank;
  std::string node;    // a host name: all ranks there
  std::string folder;  // kFill; empty: that in which the rank works
  spec::SpotTrace trace;
  double speed = 1;  // of the trace
  uint64_t seed = 0;

  // Whether the generation ends at once, and does not go on at least for a while.
  bool Ends() const { return deed == Deed::kKill || deed == Deed::kTerm; }
  // "kills a rank", "stops all ranks on gpu-7 for 5s"
  std::string Words() const;
  // What is run beside the rank whose process it is. Exits with kProcessEnded where that is another one by
  // now; it returns at once, and what it began ends by itself.
  std::vector<std::string> Command(int64_t pid) const;
  // What kills all of these processes at once, beside one of them. Those that are not of its job stay alone.
  static std::vector<std::string> KillCommand(const std::vector<int64_t>& pids);
  // Why a command with another exit code than 0 did nothing.
  std::string WhyNot(int exit_code) const;
};

inline constexpr int kProcessEnded = 3, kMayNot = 4;

absl::StatusOr<ChaosPlan> ChaosPlanOf(const Args& args);
std::vector<Flag> ChaosFlags();

}  // namespace gtrain::cli
