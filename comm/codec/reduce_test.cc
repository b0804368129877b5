#include "comm/codec/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

template <typename T>
std::vector<T> ReduceAll(const std::vector<std::vector<T>>& inputs, DType dtype, ReduceOp op,
                         int divisor = 1) {
  std::vector<const void*> sources;
  for (const auto& input : inputs) sources.push_back(input.data());
  std::vector<T> output(inputs[0].size());
  Reduce(output.data(), sources.data(), sources.size(), output.size(), dtype, op, divisor);
  return output;
}

TEST(Reduce, EveryOperation) {
  const std::vector<std::vector<int32_t>> in{{1, -5, 7}, {10, 3, 7}, {4, 4, -7}};
  EXPECT_EQ(ReduceAll<int32_t>(in, DType::kInt32, ReduceOp::kSum), (std::vector<int32_t>{15, 2, 7}));
  EXPECT_EQ(ReduceAll<int32_t>(in, DType::kInt32, ReduceOp::kMean, 3), (std::vector<int32_t>{5, 0, 2}));
  EXPECT_EQ(ReduceAll<int32_t>(in, DType::kInt32, ReduceOp::kMin), (std::vector<int32_t>{1, -5, -7}));
  EXPECT_EQ(ReduceAll<int32_t>(in, DType::kInt32, ReduceOp::kMax), (std::vector<int32_t>{10, 4, 7}));
}

TEST(Reduce, IntegersWrap) {
  const int64_t top = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ReduceAll<int64_t>({{top}, {1}}, DType::kInt64, ReduceOp::kSum)[0],
            std::numeric_limits<int64_t>::min());
  EXPECT_EQ(ReduceAll<uint8_t>({{200}, {100}}, DType::kUint8, ReduceOp::kSum)[0], 44);
}

// A divisor of 256 ranks is 0 as a uint8_t.
TEST(Reduce, ADivisorNeedNotFitIntoTheType) {
  EXPECT_EQ(ReduceAll<uint8_t>({{200}, {55}}, DType::kUint8, ReduceOp::kMean, 256)[0], 0);
  EXPECT_EQ(ReduceAll<uint8_t>({{200}, {55}, {0}}, DType::kUint8, ReduceOp::kMean, 255)[0], 1);
}

TEST(Reduce, BytesOfTruthsBecomeZeroOrOne) {
  const std::vector<std::vector<uint8_t>> in{{0, 2, 128, 0}, {0, 0, 1, 255}, {0, 4, 7, 0}};
  const auto of = [&](ReduceOp op) { return ReduceAll<uint8_t>(in, DType::kBool, op); };
  EXPECT_EQ(of(ReduceOp::kSum), (std::vector<uint8_t>{0, 1, 1, 1}));
  EXPECT_EQ(of(ReduceOp::kProduct), (std::vector<uint8_t>{0, 0, 1, 0}));
  EXPECT_EQ(of(ReduceOp::kBitXor), (std::vector<uint8_t>{0, 0, 1, 1}));
}

TEST(Reduce, NanWinsInEitherPlace) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
    const std::vector<float> out = ReduceAll<float>({{nan, 1}, {1, nan}, {2, 2}}, DType::kFloat32, op);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(out[1]));
    for (uint8_t bits : {0x7f, 0xff}) {
      const auto eighth = ReduceAll<uint8_t>({{bits, 0x38}, {0x38, bits}}, DType::kFloat8E4M3, op);
      EXPECT_TRUE(std::isnan(FromFloat8E4M3(eighth[0])) && std::isnan(FromFloat8E4M3(eighth[1])));
    }
  }
}

TEST(Reduce, LongerThanABlockAndInPlace) {
  std::vector<double> a(5000), b(5000);
  for (size_t i = 0; i < a.size(); ++i) a[i] = double(i), b[i] = 0.5;
  const void* sources[] = {a.data(), b.data()};
  Reduce(a.data(), sources, 2, a.size(), DType::kFloat64, ReduceOp::kSum);
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(a[i], double(i) + 0.5);
}

// A value of `dtype`, to compare with.
std::complex<double> AsNumber(DType dtype, const char* at) {
  const auto as = [&]<typename T>(T value) {
    std::memcpy(&value, at, sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::kFloat64:
      return as(double{});
    case DType::kFloat32:
      return as(float{});
    case DType::kFloat16:
      return FromFloat16(as(uint16_t{}));
    case DType::kBFloat16:
      return FromBFloat16(as(uint16_t{}));
    case DType::kFloat8E4M3:
      return FromFloat8E4M3(as(uint8_t{}));
    case DType::kFloat8E5M2:
      return FromFloat8E5M2(as(uint8_t{}));
    case DType::kComplex64:
      return as(std::complex<float>{});
    default:
      return 0;
  }
}

// True for the same bits, or for NaNs with whatever bits.
bool Same(DType dtype, const char* a, const char* b) {
  const auto same = [](double x, double y) {
    return (std::isnan(x) && std::isnan(y)) || std::memcmp(&x, &y, sizeof x) == 0;
  };
  if (std::memcmp(a, b, DTypeSize(dtype)) == 0) return true;
  const std::complex<double> x = AsNumber(dtype, a), y = AsNumber(dtype, b);
  return !IsInteger(dtype) && dtype != DType::kBool && same(x.real(), y.real()) && same(x.imag(), y.imag());
}

// Written without regard to time: every operation on one pair of a kind of type.
template <typename T>
T OneInteger(ReduceOp op, T a, T b) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return static_cast<T>(static_cast<U>(uint64_t{U(a)} + uint64_t{U(b)}));
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<U>(uint64_t{U(a)} * uint64_t{U(b)}));
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBitAnd:
      return static_cast<T>(a & b);
    case ReduceOp::kBitOr:
      return static_cast<T>(a | b);
    case ReduceOp::kBitXor:
      return static_cast<T>(a ^ b);
  }
  return 0;
}

template <typename T>
T OneFloat(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kProduct) return a * b;
  if (op != ReduceOp::kMin && op != ReduceOp::kMax) return a + b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  return (op == ReduceOp::kMin ? b < a : a < b) ? b : a;
}

bool OneTruth(ReduceOp op, bool a, bool b) {
  if (op == ReduceOp::kBitXor) return a != b;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBitOr) return a || b;
  return a && b;
}

std::complex<float> OneComplex(ReduceOp op, std::complex<float> a, std::complex<float> b) {
  if (op != ReduceOp::kProduct) return a + b;
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

// One element: `from` are its sources.
template <typename Stored, typename Load, typename One, typename Divide, typename Store>
void ReferenceOf(const std::vector<const char*>& from, char* to, const Load& load, const One& one,
                 const Divide& divide, const Store& store) {
  const auto get = [&](const char* at) {
    Stored stored;
    std::memcpy(&stored, at, sizeof stored);
    return load(stored);
  };
  auto value = get(from[0]);
  for (size_t s = 1; s < from.size(); ++s) value = one(value, get(from[s]));
  const Stored stored = store(divide(value));
  std::memcpy(to, &stored, sizeof stored);
}

void Reference(DType dtype, ReduceOp op, int divisor, const std::vector<const char*>& from, char* to) {
  const auto as_is = [](auto v) { return v; };
  const auto integers = [&]<typename T>(T) {
    // 300 is no int8_t, and an unsigned quotient is not that of an int64_t.
    const auto divide = [&](T v) {
      return std::is_unsigned_v<T> ? static_cast<T>(static_cast<uint64_t>(v) / static_cast<uint64_t>(divisor))
                                   : static_cast<T>(static_cast<int64_t>(v) / divisor);
    };
    ReferenceOf<T>(
        from, to, as_is, [&](T a, T b) { return OneInteger(op, a, b); }, divide, as_is);
  };
  const auto floats = [&]<typename Stored>(Stored, const auto& load, const auto& store) {
    using T = decltype(load(Stored{}));
    ReferenceOf<Stored>(
        from, to, load, [&](T a, T b) { return OneFloat(op, a, b); },
        [&](T v) { return v / static_cast<T>(divisor); }, store);
  };
  switch (dtype) {
    case DType::kFloat32:
      return floats(float{}, as_is, as_is);
    case DType::kFloat64:
      return floats(double{}, as_is, as_is);
    case DType::kFloat16:
      return floats(uint16_t{}, FromFloat16, ToFloat16);
    case DType::kBFloat16:
      return floats(uint16_t{}, FromBFloat16, ToBFloat16);
    case DType::kFloat8E4M3:
      return floats(uint8_t{}, FromFloat8E4M3, ToFloat8E4M3);
    case DType::kFloat8E5M2:
      return floats(uint8_t{}, FromFloat8E5M2, ToFloat8E5M2);
    case DType::kInt8:
      return integers(int8_t{});
    case DType::kInt16:
      return integers(int16_t{});
    case DType::kInt32:
      return integers(int32_t{});
    case DType::kInt64:
      return integers(int64_t{});
    case DType::kUint8:
      return integers(uint8_t{});
    case DType::kUint16:
      return integers(uint16_t{});
    case DType::kUint32:
      return integers(uint32_t{});
    case DType::kUint64:
      return integers(uint64_t{});
    case DType::kBool:
      return ReferenceOf<uint8_t>(
          from, to, [](uint8_t v) { return v != 0; }, [&](bool a, bool b) { return OneTruth(op, a, b); },
          as_is, [](bool v) { return uint8_t{v}; });
    case DType::kComplex64:
      return ReferenceOf<std::complex<float>>(
          from, to, as_is, [&](std::complex<float> a, std::complex<float> b) { return OneComplex(op, a, b); },
          [&](std::complex<float> v) { return v / static_cast<float>(divisor); }, as_is);
  }
}

// Two sources take another loop than more do, and rare types and operations yet another.
TEST(Reduce, EveryTypeAndOperationInEveryLoop) {
  constexpr size_t kCount = 1501;
  std::vector<std::vector<char>> in(5, std::vector<char>(kCount * 8 + 8));
  uint32_t state = 1;
  for (auto& data : in) {
    for (char& c : data) c = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
    for (size_t i = 0; i < data.size(); i += 11) data[i] = 0;  // or all truths would be true
  }
  size_t taken = 0;
  for (int type = 0; DTypeSize(static_cast<DType>(type)) != 0; ++type) {
    const DType dtype = static_cast<DType>(type);
    const size_t element = DTypeSize(dtype);
    for (int number = 0; number <= static_cast<int>(ReduceOp::kBitXor); ++number) {
      const ReduceOp op = static_cast<ReduceOp>(number);
      if (!IsReducible(dtype, op)) continue;
      ++taken;
      for (size_t sources = 1; sources <= in.size(); ++sources) {
        for (size_t shift : {size_t{0}, element, size_t{1}}) {  // the last: not aligned
          const int divisor = op == ReduceOp::kMean ? 300 : 1;
          std::vector<const void*> from;
          for (size_t s = 0; s < sources; ++s) from.push_back(in[s].data() + shift);
          std::vector<char> wanted(kCount * element);
          for (size_t i = 0; i < kCount; ++i) {
            std::vector<const char*> one;
            for (const void* f : from) one.push_back(static_cast<const char*>(f) + i * element);
            Reference(dtype, op, divisor, one, wanted.data() + i * element);
          }
          for (size_t outputs = 1; outputs <= 3; ++outputs) {
            std::vector<std::vector<char>> out(outputs, std::vector<char>(kCount * element + 9));
            std::vector<void*> to;
            for (auto& o : out) to.push_back(o.data() + shift);
            ReduceInto(to.data(), outputs, from.data(), sources, {kCount, dtype, op, divisor});
            for (auto& o : out) {
              for (size_t i = 0; i < kCount; ++i) {
                const char *got = o.data() + shift + i * element, *want = wanted.data() + i * element;
                ASSERT_TRUE(Same(dtype, got, want))
                    << type << " " << number << " " << sources << " " << outputs << " at " << i;
              }
              EXPECT_EQ(o[shift + kCount * element], 0);
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(taken, 8 * 8 + 6 * 5 + 7 + 3);  // integers, floats, bool, complex numbers
}

TEST(CopyAroundCaches, CopiesEveryByteAndNoOther) {
  std::vector<char> from(1000), to(1000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  for (size_t begin : {0, 1, 63, 64, 65}) {
    for (size_t bytes : {0, 1, 63, 64, 129, 700}) {
      std::fill(to.begin(), to.end(), 0);
      CopyAroundCaches(to.data() + begin, from.data() + 3, bytes);
      for (size_t i = 0; i < to.size(); ++i) {
        const bool inside = i >= begin && i < begin + bytes;
        ASSERT_EQ(to[i], inside ? from[i - begin + 3] : 0) << begin << " " << bytes << " " << i;
      }
    }
  }
}

TEST(Reduce, SmallFloatsAccumulateInFloat) {
  // 2048 + 1 is not a float16, but the sum of four is: rounding at each step would lose it.
  const uint16_t big = ToFloat16(2048), one = ToFloat16(1);
  EXPECT_EQ(FromFloat16(ReduceAll<uint16_t>({{big}, {one}, {one}}, DType::kFloat16, ReduceOp::kSum)[0]),
            2050);
  const uint16_t b = ToBFloat16(256), bone = ToBFloat16(1);
  EXPECT_EQ(FromBFloat16(ReduceAll<uint16_t>({{b}, {bone}, {bone}}, DType::kBFloat16, ReduceOp::kSum)[0]),
            258);
  // 16 + 1 is no float8_e4m3, and 8 + 1 no float8_e5m2.
  EXPECT_EQ(ReduceAll<uint8_t>({{0x58}, {0x38}, {0x38}}, DType::kFloat8E4M3, ReduceOp::kSum)[0],
            ToFloat8E4M3(18));
  EXPECT_EQ(ReduceAll<uint8_t>({{0x48}, {0x3c}, {0x3c}}, DType::kFloat8E5M2, ReduceOp::kSum)[0],
            ToFloat8E5M2(10));
}

TEST(Float8, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const uint8_t byte = static_cast<uint8_t>(bits);
    const float e4m3 = FromFloat8E4M3(byte), e5m2 = FromFloat8E5M2(byte);
    EXPECT_EQ(std::isnan(e4m3), (bits & 0x7f) == 0x7f);
    EXPECT_EQ(std::isnan(e5m2), (bits & 0x7f) > 0x7c);
    if (std::isnan(e4m3)) {
      EXPECT_TRUE(std::isnan(FromFloat8E4M3(ToFloat8E4M3(e4m3))));
    } else {
      EXPECT_EQ(ToFloat8E4M3(e4m3), byte);
    }
    if (std::isnan(e5m2)) {
      EXPECT_TRUE(std::isnan(FromFloat8E5M2(ToFloat8E5M2(e5m2))));
    } else {
      EXPECT_EQ(ToFloat8E5M2(e5m2), byte);
    }
  }
}

// Tests float bits in steps over the whole range: no other number is nearer, and of two as near the even one
// is taken.
template <typename From, typename To>
void ExpectNearest(From from, To to, float largest) {
  for (uint64_t bits = 0; bits < 0x7f800000; bits += 0xfff) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (value > largest) break;
    const uint8_t byte = to(value);
    const double off = std::fabs(double{from(byte)} - value);
    for (const uint8_t other : {static_cast<uint8_t>(byte - 1), static_cast<uint8_t>(byte + 1)}) {
      if (other > 0x7f || !std::isfinite(from(other))) continue;
      const double others = std::fabs(double{from(other)} - value);
      ASSERT_TRUE(off < others || (off == others && byte % 2 == 0)) << value;
    }
    ASSERT_EQ(to(-value), byte | 0x80) << value;
  }
}

TEST(Float8, Rounding) {
  ExpectNearest(FromFloat8E4M3, ToFloat8E4M3, 448);
  ExpectNearest(FromFloat8E5M2, ToFloat8E5M2, 57344);
  EXPECT_EQ(ToFloat8E4M3(17), 0x58);   // tie to even
  EXPECT_EQ(ToFloat8E4M3(464), 0x7e);  // there is no infinity
  EXPECT_EQ(ToFloat8E4M3(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(ToFloat8E5M2(61439), 0x7b);
  EXPECT_EQ(ToFloat8E5M2(-61440), 0xfc);
  EXPECT_EQ(ToFloat8E5M2(1e9f), 0x7c);
  EXPECT_EQ(ToFloat8E5M2(0x1p-17f), 0);  // tie to even
  EXPECT_EQ(ToFloat8E5M2(0x1.8p-16f), 2);
}

TEST(Float16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float f = FromFloat16(half);
    if (std::isnan(f)) {
      ASSERT_TRUE(std::isnan(FromFloat16(ToFloat16(f))));
    } else {
      ASSERT_EQ(ToFloat16(f), half) << bits;
    }
    const float g = FromBFloat16(half);
    if (!std::isnan(g)) {
      ASSERT_EQ(ToBFloat16(g), half) << bits;
    }
  }
}

#if defined(__SSE2__)
// torch.set_flush_denormal(True) sets these bits on a thread: subnormal floats are zero, as operands and as
// results. Ranks with and without them convert the narrow types, which have subnormals of their own, to the
// same bits.
TEST(Float16, AThreadThatFlushesSubnormalFloatsConvertsTheSame) {
  constexpr unsigned kFlush = 0x8040;
  const auto all = [] {
    std::vector<uint32_t> bits;
    for (uint32_t half = 0; half < 0x10000; ++half) {
      const float f = FromFloat16(static_cast<uint16_t>(half));
      bits.push_back(std::bit_cast<uint32_t>(f));
      bits.push_back(ToFloat16(f));
      if (half >= 0x100) continue;
      const float e4m3 = FromFloat8E4M3(static_cast<uint8_t>(half)),
                  e5m2 = FromFloat8E5M2(static_cast<uint8_t>(half));
      bits.insert(bits.end(), {std::bit_cast<uint32_t>(e4m3), std::bit_cast<uint32_t>(e5m2)});
      bits.insert(bits.end(), {ToFloat8E4M3(e4m3), ToFloat8E5M2(e5m2)});
    }
    return bits;
  };
  const auto sums = [](DType dtype, int bytes) {
    std::vector<uint8_t> a(static_cast<size_t>(bytes) * 64), b = a;
    for (size_t i = 0; i < a.size(); ++i) a[i] = b[i] = i % static_cast<size_t>(bytes) == 0 ? i & 0x7f : 0;
    const void* const sources[] = {a.data(), b.data()};
    std::vector<uint8_t> out(a.size());
    Reduce(out.data(), sources, 2, 64, dtype, ReduceOp::kSum);
    return out;
  };
  const auto results = [&] {
    return std::tuple(all(), sums(DType::kFloat16, 2), sums(DType::kFloat8E4M3, 1),
                      sums(DType::kFloat8E5M2, 1));
  };
  const auto as_is = results();
  EXPECT_EQ(FromFloat16(1), 0x1p-24f);
  EXPECT_EQ(FromFloat8E4M3(1), 0x1p-9f);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlush);
  const auto flushing = results();
  _mm_setcsr(before);
  EXPECT_TRUE(as_is == flushing);
}
#endif

TEST(Float16, Rounding) {
  EXPECT_EQ(ToFloat16(65504.0f), 0x7bff);
  EXPECT_EQ(ToFloat16(65519.0f), 0x7bff);
  EXPECT_EQ(ToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(ToFloat16(1e9f), 0x7c00);
  EXPECT_EQ(ToFloat16(-1e9f), 0xfc00);
  EXPECT_EQ(ToFloat16(0x1p-24f), 1);
  EXPECT_EQ(ToFloat16(0x1p-25f), 0);    // tie to even
  EXPECT_EQ(ToFloat16(0x1.8p-24f), 2);  // tie to even
  EXPECT_EQ(ToFloat16(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(ToFloat16(1.0f + 0x1.8p-10f), 0x3c02);
  EXPECT_EQ(FromFloat16(0x3555), 0x1.554p-2f);
  EXPECT_EQ(ToBFloat16(1.0f + 0x1p-8f), 0x3f80);
}

}  // namespace
}  // namespace gtrain::comm
