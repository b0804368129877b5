// Tests generations that begin without the processes that are to be started, and those that wait beside them.
#include "runtime/core/head/newcomers.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/probe.h"
#include "gmock/gmock.h"
#include "runtime/core/head/newcomers_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

TEST_F(NewcomersTest, SurvivorsGoOnAloneAndTheOtherJoins) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  const GenerationGrant three = Newest();
  EXPECT_EQ(three.world_size, 3);
  EXPECT_THAT(Processes(three.ranks), ElementsAre(ProcessId{{1}, 1}, ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  EXPECT_EQ(three.ranks[0].local_rank, 0) << "numbered anew on their machine";
  ASSERT_THAT(three.waiting, SizeIs(1));
  EXPECT_EQ(three.waiting[0].node, NodeId("1"));
  EXPECT_EQ(three.waiting[0].rank, 3);
  EXPECT_EQ(three.waiting[0].local_rank, 1);
  EXPECT_EQ(three.waiting[0].process, ProcessId{});
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("3 of 4 ranks go on"));
  IsNow("1", job, 2, 3, RankState::kRunning);
  EXPECT_EQ(Status(job).at("ranks").at(3).at("state"), "starting");
  sent_.clear();
  IsNow("1", job, 2, 3, RankState::kJoined);
  EXPECT_EQ(Status(job).at("ranks").at(3).at("state"), "waiting");
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "each generation makes a step";
  for (const RankPlace& place : three.ranks)
    FromNode(place.node.value, AgentHeartbeat{++beats_, {Step(job, 2, place.rank, 6)}, {}});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 1}, {{2}, 3}}});
  FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 2}, {{1}, 3}}});
  EXPECT_THAT(Newest().waiting, IsEmpty());
  EXPECT_THAT(Processes(Newest().ranks), UnorderedElementsAre(ProcessId{{1}, 1}, ProcessId{{2}, 3},
                                                              ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  EXPECT_EQ(Newest().ranks[1].process, (ProcessId{{2}, 3})) << "the ranks of a machine are neighbours";
  EXPECT_EQ(Status(job).at("restarts"), 1) << "that it joins is not charged";
}

// A copy of the model lies on two ranks: what is left of one is no member, keeps its part, and waits for its
// partner. Only whole copies join.
TEST_F(NewcomersTest, ACopyOfAMeshJoinsWhole) {
  const JobId job = ThreeGoOn("train 2 4 in-twos in-place");
  const GenerationGrant two = Newest();
  EXPECT_EQ(two.world_size, 2);
  EXPECT_EQ(ProcessIn(two, 0).rank % 2, 0);
  EXPECT_EQ(ProcessIn(two, 1).rank % 2, 1);
  ASSERT_THAT(two.waiting, SizeIs(2));
  const bool first_waits = two.waiting[0].process.generation.value != 0;
  const RankPlace& left = two.waiting[first_waits ? 0 : 1];
  const RankPlace& started = two.waiting[first_waits ? 1 : 0];
  EXPECT_EQ(left.cell, left.process.rank % 2) << "the part that it has in memory";
  EXPECT_EQ(started.process, ProcessId{});
  EXPECT_EQ(started.cell, std::nullopt);
  StartRanks(job);
  Steps(job, 2, 6);
  sent_.clear();
  IsNow(left.node.value, job, 2, left.rank, RankState::kJoined);
  Pass(absl::Seconds(30), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "alone it is no copy";
  IsNow(started.node.value, job, 2, started.rank, RankState::kJoined);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  std::map<std::string, std::vector<ProcessId>> live;
  for (int number = 0; number < 4; ++number) {
    const ProcessId process = PlaceOfRank(two, number).process;
    live[PlaceOfRank(two, number).node.value].push_back(
        process.generation.value != 0 ? process : ProcessId{{2}, number});
  }
  for (const auto& [node, processes] : live) FromNode(node, GenerationGone{job, {2}, true, "", processes});
  const GenerationGrant four = Newest();
  EXPECT_EQ(four.world_size, 4);
  EXPECT_THAT(four.waiting, IsEmpty());
  for (int rank = 0; rank < 4; ++rank) {
    const ProcessId process = ProcessIn(four, rank);
    if (process.generation.value == 1)
      EXPECT_EQ(process.rank % 2, rank % 2) << "it holds that part";
    else
      EXPECT_EQ(rank % 2, 1 - *left.cell) << "the new one is the partner of the one that waited";
  }
}

// Four machines of two, a copy on two of them; one of each is lost: what is left are two halves that are
// alike.
TEST_F(NewcomersTest, HalvesThatAreAlikeMakeRoomForTheOthers) {
  for (const char* node : {"1", "2", "3", "4"}) Hello(node, 2);
  const JobId job = Submit("train 4 8 in-fours in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  const GenerationGrant eight = Newest();
  ASSERT_EQ(eight.world_size, 8);
  std::map<std::string, std::vector<int>> of_node;
  for (const RankPlace& place : eight.ranks) of_node[place.node.value].push_back(place.rank);
  std::vector<std::string> lost, left;
  for (const auto& [node, ranks] : of_node) (ranks[0] % 4 == 0 ? lost : left).push_back(node);
  ASSERT_EQ(lost.size(), 2u);
  sent_.clear();
  Pass(absl::Seconds(12), left);
  for (const std::string& node : left)
    FromNode(node, GenerationGone{job, {1}, true, "", {{{1}, of_node[node][0]}, {{1}, of_node[node][1]}}});
  Pass(absl::Seconds(3), left);
  ASSERT_FALSE(Sent<StartGeneration>().empty());
  const GenerationGrant four = Newest();
  EXPECT_EQ(four.world_size, 4);
  EXPECT_THAT(four.waiting, IsEmpty());
  for (const RankPlace& place : four.ranks)
    EXPECT_TRUE(place.process.generation.value == 0 || place.process.rank % 4 == place.rank);
  EXPECT_EQ(std::ranges::count_if(four.ranks,
                                  [](const RankPlace& place) { return place.process.generation.value != 0; }),
            2);
}

// One rank is lost: the copy of which nobody is missing goes on as it is.
TEST_F(NewcomersTest, ALossTakesNoOtherCopyApart) {
  const JobId job = ThreeGoOn("train 2 4 in-twos in-place");
  EXPECT_THAT(Processes(Newest().ranks), ElementsAre(ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  EXPECT_EQ(Newest().world_size, 2) << job.value;
}

// Who was to be the partner does not come up: another is started, although one still waits.
TEST_F(NewcomersTest, APartnerThatEndsIsStartedAnew) {
  const JobId job = ThreeGoOn("train 2 4 in-twos in-place");
  const GenerationGrant two = Newest();
  StartRanks(job);
  Steps(job, 2, 6);
  for (const RankPlace& place : two.waiting) {
    if (place.process.generation.value != 0)
      IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
    else
      Kill(place.node.value, job, 2, place.rank);
  }
  sent_.clear();
  Pass(absl::Seconds(40), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

// P1: a rank was lost while the spare still loaded, so that another process was started in its place: the
// first of the two that is ready has it.
TEST_F(NewcomersTest, ASpareThatIsReadyTakesThePlaceOfOneThatLoads) {
  const JobId job = TwoAndASpare();
  const GenerationGrant two = Newest();
  const std::string node = two.ranks[0].node.value;
  Kill(node, job, 2, 0);
  // The spare had been started anew, and loads.
  const std::string of_spare = two.waiting[0].node.value;
  GenerationGone gone{job, {2}, true, "", {ProcessIn(two, 1)}, {}};
  GenerationGone beside{job, {2}, true, "", {}, {{{2}, 2}}};
  if (of_spare == node) gone.coming = beside.coming;
  FromNode(node, gone);
  if (of_spare != node) FromNode(of_spare, beside);
  const GenerationGrant three = Newest();
  ASSERT_EQ(three.world_size, 2);
  ASSERT_THAT(three.waiting, SizeIs(1));
  StartRanks(job);
  const int fresh = three.ranks[0].process.generation.value == 0 ? 0 : 1;
  IsNow(node, job, 3, 1 - fresh, RankState::kJoined);
  IsNow(node, job, 3, fresh, RankState::kRunning);
  sent_.clear();
  Pass(absl::Seconds(8), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "neither is ready";
  IsNow(three.waiting[0].node.value, job, 3, 2, RankState::kJoined);
  Pass(absl::Seconds(2), {"1", "2"});
  ASSERT_FALSE(Sent<Revoke>().empty());
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("takes the place"));
}

// Ranks that can stand still behind a step are asked to, and interrupted only when they do not come to it.
class PauseTest : public NewcomersTest {
 protected:
  void Say(RankPause pause) {
    RankStatus status = NewcomersTest::Step(job_, 2, 0, 6);
    status.pause = pause;
    FromNode(first_, RanksStarted{job_, {2}, {status}});
  }
  // Three ranks make a step, and a fourth has come up.
  void SetUp() override {
    NewcomersTest::SetUp();
    job_ = ThreeGoOn("train 2 4 in-place");
    StartRanks(job_);
    first_ = Newest().ranks[0].node.value;
    Steps(job_, 2, 6);
    Say(RankPause::kMay);
    sent_.clear();
    IsNow("1", job_, 2, 3, RankState::kJoined);
  }
  JobId job_;
  std::string first_;  // the node of rank 0
};

TEST_F(PauseTest, TheGenerationEndsWhenItsRanksStandStill) {
  ASSERT_THAT(Sent<PauseRanks>(), SizeIs(1));
  EXPECT_EQ(Sent<PauseRanks>()[0].first, first_) << "rank 0 tells the others";
  EXPECT_EQ(Sent<PauseRanks>()[0].second.generation, Generation{2});
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_THAT(Sent<PauseRanks>(), SizeIs(1)) << "once";
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Say(RankPause::kPaused);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
}

TEST_F(PauseTest, WhoDoesNotComeToTheEndOfAStepIsInterrupted) {
  Pass(absl::Seconds(28), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(4), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

TEST_F(PauseTest, ALossDoesNotWaitForThePause) {
  Kill("2", job_, 2, 1);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

// P1: nothing else says why the next generation has one rank less.
TEST_F(PauseTest, WhoIsKilledWhileAllStandStillIsSaid) {
  Say(RankPause::kPaused);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  Kill("2", job_, 2, 1);
  EXPECT_THAT(Events(job_, "warning"), IsEmpty()) << "all of them in one line";
  FromNode("1", GenerationGone{job_, {2}, true, "", {{{1}, 1}, {{2}, 3}}});
  FromNode("2", GenerationGone{job_, {2}, true, "", {{{1}, 3}}});
  const std::vector<std::string> said = Events(job_, "warning");
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_THAT(said[0], HasSubstr("a rank ended by itself while generation 2 was being formed anew"));
  EXPECT_THAT(said[0], HasSubstr("rank 1 on host-2: killed by signal 9 (KILL)"));
  EXPECT_THAT(said[0], HasSubstr(absl::StrCat("gtrain logs ", job_.value, " --generation 2")));
  EXPECT_EQ(Status(job_).at("restarts"), 1) << "and it is charged as before";
}

TEST_F(PauseTest, AnErrorWhileAllStandStillIsSaidAndAnOrdinaryEndIsNot) {
  Say(RankPause::kPaused);
  FromNode(first_, RankExited{Exit(job_, 2, 0, 75)});
  RankExit stopped = Exit(job_, 2, 1, 1);
  stopped.cause = ExitCause::kStopped;
  FromNode("2", RankExited{stopped});
  FromNode("2", RankExited{Exit(job_, 2, 2, 3)});
  FromNode("1", GenerationGone{job_, {2}, true, "", {{{2}, 3}}});
  FromNode("2", GenerationGone{job_, {2}, true, "", {}});
  const std::vector<std::string> said = Events(job_, "warning");
  ASSERT_THAT(said, SizeIs(2));
  EXPECT_THAT(said[0], HasSubstr("charged to nobody: rank 2 on host-2: exit code 3. What"));
  EXPECT_THAT(said[1], HasSubstr("begins anew from nothing")) << "nobody who had a state goes on";
}

TEST_F(PauseTest, WhoStoodStillInVainIsAskedAgain) {
  Kill("1", job_, 2, 3);  // who was to come
  Say(RankPause::kPaused);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "for whom?";
  Say(RankPause::kMay);
  sent_.clear();
  Pass(absl::Seconds(40), {"1", "2"});
  EXPECT_THAT(Sent<PauseRanks>(), SizeIs(1)) << "another is to be started";
  Say(RankPause::kPaused);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

// N1: nothing is re-formed while a node is silent, and by when it answers the ranks have gone on.
TEST_F(PauseTest, WhoStoodStillWhileANodeWasSilentIsAskedAgain) {
  Pass(absl::Seconds(5), {first_});
  Say(RankPause::kPaused);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Say(RankPause::kMay);
  sent_.clear();
  Pass(absl::Seconds(3), {"1", "2"});
  EXPECT_THAT(Sent<PauseRanks>(), SizeIs(1));
}

// P1: a process that was to go on had died when its grant came. The others do not wait for another one.
TEST_F(NewcomersTest, WithoutWhoDiedBeforeItsGrantTheOthersGoOn_P1) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  EXPECT_THAT(Processes(Newest().ranks),
              ElementsAre(ProcessId{{1}, 1}, ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  sent_.clear();
  RankExit lost;
  lost.job = job;
  lost.generation = {2};
  lost.rank = 1;
  lost.cause = ExitCause::kLost;
  FromNode("2", RankExited{lost});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 1}}});
  FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 3}}});
  ASSERT_THAT(Sent<StartGeneration>(), SizeIs(2)) << "at once";
  EXPECT_THAT(Processes(Newest().ranks), UnorderedElementsAre(ProcessId{{1}, 1}, ProcessId{{1}, 3}));
  EXPECT_THAT(Processes(Newest().waiting), ElementsAre(ProcessId{}, ProcessId{}));
  EXPECT_EQ(Status(job).at("restarts"), 2) << "it was no end of gtrain's";
}

// A program that reports no steps is re-formed all the same.
TEST_F(NewcomersTest, WithoutStepsItJoinsAWhileLater) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  AllJoin(job);
  sent_.clear();
  IsNow("1", job, 2, 3, RankState::kJoined);
  Pass(absl::Seconds(58), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(4), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

// Ten that came up one after the other, each within a step of 70 s, had the others compute their first step
// again and again: three and a half minutes without an update.
TEST_F(NewcomersTest, ALongFirstStepIsNotInterrupted) {
  const JobId job = ThreeGoOn("train 2 4 in-place", absl::Seconds(70));
  StartRanks(job);
  AllJoin(job);
  const std::vector<RankPlace> ranks = Newest().ranks;
  sent_.clear();
  IsNow("1", job, 2, 3, RankState::kJoined);
  Pass(absl::Seconds(200), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "three steps are 210 s";
  for (const RankPlace& place : ranks)
    FromNode(place.node.value, AgentHeartbeat{++beats_, {Step(job, 2, place.rank, 10)}, {}});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

// A lone rank of a long step would make two of them before another joins: the one that it was in when its
// generation ended, and the first of the next one.
TEST_F(NewcomersTest, NobodyWaitsForAStepThatCannotBegin) {
  const JobId job = ThreeGoOn("train 2 4 in-place", absl::Seconds(70));
  StartRanks(job);
  const std::vector<RankPlace> ranks = Newest().ranks;
  for (const RankPlace& place : ranks) {
    if (place.rank != 1) IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
  }
  sent_.clear();
  IsNow("1", job, 2, 3, RankState::kJoined);
  Pass(absl::Seconds(4), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "rank 1 may be about to come";
  Pass(absl::Seconds(2), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2)) << "it is in a step of 70 s";
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
}

// P3: it is found out also where spares come and go meanwhile.
TEST_F(NewcomersTest, WhoHangsIsFoundBesideSparesThatComeAndGo_P3) {
  const JobId job = TwoAndASpare();
  Kill("1", job, 2, 2);
  bool found = false;
  for (int i = 0; i < 40 && !found; ++i) {
    const GenerationGrant grant = Newest();
    const uint64_t generation = grant.generation.value;
    IsNow(grant.ranks[0].node.value, job, generation, 0, RankState::kJoined);
    IsNow(grant.ranks[1].node.value, job, generation, 1, RankState::kRunning);
    for (const RankPlace& spare : grant.waiting) {
      IsNow(spare.node.value, job, generation, spare.rank, RankState::kJoined);
      Kill(spare.node.value, job, generation, spare.rank);
    }
    Pass(absl::Seconds(5), {"1", "2"});
    for (const std::string& fault : Events(job, "fault")) found = found || fault.find("hangs") != fault.npos;
    if (Newest().generation == grant.generation && Status(job).at("state") == "RECONFIGURING") GoneBut({});
  }
  EXPECT_TRUE(found);
}

// Nor is the step in which ranks are asked to stand still, where it is the first of its generation and of the
// job, so that no speed is known.
TEST_F(NewcomersTest, ALongStepIsNotInterruptedForWhoComes) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  Pass(absl::Seconds(25), {"1", "2"});
  Steps(job, 2, 6);
  for (const RankPlace& place : Newest().ranks)
    IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
  const std::string first = Newest().ranks[0].node.value;
  RankStatus status = Step(job, 2, 0, 6);
  status.state = RankState::kJoined;
  status.pause = RankPause::kMay;
  FromNode(first, RanksStarted{job, {2}, {status}});
  sent_.clear();
  IsNow("1", job, 2, 3, RankState::kJoined);
  Pass(absl::Seconds(70), {"1", "2"});
  EXPECT_THAT(Sent<PauseRanks>(), SizeIs(1));
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "three steps are 75 s";
  Pass(absl::Seconds(10), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

TEST_F(NewcomersTest, WhoHasNotComeUpWaitsOn) {
  const JobId job = TwoGoOn();
  EXPECT_THAT(Processes(Newest().ranks), UnorderedElementsAre(ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  EXPECT_THAT(Processes(Newest().waiting), UnorderedElementsAre(ProcessId{{2}, 3}, ProcessId{}));
}

// N5: they lose nothing, so they wait for no checkpoint, but for the room to last.
TEST_F(NewcomersTest, WhoGoesOnGrowsWithoutACheckpoint) {
  Hello("1", 2);
  const JobId job = Submit("train 2 6 in-place");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  sent_.clear();
  Hello("2", 2);
  Pass(absl::Seconds(9), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_THAT(Events(job, "room"), ElementsAre("there is room for more ranks: it grows in place"));
  Pass(absl::Seconds(3), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_EQ(Sent<Revoke>()[0].second.reason, "it grows from 2 to 4 ranks");
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
  EXPECT_THAT(Events(job, "resize"), ElementsAre("it grows from 2 to 4 ranks"));
  EXPECT_THAT(Events(job, "fault"), IsEmpty()) << "nothing went wrong";
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  EXPECT_EQ(Newest().world_size, 2);
  EXPECT_EQ(Status(job).at("goodput").at("losses"), 0) << "who comes is no loss";
  EXPECT_THAT(Newest().waiting, SizeIs(2));
  // While these come up there is no other generation for more of them.
  StartRanks(job);
  Steps(job, 2, 6);
  sent_.clear();
  Hello("3", 2);
  Pass(absl::Seconds(30), {"1", "2", "3"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(NewcomersTest, WhoDoesNotGoOnGrowsBehindACheckpointAlone) {
  Hello("1", 2);
  const JobId job = Submit("train 2 4 in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  sent_.clear();
  Hello("2", 2);
  Pass(absl::Minutes(5), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

// P13: the machine that leaves is used to the end, since those that go on lose nothing then.
TEST_F(NewcomersTest, WhoGoesOnUsesAMachineThatLeavesToTheEnd) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 2 4 in-place");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  sent_.clear();
  NodeNotice notice;
  notice.kind = NoticeKind::kLeave;
  notice.left = absl::Seconds(120);
  notice.source = "a test";
  FromNode("1", NoticeSeen{1, notice});
  Pass(absl::Seconds(30), {"1", "2"});
  EXPECT_THAT(Sent<NoticeRanks>(), SizeIs(2)) << "they may save";
  FromNode("1", CheckpointReport{job, {1}, {1}, 6, "m", ""});
  Pass(absl::Seconds(75), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "15 s are left";
  Pass(absl::Seconds(3), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2)) << "12 s are left, and the others go on alone";
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  Pass(absl::Seconds(2), {"1", "2"});
  EXPECT_THAT(Processes(Newest().ranks), UnorderedElementsAre(ProcessId{{1}, 2}, ProcessId{{1}, 3}));
}

TEST_F(NewcomersTest, TooFewDoNotGoOnAlone) {
  ThreeGoOn("train 4 4 in-place");
  EXPECT_EQ(Newest().world_size, 4);
  EXPECT_THAT(Newest().waiting, IsEmpty());
}

// Nor is it anybody's crash: the others go on, and it is started again a while later.
TEST_F(NewcomersTest, ANewcomerThatEndsHoldsNobodyUp) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  Steps(job, 2, 8);
  sent_.clear();
  FromNode("1", RankExited{Exit(job, 2, 3, 1, "ImportError\n")});
  EXPECT_THAT(Sent<AckExit>(), SizeIs(1));
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Events(job, "newcomer"), ElementsAre(HasSubstr("rank 3 on host-1: exit code 1")));
  Pass(absl::Seconds(10), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(10), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
  EXPECT_EQ(Status(job).at("restarts"), 1);
}

TEST_F(NewcomersTest, TheMachineOfOneThatWaitsMayBeLost) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 1 2 one-per-node in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  Kill("2", job, 1, 1);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}}});
  FromNode("2", GenerationGone{job, {1}});
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  sent_.clear();
  Pass(absl::Seconds(12), {"1"});
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("generation"), 2);
  EXPECT_EQ(Status(job).at("ranks").at(1).at("state"), "exited");
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(NewcomersTest, WhoDoesNotComeUpInTimeIsStartedAnew) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  IsNow("1", job, 2, 3, RankState::kRunning);
  Steps(job, 2, 8);
  for (const RankPlace& place : Newest().ranks)
    IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
  sent_.clear();
  Pass(absl::Minutes(60) + absl::Seconds(17), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  EXPECT_THAT(Events(job, "newcomer"), ElementsAre(HasSubstr("has not come up within 1h")));
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 1}}, {{{2}, 3}}});
  FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 2}, {{1}, 3}}});
  EXPECT_THAT(Processes(Newest().waiting), ElementsAre(ProcessId{}));
}

// A process that never comes up would begin its time anew with each generation that it waits through.
TEST_F(NewcomersTest, WhoComesUpIsAsOldAsBeforeInTheNextGeneration) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  IsNow("1", job, 2, 3, RankState::kRunning);
  Steps(job, 2, 8);
  AllJoin(job);
  Pass(absl::Minutes(40), {"1", "2"});
  Kill("1", job, 2, 0);
  FromNode("1", GenerationGone{job, {2}, true, "", {}, {{{2}, 3}}});
  FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 2}, {{1}, 3}}});
  ASSERT_THAT(Processes(Newest().waiting), UnorderedElementsAre(ProcessId{{2}, 3}, ProcessId{}));
  StartRanks(job);
  Steps(job, 3, 10);
  AllJoin(job);
  Pass(absl::Minutes(21), {"1", "2"});
  EXPECT_THAT(Events(job, "newcomer"), ElementsAre(HasSubstr("has not come up within 1h")));
}

TEST_F(NewcomersTest, ASpareTakesThePlaceAtOnce) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value, first = Newest().ranks[0].node.value;
  EXPECT_NE(spare, first) << "there is more room";
  EXPECT_THAT(Status(job).at("reason").get<std::string>(),
              HasSubstr("2 ranks, 1 spare (3 processes packed: "));
  EXPECT_EQ(Status(job).at("spares"), "") << "it waits";
  EXPECT_EQ(Status(job).at("goodput").at("wanted"), 2) << "the spare is none of the ranks that it asks for";
  sent_.clear();
  Pass(absl::Seconds(30), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "nobody needs it";
  Kill(first, job, 2, 0);
  FromNode(first, GenerationGone{job, {2}, true, "", {{{1}, 1}}});
  FromNode(spare, GenerationGone{job, {2}, true, "", {{{2}, 2}}});
  EXPECT_EQ(Newest().world_size, 2);
  EXPECT_THAT(Processes(Newest().ranks), UnorderedElementsAre(ProcessId{{1}, 1}, ProcessId{{2}, 2}));
  EXPECT_THAT(Processes(Newest().waiting), ElementsAre(ProcessId{}));
}

// A spare that came up has no state: steps in the memory of lost ranks are lost with them.
TEST_F(NewcomersTest, ASpareAloneSavesNothing) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value, first = Newest().ranks[0].node.value;
  Kill(first, job, 2, 0);
  FromNode(first, GenerationGone{job, {2}});
  FromNode(spare, GenerationGone{job, {2}, true, "", {{{2}, 2}}});
  EXPECT_EQ(Stored(job).faults.back().committed, std::nullopt);
}

TEST_F(NewcomersTest, ASpareThatEndsIsStartedAgain) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value;
  sent_.clear();
  FromNode(spare, RankExited{Exit(job, 2, 2, 75)});
  EXPECT_THAT(Events(job, "newcomer"), ElementsAre(HasSubstr("it was a spare")));
  Pass(absl::Seconds(10), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(10), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
  EXPECT_EQ(Status(job).at("restarts"), 0);
}

// It was stopped, or died as the generation ended: its keeper does not count it among those that can go on.
TEST_F(NewcomersTest, ASpareThatDoesNotAnswerIsNotReplacedInSilence) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value, first = Newest().ranks[0].node.value;
  Kill(first, job, 2, 0);
  FromNode(first, GenerationGone{job, {2}, true, "", {{{1}, 1}}});
  EXPECT_THAT(Events(job, "newcomer"), IsEmpty());
  FromNode(spare, GenerationGone{job, {2}});
  EXPECT_THAT(Events(job, "newcomer"),
              ElementsAre(HasSubstr("a spare, did not answer when generation 2 ended")));
  FromNode(spare, GenerationGone{job, {2}});
  EXPECT_THAT(Events(job, "newcomer"), SizeIs(1));
}

TEST_F(NewcomersTest, OfASpareThatAnsweredOrThatAStopEndsNothingIsSaid) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value, first = Newest().ranks[0].node.value;
  Kill(first, job, 2, 0);
  FromNode(first, GenerationGone{job, {2}, true, "", {{{1}, 1}}});
  FromNode(spare, GenerationGone{job, {2}, true, "", {{{2}, 2}}});
  StartRanks(job);
  FromClient(ClientStop{job, true, "enough"});
  FromNode(first, GenerationGone{job, {3}});
  FromNode(spare, GenerationGone{job, {3}});
  EXPECT_THAT(Events(job, "newcomer"), IsEmpty());
}

// Nor are ranks interrupted for one where there is no room.
TEST_F(NewcomersTest, WithoutRoomThereIsNoSpare) {
  Hello("1", 2);
  const JobId job = Submit("train 2 2 in-place spare");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  Pass(absl::Minutes(5), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Hello("2", 2);
  Pass(absl::Minutes(9), {"1", "2"});
  ASSERT_FALSE(Sent<Revoke>().empty());
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("spares are started"));
}

// A program that does not stay would have to be restarted for a spare, and have no use for it.
TEST_F(NewcomersTest, NothingIsReformedForASpareOfAProgramThatRestarts) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 2 2 in-place spare");
  StartRanks(job);
  Steps(job, 1, 5);
  Pass(absl::Minutes(70), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_EQ(Status(job).at("generation"), 1);
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("2 ranks packed: 2 on host-"));
}

// The size that worked is that of the ranks, whatever waits beside them.
TEST_F(NewcomersTest, AKillDoesNotThrowAJobWithSparesBack) {
  Hello("1", 4);
  Hello("2", 4);
  const JobId job = Submit("train 1 4 in-place spare");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  ASSERT_EQ(Newest().world_size, 4);
  const auto gone = [&](uint64_t generation, int but) {
    for (const auto& place : GrantsNodes()) {
      GenerationGone gone{job, {generation}};
      for (const RankPlace& rank : last_.ranks) {
        if (rank.node == place && rank.rank != but) gone.kept.push_back(ProcessIn(last_, rank.rank));
      }
      FromNode(place.value, gone);
    }
  };
  last_ = Newest();
  gone(1, -1);
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  IsNow(Newest().waiting[0].node.value, job, 2, 4, RankState::kJoined);
  StayAndStep(job, 2, 9);
  FromClient(ClientScale{job, 3, true});
  last_ = Newest();
  gone(2, -1);
  ASSERT_EQ(Newest().world_size, 3);
  StartRanks(job);
  StayAndStep(job, 3, 12);
  last_ = Newest();
  Kill(last_.ranks[0].node.value, job, 3, 0);
  gone(3, 0);
  EXPECT_EQ(Status(job).at("restarts"), 1) << "charged, and no other size";
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), ::testing::Not(HasSubstr("goes back")));
}

// A program that always ends would interrupt the others four times a minute for ever.
TEST_F(NewcomersTest, WhatEndsAgainAndAgainIsStartedLessAndLessOften) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  const auto ends = [&] {
    StartRanks(job);
    AllJoin(job);
    const GenerationGrant last = Newest();
    Steps(job, last.generation.value, static_cast<int64_t>(6 + last.generation.value));
    ASSERT_THAT(last.waiting, SizeIs(1));
    sent_.clear();
    FromNode("1", RankExited{Exit(job, last.generation.value, 3, 1, "ImportError")});
    last_ = last;
  };
  const auto again = [&] {
    FromNode("1", GenerationGone{job, last_.generation, true, "", {{{1}, 1}}});
    FromNode("2", GenerationGone{job, last_.generation, true, "", {{{1}, 2}, {{1}, 3}}});
  };
  ends();
  Pass(absl::Seconds(17), {"1", "2"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  again();
  ends();
  Pass(absl::Seconds(25), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(10), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
}

// Who runs is not interrupted for the sake of a machine that may be lost.
TEST_F(NewcomersTest, NobodyJoinsWhileAMachineIsSilent) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  Steps(job, 2, 8);
  sent_.clear();
  Pass(absl::Seconds(5), {"2"});
  IsNow("2", job, 2, 0, RankState::kJoined);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

// It comes after all, before it was ended.
TEST_F(NewcomersTest, WhoIsLateJoinsAllTheSame) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  for (const RankPlace& place : Newest().ranks)
    IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
  IsNow("1", job, 2, 3, RankState::kRunning);
  Steps(job, 2, 8);
  for (const RankPlace& place : Newest().ranks)
    IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
  Pass(absl::Minutes(60) + absl::Seconds(5), {"1", "2"});
  ASSERT_THAT(Events(job, "newcomer"), SizeIs(1));
  IsNow("1", job, 2, 3, RankState::kJoined);
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 1}, {{2}, 3}}});
  FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 2}, {{1}, 3}}});
  EXPECT_EQ(Newest().world_size, 4);
}

// Revokes and grants go to each node once and at once, and a round of steps is no reason to look at all ranks
// for each.
TEST_F(NewcomersTest, AThousandRanksCostAFewMessagesANode) {
  constexpr int kNodes = 125;
  const auto looks = [] {
    uint64_t hits = 0;
    for (const auto& [name, count] : Probes()) {
      if (absl::string_view(name) == "head.considers_newcomers") hits += count;
    }
    return hits;
  };
  std::vector<std::string> names;
  for (int node = 1; node <= kNodes; ++node) Hello(names.emplace_back(absl::StrCat(node)), 8);
  const JobId job = Submit("train 900 1000 in-place");
  StartRanks(job);
  last_ = Newest();
  ASSERT_EQ(last_.world_size, 1000);
  Steps(job, 1, 1);
  const std::string lost = last_.ranks[0].node.value;
  const auto gone = [&](uint64_t generation, int but) {
    for (const std::string& name : names) {
      GenerationGone gone{job, {generation}};
      for (const RankPlace& rank : last_.ranks) {
        if (rank.node.value == name && rank.rank != but) gone.kept.push_back(ProcessIn(last_, rank.rank));
      }
      for (const RankPlace& rank : last_.waiting) {
        if (rank.node.value == name) gone.kept.push_back(ProcessId{{generation}, rank.rank});
      }
      FromNode(name, gone);
    }
  };
  sent_.clear();
  Kill(lost, job, 1, 0);
  gone(1, 0);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(kNodes));
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(kNodes));
  last_ = Newest();
  ASSERT_EQ(last_.world_size, 999);
  ASSERT_THAT(last_.waiting, SizeIs(1));
  StartRanks(job);
  const uint64_t before = looks();
  for (const int64_t step : {2, 3}) {
    for (const RankPlace& place : last_.ranks)
      FromNode(place.node.value, AgentHeartbeat{++beats_, {Step(job, 2, place.rank, step)}, {}});
  }
  EXPECT_LE(looks() - before, 5u) << "of 1,998 statuses";
  sent_.clear();
  IsNow(last_.waiting[0].node.value, job, 2, 999, RankState::kJoined);
  gone(2, -1);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(kNodes));
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(kNodes));
  EXPECT_EQ(Newest().world_size, 1000);
}

// What a head with old records would start may be of a generation that is over (H9).
TEST_F(NewcomersTest, NothingIsStartedBesideBeforeRecordsAreSettled_H9) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 1 2 one-per-node in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  Kill("2", job, 1, 1);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}}});
  FromNode("2", GenerationGone{job, {1}});
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  auto& cluster = std::get<ClusterRecord>(disk_.at("cluster"));
  cluster.recovering = true;
  Boot();
  sent_.clear();
  Hello("2", 2);
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
}

// A head that restarts has not heard of the end of one that waited, and nobody says it again.
TEST_F(NewcomersTest, ANewHeadSeesWhoIsNotThereAnyMore) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  Steps(job, 2, 8);
  FromNode("1", RankExited{Exit(job, 2, 3, 1)});
  HeldGeneration one{job, {2}, {1}, {Step(job, 2, 0, 9)}};
  HeldGeneration two{job, {2}, {1}, {Step(job, 2, 1, 9), Step(job, 2, 2, 9)}};
  Boot();
  Hello("1", 2, {one});
  Hello("2", 2, {two});
  EXPECT_EQ(Status(job).at("ranks").at(3).at("state"), "exited");
}

TEST_F(NewcomersTest, JobsThatEndDoNotTakeAnybodyIn) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  Steps(job, 2, 8);
  sent_.clear();
  FromNode("1", RankExited{Exit(job, 2, 0, 0)});
  IsNow("1", job, 2, 3, RankState::kJoined);
  Pass(absl::Seconds(30), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  FromNode("2", RankExited{Exit(job, 2, 1, 0)});
  FromNode("2", RankExited{Exit(job, 2, 2, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
  EXPECT_THAT(Sent<ForgetJob>(), SizeIs(2)) << "that ends what waits";
}

// An agent that died while it ordered a generation: what its keeper has never heard of does not run.
TEST_F(NewcomersTest, WhoStartedIsWhoWasNamed) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  IsNow("1", job, 1, 0, RankState::kRunning);
  EXPECT_EQ(State(job), "STARTING");
  Pass(absl::Seconds(70), {"1"});
  EXPECT_THAT(Events(job, "fault").back(), HasSubstr("rank 1 on host-1 had not started"));
}

}  // namespace
}  // namespace gtrain::core
