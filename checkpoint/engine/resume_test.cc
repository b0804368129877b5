// From which checkpoint a run goes on, and which runs may commit beside or after another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/retain.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(EngineTest, ARevokedGenerationNeverCommits_C3) {
  FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1}).ok());
  job.generation = 2;
  std::vector<absl::Status> results(2);
  std::atomic<bool> revoked{false};
  RunRanks(job, [&](FakeSession* session) {
    const bool slow = session->rank() == 1;
    const StoreFactory factory =
        [&](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      GT_ASSIGN_OR_RETURN(auto base, OpenDirectoryStore(path));
      // Leaks are none: the process of the test owns both until the rank is done.
      static std::vector<std::unique_ptr<port::BlobStore>> bases;
      static Mutex mu;
      port::BlobStore* raw = base.get();
      MutexLock lock(&mu);
      bases.push_back(std::move(base));
      return std::make_unique<FaultyStore>(
          raw, FaultPlan{[&, slow](uint64_t, absl::string_view name) {
            // Rank 1 writes its shard only after the revoke.
            while (slow && absl::StrContains(name, "PutIfAbsent step-") && !revoked) {
              std::this_thread::yield();
            }
            return Fault::kNone;
          }});
    };
    auto rank = OpenRank(job, session, folder, 3, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    Fill(rank->state.get(), State::At(2, session->rank()));
    ASSERT_TRUE(rank->checkpointer->Save(2).ok());
    session->Revoke();
    if (session->rank() == 0) {
      results[0] = rank->checkpointer->Wait(kLong);
      revoked = true;
    } else {
      results[1] = rank->checkpointer->Wait(kLong);
    }
    EXPECT_TRUE(absl::IsUnavailable(rank->checkpointer->Save(3).status()));
    EXPECT_THAT(session->reported(), IsEmpty());
  });
  EXPECT_TRUE(absl::IsUnavailable(results[0])) << results[0];
  EXPECT_FALSE(results[1].ok());
  job.generation = job.timeline = 3;
  ExpectRestored(job, folder, 1);
}

// The generation is asked for last, so even a revoke that comes while owners are looked for is seen.
TEST_F(EngineTest, ARevokeJustBeforeThePutIsSeen_C3) {
  MemoryStore memory;
  RunRanks({}, [&](FakeSession* session) {
    bool saving = false;
    const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(&memory, FaultPlan{[&](uint64_t, absl::string_view name) {
        if (saving && name == "ListAll manifests/ owners/") session->Revoke();
        return Fault::kNone;
      }});
    };
    auto rank = OpenRank({}, session, "x", 3, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    saving = true;
    ASSERT_TRUE(rank->checkpointer->Save(1).ok());
    EXPECT_TRUE(absl::IsUnavailable(rank->checkpointer->Wait(kLong)));
    EXPECT_FALSE(session->Alive().ok()) << "owners were never looked for";
    EXPECT_THAT(session->reported(), IsEmpty());
  });
}

TEST_F(EngineTest, ALateCommitOfAnOldTimelineDoesNotWin_C3) {
  FakeJob zombie{.generation = 1, .timeline = 1};
  FakeJob resumed{.generation = 2, .timeline = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(zombie, folder, {100}).ok());
  ASSERT_TRUE(SaveSteps(resumed, folder, {110}).ok());
  ASSERT_TRUE(SaveSteps(zombie, folder, {200}).ok());
  resumed.generation = resumed.timeline = 3;
  ExpectRestored(resumed, folder, 110);
}

// The life after it may clean up between its put and its look: nothing lied, and the user is told so.
TEST_F(EngineTest, ALateCommitThatRetentionTakesSaysSo_C3) {
  MemoryStore memory;
  FakeJob zombie{.world_size = 1, .generation = 1, .timeline = 1};
  FakeJob resumed{.world_size = 1, .generation = 2, .timeline = 2};
  bool taken = false;
  const auto retain = [&](uint64_t, absl::string_view call) {
    const auto ids = ListManifests(&memory);
    if (taken || !absl::StartsWith(call, "Get manifests/") || (*ids).empty()) return Fault::kNone;
    if ((*ids).back().timeline != 1) return Fault::kNone;
    taken = true;
    EXPECT_TRUE(DeletePlanned(&memory, {.manifests = {(*ids).back()}, .folders = {(*ids).back()}}).ok());
    return Fault::kNone;
  };
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(&memory, FaultPlan{retain});
  };
  ASSERT_TRUE(SaveSteps(resumed, "x", {110}, 3, factory).ok());
  const absl::Status late = SaveSteps(zombie, "x", {200}, 3, factory);
  EXPECT_TRUE(taken);
  EXPECT_TRUE(absl::IsAborted(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("retention removed it"));
}

TEST_F(EngineTest, ADifferentJobIsRefusedAndShown) {
  const std::string folder = TestFolder();
  FakeJob first{.job = "mnist-1", .world_size = 2, .generation = 7, .timeline = 4};
  ASSERT_TRUE(SaveSteps(first, folder, {10}).ok());
  FakeJob other{.job = "mnist-2", .job_hash = "hash-b", .world_size = 2};
  for (uint64_t generation : {1, 2}) {  // a restart of the refused job is refused as well
    other.generation = generation;
    for (const Restored& r : RestoreAll(other, folder)) {
      EXPECT_TRUE(absl::IsFailedPrecondition(r.status)) << r.status;
      EXPECT_THAT(std::string(r.status.message()), HasSubstr("hash-a"));
      EXPECT_THAT(std::string(r.status.message()), HasSubstr("hash-b"));
      EXPECT_THAT(std::string(r.status.message()), HasSubstr("--fresh"));
    }
  }
  other.resume = "latest";
  ExpectRestored(other, folder, 10);
  FakeJob same{.job = "mnist-3", .world_size = 2};
  ExpectRestored(same, folder, 10);
}

TEST_F(EngineTest, FreshIgnoresTheOldAndRecoversItsOwn) {
  const std::string folder = TestFolder();
  FakeJob first{.job = "mnist-1", .generation = 7, .timeline = 4};
  ASSERT_TRUE(SaveSteps(first, folder, {900}).ok());
  FakeJob fresh{.job = "mnist-2", .job_hash = "hash-b", .resume = "fresh"};
  EXPECT_FALSE(RestoreAll(fresh, folder)[0].step.has_value());
  fresh.generation = fresh.timeline = 2;  // failed before its first commit
  EXPECT_FALSE(RestoreAll(fresh, folder)[0].step.has_value());
  ASSERT_TRUE(SaveSteps(fresh, folder, {5}).ok());
  fresh.generation = fresh.timeline = 3;
  ExpectRestored(fresh, folder, 5);
  // A later launch of the same file continues from the newest owner, not from the highest step.
  FakeJob next{.job = "mnist-3", .job_hash = "hash-b"};
  ExpectRestored(next, folder, 5);
}

TEST_F(EngineTest, FreshSaysWhatItIgnores) {
  const std::string folder = TestFolder();
  const auto told = [&](const FakeJob& job) {
    std::string note;
    RunRanks(job, [&](FakeSession* session) {
      auto rank = OpenRank(job, session, folder, 1);
      ASSERT_TRUE(rank.ok()) << rank.status();
      const auto restored = rank->checkpointer->Restore();
      ASSERT_TRUE(restored.ok()) << restored.status();
      EXPECT_FALSE(restored->has_value());
      note = session->note(kNoteRestore);
    });
    return note;
  };
  EXPECT_THAT(told({.job = "mnist-1", .resume = "fresh"}),
              testing::StartsWith("nothing: no checkpoint is in "));
  ASSERT_TRUE(SaveSteps({.job = "mnist-2"}, folder, {1, 2}).ok());
  EXPECT_THAT(told({.job = "mnist-3", .resume = "fresh"}),
              AllOf(HasSubstr("nothing: --fresh was given, and the 2 checkpoints that are in "),
                    testing::EndsWith(" are ignored, so training begins anew")));
}

TEST_F(EngineTest, ANewLaunchOfTheSameFileOutranksTheOldOne) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({.job = "mnist-1", .generation = 9, .timeline = 9}, folder, {100}).ok());
  FakeJob next{.job = "mnist-2"};  // timelines are counted per job: this is timeline 1 again
  ExpectRestored(next, folder, 100);
  ASSERT_TRUE(SaveSteps(next, folder, {110}).ok());
  next.generation = next.timeline = 2;
  ExpectRestored(next, folder, 110);
}

TEST_F(EngineTest, TheOldOwnerCommitsNothingMore) {
  const std::string folder = TestFolder();
  const FakeJob old{.job = "mnist-1"};
  ASSERT_TRUE(SaveSteps(old, folder, {100}).ok());
  ASSERT_TRUE(SaveSteps({.job = "mnist-2"}, folder, {110}).ok());
  const absl::Status late = SaveSteps(old, folder, {120});
  EXPECT_TRUE(absl::IsFailedPrecondition(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("was taken over by job \"mnist-2\""));
  EXPECT_THAT(std::string(late.message()), HasSubstr("--takeover"));
}

TEST_F(EngineTest, ResumeFromAStepOrAUri) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({.job = "a-1"}, folder, {10, 20, 30}).ok());
  FakeJob job{.job = "a-2", .job_hash = "other", .resume = "20"};
  ExpectRestored(job, folder, 20);
  job.resume = "25";
  job.job = "a-3";
  EXPECT_TRUE(absl::IsNotFound(RestoreAll(job, folder)[0].status));

  const std::string elsewhere = TestFolder();
  job.job = "a-4";
  job.world_size = 2;
  job.resume = "file://" + folder;
  std::vector<Restored> all = RestoreAll(job, elsewhere);
  ASSERT_TRUE(all[1].status.ok()) << all[1].status;
  EXPECT_EQ(all[1].step->step, 30);
  auto store = *OpenDirectoryStore(folder);
  job.resume = absl::StrCat(folder, "/", ManifestKey((*ListManifests(store.get()))[1]));
  all = RestoreAll(job, elsewhere);
  ASSERT_TRUE(all[1].status.ok()) << all[1].status;
  EXPECT_EQ(all[1].step->step, 20);
  ASSERT_TRUE(SaveSteps(job, elsewhere, {21}).ok());
  job.generation = job.timeline = 2;
  ExpectRestored(job, elsewhere, 21);  // recovery inside the run
}

}  // namespace
}  // namespace gtrain::ckpt
