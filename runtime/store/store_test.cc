// One suite for every MetaStore, then what only a disk can do wrong.
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/power_cut_fake.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/store/memory_store.h"
#include "runtime/store/rocks_store.h"
#include "runtime/store/sealed_value.h"

namespace gtrain::store {
namespace {

using ::testing::HasSubstr;
using Records = std::vector<std::pair<std::string, std::string>>;

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
                                                   std::string path = TestFolder() + "/db";
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
  std::string path = TestFolder() + "/db";
  auto first = OpenRocksStore(path);
  ASSERT_TRUE(first.ok());
  auto second = OpenRocksStore(path);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another head"));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat("process ", getpid())));
}

// On the strict disk of power_cut_fake.h data that was not synced is gone.
class PowerCutTest : public testing::Test {
 protected:
  std::unique_ptr<port::MetaStore> Open(const std::string& path) {
    auto store = OpenRocksStore(path);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  // How many records a head finds after a power cut now.
  size_t Left(PowerCut& cut) {
    const std::string copy = TestFolder() + "/left";
    EXPECT_TRUE(cut.Leave(copy).ok());
    auto store = Open(copy + "/db");
    if (store == nullptr) return 0;
    auto all = store->LoadAll();
    EXPECT_TRUE(all.ok()) << all.status();
    return all.ok() ? all->size() : 0;
  }
  const std::string dir_ = TestFolder(), path_ = dir_ + "/db";
};

TEST_F(PowerCutTest, AcknowledgedCommitsSurvive_H2) {
  PowerCut cut(dir_);
  auto store = Open(path_);
  ASSERT_NE(store, nullptr);
  for (int i = 1; i <= 40; ++i) {
    ASSERT_TRUE(store->Commit({{absl::StrCat("key/", i), std::string(20'000, 'v')}}).ok());
    if (i % 8 == 0) {
      EXPECT_EQ(Left(cut), static_cast<size_t>(i));
    }
  }
  store = nullptr;  // an orderly end, and a second life that moves the log into a table
  store = Open(path_);
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(store->Commit({{"key/41", "v"}}).ok());
  EXPECT_EQ(Left(cut), 41u);
}

TEST_F(PowerCutTest, AFailedSyncIsFinal_H4) {
  PowerCut cut(dir_);
  auto store = Open(path_);
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(store->Commit({{"before", "v"}}).ok());
  cut.FailNextSync(EIO);
  EXPECT_FALSE(store->Commit({{"lost", "v"}}).ok());
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(store->Commit({{"after", "v"}}).ok());
  store = nullptr;
  EXPECT_EQ(Left(cut), 1u);
}

}  // namespace
}  // namespace gtrain::store
