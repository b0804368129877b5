// What an all-reduce between machines will take, and so which algorithm is the best for it. PURE.
//
// A round takes as long as the network needs for something however small, and each byte that a rank sends in
// it or reduces adds to that. What these cost is measured where the ranks are.
#pragma once
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"
#include "comm/plan/schedule.h"

namespace gtrain::comm {

enum class AllReduceAlgorithm : uint8_t { kAuto, kRing, kDoubling, kHalvingDoubling, kDoubleTree };

// The names of GTRAIN_COMM_ALGO. Nullopt: none of them.
std::optional<AllReduceAlgorithm> AllReduceAlgorithmFrom(absl::string_view name);
inline constexpr char kAllReduceAlgorithms[] = "auto, ring, doubling, halving-doubling, double-tree";

// In seconds. The slowest link of all counts, since everybody waits for it.
struct LinkCost {
  double round = 50e-6;
  double byte = 1e-9;
  double reduced_byte = 0.2e-9;
  bool operator==(const LinkCost&) const = default;
};

// From the times of exchanges in which everybody sends one message and gets one, at two sizes.
LinkCost FitLink(double small_seconds, uint64_t small_bytes, double large_seconds, uint64_t large_bytes,
                 double reduced_byte_seconds);

// Of the rank that has most to do.
struct Work {
  double rounds = 0;
  double bytes = 0;  // sent one after the other
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
Schedule MakeSchedule(const AllReducePlan& plan, int rank, int ranks, uint64_t count);

}  // namespace gtrain::comm
