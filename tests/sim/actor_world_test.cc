// Schedules of actors that are known to be hard: spawn, locate, restart, partition.
#include "tests/sim/actor_world.h"

#include "gtest/gtest.h"

namespace gtrain::sim {
namespace {

ActorProfile Quiet() {
  ActorProfile profile;
  profile.processes = 3;
  profile.told_within = 0;
  profile.same_address = 0;
  profile.runs_max = kMs;
  profile.network.notice_max = 20 * kMs;
  profile.given_up_within = kMin;
  return profile;
}

// Process 0 owns, the actor is at process 1, process 2 calls.
class ActorWorldTest : public ::testing::Test {
 protected:
  void Open(const ActorProfile& profile = Quiet()) {
    world_ = std::make_unique<ActorWorld>(1, profile);
    world_->Begin();
  }
  ~ActorWorldTest() override {
    if (world_ == nullptr) return;
    for (const Violation& one : world_->kernel.violations()) ADD_FAILURE() << one.id << ": " << one.text;
  }
  int Spawn(int rank = 1, bool keep = false, int restarts = 3, int64_t timeout = kMin) {
    ActorWorld::Spawning how;
    how.placement.rank = rank;
    how.keep = keep;
    how.restarts = restarts;
    how.timeout = timeout;
    return world_->Spawn(0, how);
  }
  int Spawned(int rank = 1, bool keep = false) {
    const int actor = Spawn(rank, keep);
    EXPECT_TRUE(world_->RunUntil([&] { return Of(actor).spawned.has_value(); }, kMin));
    EXPECT_TRUE(Of(actor).spawned->ok()) << *Of(actor).spawned;
    return actor;
  }
  const ActorTruth::Actor& Of(int actor) { return world_->truth.actors()[static_cast<size_t>(actor)]; }
  const ActorTruth::Call& Call(size_t call) { return world_->truth.calls()[call]; }
  void Await(size_t call) {
    EXPECT_TRUE(world_->RunUntil([&] { return Call(call).answered; }, 2 * kMin));
    EXPECT_EQ(Call(call).code, absl::StatusCode::kOk) << absl::StatusCodeToString(Call(call).code);
  }
  // Nobody waits for anything any more.
  void Rest() {
    world_->Run(150 * kSec);
    world_->truth.CheckRest();
  }

  std::unique_ptr<ActorWorld> world_;
};

TEST_F(ActorWorldTest, ASpawnWhoseAnswerIsLostMakesOneActor) {
  Open();
  Spawned();  // connects
  const int actor = Spawn();
  ASSERT_TRUE(world_->RunUntil([&] { return Of(actor).alive == 1; }, kMin));
  world_->net.Break(1);
  ASSERT_TRUE(world_->RunUntil([&] { return Of(actor).spawned.has_value(); }, kMin));
  EXPECT_TRUE(Of(actor).spawned->ok());
  Await(world_->Call(2, actor, ActorTruth::kAdd, kMin));
  Rest();
}

TEST_F(ActorWorldTest, AnActorWhoseSpawnIsAnsweredTooLateIsEnded) {
  Open();
  Spawned();
  const int actor = Spawn(1, false, 3, /*timeout=*/500 * kMs);
  ASSERT_TRUE(world_->RunUntil([&] { return Of(actor).alive == 1; }, kMin));
  world_->net.Cut({1});
  ASSERT_TRUE(world_->RunUntil([&] { return Of(actor).spawned.has_value(); }, kMin));
  EXPECT_TRUE(absl::IsDeadlineExceeded(*Of(actor).spawned)) << *Of(actor).spawned;
  world_->net.Heal();
  Rest();
  EXPECT_EQ(Of(actor).alive, 0u);
}

// A process of the next generation asks an owner that has not heard of it where an actor is, which is dead.
TEST_F(ActorWorldTest, WhoComesUpFindsAnActorWhoseOwnerHearsOfItsLossLater) {
  Open();
  const int actor = Spawned();
  world_->Kill(1);
  world_->Deaf(0, true);
  world_->Generation(/*replace=*/true);
  world_->Run(kSec);
  const int late = world_->Members()[1];
  const size_t first = world_->Call(late, actor, ActorTruth::kAdd, kMin);
  world_->Run(kSec);
  EXPECT_FALSE(Call(first).answered);
  world_->Deaf(0, false);
  Await(first);
  Await(world_->Call(late, actor, ActorTruth::kAdd, kMin));
  Rest();
}

// It was told to have an actor before it had heard of anybody.
TEST_F(ActorWorldTest, AnActorEndsWithAnOwnerOfWhichItsProcessHasNeverHeard) {
  Open();
  world_->Kill(1);
  world_->Generation(/*replace=*/true);
  const int late = world_->Members()[1];
  world_->Deaf(late, true);
  world_->Run(kSec);
  const int actor = Spawned(1);
  ASSERT_EQ(world_->truth.Only(actor)->process, late);
  world_->Kill(0);
  world_->Generation(/*replace=*/false);
  world_->Deaf(late, false);
  Rest();
  EXPECT_EQ(Of(actor).alive, 0u);
}

// The address of a dead process is that of another one before its owner hears of the loss.
TEST_F(ActorWorldTest, AnActorIsNotMadeAnewInAProcessThatIsKnownToBeDead) {
  ActorProfile profile = Quiet();
  profile.same_address = 1;
  Open(profile);
  const int actor = Spawned();
  world_->Kill(1);
  world_->Deaf(0, true);
  world_->Generation(/*replace=*/true);
  (void)world_->Call(0, actor, ActorTruth::kAdd, kMin);  // may have been sent
  EXPECT_TRUE(world_->RunUntil([&] { return Of(actor).alive == 1; }, kMin));
  Await(world_->Call(0, actor, ActorTruth::kAdd, kMin));
  world_->Deaf(0, false);
  Rest();
}

TEST_F(ActorWorldTest, AProcessThatIsCutOffAndGivenUpUndoesNothing) {
  Open();
  const int actor = Spawned(1, /*keep=*/true);
  Await(world_->Call(2, actor, ActorTruth::kAdd, kMin));
  world_->net.Cut({1});
  const size_t during = world_->Call(2, actor, ActorTruth::kAdd, kMin);
  const size_t there = world_->Call(1, actor, ActorTruth::kAdd, 10 * kSec);
  world_->Run(kSec);
  world_->GiveUp(1);
  world_->Generation(/*replace=*/false);
  Await(during);
  world_->net.Heal();
  Await(world_->Call(2, actor, ActorTruth::kAdd, kMin));
  Rest();
  EXPECT_NE(Call(there).code, absl::StatusCode::kOk);
}

}  // namespace
}  // namespace gtrain::sim
