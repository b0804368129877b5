// Ring all-reduce (reduce-scatter, then all-gather) after Patarasu and Yuan (2009); recursive
// doubling with a fold for counts of ranks that are no power of two, and the binomial broadcast tree,
// after Thakur, Rabenseifner and Gropp (2005).
//
// Why all ranks end with the same bits: in the ring each segment is reduced along one fixed path and then
// copied; in recursive doubling both partners of an exchange compute lower-operand-first, so
// by induction all ranks of a block of 2^k hold the value of the same expression tree.
#include "comm/plan/schedule.h"

#include <algorithm>
#include <cstddef>

namespace gtrain::comm {
namespace {

// Below this recursive doubling wins: two thousand elements fit one or two packets anyway.
constexpr uint64_t kDoublingBytesMax = 32 << 10;

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

int FloorPowerOfTwo(int n) {
  int power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
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
  Schedule schedule;
  const Range all{0, count};
  const int power = FloorPowerOfTwo(ranks), extra = ranks - power;
  // The first 2 * extra ranks fold in pairs: the even one works for both.
  const bool folded = rank < 2 * extra;
  if (folded && rank % 2 == 1) {
    AddRound(schedule, {Send(rank - 1, all)});
    AddRound(schedule, {Receive(rank - 1, all)});
    return schedule;
  }
  if (folded) AddRound(schedule, {Reduce(rank + 1, all, /*incoming_first=*/false)});
  const int place = folded ? rank / 2 : rank - extra;
  auto rank_at = [&](int p) { return p < extra ? p * 2 : p + extra; };
  for (int mask = 1; mask < power; mask *= 2) {
    const int peer_place = place ^ mask;
    AddRound(schedule,
             {Send(rank_at(peer_place), all), Reduce(rank_at(peer_place), all, peer_place < place)});
  }
  if (folded) AddRound(schedule, {Send(rank + 1, all)});
  return schedule;
}

Schedule AllReduceSchedule(int rank, int ranks, uint64_t count, uint64_t element_bytes) {
  // With two ranks doubling is one round against two and moves the same bytes only when small.
  if (count * element_bytes <= kDoublingBytesMax) return DoublingAllReduce(rank, ranks, count);
  return RingAllReduce(rank, ranks, count);
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

Schedule AllGatherSchedule(int rank, const std::vector<uint64_t>& offsets) {
  Schedule schedule;
  const int ranks = static_cast<int>(offsets.size()) - 1;
  auto part = [&](int index) {
    const size_t i = static_cast<size_t>(((index % ranks) + ranks) % ranks);
    return Range{offsets[i], offsets[i + 1] - offsets[i]};
  };
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
  for (int step = 0; step < ranks - 1; ++step) {
    AddRound(schedule, {Receive((rank + ranks - 1) % ranks, part(rank - step - 1)),
                        Send((rank + 1) % ranks, part(rank - step))});
  }
  return schedule;
}

}  // namespace gtrain::comm
