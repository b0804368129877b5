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
#include <cstdint>
#include <map>
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

// Bytes that a rank sends a step along an axis, as the job says.
using Traffic = std::map<std::string, uint64_t>;

// The mesh of a job as it has so many ranks. An axis without traffic has what topology/place/mesh.h assumes
// for it. Without a mesh all ranks are data-parallel.
topology::Mesh MeshOf(const std::vector<spec::MeshAxis>& axes, int64_t ranks, const Traffic& traffic = {});

// What the labels of nodes say; no machines where no node has one.
topology::Topology TopologyOfLabels(const std::vector<NodeView>& nodes);

// A topology as grants use it. O(machines), made once for each change of what is known, not for each grant.
class KnownTopology {
 public:
  KnownTopology() = default;
  explicit KnownTopology(topology::Topology topology);
  const topology::Topology& topology() const { return topology_; }
  bool empty() const { return topology_.machines.empty(); }

  // The machine of the topology that has the node's id or hostname, with or without the domain; -1: none.
  int MachineOf(const NodeView& node) const;
  // The domains that hold a machine, numbered, the widest first; empty for -1.
  const std::vector<int>& PathOf(int machine) const;
  // The topology with these machines first, and else one for each switch that has any. What goes through what
  // is left costs the same: where nobody knows the speed of a switch, it is what was assumed for the whole
  // (but of leaves with rails).
  topology::Topology Part(const std::vector<int>& machines) const;

 private:
  void IndexLinks();

  topology::Topology topology_;
  std::map<std::string, int, std::less<>> machines_;  // by name, whole and short
  std::vector<std::vector<int>> paths_;               // by machine
  std::vector<std::vector<int>> links_;               // of each machine
  std::map<int, int> machine_of_switch_;              // one that hangs on it
  topology::Topology without_machines_;
};

// The places of `packed`, which Place(nodes, demand) found, as the topology wants them; `packed` itself where
// there is nothing to choose or the topology has none of the nodes. `before`: of the last generation's ranks,
// by rank. For a job of which nothing is there yet O(nodes) and what its own machines take.
Placement ByTopology(const std::vector<NodeView>& nodes, const Demand& demand, Placement packed,
                     const KnownTopology& known, const std::vector<spec::MeshAxis>& axes,
                     const std::vector<RankSlot>& before, const Traffic& traffic = {});

// The order in which collectives go through the nodes of a job: [node] is its position. Nodes of one domain
// follow each other, and domains and nodes come as in `nodes` else, which are in the order of GROUP_RANK.
// Empty: that is the order of `nodes` itself.
std::vector<int> CollectiveOrder(const KnownTopology& known, const std::vector<NodeView>& nodes);

}  // namespace gtrain::plan
