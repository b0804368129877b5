// Placement by the topology of the cluster: on which of the nodes with room, and which rank on which of their
// GPUs, a step of the job's mesh communicates least. PURE.
//
// Place() says whether there is room, and for how many ranks: a topology moves no job to the front of a
// queue. This comes after it, once a grant. Of a job that ran before, ranks stay where they were where that
// is still free, and only the others get a new place, the one that adds least. Processes
// that go on in place keep their nodes and GPUs, and who comes up beside them is placed likewise.
//
// A job is on no more machines than Place() took; where that communicates no more, or planning would take
// more than some tenths of a second (ranks x neighbours above 100,000), Place() has the last word. On the
// caller's thread; `bench_placement` has the milliseconds.
#pragma once
#include <string>
#include <vector>

#include "job/plan/place.h"
#include "job/spec/job_spec.h"
#include "topology/place/mesh.h"
#include "topology/topology.h"

namespace gtrain::plan {

// The label of a node that says what it hangs on, the widest first: "/zone-a/spine-3/rack-17". Of use where
// no file says it; without it the labels `zone` and `rack` do, which copies of checkpoints follow too.
inline constexpr char kFabricLabel[] = "fabric";

// The mesh of a job as it has so many ranks, with the traffic assumed for each axis (topology/place/mesh.h).
// Without a mesh all ranks are data-parallel.
topology::Mesh MeshOf(const std::vector<spec::MeshAxis>& axes, int64_t ranks);

// What the labels of nodes say; no machines where no node has one.
topology::Topology TopologyOfLabels(const std::vector<NodeView>& nodes);

// The places of `packed`, which Place(nodes, demand) found, as the topology wants them; `packed` itself where
// there is nothing to choose or the topology has none of the nodes. A node is the machine of the topology
// that has its hostname, with or without the domain. `before`: of the last generation's ranks, by rank.
Placement ByTopology(const std::vector<NodeView>& nodes, const Demand& demand, Placement packed,
                     const topology::Topology& topology, const std::vector<spec::MeshAxis>& axes,
                     const std::vector<RankSlot>& before);

}  // namespace gtrain::plan
