// `gtrain plan`: the placement a job would get where `gtrain launch` with the same flags would run it, or on
// the nodes that --nodes makes up. Changes nothing.
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "job/plan/by_topology.h"
#include "job/plan/place.h"
#include "job/spec/print.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/rankfile.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/topology_plan.h"
#include "launcher/cli/verbs.h"
#include "runtime/agent/node.h"
#include "runtime/core/head/gang.h"
#include "runtime/detect/inventory.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

struct PlanNodes {
  std::vector<plan::NodeView> views;
  std::string where;             // "this machine"
  bool on_this_machine = false;  // whose CPUs ranks may share
  topology::Topology topology;   // that launch would follow; no machines: none
};

PlanNodes ThisMachine() {
  core::NodeRecord node;
  node.hostname = agent::Hostname();
  node.id = NodeId(node.hostname);
  node.inventory = detect::DetectInventory({});
  return {{core::ViewOf(node)}, "this machine", true};
}

core::NodeRecord NodeOf(const std::string& hostname, int cpus, int gpus) {
  core::NodeRecord node;
  node.id = NodeId(hostname);
  node.hostname = hostname;
  node.inventory.cpus = cpus;
  node.inventory.memory_bytes = uint64_t{1} << 50;
  for (int i = 0; i < gpus; ++i) node.inventory.gpus.push_back({absl::StrCat("GPU-", i), "any", 0, -1});
  return node;
}

// "host:cpus" or "host:cpus:gpus", comma-separated.
absl::StatusOr<PlanNodes> GivenNodes(const std::string& text) {
  PlanNodes nodes{{}, "the given nodes"};
  std::set<std::string> names;
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::vector<std::string> parts = absl::StrSplit(item, ':');
    int cpus = 0;
    int gpus = 0;
    const bool good = (parts.size() == 2 || parts.size() == 3) && !parts[0].empty() &&
                      absl::SimpleAtoi(parts[1], &cpus) && cpus > 0 && cpus <= 8192 &&
                      (parts.size() == 2 || (absl::SimpleAtoi(parts[2], &gpus) && gpus >= 0 && gpus <= 1024));
    if (!good) {
      return absl::InvalidArgumentError(
          absl::StrCat("--nodes: ", spec::Shown(item), " must be HOST:CPUS or HOST:CPUS:GPUS"));
    }
    if (!names.insert(parts[0]).second)
      return absl::InvalidArgumentError(absl::StrCat("--nodes: ", spec::Shown(parts[0]), " is given twice"));
    nodes.views.push_back(core::ViewOf(NodeOf(SafeText(parts[0]), cpus, gpus)));
    if (nodes.views.size() > 10'000) return absl::InvalidArgumentError("--nodes: more than 10000 nodes");
  }
  return nodes;
}

// An older head does not say what is unusable. What agents say of themselves is on a line of its own,
// whatever they put into it.
plan::NodeView ViewOf(const json& node) {
  plan::NodeView view;
  view.id = NodeId(node.at("id").get<std::string>());
  view.hostname = SafeText(node.at("hostname").get<std::string>());
  for (const auto& [key, value] : node.at("labels").get<std::map<std::string, std::string>>())
    view.labels[SafeText(key)] = SafeText(value);
  view.cpus = node.at("cpus").get<int>();
  view.cpus_free = node.at("cpus_free").get<int>();
  view.cpus_bound = node.value("cpus_bound", std::set<int>());
  view.memory_bytes = node.at("memory_bytes").get<uint64_t>();
  view.memory_free_bytes = node.at("memory_free_bytes").get<uint64_t>();
  view.cpu_numa = node.value("cpu_numa", std::vector<int>());
  for (const json& gpu : node.at("gpus")) {
    view.gpu_models.push_back(gpu.at("model").get<std::string>());
    view.gpu_numa.push_back(gpu.value("numa", -1));
  }
  view.gpus_free = node.at("gpus_free").get<std::vector<int>>();
  for (const json& share : node.value("gpu_shares", json::array()))
    view.gpu_shares[share.at("gpu").get<int>()] = share.at("taken").get<int>();
  const std::string state = node.at("state").get<std::string>();
  view.unusable = SafeText(node.value("unusable", state == "alive" ? "" : state));
  return view;
}

// The nodes as they are now: resources that other jobs hold are not free.
absl::StatusOr<PlanNodes> NodesOf(Cluster& cluster) {
  PlanNodes nodes;
  nodes.where = cluster.is_own() ? absl::StrCat("the ", cluster.name(), " cluster")
                                 : absl::StrCat("cluster ", cluster.name());
  nodes.on_this_machine = cluster.backend->on_this_machine();
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, core::ClientNodes{}));
  // A head from before 0.7 answers nothing, and packs.
  if (absl::StatusOr<topology::Topology> topology = TopologyOfHead(cluster); topology.ok())
    nodes.topology = *std::move(topology);
  try {
    const json answer = json::parse(text);
    for (const json& node : answer.at("nodes")) nodes.views.push_back(ViewOf(node));
  } catch (const json::exception& e) {
    return absl::InternalError(absl::StrCat("the head's list of nodes is not understood: ", e.what()));
  }
  return nodes;
}

absl::StatusOr<PlanNodes> ChooseNodes(const Args& args) {
  if (args.Has("nodes")) {
    if (!args.Has("context")) return GivenNodes(args.Get("nodes"));
    return absl::InvalidArgumentError("--nodes and --context exclude each other");
  }
  absl::StatusOr<Cluster> cluster = OpenCluster(args, Start::kNever);
  if (cluster.ok()) return NodesOf(*cluster);
  if (!absl::IsNotFound(cluster.status())) return cluster.status();
  // A local cluster that does not run would have this machine for itself.
  GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
  if (backend->on_this_machine()) return ThisMachine();
  return cluster.status();
}

json ToJson(const plan::Placement& placement) {
  json ranks = json::array();
  for (const plan::RankSlot& slot : placement.ranks) {
    ranks.push_back({{"rank", slot.rank},
                     {"local_rank", slot.local_rank},
                     {"node", slot.node.value},
                     {"cpus", slot.cpus},
                     {"gpus", slot.gpus}});
  }
  json nodes = json::array();
  for (const plan::NodeVerdict& v : placement.verdicts) {
    nodes.push_back({{"node", v.node.value}, {"hostname", v.hostname}, {"room", v.room}, {"limit", v.limit}});
  }
  return {{"placed", placement.placed},
          {"reason", placement.reason},
          {"warnings", placement.warnings},
          {"ranks", ranks},
          {"nodes", nodes}};
}

std::vector<PlacedRank> PlacedRanksOf(const plan::Placement& placement) {
  std::map<NodeId, std::string> hostnames;
  for (const plan::NodeVerdict& verdict : placement.verdicts) hostnames[verdict.node] = verdict.hostname;
  std::vector<PlacedRank> ranks;
  for (const plan::RankSlot& slot : placement.ranks)
    ranks.push_back({slot.rank, slot.local_rank, slot.node.value, hostnames[slot.node], slot.gpus});
  return ranks;
}

absl::StatusOr<int> Plan(const Args& args) {
  GT_ASSIGN_OR_RETURN(JobInput input, ReadJob(args));
  if (args.Has("traffic")) GT_RETURN_IF_ERROR(SetTraffic(args.Get("traffic"), input.spec));
  if (args.Has("topology")) {
    if (!args.Has("nodes") && !args.Has("context")) return PlanOnTopology(args, input);
    return absl::InvalidArgumentError("--topology, --nodes and --context exclude each other");
  }
  GT_ASSIGN_OR_RETURN(const PlanNodes nodes, ChooseNodes(args));
  const plan::Demand demand = core::DemandOf(input.spec, nodes.on_this_machine);
  plan::Placement placement =
      plan::ByTopology(nodes.views, demand, plan::Place(nodes.views, demand),
                       plan::KnownTopology(nodes.topology), input.spec.mesh, {}, input.spec.traffic);
  if (nodes.on_this_machine && placement.placed) {  // as launch refuses it
    if (const std::string why = agent::TooManyRanks(placement.ranks.size()); !why.empty()) {
      placement.placed = false;
      placement.reason = why;
      placement.ranks.clear();
      placement.nodes.clear();
      placement.warnings.clear();
    }
  }
  if (args.Has("rankfile-out") && placement.placed)
    GT_RETURN_IF_ERROR(WriteRankfile(args.Get("rankfile-out"), PlacedRanksOf(placement)));
  if (args.Has("json")) {
    Print(ToJson(placement).dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  } else {
    Print(absl::StrCat("job ", input.spec.name, " (hash ", spec::JobHash(input.spec).substr(0, 12), ") on ",
                       SafeText(nodes.where), "\n", SafeLines(plan::Print(placement), ""), "\n"));
  }
  return placement.placed ? kDone : kFailed;
}

int RunPlan(const Args& args) {
  const absl::StatusOr<int> code = Plan(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb PlanVerb() {
  Verb verb;
  verb.name = "plan";
  verb.summary = "Show where the ranks of a job would go";
  verb.usage = "[flags] JOB.yaml | -- CMD ARGS";
  verb.details =
      "On the cluster that launch would use: its nodes as they are now, with what other jobs hold; on this\n"
      "machine where no local cluster runs. Starts and changes nothing.\n"
      "Exit code 0 when the job fits, 1 when it does not (with the numbers), 2 when the file is wrong.\n\n"
      "  gtrain plan job.yaml --context lab             on the nodes of lab\n"
      "  gtrain plan job.yaml --hosts tux[0-3,12]       on these of them\n"
      "  gtrain plan job.yaml --rankfile-out ranks.txt  where each rank would go, for launch --rankfile\n"
      "  gtrain plan job.yaml --nodes a:8,b:8           on two nodes of 8 hardware threads\n"
      "  gtrain plan -n 16 --nodes a:64:8,b:64:8 -- python train.py\n"
      "  gtrain plan job.yaml --topology cluster.json   on the cluster of a file: the ranks of the mesh "
      "where\n"
      "                                                 a step communicates least, predicted, with what "
      "bounds it";
  verb.flags = JobFlags();
  verb.flags.push_back({"nodes", '\0', "HOST:CPUS[:GPUS],...", "nodes to plan for that need not exist"});
  verb.flags.push_back(ContextFlag());
  for (Flag& flag : TopologyFlags()) verb.flags.push_back(std::move(flag));
  verb.flags.push_back({"json", '\0', "", "one JSON document: placed, reason, warnings, ranks, nodes"});
  verb.words_max = 1;
  verb.takes_rest = true;
  verb.run = RunPlan;
  return verb;
}

}  // namespace gtrain::cli
