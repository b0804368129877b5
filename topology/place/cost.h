// What a placement costs: the predicted communication time of a step. PURE.
//
// Along one axis all groups talk at the same time, so each link carries the sum of what they send over it,
// and the slowest link decides; the axes follow one another, so their times add up. Latency comes on top: the
// messages of a ring one after the other.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "topology/place/fabric.h"
#include "topology/place/mesh.h"

namespace gtrain::topology {

struct AxisCost {
  double seconds = 0;          // of this axis, latency included
  double latency_seconds = 0;  // of that
  int level = -1;              // whose domain's uplink is the slowest; -1: the slots' own links
  int domain = 0;
  double link_gb = 0;  // that it carries
  double total = 0;    // seconds of transfer of all edges, as if each had its share of the links alone
  std::vector<double> cut_gb;  // [level]: that leave the domains of that level
  int machines_max = 0;        // the most machines that one group lies on
};

struct Cost {
  double seconds = 0;  // predicted communication time of a step
  double total = 0;    // sum of `total` of the axes: what a graph mapper minimises, and the local search
  std::vector<AxisCost> axes;
  double same_rail =
      1;  // share of the ring edges between machines that stay on their rail; 1 where there are no rails
};

// `slot_of_rank`: all different. O(ranks x axes x levels).
Cost Evaluate(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank);

}  // namespace gtrain::topology
