// Fabrics of the benchmark and of tests, with and without holes. PURE; written before the solver was tuned on
// them.
//
// Holes are whole machines, drawn without replacement, each equally likely: the machines that are lost,
// drained or busy. `slot_holes` takes single GPUs instead, which breaks machines up. The machines that are
// left are exactly as many as the ranks need, beside `spares` further ones.
#pragma once
#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "topology/place/mesh.h"
#include "topology/topology.h"

namespace gtrain::topology {

enum class FabricKind {
  // 8 GPUs a machine (500 GB/s), 16 machines a leaf (8 x 50 GB/s), leaves on a spine (640 GB/s): distances 1,
  // 10, 100.
  kLeafSpine,
  // 8 GPUs a machine, a NIC each to the leaf of its rail, 8 leaves for a group of 32 machines, 8 groups a pod
  // at half of
  // that bandwidth, pods on a core at an eighth: distances about 1, 10, 20, 80.
  kRails,
};

struct RandomFabric {
  Topology topology;
  // Holes are Machine::unusable or Machine::broken_gpus of `topology`; these further ones are whole and not
  // needed.
  std::vector<int> spares;  // machine indices
};

struct FabricOptions {
  FabricKind kind = FabricKind::kLeafSpine;
  int ranks = 1024;
  double holes = 0;         // share of the machines, or of the GPUs
  bool slot_holes = false;  // single GPUs
  int spares = 0;           // machines
};

RandomFabric MakeFabric(const FabricOptions& options, Rng& rng);

// dp x pp x tp of the benchmark for 1,024, 8,192, 65,536 and 1,048,576 ranks: tp 8, pp 8 or 16, traffic 100 :
// 2 : 10.
Mesh BenchMesh(int ranks);

}  // namespace gtrain::topology
