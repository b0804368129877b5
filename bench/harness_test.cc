#include "bench/harness.h"

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::bench {
namespace {

TEST(Series, MedianAndSpreadIgnoreOneOutlier) {
  const Series series{{1.0, 1.1, 0.9, 1.0, 50.0}};
  EXPECT_DOUBLE_EQ(series.Median(), 1.0);
  EXPECT_NEAR(series.Spread(), 0.1, 1e-9);
  EXPECT_DOUBLE_EQ((Series{{2, 4}}).Median(), 3);
  EXPECT_DOUBLE_EQ(Series{}.Median(), 0);
}

TEST(Series, AQuantileIsTheNearestRank) {
  Series hundred;
  for (int i = 100; i > 0; --i) hundred.samples.push_back(i);
  EXPECT_DOUBLE_EQ(hundred.Quantile(0.99), 99);  // not the maximum
  EXPECT_DOUBLE_EQ(hundred.Quantile(0.9), 90);
  EXPECT_DOUBLE_EQ(hundred.Quantile(0.07), 7);
  EXPECT_DOUBLE_EQ(hundred.Quantile(1), 100);
  EXPECT_DOUBLE_EQ(hundred.Quantile(0), 1);
  const Series few{{3, 1, 2}};
  EXPECT_DOUBLE_EQ(few.Quantile(0.9), 3);
  EXPECT_DOUBLE_EQ(few.Quantile(0.5), 2);
  EXPECT_DOUBLE_EQ(Series{}.Quantile(0.5), 0);
}

TEST(Judge, ASpreadBeyondTheDistanceToTheGoalDecidesNothing) {
  EXPECT_EQ(Judge({{0.2, 0.1, 0.4}}, 1), Verdict::kReached);
  EXPECT_EQ(Judge({{1.6, 1.5, 1.9}}, 1), Verdict::kNotReached);
  EXPECT_EQ(Judge({{0.9, 0.7, 1.1}}, 1), Verdict::kUndecided);
  EXPECT_EQ(Judge({{0.9, 0.1, 0.95}}, 1), Verdict::kUndecided);  // below it all, but by less than they differ
  EXPECT_EQ(Judge({{1.2, 0.9, 1.3}}, 1), Verdict::kUndecided);
  EXPECT_EQ(Judge({{9.70 - 9.40, 9.70 - 9.40}}, 0.3), Verdict::kReached);
  EXPECT_EQ(Judge({{0.2}}, 1), Verdict::kUndecided);
  EXPECT_EQ(Judge({}, 1), Verdict::kUndecided);
}

Options Parsed(std::vector<std::string> words, int seeds) {
  words.insert(words.begin(), "bench");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return ParseOptions(static_cast<int>(argv.size()), argv.data(), {"part"}, seeds);
}

TEST(ParseOptions, Seeds) {
  EXPECT_EQ(Parsed({}, 3).seeds, 3);
  EXPECT_EQ(Parsed({"--quick"}, 3).seeds, 1);
  EXPECT_EQ(Parsed({"--quick", "--seeds", "5", "--only", "part"}, 3).seeds, 5);
  EXPECT_EQ(Parsed({"--quick"}, 0).seeds, 0);
  EXPECT_EXIT(Parsed({"--seeds", "0"}, 3), testing::ExitedWithCode(2), "--seeds N");
  EXPECT_EXIT(Parsed({"--seeds", "2"}, 0), testing::ExitedWithCode(2), "usage");
}

Sample Says(std::string* order, char name, double value) {
  return [=]() -> absl::StatusOr<double> {
    *order += name;
    return value;
  };
}

TEST(Measure, AlternatesAndDropsTheFirstTurn) {
  std::string order;
  const auto outcomes = Measure(
      {"x", "s", Says(&order, 'o', 2), {{"y", Says(&order, 'p', 1)}, {"z", Says(&order, 'q', 4)}}}, 2);
  ASSERT_TRUE(outcomes.ok());
  EXPECT_EQ(order, "pqopqopqo");
  ASSERT_EQ(outcomes->size(), 2u);
  EXPECT_EQ((*outcomes)[1].ours.samples.size(), 2u);
  EXPECT_DOUBLE_EQ((*outcomes)[0].Ratio(), 2.0);
  EXPECT_DOUBLE_EQ((*outcomes)[1].Ratio(), 0.5);
}

TEST(Measure, OursCountsWithoutAPeer) {
  std::string order;
  const auto outcomes = Measure({"x", "s", Says(&order, 'o', 2), {}}, 3);
  ASSERT_TRUE(outcomes.ok());
  ASSERT_EQ(outcomes->size(), 1u);
  EXPECT_EQ((*outcomes)[0].ours.samples.size(), 3u);
  EXPECT_EQ((*outcomes)[0].peer, "");
}

TEST(Measure, AFailureIsNotANumber) {
  std::string order;
  const Comparison comparison{"x",
                              "s",
                              []() -> absl::StatusOr<double> { return absl::InternalError("broken"); },
                              {{"y", Says(&order, 'p', 1)}}};
  EXPECT_EQ(Measure(comparison, 3).status().message(), "broken");
}

TEST(Report, WritesJson) {
  const std::string path = TestFolder() + "/report.json";
  const Outcome outcome{"launch 8", "s", "fork", Series{{2, 2}}, Series{{1, 1}}};
  ASSERT_EQ(Report({path, true, "."}, "launch", {outcome}), 0);
  const auto text = ReadFile(path, 1 << 20);
  ASSERT_TRUE(text.ok());
  EXPECT_THAT(*text, testing::HasSubstr("\"ratio\": 2.0000"));
  EXPECT_THAT(*text, testing::HasSubstr("\"quick\": true"));
}

}  // namespace
}  // namespace gtrain::bench
