// An agent that started anew, has adopted ranks and hears no head.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace gtrain::core
