#include "net/zmq/end_to_end.h"

#include "gtest/gtest.h"

namespace gtrain::net {
namespace {

struct Pair {
  KeyPair node = MakeKeyPair(), head = MakeKeyPair();
  std::string secret = PairSecret(node, head.public_key).value();
  std::string node_half = NewSessionHalf(), head_half = NewSessionHalf();
  SealedSession at_node{SealedSession::End::kNode, secret, node_half, head_half};
  SealedSession at_head{SealedSession::End::kHead, PairSecret(head, node.public_key).value(), node_half,
                        head_half};
};

TEST(SealedSession, BothDirectionsInOrder) {
  Pair pair;
  for (const char* text : {"hello", "", "again"}) {
    EXPECT_EQ(pair.at_head.Open(pair.at_node.Seal(text)).value(), text);
    EXPECT_EQ(pair.at_node.Open(pair.at_head.Seal(text)).value(), text);
  }
  EXPECT_NE(pair.at_node.Seal("same"), pair.at_node.Seal("same")) << "each has its own number";
}

// A relay changes, repeats, leaves out, moves, and sends back where it came from.
TEST(SealedSession, WhatARelayMayDoToItDoesNotOpen) {
  Pair pair;
  const std::string first = pair.at_node.Seal("first"), second = pair.at_node.Seal("second");
  for (size_t i = 0; i < first.size(); ++i) {
    std::string changed = first;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(pair.at_head.Open(changed).ok()) << "byte " << i;
  }
  EXPECT_FALSE(pair.at_head.Open(second).ok()) << "the first was left out";
  EXPECT_FALSE(pair.at_head.Open(first.substr(0, 15)).ok());
  EXPECT_FALSE(pair.at_node.Open(first).ok()) << "its own words";
  EXPECT_TRUE(pair.at_head.Open(first).ok()) << "what does not open takes no number";
  EXPECT_FALSE(pair.at_head.Open(first).ok()) << "a second time";
  EXPECT_EQ(pair.at_head.Open(second).value(), "second");
}

TEST(SealedSession, ARecordedSessionOpensInNoOther) {
  Pair pair;
  const std::string recorded = pair.at_node.Seal("hello");
  SealedSession later(SealedSession::End::kHead, pair.secret, pair.node_half, NewSessionHalf());
  EXPECT_FALSE(later.Open(recorded).ok()) << "the head's half is fresh";
  const KeyPair other = MakeKeyPair();
  SealedSession others(SealedSession::End::kHead, PairSecret(pair.head, other.public_key).value(),
                       pair.node_half, pair.head_half);
  EXPECT_FALSE(others.Open(recorded).ok()) << "another node's";
}

TEST(SharedBody, OnlyAsItWasMade) {
  const SharedBody body = SealShared("to all of you");
  EXPECT_EQ(OpenShared(body.bytes, body.key).value(), "to all of you");
  std::string changed = body.bytes;
  changed.back() = static_cast<char>(changed.back() ^ 1);
  EXPECT_FALSE(OpenShared(changed, body.key).ok());
  // One of the readers has the key, and seals other words with it.
  SharedBody forged = SealShared("to all of me!");
  const std::string key = forged.key.substr(0, 32) + body.key.substr(32);
  EXPECT_FALSE(OpenShared(forged.bytes, key).ok());
  EXPECT_FALSE(OpenShared(body.bytes, body.key.substr(1)).ok());
  EXPECT_FALSE(OpenShared("", body.key).ok());
}

TEST(PairSecret, NeedsKeys) {
  EXPECT_FALSE(PairSecret(MakeKeyPair(), "short").ok());
  EXPECT_FALSE(PairSecret({}, MakeKeyPair().public_key).ok());
  // The point of order one: every secret with it is the same, known one.
  EXPECT_FALSE(PairSecret(MakeKeyPair(), std::string(40, '0')).ok());
}

}  // namespace
}  // namespace gtrain::net
