// The door of a relay and the files that remember it.
#include "runtime/agent/relay_way.h"

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "net/zmq/client.h"

namespace gtrain::agent {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<net::ZmqClient> Knock(const RelayDoor& door, const net::KeyPair& relay,
                                      const net::KeyPair& child) {
  net::ClientOptions options;
  options.endpoint = "127.0.0.1:" + std::to_string(door.port());
  options.server_public_key = relay.public_key;
  options.keys = child;
  return net::ZmqClient::Connect(options).value();
}

// Waits until one of the two has become true.
bool ComesIn(const net::ZmqClient& client) {
  const RealClock clock;
  for (const Instant until = clock.Now() + absl::Seconds(10); clock.Now() < until;) {
    if (client.Connected()) return true;
    if (client.KeyRefused()) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  ADD_FAILURE() << "neither let in nor refused";
  return false;
}

core::RelayChild ChildOf(const net::KeyPair& keys) {
  return {NodeId(net::KeyId(keys.public_key)), keys.public_key};
}

TEST(RelayDoor, LetsInTheChildrenThatItWasToldAndNobodyElse) {
  const std::string folder = TestFolder();
  const net::KeyPair relay = net::MakeKeyPair(), child = net::MakeKeyPair(), other = net::MakeKeyPair();
  EXPECT_FALSE(RelayDoor::WasOpen(folder));
  const auto door = RelayDoor::Open(folder, "127.0.0.1", relay);
  ASSERT_TRUE(door.ok()) << door.status();
  EXPECT_TRUE(RelayDoor::WasOpen(folder));
  EXPECT_FALSE(ComesIn(*Knock(**door, relay, child))) << "it was told nobody yet";
  // A head that names a key under another node's id lets in neither.
  (*door)->Admit({ChildOf(child), {ChildOf(child).node, other.public_key}}, RealClock().Now());
  EXPECT_TRUE(ComesIn(*Knock(**door, relay, child)));
  EXPECT_FALSE(ComesIn(*Knock(**door, relay, other)));
  (*door)->Admit({}, RealClock().Now());
  EXPECT_FALSE(ComesIn(*Knock(**door, relay, child)));
}

TEST(RelayDoor, IsWhereItWasAndElsewhereWhereThatIsTaken) {
  const std::string folder = TestFolder();
  const net::KeyPair keys = net::MakeKeyPair();
  auto first = RelayDoor::Open(folder, "127.0.0.1", keys);
  ASSERT_TRUE(first.ok()) << first.status();
  const int port = (*first)->port();
  const auto beside = RelayDoor::Open(folder, "127.0.0.1", keys);
  ASSERT_TRUE(beside.ok()) << beside.status();
  EXPECT_NE((*beside)->port(), port);
  ASSERT_TRUE(WriteFileDurable(folder + "/relay-port", std::to_string(port) + "\n", 0600).ok());
  first->reset();
  const auto again = RelayDoor::Open(folder, "127.0.0.1", keys);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->port(), port);
}

TEST(RelayDoor, SaysWhyItCannotListen) {
  const auto door = RelayDoor::Open(TestFolder(), "192.0.2.1", net::MakeKeyPair());  // of no machine
  EXPECT_THAT(door.status().message(), HasSubstr("192.0.2.1"));
}

TEST(Via, IsRememberedAndForgottenAndADamagedOneIsNone) {
  const std::string folder = TestFolder();
  EXPECT_FALSE(LoadVia(folder).has_value());
  const core::ConnectVia via{{}, NodeId("n1"), "10.0.0.2:4711", net::MakeKeyPair().public_key};
  SaveVia(folder, via);
  EXPECT_EQ(LoadVia(folder), via);
  SaveVia(folder, std::nullopt);
  EXPECT_FALSE(LoadVia(folder).has_value());
  for (const char* text : {"", "n1", "../x\n10.0.0.2:4711\nkey\n"}) {
    ASSERT_TRUE(WriteFileDurable(folder + "/via", text, 0600).ok());
    EXPECT_FALSE(LoadVia(folder).has_value()) << text;
  }
}

TEST(ConnectThrough, RefusesWhatCannotBeARelay) {
  const net::KeyPair keys = net::MakeKeyPair(), head = net::MakeKeyPair();
  const NodeId self(net::KeyId(keys.public_key));
  const core::ConnectVia good{{}, NodeId("n1"), "127.0.0.1:1", net::MakeKeyPair().public_key};
  EXPECT_TRUE(ConnectThrough(good, self, keys, head.public_key, 0).ok());
  core::ConnectVia bad = good;
  bad.endpoint = "nowhere";
  EXPECT_FALSE(ConnectThrough(bad, self, keys, head.public_key, 0).ok());
  bad = good;
  bad.public_key = "no key";
  EXPECT_FALSE(ConnectThrough(bad, self, keys, head.public_key, 0).ok());
  EXPECT_FALSE(ConnectThrough(good, self, keys, "no key", 0).ok());
}

}  // namespace
}  // namespace gtrain::agent
