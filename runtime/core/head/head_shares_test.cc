// Tests the shares of one user, and of one job, in the head that all use together.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "runtime/core/head/head_test_world.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;

class HeadSharesTest : public HeadTestWorld {
 protected:
  std::vector<std::string> EventsOf(const JobId& job, const std::string& kind) {
    const nlohmann::json document = nlohmann::json::parse(FromClient(ClientEvents{job}).json);
    std::vector<std::string> texts;
    for (const auto& event : document.at("events"))
      if (event.at("kind") == kind) texts.push_back(event.at("text"));
    return texts;
  }
  // How many answers of a client's key are remembered.
  int64_t Remembered(const std::string& key) const {
    return std::count_if(disk_.begin(), disk_.end(), [&](const auto& item) {
      return item.first.rfind(absl::StrCat("request/", key, "/"), 0) == 0;
    });
  }
  void StopBy(const std::string& key, int number) {
    const ClientRequest request{absl::StrCat("stop-", number), absl::Seconds(5),
                                ClientStop{JobId("train-1")}};
    Do(head_->Step(PeerMessage{{Role::kAdmin, key, "root"}, "route", "10.0.0.9", request}, clock_.Now()));
  }
};

TEST_F(HeadSharesTest, OneUserLeavesRoomForOthers) {
  config_.live_jobs_per_user_max = 2;
  config_.requests_per_key_max = 3;
  config_.polls_per_user_max = 2;
  Boot();
  const auto submit = [&](const std::string& user) {
    return FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "", Role::kUser, user);
  };
  EXPECT_TRUE(submit("ann").ok);
  EXPECT_TRUE(submit("ann").ok);
  EXPECT_THAT(submit("ann").error, HasSubstr("2 jobs of ann are live, the most this head takes of one user"));
  EXPECT_TRUE(submit("bob").ok);
  StopBy("other", 1);
  for (int i = 0; i < 9; ++i) StopBy("eager", i);
  EXPECT_EQ(Remembered("eager"), 3);
  EXPECT_EQ(Remembered("other"), 1);
  const auto poll = [&](const std::string& id) {
    return FromClient(ClientEvents{JobId("train-2"), 1'000'000, absl::Seconds(20)}, id, Role::kUser, "ann");
  };
  EXPECT_EQ(poll("poll-1").id, "none") << "it waits";
  EXPECT_EQ(poll("poll-2").id, "none");
  EXPECT_THAT(
      poll("poll-3").error,
      HasSubstr("2 requests wait for events for ann, the most this head takes of one user: end some"));
  Pass(absl::Seconds(21), {});
  EXPECT_EQ(poll("poll-4").id, "none") << "those before have been answered";
}

TEST_F(HeadSharesTest, ManyKeysOfOneUserPushOutNobodyElsesAnswers) {
  config_.requests_max = 8;
  config_.requests_per_key_max = 4;
  Boot();
  FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "", Role::kUser, "ann");
  StopBy("other", 1);
  for (int i = 0; i < 4; ++i) {
    for (const char* key : {"eager-1", "eager-2", "eager-3", "eager-4"}) StopBy(key, i);
  }
  EXPECT_EQ(Remembered("other"), 1) << "it is the oldest of all";
}

TEST_F(HeadSharesTest, TheQuestionsOfOneUserLeaveRoomForThoseOfOthers) {
  config_.queries_per_user_max = 2;
  Boot();
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  const auto ask = [&](const std::string& user, ClientRequestBody body) {
    return FromClient(std::move(body), "", Role::kAdmin, user);
  };
  EXPECT_EQ(ask("ann", ClientLogs{job}).id, "none") << "the agent is asked";
  EXPECT_EQ(ask("ann", ClientExec{job, 0, {"env"}}).id, "none");
  EXPECT_THAT(ask("ann", ClientLogs{job}).error, HasSubstr("2 log reads and commands are open for ann"));
  EXPECT_THAT(ask("ann", ClientExec{job, 0, {"env"}}).error, HasSubstr("are open for ann"));
  EXPECT_EQ(ask("bob", ClientLogs{job}).id, "none");

  const auto asked = Sent<AgentQuery>();
  ASSERT_EQ(asked.size(), 3u);
  FromNode("1", AgentAnswer{asked[0].second.query, true, "words"});
  EXPECT_EQ(ask("ann", ClientLogs{job}).id, "none") << "one was answered";
  EXPECT_THAT(ask("ann", ClientLogs{job}).error, HasSubstr("are open for ann"));
  Pass(config_.query_timeout + absl::Seconds(1), {"1"});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask("ann", ClientLogs{job}).id, "none") << "their time was up";
  EXPECT_THAT(ask("ann", ClientLogs{job}).error, HasSubstr("are open for ann"));
}

TEST_F(HeadSharesTest, QuestionsThatNoAgentIsAskedTakeNoPlace) {
  config_.queries_per_user_max = 1;
  Boot();
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Pass(config_.dead_after * 2 + config_.agent_grace, {});
  for (int i = 0; i < 3; ++i)
    EXPECT_THAT(FromClient(ClientLogs{job}, "", Role::kAdmin, "ann").error, HasSubstr("is not connected"));
}

TEST_F(HeadSharesTest, WhatRanksSayIsToldInMeasure) {
  config_.notes_burst = 5;
  Boot();
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  for (int i = 1; i <= 50; ++i) FromNode("1", AgentNote{job, {1}, 0, kOwnerNote, absl::StrCat("owner ", i)});
  for (int i = 1; i <= 50; ++i) {
    FromNode("1", AgentNote{job, {1}, 0, kSavesNote, "full"});
    FromNode("1", AgentNote{job, {1}, 0, kSavesNote, ""});
    FromNode("1", AgentNote{job, {1}, 0, "log-dropped", "bytes"});
  }
  EXPECT_EQ(EventsOf(job, kOwnerNote).size(), 5u);
  EXPECT_EQ(EventsOf(job, kSavesNote).size() + EventsOf(job, "log-dropped").size(), 0u);
  EXPECT_EQ(Status(job).at("owner"), "owner 50") << "what they told of is known all the same";

  FromNode("1", AgentNote{job, {1}, 0, kSamplesNote, "train: a record"});
  ASSERT_EQ(EventsOf(job, kSamplesNote).size(), 1u) << "other notes take none of its room";
  EXPECT_THAT(EventsOf(job, kSamplesNote)[0], testing::EndsWith("train: a record")) << "a program reads it";
  for (int i = 0; i < 2 * config_.samples_burst; ++i)
    FromNode("1", AgentNote{job, {1}, 0, kSamplesNote, absl::StrCat("train: ", i)});
  EXPECT_EQ(EventsOf(job, kSamplesNote).size(), static_cast<size_t>(config_.samples_burst));

  Pass(absl::Seconds(2), {"1"});
  FromNode("1", AgentNote{job, {1}, 0, kOwnerNote, "another"});
  EXPECT_THAT(EventsOf(job, kOwnerNote).back(), HasSubstr("another (696 notes before this are not listed)"));

  const JobId other = Submit("train 1 1");
  StartRanks(other);
  FromNode("1", AgentNote{other, {1}, 0, kOwnerNote, "mine"});
  EXPECT_EQ(EventsOf(other, kOwnerNote).size(), 1u) << "each job has its own measure";
}

// To take the directory of a job that runs is to end that job.
TEST_F(HeadSharesTest, NobodyTakesTheDirectoryOfSomebodyElsesJob) {
  Boot();
  Hello("1");
  const auto submit = [&](const std::string& user, const std::string& job, bool takeover,
                          Role role = Role::kUser) {
    ClientSubmit request{job, {}, "/r/{job}"};
    request.takeover = takeover;
    return FromClient(request, "", role, user);
  };
  ASSERT_TRUE(submit("ann", "mine 1 1 in=/w/ckpt", false).ok);
  const ClientReply refused = submit("bob", "his 1 1 in=/w/ckpt", true);
  EXPECT_FALSE(refused.ok);
  EXPECT_THAT(refused.error, HasSubstr("job mine-1 belongs to ann"));
  const ClientReply told = submit("bob", "his 1 1 in=/w/ckpt", false);
  EXPECT_THAT(told.error, HasSubstr("ask ann or an administrator"));
  EXPECT_THAT(told.error, ::testing::Not(HasSubstr("gtrain stop"))) << "which bob may not";
  EXPECT_TRUE(submit("ann", "mine 1 1 in=/w/ckpt", true).ok);
  EXPECT_TRUE(submit("root", "admins 1 1 in=/w/ckpt", true, Role::kAdmin).ok);
}

// The right of a launch to take a directory is checked again when it starts: the other job may run by then.
TEST_F(HeadSharesTest, ATakeoverThatWaitedTakesNothingThatStartedMeanwhile) {
  for (const Role role : {Role::kUser, Role::kAdmin}) {
    disk_.clear();
    Boot();
    Hello("1", 2);
    ClientSubmit late{"late 2 2 one-per-node in=/w/ckpt", {}, "/r/{job}"};  // there is no room for it yet
    late.takeover = true;
    ASSERT_TRUE(FromClient(late, "", role, "bob").ok);
    ASSERT_TRUE(FromClient(ClientSubmit{"mine 1 1 in=/w/ckpt", {}, "/r/{job}"}, "", Role::kUser, "ann").ok);
    StartRanks(JobId("mine-2"));
    ASSERT_EQ(Stored(JobId("mine-2")).state, JobState::kRunning);
    Boot();  // the head is another one by then
    const JobId mine("mine-2");
    Hello("1", 2, {HeldGeneration{mine, {1}, {0}, {Step(mine, 1, 0, 7)}, {}}});
    Hello("2", 2);
    Pass(absl::Minutes(1), {"1", "2"});
    const std::string why = FromClient(ClientWhy{JobId("mine-2")}, "", Role::kUser, "ann").json;
    if (role == Role::kAdmin) {
      EXPECT_EQ(Stored(JobId("late-1")).generation, Generation{1});
      EXPECT_THAT(why, HasSubstr("job late-1 of bob takes over"));
    } else {
      EXPECT_EQ(Stored(JobId("late-1")).generation, Generation{0});
      EXPECT_EQ(Stored(JobId("late-1")).state, JobState::kFailed);
      EXPECT_THAT(Stored(JobId("late-1")).reason, HasSubstr("job mine-2 of ann saves its checkpoints"));
    }
  }
}

// The history of others is not the price of one user's many short jobs.
TEST_F(HeadSharesTest, TheOldestOfWhoHasMostJobsIsForgotten) {
  config_.jobs_max = 20;
  Boot();
  const auto run = [&](const std::string& user) {
    const ClientReply reply = FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "", Role::kUser, user);
    const JobId job(nlohmann::json::parse(reply.json).at("job").get<std::string>());
    FromClient(ClientStop{job}, "", Role::kUser, user);
  };
  for (int i = 0; i < 5; ++i) run("ann");
  for (int i = 0; i < 60; ++i) run("bob");
  for (int i = 1; i <= 5; ++i) EXPECT_EQ(Stored(JobId(absl::StrCat("train-", i))).owner, "ann");
  EXPECT_FALSE(disk_.contains(KeyOf(JobStatusRecord{JobId("train-6")})));
}

TEST_F(HeadSharesTest, AJobThatNeverRanKeepsNobodyElseOut) {
  Boot();
  Hello("1");
  const auto submit = [&](const std::string& user, const std::string& job) {
    return FromClient(ClientSubmit{job, {}, "/r/{job}"}, "", Role::kUser, user);
  };
  ASSERT_TRUE(submit("bob", "blocks 99 99 in=/w/ckpt").ok);  // there is no room for it yet
  EXPECT_FALSE(submit("bob", "again 1 1 in=/w/ckpt").ok) << "his own two would take it from each other";
  ASSERT_TRUE(submit("ann", "mine 1 1 in=/w/ckpt").ok);
  StartRanks(JobId("mine-2"));
  Hello("2", 200);  // now there is
  EXPECT_EQ(Stored(JobId("blocks-1")).state, JobState::kFailed);
  EXPECT_THAT(Stored(JobId("blocks-1")).reason,
              HasSubstr("job mine-2 of ann saves its checkpoints to /w/ckpt"));
  EXPECT_EQ(Stored(JobId("mine-2")).state, JobState::kRunning);
}

// The waiting job may be the newer of the two: it is not told to stop itself.
TEST_F(HeadSharesTest, WhoWaitedIsToldWhoHasTheDirectory) {
  Boot();
  Hello("1");
  const auto submit = [&](const std::string& user, const std::string& job) {
    return FromClient(ClientSubmit{job, {}, "/r/{job}"}, "", Role::kUser, user);
  };
  ASSERT_TRUE(submit("ann", "mine 8 8 in=/w/ckpt").ok);
  ASSERT_TRUE(submit("bob", "late 99 99 in=/w/ckpt").ok);
  Hello("2", 8);
  StartRanks(JobId("mine-1"));
  ASSERT_EQ(Stored(JobId("mine-1")).state, JobState::kRunning);
  Hello("3", 200);
  EXPECT_EQ(Stored(JobId("late-2")).state, JobState::kFailed);
  EXPECT_THAT(Stored(JobId("late-2")).reason,
              HasSubstr("job mine-1 of ann saves its checkpoints to /w/ckpt"));
}

TEST_F(HeadSharesTest, LargeJobsOfOneUserAreBounded) {
  config_.live_jobs_bytes_per_user_max = 300'000;
  config_.jobs_bytes_max = 250'000;
  Boot();
  const auto submit = [&](const std::string& user, size_t bytes) {
    return FromClient(ClientSubmit{"train 1 1", {{"A", std::string(bytes, 'x')}}, "/r"}, "", Role::kUser,
                      user);
  };
  ASSERT_TRUE(submit("ann", 10'000).ok);
  FromClient(ClientStop{JobId("train-1")}, "", Role::kUser, "ann");
  EXPECT_TRUE(submit("bob", 140'000).ok);
  EXPECT_TRUE(submit("bob", 140'000).ok);
  EXPECT_THAT(submit("bob", 140'000).error, HasSubstr("live jobs of bob and of this one are more than"));
  for (const char* job : {"train-2", "train-3"}) FromClient(ClientStop{JobId(job)}, "", Role::kUser, "bob");
  EXPECT_TRUE(submit("bob", 140'000).ok);
  EXPECT_THAT(FromClient(ClientWhy{JobId("train-2")}, "", Role::kUser, "bob").error,
              HasSubstr("no job train-2"));
  EXPECT_EQ(Stored(JobId("train-1")).owner, "ann") << "the oldest, but not of who has most";
}

// The live jobs of a user are no reason to keep more of the finished jobs of others.
TEST_F(HeadSharesTest, JobsThatAreOverAreBoundedWhoeverHasMostThatLive) {
  config_.jobs_bytes_max = 1'000'000;
  Boot();
  const auto submit = [&](const std::string& user) {
    return FromClient(ClientSubmit{"train 1 1", {{"A", std::string(100'000, 'x')}}, "/r"}, "", Role::kUser,
                      user);
  };
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(submit("ann").ok);
  for (int i = 21; i <= 60; ++i) {
    const std::string user = absl::StrCat("user", i % 4);
    ASSERT_TRUE(submit(user).ok);
    FromClient(ClientStop{JobId(absl::StrCat("train-", i))}, "", Role::kUser, user);
  }
  ASSERT_TRUE(submit("ann").ok);
  size_t over = 0;
  for (int i = 21; i <= 60; ++i)
    over += disk_.contains(KeyOf(JobStatusRecord{JobId(absl::StrCat("train-", i))}));
  EXPECT_GE(over, 4u);
  EXPECT_LE(over, 5u) << "of 100 kB each, as text and as what was read from it";
}

// The last output of 1,000 ranks is kept only where it explains something, and the kept bytes are counted.
TEST_F(HeadSharesTest, WhatRanksOfOldJobsSaidIsBounded) {
  config_.jobs_bytes_max = 250'000;
  Boot();
  Hello("1", 16);
  const auto run = [&](int number, int exit_code) {
    const JobId job(absl::StrCat("train-", number));
    ASSERT_TRUE(FromClient(ClientSubmit{"train 16 16", {}, "/r"}).ok);
    StartRanks(job);
    for (int rank = 0; rank < 16; ++rank) {
      FromNode("1", RankExited{Exit(job, 1, rank, exit_code, std::string(20'000, 't'))});
    }
    FromNode("1", GenerationGone{job, {1}});
  };
  run(1, 0);
  EXPECT_EQ(Stored(JobId("train-1")).state, JobState::kSucceeded);
  for (const RankExit& exit : Stored(JobId("train-1")).exits) EXPECT_EQ(exit.tail, "");
  for (int number = 2; number <= 8; ++number) run(number, 93);
  EXPECT_EQ(Stored(JobId("train-8")).state, JobState::kFailed);
  EXPECT_EQ(Stored(JobId("train-8")).exits[0].tail.size(), 2'048u) << "it tells why";
  ASSERT_TRUE(FromClient(ClientSubmit{"train 16 16", {}, "/r"}).ok);
  int kept = 0;
  for (int number = 2; number <= 8; ++number)
    kept += disk_.contains(KeyOf(JobStatusRecord{JobId(absl::StrCat("train-", number))}));
  EXPECT_GE(kept, 1);
  EXPECT_LE(kept, 4) << "of 32 kB of words each, and the job";
}

// A record that keeps others away from ranks that may still run is not forgotten for want of room.
TEST_F(HeadSharesTest, AJobWhoseNodeHasNotConfirmedIsKept) {
  config_.jobs_max = 2;
  Boot();
  Hello("1", 4);
  ASSERT_TRUE(FromClient(ClientSubmit{"train 4 4", {}, "/r"}).ok);
  StartRanks(JobId("train-1"));
  FromClient(ClientStop{JobId("train-1"), true});
  Pass(absl::Minutes(5), {"1"});  // its agent lives, and says nothing of the job
  ASSERT_EQ(Stored(JobId("train-1")).state, JobState::kCancelled);
  ASSERT_FALSE(Stored(JobId("train-1")).unreleased.empty());
  for (int number = 2; number <= 6; ++number) {
    ASSERT_TRUE(FromClient(ClientSubmit{"train 9 9", {}, "/r"}).ok);
    FromClient(ClientStop{JobId(absl::StrCat("train-", number))});
  }
  EXPECT_FALSE(Stored(JobId("train-1")).unreleased.empty());
  EXPECT_FALSE(disk_.contains(KeyOf(JobStatusRecord{JobId("train-4")})));
}

TEST_F(HeadSharesTest, OthersPushNobodysOwnJobsOutOfTheList) {
  Boot();
  const auto run = [&](const std::string& user) {
    const ClientReply reply = FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "", Role::kUser, user);
    const JobId job(nlohmann::json::parse(reply.json).at("job").get<std::string>());
    FromClient(ClientStop{job}, "", Role::kUser, user);
  };
  run("ann");
  for (int i = 0; i < 120; ++i) run("bob");
  const auto listed = [&](const std::string& user, int over = 0) {
    return nlohmann::json::parse(FromClient(ClientStatus{JobId(), over}, "", Role::kUser, user).json);
  };
  EXPECT_EQ(listed("ann").at("jobs")[0].at("id"), "train-1");
  EXPECT_EQ(listed("ann").at("jobs").size(), 101u);
  EXPECT_EQ(listed("bob").at("jobs").size(), 100u);
  EXPECT_EQ(listed("bob").at("omitted"), 21);
  EXPECT_EQ(listed("bob", 120).at("jobs").size(), 120u);
  EXPECT_EQ(listed("bob", 120).at("omitted"), 1);
  EXPECT_EQ(listed("bob", ClientStatus::kOverMax).at("jobs").size(), 121u);
}

TEST_F(HeadSharesTest, WhatEndedLastIsListedHoweverManyBeganAfterIt) {
  Boot();
  const auto submit = [&] {
    const ClientReply reply = FromClient(ClientSubmit{"train 1 1", {}, "/r"}, "", Role::kUser, "bob");
    return JobId(nlohmann::json::parse(reply.json).at("job").get<std::string>());
  };
  const JobId overnight = submit();
  for (int i = 0; i < 120; ++i) {
    FromClient(ClientStop{submit()}, "", Role::kUser, "bob");
    clock_.Advance(absl::Seconds(1));
  }
  FromClient(ClientStop{overnight}, "", Role::kUser, "bob");
  const auto listed =
      nlohmann::json::parse(FromClient(ClientStatus{}, "", Role::kUser, "bob").json).at("jobs");
  EXPECT_EQ(listed.size(), 100u);
  EXPECT_EQ(listed[0].at("id"), overnight.value);
}

// The head that heard it first may have ended between the end of the job and its event.
TEST_F(HeadSharesTest, TheLastWordOfDataIsAnEventOnceAlsoOfAJobThatIsOver) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", AgentNote{job, {1}, 0, kSamplesNote, "train: begins"});
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  ASSERT_EQ(State(job), "SUCCEEDED");
  for (int told = 0; told < 2; ++told) {
    FromNode("1", AgentNote{job, {1}, 0, kSamplesNote, "train: begins"});
    FromNode("1", AgentNote{job, {1}, 0, kSamplesNote, "train: ends"});
  }
  const std::vector<std::string> events = Events(job, kSamplesNote);
  ASSERT_THAT(events, testing::SizeIs(2));
  EXPECT_THAT(events[0], testing::EndsWith("train: begins"));
  EXPECT_THAT(events[1], testing::EndsWith("train: ends"));
}

}  // namespace
}  // namespace gtrain::core
