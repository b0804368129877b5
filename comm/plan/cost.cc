#include "comm/plan/cost.h"

#include <algorithm>
#include <cstddef>

namespace gtrain::comm {
namespace {

// More would be more messages than the memory of a round is worth.
constexpr int kSegmentsMax = 256;
// What a message beside the first of a round takes, of what a round of the smallest message takes.
constexpr double kMessageShare = 0.3;

}  // namespace

std::optional<AllReduceAlgorithm> AllReduceAlgorithmFrom(absl::string_view name) {
  if (name == "auto") return AllReduceAlgorithm::kAuto;
  if (name == "ring") return AllReduceAlgorithm::kRing;
  if (name == "doubling") return AllReduceAlgorithm::kDoubling;
  if (name == "halving-doubling") return AllReduceAlgorithm::kHalvingDoubling;
  if (name == "double-tree") return AllReduceAlgorithm::kDoubleTree;
  return std::nullopt;
}

double LinkCost::Round(double bytes) const {
  size_t i = 1;
  while (i + 1 < kSizes.size() && bytes > static_cast<double>(kSizes[i])) ++i;
  const double below = static_cast<double>(kSizes[i - 1]), above = static_cast<double>(kSizes[i]);
  const double byte = std::max(0.0, round[i] - round[i - 1]) / (above - below);
  return round[i - 1] + byte * std::max(0.0, bytes - below);
}

double Seconds(const LinkCost& link, const Work& work) {
  // A link may let short messages through faster than it goes on for long, so the sum of the rounds is no
  // promise: nothing carries it all faster than one message of that size.
  double sum = 0, times = 0, messages = 0, bytes = 0;
  for (const Work::Rounds& r : work.rounds) {
    sum += r.times * link.Round(r.bytes);
    times += r.times;
    messages += r.times * r.more_messages;
    bytes += r.times * r.bytes;
  }
  const double whole = (times - 1) * link.round[0] + link.Round(bytes);
  return std::max(sum, times > 0 ? whole : 0) + messages * kMessageShare * link.round[0] +
         link.reduced_byte * work.reduced_bytes;
}

Work WorkOf(const AllReducePlan& plan, int ranks, uint64_t bytes) {
  const double all = static_cast<double>(bytes), n = ranks;
  if (ranks == 1) return {};
  if (plan.algorithm == AllReduceAlgorithm::kDoubleTree) {
    // While the trees fill and empty half of the messages of a full round are sent.
    const double segments = plan.segments, fill = 2.0 * DoubleTreeDepth(ranks) - 1;
    const double part = all / (ranks == 2 ? 2 : 1) / segments;
    return {{{segments, 2 * part, ranks == 2 ? 1.0 : 3.0}, {fill, part, ranks == 2 ? 0.0 : 1.0}},
            part * (segments + fill / 2)};
  }
  if (plan.algorithm == AllReduceAlgorithm::kRing) return {{{2 * (n - 1), all / n}}, (n - 1) * all / n};
  double power = 1, steps = 0;
  for (; power * 2 <= n; power *= 2) ++steps;
  const double fold = power < n ? 1 : 0;
  if (plan.algorithm == AllReduceAlgorithm::kDoubling)
    return {{{steps + 2 * fold, all}}, all * (steps + fold)};
  Work work{{{2 * fold, all}}, all * ((power - 1) / power + fold)};
  for (double part = 2; part <= power; part *= 2) work.rounds.push_back({2, all / part});
  return work;
}

AllReducePlan PlanAllReduce(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes) {
  AllReducePlan best;
  double least = 0;
  for (const AllReduceAlgorithm algorithm :
       {AllReduceAlgorithm::kDoubling, AllReduceAlgorithm::kHalvingDoubling, AllReduceAlgorithm::kRing,
        AllReduceAlgorithm::kDoubleTree}) {
    if (wanted != AllReduceAlgorithm::kAuto && wanted != algorithm) continue;
    const int segments_max = algorithm == AllReduceAlgorithm::kDoubleTree ? kSegmentsMax : 1;
    for (int segments = 1; segments <= segments_max; segments *= 2) {
      const AllReducePlan plan{algorithm, segments};
      const double seconds = Seconds(link, WorkOf(plan, ranks, bytes));
      if (least != 0 && seconds >= least) continue;
      least = seconds;
      best = plan;
    }
  }
  return best;
}

bool GoesWithRecords(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes) {
  if (wanted != AllReduceAlgorithm::kAuto) return wanted == AllReduceAlgorithm::kDoubling;
  const AllReducePlan doubling{AllReduceAlgorithm::kDoubling, 1};
  const Work records = WorkOf(doubling, ranks, 0);
  const AllReducePlan after = PlanAllReduce(wanted, link, ranks, bytes);
  return Seconds(link, WorkOf(doubling, ranks, bytes)) <=
         Seconds(link, records) + Seconds(link, WorkOf(after, ranks, bytes));
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
