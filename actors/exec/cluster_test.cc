#include "actors/exec/cluster.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "actors/exec/incoming.h"
#include "actors/exec/net_fake.h"
#include "actors/exec/owned.h"
#include "actors/plan/frames.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "net/zmq/job_net.h"

namespace gtrain::actors {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(60);

// What calls came to, in the order in which it was heard.
class Answers {
 public:
  Reply Taker(int which = 0) {
    return [state = state_, which](const absl::Status& status, absl::string_view result) {
      MutexLock lock(&state->mutex);
      state->heard.push_back({which, status, std::string(result)});
    };
  }
  struct One {
    int which = 0;
    absl::Status status;
    std::string result;
  };
  std::vector<One> Await(size_t count) {
    MutexLock lock(&state_->mutex);
    if (!state_->mutex.AwaitFor(kSoon, [&] { return state_->heard.size() >= count; }))
      ADD_FAILURE() << "only " << state_->heard.size() << " answers of " << count;
    return state_->heard;
  }
  absl::StatusOr<std::string> Get() {
    const std::vector<One> all = Await(1);
    if (all.empty()) return absl::InternalError("no answer");
    if (!all[0].status.ok()) return all[0].status;
    return all[0].result;
  }

 private:
  struct State {
    Mutex mutex;
    std::vector<One> heard;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// The generations of a job: which of its processes have which rank.
class FakeJob {
 public:
  void Begin(std::vector<int> processes) {
    MutexLock lock(&mutex_);
    processes_ = std::move(processes);
    blobs_.clear();
    left_.clear();
    ++generation_;
  }
  void Left(int rank) {
    MutexLock lock(&mutex_);
    left_.push_back(rank);
  }
  // It does not hear of generations (partition).
  void Deaf(int process, bool deaf) {
    MutexLock lock(&mutex_);
    if (deaf)
      deaf_.insert(process);
    else
      deaf_.erase(process);
  }
  // It hears late what the others said.
  void Hold(int process, bool hold) {
    MutexLock lock(&mutex_);
    if (hold)
      held_.insert(process);
    else
      held_.erase(process);
  }

  class Gatherer final : public Gathering {
   public:
    Gatherer(FakeJob* job, int process) : job_(job), process_(process) {
      MutexLock lock(&job_->mutex_);
      generation_ = job_->generation_;
      rank_ = job_->RankOf(process_);
      late_ = generation_ > 1;
    }
    absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view own,
                                                       absl::Duration timeout) override {
      MutexLock lock(&job_->mutex_);
      job_->blobs_[rank_] = std::string(own);
      job_->mutex_.AwaitFor(timeout, [&] {
        return job_->generation_ != generation_ || !job_->left_.empty() ||
               job_->blobs_.size() == job_->processes_.size();
      });
      if (job_->blobs_.size() < job_->processes_.size())
        return absl::UnavailableError("a rank has left, or the generation is over");
      if (job_->generation_ != generation_) return absl::UnavailableError("the generation is over");
      std::vector<std::string> table;
      for (const auto& [rank, blob] : job_->blobs_) table.push_back(blob);
      job_->mutex_.AwaitFor(kSoon, [&] { return !job_->held_.contains(process_); });
      return table;
    }
    int rank() const override { return rank_; }
    std::vector<int> left() const override {
      MutexLock lock(&job_->mutex_);
      return job_->left_;
    }
    absl::Status AwaitNext(absl::Duration timeout) override {
      MutexLock lock(&job_->mutex_);
      if (!job_->mutex_.AwaitFor(
              timeout, [&] { return job_->generation_ != generation_ && !job_->deaf_.contains(process_); }))
        return absl::DeadlineExceededError("it goes on");
      generation_ = job_->generation_;
      rank_ = job_->RankOf(process_);
      return rank_ < 0 ? absl::UnavailableError("the generation is over") : absl::OkStatus();
    }

    bool late() const override { return late_; }
    void Report(uint64_t answered) override { job_->reported_ = answered; }

   private:
    FakeJob* const job_;
    const int process_;
    int generation_ = 0;
    std::atomic<int> rank_ = 0;
    bool late_ = false;
  };

 private:
  int RankOf(int process) const {
    const auto at = std::ranges::find(processes_, process);
    return at == processes_.end() ? -1 : static_cast<int>(at - processes_.begin());
  }
  Mutex mutex_;
  std::vector<int> processes_, left_;
  std::set<int> deaf_, held_;
  std::map<int, std::string> blobs_;
  int generation_ = 0;

 public:
  std::atomic<uint64_t> reported_ = 0;
};

// All that the actors of a test have done.
struct World {
  Mutex mutex;
  std::vector<std::string> effects;
  bool gate = true, async_gate = true;
  int saves = 1 << 30;
  std::atomic<int> alive = 0;
  size_t Count() {
    MutexLock lock(&mutex);
    return effects.size();
  }
};

// Methods: 0 has its argument as an effect and answers with it; 1 does so behind the gate; 2 throws, so to
// say; 3 adds its argument to the state and answers with all of it; 4 answers with the state.
ActorClass TypeOf(World* world, const std::string& signature) {
  ActorClass type;
  type.name = "Log";
  type.signature = signature;
  type.methods = 6;
  type.constant = {false, false, false, false, true, false};
  type.save = [world](void* self) {
    MutexLock lock(&world->mutex);
    world->mutex.AwaitFor(kSoon, [&] { return world->saves > 0; });
    --world->saves;
    return *static_cast<std::string*>(self);
  };
  type.load = [](void* self, absl::string_view state) {
    *static_cast<std::string*>(self) = std::string(state);
    return absl::OkStatus();
  };
  type.create = [world](absl::string_view arguments) -> absl::StatusOr<void*> {
    if (arguments == "slow") {
      MutexLock lock(&world->mutex);
      world->mutex.AwaitFor(kSoon, [&] { return world->gate; });
    }
    ++world->alive;
    return new std::string(arguments);
  };
  type.destroy = [world](void* self) {
    --world->alive;
    delete static_cast<std::string*>(self);
  };
  type.call = [world](void* self, int method, absl::string_view arguments, BegunCall* call) {
    if (method == 5) {  // as a Task: answered by another thread
      static_cast<std::string*>(self)->append(arguments.data(), arguments.size());
      std::thread([world, call] {
        {
          MutexLock lock(&world->mutex);
          world->mutex.AwaitFor(kSoon, [&] { return world->async_gate; });
        }
        call->Answer(absl::OkStatus(), std::string(24 << 20, 'r'), false);
      }).detach();
      return;
    }
    if (method == 2) return call->Answer(absl::UnknownError("thrown"), "", true);
    if (method >= 3) {
      std::string& state = *static_cast<std::string*>(self);
      if (method == 3) state.append(arguments.data(), arguments.size());
      return call->Answer(absl::OkStatus(), state, false);
    }
    {
      MutexLock lock(&world->mutex);
      if (method == 1) world->mutex.AwaitFor(kSoon, [&] { return world->gate; });
      world->effects.push_back(absl::StrCat(*static_cast<std::string*>(self), arguments));
    }
    call->Answer(absl::OkStatus(), arguments, false);
  };
  return type;
}

class ClusterTest : public ::testing::Test {
 protected:
  explicit ClusterTest(const port::NetModule* net = &FakeNet::Module()) : net_(net) {}
  ~ClusterTest() override {
    Gate(true);
    {
      MutexLock lock(&world_.mutex);
      world_.async_gate = true;
      world_.saves = 1 << 30;
    }
    clusters_.clear();
    FakeNet::Get().BreakOften(0, 1);
    EXPECT_EQ(world_.alive, 0);
  }

  void Open(int processes, HostOptions options = {}) {
    std::vector<int> all;
    for (int i = 0; i < processes; ++i) all.push_back(i);
    job_.Begin(all);
    std::vector<std::thread> joining;
    for (int i = 0; i < processes; ++i) Add(i, options, joining);
    for (std::thread& one : joining) one.join();
  }
  void Add(int process, const HostOptions& options, std::vector<std::thread>& joining,
           const std::string& signature = "one") {
    clusters_[process] = std::make_unique<Cluster>(options, clock_);
    ASSERT_TRUE(clusters_[process]->Register(TypeOf(&world_, signature)).ok());
    joining.emplace_back([this, process, cluster = clusters_[process].get()] {
      ClusterNetwork network;
      network.gathering = std::make_unique<FakeJob::Gatherer>(&job_, process);
      network.net = net_;
      network.secret = std::string(64, '5');
      network.address = "127.0.0.1";
      network.node = absl::StrCat("node-", process / 2);
      const absl::Status status = cluster->Join(std::move(network));
      EXPECT_TRUE(status.ok()) << status;
    });
  }

  absl::StatusOr<ActorRef> Spawn(int from, int rank, const std::string& arguments = "",
                                 absl::Duration timeout = kSoon, int restarts = 3, bool keep = false) {
    Answers answers;
    SpawnOptions options;
    options.restarts = restarts;
    options.keep = keep;
    clusters_[from]->Spawn("Log", options, {.rank = rank}, arguments, timeout, answers.Taker());
    const auto bytes = answers.Get();
    if (!bytes.ok()) return bytes.status();
    return ActorRef::Parse(*bytes);
  }
  absl::StatusOr<ActorRef> SpawnKept(int from, int rank, const std::string& arguments = "") {
    return Spawn(from, rank, arguments, kSoon, 100, true);
  }
  absl::StatusOr<std::string> Call(int from, const ActorRef& actor, int method, const std::string& text,
                                   absl::Duration timeout = kSoon) {
    Answers answers;
    clusters_[from]->Call(actor, method, text, timeout, answers.Taker());
    return answers.Get();
  }
  void Gate(bool open) {
    MutexLock lock(&world_.mutex);
    world_.gate = open;
  }
  template <typename Condition>
  void AwaitWorld(const Condition& condition) {
    MutexLock lock(&world_.mutex);
    EXPECT_TRUE(world_.mutex.AwaitFor(kSoon, condition));
  }
  // Looks again and again: what is awaited changes without this test's locks.
  template <typename Condition>
  void AwaitLooking(const Condition& condition) {
    Mutex mutex;
    MutexLock lock(&mutex);
    const Instant deadline = clock_.Now() + kSoon;
    while (!condition() && clock_.Now() < deadline)
      mutex.AwaitFor(absl::Milliseconds(2), [] { return false; });
    EXPECT_TRUE(condition());
  }

  const port::NetModule* const net_;
  RealClock clock_;
  World world_;
  FakeJob job_;
  std::map<int, std::unique_ptr<Cluster>> clusters_;
};

class ClusterOverZmqTest : public ClusterTest {
 protected:
  ClusterOverZmqTest() : ClusterTest(&net::JobNet()) {}
};

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
  const auto behind = Call(0, *actor, 0, "behind", absl::Milliseconds(30));
  EXPECT_EQ(behind.status().code(), absl::StatusCode::kDeadlineExceeded);
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
  std::vector<ActorRef> all;
  for (int i = 0; i < kActors; i += 500) {
    Answers answers;
    for (int k = 0; k < 500; ++k) clusters_[0]->Spawn("Log", {}, {.rank = 1}, "", kSoon, answers.Taker());
    for (const auto& one : answers.Await(500)) {
      ASSERT_TRUE(one.status.ok()) << one.status;
      all.push_back(*ActorRef::Parse(one.result));
    }
  }
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

void Nap(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// 1: a parameter server: readers hear the state, then a change.
TEST_F(ClusterTest, ReadersOfALargeStateLeaveAKeptActorAlone) {
  Open(6);
  const auto actor = SpawnKept(0, 1, std::string(16 << 20, 'w'));
  ASSERT_TRUE(actor.ok());
  for (int from : {0, 2, 3, 4, 5})
    EXPECT_TRUE(Call(from, *actor, 4, "").ok());  // const; each is answered and done
  const auto pushed = Call(0, *actor, 0, "x");
  std::cerr << "push: " << pushed.status() << "\n";
  Nap(300);
  const auto after = Call(2, *actor, 4, "");
  EXPECT_TRUE(after.ok()) << after.status();
}

// 2: a Task's answer is told behind the save that has its effect.
TEST_F(ClusterTest, AnAsyncCallOfAKeptActorRunsOnce) {
  int twice = 0;
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
    std::cerr << "round " << round << " state after ONE call: " << state << "\n";
    if (state == "XX") ++twice;
    FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
    clusters_.clear();
  }
  EXPECT_EQ(twice, 0);
}

// 3: P is lost to its owner, lives on, and C has not heard of it.
TEST_F(ClusterTest, NothingIsHeardOfALostProcessThatLives) {
  Open(4);
  const auto actor = SpawnKept(0, 1, "");
  ASSERT_TRUE(actor.ok());
  job_.Deaf(1, true);
  job_.Hold(2, true);
  job_.Begin({0, 2, 3});
  AwaitLooking([&] { return clusters_[3]->counts().actors == 1 || clusters_[2]->counts().actors == 1; });
  const auto heard = Call(2, *actor, 3, "X", absl::Seconds(5));
  std::cerr << "caller hears: " << heard.status() << " " << heard.value_or("-") << "\n";
  job_.Hold(2, false);
  const auto state = Call(0, *actor, 4, "", absl::Seconds(5));
  std::cerr << "state is: '" << state.value_or("-") << "' " << state.status() << "\n";
  if (heard.ok()) {
    EXPECT_EQ(state.value_or("-"), "X");
  }
  job_.Deaf(1, false);
}

// 4: more than 1,024 kept actors of one process have something to keep.
TEST_F(ClusterTest, ThousandsOfKeptActorsSaveAtOnce) {
  Open(3);
  constexpr int kActors = 3000;
  std::vector<ActorRef> all;
  for (int i = 0; i < kActors; i += 500) {
    Answers answers;
    SpawnOptions options;
    options.keep = true;
    for (int k = 0; k < 500; ++k)
      clusters_[0]->Spawn("Log", options, {.rank = 1}, "", kSoon, answers.Taker());
    for (const auto& one : answers.Await(500)) all.push_back(*ActorRef::Parse(one.result));
  }
  Answers answers;
  for (const ActorRef& one : all) clusters_[2]->Call(one, 3, "a", kSoon, answers.Taker());
  int bad = 0;
  for (const auto& one : answers.Await(kActors)) bad += one.status.ok() ? 0 : 1;
  Answers again;
  for (const ActorRef& one : all) clusters_[2]->Call(one, 4, "", kSoon, again.Taker());
  std::map<std::string, int> errors;
  for (const auto& one : again.Await(kActors)) ++errors[std::string(one.status.ToString().substr(0, 40))];
  std::cerr << "calls that failed: " << bad << "\n";
  for (auto& [what, n] : errors) std::cerr << n << " x " << what << "\n";
  EXPECT_EQ(clusters_[1]->counts().actors, static_cast<size_t>(kActors));
}

// 4b: what was heard is undone.
TEST_F(ClusterTest, ThousandsThatWereHeardAreKept) {
  Open(3);
  constexpr int kActors = 3000;
  std::vector<ActorRef> all;
  for (int i = 0; i < kActors; i += 500) {
    Answers answers;
    SpawnOptions options;
    options.keep = true;
    for (int k = 0; k < 500; ++k)
      clusters_[0]->Spawn("Log", options, {.rank = 1}, "", kSoon, answers.Taker());
    for (const auto& one : answers.Await(500)) all.push_back(*ActorRef::Parse(one.result));
  }
  Answers answers;
  for (const ActorRef& one : all) clusters_[2]->Call(one, 3, "a", kSoon, answers.Taker());
  int heard = 0;
  for (const auto& one : answers.Await(kActors)) heard += one.status.ok() && one.result == "a";
  Nap(500);
  std::cerr << "heard OK " << heard << ", actors that live: " << clusters_[1]->counts().actors << "\n";
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
  for (auto& [what, n] : states) std::cerr << n << " actors have the state " << what << "\n";
  EXPECT_EQ(states["'a'"], heard);
}

// 5: more than 1,024 actors of one owner are lost, whom another has called.
TEST_F(ClusterTest, ThousandsAreLocated) {
  Open(4);
  constexpr int kActors = 3000;
  std::vector<ActorRef> all;
  for (int i = 0; i < kActors; i += 500) {
    Answers answers;
    SpawnOptions options;
    options.keep = true;
    for (int k = 0; k < 500; ++k)
      clusters_[0]->Spawn("Log", options, {.rank = 1}, "", kSoon, answers.Taker());
    for (const auto& one : answers.Await(500)) all.push_back(*ActorRef::Parse(one.result));
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
  for (auto& [what, n] : errors) std::cerr << n << " x " << what << "\n";
  EXPECT_EQ(errors["OK"], kActors);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

// 6 and 7: the window of the process itself is full as an actor is to be made anew, or ends.
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
  std::cerr << "kept actor: " << state.status() << "\n";
  EXPECT_TRUE(state.ok());
  Nap(1000);
  const auto ended = Call(0, *ends, 4, "", absl::Seconds(5));
  std::cerr << "ended actor: " << ended.status() << "\n";
  EXPECT_FALSE(ended.ok());
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
}

// 8: the answer to a spawn and the loss of its process are heard together.
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
  std::cerr << "spawn: " << ref.status() << "\n";
  if (ref.ok()) {
    const auto called = Call(0, *ActorRef::Parse(*ref), 0, "x", absl::Seconds(10));
    EXPECT_TRUE(called.ok()) << called.status();
  }
}

// 9: what is told that the cluster is closed spawns.
TEST_F(ClusterTest, ASpawnAsTheClusterClosesIsRefused) {
  Open(2);
  const auto actor = Spawn(0, 1, "");
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Cluster* const cluster = clusters_[0].get();
  Answers spawned;
  cluster->Call(*actor, 1, "", kSoon, [&](const absl::Status& status, absl::string_view) {
    std::cerr << "heard " << status << ", and spawns\n";
    cluster->Spawn("Log", {}, {.rank = 1}, "", kSoon, spawned.Taker());
  });
  AwaitLooking([&] { return clusters_[1]->counts().begun == 1; });
  clusters_.erase(0);
  EXPECT_FALSE(spawned.Get().ok());
}

// 10
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

// 11
TEST_F(ClusterTest, WhatIsTooLargeToBeMadeAnewIsNotKept) {
  Open(2);
  const auto large = SpawnKept(0, 1, std::string(kKeptArgumentsMax + 1, 'x'));
  EXPECT_EQ(large.status().code(), absl::StatusCode::kInvalidArgument);
}

// 12
TEST_F(ClusterTest, DeadCallersAreNotInTheRecord) {
  Open(8);
  const auto actor = SpawnKept(0, 1, "");
  ASSERT_TRUE(actor.ok());
  std::vector<int> alive = {0, 1, 2, 3, 4, 5, 6, 7};
  while (alive.size() > 2) {
    const auto heard = Call(alive[2], *actor, 0, std::string(20 << 20, 'a'));
    std::cerr << "caller " << alive[2] << ", actor at " << alive[1] << ": " << heard.status() << "\n";
    for (const int i : {1, 2})
      FakeNet::Get().CutOff(clusters_[alive[static_cast<size_t>(i)]]->endpoint(), true);
    alive.erase(alive.begin() + 1, alive.begin() + 3);
    job_.Begin(alive);
    AwaitLooking([&] { return clusters_[alive[1]]->counts().actors == 1; });
  }
  const auto heard = Call(0, *actor, 0, std::string(20 << 20, 'a'));
  std::cerr << "caller 0: " << heard.status() << "\n";
  Nap(500);
  const auto after = Call(0, *actor, 4, "", absl::Seconds(10));
  EXPECT_TRUE(after.ok()) << after.status();
  for (auto& [process, cluster] : clusters_) FakeNet::Get().CutOff(cluster->endpoint(), false);
}

// 16
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

// 17
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
    std::map<std::string, int> codes;
    for (const int from : {0, 1}) {
      for (const auto& one : answers[from].Await(kCalls)) {
        ++codes[absl::StatusCodeToString(one.status.code())];
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
    for (auto& [code, n] : codes) std::cerr << code << " " << n << ", ";
    std::cerr << "state " << state->size() << "\n";
    for (auto& [process, cluster] : clusters_) FakeNet::Get().CutOff(cluster->endpoint(), false);
    clusters_.clear();
  }
}

// 10b: ranks are given anew, and the owner has the rank where the actor was.
TEST_F(ClusterTest, AKeptActorMovesToOthersThanItsOwner) {
  Open(4);
  const auto actor = SpawnKept(2, 1, "x");
  ASSERT_TRUE(actor.ok());
  EXPECT_EQ(*Call(0, *actor, 3, "a"), "xa");
  job_.Begin({0, 2, 3});
  AwaitLooking([&] { return clusters_[2]->processes() == 3 && Call(0, *actor, 3, "b").ok(); });
  for (const int i : {0, 2, 3})
    std::cerr << "process " << i << " has " << clusters_[i]->counts().actors << "\n";
  EXPECT_EQ(clusters_[2]->counts().actors, 0u);
  Call(0, *actor, 2, "").IgnoreError();
  EXPECT_EQ(*Call(0, *actor, 4, ""), "xabb");  // it was looked twice
}

// 13: a caller that counts as lost lives on, and its connection breaks.
TEST_F(ClusterTest, ACallOfALostCallerRunsOnce) {
  Open(3);
  const auto actor = Spawn(0, 1, "");
  ASSERT_TRUE(actor.ok());
  Gate(false);
  Answers answers;
  clusters_[2]->Call(*actor, 1, "once", kSoon, answers.Taker());
  AwaitLooking([&] { return clusters_[1]->counts().begun == 1; });
  job_.Deaf(2, true);
  job_.Begin({0, 1});
  AwaitLooking([&] { return clusters_[1]->processes() == 2; });
  Nap(200);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), true);
  FakeNet::Get().CutOff(clusters_[1]->endpoint(), false);
  Nap(300);
  Gate(true);
  const auto heard = answers.Get();
  std::cerr << "heard " << heard.status() << "\n";
  Nap(200);
  EXPECT_EQ(world_.Count(), 1u);
  job_.Deaf(2, false);
}

// 14
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

// 22: what threw too often has ended, and comes back when its process is lost.
TEST_F(ClusterTest, AnEndedActorStaysSo) {
  Open(3);
  const auto actor = Spawn(0, 1, "x", kSoon, 1), kept = Spawn(0, 1, "k", kSoon, 1, true);
  ASSERT_TRUE(actor.ok() && kept.ok());
  for (const ActorRef& ref : {*actor, *kept}) {
    EXPECT_TRUE(Call(2, ref, 3, "a").ok());
    for (int i = 0; i < 2; ++i) Call(2, ref, 2, "").IgnoreError();
    AwaitLooking([&] { return absl::IsNotFound(Call(2, ref, 4, "").status()); });
    std::cerr << Call(2, ref, 4, "").status() << "\n";
  }
  job_.Begin({0, 2});
  AwaitLooking([&] { return clusters_[2]->processes() == 2; });
  Nap(300);
  for (const ActorRef& ref : {*actor, *kept}) {
    const auto after = Call(2, ref, 4, "", absl::Seconds(5));
    EXPECT_TRUE(absl::IsNotFound(after.status())) << "it lives: " << after.value_or("-") << after.status();
  }
}

// 23
TEST_F(ClusterTest, VeryLongDeadline) {
  Open(2);
  const auto actor = Spawn(0, 1, "x"), here = Spawn(0, 0, "x");
  ASSERT_TRUE(actor.ok() && here.ok());
  EXPECT_TRUE(Call(0, *actor, 4, "", absl::Nanoseconds(INT64_MAX)).ok())
      << Call(0, *actor, 4, "", absl::Nanoseconds(INT64_MAX)).status();
  EXPECT_TRUE(Call(0, *here, 4, "", absl::Nanoseconds(INT64_MAX)).ok())
      << Call(0, *here, 4, "", absl::Nanoseconds(INT64_MAX)).status();
}

// 24: an answer is lost with its connection, and then the actor ends.
TEST_F(ClusterTest, RanAndNotFound) {
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
  const auto heard = answer.Get();
  std::cerr << "effects " << world_.Count() << ", heard " << heard.status() << "\n";
}

// 18: the owner is away for a minute; the actor throws as it is asked for its state again.
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
  f.save = [&](uint64_t) { ++saves; };
  f.keep = [&](uint64_t, const CallerId&, uint64_t, const std::string& r) { record = r; };
  f.end = [](uint64_t, const std::string&) {};
  const CallerId own{1, 1}, owner{2, 2}, caller{3, 3};
  IncomingCalls in(own, 100, f);
  in.Keep(1, owner, 1, {});
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
  std::cerr << "answer to A: code " << static_cast<int>(kept.callers[0].answers[0].second[0]) << " "
            << kept.callers[0].answers[0].second.substr(1) << "; the state that is kept: " << kept.state
            << "\n";
  EXPECT_EQ(kept.callers[0].answers[0].second[0], '\0');
}

// 19: to be made anew takes a minute, once.
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
  std::cerr << "spawned within 10 min, made anew within " << making[1].first << "\n";
  making[1].second(absl::DeadlineExceededError("there is no connection to rank 2"), "");
  EXPECT_EQ(owned.size(), 1u);
}

TEST(ClusterParts, TheLedgerDoesNotRunWhatItsRecordHasAnswered) {
  CallLedger ledger(10, {CallerRecord{{1, 1}, 0, {{5, "answer"}}}});
  EXPECT_EQ(ledger.Offer({1, 1}, 5, 4).what, Admission::kAnswered);
}

}  // namespace
}  // namespace gtrain::actors
