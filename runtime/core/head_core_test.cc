#include "runtime/core/head_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "runtime/core/outbox.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// "name min max [key=value ...]" stands for the job file; the real parser is launcher/spec.
absl::StatusOr<spec::JobSpec> ParseFake(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  if (words.size() < 3) return absl::InvalidArgumentError("fake spec: name min max");
  spec::JobSpec spec;
  spec.name = words[0];
  spec.ranks = spec::Range{std::stoi(words[1]), std::stoi(words[2])};
  for (const std::string& word : words) {
    if (word == "one-per-node") spec.ranks_per_node = 1;
    if (word == "budget0") spec.restart.budget = 0;
    if (word == "limit60s") spec.time_limit = absl::Seconds(60);
    if (word == "stall-kill") {
      spec.progress.step = "step";
      spec.progress.on_stall = spec::OnStall::kKill;
    }
  }
  return spec;
}

// A head between a disk that is as fast as told and agents that do as told.
class HeadCoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_.cluster = ClusterId("c");
    config_.parse_job = ParseFake;
    Boot();
  }

  void Boot() {
    head_ = std::make_unique<HeadCore>(config_, Rng(7));
    outbox_ = Outbox();
    sent_.clear();
    std::vector<Record> records;
    for (const auto& [key, record] : disk_) records.push_back(record);
    auto recovered = head_->Recover(records, clock_.Now());
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    Do(*std::move(recovered));
  }

  void Do(StepResult step) {
    for (Effect& effect : outbox_.Add(std::move(step))) sent_.push_back(std::move(effect));
    if (!disk_works_) return;
    while (auto batch = outbox_.NextBatch()) {
      for (const RecordWrite& write : batch->writes) {
        if (write.record) {
          disk_[write.key] = *write.record;
        } else {
          disk_.erase(write.key);
        }
      }
      for (Effect& effect : outbox_.Durable(batch->sequence)) sent_.push_back(std::move(effect));
    }
  }

  void FromNode(const std::string& node, Message message) {
    Do(head_->Step(PeerMessage{{Role::kNode, node}, "route-" + node, "10.0.0.1", std::move(message)},
                   clock_.Now()));
  }

  ClientReply FromClient(ClientRequestBody body, std::string id = "", Role role = Role::kUser) {
    if (id.empty()) id = absl::StrCat("request-", ++requests_);
    Do(head_->Step(
        PeerMessage{{role, "user1"}, "client", "10.0.0.9", ClientRequest{id, absl::Seconds(5), body}},
        clock_.Now()));
    for (auto it = sent_.rbegin(); it != sent_.rend(); ++it) {
      const auto* reply = std::get_if<ReplyToClient>(&*it);
      if (reply != nullptr && reply->reply.id == id) return reply->reply;
    }
    return ClientReply{"none"};
  }

  void Hello(const std::string& node, int cpus = 4, std::vector<HeldGeneration> held = {},
             std::string incarnation = "1") {
    AgentHello hello;
    hello.cluster = ClusterId("c");
    hello.incarnation = Incarnation(incarnation);
    hello.hostname = "host-" + node;
    hello.address = "10.0.0." + node;
    hello.inventory.cpus = cpus;
    hello.inventory.memory_bytes = uint64_t{8} << 30;
    hello.free_ports = {25000, 25001, 25002};
    hello.held = std::move(held);
    FromNode(node, hello);
  }

  // Lets time pass in heartbeats of the given nodes.
  void Pass(absl::Duration time, std::vector<std::string> alive) {
    const Instant end = clock_.Now() + time;
    while (clock_.Now() < end) {
      clock_.Advance(absl::Milliseconds(500));
      for (const std::string& node : alive) FromNode(node, AgentHeartbeat{++heartbeats_, {}, {}});
      Do(head_->Step(Tick{}, clock_.Now()));
    }
  }

  RankStatus StepOf(const JobId& job, int rank, int64_t step) {
    return {
        .job = job, .generation = {1}, .rank = rank, .pid = 1, .state = RankState::kRunning, .step = step};
  }

  JobId Submit(const std::string& spec) {
    const ClientReply reply = FromClient(ClientSubmit{spec, {}, "/runs/{job}"});
    EXPECT_TRUE(reply.ok) << reply.error;
    return JobId(json::parse(reply.json).at("job").get<std::string>());
  }

  json Status(const JobId& job) { return json::parse(FromClient(ClientStatus{job}).json).at("jobs").at(0); }
  std::string State(const JobId& job) { return Status(job).at("state"); }

  template <typename T>
  std::vector<std::pair<std::string, T>> Sent() const {
    std::vector<std::pair<std::string, T>> all;
    for (const Effect& effect : sent_) {
      const auto* send = std::get_if<SendToNode>(&effect);
      if (send == nullptr) continue;
      if (const T* message = std::get_if<T>(&send->message)) all.emplace_back(send->node.value, *message);
    }
    return all;
  }

  // What the agents of the newest grants answer: all ranks run.
  void StartRanks(const JobId& job) {
    for (const auto& [node, start] : Sent<StartGeneration>()) {
      if (start.grant.job != job) continue;
      RanksStarted started{job, start.grant.generation, {}};
      for (const RankPlace& place : start.grant.ranks) {
        if (place.node.value == node)
          started.ranks.push_back(
              {job, start.grant.generation, place.rank, 100 + place.rank, RankState::kRunning});
      }
      FromNode(node, started);
    }
  }

  RankExit Exit(const JobId& job, uint64_t generation, int rank, int code, std::string tail = "") {
    RankExit exit;
    exit.job = job;
    exit.generation = {generation};
    exit.rank = rank;
    exit.exit_code = code;
    exit.tail = std::move(tail);
    return exit;
  }

  RankStatus Step(const JobId& job, uint64_t generation, int rank, int64_t step) {
    RankStatus status{job, {generation}, rank, 100, RankState::kRunning};
    status.step = step;
    return status;
  }

  HeadConfig config_;
  ManualClock clock_;
  std::unique_ptr<HeadCore> head_;
  Outbox outbox_;
  std::map<std::string, Record> disk_;
  bool disk_works_ = true;
  std::vector<Effect> sent_;
  uint64_t heartbeats_ = 0;
  int requests_ = 0;
};

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
  const json failure = json::parse(std::get<WriteFailure>(*report).json);
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

TEST_F(HeadCoreTest, DeadNodeThatReturnsIsToldAgain_N2) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 2 one-per-node");
  StartRanks(job);
  Pass(absl::Seconds(12), {"1"});
  sent_.clear();
  FromNode("2", AgentHeartbeat{1, {}, {}});
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(1));
  EXPECT_EQ(revokes[0].first, "2");
  EXPECT_EQ(revokes[0].second.generation.value, 1u);
}

TEST_F(HeadCoreTest, SecondAgentWithTheSameKeyIsRefused_N4) {
  Hello("1");
  sent_.clear();
  AgentHello hello;
  hello.cluster = ClusterId("c");
  hello.incarnation = Incarnation("other");
  Do(head_->Step(PeerMessage{{Role::kNode, "1"}, "route-rival", "10.0.0.7", hello}, clock_.Now()));
  EXPECT_THAT(Sent<AgentWelcome>(), IsEmpty());
  Pass(absl::Milliseconds(500), {"1"});
  const auto refused = std::find_if(sent_.begin(), sent_.end(),
                                    [](const Effect& e) { return std::holds_alternative<RefusePeer>(e); });
  ASSERT_NE(refused, sent_.end());
  EXPECT_EQ(std::get<RefusePeer>(*refused).route, "route-rival");
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "route-1");
}

TEST_F(HeadCoreTest, NewIncarnationIsTakenWhenTheOldOneIsSilent_N3) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  AgentHello hello;
  hello.cluster = ClusterId("c");
  hello.incarnation = Incarnation("rebooted");
  hello.hostname = "host-1";
  hello.inventory.cpus = 4;
  Do(head_->Step(PeerMessage{{Role::kNode, "1"}, "route-new", "10.0.0.1", hello}, clock_.Now()));
  Pass(absl::Seconds(4), {});
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "route-new");
  EXPECT_EQ(Status(job).at("last_fault").at("kind"), "infrastructure");
  EXPECT_EQ(Status(job).at("generation"), 2) << "nothing of the old life can be left on a rebooted node";
}

TEST_F(HeadCoreTest, ForeignClusterAndOtherProtocolAreRefused_N13) {
  AgentHello hello;
  hello.cluster = ClusterId("other");
  FromNode("9", hello);
  hello.cluster = ClusterId("c");
  hello.protocol = 99;
  FromNode("9", hello);
  EXPECT_EQ(head_->counters().refused, 2u);
  EXPECT_THAT(Sent<AgentWelcome>(), IsEmpty());
}

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

// All ranks have ended and are acknowledged, but a descendant may still run: only "gone" releases.
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

TEST_F(HeadCoreTest, LogsComeFromTheAgentOrFromTheMirror) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", LogTail{job, {1}, 0, false, 100, "last words\n"});
  FromClient(ClientLogs{job}, "logs1");
  ASSERT_THAT(Sent<AgentQuery>(), SizeIs(1));
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

TEST_F(HeadCoreTest, EventsAreALongPoll) {
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
  EXPECT_NE(reply, sent_.end());
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

TEST_F(HeadCoreTest, StallNamesTheCulpritAndEndsItOnlyWhenAsked) {
  Hello("1");
  const JobId job = Submit("train 2 2 stall-kill");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 9), Step(job, 1, 1, 4)}, {}});
  sent_.clear();
  Pass(absl::Minutes(16), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("rank 1 on host-1 is furthest behind (step 4)"));
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
  EXPECT_EQ(other.Recover({record}, clock_.Now()).status().code(), absl::StatusCode::kFailedPrecondition);
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

}  // namespace
}  // namespace gtrain::core
