#include "actors/exec/listing.h"

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "actors/exec/news.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CallTimes, AreKnownToAFactorOfTwo) {
  CallTimes times;
  EXPECT_EQ(times.Quantile(0.5), absl::ZeroDuration());
  Instant now;
  for (int i = 0; i < 980; ++i) times.Count(now, now + absl::Microseconds(100));
  for (int i = 0; i < 20; ++i) times.Count(now, now + absl::Milliseconds(50));
  EXPECT_GE(times.Quantile(0.5), absl::Microseconds(50));
  EXPECT_LE(times.Quantile(0.5), absl::Microseconds(200));
  EXPECT_GE(times.Quantile(0.99), absl::Milliseconds(25));
  EXPECT_LE(times.Quantile(0.99), absl::Milliseconds(100));
  EXPECT_EQ(times.count(), 1000u);
  CallTimes more;
  for (int i = 0; i < 3000; ++i) more.Count(now, now + absl::Seconds(10));
  more.Add(times);
  EXPECT_EQ(more.count(), 4000u);
  EXPECT_GE(more.Quantile(0.5), absl::Seconds(5));
  EXPECT_LE(more.Quantile(0.1), absl::Microseconds(200));
}

TEST(CallTimes, OfAnyLengthAreCounted) {
  CallTimes times;
  times.Count({1}, {0});
  EXPECT_LE(times.Quantile(1), absl::Microseconds(2));
  times.Count({0}, Instant{0} + absl::Hours(1000));
  EXPECT_GE(times.Quantile(1), absl::Minutes(15));
}

// The rate is that of the last 10 to 20 s, and goes down when no more calls come.
TEST(CallTimes, TheRateIsThatOfLately) {
  CallTimes times;
  Instant now{1};
  EXPECT_EQ(times.PerSecond(now), 0);
  for (int i = 0; i < 3000; ++i) {
    now = now + absl::Milliseconds(10);
    times.Count(now - absl::Microseconds(10), now);
  }
  EXPECT_NEAR(times.PerSecond(now), 100, 2);
  for (int i = 0; i < 400; ++i) {
    now = now + absl::Milliseconds(100);
    times.Count(now - absl::Microseconds(10), now);
  }
  EXPECT_NEAR(times.PerSecond(now), 10, 1);
  EXPECT_LT(times.PerSecond(now + absl::Hours(1)), 0.1);
}

TEST(MethodOf, ReadsTheNameFromEitherKindOfSignature) {
  const char* const cpp = "(int64); Pull() const -> vector<float>; Push(vector<float>, float) -> int64";
  EXPECT_EQ(MethodOf(cpp, 2, 0), "Pull");
  EXPECT_EQ(MethodOf(cpp, 2, 1), "Push");
  EXPECT_EQ(MethodOf("python: (self, n); add(self, by); total(self)", 2, 1), "total");
  EXPECT_EQ(MethodOf(cpp, 2, 2), "method 2");
  EXPECT_EQ(MethodOf(cpp, 2, -1), "method -1");
  EXPECT_EQ(MethodOf("python: (self); join(self, by='; '); total(self)", 2, 1), "method 1");
  EXPECT_EQ(MethodOf("", 1, 0), "method 0");
}

TEST(ListQuestion, AsksForAllUnlessItSaysOtherwise) {
  const auto all = ParseListQuestion("{}");
  ASSERT_TRUE(all.ok());
  EXPECT_TRUE(all->Asks("A", "", 1));
  EXPECT_EQ(all->limit, 50u);
  const auto some = ParseListQuestion(R"({"class":"A","number":7,"limit":1000000,"name":4})");
  ASSERT_TRUE(some.ok());
  EXPECT_TRUE(some->Asks("A", "x", 7));
  EXPECT_FALSE(some->Asks("A", "x", 8));
  EXPECT_FALSE(some->Asks("B", "x", 7));
  EXPECT_EQ(some->limit, kRowsMax);
  const auto named = ParseListQuestion(R"({"name":"ps/0"})");
  EXPECT_TRUE(named->Asks("A", "ps/0", 7));
  EXPECT_FALSE(named->Asks("A", "ps/1", 7));
  EXPECT_FALSE(ParseListQuestion("[]").ok());
  EXPECT_FALSE(ParseListQuestion("{").ok());
}

// However long names are, the answer is one that a keeper passes on.
TEST(PrintListing, IsBounded_B1) {
  Listing listing;
  for (int i = 0; i < 100; ++i) listing.classes[absl::StrCat(i, std::string(250, '\x01'))].actors = 1;
  for (size_t i = 0; i < kRowsMax; ++i) {
    ActorFacts actor;
    actor.type = std::string(255, '\x01');
    actor.name = std::string(255, '\xff');
    listing.actors.push_back(actor);
  }
  listing.left_out = 5;
  const std::string text = PrintListing(listing);
  EXPECT_LE(text.size(), kAnswerBytesMax + 4096);
  const json answer = json::parse(text, nullptr, false);
  ASSERT_TRUE(answer.is_object());
  EXPECT_EQ(answer["count"], 100);
  EXPECT_GT(answer["actors"].size(), 100u);
  EXPECT_EQ(answer["actors"].size() + answer["left_out"].get<size_t>(), kRowsMax + 5);
  EXPECT_EQ(answer["classes"].size() + answer["classes_left_out"].get<size_t>(), 100u);
}

TEST(News, OfThousandsIsAFewSentencesAndACount_B1) {
  ManualClock clock;
  News news(clock);
  EXPECT_EQ(news.Take(), std::nullopt);
  for (int i = 0; i < 5000; ++i) news.Add(absl::StrCat("actor ", i));
  for (size_t i = 0; i < News::kAtOnce; ++i) EXPECT_EQ(news.Take(), absl::StrCat("actor ", i));
  EXPECT_EQ(news.Take(), std::nullopt) << "not so soon";
  clock.Advance(absl::Seconds(11));
  EXPECT_THAT(*news.Take(), HasSubstr("4990 more actors"));
  clock.Advance(absl::Seconds(11));
  EXPECT_EQ(news.Take(), std::nullopt);
  news.Add("one");
  EXPECT_EQ(news.Take(), "one");
}

}  // namespace
}  // namespace gtrain::actors
