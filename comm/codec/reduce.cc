// One loop nest for all types, compiled for each instruction set that Highway knows and chosen at the first
// call. The innermost loops are branch-free, so that the compiler vectorises them; conversions of 16-bit
// floats are bit arithmetic for the same reason.
//
// Two sources, the usual case of two ranks that reach each other's memory, are added in registers and stored
// to every output at once: each byte is read and written once. More go through a block of accumulators small
// enough for the first-level cache, and so do two of a rare type or operation: each of the loops above is
// compiled for every instruction set.
#include "comm/codec/reduce.h"

#if GTRAIN_HAVE_HWY
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/codec/reduce.cc"
#include "hwy/foreach_target.h"
//
#include "comm/codec/simd_choice.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#define LOOPS_NAMESPACE HWY_NAMESPACE
#define LOOPS_BEGIN HWY_BEFORE_NAMESPACE()
#define LOOPS_END HWY_AFTER_NAMESPACE()
#define LOOPS_ONCE HWY_ONCE
#else
#define LOOPS_NAMESPACE portable
#define LOOPS_BEGIN static_assert(true)
#define LOOPS_END static_assert(true)
#define LOOPS_ONCE 1
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/check.h"

LOOPS_BEGIN;
namespace gtrain::comm::LOOPS_NAMESPACE {
namespace {

constexpr size_t kBlock = 1024;

template <typename T>
struct Plain {
  using Stored = T;
  // Signed overflow is undefined; integers are added as unsigned, which wraps to the same bits.
  using Value = T;
  static Value Load(Stored s) { return s; }
  static Stored Store(Value v) { return v; }
};
template <typename S, float (*kFrom)(S), S (*kTo)(float)>
struct SmallFloat {
  using Stored = S;
  using Value = float;
  static Value Load(Stored s) { return kFrom(s); }
  static Stored Store(Value v) { return kTo(v); }
};
using Half = SmallFloat<uint16_t, FromFloat16, ToFloat16>;
using Brain = SmallFloat<uint16_t, FromBFloat16, ToBFloat16>;
using E4M3 = SmallFloat<uint8_t, FromFloat8E4M3, ToFloat8E4M3>;
using E5M2 = SmallFloat<uint8_t, FromFloat8E5M2, ToFloat8E5M2>;
struct Truth {
  using Stored = uint8_t;
  using Value = uint8_t;
  static Value Load(Stored s) { return s != 0; }
  static Stored Store(Value v) { return v; }
};
struct Complex {
  struct Value {
    float real, imaginary;
  };
  using Stored = uint64_t;
  static Value Load(Stored s) { return std::bit_cast<Value>(s); }
  static Stored Store(Value v) { return std::bit_cast<Stored>(v); }
};

struct Add {
  static constexpr ReduceOp kOp = ReduceOp::kSum;
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
  static constexpr ReduceOp kOp = ReduceOp::kMin;
  template <typename V>
  static V Apply(V a, V b) {
    V least = b < a ? b : a;
    if constexpr (std::is_floating_point_v<V>) least = b != b ? b : least;
    return least;
  }
};
struct Most {
  static constexpr ReduceOp kOp = ReduceOp::kMax;
  template <typename V>
  static V Apply(V a, V b) {
    V most = a < b ? b : a;
    if constexpr (std::is_floating_point_v<V>) most = b != b ? b : most;
    return most;
  }
};

struct Multiply {
  static constexpr ReduceOp kOp = ReduceOp::kProduct;
  template <typename V>
  static V Apply(V a, V b) {
    if constexpr (std::is_integral_v<V>) {
      using U = std::common_type_t<std::make_unsigned_t<V>, unsigned>;  // two uint16_t would multiply as int
      return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
  static Complex::Value Apply(Complex::Value a, Complex::Value b) {
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
  }
};
struct And {
  static constexpr ReduceOp kOp = ReduceOp::kBitAnd;
  template <typename V>
  static V Apply(V a, V b) {
    return static_cast<V>(a & b);
  }
};
struct Or {
  static constexpr ReduceOp kOp = ReduceOp::kBitOr;
  template <typename V>
  static V Apply(V a, V b) {
    return static_cast<V>(a | b);
  }
};
struct Xor {
  static constexpr ReduceOp kOp = ReduceOp::kBitXor;
  template <typename V>
  static V Apply(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

// 256 ranks are no uint8_t.
template <typename V>
V Divided(V value, int divisor) {
  if constexpr (std::is_floating_point_v<V>) return value / static_cast<V>(divisor);
  return static_cast<V>(value / static_cast<std::common_type_t<V, int>>(divisor));
}

// Users' memory need not be aligned. (With a memcpy for each gcc 12 does not vectorise additions of floats.)
template <typename T>
struct Loose {
  typedef T Type __attribute__((aligned(1), may_alias));
};
template <typename T>
T Get(const void* from, size_t index) {
  return static_cast<const typename Loose<T>::Type*>(from)[index];
}
template <typename T>
void Put(T value, void* to, size_t index) {
  static_cast<typename Loose<T>::Type*>(to)[index] = value;
}

// Everything that a loop needs.
struct Work {
  void* const* outputs;
  size_t output_count;
  const void* const* sources;
  size_t source_count;
  size_t count;
  ReduceOp op;  // kSum for kMean
  int divisor;
};

// Two sources. Outputs may be the sources themselves (the same element of each), never overlap otherwise.
template <typename Type, typename Op, bool kDivide, bool kTwice>
void ReducePair(const Work& w) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  const void *a = w.sources[0], *b = w.sources[1];
  void *out = w.outputs[0], *second = w.outputs[kTwice ? 1 : 0];
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (size_t i = 0; i < w.count; ++i) {
    Value v = Op::Apply(Type::Load(Get<Stored>(a, i)), Type::Load(Get<Stored>(b, i)));
    if constexpr (kDivide) v = Divided(v, w.divisor);
    const Stored stored = Type::Store(v);
    Put(stored, out, i);
    if constexpr (kTwice) Put(stored, second, i);
  }
}

template <typename Type, typename Op>
void Fold(typename Type::Value* __restrict sum, const void* source, size_t begin, size_t n) {
  for (size_t i = 0; i < n; ++i)
    sum[i] = Op::Apply(sum[i], Type::Load(Get<typename Type::Stored>(source, begin + i)));
}

// w.op is that of one of Ops.
template <typename Type, typename... Ops>
void ReduceMany(const Work& w) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  alignas(64) Value sum[kBlock];
  alignas(64) Stored stored[kBlock];
  for (size_t begin = 0; begin < w.count; begin += kBlock) {
    const size_t n = std::min(kBlock, w.count - begin);
    for (size_t i = 0; i < n; ++i) sum[i] = Type::Load(Get<Stored>(w.sources[0], begin + i));
    for (size_t s = 1; s < w.source_count; ++s) {
      ((w.op == Ops::kOp ? Fold<Type, Ops>(sum, w.sources[s], begin, n) : void()), ...);
    }
    if constexpr (std::is_arithmetic_v<Value>) {
      if (w.divisor != 1) {
        for (size_t i = 0; i < n; ++i) sum[i] = Divided(sum[i], w.divisor);
      }
    }
    for (size_t i = 0; i < n; ++i) stored[i] = Type::Store(sum[i]);
    for (size_t o = 0; o < w.output_count; ++o) {
      std::memcpy(static_cast<char*>(w.outputs[o]) + begin * sizeof(Stored), stored, n * sizeof(Stored));
    }
  }
}

template <typename Type, typename Op>
void ReduceTwo(const Work& w) {
  const bool divide = w.divisor != 1;
  if (w.output_count == 2) {
    return divide ? ReducePair<Type, Op, true, true>(w) : ReducePair<Type, Op, false, true>(w);
  }
  return divide ? ReducePair<Type, Op, true, false>(w) : ReducePair<Type, Op, false, false>(w);
}

// Reduces a type that is often reduced; `More` are its rare operations.
template <typename Type, typename... More>
void ReduceOften(const Work& w) {
  if (w.source_count == 2 && w.output_count <= 2) {
    if (w.op == ReduceOp::kSum) return ReduceTwo<Type, Add>(w);
    if (w.op == ReduceOp::kMin) return ReduceTwo<Type, Least>(w);
    if (w.op == ReduceOp::kMax) return ReduceTwo<Type, Most>(w);
  }
  ReduceMany<Type, Add, Least, Most, More...>(w);
}

// The integer type of the same size that stands for both, with a sign and without, where the bits of a result
// are the same.
DType SameBits(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return DType::kUint8;
    case DType::kInt16:
      return DType::kUint16;
    case DType::kUint32:
      return DType::kInt32;
    case DType::kUint64:
      return DType::kInt64;
    default:
      return dtype;
  }
}

ReduceOp OfTruths(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return ReduceOp::kBitOr;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return ReduceOp::kBitAnd;
    default:
      return op;
  }
}

void ReduceAny(const Work& w, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ReduceOften<Plain<float>, Multiply>(w);
    case DType::kFloat64:
      return ReduceOften<Plain<double>, Multiply>(w);
    case DType::kInt32:
      return ReduceOften<Plain<int32_t>, Multiply, And, Or, Xor>(w);
    case DType::kInt64:
      return ReduceOften<Plain<int64_t>, Multiply, And, Or, Xor>(w);
    case DType::kUint8:
      return ReduceOften<Plain<uint8_t>, Multiply, And, Or, Xor>(w);
    case DType::kFloat16:
      return ReduceOften<Half, Multiply>(w);
    case DType::kBFloat16:
      return ReduceOften<Brain, Multiply>(w);
    case DType::kUint16:
      return ReduceMany<Plain<uint16_t>, Add, Least, Most, Multiply, And, Or, Xor>(w);
    case DType::kInt8:
      return ReduceMany<Plain<int8_t>, Add, Least, Most>(w);
    case DType::kInt16:
      return ReduceMany<Plain<int16_t>, Add, Least, Most>(w);
    case DType::kUint32:
      return ReduceMany<Plain<uint32_t>, Add, Least, Most>(w);
    case DType::kUint64:
      return ReduceMany<Plain<uint64_t>, Add, Least, Most>(w);
    case DType::kFloat8E4M3:
      return ReduceMany<E4M3, Add, Least, Most, Multiply>(w);
    case DType::kFloat8E5M2:
      return ReduceMany<E5M2, Add, Least, Most, Multiply>(w);
    case DType::kBool:
      return ReduceMany<Truth, And, Or, Xor>(w);
    case DType::kComplex64:
      return ReduceMany<Complex, Multiply>(w);
  }
}

}  // namespace

void ReduceLoops(void* const* outputs, size_t output_count, const void* const* sources, size_t source_count,
                 const Reduction& r) {
  size_t count = r.count;
  DType dtype = r.dtype;
  ReduceOp op = r.op == ReduceOp::kMean ? ReduceOp::kSum : r.op;
  if (dtype == DType::kBool) {
    op = OfTruths(op);
  } else if (dtype == DType::kComplex64 && op == ReduceOp::kSum) {
    dtype = DType::kFloat32;  // a sum is that of the parts
    count *= 2;
  } else if (op != ReduceOp::kMin && op != ReduceOp::kMax && r.divisor == 1) {
    dtype = SameBits(dtype);
  }
  ReduceAny({outputs, output_count, sources, source_count, count, op, r.divisor}, dtype);
}

void CopyLoop(void* to, const void* from, size_t bytes) {
#if GTRAIN_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  constexpr hn::ScalableTag<uint8_t> d;
  const size_t lanes = hn::Lanes(d);
  uint8_t* out = static_cast<uint8_t*>(to);
  const uint8_t* in = static_cast<const uint8_t*>(from);
  // Whole vectors go around the caches and need an aligned target.
  const size_t odd = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % lanes);
  std::memcpy(out, in, odd);
  size_t at = odd;
  for (; at + lanes <= bytes; at += lanes) hn::Stream(hn::LoadU(d, in + at), d, out + at);
  std::memcpy(out + at, in + at, bytes - at);
  hwy::FlushStream();
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace gtrain::comm::LOOPS_NAMESPACE
LOOPS_END;

#if LOOPS_ONCE
namespace gtrain::comm {
#if GTRAIN_HAVE_HWY
namespace {
GT_SIMD_EXPORT(ReduceLoops);
GT_SIMD_EXPORT(CopyLoop);
}  // namespace
#endif

void ReduceInto(void* const* outputs, size_t output_count, const void* const* sources, size_t source_count,
                const Reduction& r) {
  GT_CHECK(IsReducible(r.dtype, r.op));  // CheckArguments refuses the others
  if (source_count == 0 || r.count == 0) return;
#if GTRAIN_HAVE_HWY
  GT_SIMD_BEST(ReduceLoops)(outputs, output_count, sources, source_count, r);
#else
  portable::ReduceLoops(outputs, output_count, sources, source_count, r);
#endif
}

void CopyAroundCaches(void* to, const void* from, size_t bytes) {
#if GTRAIN_HAVE_HWY
  GT_SIMD_BEST(CopyLoop)(to, from, bytes);
#else
  portable::CopyLoop(to, from, bytes);
#endif
}

void Reduce(void* output, const void* const* sources, size_t source_count, size_t count, DType dtype,
            ReduceOp op, int divisor) {
  ReduceInto(&output, 1, sources, source_count, {count, dtype, op, divisor});
}

}  // namespace gtrain::comm
#endif  // LOOPS_ONCE
