// The other end of bench_actors: calls of an actor in this process, or by hand of a thread that takes them
// from a queue. Each line on standard input, "KIND COUNT", is answered with the seconds that COUNT calls
// took.
//
//   sync      each call is made when the one before has been answered
//   windowed  64 calls are under way
//   many      COUNT actors are made, called once each, and ended; by hand: objects that the thread calls
//
// A program as users write them: the headers and libgtrain.so.
#include <gtrain/actor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kWindow = 64;

class Counter {
 public:
  explicit Counter(int64_t from) : value_(from) {}
  int64_t Add(int64_t by) { return value_ += by; }

 private:
  int64_t value_;
};
[[maybe_unused]] constexpr auto kCounter =
    gtrain::Actor<Counter, gtrain::Ctor<int64_t>, gtrain::Methods<&Counter::Add>>;

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "actors_calls: %s\n", what);
  std::exit(1);
}

// ---- actors

gtrain::Task<> Sync(gtrain::Cluster& cluster, int64_t count) {
  auto counter = co_await cluster.Spawn<Counter>(0);
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) last = co_await counter.Call<&Counter::Add>(1);
  Expect(last == count, "a call was lost");
}

gtrain::Task<> Windowed(gtrain::Cluster& cluster, int64_t count) {
  auto counter = co_await cluster.Spawn<Counter>(0);
  std::deque<gtrain::Future<int64_t>> window;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (static_cast<int>(window.size()) == kWindow) {
      last = co_await std::move(window.front());
      window.pop_front();
    }
    window.push_back(counter.Call<&Counter::Add>(1));
  }
  while (!window.empty()) {
    last = co_await std::move(window.front());
    window.pop_front();
  }
  Expect(last == count, "a call was lost");
}

gtrain::Task<> Many(gtrain::Cluster& cluster, int64_t count) {
  std::vector<gtrain::Future<gtrain::Owner<Counter>>> making;
  for (int64_t i = 0; i < count; ++i) making.push_back(cluster.Spawn<Counter>(i));
  std::vector<gtrain::Owner<Counter>> counters;
  for (auto& one : making) counters.push_back(co_await std::move(one));
  for (int64_t i = 0; i < count; ++i)
    Expect(co_await counters[static_cast<size_t>(i)].Call<&Counter::Add>(1) == i + 1, "a wrong answer");
}

void OfActors(gtrain::Cluster& cluster, const std::string& kind, int64_t count) {
  const auto task = kind == "sync" ? Sync : kind == "windowed" ? Windowed : Many;
  gtrain::internal::RunToEnd(task(cluster, count)).status().ThrowIfError();
}

// ---- by hand

class Queue {
 public:
  Queue() : thread_([this] { Work(); }) {}
  ~Queue() {
    Push(nullptr);
    thread_.join();
  }
  std::future<int64_t> Add(Counter& counter, int64_t by) {
    auto promise = std::make_shared<std::promise<int64_t>>();
    std::future<int64_t> future = promise->get_future();
    Push([promise, &counter, by] { promise->set_value(counter.Add(by)); });
    return future;
  }

 private:
  void Push(std::function<void()> call) {
    {
      const std::lock_guard lock(mutex_);
      calls_.push_back(std::move(call));
    }
    changed_.notify_one();
  }
  void Work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !calls_.empty(); });
      const std::function<void()> call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      if (!call) return;
      call();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  std::thread thread_;
};

void OfQueue(Queue& queue, const std::string& kind, int64_t count) {
  if (kind == "many") {
    std::vector<std::unique_ptr<Counter>> counters;
    for (int64_t i = 0; i < count; ++i) counters.push_back(std::make_unique<Counter>(i));
    for (int64_t i = 0; i < count; ++i)
      Expect(queue.Add(*counters[static_cast<size_t>(i)], 1).get() == i + 1, "a wrong answer");
    return;
  }
  Counter counter(0);
  const size_t most = kind == "sync" ? 1 : kWindow;
  std::deque<std::future<int64_t>> window;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    window.push_back(queue.Add(counter, 1));
    if (window.size() < most) continue;
    last = window.front().get();
    window.pop_front();
  }
  for (; !window.empty(); window.pop_front()) last = window.front().get();
  Expect(last == count, "a call was lost");
}

}  // namespace

int main(int argc, char** argv) {
  Expect(argc == 2, "usage: actors_calls actors|queue");
  const bool actors = std::string(argv[1]) == "actors";
  auto cluster = gtrain::Cluster::Open().value();
  Queue queue;
  std::string kind;
  int64_t count = 0;
  while (std::cin >> kind >> count) {
    const auto begin = std::chrono::steady_clock::now();
    if (actors) {
      OfActors(*cluster, kind, count);
    } else {
      OfQueue(queue, kind, count);
    }
    std::printf("%.9f\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::fflush(stdout);
  }
  return 0;
}
