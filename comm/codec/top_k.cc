// One pass takes every element at or above a threshold. When more than a few k are taken, the k largest of
// them stay, the others are put back, and the pass goes on with the k-th as its threshold: so a pass may
// start with any threshold that is not too high, and ends with the true k largest. Started just below the
// k-th magnitude of the step before, it takes little more than k and rarely has anything to put back; started
// too high, it must be repeated lower, so the margin widens after each repetition and narrows slowly without.
#include "comm/codec/top_k.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gtrain::comm {
namespace {

constexpr size_t kChunk =
    16384;  // 64 KiB of each array: what is taken out of a chunk is put back while still near
constexpr size_t kSample = 8192;  // elements the first threshold is guessed from
static_assert(kSample <= kChunk);
constexpr float kSmallest = std::numeric_limits<float>::min();  // zeros are never sent

}  // namespace

bool TopKSelector::Select(const TopKInput& input, size_t low, size_t k, size_t high) {
  const size_t capacity = std::max(2 * high, high + kChunk);
  if (indices_.size() < capacity + kChunk + 16) {
    indices_.resize(capacity + kChunk + 16);
    values_.resize(indices_.size());
    magnitudes_.resize(indices_.size());
  }
  float start = std::max(carried_ == 0 ? Sampled(input, high) : carried_ * margin_, kSmallest);
  for (passes_ = 1;; ++passes_) {
    threshold_ = start;
    if (!Pass(input, k, capacity)) return false;
    if (taken_ >= low || start == kSmallest) break;
    margin_ = std::max(margin_ * 0.9f, kLeastMargin);
    start = passes_ == 1 ? std::max(start / 2, kSmallest) : kSmallest;
  }
  if (passes_ == 1) margin_ = std::min(margin_ * 1.002f, low == high ? 0.99f : 1.0f);
  if (taken_ > high) {
    Prune(input, k);
    carried_ = threshold_;
  } else {
    // Tails of gradients fall between the 4th and the 12th power of the threshold here, so this converges.
    carried_ = threshold_ * std::pow(std::max<float>(taken_, 1) / static_cast<float>(k), 0.12f);
  }
  return true;
}

// A threshold that about twice `high` elements reach, from a sample; 0 where a sample says little.
float TopKSelector::Sampled(const TopKInput& input, size_t high) {
  const size_t stride = input.gradient.size() / kSample;
  const size_t wanted = stride == 0 ? 0 : 2 * high / stride;
  if (wanted < 8 || wanted >= kSample) return 0;
  for (size_t i = 0; i < kSample; ++i) {
    const size_t at = i * stride;
    const float value = input.gradient[at] + (input.residual == nullptr ? 0 : input.residual[at]);
    magnitudes_[i] = std::isfinite(value) ? std::fabs(value) : 0;
  }
  const auto first = magnitudes_.begin();
  std::nth_element(first, first + static_cast<ptrdiff_t>(wanted), first + kSample, std::greater<float>());
  return magnitudes_[wanted];
}

bool TopKSelector::Pass(const TopKInput& input, size_t k, size_t capacity) {
  const size_t count = input.gradient.size();
  taken_ = 0;
  float poison = 0;
  for (size_t begin = 0; begin < count; begin += kChunk) {
    taken_ += SelectChunk(input, begin, std::min(kChunk, count - begin), count >= kStreamFrom, &poison);
    if (std::isnan(poison)) return false;
    if (taken_ > capacity) Prune(input, k);
  }
  return true;
}

size_t TopKSelector::SelectChunk(const TopKInput& input, size_t begin, size_t count, bool stream,
                                 float* poison) {
  const auto at = [&](auto* array) { return array == nullptr ? nullptr : array + begin; };
  const Selection selection = {threshold_, static_cast<uint32_t>(begin), indices_.data() + taken_,
                               values_.data() + taken_, stream};
  const float* gradient = input.gradient.data() + begin;
  if (input.velocity == nullptr) {
    return kernels_.select(gradient, at(input.residual), at(input.pending_residual), count, selection,
                           poison);
  }
  return kernels_.select_momentum(gradient, {input.momentum, at(input.velocity), at(input.pending_velocity)},
                                  at(input.residual), at(input.pending_residual), count, selection, poison);
}

void TopKSelector::Prune(const TopKInput& input, size_t k) {
  for (size_t i = 0; i < taken_; ++i) magnitudes_[i] = std::fabs(values_[i]);
  const auto first = magnitudes_.begin();
  std::nth_element(first, first + static_cast<ptrdiff_t>(k - 1), first + static_cast<ptrdiff_t>(taken_),
                   std::greater<float>());
  threshold_ = magnitudes_[k - 1];
  size_t equals =
      k - static_cast<size_t>(std::count_if(first, first + static_cast<ptrdiff_t>(k),
                                            [this](float magnitude) { return magnitude > threshold_; }));
  size_t kept = 0;
  for (size_t i = 0; i < taken_; ++i) {
    const uint32_t index = indices_[i];
    const float value = values_[i];
    const float magnitude = std::fabs(value);
    const bool keep = magnitude > threshold_ || (magnitude == threshold_ && equals > 0);
    if (keep) {
      if (magnitude == threshold_) --equals;
      indices_[kept] = index;
      values_[kept] = value;
      ++kept;
      continue;
    }
    if (input.pending_residual != nullptr) input.pending_residual[index] = value;
    if (input.velocity != nullptr) {
      input.pending_velocity[index] = std::fma(input.momentum, input.velocity[index], input.gradient[index]);
    }
  }
  taken_ = kept;
}

}  // namespace gtrain::comm
