// `gtrain topology`: makes a topology file of what this machine or another program knows, and shows one.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/topology_plan.h"
#include "launcher/cli/verbs.h"
#include "runtime/agent/node.h"
#include "topology/detect/machine.h"
#include "topology/import.h"
#include "topology/json.h"
#include "topology/place/plan.h"
#include "topology/svg.h"

namespace gtrain::cli {
namespace {

using topology::Shape;
using topology::Topology;

struct Source {
  const char* flag;
  absl::StatusOr<Topology> (*import)(absl::string_view, absl::string_view, const Shape&);
  const char* help;
};

constexpr Source kSources[] = {
    {"slurm", topology::ImportSlurm, "Slurm's topology.conf, of trees or blocks"},
    {"ib", topology::ImportIbnetdiscover, "what `ibnetdiscover` prints"},
    {"aws", topology::ImportAws, "what `aws ec2 describe-instance-topology` prints"},
    {"gcp", topology::ImportGcp, "what `gcloud compute instances list --format=json` prints"},
    {"racks", topology::ImportPaths, "lines \"HOSTS /zone/rack\""},
};

// One machine by this name.
Topology Alone(Shape shape, const std::string& name) {
  Topology out;
  out.name = name;
  shape.name = name;
  out.shapes = {std::move(shape)};
  out.machines.push_back({name, 0, {}, {}, ""});
  return out;
}

absl::StatusOr<Topology> Captured(const Args& args) {
  std::vector<const Source*> given;
  for (const Source& source : kSources) {
    if (args.Has(source.flag)) given.push_back(&source);
  }
  if (given.size() + (args.Has("hwloc") ? 1 : 0) > 1)
    return absl::InvalidArgumentError("topology capture: one source at a time");
  if (args.Has("hwloc")) {
    GT_ASSIGN_OR_RETURN(const std::string xml, ReadFile(args.Get("hwloc"), topology::kHwlocXmlBytesMax));
    GT_ASSIGN_OR_RETURN(Shape shape, topology::ShapeOfHwlocXml(xml, args.Get("hwloc")));
    return Alone(std::move(shape), "machine");
  }
  if (given.empty()) {
    if (args.Has("like"))
      return absl::InvalidArgumentError("--like goes with --slurm, --ib, --aws, --gcp or --racks");
    GT_ASSIGN_OR_RETURN(Shape shape, topology::ShapeOfThisMachine());
    return Alone(std::move(shape), agent::Hostname());
  }
  Shape shape = topology::ShapeOfOneSlot();
  if (args.Has("like")) {
    GT_ASSIGN_OR_RETURN(const Topology like, ReadTopology(args.Get("like")));
    if (like.shapes.size() != 1)
      return absl::InvalidArgumentError(absl::StrCat(args.Get("like"), " has ", like.shapes.size(),
                                                     " shapes; --like needs a file with one"));
    shape = like.shapes[0];
  }
  const std::string path = args.Get(given[0]->flag);
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, topology::kImportBytesMax));
  return given[0]->import(text, path, shape);
}

absl::Status Capture(const Args& args) {
  if (args.Has("svg")) return absl::InvalidArgumentError("--svg goes with `gtrain topology show`");
  if (args.words.size() > 1)
    return absl::InvalidArgumentError("topology capture takes no file; --out FILE says where it goes");
  GT_ASSIGN_OR_RETURN(const Topology topology, Captured(args));
  const std::string text = topology::PrintTopology(topology);
  if (args.Has("out")) return WriteFileDurable(args.Get("out"), text, 0644);
  Print(text);
  return absl::OkStatus();
}

absl::Status Show(const Args& args) {
  for (const char* flag : {"out", "like", "hwloc", "slurm", "ib", "aws", "gcp", "racks"}) {
    if (args.Has(flag))
      return absl::InvalidArgumentError(absl::StrCat("--", flag, " goes with `gtrain topology capture`"));
  }
  if (args.words.size() == 2 && args.Has("context"))
    return absl::InvalidArgumentError("topology show: a FILE or a --context, not both");
  Topology topology;
  std::string from;
  if (args.words.size() == 2) {
    GT_ASSIGN_OR_RETURN(topology, ReadTopology(args.words[1]));
  } else {
    GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
    std::string source;
    GT_ASSIGN_OR_RETURN(topology, TopologyOfHead(cluster, &source));
    if (topology.machines.empty())
      return absl::NotFoundError(
          absl::StrCat("the head of ", cluster.name(),
                       " follows no topology: start it with --topology FILE, or agents "
                       "with --label fabric=/zone/rack; until then ranks are packed"));
    from = absl::StrCat("what the head of ", cluster.name(), " follows: ",
                        source == "file" ? "the file that it was started with" : "the labels of its agents",
                        "\n");
  }
  std::error_code ignored;
  if (args.words.size() == 2 && std::filesystem::equivalent(args.words[1], args.Get("svg"), ignored))
    return absl::InvalidArgumentError(
        absl::StrCat("--svg ", args.Get("svg"), " is the topology file itself"));
  if (args.Has("svg"))
    GT_RETURN_IF_ERROR(WriteFileDurable(args.Get("svg"), topology::DrawSvg(topology), 0644));
  std::string text = absl::StrCat(from, topology::Describe(topology));
  // What placement makes of it shows a misspelt link.
  if (const absl::StatusOr<topology::Fabric> fabric = topology::Compile(topology); fabric.ok())
    absl::StrAppend(&text, "\n", topology::PrintDomains(*fabric));
  Print(SafeLines(text, "") + "\n");
  return absl::OkStatus();
}

int RunTopology(const Args& args) {
  const std::string& action = args.words[0];
  absl::Status done = absl::InvalidArgumentError(
      absl::StrCat("topology: unknown action \"", SafeText(action), "\"; there are capture and show"));
  if (action == "capture") done = Capture(args);
  if (action == "show") done = Show(args);
  return done.ok() ? kDone : Report(done);
}

}  // namespace

Verb TopologyVerb() {
  Verb verb;
  verb.name = "topology";
  verb.summary = "Write and show what a cluster is made of";
  verb.usage = "capture [flags] | show [FILE | --context NAME] [--svg FILE]";
  verb.details =
      "A topology file has machines, GPUs, NICs, switches and links (docs/formats/topology.md). It may be "
      "written\n"
      "by hand. `gtrain head --topology FILE` has launches follow it, `gtrain plan JOB.yaml --topology FILE` "
      "plans\n"
      "without a cluster, and show without a file shows what the cluster's head follows.\n\n"
      "  gtrain topology capture --out this.json                 this machine, by hwloc and sysfs\n"
      "  gtrain topology capture --slurm topology.conf --like this.json --out cluster.json\n"
      "  gtrain topology show cluster.json --svg cluster.svg";
  for (const Source& source : kSources) verb.flags.push_back({source.flag, '\0', "FILE", source.help});
  verb.flags.push_back({"hwloc", '\0', "FILE", "one machine, from the XML of `lstopo --of xml`"});
  verb.flags.push_back({"like", '\0', "FILE", "a topology whose one shape all machines get"});
  verb.flags.push_back({"out", '\0', "FILE", "write it here instead of to stdout"});
  verb.flags.push_back({"svg", '\0', "FILE", "with show: also draw it"});
  verb.flags.push_back(ContextFlag());
  verb.words_min = 1;
  verb.words_max = 2;
  verb.actions = {"capture", "show"};
  verb.run = RunTopology;
  return verb;
}

}  // namespace gtrain::cli
