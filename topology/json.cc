// Reading: the document is walked once with a Reader for each object, which knows the keys that were asked
// for, so that a wrong key is an error with the right ones beside it. The first pass over the text gives the
// value; where something is wrong a second pass finds the lines (json_lines.h), so that a good file does not
// pay for it.
#include "topology/json.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "topology/hostlist.h"
#include "topology/json_lines.h"

namespace gtrain::topology {
namespace {

using nlohmann::json;

constexpr size_t kErrorsMax = 20;
constexpr int kVersion = 1;

struct Problem {
  std::string path, message;
};
using Problems = std::vector<Problem>;

// One object of the document. Finish reports the keys that nobody asked for.
class Reader {
 public:
  Reader(const json& object, std::string path, Problems& problems)
      : object_(object), path_(std::move(path)), problems_(problems) {
    if (!object_.is_object()) Wrong("", "must be an object, { ... }");
  }

  void Wrong(absl::string_view key, std::string message) {
    if (problems_.size() < kErrorsMax)
      problems_.push_back({key.empty() ? path_ : absl::StrCat(path_, "/", key), std::move(message)});
  }

  // nullptr: the key is not there.
  const json* Find(const char* key) {
    asked_.insert(key);
    if (!object_.is_object()) return nullptr;
    const auto it = object_.find(key);
    return it == object_.end() ? nullptr : &*it;
  }

  std::string Text(const char* key) {
    const json* value = Find(key);
    if (value == nullptr) return "";
    if (!value->is_string()) {
      Wrong(key, "must be a text");
      return "";
    }
    return value->get<std::string>();
  }

  double Number(const char* key, double otherwise = 0) {
    const json* value = Find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_number() || value->get<double>() < 0 || value->get<double>() > 1e9) {
      Wrong(key, "must be a number from 0 to 1e9");
      return otherwise;
    }
    return value->get<double>();
  }

  int Int(const char* key, int otherwise, int min, int max) {
    const json* value = Find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_number_integer() || value->get<int64_t>() < min || value->get<int64_t>() > max) {
      Wrong(key, absl::StrCat("must be a whole number from ", min, " to ", max));
      return otherwise;
    }
    return value->get<int>();
  }

  std::vector<int> Numbers(const char* key) {
    const std::string text = Text(key);
    if (text.empty()) return {};
    absl::StatusOr<std::vector<int>> numbers = ParseNumbers(text);
    if (numbers.ok()) return *std::move(numbers);
    Wrong(key, std::string(numbers.status().message()));
    return {};
  }

  std::vector<std::string> Names(const char* key) {
    if (Find(key) == nullptr) {
      Wrong("", absl::StrCat("needs \"", key, "\", a hostlist such as \"node[0-7]\""));
      return {};
    }
    absl::StatusOr<std::vector<std::string>> names = ParseHostlist(Text(key));
    if (names.ok()) return *std::move(names);
    Wrong(key, std::string(names.status().message()));
    return {};
  }

  // Calls `take` with a Reader for each object of an array.
  template <typename Take>
  void Each(const char* key, const Take& take) {
    const json* value = Find(key);
    if (value == nullptr) return;
    if (!value->is_array()) return Wrong(key, "must be a list, [ ... ]");
    for (size_t i = 0; i < value->size(); ++i) {
      Reader reader((*value)[i], absl::StrCat(path_, "/", key, "/", i), problems_);
      take(reader);
      reader.Finish();
    }
  }

  void Finish() {
    if (!object_.is_object()) return;
    for (const auto& [key, value] : object_.items()) {
      if (!asked_.contains(key))
        Wrong(key, absl::StrCat("is not known here; there are ", absl::StrJoin(asked_, ", ")));
    }
  }

 private:
  const json& object_;
  const std::string path_;
  Problems& problems_;
  std::set<std::string, std::less<>> asked_;
};

Shape ReadShape(Reader& in) {
  Shape shape;
  shape.name = in.Text("name");
  if (shape.name.empty()) in.Wrong("", "needs a \"name\"");
  in.Each("numa", [&](Reader& r) {
    shape.numa.push_back(
        {r.Int("socket", 0, 0, kDevicesMax), r.Int("cores", 0, 0, 1 << 20), r.Number("memory_gb")});
  });
  const int numa_max = static_cast<int>(shape.numa.size()) - 1;
  in.Each("gpus", [&](Reader& r) {
    const int count = r.Int("count", 1, 1, kDevicesMax);
    const Gpu gpu{r.Text("model"), r.Int("numa", -1, -1, numa_max), r.Text("pci"), r.Number("memory_gb")};
    if (count > 1 && !gpu.pci.empty()) r.Wrong("pci", "names one GPU, and count is more");
    shape.gpus.insert(shape.gpus.end(), count, gpu);
  });
  in.Each("nics", [&](Reader& r) {
    const Nic nic{"", r.Int("numa", -1, -1, numa_max), r.Text("pci"), r.Number("gb_s")};
    for (std::string& name : r.Names("names")) {
      shape.nics.push_back(nic);
      shape.nics.back().name = std::move(name);
    }
  });
  in.Each("nvlink", [&](Reader& r) {
    shape.nvlink.push_back({r.Numbers("gpus"), r.Number("gb_s"), r.Number("us")});
  });
  shape.pcie_gb_s = in.Number("pcie_gb_s");
  shape.socket_gb_s = in.Number("socket_gb_s");
  shape.slots = in.Int("slots", 0, 0, kDevicesMax);
  return shape;
}

struct Index {
  absl::flat_hash_map<std::string, int> shapes, machines, switches;
};

void ReadMachines(Reader& in, Index& index, Topology& out) {
  in.Each("machines", [&](Reader& r) {
    Machine machine;
    const std::string shape = r.Text("shape");
    const auto it = index.shapes.find(shape);
    if (it == index.shapes.end()) r.Wrong("shape", absl::StrCat("no shape is called \"", shape, "\""));
    machine.shape = it == index.shapes.end() ? 0 : it->second;
    machine.unusable = r.Text("unusable");
    machine.broken_gpus = r.Numbers("broken_gpus");
    if (const json* labels = r.Find("labels"); labels != nullptr) {
      for (const auto& [key, value] : labels->items()) {
        if (value.is_string()) machine.labels[key] = value.get<std::string>();
        if (!labels->is_object() || !value.is_string()) r.Wrong("labels", "must be an object of texts");
      }
    }
    for (std::string& name : r.Names("names")) {
      if (!index.machines.emplace(name, static_cast<int>(out.machines.size())).second) {
        r.Wrong("names", absl::StrCat(name, " is listed twice"));
        continue;
      }
      machine.name = std::move(name);
      out.machines.push_back(machine);
    }
  });
}

void ReadSwitches(Reader& in, Index& index, Topology& out) {
  in.Each("switches", [&](Reader& r) {
    const std::string kind = r.Text("kind");
    if (!kind.empty() && kind != "fabric" && kind != "nvlink") r.Wrong("kind", "is fabric or nvlink");
    for (std::string& name : r.Names("names")) {
      if (index.machines.contains(name) ||
          !index.switches.emplace(name, static_cast<int>(out.switches.size())).second) {
        r.Wrong("names", absl::StrCat(name, " is listed twice"));
        continue;
      }
      out.switches.push_back({std::move(name), kind == "nvlink" ? SwitchKind::kNvlink : SwitchKind::kFabric});
    }
  });
}

std::vector<End> ReadEnds(Reader& in, const char* key, const Index& index) {
  std::vector<End> ends;
  for (const std::string& name : in.Names(key)) {
    if (const auto it = index.machines.find(name); it != index.machines.end()) {
      ends.push_back({false, it->second, -1});
    } else if (const auto sw = index.switches.find(name); sw != index.switches.end()) {
      ends.push_back({true, sw->second, -1});
    } else {
      in.Wrong(key, absl::StrCat("\"", name, "\" is no machine and no switch of this file"));
      break;
    }
  }
  return ends;
}

// Every end of "from" with every end of "to".
void ReadLinks(Reader& in, const Index& index, Topology& out) {
  in.Each("links", [&](Reader& r) {
    std::vector<End> from = ReadEnds(r, "from", index);
    const std::vector<End> to = ReadEnds(r, "to", index);
    const std::string nic = r.Text("nic");
    const double gb_s = r.Number("gb_s"), us = r.Number("us");
    for (End& end : from) {
      if (nic.empty()) break;
      if (end.is_switch) {
        r.Wrong("nic", "\"from\" is a switch, which has none");
        return;
      }
      const std::vector<Nic>& nics = out.shapes[out.machines[end.index].shape].nics;
      const auto it = std::ranges::find(nics, nic, &Nic::name);
      if (it == nics.end()) {
        r.Wrong("nic",
                absl::StrCat(out.machines[end.index].name, " is of a shape without a NIC called ", nic));
        return;
      }
      end.nic = static_cast<int>(it - nics.begin());
    }
    if (from.size() * to.size() + out.links.size() > kLinksMax) return r.Wrong("", "more than 4194304 links");
    for (const End& a : from) {
      for (const End& b : to) out.links.push_back({a, b, gb_s, us});
    }
  });
}

absl::Status Listed(const Problems& problems, absl::string_view text, absl::string_view filename) {
  const std::map<std::string, int> lines = JsonLines(text);
  std::vector<std::string> rows;
  for (const Problem& problem : problems) {
    std::string path = problem.path;
    auto it = lines.find(path);
    while (it == lines.end() && !path.empty()) {
      path.resize(path.rfind('/'));
      it = lines.find(path);
    }
    rows.push_back(absl::StrCat(filename, ":", it == lines.end() ? 1 : it->second, ": ",
                                problem.path.empty() ? "the document" : problem.path.substr(1), ": ",
                                problem.message));
  }
  return absl::InvalidArgumentError(absl::StrJoin(rows, "\n"));
}

// --- writing

json PrintShape(const Shape& shape) {
  json out = {{"name", shape.name}};
  for (const Numa& n : shape.numa)
    out["numa"].push_back({{"socket", n.socket}, {"cores", n.cores}, {"memory_gb", n.memory_gb}});
  for (size_t i = 0; i < shape.gpus.size();) {
    const Gpu& gpu = shape.gpus[i];
    size_t count = 1;
    while (gpu.pci.empty() && i + count < shape.gpus.size() && shape.gpus[i + count] == gpu) ++count;
    json entry = {{"count", count}, {"model", gpu.model}, {"numa", gpu.numa}, {"memory_gb", gpu.memory_gb}};
    if (!gpu.pci.empty()) entry["pci"] = gpu.pci;
    out["gpus"].push_back(entry);
    i += count;
  }
  for (const Nic& nic : shape.nics) {
    json entry = {{"names", nic.name}, {"numa", nic.numa}, {"gb_s", nic.gb_s}};
    if (!nic.pci.empty()) entry["pci"] = nic.pci;
    out["nics"].push_back(entry);
  }
  for (const NvlinkGroup& group : shape.nvlink)
    out["nvlink"].push_back({{"gpus", PrintNumbers(group.gpus)}, {"gb_s", group.gb_s}, {"us", group.us}});
  if (shape.pcie_gb_s > 0) out["pcie_gb_s"] = shape.pcie_gb_s;
  if (shape.socket_gb_s > 0) out["socket_gb_s"] = shape.socket_gb_s;
  if (shape.slots > 0) out["slots"] = shape.slots;
  return out;
}

// A hostlist is read back in its own order, so only neighbours that it names in order may share an entry.
bool KeepsOrder(const std::vector<std::string>& names) {
  const absl::StatusOr<std::vector<std::string>> back = ParseHostlist(PrintHostlist(names));
  return back.ok() && *back == names;
}

json PrintMachines(const Topology& topology) {
  json out = json::array();
  for (size_t i = 0; i < topology.machines.size();) {
    const Machine& first = topology.machines[i];
    std::vector<std::string> names;
    for (; i < topology.machines.size(); ++i) {
      const Machine& m = topology.machines[i];
      if (m.shape != first.shape || m.labels != first.labels || m.unusable != first.unusable ||
          m.broken_gpus != first.broken_gpus)
        break;
      names.push_back(m.name);
    }
    json entry = {{"shape", topology.shapes[first.shape].name}};
    if (!first.labels.empty()) entry["labels"] = first.labels;
    if (!first.unusable.empty()) entry["unusable"] = first.unusable;
    if (!first.broken_gpus.empty()) entry["broken_gpus"] = PrintNumbers(first.broken_gpus);
    if (KeepsOrder(names)) names = {PrintHostlist(names)};
    for (const std::string& name : names) {
      entry["names"] = name;
      out.push_back(entry);
    }
  }
  return out;
}

std::string NameOf(const Topology& topology, const End& end) {
  return end.is_switch ? topology.switches[end.index].name : topology.machines[end.index].name;
}

// Links that follow each other and differ in their first end only share an entry.
json PrintLinks(const Topology& topology) {
  json out = json::array();
  for (size_t i = 0; i < topology.links.size();) {
    const Link& first = topology.links[i];
    std::vector<std::string> names;
    for (; i < topology.links.size(); ++i) {
      const Link& link = topology.links[i];
      const bool alike = link.to == first.to && link.gb_s == first.gb_s && link.us == first.us &&
                         link.from.is_switch == first.from.is_switch && link.from.nic == first.from.nic;
      const bool same_shape =
          alike && (first.from.is_switch ||
                    topology.machines[link.from.index].shape == topology.machines[first.from.index].shape);
      if (!same_shape) break;
      names.push_back(NameOf(topology, link.from));
    }
    json entry = {{"to", NameOf(topology, first.to)}};
    if (first.from.nic >= 0) {
      const Machine& machine = topology.machines[first.from.index];
      entry["nic"] = topology.shapes[machine.shape].nics[first.from.nic].name;
    }
    if (first.gb_s > 0) entry["gb_s"] = first.gb_s;
    if (first.us > 0) entry["us"] = first.us;
    if (KeepsOrder(names)) names = {PrintHostlist(names)};
    for (const std::string& name : names) {
      entry["from"] = name;
      out.push_back(entry);
    }
  }
  return out;
}

std::string Rows(const json& list) {
  std::vector<std::string> rows;
  for (const json& entry : list)
    rows.push_back(absl::StrCat("    ", entry.dump(-1, ' ', false, json::error_handler_t::replace)));
  return rows.empty() ? "[]" : absl::StrCat("[\n", absl::StrJoin(rows, ",\n"), "\n  ]");
}

}  // namespace

absl::StatusOr<Topology> ParseTopology(absl::string_view text, absl::string_view filename) {
  json document;
  try {
    document = json::parse(text.begin(), text.end());
  } catch (const json::parse_error& e) {
    const std::string said = e.what();
    const size_t detail = said.find(": ");
    return absl::InvalidArgumentError(
        absl::StrCat(filename, ":", LineOf(text, e.byte == 0 ? 0 : e.byte - 1),
                     ": this is no JSON: ", detail == std::string::npos ? said : said.substr(detail + 2)));
  }
  Problems problems;
  Topology out;
  Index index;
  Reader in(document, "", problems);
  if (in.Int("gtrain_topology", 0, 0, 1 << 20) != kVersion)
    in.Wrong("gtrain_topology", "must be there and 1: this program reads no other version");
  out.name = in.Text("name");
  in.Each("shapes", [&](Reader& r) {
    out.shapes.push_back(ReadShape(r));
    if (!index.shapes.emplace(out.shapes.back().name, static_cast<int>(out.shapes.size()) - 1).second)
      r.Wrong("name", absl::StrCat(out.shapes.back().name, " is there twice"));
  });
  ReadMachines(in, index, out);
  ReadSwitches(in, index, out);
  if (problems.empty()) ReadLinks(in, index, out);
  in.Find("links");
  in.Finish();
  if (problems.empty()) {
    if (const absl::Status valid = Validate(out); !valid.ok())
      problems.push_back({"", std::string(valid.message())});
  }
  if (!problems.empty()) return Listed(problems, text, filename);
  return out;
}

std::string PrintTopology(const Topology& topology) {
  const auto text = [](const json& value) {
    return value.dump(-1, ' ', false, json::error_handler_t::replace);
  };
  json shapes = json::array(), switches = json::array();
  for (const Shape& shape : topology.shapes) shapes.push_back(PrintShape(shape));
  for (const Switch& sw : topology.switches) {
    json entry = {{"names", sw.name}};
    if (sw.kind == SwitchKind::kNvlink) entry["kind"] = "nvlink";
    switches.push_back(entry);
  }
  return absl::StrCat("{\n  \"gtrain_topology\": ", kVersion, ",\n  \"name\": ", text(topology.name),
                      ",\n  \"shapes\": ", Rows(shapes), ",\n  \"machines\": ", Rows(PrintMachines(topology)),
                      ",\n  \"switches\": ", Rows(switches), ",\n  \"links\": ", Rows(PrintLinks(topology)),
                      "\n}\n");
}

}  // namespace gtrain::topology
