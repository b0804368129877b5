// Storage that cannot be read or written for a while is not damage: a restore that meets it ends with an
// error that says so and restores nothing older, and nothing is deleted because of it (C9, S7). Every storage
// call of each rank gets every kind of answer, once, three times in a row and for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/crash_test_world.h"
// The engine marks such errors; until it does, their codes alone are judged.
#if __has_include("checkpoint/engine/storage_error.h")
#include "checkpoint/engine/storage_error.h"
#define GTRAIN_STORAGE_ERRORS_ARE_MARKED
#endif

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kCallsMax = 400;  // more than any of these programs makes
constexpr uint64_t kForEver = kNever;

class StorageErrorTest : public testing::TestWithParam<StorageAnswer> {
 protected:
  StorageErrorTest() {
    SetLogSink([](LogLevel, absl::string_view) {});
  }
  ~StorageErrorTest() override { SetLogSink(nullptr); }

  // `body` gets storage as `prepare` made it and the lives of the ranks, one of which meets errors at its
  // call 0, 1, 2, ... until it makes no further call.
  using Prepare = std::function<void(Storage*)>;
  using Body = std::function<void(Storage*, const std::vector<std::shared_ptr<Life>>&)>;
  void FailEveryCall(int world, bool happens, const Prepare& prepare, const Body& body) {
    for (int rank = 0; rank < world; ++rank) {
      for (const uint64_t errors : {uint64_t{1}, uint64_t{3}, kForEver}) {
        if (happens && errors == 3) continue;  // once and for ever tell the same
        for (uint64_t at = 0;; ++at) {
          ASSERT_LT(at, kCallsMax);
          SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", world, " meets ",
                                    errors == kForEver ? "endless" : absl::StrCat(errors),
                                    " errors from its call ", at, happens ? ", which happens" : ""));
          Memory storage;
          ASSERT_NO_FATAL_FAILURE(prepare(&storage));
          const auto life = std::make_shared<Life>(at, errors, GetParam().status, happens);
          ASSERT_NO_FATAL_FAILURE(body(&storage, LivesOf(world, rank, life)));
          ASSERT_FALSE(HasFailure());
          if (!life->met()) {
            ASSERT_GT(at, 0u);
            break;
          }
        }
      }
    }
  }
};

// Checks that the errors of a program are errors of the storage.
void ExpectAStorageErrorOrNone(const MortalRanks& ranks) {
  bool marked = false, failed = false;
  for (const absl::Status& status : ranks.results) {
    EXPECT_FALSE(absl::IsDataLoss(status)) << "taken for damage: " << status;
    EXPECT_FALSE(absl::IsNotFound(status)) << "taken for an empty directory: " << status;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("is not shared")));
    failed = failed || !status.ok();
#ifdef GTRAIN_STORAGE_ERRORS_ARE_MARKED
    marked = marked || IsStorageError(status);
#else
    marked = true;
#endif
  }
  EXPECT_TRUE(marked || !failed) << "not marked as an error of the storage: " << ranks.first_error();
}

TEST_P(StorageErrorTest, AnOpenOrARestoreTakesItForNoDamage_C9_S7) {
  for (const int world : {1, 2}) {
    FakeJob job{.world_size = world};
    FailEveryCall(
        world, /*happens=*/false,
        [&](Storage* storage) {
          job.generation = job.timeline = 1;
          ASSERT_TRUE(SaveInLives(job, storage, {1, 2}, Immortal(job), {.keep = 2}).first_error().ok());
        },
        [&](Storage* storage, const std::vector<std::shared_ptr<Life>>& lives) {
          job.generation = job.timeline = 2;
          for (const auto& life : lives) life->Arm();
          std::atomic<int64_t> step{-2};
          const MortalRanks ranks = ResumeInLives(job, storage, lives, {.keep = 2}, &step);
          ASSERT_NO_FATAL_FAILURE(ExpectAStorageErrorOrNone(ranks));
          if (ranks.first_error().ok()) {
            ASSERT_EQ(step, 2) << "older than the newest, or anew";
          }
          ASSERT_NE(step, 1) << "a rank went on from an older one";
          ASSERT_NE(step, -1) << "a rank began anew";
          // The storage is well again.
          job.generation = job.timeline = 3;
          const absl::StatusOr<int64_t> later = ResumeStep(job, storage, {.keep = 2});
          ASSERT_TRUE(later.ok()) << later.status();
          ASSERT_EQ(*later, 2);
          ASSERT_EQ(ListManifests(storage->Open().get())->size(), 2u) << "something was deleted or made";
        });
    if (HasFailure()) return;
  }
}

// Saves take every answer alike, and have to wait for peers that failed: two of the answers are enough.
class SaveErrorTest : public StorageErrorTest {};

// `happens`: a put whose folder cannot be synced any more, an answer that is lost.
TEST_P(SaveErrorTest, ASaveThatMeetsItDeletesNothingForIt_C1_S7) {
  for (const bool happens : {false, true}) {
    for (const int world : {1, 2}) {
      FakeJob job{.world_size = world};
      FailEveryCall(
          world, happens,
          [&](Storage* storage) {
            job.generation = job.timeline = 1;
            ASSERT_TRUE(SaveStep(job, storage, 1).ok());
          },
          [&](Storage* storage, const std::vector<std::shared_ptr<Life>>& lives) {
            job.generation = job.timeline = 2;
            const MortalRanks ranks = RunProgram(
                job, storage, lives, {.commit_timeout = absl::Milliseconds(30)},
                [&](FakeSession* session, Checkpointer* checkpointer, Weights* state,
                    const Life&) -> absl::Status {
                  const auto restored = checkpointer->Restore();
                  EXPECT_TRUE(restored.ok() && restored->has_value()) << restored.status();
                  lives[static_cast<size_t>(session->rank())]->Arm();
                  for (const int64_t step : {2, 3}) {
                    state->Fill(step, session->rank());
                    GT_ASSIGN_OR_RETURN(const bool saved, checkpointer->Save(step));
                    EXPECT_TRUE(saved);
                    checkpointer->Wait(kLong).IgnoreError();  // a save may fail, the program goes on
                  }
                  return absl::OkStatus();
                });
            job.generation = job.timeline = 3;
            const absl::StatusOr<int64_t> step = ResumeStep(job, storage);
            ASSERT_TRUE(step.ok()) << step.status();
            ASSERT_GE(*step, std::max<int64_t>(ranks.newest_reported(), 1));
            ASSERT_TRUE(SaveStep(job, storage, 4).ok());
            const absl::StatusOr<int64_t> last = ResumeStep(job, storage);
            ASSERT_TRUE(last.ok()) << last.status();
            ASSERT_EQ(*last, 4);
          });
      if (HasFailure()) return;
    }
  }
}

// A generation that resumes while the newest can be read for one rank only must not settle on an older one:
// its next commit would delete the intact newest (C9).
TEST_P(StorageErrorTest, RetentionKeepsTheNewestThatCouldNotBeRead_C9) {
  FakeJob job{.world_size = 2};
  Memory storage;
  ASSERT_TRUE(SaveInLives(job, &storage, {1, 2}, Immortal(job), {.keep = 2}).first_error().ok());
  // Rank 1 cannot read any shard of the newest.
  job.generation = job.timeline = 2;
  const SaveId newest = ListManifests(storage.store())->front();
  const auto program = [&](FakeSession* session) -> absl::Status {
    Weights state(3);
    const auto blind = [&](uint64_t, absl::string_view call) {
      const bool shard = absl::StrContains(call, AttemptName(newest)) && absl::StrContains(call, "rank-");
      return session->rank() == 1 && shard ? Fault::kBefore : Fault::kNone;
    };
    GT_ASSIGN_OR_RETURN(
        auto checkpointer,
        OpenCheckpointer(
            session, {.uri = "x", .keep = 1, .commit_timeout = kLong}, EnvironmentOf(job),
            [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
              return std::make_unique<FaultyStore>(storage.store(), FaultPlan{blind, GetParam().status});
            }));
    GT_RETURN_IF_ERROR(
        checkpointer->AddReplicated("weights", MemoryOf(&state.weights), {3, 1000}, DType::kFloat32));
    GT_RETURN_IF_ERROR(checkpointer->AddPerRank("mine", {&state.mine, sizeof(state.mine)}));
    GT_RETURN_IF_ERROR(checkpointer->Restore().status());
    state.Fill(3, session->rank());
    GT_RETURN_IF_ERROR(checkpointer->Save(3).status());
    return checkpointer->Wait(kLong);
  };
  const MortalRanks ranks =
      RunMortalRanks(job, Immortal(job), [&](FakeSession* session, Life*) { return program(session); });
  EXPECT_FALSE(ranks.first_error().ok()) << "it went on from an older step";
  ASSERT_NO_FATAL_FAILURE(ExpectAStorageErrorOrNone(ranks));
  job.generation = job.timeline = 3;
  const absl::StatusOr<int64_t> step = ResumeStep(job, &storage, {.keep = 2});
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(*step, 2);
}

INSTANTIATE_TEST_SUITE_P(Answers, SaveErrorTest,
                         testing::Values(StorageAnswers().front(), StorageAnswers().back()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Answers, StorageErrorTest, testing::ValuesIn(StorageAnswers()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace gtrain::ckpt
