#include "runtime/agent/membership.h"

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void Write(const std::string& dir, const std::string& text) {
  ASSERT_TRUE(WriteFileDurable(MembershipPath(dir), text).ok());
}

TEST(Membership, WhatIsNoAddressIsPassedOverAndKept) {
  const std::string dir = TestFolder();
  Write(dir, R"({"endpoint": "nonsense", "endpoints": ["nonsense", 7, "10.0.0.2", "h:7170 ", "http://x:1",
                 "*:7170", "h:0", "127.0.0.1:7170", "head-2.lab:7170", "[fd00::2]:7170", "127.0.0.1:7170"],
                 "head_public_key": "key", "cluster": "c"})");
  Membership membership = LoadMembership(dir);
  EXPECT_EQ(membership.endpoint, "127.0.0.1:7170");
  EXPECT_THAT(membership.others, ElementsAre("head-2.lab:7170", "[fd00::2]:7170"));
  EXPECT_THAT(membership.bad, ElementsAre("nonsense", "10.0.0.2", "h:7170 ", "http://x:1", "*:7170", "h:0"));
  EXPECT_THAT(membership.Warning("the file"), HasSubstr("\"nonsense\", \"10.0.0.2\", \"h:7170 \""));
  membership.Prefer("[fd00::2]:7170");
  ASSERT_TRUE(SaveMembership(dir, membership).ok());
  const Membership again = LoadMembership(dir);
  EXPECT_THAT(again.Addresses(), ElementsAre("[fd00::2]:7170", "127.0.0.1:7170", "head-2.lab:7170"));
  EXPECT_EQ(again.bad, membership.bad);
  EXPECT_EQ(again.head_public_key, "key");
  EXPECT_EQ(again.cluster, ClusterId("c"));
}

TEST(Membership, AfterOneComeTheOthersOnceAround) {
  const Membership membership{"a:1", "key", ClusterId("c"), {"b:1", "c:1"}, {}};
  EXPECT_THAT(membership.After("b:1"), ElementsAre("c:1", "a:1"));
  EXPECT_THAT(membership.After("c:1"), ElementsAre("a:1", "b:1"));
  EXPECT_THAT(membership.After("gone:1"), ElementsAre("a:1", "b:1", "c:1"));
}

TEST(Membership, ADamagedFileSaysNothing) {
  const std::string dir = TestFolder();
  EXPECT_THAT(LoadMembership(dir).Addresses(), IsEmpty());
  for (const std::string& text :
       {std::string("[1"), std::string("[\"127.0.0.1:1\"]"), std::string(30'000, '['),
        R"({"endpoint":)" + std::string(20'000, '[') + std::string(20'000, ']') + "}",
        std::string(R"({"endpoint": 7, "endpoints": {"a": "h:1"}})")}) {
    Write(dir, text);
    EXPECT_THAT(LoadMembership(dir).Addresses(), IsEmpty());
  }
}

TEST(Membership, AnAddressOfAFlagIsCheckedInWords) {
  EXPECT_TRUE(CheckHeadAddress("--head", "10.0.0.2:7070").ok());
  for (const char* bad :
       {"10.0.0.2", "h:7170 ", " h:7170", "http://x:1", "*:7170", "h:", ":1", "h:-1", "h:+1", "h:65536",
        "h:0", "fd00::2:1", "[fd00::2]", "h\x1b:1", "h h:1", "h:1,h:2"}) {
    const absl::Status status = CheckHeadAddress("--head", bad);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad;
    EXPECT_THAT(status.message(), HasSubstr("is not HOST:PORT, as in")) << bad;
  }
}

}  // namespace
}  // namespace gtrain::agent
