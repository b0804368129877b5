// Tests that ranks which are left of a job in place save what only they know before they may be lost.
#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/unsaved_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

class SurvivorSaveTest : public UnsavedTest {
 protected:
  void Saves(int64_t step) {
    const GenerationGrant grant = Newest();
    FromNode("2", CheckpointReport{job_, grant.generation, grant.timeline, step, "m"});
    Pass(absl::Milliseconds(1), {});
  }
  // Node 2 was told that the newest generation is over.
  std::optional<Revoke> Revoked() {
    for (const auto& [node, revoke] : Sent<Revoke>()) {
      if (node == "2" && revoke.generation == Newest().generation) return revoke;
    }
    return std::nullopt;
  }
};

TEST_F(SurvivorSaveTest, FewerThanNeededSaveAndWaitOnInMemory_N7) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  const GenerationGrant two = Newest();
  ASSERT_EQ(two.generation, Generation{2});
  EXPECT_THAT(Processes(two.ranks), UnorderedElementsAre(ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  EXPECT_THAT(two.waiting, IsEmpty()) << "nothing is started for it";
  EXPECT_THAT(Reason(), HasSubstr("2 ranks that are left, to save what only they know"));
  StartRanks(job_);
  IsNow("2", job_, 2, 0, RankState::kJoined);
  Pass(absl::Seconds(1), {"2"});
  EXPECT_THAT(Sent<NoticeRanks>(), IsEmpty()) << "the other has not come to it";
  IsNow("2", job_, 2, 1, RankState::kJoined);
  Pass(absl::Seconds(1), {"2"});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  EXPECT_EQ(Sent<NoticeRanks>()[0].second.generation, Generation{2});
  EXPECT_FALSE(Revoked());
  Saves(8);
  ASSERT_TRUE(Revoked());
  EXPECT_TRUE(Revoked()->keep);
  GoneBut({});
  EXPECT_EQ(State(job_), "WAITING");
  EXPECT_THAT(Reason(), HasSubstr("2 processes keep its state"));
  sent_.clear();
  Pass(absl::Seconds(60), {"2"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "once";
  Hello("3", 2);
  Pass(absl::Seconds(2), {"2", "3"});
  EXPECT_EQ(Newest().world_size, 4);
  EXPECT_EQ(Status(job_).at("restarts"), 1) << "of the machine";
}

TEST_F(SurvivorSaveTest, WhatIsSavedIsNotSavedAgain) {
  Run("train 4 4 in-place in=/ckpt/a");
  FromNode("1", CheckpointReport{job_, {1}, Timeline{1}, 7, "seven"});
  LoseAMachine();
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_EQ(State(job_), "WAITING");
}

TEST_F(SurvivorSaveTest, WhoSavesNothingIsNotAsked) {
  Hello("1", 2);
  Hello("2", 2);
  job_ = Submit("train 4 4 in-place");
  StartRanks(job_);
  StayAndStep(job_, 1, 5);
  LoseAMachine();
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_EQ(State(job_), "WAITING");
}

// A storage that does not answer keeps nobody from waiting in memory.
TEST_F(SurvivorSaveTest, WhoCannotSaveWaitsAllTheSame) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  Come();
  Pass(absl::Seconds(170), {"2"});
  EXPECT_FALSE(Revoked());
  Pass(absl::Seconds(15), {"2"});
  ASSERT_TRUE(Revoked());
  EXPECT_THAT(Revoked()->reason, HasSubstr("no checkpoint in time"));
  GoneBut({});
  EXPECT_EQ(State(job_), "WAITING");
}

TEST_F(SurvivorSaveTest, RoomThatComesMeanwhileIsTaken) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  Come();
  Steps(job_, 2, 8);
  Hello("3", 2);
  Pass(absl::Seconds(15), {"2", "3"});
  ASSERT_TRUE(Revoked());
  GoneBut({});
  EXPECT_EQ(Newest().world_size, 4);
}

// A mesh saves what its whole copies know: here one of two.
TEST_F(SurvivorSaveTest, OfAMeshAWholeCopySaves) {
  Run("train 4 4 in-twos in-place in=/ckpt/a");
  LoseAMachine();
  ASSERT_EQ(Newest().generation, Generation{2});
  EXPECT_EQ(Newest().world_size, 2);
}

TEST_F(SurvivorSaveTest, HalfACopySavesNothing) {
  Run("train 4 4 in-fours in-place in=/ckpt/a");
  LoseAMachine();
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_EQ(State(job_), "WAITING");
}

// A stop between two generations lost what was not saved: nobody was there who could.
TEST_F(SurvivorSaveTest, AStopBetweenTwoGenerationsWaitsForThem) {
  Run("train 4 4 in-place in=/ckpt/a");
  CrashAgainAndAgain();
  EXPECT_THAT(FromClient(ClientStop{job_, false, "enough"}).json, HasSubstr("graceful"));
  ASSERT_EQ(Newest().generation, tried_.Next());
  EXPECT_EQ(Newest().world_size, 3);
  Come();
  EXPECT_FALSE(Revoked());
  Saves(8);
  ASSERT_TRUE(Revoked());
  EXPECT_EQ(Revoked()->mode, EndMode::kStop) << "so they save what they have done since";
  GoneBut({0, 1, 2});
  EXPECT_EQ(State(job_), "CANCELLED");
  EXPECT_THAT(Reason(), HasSubstr("enough"));
}

TEST_F(SurvivorSaveTest, ASecondStopWaitsForNobody) {
  Run("train 4 4 in-place in=/ckpt/a");
  CrashAgainAndAgain();
  FromClient(ClientStop{job_, false, ""});
  ASSERT_EQ(Newest().generation, tried_.Next());
  EXPECT_THAT(Reason(), HasSubstr("to save"));
  FromClient(ClientStop{job_, false, ""});
  ASSERT_TRUE(Revoked());
  EXPECT_EQ(Revoked()->mode, EndMode::kStopNow);
}

TEST_F(SurvivorSaveTest, WhoIsStoppedWhileItSavesEndsAtOnce) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  Come();
  FromClient(ClientStop{job_, false, "enough"});
  ASSERT_TRUE(Revoked());
  EXPECT_EQ(Revoked()->mode, EndMode::kStop) << "as any generation: its ranks save";
  GoneBut({0, 1});
  EXPECT_EQ(State(job_), "CANCELLED");
}

// The program was edited, say: what is started in the place of a lost rank fails until the budget is spent.
TEST_F(SurvivorSaveTest, AJobThatFailsSavesFirst_P1) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  Crash();
  EXPECT_THAT(Reason(), HasSubstr("3 ranks that are left, to save"));
  ASSERT_EQ(Newest().world_size, 3);
  Come();
  Saves(8);
  ASSERT_TRUE(Revoked());
  EXPECT_EQ(Revoked()->mode, EndMode::kStop);
  EXPECT_THAT(Revoked()->reason, HasSubstr("restart budget spent"));
  GoneBut({0, 1, 2});
  EXPECT_EQ(State(job_), "FAILED");
  EXPECT_THAT(Reason(), HasSubstr("exit code 1; restart budget spent"));
  EXPECT_EQ(Status(job_).at("exit_code"), 1);
}

TEST_F(SurvivorSaveTest, WhoIsLeftOfThemSavesBeforeTheEnd) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  Crash();
  for (const int left : {2, 1}) {
    Come();
    const RankPlace last = Newest().ranks.back();
    Kill(last.node.value, job_, Newest().generation.value, last.rank);
    GoneBut({last.rank});
    ASSERT_EQ(Newest().world_size, left);
  }
  Come();
  const GenerationGrant grant = Newest();
  Kill(grant.ranks[0].node.value, job_, grant.generation.value, 0);
  GoneBut({0});
  EXPECT_EQ(State(job_), "FAILED");
  EXPECT_THAT(Reason(), HasSubstr("exit code 1; restart budget spent")) << "why, and not what came then";
}

TEST_F(SurvivorSaveTest, NobodyJoinsWhoEndSoon) {
  Run("train 4 6 in-place budget0 in=/ckpt/a");
  Crash();
  ASSERT_EQ(Newest().world_size, 3);
  Come();
  Steps(job_, 2, 8);
  Hello("3", 4);
  Pass(absl::Seconds(30), {"1", "2", "3"});
  EXPECT_FALSE(Revoked());
}

// H2: why it ends is known to the next head, which has it saved as well.
// H2: why it ends is known to the next head, also where the one before had just told the agents to stop it.
TEST_F(SurvivorSaveTest, ANewHeadKnowsThatItEndsAndWhy_H2) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  Crash(3);
  Come();
  EXPECT_THAT(Reason(), HasSubstr("then it ends: rank 0 on host-1: exit code 3; restart budget spent"));
  const JobRecord record = Stored(job_);
  EXPECT_EQ(record.after_save, Ending::kFail);
  EXPECT_TRUE(record.saves);
  EXPECT_TRUE(Status(job_).at("exit_code").is_null()) << "it runs";
  disk_works_ = false;
  Saves(8);
  ASSERT_TRUE(Revoked());
  disk_works_ = true;
  Boot();
  for (const NodePlace& node : record.grant->nodes)
    Hello(node.node.value, 2, {{.job = job_, .generation = {2}, .revoked = {2}, .stopping = true}});
  for (const NodePlace& node : record.grant->nodes) FromNode(node.node.value, GenerationGone{job_, {2}});
  EXPECT_EQ(State(job_), "FAILED");
  EXPECT_EQ(Status(job_).at("exit_code"), 3);
}

TEST_F(SurvivorSaveTest, ANewHeadDoesNotHaveThemSaveAgain_H2) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  Come();
  Pass(absl::Seconds(185), {"2"});
  ASSERT_TRUE(Revoked());
  GoneBut({});
  ASSERT_EQ(State(job_), "WAITING");
  Boot();
  sent_.clear();
  kept_hello_ = {{job_, {{{1}, 2}, {{1}, 3}}, {}}};
  Hello("2", 2);
  Pass(absl::Seconds(30), {"2"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_EQ(State(job_), "WAITING");
}

// The exit code is that of the error, and not of what comes while the others save.
TEST_F(SurvivorSaveTest, AKillWhileTheySaveHasNoPartInTheExitCode) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  Crash(3);
  Come();
  const RankPlace last = Newest().ranks.back();
  Kill(last.node.value, job_, 2, last.rank);
  GoneBut({last.rank});
  Come();
  Pass(absl::Minutes(4), {"1", "2"});
  GoneBut({});
  EXPECT_EQ(State(job_), "FAILED");
  EXPECT_EQ(Status(job_).at("exit_code"), 3);
}

// A machine of several ranks that has lost one of them has the others save all the same.
TEST_F(SurvivorSaveTest, PartOfAMachineSaves_P1) {
  Run("train 4 4 two-per-node in-place budget0 in=/ckpt/a");
  Crash();
  EXPECT_EQ(State(job_), "RECONFIGURING");
  EXPECT_EQ(Newest().world_size, 3);
}

// P16: who hangs cannot save, and keeps nobody else from it.
TEST_F(SurvivorSaveTest, WhoHangsIsLeftOut_P16) {
  Run("train 4 4 in-place budget0 in=/ckpt/a stall20s stall-kill");
  for (const RankPlace& place : Newest().ranks) {
    if (place.rank != 0)
      FromNode(place.node.value, AgentHeartbeat{++beats_, {Step(job_, 1, place.rank, 8)}, {}});
  }
  sent_.clear();
  for (int i = 0; i < 60 && Sent<Revoke>().empty(); ++i) Pass(absl::Seconds(1), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  FromNode("1", GenerationGone{job_, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  Pass(absl::Seconds(5), {"1", "2"});
  ASSERT_THAT(Sent<StartGeneration>(), ::testing::Not(IsEmpty())) << Reason();
  EXPECT_THAT(Processes(Newest().ranks),
              UnorderedElementsAre(ProcessId{{1}, 1}, ProcessId{{1}, 2}, ProcessId{{1}, 3}));
}

// A number that a person asked for is of no matter to those that only save.
TEST_F(SurvivorSaveTest, WhatAPersonAskedForKeepsNobodyFromSaving) {
  Run("train 3 4 in-place in=/ckpt/a");
  ASSERT_TRUE(FromClient(ClientScale{job_, 4, false}).ok);
  LoseAMachine();
  ASSERT_THAT(Sent<StartGeneration>(), ::testing::Not(IsEmpty())) << Reason();
  EXPECT_EQ(Newest().world_size, 2);
  EXPECT_THAT(Reason(), HasSubstr("2 ranks that are left, to save what only they know"));
}

// W5: who waits on a machine that the job avoids keeps nobody else from saving.
TEST_F(SurvivorSaveTest, WhoIsOnAnAvoidedMachineIsLeftOut_W5) {
  Run("train 4 4 in-place in=/ckpt/a");
  FromNode("1", LinkDown{job_, {1}, 0, 2, "no answer within 5s"});
  Pass(absl::Seconds(20), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  GoneBut({});
  EXPECT_EQ(Newest().generation, Generation{2});
  EXPECT_EQ(Newest().world_size, 2);
}

// What saves with too few ranks is no size to go back to: a crash behind it is charged like any other.
TEST_F(SurvivorSaveTest, NothingGoesBackToTooFew) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  LoseAMachine();
  Come();
  Steps(job_, 2, 8);
  Hello("3", 2);
  Pass(absl::Seconds(15), {"2", "3"});
  GoneBut({});
  ASSERT_EQ(Newest().world_size, 4);
  StartRanks(job_);
  Crash();
  EXPECT_EQ(Stored(job_).size_wanted, 0);
  EXPECT_EQ(Stored(job_).after_save, Ending::kFail) << Reason();
}

// N1: the word that they are to save may be lost with a connection.
TEST_F(SurvivorSaveTest, WhoConnectsAnewIsToldAgain_N1) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  Come();
  Pass(absl::Seconds(1), {"2"});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  HeldGeneration held{job_, {2}};
  for (const RankPlace& place : Newest().ranks)
    held.live.push_back({job_, {2}, place.rank, 100, RankState::kJoined});
  sent_.clear();
  Hello("2", 2, {held});
  EXPECT_THAT(Sent<NoticeRanks>(), SizeIs(1));
}

// The time of a job that is stopped is over by itself.
TEST_F(SurvivorSaveTest, ARankThatNeverComesHoldsUpNobodyForLong) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  StartRanks(job_);
  IsNow("2", job_, 2, 0, RankState::kJoined);
  FromNode("2", RankExited{Exit(job_, 2, 0, 0)});
  Pass(absl::Minutes(6), {"2"});
  EXPECT_TRUE(Revoked());
}

}  // namespace
}  // namespace gtrain::core
