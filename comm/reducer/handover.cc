#include "comm/reducer/handover.h"

#include <algorithm>
#include <string>

#include "base/status_macros.h"
#include "comm/codec/low_rank.h"

namespace gtrain::comm {
namespace {

enum Number : size_t { kHow, kSteps, kThreshold, kMargin };
constexpr size_t kProgressParts = kProgressNumbers;
static_assert(kProgressParts == HandoverLayout::kNumbers - 1, "steps, threshold and margin");

struct Parts {
  absl::Span<float> residual, momentum, agreed, basis;
};

Parts PartsOf(absl::Span<float> block, const HandoverLayout& layout) {
  size_t at = HandoverLayout::kNumbers;
  const auto next = [&](size_t size) {
    at += size;
    return block.subspan(at - size, size);
  };
  return {next(layout.residual), next(layout.momentum), next(layout.agreed), next(layout.basis)};
}

Parts PartsOf(absl::Span<const float> block, const HandoverLayout& layout) {
  return PartsOf(absl::Span<float>(const_cast<float*>(block.data()), block.size()), layout);  // only read
}

void Scale(absl::Span<const float> from, float factor, absl::Span<float> to) {
  std::transform(from.begin(), from.end(), to.begin(), [factor](float value) { return value * factor; });
}

void Add(absl::Span<const float> values, size_t offset, float factor, absl::Span<float> to) {
  for (size_t i = 0; i < values.size() && offset + i < to.size(); ++i) to[offset + i] += factor * values[i];
}

}  // namespace

absl::StatusOr<HandoverLayout> LayoutOf(const CompressionOptions& options, size_t count,
                                        const std::vector<std::vector<int64_t>>& shapes) {
  HandoverLayout layout;
  layout.residual = options.error_feedback ? count : 0;
  if (options.codec == Codec::kTopK && options.momentum > 0) layout.momentum = count;
  if (options.optimizer_momentum > 0) layout.agreed = count;
  if (options.codec != Codec::kPowerSgd) return layout;
  const auto rank = static_cast<size_t>(options.matrix_rank);
  GT_ASSIGN_OR_RETURN(const std::vector<Matrix> matrices, MatricesOf(shapes, count, rank));
  for (const Matrix& matrix : matrices) layout.basis += matrix.columns * rank;
  return layout;
}

void Pack(const std::vector<CarriedState>& states, absl::Span<const float> leftover, int ranks,
          const HandoverLayout& layout, absl::Span<float> block) {
  const Parts parts = PartsOf(block, layout);
  const float share = 1 / static_cast<float>(ranks);
  block[kHow] = states.empty() ? HandoverLayout::kResidual : HandoverLayout::kAll;
  std::fill(parts.residual.begin(), parts.residual.end(), 0.0f);
  Add(leftover, 0, share, parts.residual);
  for (const CarriedState& state : states) {
    if (state.name == "residual") Add(state.values, state.offset, share, parts.residual);
    if (state.name == "residual/shard") Add(state.values, state.offset, 1, parts.residual);  // of the mean
    if (state.name == "momentum" && state.values.size() == parts.momentum.size())
      Scale(state.values, share, parts.momentum);
    if (state.name == "momentum" && state.values.size() == parts.agreed.size())
      std::copy(state.values.begin(), state.values.end(), parts.agreed.begin());
    if (state.name == "basis" && state.values.size() == parts.basis.size())
      std::copy(state.values.begin(), state.values.end(), parts.basis.begin());
    if (state.name == "warmup") block[kSteps] = std::max(block[kSteps], state.values[0]);
    if (state.name == "progress") {
      block[kSteps] = std::max(block[kSteps], state.values[0]);
      block[kThreshold] = state.values[1] * share;
      block[kMargin] = state.values[2];
    }
  }
}

void CopyShared(absl::Span<const float> block, const HandoverLayout& layout, absl::Span<float> shared) {
  const Parts parts = PartsOf(block, layout);
  auto at = std::copy(block.begin() + kSteps, block.begin() + HandoverLayout::kNumbers, shared.begin());
  at = std::copy(parts.agreed.begin(), parts.agreed.end(), at);
  std::copy(parts.basis.begin(), parts.basis.end(), at);
}

void SetShared(absl::Span<const float> shared, const HandoverLayout& layout, absl::Span<float> block) {
  const Parts parts = PartsOf(block, layout);
  const auto take = [&](absl::Span<float> to) {
    std::copy_n(shared.begin(), to.size(), to.begin());
    shared.remove_prefix(to.size());
  };
  take(block.subspan(kSteps, HandoverLayout::kNumbers - 1));
  take(parts.agreed);
  take(parts.basis);
}

std::vector<CarriedState> Unpack(absl::Span<const float> block, int ranks, const HandoverLayout& layout,
                                 std::vector<CarriedState> states, bool* residual_taken) {
  const Parts parts = PartsOf(block, layout);
  const auto whole = static_cast<float>(ranks);
  *residual_taken = false;
  for (CarriedState& state : states) {
    const auto is = [&](const char* name, absl::Span<float> part) {
      return state.name == name && state.values.size() == part.size() && !part.empty();
    };
    const absl::Span<float> values = absl::MakeSpan(state.values);
    if (is("residual", parts.residual)) {
      Scale(parts.residual, whole, values);
      *residual_taken = true;
    }
    if (is("momentum", parts.momentum)) Scale(parts.momentum, whole, values);
    if (is("momentum", parts.agreed)) Scale(parts.agreed, 1, values);
    if (is("basis", parts.basis)) Scale(parts.basis, 1, values);
    if (state.name == "warmup") state.values[0] = block[kSteps];
    for (size_t at = 0; state.name == "progress" && at + kProgressParts <= values.size();
         at += kProgressParts) {
      values[at] = block[kSteps];
      values[at + 1] = block[kThreshold] * whole;
      values[at + 2] = block[kMargin];
    }
  }
  return states;
}

}  // namespace gtrain::comm
