#include "actors/exec/cluster.h"

#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

TEST_F(ClusterOverZmqTest, AnActorIsMadeCalledAndEndedInAnotherProcess) {
  Open(3);
  const auto actor = Spawn(0, 1, "a");
  ASSERT_TRUE(actor.ok()) << actor.status();
  EXPECT_EQ(clusters_[1]->counts().actors, 1u);
  EXPECT_EQ(*Call(0, *actor, 0, "1"), "1");
  EXPECT_EQ(*Call(2, *actor, 0, "2"), "2");  // who was given the address may call it, too
  EXPECT_EQ(*Call(1, *actor, 0, "3"), "3");
  EXPECT_EQ(world_.effects, (std::vector<std::string>{"a1", "a2", "a3"}));
  clusters_[0]->End(*actor, "no more");
  AwaitLooking([&] { return clusters_[1]->counts().actors == 0; });
  const auto ended = Call(0, *actor, 0, "4");
  EXPECT_EQ(ended.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(ended.status().message(), HasSubstr("no more"));
}

TEST_F(ClusterOverZmqTest, ErrorsAndLongValuesTravel) {
  Open(2);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  const std::string large(20 << 20, 'x');
  EXPECT_EQ(*Call(0, *actor, 0, large), large);
  const auto thrown = Call(0, *actor, 2, "");
  EXPECT_EQ(thrown.status().code(), absl::StatusCode::kUnknown);
  const auto no_method = Call(0, *actor, 7, "");
  EXPECT_EQ(no_method.status().code(), absl::StatusCode::kInvalidArgument);
  const auto too_long = Call(0, *actor, 0, std::string(kCallBytesMax + 1, 'x'));
  EXPECT_EQ(too_long.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClusterOverZmqTest, WhoHasAnotherSecretIsRefused) {
  Open(2);
  port::NetOptions options{std::string(64, '6'), 1 << 20, 16};
  std::string endpoint;
  auto server = net::JobNet().serve("127.0.0.1:0", options, &endpoint);
  ASSERT_TRUE(server.ok());
  options.secret = std::string(64, '7');
  auto client = net::JobNet().connect(endpoint, options);
  ASSERT_TRUE(client.ok());
  options.secret = std::string(64, '6');
  auto good = net::JobNet().connect(endpoint, options);
  ASSERT_TRUE(good.ok());
  AwaitLooking([&] {
    (*server)->Receive();
    (*client)->Receive();
    return (*good)->Connected();
  });
  EXPECT_FALSE((*client)->Connected());
}

// Each effect once and in the order of its caller, whatever becomes of the connections.
TEST_F(ClusterTest, CallsRunOnceAndInOrderOverConnectionsThatBreak) {
  Open(3);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  FakeNet::Get().BreakOften(3000, 7);
  constexpr int kCalls = 3000;
  std::map<int, Answers> answers;
  std::vector<std::thread> callers;
  for (const int from : {0, 2}) {
    Answers& heard = answers[from];
    callers.emplace_back([&, from] {
      for (int i = 0; i < kCalls; ++i) {
        clusters_[from]->Call(*actor, 0, absl::StrCat(from, " ", i), kSoon, heard.Taker(i));
        if (i % 50 == 49) heard.Await(static_cast<size_t>(i) + 1);
      }
      heard.Await(kCalls);
    });
  }
  for (std::thread& one : callers) one.join();
  EXPECT_GT(FakeNet::Get().broken(), 20u);
  FakeNet::Get().BreakOften(0, 1);
  for (auto& [from, heard] : answers) {
    const auto all = heard.Await(kCalls);
    ASSERT_EQ(all.size(), static_cast<size_t>(kCalls));
    for (const auto& one : all) {
      EXPECT_TRUE(one.status.ok()) << one.status;
      EXPECT_EQ(one.result, absl::StrCat(from, " ", one.which));
    }
  }
  MutexLock lock(&world_.mutex);
  std::map<char, int> next;
  for (const std::string& effect : world_.effects)
    EXPECT_EQ(effect.substr(2), absl::StrCat(next[effect[0]]++));
  EXPECT_EQ(next['0'], kCalls);
  EXPECT_EQ(next['2'], kCalls);
}

TEST_F(ClusterTest, SpawnsHappenOnceOverConnectionsThatBreak) {
  Open(2);
  FakeNet::Get().BreakOften(2000, 3);
  std::vector<ActorRef> made;
  for (int i = 0; i < 200; ++i) {
    const auto actor = Spawn(0, 1);
    ASSERT_TRUE(actor.ok()) << actor.status();
    made.push_back(*actor);
  }
  EXPECT_EQ(world_.alive, 200);
  for (const ActorRef& one : made) clusters_[0]->End(one, "done");
  AwaitLooking([&] { return world_.alive == 0; });
}

// 4 of the issue: callers wait, mailboxes stay short, nothing is lost.
TEST_F(ClusterTest, FullMailboxesHoldUpCallersAndLoseNothing) {
  Open(5, {.mailbox_calls = 8});
  const auto actor = Spawn(0, 0);
  ASSERT_TRUE(actor.ok());
  Gate(false);
  constexpr int kCalls = 300;
  std::map<int, Answers> answers;
  for (int from = 1; from < 5; ++from) {
    for (int i = 0; i < kCalls; ++i)
      clusters_[from]->Call(*actor, 1, absl::StrCat(from, " ", i), kSoon, answers[from].Taker(i));
  }
  AwaitLooking([&] { return clusters_[0]->counts().waiting == 8; });
  Gate(true);
  for (int from = 1; from < 5; ++from) {
    for (const auto& one : answers[from].Await(kCalls)) EXPECT_TRUE(one.status.ok()) << one.status;
  }
  EXPECT_EQ(world_.Count(), 4u * kCalls);
}

TEST_F(ClusterTest, MoreThanAWindowIsRefusedAtOnce) {
  Open(2);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Answers answers;
  for (uint64_t i = 0; i <= kCallsInWindow; ++i) clusters_[0]->Call(*actor, 1, "", kSoon, answers.Taker());
  const auto first = answers.Get();
  EXPECT_EQ(first.status().code(), absl::StatusCode::kResourceExhausted) << first.status();
  Gate(true);
  answers.Await(kCallsInWindow + 1);
  EXPECT_EQ(world_.Count(), kCallsInWindow);
}

TEST_F(ClusterTest, DeadlinesHoldWhateverTheOtherEndDoes) {
  Open(2);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  Gate(false);
  const auto begun = Call(0, *actor, 1, "begun", absl::Milliseconds(30));
  EXPECT_EQ(begun.status().code(), absl::StatusCode::kDeadlineExceeded);
  const auto behind = Call(0, *actor, 0, "behind", absl::Milliseconds(200));
  EXPECT_EQ(behind.status().code(), absl::StatusCode::kDeadlineExceeded);
  // A caller of a busy machine may give up before the other end has answered: then the call may run later.
  AwaitLooking([&] { return clusters_[1]->counts().waiting == 0; });
  Gate(true);
  EXPECT_EQ(*Call(0, *actor, 0, "after"), "after");
  // What had not begun never runs.
  EXPECT_EQ(world_.effects, (std::vector<std::string>{"begun", "after"}));
}

TEST_F(ClusterTest, WithoutAConnectionACallSaysSoAndDoesNotRun) {
  Open(3);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  const auto cut = Call(2, *actor, 0, "x", absl::Milliseconds(50));
  EXPECT_EQ(cut.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(cut.status().message(), HasSubstr("there is no connection to rank 1"));
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
  EXPECT_EQ(*Call(2, *actor, 0, "y"), "y");
  EXPECT_EQ(world_.effects, (std::vector<std::string>{"y"}));
}

TEST_F(ClusterTest, ASpawnThatTookTooLongLeavesNoActor) {
  Open(2);
  Gate(false);
  const auto late = Spawn(0, 1, "slow", absl::Milliseconds(30));
  EXPECT_EQ(late.status().code(), absl::StatusCode::kDeadlineExceeded);
  Gate(true);
  AwaitLooking([&] { return clusters_[1]->counts().actors == 0 && world_.alive == 0; });
}

TEST_F(ClusterTest, AnotherBuildOfAClassIsRefusedByName) {
  job_.Begin({0, 1});
  std::vector<std::thread> joining;
  Add(0, {}, joining, "(); Get() -> int32");
  Add(1, {}, joining, "(); Get() -> int64");
  for (std::thread& one : joining) one.join();
  const auto refused = Spawn(0, 1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.status().message(), HasSubstr("Get() -> int32"));
  EXPECT_THAT(refused.status().message(), HasSubstr("Get() -> int64"));
  EXPECT_EQ(Spawn(0, 7).status().code(), absl::StatusCode::kNotFound);
}

// P1, N7: the others keep their actors and their calls; what the lost one had, or owned, is gone.
TEST_F(ClusterTest, WhoSurvivesKeepsItsActorsAndHearsWhatIsLost) {
  Open(3);
  const auto of_0 = Spawn(0, 1, "of 0 "), of_2 = Spawn(2, 1, "of 2 "), at_2 = Spawn(0, 2, "at 2 ", kSoon, 0);
  ASSERT_TRUE(of_0.ok() && of_2.ok() && at_2.ok());
  ASSERT_TRUE(Call(0, *at_2, 0, "x").ok());
  Gate(false);
  Answers lost, kept;
  clusters_[0]->Call(*at_2, 1, "lost", kSoon, lost.Taker());
  clusters_[0]->Call(*of_0, 1, "kept", kSoon, kept.Taker());
  AwaitLooking([&] { return clusters_[2]->counts().begun == 1 && clusters_[1]->counts().begun == 1; });
  FakeNet::Get().CutOff(clusters_[2]->endpoint(),
                        true);  // as a process that is killed: nothing more comes from it
  std::vector<std::thread> joining;
  job_.Begin({0, 1, 3});
  Add(3, {}, joining);
  for (std::thread& one : joining) one.join();
  const auto heard = lost.Get();
  EXPECT_EQ(heard.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(heard.status().message(), HasSubstr("may have run"));
  Gate(true);
  EXPECT_EQ(*kept.Get(), "kept");
  EXPECT_EQ(*Call(0, *of_0, 0, "on"), "on");
  AwaitLooking([&] { return clusters_[1]->counts().actors == 1; });
  EXPECT_EQ(Call(0, *of_2, 0, "").status().code(), absl::StatusCode::kNotFound);  // its owner is gone
  const auto gone = Call(0, *at_2, 0, "");
  EXPECT_EQ(gone.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(gone.status().message(), HasSubstr("its process was lost, and it has 0 restarts"));
  const auto new_one = Spawn(0, 2);  // the rank of the lost one is another process now
  ASSERT_TRUE(new_one.ok());
  EXPECT_EQ(*Call(1, *new_one, 0, "new"), "new");
  FakeNet::Get().CutOff(clusters_[2]->endpoint(), false);
}

// P4: what was sent may have run; the rest goes on, in its order, where the actor is made anew.
TEST_F(ClusterTest, ALostActorIsMadeAnewElsewhereAndFoundThere_P4) {
  Open(3);
  const auto actor = Spawn(0, 2, "made of this ");
  ASSERT_TRUE(actor.ok());
  ASSERT_TRUE(Call(1, *actor, 0, "before").ok());
  FakeNet::Get().CutOff(clusters_[2]->endpoint(), true);
  std::map<int, Answers> answers;
  for (const int from : {0, 1}) {
    for (int i = 0; i < 50; ++i)
      clusters_[from]->Call(*actor, 0, absl::StrCat(from, " ", i), kSoon, answers[from].Taker(i));
  }
  job_.Begin({0, 1});
  for (const int from : {0, 1}) {
    for (const auto& one : answers[from].Await(50)) EXPECT_TRUE(one.status.ok()) << one.status;
  }
  EXPECT_EQ(*Call(1, *actor, 0, "after"), "after");
  EXPECT_EQ(clusters_[1]->counts().actors, 1u);  // the owner's process is the last of equals
  // Who comes up now has never heard of the process that the reference names.
  std::vector<std::thread> joining;
  job_.Begin({0, 1, 3});
  Add(3, {}, joining);
  for (std::thread& one : joining) one.join();
  EXPECT_EQ(*Call(3, *actor, 0, "new"), "new");
  MutexLock lock(&world_.mutex);
  std::map<char, int> next;
  for (const std::string& effect : world_.effects) {
    const std::string text = effect.substr(std::string("made of this ").size());
    if (text[1] != ' ') continue;
    EXPECT_EQ(text.substr(2), absl::StrCat(next[text[0]]++));
  }
  EXPECT_EQ(next['0'], 50);
  EXPECT_EQ(next['1'], 50);
  FakeNet::Get().CutOff(clusters_[2]->endpoint(), false);
}

TEST_F(ClusterTest, AnActorThatIsLostTooOftenHasEnded) {
  Open(3);
  const auto actor = Spawn(0, 1, "", kSoon, 1);
  ASSERT_TRUE(actor.ok());
  ASSERT_TRUE(Call(0, *actor, 0, "").ok());
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[2]->counts().actors == 1; });
  EXPECT_TRUE(Call(0, *actor, 0, "").ok());
  job_.Begin({0});
  AwaitLooking([&] { return clusters_[0]->processes() == 1 && !Call(0, *actor, 0, "").ok(); });
  const auto ended = Call(0, *actor, 0, "");
  EXPECT_EQ(ended.status().code(), absl::StatusCode::kNotFound) << ended.status();
  EXPECT_THAT(ended.status().message(), HasSubstr("lost 2 times within 1h, and it has 1 restarts"));
  EXPECT_EQ(clusters_[0]->counts().actors, 0u);
}

// An owner of thousands loses the process that had them, and lets them go.
TEST_F(ClusterTest, ManyActorsMoveAndEndAtOnce) {
  Open(2);
  constexpr int kActors = 5000;
  const std::vector<ActorRef> all = SpawnMany(kActors, /*keep=*/false);
  std::vector<std::thread> joining;
  job_.Begin({0, 2});
  Add(2, {}, joining);
  for (std::thread& one : joining) one.join();
  AwaitLooking([&] { return clusters_[2]->counts().actors == kActors; });
  for (const ActorRef& one : all) clusters_[0]->End(one, "done");
  AwaitLooking([&] { return clusters_[2]->counts().actors == 0; });
}

// P4: whatever is lost, each call that changes a kept actor is in its state once, in the order of its caller.
TEST_F(ClusterTest, AKeptActorGoesOnElsewhereWithAllThatWasHeard_P4) {
  Open(4);
  const auto actor = SpawnKept(0, 2);
  ASSERT_TRUE(actor.ok()) << actor.status();
  FakeNet::Get().BreakOften(300, 11);
  constexpr int kCalls = 300;
  std::map<int, Answers> answers;
  std::vector<std::thread> callers;
  for (const int from : {0, 1}) {
    Answers& heard = answers[from];
    callers.emplace_back([&, from] {
      for (int i = 0; i < kCalls; ++i) {
        clusters_[from]->Call(*actor, 3, absl::StrCat(from, ".", i, " "), kSoon, heard.Taker(i));
        if (i % 20 == 19) heard.Await(static_cast<size_t>(i) + 1);
      }
    });
  }
  std::vector<int> others = {2, 3};  // one of them has it, until only the others are left
  for (int next = 4; next < 9; ++next) {
    answers[1].Await(static_cast<size_t>(next - 3) * 40);
    const int lost = others[0];
    FakeNet::Get().CutOff(clusters_[lost]->endpoint(), true);
    others = {others[1], next};
    std::vector<std::thread> joining;
    job_.Begin({0, 1, others[0], others[1]});
    Add(next, {}, joining);
    for (std::thread& one : joining) one.join();
  }
  for (std::thread& one : callers) one.join();
  FakeNet::Get().BreakOften(0, 1);
  for (const int from : {0, 1}) {
    for (const auto& one : answers[from].Await(kCalls)) EXPECT_TRUE(one.status.ok()) << one.status;
  }
  const std::string state = *Call(1, *actor, 4, "");
  std::map<char, int> next;
  for (const absl::string_view word : absl::StrSplit(state, ' ', absl::SkipEmpty()))
    EXPECT_EQ(word.substr(2), absl::StrCat(next[word[0]]++));
  EXPECT_EQ(next['0'], kCalls);
  EXPECT_EQ(next['1'], kCalls);
  for (auto& [process, cluster] : clusters_) FakeNet::Get().CutOff(cluster->endpoint(), false);
}

TEST_F(ClusterTest, WhoWasSilentForAWhileFindsAKeptActorThatHasMoved) {
  Open(3);
  const auto actor = SpawnKept(0, 1, "x");
  ASSERT_TRUE(actor.ok());
  for (const int from : {0, 2}) EXPECT_TRUE(Call(from, *actor, 3, absl::StrCat(from)).ok());
  Nap(500);  // its answers are acknowledged, and nothing is under way
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[2]->counts().actors == 1; });
  for (const int from : {0, 2}) EXPECT_EQ(*Call(from, *actor, 4, "", absl::Seconds(20)), "x02");
  EXPECT_EQ(*Call(2, *actor, 3, "a", absl::Seconds(20)), "x02a");
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

TEST_F(ClusterTest, NobodyHearsOfWhatItsOwnerDoesNotHaveYet) {
  Open(3);
  const auto actor = SpawnKept(0, 1, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(2, *actor, 3, "a"), "xa");
  FakeNet::Get().CutOff(clusters_[0]->endpoint(), true);
  EXPECT_EQ(*Call(2, *actor, 4, ""), "xa");  // what changes nothing needs nobody
  const uint64_t before = clusters_[1]->counts().answered;
  Answers changed, seen;
  clusters_[2]->Call(*actor, 3, "b", kSoon, changed.Taker());
  clusters_[2]->Call(*actor, 4, "", kSoon, seen.Taker());
  AwaitLooking([&] { return clusters_[1]->counts().answered == before + 2; });
  EXPECT_EQ(Call(2, *actor, 4, "", absl::Milliseconds(50)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(changed.Await(0).empty());
  EXPECT_TRUE(seen.Await(0).empty());
  FakeNet::Get().CutOff(clusters_[0]->endpoint(), false);
  EXPECT_EQ(*changed.Get(), "xab");
  EXPECT_EQ(*seen.Get(), "xab");
}

TEST_F(ClusterTest, WhatAKeptActorDidBeforeItThrewIsKeptOrUndone_P4) {
  Open(3);
  const auto actor = SpawnKept(0, 1, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(2, *actor, 3, "a"), "xa");
  FakeNet::Get().CutOff(clusters_[0]->endpoint(), true);
  std::map<int, Answers> answers;
  const uint64_t before = clusters_[1]->counts().answered;
  // The first is in the save that is under way; behind it nothing is saved.
  for (int i = 0; i < 4; ++i) {
    clusters_[2]->Call(*actor, i == 3 ? 2 : 3, absl::StrCat(i), kSoon, answers[i].Taker());
    AwaitLooking([&] { return clusters_[1]->counts().answered == before + static_cast<uint64_t>(i) + 1; });
  }
  EXPECT_EQ(Call(2, *actor, 4, "", absl::Milliseconds(50)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  FakeNet::Get().CutOff(clusters_[0]->endpoint(), false);
  std::string state = "xa";
  for (int i = 0; i < 3; ++i) {
    const auto answer = answers[i].Get();
    EXPECT_TRUE(answer.ok() || answer.status().code() == absl::StatusCode::kAborted) << answer.status();
    if (answer.ok()) state += absl::StrCat(i);
  }
  EXPECT_EQ(answers[3].Get().status().code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(answers[2].Get().status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(*Call(2, *actor, 4, ""), state);
}

TEST_F(ClusterTest, AKeptActorInItsOwnersProcessNeedsNobody) {
  Open(2);
  const auto actor = SpawnKept(0, 0, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(0, *actor, 3, "a"), "xa");
  EXPECT_EQ(*Call(1, *actor, 3, "b"), "xab");
}

TEST_F(ClusterTest, OneProcessDrivesUntilItIsLost) {
  Open(3);
  EXPECT_TRUE(*clusters_[0]->AwaitTurn());
  std::vector<std::thread> joining;
  job_.Begin({3, 0, 1});  // the driver has another rank, and drives on
  Add(3, {}, joining);
  for (std::thread& one : joining) one.join();
  EXPECT_TRUE(*clusters_[0]->AwaitTurn());
  EXPECT_FALSE(clusters_[3]->drives());
  AwaitLooking([&] { return clusters_[1]->processes() == 3; });
  EXPECT_EQ(clusters_[2]->AwaitTurn().status().code(), absl::StatusCode::kUnavailable);  // it has no place
  job_.Begin({1, 3});
  EXPECT_TRUE(*clusters_[1]->AwaitTurn());
  clusters_[1]->Finish();
  EXPECT_FALSE(*clusters_[3]->AwaitTurn());
}

TEST_F(ClusterTest, WhoComesUpWhenTheDriverHasLeftEndsAtOnce) {
  Open(2);
  std::vector<std::thread> joining;
  clusters_.erase(0);  // it has ended well, and rank 1 was lost
  job_.Begin({0, 2});
  Add(2, {}, joining);
  job_.Left(0);
  for (std::thread& one : joining) one.join();
  EXPECT_FALSE(*clusters_[2]->AwaitTurn());
}

TEST_F(ClusterTest, WhatTheDriverHasHeardIsItsProgress) {
  Open(2);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Call(0, *actor, 0, "").ok());
  AwaitLooking([&] { return job_.reported_ == 4; });  // the spawn is one
  job_.reported_ = 0;
  job_.Begin({0, 1});
  AwaitLooking([&] { return job_.reported_ == 4; });  // said again: the generation is a new one
}

TEST_F(ClusterTest, ADriverThatHasLeftEndsTheOthers) {
  Open(2);
  EXPECT_TRUE(*clusters_[0]->AwaitTurn());
  job_.Left(0);
  EXPECT_FALSE(*clusters_[1]->AwaitTurn());
}

}  // namespace
}  // namespace gtrain::actors
