#include "launcher/cli/topology_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/plan/by_topology.h"
#include "job/spec/hosts.h"
#include "job/spec/mesh.h"
#include "job/spec/values.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "topology/json.h"
#include "topology/place/plan.h"
#include "topology/place/rankfile.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using topology::Fabric;
using topology::Mesh;
using topology::Topology;

constexpr size_t kRanksShown = 64;

absl::Status Wrong(const std::string& message) { return absl::InvalidArgumentError(message); }

}  // namespace

absl::Status SetTraffic(const std::string& text, spec::JobSpec& job) {
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::vector<std::string> halves = absl::StrSplit(item, absl::MaxSplits('=', 1));
    const bool has_unit = halves.size() == 2 && !halves[1].empty() && !absl::ascii_isdigit(halves[1].back());
    const absl::StatusOr<uint64_t> bytes = has_unit ? ParseBytes(halves[1]) : Wrong("no size");
    if (!bytes.ok() || *bytes == 0)
      return Wrong(absl::StrCat("--traffic: ", spec::Shown(item),
                                " must be AXIS=SIZE, a whole number and a unit: tp=4GB, dp=400MB"));
    if (!spec::HasAxis(job.mesh, halves[0]))
      return Wrong(absl::StrCat("--traffic: ", spec::Shown(item), ": the job's mesh has no such axis",
                                job.mesh.empty() ? " but dp" : ""));
    job.traffic[halves[0]] = *bytes;
  }
  return absl::OkStatus();
}

namespace {

// As many ranks as the job may have and the topology takes, in whole copies of the model and whole machines.
int64_t RanksOf(const spec::JobSpec& job, const Topology& topology, const Fabric& fabric,
                const topology::PlanRequest& request) {
  const std::vector<int32_t> slots = UsableSlots(topology, fabric, request);
  int64_t usable = std::ssize(slots), unit = spec::ShapeOf(job.mesh).model_ranks;
  if (const int64_t each = request.ranks_per_machine; each > 0) {
    usable = std::ssize(WholeMachines(fabric, slots, static_cast<size_t>(each))) * each;
    unit = std::lcm(unit, each);
  }
  spec::Range range = job.ranks.value_or(spec::Range{});
  if (job.nodes) {
    const int each =
        job.ranks_per_node.value_or(topology.shapes.empty() ? 1 : topology::SlotsOf(topology.shapes[0]));
    range = {job.nodes->min * each, job.nodes->max * each};
  }
  const int64_t fits = std::min<int64_t>(range.max, (usable - request.spares) / unit * unit);
  return std::max<int64_t>(fits, range.min);
}

struct Planned {
  Topology topology;
  Fabric fabric;
  topology::PlanRequest request;
  topology::Plan plan;
  std::vector<topology::Move> moves;  // with --rankfile
};

std::map<int, int> RanksOfMachines(const Fabric& fabric, const std::vector<int32_t>& slots) {
  std::map<int, int> ranks;
  for (const int32_t slot : slots) {
    if (slot >= 0) ++ranks[fabric.slots[slot].machine];
  }
  return ranks;
}

// With `ranks_per_node`: of the free places only as many as a machine may still have ranks, and none of a
// machine that has fewer.
void LeaveWholeMachines(const Planned& planned, const std::vector<int32_t>& kept, std::set<int32_t>& free) {
  const int each = planned.request.ranks_per_machine;
  if (each == 0) return;
  std::map<int, int> ranks = RanksOfMachines(planned.fabric, kept);
  std::erase_if(free, [&](int32_t slot) { return ++ranks[planned.fabric.slots[slot].machine] > each; });
  std::erase_if(free, [&](int32_t slot) { return ranks[planned.fabric.slots[slot].machine] < each; });
}

// What keeps the places from being `ranks_per_node` on each machine; empty: nothing.
std::string OddMachine(const Planned& planned, const std::vector<int32_t>& slots) {
  const int each = planned.request.ranks_per_machine;
  for (const auto& [machine, ranks] : RanksOfMachines(planned.fabric, slots)) {
    if (each > 0 && ranks != each)
      return absl::StrCat(planned.topology.machines[machine].name, " would have ", ranks, " ranks, and ",
                          "ranks_per_node is ", each);
  }
  return "";
}

// The ranks keep the places of a rankfile; those whose place is gone move. What a new placement would cost
// stands beside it.
absl::Status KeepPlaces(const std::string& path, Planned& planned) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, topology::kRankfileBytesMax));
  GT_ASSIGN_OR_RETURN(std::vector<int32_t> slots,
                      topology::ParseRankfile(text, path, planned.topology, planned.fabric));
  const Mesh& mesh = planned.request.mesh;
  if (static_cast<int64_t>(slots.size()) != mesh.ranks())
    return Wrong(absl::StrCat(path, " has ", slots.size(), " ranks, the job has ", mesh.ranks(),
                              ": without --rankfile all of them are placed anew"));
  const std::vector<int32_t> usable = UsableSlots(planned.topology, planned.fabric, planned.request);
  std::set<int32_t> free(usable.begin(), usable.end());
  for (int32_t& slot : slots) {
    if (free.erase(slot) == 0) slot = -1;
  }
  LeaveWholeMachines(planned, slots, free);
  const topology::Replacement moved = Replace(planned.fabric, mesh, slots, {free.begin(), free.end()}, {});
  topology::Plan& plan = planned.plan;
  const auto refuse = [&](const std::string& reason) {
    plan = {};
    plan.reason = reason;
    return absl::OkStatus();
  };
  if (!moved.done) return refuse(moved.reason);
  for (const topology::Move& move : moved.moves) slots[move.rank] = move.to;
  if (const std::string odd = OddMachine(planned, slots); !odd.empty())
    return refuse(absl::StrCat(path, ": ", odd));
  plan.rejected.insert(plan.rejected.begin(), {absl::StrCat(plan.policy, ", from scratch"), plan.cost});
  plan.slot_of_rank = std::move(slots);
  plan.policy = "kept";
  plan.cost = Evaluate(planned.fabric, mesh, plan.slot_of_rank);
  plan.reason = absl::StrCat(mesh.ranks() - static_cast<int64_t>(moved.moves.size()), " ranks stay where ",
                             path, " has them, ", moved.moves.size(), " move");
  plan.spare_slots.clear();
  planned.moves = moved.moves;
  return absl::OkStatus();
}

// The ranks where `where.ranks` has them, on the slots it names or else the first that are left there.
void TakePlaces(const spec::JobSpec& job, Planned& planned) {
  topology::Plan& plan = planned.plan;
  const std::vector<int32_t> usable = UsableSlots(planned.topology, planned.fabric, planned.request);
  std::set<int32_t> free(usable.begin(), usable.end());
  std::vector<int32_t> slots(plan.slot_of_rank.size(), -1);
  for (const bool named : {true, false}) {
    for (const spec::RanksOn& place : job.where_ranks) {
      if (place.slots.empty() == named) continue;
      const std::set<int> machines = MachinesCalled(planned.topology, {place.host});
      for (size_t i = 0; i < place.ranks.size(); ++i) {
        auto slot = free.end();
        if (machines.size() == 1) {
          const auto [first, end] = planned.fabric.slots_of_machine[*machines.begin()];
          slot = named ? free.find(first + place.slots[i]) : free.lower_bound(first);
          if (slot != free.end() && *slot >= end) slot = free.end();
        }
        if (slot == free.end()) {
          plan = {};
          plan.reason = absl::StrCat("rank ", place.ranks[i], " goes on ", place.host,
                                     named ? absl::StrCat(" slot ", place.slots[i]) : "",
                                     " by where.ranks, and the job may have no such place");
          return;
        }
        slots[place.ranks[i]] = *slot;
        free.erase(slot);
      }
    }
  }
  plan.rejected.insert(plan.rejected.begin(), {plan.policy, plan.cost});
  plan.slot_of_rank = std::move(slots);
  plan.policy = "where.ranks";
  plan.cost = Evaluate(planned.fabric, planned.request.mesh, plan.slot_of_rank);
  plan.reason = absl::StrCat(plan.slot_of_rank.size(), " ranks where where.ranks has them");
  plan.spare_slots.clear();
}

// Rank 0 on its host: the coordinates are shifted, or, where the plan has no rank there, the others are
// placed around it.
void MoveRank0(const std::string& host, Planned& planned) {
  const std::set<int> machines = MachinesCalled(planned.topology, spec::NamesOf({host}));
  topology::Plan& plan = planned.plan;
  const Fabric& fabric = planned.fabric;
  const Mesh& mesh = planned.request.mesh;
  const auto is_there = [&](int32_t slot) { return machines.contains(fabric.slots[slot].machine); };
  const auto refuse = [&](absl::string_view why) {
    plan.placed = false;
    plan.reason = absl::StrCat("rank 0 goes on ", host, " by where.rank0, and ", why);
  };
  if (const auto there = std::ranges::find_if(plan.slot_of_rank, is_there);
      there != plan.slot_of_rank.end()) {
    plan.slot_of_rank = topology::Shifted(mesh, plan.slot_of_rank, there - plan.slot_of_rank.begin());
  } else {
    std::vector<int32_t> free = UsableSlots(planned.topology, fabric, planned.request);
    const auto first = std::ranges::find_if(free, is_there);
    if (first == free.end() || planned.request.ranks_per_machine > 0)
      return refuse("the job may have no place there");
    std::vector<int32_t> slots(plan.slot_of_rank.size(), -1);
    slots[0] = *first;
    free.erase(first);
    const topology::Replacement around = Replace(fabric, mesh, slots, free, {});
    if (!around.done) return refuse(around.reason);
    for (const topology::Move& move : around.moves) slots[move.rank] = move.to;
    plan.slot_of_rank = std::move(slots);
    plan.policy = "around rank 0";
    plan.spare_slots.clear();
  }
  plan.cost = Evaluate(fabric, mesh, plan.slot_of_rank);
}

json ToJson(const Planned& planned) {
  const topology::Plan& plan = planned.plan;
  json ranks = json::array(), rejected = json::array(), moves = json::array(), axes = json::array();
  const auto place = [&](int32_t slot) {
    const int machine = planned.fabric.slots[slot].machine;
    json gpus = json::array();
    for (int g = 0; g < planned.fabric.gpus_per_slot; ++g) {
      const int gpu = planned.fabric.gpus[static_cast<size_t>(slot) * planned.fabric.gpus_per_slot + g];
      if (gpu >= 0) gpus.push_back(gpu);
    }
    return json{{"machine", planned.topology.machines[machine].name},
                {"slot", slot - planned.fabric.slots_of_machine[machine].first},
                {"gpus", gpus}};
  };
  for (size_t rank = 0; rank < plan.slot_of_rank.size(); ++rank) {
    ranks.push_back(place(plan.slot_of_rank[rank]));
    ranks.back()["rank"] = rank;
  }
  for (const topology::Candidate& c : plan.rejected)
    rejected.push_back({{"policy", c.policy}, {"seconds", c.cost.seconds}});
  for (const topology::Move& move : planned.moves) {
    moves.push_back(place(move.to));
    moves.back()["rank"] = move.rank;
  }
  for (size_t a = 0; a < plan.cost.axes.size(); ++a) {
    const topology::Axis& axis = planned.request.mesh.axes[a];
    axes.push_back(
        {{"name", axis.name}, {"size", axis.size}, {"gb", axis.gb}, {"seconds", plan.cost.axes[a].seconds}});
  }
  return {{"placed", plan.placed},
          {"reason", plan.reason},
          {"policy", plan.policy},
          {"seconds", plan.cost.seconds},
          {"bound_seconds", plan.bound.seconds},
          {"axes", axes},
          {"ranks", ranks},
          {"moves", moves},
          {"rejected", rejected},
          {"unblocks", plan.unblocks},
          {"assumed", planned.fabric.assumed}};
}

absl::StatusOr<Planned> MakePlanned(const Args& args, const spec::JobSpec& job) {
  if (args.Has("rankfile") && !job.where_rank0.empty())
    return Wrong("--rankfile says where rank 0 is, and so does where.rank0: keep one");
  if (args.Has("rankfile") && !job.where_ranks.empty())
    return Wrong("--rankfile says where the ranks are, and so does where.ranks: keep one");
  if (job.resources.gpu_share > 0)
    return Wrong("--topology plans ranks with GPUs of their own, and with a part of a GPU several share one");
  if (job.per == spec::Per::kNode)
    return Wrong("--topology plans ranks with GPUs of their own; a job with `per: node` has none");
  Planned planned;
  GT_ASSIGN_OR_RETURN(planned.topology, ReadTopology(args.Get("topology")));
  // Beside names, which the parser has checked, it is printed as part of a line.
  for (topology::Machine& machine : planned.topology.machines) machine.unusable = SafeText(machine.unusable);
  GT_ASSIGN_OR_RETURN(planned.fabric,
                      topology::Compile(planned.topology, std::max(1, job.resources.gpus.value_or(1))));
  topology::PlanRequest& request = planned.request;
  request.hosts = spec::NamesOf(job.where_hosts);
  request.exclude = spec::NamesOf(job.where_exclude);
  request.labels = job.where_labels;
  request.gpu_types = job.resources.gpu_type;
  request.gpus = job.resources.gpus.value_or(0) > 0;
  // With `nodes` a machine has so many ranks, and spares are machines, too.
  request.ranks_per_machine = job.nodes ? job.ranks_per_node.value_or(0) : 0;
  request.spares = job.spares * std::max(1, request.ranks_per_machine);
  if (!job.where_rank0.empty()) request.rank0 = spec::NamesOf({job.where_rank0});
  const int64_t ranks = RanksOf(job, planned.topology, planned.fabric, request);
  request.mesh = plan::MeshOf(job.mesh, ranks, job.traffic);
  planned.plan = MakePlan(planned.topology, planned.fabric, request);
  if (args.Has("rankfile") && planned.plan.placed)
    GT_RETURN_IF_ERROR(KeepPlaces(args.Get("rankfile"), planned));
  if (!job.where_ranks.empty() && planned.plan.placed) TakePlaces(job, planned);
  if (!job.where_rank0.empty() && planned.plan.placed) MoveRank0(job.where_rank0, planned);
  return planned;
}

}  // namespace

absl::StatusOr<Topology> ReadTopology(const std::string& path) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, topology::kTopologyBytesMax));
  return topology::ParseTopology(text, path);
}

absl::StatusOr<Topology> TopologyOfHead(Cluster& cluster, std::string* source) {
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, core::ClientTopology{}, absl::Seconds(5)));
  GT_RETURN_IF_ERROR(ExpectKey(text, "topology"));
  const json answer = json::parse(text);
  if (source != nullptr) *source = answer.value("source", "");
  if (answer["topology"].is_null()) return Topology();
  return topology::ParseTopology(answer["topology"].dump(), "the head's topology");
}

std::vector<Flag> TopologyFlags() {
  return {
      {"topology", '\0', "FILE", "plan for the cluster of this file (gtrain topology)"},
      {"traffic", '\0', "AXIS=SIZE,...", "what a rank sends a step along an axis, over the job's `traffic`"},
      {"rankfile-out", '\0', "FILE", "write the plan as a rankfile"}};
}

absl::StatusOr<int> PlanOnTopology(const Args& args, const JobInput& input) {
  GT_ASSIGN_OR_RETURN(const Planned planned, MakePlanned(args, input.spec));
  const topology::Plan& plan = planned.plan;
  if (args.Has("rankfile-out") && plan.placed) {
    GT_RETURN_IF_ERROR(
        WriteFileDurable(args.Get("rankfile-out"),
                         topology::PrintRankfile(planned.topology, planned.fabric, plan.slot_of_rank), 0644));
  }
  if (args.Has("json")) {
    Print(ToJson(planned).dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  } else {
    std::string text =
        absl::StrCat("job ", input.spec.name, " on the topology ", args.Get("topology"), "\n",
                     PrintPlan(planned.topology, planned.fabric, planned.request.mesh, plan, kRanksShown));
    for (const topology::Move& move : planned.moves) {
      const int machine = planned.fabric.slots[move.to].machine;
      absl::StrAppend(&text, "moves: rank ", move.rank, " to ", planned.topology.machines[machine].name,
                      " slot ", move.to - planned.fabric.slots_of_machine[machine].first, "\n");
    }
    Print(SafeLines(text, "") + "\n");
  }
  return plan.placed ? kDone : kFailed;
}

}  // namespace gtrain::cli
