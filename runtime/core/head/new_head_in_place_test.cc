// Tests that what processes of a job in place have in memory outlives a head that dies, whenever it dies and
// whoever speaks to the next one first.
#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/unsaved_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class NewHeadInPlaceTest : public UnsavedTest {
 protected:
  // A hello of a node on which these processes wait.
  void Keeps(const std::string& node, int slots, const std::vector<ProcessId>& kept,
             const std::vector<HeldGeneration>& held = {}) {
    kept_hello_ = {{job_, kept, {}}};
    Hello(node, slots, held);
    kept_hello_.clear();
  }
  // Those of a generation whose rank 0 is dead.
  std::vector<ProcessId> LeftOf(const GenerationGrant& last, const std::string& node) {
    std::vector<ProcessId> left;
    for (const RankPlace& place : last.ranks) {
      if (place.rank != 0 && place.node.value == node) left.push_back(ProcessIn(last, place.rank));
    }
    return left;
  }
  HeldGeneration HeldOf(const GenerationGrant& grant, const std::string& node, int64_t step) {
    HeldGeneration held{job_, grant.generation, {grant.generation.value - 1}};
    for (const RankPlace& place : grant.ranks) {
      if (place.node.value != node) continue;
      RankStatus status{job_, grant.generation, place.rank, 200 + place.rank, RankState::kJoined};
      status.stays = true;
      status.step = step;
      held.live.push_back(status);
    }
    return held;
  }
  HeldGeneration OnlyAKilledRank() {
    HeldGeneration held{job_, {1}, {1}};
    held.exited.push_back(Exit(job_, 1, 0, 0));
    held.exited[0].cause = ExitCause::kSignal;
    held.exited[0].signal = 9;
    return held;
  }
  int64_t GoOn() {
    return std::ranges::count_if(Newest().ranks,
                                 [](const RankPlace& place) { return place.process.generation.value != 0; });
  }
};

// ---- who is left saves, and the head restarts meanwhile

TEST_F(NewHeadInPlaceTest, WhoIsLeftIsEndedWhenItHasSaved_H2) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  const GenerationGrant two = Newest();
  Come();
  Pass(absl::Seconds(1), {"2"});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  Boot();
  Hello("2", 2, {HeldOf(two, "2", 8)});
  Pass(absl::Seconds(2), {"2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  FromNode("2", CheckpointReport{job_, {2}, two.timeline, 9, "m"});
  Pass(absl::Seconds(1), {"2"});
  EXPECT_THAT(Sent<Revoke>(), Not(IsEmpty())) << "it would train on with two of four ranks";
}

TEST_F(NewHeadInPlaceTest, AJobThatHasFailedEndsWhenItHasSaved_H2) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  FromNode(Newest().ranks[0].node.value, RankExited{Exit(job_, 1, 0, 1)});
  GoneBut({0});
  const GenerationGrant three = Newest();
  ASSERT_EQ(three.world_size, 3);
  Come();
  Boot();
  Hello("1", 2, {HeldOf(three, "1", 8)});
  Hello("2", 2, {HeldOf(three, "2", 8)});
  Pass(absl::Seconds(2), {"1", "2"});
  FromNode(three.ranks[0].node.value, CheckpointReport{job_, {2}, three.timeline, 9, "m"});
  Pass(absl::Seconds(1), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), Not(IsEmpty()));
  EXPECT_EQ(Sent<Revoke>()[0].second.mode, EndMode::kStop);
}

TEST_F(NewHeadInPlaceTest, WhatIsCommittedInItsGenerationIsEnough_H2) {
  Run("train 4 4 in-place budget0 in=/ckpt/a");
  FromNode(Newest().ranks[0].node.value, RankExited{Exit(job_, 1, 0, 1)});
  GoneBut({0});
  const GenerationGrant three = Newest();
  Come();
  Pass(absl::Seconds(1), {"1", "2"});
  FromNode(three.ranks[0].node.value, CheckpointReport{job_, {2}, three.timeline, 9, "m"});
  Boot();  // before it has acted on that
  Hello("1", 2, {HeldOf(three, "1", 9)});
  Hello("2", 2, {HeldOf(three, "2", 9)});
  Pass(absl::Seconds(2), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), Not(IsEmpty()));
}

// ---- processes wait, and another machine speaks first

TEST_F(NewHeadInPlaceTest, WhoHasTheStateIsAwaitedBeforeOthersAreGrantedIt_H1) {
  Run("train 4 4 in-place");
  Hello("3", 4);
  CrashAgainAndAgain();
  const GenerationGrant last = Newest();
  Boot();
  sent_.clear();
  Hello("3", 4);
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "three processes wait with step 7 elsewhere";
  EXPECT_THAT(Reason(), HasSubstr("this head has not heard its agent yet"));
  Keeps("1", 2, LeftOf(last, "1"));
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  Keeps("2", 2, LeftOf(last, "2"));
  Pass(absl::Seconds(30), {"1", "2", "3"});
  EXPECT_EQ(GoOn(), 3);
}

TEST_F(NewHeadInPlaceTest, WhoWaitsForRoomIsAwaited_H1) {
  Run("train 4 4 in-place");
  FromNode("1", CheckpointReport{job_, {1}, Timeline{1}, 7, "seven"});
  LoseAMachine();
  ASSERT_EQ(State(job_), "WAITING");
  Boot();
  sent_.clear();
  Hello("3", 4);
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  Keeps("2", 2, {{{1}, 2}, {{1}, 3}});
  Pass(absl::Seconds(5), {"2", "3"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "the first machine may only be slow to speak";
  Pass(absl::Seconds(120), {"2", "3"});
  ASSERT_THAT(Sent<StartGeneration>(), Not(IsEmpty())) << "nobody is awaited for ever";
  EXPECT_EQ(GoOn(), 2);
}

TEST_F(NewHeadInPlaceTest, WhoNeverSpeaksAgainIsNotAwaitedForLong_H1) {
  Run("train 4 4 in-place");
  CrashAgainAndAgain();
  Boot();
  sent_.clear();
  Hello("3", 4);
  Pass(absl::Seconds(180), {"3"});
  EXPECT_THAT(Sent<StartGeneration>(), Not(IsEmpty())) << Reason();
}

// The simulator's seed 18903: a machine comes back with processes that have the state, and with a generation
// of another job that has gone on elsewhere meanwhile.
TEST_F(NewHeadInPlaceTest, AMachineOnWhichAnotherJobIsStillEndedIsAwaited_N2) {
  Hello("1", 6);
  RunThere("train 4 4 in-place");
  CrashAgainAndAgain();
  const GenerationGrant last = Newest();
  const JobId other = Submit("other 2 2");
  StartRanks(other);
  Hello("3", 2);
  sent_.clear();
  Pass(absl::Seconds(11), {"3"});
  ASSERT_EQ(Newest().job, other);
  ASSERT_EQ(Newest().ranks[0].node, NodeId("3"));
  const HeldGeneration moved{other, {2}, {1}};
  Boot();
  Hello("3", 2, {moved});
  Hello("2", 4);
  sent_.clear();
  Keeps("1", 6, LeftOf(last, "1"), {HeldGeneration{other, {1}, {}}});
  Pass(absl::Seconds(4), {"1", "2", "3"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "three processes wait with step 7 on 1";
  EXPECT_THAT(Reason(), HasSubstr("processes of another job are still being ended there"));
  FromNode("1", GenerationGone{other, {1}, true, ""});
  Pass(absl::Seconds(60), {"1", "2", "3"});
  ASSERT_THAT(Sent<StartGeneration>(), Not(IsEmpty()));
  EXPECT_EQ(Newest().job, job_);
  EXPECT_EQ(GoOn(), 3);
}

// ---- the head dies between a revoke, which leaves at once, and the record of it

TEST_F(NewHeadInPlaceTest, ANodeWhoseRanksAllWaitHasLostNothing_H1) {
  Run("train 4 4 in-place");
  disk_works_ = false;
  Kill("1", job_, 1, 0);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  disk_works_ = true;
  Boot();
  Keeps("2", 2, {{{1}, 2}, {{1}, 3}});
  Keeps("1", 2, {{{1}, 1}}, {OnlyAKilledRank()});
  if (Sent<StartGeneration>().empty()) {  // what the agents answer to the revoke
    FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
    FromNode("1", GenerationGone{job_, {1}, true, "", {{{1}, 1}}});
  }
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_EQ(GoOn(), 3);
}

TEST_F(NewHeadInPlaceTest, AGenerationThatWasReformedForASpareLosesNothing_H1) {
  Hello("1", 4);
  job_ = Submit("train 2 2 in-place spare");
  StartRanks(job_);
  disk_works_ = false;
  StayAndStep(job_, 1, 500);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  FromNode("1", GenerationGone{job_, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  disk_works_ = true;
  Boot();
  Keeps("1", 4, {{{1}, 0}, {{1}, 1}});
  Pass(absl::Seconds(5), {"1"});
  EXPECT_EQ(GoOn(), 2);
  EXPECT_THAT(Events(job_, "fault"), IsEmpty()) << "nobody has died";
}

// ---- a job is ended before those that wait were heard

TEST_F(NewHeadInPlaceTest, AStopAwaitsThoseThatWait_H1) {
  Run("train 4 4 in-place in=/ckpt/a");
  CrashAgainAndAgain();
  const GenerationGrant last = Newest();
  Boot();
  sent_.clear();
  FromClient(ClientStop{job_, false, "enough"});
  Keeps("1", 2, LeftOf(last, "1"));
  Keeps("2", 2, LeftOf(last, "2"));
  ASSERT_THAT(Sent<StartGeneration>(), Not(IsEmpty())) << "to save what only they know";
  EXPECT_THAT(Sent<ForgetJob>(), IsEmpty());
  EXPECT_THAT(Reason(), HasSubstr("to save what only they know"));
}

TEST_F(NewHeadInPlaceTest, ASecondStopAwaitsNobody_H1) {
  Run("train 4 4 in-place in=/ckpt/a");
  CrashAgainAndAgain();
  Boot();
  FromClient(ClientStop{job_, false, "enough"});
  EXPECT_NE(State(job_), "CANCELLED");
  FromClient(ClientStop{job_, false, "enough"});
  EXPECT_EQ(State(job_), "CANCELLED");
}

TEST_F(NewHeadInPlaceTest, AJobWhoseTimeIsUpAwaitsThoseThatWait_H1) {
  Run("train 4 4 in-place in=/ckpt/a limit60s");
  Pass(absl::Seconds(50), {"1", "2"});
  CrashAgainAndAgain();
  const GenerationGrant last = Newest();
  clock_.Advance(absl::Seconds(15));
  Boot();
  Do(head_->Step(Tick{}, clock_.Now()));
  sent_.clear();
  Keeps("1", 2, LeftOf(last, "1"));
  Keeps("2", 2, LeftOf(last, "2"));
  Pass(absl::Seconds(2), {"1", "2"});
  EXPECT_THAT(Sent<StartGeneration>(), Not(IsEmpty()));
}

TEST_F(NewHeadInPlaceTest, AStopAwaitsAnAgentThatRestarts_W3) {
  Hello("1", 4);
  RunThere("train 4 4 in-place in=/ckpt/a");
  CrashAgainAndAgain();
  const GenerationGrant last = Newest();
  Do(head_->Step(PeerGone{{Role::kNode, "1"}, RouteOf("1")}, clock_.Now()));
  FromClient(ClientStop{job_, false, "enough"});
  EXPECT_NE(State(job_), "CANCELLED") << "three ranks know step 7, saved is 3";
  sent_.clear();
  Keeps("1", 4, LeftOf(last, "1"));
  Pass(absl::Seconds(1), {"1"});
  EXPECT_THAT(Sent<StartGeneration>(), Not(IsEmpty()));
}

TEST_F(NewHeadInPlaceTest, OtherMachinesWaitUntilTheAgentOfThoseThatWaitIsBack_W3) {
  Hello("1", 4);
  RunThere("train 4 4 in-place");
  CrashAgainAndAgain();
  const GenerationGrant last = Newest();
  Do(head_->Step(PeerGone{{Role::kNode, "1"}, RouteOf("1")}, clock_.Now()));
  Hello("2", 4);
  sent_.clear();
  Pass(absl::Seconds(4), {"2"});  // the job tries again after 2 s, and the agent is given up after 6
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "three processes wait with step 7 elsewhere";
  Keeps("1", 4, LeftOf(last, "1"));
  Pass(absl::Seconds(60), {"1", "2"});
  ASSERT_THAT(Sent<StartGeneration>(), Not(IsEmpty()));
  EXPECT_EQ(GoOn(), 3);
}

TEST_F(NewHeadInPlaceTest, WhatTheyKnowIsInTheRecordOfTheFault_H1) {
  Hello("1", 2);
  Hello("2", 2);
  job_ = Submit("train 4 4 in-place in=/ckpt/a");
  StartRanks(job_);
  StayAndStep(job_, 1, 5);
  FromNode("1", CheckpointReport{job_, {1}, Timeline{1}, 50, "fifty"});
  Steps(job_, 1, 400);
  Kill("1", job_, 1, 0);  // and then the machine is lost
  FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  Pass(absl::Seconds(2), {"2"});
  Boot();
  Keeps("2", 2, {{{1}, 2}, {{1}, 3}});
  sent_.clear();
  Pass(absl::Seconds(120), {"2"});
  EXPECT_THAT(Sent<StartGeneration>(), Not(IsEmpty())) << "two ranks know step 400, saved is 50";
}

TEST_F(NewHeadInPlaceTest, TheGrantToSaveWasNotStored_H1) {
  Hello("1", 2);
  Hello("2", 2);
  job_ = Submit("train 4 4 in-place budget0 in=/ckpt/a");
  StartRanks(job_);
  StayAndStep(job_, 1, 7);
  FromNode("1", RankExited{Exit(job_, 1, 0, 1)});
  FromNode("1", GenerationGone{job_, {1}, true, "", {{{1}, 1}}});
  disk_works_ = false;
  FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  disk_works_ = true;
  Boot();
  Keeps("2", 2, {{{1}, 2}, {{1}, 3}});
  EXPECT_NE(State(job_), "FAILED");
  Keeps("1", 2, {{{1}, 1}});
  EXPECT_EQ(Newest().world_size, 3);
}

// ---- of the same head

TEST_F(NewHeadInPlaceTest, AMachineThatWasSilentHasNoHungProcess_N3) {
  Hello("1", 2);
  Hello("2", 0);
  job_ = Submit("train 1 1 in-place");
  StartRanks(job_);
  StayAndStep(job_, 1, 500);
  sent_.clear();
  Pass(absl::Seconds(11), {"2"});
  FromNode("1", GenerationGone{job_, {1}, true, "", {{{1}, 0}}});
  Pass(absl::Seconds(5), {"1", "2"});
  ASSERT_THAT(Sent<StartGeneration>(), Not(IsEmpty()));
  EXPECT_EQ(ProcessIn(Newest(), 0), (ProcessId{{1}, 0}));
}

TEST_F(NewHeadInPlaceTest, WhoWaitedOnAMachineThatRestartedIsGone_N4) {
  Run("train 4 4 in-place");
  FromNode("1", CheckpointReport{job_, {1}, Timeline{1}, 7, "seven"});
  LoseAMachine();
  ASSERT_THAT(Reason(), HasSubstr("2 processes keep its state"));
  Pass(absl::Seconds(12), {});
  connections_["2"].second++;
  Hello("2", 2, {}, "2");
  Pass(absl::Seconds(1), {"2"});
  EXPECT_THAT(Reason(), Not(HasSubstr("keep")));
  Hello("3", 2);
  Pass(absl::Seconds(5), {"2", "3"});
  EXPECT_EQ(GoOn(), 0);
}

// Who is coming up when the head restarts has loaded half of it, and goes on with that.
TEST_F(NewHeadInPlaceTest, WhoComesUpIsTakenAlong_H1) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  IsNow("1", job, 2, 3, RankState::kRunning);
  Steps(job, 2, 8);
  Kill("1", job, 2, 0);
  Boot();
  kept_hello_ = {{job, {}, {{{2}, 3}}}};
  Hello("1", 2);
  kept_hello_ = {{job, {{{1}, 2}, {{1}, 3}}, {}}};
  Hello("2", 2);
  kept_hello_.clear();
  Pass(absl::Minutes(1), {"1", "2"});
  ASSERT_FALSE(Sent<StartGeneration>().empty());
  EXPECT_EQ(Newest().world_size, 2);
  EXPECT_THAT(Processes(Newest().waiting), ::testing::UnorderedElementsAre(ProcessId{{2}, 3}, ProcessId{}));
}

TEST_F(NewHeadInPlaceTest, WhoIsLeftSavesOnAMachineThatLeavesLater_N7) {
  Run("train 4 4 in-place in=/ckpt/a");
  FromClient(ClientDrainNode{"host-2", absl::Hours(1), "repair"}, "", Role::kAdmin);
  sent_.clear();
  Pass(absl::Seconds(61), {"2"});
  FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  ASSERT_THAT(Sent<StartGeneration>(), Not(IsEmpty()));
  const GenerationGrant two = Newest();
  Come();
  Pass(absl::Seconds(1), {"2"});
  EXPECT_THAT(Sent<NoticeRanks>(), Not(IsEmpty()));
  FromNode("2", CheckpointReport{job_, two.generation, two.timeline, 9, "m"});
  Pass(absl::Seconds(1), {"2"});
  GoneBut({});
  Pass(absl::Seconds(5), {"2"});
  EXPECT_EQ(Newest().generation, two.generation) << "once";
  EXPECT_EQ(State(job_), "WAITING");
}

TEST_F(NewHeadInPlaceTest, AJobThatFailsOnAMachineThatLeavesLaterSavesFirst_N7) {
  Hello("1", 4);
  RunThere("train 4 4 in-place budget0 in=/ckpt/a");
  FromClient(ClientDrainNode{"host-1", absl::Hours(1), "repair"}, "", Role::kAdmin);
  FromNode("1", RankExited{Exit(job_, 1, 0, 1)});
  GoneBut({0});
  const GenerationGrant three = Newest();
  ASSERT_EQ(three.world_size, 3);
  Come();
  Pass(absl::Seconds(1), {"1"});
  FromNode("1", CheckpointReport{job_, three.generation, three.timeline, 9, "m"});
  Pass(absl::Seconds(1), {"1"});
  GoneBut({});
  EXPECT_EQ(State(job_), "FAILED");
}

TEST_F(NewHeadInPlaceTest, WhoIsLeftOfThemTriesAgain_N7) {
  Run("train 4 4 in-place in=/ckpt/a");
  LoseAMachine();
  Come();
  Kill("2", job_, 2, 1);
  GoneBut({1});
  Pass(absl::Seconds(2), {"2"});
  ASSERT_EQ(Newest().generation, Generation{3}) << "it knows step 7, saved is 3";
  EXPECT_THAT(Newest().ranks, SizeIs(1));
  Come();
  Pass(absl::Minutes(4), {"2"});
  GoneBut({});
  sent_.clear();
  Pass(absl::Seconds(60), {"2"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "nobody was lost, it only did not save";
}

// Its agent is away, and its rank trains on: a checkpoint has all ranks, so they have made its step.
TEST_F(NewHeadInPlaceTest, ACommittedStepIsMadeByAllAlsoByWhomNobodyHears_N1) {
  Run("train 4 4 in-place");
  ASSERT_EQ(Status(job_).at("step"), 7);
  for (const RankPlace& place : Newest().ranks) {
    if (place.node.value == "1")
      FromNode("1", AgentHeartbeat{++beats_, {Step(job_, 1, place.rank, 600)}, {}});
  }
  EXPECT_EQ(Status(job_).at("step"), 7);
  FromNode("1", CheckpointReport{job_, {1}, Timeline{1}, 600, "m"});
  EXPECT_EQ(Status(job_).at("step"), 600);
  for (const RankPlace& place : Newest().ranks)
    FromNode(place.node.value, RankExited{Exit(job_, 1, place.rank, 0)});
  for (const NodePlace& node : Newest().nodes) FromNode(node.node.value, GenerationGone{job_, {1}});
  EXPECT_EQ(State(job_), "SUCCEEDED");
  EXPECT_EQ(Stored(job_).last_step, 600);
}

// Who goes on has loaded long ago, so `startup` is not the time until the first step of its generation.
TEST_F(NewHeadInPlaceTest, AHangInAReformedGenerationIsEndedByItsLimit_P3) {
  Run("train 4 4 in-place stall20s stall-kill");
  Kill("1", job_, 1, 0);
  GoneBut({0});
  Come();
  sent_.clear();
  Pass(absl::Minutes(3), {"1", "2"});
  EXPECT_THAT(Events(job_, "stall"), IsEmpty());
  Pass(absl::Minutes(1), {"1", "2"});
  EXPECT_THAT(Events(job_, "stall"), Not(IsEmpty()));
  EXPECT_THAT(Sent<Revoke>(), Not(IsEmpty()));
}

TEST_F(NewHeadInPlaceTest, APersonMayAskForASizeWhileOthersJoin) {
  job_ = ThreeGoOn("train 2 4 in-place");
  StartRanks(job_);
  StayAndStep(job_, 2, 6);
  IsNow(Newest().waiting[0].node.value, job_, 2, 3, RankState::kJoined);
  const ClientReply reply = FromClient(ClientScale{job_, 3, false});
  EXPECT_TRUE(reply.ok) << reply.error;
}

}  // namespace
}  // namespace gtrain::core
