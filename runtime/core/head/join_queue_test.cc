#include "runtime/core/head/join_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class JoinQueueTest : public ::testing::Test {
 protected:
  bool Add(const std::string& token, int node, const std::string& address = "10.0.0.1") {
    return queue_.Add(
        {absl::StrCat("route-", ++routes_), address, token, {absl::StrCat("key-", node), "host"}}, now_);
  }
  std::vector<std::string> Tokens(const std::vector<JoinQueue::One>& batch) {
    std::vector<std::string> tokens;
    for (const auto& one : batch) tokens.push_back(one.token);
    return tokens;
  }
  JoinQueue queue_;
  Instant now_;
  int routes_ = 0;
};

TEST_F(JoinQueueTest, TwoThousandAtOnceAllHaveRoom) {
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(Add("t", i)) << i;
  size_t taken = 0;
  while (true) {
    const auto batch = queue_.Take();
    if (batch.empty()) break;
    EXPECT_LE(batch.size(), JoinQueue::kBatchMax);
    EXPECT_THAT(queue_.Take(), IsEmpty()) << "one batch at a time";
    EXPECT_THAT(queue_.Done(), SizeIs(batch.size()));
    taken += batch.size();
  }
  EXPECT_EQ(taken, 2000);
  EXPECT_EQ(queue_.dropped(), 0);
}

TEST_F(JoinQueueTest, WhoAsksAgainIsAnsweredOnceAndOnTheNewestRoute) {
  EXPECT_TRUE(Add("t", 1));
  EXPECT_TRUE(Add("t", 1));
  EXPECT_THAT(queue_.Take(), SizeIs(1));
  EXPECT_TRUE(Add("t", 1)) << "while it is dealt with";
  EXPECT_THAT(queue_.Done(), ElementsAre("route-3"));
  EXPECT_THAT(queue_.Take(), IsEmpty());
}

TEST_F(JoinQueueTest, OneTokenDoesNotHoldUpAnother) {
  for (int i = 0; i < 500; ++i) Add("many", i);
  Add("one", 0);
  EXPECT_THAT(Tokens(queue_.Take()), ::testing::Contains("one"));
}

TEST_F(JoinQueueTest, OneTokenHasItsShare) {
  int kept = 0;
  for (int i = 0; i < 4000; ++i) kept += Add("t", i);
  EXPECT_EQ(kept, JoinQueue::kWaitingOfToken);
  EXPECT_TRUE(Add("other", 0));
  EXPECT_EQ(queue_.dropped(), 4000 - JoinQueue::kWaitingOfToken);
  for (int t = 0; t < 10; ++t) {
    for (int i = 0; i < 1000; ++i) Add(absl::StrCat("t", t), i, "10.0.0.2");
  }
  size_t all = 0;
  for (auto batch = queue_.Take(); !batch.empty(); batch = queue_.Take()) all += queue_.Done().size();
  EXPECT_EQ(all, JoinQueue::kWaitingMax);
}

TEST_F(JoinQueueTest, WhoKeepsAskingIsHeldBack) {
  int kept = 0;
  for (int i = 0; i < 100'000; ++i) kept += Add("t", 1);
  EXPECT_EQ(kept, JoinQueue::kBurst);
  EXPECT_TRUE(Add("t", 1, "10.0.0.2")) << "another address";
  EXPECT_TRUE(Add("u", 1)) << "another token";
  EXPECT_FALSE(Add("t", 1));
  now_ = now_ + absl::Seconds(1);
  EXPECT_TRUE(Add("t", 1));
  for (int i = 0; i < 20'000; ++i)
    Add("v", i, absl::StrCat("address-", i));  // forgets, grows without bound not
  EXPECT_TRUE(Add("w", 1));
}

}  // namespace
}  // namespace gtrain::core
