#include "comm/codec/reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

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

// Of 256 ranks, which as a uint8_t are none.
TEST(Reduce, ADivisorNeedNotFitIntoTheType) {
  EXPECT_EQ(ReduceAll<uint8_t>({{200}, {55}}, DType::kUint8, ReduceOp::kMean, 256)[0], 0);
  EXPECT_EQ(ReduceAll<uint8_t>({{200}, {55}, {0}}, DType::kUint8, ReduceOp::kMean, 255)[0], 1);
}

TEST(Reduce, NanWinsInEitherPlace) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
    const std::vector<float> out = ReduceAll<float>({{nan, 1}, {1, nan}, {2, 2}}, DType::kFloat32, op);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(out[1]));
  }
}

TEST(Reduce, LongerThanABlockAndInPlace) {
  std::vector<double> a(5000), b(5000);
  for (size_t i = 0; i < a.size(); ++i) a[i] = double(i), b[i] = 0.5;
  const void* sources[] = {a.data(), b.data()};
  Reduce(a.data(), sources, 2, a.size(), DType::kFloat64, ReduceOp::kSum);
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(a[i], double(i) + 0.5);
}

// Whether `a` and `b` are NaNs of `dtype`, with whatever bits.
bool BothNan(DType dtype, const char* a, const char* b) {
  const auto as = [&]<typename T>(T) {
    T x, y;
    std::memcpy(&x, a, sizeof(T));
    std::memcpy(&y, b, sizeof(T));
    return std::pair(x, y);
  };
  if (dtype == DType::kFloat64) {
    const auto [x, y] = as(double{});
    return std::isnan(x) && std::isnan(y);
  }
  if (dtype == DType::kFloat32) {
    const auto [x, y] = as(float{});
    return std::isnan(x) && std::isnan(y);
  }
  const auto [x, y] = as(uint16_t{});
  if (dtype == DType::kFloat16) return std::isnan(FromFloat16(x)) && std::isnan(FromFloat16(y));
  return dtype == DType::kBFloat16 && std::isnan(FromBFloat16(x)) && std::isnan(FromBFloat16(y));
}

// Two sources take another loop than more do. All must give the bits of one element at a time.
TEST(Reduce, EveryLoopGivesTheSameBits) {
  constexpr size_t kCount = 2500;
  std::vector<std::vector<char>> in(3, std::vector<char>(kCount * 8 + 8));
  uint32_t state = 1;
  for (auto& data : in) {
    for (char& c : data) c = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  }
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32,
                      DType::kInt64, DType::kUint8}) {
    const size_t element = DTypeSize(dtype);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax}) {
      for (size_t sources = 1; sources <= 3; ++sources) {
        for (size_t outputs = 1; outputs <= 3; ++outputs) {
          for (size_t shift : {size_t{0}, element, size_t{1}}) {  // the last: not aligned
            const int divisor = op == ReduceOp::kMean ? 3 : 1;
            std::vector<const void*> from;
            for (size_t i = 0; i < sources; ++i) from.push_back(in[i].data() + shift);
            std::vector<char> wanted(kCount * element);
            for (size_t i = 0; i < kCount; ++i) {
              std::vector<const void*> one;
              for (const void* f : from) one.push_back(static_cast<const char*>(f) + i * element);
              Reduce(wanted.data() + i * element, one.data(), sources, 1, dtype, op, divisor);
            }
            std::vector<std::vector<char>> out(outputs, std::vector<char>(kCount * element + 8));
            std::vector<void*> to;
            for (auto& o : out) to.push_back(o.data() + shift);
            ReduceInto(to.data(), outputs, from.data(), sources, {kCount, dtype, op, divisor});
            for (auto& o : out) {
              for (size_t i = 0; i < kCount; ++i) {
                const char *got = o.data() + shift + i * element, *want = wanted.data() + i * element;
                ASSERT_TRUE(std::memcmp(got, want, element) == 0 || BothNan(dtype, got, want))
                    << int(dtype) << " " << int(op) << " " << sources << " " << outputs << " at " << i;
              }
            }
          }
        }
      }
    }
  }
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

TEST(Reduce, SixteenBitFloatsAccumulateInFloat) {
  // 2048 + 1 is not a float16, but the sum of four is: rounding at each step would lose it.
  const uint16_t big = ToFloat16(2048), one = ToFloat16(1);
  EXPECT_EQ(FromFloat16(ReduceAll<uint16_t>({{big}, {one}, {one}}, DType::kFloat16, ReduceOp::kSum)[0]),
            2050);
  const uint16_t b = ToBFloat16(256), bone = ToBFloat16(1);
  EXPECT_EQ(FromBFloat16(ReduceAll<uint16_t>({{b}, {bone}, {bone}}, DType::kBFloat16, ReduceOp::kSum)[0]),
            258);
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
