// Tests the agent's reports about ranks that rest, and which process reads their stacks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;

// An agent that holds rank 0 of a job, process 100, and has a head. `progress.stall` is a minute.
class AgentIdleTest : public ::testing::Test {
 protected:
  void SetUp() override { Boot(""); }

  void Boot(const std::string& keeper_program) {
    AgentConfig config = PlainAgent();
    config.keeper_program = keeper_program;
    config.parse_spec = [](absl::string_view) -> absl::StatusOr<spec::JobSpec> {
      spec::JobSpec spec;
      spec.progress.stall = absl::Minutes(1);
      return spec;
    };
    core_.emplace(std::move(config));
    Step(KeeperHoldsOneRank());
    Step(HeadUp{"10.0.0.1"});
    Step(FromHead{WelcomeOf()});
  }

  void Step(const AgentEvent& event) { last_ = core_->Step(event, now_); }
  void Later(absl::Duration time) {
    now_ = now_ + time;
    Step(FromHead{HeartbeatAck{{5}, 0}});  // a head that is silent is greeted anew
    Step(AgentTick{});
  }
  template <typename T>
  const T* Effect() const {
    for (const AgentEffect& effect : last_.effects) {
      if (const T* found = std::get_if<T>(&effect)) return found;
    }
    return nullptr;
  }
  const keeper::Exec* Exec() const {
    const auto* command = Effect<ToKeeper>();
    return command == nullptr ? nullptr : std::get_if<keeper::Exec>(&command->command);
  }
  void Output() { Step(FromKeeper{kJob, keeper::Output{1, 0, false, 5, 0, "hello"}}); }

  // The look that comes now, and what the next heartbeat says of the rank.
  std::optional<RankStatus> Look(uint64_t cpu_ms) {
    Later(absl::Seconds(16));
    EXPECT_NE(Effect<LookAtRanks>(), nullptr);
    Step(RanksSeen{kJob, {1}, {{0, cpu_ms, "futex_wait_queue"}}});
    return NextBeat();
  }
  std::optional<RankStatus> NextBeat() {
    Later(absl::Seconds(2));
    for (const AgentHeartbeat& beat : SentBy<AgentHeartbeat>(last_)) {
      if (!beat.changed.empty()) return beat.changed.back();
    }
    return std::nullopt;
  }

  std::optional<AgentCore> core_;
  Instant now_{3'600'000'000'000};
  AgentStep last_;
};

TEST_F(AgentIdleTest, ARankThatWritesIsNotLookedAt) {
  for (int i = 0; i < 20; ++i) {
    Output();
    Later(absl::Seconds(10));
    EXPECT_EQ(Effect<LookAtRanks>(), nullptr);
  }
}

TEST_F(AgentIdleTest, ARankThatRestsIsSaidOnceAndTakenBack) {
  Output();
  (void)NextBeat();
  EXPECT_FALSE(Look(500)) << "the first look has nothing to compare with";
  EXPECT_FALSE(Look(500)) << "not for long";
  const auto rests = Look(505);  // it looked at the clock
  ASSERT_TRUE(rests);
  EXPECT_GE(rests->idle, absl::Seconds(30));
  EXPECT_EQ(rests->blocked_in, "futex_wait_queue");
  EXPECT_FALSE(Look(505)) << "known";
  const auto works = Look(5'000);
  ASSERT_TRUE(works);
  EXPECT_EQ(works->idle, absl::ZeroDuration());
  EXPECT_EQ(works->blocked_in, "");
}

TEST_F(AgentIdleTest, OutputEndsTheRestAtOnce) {
  for (int i = 0; i < 6; ++i) (void)Look(500);
  Output();
  const auto works = NextBeat();
  ASSERT_TRUE(works);
  EXPECT_EQ(works->idle, absl::ZeroDuration());
}

// Debuggers run beside the rank, like any command; the agent itself says at once what the kernel shows.
TEST_F(AgentIdleTest, FullStacksAreReadBesideTheRank) {
  Boot("/opt/gtrain/bin/gtrain-keeper");
  AgentQuery query{{5}, 12, AgentQuery::Kind::kStacks, kJob, {1}, 0};
  Step(FromHead{query});
  EXPECT_EQ(Exec(), nullptr);
  ASSERT_NE(Effect<ReadStacks>(), nullptr);
  EXPECT_EQ(Effect<ReadStacks>()->pid, 100);
  query.full = true;
  Step(FromHead{query});
  ASSERT_NE(Exec(), nullptr);
  EXPECT_THAT(Exec()->argv, ElementsAre("/opt/gtrain/bin/gtrain-keeper", "--stacks", "100"));
  EXPECT_EQ(Exec()->id, 12u);
}

TEST_F(AgentIdleTest, WhatARankSaidLastGoesWithItsExit) {
  const auto said = [&](uint64_t id, const char* json) {
    Step(FromKeeper{kJob, keeper::RelayUp{1, 0, id, json}});
  };
  said(1, R"({"type":"progress","step":99,"loss":0.5})");
  EXPECT_EQ(NextBeat()->loss, 0.5);
  said(2, R"({"type":"progress","step":100,"loss":"nan"})");
  keeper::Exited exited;
  exited.generation = 1;
  exited.rank = 0;
  exited.pid = 100;
  exited.cause = keeper::Cause::kExited;
  Step(FromKeeper{kJob, exited});
  const RankExit* exit = nullptr;
  for (const AgentEffect& effect : last_.effects) {
    const auto* send = std::get_if<ToHead>(&effect);
    if (send == nullptr) continue;
    if (const auto* found = std::get_if<RankExited>(&send->message)) exit = &found->exit;
  }
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->step, 100);
  EXPECT_FALSE(exit->loss.has_value());
  EXPECT_TRUE(exit->diverged);
}

}  // namespace
}  // namespace gtrain::core
