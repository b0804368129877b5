// Tests when the ranks of a grant are started, and why they are not.
#include <cerrno>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_test_world.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(AgentCoreTest, MissingSecretFailsTheStartByName) {
  spec_.secrets["TOKEN"] = {"NOT_SET", ""};
  Welcome();
  StartIt(1, 1, 1);
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kStartFailed);
  EXPECT_THAT(Sent<RankExited>()[0].exit.message, HasSubstr("NOT_SET"));
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, NoRankStartsWhereItsFilesCannotBe) {  // X20
  Welcome();
  StartIt(1, 1, 1);
  Exit(0, 0);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  facts_.run_dir = absl::PermissionDeniedError("/run belongs to another user");
  StartIt(2, 2, 2);
  ASSERT_EQ(Sent<RankExited>().size(), 2u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kStartFailed);
  EXPECT_EQ(Sent<RankExited>()[0].exit.message,
            "the run directory cannot be used: /run belongs to another user. Another place: gtrain launch "
            "--run-dir DIR");
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, MoreRanksThanTheMachineHoldsAreNotBegun) {
  ranks_max_ = 3;
  Welcome();
  StartIt(1, 3, 8);  // those of other machines do not count
  EXPECT_EQ(Commands<keeper::StartRank>().size(), 3u);
  StartIt(2, 4, 4);
  ASSERT_EQ(Sent<RankExited>().size(), 4u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.message, "4 are too many");
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, LogsThatCannotBeWrittenAreSaidOnceAMachineAndTakenBack) {  // P8
  Welcome();
  StartIt(1, 2, 2);
  const auto output = [&](int rank, bool is_stderr, int refused, uint64_t dropped) {
    Step(FromKeeper{kJob, keeper::Output{1, rank, is_stderr, 10, dropped, "text", refused}});
    return Sent<AgentNote>();
  };
  auto notes = output(0, false, ENOSPC, 500);
  ASSERT_EQ(notes.size(), 1u) << "and nothing of a rank that writes too fast";
  EXPECT_EQ(notes[0].kind, kLogsNote);
  EXPECT_THAT(notes[0].text, HasSubstr("/run/logs cannot be written: No space left on device"));
  EXPECT_THAT(output(0, true, ENOSPC, 0), IsEmpty());
  EXPECT_THAT(output(1, false, ENOSPC, 0), IsEmpty());
  EXPECT_THAT(output(0, false, 0, 500), Not(Contains(Field(&AgentNote::kind, kLogsNote))));
  EXPECT_THAT(output(0, true, 0, 0), IsEmpty());
  notes = output(1, false, 0, 0);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].kind, kLogsNote);
  EXPECT_EQ(notes[0].text, "");
}

TEST_F(AgentCoreTest, MasterPortInUseIsItsOwnCause) {
  facts_.port_is_free = false;
  Welcome();
  StartIt(1, 1, 1);
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kAddressInUse);
}

TEST_F(AgentCoreTest, RevokedGenerationNeverStarts) {
  Welcome();
  Step(FromHead{Revoke{{5}, kJob, {4}, EndMode::kReform, absl::Seconds(1), "x"}});
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u) << "nothing of it is here";
  StartIt(4, 1, 1);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
  ASSERT_EQ(Sent<GenerationGone>().size(), 1u);
  StartIt(5, 1, 1);
  EXPECT_EQ(Commands<keeper::StartRank>().size(), 1u);
}

TEST_F(AgentCoreTest, RepeatedGrantStartsOnce) {
  Welcome();
  StartIt(1, 1, 1);
  StartIt(1, 1, 1);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

// A command to a keeper that is leaving is lost with it, and the start would be charged as a loss.
TEST_F(AgentCoreTest, AGrantWaitsForTheLeavingKeeper_P4) {
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = 2;
  Step(FromKeeper{kJob, state});
  Welcome();
  Step(FromHead{StartGeneration{{5}, Grant(3, 1, 1)}});
  EXPECT_TRUE(Commands<keeper::StartRank>().empty());
  Step(KeeperLost{kJob, true, "the keeper has left"});
  EXPECT_FALSE(Commands<keeper::StartRank>().empty());
  EXPECT_TRUE(Sent<RankExited>().empty());
}

// An agent that was started later gives it back, too, from the keeper's note.
TEST_F(AgentCoreTest, GivesBackTheSealOfAGrantAsItCame_H8) {
  Welcome();
  Step(FromHead{StartGeneration{{5}, Grant(1, 1, 1), {kSealed, "mac"}}});
  ASSERT_EQ(Commands<keeper::BeginGeneration>().size(), 1u);
  keeper::GenerationHeld held;
  held.generation = 1;
  held.note = Commands<keeper::BeginGeneration>()[0].note;
  held.ranks = {{0, 100, 5, true, true}};
  for (bool restarted : {false, true}) {
    if (restarted) {
      core_ = AgentCore(Config());
      keeper::State state;
      state.job = kJob.value;
      state.generations = {held};
      Step(FromKeeper{kJob, state});
    }
    Step(HeadDown{});
    Step(HeadUp{"10.0.0.1"});
    EXPECT_TRUE(Sent<AgentHello>().at(0).keeps_seals);
    Step(FromHead{AgentWelcome{
        ClusterId("c1"), {6}, kMe, absl::Seconds(1), absl::Seconds(120), "", /*describe=*/true}});
    ASSERT_EQ(Sent<GenerationDescribed>().size(), 1u) << restarted;
    EXPECT_EQ(Sent<GenerationDescribed>()[0].seal, (GrantSeal{kSealed, "mac"})) << restarted;
  }
}

}  // namespace
}  // namespace gtrain::core
