#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "topology/builder.h"
#include "topology/hostlist.h"
#include "topology/import.h"
#include "topology/json_lines.h"

namespace gtrain::topology {
namespace {

using nlohmann::json;

constexpr size_t kPathMax = 8;  // levels

absl::StatusOr<json> Parse(absl::string_view text, absl::string_view filename) {
  try {
    return json::parse(text.begin(), text.end());
  } catch (const json::parse_error& e) {
    return absl::InvalidArgumentError(
        absl::StrCat(filename, ":", LineOf(text, e.byte == 0 ? 0 : e.byte - 1), ": this is no JSON"));
  }
}

std::vector<std::string> Segments(absl::string_view path) {
  return absl::StrSplit(path, '/', absl::SkipEmpty());
}

}  // namespace

// A switch a place of the path. Its name is the whole path: racks of two zones may share a name.
absl::StatusOr<Topology> TopologyOfPaths(const std::vector<Located>& machines, absl::string_view filename,
                                         const Shape& shape) {
  Topology out;
  out.shapes = {shape};
  Builder builder(out);
  for (const Located& machine : machines) {
    const size_t before = out.machines.size();
    const int index = builder.Machine(machine.host);
    if (out.machines.size() == before)
      return absl::InvalidArgumentError(absl::StrCat(filename,
                                                     machine.line > 0 ? absl::StrCat(":", machine.line) : "",
                                                     ": ", machine.host, " is there twice"));
    int above = -1;
    for (size_t depth = 1; depth <= machine.path.size(); ++depth) {
      const std::string name =
          absl::StrJoin(machine.path.begin(), machine.path.begin() + static_cast<std::ptrdiff_t>(depth), "/");
      const bool known = builder.HasSwitch(name);
      const int sw = builder.Switch(name);
      if (!known && above >= 0) builder.LinkSwitch(sw, above);
      above = sw;
    }
    if (above >= 0) builder.LinkMachine(index, above);
  }
  if (machines.empty()) return absl::InvalidArgumentError(absl::StrCat(filename, ": no machine in it"));
  if (const absl::Status valid = Validate(out); !valid.ok())
    return absl::InvalidArgumentError(absl::StrCat(filename, ": ", valid.message()));
  return out;
}

absl::StatusOr<Topology> ImportPaths(absl::string_view text, absl::string_view filename, const Shape& shape) {
  std::vector<Located> machines;
  int number = 0;
  for (absl::string_view row : absl::StrSplit(text, '\n')) {
    ++number;
    row = row.substr(0, row.find('#'));
    const std::vector<absl::string_view> words =
        absl::StrSplit(row, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    const std::vector<std::string> path = words.size() == 2 ? Segments(words[1]) : std::vector<std::string>();
    if (path.empty() || path.size() > kPathMax)
      return absl::InvalidArgumentError(absl::StrCat(
          filename, ":", number, ": must be HOSTS /zone/rack, with 1 to 8 places, the widest first"));
    const absl::StatusOr<std::vector<std::string>> hosts = ParseHostlist(words[0]);
    if (!hosts.ok())
      return absl::InvalidArgumentError(absl::StrCat(filename, ":", number, ": ", hosts.status().message()));
    for (const std::string& host : *hosts) machines.push_back({host, path, number});
  }
  return TopologyOfPaths(machines, filename, shape);
}

absl::StatusOr<Topology> ImportAws(absl::string_view text, absl::string_view filename, const Shape& shape) {
  GT_ASSIGN_OR_RETURN(const json document, Parse(text, filename));
  const auto list = document.is_object() ? document.find("Instances") : document.end();
  if (list == document.end() || !list->is_array())
    return absl::InvalidArgumentError(absl::StrCat(
        filename, ":1: no \"Instances\"; this must be what `aws ec2 describe-instance-topology` prints"));
  std::vector<Located> machines;
  for (const json& instance : *list) {
    Located machine{TextOf(instance, "InstanceId"), {}};
    const auto nodes = instance.is_object() ? instance.find("NetworkNodes") : instance.end();
    if (!machine.host.empty() && nodes != instance.end() && nodes->is_array()) {
      for (const json& node : *nodes) machine.path.push_back(node.is_string() ? node.get<std::string>() : "");
    }
    if (machine.path.empty() || machine.path.size() > kPathMax || absl::StrJoin(machine.path, "").empty())
      return absl::InvalidArgumentError(
          absl::StrCat(filename, ": instance ", machines.size(), " has no InstanceId or no NetworkNodes"));
    machines.push_back(std::move(machine));
  }
  return TopologyOfPaths(machines, filename, shape);
}

absl::StatusOr<Topology> ImportGcp(absl::string_view text, absl::string_view filename, const Shape& shape) {
  GT_ASSIGN_OR_RETURN(const json document, Parse(text, filename));
  if (!document.is_array())
    return absl::InvalidArgumentError(absl::StrCat(
        filename, ":1: no list; this must be what `gcloud compute instances list --format=json` prints"));
  std::vector<Located> machines;
  for (const json& instance : document) {
    const auto status = instance.is_object() ? instance.find("resourceStatus") : instance.end();
    const std::string place =
        instance.is_object() && status != instance.end() ? TextOf(*status, "physicalHost") : "";
    Located machine{instance.is_object() ? TextOf(instance, "name") : "", Segments(place)};
    if (machine.host.empty() || machine.path.size() < 2)
      return absl::InvalidArgumentError(absl::StrCat(
          filename, ": instance ", machines.size(),
          " has no name, or no resourceStatus.physicalHost such as ",
          "/cluster/rack/host (it has one where its machine type and placement policy give it)"));
    machine.path.resize(2);
    machines.push_back(std::move(machine));
  }
  return TopologyOfPaths(machines, filename, shape);
}

}  // namespace gtrain::topology
