// Schedules of collectives as values: what one rank sends and receives, in rounds. PURE. Run by comm/exec
// over a DataTransport and by the simulator of plan_test.cc.
//
// The most that the rank with most to do has to do, for n ranks and S bytes; L = ceil(log2 n), F = 1 where n
// is no power of two, else 0, s = segments. A peer is a rank that it exchanges anything with.
// Schedule.CostsAtScale counts it up to 1,024 ranks.
//
//   schedule                     rounds     messages sent  bytes sent             peers
//   ring all-reduce              2(n-1)     2(n-1)         2 S (n-1)/n            2
//   doubling                     L + F      L              L S                    L
//   halving-doubling             2 L        2 L            2 S (n-1)/n + F S      L
//   double tree                  s + 2 L    4 s            2 S                    4
//   tree broadcast, reduce       2, L       L, 1           L S, S                 L
//   reduce in parts              2          n              S                      n-1
//   all-gather of S each, n<=16  1          n-1            (n-1) S                n-1
//   all-gather of S each, above  L          2 L            (n-1) S                2 L
//   reduce-scatter, all-to-all   1          n-1            (n-1) S                n-1
//
// So a reduce-scatter or an all-to-all among 1,000 machines speaks over 999 connections a rank; all else over
// a dozen. (A communicator connects a rank that speaks with all of them when it is made:
// comm/exec/communicator.h.) A schedule itself takes 40 bytes an action in memory.
#pragma once
#include <cstdint>
#include <vector>

namespace gtrain::comm {

enum class ActionKind : uint8_t { kSend, kReceive, kReceiveReduce };

// A range of elements of the one buffer that the collective works on.
struct Action {
  ActionKind kind = ActionKind::kSend;
  int peer = 0;
  uint64_t offset = 0;
  uint64_t count = 0;
  // kReceiveReduce: the operand that comes first. Both sides of an exchange put the same rank's
  // operand first, so that results are bit-identical even for NaNs.
  bool incoming_first = false;
  bool operator==(const Action&) const = default;
};

// All actions of a round may be in flight together; results are applied in the order of the list.
// A receive that overwrites what the same round sends comes after that send in the list.
using Round = std::vector<Action>;
// The schedule of one rank. Messages between two ranks match in the order of the list.
using Schedule = std::vector<Round>;

struct Range {
  uint64_t begin = 0;
  uint64_t count = 0;
  bool operator==(const Range&) const = default;
};

// Part `index` of `count` elements in `parts` parts whose borders are multiples of `align`.
Range EvenPart(uint64_t count, int parts, int index, uint64_t align = 1);

// Elements of a cache line of the smallest type: parts of two ranks never share a line.
inline constexpr uint64_t kPartAlign = 64;
// Where `rails` ranks of each machine carry `count` elements between the machines: the range that the ranks
// at place `local` of their machines carry. Empty from place `rails` on.
Range RailPart(uint64_t count, int rails, int local);

// 2(n-1) rounds, each moving 1/n of the data: least bytes.
Schedule RingAllReduce(int rank, int ranks, uint64_t count);
// About log2(n) rounds, each moving everything: least latency.
Schedule DoublingAllReduce(int rank, int ranks, uint64_t count);
// About 2 log2(n) rounds that move as few bytes as the ring where n is a power of two, and twice the data
// more where it is not.
Schedule HalvingDoublingAllReduce(int rank, int ranks, uint64_t count);
// Two trees of which each reduces and hands down one half, in `segments` parts one after the other: about
// segments + 2 log2(n) rounds and little more than the bytes of the ring, for any n.
Schedule DoubleTreeAllReduce(int rank, int ranks, uint64_t count, int segments);
// Rounds that a message takes from the deepest leaf of such a tree to its root.
int DoubleTreeDepth(int ranks);

// Binomial tree.
Schedule TreeBroadcast(int rank, int ranks, int root, uint64_t count);
// The same binomial tree towards the root, whose buffer has the result. The buffers of the others are used on
// the way.
Schedule TreeReduce(int rank, int ranks, int root, uint64_t count);
// Each rank reduces one part of the data for the root and sends it there: two rounds, and no more than twice
// the data to or from any rank.
Schedule ReduceInParts(int rank, int ranks, int root, uint64_t count);

// One round. Sends refer to a buffer of `ranks` blocks of `count`, block i for rank i; receives to another,
// in which reduce-scatter has one block (this rank's own, reduced into) and all-to-all one a rank.
Schedule DirectReduceScatter(int rank, int ranks, uint64_t count);
Schedule DirectAllToAll(int rank, int ranks, uint64_t count);
// One round, in place: every rank has parts for all, and reduces its own part of all.
Schedule DirectReduceScatter(int rank, const std::vector<Range>& parts);

// Rank r owns parts[r]; afterwards every rank has all of them.
// One round of direct messages up to `kDirectRanksMax` ranks; above, each round doubles what a rank has (J.
// Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems",
// 1997, without the rotation at the end). Parts that do not lie one behind the other are a message each.
inline constexpr int kDirectRanksMax = 16;
Schedule AllGatherSchedule(int rank, const std::vector<Range>& parts);

}  // namespace gtrain::comm
