// A job of clusters in one process, for tests: their generations, what their actors do, and its connections.
#pragma once
#include <sys/socket.h>

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
#include "actors/exec/cluster.h"
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

inline constexpr absl::Duration kSoon = absl::Seconds(60);

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
    void Note(const std::string& text) override {
      MutexLock lock(&job_->mutex_);
      job_->notes_.push_back(text);
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
  std::vector<std::string> notes_;

 public:
  std::vector<std::string> notes() {
    MutexLock lock(&mutex_);
    return notes_;
  }
  std::atomic<uint64_t> reported_ = 0;
};

// All that the actors of a test have done.
struct World {
  Mutex mutex;
  std::vector<std::string> effects;
  bool gate = true, async_gate = true;
  int saves = 1 << 30;
  std::atomic<int> alive = 0, made = 0;

  size_t Count() {
    MutexLock lock(&mutex);
    return effects.size();
  }
};

// Methods: 0 has its argument as an effect and answers with it; 1 does so behind the gate; 2 throws, so to
// say; 3 adds its argument to the state and answers with all of it; 4 answers with the state.
inline ActorClass TypeOf(World* world, const std::string& signature) {
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
    ++world->made;
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
      network.shared_memory = shared_memory_;
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
  static std::string NetworkOf(const Cluster& cluster) {
    return cluster.endpoint().substr(0, cluster.endpoint().find('+'));
  }
  // Shuts all Unix sockets of this process down that are connected. How many there were.
  static int CloseLinks() {
    int closed = 0;
    for (int fd = 3; fd < 4096; ++fd) {
      int type = 0, listens = 0;
      socklen_t size = sizeof(type);
      if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_SEQPACKET) continue;
      size = sizeof(listens);
      if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens != 0) continue;
      if (shutdown(fd, SHUT_RDWR) == 0) ++closed;
    }
    return closed;
  }
  // Time in which something that must not happen could.
  static void Nap(int ms) {
    Mutex mutex;
    MutexLock lock(&mutex);
    mutex.AwaitFor(absl::Milliseconds(ms), [] { return false; });
  }
  // Actors at rank 1, owned by process 0.
  std::vector<ActorRef> SpawnMany(int count, bool keep) {
    constexpr int kAtOnce = 500;
    SpawnOptions options;
    options.keep = keep;
    std::vector<ActorRef> all;
    for (int i = 0; i < count; i += kAtOnce) {
      Answers answers;
      for (int k = 0; k < kAtOnce; ++k)
        clusters_[0]->Spawn("Log", options, {.rank = 1}, "", kSoon, answers.Taker());
      for (const auto& one : answers.Await(kAtOnce)) {
        EXPECT_TRUE(one.status.ok()) << one.status;
        if (one.status.ok()) all.push_back(*ActorRef::Parse(one.result));
      }
    }
    return all;
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
  bool shared_memory_ = false;
  World world_;

  FakeJob job_;
  std::map<int, std::unique_ptr<Cluster>> clusters_;
};

class ClusterOverZmqTest : public ClusterTest {
 protected:
  ClusterOverZmqTest() : ClusterTest(&net::JobNet()) {}
};

}  // namespace gtrain::actors
