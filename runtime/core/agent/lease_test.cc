// An agent that started anew, has adopted ranks and hears no head.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

bool EndsRanks(const AgentStep& step) { return !CommandsOf<keeper::EndGeneration>(step).empty(); }

// The length of the lease is the head's word: until it has said it to this agent, the keeper's counts.
TEST(AgentLease, WithoutAHeadsWordNoneIsOver) {
  for (const bool welcomed : {false, true}) {
    AgentCore core(PlainAgent());
    Instant now{1'000'000'000};
    core.Step(KeeperHoldsOneRank(), now);
    core.Step(HeadUp{"10.0.0.1"}, now);
    if (welcomed) core.Step(FromHead{WelcomeOf()}, now);
    core.Step(HeadDown{}, now);
    now = now + absl::Minutes(10);
    EXPECT_EQ(EndsRanks(core.Step(AgentTick{}, now)), welcomed);
  }
}

bool Beats(const AgentStep& step) {
  return std::ranges::any_of(step.effects,
                             [](const AgentEffect& effect) { return std::holds_alternative<Beat>(effect); });
}

// Through a relay the head hears few heartbeats, and those it answers are the only ones that count for the
// lease: what a relay says of it proves nothing (N2).
TEST(AgentLease, ThroughARelayOnlyWhatTheHeadAnswersExtendsIt) {
  for (const bool answers : {true, false}) {
    AgentCore core(PlainAgent());
    Instant now{1'000'000'000};
    core.Step(KeeperHoldsOneRank(), now);
    core.Step(HeadUp{"10.0.0.1", /*relayed=*/true}, now);
    core.Step(FromHead{WelcomeOf()}, now);
    int beats = 0, words = 0;
    bool ended = false;
    for (int second = 0; second < 200; ++second) {
      now = now + absl::Seconds(1);
      const AgentStep step = core.Step(AgentTick{}, now);
      beats += Beats(step) ? 1 : 0;
      ended = ended || EndsRanks(step);
      for (const AgentHeartbeat& word : SentBy<AgentHeartbeat>(step)) {
        ++words;
        if (answers) core.Step(FromHead{HeartbeatAck{{5}, word.sequence, false}}, now);
      }
    }
    EXPECT_EQ(ended, !answers);
    if (!answers) continue;
    EXPECT_EQ(beats, 200) << "each of them is a beat for the relay";
    EXPECT_GE(words, 200 / 21);
    EXPECT_LE(words, 12);
  }
}

// A short lease needs more words.
TEST(AgentLease, ThroughARelayAShortOneIsExtendedInTime) {
  AgentCore core(PlainAgent());
  Instant now{1'000'000'000};
  core.Step(KeeperHoldsOneRank(), now);
  core.Step(HeadUp{"10.0.0.1", /*relayed=*/true}, now);
  AgentWelcome welcome = WelcomeOf();
  welcome.fence_after = absl::Seconds(10);
  core.Step(FromHead{welcome}, now);
  for (int second = 0; second < 100; ++second) {
    now = now + absl::Seconds(1);
    const AgentStep step = core.Step(AgentTick{}, now);
    EXPECT_FALSE(EndsRanks(step)) << second;
    for (const AgentHeartbeat& word : SentBy<AgentHeartbeat>(step))
      core.Step(FromHead{HeartbeatAck{{5}, word.sequence, false}}, now);
  }
}

}  // namespace
}  // namespace gtrain::core
