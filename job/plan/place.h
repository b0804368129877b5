// Placement as a pure function: (what nodes have free, what a job needs) -> rank map + reason.
//
// Policy "pack": as few nodes as possible, ties by NodeId, so equal input gives equal output. Nodes
// that held ranks before come first and their ranks keep their numbers where the new world allows; processes
// that wait for a place go on where they are, whatever would be packed closer.
// CPUs are oversubscribed, where that is allowed, for `min` ranks or those that a person asked for, and not
// to reach `max`. Topology-aware policies become further files with the same signature.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "job/spec/hosts.h"

namespace gtrain::plan {

// One node as the placement sees it. "free" is what no other job holds.
struct NodeView {
  NodeId id;
  std::string hostname;
  std::map<std::string, std::string> labels;
  int cpus = 0;  // hardware threads
  int cpus_free = 0;
  std::set<int> cpus_bound;   // indices some rank is bound to
  std::vector<int> cpu_numa;  // index = CPU; empty, or -1 for one: unknown
  uint64_t memory_bytes = 0;
  uint64_t memory_free_bytes = 0;
  std::vector<std::string> gpu_models;  // index = GPU
  std::vector<int> gpu_numa;            // index = GPU; empty, or -1 for one: unknown
  std::vector<int> gpus_free;           // ascending; of which no rank has a part
  std::map<int, int> gpu_shares;        // of those that ranks share: how much is taken, in thousandths
  std::string unusable;                 // why it takes no ranks at all; empty = it does
  bool operator==(const NodeView&) const = default;
};

// Processes that wait on a node for their place in the next generation, by what they have.
struct Waiting {
  int members = 0, others = 0;  // members have what was trained
  std::vector<int> gpus;        // of the node: those of each process in turn, members first
};

// The demand of one job. Exactly one of ranks and nodes is counted, by `count_nodes`.
struct Demand {
  bool count_nodes = false;
  int min = 1;  // ranks, or nodes
  int max = 1;
  int unit = 1;  // the world size is a multiple of it: the ranks of one copy of the model
  std::optional<int>
      ranks_per_node;         // exact; nullopt: as many as fit, or GPUs of the node (else 1) for count_nodes
  std::optional<int> cpus;    // per rank; nullopt = auto: one each at least, not bound
  uint64_t memory_bytes = 0;  // per rank; 0 = not limited
  std::optional<int> gpus;    // per rank; nullopt = auto: one where there are GPUs
  int gpu_share = 0;          // thousandths of one GPU per rank, instead of `gpus`; 0: whole ones
  bool all_gpus = false;      // `per: node` with auto: one process gets every GPU of the node
  std::vector<std::string> gpu_types;  // any of; matched inside the model, ignoring case
  std::map<std::string, std::string> labels;
  // Hostnames, whole or without their domain, or NodeIds.
  spec::HostNames hosts;    // only there; empty: wherever
  spec::HostNames exclude;  // not there, whatever `hosts` says
  spec::HostNames rank0;    // where rank 0 goes, on one of these; empty: wherever
  // Where each rank goes, by rank; empty: wherever. One of host_names, and which of the places there, counted
  // in GPUs of a rank; -1: any.
  struct RankHost {
    int host = 0, slot = -1;
  };
  std::vector<std::string> host_names;
  std::vector<RankHost> rank_hosts;
  int asked = 0;   // by a person while the job ran, of min to max; 0: nobody did
  int spares = 0;  // of max: what waits beside the ranks, so that words do not call it one
  bool oversubscribe_cpus = false;
  std::vector<NodeId> previous;                 // index = rank of the last generation
  std::vector<std::vector<int>> previous_gpus;  // of each; may be shorter
  std::map<NodeId, Waiting> waiting;  // they go on where there is room, before what is left is packed
};

struct RankSlot {
  int rank = 0;
  int local_rank = 0;
  NodeId node;
  std::vector<int> cpus;  // bound to; empty = not bound
  std::vector<int> gpus;
  bool operator==(const RankSlot&) const = default;
};

// The number of ranks that one node could take, and the reason why it takes no more.
struct NodeVerdict {
  NodeId node;
  std::string hostname;
  int room = 0;        // ranks
  std::string limit;   // "cpus: 2 of 4 free", "excluded by where.exclude", ...
  std::string remedy;  // of what keeps it from being a candidate at all; empty: more room would do
};

struct Placement {
  bool placed = false;
  std::vector<RankSlot> ranks;  // index = rank
  std::vector<NodeId> nodes;    // index = GROUP_RANK
  std::string reason;           // one sentence, also when not placed
  std::vector<std::string> warnings;
  std::vector<NodeVerdict> verdicts;  // NodeId order
  // Where the job names hosts that do not take what is to go there: what would help, and those of them that
  // are up. What other nodes have does not matter then.
  std::string remedy;
  std::vector<NodeId> named;
};

Placement Place(const std::vector<NodeView>& nodes, const Demand& demand);

// Returns the same nodes with all resources free: can this job ever run here?
std::vector<NodeView> Emptied(std::vector<NodeView> nodes);

// Prints a placement for `gtrain plan` and `gtrain why`.
std::string Print(const Placement& placement);

}  // namespace gtrain::plan
