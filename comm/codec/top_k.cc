// One pass takes every element at or above a threshold. When more than a few k are taken, the k largest of
// them stay, the others are put back, and the pass goes on with the k-th as its threshold: so a pass may
// start with any threshold that is not too high, and ends with the true k largest. Started just below the
// k-th magnitude of the step before, it takes little more than k and rarely has anything to put back; started
// too high, it must be repeated lower, so the margin widens after each repetition and narrows slowly without.
#include "comm/codec/top_k.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "comm/codec/carried.h"

namespace gtrain::comm {
namespace {

constexpr size_t kChunk =
    16384;  // 64 KiB of each array: what is taken out of a chunk is put back while still near
constexpr size_t kSample = 8192;  // elements the first threshold is guessed from
static_assert(kSample <= kChunk && kChunk % kHalvesBlock == 0);
constexpr float kSmallest = std::numeric_limits<float>::min();  // zeros are never sent

size_t PlaceIn(const float*, size_t index) { return index; }
size_t PlaceIn(const uint16_t*, size_t index) { return PlaceOf(index); }

template <typename T>
void Fetch(const TopKInput<T>& input, size_t index) {
  const size_t place = PlaceIn(input.residual, index);
  __builtin_prefetch(input.pending_residual + place, 1);
  if (input.velocity == nullptr) return;
  __builtin_prefetch(input.pending_velocity + place, 1);
  __builtin_prefetch(input.velocity + place);
  __builtin_prefetch(input.gradient.data() + index);
}

}  // namespace

void TopKScratch::MakeRoom(size_t room) {
  constexpr int kLookedAtEvery = 256;  // calls: of all buckets and shards of some steps
  wanted = std::max(wanted, room);
  const auto resize = [&](size_t size) {
    const auto one = [&](auto& array) {
      array.resize(size);
      if (array.capacity() > 2 * size) array.shrink_to_fit();
    };
    one(indices), one(back_indices), one(values), one(magnitudes);
  };
  if (indices.size() < room) resize(room);
  if (++calls < kLookedAtEvery) return;
  if (indices.size() > 2 * wanted) resize(wanted);
  calls = 0;
  wanted = room;
}

template <typename T>
bool TopKSelector::Select(const TopKInput<T>& input, size_t low, size_t k, size_t high) {
  thread_local TopKScratch scratch;
  scratch_ = &scratch;
  const size_t capacity = std::max(2 * high, high + kChunk);
  scratch.MakeRoom(capacity + kChunk + 16);
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
template <typename T>
float TopKSelector::Sampled(const TopKInput<T>& input, size_t high) {
  std::vector<float>& magnitudes = scratch_->magnitudes;
  const size_t stride = input.gradient.size() / kSample;
  const size_t wanted = stride == 0 ? 0 : 2 * high / stride;
  if (wanted < 8 || wanted >= kSample) return 0;
  for (size_t i = 0; i < kSample; ++i) {
    const size_t at = i * stride;
    const float value = input.gradient[at] + (input.residual == nullptr ? 0 : CarriedAt(input.residual, at));
    magnitudes[i] = std::isfinite(value) ? std::fabs(value) : 0;
  }
  const auto first = magnitudes.begin();
  std::nth_element(first, first + static_cast<ptrdiff_t>(wanted), first + kSample, std::greater<float>());
  return magnitudes[wanted];
}

template <typename T>
bool TopKSelector::Pass(const TopKInput<T>& input, size_t k, size_t capacity) {
  const size_t count = input.gradient.size();
  const bool stream = count >= kStreamFrom;
  taken_ = 0;
  float poison = 0;
  for (size_t begin = 0; begin < count && !std::isnan(poison); begin += kChunk) {
    taken_ += SelectChunk(input, begin, std::min(kChunk, count - begin), stream, &poison);
    if (taken_ > capacity && !std::isnan(poison)) Prune(input, k);
  }
  if (stream) kernels_.flush();
  return !std::isnan(poison);
}

template <typename T>
size_t TopKSelector::SelectChunk(const TopKInput<T>& input, size_t begin, size_t count, bool stream,
                                 float* poison) {
  const auto at = [&](auto* array) { return array == nullptr ? nullptr : array + begin; };
  const Selection selection = {threshold_,
                               static_cast<uint32_t>(begin),
                               scratch_->indices.data() + taken_,
                               scratch_->values.data() + taken_,
                               stream,
                               input.seed};
  const float* gradient = input.gradient.data() + begin;
  const CarryKernels<T>& kernels = kernels_.Carrying<T>();
  if (input.velocity == nullptr) {
    return kernels.select(gradient, at(input.residual), at(input.pending_residual), count, selection, poison);
  }
  return kernels.select_momentum(gradient, {input.momentum, at(input.velocity), at(input.pending_velocity)},
                                 at(input.residual), at(input.pending_residual), count, selection, poison);
}

// Raises the threshold to the k-th largest magnitude of the taken elements. Returns how many of the elements
// with exactly that magnitude belong to the k. A histogram over the upper bits of the distance to the old
// threshold, which all elements reach, says which few elements have to be compared.
size_t TopKSelector::RaiseThreshold(size_t k) {
  const std::vector<float>& values = scratch_->values;
  std::vector<float>& magnitudes = scratch_->magnitudes;
  constexpr int kBinBits = 11;
  const uint32_t least = std::bit_cast<uint32_t>(threshold_);
  uint32_t largest = least;
  for (size_t i = 0; i < taken_; ++i) {
    magnitudes[i] = std::fabs(values[i]);
    largest = std::max(largest, std::bit_cast<uint32_t>(magnitudes[i]));
  }
  const int shift = std::max(static_cast<int>(std::bit_width(largest - least)) - kBinBits, 0);
  const auto bin = [&](float magnitude) { return (std::bit_cast<uint32_t>(magnitude) - least) >> shift; };
  std::array<size_t, size_t{1} << kBinBits> counts = {};
  for (size_t i = 0; i < taken_; ++i) ++counts[bin(magnitudes[i])];
  size_t at = counts.size(), wanted = k;  // in this bin, of the largest
  while (counts[--at] < wanted) wanted -= counts[at];
  const auto first = magnitudes.begin();
  const auto last = std::copy_if(first, first + static_cast<ptrdiff_t>(taken_), first,
                                 [&](float magnitude) { return bin(magnitude) == at; });
  std::nth_element(first, first + static_cast<ptrdiff_t>(wanted - 1), last, std::greater<float>());
  threshold_ = magnitudes[wanted - 1];
  return wanted - static_cast<size_t>(std::count_if(first, first + static_cast<ptrdiff_t>(wanted),
                                                    [&](float magnitude) { return magnitude > threshold_; }));
}

template <typename T>
void TopKSelector::Prune(const TopKInput<T>& input, size_t k) {
  std::vector<uint32_t>&indices = scratch_->indices, &back_indices = scratch_->back_indices;
  std::vector<float>&values = scratch_->values, &magnitudes = scratch_->magnitudes;
  size_t equals = RaiseThreshold(k);
  size_t kept = 0, back = 0;
  for (size_t i = 0; i < taken_; ++i) {
    const uint32_t index = indices[i];
    const float value = values[i];
    const float magnitude = std::fabs(value);
    bool keep = magnitude > threshold_;
    if (magnitude == threshold_ && equals > 0) keep = true, --equals;
    // Both arrays are written and one of them counts: which one cannot be predicted.
    indices[kept] = back_indices[back] = index;
    values[kept] = magnitudes[back] = value;
    kept += keep;
    back += !keep;
  }
  taken_ = kept;
  if (input.pending_residual == nullptr) return;
  // Elements that were written around the caches come back from memory, so they are fetched long before they
  // are needed.
  constexpr size_t kAhead = 32;
  for (size_t i = 0; i < back; ++i) {
    if (i + kAhead < back) Fetch(input, back_indices[i + kAhead]);
    const uint32_t index = back_indices[i];
    Carry(magnitudes[i], input.seed, 0, index, input.pending_residual);
    if (input.velocity != nullptr) {
      const float u = std::fma(input.momentum, CarriedAt(input.velocity, index), input.gradient[index]);
      Carry(u, OtherSeed(input.seed), 0, index, input.pending_velocity);
    }
  }
}

template bool TopKSelector::Select(const TopKInput<float>&, size_t, size_t, size_t);
template bool TopKSelector::Select(const TopKInput<uint16_t>&, size_t, size_t, size_t);

}  // namespace gtrain::comm
