// Copies near by: they are used when they are right, and found out when they are not (faults S6, C4).
#include "checkpoint/engine/near.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/logging.h"
#include "base/test_folder.h"
#include "base/unique_fd.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/near/near_folder.h"
#include "checkpoint/store/faulty_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

class NearTest : public testing::Test {
 protected:
  NearTest() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      MutexLock lock(&mu_);
      if (level != LogLevel::kInfo) loud_.push_back(std::string(line));
    });
    for (std::string& folder : machines_) folder = TestFolder();
  }
  ~NearTest() override { SetLogSink(nullptr); }
  std::string loud() {
    MutexLock lock(&mu_);
    return absl::StrJoin(loud_, "\n");
  }

  // Like SaveSteps and RestoreAll, with rank r on the machine on(r).
  absl::Status Save(const FakeJob& job, std::vector<int64_t> steps,
                    const StoreFactory& factory = &OpenDirectoryStore) {
    std::vector<absl::Status> results(job.world_size);
    RunRanks(job, [&](FakeSession* session) {
      results[session->rank()] = [&]() -> absl::Status {
        GT_ASSIGN_OR_RETURN(Rank rank, OpenRank(On(job, session->rank()), session, store_, 3, factory));
        for (int64_t step : steps) {
          Fill(rank.state.get(), State::At(step, session->rank()));
          GT_RETURN_IF_ERROR(rank.checkpointer->Save(step).status());
          GT_RETURN_IF_ERROR(rank.checkpointer->Wait(kLong));
        }
        return absl::OkStatus();
      }();
    });
    for (const absl::Status& s : results) GT_RETURN_IF_ERROR(s);
    return absl::OkStatus();
  }
  // Bytes of each rank that came from near by.
  std::vector<RestoredStep> Restore(FakeJob job, int64_t step) {
    job.generation = job.timeline = ++generation_;
    std::vector<RestoredStep> out(job.world_size);
    RunRanks(job, [&](FakeSession* session) {
      auto rank = OpenRank(On(job, session->rank()), session, store_);
      ASSERT_TRUE(rank.ok()) << rank.status();
      auto restored = rank->checkpointer->Restore();
      ASSERT_TRUE(restored.ok() && *restored) << restored.status();
      out[session->rank()] = **restored;
      EXPECT_EQ((*restored)->step, step);
      State expected = State::At(step, session->rank());
      if (session->rank() >= saved_by_) expected.rng = rank->state->rng;  // it had none
      EXPECT_TRUE(*rank->state == expected) << "rank " << session->rank() << " is not bit-identical";
    });
    return out;
  }
  // Counts the bytes that any rank read from the storage: ranks of one machine read common chunks once.
  static uint64_t BytesOfTheStorage(const std::vector<RestoredStep>& steps) {
    uint64_t bytes = 0;
    for (const RestoredStep& step : steps) bytes += step.bytes_read - step.bytes_near;
    return bytes;
  }
  FakeJob On(FakeJob job, int rank) const {
    const std::string& machine = machines_[one_machine_ ? 0 : rank % 3];
    job.node = machine;
    if (near_) job.near = absl::StrCat(bytes_max_, " ", machine);
    return job;
  }
  // Files of shards below a folder.
  static std::vector<std::string> Shards(const std::string& folder) {
    std::vector<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  static void Flip(const std::string& path, uint64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    char byte;
    file.seekg(static_cast<std::streamoff>(at)).get(byte);
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(byte ^ 1));
  }
  void LoseTheStorage() {
    for (const std::string& path : Shards(store_)) fs::remove(path);
  }

  const std::string store_ = TestFolder();
  std::string machines_[3];
  bool near_ = true;
  bool one_machine_ = true;
  uint64_t bytes_max_ = 1 << 30;
  int saved_by_ = 1000;
  uint64_t generation_ = 1;
  Mutex mu_;
  std::vector<std::string> loud_;
};

TEST_F(NearTest, ARestoreThatFindsAllNearNeedsNoShardOfTheStorage) {
  const FakeJob job{.world_size = 3};
  ASSERT_TRUE(Save(job, {5, 6, 7}).ok());
  EXPECT_EQ(Shards(machines_[0]).size(), 6u);  // two checkpoints of three ranks, no more
  LoseTheStorage();
  for (const RestoredStep& step : Restore(job, 7)) {
    EXPECT_GT(step.bytes_read, 0u);
    EXPECT_EQ(step.bytes_near, step.bytes_read);
  }
  EXPECT_EQ(loud(), "");
}

TEST_F(NearTest, ABitThatFlippedIsFoundAndTheStorageRead_S6) {
  const FakeJob job{.world_size = 2};
  ASSERT_TRUE(Save(job, {5}).ok());
  const std::vector<std::string> copies = Shards(machines_[0]);
  ASSERT_EQ(copies.size(), 2u);
  const uint64_t bytes = fs::file_size(copies[0]);
  for (const uint64_t at : {uint64_t{0}, bytes / 2, bytes - 1}) {
    Flip(copies[0], at);
    for (const RestoredStep& step : Restore(job, 5)) EXPECT_LT(step.bytes_near, step.bytes_read);
    EXPECT_THAT(loud(), HasSubstr(absl::StrCat("(", machines_[0], ") is NOT USED: bytes 0 to ")));
    Flip(copies[0], at);
    loud_.clear();
  }
  Restore(job, 5);
  EXPECT_EQ(loud(), "");
}

TEST_F(NearTest, WhatIsBadThereAndInTheStorageFallsBackToTheCheckpointBefore_C4) {
  const FakeJob job{.world_size = 2};
  ASSERT_TRUE(Save(job, {5, 6}).ok());
  Flip(Shards(machines_[0]).back(), 100);
  Flip(Shards(store_).back(), 100);
  Restore(job, 5);
  EXPECT_THAT(loud(), HasSubstr("NOT USED"));
  EXPECT_THAT(loud(), HasSubstr("IS DAMAGED, falling back"));
}

TEST_F(NearTest, ACopyThatIsTooShortOrGoneIsReadFromTheStorage_S6) {
  const FakeJob job{.world_size = 2};
  ASSERT_TRUE(Save(job, {5}).ok());
  const std::vector<std::string> copies = Shards(machines_[0]);
  fs::resize_file(copies[0], fs::file_size(copies[0]) - 1);
  Restore(job, 5);
  EXPECT_THAT(loud(), HasSubstr("NOT USED: it has"));
  fs::remove(copies[0]);
  loud_.clear();
  EXPECT_GT(BytesOfTheStorage(Restore(job, 5)), 0u);
  EXPECT_EQ(loud(), "");
}

TEST_F(NearTest, AFullTierFailsNoSaveAndSaysSo_C12) {
  const FakeJob job;
  bytes_max_ = 1000;
  ASSERT_TRUE(Save(job, {5}).ok());
  EXPECT_THAT(Shards(machines_[0]), IsEmpty());
  EXPECT_THAT(loud(), HasSubstr("step 5: no copy of it in this machine's"));
  EXPECT_THAT(loud(), HasSubstr("do not fit"));
  EXPECT_THAT(loud(), HasSubstr("1 left out so far"));
  EXPECT_EQ(Restore(job, 5)[0].bytes_near, 0u);
}

TEST_F(NearTest, ATierThatIsHeldFailsNoSave) {
  const FakeJob job;
  ASSERT_TRUE(Save(job, {5}).ok());
  const UniqueFd lock(open(absl::StrCat(machines_[0], "/.lock").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  ASSERT_TRUE(Save(job, {6}).ok());
  EXPECT_THAT(loud(), HasSubstr(".lock was held"));
  EXPECT_EQ(Restore(job, 6)[0].bytes_near, 0u);
}

TEST_F(NearTest, AFolderThatCannotBeMadeFailsNothing) {
  machines_[0] = "/proc/none";
  const FakeJob job;
  ASSERT_TRUE(Save(job, {5}).ok());
  EXPECT_THAT(loud(), HasSubstr("no copies are kept on this machine"));
  Restore(job, 5);
}

// The storage alone says what is given up.
TEST_F(NearTest, ACopyOfAnAttemptThatWasGivenUpIsNeverUsed_C1) {
  const FakeJob job;
  ASSERT_TRUE(Save(job, {5}).ok());
  const StoreFactory no_manifest =
      [](const std::string& location) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    GT_ASSIGN_OR_RETURN(auto base, OpenDirectoryStore(location));
    return std::make_unique<FaultyStore>(
        std::move(base), FaultPlan{[](uint64_t, absl::string_view call) {
          return absl::StartsWith(call, "PutIfAbsent manifests/") ? Fault::kBefore : Fault::kNone;
        }});
  };
  FakeJob again = job;
  again.generation = again.timeline = ++generation_;
  EXPECT_FALSE(Save(again, {6}, no_manifest).ok());
  EXPECT_EQ(Shards(machines_[0]).size(), 2u);
  // Nobody gave it up: the storage had a bad moment, and the state is whole.
  EXPECT_EQ(Restore(job, 6)[0].step, 6);
  const SaveId six = {.timeline = again.timeline, .step = 6, .generation = again.generation};
  auto store = *OpenDirectoryStore(store_);
  ASSERT_TRUE(store->PutIfAbsent(ManifestKey(six), Print(AbortMarker{.id = six, .reason = "a test"})).ok());
  EXPECT_EQ(Restore(job, 5)[0].step, 5);
  // The next commit and the save after it take its place.
  again.generation = again.timeline = ++generation_;
  ASSERT_TRUE(Save(again, {6, 7}).ok());
  EXPECT_EQ(Shards(machines_[0]).size(), 2u);
}

// ------------------------------------------------------------------ other machines

class DeadTier : public port::NearTier {
 public:
  absl::StatusOr<std::vector<std::string>> Attempts() override { return Gone(); }
  absl::StatusOr<std::vector<Shard>> List(absl::string_view) override { return Gone(); }
  absl::Status Read(absl::string_view, absl::string_view, uint64_t, absl::Span<char>) override {
    return Gone();
  }
  uint64_t ReadSize() const override { return 1; }
  absl::Status Put(const Copy&, Source) override { return Gone(); }
  std::string Describe() const override { return "the memory of node-b"; }

 private:
  static absl::Status Gone() { return absl::UnavailableError("node-b does not answer"); }
};

std::shared_ptr<port::NearTier> TierIn(const std::string& folder) {
  return MakeNearTier(*NearFolder::Open(folder, 1 << 30), "fashion-1");
}

constexpr char kShard[] = "rank-00000-of-00001.safetensors";

TEST_F(NearTest, TheHoldersGetCopiesOfTheCopyHere) {
  auto store = *OpenDirectoryStore(store_);
  const std::string data(10'000'000, 'x');
  {
    NearSaves saves(
        {.own = TierIn(machines_[0]), .peers = {TierIn(machines_[1]), TierIn(machines_[2])}, .holders = 1},
        store.get());
    saves.Begin({.step = 5}, kShard, "header", data);
    saves.End(SaveId{.step = 5});
    EXPECT_EQ(saves.note(), "");
  }  // waits for what is under way
  ASSERT_EQ(Shards(machines_[1]).size(), 1u);
  EXPECT_EQ(fs::file_size(Shards(machines_[1])[0]), data.size() + 6);
  EXPECT_THAT(Shards(machines_[2]), IsEmpty());
}

TEST_F(NearTest, AHolderThatIsDeadFailsNoSaveAndIsSaid) {
  auto store = *OpenDirectoryStore(store_);
  NearSaves saves({.own = TierIn(machines_[0]), .peers = {std::make_shared<DeadTier>()}, .holders = 1},
                  store.get());
  // The note of a push comes with a later save, and the newest one is told.
  const RealClock clock;
  const Instant end = clock.Now() + kLong;
  std::string note;
  for (int64_t step = 5; note.find("node-b does not answer") == std::string::npos; ++step) {
    ASSERT_LT(clock.Now(), end) << note;
    saves.Begin({.step = step}, kShard, "header", "data");
    saves.End(SaveId{.step = step});
    note = saves.note();
  }
  EXPECT_THAT(note, HasSubstr("left out so far"));
}

TEST_F(NearTest, ACopyThatNeverEndsIsGivenUpAndSaid) {
  class EndlessTier final : public DeadTier {
   public:
    absl::Status Put(const Copy&, Source source) override {
      while (true) {
        if (const auto bytes = source(0); !bytes.ok()) return bytes.status();
        absl::SleepFor(absl::Milliseconds(5));
      }
    }
  };
  auto store = *OpenDirectoryStore(store_);
  NearSaves saves({.own = std::make_shared<EndlessTier>()}, store.get());
  saves.Begin({.step = 5}, kShard, "header", "data");
  saves.End(SaveId{.step = 5});
  EXPECT_THAT(saves.note(), HasSubstr("took longer than the save and than 256 MB/s"));
  EXPECT_THAT(saves.note(), HasSubstr("1 left out so far"));
}

TEST_F(NearTest, ARestoreTakesOfOtherMachinesWhatThisOneLacks) {
  one_machine_ = false;
  ASSERT_TRUE(Save({.world_size = 3}, {5}).ok());
  auto store = *OpenDirectoryStore(store_);
  const Manifest manifest = *FindCheckpoint(store.get(), "latest");
  const NearTiers tiers{.own = TierIn(machines_[0]),
                        .peers = {std::make_shared<DeadTier>(), TierIn(machines_[1])}};
  NearShards near(tiers, manifest);
  EXPECT_THAT(loud(),
              HasSubstr("the memory of node-b is not asked for copies of step 5: node-b does not answer"));
  EXPECT_TRUE(near.Holds(0) && near.Holds(1) && !near.Holds(2));
  const auto read = [](const NearShards::ReadFrom& from) {
    char byte;
    return from.read(0, absl::MakeSpan(&byte, 1));
  };
  EXPECT_TRUE(near.Read(0, read) && near.Read(1, read) && !near.Read(2, read));
  EXPECT_EQ(near.own_bytes(), 1u);
  EXPECT_EQ(near.peer_bytes(), 1u);
}

TEST_F(NearTest, AtAnotherWorldSizeEachMachineUsesWhatItHas) {
  one_machine_ = false;
  saved_by_ = 3;
  ASSERT_TRUE(Save({.world_size = 3}, {5}).ok());
  for (const std::string& machine : machines_) EXPECT_EQ(Shards(machine).size(), 1u);
  for (const int world_size : {1, 2, 5}) {
    const std::vector<RestoredStep> steps = Restore({.world_size = world_size}, 5);
    for (const RestoredStep& step : steps) EXPECT_GT(step.bytes_near, 0u);
    EXPECT_GT(BytesOfTheStorage(steps), 0u);
  }
  EXPECT_EQ(loud(), "");
}

}  // namespace
}  // namespace gtrain::ckpt
