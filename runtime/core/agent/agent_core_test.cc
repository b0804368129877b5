// Tests how an agent stands with its head and its machine: greetings, epochs, notices of the cloud, its end.
#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_test_world.h"
#include "runtime/core/head/head_core.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(AgentCoreTest, NoticeIsRepeatedUntilTheHeadHasIt) {
  const NodeNotice notice{
      .kind = NoticeKind::kLeave, .left = absl::Seconds(120), .source = "aws", .id = "t@1"};
  Step(CloudSays{notice});
  EXPECT_TRUE(Sent<NoticeSeen>().empty()) << "no head yet";
  Advance(absl::Seconds(20));
  Step(HeadUp{"10.0.0.1"});
  Step(FromHead{WelcomeOf()});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  EXPECT_EQ(Sent<NoticeSeen>()[0].notice.left, absl::Seconds(100)) << "of what is left when it is said";
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  Step(FromHead{AckNotice{{5}, 1}});
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  EXPECT_TRUE(Sent<NoticeSeen>().empty());
  NodeNotice same = notice;
  same.left = absl::Seconds(90);  // later than was said first
  Step(CloudSays{same});
  EXPECT_TRUE(Sent<NoticeSeen>().empty());
  same.left = absl::ZeroDuration();  // "Started"
  Step(CloudSays{same});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  Step(CloudSays{});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  EXPECT_EQ(Sent<NoticeSeen>()[0].notice.kind, NoticeKind::kNone);
  EXPECT_EQ(Sent<NoticeSeen>()[0].sequence, 3u);
}

// A machine may lend its agent any of its CPUs.
TEST_F(AgentCoreTest, ARankIsBoundToTheCpusThatTheIndicesOfItsPlaceMean) {
  Welcome();
  GenerationGrant grant = Grant(1, 2, 2);
  grant.ranks[0].cpus = {1};
  grant.ranks[1].cpus = {0, 2};  // --cpus said 3
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto starts = Commands<keeper::StartRank>();
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_THAT(starts[0].cpus, ::testing::ElementsAre(12));
  EXPECT_THAT(starts[1].cpus, ::testing::ElementsAre(8)) << "which this machine does not have";
}

TEST_F(AgentCoreTest, NoticeReachesTheRanksAndSignalsThemOnce) {
  Welcome();
  StartIt(1, 2, 2);
  Step(FromHead{NoticeRanks{{5}, kJob, {1}, absl::Seconds(119)}});
  ASSERT_EQ(Commands<keeper::Notice>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Notice>()[0].seconds, 119u);
  EXPECT_EQ(Commands<keeper::Notice>()[0].signal, 15);
  Step(FromHead{NoticeRanks{{6}, kJob, {1}, absl::Seconds(80)}});
  const keeper::Notice again{.generation = 1, .seconds = 80, .signal = 0, .number = 1};
  EXPECT_THAT(Commands<keeper::Notice>(), ::testing::ElementsAre(again))
      << "a second signal might end who is saving";
  Step(FromHead{NoticeRanks{{6}, kJob, {1}, absl::Seconds(80), 2}});
  EXPECT_EQ(Commands<keeper::Notice>().at(0).signal, 15) << "another, after the first was taken back";
}

TEST_F(AgentCoreTest, HelloThenWelcomeThenHeartbeats) {
  Step(FreePorts{{20001, 20002}});
  Step(HeadUp{"10.0.0.1"});
  ASSERT_EQ(Sent<AgentHello>().size(), 1u);
  EXPECT_EQ(Sent<AgentHello>()[0].address, "10.0.0.1");
  EXPECT_EQ(Sent<AgentHello>()[0].free_ports, (std::vector<int>{20001, 20002}));
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  EXPECT_THAT(Sent<AgentHeartbeat>(), IsEmpty());
  Advance(absl::Seconds(2));
  Step(AgentTick{});
  EXPECT_EQ(Sent<AgentHello>().size(), 1u) << "the hello is repeated until it is answered";
  Welcome();
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  ASSERT_EQ(Sent<AgentHeartbeat>().size(), 1u);
  EXPECT_EQ(Sent<AgentHeartbeat>()[0].sequence, 1u);
}

TEST_F(AgentCoreTest, EachHelloHasALargerOrder_W7) {
  Step(HeadUp{"10.0.0.1"});
  const uint64_t first = Sent<AgentHello>().at(0).order;
  Step(HeadUp{"10.0.0.1"});  // at the same moment
  const uint64_t second = Sent<AgentHello>().at(0).order;
  EXPECT_GT(second, first);
  Advance(absl::Seconds(3));
  AgentCore next(AgentConfig{});  // the agent is restarted within the boot
  last_ = next.Step(HeadUp{"10.0.0.1"}, now_);
  EXPECT_GT(Sent<AgentHello>().at(0).order, second);
}

TEST_F(AgentCoreTest, RefusalEndsTheAgentWithItsReason) {
  Step(HeadUp{"10.0.0.1"});
  Step(FromHead{AgentRefused{"another cluster"}});
  ASSERT_EQ(last_.effects.size(), 1u);
  const auto* leave = std::get_if<Leave>(&last_.effects[0]);
  ASSERT_NE(leave, nullptr);
  EXPECT_THAT(std::string(leave->status.message()), HasSubstr("another cluster"));
}

TEST_F(AgentCoreTest, LowerEpochIsIgnored) {  // H-class fencing: an old head must not command
  Welcome(5);
  Step(FromHead{StartGeneration{{4}, Grant(1, 1, 1)}});
  EXPECT_THAT(last_.effects, IsEmpty());
  EXPECT_THAT(last_.why, HasSubstr("epoch 4"));
  Step(FromHead{StartGeneration{{6}, Grant(1, 1, 1)}});
  EXPECT_EQ(Commands<keeper::StartRank>().size(), 1u);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(1), "old head"}});
  EXPECT_THAT(last_.effects, IsEmpty());
}

TEST_F(AgentCoreTest, SilentHeadEndsOnlyProgramsWithoutTheSdk) {
  Welcome();
  StartIt(1, 1, 1);
  Advance(absl::Seconds(121));
  Step(AgentTick{});
  ASSERT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
  EXPECT_THAT(Commands<keeper::EndGeneration>()[0].reason, HasSubstr("no word from the head"));

  Welcome();
  StartIt(2, 1, 1);
  FromRank(0, R"({"type":"joined"})", 1, 2);
  Advance(absl::Seconds(500));
  Step(AgentTick{});
  EXPECT_THAT(Commands<keeper::EndGeneration>(), IsEmpty());
}

// The lease runs from the sending of what the head has answered, and the keeper knows until when.
TEST_F(AgentCoreTest, TheKeeperIsToldUntilWhenRanksMayRun_N2) {
  Welcome();
  const Instant welcomed = now_;
  StartIt(1, 1, 2);
  ASSERT_EQ(Commands<keeper::Fence>().size(), 1u);
  const int64_t first = Commands<keeper::Fence>()[0].until_ms;
  EXPECT_EQ(first, (welcomed + absl::Seconds(120)).ns / 1'000'000);
  int64_t told = first;
  for (int second = 0; second < 60; ++second) {
    Advance(absl::Seconds(1));
    Step(AgentTick{});
    const Instant sent = now_;
    ASSERT_EQ(Sent<AgentHeartbeat>().size(), 1u);
    const uint64_t sequence = Sent<AgentHeartbeat>()[0].sequence;
    Advance(absl::Milliseconds(400));
    Step(FromHead{HeartbeatAck{{5}, sequence}});
    for (const keeper::Fence& fence : Commands<keeper::Fence>()) {
      EXPECT_EQ(fence.until_ms, (sent + absl::Seconds(120)).ns / 1'000'000);
      told = fence.until_ms;
    }
  }
  EXPECT_GT(told, (now_ + absl::Seconds(105)).ns / 1'000'000) << "told at least every ten seconds";
  // A heartbeat that is not answered extends nothing, and other messages of the head do not, either.
  for (int second = 0; second < 100; ++second) {
    Advance(absl::Seconds(1));
    Step(AgentTick{});
    Step(FromHead{ForgetJob{{5}, JobId("other-1")}});
    EXPECT_THAT(Commands<keeper::Fence>(), IsEmpty());
  }
  Step(AgentTick{});
  EXPECT_THAT(Commands<keeper::EndGeneration>(), IsEmpty());
  Advance(absl::Seconds(25));
  Step(AgentTick{});
  EXPECT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
}

TEST_F(AgentCoreTest, QueriesReadLogsByNumbersOnly) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentQuery{{5}, 9, AgentQuery::Kind::kReadLog, kJob, {1}, 0, true, 5, {}, 77}});
  ASSERT_EQ(last_.effects.size(), 1u);
  const auto& read = std::get<ReadLog>(last_.effects[0]);
  EXPECT_EQ(read.path, "/run/logs/generation-1/rank-0.err");
  EXPECT_EQ(read.offset, 5u);
  EXPECT_EQ(read.bytes_max, 77u);
  Step(FromHead{AgentQuery{{5}, 10, AgentQuery::Kind::kReadLog, JobId("../etc"), {1}, 0, true, 5, {}}});
  ASSERT_EQ(Sent<AgentAnswer>().size(), 1u);
  EXPECT_FALSE(Sent<AgentAnswer>()[0].ok);
  Step(FromHead{AgentQuery{{5}, 11, AgentQuery::Kind::kExec, kJob, {1}, 0, false, 0, {"ls"}}});
  ASSERT_EQ(Commands<keeper::Exec>().size(), 1u);
  // The client is told after this time that there is no answer: no command outlives it.
  EXPECT_LT(absl::Milliseconds(Commands<keeper::Exec>()[0].timeout_ms), HeadConfig().query_timeout);
}

TEST_F(AgentCoreTest, AQuestionAboutActorsGoesToTheRankUnread) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentQuery{{5}, 12, AgentQuery::Kind::kActors, kJob, {1}, 0, false, 0, {"{\"limit\":2}"}}});
  ASSERT_EQ(Commands<keeper::Ask>().size(), 1u);
  const keeper::Ask ask = Commands<keeper::Ask>()[0];
  EXPECT_EQ(ask.question, "{\"limit\":2}");
  EXPECT_LT(absl::Milliseconds(ask.timeout_ms), HeadConfig().query_timeout)
      << "or nobody hears who is silent";
  Step(FromKeeper{kJob, keeper::ExecDone{12, false, 0, "rank 0 does not answer within 5 s"}});
  ASSERT_EQ(Sent<AgentAnswer>().size(), 1u);
  EXPECT_FALSE(Sent<AgentAnswer>()[0].ok);
  EXPECT_EQ(Sent<AgentAnswer>()[0].text, "rank 0 does not answer within 5 s");
}

// A revoked node ends its ranks, then itself; a node refused for another reason leaves them alone.
TEST_F(AgentCoreTest, RevokedNodeEndsItsRanksThenItself) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentRefused{"this node was revoked by root", true}});
  EXPECT_EQ(Commands<keeper::Quit>().size(), 1u);
  for (const AgentEffect& effect : last_.effects) EXPECT_FALSE(std::holds_alternative<Leave>(effect));
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  const auto leave = std::find_if(last_.effects.begin(), last_.effects.end(),
                                  [](const AgentEffect& e) { return std::holds_alternative<Leave>(e); });
  ASSERT_NE(leave, last_.effects.end());
  EXPECT_TRUE(absl::IsPermissionDenied(std::get<Leave>(*leave).status));
  EXPECT_TRUE(std::get<Leave>(*leave).after_keepers);
}

TEST_F(AgentCoreTest, ShutdownLeavesAfterTheLastGeneration) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentShutdown{{5}, "idle"}});
  EXPECT_EQ(Commands<keeper::Quit>().size(), 1u);
  for (const AgentEffect& effect : last_.effects) EXPECT_FALSE(std::holds_alternative<Leave>(effect));
  Exit(0, 0);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  EXPECT_TRUE(std::any_of(last_.effects.begin(), last_.effects.end(),
                          [](const AgentEffect& e) { return std::holds_alternative<Leave>(e); }));
}

}  // namespace
}  // namespace gtrain::core
