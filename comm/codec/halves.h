// Conversions of the 16-bit floats, in bit arithmetic without branches so that loops over them vectorise.
// Rounding is to nearest, ties to even. Of one element each, without memory. PURE.
#pragma once
#include <bit>
#include <cstdint>

namespace gtrain::comm {

inline float FromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t rest = bits & 0x7fff;
  // Scaling by 2^112 moves the exponent's bias and normalises subnormals in one multiplication.
  const float scaled = std::bit_cast<float>(rest << 13) * 0x1p112f;
  const uint32_t special = rest >= 0x7c00 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
}

inline uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  // Rounded to even on the 13 bits that go; 65520 and above carry into infinity by themselves.
  const uint32_t normal = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
  // The addition aligns a subnormal's last bit with that of 0.5f and rounds it.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  uint32_t half = rest < 0x38800000 ? subnormal : normal;
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

}  // namespace gtrain::comm
