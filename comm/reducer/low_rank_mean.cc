// A member carries over its own gradient less its own part of what was sent, P (A^T P)^T, and not less the
// mean: both have the same sum over the members, so the model cannot tell them apart, but this one stays
// small where the members' gradients differ for good.
#include "comm/reducer/low_rank_mean.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::comm {
namespace {

constexpr uint64_t kSeed = 0x505347;  // of the first factors; any number that all ranks share
constexpr char kResidual[] = "residual";
constexpr char kBasis[] = "basis";

}  // namespace

absl::StatusOr<std::unique_ptr<LowRankMean>> LowRankMean::Make(
    const CompressionOptions& options, size_t count, const std::vector<std::vector<int64_t>>& shapes) {
  if (options.matrix_rank < 1 || options.matrix_rank > kMatrixRankMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("powersgd: rank ", options.matrix_rank, " is not from 1 to ", kMatrixRankMax));
  }
  std::vector<Matrix> matrices;
  if (!shapes.empty()) {
    GT_ASSIGN_OR_RETURN(matrices, MatricesOf(shapes, count, static_cast<size_t>(options.matrix_rank)));
  }
  return std::unique_ptr<LowRankMean>(new LowRankMean(options, count, std::move(matrices)));
}

LowRankMean::LowRankMean(const CompressionOptions& options, size_t count, std::vector<Matrix> matrices)
    : rank_(static_cast<size_t>(options.matrix_rank)), count_(count), matrices_(std::move(matrices)) {
  size_t right_elements = 0;
  for (const Matrix& m : matrices_) left_elements_ += m.rows * rank_, right_elements += m.columns * rank_;
  if (options.error_feedback && !matrices_.empty()) {
    residual_.resize(count_);
    residual_next_.resize(count_);
  }
  right_.resize(right_elements);
  right_next_.resize(right_elements);
  sent_.resize(right_elements);
  wire_.resize(FactorElements(matrices_, count_, rank_) - right_elements);
}

absl::StatusOr<uint64_t> LowRankMean::Mean(Communicator& group, float factor, absl::Span<float> data) {
  pending_ = false;
  clipped_ = 0;
  float* left = wire_.data();
  float* dense = wire_.data() + left_elements_;
  float* right = right_.data();
  size_t at = 0;  // in data
  for (size_t i = 0; i < matrices_.size(); ++i) {
    const Matrix& m = matrices_[i];
    dense = std::copy(data.begin() + static_cast<ptrdiff_t>(at),
                      data.begin() + static_cast<ptrdiff_t>(m.offset), dense);
    FillZeroColumns(right, m.columns, rank_, kSeed + i * kMatrixRankMax);
    ScaleColumns(right, m.columns, rank_);
    clipped_ +=
        MultiplyRight(data.data() + m.offset, residual_.empty() ? nullptr : residual_.data() + m.offset, m,
                      rank_, right, left);
    left += m.rows * rank_;
    right += m.columns * rank_;
    at = m.offset + m.size();
  }
  std::copy(data.begin() + static_cast<ptrdiff_t>(at), data.end(), dense);
  GT_RETURN_IF_ERROR(group.AllReduce(wire_.data(), wire_.size(), DType::kFloat32, ReduceOp::kSum));
  for (float& value : wire_) value *= factor;
  uint64_t bytes = wire_.size() * sizeof(float);
  if (Poisoned(wire_, data)) return bytes;

  left = wire_.data();
  float* sent = sent_.data();
  for (const Matrix& m : matrices_) {
    Orthonormalise(left, m.rows, rank_);
    MultiplyLeft(data.data() + m.offset, m, rank_, left, sent);
    left += m.rows * rank_;
    sent += m.columns * rank_;
  }
  right_next_ = sent_;
  if (!matrices_.empty()) {
    GT_RETURN_IF_ERROR(
        group.AllReduce(right_next_.data(), right_next_.size(), DType::kFloat32, ReduceOp::kSum));
    for (float& value : right_next_) value *= factor;
    bytes += right_next_.size() * sizeof(float);
    if (Poisoned(right_next_, data)) return bytes;
  }

  left = wire_.data();
  dense = wire_.data() + left_elements_;
  size_t behind = 0;  // in the right factors
  at = 0;
  for (const Matrix& m : matrices_) {
    std::copy_n(dense, m.offset - at, data.begin() + static_cast<ptrdiff_t>(at));
    dense += m.offset - at;
    Expand(data.data() + m.offset, residual_.empty() ? nullptr : residual_next_.data() + m.offset, m, rank_,
           left, sent_.data() + behind, right_next_.data() + behind);
    left += m.rows * rank_;
    behind += m.columns * rank_;
    at = m.offset + m.size();
  }
  std::copy_n(dense, count_ - at, data.begin() + static_cast<ptrdiff_t>(at));
  pending_ = true;
  return bytes;
}

// Any member's NaN or infinity is in the sum, which all of them have.
bool LowRankMean::Poisoned(absl::Span<const float> sum, absl::Span<float> data) {
  float poison = 0;
  for (const float value : sum) poison += value * 0;
  if (!std::isnan(poison)) return false;
  std::fill(data.begin(), data.end(), std::numeric_limits<float>::quiet_NaN());
  clipped_ = 0;
  return true;
}

void LowRankMean::Apply() {
  if (!std::exchange(pending_, false)) return;
  residual_.swap(residual_next_);
  right_.swap(right_next_);
}

std::vector<CarriedState> LowRankMean::Export() const {
  std::vector<CarriedState> states;
  if (!residual_.empty()) states.push_back({kResidual, 0, residual_});
  if (!right_.empty()) states.push_back({kBasis, 0, right_});
  return states;
}

bool LowRankMean::Load(const CarriedState& state) {
  std::vector<float>& own = state.name == kBasis ? right_ : residual_;
  if ((state.name != kBasis && state.name != kResidual) || state.offset != 0 || own.empty() ||
      state.values.size() != own.size()) {
    return false;
  }
  // A checkpoint of a version whose factors could become infinite heals.
  std::transform(state.values.begin(), state.values.end(), own.begin(),
                 [](float value) { return std::isfinite(value) ? value : 0; });
  pending_ = false;
  return true;
}

}  // namespace gtrain::comm
