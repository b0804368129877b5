// Storage that cannot be read, the newest checkpoint in grants, and whose a checkpoint directory is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class HeadStorageTest : public HeadTestWorld {
 protected:
  RankExit StorageExit(const JobId& job, uint64_t generation, int rank, int code = 1) {
    RankExit exit = Exit(job, generation, rank, code, "Traceback");
    exit.storage = "/ckpt: Input/output error";
    return exit;
  }
  // A generation of one rank on node 1 that ends so.
  void EndWith(const JobId& job, uint64_t generation, RankExit exit) {
    FromNode("1", RankExited{std::move(exit)});
    FromNode("1", GenerationGone{job, {generation}});
  }
  uint64_t Generation_(const JobId& job) { return Status(job).at("generation").get<uint64_t>(); }
  // Passes time until the next try begins.
  absl::Duration WaitForTry(const JobId& job) {
    const uint64_t before = Generation_(job);
    const Instant from = clock_.Now();
    while (Generation_(job) == before && clock_.Now() - from < absl::Minutes(5)) {
      Pass(absl::Milliseconds(500), {"1"});
    }
    return clock_.Now() - from;
  }
  // The next generation starts and meets the same fault.
  void FailAgain(const JobId& job) {
    StartRanks(job);
    EndWith(job, Generation_(job), StorageExit(job, Generation_(job), 0));
  }
  const GenerationGrant& NewestGrant() {
    static GenerationGrant grant;
    grant = Sent<StartGeneration>().back().second.grant;
    return grant;
  }
};

TEST_F(HeadStorageTest, AStorageFaultWaitsAndIsChargedToNothing_S7) {
  Hello("1");
  const JobId job = Submit("train 1 1 budget0");
  StartRanks(job);
  FromNode("1", AgentNote{job, {1}, 0, "storage", "/ckpt: Input/output error"});
  EXPECT_EQ(Status(job).at("storage"), "/ckpt: Input/output error");
  EndWith(job, 1, StorageExit(job, 1, 0));
  EXPECT_EQ(State(job), "WAITING");
  EXPECT_THAT(
      Status(job).at("reason").get<std::string>(),
      HasSubstr("storage: rank 0 on host-1: /ckpt: Input/output error; tried 1 time, next try in 1s"));
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_EQ(Status(job).at("last_fault").at("kind"), "storage");
  const json why = json::parse(FromClient(ClientWhy{job}).json);
  ASSERT_EQ(why.at("blocked_by").size(), 1u);
  EXPECT_THAT(why.at("blocked_by")[0].at("constraint").get<std::string>(), HasSubstr("storage: rank 0"));
  EXPECT_THAT(why.at("blocked_by")[0].at("unblocked_by").get<std::string>(), HasSubstr("gtrain stop"));
  EXPECT_EQ(why.at("storage"), "/ckpt: Input/output error");
  EXPECT_THAT(why.at("events").dump(), HasSubstr(R"("kind":"storage")"));
  // Budget 0, before_first_step 1, the same error: any other fault would be final by now.
  absl::Duration last;
  for (int tries = 2; tries <= 40; ++tries) {
    last = WaitForTry(job);
    ASSERT_LE(last, absl::Seconds(61)) << tries;
    FailAgain(job);
    ASSERT_EQ(State(job), "WAITING") << tries;
    EXPECT_THAT(Status(job).at("reason").get<std::string>(),
                HasSubstr(absl::StrCat("tried ", tries, " times")));
  }
  EXPECT_GE(last, absl::Seconds(45)) << "the back-off grew";
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_EQ(Status(job).at("last_fault").at("tries"), 40);
  EXPECT_THAT(Stored(JobId("train-1")).faults, SizeIs(1)) << "one record for all of them";
  WaitForTry(job);
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING") << "the storage is back";
}

TEST_F(HeadStorageTest, AStepOrACheckpointResetsTheBackoff) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EndWith(job, 1, StorageExit(job, 1, 0));
  for (int i = 0; i < 5; ++i) {
    WaitForTry(job);
    FailAgain(job);
  }
  WaitForTry(job);
  StartRanks(job);
  const uint64_t g = Generation_(job);
  FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, g, 0, 3)}, {}});
  EndWith(job, g, StorageExit(job, g, 0));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("tried 1 time, next try in 1s"));
  WaitForTry(job);
  FailAgain(job);
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("tried 2 times"));
  WaitForTry(job);
  StartRanks(job);
  const uint64_t c = Generation_(job);
  FromNode("1", CheckpointReport{job, {c}, Timeline{c}, 4, "m"});
  EndWith(job, c, StorageExit(job, c, 0));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("tried 1 time,"));
}

// A restore that fails for minutes reports no step. For other faults five minutes without a report are
// progress.
TEST_F(HeadStorageTest, TimeAloneIsNoProgress) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Pass(absl::Minutes(6), {"1"});
  EndWith(job, 1, StorageExit(job, 1, 0));
  WaitForTry(job);
  StartRanks(job);
  Pass(absl::Minutes(6), {"1"});
  EndWith(job, 2, StorageExit(job, 2, 0));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("tried 2 times"));
}

TEST_F(HeadStorageTest, ExitCode75IsOneToo93IsNot) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EndWith(job, 1, StorageExit(job, 1, 0, 75));
  EXPECT_EQ(Status(job).at("last_fault").at("kind"), "storage");
  WaitForTry(job);
  StartRanks(job);
  EndWith(job, 2, StorageExit(job, 2, 0, 93));
  EXPECT_EQ(State(job), "FAILED") << "the program asks not to be restarted";
}

// Rank 1 ends because rank 0 is gone, and the head hears of it first.
TEST_F(HeadStorageTest, TheEndOfAnotherRankMayBeHeardFirst) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node budget0");
  StartRanks(job);
  const std::string other = Status(job).at("ranks").at(1).at("node");
  FromNode(other, RankExited{Exit(job, 1, 1, 1, "the peer is gone")});
  RankExit cause = StorageExit(job, 1, 0);
  cause.cause = ExitCause::kStopped;  // the revoke reached it at the same time
  FromNode(other == "1" ? "2" : "1", RankExited{cause});
  FromNode("1", GenerationGone{job, {1}});
  FromNode("2", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "WAITING");
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_EQ(Status(job).at("last_fault").at("rank"), 0);
}

// The node of the rank that met it never answers: what the rank said while it lived is what the head knows.
TEST_F(HeadStorageTest, TheNoteOfARankWhoseNodeIsSilentCounts) {
  for (const bool said : {true, false}) {
    Hello("1");
    Hello("2");
    const JobId job = Submit("train 2 2 one-per-node budget0");
    StartRanks(job);
    const std::string other = Status(job).at("ranks").at(1).at("node");
    const std::string silent = other == "1" ? "2" : "1";
    FromNode(silent, AgentNote{job, {1}, 0, "storage", "/ckpt: Input/output error"});
    if (!said) FromNode(silent, AgentNote{job, {1}, 0, "storage", ""});  // it can be read again
    FromNode(other, RankExited{Exit(job, 1, 1, 1, "the peer is gone")});
    FromNode(other, GenerationGone{job, {1}});
    Pass(absl::Seconds(60), {other});
    const json status = Status(job);
    EXPECT_EQ(status.at("state"), said ? "WAITING" : "FAILED") << status.dump();
    if (!said) continue;
    EXPECT_EQ(status.at("restarts"), 0);
    EXPECT_THAT(status.at("last_fault").at("message").get<std::string>(), HasSubstr("Input/output error"));
    FromClient(ClientStop{job, true});
  }
}

TEST_F(HeadStorageTest, OtherFaultsAreChargedAsBefore) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EndWith(job, 1, Exit(job, 1, 0, 1, "bug"));
  WaitForTry(job);
  FailAgain(job);
  WaitForTry(job);
  StartRanks(job);
  EndWith(job, 3, Exit(job, 3, 0, 1, "bug"));
  EXPECT_EQ(State(job), "FAILED") << "a storage fault between two crashes hides neither";
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("the same error twice"));
}

TEST_F(HeadStorageTest, AHeadThatRestartsKeepsWaiting_H1) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EndWith(job, 1, StorageExit(job, 1, 0));
  for (int i = 0; i < 6; ++i) {
    WaitForTry(job);
    FailAgain(job);
  }
  const uint64_t g = Generation_(job);
  Boot();
  Hello("1");
  EXPECT_EQ(State(job), "WAITING");
  EXPECT_THAT(Status(job).at("blocked_by").dump(), HasSubstr("storage: rank 0"));
  Pass(absl::Seconds(20), {"1"});
  EXPECT_EQ(Generation_(job), g) << "the wait goes on";
  WaitForTry(job);
  EXPECT_EQ(Generation_(job), g + 1) << "and ends by itself";
}

TEST_F(HeadStorageTest, StopEndsAJobThatWaitsForItsStorage) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EndWith(job, 1, StorageExit(job, 1, 0));
  EXPECT_EQ(json::parse(FromClient(ClientStop{job}).json).at("stop"), "over");
  EXPECT_EQ(State(job), "CANCELLED");
  Pass(absl::Minutes(2), {"1"});
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(1));
}

TEST_F(HeadStorageTest, TheNodesOfAJobThatWaitsStayItsOwn) {
  Hello("1", 2);
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  EndWith(job, 1, StorageExit(job, 1, 0));
  ASSERT_EQ(State(job), "WAITING");
  const JobId other = Submit("other 1 1");
  EXPECT_EQ(State(other), "QUEUED");
  EXPECT_THAT(Status(other).at("blocked_by").dump(), HasSubstr(job.value));
  WaitForTry(job);
  EXPECT_EQ(State(job), "STARTING");
}

// Many machines see one storage go.
TEST_F(HeadStorageTest, AnEventForTheFirstWhoSaysSoAndForTheLast) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  const auto events = [&] {
    const json why = json::parse(FromClient(ClientWhy{job}).json);
    std::vector<std::string> texts;
    for (const json& event : why.at("events")) {
      if (event.at("kind") == "storage" || event.at("kind") == "owner") texts.push_back(event.at("text"));
    }
    return texts;
  };
  const std::string first = Status(job).at("ranks").at(0).at("node"), second = first == "1" ? "2" : "1";
  FromNode(first, AgentNote{job, {1}, 0, "storage", "EIO"});
  FromNode(second, AgentNote{job, {1}, 1, "storage", "ESTALE"});
  EXPECT_THAT(events(), SizeIs(1));
  EXPECT_EQ(Status(job).at("storage"), "ESTALE") << "the newest counts";
  FromNode(second, AgentNote{job, {1}, 1, "storage", ""});
  EXPECT_THAT(events(), ElementsAre(HasSubstr("EIO"), HasSubstr("can be read again")));
  FromNode(first, AgentNote{job, {1}, 0, "owner", "taken over by train-9"});
  FromNode(first, AgentNote{job, {1}, 0, "owner", "taken over by train-9"});
  EXPECT_THAT(events(), SizeIs(3)) << "an agent says it again to each head";
  EXPECT_EQ(Status(job).at("owner"), "taken over by train-9");
}

// ---------------------------------------------------------------- the newest checkpoint

TEST_F(HeadStorageTest, TheGrantNamesTheNewestCheckpointAndLeavesResumeAlone_S7) {
  Hello("1");
  const ClientReply reply = FromClient(ClientSubmit{"train 1 1", {}, "/runs/{job}", "fresh"});
  const JobId job(json::parse(reply.json).at("job").get<std::string>());
  StartRanks(job);
  EXPECT_FALSE(NewestGrant().newest.has_value());
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 10, "/c/manifests/step-10.json", ""});
  EndWith(job, 1, Exit(job, 1, 0, 9));
  Boot();  // also by a head that only has its disk
  Hello("1");
  Pass(absl::Seconds(40), {"1"});
  ASSERT_EQ(NewestGrant().generation, Generation{2});
  ASSERT_TRUE(NewestGrant().newest.has_value());
  EXPECT_EQ(NewestGrant().newest->manifest, "/c/manifests/step-10.json");
  EXPECT_EQ(NewestGrant().newest->step, 10);
  EXPECT_EQ(NewestGrant().resume, "fresh") << "as the user asked at the launch";
}

TEST_F(HeadStorageTest, AProgramWithoutTheSdkResumesFromItsLatestAsBefore) {
  Hello("1");
  const ClientReply reply = FromClient(ClientSubmit{"train 1 1", {}, "/runs/{job}", "fresh"});
  const JobId job(json::parse(reply.json).at("job").get<std::string>());
  StartRanks(job);
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 10, "", ""});
  EndWith(job, 1, Exit(job, 1, 0, 9));
  Pass(absl::Seconds(5), {"1"});
  EXPECT_EQ(NewestGrant().resume, "latest");
  EXPECT_FALSE(NewestGrant().newest.has_value());
}

TEST_F(HeadStorageTest, TheNewestCheckpointNeverGoesBack_INV4) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  const auto newest = [&] { return std::get<CheckpointRecord>(disk_.at("checkpoint/train-1")); };
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 10, "t1/10", ""});
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 10, "", ""});  // a line of $GTRAIN_REPORT
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 20, "", ""});
  EXPECT_EQ(newest().manifest, "t1/10");
  EndWith(job, 1, Exit(job, 1, 0, 9));
  Pass(absl::Seconds(5), {"1"});
  StartRanks(job);
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 30, "t1/30", ""});  // late, of what was cut off
  EXPECT_EQ(newest().manifest, "t1/10");
  // The restore fell back to step 5: the newest is now an older step of a newer timeline.
  FromNode("1", CheckpointReport{job, {2}, Timeline{2}, 6, "t2/6", ""});
  EXPECT_EQ(newest().manifest, "t2/6");
  FromNode("1", CheckpointReport{job, {2}, Timeline{2}, 5, "t2/5", ""});
  FromNode("1", CheckpointReport{job, {1}, Timeline{1}, 40, "t1/40", ""});
  EXPECT_EQ(newest().manifest, "t2/6");
}

// ---------------------------------------------------------------- whose a directory is

TEST_F(HeadStorageTest, ASecondLaunchOntoADirectoryIsRefused) {
  Hello("1");
  const JobId first = Submit("train 1 1 in=/w/ckpt");
  StartRanks(first);
  Pass(absl::Seconds(90), {"1"});
  for (const char* same : {"/w/ckpt/", "/w/./x/../ckpt", "//w//ckpt", "file:///w/ckpt", "ckpt", "./ckpt/."}) {
    const ClientReply refused = FromClient(ClientSubmit{absl::StrCat("again 1 1 at=/w in=", same), {}, "/r"});
    EXPECT_FALSE(refused.ok) << same;
    EXPECT_THAT(refused.error, HasSubstr("job train-1 of user1 saves its checkpoints to /w/ckpt")) << same;
    EXPECT_THAT(refused.error, HasSubstr("(RUNNING, started 1m30s ago)"));
    for (const char* way : {"gtrain attach train-1", "gtrain stop train-1", "--takeover"}) {
      EXPECT_THAT(refused.error, HasSubstr(way));
    }
  }
  EXPECT_EQ(json::parse(FromClient(ClientStatus{}).json).at("jobs").size(), 1u) << "nothing was made";
  for (const char* other : {"/w/ckpt2", "/w", "s3://w/ckpt", "/w/ckpt/deeper"})
    Submit(absl::StrCat("o 1 1 in=", other));
  EXPECT_FALSE(FromClient(ClientSubmit{"o 1 1 in=s3://w/ckpt/", {}, "/r"}).ok);
  FromNode("1", RankExited{Exit(first, 1, 0, 0)});
  ASSERT_EQ(State(first), "SUCCEEDED");
  Submit("again 1 1 in=/w/ckpt");
}

// It never owns the directory: it runs beside the job that does, and keeps nobody out.
TEST_F(HeadStorageTest, AReadOnlyJobIsNotRefusedAndRefusesNobody) {
  Hello("1", 64);
  const JobId reader = Submit("eval 1 1 reads=/w/ckpt");
  const JobId trainer = Submit("train 1 1 in=/w/ckpt");
  EXPECT_THAT(NewestGrant().live_jobs, ElementsAre(trainer));
  Submit("eval 1 1 reads=/w/ckpt");
  EXPECT_THAT(NewestGrant().live_jobs, ElementsAre(JobId("eval-3"), trainer));
  ClientSubmit submit{"eval 1 1 reads=/w/ckpt", {}, "/runs/{job}"};
  submit.takeover = true;
  ASSERT_TRUE(FromClient(submit).ok);
  EXPECT_THAT(json::parse(FromClient(ClientWhy{trainer}).json).at("events").dump(),
              Not(HasSubstr("takes over")));
  const ClientReply refused = FromClient(ClientSubmit{"again 1 1 in=/w/ckpt", {}, "/r"});
  EXPECT_FALSE(refused.ok);
  EXPECT_THAT(refused.error, HasSubstr("job train-2"));
}

TEST_F(HeadStorageTest, TheSameRequestAgainIsNoSecondLaunch_H15) {
  Hello("1");
  const ClientSubmit submit{"train 1 1 in=/w/ckpt", {}, "/runs/{job}"};
  const ClientReply one = FromClient(submit, "id-1");
  const ClientReply two = FromClient(submit, "id-1");
  EXPECT_TRUE(two.ok) << two.error;
  EXPECT_EQ(one.json, two.json);
  Boot();
  EXPECT_EQ(FromClient(submit, "id-1").json, one.json);
  EXPECT_FALSE(FromClient(submit, "id-2").ok) << "also after a restart of the head";
}

TEST_F(HeadStorageTest, TakeoverTellsTheLoserByName) {
  Hello("1");
  const JobId loser = Submit("train 1 1 in=/w/ckpt");
  StartRanks(loser);
  EXPECT_FALSE(NewestGrant().takeover);
  ClientSubmit submit{"again 1 1 in=/w/ckpt", {}, "/runs/{job}"};
  submit.takeover = true;
  const ClientReply reply = FromClient(submit);
  ASSERT_TRUE(reply.ok) << reply.error;
  EXPECT_TRUE(NewestGrant().takeover);
  EXPECT_THAT(NewestGrant().live_jobs, ElementsAre(NewestGrant().job, loser));
  EXPECT_THAT(json::parse(FromClient(ClientWhy{loser}).json).at("events").dump(),
              HasSubstr("job again-2 of user1 takes over /w/ckpt"));
  const JobRecord record = Stored(JobId("again-2"));
  EXPECT_TRUE(record.takeover);
  EXPECT_THAT(record.grant->live_jobs, IsEmpty()) << "in no record";
}

// Jobs whose programs chose their directories count, too: a rank that finds such a job in a directory must
// not take it for over.
TEST_F(HeadStorageTest, LiveJobsAreThoseThatMaySave) {
  Hello("1", 64);
  Submit("own 1 1");
  Submit("eval 1 1 reads=/w/ckpt");
  const JobId over = Submit("over 1 1 in=/over");
  StartRanks(over);
  FromNode("1", RankExited{Exit(over, 1, 0, 0)});
  ASSERT_EQ(State(over), "SUCCEEDED");
  for (int i = 0; i < 3; ++i) Submit(absl::StrCat("s 1 1 in=/d", i));
  EXPECT_THAT(NewestGrant().live_jobs, Not(testing::Contains(JobId("eval-2"))));
  EXPECT_THAT(NewestGrant().live_jobs, Not(testing::Contains(over)));
  EXPECT_THAT(NewestGrant().live_jobs, testing::IsSupersetOf({JobId("own-1"), JobId("s-4"), JobId("s-5")}));
}

TEST_F(HeadStorageTest, TheSameFileAgainWhereItsProgramChoosesTheDirectory) {
  Hello("1", 64);
  const JobId first = Submit("train 1 1");
  StartRanks(first);
  const JobId beside = Submit("train 1 1");
  FromClient(ClientStop{beside, true});
  FromNode("1",
           CheckpointReport{.job = first, .generation = {1}, .timeline = {1}, .step = 7, .manifest = "m/7"});
  const ClientReply refused = FromClient(ClientSubmit{"train 1 1", {}, "/r"});
  EXPECT_FALSE(refused.ok) << "nothing keeps apart what the two save";
  for (const char* word : {"job train-1 of user1", "to a folder that its program chose", "started 1s ago",
                           "gtrain attach train-1", "gtrain stop train-1", "--takeover"})
    EXPECT_THAT(refused.error, HasSubstr(word));
  Submit("train 2 2");
  Submit("other 1 1");
  ClientSubmit takes{"train 1 1", {}, "/runs/{job}"};
  takes.takeover = true;
  EXPECT_TRUE(FromClient(takes).ok);
}

// On the local cluster each launch puts the values of its secrets into a folder of its own.
TEST_F(HeadStorageTest, TheSameFileAgainWithItsSecretsElsewhere) {
  Hello("1", 64);
  const JobId first = Submit("train 1 1 secret=/secrets/1/KEY");
  StartRanks(first);
  FromNode("1",
           CheckpointReport{.job = first, .generation = {1}, .timeline = {1}, .step = 7, .manifest = "m/7"});
  const ClientReply refused = FromClient(ClientSubmit{"train 1 1 secret=/secrets/2/KEY", {}, "/r"});
  EXPECT_FALSE(refused.ok);
  EXPECT_THAT(refused.error, HasSubstr("to a folder that its program chose"));
  Submit("train 1 1");
  Submit("train 2 2 secret=/secrets/2/KEY");
}

}  // namespace
}  // namespace gtrain::core
