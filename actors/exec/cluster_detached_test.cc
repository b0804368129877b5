// Actors that are nobody's: they outlive the process that drives, and the next one that does finds them.
#include "actors/exec/cluster.h"
#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

class ClusterDetachedTest : public ClusterTest {
 protected:
  absl::StatusOr<ActorRef> Detached(int from, const std::string& name, std::optional<int> rank,
                                    bool keep = false, const std::string& arguments = "") {
    Answers answers;
    SpawnOptions options;
    options.restarts = 100;
    options.keep = keep;
    Placement placement;
    placement.rank = rank;
    clusters_[from]->SpawnDetached(name, "Log", options, placement, arguments, kSoon, answers.Taker());
    const auto bytes = answers.Get();
    if (!bytes.ok()) return bytes.status();
    return ActorRef::Parse(*bytes);
  }
  absl::StatusOr<ActorRef> Find(int from, const std::string& name) {
    Answers answers;
    clusters_[from]->Find(name, "Log", kSoon, answers.Taker());
    const auto bytes = answers.Get();
    if (absl::IsUnavailable(bytes.status())) return Find(from, name);  // it has not heard of the next driver
    if (!bytes.ok()) return bytes.status();
    return ActorRef::Parse(*bytes);
  }
  absl::Status End(int from, const ActorRef& ref) {
    Answers answers;
    clusters_[from]->EndDetached(ref, kSoon, answers.Taker());
    return answers.Get().status();
  }
  // Process 0 drove, and is gone.
  void LoseTheDriver(std::vector<int> left) {
    clusters_.erase(0);
    const int next = left[0];
    job_.Begin(std::move(left));
    AwaitLooking([&] { return clusters_[next]->drives(); });
  }
};

TEST_F(ClusterDetachedTest, ItIsOwnedByWhoDrivesAndEndedByAnybody) {
  Open(3);
  const auto actor = Detached(1, "ps", {});
  ASSERT_TRUE(actor.ok()) << actor.status();
  EXPECT_EQ(actor->owner_low, clusters_[0]->self().low);
  EXPECT_EQ(clusters_[0]->counts().actors, 0u);  // where it would be lost with its owner
  EXPECT_EQ(*Find(2, "ps"), *actor);
  EXPECT_EQ(*Call(2, *actor, 0, "a"), "a");
  EXPECT_TRUE(absl::IsAlreadyExists(Detached(2, "ps", {}).status()));
  EXPECT_TRUE(End(2, *actor).ok());
  EXPECT_TRUE(absl::IsNotFound(Find(1, "ps").status()));
  AwaitLooking([&] { return world_.alive == 0; });
  EXPECT_TRUE(absl::IsNotFound(End(2, *actor)));
  const auto owned = Spawn(1, 2);
  EXPECT_TRUE(absl::IsInvalidArgument(End(1, *owned)));
}

TEST_F(ClusterDetachedTest, TheNextDriverFindsItAsItWas_P4) {
  Open(4);
  const auto actor = Detached(0, "ps", 2, /*keep=*/false, "x");
  ASSERT_TRUE(actor.ok()) << actor.status();
  EXPECT_EQ(*Call(3, *actor, 3, "a"), "xa");
  LoseTheDriver({1, 2, 3});
  // As a driver begins: it looks for it before others may have said what they have.
  const auto found = Find(1, "ps");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->owner_low, clusters_[1]->self().low);
  EXPECT_EQ(*Call(1, *found, 3, "b"), "xab");
  EXPECT_EQ(*Call(3, *actor, 3, "c"), "xabc");  // by the reference of before
  EXPECT_EQ(world_.made, 1);
  EXPECT_TRUE(End(3, *actor).ok());
  AwaitLooking([&] { return world_.alive == 0; });
}

// Its process is lost after its owner is: who has the old reference asks the new owner.
TEST_F(ClusterDetachedTest, ItIsMadeAnewByTheNextOwner_P4) {
  Open(4);
  const auto actor = Detached(0, "ps", 2, /*keep=*/false, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(3, *actor, 3, "a"), "xa");
  LoseTheDriver({1, 2, 3});
  ASSERT_TRUE(Find(1, "ps").ok());
  clusters_.erase(2);
  job_.Begin({1, 3});
  // What had been sent to the process that is gone may have run there.
  absl::StatusOr<std::string> answer = absl::UnavailableError("");
  while (absl::IsUnavailable(answer.status())) answer = Call(3, *actor, 3, "b");
  EXPECT_EQ(*answer, "xb");
  EXPECT_EQ(world_.made, 2);
}

TEST_F(ClusterDetachedTest, WhatIsKeptIsKeptByTheNextOwner_P4) {
  Open(4);
  const auto actor = Detached(0, "ps", 2, /*keep=*/true, "x");
  ASSERT_TRUE(actor.ok()) << actor.status();
  EXPECT_EQ(*Call(3, *actor, 3, "a"), "xa");
  LoseTheDriver({1, 2, 3});
  EXPECT_EQ(*Call(3, *actor, 3, "b"), "xab");  // answered when the new owner has it
  ASSERT_TRUE(Find(1, "ps").ok());
  clusters_.erase(2);
  job_.Begin({1, 3});
  EXPECT_EQ(*Call(3, *actor, 3, "c"), "xabc");
  const auto found = Find(3, "ps");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*Call(1, *found, 3, "d"), "xabcd");
}

// The state of one that nobody calls is with the next owner, too.
TEST_F(ClusterDetachedTest, TheNextOwnerGetsTheStateWithoutACall) {
  Open(4);
  const auto actor = Detached(0, "ps", 2, /*keep=*/true, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(3, *actor, 3, "a"), "xa");
  {
    MutexLock lock(&world_.mutex);
    world_.saves = 1 << 20;
  }
  LoseTheDriver({1, 2, 3});
  ASSERT_TRUE(Find(1, "ps").ok());
  AwaitWorld([&] { return world_.saves < 1 << 20; });
  EXPECT_EQ(*Call(3, *actor, 4, ""), "xa");
  clusters_.erase(2);
  job_.Begin({1, 3});
  EXPECT_EQ(*Call(3, *actor, 4, ""), "xa");
}

TEST_F(ClusterDetachedTest, OneOwnerAfterAnother_P4) {
  Open(5);
  const auto actor = Detached(0, "ps", 4, /*keep=*/true, "x");
  ASSERT_TRUE(actor.ok());
  std::string state = "x";
  for (int driver = 1; driver <= 3; ++driver) {
    std::vector<int> left;
    for (int i = driver; i < 5; ++i) left.push_back(i);
    clusters_.erase(driver - 1);
    job_.Begin(left);
    const auto found = Find(4, "ps");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->owner_low, clusters_[driver]->self().low);
    state += "a";
    EXPECT_EQ(*Call(driver, *actor, 3, "a"), state);
  }
  EXPECT_EQ(world_.made, 1);
}

TEST_F(ClusterDetachedTest, InItsOwnersProcessItIsLostWithIt) {
  Open(3);
  const auto actor = Detached(1, "ps", 0);
  ASSERT_TRUE(actor.ok());
  LoseTheDriver({1, 2});
  EXPECT_TRUE(absl::IsNotFound(Find(2, "ps").status()));
  const auto called = Call(2, *actor, 0, "a");
  EXPECT_TRUE(absl::IsNotFound(called.status()) || absl::IsUnavailable(called.status())) << called.status();
  EXPECT_TRUE(Detached(2, "ps", 1).ok());
}

// The one that was offered it is lost before it answers: the next one is.
TEST_F(ClusterDetachedTest, ItIsOfferedUntilSomebodyOwnsIt_P4) {
  Open(4);
  const auto actor = Detached(0, "ps", 3, /*keep=*/false, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(2, *actor, 3, "a"), "xa");
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  LoseTheDriver({1, 2, 3});
  job_.Begin({2, 3});
  AwaitLooking([&] { return clusters_[2]->drives(); });
  const auto found = Find(2, "ps");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*Call(2, *found, 3, "b"), "xab");
  EXPECT_TRUE(absl::IsAlreadyExists(Detached(2, "ps", {}).status()));
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

// One that is still being made when its owner is lost has not got the name, whoever is offered first.
TEST_F(ClusterDetachedTest, OneThatNeverHadItsNameIsNotOffered_P4) {
  Open(4);
  const auto actor = Detached(0, "ps", 3, /*keep=*/true, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(1, *actor, 3, "a"), "xa");
  Gate(false);
  Answers second;
  clusters_[1]->SpawnDetached("ps", "Log", {}, {.rank = 2}, "slow", kSoon, second.Taker());
  AwaitLooking([&] { return clusters_[2]->counts().actors == 1; });
  clusters_.erase(0);
  Gate(true);
  AwaitLooking([&] { return world_.made == 2; });
  job_.Hold(3, true);
  job_.Begin({1, 2, 3});
  AwaitLooking([&] { return clusters_[1]->drives() && clusters_[2]->counts().actors == 0; });
  job_.Hold(3, false);
  const auto found = Find(1, "ps");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*Call(1, *found, 4, ""), "xa");
  EXPECT_EQ(*Call(1, *actor, 4, ""), "xa");
  EXPECT_FALSE(second.Get().ok());
}

// What it has is not with the new owner yet: then it ends, and nothing that somebody has heard of is undone.
TEST_F(ClusterDetachedTest, OneThatIsLostBeforeItsStateHasComeDoesNotGoBack) {
  Open(4);
  const auto actor = Detached(0, "ps", 2, /*keep=*/true, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(3, *actor, 3, "a"), "xa");
  Gate(false);
  Answers slow;
  clusters_[3]->Call(*actor, 1, "z", kSoon, slow.Taker());  // nothing is saved while it runs
  AwaitLooking([&] { return clusters_[2]->counts().begun == 1; });
  LoseTheDriver({1, 2, 3});
  ASSERT_TRUE(Find(1, "ps").ok());
  job_.Begin({1, 3});
  AwaitLooking([&] { return absl::IsNotFound(Find(1, "ps").status()); });
  Gate(true);
  const auto state = Call(3, *actor, 4, "");
  EXPECT_TRUE(absl::IsNotFound(state.status())) << state.status() << state.value_or("");
}

TEST_F(ClusterDetachedTest, OneThatEndsAsItIsOfferedLeavesNoName) {
  Open(4);
  Answers made;
  clusters_[0]->SpawnDetached("ps", "Log", {.restarts = 0}, {.rank = 2}, "x", kSoon, made.Taker());
  const ActorRef actor = *ActorRef::Parse(*made.Get());
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), true);
  LoseTheDriver({1, 2, 3});
  EXPECT_EQ(Call(3, actor, 2, "").status().code(), absl::StatusCode::kUnknown);  // it throws, and ends
  AwaitLooking([&] { return world_.alive == 0; });
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), false);
  AwaitLooking([&] { return absl::IsNotFound(Find(3, "ps").status()); });
  EXPECT_TRUE(Detached(3, "ps", 2).ok());
}

// A process that has never heard of the first owner goes on with the first reference, and by name, too.
TEST_F(ClusterDetachedTest, OldReferencesGoOnInNewProcesses_P4) {
  Open(4);
  const auto actor = Detached(0, "ps", 2, /*keep=*/true, "x");
  ASSERT_TRUE(actor.ok());
  LoseTheDriver({1, 2, 3});
  ASSERT_TRUE(Find(1, "ps").ok());
  job_.Begin({1, 2, 3, 5});
  std::vector<std::thread> joining;
  Add(5, {}, joining);
  for (std::thread& one : joining) one.join();
  EXPECT_EQ(*Call(5, *actor, 3, "a"), "xa");
  clusters_.erase(2);
  job_.Begin({1, 3, 5});
  const auto by_name = Find(5, "ps");
  ASSERT_TRUE(by_name.ok()) << by_name.status();
  EXPECT_EQ(*Call(5, *by_name, 3, "b"), "xab");  // its own answer, and not that of another call
  EXPECT_EQ(*Call(5, *actor, 3, "c"), "xabc");
  EXPECT_EQ(*Call(3, *actor, 4, ""), "xabc");
  EXPECT_TRUE(End(5, *actor).ok());
}

// Whoever ends it hears in time, also where some have still to say what they have.
TEST_F(ClusterDetachedTest, ItsEndHasADeadline) {
  Open(4);
  const auto actor = Detached(0, "ps", 3, /*keep=*/false, "x");
  ASSERT_TRUE(actor.ok());
  job_.Hold(3, true);
  LoseTheDriver({1, 2, 3});
  Answers ended;
  clusters_[1]->EndDetached(*actor, absl::Milliseconds(100), ended.Taker());
  EXPECT_TRUE(absl::IsDeadlineExceeded(ended.Get().status()));
  job_.Hold(3, false);
}

// Which reference one has, and what it knows, is no matter: its owner decides what is detached.
TEST_F(ClusterDetachedTest, AReferenceDoesNotMakeAnActorDetached) {
  Open(3);
  auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  actor->flags |= ActorRef::kDetached;
  EXPECT_TRUE(absl::IsInvalidArgument(End(2, *actor)));
  EXPECT_TRUE(Call(2, *actor, 0, "a").ok());
}

// ---- endings, groups that are apart, several calls at a time

TEST_F(ClusterDetachedTest, TheOwnerHearsWhyAnActorEnded) {
  Open(3);
  for (const int rank : {0, 1}) {
    const auto actor = Spawn(0, rank, "", kSoon, /*restarts=*/0);
    ASSERT_TRUE(actor.ok());
    Answers watch, other;
    clusters_[0]->Watch(*actor, watch.Taker());
    clusters_[2]->Watch(*actor, other.Taker());
    EXPECT_TRUE(absl::IsFailedPrecondition(other.Get().status()));
    (void)Call(0, *actor, 2, "");  // it throws
    const auto why = watch.Get();
    ASSERT_TRUE(why.ok()) << why.status();
    EXPECT_THAT(*why, HasSubstr("it threw 1 times"));
    Answers late;
    clusters_[0]->Watch(*actor, late.Taker());
    EXPECT_EQ(*late.Get(), *why);
  }
  const auto lost = Spawn(0, 2, "", kSoon, /*restarts=*/0), ended = Spawn(0, 1);
  Answers of_lost, of_ended;
  clusters_[0]->Watch(*lost, of_lost.Taker());
  clusters_[0]->Watch(*ended, of_ended.Taker());
  clusters_[0]->End(*ended, "its owner let it go");
  EXPECT_TRUE(absl::IsCancelled(of_ended.Get().status()));
  clusters_.erase(2);
  job_.Begin({0, 1});
  EXPECT_THAT(*of_lost.Get(), HasSubstr("its process was lost"));
}

TEST_F(ClusterDetachedTest, WhatIsApartIsInPlacesOfItsOwnOrNowhere) {
  Open(4);  // on two machines
  const auto apart = [&](uint64_t group, Spread spread) {
    Answers answers;
    Placement placement;
    placement.spread = spread;
    placement.apart = group;
    clusters_[0]->Spawn("Log", {}, placement, "", kSoon, answers.Taker());
    const auto bytes = answers.Get();
    return bytes.ok() ? ActorRef::Parse(*bytes) : bytes.status();
  };
  std::set<uint64_t> processes;
  for (int i = 0; i < 4; ++i) processes.insert(apart(1, Spread::kProcesses)->at.host_low);
  EXPECT_EQ(processes.size(), 4u);
  EXPECT_THAT(apart(1, Spread::kProcesses).status().message(), HasSubstr("it has 4 processes now"));
  std::vector<ActorRef> second;
  for (int i = 0; i < 2; ++i) second.push_back(*apart(2, Spread::kNodes));
  EXPECT_TRUE(absl::IsFailedPrecondition(apart(2, Spread::kNodes).status()));
  clusters_[0]->End(second[0], "it makes room");
  EXPECT_TRUE(apart(2, Spread::kNodes).ok());
}

TEST_F(ClusterDetachedTest, SeveralCallsRunAtATime) {
  HostOptions host;
  host.threads = 4;
  Open(2, host);
  SpawnOptions options;
  options.concurrency = 3;
  Answers made;
  clusters_[0]->Spawn("Log", options, {.rank = 1}, "", kSoon, made.Taker());
  const ActorRef actor = *ActorRef::Parse(*made.Get());
  Gate(false);
  Answers answers;
  for (int i = 0; i < 5; ++i) clusters_[0]->Call(actor, 1, "x", kSoon, answers.Taker());
  AwaitLooking([&] { return clusters_[1]->counts().begun == 3 && clusters_[1]->counts().waiting == 2; });
  Gate(true);
  EXPECT_EQ(answers.Await(5).size(), 5u);
  EXPECT_EQ(world_.Count(), 5u);
  options.keep = true;
  Answers refused;
  clusters_[0]->Spawn("Log", options, {.rank = 1}, "", kSoon, refused.Taker());
  EXPECT_TRUE(absl::IsInvalidArgument(refused.Get().status()));
}

}  // namespace
}  // namespace gtrain::actors
