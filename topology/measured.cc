#include "topology/measured.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/rng.h"
#include "topology/builder.h"

namespace gtrain::topology {
namespace {

// Groups of two levels differ at least by this factor in speed. Measurements of equal links differ by less.
constexpr double kStep = 1.5;
constexpr uint64_t kSeed = 22;

using Rounds = std::vector<std::vector<Pair>>;

// The circle method: one machine stays, the others go round. In each turn others meet at the same time.
Rounds AllPairs(int machines, int turn) {
  const int n = machines + machines % 2;
  std::vector<int> seat(static_cast<size_t>(machines));
  std::iota(seat.begin(), seat.end(), 0);
  Rng random(kSeed + static_cast<uint64_t>(turn));
  std::ranges::shuffle(seat, random);
  Rounds rounds;
  for (int r = 0; r + 1 < n; ++r) {
    std::vector<Pair> round;
    for (int i = 0; i < n / 2; ++i) {
      const int a = i == 0 ? n - 1 : (r + i) % (n - 1), b = (r + n - 1 - i) % (n - 1);
      if (std::max(a, b) < machines)
        round.push_back({std::min(seat[a], seat[b]), std::max(seat[a], seat[b])});
    }
    rounds.push_back(std::move(round));
  }
  return rounds;
}

// Rounds of near pairs, of machines that follow each other or are a power of two apart, and rounds of random
// ones. Three quarters of the machines of a near round are in random pairs, too: where most pairs are near an
// uplink carries so little that nobody notices how narrow it is.
class SomePairs {
 public:
  SomePairs(int machines, int turn)
      : machines_(machines),
        order_(static_cast<size_t>(machines)),
        random_(kSeed + static_cast<uint64_t>(turn)) {
    std::iota(order_.begin(), order_.end(), 0);
  }

  Rounds Make() {
    NearRounds(1, 1);
    for (int step = 1; step <= kNearMax; step *= 2) NearRounds(0, step);
    for (int n = machines_; n > 1; n /= 2) {
      for (int twice = 0; twice < 2; ++twice) EndRound();
    }
    return std::move(rounds_);
  }

 private:
  static constexpr int kNearMax = 32, kParts = 4;

  void NearRounds(int first, int step) {
    for (int part = 0; part < kParts; ++part) {
      int number = 0;
      for (int i = first; i + step < machines_; ++i) {
        if ((i - first) / step % 2 == 0 && number++ % kParts == part) Add(i, i + step);
      }
      EndRound();
    }
  }
  void Add(int a, int b) {
    if (busy_.contains(a) || busy_.contains(b) || !seen_.emplace(std::min(a, b), std::max(a, b)).second)
      return;
    busy_.insert({a, b});
    round_.push_back({std::min(a, b), std::max(a, b)});
  }
  // Who is not in a pair yet gets a random partner.
  void EndRound() {
    std::ranges::shuffle(order_, random_);
    int waits = -1;
    for (const int machine : order_) {
      if (busy_.contains(machine)) continue;
      if (waits >= 0) Add(waits, machine);
      waits = waits >= 0 ? -1 : machine;
    }
    rounds_.push_back(std::move(round_));
    round_.clear();
    busy_.clear();
  }

  const int machines_;
  std::vector<int> order_;
  Rng random_;
  absl::flat_hash_set<std::pair<int, int>> seen_;
  absl::flat_hash_set<int> busy_;
  std::vector<Pair> round_;
  Rounds rounds_;
};

// The speed of the fastest pair of each machine: what its own link can do.
std::vector<double> OwnSpeeds(int machines, absl::Span<const PairSpeed> pairs) {
  std::vector<double> own(static_cast<size_t>(machines), 0);
  for (const PairSpeed& pair : pairs) {
    for (const int end : {pair.a, pair.b}) own[end] = std::max(own[end], pair.gb_s);
  }
  return own;
}

// Clusters of machines and the mean distance of those pairs between them that were measured.
class Clusters {
 public:
  struct Merge {
    int a, b;
    double height;
  };

  Clusters(int machines, absl::Span<const PairSpeed> pairs) : near_(static_cast<size_t>(machines)) {
    const std::vector<double> own = OwnSpeeds(machines, pairs);
    for (const PairSpeed& pair : pairs) {
      if (pair.a == pair.b || !(pair.gb_s > 0)) continue;
      const double distance = std::log(std::min(own[pair.a], own[pair.b]) / pair.gb_s);
      Add(near_[pair.a][pair.b], {distance, 1});
      Add(near_[pair.b][pair.a], {distance, 1});
    }
  }

  // All merges in the order in which they are made. Their heights never fall: where pairs are missing a mean
  // may be smaller than one that was merged before.
  std::vector<Merge> MergeAll() {
    for (size_t a = 0; a < near_.size(); ++a) {
      for (const auto& [b, mean] : near_[a]) {
        if (static_cast<int>(a) < b) Offer(static_cast<int>(a), b, mean);
      }
    }
    std::vector<Merge> merges;
    double height = 0;
    while (!queue_.empty()) {
      const auto [distance, a, b, count] = queue_.top();
      queue_.pop();
      const auto it = near_[a].find(b);
      if (it == near_[a].end() || it->second.count != count) continue;  // one of them has changed since
      height = std::max(height, distance);
      merges.push_back({a, b, height});
      Join(a, b);
    }
    return merges;
  }

 private:
  struct Mean {
    double sum = 0;
    int count = 0;
  };
  using Entry = std::tuple<double, int, int, int>;  // mean, both, number of pairs

  static void Add(Mean& to, const Mean& more) {
    to.sum += more.sum;
    to.count += more.count;
  }
  void Offer(int a, int b, const Mean& mean) {
    queue_.emplace(mean.sum / mean.count, std::min(a, b), std::max(a, b), mean.count);
  }
  // The one that has fewer neighbours becomes part of the other.
  void Join(int a, int b) {
    if (near_[a].size() > near_[b].size()) std::swap(a, b);
    near_[b].erase(a);
    for (const auto& [other, mean] : near_[a]) {
      if (other == b) continue;
      near_[other].erase(a);
      Mean& joined = near_[b][other];
      Add(joined, mean);
      near_[other][b] = joined;
      Offer(b, other, joined);
    }
    near_[a].clear();
  }

  std::vector<absl::flat_hash_map<int, Mean>> near_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

GroupLevel LevelOf(int machines, absl::Span<const Clusters::Merge> merges) {
  std::vector<int> parent(static_cast<size_t>(machines));
  std::iota(parent.begin(), parent.end(), 0);
  const auto find = [&](int i) {
    while (parent[i] != i) i = parent[i] = parent[parent[i]];
    return i;
  };
  for (const Clusters::Merge& merge : merges) parent[find(merge.a)] = find(merge.b);
  GroupLevel level;
  std::map<int, int> numbers;
  for (int m = 0; m < machines; ++m)
    level.group_of.push_back(numbers.emplace(find(m), static_cast<int>(numbers.size())).first->second);
  return level;
}

// The middle value; 0 where there is none.
double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// [level]: the latency between machines that share a group of that level but none of a narrower one; the last
// is of those that share none.
std::vector<double> LatencyByLevel(const Measured& measured) {
  std::vector<std::vector<double>> found(measured.levels.size() + 1);
  for (const PairSpeed& pair : measured.pairs) {
    size_t level = 0;
    while (level < measured.levels.size() &&
           measured.levels[level].group_of[pair.a] != measured.levels[level].group_of[pair.b])
      ++level;
    if (pair.us > 0) found[level].push_back(pair.us);
  }
  std::vector<double> out;
  for (std::vector<double>& values : found) out.push_back(Median(std::move(values)));
  return out;
}

// Three digits: more would be noise, and files of two measurements are to be compared.
double Rounded(double value) {
  if (!(value > 0)) return 0;
  double rounded = 0;
  return absl::SimpleAtod(absl::StrFormat("%.3g", value), &rounded) ? rounded : value;
}

constexpr const char* kLevelNames[] = {"leaf", "pod", "zone"};
static_assert(std::size(kLevelNames) == kGroupLevelsMax);

}  // namespace

int GroupLevel::groups() const {
  return group_of.empty() ? 0 : 1 + *std::max_element(group_of.begin(), group_of.end());
}

Rounds ProbeRounds(int machines, int turn) {
  return machines <= kAllPairsMax ? AllPairs(machines, turn) : SomePairs(machines, turn).Make();
}

std::vector<GroupLevel> FindGroups(int machines, absl::Span<const PairSpeed> pairs) {
  const std::vector<Clusters::Merge> merges = Clusters(machines, pairs).MergeAll();
  // A level is what was merged before a step in height; the largest steps count.
  std::vector<std::pair<double, size_t>> steps;
  for (size_t i = 1; i < merges.size(); ++i) {
    const double step = merges[i].height - merges[i - 1].height;
    if (step >= std::log(kStep)) steps.emplace_back(step, i);
  }
  std::ranges::sort(steps, std::greater<>());
  if (steps.size() > kGroupLevelsMax) steps.resize(kGroupLevelsMax);
  std::ranges::sort(steps, {}, &std::pair<double, size_t>::second);
  std::vector<GroupLevel> levels;
  for (const auto& [step, merged] : steps)
    levels.push_back(LevelOf(machines, absl::MakeConstSpan(merges).subspan(0, merged)));
  return levels;
}

std::vector<Pair> PairsAcross(absl::Span<const GroupLevel> levels, size_t level, int group) {
  const std::vector<int>& group_of = levels[level].group_of;
  const auto inside_of = [&](size_t m) { return group_of[m] == group; };
  std::vector<int> inside;
  for (size_t m = 0; m < group_of.size(); ++m) {
    if (inside_of(m)) inside.push_back(static_cast<int>(m));
  }
  // [near or far][turn]: machine number `turn` of each other group.
  std::vector<std::vector<int>> by_turn[2];
  std::vector<size_t> seen(static_cast<size_t>(levels[level].groups()));
  for (size_t m = 0; m < group_of.size(); ++m) {
    if (inside_of(m)) continue;
    const bool far =
        level + 1 < levels.size() && levels[level + 1].group_of[m] != levels[level + 1].group_of[inside[0]];
    const size_t turn = seen[group_of[m]]++;
    if (by_turn[far].size() <= turn) by_turn[far].resize(turn + 1);
    by_turn[far][turn].push_back(static_cast<int>(m));
  }
  std::vector<Pair> pairs;
  for (const auto& turns : by_turn) {
    for (const std::vector<int>& turn : turns) {
      for (const int outside : turn) {
        if (pairs.size() < inside.size()) pairs.push_back({inside[pairs.size()], outside});
      }
    }
  }
  return pairs;
}

absl::StatusOr<Topology> TopologyOf(const Measured& measured, const Shape& shape) {
  if (measured.levels.size() > kGroupLevelsMax)
    return absl::InvalidArgumentError(absl::StrCat("more than ", kGroupLevelsMax, " levels of groups"));
  const int machines = static_cast<int>(measured.machines.size());
  const std::vector<double> own = OwnSpeeds(machines, measured.pairs);
  const std::vector<double> latency = LatencyByLevel(measured);
  Topology out;
  out.name = "measured";
  out.shapes = {shape};
  Builder builder(out);
  for (int m = 0; m < machines; ++m) {
    if (builder.Machine(measured.machines[m]) != m)
      return absl::InvalidArgumentError(absl::StrCat("two machines are called ", measured.machines[m]));
    if (!(own[m] > 0))
      return absl::InvalidArgumentError(
          absl::StrCat(measured.machines[m], " has exchanged nothing with any other machine"));
  }
  const auto switch_of = [&](size_t level, int machine) {
    if (level == measured.levels.size()) return builder.Switch("/core");
    return builder.Switch(absl::StrCat("/", kLevelNames[level], measured.levels[level].group_of[machine]));
  };
  // A message goes up and down again, so each side has half of it.
  const auto us_up = [&](size_t level) {
    const double below = level == 0 ? 0 : latency[level - 1];
    return Rounded(std::max(0.0, latency[level] - below) / 2);
  };
  for (int m = 0; m < machines; ++m) builder.LinkMachine(m, switch_of(0, m), Rounded(own[m]), us_up(0));
  for (size_t l = 0; l < measured.levels.size(); ++l) {
    const GroupLevel& level = measured.levels[l];
    std::vector<bool> linked(static_cast<size_t>(level.groups()));
    for (int m = 0; m < machines; ++m) {
      const int group = level.group_of[m];
      if (linked[group]) continue;
      linked[group] = true;
      const double gb_s = static_cast<size_t>(group) < level.gb_s.size() ? level.gb_s[group] : 0;
      builder.LinkSwitch(switch_of(l, m), switch_of(l + 1, m), Rounded(gb_s), us_up(l + 1));
    }
  }
  if (const absl::Status valid = Validate(out); !valid.ok()) return valid;
  return out;
}

}  // namespace gtrain::topology
