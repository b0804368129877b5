// PowerSGD as a transaction: the mean of a bucket among a group, its matrices sent as factors.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/codec/low_rank.h"
#include "comm/reducer/reducer.h"

namespace gtrain::comm {

// Two all-reduces a step, of the left factors with what is not compressed and of the right factors: what a
// rank sends does not grow with the number of ranks, nor does what it keeps: 8 bytes an element with error
// feedback, 4 rank (rows + 3 columns) of each matrix and 4 of each element of none. Not thread-safe.
class LowRankMean {
 public:
  // `shapes` of the tensors in the bucket, one behind the other; none: one vector of `count`.
  // InvalidArgument: matrix_rank out of range, or shapes of another number of elements.
  static absl::StatusOr<std::unique_ptr<LowRankMean>> Make(const CompressionOptions& options, size_t count,
                                                           const std::vector<std::vector<int64_t>>& shapes);

  // data[count] of each member becomes `factor` times about their sum, the same bits on all. Returns the
  // bytes that this member gave to collectives. A sum that is not finite makes all elements NaN and leaves
  // nothing pending; no finite matrix does that, since matrices are clipped (low_rank.h).
  absl::StatusOr<uint64_t> Mean(Communicator& group, float factor, absl::Span<float> data);
  void Apply();  // what is pending, if anything
  void Drop() { pending_ = false; }
  // Elements of this member's matrices that the last Mean clipped.
  size_t clipped() const { return clipped_; }

  // "residual" of `count`, with error feedback, and "basis": the right factors, which the next step begins
  // with. Load: false where there is no state of that name and size; what is not finite becomes 0.
  std::vector<CarriedState> Export() const;
  bool Load(const CarriedState& state);

 private:
  LowRankMean(const CompressionOptions& options, size_t count, std::vector<Matrix> matrices);
  bool Poisoned(absl::Span<const float> sum, absl::Span<float> data);

  const size_t rank_;
  const size_t count_;
  const std::vector<Matrix> matrices_;
  size_t left_elements_ = 0;  // of all left factors
  // A factor is `rank_` arrays, and those of the matrices lie one behind the other.
  std::vector<float> residual_, residual_next_;  // empty without error feedback
  std::vector<float> right_, right_next_;        // means; those of the applied steps, those pending
  std::vector<float> sent_;                      // this member's right factors
  std::vector<float> wire_;                      // left factors, then the elements of no matrix
  bool pending_ = false;
  size_t clipped_ = 0;
};

}  // namespace gtrain::comm
