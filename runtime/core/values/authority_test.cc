// Faults X5, B8: every message and every request with every role. A right that appears here must be meant.
#include "runtime/core/values/authority.h"

#include <map>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;

constexpr Role kRoles[] = {Role::kAdmin, Role::kUser, Role::kNode, Role::kReadOnly, Role::kJoin};

template <typename Variant, size_t... I>
std::vector<Variant> OneOfEach(std::index_sequence<I...>) {
  return {Variant(std::in_place_index<I>)...};
}
template <typename Variant>
std::vector<Variant> OneOfEach() {
  return OneOfEach<Variant>(std::make_index_sequence<std::variant_size_v<Variant>>());
}

template <typename T>
bool Is(const Message& message) {
  return std::holds_alternative<T>(message);
}

// The roles that may send a message to the head; no role may send any other message.
std::set<Role> Senders(const Message& m) {
  if (Is<ClientRequest>(m)) return {Role::kAdmin, Role::kUser, Role::kReadOnly};
  if (Is<AgentJoin>(m)) return {Role::kJoin};
  if (Is<AgentHello>(m) || Is<AgentHeartbeat>(m) || Is<RanksStarted>(m) || Is<RankExited>(m) ||
      Is<GenerationGone>(m) || Is<ExchangePart>(m) || Is<CheckpointReport>(m) || Is<LogTail>(m) ||
      Is<AgentNote>(m) || Is<AgentAnswer>(m) || Is<GenerationDescribed>(m) || Is<NoticeSeen>(m) ||
      Is<LinkDown>(m) || Is<RelayedUp>(m) || Is<RelayReady>(m)) {
    return {Role::kNode};
  }
  return {};
}

TEST(Authority, EveryMessageWithEveryRole) {
  for (const Message& message : OneOfEach<Message>()) {
    for (Role role : kRoles) {
      EXPECT_EQ(MaySend(role, message), Senders(message).contains(role))
          << "message " << message.index() << " role " << static_cast<int>(role);
    }
  }
}

TEST(Authority, WhatTakesADrainBackHasANameOfItsOwn) {
  ClientDrainNode drain{"gpu-7", absl::Minutes(2), "new disk"};
  EXPECT_EQ(RuleOf(drain).name, "node drain");
  EXPECT_EQ(ReasonOf(drain), "new disk");
  drain.undo = true;
  EXPECT_EQ(RuleOf(drain).name, "node undrain");
  EXPECT_TRUE(RuleOf(drain).changes);
  for (const Role role : kRoles) EXPECT_EQ(RuleOf(drain).Of(role), RuleOf(ClientDrainNode{}).Of(role));
  EXPECT_EQ(ReasonOf(ClientRevokeNode{"gpu-7", "stolen"}), "stolen");
}

TEST(Authority, EveryRequestWithEveryRole) {
  // name: rights of admin, user, readonly: a(ll), o(wn jobs), -
  const std::map<std::string, std::string> table = {
      {"submit", "ao-"},   {"stop", "ao-"},         {"status", "aoa"},      {"why", "aoa"},
      {"nodes", "aaa"},    {"logs", "aoa"},         {"exec", "ao-"},        {"events", "aoa"},
      {"shutdown", "a--"}, {"token create", "a--"}, {"token ls", "a--"},    {"token revoke", "a--"},
      {"user add", "a--"}, {"user ls", "a--"},      {"user revoke", "a--"}, {"node revoke", "a--"},
      {"backup", "a--"},   {"node drain", "a--"},   {"stack", "ao-"},       {"scale", "ao-"},
      {"console", "ao-"},  {"actors", "aoa"},       {"topology", "aaa"}};
  const std::vector<ClientRequestBody> bodies = OneOfEach<ClientRequestBody>();
  ASSERT_EQ(bodies.size(), table.size());
  const std::string own = "ann", other = "bob";
  for (const ClientRequestBody& body : bodies) {
    const std::string name(RuleOf(body).name);
    ASSERT_TRUE(table.contains(name)) << name;
    for (Role role : kRoles) {
      const size_t column = role == Role::kAdmin      ? 0
                            : role == Role::kUser     ? 1
                            : role == Role::kReadOnly ? 2
                                                      : 3;
      const char right = column == 3 ? '-' : table.at(name)[column];
      const Peer peer{role, "0123456789abcdef", own};
      EXPECT_EQ(Authorize(peer, body, nullptr).ok(), right != '-') << name << " " << static_cast<int>(role);
      EXPECT_EQ(Authorize(peer, body, &own).ok(), right != '-') << name << " " << static_cast<int>(role);
      EXPECT_EQ(Authorize(peer, body, &other).ok(), right == 'a') << name << " " << static_cast<int>(role);
    }
  }
}

// Reads change nothing, so they are not audited; everything else is.
TEST(Authority, OnlyReadsAreNotChanges) {
  const std::set<std::string> reads = {"status",   "why",     "nodes",  "logs",    "events",
                                       "token ls", "user ls", "actors", "topology"};
  for (const ClientRequestBody& body : OneOfEach<ClientRequestBody>()) {
    EXPECT_EQ(RuleOf(body).changes, !reads.contains(std::string(RuleOf(body).name))) << RuleOf(body).name;
  }
}

TEST(Authority, AKeyWithoutANameOwnsWhatItSubmits) {
  EXPECT_EQ(OwnerName({Role::kUser, "00112233", ""}), "00112233");
  EXPECT_EQ(OwnerName({Role::kUser, "00112233", "ann"}), "ann");
}

TEST(Authority, RefusalsSayWhatIsNeeded) {
  const auto message = [](Role role, const ClientRequestBody& body, const std::string* owner) {
    return std::string(Authorize({role, "k", "ann"}, body, owner).message());
  };
  const std::string bob = "bob";
  EXPECT_THAT(message(Role::kUser, ClientStop{}, &bob), HasSubstr("belongs to bob"));
  EXPECT_THAT(message(Role::kUser, ClientShutdown{}, nullptr), HasSubstr("admin key"));
  EXPECT_THAT(message(Role::kReadOnly, ClientSubmit{}, nullptr), HasSubstr("may only read"));
  EXPECT_THAT(message(Role::kNode, ClientStatus{}, nullptr), HasSubstr("key of a node"));
}

}  // namespace
}  // namespace gtrain::core
