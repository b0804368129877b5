// The model against the schedules themselves, run on a network with the same costs.
#include "comm/plan/cost.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "comm/plan/link_drift.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr AllReduceAlgorithm kAll[] = {AllReduceAlgorithm::kRing, AllReduceAlgorithm::kDoubling,
                                       AllReduceAlgorithm::kHalvingDoubling, AllReduceAlgorithm::kDoubleTree};

// Everything costs what one round and each byte cost, at any size.
struct Line {
  double round, byte, reduced_byte;
  LinkCost Cost() const {
    LinkCost link;
    for (size_t i = 0; i < link.round.size(); ++i) {
      link.round[i] = round + byte * static_cast<double>(LinkCost::kSizes[i]);
    }
    link.reduced_byte = reduced_byte;
    return link;
  }
};

// When the last rank is done. A rank sends one message after the other and takes in one after the other: 0.3
// of a round goes by with each at either end.
class TimedNetwork {
 public:
  TimedNetwork(const AllReducePlan& plan, int ranks, uint64_t bytes, const Line& link) : link_(link) {
    for (int r = 0; r < ranks; ++r) schedules_.push_back(MakeSchedule(plan, r, ranks, bytes));
    now_.resize(schedules_.size());
    next_.resize(schedules_.size());
    sent_.resize(schedules_.size());
  }

  double Run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < schedules_.size(); ++rank) {
        while (next_[rank] < schedules_[rank].size() && Turn(rank)) moved = true;
      }
    }
    for (size_t rank = 0; rank < schedules_.size(); ++rank) EXPECT_EQ(next_[rank], schedules_[rank].size());
    return *std::max_element(now_.begin(), now_.end());
  }

 private:
  bool Turn(size_t rank) {
    const Round& round = schedules_[rank][next_[rank]];
    const int self = static_cast<int>(rank);
    double out = now_[rank];
    if (sent_[rank] == next_[rank]) {
      ++sent_[rank];
      for (const Action& a : round) {
        if (a.kind != ActionKind::kSend) continue;
        out += 0.3 * link_.round + link_.byte * static_cast<double>(a.count);
        mail_[{self, a.peer}].push_back(out + 0.7 * link_.round);
      }
    }
    std::map<int, size_t> wanted;
    for (const Action& a : round) {
      if (a.kind != ActionKind::kSend && mail_[{a.peer, self}].size() < ++wanted[a.peer]) return false;
    }
    double in = now_[rank];
    for (const Action& a : round) {
      const double bytes = static_cast<double>(a.count);
      if (a.kind == ActionKind::kSend) continue;
      auto& box = mail_[{a.peer, self}];
      in = std::max(in + 0.3 * link_.round + link_.byte * bytes, box.front());
      if (a.kind == ActionKind::kReceiveReduce) in += link_.reduced_byte * bytes;
      box.pop_front();
    }
    now_[rank] = std::max(in, out);
    ++next_[rank];
    return true;
  }

  const Line link_;
  std::vector<Schedule> schedules_;
  std::vector<double> now_;
  std::vector<size_t> next_, sent_;
  std::map<std::pair<int, int>, std::deque<double>> mail_;
};

AllReducePlan PlanOn(const Line& link, AllReduceAlgorithm wanted, int ranks, uint64_t bytes) {
  const Carriers alone{1, link.Cost()};
  return PlanAllReduce(wanted, {alone}, ranks, bytes);
}

constexpr Line kGigabit{40e-6, 8.5e-9, 0.2e-9}, kFast{5e-6, 0.1e-9, 0.1e-9}, kFar{20e-3, 1e-9, 0.2e-9};
constexpr uint64_t kSizes[] = {8, 4 << 10, 64 << 10, 1 << 20, 16 << 20};

TEST(Cost, PredictsWhatTheSchedulesTake) {
  for (const Line& link : {kGigabit, kFast, kFar}) {
    for (int ranks = 2; ranks <= 64; ++ranks) {
      for (uint64_t bytes : kSizes) {
        for (AllReduceAlgorithm algorithm : kAll) {
          if (bytes < static_cast<uint64_t>(ranks)) continue;
          const AllReducePlan plan = PlanOn(link, algorithm, ranks, bytes);
          const double took = TimedNetwork(plan, ranks, bytes, link).Run();
          const double predicted = Seconds(link.Cost(), WorkOf(plan, ranks, bytes));
          EXPECT_GT(predicted, 0.7 * took) << int(algorithm) << " of " << ranks << " ranks, " << bytes;
          EXPECT_LT(predicted, 1.8 * took) << int(algorithm) << " of " << ranks << " ranks, " << bytes;
        }
      }
    }
  }
}

TEST(Cost, TheChosenPlanIsTheBestOrNearlyTheBest) {
  for (const Line& link : {kGigabit, kFast, kFar}) {
    for (int ranks = 2; ranks <= 64; ++ranks) {
      for (uint64_t bytes : kSizes) {
        const auto run = [&](AllReduceAlgorithm algorithm) {
          return TimedNetwork(PlanOn(link, algorithm, ranks, bytes), ranks, bytes, link).Run();
        };
        double best = 1e9;
        for (AllReduceAlgorithm algorithm : kAll) best = std::min(best, run(algorithm));
        EXPECT_LE(run(AllReduceAlgorithm::kAuto), 1.2 * best) << ranks << " ranks, " << bytes;
      }
    }
  }
}

// Two ranks of each machine at once: a round takes little longer than alone where the link has room for both,
// and each byte twice as long where it has not.
TEST(Cost, RailsWhereTheyAreMeasuredToBeFaster) {
  const auto rails_for = [](const Line& alone, const Line& both, uint64_t bytes) {
    const std::vector<Carriers> carriers{{1, alone.Cost()}, {2, both.Cost()}};
    return PlanAllReduce(AllReduceAlgorithm::kAuto, carriers, 4, bytes).rails;
  };
  const Line one_connection{20e-6, 0.5e-9, 0.2e-9}, busier{30e-6, 0.5e-9, 0.2e-9};
  const Line full{40e-6, 8.5e-9, 0.2e-9}, twice_as_full{45e-6, 17e-9, 0.4e-9};
  EXPECT_EQ(rails_for(one_connection, busier, 8), 1);
  EXPECT_EQ(rails_for(one_connection, busier, 512 << 10), 2);
  for (uint64_t bytes : kSizes) {
    EXPECT_EQ(rails_for(full, twice_as_full, bytes), 1) << bytes;
    EXPECT_EQ(rails_for(full, full, bytes) == 2, bytes > 8) << bytes;
  }
  for (int machines : {2, 4, 40}) {
    const std::vector<Carriers> room{{1, one_connection.Cost()}, {2, busier.Cost()}},
        no_room{{1, full.Cost()}, {2, twice_as_full.Cost()}};
    EXPECT_EQ(RailsOfAllGather(room, machines, 512 << 10), 2) << machines;
    EXPECT_EQ(RailsOfAllGather(room, machines, 8), 1) << machines;
    EXPECT_EQ(RailsOfAllGather(no_room, machines, 512 << 10), 1) << machines;
    EXPECT_EQ(RailsOfBroadcast(room, machines, 512 << 10), 2) << machines;
    EXPECT_EQ(RailsOfBroadcast(no_room, machines, 512 << 10), 1) << machines;
  }
}

TEST(Cost, ReductionsOfLargeDataGoInParts) {
  const Line link{40e-6, 1e-9, 0.2e-9}, twice_as_full{45e-6, 2e-9, 0.4e-9};
  const std::vector<Carriers> alone{{1, link.Cost()}}, room{{1, link.Cost()}, {2, link.Cost()}},
      no_room{{1, link.Cost()}, {2, twice_as_full.Cost()}};
  for (const int machines : {2, 3, 4, 16}) {
    EXPECT_EQ(PlanReduce(alone, machines, 8), (ReducePlan{false, 1})) << machines;
    EXPECT_EQ(PlanReduce(alone, machines, 16 << 20), (ReducePlan{machines > 2, 1})) << machines;
  }
  EXPECT_EQ(PlanReduce(alone, 17, 16 << 20), (ReducePlan{false, 1})) << "more connections than a tree";
  EXPECT_EQ(PlanReduce(room, 4, 16 << 20).rails, 2);
  EXPECT_EQ(PlanReduce(no_room, 4, 16 << 20).rails, 1);
  EXPECT_EQ(RailsOfExchange(room, 4, 1 << 20), 2);
  EXPECT_EQ(RailsOfExchange(no_room, 4, 1 << 20), 1);
}

class LinkDriftTest : public testing::Test {
 protected:
  // Windows until it wants to measure, of collectives that take `factor` times what was predicted, all but
  // one of each window `late` times as long; -1: it never wants to.
  int WindowsUntilDrifted(double factor, double late = 3) {
    for (int window = 0; window < 4000; ++window) {
      if (drift_.drifted()) return window;
      for (int i = 0; i < LinkDrift::kWindow; ++i) drift_.Took(1e-3, 1e-3 * factor * (i == 7 ? 1 : late));
    }
    return -1;
  }
  LinkDrift drift_;
};

TEST_F(LinkDriftTest, IsSeenInTheBestOfManyCollectives) {
  EXPECT_EQ(WindowsUntilDrifted(1.5), -1) << "a prediction may be wrong";
  EXPECT_EQ(WindowsUntilDrifted(1.5, 20), -1) << "ranks come late, most of the time";
  EXPECT_EQ(WindowsUntilDrifted(2.9), -1) << "as long as it is wrong by the same";
  EXPECT_EQ(WindowsUntilDrifted(3.1), LinkDrift::kWindows);
  drift_.Measured(/*changed=*/true);
  EXPECT_EQ(WindowsUntilDrifted(1), -1);
  EXPECT_EQ(WindowsUntilDrifted(0.4), LinkDrift::kWindows) << "links get better, too";
}

TEST_F(LinkDriftTest, WhatIsNotTheLinkIsLookedAtLessAndLess) {
  EXPECT_EQ(WindowsUntilDrifted(1), -1);
  int before = 0;
  for (int i = 0; i < 12; ++i) {
    const int windows = WindowsUntilDrifted(i % 2 == 0 ? 3 : 1);
    EXPECT_GT(windows, 0);
    EXPECT_TRUE(i == 0 || windows >= before) << i;
    before = windows;
    drift_.Measured(/*changed=*/false);
    for (int k = 0; k < LinkDrift::kWindow; ++k) drift_.Took(1e-3, 1e-3 * (i % 2 == 0 ? 3 : 1));
  }
  EXPECT_EQ(before, LinkDrift::kWindowsMax);
}

TEST(LinkDrifts, SizesForWhichPredictionsDifferAreNoChange) {
  LinkDrifts drifts;
  for (int round = 0; round < 40; ++round) {
    for (int i = 0; i < LinkDrift::kWindow; ++i) drifts.Took(4 << 10, 1e-3, 0.7e-3);
    for (int i = 0; i < 4 * LinkDrift::kWindow; ++i) drifts.Took(1 << 20, 1e-3, 2.1e-3);
  }
  EXPECT_FALSE(drifts.drifted());
  for (int i = 0; i < LinkDrift::kWindows * LinkDrift::kWindow; ++i) drifts.Took(1 << 20, 1e-3, 4.3e-3);
  EXPECT_TRUE(drifts.drifted());
}

TEST(Cost, WhichRailsAreTried) {
  EXPECT_EQ(RailsFor(Speakers::kAuto, 1), std::vector<int>({1}));
  EXPECT_EQ(RailsFor(Speakers::kAuto, 4), std::vector<int>({1, 4}));
  EXPECT_EQ(RailsFor(Speakers::kLeader, 4), std::vector<int>({1}));
  EXPECT_EQ(RailsFor(Speakers::kRails, 4), std::vector<int>({4}));
  EXPECT_EQ(RailsFor(Speakers::kRails, 1), std::vector<int>({1}));
}

TEST(Cost, WishesByName) {
  using A = AllReduceAlgorithm;
  EXPECT_EQ(AllReduceWishFrom("auto"), (AllReduceWish{A::kAuto, Speakers::kAuto}));
  EXPECT_EQ(AllReduceWishFrom("ring"), (AllReduceWish{A::kRing, Speakers::kAuto}));
  EXPECT_EQ(AllReduceWishFrom("rails"), (AllReduceWish{A::kAuto, Speakers::kRails}));
  EXPECT_EQ(AllReduceWishFrom("leader"), (AllReduceWish{A::kAuto, Speakers::kLeader}));
  EXPECT_EQ(AllReduceWishFrom("double-tree+rails"), (AllReduceWish{A::kDoubleTree, Speakers::kRails}));
  EXPECT_EQ(AllReduceWishFrom("doubling+leader"), (AllReduceWish{A::kDoubling, Speakers::kLeader}));
  EXPECT_EQ(AllReduceWishFrom("deterministic"), (AllReduceWish{A::kAuto, Speakers::kAuto, true}));
  EXPECT_EQ(AllReduceWishFrom("ring+rails+deterministic"), (AllReduceWish{A::kRing, Speakers::kRails, true}));
  for (const char* none : {"", "+", "ring+", "+rails", "rails+ring", "ring+rails+", "rails+rails", "Rails",
                           "best", "deterministic+ring", "deterministic+"}) {
    EXPECT_EQ(AllReduceWishFrom(none), std::nullopt) << none;
  }
}

}  // namespace
}  // namespace gtrain::comm
