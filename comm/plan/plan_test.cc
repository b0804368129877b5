// Runs schedules in memory: one mailbox for each pair of ranks, every rank at its own pace.
#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <set>

#include "comm/plan/cost.h"
#include "comm/plan/hierarchy.h"
#include "comm/plan/op_record.h"
#include "comm/plan/schedule.h"
#include "comm/plan/two_ways.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

using Buffers = std::vector<std::vector<float>>;

// Executes schedules[r] on buffers[r]. False: a rank waits for a message that never comes, a
// message has the wrong size, or messages are left over.
class Simulator {
 public:
  Simulator(std::vector<Schedule> schedules, Buffers* buffers)
      : schedules_(std::move(schedules)), buffers_(*buffers), next_(schedules_.size()) {}

  bool Run() {
    for (bool moved = true; moved;) {
      moved = false;
      // The last rank first: an order of execution that the schedules may not rely on.
      for (size_t rank = schedules_.size(); rank-- > 0;) moved |= Turn(rank);
    }
    for (size_t rank = 0; rank < schedules_.size(); ++rank) {
      if (next_[rank] != schedules_[rank].size()) return false;
    }
    return std::all_of(mail_.begin(), mail_.end(), [](const auto& entry) { return entry.second.empty(); });
  }

 private:
  bool Turn(size_t rank) {
    bool moved = false;
    while (next_[rank] < schedules_[rank].size()) {
      const Round& round = schedules_[rank][next_[rank]];
      if (sent_.insert({rank, next_[rank]}).second) SendAll(rank, round), moved = true;
      if (!ReceiveAll(rank, round)) break;
      ++next_[rank];
      moved = true;
    }
    return moved;
  }

  void SendAll(size_t rank, const Round& round) {
    for (const Action& a : round) {
      if (a.kind != ActionKind::kSend) continue;
      auto begin = buffers_[rank].begin() + static_cast<long>(a.offset);
      mail_[{static_cast<int>(rank), a.peer}].emplace_back(begin, begin + static_cast<long>(a.count));
    }
  }

  bool ReceiveAll(size_t rank, const Round& round) {
    std::map<int, size_t> wanted;
    for (const Action& a : round) {
      if (a.kind != ActionKind::kSend) ++wanted[a.peer];
    }
    for (auto [peer, n] : wanted) {
      if (mail_[{peer, static_cast<int>(rank)}].size() < n) return false;
    }
    for (const Action& a : round) {
      if (a.kind == ActionKind::kSend) continue;
      auto& box = mail_[{a.peer, static_cast<int>(rank)}];
      EXPECT_EQ(box.front().size(), a.count);
      for (size_t i = 0; i < box.front().size(); ++i) {
        float& mine = buffers_[rank][a.offset + i];
        const float theirs = box.front()[i];
        mine = a.kind == ActionKind::kReceive ? theirs : a.incoming_first ? theirs + mine : mine + theirs;
      }
      box.pop_front();
    }
    return true;
  }

  std::vector<Schedule> schedules_;
  Buffers& buffers_;
  std::vector<size_t> next_;
  std::set<std::pair<size_t, size_t>> sent_;
  std::map<std::pair<int, int>, std::deque<std::vector<float>>> mail_;
};

constexpr uint64_t kCounts[] = {0, 1, 2, 3, 7, 16, 17, 100, 1001};

// Values whose sum depends on the order of additions, so that a different order shows in the bits.
Buffers Inputs(int ranks, uint64_t count) {
  Buffers buffers(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    for (uint64_t i = 0; i < count; ++i) {
      buffers[static_cast<size_t>(r)].push_back(1.0f / static_cast<float>(3 + r * 7 + static_cast<int>(i)) *
                                                (r % 2 ? 1000.0f : 1.0f));
    }
  }
  return buffers;
}

using AllReduceFn = Schedule (*)(int, int, uint64_t);

void CheckAllReduce(AllReduceFn make, int ranks, uint64_t count) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks, " << count << " elements");
  const Buffers inputs = Inputs(ranks, count);
  Buffers buffers = inputs;
  std::vector<Schedule> schedules;
  for (int r = 0; r < ranks; ++r) schedules.push_back(make(r, ranks, count));
  ASSERT_TRUE(Simulator(schedules, &buffers).Run());
  for (uint64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (const auto& input : inputs) sum += input[i];
    ASSERT_NEAR(buffers[0][i], sum, 1e-3 * std::abs(sum));
  }
  for (const auto& buffer : buffers) ASSERT_EQ(buffer, buffers[0]);  // bit-identical
}

Schedule ThreeSegments(int rank, int ranks, uint64_t count) {
  return DoubleTreeAllReduce(rank, ranks, count, 3);
}
Schedule OneSegment(int rank, int ranks, uint64_t count) {
  return DoubleTreeAllReduce(rank, ranks, count, 1);
}
Schedule ManySegments(int rank, int ranks, uint64_t count) {
  return DoubleTreeAllReduce(rank, ranks, count, 40);
}

TEST(Schedule, AllReduceIsRightAndIdenticalOnAllRanks) {
  constexpr int kRanksMax = 64;
  for (int ranks = 1; ranks <= kRanksMax; ++ranks) {
    for (uint64_t count : kCounts) {
      CheckAllReduce(RingAllReduce, ranks, count);
      CheckAllReduce(DoublingAllReduce, ranks, count);
      CheckAllReduce(HalvingDoublingAllReduce, ranks, count);
      CheckAllReduce(OneSegment, ranks, count);
      CheckAllReduce(ThreeSegments, ranks, count);
      if (ranks <= 9) CheckAllReduce(ManySegments, ranks, count);
    }
  }
}

std::string ToText(const Schedule& schedule) {
  std::string text;
  for (const Round& round : schedule) {
    for (const Action& a : round) {
      const char* what = a.kind == ActionKind::kSend      ? "send "
                         : a.kind == ActionKind::kReceive ? "receive "
                         : a.incoming_first               ? "reduce-under "
                                                          : "reduce ";
      text += what + std::to_string(a.offset) + "+" + std::to_string(a.count) + "@" + std::to_string(a.peer) +
              (&a == &round.back() ? "\n" : ", ");
    }
  }
  return text;
}

// Two leaves of neighbours: what goes from one to the other is what one rank reduces, whatever n is. With the
// far half first it was n / 2 times as much, all of it through one uplink at the same time.
TEST(Schedule, HalvingSendsFarAwayOnlyWhatIsLeft) {
  for (const int ranks : {2, 4, 8, 16, 64}) {
    constexpr uint64_t kCount = 6400;
    uint64_t crossing = 0;
    for (int rank = 0; rank < ranks / 2; ++rank) {
      for (const Round& round : HalvingDoublingAllReduce(rank, ranks, kCount)) {
        for (const Action& a : round) {
          if (a.kind == ActionKind::kSend && a.peer >= ranks / 2) crossing += a.count;
        }
      }
    }
    EXPECT_EQ(crossing, kCount) << ranks;
  }
}

// The schedule of each algorithm on one rank, written down: a change of it shows here.
TEST(Schedule, GoldenTexts) {
  EXPECT_EQ(ToText(RingAllReduce(0, 3, 9)),
            "reduce-under 6+3@2, send 0+3@1\n"
            "reduce-under 3+3@2, send 6+3@1\n"
            "receive 0+3@2, send 3+3@1\n"
            "receive 6+3@2, send 0+3@1\n");
  EXPECT_EQ(ToText(HalvingDoublingAllReduce(1, 4, 10)),
            "send 0+6@0, reduce-under 6+4@0\n"
            "send 8+2@3, reduce 6+2@3\n"
            "send 6+2@3, receive 8+2@3\n"
            "send 6+4@0, receive 0+6@0\n");
  // Ranks 0 and 1 fold to place 0, rank 2 is place 1.
  EXPECT_EQ(ToText(HalvingDoublingAllReduce(0, 3, 4)),
            "reduce 0+4@1\n"
            "send 2+2@2, reduce 0+2@2\n"
            "send 0+2@2, receive 2+2@2\n"
            "send 0+4@1\n");
  EXPECT_EQ(ToText(HalvingDoublingAllReduce(1, 3, 4)),
            "send 0+4@0\n"
            "receive 0+4@0\n");
  // One tree is 0 - 2 - {1, 3}, the other 3 - 1 - {2, 0}. Rank 2 is inside the first and a leaf of the
  // second.
  EXPECT_EQ(ToText(DoubleTreeAllReduce(2, 4, 8, 2)),
            "reduce 0+2@1, reduce 0+2@3, send 4+2@1\n"
            "reduce 2+2@1, reduce 2+2@3, send 0+2@0, send 6+2@1\n"
            "send 2+2@0, receive 0+2@0\n"
            "receive 2+2@0, send 0+2@1, send 0+2@3, receive 4+2@1\n"
            "send 2+2@1, send 2+2@3, receive 6+2@1\n");
}

uint64_t Sent(const Schedule& schedule) {
  uint64_t count = 0;
  for (const Round& round : schedule) {
    for (const Action& a : round) count += a.kind == ActionKind::kSend ? a.count : 0;
  }
  return count;
}

// The purpose of the algorithms: no rank sends much more than each rank does in the ring.
TEST(Schedule, AllReduceOfLargeDataSpreadsTheBytes) {
  constexpr uint64_t kCount = 1 << 20;
  for (int ranks = 2; ranks <= 64; ++ranks) {
    const bool power = (ranks & (ranks - 1)) == 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const uint64_t ring = Sent(RingAllReduce(rank, ranks, kCount));
      if (power) {
        EXPECT_EQ(Sent(HalvingDoublingAllReduce(rank, ranks, kCount)), ring);
      }
      EXPECT_LE(Sent(DoubleTreeAllReduce(rank, ranks, kCount, 8)), 2 * kCount + 8) << rank << " of " << ranks;
    }
  }
}

// The table of schedule.h, of the rank that has most to do.
TEST(Schedule, CostsAtScale) {
  struct Cost {
    uint64_t rounds = 0, messages = 0, elements = 0, peers = 0;
  };
  const auto cost_of = [](int ranks, const auto& schedule_of) {
    Cost most;
    for (int rank = 0; rank < ranks; ++rank) {
      const Schedule schedule = schedule_of(rank);
      uint64_t messages = 0, elements = 0;
      std::set<int> peers;
      for (const Round& round : schedule) {
        for (const Action& a : round) {
          peers.insert(a.peer);
          if (a.kind == ActionKind::kSend) ++messages, elements += a.count;
        }
      }
      most.rounds = std::max(most.rounds, static_cast<uint64_t>(schedule.size()));
      most.messages = std::max(most.messages, messages);
      most.elements = std::max(most.elements, elements);
      most.peers = std::max(most.peers, static_cast<uint64_t>(peers.size()));
    }
    return most;
  };
  constexpr uint64_t kElements = 3 << 20;
  constexpr int kSegments = 8;
  for (const int ranks : {2, 3, 16, 17, 64, 1000, 1024}) {
    SCOPED_TRACE(ranks);
    const auto n = static_cast<uint64_t>(ranks);
    const uint64_t log = std::bit_width(n - 1), folds = std::has_single_bit(n) ? 0 : 1;
    const uint64_t most_once = kElements * (n - 1) / n + n;  // rounding: an element for each part

    const Cost ring = cost_of(ranks, [&](int r) { return RingAllReduce(r, ranks, kElements); });
    EXPECT_EQ(ring.rounds, 2 * (n - 1));
    EXPECT_EQ(ring.messages, 2 * (n - 1));
    EXPECT_LE(ring.elements, 2 * most_once);
    EXPECT_LE(ring.peers, 2);

    const Cost doubling = cost_of(ranks, [&](int r) { return DoublingAllReduce(r, ranks, kElements); });
    EXPECT_LE(doubling.rounds, log + folds);
    EXPECT_LE(doubling.messages, log);
    EXPECT_LE(doubling.elements, log * kElements);
    EXPECT_LE(doubling.peers, log);

    const Cost halving = cost_of(ranks, [&](int r) { return HalvingDoublingAllReduce(r, ranks, kElements); });
    EXPECT_LE(halving.rounds, 2 * log);
    EXPECT_LE(halving.messages, 2 * log);
    EXPECT_LE(halving.elements, 2 * most_once + folds * kElements);
    EXPECT_LE(halving.peers, log);

    const Cost trees =
        cost_of(ranks, [&](int r) { return DoubleTreeAllReduce(r, ranks, kElements, kSegments); });
    EXPECT_LE(trees.rounds, kSegments + 2 * log);
    EXPECT_LE(trees.messages, 4 * kSegments);
    EXPECT_LE(trees.elements, 2 * kElements + 4 * kSegments);
    EXPECT_LE(trees.peers, 4);

    const Cost broadcast = cost_of(ranks, [&](int r) { return TreeBroadcast(r, ranks, 0, kElements); });
    EXPECT_LE(broadcast.rounds, 2);
    EXPECT_LE(broadcast.messages, log);
    EXPECT_LE(broadcast.peers, log);
    const Cost reduce = cost_of(ranks, [&](int r) { return TreeReduce(r, ranks, 0, kElements); });
    EXPECT_LE(reduce.rounds, log);
    EXPECT_LE(reduce.messages, 1);
    EXPECT_LE(reduce.peers, log);

    std::vector<Range> parts;
    for (uint64_t r = 0; r < n; ++r) parts.push_back({10 * r, 10});
    const Cost gather = cost_of(ranks, [&](int r) { return AllGatherSchedule(r, parts); });
    const bool few = ranks <= kDirectRanksMax;
    EXPECT_EQ(gather.rounds, few ? 1 : log);
    EXPECT_LE(gather.messages, few ? n - 1 : 2 * log);
    EXPECT_EQ(gather.elements, 10 * (n - 1));
    EXPECT_LE(gather.peers, few ? n - 1 : 2 * log);

    const Cost in_parts = cost_of(ranks, [&](int r) { return ReduceInParts(r, ranks, 0, kElements); });
    EXPECT_EQ(in_parts.rounds, 2);
    EXPECT_LE(in_parts.messages, n);
    EXPECT_LE(in_parts.elements, kElements + kPartAlign);
    EXPECT_EQ(in_parts.peers, n - 1);

    const Cost scatter = cost_of(ranks, [&](int r) { return DirectReduceScatter(r, ranks, 10); });
    EXPECT_EQ(scatter.rounds, 1);
    EXPECT_EQ(scatter.messages, n - 1);
    EXPECT_EQ(scatter.peers, n - 1);
  }
}

TEST(Schedule, BroadcastReachesEveryRankFromEveryRoot) {
  for (int ranks = 1; ranks <= 17; ++ranks) {
    for (int root = 0; root < ranks; ++root) {
      Buffers buffers = Inputs(ranks, 5);
      const std::vector<float> wanted = buffers[static_cast<size_t>(root)];
      std::vector<Schedule> schedules;
      for (int r = 0; r < ranks; ++r) schedules.push_back(TreeBroadcast(r, ranks, root, 5));
      ASSERT_TRUE(Simulator(schedules, &buffers).Run()) << ranks << " " << root;
      for (const auto& buffer : buffers) ASSERT_EQ(buffer, wanted) << ranks << " " << root;
    }
  }
}

TEST(Schedule, ReduceByTreeAndInPartsHasTheSumAtEveryRoot) {
  for (int ranks = 1; ranks <= 17; ++ranks) {
    for (int root = 0; root < ranks; ++root) {
      for (const auto schedule_of : {TreeReduce, ReduceInParts}) {
        for (const uint64_t count : {17, 1000}) {
          const Buffers inputs = Inputs(ranks, count);
          Buffers buffers = inputs;
          std::vector<Schedule> schedules;
          for (int r = 0; r < ranks; ++r) schedules.push_back(schedule_of(r, ranks, root, count));
          ASSERT_TRUE(Simulator(schedules, &buffers).Run());
          for (size_t i = 0; i < count; ++i) {
            double sum = 0;
            for (const auto& input : inputs) sum += input[i];
            ASSERT_NEAR(buffers[static_cast<size_t>(root)][i], sum, 1e-3 * std::abs(sum));
          }
        }
      }
    }
  }
}

// The parts of machines with different numbers of ranks differ, and some are empty.
TEST(Schedule, ReduceScatterOfUnequalParts) {
  for (const std::vector<uint64_t>& counts :
       std::vector<std::vector<uint64_t>>{{5}, {3, 4}, {0, 7, 2}, {1, 0, 0, 9, 3}}) {
    std::vector<Range> parts;
    uint64_t all = 0;
    for (const uint64_t count : counts) parts.push_back({std::exchange(all, all + count), count});
    const int ranks = static_cast<int>(counts.size());
    const Buffers inputs = Inputs(ranks, all);
    Buffers buffers = inputs;
    std::vector<Schedule> schedules;
    for (int r = 0; r < ranks; ++r) schedules.push_back(DirectReduceScatter(r, parts));
    ASSERT_TRUE(Simulator(schedules, &buffers).Run());
    for (size_t r = 0; r < parts.size(); ++r) {
      for (uint64_t i = parts[r].begin; i < parts[r].begin + parts[r].count; ++i) {
        double sum = 0;
        for (const auto& input : inputs) sum += input[i];
        ASSERT_NEAR(buffers[r][i], sum, 1e-3 * std::abs(sum));
      }
    }
  }
}

// Sends are from one buffer and receives into another, which here lies behind it.
Schedule WithOutputBehind(Schedule schedule, uint64_t input) {
  for (Round& round : schedule) {
    for (Action& a : round) a.offset += a.kind == ActionKind::kSend ? 0 : input;
  }
  return schedule;
}

TEST(Schedule, DirectReduceScatterAndAllToAll) {
  for (int ranks : {1, 2, 3, 5, 16, 64}) {
    for (uint64_t count : {0, 1, 7}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << count << " elements");
      const uint64_t all = count * static_cast<uint64_t>(ranks);
      const Buffers inputs = Inputs(ranks, all);
      Buffers scattered = inputs, exchanged = inputs;
      std::vector<Schedule> scatter, exchange;
      for (int r = 0; r < ranks; ++r) {
        const size_t rank = static_cast<size_t>(r);
        const auto own = inputs[rank].begin() + static_cast<long>(rank * count);
        scattered[rank].insert(scattered[rank].end(), own, own + static_cast<long>(count));
        exchanged[rank].resize(2 * all, -1);
        scatter.push_back(WithOutputBehind(DirectReduceScatter(r, ranks, count), all));
        exchange.push_back(WithOutputBehind(DirectAllToAll(r, ranks, count), all));
      }
      ASSERT_TRUE(Simulator(scatter, &scattered).Run());
      ASSERT_TRUE(Simulator(exchange, &exchanged).Run());
      for (size_t r = 0; r < inputs.size(); ++r) {
        for (size_t i = 0; i < count; ++i) {
          double sum = 0;
          for (const auto& input : inputs) sum += input[r * count + i];
          ASSERT_NEAR(scattered[r][all + i], sum, 1e-3 * std::abs(sum));
          for (size_t from = 0; from < inputs.size(); ++from) {
            if (from != r) {
              ASSERT_EQ(exchanged[r][all + from * count + i], inputs[from][r * count + i]);
            }
          }
        }
      }
    }
  }
}

TEST(Schedule, AllGatherWithUnequalParts) {
  for (int ranks = 1; ranks <= kDirectRanksMax + 3; ++ranks) {
    std::vector<Range> parts;
    uint64_t all = 0;
    for (int r = 0; r < ranks; ++r) {
      parts.push_back({all, static_cast<uint64_t>(r * 5 % 4)});
      all += parts.back().count;
    }
    Buffers buffers(static_cast<size_t>(ranks), std::vector<float>(all, -1));
    std::vector<float> wanted(all);
    std::vector<Schedule> schedules;
    for (int r = 0; r < ranks; ++r) {
      const auto at = static_cast<size_t>(r);
      for (uint64_t i = 0; i < parts[at].count; ++i)
        buffers[at][parts[at].begin + i] = wanted[parts[at].begin + i] = float(100 * r + 1);
      schedules.push_back(AllGatherSchedule(r, parts));
    }
    ASSERT_TRUE(Simulator(schedules, &buffers).Run()) << ranks;
    for (const auto& buffer : buffers) ASSERT_EQ(buffer, wanted) << ranks;
  }
}

// Inside each machine to the memory that its ranks share, an all-reduce of each rail's part, and back: the
// value of comm/exec. `machines`: one buffer each.
void CarryByRails(const AllReducePlan& plan, Buffers* machines) {
  const int n = static_cast<int>(machines->size());
  const uint64_t count = machines->front().size();
  uint64_t carried = 0;
  for (int local = 0; local <= plan.rails; ++local) {
    const Range part = RailPart(count, plan.rails, local);
    ASSERT_TRUE(part.count == 0 || part.begin == carried) << "rail " << local;
    carried += part.count;
    Buffers of_rail;
    std::vector<Schedule> schedules;
    for (int m = 0; m < n; ++m) {
      const auto begin = (*machines)[static_cast<size_t>(m)].begin() + static_cast<long>(part.begin);
      of_rail.emplace_back(begin, begin + static_cast<long>(part.count));
      schedules.push_back(MakeSchedule(plan, m, n, part.count));
    }
    ASSERT_TRUE(Simulator(schedules, &of_rail).Run());
    for (size_t m = 0; m < of_rail.size(); ++m) {
      std::copy(of_rail[m].begin(), of_rail[m].end(), (*machines)[m].begin() + static_cast<long>(part.begin));
    }
  }
  ASSERT_EQ(carried, count);
}

TEST(Schedule, HierarchicalAllReduceByALeaderAndByRails) {
  for (int ranks : {1, 2, 3, 5, 8, 13, 17}) {
    for (int nodes : {1, 2, 3, 5}) {
      std::vector<NodeId> node_of;
      for (int r = 0; r < ranks; ++r) node_of.emplace_back(std::to_string(r * 7 % nodes));
      const Hierarchy h = MakeHierarchy(node_of, 0);
      for (uint64_t count : {0, 1, 33, 64, 65, 200, 1001}) {
        const Buffers inputs = Inputs(ranks, count);
        Buffers sums;
        for (const auto& peers : h.nodes) {
          sums.emplace_back(count, 0.0f);
          for (int r : peers)
            for (size_t i = 0; i < count; ++i) sums.back()[i] += inputs[static_cast<size_t>(r)][i];
        }
        for (const AllReduceAlgorithm algorithm :
             {AllReduceAlgorithm::kRing, AllReduceAlgorithm::kDoubling, AllReduceAlgorithm::kHalvingDoubling,
              AllReduceAlgorithm::kDoubleTree}) {
          for (int rails : {1, h.rails()}) {
            SCOPED_TRACE(testing::Message() << ranks << " ranks on " << nodes << ", " << count << " by "
                                            << rails << " rails and algorithm " << int(algorithm));
            Buffers machines = sums;
            ASSERT_NO_FATAL_FAILURE(CarryByRails({algorithm, 2, rails}, &machines));
            for (size_t i = 0; i < count; ++i) {
              double sum = 0;
              for (const auto& input : inputs) sum += input[i];
              ASSERT_NEAR(machines[0][i], sum, 1e-3 * std::abs(sum));
            }
            for (const auto& machine : machines) ASSERT_EQ(machine, machines[0]);
          }
        }
      }
    }
  }
}

// Three rails carry what lies behind each other, in whole cache lines of the smallest type; a fourth rank of
// a larger machine carries nothing.
TEST(Schedule, GoldenRails) {
  EXPECT_EQ(RailPart(1000, 3, 0), (Range{0, 384}));
  EXPECT_EQ(RailPart(1000, 3, 1), (Range{384, 320}));
  EXPECT_EQ(RailPart(1000, 3, 2), (Range{704, 296}));
  EXPECT_EQ(RailPart(1000, 3, 3), (Range{0, 0}));
  EXPECT_EQ(RailPart(10, 3, 0), (Range{0, 10}));
  EXPECT_EQ(RailPart(10, 3, 1).count, 0u);
  EXPECT_EQ(
      ToText(MakeSchedule({AllReduceAlgorithm::kHalvingDoubling, 1, 3}, 1, 2, RailPart(1000, 3, 2).count)),
      "send 0+148@0, reduce-under 148+148@0\n"
      "send 148+148@0, receive 0+148@0\n");
  EXPECT_TRUE(MakeSchedule({AllReduceAlgorithm::kRing, 1, 3}, 1, 2, RailPart(10, 3, 1).count).empty());
}

TEST(Schedule, EvenPartCoversEverythingOnce) {
  for (uint64_t count : kCounts) {
    for (int parts = 1; parts <= 17; ++parts) {
      for (uint64_t align : {1, 16}) {
        uint64_t at = 0;
        for (int i = 0; i < parts; ++i) {
          const Range part = EvenPart(count, parts, i, align);
          ASSERT_EQ(part.begin, std::min(at, count));
          ASSERT_TRUE(part.begin % align == 0 || part.count == 0);
          at = part.begin + part.count;
        }
        ASSERT_EQ(at, count);
      }
    }
  }
}

TEST(Hierarchy, LeadersAndOrder) {
  const std::vector<NodeId> nodes{NodeId("b"), NodeId("a"), NodeId("b"), NodeId("a"), NodeId("c")};
  const Hierarchy h = MakeHierarchy(nodes, 2);
  EXPECT_THAT(h.nodes, testing::ElementsAre(testing::ElementsAre(0, 2), testing::ElementsAre(1, 3),
                                            testing::ElementsAre(4)));
  EXPECT_EQ(h.node, 0);
  EXPECT_EQ(h.local, 1);
  EXPECT_FALSE(h.leader());
  EXPECT_FALSE(h.one_rank_a_node());
  EXPECT_EQ(h.rails(), 1);
  EXPECT_TRUE(h.Rail().empty());
  const std::vector<NodeId> more{NodeId("b"), NodeId("a"), NodeId("b"), NodeId("b"), NodeId("a")};
  EXPECT_EQ(MakeHierarchy(more, 0).rails(), 2);
  EXPECT_THAT(MakeHierarchy(more, 0).Rail(), testing::ElementsAre(0, 1));
  EXPECT_THAT(MakeHierarchy(more, 4).Rail(), testing::ElementsAre(2, 4));
  EXPECT_TRUE(MakeHierarchy(more, 3).Rail().empty());
  const Hierarchy ordered = MakeHierarchy(nodes, 3, {1, 2, 1, 2, 0});
  EXPECT_THAT(ordered.NodeMajor(), testing::ElementsAre(4, 0, 2, 1, 3));
  EXPECT_EQ(ordered.node, 2);
  EXPECT_EQ(ordered.local, 1);
  EXPECT_EQ(ordered.NodeOf(4), 0);
  EXPECT_EQ(h.NodeOf(3), 1);
  EXPECT_THAT(h.NodeMajor(), testing::ElementsAre(0, 2, 1, 3, 4));
}

TEST(OpRecord, ReductionsThatATypeDoesNotHaveAreRefused) {
  const auto message = [](OpKind kind, DType dtype, ReduceOp op) {
    return std::string(CheckArguments({.count = 9, .kind = kind, .dtype = dtype, .op = op}, 2).message());
  };
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce}) {
    EXPECT_EQ(message(kind, DType::kFloat32, ReduceOp::kBitXor),
              "float32 has no bit_xor: operations on bits take integers and bool");
    EXPECT_EQ(message(kind, DType::kComplex64, ReduceOp::kBitAnd),
              "complex64 has no bit_and: operations on bits take integers and bool");
    EXPECT_EQ(message(kind, DType::kBool, ReduceOp::kMean),
              "bool has no mean: a mean of truth values is none");
    EXPECT_EQ(message(kind, DType::kComplex64, ReduceOp::kMin),
              "complex64 has no min: complex numbers have no order");
    EXPECT_EQ(message(kind, DType::kUint64, ReduceOp::kBitXor), "");
    EXPECT_EQ(message(kind, DType::kFloat8E5M2, ReduceOp::kProduct), "");
    EXPECT_EQ(message(kind, DType::kFloat32, static_cast<ReduceOp>(8)), "unknown reduction 8");
  }
  EXPECT_EQ(message(OpKind::kBroadcast, DType::kComplex64, ReduceOp::kMin), "");
}

TEST(OpRecord, L6DisagreementNamesTheRanks) {
  OpRecord sum;
  sum.sequence = 17;
  sum.count = 1000;
  sum.kind = OpKind::kAllReduce;
  sum.dtype = DType::kFloat32;
  OpRecord barrier;
  barrier.sequence = 17;
  barrier.kind = OpKind::kBarrier;
  EXPECT_TRUE(CheckAgreement({sum, sum, sum}).ok());
  const absl::Status status = CheckAgreement({sum, barrier, sum});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(status.message()),
      testing::HasSubstr("ranks 0,2 call all-reduce #17 of 1000 float32, sum; rank 1 calls barrier #17"));
  OpRecord shorter = sum;
  shorter.count = 999;
  EXPECT_FALSE(CheckAgreement({sum, shorter}).ok());
  OpRecord elsewhere = sum;
  elsewhere.arena = 7;
  EXPECT_TRUE(CheckAgreement({sum, elsewhere}).ok());
}

// How many of `turns` went the second way.
int RunWays(TwoWays& ways, uint64_t bytes, int turns, int64_t first, int64_t second) {
  int taken = 0;
  for (int i = 0; i < turns; ++i) {
    const bool two = TwoWays::Second(ways.choice(), bytes);
    ways.Took(two, bytes, two ? second : first);
    taken += two ? 1 : 0;
  }
  return taken;
}

TEST(TwoWays, TakesTheFasterAndNoticesWhenThatChanges) {
  TwoWays ways;
  constexpr uint64_t kSmall = 64 << 10, kLarge = 64 << 20;
  EXPECT_LE(RunWays(ways, kLarge, 200, 1000, 3000), 8);
  EXPECT_GE(RunWays(ways, kLarge, 10 * TwoWays::kLookAgain, 9000, 3000),
            5 * static_cast<int>(TwoWays::kLookAgain));
  // One slow turn does not turn it back.
  ways.Took(true, kLarge, 1'000'000);
  EXPECT_TRUE(TwoWays::Second(ways.choice(), kLarge));
  EXPECT_FALSE(TwoWays::Second(ways.choice(), kSmall)) << "sizes are learned apart";
}

// The first operation touches memory that nobody had touched: it says nothing about its way, and that must
// not cost more than a few operations.
TEST(TwoWays, AWayIsNotJudgedByItsFirstOperation) {
  constexpr uint64_t kLarge = 2 << 20;
  TwoWays first_is_faster;
  first_is_faster.Took(false, kLarge, 50'000);
  EXPECT_LE(RunWays(first_is_faster, kLarge, 40, 1000, 3000), 13);
  TwoWays second_is_faster;
  second_is_faster.Took(false, kLarge, 1'000);
  second_is_faster.Took(true, kLarge, 50'000);
  EXPECT_GE(RunWays(second_is_faster, kLarge, 40, 1000, 300), 27);
}

}  // namespace
}  // namespace gtrain::comm
