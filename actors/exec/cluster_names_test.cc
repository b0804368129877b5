// Actors that are found by their names.
#include "actors/exec/cluster.h"
#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

class ClusterNamesTest : public ClusterTest {
 protected:
  absl::StatusOr<ActorRef> SpawnNamed(int from, const std::string& name, int rank, int restarts = 3) {
    Answers answers;
    SpawnOptions options;
    options.restarts = restarts;
    clusters_[from]->SpawnNamed(name, "Log", options, {.rank = rank}, "", kSoon, answers.Taker());
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

TEST_F(ClusterNamesTest, AProcessAloneHasNames) {
  Cluster alone({}, clock_);
  ASSERT_TRUE(alone.Register(TypeOf(&world_, "one")).ok());
  Answers made, found;
  alone.SpawnNamed("ps", "Log", {}, {}, "", kSoon, made.Taker());
  ASSERT_TRUE(made.Get().ok());
  alone.Find("ps", "Log", kSoon, found.Taker());
  EXPECT_EQ(*found.Get(), *made.Get());
}

}  // namespace
}  // namespace gtrain::actors
