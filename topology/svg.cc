#include "topology/svg.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace gtrain::topology {
namespace {

constexpr int kCell = 8, kMachineWidth = 76, kMachineHeight = 56, kRowHeight = 120, kMargin = 20;

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// The tier of each switch: its distance from the nearest machine; those that none reaches are in the first.
std::vector<int> Tiers(const Topology& topology) {
  std::vector<int> tier(topology.switches.size(), 0);
  for (const Link& link : topology.links) {
    if (!link.from.is_switch && link.to.is_switch) tier[link.to.index] = 1;
    if (link.from.is_switch && !link.to.is_switch) tier[link.from.index] = 1;
  }
  for (int now = 1; now < 16; ++now) {
    for (const Link& link : topology.links) {
      if (!link.from.is_switch || !link.to.is_switch) continue;
      for (const auto& [a, b] :
           {std::pair(link.from.index, link.to.index), std::pair(link.to.index, link.from.index)}) {
        if (tier[a] == now && tier[b] == 0) tier[b] = now + 1;
      }
    }
  }
  for (int& t : tier) t = std::max(1, t);
  return tier;
}

struct Point {
  int x = -1, y = 0;  // x -1: not drawn
};

std::string DrawMachine(const Topology& topology, const Machine& machine, Point at) {
  const Shape& shape = topology.shapes[machine.shape];
  const int left = at.x - kMachineWidth / 2;
  std::string text = absl::StrFormat(
      R"(<rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="%s" stroke="#555"/><text x="%d" y="%d">%s</text>)",
      left, at.y, kMachineWidth, kMachineHeight, machine.unusable.empty() ? "#eef3fb" : "#ddd", at.x,
      at.y + 14, Escaped(machine.name));
  for (size_t gpu = 0; gpu < std::min<size_t>(shape.gpus.size(), 16); ++gpu) {
    const bool broken = std::ranges::binary_search(machine.broken_gpus, static_cast<int>(gpu));
    absl::StrAppendFormat(&text, R"(<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>)",
                          left + 4 + static_cast<int>(gpu % 8) * (kCell + 1),
                          at.y + 24 + static_cast<int>(gpu / 8) * (kCell + 2), kCell, kCell,
                          broken ? "#c33" : "#7a3");
  }
  return text + "\n";
}

}  // namespace

std::string DrawSvg(const Topology& topology) {
  const std::vector<int> tiers = Tiers(topology);
  const int top = tiers.empty() ? 0 : *std::ranges::max_element(tiers);
  std::map<int, std::vector<int>> rows;  // tier to switches
  for (size_t i = 0; i < tiers.size(); ++i) rows[tiers[i]].push_back(static_cast<int>(i));
  size_t widest = std::min(topology.machines.size(), kDrawnMax);
  for (const auto& [tier, switches] : rows) widest = std::max(widest, std::min(switches.size(), kDrawnMax));
  const int width = 2 * kMargin + static_cast<int>(widest) * (kMachineWidth + 8);
  const auto place = [&](size_t index, size_t count, int tier) {
    const size_t drawn = std::min(count, kDrawnMax);
    if (index >= drawn) return Point{};
    return Point{static_cast<int>((2 * index + 1) * static_cast<size_t>(width) / (2 * drawn)),
                 kMargin + (top - tier) * kRowHeight};
  };
  std::vector<Point> machines, switches(tiers.size());
  for (size_t i = 0; i < topology.machines.size(); ++i)
    machines.push_back(place(i, topology.machines.size(), 0));
  for (const auto& [tier, row] : rows) {
    for (size_t i = 0; i < row.size(); ++i) switches[row[i]] = place(i, row.size(), tier);
  }
  const int height = 2 * kMargin + top * kRowHeight + kMachineHeight + 20;
  std::string text = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
      "font-size=\"10\" "
      "text-anchor=\"middle\">\n",
      width, height);
  for (const Link& link : topology.links) {
    const Point a = (link.from.is_switch ? switches : machines)[link.from.index];
    const Point b = (link.to.is_switch ? switches : machines)[link.to.index];
    if (a.x < 0 || b.x < 0) continue;
    absl::StrAppendFormat(
        &text, R"(<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="#999"><title>%g GB/s</title></line>)", a.x,
        a.y + 4, b.x, b.y + 12, link.gb_s);
    text += "\n";
  }
  for (size_t i = 0; i < switches.size(); ++i) {
    if (switches[i].x < 0) continue;
    absl::StrAppendFormat(
        &text,
        R"(<rect x="%d" y="%d" width="60" height="18" rx="9" fill="%s" stroke="#555"/><text x="%d" y="%d">%s</text>)",
        switches[i].x - 30, switches[i].y, topology.switches[i].kind == SwitchKind::kNvlink ? "#cfc" : "#fec",
        switches[i].x, switches[i].y + 12, Escaped(topology.switches[i].name));
    text += "\n";
  }
  for (size_t i = 0; i < machines.size(); ++i) {
    if (machines[i].x >= 0) text += DrawMachine(topology, topology.machines[i], machines[i]);
  }
  if (topology.machines.size() > kDrawnMax)
    absl::StrAppendFormat(&text, "<text x=\"%d\" y=\"%d\">and %d more machines</text>\n", width / 2,
                          height - 6, topology.machines.size() - kDrawnMax);
  return text + "</svg>\n";
}

}  // namespace gtrain::topology
