#include "runtime/core/head/head_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HeadCoreTest : public HeadTestWorld {};

TEST_F(HeadCoreTest, RunsAJobToItsEnd) {
  Hello("1");
  const JobId job = Submit("train 4 4");
  EXPECT_EQ(State(job), "STARTING");
  const auto grants = Sent<StartGeneration>();
  ASSERT_THAT(grants, SizeIs(1));
  EXPECT_EQ(grants[0].second.grant.world_size, 4);
  EXPECT_EQ(grants[0].second.grant.spec_text, "train 4 4");
  EXPECT_EQ(grants[0].second.grant.master_address, "10.0.0.1");
  EXPECT_EQ(grants[0].second.grant.master_port, 25000);
  EXPECT_EQ(grants[0].second.grant.run_dir, "/runs/train-1");
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  for (int rank = 0; rank < 4; ++rank) FromNode("1", RankExited{Exit(job, 1, rank, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
  EXPECT_EQ(Status(job).at("exit_code"), 0);
  EXPECT_THAT(Sent<AckExit>(), SizeIs(4));
  EXPECT_THAT(Sent<ForgetJob>(), SizeIs(1));
}

// Job 1 of another cluster has the same id.
TEST_F(HeadCoreTest, RunDirectoriesOfTwoClustersDiffer) {
  Hello("1");
  const json reply = json::parse(FromClient(ClientSubmit{"train 1 1", {}, "/runs/{job}-{cluster}"}).json);
  EXPECT_EQ(reply.at("job"), "train-1");
  EXPECT_EQ(reply.at("run_dir"), "/runs/train-1-c");
}

// They are shown in lines of terminals and logs, also to other users.
TEST_F(HeadCoreTest, RunDirectoriesThatCannotBeShownAreRefused) {
  for (const char* bad :
       {"/r/\x1b]52;c;ZXZpbA==\a", "/r/a\nb", "/r/a\tb", "/r/\x7f", "/r/\xC2\x9B", "/r/\u202e", "/r/\xff"}) {
    const ClientReply reply = FromClient(ClientSubmit{"train 1 1", {}, bad});
    EXPECT_FALSE(reply.ok) << bad;
    EXPECT_EQ(static_cast<absl::StatusCode>(reply.code), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(reply.error, HasSubstr("the run directory's path has control characters"));
  }
  EXPECT_TRUE(FromClient(ClientSubmit{"train 1 1", {}, "/r/mit Leerzeichen/\u00e9/{job}"}).ok);
}

// P8: a job of one line may be over before its keeper knows that the line could not be written.
TEST_F(HeadCoreTest, TheLastWordOfALogIsHeardOfAJobThatIsOver) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  ASSERT_EQ(State(job), "SUCCEEDED");
  FromNode("1", AgentNote{job, {1}, 0, kLogsNote, "the disk is full"});
  EXPECT_EQ(Status(job).at("logs"), "the disk is full");
  FromNode("1", AgentNote{job, {1}, 0, kStorageNote, "too late"});
  EXPECT_EQ(Status(job).at("storage"), "");
}

TEST_F(HeadCoreTest, ALargeClusterThatComesBackIsLookedAtTenTimesASecond) {
  const JobId waits = Submit("train 100 100 one-per-node");
  for (int node = 1; node <= 100; ++node) Hello(absl::StrCat(node));
  EXPECT_NE(State(waits), "STARTING") << "not after each hello";
  const JobId small = Submit("small 1 1");
  EXPECT_EQ(State(small), "STARTING") << "a new job is looked at at once";
  ASSERT_TRUE(head_->NextDeadline().has_value());
  ASSERT_LE(*head_->NextDeadline(), clock_.Now() + absl::Milliseconds(100));
  clock_.Advance(*head_->NextDeadline() - clock_.Now());
  Do(head_->Step(Tick{}, clock_.Now()));
  EXPECT_EQ(State(waits), "STARTING");
}

TEST_F(HeadCoreTest, GrantWaitsForTheDiskRevokeDoesNot) {
  Hello("1");
  disk_works_ = false;
  FromClient(ClientSubmit{"train 2 2", {}, "/r"}, "x");
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  disk_works_ = true;
  Pass(absl::Seconds(1), {"1"});
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(1));
  StartRanks(JobId("train-1"));
  disk_works_ = false;
  FromNode("1", RankExited{Exit(JobId("train-1"), 1, 0, 1)});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1)) << "the news of a death never waits";
  EXPECT_THAT(Sent<AckExit>(), IsEmpty()) << "an exit is acknowledged when it is on disk";
}

TEST_F(HeadCoreTest, RankCrashReformsAfterAllProcessesAreGone) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 5)}, {}});
  sent_.clear();
  FromNode("1", RankExited{Exit(job, 1, 0, 1, "ValueError: bad\n")});
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(2));
  EXPECT_EQ(revokes[0].second.generation.value, 1u);
  EXPECT_EQ(revokes[0].second.mode, EndMode::kReform);
  FromNode("2", RankExited{Exit(job, 1, 1, 1, "peer lost\n")});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty()) << "node 2 still has processes";
  FromNode("2", GenerationGone{job, {1}});
  const auto grants = Sent<StartGeneration>();
  ASSERT_THAT(grants, SizeIs(2));
  EXPECT_EQ(grants[0].second.grant.generation.value, 2u);
  EXPECT_EQ(grants[0].second.grant.timeline.value, 2u);
  EXPECT_EQ(grants[0].second.grant.restart_count, 1);
  EXPECT_NE(grants[0].second.grant.master_port, 25000) << "a new port each generation";
  StartRanks(job);
  const json status = Status(job);
  EXPECT_EQ(status.at("state"), "RUNNING");
  EXPECT_EQ(status.at("restarts"), 1);
  EXPECT_EQ(status.at("first_fault").at("rank"), 0) << "the first, not its consequences";
  EXPECT_THAT(status.at("first_fault").at("tail").get<std::string>(), HasSubstr("ValueError"));
}

TEST_F(HeadCoreTest, SpentBudgetFailsWithAReport) {
  Hello("1");
  const JobId job = Submit("train 1 1 budget0");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 3, "boom\n")});
  FromNode("1", GenerationGone{job, {1}});
  const json status = Status(job);
  EXPECT_EQ(status.at("state"), "FAILED");
  EXPECT_EQ(status.at("exit_code"), 3);
  EXPECT_THAT(status.at("reason").get<std::string>(),
              HasSubstr("rank 0 on host-1: exit code 3; restart budget spent"));
  const auto report = std::find_if(sent_.begin(), sent_.end(),
                                   [](const Effect& e) { return std::holds_alternative<WriteFailure>(e); });
  ASSERT_NE(report, sent_.end());
  const json failure = json::parse(std::get<WriteFailure>(*report).document->Json());
  EXPECT_EQ(failure.at("first_fault").at("rank"), 0);
  EXPECT_EQ(failure.at("ranks").at(0).at("last_lines"), "boom\n");
}

TEST_F(HeadCoreTest, LostNodeReformsOnTheRest_N1) {
  for (const char* node : {"1", "2", "3"}) Hello(node);
  const JobId job = Submit("train 2 3 one-per-node");
  StartRanks(job);
  Pass(absl::Seconds(12), {"1", "3"});
  FromNode("1", GenerationGone{job, {1}});
  FromNode("3", GenerationGone{job, {1}});
  StartRanks(job);
  const json status = Status(job);
  EXPECT_EQ(status.at("state"), "RUNNING");
  EXPECT_EQ(status.at("world_size"), 2);
  EXPECT_EQ(status.at("first_fault").at("kind"), "infrastructure");
  EXPECT_THAT(status.at("reason").get<std::string>(), HasSubstr("at most 3 ranks were asked for"));
}

// Its connection lives, so it would never say hello by itself, and the lost message would be lost for good.
TEST_F(HeadCoreTest, ANodeToWhichAMessageWasLostIsAskedToConnectAnew_W9) {
  Hello("1");
  const auto acked = [&] {
    sent_.clear();
    FromNode("1", AgentHeartbeat{++heartbeats_, {}, {}});
    return Sent<HeartbeatAck>().at(0).second;
  };
  EXPECT_FALSE(acked().greet);
  Do(head_->Step(PeerGone{{Role::kNode, "1"}, RouteOf("1")}, clock_.Now()));
  EXPECT_TRUE(acked().greet);
  EXPECT_TRUE(acked().greet) << "the first answer may be lost, too";
  HelloAgain("1");
  EXPECT_TRUE(acked().greet) << "that may have left before";
  Hello("1");
  EXPECT_FALSE(acked().greet) << "on another connection";
}

TEST_F(HeadCoreTest, SilentAgentBesideWorkingRanksIsOnlySuspect_P4) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  const auto pass_with_steps = [&](int from, int to) {  // rank 0 needs rank 1 for every step
    for (int step = from; step < to; ++step) {
      FromNode("1", AgentHeartbeat{++heartbeats_, {StepOf(job, 0, step)}, {}});
      Pass(absl::Seconds(1), {"1"});
    }
  };
  pass_with_steps(0, 30);
  EXPECT_EQ(State(job), "RUNNING") << "30 s without its agent, but its rank works";
  Pass(absl::Seconds(5), {"1"});
  EXPECT_EQ(State(job), "RECONFIGURING") << "no step any more: the node is gone";
}

TEST_F(HeadCoreTest, RateIsOfTheSlowestRankOverSeconds) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  for (int second = 0; second < 10; ++second) {  // ten steps a second, the ranks seen at different moments
    FromNode("1", AgentHeartbeat{++heartbeats_, {StepOf(job, 0, 10 * second + 9)}, {}});
    Pass(absl::Milliseconds(500), {"1"});
    FromNode("1", AgentHeartbeat{++heartbeats_, {StepOf(job, 1, 10 * second)}, {}});
    Pass(absl::Milliseconds(500), {"1"});
  }
  EXPECT_NEAR(Status(job).at("steps_per_second").get<double>(), 10, 1);
}

// A program that reports every hundredth step is seen to step on as long as one report may take.
TEST_F(HeadCoreTest, RanksThatReportSeldomSpareASilentAgent_P4) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  int step = 0;
  const auto report = [&](const std::vector<std::string>& nodes) {
    step += 100;
    FromNode("1", AgentHeartbeat{++heartbeats_, {StepOf(job, 0, step)}, {}});
    if (nodes.size() > 1) FromNode("2", AgentHeartbeat{++heartbeats_, {StepOf(job, 1, step)}, {}});
    for (int second = 0; second < 20; ++second) Pass(absl::Seconds(1), nodes);
  };
  for (int i = 0; i < 3; ++i) report({"1", "2"});
  report({"1"});  // the agent of node 2 stands still for 20 s
  EXPECT_EQ(State(job), "RUNNING");
  report({"1", "2"});
  EXPECT_EQ(State(job), "RUNNING");
}

TEST_F(HeadCoreTest, GraceOfAnAgentEnds_P4) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  for (int step = 0; step < 62; ++step) {
    FromNode("1", AgentHeartbeat{++heartbeats_, {StepOf(job, 0, step)}, {}});
    Pass(absl::Seconds(1), {"1"});
  }
  EXPECT_EQ(State(job), "RECONFIGURING");
}

TEST_F(HeadCoreTest, OnlyNodeIsNotGivenUpBeforeTheGrace_P4) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Pass(absl::Seconds(55), {});
  EXPECT_EQ(State(job), "RUNNING");
  Pass(absl::Seconds(7), {});
  EXPECT_EQ(State(job), "WAITING");
}

TEST_F(HeadCoreTest, BelowTheMinimumWaitsAndResumesByItself_N7) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  Pass(absl::Seconds(12), {"1"});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "WAITING");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("it resumes by itself"));
  Hello("3");
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("generation"), 2);
}

// After a restart of the head the copy may be the first to speak.
TEST_F(HeadCoreTest, HeadRestartLeavesRunningRanksAlone_H1) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Boot();
  EXPECT_EQ(head_->epoch().value, 2u);
  EXPECT_EQ(State(job), "RUNNING");
  // Nobody is declared dead inside the rejoin window (fault W13).
  Pass(absl::Seconds(15), {});
  EXPECT_EQ(State(job), "RUNNING");
  HeldGeneration held{job, {1}, {0}, {Step(job, 1, 0, 7), Step(job, 1, 1, 8)}, {}};
  sent_.clear();
  Hello("1", 4, {held});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_EQ(Status(job).at("step"), 7);
  for (int rank = 0; rank < 2; ++rank) FromNode("1", RankExited{Exit(job, 1, rank, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
}

TEST_F(HeadCoreTest, ExitDuringAHeadOutageIsLearntFromTheHello_H1) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Boot();
  HeldGeneration held{job, {1}, {0}, {Step(job, 1, 1, 8)}, {Exit(job, 1, 0, 1)}};
  Hello("1", 4, {held});
  EXPECT_EQ(State(job), "RECONFIGURING");
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

// The agent forgets an exit when it is acknowledged, so from then on the head alone has to know it.
TEST_F(HeadCoreTest, AcknowledgedExitSurvivesTheHead_H1) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  disk_works_ = false;
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  EXPECT_THAT(Sent<AckExit>(), IsEmpty()) << "acknowledged before it is on disk";
  disk_works_ = true;
  FromNode("1", AgentHeartbeat{++heartbeats_, {}, {}});
  EXPECT_THAT(Sent<AckExit>(), SizeIs(1));
  Boot();
  Hello("1", 4, {HeldGeneration{job, {1}, {0}, {Step(job, 1, 1, 8)}, {}}});
  FromNode("1", RankExited{Exit(job, 1, 1, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
}

TEST_F(HeadCoreTest, NobodyDiesInTheRejoinWindow_W13) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  Boot();
  HeldGeneration held{job, {1}, {0}, {Step(job, 1, 0, 7)}, {}};
  Hello("1", 4, {held});
  sent_.clear();
  Pass(absl::Seconds(18), {"1"});  // longer than a silence that is deadly otherwise
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(5), {"1"});
  EXPECT_EQ(State(job), "RECONFIGURING");
}

// A head that died before it wrote a revoke down finishes it when a node says that the generation is revoked.
TEST_F(HeadCoreTest, RevokeThatWasNeverWrittenDownIsFinished) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Boot();
  HeldGeneration held{job, {1}, {1}, {}, {}};
  Hello("1", 4, {held});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(Status(job).at("generation"), 2);
}

// One look at all ranks for each status, and at all exits for each of those, was 17 s a round at 4,000 ranks;
// with these it would be hours, and the limit of this program is minutes.
TEST_F(HeadCoreTest, ARoundOfManyRanksOfWhichHalfHaveEnded) {
  constexpr int kRanks = 20'000;
  Hello("1", kRanks);
  const JobId job = Submit(absl::StrCat("train ", kRanks, " ", kRanks));
  StartRanks(job);
  HeldGeneration held{job, {1}};
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank % 2 == 0) held.exited.push_back(Exit(job, 1, rank, 0));
    if (rank % 2 == 1) held.live.push_back(StepOf(job, rank, 1));
  }
  Hello("1", kRanks, {held});
  EXPECT_EQ(Status(job).at("step"), 1);
  for (int step : {2, 3}) {
    AgentHeartbeat heartbeat{++heartbeats_, {}, {}};
    for (int rank = 1; rank < kRanks; rank += 2) heartbeat.changed.push_back(StepOf(job, rank, step));
    FromNode("1", heartbeat);
    EXPECT_EQ(Status(job).at("step"), step);
  }
  FromNode("1", AgentHeartbeat{++heartbeats_, {StepOf(job, 1, 9)}, {}});
  EXPECT_EQ(Status(job).at("step"), 3) << "where its slowest running rank is";
}

// All ranks of the generation have ended, but a descendant of theirs may still run, so only "gone" releases
// it.
TEST_F(HeadCoreTest, HeldWithoutLiveRanksIsNotReleased_P6) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  Hello("1", 4, {HeldGeneration{job, {1}, {1}, {}, {}}});
  Pass(absl::Seconds(3), {"1"});
  EXPECT_EQ(Status(job).at("generation"), 1);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  EXPECT_EQ(Status(job).at("generation"), 2);
}

// A job is over when its time to end is up, though a machine has not confirmed it. The generation that this
// machine still holds when it comes back keeps its room until the agent says "gone": the next job would run
// beside it.
TEST_F(HeadCoreTest, WhatANodeHoldsOfAJobThatIsOverKeepsItsRoom_P6) {
  Hello("1");
  const JobId job = Submit("train 4 4");
  StartRanks(job);
  FromClient(ClientStop{job, true});
  Pass(absl::Minutes(5), {"1"});
  ASSERT_EQ(Stored(job).state, JobState::kCancelled);
  ASSERT_FALSE(Stored(job).unreleased.empty());
  Boot();
  Hello("1", 4, {HeldGeneration{job, {1}, {1}, {Step(job, 1, 0, 7)}, {Exit(job, 1, 1, 0)}}});
  EXPECT_FALSE(Sent<Revoke>().empty());
  EXPECT_FALSE(Sent<AckExit>().empty());
  EXPECT_FALSE(Sent<ForgetJob>().empty());
  const JobId next = Submit("train 4 4");
  Pass(absl::Seconds(3), {"1"});
  EXPECT_EQ(Status(next).at("generation"), 0);
  EXPECT_THAT(Status(next).at("blocked_by").dump(),
              HasSubstr(absl::StrCat("processes of ", job.value, ", which is over, may still run there")));
  const json node = json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0);
  EXPECT_EQ(node.at("cpus_free"), 0) << "as the placement sees it";
  EXPECT_EQ(node.at("jobs").at(0), job.value);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  EXPECT_EQ(Status(next).at("generation"), 1);
  EXPECT_TRUE(Stored(job).unreleased.empty());
}

// The room stays taken also when the next generation of the job is elsewhere (found by the simulator, seed
// 659).
TEST_F(HeadCoreTest, WhatAnOldGenerationHoldsKeepsItsRoom_P6) {
  Hello("1");
  const JobId job = Submit("train 4 4");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  Pass(absl::Minutes(5), {"1"});  // its agent lives and confirms nothing
  Hello("2");
  Pass(absl::Minutes(1), {"1", "2"});
  ASSERT_EQ(Status(job).at("generation"), 2) << "on the other node";
  const JobId next = Submit("other 4 4");
  Pass(absl::Seconds(3), {"1", "2"});
  EXPECT_EQ(Status(next).at("generation"), 0);
  EXPECT_THAT(Status(next).at("blocked_by").dump(),
              HasSubstr("an ended generation of train-1 may still run"));
  EXPECT_THAT(Status(next).at("blocked_by").dump(), HasSubstr("when its agent says that they are gone"));
  FromNode("1", GenerationGone{job, Stored(job).revoked});
  Pass(absl::Seconds(3), {"1", "2"});
  EXPECT_EQ(Status(next).at("generation"), 1);
}

// Agents remember a stop as a person's word: what re-forms a job is never sent as one (H1).
TEST_F(HeadCoreTest, AnEndThatIsSaidAgainIsNoStop) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  Pass(config_.reform_grace + absl::Seconds(5), {"1"});
  sent_.clear();
  Hello("1", 4, {HeldGeneration{job, {1}, {0}, {}, {}}});
  ASSERT_FALSE(Sent<Revoke>().empty());
  for (const auto& [node, revoke] : Sent<Revoke>()) EXPECT_EQ(revoke.mode, EndMode::kReform);
}

// An agent repeats its hello until it is answered. One that was sent before the grant arrived does not say
// that the grant's ranks are not there: the next generation would begin beside them (found by the simulator).
TEST_F(HeadCoreTest, AHelloThatCrossedAGrantReleasesNothing_N2) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  AgentHello again{.cluster = ClusterId("c"), .incarnation = Incarnation("1"), .hostname = "host-1"};
  again.address = "10.0.0.1";
  again.inventory.cpus = 4;
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  sent_.clear();
  FromNode("1", again);
  Pass(absl::Seconds(2), {"1"});
  EXPECT_EQ(Status(job).at("generation"), 1);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  EXPECT_EQ(Status(job).at("generation"), 2);
}

TEST_F(HeadCoreTest, LostGrantIsSentAgainLostKeeperIsAFault_P4) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  sent_.clear();
  Hello("1");
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(1)) << "same incarnation, nothing started: resend";
  StartRanks(job);
  Hello("1");
  EXPECT_EQ(State(job), "RECONFIGURING");
}

TEST_F(HeadCoreTest, StopOnceTwice) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  sent_.clear();
  FromClient(ClientStop{job});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_EQ(Sent<Revoke>()[0].second.mode, EndMode::kStop);
  EXPECT_EQ(Sent<Revoke>()[0].second.grace, absl::Seconds(30));
  EXPECT_EQ(State(job), "RUNNING") << "until nothing is left";
  FromClient(ClientStop{job});
  EXPECT_EQ(Sent<Revoke>().back().second.mode, EndMode::kStopNow);
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "CANCELLED");
}

TEST_F(HeadCoreTest, QueuedJobStopsAtOnceAndExplainsItselfBefore) {
  Hello("1");
  const JobId first = Submit("first 4 4");
  const JobId second = Submit("second 2 2");
  EXPECT_EQ(State(second), "QUEUED");
  const json why = json::parse(FromClient(ClientWhy{second}).json);
  EXPECT_EQ(why.at("blocked_by").at(0).at("held_by").at(0), first.value);
  EXPECT_THAT(why.at("blocked_by").at(0).at("unblocked_by").get<std::string>(),
              HasSubstr("when first-1 ends"));
  FromClient(ClientStop{second});
  EXPECT_EQ(State(second), "CANCELLED");
}

TEST_F(HeadCoreTest, NeverFitsFailsOnlyWhenTheClusterIsComplete) {
  config_.expected_nodes = 1;
  Boot();
  const JobId early = Submit("early 9 9");
  EXPECT_EQ(State(early), "WAITING");
  Hello("1");
  EXPECT_EQ(State(early), "FAILED");
  EXPECT_THAT(Status(early).at("reason").get<std::string>(),
              HasSubstr("can never fit this cluster: needs 9 ranks; there is room for 4"));
}

TEST_F(HeadCoreTest, AddressInUseIsFreeAndKeepsTheTimeline) {
  Hello("1");
  const JobId job = Submit("train 1 1 budget0");
  RankExit exit = Exit(job, 1, 0, 0);
  exit.cause = ExitCause::kAddressInUse;
  FromNode("1", RankExited{exit});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(2), {"1"});
  const json status = Status(job);
  EXPECT_EQ(status.at("generation"), 2);
  EXPECT_EQ(status.at("timeline"), 1);
  EXPECT_EQ(status.at("restarts"), 0);
}

TEST_F(HeadCoreTest, RepeatedSubmitMakesOneJob_H15) {
  const ClientReply first = FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "same");
  EXPECT_EQ(FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "same"), first);
  Boot();
  EXPECT_EQ(FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "same"), first) << "also after a head restart";
  EXPECT_THAT(head_->Snapshot().jobs, SizeIs(1));
}

TEST_F(HeadCoreTest, AuthorityComesFromTheKey_X5) {
  Hello("1");
  EXPECT_FALSE(FromClient(ClientSubmit{"a 1 1", {}, "/r"}, "", Role::kReadOnly).ok);
  EXPECT_FALSE(FromClient(ClientStatus{}, "", Role::kNode).ok);
  EXPECT_FALSE(FromClient(ClientShutdown{}, "", Role::kUser).ok);
  EXPECT_TRUE(FromClient(ClientStatus{}, "", Role::kReadOnly).ok);
  EXPECT_EQ(head_->counters().denied, 3u);
  Do(head_->Step(PeerMessage{{Role::kUser, "user1"}, "client", "", AgentHello{}}, clock_.Now()));
  EXPECT_EQ(head_->counters().denied, 4u);
  EXPECT_THAT(head_->Snapshot().jobs, IsEmpty());
}

// The namespace of a user is its name: every key with that name reaches its jobs, after a head restart too;
// no other but administrators does.
TEST_F(HeadCoreTest, UsersReachOnlyTheirOwnJobs_X5) {
  Hello("1");
  const JobId job(
      json::parse(FromClient(ClientSubmit{"a 1 1", {}, "/r"}, "", Role::kUser, "ann").json).at("job"));
  Boot();
  const ClientRequestBody bodies[] = {ClientStatus{job},          ClientWhy{job},           ClientLogs{job},
                                      ClientExec{job, 0, {"id"}}, ClientEvents{job, 0, {}}, ClientStop{job}};
  for (const ClientRequestBody& body : bodies) {
    const ClientReply bob = FromClient(body, "", Role::kUser, "bob");
    EXPECT_EQ(bob.code, static_cast<int>(absl::StatusCode::kPermissionDenied)) << body.index();
    EXPECT_THAT(bob.error, HasSubstr("belongs to ann"));
  }
  EXPECT_TRUE(FromClient(ClientStatus{}, "", Role::kUser, "bob").ok) << "the list is for everyone";
  EXPECT_TRUE(FromClient(ClientStatus{job}, "", Role::kAdmin, "root").ok);
  EXPECT_TRUE(FromClient(ClientStop{job}, "", Role::kUser, "ann").ok);
  EXPECT_EQ(head_->counters().denied, std::size(bodies));
}

// An audit line says who asked, from where, for what, with which outcome; reads leave no line, a repeated
// request no second one.
TEST_F(HeadCoreTest, ChangesAndRefusalsAreAudited) {
  Hello("1");
  const std::string id = "request-once";
  (void)FromClient(ClientSubmit{"a 1 1", {}, "/r"}, id, Role::kUser, "ann");
  (void)FromClient(ClientSubmit{"a 1 1", {}, "/r"}, id, Role::kUser, "ann");
  (void)FromClient(ClientStatus{}, "", Role::kReadOnly);
  (void)FromClient(ClientStop{JobId("a-1")}, "", Role::kReadOnly, "eve");
  ASSERT_THAT(audit_, SizeIs(2));
  EXPECT_EQ(audit_[0], (AuditEntry{{Role::kUser, "user1", "ann"}, "10.0.0.9", "submit", "a-1", "ok"}));
  EXPECT_EQ(audit_[1].action, "stop");
  EXPECT_EQ(audit_[1].peer.name, "eve");
  EXPECT_THAT(audit_[1].outcome, HasSubstr("denied: "));
}

TEST_F(HeadCoreTest, RefusalsCannotFillTheAuditLog_X16) {
  for (int i = 0; i < 500; ++i) (void)FromClient(ClientShutdown{}, "", Role::kReadOnly);
  EXPECT_THAT(audit_, SizeIs(60));
  clock_.Advance(absl::Minutes(2));
  (void)FromClient(ClientShutdown{}, "", Role::kReadOnly);
  ASSERT_THAT(audit_, SizeIs(61));
  EXPECT_THAT(audit_.back().outcome, HasSubstr("440 refusals"));
}

// The reply of a change waits for the disk that holds its audit line.
TEST_F(HeadCoreTest, NoReplyBeforeItsAuditLine) {
  disk_works_ = false;
  EXPECT_EQ(FromClient(ClientShutdown{}, "", Role::kReadOnly).id, "none");
}

TEST_F(HeadCoreTest, RevokedNodeIsGoneAtOnce) {
  Hello("1", 1);
  Hello("2", 1);
  Do(head_->Step(StoreRoom{true, "the disk is full", true}, clock_.Now()));
  const ClientReply full = FromClient(ClientRevokeNode{"host-2", "stolen"}, "", Role::kAdmin, "root");
  EXPECT_THAT(full.error, HasSubstr("nothing was done: the disk is full"));
  EXPECT_THAT(head_->Snapshot().nodes, SizeIs(2)) << "its key would still be let in";
  Do(head_->Step(StoreRoom{}, clock_.Now()));
  const JobId job = Submit("train 1 2");
  StartRanks(job);
  ASSERT_EQ(Status(job).at("ranks").size(), 2u);
  (void)FromClient(ClientRevokeNode{"host-2", "stolen"}, "", Role::kAdmin, "root");
  bool refused = false, asked = false;
  for (const Effect& effect : sent_) {
    if (const auto* e = std::get_if<RefusePeer>(&effect))
      refused = refused || (e->revoked && e->route == "route-2");
    if (const auto* e = std::get_if<ServiceRequest>(&effect)) {
      const auto& body = std::get<ClientRequest>(e->message).body;
      asked = asked || std::get<ClientRevokeNode>(body).node == "2";
    }
  }
  EXPECT_TRUE(refused);
  Hello("2", 1);  // before the service has taken its key off the list
  EXPECT_THAT(head_->Snapshot().nodes, SizeIs(1));
  EXPECT_TRUE(asked) << "the service gets the id, whatever name was used";
  EXPECT_THAT(head_->Snapshot().nodes, SizeIs(1));
  EXPECT_FALSE(disk_.contains("node/2"));
  EXPECT_THAT(std::string(Status(job).at("last_fault").at("message")), HasSubstr("revoked by root: stolen"));
  FromNode("2", AgentHeartbeat{99, {}, {}});
  EXPECT_THAT(head_->Snapshot().nodes, SizeIs(1)) << "a late message does not bring it back";
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(5), {"1"});
  EXPECT_EQ(Status(job).at("ranks").size(), 1u) << "the job goes on without it";
}

TEST_F(HeadCoreTest, MessagesOfAnOldGenerationChangeNothing_P3) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  StartRanks(job);
  const uint64_t before = head_->counters().stale_dropped;
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  EXPECT_EQ(head_->counters().stale_dropped, before + 1);
  EXPECT_EQ(State(job), "RUNNING");
}

TEST_F(HeadCoreTest, ExchangeReachesEveryNode) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  FromNode("1", ExchangePart{job, {1}, 0, {{0, "zero"}}});
  EXPECT_THAT(Sent<ExchangeTable>(), IsEmpty());
  FromNode("2", ExchangePart{job, {1}, 0, {{1, "one"}}});
  ASSERT_THAT(Sent<ExchangeTable>(), SizeIs(2));
  EXPECT_EQ(Sent<ExchangeTable>()[0].second.blobs, std::vector<std::string>({"zero", "one"}));
}

TEST_F(HeadCoreTest, RepeatedExchangePartIsToldWhoIsMissing) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  FromNode("1", ExchangePart{job, {1}, 0, {{0, "zero"}}});
  EXPECT_THAT(Sent<ExchangeMissing>(), IsEmpty());
  FromNode("1", ExchangePart{job, {1}, 0, {{0, "zero"}}});
  ASSERT_THAT(Sent<ExchangeMissing>(), SizeIs(1));
  EXPECT_EQ(Sent<ExchangeMissing>()[0].first, "1");
  EXPECT_EQ(Sent<ExchangeMissing>()[0].second.ranks, std::vector<int>({1}));
}

TEST_F(HeadCoreTest, LogsComeFromTheAgentOrFromTheMirror) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", LogTail{job, {1}, 0, false, 100, "last words\n"});
  FromClient(ClientLogs{.job = job, .bytes_max = 77}, "logs1");
  ASSERT_THAT(Sent<AgentQuery>(), SizeIs(1));
  EXPECT_EQ(Sent<AgentQuery>()[0].second.bytes_max, 77u);
  FromNode("1", AgentAnswer{Sent<AgentQuery>()[0].second.query, true, "whole log", 9, false});
  const auto reply = std::find_if(sent_.begin(), sent_.end(), [](const Effect& e) {
    const auto* r = std::get_if<ReplyToClient>(&e);
    return r != nullptr && r->reply.id == "logs1";
  });
  ASSERT_NE(reply, sent_.end());
  EXPECT_EQ(json::parse(std::get<ReplyToClient>(*reply).reply.json).at("text"), "whole log");
  Pass(absl::Seconds(62), {});
  const json mirrored = json::parse(FromClient(ClientLogs{job}).json);
  EXPECT_EQ(mirrored.at("text"), "last words\n");
  EXPECT_EQ(mirrored.at("mirrored"), true);
}

TEST_F(HeadCoreTest, RepeatedExecRunsOnce_H15) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  const ClientExec exec{job, 0, {"touch", "file"}};
  FromClient(exec, "exec1");
  FromClient(exec, "exec1");  // its client has waited long: still running
  ASSERT_THAT(Sent<AgentQuery>(), SizeIs(1));
  FromNode("1", AgentAnswer{Sent<AgentQuery>()[0].second.query, true, "done", 0, true});
  EXPECT_EQ(json::parse(FromClient(exec, "exec1").json).at("text"), "done");
  EXPECT_THAT(Sent<AgentQuery>(), SizeIs(1));
  FromClient(exec, "exec2");
  EXPECT_THAT(Sent<AgentQuery>(), SizeIs(2));
}

// W10: a first answer with all that is known, then each event from its number on, none twice and none
// missing.
TEST_F(HeadCoreTest, EventsAreALongPoll_W10) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  const json first = json::parse(FromClient(ClientEvents{job, 0, absl::Seconds(5)}).json);
  EXPECT_FALSE(first.at("events").empty());
  sent_.clear();
  FromClient(ClientEvents{job, first.at("next").get<uint64_t>(), absl::Seconds(5)}, "poll");
  EXPECT_THAT(sent_, IsEmpty()) << "nothing new yet";
  StartRanks(job);
  Pass(absl::Seconds(1), {"1"});
  EXPECT_EQ(State(job), "STARTING") << "the grant was cleared from sent_, so nothing started";
  FromNode("1", RanksStarted{job, {1}, {}});
  const auto reply = std::find_if(sent_.begin(), sent_.end(), [](const Effect& e) {
    const auto* r = std::get_if<ReplyToClient>(&e);
    return r != nullptr && r->reply.id == "poll";
  });
  ASSERT_NE(reply, sent_.end());
  const json second = json::parse(std::get<ReplyToClient>(*reply).reply.json);
  const json whole = json::parse(FromClient(ClientEvents{job, 0, absl::ZeroDuration()}).json);
  json joined = first.at("events");
  for (const json& event : second.at("events")) joined.push_back(event);
  EXPECT_EQ(joined, whole.at("events"));
  EXPECT_EQ(second.at("next"), whole.at("next"));
}

TEST_F(HeadCoreTest, TimeLimitEndsTheJob) {
  Hello("1");
  const JobId job = Submit("train 1 1 limit60s");
  StartRanks(job);
  Pass(absl::Seconds(61), {"1"});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "FAILED");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("limits.time of 1m"));
}

// It waits for room when its time runs out: nothing is granted only to be ended at once.
TEST_F(HeadCoreTest, TimeLimitEndsAJobBetweenGenerations) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node limit60s");
  StartRanks(job);
  Pass(absl::Seconds(12), {"1"});
  FromNode("1", GenerationGone{job, {1}});
  ASSERT_EQ(State(job), "WAITING");
  while (clock_.Now() - Instant{} < absl::Seconds(59)) Pass(absl::Seconds(1), {"1"});
  ASSERT_EQ(State(job), "WAITING");
  sent_.clear();
  clock_.Advance(absl::Seconds(2));
  Hello("2");
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_EQ(State(job), "FAILED");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("limits.time of 1m"));
}

TEST_F(HeadCoreTest, WaitingJobEndsOnTimeWithoutAnotherEvent) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node limit60s");
  StartRanks(job);
  Pass(absl::Seconds(70), {"1"});
  EXPECT_EQ(State(job), "FAILED");
}

TEST_F(HeadCoreTest, StallNamesTheCulpritAndEndsItOnlyWhenAsked_P16) {
  Hello("1");
  const JobId job = Submit("train 2 2 stall-kill");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 9), Step(job, 1, 1, 4)}, {}});
  sent_.clear();
  const auto asked = [&] {
    std::vector<AgentQuery> queries;
    for (const auto& [node, query] : Sent<AgentQuery>()) queries.push_back(query);
    return queries;
  };
  for (int i = 0; i < 20 * 60 && asked().empty(); ++i) Pass(absl::Seconds(1), {"1"});
  ASSERT_THAT(asked(), SizeIs(2)) << "the stacks of every rank, before any is killed";
  for (int rank : {0, 1}) {
    EXPECT_EQ(asked()[rank].kind, AgentQuery::Kind::kStacks);
    EXPECT_EQ(asked()[rank].rank, rank);
    EXPECT_THAT(Sent<Revoke>(), IsEmpty());
    FromNode("1", AgentAnswer{asked()[rank].query, true, absl::StrCat("waits in futex_", rank), 0, true});
  }
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("rank 1 on host-1 is furthest behind (step 4)"));
}

TEST_F(HeadCoreTest, StacksThatDoNotComeHoldNoKillUp_P16) {
  Hello("1");
  const JobId job = Submit("train 2 2 stall-kill");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 9), Step(job, 1, 1, 4)}, {}});
  sent_.clear();
  Pass(absl::Minutes(16), {"1"});
  EXPECT_THAT(Sent<AgentQuery>(), SizeIs(2));
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

// Its own clock ran on while it stood still; no agent could have answered it.
TEST_F(HeadCoreTest, StandingStillMakesNoStartLate_H12) {
  Hello("1");
  (void)Submit("train 2 2");
  Pass(absl::Seconds(30), {"1"});
  sent_.clear();
  clock_.Advance(absl::Seconds(50));
  Do(head_->Step(Tick{}, clock_.Now()));
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(27), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(5), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("had not started when its time was up"));
}

TEST_F(HeadCoreTest, StandingStillIsNoStall_H12) {
  Hello("1");
  const JobId job = Submit("train 2 2 stall-kill");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 9), Step(job, 1, 1, 4)}, {}});
  sent_.clear();
  clock_.Advance(absl::Minutes(16));
  Do(head_->Step(Tick{}, clock_.Now()));
  Pass(absl::Minutes(1), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(HeadCoreTest, NodeThatDoesNotReleaseIsLeftOut_P10) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 2 one-per-node");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(25), {"1", "2"});
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("world_size"), 1);
}

TEST_F(HeadCoreTest, UncleanNodeIsNotUsedAgain_P10) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}, false, "pid 7 in state D"});
  Pass(absl::Seconds(90), {"1"});
  EXPECT_EQ(Status(job).at("generation"), 1);
  Hello("1", 4, {}, "2");  // it was rebooted
  Pass(absl::Seconds(90), {"1"});
  EXPECT_EQ(Status(job).at("generation"), 2);
}

// Every process of a generation is gone before the next one starts, on other nodes too.
TEST_F(HeadCoreTest, NextGenerationWaitsForTheLastOne_N8) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  const std::string node = Sent<StartGeneration>()[0].first;
  sent_.clear();
  FromNode(node, RankExited{Exit(job, 1, 0, 1)});
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  FromNode(node, GenerationGone{job, {1}});
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(1));
}

// Notes of a rank of an old generation are not those of this one.
TEST_F(HeadCoreTest, WhatRanksSayOfThemselvesIsOfThisGeneration) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EXPECT_EQ(Status(job).at("compression"), "");
  FromNode("1", AgentNote{job, {1}, 0, "compression", "topk for 2 of 3 buckets"});
  EXPECT_EQ(Status(job).at("compression"), "topk for 2 of 3 buckets");
  EXPECT_EQ(Status(job).at("restore"), "");
  FromNode("1", AgentNote{job, {1}, 0, "restore", "step 2 in 0.3 s"});
  EXPECT_EQ(Status(job).at("restore"), "step 2 in 0.3 s");
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(5), {"1"});
  ASSERT_EQ(Status(job).at("generation"), 2);
  EXPECT_EQ(Status(job).at("compression"), "");
  EXPECT_EQ(Status(job).at("restore"), "");
  FromNode("1", AgentNote{job, {1}, 0, "compression", "late"});
  EXPECT_EQ(Status(job).at("compression"), "");
}

// Its ranks may have run before the reboot, so the generation is over, also when nobody heard of its start.
// A zombie may still commit, into its own timeline (fault C3); the job does not resume from that.
TEST_F(HeadCoreTest, CheckpointOfAnOldTimelineDoesNotCount_C3) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 10, "ten", "every 42 s: so it is"});
  EXPECT_EQ(Status(job).at("last_checkpoint").at("step"), 10);
  EXPECT_EQ(Status(job).at("checkpoint_policy"), "every 42 s: so it is");
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}});
  ASSERT_EQ(Status(job).at("timeline"), 2);
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 20, "late"});
  EXPECT_EQ(Status(job).at("last_checkpoint").at("step"), 10);
}

TEST_F(HeadCoreTest, LocalClusterOversubscribesAndEndsWhenIdle) {
  config_.local = config_.exit_when_idle = true;
  Boot();
  Hello("1", 2);
  const JobId job = Submit("train 4 4");
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  Pass(absl::Seconds(60), {"1"});
  for (int rank = 0; rank < 4; ++rank) FromNode("1", RankExited{Exit(job, 1, rank, 0)});
  Pass(absl::Seconds(5), {"1"});
  EXPECT_THAT(Sent<AgentShutdown>(), IsEmpty()) << "clients may still read how it ended";
  Pass(absl::Seconds(7), {"1"});
  EXPECT_THAT(Sent<AgentShutdown>(), SizeIs(1));
  EXPECT_TRUE(std::holds_alternative<StopHead>(sent_.back()));
  EXPECT_FALSE(head_->NextDeadline().has_value());
}

TEST_F(HeadCoreTest, StateOfAnotherClusterIsRefused_H10) {
  HeadCore other(config_, Rng(1));
  ClusterRecord record;
  record.cluster = ClusterId("someone else's");
  StoredRecords stored;
  stored.Add(record);
  EXPECT_EQ(other.Recover(std::move(stored), clock_.Now(), clock_.WallNow()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(HeadCoreTest, DeadlinesNeverLieInThePastAfterATick) {
  Hello("1");
  Submit("a 4 4 stall-kill");
  Submit("b 4 4 limit60s");
  for (int i = 0; i < 400; ++i) {
    const auto next = head_->NextDeadline();
    ASSERT_TRUE(next.has_value());
    clock_.Advance(std::max(absl::ZeroDuration(), *next - clock_.Now()));
    Do(head_->Step(Tick{}, clock_.Now()));
    const auto after = head_->NextDeadline();
    if (!after) break;
    EXPECT_GT(*after, clock_.Now()) << "a busy loop at turn " << i;
  }
}

// H3
TEST_F(HeadCoreTest, NoNewJobsWhileTheDiskIsNearlyFull) {
  Do(head_->Step(StoreRoom{true, "the disk has 1 MiB free"}, clock_.Now()));
  const ClientReply refused = FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "same");
  EXPECT_FALSE(refused.ok);
  EXPECT_THAT(refused.error, HasSubstr("1 MiB free"));
  Do(head_->Step(StoreRoom{}, clock_.Now()));
  EXPECT_TRUE(FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "same").ok);
}

TEST(NodeTimeout, AgentsSpeakOftenEnoughForIt) {
  for (const absl::Duration timeout :
       {kNodeTimeoutMin, absl::Seconds(2), absl::Seconds(10), kNodeTimeoutMax}) {
    HeadConfig config;
    SetNodeTimeout(timeout, config);
    EXPECT_EQ(config.dead_after, timeout);
    EXPECT_LT(config.suspect_after, config.dead_after);
    EXPECT_LE(config.heartbeat_interval * 5, timeout);
    EXPECT_LE(config.heartbeat_interval, absl::Seconds(1));
  }
  HeadConfig as_it_comes, ten;
  SetNodeTimeout(absl::Seconds(10), ten);
  EXPECT_EQ(ten.heartbeat_interval, as_it_comes.heartbeat_interval);
  EXPECT_EQ(ten.suspect_after, as_it_comes.suspect_after);
}

}  // namespace
}  // namespace gtrain::core
