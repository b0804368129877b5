#include "bench/harness.h"

#include "base/file.h"
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

TEST(Measure, AlternatesAndDropsTheFirstTurn) {
  std::string order;
  const Comparison comparison{"x", "s", "y",
                              [&]() -> absl::StatusOr<double> {
                                order += 'o';
                                return 2.0;
                              },
                              [&]() -> absl::StatusOr<double> {
                                order += 'p';
                                return 1.0;
                              }};
  const auto outcome = Measure(comparison, 3);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(order, "popopopo");
  EXPECT_EQ(outcome->ours.samples.size(), 3u);
  EXPECT_DOUBLE_EQ(outcome->Ratio(), 2.0);
}

TEST(Measure, AFailureIsNotANumber) {
  const Comparison comparison{"x", "s", "y",
                              []() -> absl::StatusOr<double> { return absl::InternalError("broken"); },
                              []() -> absl::StatusOr<double> { return 1.0; }};
  EXPECT_EQ(Measure(comparison, 3).status().message(), "broken");
}

TEST(Report, WritesJson) {
  const std::string path = testing::TempDir() + "/bench_report.json";
  const Outcome outcome{"launch 8", "s", "fork", Series{{2, 2}}, Series{{1, 1}}};
  ASSERT_EQ(Report({path, true, "."}, "launch", {outcome}), 0);
  const auto text = ReadFile(path, 1 << 20);
  ASSERT_TRUE(text.ok());
  EXPECT_THAT(*text, testing::HasSubstr("\"ratio\": 2.0000"));
  EXPECT_THAT(*text, testing::HasSubstr("\"quick\": true"));
}

}  // namespace
}  // namespace gtrain::bench
