// `gtrain plan`: the placement a job would get, without touching a cluster. Nodes are this machine or what
// --nodes says.
#include <sched.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/plan/place.h"
#include "launcher/spec/print.h"
#include "launcher/spec/values.h"
#include "runtime/core/gang.h"

namespace gtrain::cli {
namespace {

core::NodeRecord NodeOf(const std::string& hostname, int cpus, int gpus, uint64_t memory) {
  core::NodeRecord node;
  node.id = NodeId(hostname);
  node.hostname = hostname;
  node.inventory.cpus = cpus;
  node.inventory.memory_bytes = memory;
  for (int i = 0; i < gpus; ++i) node.inventory.gpus.push_back({absl::StrCat("GPU-", i), "any", 0, -1});
  return node;
}

core::NodeRecord ThisMachine() {
  cpu_set_t set;
  const int cpus = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  const uint64_t memory =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) name[0] = '\0';
  return NodeOf(name[0] == '\0' ? "localhost" : name, cpus, 0, memory);
}

// "host:cpus" or "host:cpus:gpus", comma-separated.
absl::StatusOr<std::vector<core::NodeRecord>> ParseNodes(const std::string& text) {
  std::vector<core::NodeRecord> nodes;
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
    nodes.push_back(NodeOf(parts[0], cpus, gpus, uint64_t{1} << 50));
    if (nodes.size() > 10'000) return absl::InvalidArgumentError("--nodes: more than 10000 nodes");
  }
  return nodes;
}

nlohmann::json ToJson(const plan::Placement& placement) {
  nlohmann::json ranks = nlohmann::json::array();
  for (const plan::RankSlot& slot : placement.ranks) {
    ranks.push_back({{"rank", slot.rank},
                     {"local_rank", slot.local_rank},
                     {"node", slot.node.value},
                     {"cpus", slot.cpus},
                     {"gpus", slot.gpus}});
  }
  nlohmann::json nodes = nlohmann::json::array();
  for (const plan::NodeVerdict& v : placement.verdicts) {
    nodes.push_back({{"node", v.node.value}, {"hostname", v.hostname}, {"room", v.room}, {"limit", v.limit}});
  }
  return {{"placed", placement.placed},
          {"reason", placement.reason},
          {"warnings", placement.warnings},
          {"ranks", ranks},
          {"nodes", nodes}};
}

int Run(const Args& args) {
  const absl::StatusOr<JobInput> input = ReadJob(args);
  if (!input.ok()) return Report(input.status());
  std::vector<core::NodeRecord> nodes = {ThisMachine()};
  const bool local = !args.Has("nodes");
  if (!local) {
    absl::StatusOr<std::vector<core::NodeRecord>> given = ParseNodes(args.Get("nodes"));
    if (!given.ok()) return Report(given.status());
    nodes = *std::move(given);
  }
  std::vector<plan::NodeView> views;
  for (const core::NodeRecord& node : nodes) views.push_back(core::ViewOf(node));
  const plan::Placement placement = plan::Place(views, core::DemandOf(input->spec, local));
  if (args.Has("json")) {
    Print(ToJson(placement).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  } else {
    Print(absl::StrCat("job ", input->spec.name, " (hash ", spec::JobHash(input->spec).substr(0, 12), ") on ",
                       local ? "this machine" : "the given nodes", "\n", plan::Print(placement)));
  }
  return placement.placed ? kDone : kFailed;
}

}  // namespace

Verb PlanVerb() {
  Verb verb;
  verb.name = "plan";
  verb.summary = "Show where the ranks of a job would go; needs no cluster";
  verb.usage = "[flags] JOB.yaml | -- CMD ARGS";
  verb.details =
      "Exit code 0 when the job fits, 1 when it does not (with the numbers), 2 when the file is wrong.\n\n"
      "  gtrain plan job.yaml                           on this machine\n"
      "  gtrain plan job.yaml --nodes a:8,b:8           on two nodes of 8 hardware threads\n"
      "  gtrain plan -n 16 --nodes a:64:8,b:64:8 -- python train.py";
  verb.flags = JobFlags();
  verb.flags.push_back({"nodes", '\0', "HOST:CPUS[:GPUS],...", "the nodes to plan for"});
  verb.flags.push_back({"json", '\0', "", "one JSON document: placed, reason, warnings, ranks, nodes"});
  verb.words_max = 1;
  verb.takes_rest = true;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
