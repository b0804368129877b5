// Tests questions to the processes of ranks (`gtrain actors`), which the keeper passes on.
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_client.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::host {
namespace {

class KeeperAsksTest : public KeeperTest {
 protected:
  void SetUp() override {
    KeeperTest::SetUp();
    Start();
    Launch({"exec sleep 600", "exec sleep 600"});
    ASSERT_NE(WaitStarted(1), nullptr);
    rank_.emplace(dir_);
    rank_->Hello(1, 1, Rank(1, {}).token);
    const auto welcome = rank_->Next();
    ASSERT_EQ(welcome.first, kKeeperWelcome);
    uint32_t abilities = 0;
    ASSERT_EQ(welcome.second.size(), sizeof(abilities));
    std::memcpy(&abilities, welcome.second.data(), sizeof(abilities));
    ASSERT_NE(abilities & kKeeperAsksRanks, 0u);
  }
  void TearDown() override {
    rank_.reset();
    KeeperTest::TearDown();
  }
  void Ask(uint64_t id, int rank, uint64_t timeout_ms = 60'000) {
    client_->Send(keeper::Ask{id, 1, rank, "what?", timeout_ms});
    Pump();
  }
  const keeper::ExecDone* Answer(uint64_t id) {
    return Wait<keeper::ExecDone>([id](const keeper::ExecDone& done) { return done.id == id; });
  }

  std::optional<FakeRank> rank_;
};

TEST_F(KeeperAsksTest, AQuestionComesToTheRankAndItsAnswerBack) {
  rank_->Send(kRankAnswers, "");
  rank_->Send(kRankToAgent, R"({"type":"joined"})");  // once that is heard, so is the other
  ASSERT_NE(Wait<keeper::RelayUp>([](const keeper::RelayUp&) { return true; }), nullptr);
  Ask(7, 1);
  const auto [kind, body] = rank_->Next();
  EXPECT_EQ(kind, kKeeperAsks);
  ASSERT_GE(body.size(), sizeof(RankQuestion));
  EXPECT_EQ(body.substr(sizeof(RankQuestion)), "what?");
  std::string other = body.substr(0, sizeof(RankQuestion));
  ++other[0];
  rank_->Send(kRankAnswer, other + "to nobody");
  rank_->Send(kRankAnswer, body.substr(0, sizeof(RankQuestion)) + "{}");
  const keeper::ExecDone* done = Answer(7);
  ASSERT_NE(done, nullptr);
  EXPECT_TRUE(done->ok);
  EXPECT_EQ(done->output, "{}");
}

TEST_F(KeeperAsksTest, WhoHasNothingToSayIsNotAsked) {
  Ask(7, 0);
  Ask(8, 1);
  for (const uint64_t id : {7, 8}) {
    const keeper::ExecDone* done = Answer(id);
    ASSERT_NE(done, nullptr);
    EXPECT_TRUE(done->ok);
    EXPECT_EQ(done->output, "");
  }
  Ask(9, 5);
  const keeper::ExecDone* none = Answer(9);
  ASSERT_NE(none, nullptr);
  EXPECT_FALSE(none->ok);
  EXPECT_EQ(none->output, "rank 5 is not running here");
}

// Nor does one that is asked for ever lose its connection by what it has not read.
TEST_F(KeeperAsksTest, WhoDoesNotAnswerIsNamed_B1) {
  rank_->Send(kRankAnswers, "");
  rank_->Send(kRankToAgent, R"({"type":"joined"})");
  ASSERT_NE(Wait<keeper::RelayUp>([](const keeper::RelayUp&) { return true; }), nullptr);
  for (uint64_t id = 1; id <= 8; ++id) {
    Ask(id, 1, 1000);
  }
  const keeper::ExecDone* late = Answer(8);
  ASSERT_NE(late, nullptr);
  EXPECT_FALSE(late->ok);
  EXPECT_THAT(late->output, ::testing::HasSubstr("rank 1 does not answer within 1 s"));
  Ask(9, 1);
  const keeper::ExecDone* refused = Answer(9);
  ASSERT_NE(refused, nullptr);
  EXPECT_THAT(refused->output, ::testing::HasSubstr("rank 1 has not answered the last 8 questions"));
  // It goes on.
  const std::string question = rank_->Next().second;
  rank_->Send(kRankAnswer, question + "too late");
  rank_->Send(kRankToAgent, R"({"type":"progress","step":1})");
  ASSERT_NE(Wait<keeper::RelayUp>([](const keeper::RelayUp& r) { return r.id == 2; }), nullptr);
  Ask(10, 1, 1000);
  const keeper::ExecDone* again = Answer(10);
  ASSERT_NE(again, nullptr);
  EXPECT_THAT(again->output, ::testing::HasSubstr("does not answer within"));
}

TEST_F(KeeperAsksTest, AnAnswerThatIsTooLongIsRefused_B1) {
  rank_->Send(kRankAnswers, "");
  rank_->Send(kRankToAgent, R"({"type":"joined"})");
  ASSERT_NE(Wait<keeper::RelayUp>([](const keeper::RelayUp&) { return true; }), nullptr);
  Ask(7, 1);
  rank_->Send(kRankAnswer, rank_->Next().second.substr(0, sizeof(RankQuestion)) + std::string(2 << 20, 'x'));
  const keeper::ExecDone* done = Answer(7);
  ASSERT_NE(done, nullptr);
  EXPECT_FALSE(done->ok);
  EXPECT_THAT(done->output, ::testing::HasSubstr("answers with 2097152 bytes"));
}

}  // namespace
}  // namespace gtrain::host
