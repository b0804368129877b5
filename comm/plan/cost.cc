#include "comm/plan/cost.h"

#include <algorithm>
#include <cmath>

namespace gtrain::comm {
namespace {

// More would be more messages than the memory of a round is worth.
constexpr int kSegmentsMax = 256;

// The number that balances the rounds it adds against the bytes that wait for the tree to fill.
int Segments(const LinkCost& link, int ranks, uint64_t bytes) {
  const double fill = 2.0 * DoubleTreeDepth(ranks) - 1;
  const double data = static_cast<double>(bytes) * (link.byte + link.reduced_byte / 2);
  const double best = std::sqrt(fill * data / std::max(link.round, 1e-9));
  return static_cast<int>(std::clamp(best, 1.0, static_cast<double>(kSegmentsMax)));
}

}  // namespace

std::optional<AllReduceAlgorithm> AllReduceAlgorithmFrom(absl::string_view name) {
  if (name == "auto") return AllReduceAlgorithm::kAuto;
  if (name == "ring") return AllReduceAlgorithm::kRing;
  if (name == "doubling") return AllReduceAlgorithm::kDoubling;
  if (name == "halving-doubling") return AllReduceAlgorithm::kHalvingDoubling;
  if (name == "double-tree") return AllReduceAlgorithm::kDoubleTree;
  return std::nullopt;
}

LinkCost FitLink(double small_seconds, uint64_t small_bytes, double large_seconds, uint64_t large_bytes,
                 double reduced_byte_seconds) {
  LinkCost link;
  link.byte =
      std::max(1e-12, (large_seconds - small_seconds) / static_cast<double>(large_bytes - small_bytes));
  link.round = std::max(1e-7, small_seconds - link.byte * static_cast<double>(small_bytes));
  link.reduced_byte = reduced_byte_seconds;
  return link;
}

double Seconds(const LinkCost& link, const Work& work) {
  return link.round * work.rounds + link.byte * work.bytes + link.reduced_byte * work.reduced_bytes;
}

Work WorkOf(const AllReducePlan& plan, int ranks, uint64_t bytes) {
  const double all = static_cast<double>(bytes), n = ranks;
  if (ranks == 1) return {};
  if (plan.algorithm == AllReduceAlgorithm::kDoubleTree) {
    // While the trees fill and empty half of the messages of a full round are sent.
    const double fill = 2.0 * DoubleTreeDepth(ranks) - 1, segments = plan.segments;
    const double inner = ranks == 2 ? 0.5 : 1;
    return {segments + fill, all * inner * (2 + fill / segments), all * inner * (1 + fill / 2 / segments)};
  }
  if (plan.algorithm == AllReduceAlgorithm::kRing) {
    const double part = all / n;
    return {2 * (n - 1), 2 * (n - 1) * part, (n - 1) * part};
  }
  double power = 1, steps = 0;
  for (; power * 2 <= n; power *= 2) ++steps;
  const double fold = power < n ? 1 : 0;
  if (plan.algorithm == AllReduceAlgorithm::kDoubling) {
    return {steps + 2 * fold, all * (steps + 2 * fold), all * (steps + fold)};
  }
  const double halves = (power - 1) / power;
  return {2 * steps + 2 * fold, all * 2 * (halves + fold), all * (halves + fold)};
}

AllReducePlan PlanAllReduce(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes) {
  AllReducePlan best;
  double least = 0;
  for (const AllReduceAlgorithm algorithm :
       {AllReduceAlgorithm::kDoubling, AllReduceAlgorithm::kHalvingDoubling, AllReduceAlgorithm::kRing,
        AllReduceAlgorithm::kDoubleTree}) {
    if (wanted != AllReduceAlgorithm::kAuto && wanted != algorithm) continue;
    AllReducePlan plan{algorithm, 1};
    if (algorithm == AllReduceAlgorithm::kDoubleTree) plan.segments = Segments(link, ranks, bytes);
    const double seconds = Seconds(link, WorkOf(plan, ranks, bytes));
    if (least != 0 && seconds >= least) continue;
    least = seconds;
    best = plan;
  }
  return best;
}

Schedule MakeSchedule(const AllReducePlan& plan, int rank, int ranks, uint64_t count) {
  switch (plan.algorithm) {
    case AllReduceAlgorithm::kDoubling:
      return DoublingAllReduce(rank, ranks, count);
    case AllReduceAlgorithm::kHalvingDoubling:
      return HalvingDoublingAllReduce(rank, ranks, count);
    case AllReduceAlgorithm::kDoubleTree:
      return DoubleTreeAllReduce(rank, ranks, count, plan.segments);
    case AllReduceAlgorithm::kRing:
    case AllReduceAlgorithm::kAuto:
      break;
  }
  return RingAllReduce(rank, ranks, count);
}

}  // namespace gtrain::comm
