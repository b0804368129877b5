#include "checkpoint/plan/interval.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace gtrain::ckpt {
namespace {

// The formula counts one interruption in this time before the job began: the rate of a thousand GPUs (Kokolis
// et al., HPCA 2025). It is a guess only until the job has run for as long.
constexpr absl::Duration kPrior = absl::Hours(8);
// Writing beside training takes memory bandwidth and some of the processors: this share of its time is
// counted as lost (bench_checkpoint measures 0.02 to 0.1 with both cores computing).
constexpr double kWritingShare = 0.05;
constexpr absl::Duration kMin = absl::Seconds(1);
constexpr absl::Duration kMax = absl::Hours(1);

// "0.3 s", "90 s", "8.0 h": three digits at most, never more exact than it is meant.
std::string Rough(absl::Duration d) {
  const double seconds = absl::ToDoubleSeconds(d);
  if (seconds >= 2 * 3600) return absl::StrFormat("%.1f h", seconds / 3600);
  if (seconds >= 120) return absl::StrFormat("%.0f min", seconds / 60);
  return absl::StrFormat("%.*f s", seconds < 1 ? 3 : seconds < 10 ? 1 : 0, seconds);
}

}  // namespace

Interval ChooseInterval(const IntervalInput& input) {
  const absl::Duration lost = std::max(input.stall, absl::ZeroDuration()) +
                              kWritingShare * std::max(input.writing, absl::ZeroDuration());
  const double cost = absl::ToDoubleSeconds(lost);
  const absl::Duration between =
      (kPrior + std::max(input.observed, absl::ZeroDuration())) / (1 + input.interruptions);
  const double mtbf = absl::ToDoubleSeconds(between);
  double best = mtbf;  // saving takes longer than the job lives: hardly anything helps
  if (cost < 2 * mtbf) {
    const double ratio = cost / (2 * mtbf);
    best = std::sqrt(2 * cost * mtbf) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - cost;
  }
  Interval out;
  // A save that is asked for while the last one is still written is skipped.
  const absl::Duration least = std::max(kMin, 2 * input.writing);
  out.every = std::max(std::min(absl::Seconds(best), kMax), least);
  out.reason = absl::StrFormat(
      "every %s: a save costs %s and is written in %s, one interruption in %s is expected (%d seen in %s)",
      Rough(out.every), Rough(lost), Rough(input.writing), Rough(between), input.interruptions,
      Rough(input.observed));
  return out;
}

}  // namespace gtrain::ckpt
