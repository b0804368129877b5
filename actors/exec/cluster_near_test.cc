// Processes of one machine, which call each other over shared memory: the same guarantees.
#include <algorithm>

#include "actors/exec/cluster.h"
#include "actors/exec/cluster_fake.h"

namespace gtrain::actors {
namespace {

class ClusterNearTest : public ClusterTest {
 protected:
  ClusterNearTest() { shared_memory_ = true; }
  // Nothing goes over the network, or a test of this file would say nothing.
  void CutNetwork() {
    for (auto& [process, cluster] : clusters_) FakeNet::Get().CutOff(NetworkOf(*cluster), true);
  }
};

TEST_F(ClusterNearTest, ActorsAreMadeCalledAndEndedWithoutTheNetwork) {
  Open(3);
  CutNetwork();
  const auto actor = Spawn(0, 1, "a");
  ASSERT_TRUE(actor.ok()) << actor.status();
  EXPECT_EQ(*Call(0, *actor, 0, "1"), "1");
  EXPECT_EQ(*Call(2, *actor, 0, "2"), "2");
  EXPECT_EQ(*Call(1, *actor, 0, "3"), "3");
  EXPECT_EQ(world_.effects, (std::vector<std::string>{"a1", "a2", "a3"}));
  const std::string large(20 << 20, 'x');
  EXPECT_EQ(*Call(0, *actor, 0, large), large);
  EXPECT_EQ(Call(0, *actor, 2, "").status().code(), absl::StatusCode::kUnknown);
  clusters_[0]->End(*actor, "no more");
  AwaitLooking([&] { return clusters_[1]->counts().actors == 0; });
  EXPECT_EQ(Call(0, *actor, 0, "4").status().code(), absl::StatusCode::kNotFound);
}

// Each effect once and in the order of its thread, with threads that wait for answers and others that do not,
// and pauses long enough for everybody to fall asleep.
TEST_F(ClusterNearTest, CallsRunOnceAndInOrderWhoeverSleeps) {
  Open(3);
  CutNetwork();
  std::vector<ActorRef> actors;
  for (const int rank : {0, 1, 1, 2}) actors.push_back(*Spawn(0, rank));
  constexpr int kCalls = 2000;
  std::vector<std::thread> callers;
  for (int thread = 0; thread < 6; ++thread) {
    callers.emplace_back([&, thread] {
      const int from = thread % 3;
      Rng rng(static_cast<uint64_t>(thread) + 1);
      Answers heard;
      size_t made = 0;
      for (int i = 0; i < kCalls; ++i) {
        const ActorRef& actor = actors[static_cast<size_t>(thread) % actors.size()];
        clusters_[from]->Call(actor, 0, absl::StrCat(thread, " ", i), kSoon, heard.Taker(i));
        ++made;
        if (thread < 3 || i % 60 == 59) heard.Await(made);
        if (rng.Below(200) == 0) Nap(static_cast<int>(rng.Below(3)));
      }
      for (const auto& one : heard.Await(kCalls)) EXPECT_TRUE(one.status.ok()) << one.status;
    });
  }
  for (std::thread& one : callers) one.join();
  std::map<std::string, int> next;
  MutexLock lock(&world_.mutex);
  ASSERT_EQ(world_.effects.size(), size_t{6} * kCalls);
  for (const std::string& effect : world_.effects) {
    const std::vector<std::string> words = absl::StrSplit(effect, ' ');
    EXPECT_EQ(words[1], absl::StrCat(next[words[0]]++)) << "of thread " << words[0];
  }
}

// A thread that runs a long call is not the one that hears of others.
TEST_F(ClusterNearTest, OthersAreHeardWhileACallIsLong) {
  Open(2);
  CutNetwork();
  const auto slow = Spawn(0, 1, "slow"), quick = Spawn(0, 1, "quick");
  ASSERT_TRUE(slow.ok() && quick.ok());
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Call(0, *quick, 0, "warm").ok());
  Gate(false);
  Answers held;
  clusters_[0]->Call(*slow, 1, "long", kSoon, held.Taker());
  for (int i = 0; i < 50; ++i) EXPECT_EQ(*Call(0, *quick, 0, "1"), "1");
  Gate(true);
  EXPECT_EQ(*held.Get(), "long");
}

TEST_F(ClusterNearTest, DeadlinesHold) {
  Open(2);
  CutNetwork();
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Answers first, second;
  clusters_[0]->Call(*actor, 1, "begun", absl::Milliseconds(100), first.Taker());
  clusters_[0]->Call(*actor, 0, "waits", absl::Milliseconds(100), second.Taker());
  EXPECT_EQ(first.Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(second.Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  AwaitLooking([&] { return clusters_[1]->counts().waiting == 0; });  // a millisecond later there
  Gate(true);
  EXPECT_EQ(*Call(0, *actor, 0, "after"), "after");
  MutexLock lock(&world_.mutex);
  EXPECT_EQ(std::ranges::count(world_.effects, "waits"), 0);
}

TEST_F(ClusterNearTest, FullMailboxesHoldUpCallersAndLoseNothing) {
  HostOptions options;
  options.mailbox_calls = 4;
  Open(3, options);
  CutNetwork();
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Answers answers;
  for (int i = 0; i < 300; ++i)
    for (const int from : {0, 2}) clusters_[from]->Call(*actor, 1, "x", kSoon, answers.Taker(from));
  Gate(true);
  for (const auto& one : answers.Await(600)) EXPECT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(world_.Count(), 600u);
}

// Long messages go through the ring in pieces, both ways at once.
TEST_F(ClusterNearTest, LongCallsAndShortOnesOverOneConnection) {
  Open(2);
  CutNetwork();
  const auto there = Spawn(0, 1), here = Spawn(1, 0);
  ASSERT_TRUE(there.ok() && here.ok());
  std::vector<std::thread> callers;
  for (const int from : {0, 1}) {
    for (const size_t size : {size_t{10}, size_t{3} << 20}) {
      callers.emplace_back([&, from, size] {
        for (int i = 0; i < 40; ++i) {
          const std::string text(size + static_cast<size_t>(i), static_cast<char>('a' + i % 26));
          const auto answer = Call(from, from == 0 ? *there : *here, 0, text);
          EXPECT_TRUE(answer.ok() && *answer == text);
        }
      });
    }
  }
  for (std::thread& one : callers) one.join();
}

// Callers go on with a kept actor wherever it is, and hear of each call once. The process that is lost is cut
// off: one that closes ends its actors.
TEST_F(ClusterNearTest, AKeptActorGoesOnElsewhereWithAllThatWasHeard_P4) {
  Open(4);
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), true);
  const auto actor = SpawnKept(0, 1);
  ASSERT_TRUE(actor.ok()) << actor.status();
  std::atomic<bool> lost = false;
  std::string heard;
  std::thread caller([&] {
    for (int i = 0; i < 300 || !lost; ++i) {
      const auto answer = Call(3, *actor, 3, "x");
      EXPECT_TRUE(answer.ok()) << answer.status();
      if (!answer.ok()) return;
      EXPECT_EQ(answer->size(), heard.size() + 1);
      heard = *answer;
    }
  });
  AwaitLooking([&] { return clusters_[1]->counts().answered > 20; });
  ASSERT_GT(CloseLinks(), 0);
  job_.Begin({0, 2, 3});
  lost = true;
  caller.join();
  EXPECT_EQ(*Call(0, *actor, 4, ""), heard);
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), false);
}

// The connection breaks, and the process behind it lives: it is called over the network.
TEST_F(ClusterNearTest, WithoutSharedMemoryItGoesOverTheNetwork) {
  Open(2);
  const auto actor = Spawn(0, 1);
  ASSERT_TRUE(actor.ok());
  ASSERT_TRUE(Call(0, *actor, 0, "1").ok());
  ASSERT_GT(CloseLinks(), 0);
  EXPECT_EQ(*Call(0, *actor, 0, "2"), "2");
  EXPECT_EQ(*Call(1, *Spawn(1, 0), 0, "3"), "3");
  EXPECT_EQ(world_.effects, (std::vector<std::string>{"1", "2", "3"}));
}

// A process that ends by itself before the job is over is lost, and its actors live on: nobody hears that
// they are no more.
TEST_F(ClusterNearTest, ActorsOfAProcessThatClosesAreLostAndNotEnded_P4) {
  Open(4);
  const auto kept = SpawnKept(0, 1), plain = Spawn(0, 1, "", kSoon, 100);
  ASSERT_TRUE(kept.ok() && plain.ok());
  std::atomic<bool> lost = false;
  size_t sum = 0;
  std::thread caller([&] {
    for (int i = 0; i < 300 || !lost; ++i) {
      const auto answer = Call(3, *kept, 3, "x");
      ASSERT_TRUE(answer.ok()) << answer.status();
      ASSERT_EQ(answer->size(), ++sum);
      const auto other = Call(3, *plain, 0, "x");
      ASSERT_TRUE(other.ok() || absl::IsUnavailable(other.status())) << other.status();
    }
  });
  AwaitLooking([&] { return clusters_[1]->counts().answered > 20; });
  clusters_[1].reset();
  job_.Begin({0, 2, 3});
  lost = true;
  caller.join();
  EXPECT_EQ(Call(0, *kept, 4, "")->size(), sum);
}

// What had been answered is heard, also of a process that is lost before anybody has read it.
TEST_F(ClusterNearTest, AnswersInARingThatIsLostAreHeard_P4) {
  Open(2);
  const auto actor = Spawn(0, 1), other = Spawn(0, 1);
  ASSERT_TRUE(actor.ok() && other.ok());
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), true);
  Mutex mutex;
  bool open = false;
  std::atomic<bool> blocked = false;
  // Whoever hears this hears nothing else meanwhile, as a process that is stopped.
  clusters_[0]->Call(*other, 0, "block", kSoon, [&](const absl::Status&, absl::string_view) {
    blocked = true;
    MutexLock lock(&mutex);
    mutex.AwaitFor(kSoon, [&] { return open; });
  });
  AwaitLooking([&] { return blocked.load(); });
  Answers answers;
  std::thread caller([&] {  // a call waits for its turn with the one that is blocked
    for (int i = 0; i < 500; ++i) clusters_[0]->Call(*actor, 0, "x", kSoon, answers.Taker());
  });
  caller.join();
  {
    MutexLock lock(&mutex);
    open = true;
  }
  AwaitLooking([&] { return world_.Count() >= 501; });
  ASSERT_GT(CloseLinks(), 0);
  job_.Begin({0});
  for (const auto& one : answers.Await(500)) EXPECT_TRUE(one.status.ok()) << one.status;
  FakeNet::Get().CutOff(NetworkOf(*clusters_[1]), false);
}

}  // namespace
}  // namespace gtrain::actors
