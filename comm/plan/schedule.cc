// Ring all-reduce (reduce-scatter, then all-gather) after Patarasu and Yuan (2009); recursive
// doubling, halving with doubling distance with a fold for counts of ranks that are no power of two, and the
// binomial broadcast tree, after Thakur, Rabenseifner and Gropp (2005); two trees after Sanders, Speck and
// Traeff (2009).
//
// Why all ranks end with the same bits: in the ring, in halving and in the trees each element is reduced
// along one fixed path and then copied; in recursive doubling both partners of an exchange compute
// lower-operand-first, so by induction all ranks of a block of 2^k hold the value of the same expression
// tree.
#include "comm/plan/schedule.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <functional>

namespace gtrain::comm {
namespace {

Action Send(int peer, Range r) { return {ActionKind::kSend, peer, r.begin, r.count}; }
Action Receive(int peer, Range r) { return {ActionKind::kReceive, peer, r.begin, r.count}; }
Action Reduce(int peer, Range r, bool incoming_first) {
  return {ActionKind::kReceiveReduce, peer, r.begin, r.count, incoming_first};
}

// Rounds without bytes are left out on both sides alike: emptiness depends on the range only.
void AddRound(Schedule& schedule, const std::vector<Action>& actions) {
  Round round;
  for (const Action& action : actions) {
    if (action.count > 0) round.push_back(action);
  }
  if (!round.empty()) schedule.push_back(std::move(round));
}

// Places 0..power-1, a power of two, are what `ranks` ranks are folded to.
struct Fold {
  int power = 1, extra = 0, place = 0;
  int RankAt(int p) const { return p < extra ? p * 2 : p + extra; }
};

// The first 2 * extra ranks fold in pairs: the even one works for both.
Schedule WithFold(int rank, int ranks, uint64_t count,
                  const std::function<void(const Fold&, Schedule&)>& between) {
  Schedule schedule;
  const Range all{0, count};
  Fold fold;
  while (fold.power * 2 <= ranks) fold.power *= 2;
  fold.extra = ranks - fold.power;
  const bool folded = rank < 2 * fold.extra;
  if (folded && rank % 2 == 1) {
    AddRound(schedule, {Send(rank - 1, all)});
    AddRound(schedule, {Receive(rank - 1, all)});
    return schedule;
  }
  if (folded) AddRound(schedule, {Reduce(rank + 1, all, /*incoming_first=*/false)});
  fold.place = folded ? rank / 2 : rank - fold.extra;
  between(fold, schedule);
  if (folded) AddRound(schedule, {Send(rank + 1, all)});
  return schedule;
}

// A binary tree of any number of places with 0 at its root and all odd ones as leaves; the root has one
// child.
int TreeParent(int place, int ranks) {
  const int lowest = place & -place, up = (place ^ lowest) | (lowest << 1);
  return up < ranks ? up : place ^ lowest;
}

int TreeDepth(int place, int ranks) {
  int depth = 0;
  for (; place != 0; place = TreeParent(place, ranks)) ++depth;
  return depth;
}

}  // namespace

Range EvenPart(uint64_t count, int parts, int index, uint64_t align) {
  const uint64_t blocks = (count + align - 1) / align;
  const uint64_t n = static_cast<uint64_t>(parts), i = static_cast<uint64_t>(index);
  const uint64_t each = blocks / n, rest = blocks % n;
  const uint64_t first = i * each + std::min(i, rest);
  const uint64_t last = first + each + (i < rest ? 1 : 0);
  const uint64_t begin = std::min(count, first * align), end = std::min(count, last * align);
  return {begin, end - begin};
}

Range RailPart(uint64_t count, int rails, int local) {
  return local < rails ? EvenPart(count, rails, local, kPartAlign) : Range{};
}

Schedule RingAllReduce(int rank, int ranks, uint64_t count) {
  Schedule schedule;
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  auto part = [&](int index) { return EvenPart(count, ranks, ((index % ranks) + ranks) % ranks); };
  for (int step = 0; step < ranks - 1; ++step) {
    AddRound(schedule, {Reduce(previous, part(rank - step - 1), /*incoming_first=*/true),
                        Send(next, part(rank - step))});
  }
  for (int step = 0; step < ranks - 1; ++step) {
    AddRound(schedule, {Receive(previous, part(rank - step)), Send(next, part(rank + 1 - step))});
  }
  return schedule;
}

Schedule DoublingAllReduce(int rank, int ranks, uint64_t count) {
  const Range all{0, count};
  return WithFold(rank, ranks, count, [&](const Fold& fold, Schedule& schedule) {
    for (int mask = 1; mask < fold.power; mask *= 2) {
      const int peer_place = fold.place ^ mask, peer = fold.RankAt(peer_place);
      AddRound(schedule, {Send(peer, all), Reduce(peer, all, peer_place < fold.place)});
    }
  });
}

Schedule HalvingDoublingAllReduce(int rank, int ranks, uint64_t count) {
  return WithFold(rank, ranks, count, [&](const Fold& fold, Schedule& schedule) {
    // Most goes to the nearest: machines are numbered so that neighbours share a switch, and what leaves it
    // is narrower. So the distance doubles while the data halves, and a place ends with the part that its
    // bits give from behind.
    const auto part_of = [&](int place) {
      int part = 0;
      for (int bit = 1; bit < fold.power; bit *= 2) part = 2 * part + (place & bit ? 1 : 0);
      return part;
    };
    // The block of `width` parts that a place is left with by halving.
    const auto block = [&](int place, int width) {
      const int first = part_of(place) / width * width;
      const uint64_t begin = EvenPart(count, fold.power, first).begin;
      const Range last = EvenPart(count, fold.power, first + width - 1);
      return Range{begin, last.begin + last.count - begin};
    };
    for (int width = fold.power / 2, distance = 1; width > 0; width /= 2, distance *= 2) {
      const int peer_place = fold.place ^ distance, peer = fold.RankAt(peer_place);
      AddRound(schedule, {Send(peer, block(peer_place, width)),
                          Reduce(peer, block(fold.place, width), peer_place < fold.place)});
    }
    for (int width = 1, distance = fold.power / 2; distance > 0; width *= 2, distance /= 2) {
      const int peer_place = fold.place ^ distance, peer = fold.RankAt(peer_place);
      AddRound(schedule, {Send(peer, block(fold.place, width)), Receive(peer, block(peer_place, width))});
    }
  });
}

int DoubleTreeDepth(int ranks) { return static_cast<int>(std::bit_width(static_cast<unsigned>(ranks - 1))); }

Schedule DoubleTreeAllReduce(int rank, int ranks, uint64_t count, int segments) {
  struct Node {
    int depth, parent;
    std::vector<int> children;
    Range half;
  };
  const auto node = [&](int tree) {
    // A leaf of one tree is inside the other, so that everybody sends and receives about as much.
    const auto swap = [&](int r) {
      return tree == 0 ? r : ranks % 2 == 0 ? ranks - 1 - r : (r + ranks - 1) % ranks;
    };
    const auto back = [&](int place) {
      return tree == 0 ? place : ranks % 2 == 0 ? ranks - 1 - place : (place + 1) % ranks;
    };
    const int place = swap(rank);
    Node n{TreeDepth(place, ranks), place == 0 ? -1 : back(TreeParent(place, ranks)), {}, {}};
    for (int other = 1; other < ranks; ++other) {
      if (TreeParent(other, ranks) == place) n.children.push_back(back(other));
    }
    n.half = EvenPart(count, 2, tree);
    return n;
  };
  const Node nodes[] = {node(0), node(1)};

  // At tick t the ranks at depth d of the deepest d = depth send segment t up, those above them segment t -
  // 1, and so on to the root and down again: the receiver of a segment gets it in the same tick.
  Schedule schedule;
  const int depth = DoubleTreeDepth(ranks);
  for (int tick = 0; tick < segments + 2 * depth - 1; ++tick) {
    std::vector<Action> actions;
    for (const Node& n : nodes) {
      const auto segment = [&](int index) {
        if (index < 0 || index >= segments) return Range{};
        const Range part = EvenPart(n.half.count, segments, index);
        return Range{n.half.begin + part.begin, part.count};
      };
      const Range joined = segment(tick - (depth - n.depth - 1)), risen = segment(tick - (depth - n.depth));
      const Range fallen = segment(tick - (depth + n.depth - 1)), done = segment(tick - (depth + n.depth));
      for (int child : n.children) actions.push_back(Reduce(child, joined, /*incoming_first=*/false));
      if (n.parent >= 0) actions.push_back(Send(n.parent, risen));
      if (n.parent >= 0) actions.push_back(Receive(n.parent, fallen));
      for (int child : n.children) actions.push_back(Send(child, done));
    }
    AddRound(schedule, actions);
  }
  return schedule;
}

Schedule TreeBroadcast(int rank, int ranks, int root, uint64_t count) {
  Schedule schedule;
  const Range all{0, count};
  const int place = (rank - root + ranks) % ranks;
  auto rank_at = [&](int p) { return (p + root) % ranks; };
  int mask = 1;
  while (mask < ranks && (place & mask) == 0) mask *= 2;
  if (place != 0) AddRound(schedule, {Receive(rank_at(place - mask), all)});
  std::vector<Action> sends;
  for (mask /= 2; mask > 0; mask /= 2) {
    if (place + mask < ranks) sends.push_back(Send(rank_at(place + mask), all));
  }
  AddRound(schedule, sends);
  return schedule;
}

Schedule TreeReduce(int rank, int ranks, int root, uint64_t count) {
  Schedule schedule;
  const Range all{0, count};
  const int place = (rank - root + ranks) % ranks;
  auto rank_at = [&](int p) { return (p + root) % ranks; };
  int mask = 1;
  for (; mask < ranks && (place & mask) == 0; mask *= 2) {
    if (place + mask < ranks) {
      AddRound(schedule, {Reduce(rank_at(place + mask), all, /*incoming_first=*/false)});
    }
  }
  if (place != 0) AddRound(schedule, {Send(rank_at(place - mask), all)});
  return schedule;
}

Schedule DirectReduceScatter(int rank, int ranks, uint64_t count) {
  Schedule schedule;
  std::vector<Action> actions;
  for (int step = 1; step < ranks; ++step) {
    const int from = (rank + ranks - step) % ranks, to = (rank + step) % ranks;
    actions.push_back(Reduce(from, {0, count}, /*incoming_first=*/false));
    actions.push_back(Send(to, {static_cast<uint64_t>(to) * count, count}));
  }
  AddRound(schedule, actions);
  return schedule;
}

Schedule DirectReduceScatter(int rank, const std::vector<Range>& parts) {
  Schedule schedule;
  const int ranks = static_cast<int>(parts.size());
  std::vector<Action> actions;
  for (int step = 1; step < ranks; ++step) {
    const int from = (rank + ranks - step) % ranks, to = (rank + step) % ranks;
    actions.push_back(Reduce(from, parts[static_cast<size_t>(rank)], /*incoming_first=*/false));
    actions.push_back(Send(to, parts[static_cast<size_t>(to)]));
  }
  AddRound(schedule, actions);
  return schedule;
}

Schedule ReduceInParts(int rank, int ranks, int root, uint64_t count) {
  std::vector<Range> parts;
  for (int i = 0; i < ranks; ++i) parts.push_back(EvenPart(count, ranks, i, kPartAlign));
  Schedule schedule = DirectReduceScatter(rank, parts);
  std::vector<Action> actions;
  for (int i = 0; i < ranks; ++i) {
    const Range part = parts[static_cast<size_t>(rank == root ? i : rank)];
    if (i == root) continue;
    if (rank == root) actions.push_back(Receive(i, part));
    if (rank == i) actions.push_back(Send(root, part));
  }
  AddRound(schedule, actions);
  return schedule;
}

Schedule DirectAllToAll(int rank, int ranks, uint64_t count) {
  Schedule schedule;
  std::vector<Action> actions;
  for (int step = 1; step < ranks; ++step) {
    const int from = (rank + ranks - step) % ranks, to = (rank + step) % ranks;
    actions.push_back(Receive(from, {static_cast<uint64_t>(from) * count, count}));
    actions.push_back(Send(to, {static_cast<uint64_t>(to) * count, count}));
  }
  AddRound(schedule, actions);
  return schedule;
}

Schedule AllGatherSchedule(int rank, const std::vector<Range>& parts) {
  Schedule schedule;
  const int ranks = static_cast<int>(parts.size());
  auto part = [&](int index) { return parts[static_cast<size_t>(((index % ranks) + ranks) % ranks)]; };
  if (ranks <= kDirectRanksMax) {
    std::vector<Action> actions;
    for (int step = 1; step < ranks; ++step) {
      const int from = (rank + ranks - step) % ranks, to = (rank + step) % ranks;
      actions.push_back(Receive(from, part(from)));
      actions.push_back(Send(to, part(rank)));
    }
    AddRound(schedule, actions);
    return schedule;
  }
  // Each has the parts of `have` ranks from its own on, and gives so many, as far as they are needed, to the
  // rank that is so far before it. Parts that follow each other in memory go as one message.
  const auto ranges = [&](int first, int count) {
    std::vector<Range> merged;
    for (int i = 0; i < count; ++i) {
      const Range next = part(first + i);
      if (!merged.empty() && merged.back().begin + merged.back().count == next.begin) {
        merged.back().count += next.count;
      } else {
        merged.push_back(next);
      }
    }
    return merged;
  };
  for (int have = 1; have < ranks; have *= 2) {
    const int count = std::min(have, ranks - have), from = (rank + have) % ranks;
    std::vector<Action> actions;
    for (const Range& range : ranges(from, count)) actions.push_back(Receive(from, range));
    for (const Range& range : ranges(rank, count))
      actions.push_back(Send((rank + ranks - have) % ranks, range));
    AddRound(schedule, actions);
  }
  return schedule;
}

}  // namespace gtrain::comm
