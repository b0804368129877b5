// The other end of bench_actors. Each line "KIND COUNT" is answered with the seconds that COUNT calls took.
//
//   actors_calls actors       of an actor in this process; lines on standard input
//   actors_calls queue        by hand, of a thread that takes them from a queue; likewise
//   actors_calls job IN OUT   of an actor in another rank of the job; lines and answers by two named pipes
//
//   sync      each call is made when the one before has been answered
//   windowed  64 calls are under way
//   wide      512 are
//   large     each has 1 MiB of arguments, 4 are under way
//   kept_sync, kept_wide   sync and wide, of an actor whose state is kept
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
#include <fstream>
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

class Counter {
 public:
  explicit Counter(int64_t from) : value_(from) {}
  int64_t Add(int64_t by) { return value_ += by; }
  int64_t Take(const std::vector<uint8_t>& bytes) { return value_ += bytes.empty() ? 0 : 1; }
  void Persist(auto& archive) { archive(value_); }

 private:
  int64_t value_;
};
[[maybe_unused]] constexpr auto kCounter =
    gtrain::Actor<Counter, gtrain::Ctor<int64_t>, gtrain::Methods<&Counter::Add, &Counter::Take>>;

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "actors_calls: %s\n", what);
  std::exit(1);
}

// ---- actors

// Elsewhere, where there is an elsewhere.
gtrain::Spawn Place(const gtrain::Cluster& cluster) {
  return gtrain::Spawn().On(cluster.processes() > 1 ? gtrain::Spread::kProcesses : gtrain::Spread::kHere);
}

gtrain::Task<> Sync(gtrain::Cluster& cluster, int64_t count, gtrain::Durable durable) {
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster).Keep(durable), 0);
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) last = co_await counter.Call<&Counter::Add>(1);
  Expect(last == count, "a call was lost");
}

template <size_t kUnderWay, typename Call>
gtrain::Task<> Windowed(int64_t count, Call call) {
  std::deque<gtrain::Future<int64_t>> window;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (window.size() == kUnderWay) {
      last = co_await std::move(window.front());
      window.pop_front();
    }
    window.push_back(call());
  }
  while (!window.empty()) {
    last = co_await std::move(window.front());
    window.pop_front();
  }
  Expect(last == count, "a call was lost");
}

gtrain::Task<> Small(gtrain::Cluster& cluster, int64_t count, bool wide, gtrain::Durable durable) {
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster).Keep(durable), 0);
  const auto call = [&counter] { return counter.Call<&Counter::Add>(1); };
  if (wide) co_await Windowed<512>(count, call);
  if (!wide) co_await Windowed<64>(count, call);
}

gtrain::Task<> Large(gtrain::Cluster& cluster, int64_t count) {
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster), 0);
  const std::vector<uint8_t> bytes(1 << 20, 1);
  co_await Windowed<4>(count, [&] { return counter.Call<&Counter::Take>(bytes); });
}

gtrain::Task<> Many(gtrain::Cluster& cluster, int64_t count) {
  std::deque<gtrain::Future<gtrain::Owner<Counter>>> making;
  std::vector<gtrain::Owner<Counter>> counters;
  for (int64_t i = 0; i < count; ++i) {
    if (making.size() == 512) {
      counters.push_back(co_await std::move(making.front()));
      making.pop_front();
    }
    making.push_back(cluster.Spawn<Counter>(Place(cluster), i));
  }
  for (auto& one : making) counters.push_back(co_await std::move(one));
  for (int64_t i = 0; i < count; ++i)
    Expect(co_await counters[static_cast<size_t>(i)].Call<&Counter::Add>(1) == i + 1, "a wrong answer");
}

gtrain::Task<> OfActors(gtrain::Cluster& cluster, std::string kind, int64_t count) {
  const bool kept = kind.starts_with("kept_");
  const auto durable = kept ? gtrain::Durable::kPeer : gtrain::Durable::kNo;
  if (kept) kind.erase(0, 5);
  if (kind == "sync") co_await Sync(cluster, count, durable);
  if (kind == "windowed" || kind == "wide") co_await Small(cluster, count, kind == "wide", durable);
  if (kind == "large") co_await Large(cluster, count);
  if (kind == "many") co_await Many(cluster, count);
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
  const size_t most = kind == "sync" ? 1 : 64;
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

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

gtrain::Task<> Answer(gtrain::Cluster& cluster, std::istream& in, std::ostream& out) {
  std::string kind;
  int64_t count = 0;
  while (in >> kind >> count) {
    const auto begin = std::chrono::steady_clock::now();
    co_await OfActors(cluster, kind, count);
    out << SecondsSince(begin) << std::endl;
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  Expect(argc == (what == "job" ? 4 : 2), "usage: actors_calls actors|queue|job IN OUT");
  if (what == "job") {
    return gtrain::Main(argc, argv, [argv](gtrain::Cluster& cluster) -> gtrain::Task<> {
      std::ifstream in(argv[2]);
      std::ofstream out(argv[3]);
      co_await Answer(cluster, in, out);
    });
  }
  auto cluster = gtrain::Cluster::Open().value();
  if (what == "actors") {
    gtrain::internal::RunToEnd(Answer(*cluster, std::cin, std::cout)).status().ThrowIfError();
    return 0;
  }
  Queue queue;
  std::string kind;
  int64_t count = 0;
  while (std::cin >> kind >> count) {
    const auto begin = std::chrono::steady_clock::now();
    OfQueue(queue, kind, count);
    std::cout << SecondsSince(begin) << std::endl;
  }
  return 0;
}
