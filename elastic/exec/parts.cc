#include "elastic/exec/parts.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gtrain::elastic {

Parts::Parts(const sharding::SampleOptions& samples, int virtual_ranks,
             std::vector<absl::Span<float>> gradients)
    : samples_(samples), virtual_ranks_(virtual_ranks), gradients_(std::move(gradients)) {
  if (virtual_ranks_ > 0) sum_ = std::make_unique<TreeSum>(gradients_);
}

void Parts::BeginGeneration() {
  if (sum_ != nullptr) sum_->BeginGeneration();
}

// A virtual rank without samples is none: the tree has as many leaves as there are parts that somebody
// computes, which the batch alone decides.
sharding::SampleRange Parts::Begin(const sharding::SampleRange& batch, int64_t step, int rank, int ranks) {
  batch_ = batch;
  step_ = step;
  leaves_ = static_cast<int>(std::min<int64_t>(bitwise() ? virtual_ranks_ : ranks, batch.size()));
  run_ = rank < 0 ? TreeBlock{leaves_, leaves_} : RunOf(leaves_, rank, ranks);
  next_ = run_.begin;
  asked_ = ended_ = false;
  loss_ = 0;
  if (sum_ != nullptr) sum_->Begin(leaves_, rank, ranks);
  share_ = {batch.epoch, batch.end, batch.end};
  if (run_.size() > 0) {
    share_.begin = sharding::ShareOf(batch, run_.begin, leaves_).begin;
    share_.end = sharding::ShareOf(batch, run_.end - 1, leaves_).end;
  }
  return share_;
}

StepPart Parts::Next(double loss) {
  asked_ = true;
  if (next_ > run_.begin && !ended_) {
    loss_ += loss;
    if (sum_ != nullptr) sum_->Add(loss);
  }
  if (next_ >= run_.end) {
    ended_ = true;
    return {.done = true};
  }
  if (sum_ != nullptr && next_ > run_.begin) {
    for (const absl::Span<float>& gradient : gradients_) std::ranges::fill(gradient, 0.0F);
  }
  const int part = next_++;
  return {.virtual_rank = part,
          .seed = PartSeed(samples_.seed, step_, part),
          .samples = sharding::SamplesOf(samples_, sharding::ShareOf(batch_, part, leaves_))};
}

absl::StatusOr<double> Parts::Loss(double loss) const {
  if (!asked_ && (!bitwise() || run_.size() == 0)) return loss;
  if (!ended_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the program has computed ", std::max(0, next_ - run_.begin - 1), " of the ", run_.size(),
        " parts that this step has on this rank",
        bitwise()
            ? ". With `elastic.determinism: bitwise` gradients are computed part by part, so that their "
              "sum does not depend on the number of ranks: take the samples of `step.parts()` and not "
              "those of the step"
            : ": go through all of them, or take the samples of the step"));
  }
  if (loss != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the step has a loss of ", loss,
                                                   " beside those of its parts: the loss of a part is set "
                                                   "when that ends, and that of the step is 0 then"));
  }
  return loss_;
}

absl::StatusOr<double> Parts::Finish(Communicator& comm) {
  return sum_->Finish(comm, static_cast<float>(1 / static_cast<double>(batch_.size())));
}

}  // namespace gtrain::elastic
