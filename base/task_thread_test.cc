#include "base/task_thread.h"

#include "base/mutex.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

TEST(TaskThread, RunsInOrderAndFinishesWhatIsQueued) {
  std::vector<int> ran;
  TaskThread thread(100);
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(thread.Post([&ran, i] { ran.push_back(i); }));
  EXPECT_TRUE(thread.Finish(absl::Seconds(60)));
  ASSERT_EQ(ran.size(), 50u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(ran[i], i);
  EXPECT_FALSE(thread.Post([] {}));
}

TEST(TaskThread, WhatIsPostedFirstRunsBeforeAllThatWaits) {
  std::vector<int> ran;
  auto go = std::make_shared<Notification>();
  TaskThread thread(2);
  auto entered = std::make_shared<Notification>();
  ASSERT_TRUE(thread.Post([=] {
    entered->Notify();
    go->WaitFor(absl::Seconds(60));
  }));
  ASSERT_TRUE(entered->WaitFor(absl::Seconds(60)));
  EXPECT_TRUE(thread.Post([&] { ran.push_back(1); }));
  EXPECT_TRUE(thread.Post([&] { ran.push_back(2); }));
  thread.PostFirst([&] { ran.push_back(0); });
  go->Notify();
  EXPECT_TRUE(thread.Finish(absl::Seconds(60)));
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2}));
}

// H11: a disk that hangs fills a bounded queue and delays the end only by the limit.
TEST(TaskThread, StuckTaskBoundsTheQueueAndTheEnd) {
  auto stuck = std::make_shared<Notification>();
  {
    TaskThread thread(2);
    auto entered = std::make_shared<Notification>();
    ASSERT_TRUE(thread.Post([stuck, entered] {
      entered->Notify();
      stuck->WaitFor(absl::Seconds(60));
    }));
    ASSERT_TRUE(entered->WaitFor(absl::Seconds(60)));
    EXPECT_TRUE(thread.Post([] {}));
    EXPECT_TRUE(thread.Post([] {}));
    EXPECT_FALSE(thread.Post([] {}));
    thread.PostFirst([] {});  // a commit is not refused because others wait
    EXPECT_FALSE(thread.Finish(absl::Milliseconds(50)));
  }
  stuck->Notify();
}

}  // namespace
}  // namespace gtrain
