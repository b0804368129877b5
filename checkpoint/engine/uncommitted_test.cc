// Finding 10 of the readings: a rank that crashed while its machine uploaded a save of minutes was restored
// when the upload had ended, although all of the state lay in the machine's memory.
#include "checkpoint/engine/uncommitted.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/hosted_fake.h"
#include "checkpoint/near/near_folder.h"
#include "checkpoint/store/faulty_store.h"

namespace gtrain::ckpt {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

// Two ranks with writers outside of them on one machine that keeps copies. Step 5 is committed; the upload of
// step 6 stops at its first byte until `gate` is set.
class UncommittedTest : public EngineTest {
 protected:
  UncommittedTest() {
    writers_.near = NearPlace{.folder = machine_, .bytes_max = 1 << 30};
    writers_.open_store =
        [this](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(*OpenDirectoryStore(path),
                                           FaultPlan{[this](uint64_t, absl::string_view call) {
                                             if (absl::StrContains(call, "step-000000000006."))
                                               (void)gate_.Await(kLong);
                                             return Fault::kNone;
                                           }});
    };
    job_.near = absl::StrCat(1 << 30, " ", machine_);
    job_.node = "node-a";
  }
  ~UncommittedTest() override { gate_.Set(); }

  // Runs generation 1, which is over then.
  void SaveFiveAndBeginSix() {
    RunHosted(job_, &writers_, [&](HostedSession* session) {
      auto rank = OpenRank(job_, session, store_);
      ASSERT_TRUE(rank.ok()) << rank.status();
      for (const int64_t step : {5, 6}) {
        Fill(rank->state.get(), State::At(step, session->rank()));
        const auto saved = rank->checkpointer->Save(step);
        ASSERT_TRUE(saved.ok() && *saved) << saved.status();
        if (step == 5) {
          ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
        }
      }
      ASSERT_TRUE(Until([&] { return fs::exists(CopyOf(IndexName(session->rank(), 2))); }));
      ASSERT_TRUE(Until([&] { return fs::exists(CopyOf(OrderName(2))); }));
      session->Revoke();
    });
    job_.generation = job_.timeline = 2;
    job_.environment["GTRAIN_CHECKPOINT_NEWEST"] = absl::StrCat(store_, "/", ManifestKey(five_));
  }
  void RestoreSix(HostedSession* session, Rank* rank) {
    auto opened = OpenRank(job_, session, store_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    *rank = *std::move(opened);
    const auto restored = rank->checkpointer->Restore();
    ASSERT_TRUE(restored.ok() && *restored) << restored.status();
    EXPECT_EQ((*restored)->step, 6);
    EXPECT_TRUE(*rank->state == State::At(6, session->rank()));
  }
  std::string CopyOf(const std::string& file) const {
    return absl::StrCat(machine_, "/", job_.job, "/", AttemptName(six_), "/", file);
  }
  NearTiers Tiers() const { return {.own = MakeNearTier(*NearFolder::Open(machine_, 1 << 30), job_.job)}; }
  std::optional<SaveId> Found(const SaveId& self) const {
    auto store = *OpenDirectoryStore(store_);
    const auto found = FindUncommitted(store.get(), Tiers(), self, owner_);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() && *found ? std::optional((*found)->id) : std::nullopt;
  }

  const std::string store_ = TestFolder(), machine_ = TestFolder();
  const SaveId five_{.step = 5}, six_{.step = 6};
  Identity owner_{.cluster = "c1", .job = "fashion-1", .job_hash = "hash-a"};
  FakeJob job_{.world_size = 2};
  StopFlag gate_;
  HostedSession::Writers writers_;
};

TEST_F(UncommittedTest, TheNextGenerationDoesNotWaitForTheUpload) {
  SaveFiveAndBeginSix();
  RunHosted(job_, &writers_, [&](HostedSession* session) {
    auto rank = OpenRank(job_, session, store_);
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto restored = rank->checkpointer->Restore();
    ASSERT_TRUE(restored.ok() && *restored) << restored.status();
    EXPECT_EQ((*restored)->step, 6);
    EXPECT_EQ((*restored)->bytes_near, (*restored)->bytes_read);
    EXPECT_TRUE(*rank->state == State::At(6, session->rank()));
    EXPECT_EQ(rank->checkpointer->LastCommitted(), 5) << "6 may never be";
    EXPECT_FALSE(fs::exists(absl::StrCat(store_, "/", ManifestKey(six_))));
    if (session->rank() == 0) {
      EXPECT_THAT(session->note(kNoteRestore), HasSubstr("step 6 (its upload had not ended)"));
    }
    // There is memory for one snapshot (fault C12).
    auto saved = rank->checkpointer->Save(7);
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_FALSE(*saved);
    if (session->rank() == 0) {
      EXPECT_THAT(loud(), HasSubstr("step 7 is not saved, the memory for it still holds a save of an earlier "
                                    "generation (1 skipped so far)"));
    }
    gate_.Set();
    const RealClock clock;
    const Instant end = clock.Now() + kLong;
    int64_t step = 7;
    for (; saved.ok() && !*saved; saved = rank->checkpointer->Save(step)) {
      ASSERT_LT(clock.Now(), end);
      Fill(rank->state.get(), State::At(++step, session->rank()));
    }
    ASSERT_TRUE(saved.ok()) << saved.status();
    ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    EXPECT_EQ(rank->checkpointer->LastCommitted(), step);
  });
  auto store = *OpenDirectoryStore(store_);
  EXPECT_GT((*ListManifests(store.get()))[0].step, 7);
}

// A save that was restored before it was committed is committed all the same, and later generations find it.
TEST_F(UncommittedTest, TheUploadGoesOnAndIsCommitted) {
  SaveFiveAndBeginSix();
  for (int generation = 2; generation <= 4; ++generation) {
    job_.generation = job_.timeline = static_cast<uint64_t>(generation);
    RunHosted(job_, &writers_, [&](HostedSession* session) {
      Rank rank;
      RestoreSix(session, &rank);
    });  // ends while it waits for its writer
    if (generation == 3) {
      EXPECT_FALSE(fs::exists(absl::StrCat(store_, "/", ManifestKey(six_))));
      gate_.Set();
      ASSERT_TRUE(Until([&] { return fs::exists(absl::StrCat(store_, "/", ManifestKey(six_))); }));
    }
  }
  EXPECT_THAT(info(), HasSubstr("which is not committed yet"));
}

TEST_F(UncommittedTest, ACopyThatIsBadIsFoundOutAndTheUploadIsWaitedFor) {
  SaveFiveAndBeginSix();
  const std::string shard = CopyOf(ShardName(1, 2));
  fs::resize_file(shard, fs::file_size(shard) - 1);
  {
    std::fstream out(CopyOf(ShardName(0, 2)), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(-1000, std::ios::end);
    out.put('!');
  }
  EXPECT_EQ(Found({.timeline = 2, .generation = 2}), std::nullopt) << "a shard is too short";
  fs::resize_file(shard, fs::file_size(shard) + 1);
  std::thread opens([&] {
    EXPECT_TRUE(Until([&] { return absl::StrContains(loud(), "its upload is waited for"); }));
    gate_.Set();
  });
  RunHosted(job_, &writers_, [&](HostedSession* session) {
    Rank rank;
    RestoreSix(session, &rank);
    EXPECT_TRUE(fs::exists(absl::StrCat(store_, "/", ManifestKey(six_))));
  });
  opens.join();
}

TEST_F(UncommittedTest, WhatMayNotBeResumedFromIsNotFound) {
  SaveFiveAndBeginSix();
  const SaveId self{.timeline = 2, .generation = 2};
  auto store = *OpenDirectoryStore(store_);
  EXPECT_EQ(Found(self), six_);
  EXPECT_EQ(Found({.epoch = 2, .timeline = 2, .generation = 2}), std::nullopt) << "another owner's";
  EXPECT_EQ(Found({.timeline = 1, .generation = 2}), std::nullopt)
      << "of its timeline: what shows nowhere yet could be committed behind its back";
  EXPECT_EQ(Found({.timeline = 2, .generation = 1}), std::nullopt) << "its own";
  // In another cluster a job may have the same id.
  owner_.cluster = "c2";
  EXPECT_EQ(Found(self), std::nullopt) << "another owner's";
  owner_.cluster = "c1";
  const std::string elsewhere = TestFolder();
  EXPECT_EQ(*FindUncommitted(OpenDirectoryStore(elsewhere)->get(), Tiers(), self, owner_), std::nullopt)
      << "made for another directory";
  // Something newer began to be written.
  const std::string newer = AttemptKey({.step = 7}, ShardName(0, 2));
  ASSERT_TRUE(store->PutIfAbsent(newer, "x").ok());
  EXPECT_EQ(Found(self), std::nullopt) << "a newer save may be on its way";
  ASSERT_TRUE(store->PutIfAbsent(ManifestKey({.step = 7}), Print(AbortMarker{.id = {.step = 7}})).ok());
  EXPECT_EQ(Found(self), std::nullopt) << "something newer is decided";
  ASSERT_TRUE(store->Delete(ManifestKey({.step = 7})).ok());
  ASSERT_TRUE(store->Delete(newer).ok());
  EXPECT_EQ(Found(self), six_);
  for (const std::string& file : {OrderName(2), IndexName(0, 2), IndexName(1, 2), ShardName(0, 2)}) {
    fs::rename(CopyOf(file), machine_ + "/away");
    EXPECT_EQ(Found(self), std::nullopt) << file;
    fs::rename(machine_ + "/away", CopyOf(file));
  }
  EXPECT_EQ(Found(self), six_);
  // Texts that are whole and of this attempt, and do not speak for it.
  const auto replaced = [&](const std::string& file, const std::string& text) {
    fs::rename(CopyOf(file), machine_ + "/away");
    EXPECT_TRUE(WriteFileDurable(CopyOf(file), text).ok());
    const std::optional<SaveId> found = Found(self);
    fs::rename(machine_ + "/away", CopyOf(file));
    return found;
  };
  SaveOrder order = *ParseSaveOrder(*ReadFile(CopyOf(OrderName(2)), 1 << 20));
  EXPECT_EQ(replaced(OrderName(2), Print(order)), six_);
  ++order.epoch;
  EXPECT_EQ(replaced(OrderName(2), Print(order)), std::nullopt) << "an order of another epoch";
  const ShardIndex failed{.id = six_, .rank = 1, .world_size = 2, .error = "its disk was full"};
  EXPECT_EQ(replaced(IndexName(1, 2), Print(failed)), std::nullopt) << "a rank failed";
  EXPECT_THAT(info(), HasSubstr("not whole near by: its disk was full"));
  EXPECT_EQ(Found(self), six_);
  // A copy of something newer is coming.
  auto folder = *NearFolder::Open(machine_, 1 << 30);
  const auto coming =
      folder->Begin(job_.job, {.attempt = AttemptName({.step = 7}), .file = ShardName(0, 2), .bytes = 10});
  ASSERT_TRUE(coming.ok()) << coming.status();
  EXPECT_EQ(Found(self), std::nullopt);
}

}  // namespace
}  // namespace gtrain::ckpt
