// Tests shards that a disk changed after it acknowledged them.
#include "checkpoint/engine/read_back.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

class ReadBackTest : public EngineTest {
 protected:
  // One committed save of a job in a directory.
  ReadBackTest() {
    EXPECT_TRUE(SaveSteps({}, folder_, {10}).ok());
    manifest_ = **NewestManifest(store_.get());
  }
  std::string shard() const {
    return absl::StrCat(folder_, "/", AttemptKey(manifest_.id, manifest_.files[0].name));
  }
  void Replace(const std::string& bytes) {
    std::filesystem::remove(shard());
    ASSERT_TRUE(WriteFileDurable(shard(), bytes, 0644).ok());
  }

  const std::string folder_ = TestFolder();
  const std::unique_ptr<port::BlobStore> store_ = *OpenDirectoryStore(folder_);
  Manifest manifest_;
};

TEST_F(ReadBackTest, WhatIsAsItShouldBeIsVerified) {
  ReadBack read_back(store_.get());
  EXPECT_EQ(read_back.verified(), std::nullopt);
  read_back.Begin(manifest_.id, manifest_.files[0]);
  read_back.Await(kLong);
  EXPECT_EQ(read_back.verified(), manifest_.id);
  EXPECT_EQ(read_back.TakeNote(), "");
}

TEST_F(ReadBackTest, WhatTheDiskChangedIsFoundAndSaid_S6) {
  std::string bytes = *ReadFile(shard(), 64 << 20);
  bytes[bytes.size() / 2] ^= 4;
  Replace(bytes);
  ReadBack read_back(store_.get());
  read_back.Begin(manifest_.id, manifest_.files[0]);
  read_back.Await(kLong);
  EXPECT_EQ(read_back.verified(), std::nullopt);
  EXPECT_THAT(read_back.TakeNote(), HasSubstr("step 10 was committed and is damaged"));
  EXPECT_EQ(read_back.TakeNote(), "");
  EXPECT_THAT(loud(), HasSubstr("IS DAMAGED"));
}

TEST_F(ReadBackTest, AnErrorOfTheStorageProvesNothing) {
  FaultyStore broken(store_.get(), FaultPlan{[](uint64_t, absl::string_view call) {
                       return absl::StartsWith(call, "Read ") ? Fault::kBefore : Fault::kNone;
                     }});
  ReadBack read_back(&broken);
  read_back.Begin(manifest_.id, manifest_.files[0]);
  read_back.Await(kLong);
  EXPECT_EQ(read_back.verified(), std::nullopt);
  EXPECT_EQ(read_back.TakeNote(), "");
}

// Retention takes the save while its shard is read: what is missing then is no damage.
TEST_F(ReadBackTest, WhatIsDeletedWhileItIsReadIsNotDamage_C2) {
  FaultyStore deleted(store_.get(), FaultPlan{[&](uint64_t, absl::string_view call) {
                        if (absl::StartsWith(call, "Read ")) {
                          EXPECT_TRUE(store_->Delete(ManifestKey(manifest_.id)).ok());
                          EXPECT_TRUE(store_->Delete(AttemptKey(manifest_.id, ShardName(0, 1))).ok());
                        }
                        return Fault::kNone;
                      }});
  ReadBack read_back(&deleted);
  read_back.Begin(manifest_.id, manifest_.files[0]);
  read_back.Await(kLong);
  EXPECT_EQ(read_back.verified(), std::nullopt);
  EXPECT_EQ(read_back.TakeNote(), "");
  EXPECT_EQ(loud(), "");
}

// Training waits for the copy of the next save: nobody else takes memory or the disk meanwhile.
TEST_F(ReadBackTest, NothingIsReadWhileTheNextSaveIsCopied) {
  FaultyStore watched(store_.get(), FaultPlan{});
  std::atomic<bool> copying{true};
  std::atomic<int> asked{0};
  ReadBack read_back(&watched, [&] {
    ++asked;
    return copying.load();
  });
  read_back.Begin(manifest_.id, manifest_.files[0]);
  const RealClock clock;
  const Instant end = clock.Now() + kLong;
  while (asked < 5 && clock.Now() < end) std::this_thread::yield();
  EXPECT_GE(asked, 5);
  EXPECT_THAT(watched.calls(), ::testing::IsEmpty());
  EXPECT_EQ(read_back.verified(), std::nullopt);
  copying = false;
  read_back.Await(kLong);
  EXPECT_EQ(read_back.verified(), manifest_.id);
}

TEST_F(ReadBackTest, OneThatStandsAsideCanBeGivenUp) {
  std::atomic<int> asked{0};
  FaultyStore watched(store_.get(), FaultPlan{});
  {
    ReadBack read_back(&watched, [&] {
      ++asked;
      return true;
    });
    read_back.Begin(manifest_.id, manifest_.files[0]);
    const RealClock clock;
    const Instant end = clock.Now() + kLong;
    while (asked < 1 && clock.Now() < end) std::this_thread::yield();
  }
  EXPECT_THAT(watched.calls(), ::testing::IsEmpty());
}

// The newest shard was lost by the disk: what was read back before stays, whatever `keep` says.
TEST_F(ReadBackTest, RetentionKeepsTheNewestThatWasReadBack) {
  const std::string folder = TestFolder();
  // Flips a bit of what is read of every save but the first.
  class Forgetful final : public FaultyStore {
   public:
    using FaultyStore::FaultyStore;
    absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
      const absl::Status read = FaultyStore::Read(key, offset, out);
      if (read.ok() && !absl::StartsWith(key, "step-000000000001.") && !out.empty()) out[0] ^= 1;
      return read;
    }
  };
  const StoreFactory factory =
      [](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<Forgetful>(*OpenDirectoryStore(path), FaultPlan{});
  };
  std::vector<int64_t> steps(24);  // the first commit and the 22nd list everything
  std::iota(steps.begin(), steps.end(), 1);
  ASSERT_TRUE(SaveSteps({.world_size = 2}, folder, steps, 1, factory).ok());
  steps.clear();
  const std::vector<SaveId> left = *ListManifests(OpenDirectoryStore(folder)->get());
  for (const SaveId& id : left) steps.push_back(id.step);
  EXPECT_THAT(steps, ::testing::ElementsAre(24, 1));
}

}  // namespace
}  // namespace gtrain::ckpt
