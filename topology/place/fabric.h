// A topology as the placement computes with it: slots, one a rank could have, and the nested domains that
// they lie in - island, machine, switches - each with what leaves it. PURE.
//
// Links form a graph and the solver wants a tree. A switch's level is its distance from the nearest machine.
// The domains of level k are what hangs together through switches of levels up to k: the machines of one
// leaf, or of the eight leaves of a group with rails; then a pod; then all. A domain's uplink is every link
// that leaves it, together. NVLink switches come first. Slots are numbered so that every domain is a range of
// them, so a tree of a million slots is some arrays.
//
// What the file does not say is assumed, and `assumed` says so: NVLink 150 GB/s, PCIe 25, between sockets 20,
// memory 10, a machine what its NICs have together, else 12.5, a switch half of what comes up to it, between
// parts that nothing joins 1.25.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "topology/topology.h"

namespace gtrain::topology {

inline constexpr int kLevelsMax = 12;

struct Slot {
  int32_t machine = 0;  // index into Topology::machines
  int16_t rail = 0;  // position on the machine: slots of one rail share a leaf switch where there are rails
  bool broken = false;  // one of its GPUs is
};

// The domains of one level. Domain d has the slots begin[d] to begin[d + 1].
struct Level {
  std::string name;             // "machine", "leaf", ...
  std::vector<int32_t> begin;   // one more than there are domains
  std::vector<double> up_gb_s;  // of one direction, all links together
  std::vector<float> up_us;
  std::vector<std::string> names;  // of domains; empty below the machine
  int count() const { return static_cast<int>(begin.size()) - 1; }
};

struct Fabric {
  std::vector<Slot> slots;
  // From the smallest domains, islands or machines, to the one that has everything. A level that says nothing
  // new is left out.
  std::vector<Level> levels;
  int machine_level = 0;
  std::vector<double> slot_gb_s;  // of one slot into its smallest domain
  // [level][slot]: the domain of it.
  std::vector<std::vector<int32_t>> domain;
  // [level]: seconds for a GB between two slots whose smallest common domain is of that level, every slot
  // sending.
  std::vector<double> seconds_per_gb;
  std::vector<double> us;  // [level]: one message between such slots
  bool has_rails = false;
  double rail_seconds_per_gb = 0;  // on top, between slots of different rails outside of a machine
  std::vector<std::string> assumed;
  std::vector<std::pair<int32_t, int32_t>> slots_of_machine;  // [machine]: first slot, and one after the last
  int gpus_per_slot = 1;
  std::vector<int16_t> gpus;  // gpus_per_slot for each slot, indices of its machine; -1: it has none

  int size() const { return static_cast<int>(slots.size()); }
  // The level of the smallest domain that has both; -1: they are the same slot.
  int Meet(int32_t a, int32_t b) const {
    if (a == b) return -1;
    int level = 0;
    while (domain[level][a] != domain[level][b]) ++level;
    return level;
  }
  // Seconds for a GB; 0 for the same slot.
  double Distance(int32_t a, int32_t b) const {
    const int level = Meet(a, b);
    if (level < 0) return 0;
    const bool changes_rail = has_rails && level > machine_level && slots[a].rail != slots[b].rail;
    return seconds_per_gb[level] + (changes_rail ? rail_seconds_per_gb : 0);
  }
};

// `gpus_per_slot`: of each rank. Machines whose GPUs do not divide by it leave the rest of each island
// unused. InvalidArgument when there is no slot at all.
absl::StatusOr<Fabric> Compile(const Topology& topology, int gpus_per_slot = 1);

}  // namespace gtrain::topology
