#include "topology/hostlist.h"

#include <gtest/gtest.h>

#include "absl/strings/str_join.h"

namespace gtrain::topology {
namespace {

std::string Expanded(const std::string& text) {
  const absl::StatusOr<std::vector<std::string>> names = ParseHostlist(text);
  return names.ok() ? absl::StrJoin(*names, " ") : std::string(names.status().message());
}

TEST(HostlistTest, BracketsAreRangesAndKeepTheirWidth) {
  EXPECT_EQ(Expanded("tux[0-3,12]"), "tux0 tux1 tux2 tux3 tux12");
  EXPECT_EQ(Expanded("n[08-11],login"), "n08 n09 n10 n11 login");
  EXPECT_EQ(Expanded("r[1-2]n[0-1].lab"), "r1n0.lab r1n1.lab r2n0.lab r2n1.lab");
  EXPECT_EQ(Expanded(" a , b "), "a b");
}

TEST(HostlistTest, WhatIsNoneSaysWhy) {
  EXPECT_EQ(Expanded("tux[0-3"), "hostlist \"tux[0-3\": a [ without a ]");
  EXPECT_EQ(Expanded("tux0-3]"), "hostlist \"tux0-3]\": a ] without a [");
  EXPECT_EQ(Expanded("tux[3-0]"), "hostlist \"tux[3-0]\": the range 3-0 runs backwards");
  EXPECT_EQ(Expanded("tux[a]"), "hostlist \"tux[a]\": \"a\" is no number and no range such as 0-3");
  EXPECT_EQ(Expanded("a,,b"), "hostlist \"a,,b\": an empty name");
  EXPECT_EQ(Expanded("n[0-999999999]"), "hostlist \"n[0-999999999]\": more than 262144 names");
  EXPECT_EQ(Expanded("a[0-999]b[0-999]"), "hostlist \"a[0-999]b[0-999]\": more than 262144 names");
}

TEST(HostlistTest, PrintedNamesAreReadBack) {
  for (const std::string text : {"tux[0-3,12]", "n[08-11],login", "a", "x[1-2]y", "m[00-31]"}) {
    const absl::StatusOr<std::vector<std::string>> names = ParseHostlist(text);
    ASSERT_TRUE(names.ok()) << names.status();
    EXPECT_EQ(PrintHostlist(*names), text);
  }
}

TEST(HostlistTest, NumbersAscend) {
  EXPECT_EQ(*ParseNumbers("0-3,7"), (std::vector<int>{0, 1, 2, 3, 7}));
  EXPECT_FALSE(ParseNumbers("3,1").ok());
  EXPECT_EQ(PrintNumbers({0, 1, 2, 7}), "0-2,7");
}

}  // namespace
}  // namespace gtrain::topology
