// Lost and older records, newer heads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RecoveryTest : public HeadTestWorld {
 protected:
  // The records are gone; a person has said `gtrain head recover`.
  void LoseRecords() {
    disk_.clear();
    ClusterRecord cluster;
    cluster.cluster = ClusterId("c");
    cluster.epoch = HeadEpoch{5'000};
    cluster.next_job = 1'000;
    cluster.recovering = true;
    disk_["cluster"] = cluster;
  }
  // The description that node's agent would send of its grant.
  GenerationDescribed Described(const GenerationGrant& grant, const std::string& node, uint64_t revoked = 0) {
    GenerationDescribed described;
    described.grant = grant;
    described.held = Holds(grant, node, revoked);
    return described;
  }
  HeldGeneration Holds(const GenerationGrant& grant, const std::string& node, uint64_t revoked = 0) {
    HeldGeneration held{grant.job, grant.generation, {revoked}};
    for (const RankPlace& place : grant.ranks) {
      if (place.node.value == node)
        held.live.push_back(Step(grant.job, grant.generation.value, place.rank, 7));
    }
    return held;
  }
};

TEST_F(RecoveryTest, TotalLossTakesUpWhatAgentsDescribe_H8) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  const GenerationGrant grant = Sent<StartGeneration>().at(0).second.grant;
  StartRanks(job);
  LoseRecords();
  Boot();
  Hello("1", 4, {Holds(grant, "1")});
  ASSERT_TRUE(Sent<AgentWelcome>().at(0).second.describe);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "unknown, but about to be described";
  FromNode("1", Described(grant, "1"));
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("generation"), 1);
  // The other node may still be on its way.
  Pass(absl::Seconds(5), {"1"});
  Hello("2", 4, {Holds(grant, "2")});
  FromNode("2", Described(grant, "2"));
  Pass(absl::Seconds(60), {"1", "2"});
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "no healthy rank is ended";
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  // The client that submitted it asks again, not having heard.
  const ClientReply again =
      FromClient(ClientSubmit{"train 2 2 one-per-node", {}, "/runs/{job}"}, "request-1");
  EXPECT_EQ(json::parse(again.json).at("job"), job.value);
  EXPECT_GE(json::parse(FromClient(ClientSubmit{"other 1 1", {}, "/r"}).json).at("job"), "other-1000");
  for (int rank = 0; rank < 2; ++rank) FromNode(rank == 0 ? "1" : "2", RankExited{Exit(job, 1, rank, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
}

// The node that has the processes of a job may come before the one that can describe it.
TEST_F(RecoveryTest, ProcessesThatWaitAreNotEndedBeforeTheirJobIsTold_H8) {
  Hello("1");
  LoseRecords();
  Boot();
  sent_.clear();
  kept_hello_ = {{JobId("train-1"), {{{1}, 0}}}};
  Hello("1");
  EXPECT_THAT(Sent<ForgetJob>(), IsEmpty());
  disk_.clear();
  Boot();
  sent_.clear();
  Hello("1");
  EXPECT_THAT(Sent<ForgetJob>(), SizeIs(1)) << "a head that is whole knows all jobs";
}

TEST_F(RecoveryTest, WithoutAPersonsWordAnUnknownJobIsEnded_H8) {
  Hello("1");
  Submit("train 1 1");
  const GenerationGrant grant = Sent<StartGeneration>().at(0).second.grant;
  disk_.clear();
  Boot();
  Hello("1", 4, {Holds(grant, "1")});
  EXPECT_FALSE(Sent<AgentWelcome>().at(0).second.describe);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
  FromNode("1", Described(grant, "1"));
  EXPECT_EQ(json::parse(FromClient(ClientStatus{}).json).at("jobs").size(), 0u);
}

// One record that cannot be read costs the others nothing, and the ranks of its job nothing either.
TEST_F(RecoveryTest, AJobWhoseRecordIsSetAsideIsTakenUpAndNoOther) {
  Hello("1");
  const JobId job = Submit("train 1 1"), other = Submit("other 1 1");
  const auto starts = Sent<StartGeneration>();
  ASSERT_THAT(starts, SizeIs(2));
  StartRanks(job);
  StartRanks(other);
  disk_.erase("job/" + job.value);
  set_aside_ = {"job/" + job.value, "request/k/r"};
  Boot();
  GenerationGrant unknown = starts[0].second.grant;
  unknown.job = JobId("stranger-7");
  Hello("1", 4,
        {Holds(starts[0].second.grant, "1"), Holds(starts[1].second.grant, "1"), Holds(unknown, "1")});
  EXPECT_TRUE(Sent<AgentWelcome>().at(0).second.describe);
  FromNode("1", Described(starts[0].second.grant, "1"));
  Pass(absl::Seconds(60), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_EQ(Sent<Revoke>().at(0).second.job.value, "stranger-7");
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(State(other), "RUNNING");
  EXPECT_TRUE(disk_.contains("job/" + job.value));
}

TEST_F(RecoveryTest, AStopThatAgentsHeardStaysAStop_H8) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  const GenerationGrant grant = Sent<StartGeneration>().at(0).second.grant;
  LoseRecords();
  Boot();
  GenerationDescribed described = Described(grant, "1", 1);
  described.held.stopping = true;
  Hello("1", 4, {described.held});
  FromNode("1", described);
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "CANCELLED");
  Pass(absl::Seconds(60), {"1"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
}

// Its ranks were told at once; it was answered that the stop is not stored, and then the head ended.
TEST_F(RecoveryTest, AStopThatCouldNotBeStoredStaysAStop_H3) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  const GenerationGrant grant = Sent<StartGeneration>().at(0).second.grant;
  StartRanks(job);
  const std::map<std::string, Record> before = disk_;
  FromClient(ClientStop{job});
  disk_ = before;  // it was full
  Boot();
  HeldGeneration held = Holds(grant, "1", 1);
  held.stopping = true;
  held.live.clear();
  held.exited.push_back(Exit(job, 1, 0, 1));  // no fault: it was told to end
  Hello("1", 4, {held});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "CANCELLED");
  Pass(absl::Seconds(60), {"1"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
}

TEST_F(RecoveryTest, ARestoredHeadTakesUpNewerGenerations_H9) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1");
  const std::string first = Sent<StartGeneration>().at(0).first, second = first == "1" ? "2" : "1";
  StartRanks(job);
  const std::map<std::string, Record> backup = disk_;
  GenerationGrant newer = Sent<StartGeneration>().at(0).second.grant;
  newer.generation = {4};
  newer.timeline = {4};
  newer.ranks[0].node = newer.nodes[0].node = NodeId(second);
  disk_ = backup;
  std::get<ClusterRecord>(disk_["cluster"]).recovering = true;
  Boot();
  Hello(first);  // holds nothing of generation 1 any more
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "not judged before the others have spoken";
  Hello(second, 4, {Holds(newer, second, 3)});
  FromNode(second, Described(newer, second, 3));
  Pass(absl::Seconds(40), {"1", "2"});
  EXPECT_EQ(Status(job).at("generation"), 4);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
}

TEST_F(RecoveryTest, ALateNewerGenerationAfterANewGrantIsRevoked_H9) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  GenerationGrant newer = Sent<StartGeneration>().at(0).second.grant;
  newer.generation = {5};
  newer.ranks[0].node = newer.nodes[0].node = NodeId("2");
  StartRanks(job);
  std::get<ClusterRecord>(disk_["cluster"]).recovering = true;
  Boot();
  Hello("1");
  Pass(absl::Seconds(30), {"1"});  // settled: its rank is lost, granted anew
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(30), {"1"});
  ASSERT_THAT(Sent<StartGeneration>(), SizeIs(1));
  sent_.clear();
  Hello("2", 4, {Holds(newer, "2", 4)});
  FromNode("2", Described(newer, "2", 4));
  const auto revokes = Sent<Revoke>();
  ASSERT_FALSE(revokes.empty());
  for (const auto& [node, revoke] : revokes) EXPECT_EQ(revoke.generation.value, 5u);
  for (const char* node : {"1", "2"}) FromNode(node, GenerationGone{job, {5}});
  Pass(absl::Seconds(30), {"1", "2"});
  ASSERT_THAT(Sent<StartGeneration>(), SizeIs(1));
  EXPECT_EQ(Sent<StartGeneration>().at(0).second.grant.generation.value, 6u);
}

class SealTest : public RecoveryTest {
 protected:
  void SetUp() override {
    config_.seal_grant = [](const GenerationGrant& grant) {
      return GrantSeal{absl::StrCat(grant.job.value, " ", grant.generation.value), "ours"};
    };
    config_.proves_grant = [](const GrantSeal& seal) { return seal.mac == "ours"; };
    RecoveryTest::SetUp();
  }
  // A job whose ranks run on node 1, as its agent describes it to a head without records.
  GenerationDescribed LoseRunningJob(bool keeps_seals = true) {
    Hello("1");
    AgentHello hello{.cluster = ClusterId("c"), .incarnation = Incarnation("1"), .hostname = "host-1"};
    hello.inventory.cpus = 4;
    hello.keeps_seals = keeps_seals;
    FromNode("1", hello);
    job_ = Submit("train 1 1");
    const StartGeneration start = Sent<StartGeneration>().at(0).second;
    StartRanks(job_);
    GenerationDescribed described = Described(start.grant, "1");
    described.seal = start.seal;
    LoseRecords();
    Boot();
    Hello("1", 4, {described.held});
    return described;
  }
  size_t Jobs() { return json::parse(FromClient(ClientStatus{}).json).at("jobs").size(); }
  void AcceptUnsealed() {
    std::get<ClusterRecord>(disk_["cluster"]).accept_unsealed = true;
    Boot();
  }
  JobId job_;
};

TEST_F(SealTest, WhatTheHeadGrantedIsTakenUp_H8) {
  const GenerationDescribed described = LoseRunningJob();
  EXPECT_EQ(described.seal.mac, "ours");
  FromNode("1", described);
  EXPECT_EQ(State(job_), "RUNNING");
}

TEST_F(SealTest, AnAgentThatKeepsNoSealsGetsNone) { EXPECT_TRUE(LoseRunningJob(false).seal.bytes.empty()); }

// A node that somebody else controls describes a job that nobody submitted, to run on another node.
TEST_F(SealTest, WhatNoHeadGrantedRunsNowhere_X4) {
  GenerationDescribed forged = LoseRunningJob();
  Hello("2");
  forged.seal.mac = "made up";
  forged.grant.generation = forged.held.generation = Generation{9};
  NodePlace other = forged.grant.nodes[0];
  other.node = NodeId("2");
  forged.grant.nodes.push_back(other);
  sent_.clear();
  FromNode("1", forged);
  Pass(absl::Seconds(60), {"1", "2"});
  EXPECT_EQ(Jobs(), 0u);
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  ASSERT_FALSE(Sent<Revoke>().empty());
  for (const auto& [node, revoke] : Sent<Revoke>()) EXPECT_EQ(node, "1");
  AcceptUnsealed();  // is about what has no seal, not about a false one
  Hello("1", 4, {forged.held});
  FromNode("1", forged);
  EXPECT_EQ(Jobs(), 0u);
}

TEST_F(SealTest, WhatWasGrantedBeforeTheUpgradeWaitsForAWord_H8) {
  const GenerationDescribed unsealed = LoseRunningJob(false);
  FromNode("1", unsealed);
  Pass(absl::Minutes(10), {"1"});
  EXPECT_EQ(Jobs(), 0u);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "its ranks go on meanwhile";
  AcceptUnsealed();
  Hello("1", 4, {unsealed.held});
  FromNode("1", unsealed);
  EXPECT_EQ(State(job_), "RUNNING");
}

TEST_F(SealTest, WithoutAWordItIsEndedWhenTheTimeIsOver_H8) {
  FromNode("1", LoseRunningJob(false));
  Pass(config_.recovery_window + absl::Seconds(2), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_EQ(Sent<Revoke>().at(0).first, "1");
}

// A description that agrees with the records needs no proof: nothing new is believed.
TEST_F(SealTest, WhatTheRecordsAgreeWithIsLeftAlone_H9) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  const GenerationGrant grant = Sent<StartGeneration>().at(0).second.grant;
  StartRanks(job);
  std::get<ClusterRecord>(disk_["cluster"]).recovering = true;
  Boot();
  Hello("1", 4, {Holds(grant, "1")});
  FromNode("1", Described(grant, "1"));
  Pass(config_.recovery_window + absl::Seconds(5), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("generation"), 1);
}

// The head knows the job by older records: what the node holds is neither believed nor run a second time.
TEST_F(SealTest, AKnownJobIsNotGrantedBesideWhatWaits_H9) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1");
  GenerationGrant newer = Sent<StartGeneration>().at(0).second.grant;
  newer.generation = {4};
  newer.ranks[0].node = newer.nodes[0].node = NodeId("2");
  StartRanks(job);
  std::get<ClusterRecord>(disk_["cluster"]).recovering = true;
  Boot();
  Hello("2", 4, {Holds(newer, "2", 3)});
  FromNode("2", Described(newer, "2", 3));
  Hello("1");
  Pass(absl::Minutes(2), {"1", "2"});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Minutes(2), {"1", "2"});
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  EXPECT_THAT(FromClient(ClientWhy{job}).json, HasSubstr("accept-unsealed"));
  Pass(config_.recovery_window, {"1", "2"});
  const auto revokes = Sent<Revoke>();
  EXPECT_TRUE(
      std::any_of(revokes.begin(), revokes.end(), [](const auto& sent) { return sent.first == "2"; }));
  for (const char* node : {"1", "2"}) FromNode(node, GenerationGone{job, {4}});
  Pass(absl::Minutes(3), {"1", "2"});
  ASSERT_FALSE(Sent<StartGeneration>().empty());
  EXPECT_GT(Sent<StartGeneration>().at(0).second.grant.generation, Generation{4})
      << "never below what was there";
}

TEST_F(RecoveryTest, AHeadThatIsNotTheNewestStepsDownForGood_H9) {
  config_.prove_epoch = [](HeadEpoch epoch) { return absl::StrCat("mine ", epoch.value); };
  config_.proves_epoch = [](HeadEpoch epoch, const std::string& proof) {
    return proof == absl::StrCat("mine ", epoch.value) || proof == absl::StrCat("copy ", epoch.value);
  };
  const auto stops = [&] {
    return std::count_if(sent_.begin(), sent_.end(),
                         [](const Effect& e) { return std::holds_alternative<StopHead>(e); });
  };
  const auto hello = [&](HeadEpoch epoch, std::string proof) {
    AgentHello hello{.cluster = ClusterId("c"), .incarnation = Incarnation("1"), .hostname = "h"};
    hello.epoch = epoch;
    hello.epoch_proof = std::move(proof);
    FromNode("1", hello);
  };
  Boot();
  const HeadEpoch own = head_->epoch();
  hello(own, absl::StrCat("mine ", own.value));
  hello({own.value - 1}, "anything");
  hello({own.value + 9}, "forged");
  EXPECT_EQ(stops(), 0);
  hello(own, absl::StrCat("copy ", own.value));
  EXPECT_EQ(stops(), 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      HeadCore(config_, Rng(1)).Recover(OnDisk(), clock_.Now(), clock_.WallNow()).status()));
}

}  // namespace
}  // namespace gtrain::core
