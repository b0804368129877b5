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
#include "launcher/cli/topology_measure.h"
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

// That of --like, else one slot.
absl::StatusOr<Shape> ShapeOfAll(const Args& args) {
  if (!args.Has("like")) return topology::ShapeOfOneSlot();
  GT_ASSIGN_OR_RETURN(const Topology like, ReadTopology(args.Get("like")));
  if (like.shapes.size() == 1) return like.shapes[0];
  return absl::InvalidArgumentError(
      absl::StrCat(args.Get("like"), " has ", like.shapes.size(), " shapes; --like needs a file with one"));
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
  GT_ASSIGN_OR_RETURN(const Shape shape, ShapeOfAll(args));
  const std::string path = args.Get(given[0]->flag);
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, topology::kImportBytesMax));
  return given[0]->import(text, path, shape);
}

// Flags that belong to other actions than the given one.
absl::Status RefuseFlags(const Args& args, const std::vector<std::string>& flags, const char* action) {
  for (const std::string& flag : flags) {
    if (args.Has(flag))
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, " goes with `gtrain topology ", action, "`"));
  }
  return absl::OkStatus();
}

const std::vector<std::string> kOfSources = {"hwloc", "slurm", "ib", "aws", "gcp", "racks"};
const std::vector<std::string> kOfMeasure = {"nodes", "pairs", "env", "run-dir"};

// For people. What placement makes of it shows a misspelt link.
std::string Described(const Topology& topology, const std::string& from = "") {
  std::string text = absl::StrCat(from, topology::Describe(topology));
  if (const absl::StatusOr<topology::Fabric> fabric = topology::Compile(topology); fabric.ok())
    absl::StrAppend(&text, "\n", topology::PrintDomains(*fabric));
  return SafeLines(text, "");
}

absl::Status WriteOrPrint(const Args& args, const absl::StatusOr<Topology>& topology) {
  if (!topology.ok()) return topology.status();
  const std::string text = topology::PrintTopology(*topology);
  if (!args.Has("out")) {
    Print(text);
    return absl::OkStatus();
  }
  const absl::Status written = WriteText(args.Get("out"), text);
  if (!written.ok()) Print(text);  // it may have taken a while to find out
  return written;
}

absl::Status Capture(const Args& args) {
  GT_RETURN_IF_ERROR(RefuseFlags(args, {"svg"}, "show"));
  GT_RETURN_IF_ERROR(RefuseFlags(args, kOfMeasure, "measure"));
  if (args.words.size() > 1)
    return absl::InvalidArgumentError("topology capture takes no file; --out FILE says where it goes");
  return WriteOrPrint(args, Captured(args));
}

absl::Status MeasureTopology(const Args& args) {
  GT_RETURN_IF_ERROR(RefuseFlags(args, {"svg"}, "show"));
  GT_RETURN_IF_ERROR(RefuseFlags(args, kOfSources, "capture"));
  if (args.words.size() > 1)
    return absl::InvalidArgumentError("topology measure takes no file; --out FILE says where it goes");
  GT_ASSIGN_OR_RETURN(const Shape shape, ShapeOfAll(args));
  const absl::StatusOr<Topology> topology = MeasuredTopology(args, shape);
  GT_RETURN_IF_ERROR(WriteOrPrint(args, topology));
  if (args.Has("out")) Print(Described(*topology) + "\n");
  return absl::OkStatus();
}

absl::Status Show(const Args& args) {
  GT_RETURN_IF_ERROR(RefuseFlags(args, {"out", "like"}, "capture"));
  GT_RETURN_IF_ERROR(RefuseFlags(args, kOfSources, "capture"));
  GT_RETURN_IF_ERROR(RefuseFlags(args, kOfMeasure, "measure"));
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
  if (args.Has("svg")) GT_RETURN_IF_ERROR(WriteText(args.Get("svg"), topology::DrawSvg(topology)));
  Print(Described(topology, from) + "\n");
  return absl::OkStatus();
}

int RunTopology(const Args& args) {
  const std::string& action = args.words[0];
  absl::Status done = absl::InvalidArgumentError(absl::StrCat("topology: unknown action \"", SafeText(action),
                                                              "\"; there are capture, measure and show"));
  if (action == "capture") done = Capture(args);
  if (action == "measure") done = MeasureTopology(args);
  if (action == "show") done = Show(args);
  return done.ok() ? kDone : Report(done);
}

}  // namespace

Verb TopologyVerb() {
  Verb verb;
  verb.name = "topology";
  verb.summary = "Write and show what a cluster is made of";
  verb.usage = "capture [flags] | measure [flags] | show [FILE | --context NAME] [--svg FILE]";
  verb.details =
      "A topology file has machines, GPUs, NICs, switches and links (docs/formats/topology.md). It may be "
      "written\n"
      "by hand. `gtrain head --topology FILE` has launches follow it, `gtrain plan JOB.yaml --topology FILE` "
      "plans\n"
      "without a cluster, and show without a file shows what the cluster's head follows. measure has "
      "machines\n"
      "without jobs exchange data, by a job of their own: which of them hang together, and what links "
      "carry "
      "when all\n"
      "of them do.\n\n"
      "  gtrain topology capture --out this.json                 this machine, by hwloc and sysfs\n"
      "  gtrain topology capture --slurm topology.conf --like this.json --out cluster.json\n"
      "  gtrain topology measure --like this.json --out cluster.json --pairs pairs.json\n"
      "  gtrain topology show cluster.json --svg cluster.svg";
  for (const Source& source : kSources) verb.flags.push_back({source.flag, '\0', "FILE", source.help});
  verb.flags.push_back({"hwloc", '\0', "FILE", "one machine, from the XML of `lstopo --of xml`"});
  verb.flags.push_back({"like", '\0', "FILE", "a topology whose one shape all machines get"});
  verb.flags.push_back({"out", '\0', "FILE", "write it here instead of to stdout"});
  for (Flag& flag : MeasureFlags()) verb.flags.push_back(std::move(flag));
  verb.flags.push_back({"svg", '\0', "FILE", "with show: also draw it"});
  verb.flags.push_back(ContextFlag());
  verb.words_min = 1;
  verb.words_max = 2;
  verb.actions = {"capture", "measure", "show"};
  verb.run = RunTopology;
  return verb;
}

}  // namespace gtrain::cli
