// The sum of a step's gradients and loss along the tree of elastic/plan/tree.h: the same bits at any number
// of ranks.
//
//   Begin -> for each leaf of this rank: the gradients are computed, Add -> Finish
//
// Not thread-safe. It keeps buffers of the size of all gradients together: while a rank folds m leaves at
// most 2 log2(m) + 1 of them, one where it has one leaf or none. Add reads and writes about three times the
// gradients. Finish blocks for the other ranks: at most log2(leaves) rounds, in pieces that follow each other
// through the tree, and a broadcast. Where n ranks have the same power of two of leaves a rank sends its
// gradients once and rank 0 receives them log2(n) times, at 1,000 ranks 10 times; otherwise a rank sends and
// receives them at most log2(leaves) times each, since nodes that are not whole cannot be added ahead.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/port/communicator.h"
#include "elastic/plan/tree.h"

namespace gtrain::elastic {

class TreeSum {
 public:
  // The gradients, whose memory outlives this. `measures`: what it costs is measured and said (cost()).
  explicit TreeSum(std::vector<absl::Span<float>> gradients, bool measures = true);

  // A step of `leaves` parts, of which this rank computes RunOf(leaves, rank, ranks). Ends a step that was
  // begun before.
  void Begin(int leaves, int rank, int ranks);
  // The gradients and `loss` are those of the next leaf of this rank.
  void Add(double loss);
  // Sums over all ranks, multiplies the gradients by `scale`, and gives every rank the same; returns the sum
  // of the losses. Errors are those of the communicator; the gradients are undefined then.
  absl::StatusOr<double> Finish(Communicator& comm, float scale);

  // A generation begins: its ranks measure anew.
  void BeginGeneration() { finished_ = 0; }
  // What the tree costs beside an all-reduce of the same size, for people. Some steps of each generation
  // measure it, by all ranks alike: a barrier and an all-reduce more for each. Empty until then.
  const std::string& cost() const { return cost_; }

 private:
  using Buffer = std::vector<float>;  // all gradients behind each other, and the loss in the last places

  size_t Values() const;
  Buffer& Slot(size_t index);
  void AddBuffer(Buffer& left, const Buffer& right) const;
  absl::Status SumPiece(Communicator& comm, const std::vector<TreeRound>& rounds, size_t begin, size_t end,
                        float scale);
  absl::Status SumOverRanks(Communicator& comm, float scale);
  absl::Status Measure(Communicator& comm, absl::Duration tree);

  const std::vector<absl::Span<float>> gradients_;
  const bool measures_;
  size_t floats_ = 0;  // of all gradients
  int leaves_ = 0, rank_ = 0, ranks_ = 1;
  int next_ = 0;                   // the leaf that Add adds
  std::vector<TreeBlock> blocks_;  // what is folded so far; block i is in slots_[i]
  std::vector<Buffer> slots_;
  Buffer arriving_;

  int finished_ = 0;                  // steps of this generation
  absl::Duration folding_;            // in this step
  absl::Duration tree_, all_reduce_;  // the fastest that was measured
  std::string cost_;
};

}  // namespace gtrain::elastic
