#include "runtime/core/agent/keeper_order.h"

#include "gtest/gtest.h"

namespace gtrain::core {
namespace {

const JobId kOneJob("a");

ToKeeper Begin(uint64_t generation, const JobId& job = kOneJob) {
  return {job, keeper::BeginGeneration{generation, 1}};
}
ToKeeper Start(uint64_t generation, const JobId& job = kOneJob) {
  return {job, keeper::StartRank{generation, 0}};
}
ToKeeper End(uint64_t generation) { return {kOneJob, keeper::EndGeneration{generation}}; }

class KeeperOrderTest : public ::testing::Test {
 protected:
  // The ticket of what has to wait.
  uint64_t Waits(const ToKeeper& command, bool has_keeper = true) {
    const KeeperOrder::Way way = order_.Send(command, true, has_keeper);
    EXPECT_TRUE(way.ticket.has_value());
    return way.ticket.value_or(0);
  }
  KeeperOrder order_;
};

TEST_F(KeeperOrderTest, NothingWaitsWithoutFileWork) {
  for (const ToKeeper& command : {Begin(1), Start(1), End(1)}) {
    const KeeperOrder::Way way = order_.Send(command, false, false);
    EXPECT_TRUE(way.now);
    EXPECT_FALSE(way.ticket.has_value());
  }
}

TEST_F(KeeperOrderTest, WhatBeginsWaitsAndWhatEndsOvertakesItAndComesAgain_P8) {
  EXPECT_FALSE(order_.Send(Begin(1), true, false).now);
  EXPECT_FALSE(order_.Send(Start(1), true, false).now);
  const KeeperOrder::Way end = order_.Send(End(1), true, false);
  EXPECT_TRUE(end.now);
  EXPECT_TRUE(end.ticket.has_value());
  const KeeperOrder::Way ack = order_.Send({kOneJob, keeper::AckExit{1, 0}}, true, true);
  EXPECT_TRUE(ack.now);
  EXPECT_FALSE(ack.ticket.has_value());
}

TEST_F(KeeperOrderTest, ARankWhoseEndOvertookItIsNotStarted_P8) {
  const uint64_t begin = Waits(Begin(1)), start = Waits(Start(1));
  const uint64_t end = Waits(End(1));
  const uint64_t next_begin = Waits(Begin(2)), next_start = Waits(Start(2));
  EXPECT_TRUE(order_.Passes(Begin(1), begin)) << "the keeper answers for what it has heard of";
  EXPECT_FALSE(order_.Passes(Start(1), start));
  EXPECT_TRUE(order_.Passes(End(1), end));
  EXPECT_TRUE(order_.Passes(Begin(2), next_begin));
  EXPECT_TRUE(order_.Passes(Start(2), next_start));
}

TEST_F(KeeperOrderTest, AnEndCountsForWhatWaitsBeforeItAlone) {
  // The repetition of Quit still waits when the next keeper's generation is begun behind it, and revoked.
  const ToKeeper quit{kOneJob, keeper::Quit{"nothing is left"}};
  const uint64_t first = Waits(Start(1)), quits = Waits(quit);
  const uint64_t second = Waits(Start(2)), ends = Waits(End(2)), third = Waits(Start(3));
  EXPECT_FALSE(order_.Passes(Start(1), first));
  EXPECT_TRUE(order_.Passes(quit, quits));
  EXPECT_FALSE(order_.Passes(Start(2), second));
  EXPECT_TRUE(order_.Passes(End(2), ends));
  EXPECT_TRUE(order_.Passes(Start(3), third));
}

TEST_F(KeeperOrderTest, AnEndForWhichThereIsNoRoomStillCounts) {
  const uint64_t start = Waits(Start(1));
  (void)Waits(End(1));  // and never comes back
  const uint64_t next = Waits(Start(2));
  EXPECT_FALSE(order_.Passes(Start(1), start));
  EXPECT_TRUE(order_.Passes(Start(2), next));
}

TEST_F(KeeperOrderTest, WhatWaitedForALostKeeperBeginsNothing_P4) {
  const uint64_t begin = Waits(Begin(1)), start = Waits(Start(1));
  order_.KeeperLost(kOneJob);
  const uint64_t next_begin = Waits(Begin(2)), next_start = Waits(Start(2));
  EXPECT_FALSE(order_.Passes(Begin(1), begin));
  EXPECT_FALSE(order_.Passes(Start(1), start));
  EXPECT_TRUE(order_.Passes(Begin(2), next_begin));
  EXPECT_TRUE(order_.Passes(Start(2), next_start));
}

TEST_F(KeeperOrderTest, JobsDoNotMeet) {
  const JobId other("b");
  const uint64_t start = Waits(Start(1, other));
  (void)Waits(End(9));
  order_.KeeperLost(kOneJob);
  EXPECT_TRUE(order_.Passes(Start(1, other), start));
}

TEST_F(KeeperOrderTest, ALeaseWaitsOnlyWhereTheKeeperDoes) {
  const ToKeeper lease{kOneJob, keeper::Fence{1000}};
  EXPECT_FALSE(order_.Send(lease, true, true).ticket.has_value());
  EXPECT_TRUE(order_.Send(lease, true, false).ticket.has_value());
}

TEST_F(KeeperOrderTest, AGrantOfAnOlderConnectionDoesNotHold) {
  order_.Connected();
  const uint64_t connection = order_.connection();
  EXPECT_TRUE(order_.GrantHolds(connection));
  order_.Connected();
  EXPECT_FALSE(order_.GrantHolds(connection));
}

}  // namespace
}  // namespace gtrain::core
