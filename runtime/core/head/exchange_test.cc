#include "runtime/core/head/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;

ExchangePart Part(uint64_t sequence, std::vector<std::pair<int, std::string>> blobs) {
  ExchangePart part;
  part.sequence = sequence;
  part.blobs = std::move(blobs);
  return part;
}

TEST(Exchange, CompletesWhenEveryRankSpoke) {
  Exchange exchange(3, 1000);
  EXPECT_EQ(exchange.Add(Part(0, {{2, "c"}}))->table, nullptr);
  EXPECT_EQ(exchange.Add(Part(1, {{0, "x"}}))->table, nullptr) << "exchanges do not mix";
  const auto progress = exchange.Add(Part(0, {{0, "a"}, {1, "b"}}));
  ASSERT_NE(progress->table, nullptr);
  EXPECT_TRUE(progress->just_completed);
  EXPECT_THAT(*progress->table, ElementsAre("a", "b", "c"));
}

TEST(Exchange, RepeatedPartsAreIdempotent_W6) {
  Exchange exchange(2, 1000);
  exchange.Add(Part(0, {{0, "a"}})).IgnoreError();
  EXPECT_EQ(exchange.Add(Part(0, {{0, "a"}}))->table, nullptr);
  EXPECT_TRUE(exchange.Add(Part(0, {{1, "b"}}))->just_completed);
  const auto again = exchange.Add(Part(0, {{1, "b"}}));
  EXPECT_FALSE(again->just_completed);
  EXPECT_THAT(*again->table, ElementsAre("a", "b"));
}

TEST(Exchange, RefusesWhatCannotBeRight) {
  Exchange exchange(2, 10);
  EXPECT_EQ(exchange.Add(Part(0, {{2, "a"}})).status().code(), absl::StatusCode::kInvalidArgument);
  exchange.Add(Part(0, {{0, "a"}})).IgnoreError();
  EXPECT_EQ(exchange.Add(Part(0, {{0, "other"}})).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(exchange.Add(Part(1, {{0, std::string(100, 'x')}})).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// A table that no message holds would be sent again with each connection, for ever.
TEST(Exchange, ATableFitsIntoAMessage) {
  Exchange exchange(2, 64 << 20);
  const size_t half = Exchange::kTableBytesMax / 2;
  EXPECT_TRUE(exchange.Add(Part(0, {{0, std::string(half, 'x')}})).ok());
  EXPECT_TRUE(exchange.Add(Part(0, {{1, std::string(half, 'y')}}))->just_completed);
  EXPECT_TRUE(exchange.Add(Part(1, {{0, std::string(half, 'x')}})).ok()) << "each table by itself";
  const auto more = exchange.Add(Part(1, {{1, std::string(half + 2, 'y')}}));
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(more.status().message(), "the blobs of one exchange exceed 15728640 bytes");
}

TEST(Exchange, OpenExchangesAreBounded) {
  Exchange exchange(2, 1 << 20);
  for (uint64_t i = 0; i < Exchange::kOpenMax; ++i) EXPECT_TRUE(exchange.Add(Part(i, {{0, "a"}})).ok());
  EXPECT_EQ(exchange.Add(Part(1000, {{0, "a"}})).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace gtrain::core
