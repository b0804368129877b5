// Selection of the k largest magnitudes in one pass over memory. PURE.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "comm/codec/kernels.h"

namespace gtrain::comm {

// The arrays of one step. residual null: no error feedback; velocity null: no momentum. The pending arrays
// are where residual and velocity are not null, of the same length, 64-byte aligned like them. T: float, or
// uint16_t for the bfloat16 of carried.h, rounded with `seed`.
template <typename T>
struct TopKInput {
  absl::Span<const float> gradient;
  const T* residual = nullptr;
  T* pending_residual = nullptr;
  float momentum = 0;
  const T* velocity = nullptr;
  T* pending_velocity = nullptr;
  uint32_t seed = 0;
};

// Room for the selected elements during a pass. It holds nothing from call to call, so a thread has one for
// all its selectors: a rank of n has n of them. It is as large as the largest call of the thread wants, 32
// bytes for each of `high` elements; what a warm-up wanted more is freed again.
struct TopKScratch {
  void MakeRoom(size_t room);

  std::vector<uint32_t> indices, back_indices;
  std::vector<float> values, magnitudes;
  size_t wanted = 0;  // at most, by the calls since it was looked at
  int calls = 0;
};

// Remembers the threshold from call to call; one object a bucket, or a shard. Not thread-safe.
class TopKSelector {
 public:
  explicit TopKSelector(const Kernels& kernels) : kernels_(kernels) {}

  // Selects between `low` and `high` elements (low <= k <= high; all equal: exactly the k largest, the
  // earlier of equals), fewer only if fewer are not zero. False: some value is not finite; what is selected
  // and pending then means nothing.
  template <typename T>
  bool Select(const TopKInput<T>& input, size_t low, size_t k, size_t high);

  // The elements selected by the last call, by rising index; valid until any selector is called in the same
  // thread.
  absl::Span<const uint32_t> indices() const { return absl::MakeConstSpan(scratch_->indices.data(), taken_); }
  absl::Span<const float> values() const { return absl::MakeConstSpan(scratch_->values.data(), taken_); }
  // The threshold and margin with which the next call begins: a selector that is given both selects what this
  // one would. Threshold 0: nothing was selected yet, as in a new one, and the margin is ignored.
  float carried() const { return carried_; }
  float margin() const { return margin_; }
  void BeginWith(float carried, float margin) {
    carried_ = carried;
    margin_ = carried == 0 ? kFirstMargin : std::clamp(margin, kLeastMargin, 1.0f);
  }
  // Passes over memory of the last call: 1, or more when the carried threshold was too high.
  int passes() const { return passes_; }

 private:
  static constexpr float kFirstMargin = 0.98f, kLeastMargin = 0.1f;

  template <typename T>
  bool Pass(const TopKInput<T>& input, size_t k, size_t capacity);
  template <typename T>
  size_t SelectChunk(const TopKInput<T>& input, size_t begin, size_t count, bool stream, float* poison);
  template <typename T>
  float Sampled(const TopKInput<T>& input, size_t high);
  size_t RaiseThreshold(size_t k);
  template <typename T>
  void Prune(const TopKInput<T>& input, size_t k);

  const Kernels& kernels_;
  TopKScratch* scratch_ = nullptr;  // this thread's
  size_t taken_ = 0;
  int passes_ = 0;
  float threshold_ = 0;          // of this pass
  float carried_ = 0;            // the k-th magnitude of the last call, 0 before the first
  float margin_ = kFirstMargin;  // the first pass starts at carried_ * margin_
};

}  // namespace gtrain::comm
