// The bound, from how little can leave a domain that holds few ranks.
//
// Let a domain hold s ranks, and let x_a of the mesh's lines along axis a have a rank in it. By the
// inequality of Loomis and Whitney (1949) the product of all x_a is at least s^(k-1) for k axes, so the mean
// lengths of the pieces, e_a = s / x_a, have a product of at most s. What leaves the domain along axis a is
// linear in x_a: a ring that is cut into q > 1 pieces has q cut edges, a chain q - 1, and of all-to-all a
// piece of length e has e (A - e) pairs that part. Where whole lines fit into a domain, the law is the
// straight line from "all pieces are single ranks" to "all are whole lines", below which nothing lies. So a
// rank of the domain costs at least the minimum of sum_a law_a(e_a) over e_a >= 1 with a product of at most
// s, which has one multiplier to find (Rate). That rate falls when s grows. So all ranks together cost at
// least what they cost when the largest domains are filled first.
//
// That line is far below what a ring costs which is nearly whole. Counting in whole numbers is sharper
// (Least). With two axes a domain has x_a x_b >= s, a line along a can be whole only if x_b is all of A, and
// of x_a lines at most (s - x_a) / (A - 1) are whole. A third axis of A ranks that sends very much, as tp
// does, is taken off first: it cuts the domain into A slices, of m to M ranks. M - m of its lines at least
// are neither whole nor outside, and cost its GB each. A rank more or less changes what a slice costs by no
// more than what all other axes send, L. So a domain whose slices differ saves at most A L / 2 of (M - m)
// against one whose slices are equal, and where the axis sends more than that, equal slices are best.
//
// A level's cut weighs what its links add to the distance. For the time, every axis may be looked at on the
// level that serves the bound best: on one level the cuts of several axes share the domains, on two levels
// they do not (Climber).
//
// Where no usable slot stays free, each domain is known to be full, so for the time the one that takes
// longest counts, not only the mean of a level. Of a chain, though, only the sum over all domains is known to
// be q - 1: alone, a domain that has a part of a chain sends to one neighbour at least.
#include "topology/place/bound.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace gtrain::topology {
namespace {

constexpr size_t kAxesMax = 6;

using Shares = std::array<double, kAxesMax>;  // [axis]: weight of what it sends

// The least GB that leave a domain of `room` ranks, for each of them, weighed by `shares`.
double Rate(const Mesh& mesh, const Shares& shares, double room) {
  std::array<CutLaw, kAxesMax> laws;
  size_t count = 0;
  double fixed = 0, most = 1;
  for (size_t i = 0; i < mesh.axes.size(); ++i) {
    if (mesh.axes[i].size <= 1 || shares[i] <= 0) continue;
    laws[count] = CutLawOf(mesh.axes[i], room);
    laws[count].fixed *= shares[i];
    laws[count].per_piece *= shares[i];
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

// The least GB that leave a domain of a given number of ranks: on average over all domains, or of any.
class Least {
 public:
  enum class Of { kAverage, kAny };

  Least(const Mesh& mesh, const Shares& shares, Of of) {
    std::vector<Side> sides;
    for (size_t i = 0; i < mesh.axes.size(); ++i) {
      const Axis& axis = mesh.axes[i];
      if (axis.size <= 1) continue;
      sides.push_back({axis.size, axis.pattern, axis.gb * shares[i]});
      // A part of a chain has one neighbour at least, as a part of a ring has a next one.
      if (of == Of::kAny && axis.pattern == Pattern::kChain)
        sides.back() = {axis.size, Pattern::kRing, axis.gb * shares[i] / 2};
    }
    std::ranges::sort(sides, {}, &Side::gb);
    double others = 0;
    for (const Side& side : sides) others += side.gb;
    while (!sides.empty() && sides.back().pattern != Pattern::kChain) {
      const Side& side = sides.back();
      const double saved = side.size * (others - side.gb) / 2;
      if (side.gb < saved) break;
      others -= side.gb;
      slice_ *= side.size;
      sides.pop_back();
    }
    known_ = sides.size() <= 2 && std::ranges::count(sides, Pattern::kAllToAll, &Side::pattern) == 0;
    for (size_t i = 0; i < sides.size() && known_; ++i) sides_[i] = sides[i];
  }

  // Of a rank in domains of at most `room`.
  double Rate(int64_t room) const {
    const int64_t most = (room + slice_ - 1) / slice_;
    if (!known_ || most > kRanksOfRate) return 0;
    double least = std::numeric_limits<double>::max();
    for (int64_t ranks = 1; ranks <= most; ++ranks)
      least = std::min(least, OfSlice(ranks) / static_cast<double>(ranks));
    return std::max(0.0, least);
  }

  // 0 for the meshes that nothing is known of.
  double At(int64_t ranks) const {
    if (!known_) return 0;
    const int64_t whole = ranks / slice_;
    const double part = static_cast<double>(ranks % slice_) / static_cast<double>(slice_);
    const double least = OfSlice(whole) + (part > 0 ? part * (OfSlice(whole + 1) - OfSlice(whole)) : 0);
    return std::max(0.0, least * static_cast<double>(slice_));
  }

 private:
  struct Side {
    int size = 1;
    Pattern pattern = Pattern::kChain;
    double gb = 0;
  };

  // Of `lines` along a side with so many ranks in all; `crossing`: that are touched of the others.
  static double Gb(const Side& side, int64_t ranks, int64_t lines, int64_t crossing) {
    const double chain = side.pattern == Pattern::kChain ? static_cast<double>(ranks) / side.size : 0;
    const bool closed = side.pattern == Pattern::kRing && crossing == side.size;
    const int64_t whole = closed ? std::min(lines, (ranks - lines) / (side.size - 1)) : 0;
    return side.gb * (static_cast<double>(lines - whole) - chain);
  }

  double OfSlice(int64_t ranks) const {
    const auto& [a, b] = sides_;
    double least = std::numeric_limits<double>::max();
    for (int64_t along_a = 1; along_a <= std::min<int64_t>(ranks, b.size); ++along_a) {
      const int64_t along_b = (ranks + along_a - 1) / along_a;
      // More lines than needed help only where that makes lines along the other side whole.
      for (const int64_t lines : {along_b, int64_t{a.size}}) {
        if (lines < along_b || lines > std::min<int64_t>(ranks, a.size)) continue;
        least = std::min(least, Gb(a, ranks, along_a, lines) + Gb(b, ranks, lines, along_a));
      }
    }
    return ranks == 0 ? 0 : least;
  }

  static constexpr int64_t kRanksOfRate = 256;  // of a slice, which bounds the time

  std::array<Side, 2> sides_;  // b's lines are as many as a has ranks
  int64_t slice_ = 1;          // ranks of all lines that were taken off
  bool known_ = false;
};

// The domains of a level that have so many usable slots; the fullest first.
struct Room {
  int count = 0;
  double gb_s = std::numeric_limits<double>::max();  // of the slowest
};
using Rooms = std::map<int, Room, std::greater<>>;

// One level of the time: the slots' own links first, then those of domains.
struct Tier {
  Rooms rooms;        // of slots: empty
  double gb_s = 0;    // together
  bool full = false;  // no usable slot stays free
};

Tier TierOf(const Fabric& fabric, size_t level, const std::vector<int32_t>& usable, int64_t ranks) {
  std::vector<int> count(fabric.levels[level].count(), 0);
  for (const int32_t slot : usable) ++count[fabric.domain[level][slot]];
  Tier tier;
  tier.full = static_cast<int64_t>(usable.size()) == ranks;
  for (size_t d = 0; d < count.size(); ++d) {
    if (count[d] == 0) continue;
    Room& room = tier.rooms[count[d]];
    ++room.count;
    room.gb_s = std::min(room.gb_s, fabric.levels[level].up_gb_s[d]);
    tier.gb_s += fabric.levels[level].up_gb_s[d];
  }
  return tier;
}

double Cut(const Mesh& mesh, const Shares& shares, const Tier& tier) {
  double left = static_cast<double>(mesh.ranks()), cut = 0;
  const Least least(mesh, shares, Least::Of::kAverage);
  for (const auto& [size, room] : tier.rooms) {
    const double taken = std::min(left, static_cast<double>(size) * room.count);
    const double gb =
        std::max(size * Rate(mesh, shares, size), tier.full ? least.At(size) : size * least.Rate(size));
    cut += taken * gb / size;
    left -= taken;
    if (left <= 0) break;
  }
  return cut;
}

double SecondsOf(const Mesh& mesh, const Tier& tier, const Shares& shares) {
  if (!tier.rooms.empty()) {
    double seconds = Cut(mesh, shares, tier) / tier.gb_s;
    const Least least(mesh, shares, Least::Of::kAny);
    for (const auto& [size, room] : tier.rooms) {
      if (tier.full) seconds = std::max(seconds, least.At(size) / room.gb_s);
    }
    return seconds;
  }
  double gb = 0;
  for (size_t i = 0; i < mesh.axes.size(); ++i) {
    const Axis& axis = mesh.axes[i];
    const bool pair = axis.pattern == Pattern::kChain && axis.size == 2;
    if (axis.size > 1) gb += shares[i] * (pair ? axis.gb / 2 : axis.gb);
  }
  return gb / tier.gb_s;
}

class Climber {
 public:
  Climber(const Mesh& mesh, const std::vector<Tier>& tiers) : mesh_(mesh), tiers_(tiers) {}

  // Of some ways to begin with the best one, then moved.
  double Run() {
    // Alone every axis has its best bound on the slots' links. But axes that share domains bound each other
    // there only if the one that would fill them has some share there, too.
    size_t largest = 0;
    for (size_t i = 0; i < mesh_.axes.size(); ++i) {
      if (mesh_.axes[i].size > 1 && mesh_.axes[i].gb > mesh_.axes[largest].gb) largest = i;
    }
    std::vector<Shares> best;
    double best_seconds = -1;
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
      for (const double part : {0.05, 0.1, 0.2, 0.35, 0.5, 1.0}) {
        std::vector<Shares> shares(tiers_.size(), Shares{});
        for (size_t i = 0; i < mesh_.axes.size(); ++i) {
          const double here = i == largest ? part : 1;
          shares[0][i] += 1 - here;
          shares[tier][i] += here;
        }
        Begin(std::move(shares));
        if (Sum() <= best_seconds) continue;
        best_seconds = Sum();
        best = shares_;
      }
    }
    Begin(std::move(best));
    for (const double step : {0.5, 0.2, 0.1, 0.05, 0.02}) {
      for (int round = 0; round < 8 && Round(step); ++round) {
      }
    }
    return Sum();
  }

 private:
  void Begin(std::vector<Shares> shares) {
    shares_ = std::move(shares);
    seconds_.clear();
    for (size_t t = 0; t < tiers_.size(); ++t) seconds_.push_back(SecondsOf(mesh_, tiers_[t], shares_[t]));
  }
  double Sum() const { return std::accumulate(seconds_.begin(), seconds_.end(), 0.0); }

  // Moves shares of one axis at a time from one tier to another where that raises the sum.
  bool Round(double step) {
    bool moved = false;
    for (size_t axis = 0; axis < mesh_.axes.size(); ++axis) {
      for (size_t from = 0; from < tiers_.size() && mesh_.axes[axis].size > 1; ++from) {
        for (size_t to = 0; to < tiers_.size(); ++to)
          moved = (from != to && Shift(axis, from, to, step)) || moved;
      }
    }
    return moved;
  }

  bool Shift(size_t axis, size_t from, size_t to, double step) {
    step = std::min(step, shares_[from][axis]);
    if (step <= 0) return false;
    Shares less = shares_[from], more = shares_[to];
    less[axis] -= step;
    more[axis] += step;
    const double a = SecondsOf(mesh_, tiers_[from], less), b = SecondsOf(mesh_, tiers_[to], more);
    if (a + b <= (seconds_[from] + seconds_[to]) * (1 + 1e-9)) return false;
    shares_[from] = less;
    shares_[to] = more;
    seconds_[from] = a;
    seconds_[to] = b;
    return true;
  }

  const Mesh& mesh_;
  const std::vector<Tier>& tiers_;
  std::vector<Shares> shares_;  // [tier]
  std::vector<double> seconds_;
};

}  // namespace

Bound LowerBound(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable) {
  Bound bound;
  if (mesh.axes.size() > kAxesMax || usable.empty()) return bound;
  Shares all;
  all.fill(1);
  double sent = 0;
  for (const Axis& axis : mesh.axes) {
    const double edges = axis.pattern == Pattern::kChain ? axis.size - 1.0 : axis.size;
    if (axis.size > 1) sent += axis.gb * edges / axis.size * static_cast<double>(mesh.ranks());
  }
  bound.total = sent * fabric.seconds_per_gb[0];
  // The slowest slot decides, but a plan may leave all but the fastest ones out.
  std::vector<Tier> tiers = {{{}, *std::ranges::max_element(fabric.slot_gb_s)}};
  for (size_t level = 0; level + 1 < fabric.levels.size(); ++level) {
    Tier tier = TierOf(fabric, level, usable, mesh.ranks());
    bound.total += Cut(mesh, all, tier) * (fabric.seconds_per_gb[level + 1] - fabric.seconds_per_gb[level]);
    tiers.push_back(std::move(tier));
  }
  bound.seconds = Climber(mesh, tiers).Run();
  return bound;
}

}  // namespace gtrain::topology
