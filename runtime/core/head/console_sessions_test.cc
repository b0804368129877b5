// Tests consoles through the head: who may open one, how many there are, and what an agent is asked.
#include "runtime/core/head/console_sessions.h"

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;

class HeadConsoleTest : public HeadTestWorld {
 protected:
  void SetUp() override {
    HeadTestWorld::SetUp();
    Hello("1");
    job_ = Submit("train 2 2");
    StartRanks(job_);
    sent_.clear();
  }

  ClientReply Turn(Console turn, const std::string& user = "ann", std::optional<uint64_t> generation = {},
                   const std::string& id = "", Role role = Role::kAdmin) {
    return FromClient(ClientConsole{job_, generation, 1, std::move(turn)}, id, role, user);
  }
  static Console Begin(const std::string& session) {
    return {.session = session, .start = true, .argv = {"cat"}, .input = "words"};
  }
  std::string Errors(const std::string& session, const std::string& user) {
    return Turn(Begin(session), user).error;
  }

  JobId job_;
};

TEST_F(HeadConsoleTest, ATurnGoesToTheAgentAndItsAnswerBack) {
  EXPECT_EQ(Turn(Begin("s1"), "ann", {}, "turn1").id, "none") << "the agent is asked";
  EXPECT_EQ(Turn(Begin("s1"), "ann", {}, "turn1").id, "none") << "again, by a client that has waited long";
  const auto asked = Sent<AgentQuery>();
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].second.kind, AgentQuery::Kind::kConsole);
  EXPECT_EQ(asked[0].second.rank, 1);
  EXPECT_EQ(asked[0].second.generation.value, 1u);
  EXPECT_EQ(asked[0].second.console, Begin("s1"));
  sent_.clear();
  FromNode("1", AgentAnswer{.query = asked[0].second.query,
                            .text = std::string("\0\xff", 2),
                            .next_offset = 7,
                            .end = true,
                            .err = "e",
                            .taken = 5,
                            .at = 3});
  ASSERT_EQ(sent_.size(), 1u);
  const auto document = nlohmann::json::parse(std::get<ReplyToClient>(sent_[0]).reply.json);
  EXPECT_EQ(document.at("stdout"), "AP8=");
  EXPECT_EQ(document.at("stderr"), "ZQ==");
  EXPECT_EQ(document.at("at"), 3);
  EXPECT_EQ(document.at("taken"), 5);
  EXPECT_EQ(document.at("exit_code"), 7);
  EXPECT_EQ(document.at("generation"), 1);
}

// A client tells what comes back by itself, and is asked again, from what never will.
TEST_F(HeadConsoleTest, WhatIsRefusedForGoodIsNoSilence) {
  Turn(Begin("s1"));
  FromNode("1",
           AgentAnswer{.query = Sent<AgentQuery>()[0].second.query, .ok = false, .text = "no", .end = true});
  EXPECT_EQ(std::get<ReplyToClient>(sent_.back()).reply.code,
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  Turn(Begin("s2"));
  Pass(config_.query_timeout + absl::Seconds(1), {"1"});
  const auto reply = std::find_if(sent_.rbegin(), sent_.rend(), [](const Effect& effect) {
    return std::holds_alternative<ReplyToClient>(effect);
  });
  ASSERT_NE(reply, sent_.rend());
  EXPECT_EQ(std::get<ReplyToClient>(*reply).reply.code, static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(Turn(Begin("s3"), "ann", 9).code, static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST_F(HeadConsoleTest, AreForTheOwnerAndCountedForEachUser) {
  EXPECT_THAT(Turn(Begin("s"), "eve", {}, "", Role::kUser).error,
              HasSubstr("is for its owner and for admins"));
  for (int i = 0; i < ConsoleSessions::kOfUserMax; ++i) EXPECT_EQ(Errors(absl::StrCat("a", i), "ann"), "");
  EXPECT_THAT(Errors("a8", "ann"), HasSubstr("of ann are open, the most this head takes of one user"));
  EXPECT_EQ(Errors("a0", "ann"), "") << "that one goes on";
  for (int i = 0; i < ConsoleSessions::kOfUserMax; ++i) EXPECT_EQ(Errors(absl::StrCat("b", i), "bob"), "");
  EXPECT_THAT(Errors("c0", "cat"), HasSubstr("16 consoles"));
  for (const auto& [node, query] : Sent<AgentQuery>()) {
    if (query.console.session == "b7") FromNode("1", AgentAnswer{.query = query.query, .end = true});
  }
  EXPECT_EQ(Errors("c0", "cat"), "") << "one has ended";
}

TEST(ConsoleSessions, ASilentClientHoldsNoPlace) {
  ConsoleSessions sessions;
  Instant now{};
  const NodeId node("1");
  for (int i = 0; i < ConsoleSessions::kOfUserMax; ++i) {
    const Console begin{.session = absl::StrCat("s", i), .start = true};
    EXPECT_TRUE(sessions.Turn(begin, "ann", node, now).ok());
  }
  EXPECT_FALSE(sessions.Turn({.session = "more", .start = true}, "ann", node, now).ok());
  // One that a head before this one let begin is not refused, and counted if there is room.
  EXPECT_TRUE(sessions.Turn({.session = "more"}, "ann", node, now).ok());
  EXPECT_EQ(sessions.open(), 8u);
  now = now + ConsoleSessions::kSilenceMax + absl::Seconds(1);
  EXPECT_TRUE(sessions.Turn({.session = "more", .start = true}, "ann", node, now).ok());
  EXPECT_EQ(sessions.open(), 1u);
}

}  // namespace
}  // namespace gtrain::core
