// Tests what people read about those that come up beside a generation, and about those that do not go on.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "runtime/core/head/newcomers_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// People read what comes, and not a plan that somebody's end has changed.
TEST_F(NewcomersTest, WhoHasEndedIsNotSaidToWait) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  StartRanks(job);
  Steps(job, 2, 6);
  const auto reason = [&] { return Status(job).at("reason").get<std::string>(); };
  EXPECT_THAT(reason(), HasSubstr("3 of 4 ranks go on, the others come up beside them ("));
  Kill("1", job, 2, 3);
  EXPECT_THAT(reason(), HasSubstr("3 of 4 ranks go on, the others are to be started again ("));
}

TEST_F(NewcomersTest, ASpareThatHasEndedIsNotCounted) {
  const JobId job = TwoAndASpare();
  FromNode(Newest().waiting[0].node.value, RankExited{Exit(job, 2, 2, 75)});
  EXPECT_THAT(Status(job).at("reason").get<std::string>(),
              HasSubstr("2 ranks, nothing waits beside them now ("));
  const auto spares = [&] { return Status(job).at("spares").get<std::string>(); };
  EXPECT_THAT(spares(), HasSubstr("0 of 1 waits: the next one is started in 15s, where there is room; the "
                                  "last one: rank 2 on host-"));
  Pass(absl::Seconds(4), {"1", "2"});
  EXPECT_THAT(spares(), HasSubstr("the next one is started in 11s"));
}

TEST_F(NewcomersTest, ThatThereIsNoRoomForASpareIsSaid) {
  Hello("1", 2);
  const JobId job = Submit("train 2 2 in-place spare");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  const std::string spares = Status(job).at("spares").get<std::string>();
  EXPECT_THAT(spares, HasSubstr("0 of 1 waits: there is no room for more beside the ranks now; it is looked "
                                "for again in "));
}

// Who waits for them reads when the next try is, and what became of the last.
TEST_F(NewcomersTest, WhenThoseThatAreToJoinAreTriedAgainIsSaid) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  const auto newcomers = [&] { return Status(job).at("newcomers").get<std::string>(); };
  StartRanks(job);
  Steps(job, 2, 6);
  EXPECT_EQ(newcomers(), "") << "it is on its way";
  Kill("1", job, 2, 3);
  EXPECT_THAT(newcomers(), HasSubstr("none of the one to join the ranks is on its way: the next one is "
                                     "started in 15s, where there is room; the last one: rank 3 on host-"));
  const auto why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
  EXPECT_EQ(why.at("newcomers"), newcomers());
}

// Three of four go on where there is no room for a spare: who comes is one of the four.
TEST_F(NewcomersTest, BelowItsMostRanksWhoComesIsNoSpare) {
  const JobId job = ThreeGoOn("train 2 4 in-place spare");
  StartRanks(job);
  Steps(job, 2, 6);
  const auto reason = [&] { return Status(job).at("reason").get<std::string>(); };
  EXPECT_THAT(reason(), HasSubstr("3 of 4 ranks go on, the others come up beside them ("));
  Kill("1", job, 2, 3);
  EXPECT_THAT(Events(job, "newcomer"), ElementsAre(HasSubstr("it came up to join the others")));
  EXPECT_THAT(reason(), HasSubstr("3 of 4 ranks go on, the others are to be started again ("));
}

TEST_F(NewcomersTest, WhenSparesComeIsSaid) {
  Hello("1", 2);
  const JobId job = Submit("train 2 4 in-place spare");
  StartRanks(job);
  const auto spares = [&] { return Status(job).at("spares").get<std::string>(); };
  EXPECT_THAT(spares(), HasSubstr("0 of 1 waits: spares come once a rank has joined to stay"));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("(at most 4 ranks were asked for)"));
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("behind a checkpoint"));
  StayAndStep(job, 1, 5);
  EXPECT_EQ(spares(),
            "0 of 1 waits: spares come once the job has its most ranks, 4, and there is room for more");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("it grows once there is room"));
}

// A rank that was started has joined, and its program still loads: the others compute nothing meanwhile.
TEST_F(NewcomersTest, ForWhomTheOthersWaitIsSaid) {
  Hello("1", 2);
  Hello("2", 2);
  const JobId job = Submit("train 4 4 in-place");
  StartRanks(job);
  const auto waits = [&] { return Status(job).at("waits").get<std::string>(); };
  EXPECT_EQ(waits(), "") << "nobody has joined";
  const std::string first = Newest().ranks[0].node.value, last = Newest().ranks[3].node.value;
  for (int rank = 0; rank < 3; ++rank)
    IsNow(Newest().ranks[rank].node.value, job, 1, rank, RankState::kJoined);
  EXPECT_EQ(waits(), absl::StrCat("no step in this generation so far: the others wait for rank 3 on host-",
                                  last, ", not joined yet"));
  StayAndStep(job, 1, 5);
  EXPECT_EQ(waits(), "");
  const GenerationGrant four = Newest();
  Kill(first, job, 1, 0);
  for (const char* node : {"1", "2"}) {
    GenerationGone gone{job, {1}};
    for (const RankPlace& place : four.ranks) {
      if (place.node.value == node && place.rank != 0) gone.kept.push_back({{1}, place.rank});
    }
    FromNode(node, gone);
  }
  ASSERT_EQ(Newest().world_size, 4);
  StartRanks(job);
  int fresh = 0;
  for (const RankPlace& place : Newest().ranks) {
    if (place.process.generation.value == 0) fresh = place.rank;
    IsNow(place.node.value, job, 2, place.rank, RankState::kJoined);
  }
  EXPECT_EQ(waits(),
            absl::StrCat("no step in this generation so far, the last was 5: the others wait for rank ",
                         fresh, " on host-", first, ", which was started and loads, or gets the state"));
  const auto why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
  EXPECT_EQ(why.at("waits"), waits());
}

// A program that does not stay has nothing in memory for the next generation.
TEST_F(NewcomersTest, WhatBeginsFromNothingIsSaid) {
  Hello("1", 4);
  const JobId job = Submit("train 2 2 in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  EXPECT_THAT(Events(job, "warning"), IsEmpty());
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  ASSERT_EQ(Newest().generation, Generation{2});
  EXPECT_THAT(Events(job, "warning"),
              ElementsAre(::testing::AllOf(
                  HasSubstr("begins anew from nothing"), HasSubstr("did not join to stay"),
                  HasSubstr("The last step that was reported was 5."), HasSubstr("`checkpoint:`"))));
}

TEST_F(NewcomersTest, WhoGoesOnDoesNotBeginAnew) {
  const JobId job = ThreeGoOn("train 2 4 in-place");
  EXPECT_THAT(Events(job, "warning"), IsEmpty());
}

// A spare goes on in the place of a rank, and has trained nothing.
TEST_F(NewcomersTest, ASpareAloneBeginsAnew) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value, first = Newest().ranks[0].node.value;
  Kill(first, job, 2, 0);
  FromNode(first, GenerationGone{job, {2}});
  RankExit other = Exit(job, 2, 1, 1);
  FromNode(first, RankExited{other});
  FromNode(spare, GenerationGone{job, {2}, true, "", {{{2}, 2}}});
  ASSERT_EQ(Newest().generation, Generation{3});
  EXPECT_THAT(Processes(Newest().ranks), ::testing::Contains(ProcessId{{2}, 2}));
  EXPECT_THAT(Events(job, "warning"),
              ElementsAre(::testing::AllOf(HasSubstr("generation 3 begins anew from nothing: no rank of "
                                                     "generation 2 goes on in it, and who waited beside"),
                                           HasSubstr("The last step that was reported was 6."))));
}

// It stood still when the generation was re-formed for another one, and its keeper has ended it.
TEST_F(NewcomersTest, AMemberThatDoesNotAnswerIsNotReplacedInSilence) {
  const JobId job = TwoAndASpare();
  const std::string spare = Newest().waiting[0].node.value, first = Newest().ranks[0].node.value;
  Kill(first, job, 2, 0);
  RankExit ended = Exit(job, 2, 1, 0);
  ended.cause = ExitCause::kStopped;
  ended.signal = 9;
  FromNode(first, RankExited{ended});
  FromNode(first, GenerationGone{job, {2}});
  FromNode(spare, GenerationGone{job, {2}, true, "", {{{2}, 2}}});
  ASSERT_EQ(Newest().generation, Generation{3});
  EXPECT_THAT(
      Events(job, "warning"),
      ::testing::Contains(::testing::AllOf(
          HasSubstr(absl::StrCat("rank 1 on host-", first, " did not answer when generation 2 ended")),
          HasSubstr("--generation 2 --rank 1"))));
}

// Of a program that does not stay nobody goes on, which is no news.
TEST_F(NewcomersTest, OfRanksThatDoNotStayNobodyIsSaidToBeSilent) {
  Hello("1", 4);
  const JobId job = Submit("train 4 4 in-place");
  StartRanks(job);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  ASSERT_EQ(Newest().generation, Generation{2});
  EXPECT_THAT(Events(job, "warning"), IsEmpty());
}

// With a checkpoint nothing of it is lost but the steps behind it.
TEST_F(NewcomersTest, WhatHasACheckpointDoesNotBeginAnew) {
  Hello("1", 4);
  const JobId job = Submit("train 2 2 in-place");
  StartRanks(job);
  Steps(job, 1, 5);
  FromNode("1", CheckpointReport{job, {1}, {1}, 4, "m", ""});
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(3), {"1"});
  ASSERT_EQ(Newest().generation, Generation{2});
  EXPECT_THAT(Events(job, "warning"), IsEmpty());
}

// In place more ranks need no checkpoint, fewer do unless it is to be at once.
TEST_F(NewcomersTest, WhatAnotherSizeWaitsForIsSaid) {
  Hello("1", 3);
  const JobId job = Submit("train 1 4 in-place");
  StartRanks(job);
  StayAndStep(job, 1, 5);
  ASSERT_EQ(Newest().world_size, 3);
  const auto scale = [&](int size, bool now) {
    return nlohmann::json::parse(FromClient(ClientScale{job, size, now}).json);
  };
  const auto reason = [&] { return Status(job).at("reason").get<std::string>(); };
  EXPECT_EQ(scale(4, false).at("when"), "once there has been room for 10s");
  EXPECT_THAT(reason(), HasSubstr("; wants 4 ranks once there has been room for 10s"));
  EXPECT_EQ(scale(2, false).at("when"), "behind its next checkpoint");
  EXPECT_THAT(reason(), HasSubstr("wants 2 ranks behind its next checkpoint; it has committed none so far "
                                  "(`gtrain scale --now` waits for none, and loses nothing in place)"));
  sent_.clear();
  const auto now = scale(2, true);
  EXPECT_EQ(now.at("when"), "at once");
  EXPECT_EQ(now.at("in_place"), true);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_EQ(scale(3, false).at("when"), "with its next generation");
}

}  // namespace
}  // namespace gtrain::core
