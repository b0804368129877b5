// When SaveIfDue saves: by its policy, on a notice, and at a stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(EngineTest, AnAutomaticIntervalSaysWhyItIsWhatItIs) {
  for (const bool automatic : {false, true}) {
    const FakeJob job{.generation = 3};
    const std::string folder = TestFolder();
    RunRanks(job, [&](FakeSession* session) {
      CheckpointOptions options{.uri = folder};
      if (!automatic) options.every_steps = 1;
      auto rank = OpenRankWith(job, session, options);
      ASSERT_TRUE(rank.ok()) << rank.status();
      for (const int64_t step : {1, 2}) {
        EXPECT_THAT(info(), Not(HasSubstr("saves are due")));  // the first save has nothing to go by
        ASSERT_TRUE(rank->checkpointer->Save(step).ok());
        ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
      }
      EXPECT_EQ(session->policy().empty(), !automatic);
    });
    if (automatic) {
      EXPECT_THAT(info(), HasSubstr("one interruption in 2.7 h is expected (2 seen in "));
    } else {
      EXPECT_THAT(info(), Not(HasSubstr("saves are due")));
    }
  }
}

TEST_F(EngineTest, SaveIfDueFollowsThePolicy) {
  const FakeJob job{.world_size = 2};
  RunRanks(job, [&](FakeSession* session) {
    const auto environment = [](const char* name) -> std::optional<std::string> {
      if (absl::string_view(name) == "GTRAIN_CHECKPOINT_EVERY") return "3 steps";
      return std::nullopt;
    };
    static const std::string folder = TestFolder();
    auto c =
        OpenCheckpointer(session, {.uri = folder, .every = absl::Hours(1)}, environment, &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    std::vector<int64_t> saved;
    for (int64_t step = 0; step <= 7; ++step) {
      auto due = (*c)->SaveIfDue(step, nullptr);
      ASSERT_TRUE(due.ok()) << due.status();
      if (*due) saved.push_back(step);
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    }
    EXPECT_THAT(saved, ElementsAre(3, 6));
  });
  RunRanks(job, [&](FakeSession* session) {
    static const std::string folder = TestFolder();
    // Rank 0's clock decides; rank 1 alone would never save.
    const absl::Duration every = session->rank() == 0 ? absl::Nanoseconds(1) : absl::Hours(1);
    auto rank = OpenRankWith(job, session, {.uri = folder, .every = every});
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto& c = rank->checkpointer;
    auto due = c->SaveIfDue(1, nullptr);
    ASSERT_TRUE(due.ok()) << due.status();
    EXPECT_TRUE(*due);
    EXPECT_TRUE(c->Wait(kLong).ok());
  });
}

TEST_F(EngineTest, APolicyCountsFromTheNewestSaveWhoeverMadeIt) {
  const FakeJob job;
  FakeSession session(job, 0);
  const std::string folder = TestFolder();
  const RealClock clock;
  State state;
  const auto make = [&](CheckpointOptions options) {
    options.uri = folder;
    auto made = MakeCheckpointer(&session, nullptr, options, EnvironmentOf(job), &OpenDirectoryStore);
    EXPECT_TRUE(made.ok()) << made.status();
    EXPECT_TRUE(Register(made->get(), &state).ok());
    return *std::move(made);
  };
  {  // What was passed since then is made up for, once.
    const auto c = make({.every_steps = 10, .last_save = {{.step = 7}}});
    ASSERT_TRUE(c->Start().ok());
    for (const int64_t step : {8, 12, 13, 20, 21}) {
      EXPECT_EQ(*c->SaveIfDue(step, nullptr), step % 10 == 0 || step == 12) << step;
      ASSERT_TRUE(c->Wait(kLong).ok());
    }
  }
  {  // The time that it takes to open it counts.
    const auto c =
        make({.every = absl::Hours(1), .last_save = {{.ago = absl::Hours(1) - absl::Milliseconds(20)}}});
    const Instant made = clock.Now();
    ASSERT_TRUE(Until([&] { return clock.Now() >= made + absl::Milliseconds(20); }));
    ASSERT_TRUE(c->Start().ok());
    EXPECT_TRUE(*c->SaveIfDue(22, nullptr));
    EXPECT_FALSE(*c->SaveIfDue(23, nullptr));
    ASSERT_TRUE(c->Wait(kLong).ok());
  }
  {  // What was restored need not be saved again.
    const auto c = make({.every = absl::Hours(1), .last_save = {{.ago = absl::Hours(2)}}});
    ASSERT_TRUE(c->Start().ok());
    ASSERT_TRUE((*c->Restore()).has_value());
    EXPECT_FALSE(*c->SaveIfDue(24, nullptr));
  }
}

TEST_F(EngineTest, ANoticeSavesOnceAndAtOnce_C13) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRankWith(job, session, {.uri = folder, .every_steps = 100});
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto& c = rank->checkpointer;
    std::vector<int64_t> saved;
    for (int64_t step = 1; step <= 8; ++step) {
      // Rank 1 hears of it a step earlier than rank 0, which decides; it is taken back and comes again.
      const int64_t heard = session->rank() == 0 ? 3 : 2;
      const bool there = (step >= heard && step < 5) || step >= 6;
      session->Notice(there ? std::optional(absl::Seconds(100)) : std::nullopt);
      auto due = c->SaveIfDue(step, nullptr);
      ASSERT_TRUE(due.ok()) << due.status();
      if (*due) saved.push_back(step);
      ASSERT_TRUE(c->Wait(kLong).ok());
    }
    EXPECT_THAT(saved, ElementsAre(3, 6));
  });
}

TEST_F(EngineTest, AStopIsWhatRank0HasHeardAndSavesOnce) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRankWith(job, session, {.uri = folder, .every_steps = 100});
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto& c = rank->checkpointer;
    for (int64_t step = 1; step <= 4; ++step) {
      if (step == (session->rank() == 0 ? 3 : 2)) session->RequestStop();
      auto due = c->SaveIfDue(step, nullptr);
      ASSERT_TRUE(due.ok()) << due.status();
      EXPECT_EQ(*due, step == 3) << step;
      EXPECT_EQ(c->stop_agreed(), step >= 3) << step;
      ASSERT_TRUE(c->Wait(kLong).ok());
    }
  });
}

// A second save is made where SaveIfDue did not save the step last, or Restore has brought another state.
TEST_F(EngineTest, ASaveOfTheStepThatSaveIfDueSavedIsOneCommit) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  const auto commits = [&] { return ListManifests(OpenDirectoryStore(folder)->get())->size(); };
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRankWith(job, session, {.uri = folder, .keep = 100, .every_steps = 2});
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto& c = rank->checkpointer;
    ASSERT_TRUE(*c->SaveIfDue(2, nullptr));
    EXPECT_TRUE(*c->Save(2));  // whether it is committed already or not
    ASSERT_TRUE(c->Wait(kLong).ok());
    EXPECT_TRUE(*c->Save(2));
    ASSERT_TRUE(c->Wait(kLong).ok());
    if (session->rank() == 0) {
      EXPECT_EQ(commits(), 1);
    }
    ASSERT_TRUE(c->Restore().ok());
    EXPECT_TRUE(*c->Save(2));
    ASSERT_TRUE(c->Wait(kLong).ok());
    if (session->rank() == 0) {
      EXPECT_EQ(commits(), 2);
    }
  });
}

}  // namespace
}  // namespace gtrain::ckpt
