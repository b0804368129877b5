// Tests the agent's reports of its ranks' output.
#include <gtest/gtest.h>

#include "runtime/core/agent/agent_test_world.h"
#include "runtime/core/values/log_tails.h"

namespace gtrain::core {
namespace {

const TailKey kStdout{kJob, {1}, 0, false};

class AgentTails : public ::testing::Test {
 protected:
  AgentTails() { Step(KeeperHoldsOneRank()); }

  void Step(const AgentEvent& event) {
    for (const LogTail& tail : SentBy<LogTail>(core_.Step(event, now_))) {
      told_.push_back(tail);
      head_.Put(tail);
    }
  }
  void Welcome(bool joins_pieces) {
    Step(HeadUp{"10.0.0.1"});
    AgentWelcome welcome = WelcomeOf();
    welcome.joins_pieces = joins_pieces;
    Step(FromHead{welcome});
  }
  // The rank writes, and a second later the agent has told it.
  void Print(const std::string& text) {
    said_ += text;
    Step(FromKeeper{kJob, keeper::Output{1, 0, false, said_.size(), 0, text}});
    now_ = now_ + absl::Seconds(1);
    Step(FromHead{HeartbeatAck{{5}, ++beats_}});  // the head is there
    Step(AgentTick{});
  }
  std::string Held() const {
    const HeldTail* tail = head_.Find(kStdout);
    return tail == nullptr ? "" : tail->text;
  }

  AgentCore core_{PlainAgent()};
  Instant now_{1'000'000'000};
  uint64_t beats_ = 0;
  std::string said_;
  std::vector<LogTail> told_;
  LogTails head_{64 << 10, 1 << 20};
};

TEST_F(AgentTails, OnlyWhatIsNewIsTold) {
  Welcome(true);
  size_t bytes = 0;
  for (int second = 0; second < 300; ++second) Print(std::string(99, 'a' + second % 26) + "\n");
  for (const LogTail& tail : told_) bytes += tail.text.size();
  EXPECT_EQ(told_.size(), 300u);
  EXPECT_EQ(bytes, said_.size());
  EXPECT_EQ(Held(), said_);
  EXPECT_EQ(head_.Find(kStdout)->end_offset, said_.size());
}

TEST_F(AgentTails, AHeadOfTheVersionBeforeIsToldAllEachTime) {
  Welcome(false);
  for (int second = 0; second < 3; ++second) Print("line\n");
  ASSERT_EQ(told_.size(), 3u);
  for (const LogTail& tail : told_) EXPECT_EQ(tail.piece, 0u);
  EXPECT_EQ(told_.back().text, "line\nline\nline\n");
  EXPECT_EQ(Held(), said_);
}

TEST_F(AgentTails, WhoIsWelcomedAgainTellsAll) {
  Welcome(true);
  Print("one\n");
  Print("two\n");
  head_.Forget(kJob);  // another head
  Step(HeadDown{});
  Print("three\n");
  ASSERT_EQ(told_.size(), 2u);
  Welcome(true);
  Print("four\n");
  EXPECT_EQ(told_.back().piece, 0u);
  EXPECT_EQ(Held(), said_);
  Print("five\n");
  EXPECT_EQ(told_.back().text, "five\n");
  EXPECT_EQ(Held(), said_);
}

// Output is reported, too, when the disk refuses its log, so that the log's end stays where it was.
TEST_F(AgentTails, WhatALogDoesNotTakeIsToldAllTheSame) {
  Welcome(true);
  for (const char* text : {"one\n", "two\n", "disk full\n"}) {
    said_ += text;
    Step(FromKeeper{kJob, keeper::Output{1, 0, false, 4, 0, text, 28}});
    now_ = now_ + absl::Seconds(1);
    Step(AgentTick{});
  }
  EXPECT_EQ(Held(), said_);
  EXPECT_EQ(told_.back().text, "disk full\n");
}

TEST_F(AgentTails, MoreThanATailIsOneTail) {
  Welcome(true);
  Print("before\n");
  Print(std::string(50'000, 'x'));
  Step(FromKeeper{kJob, keeper::Output{1, 0, false, 1, 0, std::string(60'000, 'y')}});
  Print(std::string(60'000, 'z'));
  EXPECT_EQ(told_.back().piece, 0u);
  EXPECT_EQ(told_.back().text.size(), 65'536u);
  EXPECT_EQ(Held(), told_.back().text);
  Print("after\n");
  EXPECT_EQ(told_.back().text, "after\n");
  EXPECT_EQ(Held().size(), 65'536u);
}

}  // namespace
}  // namespace gtrain::core
