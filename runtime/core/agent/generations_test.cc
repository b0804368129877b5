// Tests how generations end on a machine, and how an agent takes over what a keeper holds.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(AgentCoreTest, ExitIsRepeatedUntilAcknowledgedThenForgotten) {
  Welcome();
  StartIt(1, 1, 1);
  Exit(0, 3);
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.exit_code, 3);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  EXPECT_EQ(Sent<RankExited>().size(), 1u);
  Step(HeadDown{});
  Step(HeadUp{"10.0.0.1"});
  ASSERT_EQ(Sent<AgentHello>()[0].held.size(), 1u);
  EXPECT_EQ(Sent<AgentHello>()[0].held[0].exited.size(), 1u);
  Step(FromHead{WelcomeOf()});
  EXPECT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  Step(FromHead{AckExit{{5}, kJob, {1}, 0}});
  EXPECT_EQ(Commands<keeper::AckExit>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Forget>().size(), 1u);
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  EXPECT_THAT(Sent<RankExited>(), IsEmpty());
}

TEST_F(AgentCoreTest, RevokeEndsTheGenerationThroughTheKeeper) {
  Welcome();
  StartIt(1, 2, 2);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kStop, absl::Seconds(30), "stopped by ada"}});
  ASSERT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
  const auto end = Commands<keeper::EndGeneration>()[0];
  EXPECT_EQ(end.mode, keeper::End::kStop);
  EXPECT_EQ(end.grace_ms, 30000u);
  EXPECT_EQ(end.reason, "stopped by ada");
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty()) << "said only when the keeper saw it";
}

TEST_F(AgentCoreTest, AKeeperThatHoldsNothingMayGo) {  // P4: its agent died before it could say so
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = 2;
  const std::vector<AgentEffect> effects = Step(FromKeeper{kJob, state});
  ASSERT_EQ(effects.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<keeper::Quit>(std::get<ToKeeper>(effects[0]).command));
}

TEST_F(AgentCoreTest, KeeperOfADistantVersionIsLeftAlone_N13) {
  keeper::State state;
  state.job = kJob.value;
  state.protocol = keeper::kAgentProtocol + 2;
  const std::vector<AgentEffect> effects = Step(FromKeeper{kJob, state});
  ASSERT_EQ(effects.size(), 1u) << "no command that could end a rank";
  const Leave& leave = std::get<Leave>(effects[0]);
  EXPECT_FALSE(leave.after_keepers);
  EXPECT_THAT(std::string(leave.status.message()),
              HasSubstr(absl::StrCat("keeper protocol ", keeper::kAgentProtocol + 2,
                                     ", more than one version away "
                                     "from protocol ",
                                     keeper::kAgentProtocol)));
}

TEST_F(AgentCoreTest, AdoptsWhatAKeeperHolds) {  // P4
  Welcome();
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = state.highest_stopped = 2;
  keeper::GenerationHeld held;
  held.generation = 3;
  held.note = R"({"run_dir":"/run","world_size":2,"timeline":1,"spec":"spec"})";
  held.ranks = {{0, 100, 5, true, true}, {1, -1, 6, false, false}};
  keeper::Exited exit;
  exit.generation = 3;
  exit.rank = 1;
  exit.code = 7;
  held.unacked = {exit};
  state.generations = {held};
  Step(FromKeeper{kJob, state});
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.exit_code, 7);
  EXPECT_THAT(core_.Snapshot(), HasSubstr("revoked 2; generation 3 0=joined 1=exited"));
  Step(HeadDown{});
  Step(HeadUp{"10.0.0.1"});
  const auto hello = Sent<AgentHello>()[0];
  ASSERT_EQ(hello.held.size(), 1u);
  EXPECT_EQ(hello.held[0].revoked, Generation{2});
  EXPECT_TRUE(hello.held[0].stopping) << "as the keeper remembers it (H3)";
  EXPECT_EQ(hello.held[0].live.size(), 1u);
  EXPECT_EQ(hello.held[0].exited.size(), 1u);
  Step(FromHead{AgentQuery{{5}, 9, AgentQuery::Kind::kReadLog, kJob, {3}, 1, true, 5, {}}});
}

// The head would begin the next generation beside ranks of the first.
TEST_F(AgentCoreTest, NothingIsGoneWhileAnOlderGenerationIsHere_N2) {
  Welcome();
  StartIt(1, 1, 2);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(3), "a node was lost"}});
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty());
  Step(FromHead{Revoke{{5}, kJob, {2}, EndMode::kReform, absl::Seconds(3), "another node was lost"}});
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty()) << "2 never came here, but 1 still is";
  StartIt(2, 1, 2);  // late
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty());
  Exit(0, 143);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  ASSERT_EQ(Sent<GenerationGone>().size(), 2u);
  EXPECT_EQ(Sent<GenerationGone>()[0].generation, Generation{1});
  EXPECT_EQ(Sent<GenerationGone>()[1].generation, Generation{2});
}

// Its end overtook the start of its ranks: nothing of it is held any more once it is gone and forgotten.
TEST_F(AgentCoreTest, RanksThatNeverBeganAreNotHeld) {
  Welcome();
  StartIt(1, 2, 2);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(3), "a node was lost"}});
  Step(FromKeeper{kJob, keeper::Gone{1, true, "it was over before it began"}});
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  Step(HeadDown{});
  Step(HeadUp{"10.0.0.1"});
  EXPECT_THAT(Sent<AgentHello>().at(0).held, IsEmpty());
}

TEST_F(AgentCoreTest, WhatIsGoneWaitsForWhatIsOlder_N2) {
  Welcome();
  StartIt(1, 1, 2);
  StartIt(2, 1, 2);
  Exit(0, 1, 2);
  Step(FromKeeper{kJob, keeper::Gone{2, true, ""}});
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty());
  Exit(0, 1, 1);
  Step(FromKeeper{kJob, keeper::Gone{1, false, "stuck"}});
  ASSERT_EQ(Sent<GenerationGone>().size(), 2u);
  EXPECT_FALSE(Sent<GenerationGone>()[0].clean);
}

// The agent died between hearing the revoke and telling the keeper; the next one hears of it first from the
// head.
TEST_F(AgentCoreTest, RevokeThatTheKeeperNeverHeardIsDoneByTheNextAgent_P4) {
  Welcome();
  Step(FromHead{Revoke{{5}, kJob, {3}, EndMode::kReform, absl::Seconds(5), "a node was lost"}});
  keeper::State state;
  state.job = kJob.value;
  keeper::GenerationHeld held;
  held.generation = 3;
  held.note = R"({"run_dir":"/run","world_size":1,"timeline":1,"spec":"spec"})";
  held.ranks = {{0, 100, 5, true, true}};
  state.generations = {held};
  Step(FromKeeper{kJob, state});
  ASSERT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
  EXPECT_EQ(Commands<keeper::EndGeneration>()[0].generation, 3u);
}

TEST_F(AgentCoreTest, LostKeeperMeansLostRanks) {
  Welcome();
  StartIt(1, 2, 2);
  Exit(0, 0);
  Step(KeeperLost{kJob, true, "the keeper was killed"});
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.rank, 1);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kLost);
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  EXPECT_FALSE(core_.HasLiveGeneration());
}

}  // namespace
}  // namespace gtrain::core
