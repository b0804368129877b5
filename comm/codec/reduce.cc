// One loop nest for all types: a block of accumulators small enough for the first-level cache
// takes one source after another. The innermost loops are branch-free, so that the compiler
// vectorises them; conversions of 16-bit floats are bit arithmetic for the same reason.
#include "comm/codec/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace gtrain::comm {
namespace {

constexpr size_t kBlock = 1024;

float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t rest = bits & 0x7fff;
  // Scaling by 2^112 moves the exponent's bias and normalises subnormals in one multiplication.
  const float scaled = std::bit_cast<float>(rest << 13) * 0x1p112f;
  const uint32_t special = rest >= 0x7c00 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
}

uint16_t FloatToHalf(float value) {
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

float BrainToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t FloatToBrain(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

template <typename T>
struct Plain {
  using Stored = T;
  // Signed overflow is undefined; integers are added as unsigned, which wraps to the same bits.
  using Value = T;
  static Value Load(Stored s) { return s; }
  static Stored Store(Value v) { return v; }
};
struct Half {
  using Stored = uint16_t;
  using Value = float;
  static Value Load(Stored s) { return HalfToFloat(s); }
  static Stored Store(Value v) { return FloatToHalf(v); }
};
struct Brain {
  using Stored = uint16_t;
  using Value = float;
  static Value Load(Stored s) { return BrainToFloat(s); }
  static Stored Store(Value v) { return FloatToBrain(v); }
};

struct Add {
  template <typename V>
  static V Apply(V a, V b) {
    if constexpr (std::is_integral_v<V>) {
      using U = std::make_unsigned_t<V>;
      return static_cast<V>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};
struct Least {
  template <typename V>
  static V Apply(V a, V b) {
    V least = b < a ? b : a;
    if constexpr (std::is_floating_point_v<V>) least = b != b ? b : least;
    return least;
  }
};
struct Most {
  template <typename V>
  static V Apply(V a, V b) {
    V most = a < b ? b : a;
    if constexpr (std::is_floating_point_v<V>) most = b != b ? b : most;
    return most;
  }
};

template <typename Type, typename Op>
void ReduceTyped(void* output, const void* const* sources, size_t source_count, size_t count, int divisor) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  Value sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const Stored* first = static_cast<const Stored*>(sources[0]) + begin;
    for (size_t i = 0; i < n; ++i) sum[i] = Type::Load(first[i]);
    for (size_t s = 1; s < source_count; ++s) {
      const Stored* source = static_cast<const Stored*>(sources[s]) + begin;
      for (size_t i = 0; i < n; ++i) sum[i] = Op::Apply(sum[i], Type::Load(source[i]));
    }
    if (divisor != 1) {
      for (size_t i = 0; i < n; ++i) sum[i] = static_cast<Value>(sum[i] / static_cast<Value>(divisor));
    }
    Stored* out = static_cast<Stored*>(output) + begin;
    for (size_t i = 0; i < n; ++i) out[i] = Type::Store(sum[i]);
  }
}

template <typename Type>
void ReduceOf(ReduceOp op, void* output, const void* const* sources, size_t source_count, size_t count,
              int divisor) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return ReduceTyped<Type, Add>(output, sources, source_count, count, divisor);
    case ReduceOp::kMin:
      return ReduceTyped<Type, Least>(output, sources, source_count, count, divisor);
    case ReduceOp::kMax:
      return ReduceTyped<Type, Most>(output, sources, source_count, count, divisor);
  }
}

}  // namespace

void Reduce(void* output, const void* const* sources, size_t source_count, size_t count, DType dtype,
            ReduceOp op, int divisor) {
  if (source_count == 0 || count == 0) return;
  switch (dtype) {
    case DType::kFloat32:
      return ReduceOf<Plain<float>>(op, output, sources, source_count, count, divisor);
    case DType::kFloat64:
      return ReduceOf<Plain<double>>(op, output, sources, source_count, count, divisor);
    case DType::kInt32:
      return ReduceOf<Plain<int32_t>>(op, output, sources, source_count, count, divisor);
    case DType::kInt64:
      return ReduceOf<Plain<int64_t>>(op, output, sources, source_count, count, divisor);
    case DType::kUint8:
      return ReduceOf<Plain<uint8_t>>(op, output, sources, source_count, count, divisor);
    case DType::kFloat16:
      return ReduceOf<Half>(op, output, sources, source_count, count, divisor);
    case DType::kBFloat16:
      return ReduceOf<Brain>(op, output, sources, source_count, count, divisor);
  }
}

float FromFloat16(uint16_t bits) { return HalfToFloat(bits); }
uint16_t ToFloat16(float value) { return FloatToHalf(value); }
float FromBFloat16(uint16_t bits) { return BrainToFloat(bits); }
uint16_t ToBFloat16(float value) { return FloatToBrain(value); }

}  // namespace gtrain::comm
