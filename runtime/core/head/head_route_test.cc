// Which connection and which agent speak for a node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HeadRouteTest : public HeadTestWorld {
 protected:
  // A hello of node 1 on a connection of its own.
  void HelloOn(const std::string& route, const std::string& incarnation, uint64_t order,
               std::vector<HeldGeneration> held = {}) {
    AgentHello hello;
    hello.cluster = ClusterId("c");
    hello.incarnation = Incarnation(incarnation);
    hello.boot_id = "boot";
    hello.hostname = "host-1";
    hello.inventory.cpus = 4;
    hello.order = order;
    hello.held = std::move(held);
    Do(head_->Step(PeerMessage{{Role::kNode, "1"}, route, "10.0.0.1", hello}, clock_.Now()));
  }
  std::vector<std::string> Refused() const {
    std::vector<std::string> routes;
    for (const Effect& effect : sent_) {
      if (const auto* refuse = std::get_if<RefusePeer>(&effect)) routes.push_back(refuse->route);
    }
    return routes;
  }
};

// A request that waited in the transport while the head was not running is not executed after its client gave
// up.
TEST_F(HeadRouteTest, RequestPastItsDeadlineIsNotDone) {
  const auto ask = [&](absl::Duration waited, const std::string& id) {
    Do(head_->Step(
        PeerMessage{{Role::kUser, "user1"},
                    "client",
                    "10.0.0.9",
                    ClientRequest{id, absl::Seconds(5), ClientSubmit{"train 1 1", {}, "/runs/{job}"}},
                    waited},
        clock_.Now()));
    return std::get<ReplyToClient>(
               *std::find_if(sent_.rbegin(), sent_.rend(),
                             [](const Effect& e) { return std::holds_alternative<ReplyToClient>(e); }))
        .reply;
  };
  const ClientReply late = ask(absl::Seconds(5), "a");
  EXPECT_EQ(late.code, static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(late.error, HasSubstr("nothing was done"));
  EXPECT_THAT(head_->Snapshot().jobs, IsEmpty());
  EXPECT_TRUE(ask(absl::Seconds(4), "a").ok) << "asked again in time it is a request like any other";
  EXPECT_THAT(head_->Snapshot().jobs, SizeIs(1));
  EXPECT_TRUE(ask(absl::Seconds(9), "a").ok) << "what was done is said as often as it is asked (H15)";
}

TEST_F(HeadRouteTest, DeadNodeThatReturnsIsToldAgain_N2) {
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

TEST_F(HeadRouteTest, SecondAgentWithTheSameKeyIsRefused_N4) {
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

TEST_F(HeadRouteTest, SecondAgentWithTheSameKeyWaitsAfterAHeadRestart_N4) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Boot();
  AgentHello hello;
  hello.cluster = ClusterId("c");
  hello.incarnation = Incarnation("other");
  Do(head_->Step(PeerMessage{{Role::kNode, "1"}, "route-rival", "10.0.0.7", hello}, clock_.Now()));
  EXPECT_THAT(Sent<AgentWelcome>(), IsEmpty());
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Hello("1", 4, {HeldGeneration{job, {1}, {0}, {Step(job, 1, 0, 7)}, {}}});
  Pass(absl::Seconds(2), {"1"});
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), RouteOf("1"));
  EXPECT_EQ(Status(job).at("generation"), 1) << "its ranks are healthy";
}

TEST_F(HeadRouteTest, NewIncarnationIsTakenWhenTheOldOneIsSilent_N3) {
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

TEST_F(HeadRouteTest, ForeignClusterAndOtherProtocolAreRefused_N13) {
  AgentHello hello;
  hello.cluster = ClusterId("other");
  FromNode("9", hello);
  hello.cluster = ClusterId("c");
  hello.version = "9.8";
  hello.protocol = kProtocolVersion + 2;
  FromNode("9", hello);
  EXPECT_EQ(head_->counters().refused, 2u);
  EXPECT_THAT(Sent<AgentWelcome>(), IsEmpty());
  for (const int apart : {-1, 1}) {  // one version either way is let in
    hello.protocol = kProtocolVersion + apart;
    FromNode("9", hello);
  }
  EXPECT_EQ(head_->counters().refused, 2u);
  EXPECT_THAT(Sent<AgentWelcome>(), SizeIs(2));
}

TEST_F(HeadRouteTest, FlappingNodeIsBelievedEverMoreSlowly_N5) {
  Hello("1");
  Hello("2");
  const auto usable = [&](const char* node) {
    const json document = json::parse(FromClient(ClientNodes{}).json);
    for (const json& one : document.at("nodes")) {
      if (one.at("id") == node) return one.at("state") == "alive" && one.at("quarantine").is_null();
    }
    return false;
  };
  Pass(absl::Seconds(12), {"1"});  // the first death is forgiven
  FromNode("2", AgentHeartbeat{1, {}, {}});
  EXPECT_TRUE(usable("2"));
  absl::Duration cooldown = absl::Minutes(1);
  for (int death = 2; death <= 4; ++death) {
    Pass(absl::Seconds(12), {"1"});
    FromNode("2", AgentHeartbeat{1, {}, {}});
    EXPECT_FALSE(usable("2")) << death;
    Pass(cooldown - absl::Seconds(10), {"1", "2"});
    EXPECT_FALSE(usable("2")) << death;
    Pass(absl::Seconds(15), {"1", "2"});
    EXPECT_TRUE(usable("2")) << death;
    cooldown *= 2;
  }
  const JobId job = Submit("train 2 2 one-per-node");
  Pass(absl::Seconds(12), {"1"});
  FromNode("2", AgentHeartbeat{1, {}, {}});
  FromNode("1", GenerationGone{job, {1}});
  FromNode("2", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "WAITING");
  EXPECT_THAT(Status(job).at("blocked_by").dump(), HasSubstr("in quarantine: it fell silent 5 times"));
  Pass(absl::Minutes(9), {"1", "2"});
  EXPECT_NE(State(job), "WAITING") << "it resumes by itself when the quarantine is over";
}

TEST_F(HeadRouteTest, OldConnectionIsNotHeard_W7) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  AgentHello hello;
  hello.cluster = ClusterId("c");
  hello.incarnation = Incarnation("1");
  hello.inventory.cpus = 4;
  hello.held = {HeldGeneration{job, {1}, {0}, {Step(job, 1, 0, 7)}, {}}};
  Do(head_->Step(PeerMessage{{Role::kNode, "1"}, "a newer route", "10.0.0.1", hello}, clock_.Now()));
  const uint64_t dropped = head_->counters().stale_dropped;
  FromNode("1", GenerationGone{job, {1}});
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(head_->counters().stale_dropped, dropped + 2);
}

TEST_F(HeadRouteTest, GenerationIsNotStartedInANewIncarnation_N3) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  Pass(absl::Seconds(5), {});
  sent_.clear();
  Hello("1", 4, {}, "2");
  Pass(absl::Seconds(5), {"1"});
  ASSERT_THAT(Sent<StartGeneration>(), SizeIs(1));
  EXPECT_EQ(Sent<StartGeneration>()[0].second.grant.generation, Generation{2});
}

TEST_F(HeadRouteTest, SilentNodesGetNoRanks_N1) {
  Hello("1");
  Pass(absl::Seconds(5), {});
  const JobId job = Submit("train 1 1");
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  Pass(absl::Seconds(1), {"1"});
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(1));
}

// After a pause of the head the hellos of several connections arrive together, and not in their order.
TEST_F(HeadRouteTest, LateHelloDoesNotTakeTheRoute_W7) {
  HelloOn("new", "1", 20);
  HelloOn("old", "1", 10);
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "new");
  Pass(absl::Seconds(5), {});  // suspect
  HelloOn("old", "1", 10);
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "new");
  HelloOn("newest", "1", 30);
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "newest");
  Pass(absl::Seconds(15), {});  // dead
  HelloOn("whatever", "1", 5);
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "whatever") << "a clock that goes back shuts nobody out for good";
}

TEST_F(HeadRouteTest, LateHelloOfAFormerLifeIsNoRival_N3) {
  HelloOn("new", "2", 20);
  HelloOn("old", "1", 10);
  Pass(absl::Seconds(5), {});
  EXPECT_EQ(*head_->RouteOf(NodeId("1")), "new");
  HelloOn("newer", "3", 40);
  HelloOn("new too", "3", 30);
  EXPECT_THAT(Refused(), IsEmpty()) << "the newest is not refused for one of its own older connections";
}

// With two agents a grant could go to the wrong one or be revoked with it.
TEST_F(HeadRouteTest, NodeWithTwoAgentsGetsNoRanks_N4) {
  HelloOn("route-1", "1", 10);
  HelloOn("second", "2", 20);
  const JobId job = Submit("train 1 1");
  EXPECT_THAT(Sent<StartGeneration>(), IsEmpty());
  Pass(absl::Seconds(5), {});  // the first was restarted
  ASSERT_THAT(Sent<StartGeneration>(), SizeIs(1));
  EXPECT_EQ(Status(job).at("generation"), 1);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

// A copy took over the key while the first was not heard: the first still has processes of what is over
// since.
TEST_F(HeadRouteTest, RefusedAgentIsToldWhatIsOver_N4) {
  HelloOn("route-1", "1", 10);
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Pass(absl::Seconds(5), {});
  HelloOn("route-1", "copy", 20);
  sent_.clear();
  const HeldGeneration over{job, {1}, {0}, {Step(job, 1, 0, 7)}, {}}, not_over{job, {2}, {0}, {}, {}};
  HelloOn("first", "1", 30, {over, not_over});
  Pass(absl::Seconds(1), {"1"});
  EXPECT_THAT(Refused(), ElementsAre("first"));
  std::vector<Generation> told;
  for (const Effect& effect : sent_) {
    const auto* send = std::get_if<SendToNode>(&effect);
    if (send == nullptr || send->route != "first") continue;
    told.push_back(std::get<Revoke>(*send->message).generation);
  }
  EXPECT_THAT(told, ElementsAre(Generation{1}));
}

}  // namespace
}  // namespace gtrain::core
