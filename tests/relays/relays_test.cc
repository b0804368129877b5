// The way of a message from an agent through another one to the head and back: the three ends as they are,
// RelayedClient, Relay and RelayRoutes, over connections in memory. Faults X4, W7.
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "net/port/memory_transport_fake.h"
#include "net/zmq/keys.h"
#include "runtime/agent/relay.h"
#include "runtime/agent/relayed_client.h"
#include "runtime/head/relay_routes.h"
#include "runtime/wire/codec.h"

namespace gtrain::head {
namespace {

using agent::Relay;
using agent::RelayedClient;
using port::MemoryServer;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

net::Peer NodeOf(const std::string& id) { return {net::Role::kNode, id, ""}; }

core::Message Note(const std::string& text) { return core::AgentNote{JobId("j"), {1}, 0, "note", text}; }
core::SharedMessage Table(size_t bytes) {
  return core::ExchangeTable{{1}, JobId("j"), {1}, 0, {std::string(bytes, 't')}};
}

class RelaysTest : public ::testing::Test {
 protected:
  struct Child {
    net::KeyPair keys = net::MakeKeyPair();
    NodeId id{net::KeyId(keys.public_key)};
    MemoryServer::Client* link = nullptr;
    std::unique_ptr<RelayedClient> client;
  };
  struct Carrier {  // a relay and its own connection to the head
    std::string name;
    MemoryServer* server = nullptr;
    std::unique_ptr<Relay> relay;
    std::string route;
    bool to_head = true;
  };

  RelaysTest() {
    for (Child& child : children_) keys_.push_back({net::Role::kNode, child.keys.public_key, "node"});
    registry_->Replace(keys_);
    routes_.emplace(head_, registry_);
    for (const char* name : {"a", "b"}) AddCarrier(name);
    for (Child& child : children_) Connect(child, "a");
  }

  void AddCarrier(const std::string& name) {
    Carrier& carrier = carriers_[name];
    carrier.name = name;
    auto server = std::make_unique<MemoryServer>();
    carrier.server = server.get();
    carrier.relay = std::make_unique<Relay>(std::move(server));
    carrier.route = "connection of " + name;
    carrier.relay->SetHead(true);
  }

  void Connect(Child& child, const std::string& through) {
    auto link = carriers_[through].server->Connect(NodeOf(child.id.value));
    child.link = link.get();
    child.client = std::make_unique<RelayedClient>(
        std::move(link), child.id, net::PairSecret(child.keys, head_.public_key).value(), clock_, 0);
  }

  // Everybody takes what has come, a few times; what a child hears is in `heard_`.
  void Run() {
    for (int i = 0; i < 6; ++i) {
      for (Child& child : children_) {
        if (child.client == nullptr) continue;
        while (const auto said = child.client->Receive()) heard_[child.id.value].push_back(*said);
      }
      for (auto& [name, carrier] : carriers_) {
        if (carrier.relay == nullptr) continue;
        for (core::RelayedUp& up : carrier.relay->Turn(clock_->Now())) {
          if (spoil_) spoil_(up);
          if (carrier.to_head) Take(carrier, up);
        }
      }
      Flush();
    }
  }
  void Take(const Carrier& carrier, const core::RelayedUp& up) {
    port::Received from{NodeOf(carrier.name), {carrier.route}, "10.0.0.1", wire::Encode(up)};
    RelayRoutes::Arrived arrived = routes_->Take(from, up, clock_->Now());
    for (port::Received& message : arrived.messages) arrived_.push_back(std::move(message));
    for (const NodeId& node : arrived.heard.children) alive_.push_back(node.value);
    for (const core::PeerGone& gone : arrived.gone) gone_.push_back(gone.peer.key_id);
  }
  void Flush() {
    for (const core::PeerGone& gone :
         routes_->Flush([this](const std::string&route, const core::RelayedDown&frame) {
           frames_.push_back(frame);
           bodies_ += frame.bodies.size();
           for (auto& [name, carrier] : carriers_) {
             if (carrier.route != route || !carrier.to_head) continue;
             core::RelayedDown changed = frame;
             if (spoil_down_) spoil_down_(changed);
             carrier.relay->OnDown(changed);
             return true;
           }
           return false;
         })) {
      gone_.push_back(gone.peer.key_id);
    }
  }
  void Say(Child& child, const std::string& text) {
    ASSERT_TRUE(child.client->Send(wire::Encode(Note(text))).ok());
  }
  std::vector<std::string> Texts() const {
    std::vector<std::string> texts;
    for (const port::Received& one : arrived_) {
      const auto message = wire::Decode(one.payload, wire::Sender::kAgent);
      const auto* note = message.ok() ? std::get_if<core::AgentNote>(&*message) : nullptr;
      texts.push_back(note == nullptr ? "?" : note->text);
    }
    return texts;
  }
  std::string RouteOf(const Child& child) const {
    for (auto it = arrived_.rbegin(); it != arrived_.rend(); ++it) {
      if (it->peer.key_id == child.id.value) return it->route.id;
    }
    return "";
  }

  const std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  const net::KeyPair head_ = net::MakeKeyPair();
  const std::shared_ptr<net::KeyRegistry> registry_ = std::make_shared<net::KeyRegistry>();
  std::vector<net::AllowedKey> keys_;
  std::optional<RelayRoutes> routes_;
  std::map<std::string, Carrier> carriers_;
  Child children_[3];
  std::vector<port::Received> arrived_;
  std::vector<std::string> alive_, gone_;
  std::map<std::string, std::vector<std::string>> heard_;
  std::vector<core::RelayedDown> frames_;
  size_t bodies_ = 0;
  std::function<void(core::RelayedUp&)> spoil_;
  std::function<void(core::RelayedDown&)> spoil_down_;
};

TEST_F(RelaysTest, MessagesGoBothWaysInTheirOrderUnderTheirOwnName) {
  Run();
  for (Child& child : children_) ASSERT_TRUE(child.client->Connected());
  Say(children_[0], "one");
  Say(children_[0], "two");
  Say(children_[1], "three");
  Run();
  EXPECT_THAT(Texts(), ElementsAre("one", "two", "three"));
  EXPECT_EQ(arrived_[0].peer.key_id, children_[0].id.value);
  EXPECT_EQ(arrived_[2].peer.key_id, children_[1].id.value);
  EXPECT_EQ(arrived_[2].peer.role, net::Role::kNode);
  const std::string route = RouteOf(children_[1]);
  ASSERT_TRUE(routes_->Has(route));
  EXPECT_FALSE(routes_->Has("relayed/77"));
  EXPECT_FALSE(routes_->Has(carriers_["a"].route));
  routes_->Send(route, "first");
  routes_->Send(route, "second");
  Run();
  EXPECT_THAT(heard_[children_[1].id.value], ElementsAre("first", "second"));
  EXPECT_THAT(heard_[children_[0].id.value], IsEmpty());
}

TEST_F(RelaysTest, BeatsOfAllChildrenAreOneMessage) {
  Run();
  for (Child& child : children_) child.client->Beat();
  clock_->Advance(absl::Seconds(1));
  int frames = 0;
  spoil_ = [&](core::RelayedUp& up) { frames += up.heard.empty() ? 0 : 1; };
  Run();
  EXPECT_EQ(frames, 1);
  EXPECT_THAT(alive_, SizeIs(3));
  for (Child& child : children_) EXPECT_FALSE(child.client->Failed()) << "the relay has answered";
  alive_.clear();
  children_[0].client->Beat();
  children_[0].client->Beat();
  clock_->Advance(absl::Seconds(1));
  Run();
  EXPECT_THAT(alive_, ElementsAre(children_[0].id.value)) << "who was not heard is not told";
}

TEST_F(RelaysTest, AMessageToManyTravelsOnce) {
  Run();
  for (Child& child : children_) Say(child, "hello");
  Run();
  const core::SharedMessage table = Table(100'000), small = Table(10);
  const std::string bytes = wire::Encode(*table), few = wire::Encode(*small);
  for (Child& child : children_) {
    routes_->Send(RouteOf(child), few);
    routes_->Send(RouteOf(child), table, bytes);
    routes_->Send(RouteOf(child), small, few);
  }
  Run();
  EXPECT_EQ(bodies_, 1u);
  for (Child& child : children_) EXPECT_THAT(heard_[child.id.value], ElementsAre(few, bytes, few));
}

// Two different ones behind each other, and the first again.
TEST_F(RelaysTest, SharedMessagesAreNotMixedUp) {
  Run();
  for (Child& child : children_) Say(child, "hello");
  Run();
  const core::SharedMessage one = Table(5'000), two = Table(6'000);
  for (const core::SharedMessage& table : {one, two, one}) {
    for (Child& child : children_) routes_->Send(RouteOf(child), table, wire::Encode(*table));
  }
  Run();
  for (Child& child : children_)
    EXPECT_THAT(heard_[child.id.value],
                ElementsAre(wire::Encode(*one), wire::Encode(*two), wire::Encode(*one)));
}

// Whatever a relay changes ends the conversation at the end that sees it, and another one begins by itself.
TEST_F(RelaysTest, WhatARelayChangesEndsTheConversationAndIsNotBelieved) {
  Run();
  Say(children_[0], "hello");
  Run();
  const auto is_sealed = [](const core::RelayPart& part) { return part.stage == core::RelayStage::kSealed; };
  const std::map<std::string, std::function<void(core::RelayedUp&)>> tricks = {
      {"a changed byte", [](core::RelayedUp& up) { up.parts[0].bytes[3] ^= 1; }},
      {"a repeated one", [](core::RelayedUp& up) { up.parts.push_back(up.parts[0]); }},
      {"another's name", [&](core::RelayedUp& up) { up.parts[0].node = children_[1].id; }},
      {"an unknown name", [&](core::RelayedUp& up) { up.parts[0].node = NodeId("0123456789abcdef"); }},
      {"words of its own", [](core::RelayedUp& up) { up.parts[0].bytes = wire::Encode(Note("forged")); }}};
  for (const auto& [name, trick] : tricks) {
    SCOPED_TRACE(name);
    clock_->Advance(absl::Seconds(2));
    Run();
    arrived_.clear();
    const uint64_t refused = routes_->refused();
    bool done = false;
    spoil_ = [&, &trick = trick](core::RelayedUp& up) {
      if (done || up.parts.empty() || !is_sealed(up.parts[0])) return;
      done = true;
      trick(up);
    };
    Say(children_[0], "true");
    Run();
    EXPECT_TRUE(done);
    EXPECT_GT(routes_->refused(), refused);
    for (const std::string& text : Texts()) EXPECT_EQ(text, "true");
    spoil_ = nullptr;
    // One that was left out is missed with the next one, and then another conversation begins.
    for (int tries = 0; tries < 3; ++tries) {
      clock_->Advance(absl::Seconds(2));
      Run();
      (void)children_[0].client->Send(wire::Encode(Note("again")));
      Run();
    }
    ASSERT_FALSE(arrived_.empty());
    EXPECT_EQ(Texts().back(), "again");
  }
}

TEST_F(RelaysTest, WhatARelayChangesOnTheWayDownIsNotBelieved) {
  const std::vector<std::function<void(core::RelayedDown&)>> tricks = {
      [](core::RelayedDown& down) { down.parts[0].bytes[0] ^= 1; },
      [](core::RelayedDown& down) { down.parts.push_back(down.parts[0]); },
      [](core::RelayedDown& down) { down.parts[0].bytes = "forged"; },
      [](core::RelayedDown& down) {
        if (!down.bodies.empty()) down.bodies[0][9] ^= 1;
      }};
  for (const auto& trick : tricks) {
    spoil_down_ = nullptr;
    clock_->Advance(absl::Seconds(2));
    Run();
    Run();
    heard_.clear();
    (void)children_[0].client->Connected();
    ASSERT_TRUE(children_[0].client->Connected());
    Say(children_[0], "hello");
    Run();
    bool done = false;
    spoil_down_ = [&](core::RelayedDown& down) {
      if (!std::exchange(done, true)) trick(down);
    };
    const core::SharedMessage table = Table(5'000);
    routes_->Send(RouteOf(children_[0]), table, wire::Encode(*table));
    Run();
    for (const std::string& text : heard_[children_[0].id.value]) EXPECT_EQ(text, wire::Encode(*table));
    EXPECT_FALSE(children_[0].client->Connected()) << "it says so once, and opens another one";
  }
}

// The head's half is fresh, so the frames of a whole conversation prove nothing a second time (W7).
TEST_F(RelaysTest, ARecordedConversationIsNotOneAgain) {
  std::vector<core::RelayedUp> recorded;
  spoil_ = [&](core::RelayedUp& up) { recorded.push_back(up); };
  Run();
  Say(children_[0], "hello");
  Run();
  spoil_ = nullptr;
  ASSERT_EQ(Texts(), std::vector<std::string>{"hello"});
  for (const core::RelayedUp& up : recorded) Take(carriers_["b"], up);
  EXPECT_EQ(Texts(), std::vector<std::string>{"hello"});
  Say(children_[0], "still here");  // another relay's openings do not end the true one
  Run();
  EXPECT_EQ(Texts().back(), "still here");
}

TEST_F(RelaysTest, ANodeThatIsShutOutIsNotHeardAnyMore) {
  Run();
  Say(children_[0], "hello");
  Run();
  registry_->Drop(children_[0].id.value);
  Say(children_[0], "more");
  Run();
  EXPECT_EQ(Texts(), std::vector<std::string>{"hello"});
  EXPECT_THAT(gone_, ElementsAre(children_[0].id.value));
  clock_->Advance(absl::Seconds(2));
  Run();
  EXPECT_FALSE(children_[0].client->Connected());
  Say(children_[1], "others go on");
  Run();
  EXPECT_EQ(Texts().back(), "others go on");
}

TEST_F(RelaysTest, ARelayWithoutAHeadSaysSoAndTheConversationComesBackWithIt) {
  Run();
  Say(children_[0], "hello");
  Run();
  carriers_["a"].relay->SetHead(false);
  Run();
  EXPECT_FALSE(children_[0].client->Connected());
  EXPECT_FALSE(children_[0].client->Send("x").ok());
  EXPECT_FALSE(children_[0].client->Failed()) << "it may be back in a moment";
  clock_->Advance(absl::Seconds(6));
  Run();
  EXPECT_TRUE(children_[0].client->Failed());
  routes_.emplace(head_, registry_);  // the head has started anew
  carriers_["a"].relay->SetHead(true);
  Run();
  EXPECT_TRUE(children_[0].client->Connected());
  Say(children_[0], "again");
  Run();
  EXPECT_EQ(Texts().back(), "again");
}

TEST_F(RelaysTest, AChildLeavesARelayThatHearsNothing) {
  Run();
  ASSERT_TRUE(children_[0].client->Connected());
  carriers_["a"].relay.reset();  // stopped: the connection stays
  children_[0].client->Beat();
  clock_->Advance(absl::Seconds(2));
  children_[0].client->Beat();
  EXPECT_FALSE(children_[0].client->Failed());
  clock_->Advance(absl::Seconds(2));
  EXPECT_TRUE(children_[0].client->Failed());
}

TEST_F(RelaysTest, TheNewestWayThatOpensCounts) {
  Run();
  Say(children_[0], "through a");
  Run();
  const std::string before = RouteOf(children_[0]);
  Connect(children_[0], "b");
  Run();
  ASSERT_TRUE(routes_->Has(before)) << "nothing has opened yet";
  Say(children_[0], "through b");
  Run();
  EXPECT_EQ(Texts().back(), "through b");
  EXPECT_FALSE(routes_->Has(before));
  EXPECT_NE(RouteOf(children_[0]), before);
  EXPECT_EQ(routes_->conversations(), 1u);
}

TEST_F(RelaysTest, ALostRelayTakesItsConversationsWithIt) {
  Run();
  for (Child& child : children_) Say(child, "hello");
  Run();
  carriers_["a"].to_head = false;
  for (Child& child : children_) routes_->Send(RouteOf(child), "lost");
  Flush();
  EXPECT_THAT(gone_, SizeIs(3));
  EXPECT_EQ(routes_->conversations(), 0u);
}

// A child speaks for itself alone.
TEST_F(RelaysTest, TheRelayPassesOnNobodyElsesWords) {
  Run();
  core::RelayedUp up;
  up.parts.push_back({children_[1].id, core::RelayStage::kOpen, std::string(16, 'x')});
  up.parts.push_back({children_[0].id, core::RelayStage::kOver, ""});
  ASSERT_TRUE(children_[0].link->Send(wire::Encode(up)).ok());
  ASSERT_TRUE(children_[0].link->Send(wire::Encode(core::RelayedUp{{}, {1, 2, 3}})).ok());
  ASSERT_TRUE(children_[0].link->Send("no message").ok());
  std::vector<core::RelayedUp> passed;
  spoil_ = [&](core::RelayedUp& one) { passed.push_back(one); };
  Run();
  EXPECT_THAT(passed, IsEmpty());
}

TEST_F(RelaysTest, ManyWordsAreManyFrames) {
  Run();
  size_t parts = 0, largest = 0;
  spoil_ = [&](core::RelayedUp& up) {
    parts += up.parts.size();
    largest = std::max(largest, wire::Encode(up).size());
  };
  for (int i = 0; i < 40; ++i) {
    Say(children_[0], "small");
    ASSERT_TRUE(
        children_[1]
            .client
            ->Send(wire::Encode(core::ExchangePart{JobId("j"), {1}, 0, {{0, std::string(300'000, 'x')}}}))
            .ok());
  }
  Run();
  EXPECT_EQ(parts, 80u);
  EXPECT_LT(largest, static_cast<size_t>(port::kToServerBytesMax) / 2);
  EXPECT_THAT(arrived_, SizeIs(80));
  EXPECT_FALSE(children_[0].client->Send(std::string(agent::kRelayedBytesMax + 1, 'x')).ok());
  EXPECT_TRUE(children_[0].client->Connected()) << "one that is too long is refused, and that is all";
}

// A relay need not send one message at a time: all of a frame arrive (N2: a revoke before an
// acknowledgement).
TEST_F(RelaysTest, NoMessageOfAFrameIsLost) {
  Run();
  Say(children_[0], "hello");
  Run();
  const std::string route = RouteOf(children_[0]);
  for (const char* text : {"revoke", "acknowledgement", "third"}) routes_->Send(route, text);
  (void)routes_->Flush([&](const std::string&, const core::RelayedDown& frame) {
    children_[0].link->queue().push_back(wire::Encode(frame));
    return true;
  });
  Run();
  EXPECT_THAT(heard_[children_[0].id.value], ElementsAre("revoke", "acknowledgement", "third"));
}

// A relay answers an opening with a half of its own: that is no head.
TEST_F(RelaysTest, AnAnswerThatTheHeadDidNotMakeIsNone) {
  spoil_down_ = [](core::RelayedDown& down) {
    for (core::RelayPart& part : down.parts) part.bytes = std::string(32, 'x');
  };
  for (int i = 0; i < 8; ++i) {
    Run();
    EXPECT_FALSE(children_[0].client->Connected());
    clock_->Advance(absl::Seconds(1));
  }
  EXPECT_TRUE(children_[0].client->Failed());
}

// A relay that answers beats and openings, and loses the rest.
TEST_F(RelaysTest, AChildLeavesARelayThroughWhichTheHeadIsNotHeard) {
  const auto wait = [&](absl::Duration time) {
    for (absl::Duration waited; waited < time; waited += absl::Seconds(1)) {
      clock_->Advance(absl::Seconds(1));
      if (children_[0].client->Failed()) return waited;
      children_[0].client->Beat();
      Run();
    }
    return absl::InfiniteDuration();
  };
  Run();
  ASSERT_TRUE(children_[0].client->Connected());
  EXPECT_LE(wait(absl::Minutes(5)), absl::Seconds(21)) << "no answer to its hello";
  Connect(children_[0], "b");
  Run();
  Say(children_[0], "hello");
  Run();
  routes_->Send(RouteOf(children_[0]), "welcome");
  Run();
  const absl::Duration silent = wait(absl::Minutes(5));
  EXPECT_GT(silent, absl::Seconds(50));
  EXPECT_LE(silent, absl::Seconds(61)) << "no answer to words of its own";
}

// Anybody may open in a node's name: it keeps the node from nothing.
TEST_F(RelaysTest, OpeningsOfOthersDoNotKeepAChildOut) {
  const auto open = [&] {
    core::RelayedUp up;
    for (int i = 0; i < 3; ++i)
      up.parts.push_back(
          {children_[0].id, core::RelayStage::kOpen, std::string(net::kSessionHalfBytes, 'x')});
    Take(carriers_["b"], up);
  };
  for (int i = 0; i < 3; ++i) {
    Run();
    open();
    Say(children_[0], absl::StrCat("word ", i));
    open();
    Run();
  }
  EXPECT_THAT(Texts(), ElementsAre("word 0", "word 1", "word 2"));
}

// A relay that keeps the first message of a child back plays it too late.
TEST_F(RelaysTest, AFirstMessageIsGoodForTenSeconds) {
  Run();
  core::RelayedUp kept;
  spoil_ = [&](core::RelayedUp& up) { std::swap(kept.parts, up.parts); };
  Say(children_[0], "hello");
  Run();
  spoil_ = nullptr;
  ASSERT_THAT(kept.parts, SizeIs(1));
  clock_->Advance(absl::Seconds(11));
  Take(carriers_["a"], kept);
  EXPECT_THAT(Texts(), IsEmpty());
}

TEST_F(RelaysTest, WhoSaysHelloDirectlyHasNoOtherRoute) {
  Run();
  Say(children_[0], "hello");
  Run();
  const std::string route = RouteOf(children_[0]);
  ASSERT_TRUE(routes_->Has(route));
  routes_->Forget(children_[0].id);
  EXPECT_FALSE(routes_->Has(route));
}

// One child with many parts does not make the frames of its relay unreadable, nor silence its siblings.
TEST_F(RelaysTest, AChildWithManyPartsHurtsNobodyElse) {
  Run();
  for (Child& child : children_) Say(child, "hello");
  Run();
  alive_.clear();
  core::RelayedUp many;
  for (int i = 0; i < 4096; ++i) {
    many.parts.push_back({children_[0].id, core::RelayStage::kSealed, "", 0, 0, true});
  }
  core::RelayedUp one;
  one.parts.push_back(many.parts[0]);
  ASSERT_TRUE(children_[0].link->Send(wire::Encode(one)).ok());
  ASSERT_TRUE(children_[0].link->Send(wire::Encode(many)).ok());
  children_[1].client->Beat();
  Say(children_[2], "still here");
  clock_->Advance(absl::Seconds(1));
  spoil_ = [](core::RelayedUp& up) { EXPECT_TRUE(wire::Decode(wire::Encode(up)).ok()); };
  Run();
  EXPECT_EQ(Texts().back(), "still here");
  EXPECT_THAT(alive_, ElementsAre(children_[1].id.value));
}

// N4: two machines with one key behind one relay: the first stays, as long as it speaks.
TEST_F(RelaysTest, ACloneDoesNotTakeTheConnectionOfWhoSpeaks) {
  Run();
  Say(children_[0], "hello");
  Run();
  const auto clone = carriers_["a"].server->Connect(NodeOf(children_[0].id.value));
  for (int second = 0; second < 10; ++second) {
    core::RelayedUp up;
    up.parts.push_back({children_[0].id, core::RelayStage::kOpen, std::string(net::kSessionHalfBytes, 'x')});
    ASSERT_TRUE(clone->Send(wire::Encode(up)).ok());
    children_[0].client->Beat();
    Run();
    clock_->Advance(absl::Seconds(1));
    EXPECT_TRUE(children_[0].client->Connected()) << second;
  }
  EXPECT_FALSE(clone->Receive().has_value());
}

TEST_F(RelaysTest, WhoIsGoneTakesNoRoom) {
  Run();
  Relay& relay = *carriers_["a"].relay;
  ASSERT_THAT(relay.Children({}), SizeIs(3));
  clock_->Advance(absl::Minutes(5));
  relay.Forget(clock_->Now() - absl::Minutes(1), {children_[1].id});
  EXPECT_THAT(relay.Children({}), ElementsAre(children_[1].id));
}

}  // namespace
}  // namespace gtrain::head
