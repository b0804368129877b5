// No generation begins while ranks of the one before may write (fault N2): those of a program without the SDK
// on a node that does not answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class FenceTest : public HeadTestWorld {
 protected:
  // One rank on each of two nodes, a third is free; then node 2 says nothing any more.
  void LoseNode2(const std::string& word, RankState state = RankState::kRunning) {
    Hello("1");
    Hello("2");
    job_ = Submit("train 2 2 one-per-node " + word);
    StartRanks(job_);
    Hello("3");
    for (int rank = 0; rank < 2; ++rank) {
      RankStatus status = StepOf(job_, rank, 5);
      status.state = state;
      FromNode(Node(rank), AgentHeartbeat{++heartbeats_, {status}, {}});
    }
    lost_ = Node(1);
    sent_.clear();
    PassAlive(config_.dead_after + absl::Seconds(1));
    FromNode(Node(0), GenerationGone{job_, {1}});
  }
  // The sentence of the job, which says for whom it waits, and how long at most.
  std::string Reason() { return Status(job_).at("reason"); }
  std::string Node(int rank) { return Status(job_).at("ranks").at(rank).at("node"); }
  void PassAlive(absl::Duration time) {
    std::vector<std::string> alive;
    for (const char* node : {"1", "2", "3"}) {
      if (node != lost_) alive.push_back(node);
    }
    Pass(time, alive);
  }
  size_t Grants() { return Sent<StartGeneration>().size(); }

  JobId job_;
  std::string lost_;
};

TEST_F(FenceTest, TheNextGenerationWaitsForTheLease_N2) {
  LoseNode2("fenced");
  PassAlive(config_.fence_after - config_.dead_after - absl::Seconds(2));
  EXPECT_EQ(Grants(), 0u) << "its ranks may still write";
  EXPECT_THAT(FromClient(ClientWhy{job_}).json, HasSubstr("overlap: allow"));
  EXPECT_THAT(Reason(), HasSubstr(absl::StrCat("may still run on host-", lost_)));
  PassAlive(config_.fence_margin + absl::Seconds(3));
  EXPECT_EQ(Grants(), 2u);
}

TEST_F(FenceTest, RanksWithTheSdkAreFencedByTheirCommits) {
  LoseNode2("fenced", RankState::kJoined);
  PassAlive(absl::Seconds(5));
  EXPECT_EQ(Grants(), 2u);
}

TEST_F(FenceTest, OverlapAllowNeverWaits) {
  LoseNode2("");
  PassAlive(absl::Seconds(5));
  EXPECT_EQ(Grants(), 2u);
}

TEST_F(FenceTest, TheWaitEndsWithTheNodesWord) {
  LoseNode2("fenced");
  const std::string back = std::exchange(lost_, "");
  Hello(back, 4, {{job_, {1}, {0}, {Step(job_, 1, 1, 5)}}});  // the same keeper, the same ranks
  EXPECT_EQ(Grants(), 0u);
  FromNode(back, GenerationGone{job_, {1}});
  PassAlive(absl::Seconds(5));
  EXPECT_EQ(Grants(), 2u);
}

TEST_F(FenceTest, TheWaitEndsWithTheNodesNextLife) {
  LoseNode2("fenced");
  const std::string back = std::exchange(lost_, "");
  Hello(back, 4, {}, "after a reboot");
  PassAlive(absl::Seconds(5));
  EXPECT_EQ(Grants(), 2u);
}

TEST_F(FenceTest, TheWaitEndsWhenThePersonSaysThatTheMachineIsOff) {
  LoseNode2("fenced");
  FromClient(ClientRevokeNode{lost_, "it is off"}, "", Role::kAdmin);
  PassAlive(absl::Seconds(5));
  EXPECT_EQ(Grants(), 2u);
}

TEST_F(FenceTest, AMachineThatWasAnnouncedToGoIsWaitedForUntilThen) {
  Hello("1");
  Hello("2");
  job_ = Submit("train 2 2 one-per-node fenced");
  StartRanks(job_);
  Hello("3");
  lost_ = Node(1);
  const NodeNotice notice{
      .kind = NoticeKind::kLeave, .left = absl::Seconds(40), .source = "aws spot interruption", .id = "t"};
  FromNode(lost_, NoticeSeen{1, notice});
  sent_.clear();
  PassAlive(absl::Seconds(15));
  FromNode(Node(0), GenerationGone{job_, {1}});
  PassAlive(absl::Seconds(30));
  EXPECT_EQ(Grants(), 0u);
  PassAlive(absl::Seconds(15));
  EXPECT_EQ(Grants(), 2u);
}

// Of the leases that an earlier head granted, this head knows only that they began before its start.
TEST_F(FenceTest, AHeadThatStartsCountsFromItsStart_H1) {
  LoseNode2("fenced");
  PassAlive(absl::Seconds(60));
  Boot();
  for (const char* node : {"1", "2", "3"}) {
    if (node != lost_) Hello(node);
  }
  sent_.clear();
  PassAlive(config_.fence_after - absl::Seconds(2));
  EXPECT_EQ(Grants(), 0u);
  PassAlive(config_.fence_margin + absl::Seconds(5));
  EXPECT_EQ(Grants(), 2u);
}

// The next head has not heard of any rank, and the ranks of the next generation have not joined yet.
TEST_F(FenceTest, AHeadThatStartsKnowsThatTheProgramHasTheSdk_H1) {
  LoseNode2("fenced", RankState::kJoined);
  PassAlive(absl::Seconds(5));
  ASSERT_EQ(Grants(), 2u);
  Boot();
  const GenerationGrant grant = Stored(job_).grant.value();
  const std::string second = grant.ranks[1].node.value, first = grant.ranks[0].node.value;
  HeldGeneration held{job_, {2}};
  held.live.push_back({job_, {2}, 0, 100, RankState::kRunning});
  Hello(first, 4, {held});
  lost_ = second;
  sent_.clear();
  Pass(config_.rejoin_window + config_.dead_after + absl::Seconds(2), {first});
  EXPECT_EQ(Status(job_).at("reason").get<std::string>().find("may still run"), std::string::npos);
  FromNode(first, GenerationGone{job_, {2}});
  Pass(absl::Seconds(5), {first});
  EXPECT_EQ(State(job_), "WAITING") << "it needs two nodes, and waits for no lease";
}

TEST_F(FenceTest, AStopDoesNotWait) {
  LoseNode2("fenced");
  FromClient(ClientStop{job_, true});
  EXPECT_EQ(State(job_), "CANCELLED");
}

// It answers, but nobody there says that the ranks have ended.
TEST_F(FenceTest, ANodeThatAnswersAndDoesNotConfirmIsWaitedForAsLong_P10) {
  Hello("1");
  Hello("2");
  job_ = Submit("train 2 2 one-per-node fenced");
  StartRanks(job_);
  Hello("3");
  FromNode(Node(0), RankExited{Exit(job_, 1, 0, 1)});
  FromNode(Node(0), GenerationGone{job_, {1}});
  sent_.clear();
  PassAlive(config_.reform_grace + config_.gone_margin + absl::Seconds(2));
  EXPECT_EQ(Grants(), 0u);
  PassAlive(config_.fence_after + absl::Seconds(2));
  EXPECT_EQ(Grants(), 2u);
}

}  // namespace
}  // namespace gtrain::core
