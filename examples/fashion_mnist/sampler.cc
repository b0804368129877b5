#include "examples/fashion_mnist/sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace gtrain::examples {
namespace {

// SplitMix64 by hand: std::shuffle and the standard distributions differ between libraries.
class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

}  // namespace

int64_t StepsPerEpoch(int64_t samples, int64_t batch) { return (samples + batch - 1) / batch; }

Slice Share(int64_t samples, int rank, int world) {
  return {samples * rank / world, samples * (rank + 1) / world};
}

Slice RankSlice(int64_t samples, int64_t batch, int64_t step, int rank, int world) {
  const int64_t first = std::min(samples, step * batch);
  const int64_t last = std::min(samples, first + batch);
  const Slice share = Share(last - first, rank, world);
  return {first + share.begin, first + share.end};
}

std::vector<int64_t> EpochOrder(int64_t samples, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(samples));
  std::iota(order.begin(), order.end(), 0);
  SplitMix mix(SplitMix(seed).Next() ^ static_cast<uint64_t>(epoch));
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[mix.Next() % i]);  // bias below 2^-40 for any real data set
  }
  return order;
}

}  // namespace gtrain::examples
