// The bound, from how little can leave a domain that holds few ranks.
//
// Let a domain hold s ranks, and let x_a of the mesh's lines along axis a have a rank in it. By the
// inequality of Loomis and Whitney the product of all x_a is at least s^(k-1) for k axes, so the mean lengths
// of the pieces, e_a = s / x_a, have a product of at most s. What leaves the domain along axis a is linear in
// x_a: a ring that is cut into q > 1 pieces has q cut edges, a chain q - 1, and of all-to-all a piece of
// length e has e (A - e) pairs that part. Where whole lines fit into a domain, the law is the straight line
// from "all pieces are single ranks" to "all are whole lines", below which nothing lies. So a rank of the
// domain costs at least the minimum of sum_a law_a(e_a) over e_a >= 1 with a product of at most s, which has
// one multiplier to find (Rate).
//
// That rate falls when s grows. So all ranks together cost at least what they cost when the largest domains
// are filled first. A level's cut weighs what its links add to the distance. For the time, every axis may be
// looked at on the level that serves the bound best: on one level the cuts of several axes share the domains,
// on two levels they do not (Best).
#include "topology/place/bound.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>

namespace gtrain::topology {
namespace {

constexpr size_t kAxesMax = 6;

// The least GB that leave a domain of `room` ranks, for each of them, along the axes of `subset`.
double Rate(const Mesh& mesh, unsigned subset, double room) {
  std::array<CutLaw, kAxesMax> laws;
  size_t count = 0;
  double fixed = 0, most = 1;
  for (size_t i = 0; i < mesh.axes.size(); ++i) {
    if ((subset >> i & 1U) == 0 || mesh.axes[i].size <= 1) continue;
    laws[count] = CutLawOf(mesh.axes[i], room);
    fixed += laws[count].fixed;
    most *= laws[count].extent_max;
    ++count;
  }
  const auto extent = [&](size_t i, double multiplier) {
    return std::clamp(laws[i].per_piece / multiplier, 1.0, laws[i].extent_max);
  };
  double low = 1e-12, high = 1;
  for (size_t i = 0; i < count; ++i) high = std::max(high, laws[i].per_piece);
  for (int step = 0; step < 60 && most > room; ++step) {
    const double middle = std::sqrt(low * high);
    double product = 1;
    for (size_t i = 0; i < count; ++i) product *= extent(i, middle);
    (product > room ? low : high) = middle;
  }
  double rate = fixed;
  for (size_t i = 0; i < count; ++i) rate += laws[i].per_piece / extent(i, low);
  return std::max(0.0, rate);
}

// How many domains of a level have so many usable slots; the fullest first.
using Rooms = std::map<int, int, std::greater<>>;

Rooms RoomsOf(const Fabric& fabric, size_t level, const std::vector<int32_t>& usable, double& up_gb_s) {
  std::vector<int> count(fabric.levels[level].count(), 0);
  for (const int32_t slot : usable) ++count[fabric.domain[level][slot]];
  Rooms rooms;
  for (size_t d = 0; d < count.size(); ++d) {
    if (count[d] == 0) continue;
    ++rooms[count[d]];
    up_gb_s += fabric.levels[level].up_gb_s[d];
  }
  return rooms;
}

double Cut(const Mesh& mesh, unsigned subset, const Rooms& rooms) {
  double left = static_cast<double>(mesh.ranks()), cut = 0;
  for (const auto& [room, count] : rooms) {
    const double taken = std::min(left, static_cast<double>(room) * count);
    cut += taken * Rate(mesh, subset, room);
    left -= taken;
    if (left <= 0) break;
  }
  return cut;
}

// The largest sum over levels of seconds[level][axes looked at there], each axis once.
double Best(const std::vector<std::vector<double>>& seconds, unsigned subsets) {
  std::vector<double> best(subsets, 0);
  for (const std::vector<double>& of_level : seconds) {
    std::vector<double> next = best;
    for (unsigned all = 1; all < subsets; ++all) {
      for (unsigned here = all; here != 0; here = (here - 1) & all)
        next[all] = std::max(next[all], best[all ^ here] + of_level[here]);
    }
    best = std::move(next);
  }
  return best[subsets - 1];
}

}  // namespace

Bound LowerBound(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable) {
  Bound bound;
  if (mesh.axes.size() > kAxesMax || usable.empty()) return bound;
  const unsigned subsets = 1U << mesh.axes.size();
  double fastest = 0, sent = 0;
  for (const double speed : fabric.slot_gb_s) fastest = std::max(fastest, speed);
  std::vector<std::vector<double>> seconds(1, std::vector<double>(subsets, 0));
  for (unsigned subset = 1; subset < subsets; ++subset) {
    for (size_t i = 0; i < mesh.axes.size(); ++i) {
      const Axis& axis = mesh.axes[i];
      if ((subset >> i & 1U) == 0 || axis.size <= 1) continue;
      seconds[0][subset] +=
          axis.pattern == Pattern::kChain && axis.size == 2 ? axis.gb / 2 / fastest : axis.gb / fastest;
    }
  }
  for (const Axis& axis : mesh.axes) {
    const double edges = axis.pattern == Pattern::kChain ? axis.size - 1.0 : axis.size;
    if (axis.size > 1) sent += axis.gb * edges / axis.size * static_cast<double>(mesh.ranks());
  }
  bound.total = sent * fabric.seconds_per_gb[0];
  for (size_t level = 0; level + 1 < fabric.levels.size(); ++level) {
    double up_gb_s = 0;
    const Rooms rooms = RoomsOf(fabric, level, usable, up_gb_s);
    std::vector<double> of_level(subsets, 0);
    for (unsigned subset = 1; subset < subsets; ++subset) of_level[subset] = Cut(mesh, subset, rooms);
    bound.total += of_level[subsets - 1] * (fabric.seconds_per_gb[level + 1] - fabric.seconds_per_gb[level]);
    for (double& gb : of_level) gb /= up_gb_s;
    seconds.push_back(std::move(of_level));
  }
  bound.seconds = Best(seconds, subsets);
  return bound;
}

}  // namespace gtrain::topology
