// Lost and older records, newer heads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head_test_world.h"

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
  // What node's agent would say of a grant it got.
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
  std::vector<Record> records;
  for (const auto& [key, record] : disk_) records.push_back(record);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      HeadCore(config_, Rng(1)).Recover(records, clock_.Now(), clock_.WallNow()).status()));
}

}  // namespace
}  // namespace gtrain::core
