// The model against the schedules themselves, run on a network with the same costs.
#include "comm/plan/cost.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

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

constexpr Line kGigabit{40e-6, 8.5e-9, 0.2e-9}, kFast{5e-6, 0.1e-9, 0.1e-9}, kFar{20e-3, 1e-9, 0.2e-9};
constexpr uint64_t kSizes[] = {8, 4 << 10, 64 << 10, 1 << 20, 16 << 20};

TEST(Cost, PredictsWhatTheSchedulesTake) {
  for (const Line& link : {kGigabit, kFast, kFar}) {
    for (int ranks = 2; ranks <= 64; ++ranks) {
      for (uint64_t bytes : kSizes) {
        for (AllReduceAlgorithm algorithm : kAll) {
          if (bytes < static_cast<uint64_t>(ranks)) continue;
          const AllReducePlan plan = PlanAllReduce(algorithm, link.Cost(), ranks, bytes);
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
          return TimedNetwork(PlanAllReduce(algorithm, link.Cost(), ranks, bytes), ranks, bytes, link).Run();
        };
        double best = 1e9;
        for (AllReduceAlgorithm algorithm : kAll) best = std::min(best, run(algorithm));
        EXPECT_LE(run(AllReduceAlgorithm::kAuto), 1.2 * best) << ranks << " ranks, " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace gtrain::comm
