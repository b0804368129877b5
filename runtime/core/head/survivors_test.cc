// Tests who goes on where ranks fail, machines go, or a job is to have another size: who has what was
// trained.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/newcomers_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

// What comes up may be another program than the others, which was edited, say: it ends as soon as it is a
// member.
class EditedTest : public NewcomersTest {
 protected:
  void GoneBut(const std::vector<int>& dead) {
    NewcomersTest::GoneBut(dead);
    Pass(absl::Seconds(3), {"1", "2"});
  }
  // Who waits beside the newest generation joins it, and ends as soon as it is a member.
  void JoinsAndFails(const JobId& job, int exit_code = 1) {
    StartRanks(job);
    const GenerationGrant three = Newest();
    ASSERT_FALSE(three.waiting.empty());
    const RankPlace newcomer = three.waiting[0];
    Steps(job, three.generation.value, static_cast<int64_t>(6 + three.generation.value));
    IsNow(newcomer.node.value, job, three.generation.value, newcomer.rank, RankState::kJoined);
    GoneBut({});
    Fails(job, ProcessId{three.generation, newcomer.rank}, exit_code);
  }
  void Fails(const JobId& job, ProcessId process, int exit_code = 1, std::vector<int> dead = {}) {
    const GenerationGrant four = Newest();
    StartRanks(job);
    const auto it = std::ranges::find(four.ranks, process, &RankPlace::process);
    ASSERT_NE(it, four.ranks.end());
    FromNode(it->node.value,
             RankExited{Exit(job, four.generation.value, it->rank, exit_code, "it trains something else")});
    dead.push_back(it->rank);
    GoneBut(dead);
  }
  void Runs(const JobId& job, int seconds, int64_t step, const std::vector<std::string>& nodes = {"1", "2"}) {
    for (int i = 0; i < seconds / 10; ++i) {
      for (const RankPlace& place : Newest().ranks) {
        RankStatus status = Step(job, Newest().generation.value, place.rank, step + i);
        status.state = RankState::kJoined;
        FromNode(place.node.value, RanksStarted{job, Newest().generation, {status}});
      }
      Pass(absl::Seconds(10), nodes);
    }
  }
  std::string Reason(const JobId& job) { return Status(job).at("reason").get<std::string>(); }
};

TEST_F(EditedTest, TheOthersGoOnWithoutANewcomerThatFailsAgainAndAgain_P1) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  JoinsAndFails(job);
  EXPECT_EQ(Status(job).at("restarts"), 2) << "once is an error like any other";
  ASSERT_EQ(Newest().generation.value, 4u);
  EXPECT_EQ(Newest().world_size, 3) << "they do not wait until it is tried again";
  EXPECT_THAT(Newest().waiting, IsEmpty());
  EXPECT_THAT(Reason(job), HasSubstr("3 ranks that go on, alone at first"));
  EXPECT_THAT(FromClient(ClientWhy{job}).json, HasSubstr("the others go on at once, alone at first"));
  StartRanks(job);
  Runs(job, 20, 20);
  GoneBut({});
  ASSERT_THAT(Newest().waiting, SizeIs(1)) << "it grows as it does where there is room";
  JoinsAndFails(job);
  EXPECT_THAT(Processes(Newest().ranks),
              UnorderedElementsAre(ProcessId{{1}, 1}, ProcessId{{1}, 2}, ProcessId{{1}, 3}));
  EXPECT_THAT(Newest().waiting, IsEmpty());
  StartRanks(job);
  const size_t before = Sent<Revoke>().size();
  Runs(job, 1800, 40);
  EXPECT_THAT(Reason(job), HasSubstr("it does not grow by itself for now: with 4 ranks it failed"));
  const auto why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
  EXPECT_THAT(why.at("size_fault").at("message").get<std::string>(),
              HasSubstr("it goes back to 3 ranks: rank"));
  EXPECT_EQ(why.at("size_fault").at("tail"), "it trains something else") << "what is to be mended";
  EXPECT_EQ(Sent<Revoke>().size(), before) << "on the same machines it is not tried again";
}

// A spare takes the place of the lost rank, so the job has the size that it had.
TEST_F(EditedTest, TheOthersGoOnWithoutASpareThatFails_P1) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 2 3 in-place spare");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  GoneBut({});
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  IsNow(Newest().waiting[0].node.value, job, 2, 3, RankState::kJoined);
  StayAndStep(job, 2, 9);
  Kill(Newest().ranks[0].node.value, job, 2, 0);
  GoneBut({0});
  ASSERT_EQ(Newest().world_size, 3) << "the spare is a member";
  Fails(job, ProcessId{{2}, 3}, 1, {3});  // the next spare has not come up
  ASSERT_EQ(Newest().world_size, 2);
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
}

// It is the program's own error where there is nobody who could go on, or where a former member fails.
TEST_F(EditedTest, AFormerMemberThatFailsTwiceEndsTheJob) {
  const JobId job = ThreeGoOn("train 2 4 in-place budget0");
  EXPECT_EQ(State(job), "FAILED") << "it has no budget, and it was a member that was lost";
}

TEST_F(EditedTest, BelowTheLeastNobodyGoesOnAlone) {
  const JobId job = ThreeGoOn("train 4 4 in-place");
  ASSERT_EQ(Newest().world_size, 4);
  for (int i = 0; i < 2; ++i) {
    if (State(job) == "FAILED") break;
    Fails(job, ProcessId{});
    Pass(absl::Seconds(10), {"1", "2"});
  }
  EXPECT_EQ(State(job), "FAILED");
}

// The grant of the next generation leaves out the machine on which they are, since nothing is started there.
TEST_F(NewcomersTest, WhoHangsIsEndedWhereNothingOfTheNextGenerationIs_P3) {
  const JobId job = ThreeGoOn("train 1 4 in-place");
  const GenerationGrant two = Newest();
  StartRanks(job);
  for (const RankPlace& place : two.ranks) {
    if (place.node.value == "1") IsNow("1", job, 2, place.rank, RankState::kJoined);
  }
  for (int i = 0; i < 300 && Events(job, "fault").size() == 1; ++i) Pass(absl::Seconds(1), {"1", "2"});
  ASSERT_THAT(Events(job, "fault").back(), HasSubstr("its program hangs (and 1 more)"));
  const auto let_go = [&] {
    return std::ranges::count_if(Sent<Revoke>(),
                                 [](const auto& to) { return to.first == "2" && !to.second.keep; });
  };
  const auto before = let_go();
  GoneBut({});
  ASSERT_EQ(Newest().generation.value, 3u);
  ASSERT_THAT(Newest().nodes, SizeIs(1));
  EXPECT_EQ(Newest().nodes[0].node.value, "1");
  EXPECT_EQ(let_go(), before + 1) << "they would hold the second machine for ever";
}

// Until it has grown again it wants what it wanted before it went back for the first time.
TEST_F(EditedTest, WhoGoesBackTwiceWantsWhatItWanted) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  JoinsAndFails(job);
  StartRanks(job);
  Runs(job, 20, 20);
  GoneBut({});
  JoinsAndFails(job);
  ASSERT_EQ(Stored(job).size_wanted, 3) << "for now";
  StartRanks(job);
  Runs(job, 20, 60);
  const GenerationGrant three = Newest();
  Kill(three.ranks[0].node.value, job, three.generation.value, 0);
  GoneBut({0});
  JoinsAndFails(job);
  StartRanks(job);
  Runs(job, 20, 100);
  GoneBut({});
  if (!Newest().waiting.empty()) JoinsAndFails(job);
  StartRanks(job);
  Hello("3", 4);  // what was wrong is mended, and there is room for four
  for (int i = 0; i < 8 && Newest().world_size < 4; ++i) {
    Runs(job, 900, 200 + 100 * i, {"2", "3"});
    const GenerationGrant last = Newest();
    for (const RankPlace& place : last.waiting)
      IsNow(place.node.value, job, last.generation.value, place.rank, RankState::kJoined);
    if (!Sent<Revoke>().empty() && Sent<Revoke>().back().second.generation == last.generation) GoneBut({});
    StartRanks(job);
  }
  EXPECT_EQ(Newest().world_size, 4) << Reason(job);
}

// With `ranks: N` there are none that could go on without it: what fails twice alike ends the job.
TEST_F(NewcomersTest, WhoCannotGoOnAloneEndsWithAProgramThatFails) {
  const JobId job = TwoAndASpare();
  const auto fails = [&](uint64_t generation, ProcessId process) {
    const GenerationGrant two = Newest();
    ASSERT_EQ(two.world_size, 2);
    StartRanks(job);
    const auto is_it = [&](const RankPlace& place) { return place.process == process; };
    const auto it = std::ranges::find_if(two.ranks, is_it);
    ASSERT_NE(it, two.ranks.end());
    FromNode(it->node.value, RankExited{Exit(job, generation, it->rank, 1, "it trains something else")});
    for (const NodePlace& node : two.nodes) {
      GenerationGone gone{job, {generation}};
      if (node.node == two.ranks[it->rank == 0 ? 1 : 0].node) gone.kept = {{{1}, 1}};
      FromNode(node.node.value, gone);
    }
    Pass(absl::Seconds(5), {"1", "2"});
  };
  const GenerationGrant first = Newest();
  Kill(first.ranks[0].node.value, job, 2, 0);
  for (const NodePlace& place : first.nodes) {
    GenerationGone gone{job, {2}};
    if (place.node == first.ranks[1].node) gone.kept.push_back({{1}, 1});
    if (place.node == first.waiting[0].node) gone.kept.push_back({{2}, 2});
    FromNode(place.node.value, gone);
  }
  fails(3, {{2}, 2});
  ASSERT_EQ(State(job), "RECONFIGURING");
  fails(4, {});
  EXPECT_EQ(State(job), "FAILED");
}

// Two copies of a model in two parts on four machines. One machine goes, or the job is to be smaller: a whole
// copy goes on, and not two ranks of the same part.
class MeshShrinkTest : public NewcomersTest, public ::testing::WithParamInterface<int> {};

TEST_P(MeshShrinkTest, AWholeCopyGoesOn_N7) {
  const int gone_machine = GetParam();
  const std::vector<std::string> nodes = {"1", "2", "3", "4"};
  for (const std::string& node : nodes) Hello(node, 1);
  const JobId job = Submit("train 2 4 in-twos in-place");
  StartRanks(job);
  const GenerationGrant four = Newest();
  ASSERT_EQ(four.world_size, 4);
  StayAndStep(job, four.generation.value, 5);
  std::vector<std::string> left;
  for (int rank = 0; rank < 4; ++rank) {
    if (rank != gone_machine) left.push_back(four.ranks[rank].node.value);
  }
  if (gone_machine == 4) {
    ASSERT_TRUE(FromClient(ClientScale{job, 2, true}).ok);
  } else {
    Pass(absl::Seconds(12), left);
  }
  ASSERT_FALSE(Sent<Revoke>().empty());
  for (const RankPlace& place : four.ranks) {
    if (place.rank != gone_machine)
      FromNode(place.node.value,
               GenerationGone{job, four.generation, true, "", {ProcessIn(four, place.rank)}});
  }
  Pass(absl::Seconds(3), left);
  const GenerationGrant two = Newest();
  ASSERT_EQ(two.world_size, 2);
  std::vector<int> cells;
  for (const RankPlace& place : two.ranks) {
    ASSERT_EQ(place.process.generation.value, four.generation.value) << "nobody has to be started";
    cells.push_back(place.process.rank % 2);
  }
  EXPECT_THAT(cells, ElementsAre(0, 1));
}

INSTANTIATE_TEST_SUITE_P(Machine, MeshShrinkTest, ::testing::Range(0, 5));

// Nobody wants it any more, and another job may need its room.
TEST_F(NewcomersTest, WhatComesUpEndsWhenTheJobIsToBeAsSmallAsItIs) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  StayAndStep(job, 2, 6);
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  sent_.clear();
  const ClientReply reply = FromClient(ClientScale{job, 3, true});
  ASSERT_TRUE(reply.ok) << reply.error;
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2));
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 1}}});
  FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 2}, {{1}, 3}}});
  EXPECT_EQ(Newest().world_size, 3);
  EXPECT_THAT(Newest().waiting, IsEmpty());
}

// The machine on which it comes up is drained, and nothing else of the job is there.
TEST_F(NewcomersTest, WhoStillComesUpIsEndedWhereNothingOfTheNextGenerationIs) {
  Hello("1", 1);
  Hello("2", 1);
  const JobId job = Submit("train 1 2 in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  Kill("2", job, 1, 1);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}}});
  FromNode("2", GenerationGone{job, {1}});
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  AllJoin(job);
  Steps(job, 2, 6);
  FromClient(ClientDrainNode{"host-2", absl::ZeroDuration(), "repair"}, "", Role::kAdmin);
  FromClient(ClientScale{job, 1, true});
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 0}}});
  sent_.clear();
  FromNode("2", GenerationGone{job, {2}, true, "", {}, {{{2}, 1}}});
  Pass(absl::Seconds(5), {"1", "2"});
  ASSERT_EQ(Newest().generation.value, 3u);
  ASSERT_THAT(Newest().nodes, SizeIs(1));
  const auto ended = Sent<Revoke>();
  ASSERT_THAT(ended, SizeIs(1)) << "it would hold the second machine for ever";
  EXPECT_EQ(ended[0].first, "2");
  EXPECT_FALSE(ended[0].second.keep);
}

// The machine may be back at once, and what it trains would be given up for room elsewhere.
TEST_F(NewcomersTest, NobodyGrowsWhileAMachineIsSilent_W3) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 2 8 in-place");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  sent_.clear();
  Hello("3", 8);
  Pass(absl::Seconds(5), {"1", "2", "3"});
  Pass(absl::Seconds(7), {"1", "3"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(12), {"1", "2", "3"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2)) << "it is heard again";
}

// Else a program whose first step is long begins it anew with each machine that comes.
TEST_F(NewcomersTest, NobodyGrowsBeforeAStep) {
  Hello("1", 2);
  const JobId job = Submit("train 2 4 in-place");
  StartRanks(job);
  for (int rank = 0; rank < 2; ++rank) {
    RankStatus status{job, {1}, rank, 200 + rank, RankState::kJoined};
    status.stays = true;
    FromNode("1", RanksStarted{job, {1}, {status}});
  }
  sent_.clear();
  Hello("2", 2);
  Pass(absl::Seconds(60), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  for (int rank = 0; rank < 2; ++rank) FromNode("1", AgentHeartbeat{++beats_, {Step(job, 1, rank, 1)}, {}});
  Pass(absl::Seconds(12), {"1", "2"});
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

// What has never made a step has nothing to lose, and perhaps each size of it fails: it waits as long as
// others do.
TEST_F(NewcomersTest, WhoHasMadeNoStepDoesNotGoOnAlone) {
  for (const char* node : {"1", "2", "3", "4"}) Hello(node, 1);
  const JobId job = Submit("train 1 4 in-place");
  const auto come = [&] {
    StartRanks(job);
    for (const RankPlace& place : Newest().ranks) {
      RankStatus status{job, Newest().generation, place.rank, 200 + place.rank, RankState::kJoined};
      status.stays = true;
      FromNode(place.node.value, RanksStarted{job, Newest().generation, {status}});
    }
  };
  come();
  Pass(absl::Seconds(12), {"1", "2", "3"});
  GoneBut({3});
  Pass(absl::Seconds(60), {"1", "2", "3"});
  ASSERT_EQ(Newest().generation.value, 2u);
  come();
  Pass(absl::Seconds(12), {"1", "2"});
  GoneBut({2});
  EXPECT_EQ(Newest().generation.value, 2u);
  Pass(absl::Seconds(60), {"1", "2"});
  EXPECT_EQ(Newest().generation.value, 3u);
}

// P1: another job has ended meanwhile, so all four would have room on one machine.
TEST_F(NewcomersTest, NobodyWhoGoesOnIsMovedToPackTheRanks_P1) {
  Hello("1", 2);
  Hello("2", 4);
  const JobId other = Submit("train 2 2");
  StartRanks(other);
  ASSERT_EQ(Newest().ranks[0].node, NodeId("1"));
  Hello("3", 2);
  const JobId filler = Submit("train 2 2");
  StartRanks(filler);
  ASSERT_EQ(Newest().ranks[0].node, NodeId("3"));
  const JobId third = Submit("train 2 2");
  StartRanks(third);
  ASSERT_EQ(Newest().ranks[0].node, NodeId("2"));
  Hello("4", 2);
  const JobId job = Submit("train 3 4 in-place");
  const GenerationGrant four = Newest();
  ASSERT_THAT(four.ranks, SizeIs(4));
  StartRanks(job);
  Steps(job, 1, 5);
  FromClient(ClientStop{third, true});
  FromNode("2", GenerationGone{third, {1}});
  GenerationGone two{job, {1}}, others{job, {1}};
  int killed = -1;
  for (const RankPlace& place : four.ranks) {
    if (place.node == NodeId("4")) others.kept.push_back({{1}, place.rank});
    if (place.node == NodeId("2") && killed >= 0) two.kept.push_back({{1}, place.rank});
    if (place.node == NodeId("2") && killed < 0) killed = place.rank;
  }
  ASSERT_GE(killed, 0);
  ASSERT_THAT(others.kept, SizeIs(2));
  Kill("2", job, 1, killed);
  FromNode("2", two);
  FromNode("4", others);
  std::vector<ProcessId> went_on;
  for (const RankPlace& place : Newest().ranks) went_on.push_back(place.process);
  EXPECT_THAT(went_on, UnorderedElementsAre(two.kept[0], others.kept[0], others.kept[1]));
}

// Likewise the addresses of all ranks, which each node is told.
TEST_F(NewcomersTest, WhatAllRanksSayIsHeldOnceForAllNodes) {
  for (const char* node : {"1", "2", "3"}) Hello(node, 2);
  const JobId job = Submit("train 6 6");
  StartRanks(job);
  const GenerationGrant grant = Newest();
  sent_.clear();
  for (const NodePlace& node : grant.nodes) {
    ExchangePart part{job, {1}, 0, {}};
    for (const RankPlace& place : grant.ranks) {
      if (place.node == node.node) part.blobs.push_back({place.rank, std::string(100, 'x')});
    }
    FromNode(node.node.value, part);
  }
  std::set<const void*> held;
  int told = 0;
  for (const Effect& effect : sent_) {
    const auto* send = std::get_if<SendToNode>(&effect);
    if (send == nullptr || std::get_if<ExchangeTable>(&*send->message) == nullptr) continue;
    held.insert(&*send->message);
    ++told;
  }
  EXPECT_EQ(told, 3);
  EXPECT_THAT(held, SizeIs(1));
}

// A grant is as long as its job has ranks and nodes, and waits for the disk: not as a copy for each node.
TEST_F(NewcomersTest, AGrantIsHeldOnceForAllItsNodes) {
  for (const char* node : {"1", "2", "3", "4"}) Hello(node, 2);
  sent_.clear();
  Submit("train 8 8 in-place");
  std::set<const Message*> grants;
  int nodes = 0;
  for (const Effect& effect : sent_) {
    const auto* send = std::get_if<SendToNode>(&effect);
    if (send == nullptr || !std::holds_alternative<StartGeneration>(*send->message)) continue;
    ++nodes;
    grants.insert(&*send->message);
  }
  EXPECT_EQ(nodes, 4);
  EXPECT_THAT(grants, SizeIs(1));
}

// There is no room for a spare, so who comes up in the place of one that is lost is no spare either.
TEST_F(NewcomersTest, BelowItsMostRanksWhatComesUpIsNoSpare) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 2 4 in-place spare");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  ASSERT_EQ(Newest().world_size, 3);
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("3 of 4 ranks go on"));
  Steps(job, 2, 6);
  sent_.clear();
  IsNow("1", job, 2, 3, RankState::kJoined);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(2)) << "it joins as soon as it is ready";
}

// A spare that waits makes up for the number that is asked for, and has not joined yet.
TEST_F(EditedTest, WhoWaitsIsNotSaidToBeThere) {
  Hello("1", 4);
  const JobId job = Submit("train 1 3 in-place spare");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  GoneBut({});
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  IsNow("1", job, 2, 3, RankState::kJoined);
  StayAndStep(job, 2, 9);
  ASSERT_TRUE(FromClient(ClientScale{job, 2, true}).ok);
  GoneBut({});
  ASSERT_EQ(Newest().world_size, 2);
  ASSERT_THAT(Newest().waiting, SizeIs(1));
  StartRanks(job);
  IsNow("1", job, 3, 2, RankState::kJoined);
  StayAndStep(job, 3, 12);
  const size_t before = Sent<Revoke>().size();
  const ClientReply reply = FromClient(ClientScale{job, 3});
  ASSERT_TRUE(reply.ok) << reply.error;
  const auto answer = nlohmann::json::parse(reply.json);
  EXPECT_EQ(answer.at("when"), "when those that wait beside the ranks have joined them");
  EXPECT_EQ(answer.at("size"), 2);
  Pass(absl::Seconds(1), {"1"});
  EXPECT_EQ(Sent<Revoke>().size(), before + 1) << "it joins";
}

}  // namespace
}  // namespace gtrain::core
