#include "job/spec/spot_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace gtrain::spec {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SpotTrace, SaysHowManyMachinesThereAre) {
  const auto trace = ParseSpotTrace(R"({"metadata": {"gap_seconds": 300}, "data": [0, 16, 3]})");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->gap, absl::Minutes(5));
  EXPECT_THAT(trace->nodes, ElementsAre(0, 16, 3));
}

TEST(SpotTrace, WhatIsNoneSaysWhy) {
  const auto why = [](const std::string& text) {
    return std::string(ParseSpotTrace(text).status().message());
  };
  EXPECT_THAT(why("{"), HasSubstr("no JSON object"));
  EXPECT_THAT(why("[]"), HasSubstr("no JSON object"));
  EXPECT_THAT(why(R"({"data": [1]})"), HasSubstr("metadata.gap_seconds"));
  EXPECT_THAT(why(R"({"metadata": {"gap_seconds": 0}, "data": [1]})"), HasSubstr("metadata.gap_seconds"));
  EXPECT_THAT(why(R"({"metadata": 1, "data": [1]})"), HasSubstr("metadata.gap_seconds"));
  EXPECT_THAT(why(R"({"metadata": {"gap_seconds": 9}, "data": []})"), HasSubstr("`data` is empty"));
  EXPECT_THAT(why(R"({"metadata": {"gap_seconds": 9}, "data": [1, -1]})"), HasSubstr("an element of `data`"));
  EXPECT_THAT(why(R"({"metadata": {"gap_seconds": 9}, "data": [10001]})"), HasSubstr("an element of `data`"));
  EXPECT_THAT(why(R"({"metadata": {"gap_seconds": 9}, "data": ["a"]})"), HasSubstr("an element of `data`"));
}

}  // namespace
}  // namespace gtrain::spec
