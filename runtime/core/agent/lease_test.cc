// An agent that started anew, has adopted ranks and hears no head.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/core/agent/agent_core.h"
#include "runtime/core/agent/agent_test_names.h"

namespace gtrain::core {
namespace {

bool EndsRanks(const AgentStep& step) {
  return std::any_of(step.effects.begin(), step.effects.end(), [](const AgentEffect& effect) {
    const auto* command = std::get_if<ToKeeper>(&effect);
    return command != nullptr && std::holds_alternative<keeper::EndGeneration>(command->command);
  });
}

// The length of the lease is the head's word: until it has said it to this agent, the keeper's counts.
TEST(AgentLease, WithoutAHeadsWordNoneIsOver) {
  for (const bool welcomed : {false, true}) {
    AgentConfig config;
    config.cluster = ClusterId("c1");
    config.node = NodeId("00000000000000aa");
    config.incarnation = Incarnation("boot-1");
    config.parse_spec = [](absl::string_view) -> absl::StatusOr<spec::JobSpec> { return spec::JobSpec(); };
    AgentCore core(std::move(config));
    Instant now{1'000'000'000};
    keeper::State state;
    state.job = kJob.value;
    keeper::GenerationHeld held;
    held.generation = 1;
    held.note = R"({"run_dir":"/run","world_size":1,"timeline":1,"spec":"spec"})";
    held.ranks = {{0, 100, 5, true, false}};
    state.generations = {held};
    core.Step(FromKeeper{kJob, state}, now);
    core.Step(HeadUp{"10.0.0.1"}, now);
    if (welcomed) {
      core.Step(FromHead{AgentWelcome{
                    ClusterId("c1"), {5}, NodeId("00000000000000aa"), absl::Seconds(1), absl::Seconds(120)}},
                now);
    }
    core.Step(HeadDown{}, now);
    now = now + absl::Minutes(10);
    EXPECT_EQ(EndsRanks(core.Step(AgentTick{}, now)), welcomed);
  }
}

}  // namespace
}  // namespace gtrain::core
