#include "actors/values/values.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/rng.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

Value Only(absl::string_view bytes) {
  Value value;
  const absl::Status status = TakeValue(&bytes, &value);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(bytes.empty()) << bytes.size() << " bytes are left";
  return value;
}

TEST(Values, IntegersComeBackWhateverTheirSize) {
  std::vector<int64_t> all = {0, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  for (int bit = 0; bit < 63; ++bit) {
    for (const int64_t off : {-1, 0, 1}) {
      all.push_back((int64_t{1} << bit) + off);
      all.push_back(-(int64_t{1} << bit) + off);
    }
  }
  for (const int64_t value : all) {
    Packer packer;
    packer.Int(value);
    const Value back = Only(packer.bytes());
    if (value < 0) {
      EXPECT_EQ(back.kind, ValueKind::kInt) << value;
      EXPECT_EQ(back.integer, value);
    } else {
      EXPECT_EQ(back.kind, ValueKind::kUint) << value;
      EXPECT_EQ(back.natural, static_cast<uint64_t>(value));
    }
  }
  Packer packer;
  packer.Uint(std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(Only(packer.bytes()).natural, std::numeric_limits<uint64_t>::max());
}

// Other libraries pack small naturals as signed, too.
TEST(Values, ANaturalThatWasPackedAsSignedIsOne) {
  EXPECT_EQ(Only("\xd0\x05").kind, ValueKind::kUint);
  EXPECT_EQ(Only("\xd0\x05").natural, 5u);
  EXPECT_EQ(Only(absl::string_view("\xd3\0\0\0\0\0\0\0\x07", 9)).natural, 7u);
  EXPECT_EQ(Only("\xd0\xfb").integer, -5);
}

TEST(Values, NumbersComeBackBitForBit) {
  for (const double value : {0.0, -0.0, 1.5, 0.1, 1e300, -1e-300, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::denorm_min()}) {
    Packer packer;
    packer.Float(value);
    const Value back = Only(packer.bytes());
    ASSERT_EQ(back.kind, ValueKind::kFloat);
    EXPECT_EQ(std::memcmp(&back.number, &value, sizeof(value)), 0) << value;
  }
  Packer packer;
  packer.Float(std::nan(""));
  EXPECT_TRUE(std::isnan(Only(packer.bytes()).number));
  EXPECT_EQ(Only(absl::string_view("\xca\x3f\xc0\0\0", 5)).number, 1.5) << "a float of four bytes";
}

TEST(Values, StringsBytesAndArrays) {
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{31}, size_t{32}, size_t{255}, size_t{256}, size_t{70'000}}) {
    const std::string text(size, 'x');
    Packer packer;
    packer.String(text);
    packer.Bytes(text);
    packer.Numbers(DType::kUint8, text);
    packer.Nil();
    absl::string_view bytes = packer.bytes();
    Value value;
    for (const ValueKind kind : {ValueKind::kString, ValueKind::kBytes, ValueKind::kNumbers}) {
      ASSERT_TRUE(TakeValue(&bytes, &value).ok());
      EXPECT_EQ(value.kind, kind) << size;
      EXPECT_EQ(value.bytes, text);
    }
    EXPECT_EQ(value.dtype, DType::kUint8);
    EXPECT_EQ(value.count, size);
    EXPECT_EQ(Only(bytes).kind, ValueKind::kNil);
  }
  Packer packer;
  packer.Array(2);
  packer.Bool(true);
  packer.Map(1);
  packer.Uint(1);
  packer.Uint(2);
  absl::string_view bytes = packer.bytes();
  Value value;
  ASSERT_TRUE(TakeValue(&bytes, &value).ok());
  EXPECT_EQ(value.kind, ValueKind::kArray);
  EXPECT_EQ(value.count, 2u);
  ASSERT_TRUE(TakeValue(&bytes, &value).ok());
  EXPECT_EQ(value.kind, ValueKind::kBool);
  EXPECT_EQ(value.integer, 1);
  ASSERT_TRUE(TakeValue(&bytes, &value).ok());
  EXPECT_EQ(value.kind, ValueKind::kMap);
  EXPECT_EQ(value.count, 1u);
}

// So that nobody has to copy them to read them.
TEST(Values, NumbersAreAlignedWithinWhatIsPacked) {
  for (size_t before = 0; before < 20; ++before) {
    for (const size_t count : {size_t{3}, size_t{20}, size_t{40}, size_t{9'000}}) {
      const std::string numbers(count * 8, 'n');
      Packer packer;
      for (size_t i = 0; i < before; ++i) packer.Nil();
      packer.Numbers(DType::kFloat64, numbers);
      absl::string_view bytes = packer.bytes();
      Value value;
      for (size_t i = 0; i <= before; ++i) ASSERT_TRUE(TakeValue(&bytes, &value).ok());
      EXPECT_EQ(value.bytes, numbers);
      EXPECT_EQ((value.bytes.data() - packer.bytes().data()) % 8, 0) << before << " " << count;
      EXPECT_TRUE(bytes.empty());
    }
  }
}

// Where another head would be another number of bytes in any case there is none; what is there comes back.
TEST(Values, NumbersOfAnyLengthComeBack) {
  for (size_t before = 0; before < 9; ++before) {
    for (size_t count = 0; count < 70; ++count) {
      std::string numbers(count * 4, 'n');
      if (count > 0) numbers.replace(0, 4, 4, '\0');
      Packer packer;
      for (size_t i = 0; i < before; ++i) packer.Nil();
      packer.Numbers(DType::kInt32, numbers);
      EXPECT_EQ(Only(absl::string_view(packer.bytes()).substr(before)).bytes, numbers);
      const size_t size = packer.bytes().size();
      EXPECT_EQ(packer.Take().size(), size);
      EXPECT_TRUE(packer.bytes().empty());
    }
  }
}

void ExpectRefused(absl::string_view bytes) {
  const absl::string_view before = bytes;
  Value value;
  const absl::Status status = TakeValue(&bytes, &value);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << testing::PrintToString(before);
  EXPECT_EQ(bytes.data(), before.data());
}

TEST(Values, BytesThatAreNoValueAreRefused_I1) {
  ExpectRefused("");
  ExpectRefused("\xc1");                                      // is not used
  ExpectRefused("\xcd\x01");                                  // half of a number
  ExpectRefused("\xa5hell");                                  // a string is cut off
  ExpectRefused("\xdd\xff\xff\xff\xff");                      // four billion values in no bytes
  ExpectRefused(absl::string_view("\xdf\0\0\0\1\0", 6));      // a pair has two
  ExpectRefused(absl::string_view("\xc7\4\x7f\0\0\0\0", 7));  // an extension that nobody knows
  ExpectRefused(absl::string_view("\xc7\3\0\0\0\0", 6));      // three quarters of a float
  ExpectRefused(absl::string_view("\xc7\5\0\1\0\0\0\0", 8));  // a float and a quarter
}

TEST(Values, WhatEndsTooEarlyIsRefusedAndNothingIsReadBehindIt) {
  Packer packer;
  packer.Array(3);
  packer.String(std::string(300, 'y'));
  packer.Numbers(DType::kFloat64, std::string(800, 'z'));
  packer.Int(-70'000);
  for (size_t size = 0; size < packer.bytes().size(); ++size) {
    const std::string cut = packer.bytes().substr(0, size);  // of its own, so that a sanitizer sees its end
    absl::string_view bytes = cut;
    Value value;
    int taken = 0;
    while (taken < 4 && TakeValue(&bytes, &value).ok()) ++taken;
    EXPECT_LT(taken, 4) << size;
  }
}

TEST(Values, AnyBytesAreTakenOrRefused) {
  Rng rng(7);
  for (int round = 0; round < 20'000; ++round) {
    std::string noise(rng.Below(24), '\0');
    for (char& byte : noise) byte = static_cast<char>(rng.Below(256));
    absl::string_view bytes = noise;
    Value value;
    while (!bytes.empty()) {
      const size_t before = bytes.size();
      if (!TakeValue(&bytes, &value).ok()) break;
      ASSERT_LT(bytes.size(), before);
      ASSERT_LE(value.bytes.size(), before);
      ASSERT_LE(value.count, before);
    }
  }
}

}  // namespace
}  // namespace gtrain::actors
