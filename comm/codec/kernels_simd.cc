// The kernels with Highway: this file is compiled once for each instruction set it includes itself for, and
// the best one for the processor is chosen at the first call. Arrays larger than the caches are written
// around them
// ("stream"): the pending residual is not read again before the next step.
//
// Selected elements are gathered with a compress in a register and a whole-vector store: a compressing store
// to memory is microcode on some processors.
#if GTRAIN_HAVE_HWY
#include <algorithm>
#include <bit>
#include <limits>

#include "comm/codec/carried.h"
#include "comm/codec/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/codec/kernels_simd.cc"
#include "hwy/foreach_target.h"
//
#include "comm/codec/simd_choice.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

// Stands behind the parameters of a lambda: gcc leaves the larger lambdas out of line, with their vectors in
// memory.
#ifndef GT_INLINED
#define GT_INLINED __attribute__((always_inline))
#endif

HWY_BEFORE_NAMESPACE();
namespace gtrain::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
constexpr F f;
constexpr I s32;
constexpr U u32;
using V = hn::Vec<F>;
constexpr size_t kLanes = hn::MaxLanes(f);
static_assert(kScaleBlock % (4 * kLanes) == 0);

// Four vectors of neighbouring elements.
struct Four {
  V v0, v1, v2, v3;
};
constexpr size_t kTurn = 4 * kLanes;
// Elements of whole turns, the last of which ends with a block of words.
constexpr size_t Whole(size_t count) {
  const size_t step = std::max(kTurn, kHalvesBlock);
  return count / step * step;
}

HWY_INLINE Four Get(const float* from, size_t i) {
  return {hn::LoadU(f, from + i), hn::LoadU(f, from + i + kLanes), hn::LoadU(f, from + i + 2 * kLanes),
          hn::LoadU(f, from + i + 3 * kLanes)};
}
HWY_INLINE Four Sum(const Four& a, const Four& b) {
  return {hn::Add(a.v0, b.v0), hn::Add(a.v1, b.v1), hn::Add(a.v2, b.v2), hn::Add(a.v3, b.v3)};
}

using W = hn::Vec<U>;
template <bool kStream>
HWY_INLINE void Put(V v, float* to) {
  if constexpr (kStream) {
    hn::Stream(v, f, to);
  } else {
    hn::Store(v, f, to);
  }
}
template <bool kStream>
HWY_INLINE void Put(W v, uint32_t* to) {
  if constexpr (kStream) {
    hn::Stream(v, u32, to);
  } else {
    hn::Store(v, u32, to);
  }
}

// `first` and `seed` as in carried.h.
template <bool kStream>
HWY_INLINE void Keep(const Four& four, uint32_t, size_t, size_t i, float* to) {
  Put<kStream>(four.v0, to + i);
  Put<kStream>(four.v1, to + i + kLanes);
  Put<kStream>(four.v2, to + i + 2 * kLanes);
  Put<kStream>(four.v3, to + i + 3 * kLanes);
}

HWY_INLINE V Lower(W words) { return hn::BitCast(f, hn::ShiftLeft<16>(words)); }
HWY_INLINE V Upper(W words) { return hn::BitCast(f, hn::And(words, hn::Set(u32, 0xffff0000))); }

HWY_INLINE Four Get(const uint16_t* from, size_t i) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from) + WordOf(i);
  const W a = hn::Load(u32, words), b = hn::Load(u32, words + kLanes);
  if constexpr (kLanes == 16) {
    return {Lower(a), Upper(a), Lower(b), Upper(b)};
  } else if constexpr (kLanes == 8) {
    return {Lower(a), Lower(b), Upper(a), Upper(b)};
  } else {  // a turn is in the lower or in the upper half of a block
    const W c = hn::Load(u32, words + 2 * kLanes), d = hn::Load(u32, words + 3 * kLanes);
    if (InUpperHalf(i)) return {Upper(a), Upper(b), Upper(c), Upper(d)};
    return {Lower(a), Lower(b), Lower(c), Lower(d)};
  }
}

// The random words from `word` on; the vector's start is multiplied once, not each lane.
HWY_INLINE W RandomWords(uint32_t seed, size_t word) {
  const W offsets = hn::Mul(hn::Iota(u32, 0), hn::Set(u32, kHashStep));
  W x = hn::Add(hn::Set(u32, seed + static_cast<uint32_t>(word) * kHashStep), offsets);
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(u32, kHashFactor));
  return hn::Xor(x, hn::ShiftRight<15>(x));
}
HWY_INLINE W Bounded(V v) {
  const V largest = hn::Set(f, kLargestHalf);
  return hn::BitCast(u32, hn::Min(hn::Max(v, hn::Neg(largest)), largest));
}
HWY_INLINE W RoundedLower(V v, W random) {
  return hn::ShiftRight<16>(hn::Add(Bounded(v), hn::And(random, hn::Set(u32, 0xffff))));
}
HWY_INLINE W RoundedUpper(V v, W random) {
  return hn::And(hn::Add(Bounded(v), hn::ShiftRight<16>(random)), hn::Set(u32, 0xffff0000));
}
HWY_INLINE W Rounded(V lower, V upper, uint32_t seed, size_t word) {
  const W random = RandomWords(seed, word);
  return hn::Or(RoundedLower(lower, random), RoundedUpper(upper, random));
}

template <bool kStream>
HWY_INLINE void Keep(const Four& four, uint32_t seed, size_t first, size_t i, uint16_t* to) {
  uint32_t* words = reinterpret_cast<uint32_t*>(to) + WordOf(i);
  const size_t word = WordOf(first + i);
  if constexpr (kLanes == 16) {
    Put<kStream>(Rounded(four.v0, four.v1, seed, word), words);
    Put<kStream>(Rounded(four.v2, four.v3, seed, word + kLanes), words + kLanes);
  } else if constexpr (kLanes == 8) {
    Put<kStream>(Rounded(four.v0, four.v2, seed, word), words);
    Put<kStream>(Rounded(four.v1, four.v3, seed, word + kLanes), words + kLanes);
  } else {  // the words are written twice
    const V vectors[] = {four.v0, four.v1, four.v2, four.v3};
    for (size_t k = 0; k < 4; ++k) {
      const W random = RandomWords(seed, word + k * kLanes);
      uint32_t* at = words + k * kLanes;
      const W half = InUpperHalf(i) ? hn::Or(hn::Load(u32, at), RoundedUpper(vectors[k], random))
                                    : RoundedLower(vectors[k], random);
      hn::Store(half, u32, at);
    }
  }
}

HWY_INLINE size_t Append(V v, hn::Mask<F> mask, size_t index, size_t taken, const Selection& s) {
  const auto ids = hn::Iota(u32, s.first + static_cast<uint32_t>(index));
  hn::StoreU(hn::Compress(v, mask), f, s.values + taken);
  hn::StoreU(hn::Compress(ids, hn::RebindMask(u32, mask)), u32, s.indices + taken);
  return taken + hn::CountTrue(f, mask);
}

struct FourMasks {
  hn::Mask<F> m0, m1, m2, m3;
};
HWY_INLINE Four ZeroWhere(const FourMasks& m, const Four& v) {
  return {hn::IfThenZeroElse(m.m0, v.v0), hn::IfThenZeroElse(m.m1, v.v1), hn::IfThenZeroElse(m.m2, v.v2),
          hn::IfThenZeroElse(m.m3, v.v3)};
}

// Selection of the elements of `value(i)`, a turn; keep(i, vectors, masks) is told each.
template <typename Value, typename Told>
HWY_INLINE size_t SelectLoop(size_t count, const Selection& s, float* poison, const Value& value,
                             const Told& keep) {
  const V threshold = hn::Set(f, s.threshold);
  V bad = hn::Zero(f);
  size_t taken = 0;
  for (size_t i = 0; i + kTurn <= count; i += kTurn) {
    const auto [v0, v1, v2, v3] = value(i);
    // Not "at least": a NaN must be taken.
    const auto m0 = hn::Not(hn::Lt(hn::Abs(v0), threshold)), m1 = hn::Not(hn::Lt(hn::Abs(v1), threshold));
    const auto m2 = hn::Not(hn::Lt(hn::Abs(v2), threshold)), m3 = hn::Not(hn::Lt(hn::Abs(v3), threshold));
    const auto any = hn::Or(hn::Or(m0, m1), hn::Or(m2, m3));
    if (HWY_UNLIKELY(!hn::AllFalse(f, any))) {
      // Only what is taken can be infinite or NaN: thresholds are finite.
      bad = hn::MulAdd(v0, hn::Zero(f), hn::MulAdd(v1, hn::Zero(f), bad));
      bad = hn::MulAdd(v2, hn::Zero(f), hn::MulAdd(v3, hn::Zero(f), bad));
      if (!hn::AllFalse(f, m0)) taken = Append(v0, m0, i, taken, s);
      if (!hn::AllFalse(f, m1)) taken = Append(v1, m1, i + kLanes, taken, s);
      if (!hn::AllFalse(f, m2)) taken = Append(v2, m2, i + 2 * kLanes, taken, s);
      if (!hn::AllFalse(f, m3)) taken = Append(v3, m3, i + 3 * kLanes, taken, s);
    }
    keep(i, Four{v0, v1, v2, v3}, FourMasks{m0, m1, m2, m3});
  }
  *poison += hn::GetLane(hn::SumOfLanes(f, bad));
  return taken;
}

Selection Rest(const Selection& s, size_t done, size_t taken) {
  Selection rest = s;
  rest.first += static_cast<uint32_t>(done);
  rest.indices += taken;
  rest.values += taken;
  return rest;
}

template <bool kStream, typename T>
size_t SelectWith(const float* gradient, const T* residual, T* pending, size_t count, const Selection& s,
                  float* poison) {
  const size_t whole = Whole(count);
  const auto sum = [&](size_t i) GT_INLINED { return Sum(Get(gradient, i), Get(residual, i)); };
  const auto plain = [&](size_t i) GT_INLINED { return Get(gradient, i); };
  const auto keep = [&](size_t i, const Four& v, const FourMasks& m)
                        GT_INLINED { Keep<kStream>(ZeroWhere(m, v), s.seed, s.first, i, pending); };
  const auto forget = [](size_t, const Four&, const FourMasks&) GT_INLINED {};
  size_t taken = 0;
  if (residual != nullptr && pending != nullptr) {
    taken = SelectLoop(whole, s, poison, sum, keep);
  } else if (pending != nullptr) {
    taken = SelectLoop(whole, s, poison, plain, keep);
  } else if (residual != nullptr) {
    taken = SelectLoop(whole, s, poison, sum, forget);
  } else {
    taken = SelectLoop(whole, s, poison, plain, forget);
  }
  return taken + ScalarKernels().Carrying<T>().select(gradient + whole,
                                                      residual == nullptr ? nullptr : residual + whole,
                                                      pending == nullptr ? nullptr : pending + whole,
                                                      count - whole, Rest(s, whole, taken), poison);
}

template <typename T>
size_t Select(const float* gradient, const T* residual, T* pending, size_t count, const Selection& s,
              float* poison) {
  return s.stream ? SelectWith<true>(gradient, residual, pending, count, s, poison)
                  : SelectWith<false>(gradient, residual, pending, count, s, poison);
}

template <bool kStream, typename T>
size_t SelectMomentumWith(const float* gradient, const Momentum<T>& momentum, const T* residual,
                          T* pending_residual, size_t count, const Selection& s, float* poison) {
  const size_t whole = Whole(count);
  const V m = hn::Set(f, momentum.factor);
  const auto speed = [&](size_t i) GT_INLINED {
    const Four v = Get(momentum.velocity, i), g = Get(gradient, i);
    return Four{hn::MulAdd(m, v.v0, g.v0), hn::MulAdd(m, v.v1, g.v1), hn::MulAdd(m, v.v2, g.v2),
                hn::MulAdd(m, v.v3, g.v3)};
  };
  const size_t taken = SelectLoop(
      whole, s, poison, [&](size_t i) GT_INLINED { return Sum(Get(residual, i), speed(i)); },
      [&](size_t i, const Four& v, const FourMasks& masks) GT_INLINED {
        // Computed anew rather than kept in four more registers: its operands are in the first-level cache.
        Keep<kStream>(ZeroWhere(masks, speed(i)), OtherSeed(s.seed), s.first, i, momentum.pending);
        Keep<kStream>(ZeroWhere(masks, v), s.seed, s.first, i, pending_residual);
      });
  const Momentum<T> rest = {momentum.factor, momentum.velocity + whole, momentum.pending + whole};
  return taken + ScalarKernels().Carrying<T>().select_momentum(gradient + whole, rest, residual + whole,
                                                               pending_residual + whole, count - whole,
                                                               Rest(s, whole, taken), poison);
}

template <typename T>
size_t SelectMomentum(const float* gradient, const Momentum<T>& momentum, const T* residual,
                      T* pending_residual, size_t count, const Selection& s, float* poison) {
  return s.stream
             ? SelectMomentumWith<true>(gradient, momentum, residual, pending_residual, count, s, poison)
             : SelectMomentumWith<false>(gradient, momentum, residual, pending_residual, count, s, poison);
}

// Infinities and NaNs are larger than all numbers when magnitudes are compared as integers: one comparison
// finds what has to be clipped and what is no number.
HWY_INLINE hn::Vec<I> Magnitude(V v) {
  return hn::BitCast(s32, hn::And(hn::BitCast(u32, v), hn::Set(u32, 0x7fffffff)));
}
HWY_INLINE hn::Vec<I> LargestMagnitude(const Four& v) {
  return hn::Max(hn::Max(Magnitude(v.v0), Magnitude(v.v1)), hn::Max(Magnitude(v.v2), Magnitude(v.v3)));
}
HWY_INLINE bool AllWithin(hn::Vec<I> reached, float largest) {
  largest = std::min(largest, std::numeric_limits<float>::max());
  return hn::GetLane(hn::MaxOfLanes(s32, reached)) <= std::bit_cast<int32_t>(largest);
}

bool Within(const float* in, size_t count, float largest) {
  const size_t whole = Whole(count);
  auto reached = hn::Zero(s32);
  for (size_t i = 0; i < whole; i += kTurn) reached = hn::Max(reached, LargestMagnitude(Get(in, i)));
  return AllWithin(reached, largest) && ScalarKernels().within(in + whole, count - whole, largest);
}

template <typename T>
size_t Add(const float* a, const T* b, float* sum, size_t count, float largest, float* poison) {
  const size_t whole = b == nullptr ? 0 : Whole(count);
  auto reached = hn::Zero(s32);
  for (size_t i = 0; i < whole; i += kTurn) {
    const Four v = Sum(Get(a, i), Get(b, i));
    reached = hn::Max(reached, LargestMagnitude(v));
    hn::StoreU(v.v0, f, sum + i);
    hn::StoreU(v.v1, f, sum + i + kLanes);
    hn::StoreU(v.v2, f, sum + i + 2 * kLanes);
    hn::StoreU(v.v3, f, sum + i + 3 * kLanes);
  }
  // Values that must be clipped or are no numbers are so rare that the scalar loop handles them.
  const size_t done = AllWithin(reached, largest) ? whole : 0;
  return ScalarKernels().Carrying<T>().add(a + done, b == nullptr ? nullptr : b + done, sum + done,
                                           count - done, largest, poison);
}

template <bool kStream, typename T>
HWY_INLINE void SubtractWhole(const float* a, const float* b, T* out, size_t whole, uint32_t seed,
                              size_t first) {
  for (size_t i = 0; i < whole; i += kTurn) {
    const Four x = Get(a, i), y = Get(b, i);
    const Four left = {hn::Sub(x.v0, y.v0), hn::Sub(x.v1, y.v1), hn::Sub(x.v2, y.v2), hn::Sub(x.v3, y.v3)};
    Keep<kStream>(left, seed, first, i, out);
  }
}

template <typename T>
void Subtract(const float* a, const float* b, T* out, size_t count, bool stream, uint32_t seed,
              size_t first) {
  const size_t whole = Whole(count);
  if (stream) {
    SubtractWhole<true>(a, b, out, whole, seed, first);
  } else {
    SubtractWhole<false>(a, b, out, whole, seed, first);
  }
  ScalarKernels().Carrying<T>().subtract(a + whole, b + whole, out + whole, count - whole, false, seed,
                                         first + whole);
}

// Runs `block(in, payload, scales)` on whole scale blocks of payload_bytes each, and `rest` on what is left.
template <typename Block, typename Rest>
HWY_INLINE void EncodeLoop(const float* in, size_t count, uint8_t* payload, float* scales,
                           size_t payload_bytes, const Block& block, const Rest& rest) {
  for (; count >= kScaleBlock; count -= kScaleBlock) {
    block(in, payload, scales++);
    in += kScaleBlock;
    payload += payload_bytes;
  }
  if (count > 0) rest(in, count, payload, scales);
}

// `add` is decided once, outside: gcc 12.2 turns a vector addition under a run-time condition into one with
// the condition as its lane mask, which adds the first lane only.
template <bool kAdd, typename Block>
HWY_INLINE void DecodeBlocks(const uint8_t* payload, const float* scales, size_t blocks, float* out,
                             size_t payload_bytes, const Block& block) {
  for (size_t b = 0; b < blocks; ++b) {
    for (size_t i = 0; i < kScaleBlock; i += kLanes) {
      V v = block(payload, scales, i);
      if constexpr (kAdd) v = hn::Add(v, hn::LoadU(f, out + i));
      hn::StoreU(v, f, out + i);
    }
    ++scales;
    out += kScaleBlock;
    payload += payload_bytes;
  }
}

template <typename Block, typename Rest>
HWY_INLINE void DecodeLoop(const uint8_t* payload, const float* scales, size_t count, float* out, bool add,
                           size_t payload_bytes, const Block& block, const Rest& rest) {
  const size_t blocks = count / kScaleBlock;
  if (add) {
    DecodeBlocks<true>(payload, scales, blocks, out, payload_bytes, block);
  } else {
    DecodeBlocks<false>(payload, scales, blocks, out, payload_bytes, block);
  }
  const size_t done = blocks * kScaleBlock;
  if (done < count) rest(payload + blocks * payload_bytes, scales + blocks, count - done, out + done, add);
}

using Halves = hn::Rebind<uint16_t, F>;
using Bytes = hn::Rebind<uint8_t, F>;

void EncodeFloat16(const float* in, size_t count, uint8_t* payload, float* scales) {
#if HWY_ARCH_X86 && HWY_TARGET >= HWY_SSE4
  // Without the CPU's own conversion Highway's cuts off where it should round.
  ScalarKernels().encode_float16(in, count, payload, scales);
#else
  const hn::Rebind<hwy::float16_t, F> f16;
  EncodeLoop(
      in, count, payload, scales, 2 * kScaleBlock,
      [&](const float* from, uint8_t* to, float*) {
        for (size_t i = 0; i < kScaleBlock; i += kLanes) {
          const auto half = hn::DemoteTo(f16, hn::LoadU(f, from + i));
          hn::StoreU(hn::BitCast(Halves(), half), Halves(), reinterpret_cast<uint16_t*>(to) + i);
        }
      },
      ScalarKernels().encode_float16);
#endif
}

void EncodeBFloat16(const float* in, size_t count, uint8_t* payload, float* scales) {
  EncodeLoop(
      in, count, payload, scales, 2 * kScaleBlock,
      [&](const float* from, uint8_t* to, float*) {
        for (size_t i = 0; i < kScaleBlock; i += kLanes) {
          const auto bits = hn::BitCast(u32, hn::LoadU(f, from + i));
          const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
          const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(u32, 0x7fff)), odd));
          const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u32, 0x40));
          const auto is_nan = hn::Gt(hn::And(bits, hn::Set(u32, 0x7fffffff)), hn::Set(u32, 0x7f800000));
          const auto half = hn::BitCast(s32, hn::IfThenElse(is_nan, nan, rounded));
          hn::StoreU(hn::DemoteTo(Halves(), half), Halves(), reinterpret_cast<uint16_t*>(to) + i);
        }
      },
      ScalarKernels().encode_bfloat16);
}

HWY_INLINE float LargestOfBlock(const float* in) {
  V largest = hn::Zero(f);
  for (size_t i = 0; i < kScaleBlock; i += kLanes) largest = hn::Max(largest, hn::Abs(hn::LoadU(f, in + i)));
  return hn::GetLane(hn::MaxOfLanes(f, largest));
}

// Codes of 8 bits, relative to the largest value of the block: convert(vector in -range..range) gives int32
// lanes.
template <typename Convert, typename Rest>
HWY_INLINE void EncodeBytes(const float* in, size_t count, uint8_t* payload, float* scales, float range,
                            const Convert& convert, const Rest& rest) {
  EncodeLoop(
      in, count, payload, scales, kScaleBlock,
      [&](const float* from, uint8_t* to, float* scale) {
        const float largest = LargestOfBlock(from);
        const bool zero = !(largest >= kSmallestScaled);
        *scale = zero ? 0 : largest / range;
        const V inverse = hn::Set(f, zero ? 0 : range / largest);
        for (size_t i = 0; i < kScaleBlock; i += kLanes) {
          const V v = hn::Mul(hn::LoadU(f, from + i), inverse);
          const auto code = hn::And(convert(v), hn::Set(s32, 0xff));
          hn::StoreU(hn::DemoteTo(Bytes(), code), Bytes(), to + i);
        }
      },
      rest);
}

void EncodeInt8(const float* in, size_t count, uint8_t* payload, float* scales) {
  const auto convert = [](V v) {
    return hn::NearestInt(hn::Min(hn::Max(v, hn::Set(f, -127.0f)), hn::Set(f, 127.0f)));
  };
  EncodeBytes(in, count, payload, scales, 127, convert, ScalarKernels().encode_int8);
}

void EncodeFloat8(const float* in, size_t count, uint8_t* payload, float* scales) {
  const auto convert = [](V v) {
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(u32, v)), hn::Set(u32, 0x80));
    const V magnitude = hn::Min(hn::Abs(v), hn::Set(f, 448.0f));
    const auto bits = hn::BitCast(u32, magnitude);
    const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(u32, 1));
    const auto bias = hn::Set(u32, 0x7ffffu - (120u << 23));
    const auto normal = hn::ShiftRight<20>(hn::Add(hn::Add(bits, bias), odd));
    const V aligned = hn::Add(magnitude, hn::Set(f, 0x1p14f));
    const auto subnormal = hn::Sub(hn::BitCast(u32, aligned), hn::Set(u32, 0x46800000));
    const auto small = hn::Lt(bits, hn::Set(u32, 0x3c800000));
    return hn::BitCast(s32, hn::Or(hn::IfThenElse(small, subnormal, normal), sign));
  };
  EncodeBytes(in, count, payload, scales, 448, convert, ScalarKernels().encode_float8);
}

void EncodeOneBit(const float* in, size_t count, uint8_t* payload, float* scales) {
  EncodeLoop(
      in, count, payload, scales, kScaleBlock / 8,
      [&](const float* from, uint8_t* to, float* scale) {
        V sum = hn::Zero(f);
        for (size_t i = 0; i < kScaleBlock; i += kLanes) {
          const V v = hn::LoadU(f, from + i);
          sum = hn::Add(sum, hn::Abs(v));
          const auto positive = hn::Ge(v, hn::Zero(f));
          if constexpr (kLanes >= 8) {
            hn::StoreMaskBits(f, positive, to + i / 8);
          } else {
            uint8_t bits[8];
            hn::StoreMaskBits(f, positive, bits);
            const unsigned shifted = static_cast<unsigned>(bits[0]) << (i % 8);
            to[i / 8] = static_cast<uint8_t>(i % 8 == 0 ? shifted : to[i / 8] | shifted);
          }
        }
        *scale = hn::GetLane(hn::SumOfLanes(f, sum)) / kScaleBlock;
      },
      ScalarKernels().encode_one_bit);
}

void DecodeFloat16(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  const hn::Rebind<hwy::float16_t, F> f16;
  DecodeLoop(
      payload, scales, count, out, add, 2 * kScaleBlock,
      [&](const uint8_t* from, const float*, size_t i) {
        const auto bits = hn::LoadU(Halves(), reinterpret_cast<const uint16_t*>(from) + i);
        return hn::PromoteTo(f, hn::BitCast(f16, bits));
      },
      ScalarKernels().decode_float16);
}

void DecodeBFloat16(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  DecodeLoop(
      payload, scales, count, out, add, 2 * kScaleBlock,
      [&](const uint8_t* from, const float*, size_t i) {
        const auto bits = hn::LoadU(Halves(), reinterpret_cast<const uint16_t*>(from) + i);
        return hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(u32, bits)));
      },
      ScalarKernels().decode_bfloat16);
}

void DecodeInt8(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  const hn::Rebind<int8_t, F> s8;
  DecodeLoop(
      payload, scales, count, out, add, kScaleBlock,
      [&](const uint8_t* from, const float* scale, size_t i) {
        const auto code = hn::PromoteTo(s32, hn::LoadU(s8, reinterpret_cast<const int8_t*>(from) + i));
        return hn::Mul(hn::ConvertTo(f, code), hn::Set(f, *scale));
      },
      ScalarKernels().decode_int8);
}

void DecodeFloat8(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  DecodeLoop(
      payload, scales, count, out, add, kScaleBlock,
      [&](const uint8_t* from, const float* scale, size_t i) {
        const auto code = hn::PromoteTo(u32, hn::LoadU(Bytes(), from + i));
        // As WidenedMagnitude: no operand is a subnormal float, which a thread may have set to be flushed.
        const auto rest = hn::ShiftLeft<20>(hn::And(code, hn::Set(u32, 0x7f)));
        const auto normal = hn::Add(rest, hn::Set(u32, 120u << 23));
        const V hidden = hn::BitCast(f, hn::Add(normal, hn::Set(u32, 1u << 23)));
        const V subnormal = hn::Sub(hidden, hn::BitCast(f, hn::Set(u32, 121u << 23)));
        const auto small = hn::Lt(rest, hn::Set(u32, 1u << 23));
        const auto bits = hn::IfThenElse(small, hn::BitCast(u32, subnormal), normal);
        const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(u32, 0x80)));
        return hn::Mul(hn::BitCast(f, hn::Or(bits, sign)), hn::Set(f, *scale));
      },
      ScalarKernels().decode_float8);
}

void DecodeOneBit(const uint8_t* payload, const float* scales, size_t count, float* out, bool add) {
  DecodeLoop(
      payload, scales, count, out, add, kScaleBlock / 8,
      [&](const uint8_t* from, const float* scale, size_t i) {
        uint8_t bits[8] = {};
        if constexpr (kLanes >= 8) {
          for (size_t b = 0; b < kLanes / 8; ++b) bits[b] = from[i / 8 + b];
        } else {
          bits[0] = static_cast<uint8_t>(from[i / 8] >> (i % 8));
        }
        const V v = hn::Set(f, *scale);
        return hn::IfThenElse(hn::LoadMaskBits(f, bits), v, hn::Neg(v));
      },
      ScalarKernels().decode_one_bit);
}

Kernels Table() {
  return {hwy::TargetName(HWY_TARGET),
          {Select, SelectMomentum, Add, Subtract},
          {Select, SelectMomentum, Add, Subtract},
          [] { hwy::FlushStream(); },
          Within,
          EncodeFloat16,
          EncodeBFloat16,
          EncodeInt8,
          EncodeFloat8,
          EncodeOneBit,
          DecodeFloat16,
          DecodeBFloat16,
          DecodeInt8,
          DecodeFloat8,
          DecodeOneBit};
}

}  // namespace gtrain::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gtrain::comm {
namespace {
GT_SIMD_EXPORT(Table);
}  // namespace

const Kernels& BestKernels() {
  static const Kernels best = GT_SIMD_BEST(Table)();
  return best;
}

}  // namespace gtrain::comm
#endif
#endif  // GTRAIN_HAVE_HWY
