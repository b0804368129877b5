// Conversions of the 16-bit and 8-bit floats, in bit arithmetic without branches so that loops over them
// vectorise. Rounding is to nearest, ties to even. Each converts one element, without memory. PURE.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace gtrain::comm {

// The bits without a sign of what is nearest to the float that has the bits `rest` and no sign, as if the
// exponents went on beyond the largest.
template <int kExponentBits, int kFractionBits>
uint32_t RoundedMagnitude(uint32_t rest) {
  constexpr int kGone = 23 - kFractionBits;
  constexpr uint32_t kBias = 127 - ((1u << (kExponentBits - 1)) - 1);
  // Rounded to even on the bits that go; what is too large carries into the exponent by itself.
  const uint32_t normal = (rest + ((1u << (kGone - 1)) - 1) + ((rest >> kGone) & 1) - (kBias << 23)) >> kGone;
  // The addition aligns a subnormal's last bit with that of the aligner and rounds it.
  constexpr uint32_t kAligner = (kBias + 1 + kGone) << 23;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + std::bit_cast<float>(kAligner)) - kAligner;
  return rest < (kBias + 1) << 23 ? subnormal : normal;
}

// The bits of the float that is as large as the number with the bits `rest` and no sign, infinities and NaNs
// as if they were numbers. No operand and no result is a subnormal float: threads that flush those to zero
// (torch.set_flush_denormal) get the same bits.
template <int kExponentBits, int kFractionBits>
uint32_t WidenedMagnitude(uint32_t rest) {
  constexpr int kNew = 23 - kFractionBits;
  constexpr uint32_t kBias = 127 - ((1u << (kExponentBits - 1)) - 1);
  const uint32_t normal = (rest << kNew) + (kBias << 23);
  // With the hidden bit that a subnormal does not have, and without it again.
  constexpr uint32_t kHidden = (kBias + 1) << 23;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(normal + (1u << 23)) - std::bit_cast<float>(kHidden));
  return rest < 1u << kFractionBits ? subnormal : normal;
}

inline float FromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t rest = bits & 0x7fff;
  const uint32_t special = rest >= 0x7c00 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(WidenedMagnitude<5, 10>(rest) | special | sign);
}

inline uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  uint32_t half = RoundedMagnitude<5, 10>(rest);  // 65520 and above: infinity
  half = rest >= 0x47800000 ? 0x7c00u : half;
  half = rest > 0x7f800000 ? 0x7e00u : half;
  return static_cast<uint16_t>(half | sign);
}

inline float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

// The upper half of a float16.
inline float FromFloat8E5M2(uint8_t bits) { return FromFloat16(static_cast<uint16_t>(bits << 8)); }

inline uint8_t ToFloat8E5M2(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rest = bits & 0x7fffffff;
  uint32_t eighth = RoundedMagnitude<5, 2>(rest);  // 61440 and above: infinity
  eighth = rest >= 0x47800000 ? 0x7cu : eighth;
  eighth = rest > 0x7f800000 ? 0x7eu : eighth;
  return static_cast<uint8_t>(eighth | ((bits >> 24) & 0x80));
}

// E4M3 has no infinity, and its largest number is 448. This pair is of numbers: 0x7f and 0xff are read as 480
// and -480, and what a NaN becomes is not specified.
inline float FromFloat8E4M3Number(uint8_t bits) {
  return std::bit_cast<float>(WidenedMagnitude<4, 3>(bits & 0x7f) |
                              (static_cast<uint32_t>(bits & 0x80) << 24));
}

inline uint8_t ToFloat8E4M3Number(float value) {
  const uint32_t rest = std::bit_cast<uint32_t>(std::min(std::fabs(value), 448.0f));
  return static_cast<uint8_t>(RoundedMagnitude<4, 3>(rest) | ((std::bit_cast<uint32_t>(value) >> 24) & 0x80));
}

// With NaN, which 0x7f and 0xff are.
inline float FromFloat8E4M3(uint8_t bits) {
  const uint32_t nan = (bits & 0x7f) == 0x7f ? 0x7fc00000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(FromFloat8E4M3Number(bits)) | nan);
}

inline uint8_t ToFloat8E4M3(float value) {
  const bool nan = (std::bit_cast<uint32_t>(value) & 0x7fffffff) > 0x7f800000;
  return nan ? uint8_t{0x7f} : ToFloat8E4M3Number(value);
}

}  // namespace gtrain::comm
