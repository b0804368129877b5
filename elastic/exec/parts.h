// The parts of a step: a batch is cut into virtual ranks, and a rank computes consecutive ones, one at a
// time. There are as many as ranks, so one each, or, where the job wants the same bits at any number of
// ranks, as many as it says (`elastic.virtual_ranks`), whose gradients are then added along a tree
// (tree_sum.h).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/port/communicator.h"
#include "elastic/exec/tree_sum.h"
#include "elastic/plan/tree.h"
#include "sharding/ledger/ledger.h"

namespace gtrain::elastic {

struct StepPart {
  bool done = false;             // there is none any more
  int64_t virtual_rank = 0;      // of the step
  uint64_t seed = 0;             // PartSeed: for what this part draws
  std::vector<int64_t> samples;  // never empty
};

// Not thread-safe. Finish blocks; nothing else does.
class Parts {
 public:
  // `virtual_ranks` 0: as many as ranks. The memory of the gradients outlives this.
  Parts(const sharding::SampleOptions& samples, int virtual_ranks, std::vector<absl::Span<float>> gradients);

  bool bitwise() const { return sum_ != nullptr; }
  void BeginGeneration();
  // Returns the positions of this rank in `batch`; none where `rank` is -1, which a bitwise step has not.
  sharding::SampleRange Begin(const sharding::SampleRange& batch, int64_t step, int rank, int ranks);
  // Of the step that was begun last.
  const sharding::SampleRange& share() const { return share_; }
  // Ends the part before, whose loss was `loss`, and begins the next one. In a bitwise step the gradients
  // are taken, and zeros for the next part.
  StepPart Next(double loss);
  // The loss of this rank's parts, or else `loss`, that of a program which takes none. FailedPrecondition:
  // not all parts were taken. InvalidArgument: there are two losses.
  absl::StatusOr<double> Loss(double loss) const;
  // Of a bitwise step: the gradients become the means, and what is returned the sum of the losses, the same
  // bits on all ranks.
  absl::StatusOr<double> Finish(Communicator& comm);

 private:
  const sharding::SampleOptions samples_;
  const int virtual_ranks_;
  const std::vector<absl::Span<float>> gradients_;
  std::unique_ptr<TreeSum> sum_;  // null: not bitwise

  sharding::SampleRange batch_, share_;
  int64_t step_ = 0;
  int leaves_ = 0;
  TreeBlock run_;
  int next_ = 0;        // the part that comes
  bool asked_ = false;  // the program takes parts
  bool ended_ = false;  // and knows that there are no more
  double loss_ = 0;     // of those that ended
};

}  // namespace gtrain::elastic
