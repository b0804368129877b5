// Actors on several ranks, as a user writes them.
//   e2e_actors_driver DIR WHAT ...
// DIR/process.PID is there for each process, DIR/driver has the number of the one that drives. WHAT:
//   place COUNT         spawns COUNT actors and prints the process of each; "nodes" spreads over machines
//   call ACTORS CALLS   calls each so often, and prints what it counted
//   fail                ends with an error
//   count SECONDS       adds to a counter on each rank but its own, and writes what it knows to DIR/result
//   nest COUNT          an actor on another rank spawns COUNT of its own, and they end with it
//   stubborn            calls an actor of another rank for ever, whatever comes of it; DIR/begun likewise
//   keep SECONDS        likewise, with sums whose state is kept; DIR/begun is there when they are
//   object BYTES        makes an object, which a reader on each other rank adds up, all at once
//   survive             finds a detached sum, or makes it, and adds 1 to it for ever; DIR/driver.PID has what
//                       came of it, and the file DIR/enough ends it
//   apart COUNT         spawns a group of COUNT that are to be in processes of their own, and adds them up
//   observe             an actor on rank 1 blocks in a method until the pipe DIR/go is opened, another awaits
//                       it, one has thrown; DIR/begun likewise
#include <gtrain/gtrain.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

std::vector<std::string> arguments;

// Each effect is a line of a file, so that a test counts what has happened and not what was answered.
class Counter {
 public:
  explicit Counter(std::string name) : effects_(arguments[0] + "/effects." + name, std::ios::app) {}
  int64_t Add(int64_t number) {
    effects_ << number << std::endl;
    return ++count_;
  }
  int64_t Count() const { return count_; }
  int64_t Process() const { return getpid(); }

 private:
  std::ofstream effects_;
  int64_t count_ = 0;
};
[[maybe_unused]] constexpr auto kCounter =
    gtrain::Actor<Counter, gtrain::Ctor<std::string>,
                  gtrain::Methods<&Counter::Add, &Counter::Count, &Counter::Process>>;

// Has actors of its own, on whichever ranks.
class Parent {
 public:
  gtrain::Task<int64_t> Bear(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      children_.push_back(co_await gtrain::Cluster::Current().Spawn<Counter>("child-" + std::to_string(i)));
    }
    auto shared = co_await gtrain::Cluster::Current().Find<Counter>("everybody's");
    int64_t sum = 10 * co_await shared.Call<&Counter::Add>(int64_t{1});
    for (const auto& child : children_) sum += co_await child.Call<&Counter::Add>(int64_t{7});
    co_return sum;
  }
  std::vector<gtrain::Ref<Counter>> Children() const { return {children_.begin(), children_.end()}; }
  void Throw() const { throw std::runtime_error("a parent throws"); }

 private:
  std::vector<gtrain::Owner<Counter>> children_;
};
[[maybe_unused]] constexpr auto kParent =
    gtrain::Actor<Parent, gtrain::Ctor<>, gtrain::Methods<&Parent::Bear, &Parent::Children, &Parent::Throw>>;

gtrain::Task<> Nest(gtrain::Cluster& cluster, int64_t count) {
  auto shared = co_await cluster.Spawn<Counter>(gtrain::Spawn("everybody's").OnRank(2), "shared");
  auto parent = co_await cluster.Spawn<Parent>(gtrain::Spawn().OnRank(1));
  const int64_t sum = co_await parent.Call<&Parent::Bear>(count);
  const auto children = co_await parent.Call<&Parent::Children>();
  std::printf("sum %lld\n", static_cast<long long>(sum));
  for (const auto& child : children) {  // whoever has a reference may call it
    const int64_t process = co_await child.Call<&Counter::Process>();
    std::printf("process %lld\n", static_cast<long long>(process));
  }
  // It is made anew, and has none of them any more.
  (void)co_await gtrain::Try(parent.Call<&Parent::Throw>());
  const auto left = co_await parent.Call<&Parent::Children>();
  size_t ended = 0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (ended < children.size() && std::chrono::steady_clock::now() < until) {
    ended = 0;
    for (const auto& child : children) {
      const auto count = co_await gtrain::Try(child.Call<&Counter::Count>());
      ended += count.status().code() == gtrain::StatusCode::kNotFound ? 1 : 0;
    }
  }
  std::printf("left %zu ended %zu\n", left.size(), ended);
}

gtrain::Task<> CallForEver(gtrain::Cluster& cluster) {
  auto counter = co_await cluster.Spawn<Counter>(gtrain::Spawn().OnRank(1), "ever");
  co_await counter.Call<&Counter::Add>(int64_t{1});
  std::ofstream(arguments[0] + "/begun");
  for (;;) (void)co_await gtrain::Try(counter.Call<&Counter::Count>());
}

gtrain::Task<> PlaceAll(gtrain::Cluster& cluster, int count) {
  gtrain::Spawn options;
  if (arguments.size() > 3) options.On(gtrain::Spread::kNodes);
  std::vector<gtrain::Owner<Counter>> all;
  for (int i = 0; i < count; ++i)
    all.push_back(co_await cluster.Spawn<Counter>(options, "place-" + std::to_string(i)));
  for (const auto& one : all) {
    const int64_t process = co_await one.Call<&Counter::Process>();
    std::printf("process %lld\n", static_cast<long long>(process));
  }
  std::printf("of %d\n", cluster.processes());
}

gtrain::Task<> CallAll(gtrain::Cluster& cluster, int actors, int calls) {
  auto group =
      co_await cluster.SpawnGroup<Counter>(static_cast<size_t>(actors), gtrain::Spawn(), std::string("call"));
  for (int i = 0; i < calls; ++i) co_await group.Call<&Counter::Add>(int64_t{i});
  const auto counts = co_await group.Call<&Counter::Count>();
  for (const int64_t count : counts) std::printf("counted %lld\n", static_cast<long long>(count));
}

// A counter on each rank but the driver's; a lost one is made anew, and what it had counted is lost with it.
gtrain::Task<> CountOn(gtrain::Cluster& cluster, int seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int64_t number = 0, added = 0, failed = 0;
  double longest_ms = 0;
  std::ofstream result(arguments[0] + "/result");
  std::vector<gtrain::Owner<Counter>> counters;
  for (int rank = 1; rank < cluster.processes(); ++rank) {
    counters.push_back(co_await cluster.Spawn<Counter>(gtrain::Spawn().OnRank(rank).Restarts(100'000),
                                                       "count-" + std::to_string(rank)));
  }
  while (std::chrono::steady_clock::now() < end) {
    for (const auto& counter : counters) {
      const auto before = std::chrono::steady_clock::now();
      auto sum = co_await gtrain::Try(counter.With(std::chrono::seconds(5)).Call<&Counter::Add>(++number));
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - before;
      longest_ms = std::max(longest_ms, took.count());
      added += sum.ok() ? 1 : 0;
      failed += sum.ok() ? 0 : 1;
      if (!sum.ok()) result << "failed " << number << ": " << sum.status().ToString() << "\n";
    }
  }
  result << "added " << added << " failed " << failed << " longest " << static_cast<int>(longest_ms)
         << " ms\n";
}

// What it has is in its owner's process, too.
class Sum {
 public:
  int64_t Add(int64_t number) {
    ++count_;
    return sum_ += number;
  }
  int64_t Total() const { return sum_; }
  void Persist(auto& archive) { archive(sum_, count_); }

 private:
  int64_t sum_ = 0, count_ = 0;
};
[[maybe_unused]] constexpr auto kSum =
    gtrain::Actor<Sum, gtrain::Ctor<>, gtrain::Methods<&Sum::Add, &Sum::Total>>;

// Reads an object, and says which memory that is.
class Reader {
 public:
  gtrain::Task<std::pair<int64_t, int64_t>> Add(gtrain::Object<int32_t> object) {
    view_ = co_await object.Read();
    co_return std::pair(std::accumulate(view_.begin(), view_.end(), int64_t{0}), MemoryOf(view_.data()));
  }
  int64_t First() const { return view_[0]; }
  int64_t Process() const { return getpid(); }

 private:
  // The inode of the mapping (proc(5), maps).
  static int64_t MemoryOf(const void* data) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      uintptr_t from = 0, to = 0;
      long inode = 0;
      if (std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %ld", &from, &to, &inode) != 3) continue;
      const auto at = reinterpret_cast<uintptr_t>(data);
      if (from <= at && at < to && line.find("gtrain-object") != std::string::npos) return inode;
    }
    return 0;
  }
  gtrain::ObjectView<int32_t> view_;
};
[[maybe_unused]] constexpr auto kReader =
    gtrain::Actor<Reader, gtrain::Ctor<>,
                  gtrain::Methods<&Reader::Add, &Reader::First, &Reader::Process,
                                  gtrain::Reduces<&Reader::Process, gtrain::Sum>>>;

gtrain::Task<> ReadEverywhere(gtrain::Cluster& cluster, int64_t bytes) {
  std::vector<gtrain::Owner<Reader>> readers;
  for (int rank = 1; rank < cluster.processes(); ++rank)
    readers.push_back(co_await cluster.Spawn<Reader>(gtrain::Spawn().OnRank(rank)));
  auto draft = co_await cluster.Create<int32_t>(bytes / 4);
  std::iota(draft.span().begin(), draft.span().end(), 0);
  const int64_t wanted = std::accumulate(draft.span().begin(), draft.span().end(), int64_t{0});
  auto object = co_await std::move(draft).Seal();
  std::vector<gtrain::Future<std::pair<int64_t, int64_t>>> adding;
  for (const auto& reader : readers) adding.push_back(reader.Call<&Reader::Add>(object.ref()));
  std::set<int64_t> memories;
  for (auto& one : adding) {
    const auto [sum, memory] = co_await std::move(one);
    if (sum != wanted) co_await gtrain::Status(gtrain::StatusCode::kDataLoss, "another sum");
    memories.insert(memory);
  }
  const gtrain::Object<int32_t> ref = object;
  object = {};
  int64_t first = 0;
  for (const auto& reader : readers) first += co_await reader.Call<&Reader::First>();
  const auto gone = co_await gtrain::Try(readers[0].Call<&Reader::Add>(ref));
  std::printf("memories %zu first %ld after the end: %s\n", memories.size() - memories.count(0), first,
              gone.status().ToString().c_str());
}

gtrain::Task<> Survive(gtrain::Cluster& cluster) {
  auto sum =
      co_await cluster.FindOrSpawn<Sum>(gtrain::Spawn("sum").Restarts(100'000).Keep(gtrain::Durable::kPeer));
  std::ofstream result(arguments[0] + "/driver." + std::to_string(getpid()));
  while (!std::ifstream(arguments[0] + "/enough")) {
    const auto now = co_await gtrain::Try(sum.Call<&Sum::Add>(int64_t{1}));
    if (now.ok()) {
      result << *now << std::endl;
    } else {
      result << now.status().ToString() << std::endl;
      sum = co_await cluster.FindOrSpawn<Sum>(gtrain::Spawn("sum"));
    }
  }
  co_await cluster.End(sum);
}

gtrain::Task<> SpawnApart(gtrain::Cluster& cluster, size_t count) {
  auto group = co_await gtrain::Try(cluster.SpawnGroup<Reader>(count, gtrain::Spawn().Strict()));
  std::printf("apart: %s\n", group.ok() ? "all" : group.status().ToString().c_str());
  if (!group.ok()) co_return;
  int64_t sum = 0;
  for (const int64_t process : co_await group->Call<&Reader::Process>()) {
    std::printf("process %ld\n", process);
    sum += process;
  }
  const int64_t reduced = co_await group->Reduce<&Reader::Process, gtrain::Sum>();
  std::printf("reduced %s\n", reduced == sum ? "well" : "wrong");
}

// 16 calls are under way to each; none of them may be lost, or counted twice.
gtrain::Task<> KeepOn(gtrain::Cluster& cluster, int seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::ofstream result(arguments[0] + "/result");
  std::vector<gtrain::Owner<Sum>> sums;
  for (int rank = 1; rank < cluster.processes(); ++rank) {
    sums.push_back(co_await cluster.Spawn<Sum>(
        gtrain::Spawn().OnRank(rank).Restarts(100'000).Keep(gtrain::Durable::kPeer)));
  }
  std::ofstream(arguments[0] + "/begun");
  int64_t number = 0, wrong = 0, wanted = 0;
  double longest_ms = 0;
  while (std::chrono::steady_clock::now() < end) {
    const auto before = std::chrono::steady_clock::now();
    std::vector<gtrain::Future<int64_t>> adding;
    for (int i = 0; i < 16; ++i) {
      wanted += ++number;
      for (const auto& sum : sums) adding.push_back(sum.Call<&Sum::Add>(number));
    }
    int64_t last = 0;
    for (auto& one : adding) last = co_await std::move(one);
    for (const auto& sum : sums)
      wrong += co_await sum.Call<&Sum::Total>() == wanted && last == wanted ? 0 : 1;
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - before;
    longest_ms = std::max(longest_ms, took.count());
  }
  result << "added " << number << " wrong " << wrong << " longest " << static_cast<int>(longest_ms)
         << " ms\n";
}

// Until somebody opens it for writing, or has.
void WaitForPipe() { std::ifstream(arguments[0] + "/go"); }

// For people to look at.
class Blocker {
 public:
  [[gnu::noinline]] int64_t BlockHere() const {
    WaitForPipe();
    return 1;
  }
  int64_t Look() const { return 1; }
  void Throw() const { throw std::runtime_error("on purpose"); }
};
[[maybe_unused]] constexpr auto kBlocker =
    gtrain::Actor<Blocker, gtrain::Ctor<>,
                  gtrain::Methods<&Blocker::BlockHere, &Blocker::Look, &Blocker::Throw>>;

class Waiter {
 public:
  gtrain::Task<int64_t> AwaitIt(gtrain::Ref<Blocker> blocker) {
    auto blocks = blocker.With(std::chrono::minutes(10)).Call<&Blocker::BlockHere>();
    for (int i = 0; i < 3; ++i) blocker.Tell<&Blocker::Look>();
    const auto came = co_await gtrain::Try(std::move(blocks));
    co_return came.ok() ? *came : 0;
  }
};
[[maybe_unused]] constexpr auto kWaiter =
    gtrain::Actor<Waiter, gtrain::Ctor<>, gtrain::Methods<&Waiter::AwaitIt>>;

gtrain::Task<> Observe(gtrain::Cluster& cluster) {
  auto blocker = co_await cluster.Spawn<Blocker>(gtrain::Spawn("blocker").OnRank(1));
  auto frail = co_await cluster.Spawn<Blocker>(gtrain::Spawn("frail").OnRank(0));
  auto waiter = co_await cluster.Spawn<Waiter>(gtrain::Spawn().OnRank(0));
  (void)co_await gtrain::Try(frail.Call<&Blocker::Throw>());
  co_await frail.Call<&Blocker::Look>();
  auto awaited = waiter.With(std::chrono::minutes(10)).Call<&Waiter::AwaitIt>(blocker);
  std::ofstream(arguments[0] + "/begun");
  WaitForPipe();
  (void)co_await gtrain::Try(std::move(awaited));
}

gtrain::Task<> Drive(gtrain::Cluster& cluster) {
  const std::string& what = arguments[1];
  std::ofstream(arguments[0] + "/driver") << getpid();
  if (what == "place") co_await PlaceAll(cluster, std::atoi(arguments[2].c_str()));
  if (what == "call")
    co_await CallAll(cluster, std::atoi(arguments[2].c_str()), std::atoi(arguments[3].c_str()));
  if (what == "count") co_await CountOn(cluster, std::atoi(arguments[2].c_str()));
  if (what == "nest") co_await Nest(cluster, std::atoi(arguments[2].c_str()));
  if (what == "observe") co_await Observe(cluster);
  if (what == "stubborn") co_await CallForEver(cluster);
  if (what == "keep") co_await KeepOn(cluster, std::atoi(arguments[2].c_str()));
  if (what == "object") co_await ReadEverywhere(cluster, std::atoll(arguments[2].c_str()));
  if (what == "survive") co_await Survive(cluster);
  if (what == "apart") co_await SpawnApart(cluster, std::stoul(arguments[2]));
  if (what == "fail") {
    auto counter = co_await cluster.Spawn<Counter>("fails");
    co_await counter.With(std::chrono::seconds(1)).Call<&Counter::Add>(int64_t{1});
    auto nowhere = co_await cluster.Spawn<Counter>(gtrain::Spawn().OnRank(99), "nowhere");
  }
  std::printf("driven by %d\n", getpid());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  arguments.assign(argv + 1, argv + argc);
  std::ofstream(arguments.at(0) + "/process." + std::to_string(getpid())) << "\n";
  return gtrain::Main(argc, argv, Drive);
}
