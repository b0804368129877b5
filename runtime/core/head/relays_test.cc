// Which agents go through which others, and what the head makes of it. Faults N2, X4.
#include "runtime/core/head/relays.h"

#include <set>

#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

class RelaysPolicyTest : public HeadTestWorld {
 protected:
  void SetUp() override {
    config_.relay_from = 4;
    config_.relay_children = 2;
    HeadTestWorld::SetUp();
    relays_hello_ = true;
  }

  void Join(std::vector<std::string> nodes, const std::string& rack = "") {
    labels_hello_ = rack.empty() ? std::map<std::string, std::string>()
                                 : std::map<std::string, std::string>{{"rack", rack}};
    for (const std::string& node : nodes) {
      Hello(node);
      alive_.push_back(node);
    }
  }
  void Wait(absl::Duration time) { Pass(time, alive_); }
  // Node: through which relay it was last told to go.
  std::map<std::string, std::string> Told() const {
    std::map<std::string, std::string> told;
    for (const auto& [node, via] : Sent<ConnectVia>()) told[node] = via.relay.value;
    return told;
  }
  // Relay: whom it was last told to let through.
  std::map<std::string, std::set<std::string>> Admitted() const {
    std::map<std::string, std::set<std::string>> admitted;
    for (const auto& [node, relay] : Sent<RelayFor>()) {
      admitted[node].clear();
      for (const RelayChild& child : relay.children) admitted[node].insert(child.node.value);
    }
    return admitted;
  }
  void Ready(const std::string& relay, int port = 7000) { FromNode(relay, RelayReady{port, ""}); }
  // Does as it was told: the next hello comes through the relay.
  void Follow(const std::string& node) {
    via_[node] = Told().at(node);
    Hello(node);
  }
  // All of them in two groups of three: "1" and "4" are relays.
  void JoinSix() {
    Join({"1", "2", "3", "4", "5", "6"});
    Wait(absl::Seconds(2));
    for (const auto& [relay, children] : Admitted()) Ready(relay);
    for (const auto& [node, relay] : Told()) Follow(node);
  }
  std::string StateOf(const std::string& node) {
    const nlohmann::json nodes = nlohmann::json::parse(FromClient(ClientNodes{}, "", Role::kAdmin).json);
    for (const auto& one : nodes.at("nodes")) {
      if (one.at("id") == node) return one.at("state");
    }
    return "";
  }

  std::vector<std::string> alive_;
};

TEST_F(RelaysPolicyTest, FewAgentsAreConnectedDirectly) {
  Join({"1", "2", "3"});
  Wait(absl::Minutes(1));
  EXPECT_THAT(Sent<RelayFor>(), IsEmpty());
}

TEST_F(RelaysPolicyTest, OneOfAFewLetsTheOthersThroughOnceItListens) {
  Join({"1", "2", "3", "4", "5", "6"});
  Wait(absl::Seconds(2));
  EXPECT_EQ(Admitted(), (std::map<std::string, std::set<std::string>>{{"1", {"2", "3"}}, {"4", {"5", "6"}}}));
  EXPECT_THAT(Sent<ConnectVia>(), IsEmpty()) << "nobody listens yet";
  Ready("4");
  ASSERT_EQ(Told(), (std::map<std::string, std::string>{{"5", "4"}, {"6", "4"}}));
  const ConnectVia via = Sent<ConnectVia>()[0].second;
  EXPECT_EQ(via.endpoint, "10.0.0.4:7000");
  EXPECT_EQ(via.public_key, std::string(39, 'k') + "4");
  EXPECT_EQ(Sent<RelayFor>()[0].second.children[0].public_key, std::string(39, 'k') + "2");
}

TEST_F(RelaysPolicyTest, OlderAgentsStayAsTheyAre) {
  relays_hello_ = false;
  Join({"1", "2", "3", "4", "5", "6"});
  Wait(absl::Minutes(1));
  EXPECT_THAT(Sent<RelayFor>(), IsEmpty());
}

TEST_F(RelaysPolicyTest, ARackHasItsOwnAndTheRestOfThemShare) {
  config_.relay_children = 16;
  Boot();
  std::vector<std::string> names;
  for (int i = 10; i < 30; ++i) names.push_back(std::to_string(i));
  Join({names.begin(), names.begin() + 9}, "a");
  Join({names.begin() + 9, names.begin() + 18}, "b");
  Join({names.begin() + 18, names.end()}, "c");
  Wait(absl::Seconds(3));
  const auto admitted = Admitted();
  ASSERT_THAT(admitted, SizeIs(2)) << "two of rack c are too few for one of their own";
  EXPECT_EQ(admitted.at("10").size() + admitted.at("19").size(), 18u);
  for (int i = 11; i < 19; ++i) EXPECT_TRUE(admitted.at("10").contains(std::to_string(i))) << i;
  for (int i = 20; i < 28; ++i) EXPECT_TRUE(admitted.at("19").contains(std::to_string(i))) << i;
}

// What a relay says keeps its children alive: its own ones, and not for long without a word of theirs.
TEST_F(RelaysPolicyTest, ARelayTellsWhoIsThereAndIsNotBelievedForEver) {
  JoinSix();
  alive_ = {"1", "4"};
  const auto say = [&](const std::string& relay, std::vector<NodeId> children, absl::Duration time) {
    for (absl::Duration t; t < time; t += absl::Seconds(1)) {
      Wait(absl::Seconds(1));
      Do(head_->Step(ChildrenHeard{NodeId(relay), children}, clock_.Now()));
    }
  };
  say("1", {NodeId("2"), NodeId("5")}, absl::Seconds(15));
  EXPECT_EQ(StateOf("2"), "alive");
  EXPECT_EQ(StateOf("3"), "dead") << "nobody has heard it";
  EXPECT_EQ(StateOf("5"), "dead") << "it is not a child of that relay";
  say("1", {NodeId("2")}, absl::Seconds(40));
  EXPECT_EQ(StateOf("2"), "alive");
  FromNode("2", AgentHeartbeat{1, {}, {}});
  say("1", {NodeId("2")}, absl::Seconds(50));
  EXPECT_EQ(StateOf("2"), "alive") << "its own word counts";
  say("1", {NodeId("2")}, absl::Seconds(30));
  EXPECT_EQ(StateOf("2"), "dead") << "the relay alone says so by now";
}

TEST_F(RelaysPolicyTest, WhoComesBackIsAskedAgainEverMoreSeldom) {
  JoinSix();
  absl::Duration before;
  for (int i = 0; i < 4; ++i) {
    sent_.clear();
    via_["2"] = "";
    Hello("2");
    absl::Duration waited;
    while (Told().empty() && waited < absl::Minutes(3)) {
      Wait(absl::Seconds(1));
      waited += absl::Seconds(1);
      if (Admitted().contains("1") && Told().empty()) Ready("1");
    }
    ASSERT_TRUE(Told().contains("2"));
    EXPECT_GT(waited, before);
    before = waited;
  }
  // It always comes through for a moment and then comes back: that is no way that works.
  Follow("2");
  Wait(absl::Seconds(5));
  sent_.clear();
  via_["2"] = "";
  Hello("2");
  Wait(absl::Seconds(60));
  EXPECT_FALSE(Told().contains("2"));
  Wait(absl::Minutes(5));
  if (Told().empty()) Ready("1");
  Follow("2");
  Wait(absl::Minutes(11));  // it works: the next time begins at the start again
  sent_.clear();
  via_["2"] = "";
  Hello("2");
  Wait(absl::Seconds(13));
  if (Told().empty()) Ready("1");
  EXPECT_TRUE(Told().contains("2"));
}

TEST_F(RelaysPolicyTest, WhoDoesNotGetThroughStaysAndIsAskedAgain) {
  config_.relay_from = 3;
  Boot();
  Join({"1", "2", "3"});
  Wait(absl::Seconds(2));
  Ready("1");
  ASSERT_TRUE(Told().contains("2"));
  Follow("3");
  sent_.clear();
  Wait(absl::Seconds(29));
  EXPECT_THAT(Told(), IsEmpty());
  Wait(absl::Seconds(15));
  EXPECT_FALSE(Told().contains("3"));
  EXPECT_TRUE(Told().contains("2")) << "after 30 s, and 10 more";
}

TEST_F(RelaysPolicyTest, OneThatCannotListenIsNotAskedAgain) {
  Join({"1", "2", "3", "4", "5", "6"});
  Wait(absl::Seconds(2));
  sent_.clear();
  FromNode("1", RelayReady{0, "no port"});
  Wait(absl::Seconds(3));
  EXPECT_FALSE(Admitted().contains("1"));
  EXPECT_TRUE(Admitted().contains("2")) << "the next one can";
}

TEST_F(RelaysPolicyTest, ALostRelayIsReplacedAndNobodyElseIsLost) {
  JoinSix();
  alive_ = {"2", "3", "4", "5", "6"};
  sent_.clear();
  for (const char* node : {"2", "3"}) {
    via_[node] = "";
    Hello(node);
  }
  Wait(absl::Seconds(25));
  EXPECT_EQ(StateOf("1"), "dead");
  for (const std::string& node : alive_) EXPECT_EQ(StateOf(node), "alive") << node;
  EXPECT_EQ(Admitted(), (std::map<std::string, std::set<std::string>>{{"2", {"3"}}}));
}

// A head that starts anew learns from the hellos who goes through whom, and tells the relay whom it may
// admit.
TEST_F(RelaysPolicyTest, ANewHeadTakesOverWhatIsThere) {
  JoinSix();
  Boot();
  sent_.clear();
  for (const char* node : {"1", "2", "3", "4", "5", "6"}) Hello(node);
  Wait(absl::Seconds(3));
  EXPECT_EQ(Admitted(), (std::map<std::string, std::set<std::string>>{{"1", {"2", "3"}}, {"4", {"5", "6"}}}));
  EXPECT_THAT(Told(), IsEmpty()) << "they are there already";
}

TEST_F(RelaysPolicyTest, ARelayThatStartsAnewIsToldWhomItMayAdmit) {
  JoinSix();
  sent_.clear();
  Hello("1");
  Wait(absl::Seconds(3));
  EXPECT_EQ(Admitted().at("1"), (std::set<std::string>{"2", "3"}));
}

TEST_F(RelaysPolicyTest, ARevokedChildIsLetThroughNoLonger) {
  JoinSix();
  sent_.clear();
  FromClient(ClientRevokeNode{"2", "stolen"}, "", Role::kAdmin);
  Hello("1");
  Wait(absl::Seconds(3));
  EXPECT_EQ(Admitted().at("1"), (std::set<std::string>{"3"}));
}

TEST_F(RelaysPolicyTest, ThreeSecondsAreTooShortForAChildToComeBack) {
  SetNodeTimeout(absl::Seconds(3), config_);
  Boot();
  Join({"1", "2", "3", "4", "5", "6"});
  Wait(absl::Seconds(10));
  EXPECT_THAT(Sent<RelayFor>(), IsEmpty());
}

// A relay keeps an idle agent's hello back until its node is dead and its ranks may still run (N2).
TEST_F(RelaysPolicyTest, AHelloThatWasKeptBackLiftsNoLease) {
  config_.relay_from = 0;
  Boot();
  const auto hello = [&](uint64_t order) {
    AgentHello hello;
    hello.cluster = ClusterId("c");
    hello.incarnation = Incarnation("1");
    hello.boot_id = "boot";
    hello.order = order;
    hello.hostname = "host-1";
    hello.address = "10.0.0.1";
    hello.inventory.cpus = 4;
    hello.inventory.memory_bytes = uint64_t{8} << 30;
    return hello;
  };
  FromNode("1", hello(200));
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Pass(absl::Seconds(90), {});
  ASSERT_EQ(StateOf("1"), "dead");
  via_["1"] = "9";
  connections_["1"].second = 7;
  const uint64_t dropped = head_->counters().stale_dropped;
  FromNode("1", hello(100));
  EXPECT_EQ(StateOf("1"), "dead");
  EXPECT_EQ(head_->counters().stale_dropped, dropped + 1);
  via_["1"] = "";
  FromNode("1", hello(100));
  EXPECT_EQ(StateOf("1"), "alive") << "on a connection of its own the clock may have been set back";
}

}  // namespace
}  // namespace gtrain::core
