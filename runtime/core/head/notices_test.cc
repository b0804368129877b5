// Machines that leave: a cloud's notice, a person's drain.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

using NoticeTest = HeadTestWorld;

NodeNotice Spot(absl::Duration left) {
  return {
      .kind = NoticeKind::kLeave, .left = left, .source = "aws spot interruption (terminate)", .id = "t@1"};
}

TEST_F(NoticeTest, NoticeIsDurableBeforeAnythingRestsOnIt) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node");
  StartRanks(job);
  disk_works_ = false;
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  EXPECT_THAT(Sent<NoticeRanks>(), IsEmpty()) << "nobody is told what a crash of the head would forget";
  EXPECT_THAT(Sent<AckNotice>(), IsEmpty()) << "the agent repeats it until then";
  disk_works_ = true;
  Pass(absl::Seconds(1), {"1", "2"});
  EXPECT_EQ(std::get<NodeRecord>(disk_.at("node/1")).notice.id, "t@1");
  EXPECT_THAT(Sent<AckNotice>(), SizeIs(1));
  const auto told = Sent<NoticeRanks>();
  ASSERT_THAT(told, SizeIs(2)) << "it takes all ranks to save";
  EXPECT_EQ(told[0].second.left, absl::Seconds(120));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(),
              HasSubstr("node host-1 is leaving (aws spot interruption"));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(),
              ContainsRegex("the ranks end by [0-9][0-9]:[0-9][0-9]:[0-9][0-9] UTC and go on"))
      << "which stays true while time passes";
}

// It is over as the ranks say, but a program that only saves at SIGTERM and ends with 0 did not mean that.
TEST_F(NoticeTest, ThoseThatEndWellAfterTheyWereToldEndTheJobWithAWordOfIt) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  const std::string from = Sent<StartGeneration>().at(0).first;
  FromNode(from, NoticeSeen{1, Spot(absl::Seconds(120))});
  Pass(absl::Seconds(1), {"1", "2"});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  FromNode(from, RankExited{Exit(job, 1, 0, 0)});
  EXPECT_EQ(State(job), "SUCCEEDED");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(),
              HasSubstr("its rank ended with exit code 0 after the notice that a machine leaves"));
  const JobId other = Submit("other 1 1");
  StartRanks(other);
  FromNode(Sent<StartGeneration>().back().first, RankExited{Exit(other, 1, 0, 0)});
  EXPECT_EQ(Status(other).at("reason"), "its rank ended with exit code 0");
}

TEST_F(NoticeTest, ANoticeThatWasTakenBackIsNoWordOfTheEnd) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  Pass(absl::Seconds(1), {"1"});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  FromNode("1", NoticeSeen{2, {}});
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  EXPECT_EQ(Status(job).at("reason"), "its rank ended with exit code 0");
}

// A program whose processes go on in place saves nothing at a notice and ends at none: its data was over.
TEST_F(NoticeTest, AProgramThatGoesOnInPlaceEndsBecauseItIsDone) {
  Hello("1");
  const JobId job = Submit("train 1 1 in-place");
  StartRanks(job);
  RankStatus stays = Step(job, 1, 0, 5);
  stays.state = RankState::kJoined;
  stays.stays = true;
  FromNode("1", RanksStarted{job, {1}, {stays}});
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  Pass(absl::Seconds(90), {"1"});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  EXPECT_EQ(Status(job).at("reason"), "its rank ended with exit code 0");
}

TEST_F(NoticeTest, LeavingNodeGetsNothingNew) {
  Hello("1");
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  const JobId job = Submit("train 1 1");
  EXPECT_EQ(State(job), "WAITING");
  EXPECT_THAT(Status(job).at("blocked_by").dump(), HasSubstr("leaving: aws spot interruption"));
  EXPECT_TRUE(head_->Snapshot().nodes.at(0).leaving);
  Hello("2");
  const auto grants = Sent<StartGeneration>();
  ASSERT_THAT(grants, SizeIs(1));
  EXPECT_EQ(grants[0].first, "2");
  FromNode("1", NoticeSeen{2, {}});
  Submit("more 4 4");
  EXPECT_EQ(Sent<StartGeneration>().back().first, "1") << "taken back, it is used again";
}

NodeNotice NotHeard() {
  return {
      .kind = NoticeKind::kAtRisk, .source = "notices of its cloud are not heard: <html>", .id = kNotHeardId};
}

TEST_F(NoticeTest, ACloudThatIsNotHeardIsShownAndChangesNothing_B12) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", NoticeSeen{1, NotHeard()});
  EXPECT_THAT(Sent<AckNotice>(), SizeIs(1));
  const auto shown = [this] {
    return json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0).at("notices");
  };
  ASSERT_THAT(shown(), SizeIs(1));
  EXPECT_EQ(shown().at(0).at("kind"), "at-risk");
  EXPECT_THAT(Sent<NoticeRanks>(), IsEmpty());
  Pass(absl::Seconds(200), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_EQ(State(job), "RUNNING");
  Submit("more 1 1");
  EXPECT_THAT(Sent<StartGeneration>(), SizeIs(2)) << "the machine is used";
  FromNode("1", NoticeSeen{2, {}});
  EXPECT_THAT(shown(), IsEmpty());
}

// The agent that says it was started again, and has not heard what the one before it heard.
TEST_F(NoticeTest, ACloudThatIsNotHeardTakesBackNoNotice_B12) {
  Hello("1");
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  FromNode("1", NoticeSeen{1, NotHeard()});
  EXPECT_EQ(std::get<NodeRecord>(disk_.at("node/1")).notice.id, "t@1");
  EXPECT_THAT(Sent<AckNotice>(), SizeIs(2)) << "it is not said for ever";
  Hello("2");
  FromNode("2", NoticeSeen{1, NotHeard()});
  FromNode("2", NoticeSeen{2, Spot(absl::Seconds(120))});
  EXPECT_EQ(std::get<NodeRecord>(disk_.at("node/2")).notice.id, "t@1");
}

TEST_F(NoticeTest, NoticedJobGoesOnElsewhereBeforeTheDeadlineFreeOfCharge) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1 budget0");
  StartRanks(job);
  const std::string from = Sent<StartGeneration>().at(0).first, to = from == "1" ? "2" : "1";
  FromNode(from, NoticeSeen{1, Spot(absl::Seconds(120))});
  Pass(absl::Seconds(79), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "the ranks have `preempt.lead` to save";
  Pass(absl::Seconds(2), {"1", "2"});
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(1));
  EXPECT_EQ(revokes[0].second.grace, absl::Seconds(30)) << "TERM to KILL ends 10 s before the machine (P13)";
  FromNode(from, GenerationGone{job, {1}});
  Pass(absl::Seconds(1), {"1", "2"});
  const auto grants = Sent<StartGeneration>();
  ASSERT_THAT(grants, SizeIs(2));
  EXPECT_EQ(grants[1].first, to);
  EXPECT_EQ(grants[1].second.grant.timeline.value, 2u) << "it resumes from a checkpoint";
  EXPECT_EQ(grants[1].second.grant.restart_count, 0);
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_TRUE(Status(job).at("first_fault").is_null()) << "it was planned";
}

TEST_F(NoticeTest, CheckpointAfterTheNoticeLetsItGoOnAtOnce) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", CheckpointReport{job, {1}, {1}, 3, "m3"});
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  FromNode("1", CheckpointReport{job, {1}, {1}, 5, "m5"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "nowhere to go: it works on";
  Hello("2");
  FromNode("1", CheckpointReport{job, {1}, {1}, 7, "m7"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

// A program that knows no notice dies of its signal, and a machine goes before its time: neither is a crash.
TEST_F(NoticeTest, WhatANoticeBringsAboutIsNotCharged) {
  Hello("1");
  Hello("2");
  const JobId first = Submit("train 1 1 budget0"), second = Submit("other 1 1 budget0");
  StartRanks(first);
  StartRanks(second);
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  RankExit died = Exit(first, 1, 0, 0);
  died.cause = ExitCause::kSignal;
  died.signal = 15;
  FromNode("1", RankExited{died});
  FromNode("1", GenerationGone{first, {1}});
  Pass(absl::Seconds(15), {"2"});
  EXPECT_EQ(Stored(first).faults.back().kind, FaultKind::kPreempted);
  EXPECT_EQ(Status(first).at("restarts"), 0);
  EXPECT_EQ(Stored(second).faults.back().kind, FaultKind::kPreempted) << Status(second);
  EXPECT_THAT(Stored(second).faults.back().message, HasSubstr("is lost: silent"));
}

TEST_F(NoticeTest, ExitCode93IsBelievedDuringANotice) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  FromNode("1", RankExited{Exit(job, 1, 0, 93)});
  FromNode("1", GenerationGone{job, {1}});
  EXPECT_EQ(State(job), "FAILED");
}

TEST_F(NoticeTest, WithdrawnNoticeLeavesTheJobAlone) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  FromNode("1", NoticeSeen{2, {}});
  Pass(absl::Seconds(200), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), Not(HasSubstr("leaving")));
  EXPECT_EQ(std::get<NodeRecord>(disk_.at("node/1")).notice, NodeNotice());
}

// Deadlines only come nearer, at once if nothing is left; GCP's default and hibernation.
TEST_F(NoticeTest, NoTimeLeftEndsTheGenerationAtOnce) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", NoticeSeen{1, Spot(absl::Hours(1))});
  FromNode("1", NoticeSeen{2, Spot(absl::Hours(2))});
  const json node = json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0);
  EXPECT_LE(node.at("notices").at(0).at("left_seconds").get<double>(), 3600);
  Pass(absl::Seconds(5), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_THAT(Sent<NoticeRanks>(), IsEmpty()) << "told `preempt.lead` before TERM, not an hour";
  FromNode("1", NoticeSeen{3, Spot(absl::ZeroDuration())});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_EQ(Sent<Revoke>()[0].second.grace, config_.reform_grace);
}

TEST_F(NoticeTest, NoticeSurvivesTheHeadAndEndsWithTheIncarnation) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  const std::string node = Sent<StartGeneration>().at(0).first;
  FromNode(node, NoticeSeen{1, Spot(absl::Seconds(120))});
  Boot();
  HeldGeneration held{job, {1}, {}, {{job, {1}, 0, 100, RankState::kRunning}}, {}};
  Hello(node, 4, {held});
  Hello(node == "1" ? "2" : "1");
  Pass(absl::Seconds(1), {"1", "2"});
  EXPECT_FALSE(Sent<NoticeRanks>().empty()) << "whether the ranks heard it is not known";
  EXPECT_TRUE(head_->Snapshot().nodes.at(node == "1" ? 0 : 1).leaving);
  Pass(absl::Seconds(15), {node == "1" ? "2" : "1"});
  Hello(node, 4, {}, "2");
  EXPECT_FALSE(head_->Snapshot().nodes.at(node == "1" ? 0 : 1).leaving) << "a new machine life";
}

TEST_F(NoticeTest, ANoticeBehindOneThatWasTakenBackIsToldAnew) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Hello("2");
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(1));
  EXPECT_EQ(Sent<NoticeRanks>()[0].second.notice, 1u);
  FromNode("1", NoticeSeen{2, {}});
  FromNode("1", CheckpointReport{job, {1}, {1}, 3, "m3"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(60), {"1", "2"});
  NodeNotice second = Spot(absl::Seconds(100));
  second.id = "t@2";
  FromNode("1", NoticeSeen{3, second});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "nothing was saved since this notice";
  ASSERT_THAT(Sent<NoticeRanks>(), SizeIs(2));
  EXPECT_EQ(Sent<NoticeRanks>()[1].second.notice, 2u);
  FromNode("1", CheckpointReport{job, {1}, {1}, 5, "m5"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

TEST_F(NoticeTest, ANearerEndIsToldAsTheSameNotice) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  FromNode("1", CheckpointReport{job, {1}, {1}, 3, "m3"});
  FromNode("1", NoticeSeen{2, Spot(absl::Seconds(60))});
  const auto told = Sent<NoticeRanks>();
  ASSERT_THAT(told, SizeIs(2));
  EXPECT_EQ(told[1].second.left, absl::Seconds(60));
  EXPECT_EQ(told[1].second.notice, told[0].second.notice) << "their signal is not given again";
  FromNode("1", NoticeSeen{3, Spot(absl::Seconds(59) + absl::Milliseconds(500))});
  EXPECT_THAT(Sent<NoticeRanks>(), SizeIs(2));
}

// They do not hear that it was, so what they do soon after is still because of it; a crash of later is one.
TEST_F(NoticeTest, AfterANoticeWasTakenBackACrashIsChargedAgain) {
  for (const bool soon : {true, false}) {
    Hello("1");
    const JobId job = Submit(soon ? "soon 1 1" : "late 1 1");
    StartRanks(job);
    const uint64_t sequence = soon ? 1 : 3;
    FromNode("1", NoticeSeen{sequence, Spot(absl::Seconds(120))});
    FromNode("1", NoticeSeen{sequence + 1, {}});
    Pass(absl::Seconds(soon ? 5 : 40), {"1"});
    FromNode("1", RankExited{Exit(job, 1, 0, 1)});
    EXPECT_EQ(Stored(job).faults.back().kind, soon ? FaultKind::kPreempted : FaultKind::kCrash);
  }
}

TEST_F(NoticeTest, AtRiskAndFreezeDoNotDrain) {
  Hello("1");
  Hello("2", 1);
  NodeNotice notice = Spot(absl::ZeroDuration());
  notice.kind = NoticeKind::kAtRisk;
  FromNode("1", NoticeSeen{1, notice});
  const JobId job = Submit("train 4 4");
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Sent<NoticeRanks>(), IsEmpty());
  notice.kind = NoticeKind::kFreeze;
  notice.id = "freeze-1";
  notice.frozen = absl::Seconds(9);
  FromNode("1", NoticeSeen{2, notice});
  Pass(absl::Seconds(40), {"2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "it said that it would stand still";
  FromNode("1", NoticeSeen{3, {}});
  EXPECT_EQ(State(job), "RUNNING");
}

TEST_F(NoticeTest, DrainByHand) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  EXPECT_FALSE(FromClient(ClientDrainNode{"host-1", absl::Minutes(2), ""}).ok) << "a user may not";
  const ClientReply reply =
      FromClient(ClientDrainNode{"host-1", absl::Minutes(2), "new disk"}, "", Role::kAdmin, "ann");
  ASSERT_TRUE(reply.ok) << reply.error;
  EXPECT_EQ(json::parse(reply.json).at("jobs").at(0), job.value);
  EXPECT_EQ(json::parse(reply.json).at("left_seconds"), 120);
  const ClientReply later =
      FromClient(ClientDrainNode{"host-1", absl::Minutes(30), "new disk"}, "", Role::kAdmin, "ann");
  EXPECT_EQ(json::parse(later.json).at("left_seconds"), 120) << "what was said first stands";
  const json node = json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0);
  EXPECT_EQ(node.at("notices").at(0).at("source"), "drained by ann: new disk");
  EXPECT_EQ(audit_.back().action, "node drain");
  Hello("1", 4, {}, "2");
  EXPECT_TRUE(head_->Snapshot().nodes.at(0).leaving) << "a reboot does not end what a person began";
  EXPECT_TRUE(FromClient(ClientDrainNode{"host-1", {}, "", true}, "", Role::kAdmin).ok);
  EXPECT_FALSE(head_->Snapshot().nodes.at(0).leaving);
  EXPECT_FALSE(FromClient(ClientDrainNode{"nowhere", {}, ""}, "", Role::kAdmin).ok);
}

// A program that drains by itself must not give back what a person or a cloud has said meanwhile.
TEST_F(NoticeTest, AnUndoOfOnesOwnTakesBackNoOthersDrainAndNoNotice) {
  Hello("1");
  const auto ask = [&](const ClientDrainNode& drain, const char* who = "ann") {
    EXPECT_TRUE(FromClient(drain, "", Role::kAdmin, who).ok);
    std::vector<std::string> sources;
    const json nodes = json::parse(FromClient(ClientNodes{}).json).at("nodes");
    for (const json& notice : nodes.at(0).at("notices")) sources.push_back(notice.at("source"));
    return sources;
  };
  const ClientDrainNode own{"host-1", {}, "chaos", true, true};
  EXPECT_THAT(ask({"host-1", absl::Hours(1), "new disk"}), SizeIs(1));
  EXPECT_THAT(ask(own), ElementsAre("drained by ann: new disk")) << "another reason";
  EXPECT_THAT(ask({"host-1", absl::Hours(1), "chaos"}, "bob"), ElementsAre("drained by bob: chaos"));
  EXPECT_THAT(ask(own), ElementsAre("drained by bob: chaos")) << "another person";
  FromNode("1", NoticeSeen{1, Spot(absl::Seconds(120))});
  EXPECT_THAT(ask(own, "bob"), ElementsAre("aws spot interruption (terminate)")) << "its own";
  EXPECT_THAT(ask({"host-1", {}, "it is in", true}), IsEmpty()) << "a person takes back whatever stands";
}

}  // namespace
}  // namespace gtrain::core
