// Tests what ranks tell their agent, and what of it the head hears.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_model.h"
#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::IsEmpty;

TEST_F(AgentCoreTest, LocalExchangeCompletesWithoutTheHead) {
  Welcome();
  StartIt(1, 2, 2);
  FromRank(0, R"({"type":"exchange","sequence":0,"blob":"YQ=="})", 11);
  EXPECT_THAT(Commands<keeper::Relay>(), IsEmpty());
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 12);
  const auto tables = Commands<keeper::Relay>();
  ASSERT_EQ(tables.size(), 2u);
  EXPECT_EQ(tables[0].json, "table 0\nYQ==\nYg==");
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 2u);
  EXPECT_THAT(Sent<ExchangePart>(), IsEmpty());
  // Repeated after a lost connection: the rank gets the same table again.
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 13);
  ASSERT_EQ(Commands<keeper::Relay>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].rank, 1);
}

TEST_F(AgentCoreTest, RemoteExchangeGoesThroughTheHeadAndIsRepeated) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(1, R"({"type":"exchange","sequence":4,"blob":"Yg=="})", 2);
  FromRank(0, R"({"type":"exchange","sequence":4,"blob":"YQ=="})", 1);
  ASSERT_EQ(Sent<ExchangePart>().size(), 1u);
  EXPECT_EQ(Sent<ExchangePart>()[0].blobs, (std::vector<std::pair<int, std::string>>{{0, "a"}, {1, "b"}}));
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "kept by the keeper until the table is here";
  Step(HeadDown{});
  Welcome();
  EXPECT_EQ(Sent<ExchangePart>().size(), 1u);
  Step(FromHead{ExchangeTable{{5}, kJob, {1}, 4, {"a", "b", "c"}}});
  EXPECT_EQ(Commands<keeper::Relay>().size(), 2u);
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 2u);
}

TEST_F(AgentCoreTest, OverdueExchangeNamesTheRanksOfThisNode) {
  Welcome();
  StartIt(1, 3, 3);
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 1);
  FromRank(1, R"({"type":"overdue","sequence":0})", 2);
  ASSERT_EQ(Commands<keeper::Relay>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].rank, 1);
  EXPECT_EQ(Commands<keeper::Relay>()[0].json, "missing 0 0 2");
}

TEST_F(AgentCoreTest, OverdueExchangeAsksTheHeadForRanksOfOtherNodes) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(0, R"({"type":"exchange","sequence":0,"blob":"YQ=="})", 1);
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 1);
  ASSERT_EQ(Sent<ExchangePart>().size(), 1u);
  FromRank(1, R"({"type":"overdue","sequence":0})", 2);
  ASSERT_EQ(Sent<ExchangePart>().size(), 1u) << "the part once more is the question";
  EXPECT_THAT(Commands<keeper::Relay>(), IsEmpty());
  Step(FromHead{ExchangeMissing{{5}, kJob, {1}, 0, {2}}});
  ASSERT_EQ(Commands<keeper::Relay>().size(), 2u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].json, "missing 0 2");
}

// They stand still until the head has heard.
TEST_F(AgentCoreTest, RanksThatPauseAreAskedByOneAndSaidAtOnce) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(0, R"({"type":"pause","paused":false})", 1);
  EXPECT_THAT(Sent<RanksStarted>(), IsEmpty()) << "the next heartbeat says that";
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 1u);
  Step(FromHead{PauseRanks{{5}, kJob, {1}}});
  ASSERT_EQ(Commands<keeper::Relay>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].rank, 0);
  EXPECT_EQ(Commands<keeper::Relay>()[0].json, "pause");
  FromRank(1, R"({"type":"pause","paused":true})", 7);
  EXPECT_THAT(Sent<RanksStarted>(), IsEmpty()) << "rank 0 alone speaks for all";
  FromRank(0, R"({"type":"pause","paused":true})", 2);
  ASSERT_EQ(Sent<RanksStarted>().size(), 1u);
  ASSERT_EQ(Sent<RanksStarted>()[0].ranks.size(), 1u);
  EXPECT_EQ(Sent<RanksStarted>()[0].ranks[0].pause, RankPause::kPaused);
  FromRank(0, R"({"type":"pause","paused":true})", 3);
  EXPECT_THAT(Sent<RanksStarted>(), IsEmpty()) << "once, however often it is said";
  Step(FromHead{PauseRanks{{5}, kJob, {2}}});
  EXPECT_THAT(Commands<keeper::Relay>(), IsEmpty()) << "of a generation that is not here";
}

TEST_F(AgentCoreTest, BrokenLinkGoesOnToTheHead_W5) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(1, R"({"type":"link","peer":2,"text":"no answer\nin 8s"})", 1);
  ASSERT_EQ(Sent<LinkDown>().size(), 1u);
  EXPECT_EQ(Sent<LinkDown>()[0], (LinkDown{kJob, {1}, 1, 2, "no answer?in 8s"}));
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 1u);
}

TEST_F(AgentCoreTest, ProgressPatternsReportLinesAndRelaysFeedTheStatus) {
  spec_.progress.step = R"(step (\d+))";
  spec_.progress.loss = R"(loss ([0-9.]+))";
  Welcome();
  StartIt(1, 2, 2);
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7}});
  EXPECT_EQ(Sent<RanksStarted>().size(), 1u);
  Step(FromKeeper{kJob, keeper::Output{1, 0, false, 20, 0, "epoch 1 step 12 loss 0.5\nste"}});
  FromRank(1, R"({"type":"joined"})");
  FromRank(1, R"({"type":"progress","step":9,"collective":77,"waited":1.5,"joined":6})");
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  auto changed = Sent<AgentHeartbeat>()[0].changed;
  ASSERT_EQ(changed.size(), 2u);
  EXPECT_EQ(changed[0].step, 12);
  EXPECT_EQ(changed[0].loss, 0.5);
  EXPECT_EQ(changed[0].state, RankState::kRunning);
  EXPECT_EQ(changed[1].step, 9);
  EXPECT_EQ(changed[1].collective_sequence, 77u);
  EXPECT_EQ(changed[1].waited_seconds, 1.5);
  EXPECT_EQ(changed[1].joined_seconds, 6);
  EXPECT_EQ(changed[1].state, RankState::kJoined);
  ASSERT_EQ(Sent<LogTail>().size(), 1u);
  EXPECT_EQ(Sent<LogTail>()[0].end_offset, 20u);
  Step(FromKeeper{kJob, keeper::Output{1, 0, false, 30, 0, "p 13\r"}});  // the line was cut between two reads
  Step(FromKeeper{kJob,
                  keeper::ReportBytes{
                      1, 1, "{\"step\":10,\"samples\":50}\n{\"step\":11,\"checkpoint\":\"x\"}\nnot json\n"}});
  ASSERT_EQ(Sent<CheckpointReport>().size(), 1u);
  EXPECT_EQ(Sent<CheckpointReport>()[0].step, 11);
  EXPECT_EQ(Sent<CheckpointReport>()[0].timeline, Timeline{3});
  Advance(absl::Seconds(2));
  Step(FromKeeper{kJob, keeper::ReportBytes{1, 1, "{\"step\":12,\"samples\":200}\n"}});
  Step(AgentTick{});
  changed = Sent<AgentHeartbeat>()[0].changed;
  ASSERT_EQ(changed.size(), 2u);
  EXPECT_EQ(changed[0].step, 13);
  EXPECT_NEAR(changed[1].samples_per_second.value_or(0), 100, 1);
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  EXPECT_THAT(Sent<AgentHeartbeat>()[0].changed, IsEmpty()) << "only what changed";
}

TEST_F(AgentCoreTest, SdkCheckpointKeepsItsManifest) {
  Welcome();
  StartIt(1, 1, 1);
  FromRank(0, R"({"type":"checkpoint","step":40,"timeline":9,"manifest":"k/m","policy":"every 9 s\n!"})");
  ASSERT_EQ(Sent<CheckpointReport>().size(), 1u);
  EXPECT_EQ(Sent<CheckpointReport>()[0].manifest, "k/m");
  EXPECT_EQ(Sent<CheckpointReport>()[0].policy, "every 9 s?!");
  EXPECT_EQ(Sent<CheckpointReport>()[0].timeline, Timeline{9});
}

// A machine that is lost within the second would hold up its job for the whole lease (N1).
TEST_F(AgentCoreTest, TheHeadHearsAtOnceThatRanksHaveTheSdk_N1) {
  Welcome();
  StartIt(1, 1, 2);
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  Advance(absl::Milliseconds(5));
  FromRank(0, R"({"type":"joined"})");
  Step(AgentTick{});
  ASSERT_EQ(Sent<AgentHeartbeat>().size(), 1u);
  ASSERT_EQ(Sent<AgentHeartbeat>()[0].changed.size(), 1u);
  EXPECT_EQ(Sent<AgentHeartbeat>()[0].changed[0].state, RankState::kJoined);
}

TEST_F(AgentCoreTest, ACheckpointThatNoHeadHeardOfIsToldToTheNext_H1) {
  Welcome();
  StartIt(1, 1, 1);
  Step(HeadDown{});
  FromRank(0, R"({"type":"checkpoint","step":40,"timeline":9,"manifest":"k/m","policy":""})");
  EXPECT_THAT(Sent<CheckpointReport>(), IsEmpty());
  Welcome(6);
  ASSERT_EQ(Sent<CheckpointReport>().size(), 1u);
  EXPECT_EQ(Sent<CheckpointReport>()[0].step, 40);
}

TEST_F(AgentCoreTest, HowGradientsTravelIsANote) {
  Welcome();
  StartIt(1, 1, 1);
  FromRank(0, R"({"type":"compression","text":"topk for 2 of 3\n buckets"})");
  ASSERT_EQ(Sent<AgentNote>().size(), 1u);
  EXPECT_EQ(Sent<AgentNote>()[0].kind, "compression");
  EXPECT_EQ(Sent<AgentNote>()[0].rank, 0);
  EXPECT_EQ(Sent<AgentNote>()[0].text, "topk for 2 of 3? buckets");
  FromRank(0, absl::StrCat(R"({"type":"compression","text":")", std::string(9000, 'x'), R"("})"));
  EXPECT_EQ(Sent<AgentNote>()[0].text.size(), 400u);
}

// It is said once, and a head may start after that.
TEST_F(AgentCoreTest, WhatWasRestoredIsToldToEachHead) {
  Welcome();
  StartIt(1, 1, 1);
  FromRank(0, R"({"type":"restore","text":"step 2 in 0.3 s"})");
  FromRank(0, R"({"type":"restore","text":"step 4 in 0.3 s"})");
  Welcome();
  ASSERT_EQ(Sent<AgentNote>().size(), 1u);
  EXPECT_EQ(Sent<AgentNote>()[0], (AgentNote{kJob, {1}, 0, "restore", "step 4 in 0.3 s"}));
}

// The job may end with that exit, and a head keeps no record of one that is over (gtrain data audit).
TEST_F(AgentCoreTest, WhatARankSaidOfItsDataReachesANewHeadBeforeItsExit) {
  Welcome();
  StartIt(1, 2, 2);
  FromRank(0, R"({"type":"samples","text":"train: begins"})", 1);
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 0, "samples", "train: begins"}));
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "an agent that restarts needs to hear it again";
  Step(HeadDown{});
  FromRank(0, R"({"type":"samples","text":"train: ends"})", 2);
  Exit(0, 0);
  Exit(1, 0);
  Step(FromKeeper{kJob, keeper::Gone{1, true, "", {}, {}}});
  Step(HeadUp{"10.0.0.1"});
  ASSERT_THAT(Sent<AgentHello>(), ::testing::SizeIs(1));
  const std::vector<HeldGeneration> held = Sent<AgentHello>()[0].held;
  ASSERT_THAT(held, ::testing::SizeIs(1));
  ASSERT_THAT(held[0].exited, ::testing::SizeIs(1)) << "with all exits the hello would end the job";
  EXPECT_EQ(held[0].exited[0].rank, 1);
  ASSERT_THAT(held[0].live, ::testing::SizeIs(1));
  EXPECT_EQ(held[0].live[0].rank, 0);
  std::vector<std::string> order;
  for (const AgentEffect& effect : Step(FromHead{WelcomeOf(6)})) {
    const auto* sent = std::get_if<ToHead>(&effect);
    if (sent == nullptr) continue;
    if (const auto* note = std::get_if<AgentNote>(&sent->message)) order.push_back(note->text);
    if (const auto* exit = std::get_if<RankExited>(&sent->message))
      order.push_back(absl::StrCat("exit ", exit->exit.rank));
  }
  EXPECT_THAT(order, ::testing::ElementsAre("train: begins", "train: ends", "exit 0", "exit 1"));
  Step(FromHead{AckExit{{6}, kJob, {1}, 0}});
  Step(HeadUp{"10.0.0.1"});
  Step(FromHead{WelcomeOf(7)});
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty()) << "the head that acknowledged the exit has them";
}

TEST_F(AgentCoreTest, OfWhatARankSaidOfItsDataTheNewestIsKept) {
  Welcome();
  StartIt(1, 1, 1);
  for (uint64_t i = 1; i <= kRecordsMax; ++i)
    FromRank(0, absl::StrCat(R"({"type":"samples","text":"train: )", i, "\"}"), i);
  FromRank(0, R"({"type":"samples","text":"train: 1"})", 1);
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty()) << "the keeper says it again to a new connection";
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty());
  FromRank(0, R"({"type":"samples","text":"train: last"})", 100);
  ASSERT_THAT(Commands<keeper::AckRelay>(), ::testing::SizeIs(1));
  EXPECT_EQ(Commands<keeper::AckRelay>()[0].id, 1u);
  Welcome(6);
  ASSERT_THAT(Sent<AgentNote>(), ::testing::SizeIs(kRecordsMax));
  EXPECT_EQ(Sent<AgentNote>()[0].text, "train: 2");
  EXPECT_EQ(Sent<AgentNote>().back().text, "train: last");
}

// The exit of a rank carries the evidence of a storage fault: the note may get lost with a connection, the
// exit does not.
TEST_F(AgentCoreTest, WhatARankSaidOfItsStorageGoesWithItsExit_S7) {
  StartIt(1, 2, 2);  // no head listens: the note itself is dropped
  FromRank(0, R"({"type":"storage","text":"/ckpt: EIO"})", 1);
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "an agent that restarts needs to hear it again";
  FromRank(0, R"({"type":"storage","text":"/ckpt: ESTALE"})", 2);
  ASSERT_THAT(Commands<keeper::AckRelay>(), ::testing::SizeIs(1));
  EXPECT_EQ(Commands<keeper::AckRelay>()[0].id, 1u);
  FromRank(0, R"({"type":"storage","text":"/ckpt: ESTALE"})", 2);
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "the same one, to a new connection";
  FromRank(1, R"({"type":"storage","text":"gone"})", 1);
  FromRank(1, R"({"type":"storage","text":""})", 2);
  Exit(0, 1);
  Exit(1, 1);
  Welcome();
  ASSERT_THAT(Sent<RankExited>(), ::testing::SizeIs(2));
  EXPECT_EQ(Sent<RankExited>()[0].exit.storage, "/ckpt: ESTALE");
  EXPECT_EQ(Sent<RankExited>()[1].exit.storage, "") << "it could be read again";
}

// An earlier generation may have said that it cannot be read, and the head goes by that until then.
TEST_F(AgentCoreTest, TheFirstWordOfTheStorageIsHeardWhateverItIs) {
  Welcome();
  StartIt(1, 3, 3);
  FromRank(0, R"({"type":"storage","text":""})");
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 0, "storage", ""}));
  FromRank(1, R"({"type":"storage","text":""})");
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
}

TEST_F(AgentCoreTest, OneRankOfAMachineSpeaksOfTheStorage) {
  Welcome();
  StartIt(1, 3, 3);
  FromRank(1, R"({"type":"storage","text":"a"})");
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 1, "storage", "a"}));
  FromRank(0, R"({"type":"storage","text":"b"})");
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
  FromRank(0, R"({"type":"storage","text":""})", 2);
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
  FromRank(1, R"({"type":"storage","text":""})", 2);
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 1, "storage", ""}));
  FromRank(2, R"({"type":"storage","text":"c"})");
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 2, "storage", "c"}));
}

}  // namespace
}  // namespace gtrain::core
