#include "actors/plan/members.h"

#include <gtest/gtest.h>

namespace gtrain::actors {
namespace {

TEST(Introduction, IsReadAsItWasWritten) {
  const Introduction one{{0x1, UINT64_MAX}, "10.0.0.1:4711", "node-7", true};
  const auto read = ParseIntroduction(PrintIntroduction(one));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, one);
}

TEST(Introduction, OfAnotherProgramSaysSo) {
  const auto of_a_communicator = ParseIntroduction("0123456789");
  EXPECT_EQ(of_a_communicator.status().code(), absl::StatusCode::kFailedPrecondition);
  const std::string good = PrintIntroduction({{1, 2}, "a:1", "n", false});
  for (size_t size = 0; size + 1 < good.size(); ++size)
    EXPECT_FALSE(ParseIntroduction(good.substr(0, size)).ok());
  std::string bad = good;
  bad[16] = 'x';
  EXPECT_FALSE(ParseIntroduction(bad).ok());
}

TEST(Driver, IsWhoDroveBeforeElseTheFirst) {
  std::vector<Introduction> all(3);
  EXPECT_EQ(DriverOf(all), 0u);
  all[2].drives = true;
  EXPECT_EQ(DriverOf(all), 2u);
}

TEST(Spawn, IsReadAsItWasWritten) {
  const std::string bytes =
      PrintSpawn({"Class", "(); F() -> void", "ps/0", 3, 7, 1, "record", absl::string_view("a\0b", 3)});
  const auto read = ParseSpawn(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->type, "Class");
  EXPECT_EQ(read->signature, "(); F() -> void");
  EXPECT_EQ(read->restarts, 3);
  EXPECT_EQ(read->id, 7u);
  EXPECT_EQ(read->kept, 1);
  EXPECT_EQ(read->record, "record");
  EXPECT_EQ(read->arguments, absl::string_view("a\0b", 3));
  for (size_t size = 0; size < bytes.size() - 3; ++size) EXPECT_FALSE(ParseSpawn(bytes.substr(0, size)).ok());
  EXPECT_FALSE(ParseSpawn(PrintSpawn({"Class", "", "", -1, 0, 0, "", ""})).ok());
}

TEST(Record, IsReadAsItWasWritten) {
  KeptRecord record{9, "state", {}};
  for (int callers = 0; callers < 3; ++callers) {
    const std::string bytes = PrintRecord(record);
    const auto read = ParseRecord(bytes);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, record);
    EXPECT_FALSE(ParseRecord(bytes + "x").ok());
    EXPECT_FALSE(ParseRecord(bytes.substr(0, bytes.size() - 1)).ok());
    record.callers.push_back({{1, static_cast<uint64_t>(callers)}, 5, {{6, "six"}, {8, ""}}});
  }
}

TEST(Owned, IsReadAsItWasWritten) {
  const std::string bytes = PrintOwned({UINT64_MAX, "why"});
  const auto read = ParseOwned(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->id, UINT64_MAX);
  EXPECT_EQ(read->text, "why");
  EXPECT_FALSE(ParseOwned(bytes.substr(0, 7)).ok());
}

TEST(Names, AreReadAsTheyWereWritten) {
  const std::string bytes =
      PrintName({NameRequest::kDrop, "ps/1", "Shard", "(i64)", "reference", UINT64_MAX});
  const auto read = ParseName(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->kind, NameRequest::kDrop);
  EXPECT_EQ(read->id, UINT64_MAX);
  EXPECT_EQ(read->name, "ps/1");
  EXPECT_EQ(read->type, "Shard");
  EXPECT_EQ(read->signature, "(i64)");
  EXPECT_EQ(read->reference, "reference");
  const std::string wanted = PrintFind({"ps/1", "Shard", "(i64)"});
  const auto find = ParseFind(wanted);
  ASSERT_TRUE(find.ok());
  EXPECT_EQ(find->name, "ps/1");
  EXPECT_EQ(find->signature, "(i64)");
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(ParseName(bytes.substr(0, size)).ok());
  for (size_t size = 0; size < wanted.size(); ++size) EXPECT_FALSE(ParseFind(wanted.substr(0, size)).ok());
  EXPECT_FALSE(ParseName(bytes + "x").ok());
  EXPECT_FALSE(ParseFind(wanted + "x").ok());
  EXPECT_FALSE(ParseName("\x04" + bytes.substr(1)).ok());
}

TEST(End, IsReadAsItWasWritten) {
  for (const std::vector<uint64_t>& actors : {std::vector<uint64_t>{}, {1, UINT64_MAX}}) {
    const std::string bytes = PrintEnd({"why", actors});
    const auto read = ParseEnd(bytes);
    ASSERT_TRUE(read.ok());
    EXPECT_EQ(read->reason, "why");
    EXPECT_EQ(read->actors, actors);
    EXPECT_FALSE(ParseEnd(bytes + "x").ok());
    EXPECT_FALSE(ParseEnd(bytes.substr(0, 6)).ok());
  }
}

}  // namespace
}  // namespace gtrain::actors
