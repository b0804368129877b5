// A snapshot of the cluster in, a plan out: which slot each rank gets, what that costs, what was rejected,
// and why a job has no place. PURE, so the head may call it on another thread and check the plan against what
// changed meanwhile.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "topology/place/bound.h"
#include "topology/place/cost.h"
#include "topology/place/fabric.h"
#include "topology/place/mesh.h"
#include "topology/topology.h"

namespace gtrain::topology {

using MachineNames = std::set<std::string, std::less<>>;

struct PlanRequest {
  Mesh mesh;
  MachineNames exclude;                       // whole, or without the domain
  std::map<std::string, std::string> labels;  // that a machine must have
  std::vector<std::string> gpu_types;  // any of; matched inside of the model, ignoring case; empty: all
  int spares = 0;                      // slots beside the ranks, for processes that wait
  bool gpus = false;                   // only slots that have GPUs
  MachineNames hosts = {};             // only these, as `exclude`; empty: all
  int ranks_per_machine = 0;           // exactly; 0: as they fit
  MachineNames rank0 =
      {};  // with ranks_per_machine: one of these machines is to be among those that are taken
};

// What keeps slots from being taken.
struct Obstacle {
  std::string constraint;  // "excluded by where.exclude"
  int slots = 0;
  std::string machines;  // hostlist
  std::string remedy;
};

struct Candidate {
  std::string policy;  // "mesh-aware"
  Cost cost;
};

struct Plan {
  bool placed = false;
  std::string reason;                 // one sentence, also when not placed
  std::vector<std::string> unblocks;  // when not placed: each of these would do, or help
  std::string policy;
  std::vector<int32_t> slot_of_rank;
  std::vector<int32_t> spare_slots;  // PlanRequest::spares of them, the best replacements first
  Cost cost;
  Bound bound;
  std::vector<Candidate> rejected;
  std::vector<Obstacle> obstacles;
};

// The machines that one of the names means: those of that name, or the only one called so without its domain.
std::set<int> MachinesCalled(const Topology& topology, const MachineNames& names);

// The slots that the request may have, ascending.
std::vector<int32_t> UsableSlots(const Topology& topology, const Fabric& fabric, const PlanRequest& request,
                                 std::vector<Obstacle>* obstacles = nullptr);

// Of the machines that have `each` of these places or more, the first `each`, by machine.
std::vector<std::vector<int32_t>> WholeMachines(const Fabric& fabric, const std::vector<int32_t>& usable,
                                                size_t each);

// `count` free ones of them at most, the best replacements first: those that have many ranks near, in the
// smallest domains first, on machines without ranks.
std::vector<int32_t> SpareSlots(const Fabric& fabric, const std::vector<int32_t>& usable,
                                const std::vector<int32_t>& slot_of_rank, int count);

// The plan of the policy with the least predicted time. `usable`, ascending: at least as many as ranks and
// spares.
Plan PlanOn(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable, int spares);

// Likewise, on what the request may have, or why it has no place.
Plan MakePlan(const Topology& topology, const Fabric& fabric, const PlanRequest& request);

// A rank that has to go elsewhere. Ranks that no Move names stay where they are.
struct Move {
  int rank = 0;
  int32_t from = -1, to = -1;  // slots; from -1: it had none
  bool operator==(const Move&) const = default;
};

struct Replacement {
  bool done = false;
  std::string reason;  // when not
  std::vector<Move> moves;
};

// New slots for the ranks whose slot is lost: -1 in `slot_of_rank`, or of a machine of `lost_machines`. Only
// these ranks move. A machine that takes all ranks of a lost one is preferred, the one that adds least to
// Cost::total; else each rank gets the best single slot. `free_slots`: usable and taken by no rank,
// ascending.
Replacement Replace(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank,
                    const std::vector<int32_t>& free_slots, const std::vector<int>& lost_machines);
// Likewise for these ranks, ascending in each group; a group was on one machine.
Replacement ReplaceGroups(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank,
                          const std::vector<int32_t>& free_slots,
                          const std::vector<std::vector<int>>& groups);

// "{dp: 2, tp: 4}".
std::string PrintMesh(const Mesh& mesh);

// "1.68 s", "12.5 ms", "40.0 us".
std::string PrintSeconds(double seconds);

// The domains that placement sees of a topology, widest last: how many of each kind, with what leaves one,
// and what was assumed. Lines.
std::string PrintDomains(const Fabric& fabric);

// The tables of `gtrain plan`. `ranks_max` rows of the rank map at most, then how many more there are.
std::string PrintPlan(const Topology& topology, const Fabric& fabric, const Mesh& mesh, const Plan& plan,
                      size_t ranks_max);

}  // namespace gtrain::topology
