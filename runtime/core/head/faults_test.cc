// Tests the head's memory of faults: the commits before them, and their times, also across its own restart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "runtime/core/head/head_test_world.h"
#include "runtime/core/head/restart_policy.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HeadFaultsTest : public HeadTestWorld {
 protected:
  uint64_t Newest(const JobId& job) { return Status(job).at("generation").get<uint64_t>(); }
  void Commit(const JobId& job, int64_t step) {
    CheckpointReport report;
    report.job = job;
    report.generation = {Newest(job)};
    report.timeline = {Status(job).at("timeline").get<uint64_t>()};
    report.step = step;
    report.manifest = absl::StrCat("m/", step);
    FromNode("1", report);
  }
  void End(const JobId& job, RankExit exit) {
    ended_ = exit.generation.value;
    FromNode("1", RankExited{exit});
    FromNode("1", GenerationGone{job, exit.generation});
  }
  void Crash(const JobId& job, int code) {
    End(job, Exit(job, Newest(job), 0, code, absl::StrCat("e", code)));
  }
  std::string Reason(const JobId& job) { return Status(job).at("reason").get<std::string>(); }
  // Passes time until the next generation runs.
  void Again(const JobId& job) {
    for (int i = 0; i < 200 && Newest(job) == ended_; ++i) Pass(absl::Seconds(1), {"1"});
    ASSERT_EQ(Newest(job), ended_ + 1) << Reason(job);
    StartRanks(job);
  }
  void CrashTenTimes(const JobId& job) {
    for (int i = 0; i < 10; ++i) {
      FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, Newest(job), 0, i)}, {}});
      Crash(job, 1 + i % 2);
      Again(job);
    }
  }
  uint64_t ended_ = 1;
};

// `kill -9` every two seconds, committed steps between: neither back-off nor an end.
TEST_F(HeadFaultsTest, AJobThatCommitsBetweenItsCrashesGoesOnAtOnce) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  for (int i = 1; i <= 40; ++i) {
    Pass(absl::Seconds(2), {"1"});
    FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, Newest(job), 0, 10 * i)}, {}});
    Commit(job, 10 * i);
    Crash(job, 1);
    ASSERT_EQ(Newest(job), static_cast<uint64_t>(i) + 1) << "granted at once: " << Reason(job);
    StartRanks(job);
  }
  for (int i = 0; i < 40 && State(job) != "FAILED"; ++i) {
    Crash(job, 1 + i % 2);
    Pass(absl::Seconds(90), {"1"});
    if (State(job) != "FAILED") StartRanks(job);
  }
  EXPECT_EQ(State(job), "FAILED") << "without progress budgets hold";
}

TEST_F(HeadFaultsTest, Exit75IsFreeOnlyIfItWasEarned) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Commit(job, 5);
  Crash(job, kExitSaved);
  EXPECT_THAT(Reason(job), HasSubstr("not charged"));
  Again(job);
  EXPECT_EQ(Status(job).at("restarts"), 0) << "a newer checkpoint";
  Crash(job, kExitSaved);
  EXPECT_EQ(Status(job).at("restarts"), 1) << "nothing newer";
  EXPECT_THAT(Status(job).dump(), HasSubstr("no checkpoint of a higher step was committed"));
  Again(job);
  Crash(job, kExitSaved);
  Again(job);
  EXPECT_EQ(Status(job).at("restarts"), 2) << "and no error that repeats";
  for (int i = 0; i < 12 && State(job) != "FAILED"; ++i) {
    Crash(job, kExitSaved);
    if (State(job) != "FAILED") Again(job);
  }
  EXPECT_EQ(State(job), "FAILED") << "it used to come back for ever";
  EXPECT_THAT(Reason(job), HasSubstr("restart budget spent"));
}

// One fault may make all the others fail, and one line tells of those that something else has ended.
TEST_F(HeadFaultsTest, WhoIsKilledBehindAFaultIsOneLineOfMany) {
  Hello("1", 1000);
  const JobId job = Submit("train 1000 1000");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 7, 1, "ValueError: bad batch")});
  for (int rank = 0; rank < 500; ++rank) {
    if (rank != 7) Kill("1", job, 1, rank);
  }
  for (int rank = 500; rank < 1000; ++rank) FromNode("1", RankExited{Exit(job, 1, rank, 1)});
  const size_t before = Events(job, "fault").size();
  FromNode("1", GenerationGone{job, {1}});
  const std::vector<std::string> said = Events(job, "warning");
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_THAT(said[0], HasSubstr("499 ranks ended"));
  EXPECT_THAT(said[0], HasSubstr("rank 2 on host-1: killed by signal 9 (KILL); and 496 more. What"));
  EXPECT_EQ(before, 1u);
  EXPECT_EQ(Status(job).at("restarts"), 1);
}

// Several ranks that are killed together are one fault, which names them; who did well, or was ended by us,
// is not among them.
TEST_F(HeadFaultsTest, AFaultSaysWhoElseEndedWithIt) {
  Hello("1", 100);
  const JobId job = Submit("train 20 20");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 4, 0)});
  for (const int rank : {3, 1}) Kill("1", job, 1, rank);
  FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
  FromNode("1", RankExited{Exit(job, 1, 2, 1)});
  RankExit ended = Exit(job, 1, 5, 0);
  ended.cause = ExitCause::kStopped;
  ended.signal = 15;
  FromNode("1", RankExited{ended});
  FromNode("1", GenerationGone{job, {1}});
  const std::string fault = Status(job).at("first_fault").at("message").get<std::string>();
  EXPECT_EQ(fault, "rank 3 on host-1: killed by signal 9 (KILL); 2 more ranks ended with it: 1, 2");
  EXPECT_THAT(Reason(job), HasSubstr(fault));
  ended_ = 1;
  Again(job);
  FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, Newest(job), 0, 1)}, {}});
  for (int rank = 19; rank >= 18; --rank) Kill("1", job, 2, rank);
  FromNode("1", GenerationGone{job, {2}});
  EXPECT_THAT(Reason(job),
              HasSubstr("rank 19 on host-1: killed by signal 9 (KILL); 1 more rank ended with it: 18; "));
  ended_ = 2;
  Again(job);
  FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, Newest(job), 0, 2)}, {}});
  RankExit first = Exit(job, 3, 19, 1);
  first.message = std::string(4 << 10, 'x');
  FromNode("1", RankExited{first});
  for (int rank = 18; rank >= 0; --rank) Kill("1", job, 3, rank);
  FromNode("1", GenerationGone{job, {3}});
  EXPECT_THAT(Reason(job), HasSubstr("x; 19 more ranks ended with it: 0, 1, 2, 3, 4, 5, ...; "))
      << "however long it is";
}

// A rank that cannot go on without the others says 75, and may be heard before the one whose error it was.
TEST_F(HeadFaultsTest, TheErrorOfAnotherRankIsTheCauseOfAnExit75) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
  FromNode("1", RankExited{Exit(job, 1, 1, 1, "ValueError: bad batch")});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_THAT(Reason(job), HasSubstr("rank 1 on host-1: exit code 1"));
  EXPECT_EQ(Status(job).at("restarts"), 1);
  ended_ = 1;
  Again(job);
  FromNode("1", RankExited{Exit(job, 2, 0, kExitSaved)});
  FromNode("1", RankExited{Exit(job, 2, 1, 1, "ValueError: bad batch")});
  FromNode("1", GenerationGone{job, {2}});
  EXPECT_EQ(State(job), "FAILED");
  EXPECT_THAT(Reason(job), HasSubstr("the same error twice without progress"));
  EXPECT_THAT(Status(job).at("first_fault").dump(), HasSubstr("ValueError"));
}

TEST_F(HeadFaultsTest, WhyTellsTheFaultThatEndedTheJobBesideTheFirst) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  const auto why = [&] { return nlohmann::json::parse(FromClient(ClientWhy{job}).json); };
  EXPECT_EQ(why().at("last_fault"), why().at("first_fault"));
  for (ended_ = 1; State(job) != "FAILED"; ++ended_) {
    ASSERT_LT(ended_, 20u);
    Again(job);
    FromNode("1", RankExited{Exit(job, Newest(job), 0, 1, "SyntaxError: invalid syntax")});
    FromNode("1", GenerationGone{job, {Newest(job)}});
  }
  EXPECT_THAT(why().at("first_fault").dump(), HasSubstr("signal 9"));
  EXPECT_EQ(why().at("last_fault").at("tail"), "SyntaxError: invalid syntax");
  EXPECT_EQ(why().at("last_fault").at("rank"), 0);
}

// The shortest pause is a tenth of a second less a quarter, which once was "again in 0".
TEST_F(HeadFaultsTest, APauseIsSaidWithItsUnit) {
  Hello("1", 40);
  for (int i = 0; i < 20; ++i) {
    const JobId job = Submit(absl::StrCat("train", i, " 1 1"));
    StartRanks(job);
    Commit(job, 5);
    FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
    FromNode("1", GenerationGone{job, {1}});
    EXPECT_THAT(Reason(job), HasSubstr(", again in 100ms"));
  }
}

// A rank that unwinds while the first one says 75 would be ended by us, and its error, or its exit code
// against another run, would be lost.
TEST_F(HeadFaultsTest, AnExit75WaitsForItsCause) {
  config_.cause_grace = absl::Seconds(5);
  Boot();
  Hello("1");
  const JobId job = Submit("train 3 3");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
  Pass(absl::Seconds(2), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "the others are left alone";
  FromNode("1", RankExited{Exit(job, 1, 1, kExitNoRestart, "do not")});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
  RankExit ended = Exit(job, 1, 2, 0);
  ended.cause = ExitCause::kStopped;
  ended.signal = 15;
  FromNode("1", RankExited{ended});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "FAILED");
  EXPECT_EQ(Status(job).at("exit_code"), kExitNoRestart);
}

// The error that is heard when the wait is over, while the ranks are ended, is the cause all the same.
TEST_F(HeadFaultsTest, AnErrorBehindTheWaitIsTheCauseOfAnExit75) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
  Pass(config_.cause_grace + absl::Seconds(1), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  FromNode("1", RankExited{Exit(job, 1, 1, 1, "ValueError: bad batch")});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_THAT(Reason(job), HasSubstr("rank 1 on host-1: exit code 1"));
}

TEST_F(HeadFaultsTest, NoExit75WaitsForLong) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Boot();  // another head goes on waiting
  Hello("1", 4,
        {{.job = job,
          .generation = {1},
          .live = {StepOf(job, 1, 1)},
          .exited = {Exit(job, 1, 0, kExitSaved)}}});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(2), {"1"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));

  const JobId other = Submit("other 2 2");
  StartRanks(other);
  for (const int rank : {0, 1}) FromNode("1", RankExited{Exit(other, 1, rank, kExitSaved)});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2)) << "nobody is left who could say more";
}

TEST_F(HeadFaultsTest, AMachineThatIsGoneEarnsAnExit75) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  const std::string node = Sent<StartGeneration>()[0].second.grant.ranks[0].node.value;
  FromNode(node, RankExited{Exit(job, 1, 0, kExitSaved)});
  FromNode(node, GenerationGone{job, {1}});
  Pass(absl::Minutes(1), {node});  // the other one does not answer
  EXPECT_EQ(Status(job).at("restarts"), 0) << Reason(job);
}

TEST_F(HeadFaultsTest, AnExit75SaysWhoHadLeft) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 1, 0)});
  FromNode("1", RankExited{Exit(job, 1, 0, kExitSaved)});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_THAT(Reason(job), HasSubstr("rank 1 had ended with exit code 0"));
}

// A rank that leaves the loop of a run ends nothing itself, and the others cannot go on without it.
TEST_F(HeadFaultsTest, AnErrorInPlaceSaysWhoHadLeft) {
  Hello("1", 16);
  const auto job_of = [&](const std::string& spec) {
    const JobId job = Submit(spec);
    StartRanks(job);
    RankStatus status = Step(job, 1, 0, 30);
    status.stays = true;
    FromNode("1", AgentHeartbeat{++heartbeats_, {status}, {}});
    return job;
  };
  const JobId job = job_of("train 3 3 in-place");
  FromNode("1", RankExited{Exit(job, 1, 1, 0)});
  FromNode("1", RankExited{Exit(job, 1, 2, 1)});
  const char* said = "rank 2 on host-1: exit code 1; rank 1 had ended with exit code 0 while it still ran";
  EXPECT_THAT(Events(job, "fault"), ::testing::ElementsAre(said));
  EXPECT_EQ(Status(job).at("first_fault").at("message"), said);

  const JobId after = job_of("after 3 3 in-place");
  FromNode("1", RankExited{Exit(after, 1, 2, 1)});
  FromNode("1", RankExited{Exit(after, 1, 1, 0)});
  EXPECT_THAT(Events(after, "fault"), ::testing::ElementsAre("rank 2 on host-1: exit code 1"));
  const JobId apart = job_of("apart 3 3");
  FromNode("1", RankExited{Exit(apart, 1, 1, 0)});
  FromNode("1", RankExited{Exit(apart, 1, 2, 1)});
  EXPECT_THAT(Events(apart, "fault"), ::testing::ElementsAre("rank 2 on host-1: exit code 1"))
      << "its ranks may end when they like";
  const JobId killed = job_of("killed 3 3 in-place");
  FromNode("1", RankExited{Exit(killed, 1, 1, 0)});
  Kill("1", killed, 1, 2);
  EXPECT_THAT(Events(killed, "fault"), ::testing::ElementsAre(HasSubstr("killed by signal 9 (KILL)")));
  EXPECT_THAT(Events(killed, "fault")[0], ::testing::Not(HasSubstr("had ended")))
      << "of which it did not die";
}

TEST_F(HeadFaultsTest, Exit75OfWhoWasToldToLeaveIsFree) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromClient(ClientDrainNode{.node = "1", .left = absl::Minutes(5), .reason = "kernel update"}, "",
             Role::kAdmin);
  Crash(job, kExitSaved);
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_THAT(Reason(job), HasSubstr("not charged"));
}

// An upgrade of the head must not kill a job for old crashes.
TEST_F(HeadFaultsTest, FaultsKeepTheirAgeWhenTheHeadRestarts) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  CrashTenTimes(job);
  clock_.Advance(absl::Hours(2));
  Boot();
  Hello("1", 4, {HeldGeneration{.job = job, .generation = {11}}});
  FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, Newest(job), 0, 20)}, {}});
  Crash(job, 1);
  EXPECT_NE(State(job), "FAILED") << Reason(job);
  EXPECT_EQ(Newest(job), 12) << "at once, as after a first crash";
}

TEST_F(HeadFaultsTest, AndAreNotForgotten) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  CrashTenTimes(job);
  Boot();
  Hello("1", 4, {HeldGeneration{.job = job, .generation = {11}}});
  FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, Newest(job), 0, 20)}, {}});
  Crash(job, 1);
  EXPECT_EQ(State(job), "FAILED") << Reason(job);
}

// Nothing is written while a job only runs, and the head may be away for a while.
TEST_F(HeadFaultsTest, TheTimeLimitCountsWhatPassedBeforeAndBetweenHeads) {
  Hello("1");
  const JobId job = Submit("train 1 1 limit60s");
  StartRanks(job);
  Pass(absl::Seconds(30), {"1"});
  clock_.Advance(absl::Seconds(20));
  Boot();
  Hello("1", 4, {HeldGeneration{.job = job, .generation = {1}}});
  Pass(absl::Seconds(5), {"1"});
  EXPECT_EQ(State(job), "RUNNING");
  Pass(absl::Seconds(6), {"1"});
  EXPECT_THAT(Reason(job), HasSubstr("limits.time of 1m is over"));
}

// A machine whose clock was not set when the head started.
TEST_F(HeadFaultsTest, AClockThatSaysNonsenseEndsNoJob) {
  Hello("1");
  const JobId job = Submit("train 1 1 limit60s");
  StartRanks(job);
  auto& status = std::get<JobStatusRecord>(disk_.at(absl::StrCat("job/", job.value, "/status"))).status;
  for (const absl::Time at : {absl::UnixEpoch() + absl::Seconds(40), clock_.WallNow() + absl::Hours(1)}) {
    status.run_time_at = at;
    Boot();
    Hello("1", 4, {HeldGeneration{.job = job, .generation = {1}}});
    Pass(absl::Seconds(2), {"1"});
    EXPECT_EQ(State(job), "RUNNING") << at;
  }
}

TEST_F(HeadFaultsTest, WhoRunsIsToldWhoHasEnded) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 3 3");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 1, 0)});
  EXPECT_EQ(Sent<RanksLeft>().size(), 0) << "most jobs end now";
  Pass(absl::Seconds(2), {"1", "2"});
  ASSERT_EQ(Sent<RanksLeft>().size(), 1) << "all its ranks are on one node";
  EXPECT_EQ(Sent<RanksLeft>()[0].second.ranks, std::vector<int>{1});
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_EQ(Sent<RanksLeft>().size(), 1) << "nothing new";
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  Pass(absl::Seconds(2), {"1", "2"});
  EXPECT_EQ(Sent<RanksLeft>().back().second.ranks, (std::vector<int>{1, 0}));
  sent_.clear();
  Hello("1", 4, {HeldGeneration{.job = job, .generation = {1}}});
  EXPECT_EQ(Sent<RanksLeft>().size(), 1) << "it may not have heard";
  FromNode("1", RankExited{Exit(job, 1, 2, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
  sent_.clear();
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_EQ(Sent<RanksLeft>().size(), 0);
}

// Ranks step together, and are heard of one after the other: who stepped in time is no stall because of it.
TEST_F(HeadFaultsTest, AStepInTimeWhoseWordIsOnItsWayIsNoStall_P16) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 stall-kill one-per-node");
  StartRanks(job);
  const std::string first = Status(job).at("ranks").at(0).at("node"), second = first == "1" ? "2" : "1";
  FromNode(first, AgentHeartbeat{1, {Step(job, 1, 0, 4)}, {}});
  FromNode(second, AgentHeartbeat{1, {Step(job, 1, 1, 4)}, {}});
  sent_.clear();
  Pass(absl::Minutes(15) - absl::Seconds(1), {"1", "2"});
  FromNode(first, AgentHeartbeat{2, {Step(job, 1, 0, 5)}, {}});
  Pass(absl::Seconds(2), {"1", "2"});
  FromNode(second, AgentHeartbeat{2, {Step(job, 1, 1, 5)}, {}});
  Pass(absl::Minutes(14), {"1", "2"});
  EXPECT_THAT(Sent<AgentQuery>(), IsEmpty());
  Pass(absl::Minutes(2), {"1", "2"});
  EXPECT_THAT(Sent<AgentQuery>(), SizeIs(2)) << "but this is one";
}

}  // namespace
}  // namespace gtrain::core
