// The other end of bench_actors: orders (orders.h), and what they come to.
//
//   actors_calls actors       of an actor in this process; orders on standard input: sync, windowed, memory
//   actors_calls queue        by hand, of a thread that takes calls from a queue; likewise sync, windowed
//   actors_calls job IN OUT   of an actor in another rank of the job; orders and answers by two named pipes:
//                             sync, windowed, wide, large, tail
//   actors_calls place FILE   one call of an actor in each rank of the job, all at once; writes the
//                             nanoseconds of the monotonic clock when all are answered
//
//   kept_sync, kept_wide   sync and wide, of an actor whose state is kept
//   many      COUNT actors are made, called once each, and ended; by hand: objects that the thread calls
//   batch     1,000 calls are made, then all of them are awaited, and so on
//   object    each call has an object of 1 MiB, which is made for it, read by the actor, and let go; 4 are
//   under way shared    an object of COUNT MiB is made, and read by an actor of each other rank, all at once
//   pairs     actors of two ranks call one in each of two others, each of which gets COUNT / 2 calls, with up
//             to 1,000 under way; a job of four
//
// A program as users write them: the headers and libgtrain.so.
#include <gtrain/actor.h>

#include <algorithm>
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

#include "bench/orders.h"

namespace {

using gtrain::bench::Expect;
using gtrain::bench::Figures;
using gtrain::bench::Order;

// What Ray's microbenchmark has under way when it calls as fast as it can.
constexpr int64_t kBatch = 1000;

class Counter {
 public:
  explicit Counter(int64_t from) : value_(from) {}
  int64_t Add(int64_t by) { return value_ += by; }
  int64_t Take(const std::vector<uint8_t>& bytes) { return value_ += bytes.empty() ? 0 : 1; }
  // A byte of each cache line is read, so that all of it has come to the processor.
  gtrain::Task<int64_t> Read(gtrain::Object<uint8_t> object) {
    const auto view = co_await object.Read();
    int64_t ones = 0;
    for (size_t i = 0; i < view.size(); i += 64) ones += view[i];
    Expect(ones == static_cast<int64_t>((view.size() + 63) / 64), "an object came with other bytes");
    co_return value_ += 1;
  }
  void Persist(auto& archive) { archive(value_); }

 private:
  int64_t value_;
};
[[maybe_unused]] constexpr auto kCounter =
    gtrain::Actor<Counter, gtrain::Ctor<int64_t>,
                  gtrain::Methods<&Counter::Add, &Counter::Take, &Counter::Read>>;

// ---- actors

// A batch of calls, each to the next of the counters, and so on.
gtrain::Task<> CallInBatches(std::vector<gtrain::Ref<Counter>> counters, int64_t count) {
  for (int64_t made = 0; made < count;) {
    std::vector<gtrain::Future<int64_t>> calls;
    for (; made < count && static_cast<int64_t>(calls.size()) < kBatch; ++made)
      calls.push_back(counters[static_cast<size_t>(made) % counters.size()].Call<&Counter::Add>(1));
    for (auto& call : calls) co_await std::move(call);
  }
}

class Caller {
 public:
  gtrain::Task<> CallAll(std::vector<gtrain::Ref<Counter>> counters, int64_t count) {
    co_await CallInBatches(std::move(counters), count);
  }
};
[[maybe_unused]] constexpr auto kCaller =
    gtrain::Actor<Caller, gtrain::Ctor<>, gtrain::Methods<&Caller::CallAll>>;

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

template <typename Call>
gtrain::Task<> Windowed(const Order& order, Figures& figures, Call call) {
  struct Made {
    gtrain::Future<int64_t> answer;
    Figures::Clock::time_point begin;
  };
  std::deque<Made> window;
  int64_t last = 0;
  for (int64_t made = 0, answered = 0; answered < order.count; ++answered) {
    for (; made < order.count && made - answered < order.UnderWay(); ++made) {
      const auto begin = figures.Begin();
      window.push_back({call(), begin});
    }
    last = co_await std::move(window.front().answer);
    figures.End(window.front().begin);
    window.pop_front();
  }
  Expect(last == order.count, "a call was lost");
}

gtrain::Task<> Small(gtrain::Cluster& cluster, const Order& order, Figures& figures,
                     gtrain::Durable durable) {
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster).Keep(durable), 0);
  co_await Windowed(order, figures, [&counter] { return counter.Call<&Counter::Add>(1); });
}

gtrain::Task<> Large(gtrain::Cluster& cluster, const Order& order, Figures& figures) {
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster), 0);
  const std::vector<uint8_t> bytes(gtrain::bench::kLargeBytes, 1);
  co_await Windowed(order, figures, [&] { return counter.Call<&Counter::Take>(bytes); });
}

gtrain::Task<> WithObjects(gtrain::Cluster& cluster, const Order& order) {
  struct Made {
    gtrain::ObjectOwner<uint8_t> object;
    gtrain::Future<int64_t> answer;
  };
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster), 0);
  const std::vector<uint8_t> bytes(gtrain::bench::kLargeBytes, 1);
  std::deque<Made> window;
  int64_t last = 0;
  for (int64_t made = 0; made < order.count || !window.empty();) {
    if (made < order.count && static_cast<int64_t>(window.size()) < order.UnderWay()) {
      auto object = co_await cluster.Put(bytes);
      auto answer = counter.Call<&Counter::Read>(object.ref());
      window.push_back({std::move(object), std::move(answer)});
      ++made;
    } else {
      last = co_await std::move(window.front().answer);
      window.pop_front();
    }
  }
  Expect(last == order.count, "a call was lost");
}

gtrain::Task<> Shared(gtrain::Cluster& cluster, int64_t mebibytes) {
  std::vector<gtrain::Owner<Counter>> readers;
  for (int rank = 1; rank < cluster.processes(); ++rank)
    readers.push_back(co_await cluster.Spawn<Counter>(gtrain::Spawn().OnRank(rank), 0));
  auto draft = co_await cluster.Create<uint8_t>(mebibytes << 20);
  std::ranges::fill(draft.span(), uint8_t{1});
  const auto object = co_await std::move(draft).Seal();
  std::vector<gtrain::Future<int64_t>> reading;
  for (const auto& reader : readers) reading.push_back(reader.Call<&Counter::Read>(object.ref()));
  for (auto& one : reading) co_await std::move(one);
}

gtrain::Task<> Batches(gtrain::Cluster& cluster, int64_t count) {
  auto counter = co_await cluster.Spawn<Counter>(Place(cluster), 0);
  std::vector<gtrain::Ref<Counter>> counters(1, counter);
  co_await CallInBatches(std::move(counters), count);
}

gtrain::Task<> Pairs(gtrain::Cluster& cluster, int64_t count) {
  constexpr int kEach = 2;
  std::vector<gtrain::Owner<Caller>> callers;
  std::vector<gtrain::Owner<Counter>> counters;
  for (int i = 0; i < kEach; ++i) {
    callers.push_back(co_await cluster.Spawn<Caller>(gtrain::Spawn().OnRank(i)));
    counters.push_back(co_await cluster.Spawn<Counter>(gtrain::Spawn().OnRank(kEach + i), 0));
  }
  const std::vector<gtrain::Ref<Counter>> all(counters.begin(), counters.end());
  std::vector<gtrain::Future<void>> calls;
  for (const auto& caller : callers) calls.push_back(caller.Call<&Caller::CallAll>(all, count / kEach));
  for (auto& call : calls) co_await std::move(call);
}

gtrain::Task<> Many(gtrain::Cluster& cluster, const Order& order, Figures& figures) {
  std::deque<gtrain::Future<gtrain::Owner<Counter>>> making;
  std::vector<gtrain::Owner<Counter>> counters;
  for (int64_t i = 0; i < order.count; ++i) {
    if (making.size() == 512) {
      counters.push_back(co_await std::move(making.front()));
      making.pop_front();
    }
    making.push_back(cluster.Spawn<Counter>(Place(cluster), i));
  }
  for (auto& one : making) counters.push_back(co_await std::move(one));
  for (int64_t i = 0; i < order.count; ++i)
    Expect(co_await counters[static_cast<size_t>(i)].Call<&Counter::Add>(1) == i + 1, "a wrong answer");
  if (order.kind == "memory") figures.TakeMemory(order.count);
}

gtrain::Task<> OfActors(gtrain::Cluster& cluster, Order order, Figures& figures) {
  const std::string kind = order.kind;
  const bool kept = kind.starts_with("kept_");
  const auto durable = kept ? gtrain::Durable::kPeer : gtrain::Durable::kNo;
  if (kept) order.kind.erase(0, 5);
  if (order.kind == "sync") {
    co_await Sync(cluster, order.count, durable);
  } else if (order.kind == "large") {
    co_await Large(cluster, order, figures);
  } else if (order.kind == "many" || order.kind == "memory") {
    co_await Many(cluster, order, figures);
  } else if (order.kind == "object") {
    co_await WithObjects(cluster, order);
  } else if (order.kind == "shared") {
    co_await Shared(cluster, order.count);
  } else if (order.kind == "batch") {
    co_await Batches(cluster, order.count);
  } else if (order.kind == "pairs") {
    co_await Pairs(cluster, order.count);
  } else {
    co_await Small(cluster, order, figures, durable);
  }
}

gtrain::Task<> CallEachRank(gtrain::Cluster& cluster, const std::string& file) {
  std::vector<gtrain::Future<gtrain::Owner<Counter>>> making;
  for (int rank = 0; rank < cluster.processes(); ++rank)
    making.push_back(cluster.Spawn<Counter>(gtrain::Spawn().OnRank(rank), rank));
  std::vector<gtrain::Owner<Counter>> counters;
  for (auto& one : making) counters.push_back(co_await std::move(one));
  std::vector<gtrain::Future<int64_t>> calls;
  for (const auto& counter : counters) calls.push_back(counter.Call<&Counter::Add>(1));
  for (size_t rank = 0; rank < calls.size(); ++rank)
    Expect(co_await std::move(calls[rank]) == static_cast<int64_t>(rank) + 1, "a wrong answer");
  std::ofstream(file) << std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
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

gtrain::Task<> AnswerAll(gtrain::Cluster& cluster, std::istream& in, std::ostream& out) {
  Order order;
  while (in >> order.kind >> order.count) {
    Figures figures(order.Tail());
    co_await OfActors(cluster, order, figures);
    gtrain::bench::Answer(order, figures, out);
  }
}

// A job's ranks, of which one drives.
int Drive(const std::string& what, int argc, char** argv) {
  return gtrain::Main(argc, argv, [what, argv](gtrain::Cluster& cluster) -> gtrain::Task<> {
    if (what == "place") {
      co_await CallEachRank(cluster, argv[2]);
    } else {
      std::ifstream in(argv[2]);
      std::ofstream out(argv[3]);
      co_await AnswerAll(cluster, in, out);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const bool in_job = what == "job" || what == "place";
  Expect(argc == (what == "job" ? 4
                  : in_job      ? 3
                                : 2),
         "usage: actors_calls actors|queue|job IN OUT|place FILE");
  if (in_job) return Drive(what, argc, argv);
  if (what == "actors") {
    auto cluster = gtrain::Cluster::Open().value();
    gtrain::internal::RunToEnd(AnswerAll(*cluster, std::cin, std::cout)).status().ThrowIfError();
    return 0;
  }
  Queue queue;
  gtrain::bench::AnswerOrders(std::cin, std::cout, [&queue](const Order& order, Figures&) {
    OfQueue(queue, order.kind, order.count);
  });
  return 0;
}
