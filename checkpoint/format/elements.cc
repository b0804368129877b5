#include "checkpoint/format/elements.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gtrain::ckpt {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A float of a sign, an exponent and `fraction_bits`, as IEEE 754 has them.
double SmallFloat(uint32_t bits, int exponent_bits, int fraction_bits) {
  const uint32_t exponent_max = (1u << exponent_bits) - 1;
  const uint32_t exponent = bits >> fraction_bits & exponent_max,
                 fraction = bits & ((1u << fraction_bits) - 1);
  const int bias = static_cast<int>(exponent_max >> 1) + fraction_bits;
  double magnitude;
  if (exponent == exponent_max) {
    magnitude = fraction == 0 ? kInfinity : kNan;
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - bias);
  } else {
    magnitude = std::ldexp((1u << fraction_bits) + fraction, static_cast<int>(exponent) - bias);
  }
  return bits >> (exponent_bits + fraction_bits) != 0 ? -magnitude : magnitude;
}

// The largest exponent of E4M3 holds numbers as well, all but one.
double Float8E4M3(uint8_t bits) {
  if ((bits & 0x7f) == 0x7f) return kNan;
  if ((bits & 0x78) != 0x78) return SmallFloat(bits, 4, 3);
  const double magnitude = std::ldexp(8 + (bits & 7), 15 - 7 - 3);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

template <typename Integer>
uint64_t Distance(absl::string_view a, absl::string_view b, size_t i) {
  Integer x, y;
  std::memcpy(&x, a.data() + i * sizeof x, sizeof x);
  std::memcpy(&y, b.data() + i * sizeof y, sizeof y);
  // Without signs nothing overflows: what is left of a difference modulo 2^64 is the difference.
  return x < y ? static_cast<uint64_t>(y) - static_cast<uint64_t>(x)
               : static_cast<uint64_t>(x) - static_cast<uint64_t>(y);
}

}  // namespace

std::complex<double> ElementAt(absl::string_view bytes, DType dtype, size_t i) {
  const auto load = [&](auto value) {
    std::memcpy(&value, bytes.data() + i * DTypeSize(dtype), sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::kFloat32:
      return load(float{});
    case DType::kFloat64:
      return load(double{});
    case DType::kFloat16:
      return SmallFloat(load(uint16_t{}), 5, 10);
    case DType::kBFloat16:
      return SmallFloat(load(uint16_t{}), 8, 7);
    case DType::kInt32:
      return load(int32_t{});
    case DType::kInt64:
      return static_cast<double>(load(int64_t{}));
    case DType::kUint8:
    case DType::kBool:
      return load(uint8_t{});
    case DType::kInt8:
      return load(int8_t{});
    case DType::kInt16:
      return load(int16_t{});
    case DType::kUint16:
      return load(uint16_t{});
    case DType::kUint32:
      return load(uint32_t{});
    case DType::kUint64:
      return static_cast<double>(load(uint64_t{}));
    case DType::kFloat8E4M3:
      return Float8E4M3(load(uint8_t{}));
    case DType::kFloat8E5M2:
      return SmallFloat(load(uint8_t{}), 5, 2);
    case DType::kComplex64:
      return {load(std::complex<float>{}).real(), load(std::complex<float>{}).imag()};
  }
  return 0;
}

std::optional<uint64_t> IntegersDiffer(absl::string_view a, absl::string_view b, DType dtype, size_t i) {
  switch (dtype) {
    case DType::kInt8:
      return Distance<int8_t>(a, b, i);
    case DType::kInt16:
      return Distance<int16_t>(a, b, i);
    case DType::kInt32:
      return Distance<int32_t>(a, b, i);
    case DType::kInt64:
      return Distance<int64_t>(a, b, i);
    case DType::kUint8:
    case DType::kBool:
      return Distance<uint8_t>(a, b, i);
    case DType::kUint16:
      return Distance<uint16_t>(a, b, i);
    case DType::kUint32:
      return Distance<uint32_t>(a, b, i);
    case DType::kUint64:
      return Distance<uint64_t>(a, b, i);
    default:
      return std::nullopt;
  }
}

}  // namespace gtrain::ckpt
