// Storage that answers badly, or answers for another directory: nothing of that is damage, and nothing of it
// is a reason to begin anew (C9, S7).
#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/stat_fault_fake.h"
#include "base/test_folder.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/store/faulty_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

// A directory in which calls that begin with one of `broken` fail.
StoreFactory Broken(std::vector<std::string> broken) {
  return [broken](const std::string& folder) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(*OpenDirectoryStore(folder),
                                         FaultPlan{[broken](uint64_t, absl::string_view call) {
                                           for (const std::string& prefix : broken) {
                                             if (absl::StartsWith(call, prefix)) return Fault::kBefore;
                                           }
                                           return Fault::kNone;
                                         }});
  };
}

void Damage(const std::string& folder, const SaveId& id) {
  const std::string path = absl::StrCat(folder, "/", AttemptKey(id, ShardName(0, 1)));
  std::string bytes = *ReadFile(path, 64 << 20);
  bytes[bytes.size() - 50] ^= 1;
  std::filesystem::remove(path);
  ASSERT_TRUE(WriteFileDurable(path, bytes, 0644).ok());
}

std::vector<SaveId> Committed(const std::string& folder) {
  return *ListManifests(OpenDirectoryStore(folder)->get());
}

FakeJob Next(FakeJob job) {
  ++job.generation;
  ++job.timeline;
  return job;
}

FakeJob Knowing(FakeJob job, const std::string& folder, const SaveId& newest) {
  job.environment["GTRAIN_CHECKPOINT_NEWEST"] = absl::StrCat(folder, "/", ManifestKey(newest));
  return job;
}

// Finding 1: a shard that cannot be read was DataLoss, so an older step was restored, and the intact newest
// was deleted by the retention of the next commit.
TEST_F(EngineTest, AShardThatCannotBeReadIsNotDamage_C9) {
  const std::string folder = TestFolder();
  FakeJob job{.world_size = 2};
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  job = Next(job);
  for (const char* call : {"Read step-000000000020", "Size step-000000000020", "List manifests",
                           "Get manifests/step-000000000020"}) {
    SCOPED_TRACE(call);
    std::vector<std::string> notes(2);
    RunRanks(job, [&](FakeSession* session) {
      auto rank = OpenRank(job, session, folder, 3, Broken({call}));
      const absl::Status failed = rank.ok() ? rank->checkpointer->Restore().status() : rank.status();
      EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
      EXPECT_TRUE(IsStorageError(failed));
      EXPECT_THAT(std::string(failed.message()), HasSubstr("nothing was taken for damage"));
      notes[session->rank()] = session->note(kNoteStorage);
    });
    // Each rank says so: whichever ends first is the fault that the head sees.
    EXPECT_THAT(notes[0], HasSubstr("injected fault")) << notes[0];
    EXPECT_THAT(notes[1], HasSubstr("injected fault")) << notes[1];
  }
  EXPECT_THAT(loud(), ::testing::Not(HasSubstr("DAMAGED")));
  ExpectRestored(Next(job), folder, 20);
}

TEST_F(EngineTest, AnOpenThatCannotReachItsStorageIsAStorageFault) {
  const std::string folder = TestFolder();
  const FakeJob job;
  for (const char* call : {"PutIfAbsent probe-", "List owners/", "PutIfAbsent owners/"}) {
    RunRanks(job, [&](FakeSession* session) {
      const auto rank = OpenRank(job, session, folder, 3, Broken({call}));
      EXPECT_TRUE(IsStorageError(rank.status())) << call << ": " << rank.status();
      EXPECT_NE(session->note(kNoteStorage), "") << call;
    });
  }
}

TEST_F(EngineTest, DamageFallsBackAsFarAsAllowedAndNoFurther_C9) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20, 30}).ok());
  const std::vector<SaveId> ids = Committed(folder);
  Damage(folder, ids[0]);
  job = Next(job);
  ExpectRestored(job, folder, 20);
  Damage(folder, ids[1]);
  const Restored refused = RestoreAll(job, folder)[0];
  EXPECT_TRUE(absl::IsDataLoss(refused.status)) << refused.status;
  EXPECT_THAT(std::string(refused.status.message()),
              HasSubstr("step 10 would be resumed, but 2 newer checkpoints are damaged and "
                        "checkpoint.max_rollback allows 1"));
  job.environment["GTRAIN_CHECKPOINT_MAX_ROLLBACK"] = "2";
  ExpectRestored(job, folder, 10);
  job.environment["GTRAIN_CHECKPOINT_MAX_ROLLBACK"] = "0";
  EXPECT_TRUE(absl::IsDataLoss(RestoreAll(job, folder)[0].status));
}

// The others waited for that index until commit_timeout, ten minutes by default.
TEST_F(EngineTest, ARankThatCannotPutItsIndexEndsTheSaveOfAllRanks) {
  FakeJob job{.world_size = 3};
  const StoreFactory broken =
      [](const std::string& folder) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(*OpenDirectoryStore(folder),
                                         FaultPlan{[](uint64_t, absl::string_view call) {
                                           return absl::StartsWith(call, "PutIfAbsent step-000000000020") &&
                                                          absl::EndsWith(call, IndexName(1, 3))
                                                      ? Fault::kBefore
                                                      : Fault::kNone;
                                         }});
  };
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 3, broken);  // commit_timeout and Wait: kLong
    ASSERT_TRUE(rank.ok()) << rank.status();
    ASSERT_TRUE(*rank->checkpointer->Save(10));
    ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    ASSERT_TRUE(*rank->checkpointer->Save(20));
    const absl::Status failed = rank->checkpointer->Wait(kLong);
    EXPECT_FALSE(absl::IsDeadlineExceeded(failed)) << session->rank() << ": " << failed;
    EXPECT_THAT(std::string(failed.message()), HasSubstr("injected fault"));
    if (session->rank() != 1) {
      EXPECT_THAT(std::string(failed.message()), HasSubstr("rank 1: "));
    }
    Fill(rank->state.get(), State::At(30, session->rank()));
    ASSERT_TRUE(*rank->checkpointer->Save(30));
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  ExpectRestored(Next(job), folder, 30);
}

// A shard that rank 0 sees shorter than its index says (a file system whose clients disagree, a disk that
// took less than it acknowledged) is never listed in a manifest.
TEST_F(EngineTest, AShardOfAnotherLengthThanItsIndexSaysIsNotCommitted_S7) {
  class Shorter final : public FaultyStore {
   public:
    using FaultyStore::FaultyStore;
    absl::StatusOr<uint64_t> Size(absl::string_view key) override {
      absl::StatusOr<uint64_t> bytes = FaultyStore::Size(key);
      if (bytes.ok() && absl::EndsWith(key, ShardName(1, 2))) --*bytes;
      return bytes;
    }
  };
  const std::string folder = TestFolder();
  const FakeJob job{.world_size = 2};
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 3, [](const std::string& path) {
      return absl::StatusOr<std::unique_ptr<port::BlobStore>>(
          std::make_unique<Shorter>(*OpenDirectoryStore(path), FaultPlan{}));
    });
    ASSERT_TRUE(rank.ok()) << rank.status();
    ASSERT_TRUE(*rank->checkpointer->Save(10));
    const absl::Status failed = rank->checkpointer->Wait(kLong);
    EXPECT_THAT(std::string(failed.message()), HasSubstr(" bytes, its index says ")) << failed;
  });
  EXPECT_THAT(loud(), HasSubstr(ShardName(1, 2)));
  const auto store = *OpenDirectoryStore(folder);
  EXPECT_EQ(*NewestManifest(store.get()), std::nullopt);
}

// An index whose answer is lost is there: nobody gives anything up.
TEST_F(EngineTest, AnIndexWhoseAnswerIsLostIsNoReasonToGiveUp_C1) {
  FakeJob job{.world_size = 2};
  const StoreFactory lossy =
      [](const std::string& folder) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(
        *OpenDirectoryStore(folder), FaultPlan{[](uint64_t, absl::string_view call) {
          return absl::StartsWith(call, "PutIfAbsent step-") && absl::EndsWith(call, IndexName(1, 2))
                     ? Fault::kAfter
                     : Fault::kNone;
        }});
  };
  const std::string folder = TestFolder();
  EXPECT_TRUE(SaveSteps(job, folder, {10, 20}, 3, lossy).ok());
  ExpectRestored(Next(job), folder, 20);
}

// A checkpoint that was passed over may be good (memory of this machine that flips bits, a bad cable): it
// stays.
TEST_F(EngineTest, RetentionKeepsWhatWasPassedOver) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  const SaveId passed_over = Committed(folder)[0], resumed = Committed(folder)[1];
  Damage(folder, passed_over);
  job = Next(job);
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 1);
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto restored = rank->checkpointer->Restore();
    ASSERT_TRUE(restored.ok() && (*restored)->step == 10) << restored.status();
    // The first commit and the 22nd list everything.
    for (int64_t step = 11; step <= 33; ++step) {
      ASSERT_TRUE(*rank->checkpointer->Save(step));
      ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
      ASSERT_THAT(Committed(folder), ::testing::Contains(passed_over)) << step;
      if (step == 11) {
        EXPECT_THAT(Committed(folder), ::testing::Contains(resumed)) << "11 was not read back yet";
      }
    }
  });
  EXPECT_EQ(Committed(folder)[0].step, 33);
  // A run that resumes from something newer knows that nobody needs it.
  job = Next(job);
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 1);
    ASSERT_TRUE(rank.ok() && rank->checkpointer->Restore().ok());
    ASSERT_TRUE(*rank->checkpointer->Save(34));
    ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  EXPECT_THAT(Committed(folder), ::testing::Not(::testing::Contains(passed_over)));
}

// Finding 2: generation 2 found an empty mount, began anew, and the job SUCCEEDED.
TEST_F(EngineTest, AnEmptyDirectoryIsNotAFreshStartWhenTheHeadKnowsACheckpoint_S7) {
  const std::string folder = TestFolder(), away = TestFolder() + "/away";
  FakeJob job{.world_size = 2};
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  job = Knowing(Next(job), folder, Committed(folder)[0]);
  std::filesystem::rename(folder, away);
  std::filesystem::create_directory(folder);
  RunRanks(job, [&](FakeSession* session) {
    const auto rank = OpenRank(job, session, folder);
    EXPECT_TRUE(IsStorageError(rank.status())) << rank.status();
    EXPECT_THAT(std::string(rank.status().message()), HasSubstr("step-000000000020"));
    EXPECT_THAT(session->note(kNoteStorage), HasSubstr("is the file system mounted"));
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "nothing is left in a directory that is not ours";
  std::filesystem::remove(folder);
  std::filesystem::rename(away, folder);
  ExpectRestored(job, folder, 20);
}

TEST_F(EngineTest, AStaleListingHidesNothing_S7) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  job = Knowing(Next(job), folder, Committed(folder)[0]);
  class Stale final : public FaultyStore {
   public:
    using FaultyStore::FaultyStore;
    absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
      auto keys = FaultyStore::List(prefix);
      if (keys.ok())
        std::erase_if(*keys, [](const std::string& k) { return absl::StrContains(k, "000020."); });
      return keys;
    }
  };
  const StoreFactory stale = [](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<Stale>(*OpenDirectoryStore(path), FaultPlan{});
  };
  const Restored restored = RestoreAll(job, folder, stale)[0];
  ASSERT_TRUE(restored.status.ok() && restored.step) << restored.status;
  EXPECT_EQ(restored.step->step, 20);
}

// EIO, ESTALE or EACCES for one name of a folder: if such a manifest counted as gone, an older step would be
// resumed, and the shards of the newest would be garbage.
TEST_F(EngineTest, AManifestThatCannotBeLookedAtIsNotAbsent_S7) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20, 30}).ok());
  const auto store = *OpenDirectoryStore(folder);
  const std::vector<std::string> before = *store->List("");
  const SaveId newest = Committed(folder)[0], middle = Committed(folder)[1];
  job = Next(job);
  for (const SaveId& id : {newest, middle}) {
    const std::string manifest = ManifestKey(id);
    const StatFault fault(manifest.substr(manifest.rfind('/') + 1), EIO);
    const Restored restored = RestoreAll(job, folder)[0];
    EXPECT_TRUE(IsStorageError(restored.status)) << restored.status;
    EXPECT_EQ(restored.step, std::nullopt);
    const auto garbage = FindGarbage(store.get(), absl::ZeroDuration());
    EXPECT_TRUE(absl::IsInternal(garbage.status())) << garbage.status();
  }
  for (const std::string& key : before) {
    if (!absl::StartsWith(key, kLeasePrefix)) {
      EXPECT_TRUE(store->Size(key).ok()) << key;
    }
  }
  ExpectRestored(Next(job), folder, 30);
}

// While the job runs, a commit that would delete waits until the storage can read the manifests.
TEST_F(EngineTest, ACommitDeletesNothingWhileAManifestCannotBeLookedAt_S7) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  const SaveId newest = Committed(folder)[0];
  job = Next(job);
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 1);
    ASSERT_TRUE(rank.ok()) << rank.status();
    ASSERT_TRUE((*rank->checkpointer->Restore())->step == 20);
    const std::string manifest = ManifestKey(newest);
    {
      const StatFault fault(manifest.substr(manifest.rfind('/') + 1), ESTALE);
      ASSERT_TRUE(*rank->checkpointer->Save(30));
      EXPECT_FALSE(rank->checkpointer->Wait(kLong).ok());
    }
    const auto store = *OpenDirectoryStore(folder);
    EXPECT_EQ((*NewestManifest(store.get()))->id, newest);
    EXPECT_TRUE(store->Size(AttemptKey(newest, ShardName(0, 1))).ok());
    Fill(rank->state.get(), State::At(40, 0));
    ASSERT_TRUE(*rank->checkpointer->Save(40));
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  ExpectRestored(Next(job), folder, 40);
}

// A list that leaves out one manifest, whose folder it shows, makes no garbage of the folder.
TEST_F(EngineTest, AStaleListingDeletesNothing_S7) {
  class Stale final : public FaultyStore {
   public:
    using FaultyStore::FaultyStore;
    absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
      return Without(FaultyStore::List(prefix));
    }
    absl::StatusOr<std::vector<std::string>> ListAll(absl::Span<const absl::string_view> prefixes) override {
      return Without(FaultyStore::ListAll(prefixes));
    }

   private:
    static absl::StatusOr<std::vector<std::string>> Without(absl::StatusOr<std::vector<std::string>> keys) {
      if (keys.ok()) {
        std::erase_if(*keys, [](const std::string& key) {
          return absl::StrContains(key, absl::StrCat(kManifestPrefix, "step-000000000020."));
        });
      }
      return keys;
    }
  };
  const StoreFactory stale = [](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<Stale>(*OpenDirectoryStore(path), FaultPlan{});
  };
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20, 30}).ok());
  const SaveId hidden = Committed(folder)[1];
  ASSERT_EQ(hidden.step, 20);
  const auto is_whole = [&] {
    const auto store = *OpenDirectoryStore(folder);
    const auto read = ReadManifest(store.get(), hidden);
    return read.ok() && VerifyAll(store.get(), std::get<Manifest>(*read), [](uint64_t, uint64_t) {
                          return absl::OkStatus();
                        }).ok();
  };
  ASSERT_TRUE(is_whole());
  const auto store = *stale(folder);
  const auto garbage = FindGarbage(store.get(), absl::ZeroDuration());
  ASSERT_TRUE(garbage.ok()) << garbage.status();
  EXPECT_THAT(garbage->plan.folders, ::testing::Contains(hidden)) << "so says the list";
  EXPECT_EQ(DropGarbage(store.get(), *garbage), absl::OkStatus());
  EXPECT_TRUE(is_whole()) << "gc";
  ASSERT_TRUE(SaveSteps(Next(job), folder, {40}, 3, stale).ok());  // its first commit lists everything
  EXPECT_TRUE(is_whole()) << "a commit";
}

// The head may not have heard of the newest commit, whose retention took what it knows.
TEST_F(EngineTest, SomethingNewerStandsForTheNewestThatTheHeadKnows) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10}).ok());
  const SaveId known = Committed(folder)[0];
  job = Next(job);
  ASSERT_TRUE(SaveSteps(job, folder, {11, 12}, 1).ok());
  std::filesystem::remove(absl::StrCat(folder, "/", ManifestKey(known)));
  ExpectRestored(Knowing(Next(job), folder, known), folder, 12);
}

// A damaged successor of the newest checkpoint that the head knows is one damaged checkpoint, however often
// it is listed, and the one that the head knows is not waited for.
TEST_F(EngineTest, ADamagedSuccessorOfTheNewestThatTheHeadKnowsCountsOnce_C9) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {10}).ok());
  const SaveId known = Committed(folder)[0];
  job = Next(job);
  ASSERT_TRUE(SaveSteps(job, folder, {11, 12}).ok());
  std::filesystem::remove(absl::StrCat(folder, "/", ManifestKey(known)));
  Damage(folder, Committed(folder)[0]);
  ExpectRestored(Knowing(Next(job), folder, known), folder, 11);
  EXPECT_THAT(loud(), HasSubstr("IS DAMAGED"));
}

// A file system that is unmounted while the job runs: what lies below its mount point is another directory.
TEST_F(EngineTest, ADirectoryThatGoesAwayIsNotMadeAnew_S7) {
  for (const bool another_shows : {false, true}) {
    SCOPED_TRACE(another_shows);
    const std::string folder = TestFolder() + "/ckpt", away = folder + ".away";
    const FakeJob job;
    RunRanks(job, [&](FakeSession* session) {
      auto rank = OpenRank(job, session, folder);
      ASSERT_TRUE(rank.ok()) << rank.status();
      const auto save = [&](int64_t step) {
        EXPECT_TRUE(*rank->checkpointer->Save(step));
        return rank->checkpointer->Wait(kLong);
      };
      ASSERT_TRUE(save(5).ok());
      std::filesystem::rename(folder, away);
      if (another_shows) std::filesystem::create_directory(folder);
      const absl::Status lost = save(6);
      EXPECT_TRUE(absl::IsUnavailable(lost)) << lost;
      EXPECT_THAT(std::string(lost.message()), HasSubstr("mounted"));
      EXPECT_THAT(session->note(kNoteSaves),
                  HasSubstr("1 save since the newest checkpoint came to nothing, the last of step 6: "));
      EXPECT_EQ(std::filesystem::exists(folder), another_shows);
      if (another_shows) {
        EXPECT_FALSE((*NewestManifest(OpenDirectoryStore(folder)->get())).has_value());
        std::filesystem::remove_all(folder);
      }
      std::filesystem::rename(away, folder);
      EXPECT_TRUE(save(7).ok());
      EXPECT_EQ(session->note(kNoteSaves), "");
    });
    EXPECT_EQ(Committed(folder)[0].step, 7);
  }
}

// Finding 5: with every own checkpoint damaged, --fresh (which had become "latest" after the first commit)
// resumed another job's.
TEST_F(EngineTest, AFreshRunNeverResumesAnotherJobsAfterItsOwnCommit) {
  for (const char* resume : {"fresh", "latest"}) {
    const std::string folder = TestFolder();  // no more is damaged in it than may be passed over
    ASSERT_TRUE(SaveSteps({.job = "other-1"}, folder, {900}).ok());
    FakeJob job{.job = absl::StrCat("mine-", resume), .job_hash = "hash-b", .resume = resume};
    ASSERT_TRUE(SaveSteps(job, folder, {5}).ok());
    Damage(folder, Committed(folder)[0]);
    job = Next(job);
    const Restored restored = RestoreAll(job, folder)[0];
    EXPECT_TRUE(absl::IsDataLoss(restored.status)) << resume << ": " << restored.status;
    EXPECT_FALSE(restored.step.has_value());
  }
}

}  // namespace
}  // namespace gtrain::ckpt
