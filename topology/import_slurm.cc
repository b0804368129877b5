#include <map>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "topology/builder.h"
#include "topology/hostlist.h"
#include "topology/import.h"

namespace gtrain::topology {
namespace {

struct Line {
  int number = 0;
  std::map<std::string, std::string> values;  // keys in small letters
};

// Comments are gone and lines that end in a backslash are joined with the next one.
absl::StatusOr<std::vector<Line>> Lines(absl::string_view text, absl::string_view filename) {
  std::vector<Line> lines;
  std::string joined;
  int number = 0, first = 1;
  for (absl::string_view row : absl::StrSplit(text, '\n')) {
    ++number;
    row = absl::StripAsciiWhitespace(row.substr(0, row.find('#')));
    if (joined.empty()) first = number;
    if (absl::ConsumeSuffix(&row, "\\")) {
      absl::StrAppend(&joined, row, " ");
      continue;
    }
    absl::StrAppend(&joined, row);
    Line line{first, {}};
    for (const absl::string_view word : absl::StrSplit(joined, absl::ByAnyChar(" \t"), absl::SkipEmpty())) {
      const std::vector<absl::string_view> halves = absl::StrSplit(word, absl::MaxSplits('=', 1));
      if (halves.size() != 2)
        return absl::InvalidArgumentError(
            absl::StrCat(filename, ":", first, ": \"", word, "\" is not KEY=VALUE"));
      line.values[absl::AsciiStrToLower(halves[0])] = std::string(halves[1]);
    }
    if (!line.values.empty()) lines.push_back(std::move(line));
    joined.clear();
  }
  return lines;
}

absl::Status Take(const Line& line, Builder& builder) {
  const auto value = [&](const char* key) {
    const auto it = line.values.find(key);
    return it == line.values.end() ? std::string() : it->second;
  };
  const bool is_block = line.values.contains("blockname");
  const std::string name = value(is_block ? "blockname" : "switchname");
  if (name.empty()) {
    // BlockSizes says how jobs are packed, and newer versions have further lines of their own.
    if (!line.values.contains("nodes") && !line.values.contains("switches")) return absl::OkStatus();
    return absl::InvalidArgumentError("Nodes= or Switches= without SwitchName= or BlockName=");
  }
  const int sw = builder.Switch(name, is_block ? SwitchKind::kNvlink : SwitchKind::kFabric);
  const std::string nodes = value("nodes"), switches = value("switches");
  if (nodes.empty() && switches.empty())
    return absl::InvalidArgumentError(absl::StrCat(name, " has neither Nodes= nor Switches="));
  if (!nodes.empty()) {
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ParseHostlist(nodes));
    for (const std::string& node : names) builder.LinkMachine(builder.Machine(node), sw);
  }
  if (!switches.empty()) {
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ParseHostlist(switches));
    for (const std::string& below : names) builder.LinkSwitch(builder.Switch(below), sw);
  }
  return absl::OkStatus();
}

}  // namespace

Shape ShapeOfOneSlot() {
  Shape shape;
  shape.name = "unknown";
  return shape;
}

absl::StatusOr<Topology> ImportSlurm(absl::string_view text, absl::string_view filename, const Shape& shape) {
  Topology out;
  out.shapes = {shape};
  Builder builder(out);
  GT_ASSIGN_OR_RETURN(const std::vector<Line> lines, Lines(text, filename));
  for (const Line& line : lines) {
    if (const absl::Status taken = Take(line, builder); !taken.ok())
      return absl::InvalidArgumentError(absl::StrCat(filename, ":", line.number, ": ", taken.message()));
  }
  std::set<std::string> defined;
  for (const Line& line : lines) {
    for (const char* key : {"switchname", "blockname"}) {
      if (const auto it = line.values.find(key); it != line.values.end()) defined.insert(it->second);
    }
  }
  for (const Switch& sw : out.switches) {
    if (!defined.contains(sw.name))
      return absl::InvalidArgumentError(
          absl::StrCat(filename, ": ", sw.name, " is named in Switches= and has no SwitchName= line"));
  }
  if (out.machines.empty())
    return absl::InvalidArgumentError(
        absl::StrCat(filename, ":1: no SwitchName= or BlockName= line with Nodes="));
  if (const absl::Status valid = Validate(out); !valid.ok())
    return absl::InvalidArgumentError(absl::StrCat(filename, ": ", valid.message()));
  return out;
}

}  // namespace gtrain::topology
