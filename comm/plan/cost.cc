#include "comm/plan/cost.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_split.h"

namespace gtrain::comm {
namespace {

// More segments would be more messages than the memory of a round is worth.
constexpr int kSegmentsMax = 256;
// The time of a further message in a round, as a share of the time of a round of the smallest message.
constexpr double kMessageShare = 0.3;

// The bytes of the rail that carries most of `bytes`.
uint64_t Share(uint64_t bytes, int rails) { return RailPart(bytes, rails, 0).count; }

// `work` returns the work of one rail that carries so many bytes.
int BestRails(absl::Span<const Carriers> carriers, uint64_t bytes,
              absl::FunctionRef<Work(double bytes)> work) {
  const auto seconds = [&](const Carriers& c) {
    return Seconds(c.link, work(static_cast<double>(Share(bytes, c.rails))));
  };
  const auto best =
      std::min_element(carriers.begin(), carriers.end(),
                       [&](const Carriers& a, const Carriers& b) { return seconds(a) < seconds(b); });
  return best->rails;
}

}  // namespace

std::optional<AllReduceWish> AllReduceWishFrom(absl::string_view name) {
  constexpr std::pair<absl::string_view, AllReduceAlgorithm> kAlgorithms[] = {
      {"auto", AllReduceAlgorithm::kAuto},
      {"ring", AllReduceAlgorithm::kRing},
      {"doubling", AllReduceAlgorithm::kDoubling},
      {"halving-doubling", AllReduceAlgorithm::kHalvingDoubling},
      {"double-tree", AllReduceAlgorithm::kDoubleTree}};
  constexpr std::pair<absl::string_view, Speakers> kSpeakers[] = {{"leader", Speakers::kLeader},
                                                                  {"rails", Speakers::kRails}};
  std::vector<absl::string_view> words = absl::StrSplit(name, '+');
  AllReduceWish wish;
  // Takes at most one word of each kind, in this order.
  const auto take = [&](const auto& known, auto* value) {
    for (const auto& [word, means] : known) {
      if (words.empty() || words.front() != word) continue;
      *value = means;
      words.erase(words.begin());
      return;
    }
  };
  take(kAlgorithms, &wish.algorithm);
  take(kSpeakers, &wish.speakers);
  take(std::array{std::pair{absl::string_view("deterministic"), true}}, &wish.deterministic);
  if (!words.empty()) return std::nullopt;
  return wish;
}

std::vector<int> RailsFor(Speakers wanted, int most) {
  if (most == 1 || wanted == Speakers::kLeader) return {1};
  return wanted == Speakers::kRails ? std::vector<int>{most} : std::vector<int>{1, most};
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

Work WorkOf(const AllReducePlan& plan, int machines, uint64_t bytes) {
  const double all = static_cast<double>(bytes), n = machines;
  if (machines == 1) return {};
  if (plan.algorithm == AllReduceAlgorithm::kDoubleTree) {
    // While the trees fill and empty half of the messages of a full round are sent.
    const double segments = plan.segments, fill = 2.0 * DoubleTreeDepth(machines) - 1;
    const double part = all / (machines == 2 ? 2 : 1) / segments;
    return {{{segments, 2 * part, machines == 2 ? 1.0 : 3.0}, {fill, part, machines == 2 ? 0.0 : 1.0}},
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

AllReducePlan PlanAllReduce(AllReduceAlgorithm wanted, absl::Span<const Carriers> carriers, int machines,
                            uint64_t bytes) {
  AllReducePlan best;
  double least = 0;
  for (const Carriers& c : carriers) {
    const uint64_t share = Share(bytes, c.rails);
    for (const AllReduceAlgorithm algorithm :
         {AllReduceAlgorithm::kDoubling, AllReduceAlgorithm::kHalvingDoubling, AllReduceAlgorithm::kRing,
          AllReduceAlgorithm::kDoubleTree}) {
      if (wanted != AllReduceAlgorithm::kAuto && wanted != algorithm) continue;
      const int segments_max = algorithm == AllReduceAlgorithm::kDoubleTree ? kSegmentsMax : 1;
      for (int segments = 1; segments <= segments_max; segments *= 2) {
        const AllReducePlan plan{algorithm, segments, c.rails};
        const double seconds = Seconds(c.link, WorkOf(plan, machines, share));
        if (least != 0 && seconds >= least) continue;
        least = seconds;
        best = plan;
      }
    }
  }
  return best;
}

int RailsOfAllGather(absl::Span<const Carriers> carriers, int machines, uint64_t bytes) {
  return BestRails(carriers, bytes, [&](double share) -> Work {
    const double others = machines - 1;
    if (machines <= kDirectRanksMax) return {{{1, others * share, others - 1}}};
    Work work;
    for (double have = 1; have < machines; have *= 2)
      work.rounds.push_back({1, std::min(have, machines - have) * share});
    return work;
  });
}

int RailsOfBroadcast(absl::Span<const Carriers> carriers, int machines, uint64_t bytes) {
  return BestRails(carriers, bytes, [&](double share) -> Work {
    double rounds = 0;
    for (int reached = 1; reached < machines; reached *= 2) ++rounds;
    return {{{rounds, share}}};
  });
}

int RailsOfExchange(absl::Span<const Carriers> carriers, int machines, uint64_t bytes) {
  return BestRails(carriers, bytes, [&](double share) -> Work {
    const double others = machines - 1;
    return {{{1, others * share, others - 1}}};
  });
}

ReducePlan PlanReduce(absl::Span<const Carriers> carriers, int machines, uint64_t bytes) {
  ReducePlan best;
  double least = 0, depth = 0;
  for (int reached = 1; reached < machines; reached *= 2) ++depth;
  for (const Carriers& c : carriers) {
    const double share = static_cast<double>(Share(bytes, c.rails)), others = machines - 1;
    const double part = share * others / machines;
    for (const bool in_parts : {false, true}) {
      // With two machines, one would send the other as many bytes as without parts, and the other some back.
      // Among many machines each would speak with all others, where a tree needs few connections.
      if (in_parts && (machines == 2 || machines > kDirectRanksMax)) continue;
      const double seconds = Seconds(
          c.link, in_parts ? Work{{{2, part, others - 1}}, part} : Work{{{depth, share}}, depth * share});
      if (least != 0 && seconds >= least) continue;
      least = seconds;
      best = {in_parts, c.rails};
    }
  }
  return best;
}

Schedule MakeSchedule(const ReducePlan& plan, int machine, int machines, int root, uint64_t count) {
  return plan.in_parts ? ReduceInParts(machine, machines, root, count)
                       : TreeReduce(machine, machines, root, count);
}

bool GoesWithRecords(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes) {
  if (wanted != AllReduceAlgorithm::kAuto) return wanted == AllReduceAlgorithm::kDoubling;
  const AllReducePlan doubling{AllReduceAlgorithm::kDoubling, 1};
  const Work records = WorkOf(doubling, ranks, 0);
  const Carriers alone{1, link};
  // The plan takes a round at least: small data need not ask for it.
  const double with = Seconds(link, WorkOf(doubling, ranks, bytes)), before = Seconds(link, records);
  if (with <= before + link.round[0]) return true;
  const AllReducePlan after = PlanAllReduce(wanted, {alone}, ranks, bytes);
  return with <= before + Seconds(link, WorkOf(after, ranks, bytes));
}

Schedule MakeSchedule(const AllReducePlan& plan, int machine, int machines, uint64_t count) {
  switch (plan.algorithm) {
    case AllReduceAlgorithm::kDoubling:
      return DoublingAllReduce(machine, machines, count);
    case AllReduceAlgorithm::kHalvingDoubling:
      return HalvingDoublingAllReduce(machine, machines, count);
    case AllReduceAlgorithm::kDoubleTree:
      return DoubleTreeAllReduce(machine, machines, count, plan.segments);
    case AllReduceAlgorithm::kRing:
    case AllReduceAlgorithm::kAuto:
      break;
  }
  return RingAllReduce(machine, machines, count);
}

}  // namespace gtrain::comm
