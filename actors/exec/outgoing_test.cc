#include "actors/exec/outgoing.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

constexpr CallerId kOwn{1, 1}, kOther{2, 2};

std::string Written(const Frame& frame) {
  std::string message;
  AppendFrame(frame, &message);
  return message;
}

class OutgoingTest : public ::testing::Test {
 protected:
  void Add(int count) {
    for (int i = 0; i < count; ++i) {
      OutgoingCalls::Call call;
      call.actor = 1;
      call.deadline = now_ + absl::Seconds(60);
      call.reply = [](const absl::Status&, absl::string_view) {};
      calls_.Add(std::move(call), heard_);
    }
  }
  // How many calls are sent now.
  size_t Sent() {
    const std::string message = calls_.NextMessage(now_);
    absl::string_view rest = message;
    size_t sent = 0;
    for (; !rest.empty(); ++sent) EXPECT_TRUE(std::holds_alternative<CallFrame>(*TakeFrame(&rest)));
    return sent;
  }
  void Greet() {
    calls_.Connected();
    EXPECT_EQ(calls_.NextMessage(now_), Written(HelloFrame{kOwn, kOther}));
    EXPECT_TRUE(calls_.OnMessage(Written(WelcomeFrame{kOther}), now_, heard_).ok());
  }
  void Pass(absl::Duration time) {
    now_ = now_ + time;
    calls_.OnTime(now_, heard_);
  }

  Instant now_{1'000'000'000};
  OutgoingCalls calls_{kOwn, kOther, "rank 1"};
  HeardReplies heard_;
};

TEST_F(OutgoingTest, NothingIsSentBeforeTheOtherHasSaidWhoItIs) {
  Add(3);
  EXPECT_EQ(Sent(), 0u);
  calls_.Connected();
  EXPECT_FALSE(calls_.NextMessage(now_).empty());
  EXPECT_EQ(Sent(), 0u);
  EXPECT_TRUE(calls_.OnMessage(Written(WelcomeFrame{kOther}), now_, heard_).ok());
  EXPECT_EQ(Sent(), 3u);
}

TEST_F(OutgoingTest, AnotherProcessAtItsAddressIsItsDeath) {
  Add(1);
  calls_.Connected();
  EXPECT_FALSE(calls_.NextMessage(now_).empty());
  EXPECT_TRUE(absl::IsNotFound(calls_.OnMessage(Written(WelcomeFrame{{3, 3}}), now_, heard_)));
  EXPECT_EQ(Sent(), 0u);
}

TEST_F(OutgoingTest, HalfAsManyAreUnderWayWhenThereIsNoRoom) {
  Add(1000);
  Greet();
  EXPECT_EQ(Sent(), 1000u);
  EXPECT_TRUE(calls_.OnMessage(Written(AgainFrame{1, 1, true}), now_, heard_).ok());
  EXPECT_EQ(Sent(), 0u);  // not at once
  Pass(absl::Milliseconds(1));
  EXPECT_EQ(Sent(), 512u);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(calls_.OnMessage(Written(AgainFrame{1, 1, true}), now_, heard_).ok());
    Pass(absl::Milliseconds(64));
    EXPECT_LE(Sent(), 512u >> (i + 1) | 1u);
  }
  // One more with each answer.
  for (uint64_t number = 1; number <= 4; ++number) {
    EXPECT_TRUE(
        calls_.OnMessage(Written(AnswerFrame{1, number, absl::StatusCode::kOk, ""}), now_, heard_).ok());
    EXPECT_EQ(Sent(), 2u);
  }
  EXPECT_EQ(heard_.size(), 4u);
}

TEST_F(OutgoingTest, WhoCallsOnTheWrongConnectionIsRefused) {
  Greet();
  EXPECT_TRUE(absl::IsInvalidArgument(calls_.OnMessage(Written(HelloFrame{kOther, kOwn}), now_, heard_)));
}

// All that were under way were given up, and the other end has answered none of them yet.
TEST_F(OutgoingTest, WhatWasGivenUpHoldsNobodyOff) {
  Greet();
  Add(kCallsInWindow);
  EXPECT_EQ(Sent(), kCallsInWindow);
  Add(1);
  ASSERT_EQ(heard_.size(), 1u);
  EXPECT_TRUE(absl::IsResourceExhausted(heard_[0].status)) << heard_[0].status;
  Pass(absl::Seconds(61));
  EXPECT_EQ(heard_.size(), kCallsInWindow + 1);
  heard_.clear();
  Add(2);
  EXPECT_TRUE(heard_.empty());
  EXPECT_EQ(Sent(), kCallsInWindow)
      << "of those that were given up the other end hears; these have no numbers yet";
  EXPECT_TRUE(calls_.OnMessage(Written(AnswerFrame{1, 1, absl::StatusCode::kOk, ""}), now_, heard_).ok());
  EXPECT_EQ(Sent(), 1u);
  Pass(absl::Seconds(61));
  EXPECT_EQ(heard_.size(), 2u);
  int not_sent = 0;
  for (const HeardReply& one : heard_) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(one.status)) << one.status;
    if (absl::StrContains(one.status.message(), "has not been sent")) ++not_sent;
  }
  EXPECT_EQ(not_sent, 1) << "each says whether it may have run";
  heard_.clear();
  Add(static_cast<int>(kCallsInWindow) + 5);
  EXPECT_EQ(heard_.size(), 5u) << "as many as the window has wait";
  EXPECT_TRUE(absl::IsResourceExhausted(heard_[0].status));
  heard_.clear();
  std::vector<OutgoingCalls::Call> unsent;
  std::vector<OutgoingCalls::Moved> moved;
  calls_.Gone("it is dead", heard_, unsent, moved);
  EXPECT_EQ(heard_.size(), kCallsInWindow);
  EXPECT_TRUE(unsent.empty());  // they have no reference
}

}  // namespace
}  // namespace gtrain::actors
