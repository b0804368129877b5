// What compression carries from step to step, of one bucket of a rank, in a form that does not know how many
// ranks there were: numbers that any number of them can go on with. Pure.
#pragma once
#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/reducer/reducer.h"

namespace gtrain::comm {

// The parts of a bucket's block, one behind the other. They depend on its gradients and its codec alone.
struct HandoverLayout {
  // How much of the block counts: 0, nothing: of a rank that comes new; kResidual; or kAll.
  // Then steps of the warm-up so far, and top-k's threshold and margin.
  static constexpr size_t kNumbers = 4;
  static constexpr float kResidual = 1;  // of a rank that does not talk to other machines itself
  static constexpr float kAll = 2;

  size_t residual = 0;  // elements of the mean that steps owe to it, on account of this rank
  size_t momentum = 0;  // of DGC: this rank's part of the mean's
  size_t agreed = 0;    // of the optimiser: the mean's, equal on all ranks
  size_t basis = 0;     // PowerSGD's right factors, equal on all ranks

  size_t size() const { return kNumbers + residual + momentum + agreed + basis; }
  // The numbers but the first, `agreed` and `basis`: what a rank takes from another one.
  size_t shared() const { return kNumbers - 1 + agreed + basis; }
};

// InvalidArgument: shapes of another number of elements.
absl::StatusOr<HandoverLayout> LayoutOf(const CompressionOptions& options, size_t count,
                                        const std::vector<std::vector<int64_t>>& shapes);

// Writes the states of a collective among `ranks` ranks into block[layout.size()]. Of what they do not say
// the block keeps what it has, but for residuals: those of the states and `leftover`, of a rank's gradient
// (empty: zeros), are all there are.
void Pack(const std::vector<CarriedState>& states, absl::Span<const float> leftover, int ranks,
          const HandoverLayout& layout, absl::Span<float> block);

// The parts that are taken from another rank, one behind the other, and back.
void CopyShared(absl::Span<const float> block, const HandoverLayout& layout, absl::Span<float> shared);
void SetShared(absl::Span<const float> shared, const HandoverLayout& layout, absl::Span<float> block);

// `states`, as a new collective among `ranks` ranks exports them, with the values of the block. The residual
// of the block has gone into them if *residual_taken says so.
std::vector<CarriedState> Unpack(absl::Span<const float> block, int ranks, const HandoverLayout& layout,
                                 std::vector<CarriedState> states, bool* residual_taken);

}  // namespace gtrain::comm
