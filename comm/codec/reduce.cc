// One loop nest for all types, compiled for each instruction set that Highway knows and chosen at the first
// call. The innermost loops are branch-free, so that the compiler vectorises them; conversions of 16-bit
// floats are bit arithmetic for the same reason.
//
// Two sources, the usual case of two ranks that reach each other's memory, are added in registers and stored
// to every output at once: each byte is read and written once. More go through a block of accumulators small
// enough for the first-level cache.
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
struct Half {
  using Stored = uint16_t;
  using Value = float;
  static Value Load(Stored s) { return FromFloat16(s); }
  static Stored Store(Value v) { return ToFloat16(v); }
};
struct Brain {
  using Stored = uint16_t;
  using Value = float;
  static Value Load(Stored s) { return FromBFloat16(s); }
  static Stored Store(Value v) { return ToBFloat16(v); }
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
void ReduceMany(const Work& w) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  alignas(64) Value sum[kBlock];
  alignas(64) Stored stored[kBlock];
  for (size_t begin = 0; begin < w.count; begin += kBlock) {
    const size_t n = std::min(kBlock, w.count - begin);
    for (size_t i = 0; i < n; ++i) sum[i] = Type::Load(Get<Stored>(w.sources[0], begin + i));
    for (size_t s = 1; s < w.source_count; ++s) {
      for (size_t i = 0; i < n; ++i)
        sum[i] = Op::Apply(sum[i], Type::Load(Get<Stored>(w.sources[s], begin + i)));
    }
    if (w.divisor != 1) {
      for (size_t i = 0; i < n; ++i) sum[i] = Divided(sum[i], w.divisor);
    }
    for (size_t i = 0; i < n; ++i) stored[i] = Type::Store(sum[i]);
    for (size_t o = 0; o < w.output_count; ++o) {
      std::memcpy(static_cast<char*>(w.outputs[o]) + begin * sizeof(Stored), stored, n * sizeof(Stored));
    }
  }
}

template <typename Type, typename Op>
void ReduceTyped(const Work& w) {
  if (w.source_count != 2 || w.output_count > 2) return ReduceMany<Type, Op>(w);
  const bool divide = w.divisor != 1;
  if (w.output_count == 2) {
    return divide ? ReducePair<Type, Op, true, true>(w) : ReducePair<Type, Op, false, true>(w);
  }
  return divide ? ReducePair<Type, Op, true, false>(w) : ReducePair<Type, Op, false, false>(w);
}

template <typename Type>
void ReduceOf(ReduceOp op, const Work& w) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return ReduceTyped<Type, Add>(w);
    case ReduceOp::kMin:
      return ReduceTyped<Type, Least>(w);
    case ReduceOp::kMax:
      return ReduceTyped<Type, Most>(w);
  }
}

void ReduceAny(const Work& w, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32:
      return ReduceOf<Plain<float>>(op, w);
    case DType::kFloat64:
      return ReduceOf<Plain<double>>(op, w);
    case DType::kInt32:
      return ReduceOf<Plain<int32_t>>(op, w);
    case DType::kInt64:
      return ReduceOf<Plain<int64_t>>(op, w);
    case DType::kUint8:
      return ReduceOf<Plain<uint8_t>>(op, w);
    case DType::kFloat16:
      return ReduceOf<Half>(op, w);
    case DType::kBFloat16:
      return ReduceOf<Brain>(op, w);
    default:
      GT_CHECK(IsReducible(dtype));  // CheckArguments refuses the others
  }
}

}  // namespace

void ReduceLoops(void* const* outputs, size_t output_count, const void* const* sources, size_t source_count,
                 const Reduction& r) {
  ReduceAny({outputs, output_count, sources, source_count, r.count, r.divisor}, r.dtype, r.op);
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
