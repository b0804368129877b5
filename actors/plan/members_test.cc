#include "actors/plan/members.h"

#include "actors/plan/placement.h"
#include "gtest/gtest.h"

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
  SpawnRequest request{.type = "Class", .signature = "(); F() -> void", .restarts = 3, .id = 7, .kept = 1};
  request.record = "record";
  request.name = "ps";
  request.detached = 1;
  request.spread = 2;
  request.rank = 5;
  request.arguments = absl::string_view("a\0b", 3);
  const std::string bytes = PrintSpawn(request);
  const auto read = ParseSpawn(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->type, "Class");
  EXPECT_EQ(read->signature, "(); F() -> void");
  EXPECT_EQ(read->restarts, 3);
  EXPECT_EQ(read->id, 7u);
  EXPECT_EQ(read->kept, 1);
  EXPECT_EQ(read->record, "record");
  EXPECT_EQ(read->concurrency, 1);
  EXPECT_EQ(read->name, "ps");
  EXPECT_EQ(read->detached, 1);
  EXPECT_EQ(read->spread, 2);
  EXPECT_EQ(read->rank, 5);
  EXPECT_EQ(read->arguments, absl::string_view("a\0b", 3));
  for (size_t size = 0; size < bytes.size() - 3; ++size) EXPECT_FALSE(ParseSpawn(bytes.substr(0, size)).ok());
  const SpawnRequest good{.type = "Class", .kept = 1};
  EXPECT_TRUE(ParseSpawn(PrintSpawn(good)).ok());
  std::vector<SpawnRequest> wrong(6, good);
  wrong[0].restarts = -1;
  wrong[1].kept = 2;
  wrong[2].concurrency = 0;
  wrong[3].concurrency = 2;  // of one that is kept
  wrong[4].spread = kSpreadMax + 1;
  wrong[5].detached = 3;
  for (const SpawnRequest& one : wrong) EXPECT_FALSE(ParseSpawn(PrintSpawn(one)).ok());
}

TEST(Adoption, IsReadAsItWasWritten) {
  const AdoptRequest request{{{{1, 2}, 3}, {{4, 5}, 6}}, 7, "spawn"};
  const std::string bytes = PrintAdopt(request);
  const auto read = ParseAdopt(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->names, request.names);
  EXPECT_EQ(read->number, 7u);
  EXPECT_EQ(read->spawn, "spawn");
  for (size_t size = 0; size < bytes.size() - 5; ++size) EXPECT_FALSE(ParseAdopt(bytes.substr(0, size)).ok());
  EXPECT_FALSE(ParseAdopt(PrintAdopt({{}, 7, "spawn"})).ok());
  EXPECT_FALSE(ParseAdopt(PrintAdopt({std::vector<OwnedName>(kAdoptionsMax + 1), 7, "spawn"})).ok());
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
