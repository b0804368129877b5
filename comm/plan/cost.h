// What an all-reduce between machines will take, and so which algorithm is the best for it. PURE.
//
// A round takes as long as the network needs for something however small, and each byte that a rank sends in
// it or reduces adds to that. What these cost is measured where the ranks are.
//
// A choice sends nothing and keeps nothing: it predicts at most 24 plans, each of up to log2 N + 1 kinds of
// rounds among N machines. What MakeSchedule returns is as long as the table in schedule.h says.
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
// Who of a machine with several ranks speaks to other machines: its leader, or as many ranks as every machine
// has, each for its part of the data.
enum class Speakers : uint8_t { kAuto, kLeader, kRails };

// What GTRAIN_COMM_ALGO asks for.
struct AllReduceWish {
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kAuto;
  Speakers speakers = Speakers::kAuto;
  // What is left open is chosen by the costs of LinkCost{} and not by measured ones: by who the ranks are and
  // the size alone, so that elements are added in the same order in every start.
  bool deterministic = false;
  bool operator==(const AllReduceWish&) const = default;
};
// Nullopt: not one of kAllReduceWishes.
std::optional<AllReduceWish> AllReduceWishFrom(absl::string_view name);
inline constexpr char kAllReduceWishes[] =
    "auto, ring, doubling, halving-doubling, double-tree; leader or rails; deterministic; or several, as "
    "ring+rails";

// In seconds. Fitted to exchanges of a few sizes in which everybody sends one message and gets one; between
// two sizes a round costs so much and each byte so much, and so it goes on above the largest. The slowest
// link of all counts, since everybody waits for it.
struct LinkCost {
  static constexpr std::array<uint64_t, 4> kSizes{8, 4 << 10, 32 << 10, 256 << 10};
  std::array<double, 4> round{50e-6, 55e-6, 80e-6, 300e-6};  // of a message of kSizes[i] bytes
  double reduced_byte = 0.2e-9;

  double Round(double bytes) const;
};

// So many ranks of each machine speak to other machines at the same time, each about its part of the data,
// and this is what a round costs them then.
struct Carriers {
  int rails = 1;  // 1: the leader, about everything
  LinkCost link;
};
// Numbers of rails to measure and to choose from, ascending, on machines of at least `most` ranks.
std::vector<int> RailsFor(Speakers wanted, int most);

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
  int rails = 1;
  bool operator==(const AllReducePlan&) const = default;
};
// Of each rail, which carries `bytes`.
Work WorkOf(const AllReducePlan& plan, int machines, uint64_t bytes);

// The plan with the least predicted time, of `wanted` alone unless that is kAuto. The same on all ranks that
// pass the same. `carriers`: at least one.
AllReducePlan PlanAllReduce(AllReduceAlgorithm wanted, absl::Span<const Carriers> carriers, int machines,
                            uint64_t bytes);
// With how many rails the others are carried best: what each machine has for all of them, and what one has
// for all.
int RailsOfAllGather(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
int RailsOfBroadcast(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
// The same for a round in which each machine has something for each other one: all that goes to one of them.
int RailsOfExchange(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
// A reduction on one machine goes down a tree, or, where that is predicted to be faster, each reduces a part
// of it and sends that to the root.
struct ReducePlan {
  bool in_parts = false;
  int rails = 1;
  bool operator==(const ReducePlan&) const = default;
};
ReducePlan PlanReduce(absl::Span<const Carriers> carriers, int machines, uint64_t bytes);
// Of one rail, which carries `count` elements.
Schedule MakeSchedule(const ReducePlan& plan, int machine, int machines, int root, uint64_t count);
// Before anything else all ranks compare what they are about to do, by doubling. Is it best that small data
// goes along, instead of taking the plan above after it?
bool GoesWithRecords(AllReduceAlgorithm wanted, const LinkCost& link, int ranks, uint64_t bytes);
// Of one rail, which carries `count` elements.
Schedule MakeSchedule(const AllReducePlan& plan, int machine, int machines, uint64_t count);

}  // namespace gtrain::comm
