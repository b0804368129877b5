// A topology from measurements between machines: which pairs to measure, which machines hang together, and
// the Topology value that says so. PURE.
//
// Speeds are measured under load: in a round every machine exchanges data with one other, all at the same
// time, so that an uplink that is narrower than what comes up to it shows, which one pair alone would not
// fill. Machines are then grouped by average linkage (Sokal and Michener, 1958) of how much slower a pair is
// than what its ends can do; a group is a switch, and what leaves it is measured by all of its machines at
// once. Parts of a network that are equally fast under load are one group: nothing is gained by telling them
// apart.
//
// Up to kAllPairsMax machines every pair is measured, n - 1 rounds. Beyond that it is O(log n) rounds, so
// O(n log n) pairs: neighbours in the order of the machines, partners at powers of two up to 32, and random
// ones. The order should then be that of the racks, as names or addresses usually are; where it says nothing,
// small groups are found instead of racks.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "topology/topology.h"

namespace gtrain::topology {

inline constexpr int kAllPairsMax = 64;
inline constexpr int kGroupLevelsMax = 3;

struct Pair {
  int a = 0, b = 0;
  bool operator==(const Pair&) const = default;
};

// Each machine is in one pair of a round at most, and each pair is there once. Deterministic. `turn`: which
// pairs share a round changes from turn to turn, for what a pair gets depends on how many others cross the
// uplinks with it.
std::vector<std::vector<Pair>> ProbeRounds(int machines, int turn = 0);

struct PairSpeed {
  int a = 0, b = 0;
  double gb_s = 0;  // of each direction, both at once
  double us = 0;    // half of the fastest round trip of a small message
  bool operator==(const PairSpeed&) const = default;
};

// Machines that hang together, of one level.
struct GroupLevel {
  std::vector<int> group_of;      // [machine], groups are numbered in the order of their first machine
  std::vector<double> gb_s = {};  // [group]: what leaves it in one direction; empty or 0: not measured
  int groups() const;
};

// From the narrowest groups to the widest; empty where no part of the network is slower than the rest. Pairs
// without a speed are left out. O(P log P) for P pairs.
std::vector<GroupLevel> FindGroups(int machines, absl::Span<const PairSpeed> pairs);

// The pairs that together fill what leaves a group: each of its machines with one outside, as far as there
// are any; of the same wider group before others, and the groups by turns.
std::vector<Pair> PairsAcross(absl::Span<const GroupLevel> levels, size_t level, int group);

struct Measured {
  std::vector<std::string> machines;
  std::vector<PairSpeed> pairs;
  std::vector<GroupLevel> levels = {};
};

// Machines hang on a switch a group of the first level, groups on one of the next, and the widest on one
// called "/core". InvalidArgument: a machine that no pair has a speed of, or two of one name.
absl::StatusOr<Topology> TopologyOf(const Measured& measured, const Shape& shape);

}  // namespace gtrain::topology
