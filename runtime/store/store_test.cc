// One suite for every MetaStore, then what only a disk can do wrong.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/store/memory_store.h"
#include "runtime/store/rocks_store.h"
#include "runtime/store/sealed_value.h"

namespace gtrain::store {
namespace {

using ::testing::HasSubstr;
using Records = std::vector<std::pair<std::string, std::string>>;

std::string TempDir() {
  std::string name = testing::TempDir() + "/gtrain-store-XXXXXX";
  return mkdtemp(name.data());
}

// Gives a store on the same disk each time it is called; the earlier one is gone by then.
using Opener = std::function<std::unique_ptr<port::MetaStore>()>;
struct Adapter {
  const char* name;
  std::function<Opener()> make;
};

class Conformance : public testing::TestWithParam<Adapter> {
 protected:
  void Reopen() {
    store_.reset();
    store_ = open_();
    ASSERT_NE(store_, nullptr);
  }
  Opener open_ = GetParam().make();
  std::unique_ptr<port::MetaStore> store_ = open_();
};

TEST_P(Conformance, EmptyAtFirst) { EXPECT_EQ(*store_->LoadAll(), Records{}); }

TEST_P(Conformance, LoadsInKeyOrderWhatWasCommitted) {
  std::string binary("\0\xff\n", 3);
  ASSERT_TRUE(store_->Commit({{"b", "2"}, {"a", binary}, {"c", ""}}).ok());
  EXPECT_EQ(*store_->LoadAll(), (Records{{"a", binary}, {"b", "2"}, {"c", ""}}));
  Reopen();
  EXPECT_EQ(*store_->LoadAll(), (Records{{"a", binary}, {"b", "2"}, {"c", ""}}));
}

TEST_P(Conformance, LaterWritesWinAndDeletesDelete) {
  ASSERT_TRUE(store_->Commit({{"a", "1"}, {"a", "2"}, {"b", "1"}}).ok());
  ASSERT_TRUE(store_->Commit({{"b", std::nullopt}, {"missing", std::nullopt}, {"c", "3"}}).ok());
  ASSERT_TRUE(store_->Commit({}).ok());
  Reopen();
  EXPECT_EQ(*store_->LoadAll(), (Records{{"a", "2"}, {"c", "3"}}));
}

TEST_P(Conformance, LargeValues) {
  std::string large(3 << 20, 'x');
  ASSERT_TRUE(store_->Commit({{"large", large}}).ok());
  Reopen();
  EXPECT_EQ((*store_->LoadAll())[0].second, large);
}

INSTANTIATE_TEST_SUITE_P(Stores, Conformance,
                         testing::Values(Adapter{"memory",
                                                 [] {
                                                   auto disk = std::make_shared<MemoryDisk>();
                                                   return
                                                       [disk] { return std::make_unique<MemoryStore>(disk); };
                                                 }},
                                         Adapter{"rocksdb",
                                                 [] {
                                                   std::string path = TempDir() + "/db";
                                                   return [path]() -> std::unique_ptr<port::MetaStore> {
                                                     auto store = OpenRocksStore(path);
                                                     EXPECT_TRUE(store.ok()) << store.status();
                                                     return store.ok() ? *std::move(store) : nullptr;
                                                   };
                                                 }}),
                         [](const auto& info) { return info.param.name; });

TEST(SealedValue, DamageIsNamed) {
  std::string sealed = SealValue("job/7", "value");
  EXPECT_EQ(*OpenValue("job/7", sealed), "value");
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::string bad = sealed;
    bad[i] ^= 4;
    EXPECT_EQ(OpenValue("job/7", bad).status().code(), absl::StatusCode::kDataLoss) << i;
    EXPECT_FALSE(OpenValue("job/7", sealed.substr(0, i)).ok()) << i;
  }
  EXPECT_THAT(std::string(OpenValue("job/8", sealed).status().message()), HasSubstr("job/8"));
}

TEST(MemoryStore, DamagedValueIsDataLossNamingTheKey) {
  auto disk = std::make_shared<MemoryDisk>();
  MemoryStore store(disk);
  ASSERT_TRUE(store.Commit({{"job/7", "v"}}).ok());
  (*disk)["job/7"].back() ^= 1;
  EXPECT_EQ(store.LoadAll().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(store.LoadAll().status().message()), HasSubstr("job/7"));
  store.Break(absl::InternalError("EIO"));
  EXPECT_FALSE(store.Commit({}).ok());
}

// H9: two heads on one directory.
TEST(RocksStore, SecondOpenerIsRefused) {
  std::string path = TempDir() + "/db";
  auto first = OpenRocksStore(path);
  ASSERT_TRUE(first.ok());
  auto second = OpenRocksStore(path);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another head"));
}

// The database as kill -9 leaves it: a copy of the files while it is open, its newest log unflushed.
class RocksDamage : public testing::Test {
 protected:
  static constexpr int kCommits = 200;
  void SetUp() override {
    std::string path = TempDir() + "/db";
    auto store = OpenRocksStore(path);
    ASSERT_TRUE(store.ok());
    for (int i = 0; i < kCommits; ++i) {
      ASSERT_TRUE((*store)->Commit({{absl::StrCat("key/", 1000 + i), std::string(300, 'v')}}).ok());
    }
    copy_ = TempDir() + "/copy";
    std::filesystem::copy(path, copy_);
    for (const auto& entry : std::filesystem::directory_iterator(copy_)) {
      if (absl::EndsWith(entry.path().string(), ".log") && entry.file_size() > 0) wal_ = entry.path();
    }
    ASSERT_FALSE(wal_.empty());
    ASSERT_GT(std::filesystem::file_size(wal_), 300u * kCommits);
  }
  void Flip(const std::string& file, uintmax_t at) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    char c = static_cast<char>(stream.get());
    stream.seekp(at);
    stream.put(static_cast<char>(c ^ 8));
  }
  std::string copy_, wal_;
};

TEST_F(RocksDamage, KilledProcessLosesNothing) {
  auto store = OpenRocksStore(copy_);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ((*store)->LoadAll()->size(), static_cast<size_t>(kCommits));
}

// H6: the last record was being written when the power went.
TEST_F(RocksDamage, TornTailDropsOnlyTheTornRecord) {
  std::filesystem::resize_file(wal_, std::filesystem::file_size(wal_) - 100);
  auto store = OpenRocksStore(copy_);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ((*store)->LoadAll()->size(), static_cast<size_t>(kCommits - 1));
}

// H5: acknowledged commits are after the damage, so it may not be skipped.
TEST_F(RocksDamage, BitFlipInTheMiddleOfTheLogIsRefused) {
  Flip(wal_, std::filesystem::file_size(wal_) / 2);
  auto store = OpenRocksStore(copy_);
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << store.status();
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("backup"));
}

// H7
TEST_F(RocksDamage, DamagedCurrentFileIsRefused) {
  std::ofstream(copy_ + "/CURRENT", std::ios::trunc) << "rubbish\n";
  EXPECT_FALSE(OpenRocksStore(copy_).ok());
}

TEST_F(RocksDamage, DamagedTableIsRefused) {
  { ASSERT_TRUE(OpenRocksStore(copy_).ok()); }  // recovery writes the log into a table
  std::string table;
  for (const auto& entry : std::filesystem::directory_iterator(copy_)) {
    if (absl::EndsWith(entry.path().string(), ".sst")) table = entry.path();
  }
  ASSERT_FALSE(table.empty());
  Flip(table, 2000);
  auto store = OpenRocksStore(copy_);
  absl::Status status = store.ok() ? (*store)->LoadAll().status() : store.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

}  // namespace
}  // namespace gtrain::store
