// What an all-reduce between machines will take, and so which algorithm is the best for it. PURE.
//
// A round takes as long as the network needs for something however small, and each byte that a rank sends in
// it or reduces adds to that. What these cost is measured where the ranks are.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "comm/plan/schedule.h"

namespace gtrain::comm {

enum class AllReduceAlgorithm : uint8_t { kAuto, kRing, kDoubling, kHalvingDoubling, kDoubleTree };

// The names of GTRAIN_COMM_ALGO. Nullopt: none of them.
std::optional<AllReduceAlgorithm> AllReduceAlgorithmFrom(absl::string_view name);
inline constexpr char kAllReduceAlgorithms[] = "auto, ring, doubling, halving-doubling, double-tree";

// In seconds. Fitted to exchanges of a few sizes in which everybody sends one message and gets one; between
// two sizes a round costs so much and each byte so much, and so it goes on above the largest. The slowest
// link of all counts, since everybody waits for it.
struct LinkCost {
  static constexpr std::array<uint64_t, 4> kSizes{8, 4 << 10, 32 << 10, 256 << 10};
  std::array<double, 4> round{50e-6, 55e-6, 80e-6, 300e-6};  // of a message of kSizes[i] bytes
  double reduced_byte = 0.2e-9;

  double Round(double bytes) const;
};

// Of the rank that has most to do.
struct Work {
  struct Rounds {
    double times, bytes;       // sent one after the other in each round,
    double more_messages = 0;  // in so many messages beside the first
  };
  std::vector<Rounds> rounds;
  double reduced_bytes = 0;
};
double Seconds(const LinkCost& link, const Work& work);

struct AllReducePlan {
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kRing;  // not kAuto
  int segments = 1;                                          // of kDoubleTree
  bool operator==(const AllReducePlan&) const = default;
};
Work WorkOf(const AllReducePlan& plan, int ranks, uint64_t bytes);

// The plan with the least predicted time, of `wanted` alone unless that is kAuto. The same on all ranks that
// pass the same.
AllReducePlan PlanAllReduce(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes);
// Before anything else all ranks compare what they are about to do, by doubling. Is it best that small data
// goes along, instead of taking the plan above after it?
bool GoesWithRecords(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes);
Schedule MakeSchedule(const AllReducePlan& plan, int rank, int ranks, uint64_t count);

}  // namespace gtrain::comm
