// Actors that are found by their names.
#include "actors/exec/cluster.h"
#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

class ClusterNamesTest : public ClusterTest {
 protected:
  absl::StatusOr<ActorRef> SpawnNamed(int from, const std::string& name, int rank, int restarts = 3,
                                      const std::string& arguments = "") {
    Answers answers;
    SpawnOptions options;
    options.restarts = restarts;
    clusters_[from]->SpawnNamed(name, "Log", options, {.rank = rank}, arguments, kSoon, answers.Taker());
    const auto bytes = answers.Get();
    if (!bytes.ok()) return bytes.status();
    return ActorRef::Parse(*bytes);
  }
  absl::StatusOr<ActorRef> Find(int from, const std::string& name, const std::string& type = "Log") {
    Answers answers;
    clusters_[from]->Find(name, type, kSoon, answers.Taker());
    const auto bytes = answers.Get();
    if (!bytes.ok()) return bytes.status();
    return ActorRef::Parse(*bytes);
  }
};

TEST_F(ClusterNamesTest, EveryProcessFindsAnActorByItsName) {
  Open(3);
  EXPECT_TRUE(absl::IsNotFound(Find(2, "ps").status()));
  const auto actor = SpawnNamed(1, "ps", 2);
  ASSERT_TRUE(actor.ok()) << actor.status();
  for (const int from : {0, 1, 2}) {
    const auto found = Find(from, "ps");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, *actor);
    EXPECT_EQ(*Call(from, *found, 0, "x"), "x");
  }
  const auto second = SpawnNamed(2, "ps", 0);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_THAT(second.status().message(), HasSubstr("has the name 'ps'"));
  AwaitLooking([&] { return clusters_[0]->counts().actors == 0; });  // it has not stayed
  EXPECT_TRUE(absl::IsInvalidArgument(SpawnNamed(2, "a\nb", 0).status()));
}

TEST_F(ClusterNamesTest, ANameIsFreeWhenItsOwnerLetsItGo) {
  Open(3);
  const auto actor = SpawnNamed(1, "ps", 2);
  ASSERT_TRUE(actor.ok());
  clusters_[1]->End(*actor, "enough");
  AwaitLooking([&] { return absl::IsNotFound(Find(2, "ps").status()); });
  EXPECT_TRUE(SpawnNamed(2, "ps", 0).ok());
}

// Its owner hears of that, and who keeps the names asks when somebody wants the name.
TEST_F(ClusterNamesTest, TheNameOfAnActorThatHasEndedByItselfIsFree) {
  Open(3);
  const auto actor = SpawnNamed(1, "ps", 2, /*restarts=*/0);
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(Call(0, *actor, 2, "").status().code(), absl::StatusCode::kUnknown);  // it throws, and ends
  AwaitLooking([&] { return absl::IsNotFound(Find(0, "ps").status()); });
  const auto next = SpawnNamed(2, "ps", 0);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*Find(1, "ps"), *next);
}

TEST_F(ClusterNamesTest, WhoIsLostLosesItsNames_P4) {
  Open(3);
  ASSERT_TRUE(SpawnNamed(1, "lost", 2).ok());
  const auto kept = SpawnNamed(2, "moves", 1);
  ASSERT_TRUE(kept.ok());
  clusters_[1].reset();
  job_.Begin({0, 2});
  AwaitLooking([&] { return absl::IsNotFound(Find(2, "lost").status()); });
  EXPECT_TRUE(SpawnNamed(2, "lost", 0).ok());
  // The actor is elsewhere, and so says who finds it.
  AwaitLooking([&] {
    const auto found = Find(0, "moves");
    return found.ok() && found->at != kept->at && Call(0, *found, 0, "x").ok();
  });
}

// Names of actors that others own outlive the process that kept them.
TEST_F(ClusterNamesTest, AnotherDriverHasTheNamesOfThoseThatLive_P4) {
  Open(4);
  const auto actor = SpawnNamed(2, "ps", 3);
  ASSERT_TRUE(actor.ok());
  ASSERT_TRUE(SpawnNamed(0, "the driver's", 3).ok());
  clusters_[0].reset();
  job_.Begin({1, 2, 3});
  AwaitLooking([&] {
    const auto found = Find(3, "ps");
    return found.ok() && *found == *actor;
  });
  EXPECT_TRUE(absl::IsNotFound(Find(1, "the driver's").status()));
  EXPECT_TRUE(absl::IsAlreadyExists(SpawnNamed(1, "ps", 1).status()));
}

TEST_F(ClusterNamesTest, AnActorOfAnotherClassIsNotFoundByMistake) {
  Open(2);
  ASSERT_TRUE(SpawnNamed(0, "ps", 0).ok());
  ActorClass other = TypeOf(&world_, "other");
  other.name = "Other";
  ASSERT_TRUE(clusters_[1]->Register(other).ok());
  const auto found = Find(1, "ps", "Other");
  EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(found.status().message(), HasSubstr("is a Log, one, and not a Other, other"));
  EXPECT_TRUE(absl::IsNotFound(Find(1, "ps", "Unknown").status()));
}

// The owner of an actor that is being made anew answers those who look for it at once.
TEST_F(ClusterNamesTest, NobodyWaitsForAnActorThatIsBeingMade) {
  Open(3);
  const auto actor = SpawnNamed(0, "ps", 1, 3, "slow");
  ASSERT_TRUE(actor.ok());
  Gate(false);
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), true);
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[0]->processes() == 2 && clusters_[2]->processes() == 2; });
  for (const int from : {0, 2}) {
    const auto found = Find(from, "ps");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->id, actor->id);
  }
  EXPECT_TRUE(absl::IsAlreadyExists(SpawnNamed(0, "ps", 0).status()));
  Gate(true);
  EXPECT_TRUE(Call(2, *Find(2, "ps"), 0, "x").ok());
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), false);
}

// It does not know the names yet, and waits until the others have said them.
TEST_F(ClusterNamesTest, ANewDriverFindsAtOnceWhatLives_P4) {
  for (int i = 0; i < 5; ++i) {
    clusters_.clear();
    Open(4);
    const auto actor = SpawnNamed(2, "ps", 3);
    ASSERT_TRUE(actor.ok());
    FakeNet::Get().CutOff(NetworkOf(*clusters_[0]), true);
    job_.Begin({1, 2, 3});
    const auto turn = clusters_[1]->AwaitTurn();
    ASSERT_TRUE(turn.ok() && *turn);
    const auto found = Find(1, "ps");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, *actor);
    EXPECT_TRUE(absl::IsAlreadyExists(SpawnNamed(1, "ps", 1).status()));
    FakeNet::Get().CutOff(NetworkOf(*clusters_[0]), false);
  }
}

// Its rank is slow to hear who drives, and runs actors of that one already.
TEST_F(ClusterNamesTest, WhoDoesNotKnowWhoKeepsTheNamesWaits) {
  job_.Begin({0, 1});
  job_.Hold(1, true);
  std::vector<std::thread> joining;
  for (int i = 0; i < 2; ++i) Add(i, {}, joining);
  joining[0].join();
  Answers named, found, taken;
  clusters_[0]->SpawnNamed("ps", "Log", {}, {.rank = 0}, "", kSoon, named.Taker());
  ASSERT_TRUE(Spawn(0, 1).ok());  // it is there
  clusters_[1]->Find("ps", "Log", kSoon, found.Taker());
  clusters_[1]->Find("ps", "Log", absl::Milliseconds(20), taken.Taker());
  EXPECT_EQ(taken.Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  job_.Hold(1, false);
  joining[1].join();
  ASSERT_TRUE(named.Get().ok()) << named.Get().status();
  ASSERT_TRUE(found.Get().ok()) << found.Get().status();
  EXPECT_EQ(*found.Get(), *named.Get());
}

// A constructor that runs for longer than the cluster waits for it.
TEST_F(ClusterNamesTest, ANamedSpawnMayOutliveItsCluster) {
  Gate(false);
  HostOptions options;
  options.close_within = absl::Milliseconds(50);
  Answers made, alone;
  {
    Cluster cluster(options, clock_);
    ASSERT_TRUE(cluster.Register(TypeOf(&world_, "one")).ok());
    cluster.SpawnNamed("ps", "Log", {}, {}, "slow", kSoon, alone.Taker());
    Nap(20);
  }
  EXPECT_EQ(alone.Get().status().code(), absl::StatusCode::kCancelled);
  Open(2, options);
  clusters_[0]->SpawnNamed("ps", "Log", {}, {.rank = 0}, "slow", kSoon, made.Taker());
  Nap(20);
  clusters_.clear();
  EXPECT_EQ(made.Get().status().code(), absl::StatusCode::kCancelled);
  Gate(true);
  AwaitLooking([&] { return world_.alive == 0 && world_.made == 2; });
}

TEST_F(ClusterNamesTest, AProcessAloneHasNames) {
  Cluster alone({}, clock_);
  ASSERT_TRUE(alone.Register(TypeOf(&world_, "one")).ok());
  Answers made, found;
  alone.SpawnNamed("ps", "Log", {}, {}, "", kSoon, made.Taker());
  ASSERT_TRUE(made.Get().ok());
  alone.Find("ps", "Log", kSoon, found.Taker());
  EXPECT_EQ(*found.Get(), *made.Get());
}

TEST_F(ClusterNamesTest, WhoListsActorsSeesNamesAndOwners) {
  Open(3);
  ASSERT_TRUE(SpawnNamed(1, "ps/0", 2).ok());
  ASSERT_TRUE(Spawn(2, 2).ok());
  const std::string list = clusters_[2]->List("{}");
  EXPECT_THAT(list, HasSubstr("\"name\":\"ps/0\""));
  EXPECT_THAT(list, HasSubstr("\"owner\":1"));
  EXPECT_THAT(list, HasSubstr("\"owner\":2")) << "its own";
  EXPECT_THAT(list, HasSubstr("\"count\":2"));
  EXPECT_THAT(clusters_[2]->List(R"({"name":"ps/0"})"), HasSubstr("\"count\":1"));
  EXPECT_THAT(clusters_[0]->List("{}"), HasSubstr("\"count\":0"));
  EXPECT_THAT(clusters_[0]->List("no question"), HasSubstr("\"error\":"));
}

TEST_F(ClusterNamesTest, ALostActorIsAnEventWithBothRanks_P4) {
  Open(3);
  ASSERT_TRUE(SpawnNamed(0, "ps", 1).ok());
  clusters_[1].reset();
  job_.Begin({0, 2});
  AwaitLooking([&] { return !job_.notes().empty(); });
  EXPECT_THAT(job_.notes(), ::testing::ElementsAre(
                                "Log ps was lost with rank 1 (node-0); it was made anew on rank 1 (node-1)"));
}

// A caller finds a kept actor that was made anew before it hears of the loss: its calls have one numbering,
// or the ledger there would answer them as the ones of before.
TEST_F(ClusterNamesTest, AKeptActorIsFoundAgainBeforeTheLossIsHeard_P4) {
  Open(5);
  SpawnOptions options;
  options.restarts = 100;
  options.keep = true;
  Answers made;
  clusters_[0]->SpawnNamed("ps", "Log", options, {.rank = 2}, "x", kSoon, made.Taker());
  ASSERT_TRUE(made.Get().ok());
  const auto ref = Find(4, "ps");
  ASSERT_TRUE(ref.ok());
  EXPECT_EQ(*Call(4, *ref, 3, "a"), "xa");
  EXPECT_EQ(*Call(4, *ref, 3, "b"), "xab");
  job_.Hold(4, true);
  clusters_.erase(2);
  job_.Begin({0, 1, 3, 4});
  AwaitLooking([&] { return world_.made == 2; });
  absl::StatusOr<ActorRef> again = *ref;
  AwaitLooking([&] {
    again = Find(4, "ps");
    return again.ok() && !(again->at == ref->at);
  });
  Answers answers;
  for (const char* text : {"c", "d"}) clusters_[4]->Call(*again, 3, text, kSoon, answers.Taker());
  job_.Hold(4, false);
  answers.Await(2);
  EXPECT_EQ(*Call(4, *ref, 3, "e"), "xabcde");
  EXPECT_EQ(*Call(3, *Find(3, "ps"), 4, ""), "xabcde");
}

}  // namespace
}  // namespace gtrain::actors
