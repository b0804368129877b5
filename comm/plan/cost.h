// Predicts how long an all-reduce between machines takes, and so which algorithm is the best for it. PURE.
//
// A round takes as long as the network needs for the smallest message, and each byte that a rank sends in it
// or reduces adds to that. These costs are measured on the machines of the ranks.
//
// A choice sends nothing and keeps nothing: it predicts at most 24 plans, each of up to log2 N + 1 kinds of
// rounds among N machines. The schedules of MakeSchedule are as long as the table in schedule.h says.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/plan/schedule.h"

namespace gtrain::comm {

enum class AllReduceAlgorithm : uint8_t { kAuto, kRing, kDoubling, kHalvingDoubling, kDoubleTree };
// The ranks of a machine that speak to other machines: its leader, or as many ranks as every machine has,
// each for its part of the data.
enum class Speakers : uint8_t { kAuto, kLeader, kRails };

// The algorithm and speakers that GTRAIN_COMM_ALGO asks for.
struct AllReduceWish {
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kAuto;
  Speakers speakers = Speakers::kAuto;
  // What the variable leaves open is chosen by the costs of LinkCost{} instead of measured ones: by where the
  // ranks are and the size alone, so that elements are added in the same order in every start.
  bool deterministic = false;
  bool operator==(const AllReduceWish&) const = default;
};
// Nullopt: not one of kAllReduceWishes.
std::optional<AllReduceWish> AllReduceWishFrom(absl::string_view name);
inline constexpr char kAllReduceWishes[] =
    "auto, ring, doubling, halving-doubling, double-tree; leader or rails; deterministic; or several, as "
    "ring+rails";

// The cost of a link in seconds. It is fitted to exchanges of a few sizes in which everybody sends one
// message and gets one; between two sizes it is linear in the bytes, and beyond the largest it goes on so.
// The slowest of all links counts, since everybody waits for it.
struct LinkCost {
  static constexpr std::array<uint64_t, 4> kSizes{8, 4 << 10, 32 << 10, 256 << 10};
  std::array<double, 4> round{50e-6, 55e-6, 80e-6, 300e-6};  // of a message of kSizes[i] bytes
  double reduced_byte = 0.2e-9;

  double Round(double bytes) const;
};

// The number of ranks of each machine that speak to other machines at the same time, each about its part of
// the data, and the cost of a round then.
struct Carriers {
  int rails = 1;  // 1: the leader, about everything
  LinkCost link;
};
// Numbers of rails to measure and to choose from, ascending, on machines of at least `most` ranks.
std::vector<int> RailsFor(Speakers wanted, int most);

// The work of the rank that has most to do.
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
  int rails = 1;
  bool operator==(const AllReducePlan&) const = default;
};
// The work of each rail, which carries `bytes`.
Work WorkOf(const AllReducePlan& plan, int machines, uint64_t bytes);

// Returns the plan with the least predicted time, among those of `wanted` unless that is kAuto. It is the
// same on all ranks that pass the same arguments. `carriers` has at least one.
AllReducePlan PlanAllReduce(AllReduceAlgorithm wanted, absl::Span<const Carriers> carriers, int machines,
                            uint64_t bytes);
// The best number of rails for an all-gather of `bytes`, all parts of each machine together, and for a
// broadcast of `bytes`.
int RailsOfAllGather(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
int RailsOfBroadcast(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
// The best number of rails for an exchange in which each machine has data for each other one: `bytes` is all
// that goes to one of them.
int RailsOfExchange(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
// A reduction to one machine goes down a tree, or, where that is predicted to be faster, each machine reduces
// a part of it and sends that to the root.
struct ReducePlan {
  bool in_parts = false;
  int rails = 1;
  bool operator==(const ReducePlan&) const = default;
};
ReducePlan PlanReduce(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
// The schedule of one rail, which carries `count` elements.
Schedule MakeSchedule(const ReducePlan& plan, int machine, int machines, int root, uint64_t count);
// Before every collective all ranks compare their calls, by doubling. True where small data should travel
// with these messages, instead of by the plan above after them.
bool GoesWithRecords(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes);
// The schedule of one rail, which carries `count` elements.
Schedule MakeSchedule(const AllReducePlan& plan, int machine, int machines, uint64_t count);

}  // namespace gtrain::comm
