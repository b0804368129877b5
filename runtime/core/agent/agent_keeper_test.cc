// Tests the agent's commands to a keeper that has never heard of a generation, and of one that is over.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/core/agent/agent_test_world.h"
#include "runtime/core/agent/rank_environment.h"

namespace gtrain::core {
namespace {

class AgentKeeperTest : public ::testing::Test {
 protected:
  AgentKeeperTest() : core_(Config()) {
    Step(HeadUp{"10.0.0.1"});
    Step(FromHead{WelcomeOf()});
  }
  static AgentConfig Config() {
    AgentConfig config = PlainAgent();
    config.job_hash = [](const spec::JobSpec&) { return "hash"; };
    config.make_token = [] { return std::string(32, 't'); };
    return config;
  }
  void Step(const AgentEvent& event) { last_ = core_.Step(event, Instant{1'000'000'000}); }
  static GenerationGrant GrantOf(uint64_t generation, ProcessId process = {}) {
    GenerationGrant grant;
    grant.job = kJob;
    grant.generation = {generation};
    grant.spec_text = "spec";
    grant.run_dir = "/run";
    grant.world_size = 1;
    grant.nodes = {{kMe, "10.0.0.1", "host-a"}};
    grant.ranks.resize(1);
    grant.ranks[0].node = kMe;
    grant.ranks[0].process = process;
    return grant;
  }
  void Start(uint64_t generation, ProcessId process = {}) {
    Step(FromHead{StartGeneration{{5}, GrantOf(generation, process)}});
  }
  template <typename T>
  std::vector<uint64_t> Commanded() const {
    std::vector<uint64_t> generations;
    for (const T& command : CommandsOf<T>(last_)) generations.push_back(command.generation);
    return generations;
  }
  // What the head was told that this node keeps.
  std::vector<ProcessId> ToldKept() const {
    const auto gone = SentBy<GenerationGone>(last_);
    return gone.empty() ? std::vector<ProcessId>() : gone[0].kept;
  }
  std::vector<uint64_t> Gone() const {
    std::vector<uint64_t> generations;
    for (const GenerationGone& gone : SentBy<GenerationGone>(last_))
      generations.push_back(gone.generation.value);
    return generations;
  }

  AgentCore core_;
  AgentStep last_;
};

using Generations = std::vector<uint64_t>;

TEST_F(AgentKeeperTest, WhatWasLostWithAConnectionIsEndedByName_P4) {
  Start(3);
  ASSERT_EQ(Commanded<keeper::BeginGeneration>(), Generations{3});
  Step(FromHead{Revoke{{5}, kJob, {6}, EndMode::kReform, absl::Seconds(5), "a node was lost"}});
  EXPECT_EQ(Commanded<keeper::EndGeneration>(), (Generations{3, 6}));
  keeper::State state;
  state.job = kJob.value;
  Step(FromKeeper{kJob, state});
  EXPECT_EQ(Commanded<keeper::EndGeneration>(), Generations{3});
  EXPECT_TRUE(Gone().empty()) << "until the keeper has said so";
  Step(FromKeeper{kJob, keeper::Gone{3, true, "it never began here"}});
  EXPECT_EQ(Gone(), (Generations{3, 6}));
}

TEST_F(AgentKeeperTest, WhatIsGoneAndAcknowledgedIsForgottenByTheKeeper) {
  Step(FromKeeper{kJob, keeper::Gone{3, true, "it was over before it began"}});
  EXPECT_EQ(Commanded<keeper::Forget>(), Generations{3});
  EXPECT_TRUE(Gone().empty());
}

// A generation of which nothing ran here (its agent died before), and whose end the head did not live to
// store.
TEST_F(AgentKeeperTest, WhatIsOverHereIsNotStartedAgain) {
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = 2;
  state.generations.emplace_back().generation = 3;
  Step(FromKeeper{kJob, state});
  Step(KeeperLost{kJob, true, "killed"});
  ASSERT_EQ(Gone(), Generations{3});
  Start(3);
  EXPECT_TRUE(Commanded<keeper::BeginGeneration>().empty());
  EXPECT_EQ(Gone(), Generations{3});
}

// The head's disk was full, so the order to forget the job came before the welcome, and the generations that
// were gone meanwhile had been reported to nobody: the head waited for it for ever.
TEST_F(AgentKeeperTest, WhatIsForgottenBeforeTheWelcomeIsToldBehindIt) {
  Start(4);
  Step(HeadUp{"10.0.0.1"});  // greets again
  Step(FromHead{Revoke{{5}, kJob, {4}, EndMode::kStopNow, absl::ZeroDuration(), "the job is over"}});
  Step(FromKeeper{kJob, keeper::Exited{.generation = 4, .rank = 0}});
  Step(FromKeeper{kJob, keeper::Gone{4, true, "all are gone"}});
  EXPECT_TRUE(Gone().empty());
  Step(FromHead{ForgetJob{{5}, kJob}});
  EXPECT_TRUE(Gone().empty());
  Step(FromHead{WelcomeOf()});
  EXPECT_EQ(Gone(), Generations{4});
  Step(HeadUp{"10.0.0.1"});
  Step(FromHead{WelcomeOf()});
  EXPECT_TRUE(Gone().empty()) << "told, and forgotten";
}

// What a keeper keeps is told with the word that a generation is gone, and the next one goes on with it.
TEST_F(AgentKeeperTest, WhatIsKeptGoesOn) {
  Start(3);
  Revoke revoke{{5}, kJob, {3}, EndMode::kReform, absl::Seconds(5), "a rank was lost"};
  revoke.keep = true;
  Step(FromHead{revoke});
  ASSERT_EQ(CommandsOf<keeper::EndGeneration>(last_).size(), 1u);
  EXPECT_TRUE(CommandsOf<keeper::EndGeneration>(last_)[0].keep);
  Step(FromKeeper{kJob, keeper::Gone{3, true, "", {{3, 0}, {0, 7}}}});
  const std::vector<ProcessId> kept = {{{3}, 0}};  // of none was it born: that is no process
  EXPECT_EQ(ToldKept(), kept);
  // A generation that is over before it came here leaves them where they are.
  revoke.generation = {4};
  Step(FromHead{revoke});
  EXPECT_EQ(ToldKept(), kept);
  // The job has no place here any more: they may go.
  revoke.keep = false;
  Step(FromHead{revoke});
  ASSERT_EQ(CommandsOf<keeper::EndGeneration>(last_).size(), 1u);
  EXPECT_FALSE(CommandsOf<keeper::EndGeneration>(last_)[0].keep);
  Step(FromHead{revoke});
  EXPECT_TRUE(CommandsOf<keeper::EndGeneration>(last_).empty()) << "said once";
  revoke.keep = true;
  Start(5, {{3}, 0});
  ASSERT_EQ(CommandsOf<keeper::StartRank>(last_).size(), 1u);
  EXPECT_EQ(CommandsOf<keeper::StartRank>(last_)[0].born, 3u);
  EXPECT_EQ(CommandsOf<keeper::StartRank>(last_)[0].born_rank, 0);
  // A keeper that comes back says what it keeps, and a revoke that keeps nobody says so.
  keeper::State state;
  state.job = kJob.value;
  state.kept = {{3, 0}};
  state.generations.emplace_back().generation = 5;
  Step(FromKeeper{kJob, state});
  revoke.generation = {5};
  revoke.keep = false;
  Step(FromHead{revoke});
  ASSERT_EQ(CommandsOf<keeper::EndGeneration>(last_).size(), 1u);
  EXPECT_FALSE(CommandsOf<keeper::EndGeneration>(last_)[0].keep);
}

// An agent that restarts finds a keeper that has nothing but processes that wait, and says so to the head.
TEST_F(AgentKeeperTest, WhatWaitsOutlivesTheAgent_P4) {
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = 3;
  state.kept = {{3, 0}};
  Step(FromKeeper{kJob, state});
  EXPECT_TRUE(CommandsOf<keeper::Quit>(last_).empty());
  Step(HeadUp{"10.0.0.1"});
  std::vector<KeptProcesses> said;
  for (const AgentEffect& effect : last_.effects) {
    const auto* sent = std::get_if<ToHead>(&effect);
    if (sent == nullptr) continue;
    if (const auto* hello = std::get_if<AgentHello>(&sent->message)) said = hello->kept;
  }
  EXPECT_EQ(said, (std::vector<KeptProcesses>{{kJob, {{{3}, 0}}}}));
  Step(FromHead{WelcomeOf()});
  Step(FromHead{ForgetJob{{5}, kJob}});
  EXPECT_EQ(CommandsOf<keeper::Quit>(last_).size(), 1u) << "the job is over";
}

// A process beside the generation: its number is behind the ranks, and the head hears when it could go on.
TEST_F(AgentKeeperTest, WhoWaitsBesideAGenerationIsStartedAndTold) {
  GenerationGrant grant = GrantOf(3);
  grant.waiting = {{.rank = 1, .local_rank = 1, .node = kMe, .process = {{2}, 4}}};
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto starts = CommandsOf<keeper::StartRank>(last_);
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_FALSE(starts[0].waits);
  EXPECT_TRUE(starts[1].waits);
  EXPECT_EQ(starts[1].born, 2u);
  EXPECT_EQ(starts[1].born_rank, 4);
  const std::map<std::string, std::string> env(starts[1].env.begin(), starts[1].env.end());
  EXPECT_EQ(env.at("RANK"), "1");
  EXPECT_EQ(env.at("WORLD_SIZE"), "1") << "it is none of the world";
  EXPECT_EQ(env.at("GTRAIN_WAITS"), "1");
  const std::string mine = R"({"type":"exchange","sequence":0,"blob":"YQ=="})";
  Step(FromKeeper{kJob, keeper::RelayUp{3, 0, 1, mine}});
  ASSERT_EQ(CommandsOf<keeper::Relay>(last_).size(), 2u) << "the exchange is whole without it";
  Step(FromKeeper{kJob, keeper::Ready{3, 1}});
  const auto told = SentBy<RanksStarted>(last_);
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].ranks.size(), 1u);
  EXPECT_EQ(told[0].ranks[0].rank, 1);
  EXPECT_EQ(told[0].ranks[0].state, RankState::kJoined);
  Revoke revoke{{5}, kJob, {3}, EndMode::kReform, absl::Seconds(5), "a rank was lost"};
  revoke.keep = true;
  Step(FromHead{revoke});
  Step(FromKeeper{kJob, keeper::Gone{3, true, "", {}, {{2, 4}}}});
  ASSERT_EQ(SentBy<GenerationGone>(last_).size(), 1u);
  EXPECT_EQ(SentBy<GenerationGone>(last_)[0].coming, (std::vector<ProcessId>{{{2}, 4}}));
  Step(HeadUp{"10.0.0.1"});
  EXPECT_EQ(SentBy<AgentHello>(last_).at(0).kept, (std::vector<KeptProcesses>{{kJob, {}, {{{2}, 4}}}}));
}

// Its agent died before it had ordered all ranks of a generation: the keeper would wait for them for ever.
TEST_F(AgentKeeperTest, ARankThatWasNeverOrderedIsLost) {
  GenerationGrant grant = GrantOf(3);
  grant.world_size = 2;
  grant.ranks.push_back({.rank = 1, .local_rank = 1, .node = kMe});
  AgentConfig config = Config();
  config.unpack_grant = [grant](absl::string_view) -> absl::StatusOr<GenerationGrant> { return grant; };
  core_ = AgentCore(std::move(config));
  keeper::State state;
  state.job = kJob.value;
  keeper::GenerationHeld& held = state.generations.emplace_back();
  held.generation = 3;
  held.note = R"({"run_dir":"/run","world_size":2,"timeline":1,"spec":"spec","grant":"YQ=="})";
  held.ranks.push_back({0, 77, 1, true, false});
  Step(FromKeeper{kJob, state});
  Step(HeadUp{"10.0.0.1"});
  ASSERT_EQ(SentBy<AgentHello>(last_).size(), 1u);
  const std::vector<HeldGeneration> said = SentBy<AgentHello>(last_)[0].held;
  ASSERT_EQ(said.size(), 1u);
  ASSERT_EQ(said[0].exited.size(), 1u);
  EXPECT_EQ(said[0].exited[0].rank, 1);
  EXPECT_EQ(said[0].exited[0].cause, ExitCause::kLost);
}

TEST_F(AgentKeeperTest, AMemoryLimitThatNothingEnforcesIsSaidOnce) {
  for (const bool limits : {false, true}) {
    AgentConfig config = Config();
    config.limits_memory = limits;
    config.parse_spec = [](absl::string_view) -> absl::StatusOr<spec::JobSpec> {
      spec::JobSpec spec;
      spec.resources.memory = uint64_t{1} << 30;
      return spec;
    };
    core_ = AgentCore(std::move(config));
    Step(HeadUp{"10.0.0.1"});
    Step(FromHead{WelcomeOf()});
    Start(1);
    std::vector<std::string> notes;
    for (const AgentEffect& effect : last_.effects) {
      const auto* sent = std::get_if<ToHead>(&effect);
      if (const auto* note = sent == nullptr ? nullptr : std::get_if<AgentNote>(&sent->message))
        notes.push_back(absl::StrCat(note->kind, ": ", note->text));
    }
    if (limits) {
      EXPECT_THAT(notes, ::testing::IsEmpty());
    } else {
      EXPECT_THAT(notes, ::testing::ElementsAre(
                             ::testing::StartsWith("warning: resources.memory only chooses the machine")));
    }
  }
}

TEST_F(AgentKeeperTest, WhoIsAskedToConnectsAnew_W9) {
  const auto reconnects = [&](bool greet) {
    Step(FromHead{HeartbeatAck{{5}, 1, greet}});
    return std::any_of(last_.effects.begin(), last_.effects.end(),
                       [](const AgentEffect& e) { return std::holds_alternative<Reconnect>(e); });
  };
  EXPECT_FALSE(reconnects(false));
  EXPECT_TRUE(reconnects(true));
}

TEST_F(AgentKeeperTest, WhoIsBoundOtherwiseIsAWarning) {
  Start(1);
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7}});
  EXPECT_TRUE(SentBy<AgentNote>(last_).empty());
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7, {0, 1, 3}}});
  const std::vector<AgentNote> notes = SentBy<AgentNote>(last_);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].kind, "warning");
  EXPECT_THAT(notes[0].text, ::testing::HasSubstr("lets it run on 0,1,3 "));
}

// The head counts what a generation costs until then. Later ones come with the heartbeats.
TEST_F(AgentKeeperTest, TheFirstStepOfAGenerationIsToldAtOnce) {
  Start(1);
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7}});
  Step(AgentTick{});
  const auto told = [&](const std::string& said) {
    Step(FromKeeper{kJob, keeper::RelayUp{1, 0, 1, said}});
    Step(AgentTick{});
    const std::vector<AgentHeartbeat> beats = SentBy<AgentHeartbeat>(last_);
    return beats.empty() ? std::optional<int64_t>() : beats[0].changed.at(0).step;
  };
  EXPECT_EQ(told(R"({"type":"progress","collective":1})"), std::nullopt);
  EXPECT_EQ(told(R"({"type":"progress","step":1})"), 1);
  EXPECT_EQ(told(R"({"type":"progress","step":2})"), std::nullopt);
}

// A turn is the keeper's to answer, also for a rank that has ended: it may have last words.
TEST_F(AgentKeeperTest, ConsolesAreBetweenClientAndKeeper) {
  Start(1);
  Step(FromKeeper{kJob, keeper::Exited{.generation = 1, .rank = 0}});
  AgentQuery query{{5}, 11, AgentQuery::Kind::kConsole, kJob, {1}, 0};
  query.console = {
      .session = "s", .start = true, .argv = {"cat"}, .input_offset = 4, .input = "in", .out_seen = 9};
  Step(FromHead{query});
  ASSERT_EQ(last_.effects.size(), 1u);
  const auto& turn = std::get<keeper::Console>(std::get<ToKeeper>(last_.effects[0]).command);
  EXPECT_EQ(turn.id, 11u);
  EXPECT_EQ(turn.session, "s");
  EXPECT_EQ(turn.argv, std::vector<std::string>{"cat"});
  EXPECT_EQ(turn.input_offset, 4u);
  EXPECT_EQ(turn.input, "in");
  EXPECT_EQ(turn.out_seen, 9u);
  Step(FromKeeper{kJob, keeper::ConsoleTurn{11, true, "out", 9, "err", 6, true, 3}});
  ASSERT_EQ(last_.effects.size(), 1u);
  const auto& answer = std::get<AgentAnswer>(std::get<ToHead>(last_.effects[0]).message);
  EXPECT_EQ(answer, (AgentAnswer{11, true, "out", 3, true, "err", false, 6, 9}));
  query.generation = {2};  // that nobody here has heard of
  Step(FromHead{query});
  EXPECT_FALSE(std::get<AgentAnswer>(std::get<ToHead>(last_.effects[0]).message).ok);
}

}  // namespace
}  // namespace gtrain::core
