// ibnetdiscover lists each switch and each adapter (Ca) with a row for each of its connected ports:
//
//   Switch  40 "S-b8cef6"   # "MF0;leaf0:MQM8700/U1" enhanced port 0 lid 1 lmc 0
//   [1]     "H-0c42a1"[1](c42a1)   # "node01 mlx5_0" lid 7 4xHDR
//   [33]    "S-b8cef7"[1]          # "MF0;spine0:MQM8700/U1" lid 2 4xHDR
//
// Rows of switches say everything: a cable between two switches comes twice and is taken from the smaller id.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "topology/builder.h"
#include "topology/import.h"

namespace gtrain::topology {
namespace {

// What stands between the first pair of quotes of `text`, which is cut off with what comes before.
std::string TakeQuoted(absl::string_view& text) {
  const size_t open = text.find('"');
  const size_t close = open == absl::string_view::npos ? open : text.find('"', open + 1);
  if (close == absl::string_view::npos) return "";
  std::string inside(text.substr(open + 1, close - open - 1));
  text.remove_prefix(close + 1);
  return inside;
}

// "4xHDR" in GB/s of data; 0: not known.
double SpeedOf(absl::string_view row) {
  static const std::map<absl::string_view, double> kLane = {{"SDR", 0.25},   {"DDR", 0.5},  {"QDR", 1},
                                                            {"FDR10", 1.25}, {"FDR", 1.7},  {"EDR", 3.125},
                                                            {"HDR", 6.25},   {"NDR", 12.5}, {"XDR", 25}};
  for (const absl::string_view word : absl::StrSplit(row, absl::ByAnyChar(" \t"), absl::SkipEmpty())) {
    const std::vector<absl::string_view> halves = absl::StrSplit(word, absl::MaxSplits('x', 1));
    int lanes = 0;
    if (halves.size() != 2 || !absl::SimpleAtoi(halves[0], &lanes)) continue;
    const auto it = kLane.find(halves[1]);
    if (it != kLane.end()) return lanes * it->second;
  }
  return 0;
}

struct Adapter {
  std::string nic;
  int to_switch = 0;
  double gb_s = 0;
};

struct Found {
  Topology topology;
  std::map<std::string, std::string> switch_names;  // id to name
  std::map<std::string, std::vector<Adapter>> machines;
  std::map<std::pair<std::string, std::string>, double> cables;  // ids, the smaller first
};

// Descriptions are free text; names are not.
std::string Cleaned(absl::string_view text) {
  return absl::StrReplaceAll(text, {{" ", "_"}, {",", "_"}, {"=", "_"}, {"[", "_"}, {"]", "_"}, {"#", "_"}});
}

// "MF0;leaf0:MQM8700/U1" is leaf0; what has no such form is a switch by its id.
std::string SwitchName(absl::string_view description, absl::string_view id) {
  const size_t semicolon = description.find(';');
  if (semicolon == absl::string_view::npos) return std::string(id);
  description.remove_prefix(semicolon + 1);
  return Cleaned(description.substr(0, description.find(':')));
}

absl::Status TakeRow(absl::string_view row, const std::string& own, Builder& builder, Found& found) {
  absl::string_view rest = row;
  const std::string peer = TakeQuoted(rest);
  const size_t comment = rest.find('#');
  if (peer.empty() || comment == absl::string_view::npos)
    return absl::InvalidArgumentError("a port without \"PEER\"[port] and # \"description\"");
  rest.remove_prefix(comment);
  const std::string description = TakeQuoted(rest);
  const double gb_s = SpeedOf(rest);
  if (absl::StartsWith(peer, "S-")) {
    if (own < peer) found.cables[{own, peer}] += gb_s;
    return absl::OkStatus();
  }
  if (!absl::StartsWith(peer, "H-")) return absl::OkStatus();  // a router
  const std::vector<std::string> words =
      absl::StrSplit(description, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  const std::string host = words.empty() ? peer : Cleaned(words[0]);
  found.machines[host].push_back(
      {words.size() > 1 ? words[1] : absl::StrCat("port", found.machines[host].size()),
       builder.Switch(found.switch_names.at(own)), gb_s});
  return absl::OkStatus();
}

// Machines with the same adapters share a shape.
void AddMachines(const Shape& shape, Builder& builder, Found& found) {
  for (auto& [host, adapters] : found.machines) {
    std::ranges::stable_sort(adapters, {}, &Adapter::nic);
    Shape own = shape;
    own.nics.clear();
    for (const Adapter& adapter : adapters) {
      const auto known = std::ranges::find(shape.nics, adapter.nic, &Nic::name);
      Nic nic = known == shape.nics.end() ? Nic{adapter.nic, -1, "", 0} : *known;
      nic.gb_s = adapter.gb_s;
      own.nics.push_back(nic);
    }
    std::vector<Shape>& shapes = found.topology.shapes;
    auto it = std::ranges::find_if(shapes, [&](const Shape& s) { return s.nics == own.nics; });
    if (it == shapes.end()) {
      if (!shapes.empty()) absl::StrAppend(&own.name, "-", shapes.size() + 1);
      it = shapes.insert(shapes.end(), own);
    }
    const int machine = builder.Machine(host, static_cast<int>(it - shapes.begin()));
    for (size_t nic = 0; nic < adapters.size(); ++nic)
      builder.LinkMachine(machine, adapters[nic].to_switch, adapters[nic].gb_s, 0, static_cast<int>(nic));
  }
}

}  // namespace

absl::StatusOr<Topology> ImportIbnetdiscover(absl::string_view text, absl::string_view filename,
                                             const Shape& shape) {
  Found found;
  Builder builder(found.topology);
  std::string own;  // the switch whose rows come; "": rows of an adapter
  int number = 0;
  for (const absl::string_view row : absl::StrSplit(text, '\n')) {
    ++number;
    if (absl::StartsWith(row, "Switch") || absl::StartsWith(row, "Ca") || absl::StartsWith(row, "Rt")) {
      absl::string_view rest = row;
      own = TakeQuoted(rest);
      if (own.empty())
        return absl::InvalidArgumentError(absl::StrCat(filename, ":", number, ": this row has no \"ID\""));
      if (!absl::StartsWith(row, "Switch")) {
        own.clear();
        continue;
      }
      found.switch_names[own] = SwitchName(TakeQuoted(rest), own);
      builder.Switch(found.switch_names[own]);
    } else if (absl::StartsWith(row, "[") && !own.empty()) {
      if (const absl::Status taken = TakeRow(row, own, builder, found); !taken.ok())
        return absl::InvalidArgumentError(absl::StrCat(filename, ":", number, ": ", taken.message()));
    }
  }
  if (found.machines.empty())
    return absl::InvalidArgumentError(absl::StrCat(
        filename, ":1: no switch with an adapter on it; this must be what `ibnetdiscover` prints"));
  AddMachines(shape, builder, found);
  for (const auto& [ends, gb_s] : found.cables) {
    const auto a = found.switch_names.find(ends.first), b = found.switch_names.find(ends.second);
    if (b == found.switch_names.end()) continue;  // its own section is missing: nothing hangs on it
    builder.LinkSwitch(builder.Switch(a->second), builder.Switch(b->second), gb_s);
  }
  if (const absl::Status valid = Validate(found.topology); !valid.ok())
    return absl::InvalidArgumentError(absl::StrCat(filename, ": ", valid.message()));
  return std::move(found.topology);
}

}  // namespace gtrain::topology
