#include "topology/topology.h"

#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "topology/hostlist.h"

namespace gtrain::topology {
namespace {

absl::Status Bad(const std::string& message) { return absl::InvalidArgumentError(message); }

// What a hostlist, a rankfile and a table take as one word.
bool IsName(absl::string_view name) {
  return !name.empty() && name.size() <= 255 && std::ranges::all_of(name, [](char c) {
    return c > ' ' && c < 127 && absl::string_view(",=[]\"#").find(c) == absl::string_view::npos;
  });
}

bool Speed(double value) { return std::isfinite(value) && value >= 0; }

absl::Status BadShape(const Shape& shape, absl::string_view what) {
  return Bad(absl::StrCat("kind of machine ", shape.name, ": ", what));
}

absl::Status CheckNvlink(const Shape& shape) {
  absl::flat_hash_set<int> grouped;
  for (const NvlinkGroup& group : shape.nvlink) {
    if (!Speed(group.gb_s) || !Speed(group.us))
      return BadShape(shape, "an nvlink group's gb_s or us is no speed");
    for (const int gpu : group.gpus) {
      if (gpu < 0 || gpu >= static_cast<int>(shape.gpus.size()))
        return BadShape(shape, absl::StrCat("nvlink names GPU ", gpu, ", there are ", shape.gpus.size()));
      if (!grouped.insert(gpu).second)
        return BadShape(shape, absl::StrCat("GPU ", gpu, " is in two nvlink groups"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const Shape& shape) {
  const auto say = [&](absl::string_view what) { return BadShape(shape, what); };
  const int numa_count = static_cast<int>(shape.numa.size());
  for (const size_t count : {shape.numa.size(), shape.gpus.size(), shape.nics.size()}) {
    if (count > kDevicesMax) return say("more than 1024 devices of one sort");
  }
  if (shape.slots < 0 || shape.slots > kDevicesMax) return say("slots must be 0 to 1024");
  for (const Numa& numa : shape.numa) {
    if (numa.socket < 0 || numa.cores < 0 || !Speed(numa.memory_gb))
      return say("a NUMA node has a negative number");
  }
  for (const Gpu& gpu : shape.gpus) {
    if (gpu.numa < -1 || gpu.numa >= numa_count) return say("a GPU is on a NUMA node that is not listed");
    if (!Speed(gpu.memory_gb)) return say("a GPU's memory_gb is no size");
  }
  for (const Nic& nic : shape.nics) {
    if (nic.numa < -1 || nic.numa >= numa_count) return say("a NIC is on a NUMA node that is not listed");
    if (!Speed(nic.gb_s)) return say("a NIC's gb_s is no speed");
  }
  if (!Speed(shape.pcie_gb_s) || !Speed(shape.socket_gb_s))
    return say("pcie_gb_s or socket_gb_s is no speed");
  return CheckNvlink(shape);
}

absl::Status CheckMachine(const Topology& topology, const Machine& machine) {
  if (machine.shape < 0 || machine.shape >= static_cast<int>(topology.shapes.size()))
    return Bad(absl::StrCat("machine ", machine.name, " has no shape"));
  const int gpus = static_cast<int>(topology.shapes[machine.shape].gpus.size());
  for (const int gpu : machine.broken_gpus) {
    if (gpu < 0 || gpu >= gpus)
      return Bad(absl::StrCat("machine ", machine.name, ": broken GPU ", gpu, ", it has ", gpus));
  }
  return absl::OkStatus();
}

absl::Status CheckEnd(const Topology& topology, const End& end) {
  const int count = static_cast<int>(end.is_switch ? topology.switches.size() : topology.machines.size());
  if (end.index < 0 || end.index >= count)
    return Bad("a link ends at a machine or switch that is not listed");
  if (end.nic == -1) return absl::OkStatus();
  if (end.is_switch) return Bad("a link names a NIC of a switch");
  const Machine& machine = topology.machines[end.index];
  const int nics = static_cast<int>(topology.shapes[machine.shape].nics.size());
  if (end.nic < 0 || end.nic >= nics)
    return Bad(absl::StrCat("a link names NIC ", end.nic, " of ", machine.name, ", which has ", nics));
  return absl::OkStatus();
}

std::string Speeds(double gb_s) { return gb_s > 0 ? absl::StrFormat("%g GB/s", gb_s) : "unknown GB/s"; }

std::string DescribeShape(const Shape& shape) {
  int cores = 0, sockets = 0;
  double memory_gb = 0;
  for (const Numa& numa : shape.numa) {
    cores += numa.cores;
    sockets = std::max(sockets, numa.socket + 1);
    memory_gb += numa.memory_gb;
  }
  std::string text = absl::StrCat("kind ", shape.name, ": ", sockets, " sockets, ", shape.numa.size(),
                                  " NUMA nodes, ", cores, " cores, ", absl::StrFormat("%g GB", memory_gb));
  if (shape.gpus.empty()) absl::StrAppend(&text, ", takes ", SlotsOf(shape), " ranks");
  absl::StrAppend(&text, "\n");
  std::map<std::string, std::vector<int>> models;
  for (size_t i = 0; i < shape.gpus.size(); ++i) {
    const Gpu& gpu = shape.gpus[i];
    const std::string place = gpu.numa >= 0 ? absl::StrCat(" on NUMA node ", gpu.numa) : "";
    models[absl::StrCat(gpu.model, place)].push_back(static_cast<int>(i));
  }
  for (const auto& [model, gpus] : models)
    absl::StrAppend(&text, "  GPU ", PrintNumbers(gpus), ": ", model, "\n");
  for (const NvlinkGroup& group : shape.nvlink)
    absl::StrAppend(&text, "  NVLink: GPU ", PrintNumbers(group.gpus), ", ", Speeds(group.gb_s), "\n");
  std::map<std::string, std::vector<std::string>> nics;
  for (const Nic& nic : shape.nics) {
    const std::string place = nic.numa >= 0 ? absl::StrCat(" on NUMA node ", nic.numa) : "";
    nics[absl::StrCat(Speeds(nic.gb_s), place)].push_back(nic.name);
  }
  for (const auto& [what, names] : nics)
    absl::StrAppend(&text, "  NIC ", PrintHostlist(names), ": ", what, "\n");
  return text;
}

// What hangs on each switch: machines as hostlists, and switches.
std::string DescribeSwitch(const Topology& topology, size_t index, const std::vector<const Link*>& links) {
  std::map<std::string, std::vector<std::string>> by_speed;
  for (const Link* link : links) {
    const End& from = link->from;
    const bool is_from = from.is_switch && from.index == static_cast<int>(index);
    const End& other = is_from ? link->to : from;
    const std::string name =
        other.is_switch ? topology.switches[other.index].name : topology.machines[other.index].name;
    by_speed[absl::StrCat(is_from ? "up to" : "from", "|", Speeds(link->gb_s),
                          link->us > 0 ? absl::StrFormat(", %g us", link->us) : "")]
        .push_back(name);
  }
  const Switch& sw = topology.switches[index];
  std::string text =
      absl::StrCat(sw.kind == SwitchKind::kNvlink ? "NVLink switch " : "switch ", sw.name, "\n");
  for (const auto& [what, names] : by_speed) {
    const size_t bar = what.find('|');
    absl::StrAppend(&text, "  ", what.substr(0, bar), " ", PrintHostlist(names), ": ", what.substr(bar + 1),
                    names.size() > 1 ? " each" : "", "\n");
  }
  return text;
}

}  // namespace

int SlotsOf(const Shape& shape) {
  if (!shape.gpus.empty()) return static_cast<int>(shape.gpus.size());
  return std::max(1, shape.slots);
}

absl::Status Validate(const Topology& topology) {
  if (topology.machines.size() > kMachinesMax) return Bad("more than 262144 machines");
  if (topology.switches.size() > kSwitchesMax) return Bad("more than 65536 switches");
  if (topology.links.size() > kLinksMax) return Bad("more than 4194304 links");
  for (const Shape& shape : topology.shapes) GT_RETURN_IF_ERROR(CheckShape(shape));
  absl::flat_hash_set<absl::string_view> names;
  for (const Machine& machine : topology.machines) {
    GT_RETURN_IF_ERROR(CheckMachine(topology, machine));
    if (!IsName(machine.name)) return Bad(absl::StrCat("machine \"", machine.name, "\": that is no name"));
    if (!names.insert(machine.name).second)
      return Bad(absl::StrCat("machine ", machine.name, " is there twice"));
  }
  for (const Switch& sw : topology.switches) {
    if (!IsName(sw.name)) return Bad(absl::StrCat("switch \"", sw.name, "\": that is no name"));
    if (!names.insert(sw.name).second)
      return Bad(absl::StrCat("switch ", sw.name, ": another machine or switch has that name"));
  }
  for (const Link& link : topology.links) {
    GT_RETURN_IF_ERROR(CheckEnd(topology, link.from));
    GT_RETURN_IF_ERROR(CheckEnd(topology, link.to));
    if (!Speed(link.gb_s) || !Speed(link.us)) return Bad("a link's gb_s or us is no speed");
    if (link.to.nic != -1) return Bad("a link names the NIC of its second end; that end comes first");
    if (link.from == link.to) return Bad("a link joins a machine or switch with itself");
  }
  return absl::OkStatus();
}

std::string Describe(const Topology& topology) {
  std::string text =
      absl::StrCat(topology.name.empty() ? "topology" : topology.name, ": ", topology.machines.size(),
                   " machines, ", topology.switches.size(), " switches, ", topology.links.size(), " links\n");
  std::vector<std::vector<std::string>> of_shape(topology.shapes.size());
  std::map<std::string, std::vector<std::string>> notes;
  for (const Machine& machine : topology.machines) {
    of_shape[machine.shape].push_back(machine.name);
    if (!machine.unusable.empty())
      notes[absl::StrCat("unusable: ", machine.unusable)].push_back(machine.name);
    if (!machine.broken_gpus.empty())
      notes[absl::StrCat("broken GPU ", PrintNumbers(machine.broken_gpus))].push_back(machine.name);
  }
  for (size_t i = 0; i < topology.shapes.size(); ++i) {
    absl::StrAppend(&text, DescribeShape(topology.shapes[i]));
    absl::StrAppend(&text, "  machines: ", of_shape[i].empty() ? "none" : PrintHostlist(of_shape[i]), "\n");
  }
  for (const auto& [note, names] : notes) absl::StrAppend(&text, note, ": ", PrintHostlist(names), "\n");
  std::vector<std::vector<const Link*>> on(topology.switches.size());
  for (const Link& link : topology.links) {
    if (link.from.is_switch) on[link.from.index].push_back(&link);
    if (link.to.is_switch) on[link.to.index].push_back(&link);
  }
  for (size_t i = 0; i < on.size(); ++i) absl::StrAppend(&text, DescribeSwitch(topology, i, on[i]));
  return text;
}

}  // namespace gtrain::topology
