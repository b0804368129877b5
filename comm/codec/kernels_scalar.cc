// The reference: what each kernel means, one element at a time.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm/codec/carried.h"
#include "comm/codec/kernels.h"
#include "comm/codec/reduce.h"

namespace gtrain::comm {
namespace {

// Appends the value if it is to be sent; returns the rest that is carried over.
float Take(float value, size_t index, const Selection& s, size_t* taken) {
  if (std::fabs(value) < s.threshold) return value;
  s.indices[*taken] = s.first + static_cast<uint32_t>(index);
  s.values[(*taken)++] = value;
  return 0;
}

template <typename T>
size_t Select(const float* gradient, const T* residual, T* pending, size_t count, const Selection& s,
              float* poison) {
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const float value = residual == nullptr ? gradient[i] : gradient[i] + CarriedAt(residual, i);
    *poison += value * 0;
    const float left = Take(value, i, s, &taken);
    if (pending != nullptr) Carry(left, s.seed, s.first, i, pending);
  }
  return taken;
}

template <typename T>
size_t SelectMomentum(const float* gradient, const Momentum<T>& momentum, const T* residual,
                      T* pending_residual, size_t count, const Selection& s, float* poison) {
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const float u = std::fma(momentum.factor, CarriedAt(momentum.velocity, i), gradient[i]);
    const float value = CarriedAt(residual, i) + u;
    *poison += value * 0;
    const size_t before = taken;
    Carry(Take(value, i, s, &taken), s.seed, s.first, i, pending_residual);
    Carry(taken == before ? u : 0, OtherSeed(s.seed), s.first, i, momentum.pending);
  }
  return taken;
}

template <typename T>
size_t Add(const float* a, const T* b, float* sum, size_t count, float largest, float* poison) {
  size_t clipped = 0;
  for (size_t i = 0; i < count; ++i) {
    const float value = b == nullptr ? a[i] : a[i] + CarriedAt(b, i);
    *poison += a[i] * 0;
    clipped += std::fabs(value) > largest ? 1 : 0;
    sum[i] = std::clamp(value, -largest, largest);
  }
  return clipped;
}

bool Within(const float* in, size_t count, float largest) {
  return std::all_of(in, in + count,
                     [&](float value) { return std::isfinite(value) && std::fabs(value) <= largest; });
}

template <typename T>
void Subtract(const float* a, const float* b, T* out, size_t count, bool, uint32_t seed, size_t first) {
  for (size_t i = 0; i < count; ++i) Carry(a[i] - b[i], seed, first, i, out);
}

template <uint16_t (*Convert)(float)>
void EncodeHalves(const float* in, size_t count, uint8_t* payload, float*) {
  for (size_t i = 0; i < count; ++i) {
    const uint16_t half = Convert(in[i]);
    std::memcpy(payload + 2 * i, &half, 2);
  }
}

template <float (*Convert)(uint16_t)>
void DecodeHalves(const uint8_t* payload, const float*, size_t count, float* out, bool add) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, payload + 2 * i, 2);
    out[i] = Convert(half) + (add ? out[i] : 0);
  }
}

float Largest(const float* in, size_t count) {
  float largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(in[i]));
  return largest;
}

uint8_t ToInt8(float value) {
  return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(std::clamp(value, -127.0f, 127.0f))));
}

template <uint8_t (*Convert)(float)>
void EncodeBytes(const float* in, size_t count, uint8_t* payload, float* scales, float range) {
  for (size_t begin = 0; begin < count; begin += kScaleBlock) {
    const size_t n = std::min(kScaleBlock, count - begin);
    const float largest = Largest(in + begin, n);
    const bool zero = !(largest >= kSmallestScaled);
    const float inverse = zero ? 0 : range / largest;
    *scales++ = zero ? 0 : largest / range;
    for (size_t i = begin; i < begin + n; ++i) payload[i] = Convert(in[i] * inverse);
  }
}

template <float (*Convert)(uint8_t)>
void DecodeBytes(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  for (size_t i = 0; i < count; ++i) {
    const float value = Convert(payload[i]) * scales[i / kScaleBlock];
    out[i] = add ? out[i] + value : value;
  }
}

float FromInt8(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }

void EncodeInt8(const float* in, size_t count, uint8_t* payload, float* scales) {
  EncodeBytes<ToInt8>(in, count, payload, scales, 127);
}
void EncodeFloat8(const float* in, size_t count, uint8_t* payload, float* scales) {
  EncodeBytes<ToFloat8E4M3Number>(in, count, payload, scales, 448);
}

void EncodeOneBit(const float* in, size_t count, uint8_t* payload, float* scales) {
  std::memset(payload, 0, (count + 7) / 8);
  for (size_t begin = 0; begin < count; begin += kScaleBlock) {
    const size_t n = std::min(kScaleBlock, count - begin);
    float sum = 0;
    for (size_t i = begin; i < begin + n; ++i) {
      sum += std::fabs(in[i]);
      if (in[i] >= 0) payload[i / 8] = static_cast<uint8_t>(payload[i / 8] | (1u << (i % 8)));
    }
    *scales++ = sum / static_cast<float>(n);
  }
}

void DecodeOneBit(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  for (size_t i = 0; i < count; ++i) {
    const float scale = scales[i / kScaleBlock];
    const float value = (payload[i / 8] >> (i % 8)) & 1 ? scale : -scale;
    out[i] = add ? out[i] + value : value;
  }
}

constexpr Kernels kScalar = {"scalar",
                             {Select, SelectMomentum, Add, Subtract},
                             {Select, SelectMomentum, Add, Subtract},
                             [] {},
                             Within,
                             EncodeHalves<ToFloat16>,
                             EncodeHalves<ToBFloat16>,
                             EncodeInt8,
                             EncodeFloat8,
                             EncodeOneBit,
                             DecodeHalves<FromFloat16>,
                             DecodeHalves<FromBFloat16>,
                             DecodeBytes<FromInt8>,
                             DecodeBytes<FromFloat8E4M3Number>,
                             DecodeOneBit};

}  // namespace

const Kernels& ScalarKernels() { return kScalar; }

#if !GTRAIN_HAVE_HWY
const Kernels& BestKernels() { return kScalar; }
#endif

}  // namespace gtrain::comm
