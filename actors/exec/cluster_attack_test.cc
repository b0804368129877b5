// What attacks on clusters of actors found, so that it stays mended.
#include "actors/exec/cluster.h"
#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

// a parameter server: readers hear the state, then a change.
TEST_F(ClusterTest, ReadersOfALargeStateLeaveAKeptActorAlone) {
  Open(6);
  const auto actor = SpawnKept(0, 1, std::string(16 << 20, 'w'));
  ASSERT_TRUE(actor.ok());
  for (int from : {0, 2, 3, 4, 5})
    EXPECT_TRUE(Call(from, *actor, 4, "").ok());  // const; each is answered and done
  EXPECT_TRUE(Call(0, *actor, 0, "x").ok());
  Nap(300);
  const auto after = Call(2, *actor, 4, "");
  EXPECT_TRUE(after.ok()) << after.status();
}

// a Task's answer is told behind the save that has its effect.
TEST_F(ClusterTest, AnAsyncCallOfAKeptActorRunsOnce) {
  for (int round = 0; round < 5; ++round) {
    Open(3);
    const auto actor = SpawnKept(0, 1, "");
    ASSERT_TRUE(actor.ok());
    {
      MutexLock lock(&world_.mutex);
      world_.async_gate = false;
      world_.saves = 1;
    }
    Answers x, wrong;
    clusters_[2]->Call(*actor, 5, "X", kSoon, x.Taker());
    AwaitLooking([&] { return clusters_[1]->counts().begun == 1; });
    clusters_[2]->Call(*actor, 77, "", kSoon, wrong.Taker());  // answered at once, and asks for a save
    Nap(50);
    {
      MutexLock lock(&world_.mutex);
      world_.async_gate = true;
    }
    EXPECT_FALSE(wrong.Get().ok());  // the first record is at the owner
    FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
    job_.Begin({0, 2});
    AwaitLooking([&] { return clusters_[2]->processes() == 2 && clusters_[2]->counts().actors == 1; });
    {
      MutexLock lock(&world_.mutex);
      world_.saves = 1 << 30;
    }
    EXPECT_TRUE(x.Get().ok());
    const std::string state = *Call(0, *actor, 4, "");
    EXPECT_EQ(state, "X") << "round " << round;
    FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
    clusters_.clear();
  }
}

// P is lost to its owner, lives on, and C has not heard of it.
TEST_F(ClusterTest, NothingIsHeardOfALostProcessThatLives) {
  Open(4);
  const auto actor = SpawnKept(0, 1, "");
  ASSERT_TRUE(actor.ok());
  job_.Deaf(1, true);
  job_.Hold(2, true);
  job_.Begin({0, 2, 3});
  AwaitLooking([&] { return clusters_[3]->counts().actors == 1 || clusters_[2]->counts().actors == 1; });
  const auto heard = Call(2, *actor, 3, "X", absl::Seconds(5));
  job_.Hold(2, false);
  const auto state = Call(0, *actor, 4, "", absl::Seconds(5));
  if (heard.ok()) {
    EXPECT_EQ(state.value_or("-"), "X");
  }
  job_.Deaf(1, false);
}

// more than 1,024 kept actors of one process have something to keep.
TEST_F(ClusterTest, ThousandsOfKeptActorsSaveAtOnce) {
  Open(3);
  constexpr int kActors = 3000;
  const std::vector<ActorRef> all = SpawnMany(kActors, /*keep=*/true);
  Answers answers;
  for (const ActorRef& one : all) clusters_[2]->Call(one, 3, "a", kSoon, answers.Taker());
  for (const auto& one : answers.Await(kActors)) EXPECT_TRUE(one.status.ok()) << one.status;
  Answers again;
  for (const ActorRef& one : all) clusters_[2]->Call(one, 4, "", kSoon, again.Taker());
  for (const auto& one : again.Await(kActors)) EXPECT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(clusters_[1]->counts().actors, static_cast<size_t>(kActors));
}

// what was heard is undone.
TEST_F(ClusterTest, ThousandsThatWereHeardAreKept) {
  Open(3);
  constexpr int kActors = 3000;
  const std::vector<ActorRef> all = SpawnMany(kActors, /*keep=*/true);
  Answers answers;
  for (const ActorRef& one : all) clusters_[2]->Call(one, 3, "a", kSoon, answers.Taker());
  int heard = 0;
  for (const auto& one : answers.Await(kActors)) heard += one.status.ok() && one.result == "a";
  Nap(500);
  job_.Begin({0, 2});
  AwaitLooking([&] {
    return clusters_[2]->processes() == 2 &&
           clusters_[2]->counts().actors + clusters_[0]->counts().actors == kActors;
  });
  std::map<std::string, int> states;
  for (const ActorRef& one : all) {
    const auto state = Call(0, one, 4, "");
    ++states[state.ok() ? "'" + *state + "'" : std::string(state.status().ToString().substr(0, 60))];
  }
  EXPECT_EQ(states["'a'"], heard);
}

// more than 1,024 actors of one owner are lost, whom another has called.
TEST_F(ClusterTest, ThousandsAreLocated) {
  Open(4);
  constexpr int kActors = 3000;
  const std::vector<ActorRef> all = SpawnMany(kActors, /*keep=*/true);
  for (int i = 0; i < kActors; i += 500) {
    Answers called;
    for (int k = 0; k < 500; ++k)
      clusters_[2]->Call(all[static_cast<size_t>(i + k)], 4, "", kSoon, called.Taker());
    called.Await(500);
  }
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  job_.Begin({0, 2, 3});
  AwaitLooking([&] {
    return clusters_[2]->counts().actors + clusters_[3]->counts().actors + clusters_[0]->counts().actors ==
           kActors;
  });
  std::map<std::string, int> errors;
  for (int i = 0; i < kActors; i += 500) {
    Answers again;
    for (int k = 0; k < 500; ++k)
      clusters_[2]->Call(all[static_cast<size_t>(i + k)], 4, "", kSoon, again.Taker());
    for (const auto& one : again.Await(500)) ++errors[std::string(one.status.ToString().substr(0, 40))];
  }
  EXPECT_EQ(errors["OK"], kActors);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

// the window of the process itself is full as an actor is to be made anew, or ends.
TEST_F(ClusterTest, SpawnsUnderWayLoseNothing) {
  Open(3);
  const auto actor = Spawn(0, 1, "", kSoon, 100, true), ends = Spawn(0, 2, "e");
  ASSERT_TRUE(actor.ok() && ends.ok());
  EXPECT_TRUE(Call(0, *actor, 3, "a").ok());
  Gate(false);
  Answers spawns;
  for (int i = 0; i < 1024; ++i) clusters_[0]->Spawn("Log", {}, {.rank = 2}, "slow", kSoon, spawns.Taker());
  Nap(200);
  clusters_[0]->End(*ends, "done");
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[0]->processes() == 2; });
  Nap(300);
  Gate(true);
  spawns.Await(1024);
  const auto state = Call(0, *actor, 4, "", absl::Seconds(5));
  EXPECT_TRUE(state.ok());
  Nap(1000);
  const auto ended = Call(0, *ends, 4, "", absl::Seconds(5));
  EXPECT_FALSE(ended.ok());
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

// the answer to a spawn and the loss of its process are heard together.
TEST_F(ClusterTest, OneThatIsSpawnedAsItsProcessIsLostIsMadeAnew) {
  Open(3);
  const auto other = Spawn(0, 1, "o");
  ASSERT_TRUE(other.ok());
  Gate(false);
  Answers spawned;
  clusters_[0]->Spawn("Log", {}, {.rank = 1}, "slow", kSoon, spawned.Taker());
  AwaitLooking([&] { return clusters_[1]->counts().actors == 2; });
  Nap(50);
  std::atomic<bool> in = false, out = false;
  clusters_[0]->Call(*other, 4, "", kSoon, [&](const absl::Status&, absl::string_view) {
    in = true;
    while (!out) Nap(1);
  });
  AwaitLooking([&] { return in.load(); });
  Gate(true);
  Nap(100);
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[0]->processes() == 2; });
  Nap(300);
  out = true;
  const auto ref = spawned.Get();
  ASSERT_TRUE(ref.ok()) << ref.status();
  const auto called = Call(0, *ActorRef::Parse(*ref), 0, "x", absl::Seconds(10));
  EXPECT_TRUE(called.ok()) << called.status();
}

// what is told that the cluster is closed spawns.
TEST_F(ClusterTest, ASpawnAsTheClusterClosesIsRefused) {
  Open(2);
  const auto actor = Spawn(0, 1, "");
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Cluster* const cluster = clusters_[0].get();
  Answers spawned;
  cluster->Call(*actor, 1, "", kSoon, [&](const absl::Status&, absl::string_view) {
    cluster->Spawn("Log", {}, {.rank = 1}, "", kSoon, spawned.Taker());
  });
  AwaitLooking([&] { return clusters_[1]->counts().begun == 1; });
  clusters_.erase(0);
  EXPECT_FALSE(spawned.Get().ok());
}

TEST_F(ClusterTest, AKeptActorThatCameHomeKeepsWhatWasHeard) {
  Open(2);
  const auto actor = SpawnKept(0, 1, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(0, *actor, 3, "a"), "xa");
  job_.Begin({0});
  AwaitLooking([&] { return clusters_[0]->counts().actors == 1; });
  for (const char* what : {"b", "c", "d"}) EXPECT_TRUE(Call(0, *actor, 3, what).ok());
  EXPECT_EQ(*Call(0, *actor, 4, ""), "xabcd");
  Call(0, *actor, 2, "").IgnoreError();
  EXPECT_EQ(*Call(0, *actor, 4, ""), "xabcd");
}

TEST_F(ClusterTest, WhatIsTooLargeToBeMadeAnewIsNotKept) {
  Open(2);
  const auto large = SpawnKept(0, 1, std::string(kKeptArgumentsMax + 1, 'x'));
  EXPECT_EQ(large.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClusterTest, DeadCallersAreNotInTheRecord) {
  Open(8);
  const auto actor = SpawnKept(0, 1, "");
  ASSERT_TRUE(actor.ok());
  std::vector<int> alive = {0, 1, 2, 3, 4, 5, 6, 7};
  while (alive.size() > 2) {
    EXPECT_TRUE(Call(alive[2], *actor, 0, std::string(20 << 20, 'a')).ok());
    for (const int i : {1, 2})
      FakeNet::Get().CutOff(clusters_[alive[static_cast<size_t>(i)]]->endpoint(), true);
    alive.erase(alive.begin() + 1, alive.begin() + 3);
    job_.Begin(alive);
    AwaitLooking([&] { return clusters_[alive[1]]->counts().actors == 1; });
  }
  EXPECT_TRUE(Call(0, *actor, 0, std::string(20 << 20, 'a')).ok());
  Nap(500);
  const auto after = Call(0, *actor, 4, "", absl::Seconds(10));
  EXPECT_TRUE(after.ok()) << after.status();
  for (auto& [process, cluster] : clusters_) FakeNet::Get().CutOff(cluster->endpoint(), false);
}

TEST_F(ClusterTest, ANewProcessFindsActorsThatWereMadeAnew) {
  Open(3);
  const auto actor = Spawn(0, 1, ""), kept = SpawnKept(0, 1, "");
  ASSERT_TRUE(actor.ok() && kept.ok());
  std::vector<std::thread> joining;
  job_.Begin({0, 3, 2});
  Add(3, {}, joining);
  for (std::thread& one : joining) one.join();
  for (const int from : {0, 2}) AwaitLooking([&] { return Call(from, *actor, 0, "x").ok(); });
  for (const ActorRef& ref : {*actor, *kept}) {
    const auto called = Call(3, ref, 0, "x", absl::Seconds(20));  // it is in this very process
    EXPECT_TRUE(called.ok()) << called.status();
  }
}

// the owner has not heard yet that the process is lost, and says that the actor is there.
TEST_F(ClusterTest, ANewProcessHearsOfTheLossBeforeTheOwner) {
  for (const bool keep : {false, true}) {
    Open(3);
    const auto actor = Spawn(0, 1, "", kSoon, 3, keep);
    ASSERT_TRUE(actor.ok());
    job_.Hold(0, true);
    FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
    std::vector<std::thread> joining;
    job_.Begin({0, 3, 2});
    Add(3, {}, joining);
    for (std::thread& one : joining) one.join();
    Answers called;
    clusters_[3]->Call(*actor, 0, "x", absl::Seconds(10), called.Taker());
    Nap(200);  // in which the owner says where it was
    job_.Hold(0, false);
    const auto heard = called.Get();
    EXPECT_TRUE(heard.ok()) << heard.status();
    FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
    clusters_.clear();
  }
}

// an owner is asked for a place that is not known yet, answers when the actor is elsewhere, and so never;
// behind an open question there is room for 1,023 others.
TEST_F(ClusterTest, WhoWasToldOfANewProcessAsksItsOwnerOn) {
  Open(3);
  job_.Hold(2, true);
  std::vector<std::thread> joining;
  job_.Begin({0, 1, 2, 3});
  Add(3, {}, joining);
  for (std::thread& one : joining) one.join();
  AwaitLooking([&] { return clusters_[0]->processes() == 4; });
  const auto actor = Spawn(0, 3);
  ASSERT_TRUE(actor.ok());
  Answers called;
  clusters_[2]->Call(*actor, 0, "x", kSoon, called.Taker());
  Nap(100);  // in which the owner says where it is
  job_.Hold(2, false);
  EXPECT_TRUE(called.Get().ok());
  for (size_t i = 0; i < kCallsInWindow + 1; ++i) {
    const auto other = Spawn(2, 0, "", absl::Seconds(10));
    ASSERT_TRUE(other.ok()) << i << " " << other.status();
  }
}

TEST_F(ClusterTest, StressOfAKeptActor) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Open(4, {.mailbox_calls = 8});
    const auto actor = SpawnKept(0, 2);
    ASSERT_TRUE(actor.ok()) << actor.status();
    FakeNet::Get().BreakOften(200, seed);
    constexpr int kCalls = 1500;
    std::map<int, Answers> answers;
    std::vector<std::thread> callers;
    for (const int from : {0, 1}) {
      Answers& heard = answers[from];
      callers.emplace_back([&, from] {
        Rng rng(seed * 7 + static_cast<uint64_t>(from));
        for (int i = 0; i < kCalls; ++i) {
          const bool throws = rng.Below(60) == 0, reads = rng.Below(6) == 0;
          clusters_[from]->Call(
              *actor,
              throws  ? 2
              : reads ? 4
                      : 3,
              absl::StrCat(from, ".", i, " "),
              rng.Below(3) == 0 ? absl::Milliseconds(1 + static_cast<int>(rng.Below(30))) : kSoon,
              heard.Taker(i));
          if (i % 20 == 19) heard.Await(static_cast<size_t>(i) + 1);
        }
      });
    }
    std::vector<int> others = {2, 3};
    for (int next = 4; next < 10; ++next) {
      Nap(static_cast<int>(30 + seed * 10));
      const int lost = others[0];
      FakeNet::Get().CutOff(clusters_[lost]->endpoint(), true);
      others = {others[1], next};
      std::vector<std::thread> joining;
      job_.Begin({0, 1, others[0], others[1]});
      Add(next, {.mailbox_calls = 8}, joining);
      for (std::thread& one : joining) one.join();
    }
    for (std::thread& one : callers) one.join();
    FakeNet::Get().BreakOften(0, 1);
    const auto state = Call(1, *actor, 4, "");
    ASSERT_TRUE(state.ok()) << state.status();
    std::map<std::string, int> times;
    std::map<char, int> last = {{'0', -1}, {'1', -1}};
    for (const absl::string_view word : absl::StrSplit(*state, ' ', absl::SkipEmpty())) {
      if (++times[std::string(word)] > 1) ADD_FAILURE() << "twice: " << word << " seed " << seed;
      const int n = std::atoi(std::string(word.substr(2)).c_str());
      if (n <= last[word[0]]) ADD_FAILURE() << "order: " << word << " seed " << seed;
      last[word[0]] = n;
    }
    for (const int from : {0, 1}) {
      for (const auto& one : answers[from].Await(kCalls)) {
        const std::string word = absl::StrCat(from, ".", one.which);
        // what was heard is a state that has this word at its end
        if (one.status.ok() && !one.result.empty() && one.result.size() > word.size() &&
            one.result.substr(one.result.size() - word.size() - 1) == word + " " && times[word] != 1)
          ADD_FAILURE() << "heard and not there: " << word << " " << times[word] << " seed " << seed;
        if (one.status.ok() && state->compare(0, one.result.size(), one.result) != 0)
          ADD_FAILURE() << "a state was heard that is none before: " << word << " seed " << seed;
        if (absl::IsAborted(one.status) && times[word] != 0)
          ADD_FAILURE() << "aborted and there: " << word << " seed " << seed;
      }
    }
    for (auto& [process, cluster] : clusters_) FakeNet::Get().CutOff(cluster->endpoint(), false);
    clusters_.clear();
  }
}

// a call is given up before it was ever sent, and then its answer has no state to wait for.
TEST_F(ClusterTest, WhatWasGivenUpHoldsNoReaderOfAKeptActor) {
  Open(3);
  const auto actor = SpawnKept(0, 1, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(2, *actor, 3, "a"), "xa");
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  const auto given_up = Call(2, *actor, 3, "b", absl::Milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(given_up.status())) << given_up.status();
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
  const auto state = Call(2, *actor, 4, "", absl::Seconds(10));
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(*state, "xa");
}

// ranks are given anew, and the owner has the rank where the actor was.
TEST_F(ClusterTest, AKeptActorMovesToOthersThanItsOwner) {
  Open(4);
  const auto actor = SpawnKept(2, 1, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(0, *actor, 3, "a"), "xa");
  job_.Begin({0, 2, 3});
  AwaitLooking([&] { return clusters_[2]->processes() == 3 && Call(0, *actor, 3, "b").ok(); });
  EXPECT_EQ(clusters_[2]->counts().actors, 0u);
  Call(0, *actor, 2, "").IgnoreError();
  EXPECT_EQ(*Call(0, *actor, 4, ""), "xabb");  // it was looked twice
}

// a caller that counts as lost lives on, and its connection breaks.
TEST_F(ClusterTest, ACallOfALostCallerRunsOnce) {
  Open(3);
  const auto actor = Spawn(0, 1, "");
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Answers answers;
  clusters_[2]->Call(*actor, 1, "once", absl::Seconds(3), answers.Taker());
  AwaitLooking([&] { return clusters_[1]->counts().begun == 1; });
  job_.Deaf(2, true);
  job_.Begin({0, 1});
  AwaitLooking([&] { return clusters_[1]->processes() == 2; });
  Nap(200);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
  Nap(300);
  Gate(true);
  EXPECT_EQ(answers.Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  Nap(200);
  EXPECT_EQ(world_.Count(), 1u);
  job_.Deaf(2, false);
}

TEST_F(ClusterTest, OwnerAndHostAreLost) {
  Open(4);
  const auto actor = SpawnKept(0, 1, ""), plain = Spawn(0, 1, "");
  ASSERT_TRUE(actor.ok() && plain.ok());
  EXPECT_TRUE(Call(2, *actor, 3, "a").ok());
  EXPECT_TRUE(Call(2, *plain, 0, "a").ok());
  FakeNet::Get().CutOff(clusters_[0]->endpoint(), true);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  job_.Begin({2, 3});
  AwaitLooking([&] { return clusters_[2]->processes() == 2; });
  Nap(300);
  const auto one = Call(2, *actor, 3, "b", absl::Seconds(5)), two = Call(2, *plain, 0, "b", absl::Seconds(5));
  EXPECT_EQ(one.status().code(), absl::StatusCode::kNotFound) << one.status();
  EXPECT_EQ(two.status().code(), absl::StatusCode::kNotFound) << two.status();
  FakeNet::Get().CutOff(clusters_[0]->endpoint(), false);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

// what threw too often has ended, and comes back when its process is lost.
TEST_F(ClusterTest, AnEndedActorStaysSo) {
  Open(3);
  const auto actor = Spawn(0, 1, "x", kSoon, 1), kept = Spawn(0, 1, "k", kSoon, 1, true);
  ASSERT_TRUE(actor.ok() && kept.ok());
  for (const ActorRef& ref : {*actor, *kept}) {
    EXPECT_TRUE(Call(2, ref, 3, "a").ok());
    for (int i = 0; i < 2; ++i) Call(2, ref, 2, "").IgnoreError();
    AwaitLooking([&] { return absl::IsNotFound(Call(2, ref, 4, "").status()); });
  }
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[2]->processes() == 2; });
  Nap(300);
  for (const ActorRef& ref : {*actor, *kept}) {
    const auto after = Call(2, ref, 4, "", absl::Seconds(5));
    EXPECT_TRUE(absl::IsNotFound(after.status())) << "it lives: " << after.value_or("-") << after.status();
  }
}

TEST_F(ClusterTest, VeryLongDeadline) {
  Open(2);
  const auto actor = Spawn(0, 1, "x"), here = Spawn(0, 0, "x");
  ASSERT_TRUE(actor.ok() && here.ok());
  EXPECT_TRUE(Call(0, *actor, 4, "", absl::Nanoseconds(INT64_MAX)).ok())
      << Call(0, *actor, 4, "", absl::Nanoseconds(INT64_MAX)).status();
  EXPECT_TRUE(Call(0, *here, 4, "", absl::Nanoseconds(INT64_MAX)).ok())
      << Call(0, *here, 4, "", absl::Nanoseconds(INT64_MAX)).status();
}

// an answer is lost with its connection, and then the actor ends.
TEST_F(ClusterTest, ACallWhoseAnswerIsLostAsItsActorEndsRunsOnce) {
  Open(3);
  const auto actor = Spawn(0, 1, "x");
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Answers answer;
  clusters_[2]->Call(*actor, 1, "ran", kSoon, answer.Taker());
  AwaitLooking([&] { return clusters_[1]->counts().begun == 1; });
  // the connection of 2 breaks, the call ends, its owner ends the actor, 2 is there again
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  Gate(true);
  AwaitLooking([&] { return world_.Count() == 1; });
  Nap(50);
  clusters_[0]->End(*actor, "done");
  Nap(50);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
  // Which of the two comes first is open; nothing runs again.
  const auto heard = answer.Get();
  EXPECT_TRUE(heard.ok() || absl::IsNotFound(heard.status())) << heard.status();
  EXPECT_EQ(world_.Count(), 1u);
}

// the owner is away for a minute; the actor throws as it is asked for its state again.
TEST(ClusterParts, WhatIsAbortedIsNotThere) {
  std::map<std::pair<uint64_t, uint64_t>, int> done;
  int saves = 0;
  std::string record;
  IncomingCalls::Functions f;
  f.call = [](uint64_t, int, std::string&, absl::Duration, Reply& reply) {
    reply = nullptr;
    return true;
  };
  f.lives = [](uint64_t) { return true; };
  f.reply = [](const CallerId&, uint64_t, uint64_t, bool) {
    return [](const absl::Status&, absl::string_view) {};
  };
  f.constant = [](uint64_t, int) { return false; };
  f.save = [&](uint64_t, bool) { ++saves; };
  f.keep = [&](uint64_t, const CallerId&, uint64_t, const std::string& r) { record = r; };
  f.end = [](uint64_t, const std::string&) {};
  const CallerId own{1, 1}, owner{2, 2}, caller{3, 3};
  IncomingCalls in(own, 100, f);
  in.Keep(1, owner, 1, {}, /*detached=*/false);
  std::string message;
  AppendFrame(HelloFrame{caller, own}, &message);
  for (uint64_t n : {1, 2}) {
    CallFrame call;
    call.actor = 1;
    call.number = n;
    call.timeout_ms = 100000;
    AppendFrame(call, &message);
  }
  port::Route route;
  route.id = "r";
  ASSERT_TRUE(in.OnMessage(route, message).ok());
  in.Done(caller, 1, 1, true, absl::OkStatus(), "A");  // A has run
  in.Saved(1, absl::OkStatus(), "state with A");       // the host goes back to this when it throws
  in.Kept(
      1, absl::DeadlineExceededError("the owner is away"));  // so its state is asked for again: behind call 2
  in.Done(caller, 1, 2, true, absl::UnknownError("threw"), "");  // which throws: the state is "state with A"
  in.Undone(1);
  in.Saved(1, absl::OkStatus(), "state with A");
  const KeptRecord kept = *ParseRecord(record);
  ASSERT_EQ(kept.callers.size(), 1u);
  EXPECT_EQ(kept.callers[0].answers[0].second[0], '\0');
}

// a peer asks a hundred times for an answer of 1 MiB, and reads nothing.
TEST(ClusterParts, WhoAsksAgainAndDoesNotReadFillsNoMemory) {
  IncomingCalls::Functions f;
  f.call = [](uint64_t, int, std::string&, absl::Duration, Reply& reply) {
    reply = nullptr;
    return true;
  };
  f.lives = [](uint64_t) { return true; };
  f.reply = [](const CallerId&, uint64_t, uint64_t, bool) {
    return [](const absl::Status&, absl::string_view) {};
  };
  f.constant = [](uint64_t, int) { return false; };
  const CallerId own{1, 1}, caller{3, 3};
  IncomingCalls in(own, 100, f);
  port::Route route;
  route.id = "r";
  std::string hello, again;
  AppendFrame(HelloFrame{caller, own}, &hello);
  CallFrame call;
  call.actor = 1;
  call.number = 1;
  call.timeout_ms = 100000;
  AppendFrame(call, &again);
  ASSERT_TRUE(in.OnMessage(route, hello).ok());
  ASSERT_TRUE(in.OnMessage(route, again).ok());
  in.Done(caller, 1, 1, true, absl::OkStatus(), std::string(1 << 20, 'x'));
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(in.OnMessage(route, again).ok());
  size_t bytes = 0;
  const auto send = [&](const port::Route&, absl::string_view message) {
    bytes += message.size();
    return absl::OkStatus();
  };
  EXPECT_FALSE(in.Flush(send));
  EXPECT_GE(bytes, size_t{16} << 20);
  EXPECT_LE(bytes, size_t{18} << 20);

  // It reads again, and has its answer.
  bytes = 0;
  ASSERT_TRUE(in.OnMessage(route, again).ok());
  EXPECT_FALSE(in.Flush(send));
  EXPECT_GE(bytes, size_t{1} << 20);
}

// to be made anew takes a minute, once.
TEST(ClusterParts, OneThatIsMadeAnewTooSlowlyIsTriedAgain) {
  RealClock clock;
  OwnedActors::Functions f;
  std::vector<std::pair<absl::Duration, Reply>> making;
  f.pick = [](const Placement&, const std::map<CallerId, size_t>&) -> absl::StatusOr<CallerId> {
    return CallerId{2, 2};
  };
  f.make = [&](const CallerId&, const OwnedActors::Spec&, absl::Duration timeout, Reply reply) {
    making.emplace_back(timeout, std::move(reply));
  };
  f.end = [](const ActorAddress&, const std::string&) {};
  OwnedActors owned({1, 1}, f, clock);
  OwnedActors::Spec spec;
  spec.options.keep = true;
  spec.options.restarts = 100;
  owned.Spawn(spec, absl::Minutes(10), [](const absl::Status&, absl::string_view) {});
  making[0].second(absl::OkStatus(), ActorAddress{2, 2, 1}.Pack());
  owned.ProcessLost({2, 2});
  ASSERT_EQ(making.size(), 2u);
  making[1].second(absl::DeadlineExceededError("there is no connection to rank 2"), "");
  EXPECT_EQ(owned.size(), 1u);
}

TEST(ClusterParts, TheLedgerDoesNotRunWhatItsRecordHasAnswered) {
  CallLedger ledger(10, {CallerRecord{{1, 1}, 0, {{5, "answer"}}}});
  EXPECT_EQ(ledger.Offer({1, 1}, 5, 4).what, Admission::kAnswered);
}

}  // namespace
}  // namespace gtrain::actors
