// Actors: objects of plain C++ classes to which calls come one at a time.
//
//   class Counter {
//    public:
//     explicit Counter(int64_t from) : value_(from) {}
//     int64_t Add(int64_t by) { return value_ += by; }
//     int64_t Value() const { return value_; }
//
//    private:
//     int64_t value_;
//   };
//   inline constexpr auto kCounter =
//       gtrain::Actor<Counter, gtrain::Ctor<int64_t>, gtrain::Methods<&Counter::Add, &Counter::Value>>;
//
//   gtrain::Task<> Drive(gtrain::Cluster& cluster) {
//     auto counter = co_await cluster.Spawn<Counter>(40);
//     const int64_t now = co_await counter.Call<&Counter::Add>(2);
//     std::printf("%lld\n", static_cast<long long>(now));
//   }
//   int main(int argc, char** argv) { return gtrain::Main(argc, argv, Drive); }
//
// Arguments and results are values (gtrain/value.h) and copied, also within a process. A method gives a
// value, nothing, a Status, a Result of a value, or a Task of one, in which it awaits calls of its own.
// docs/actors.md has what one can rely on.
// What it throws is its caller's error, and the actor is made anew from the arguments it was made of.
#pragma once
#include <gtrain/actor_c.h>
#include <gtrain/actor_class.h>
#include <gtrain/actor_pool.h>
#include <gtrain/actor_ref.h>
#include <gtrain/elastic.h>
#include <gtrain/object.h>
#include <gtrain/session.h>
#include <gtrain/status.h>
#include <gtrain/task.h>
#include <gtrain/task_run.h>
#include <gtrain/value.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

// How actors are spread over the processes of a job.
enum class Spread {
  kProcesses = GTRAIN_SPREAD_PROCESSES,  // the process with the fewest actors that this one has made
  kNodes = GTRAIN_SPREAD_NODES,          // the machine with the fewest, there the process with the fewest
  kPack = GTRAIN_SPREAD_PACK,            // this machine, the process with the fewest
  kHere = GTRAIN_SPREAD_HERE,            // this process
};

// Where the state of an actor is beside its own process.
enum class Durable {
  kNo,    // nowhere: one whose process is lost is made anew of its arguments
  kPeer,  // in the memory of its owner's process: it goes on elsewhere with all that its callers have heard
          // of
};

// How an actor is made and kept. Setters return the options, so that they are written in one line.
class Spawn {
 public:
  Spawn() = default;
  // With a name by which all ranks of the job find it (Cluster::Find) while its owner has it: 1 to 255 bytes
  // without control characters. kAlreadyExists: another actor has it. Those of a group are called "name/0",
  // "name/1" and so on.
  explicit Spawn(std::string name) : name_(std::move(name)) {}
  Spawn& Named(std::string name) {
    name_ = std::move(name);
    return *this;
  }
  // How often it is made anew within an hour after it threw; then it ends. 3 unless it is said.
  Spawn& Restarts(int restarts) {
    restarts_ = restarts;
    return *this;
  }
  // Until it is made; 60 s unless it is said.
  Spawn& Within(std::chrono::nanoseconds timeout) {
    timeout_ = timeout;
    return *this;
  }
  // In which process; the one with the fewest actors of this one unless it is said.
  Spawn& On(Spread spread) {
    spread_ = spread;
    return *this;
  }
  // In the process that has this rank now. Below 0: the spawn is kInvalidArgument.
  Spawn& OnRank(int rank) {
    rank_ = rank < 0 ? -2 : rank;
    return *this;
  }
  // kPeer: a call that changes it is answered when its owner has the state that came of it, and then is never
  // undone; calls whose process is lost meanwhile are made again elsewhere, each once. The class has a
  // `Persist`. One that is in its owner's process cannot outlive it.
  Spawn& Keep(Durable durable) {
    keep_ = durable == Durable::kPeer;
    return *this;
  }
  // So many calls of it run at a time, as far as its process has threads (ClusterOptions), and go on in any
  // of them behind a co_await: the class guards its members itself. 1 unless it is said; 1,024 at most, and 1
  // of an actor that is kept.
  Spawn& Concurrency(int calls) {
    concurrency_ = calls;
    return *this;
  }
  // SpawnGroup alone: no two of the group are in one process, or on one machine with Spread::kNodes, also
  // when one is made anew. kFailedPrecondition: the job has too few of them, and none of the group is made.
  Spawn& Strict() {
    strict_ = true;
    return *this;
  }
  int concurrency() const { return concurrency_; }
  bool strict() const { return strict_; }
  const std::string& name() const { return name_; }  // empty: it has none
  int restarts() const { return restarts_; }
  bool keep() const { return keep_; }
  Spread spread() const { return spread_; }
  int rank() const { return rank_; }  // -1: none was said
  std::chrono::nanoseconds within() const { return timeout_; }

 private:
  std::string name_;
  int restarts_ = 3, rank_ = -1, concurrency_ = 1;
  bool keep_ = false, strict_ = false;
  Spread spread_ = Spread::kProcesses;
  std::chrono::nanoseconds timeout_ = kCallTimeout;
};

struct ClusterOptions {
  int threads = 0;            // that run actors; 0: one a core, two at least
  int64_t mailbox_calls = 0;  // that wait for an actor at most; 0: 1024
  int64_t mailbox_bytes = 0;  // of their arguments; 0: 64 MiB
  int64_t object_bytes = 0;   // of all its objects; 0: 0.3 of the machine's free memory, a rank's share of it
};

// The actors of a job, as one of its processes sees them; one cluster at a time.
class Cluster {
 public:
  // Of this process alone.
  static Result<std::unique_ptr<Cluster>> Open(const ClusterOptions& options = {}) {
    return Open(static_cast<gtrain_session*>(nullptr), options);
  }
  // Of all ranks of a job, which all call this: it blocks until they have. The session is one that stays, and
  // is the cluster's from here on: nobody else calls its Rejoin.
  static Result<std::unique_ptr<Cluster>> Open(const Session& session, const ClusterOptions& options = {}) {
    return Open(session.handle(), options);
  }
  // That of this process, for the methods of actors: what they spawn is owned by their process, and ends with
  // their `Owner`s, so with them where those are members. Only while there is one.
  static Cluster& Current() { return *Here(); }

  // Ends the actors of this process, when each has ended the call that it has begun.
  ~Cluster() {
    gtrain_actors_free(internal::Engine());
    internal::Engine() = nullptr;
    Here() = nullptr;
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  // Blocks until this process is to run the driver (true), or the driver has ended elsewhere (false).
  // kUnavailable: the generation is over: exit with 75.
  Result<bool> AwaitTurn() {
    int drives = 0;
    const Status status = internal::Call(gtrain_actors_await_turn, internal::Engine(), &drives);
    if (!status.ok()) return status;
    return drives != 0;
  }
  // Blocks so long, or until no other generation comes for this process: kUnavailable, and calls to others
  // come to nothing from then on. kDeadlineExceeded: it was not so.
  Status AwaitOver(std::chrono::nanoseconds timeout) {
    return internal::Call(gtrain_actors_await_over, internal::Engine(),
                          std::chrono::ceil<std::chrono::milliseconds>(timeout).count());
  }
  // The driver has ended well: the other processes end, too.
  void Finish() { gtrain_actors_finish(internal::Engine()); }
  // That may have actors, this one counted.
  int processes() const { return gtrain_actors_processes(internal::Engine()); }

  template <typename T, typename... Given>
  Future<Owner<T>> Spawn(const gtrain::Spawn& options, Given&&... given) {
    return SpawnAs<T, Owner<T>>(options, {}, std::forward<Given>(given)...);
  }
  template <typename T, typename... Given>
  requires(!std::same_as<std::remove_cvref_t<std::tuple_element_t<0, std::tuple<Given..., void>>>,
                         gtrain::Spawn>) Future<Owner<T>> Spawn(Given&&... given) {
    return Spawn<T>(gtrain::Spawn(), std::forward<Given>(given)...);
  }
  // One that is nobody's: it ends with the job, or by End, and goes on when the rank that drives is lost, so
  // that the next driver finds it by its name, which it must have. One that is in that rank's own process is
  // lost with it. kAlreadyExists: another actor has the name. kDeadlineExceeded: it may be there.
  template <typename T, typename... Given>
  Future<Ref<T>> SpawnDetached(const gtrain::Spawn& options, Given&&... given) {
    return SpawnAs<T, Ref<T>>(options, {.detached = true}, std::forward<Given>(given)...);
  }
  // That with this name, which is spawned detached where there is none: what a driver begins with that may
  // have begun before. It is made of `given` only then.
  template <typename T, typename... Given>
  Task<Ref<T>> FindOrSpawn(gtrain::Spawn options, Given... given) {
    for (;;) {
      auto found = co_await Try(Find<T>(options.name(), options.within()));
      if (found.ok() || found.status().code() != StatusCode::kNotFound) co_return found;
      auto made = co_await Try(SpawnDetached<T>(options, given...));
      if (made.ok() || made.status().code() != StatusCode::kAlreadyExists) co_return made;
    }
  }
  // Ends a detached actor as Owner does. kInvalidArgument: it is not detached. kNotFound: it is no more.
  template <typename T>
  Future<void> End(const Ref<T>& ref, std::chrono::nanoseconds timeout = kCallTimeout) {
    const auto ended = [](const void*, size_t) -> Result<Nothing> { return Nothing{}; };
    using Answered = internal::Answered<void, decltype(ended)>;
    auto* answered = new Answered(ended);
    Future<void> future(answered->outcome());
    gtrain_actors_end_detached(internal::Engine(), ref.bytes().data(), ref.bytes().size(),
                               internal::Milliseconds(timeout), &Answered::Reply, answered);
    return future;
  }
  // The actor that some rank has spawned with this name. kNotFound: there is none now. kFailedPrecondition:
  // it is of another class. kUnavailable: the rank that drives, which keeps the names, is gone: again when
  // another one does.
  template <typename T>
  Future<Ref<T>> Find(const std::string& name, std::chrono::nanoseconds timeout = kCallTimeout) {
    static_assert(internal::HasDescription<T>,
                  "gtrain: this class is no actor here: constexpr auto kName = gtrain::Actor<Class, "
                  "gtrain::Ctor<...>, gtrain::Methods<...>>; stands before one is looked for");
    const auto found = [](const void* data, size_t size) -> Result<Ref<T>> {
      return Ref<T>(std::string(static_cast<const char*>(data), size));
    };
    if (name.find('\0') != std::string::npos)
      return internal::Failed<Ref<T>>(
          Status(StatusCode::kInvalidArgument, "the name of an actor has no control characters"));
    using Answered = internal::Answered<Ref<T>, decltype(found)>;
    auto* answered = new Answered(found);
    Future<Ref<T>> future(answered->outcome());
    gtrain_actors_find(internal::Engine(), name.c_str(), internal::ActorName<T>().c_str(),
                       internal::Milliseconds(timeout), &Answered::Reply, answered);
    return future;
  }
  // An object of these elements: a vector, a span, an array, which are there until it is. There is one copy.
  // It waits for room until `timeout`: kResourceExhausted. `shape` for those who read it; empty: one
  // dimension.
  template <std::ranges::contiguous_range Values>
  auto Put(const Values& values, std::vector<int64_t> shape = {},
           std::chrono::nanoseconds timeout = kCallTimeout) {
    const std::span span(std::ranges::data(values), std::ranges::size(values));
    using T = typename decltype(span)::value_type;
    static_assert(ObjectElement<T>,
                  "gtrain: an object is an array of numbers or of std::byte; other values travel in calls");
    if (shape.empty()) shape.push_back(static_cast<int64_t>(span.size()));
    return internal::PutObject<T>(std::span<const T>(span), std::move(shape), timeout);
  }
  // Memory for one that is filled where it will be read: `Seal` makes it an object. Likewise. The second with
  // the extents one by one, since g++ 12 takes no braces in a co_await.
  template <ObjectElement T>
  Future<ObjectDraft<T>> Create(std::vector<int64_t> shape, std::chrono::nanoseconds timeout = kCallTimeout) {
    return internal::CreateObject<T>(std::move(shape), timeout);
  }
  template <ObjectElement T, std::integral... Extents>
  Future<ObjectDraft<T>> Create(Extents... extents) {
    return internal::CreateObject<T>(std::vector<int64_t>{static_cast<int64_t>(extents)...}, kCallTimeout);
  }

  // `count` of them, all made of the same arguments: all, or none where one cannot be made.
  template <typename T, typename... Given>
  Task<ActorGroup<T>> SpawnGroup(size_t count, gtrain::Spawn options, Given... given) {
    std::vector<Future<Owner<T>>> making;
    const How how{.apart = options.strict() ? ++Groups() : 0};
    for (size_t i = 0; i < count; ++i) {
      gtrain::Spawn one = options;
      if (!options.name().empty()) one.Named(options.name() + "/" + std::to_string(i));
      making.push_back(SpawnAs<T, Owner<T>>(one, how, given...));
    }
    std::vector<Owner<T>> made;
    for (Future<Owner<T>>& one : making) made.push_back(co_await std::move(one));
    co_return ActorGroup<T>(std::move(made));
  }
  template <typename T>
  Task<ActorGroup<T>> SpawnGroup(size_t count) {
    return SpawnGroup<T>(count, gtrain::Spawn());
  }

 private:
  // What is no option of a program's own.
  struct How {
    bool detached = false;
    uint64_t apart = 0;
  };
  static std::atomic<uint64_t>& Groups() {
    static std::atomic<uint64_t> groups = 0;
    return groups;
  }
  template <typename T, typename Made, typename... Given>
  Future<Made> SpawnAs(const gtrain::Spawn& options, const How& how, Given&&... given) {
    static_assert(internal::HasDescription<T>,
                  "gtrain: this class is no actor here: constexpr auto kName = gtrain::Actor<Class, "
                  "gtrain::Ctor<...>, gtrain::Methods<...>>; stands before it is spawned");
    using Arguments = typename decltype(GtrainActorOf(internal::ActorTag<T>()))::Arguments;
    internal::CheckCtorArguments<Arguments, Given&&...>();
    const Status possible = Check(options, how);
    if (!possible.ok()) return internal::Failed<Made>(possible);
    internal::Packed packed;
    const Status status = packed.PackAs<Arguments>(&internal::ActorName<T>, std::forward<Given>(given)...);
    if (!status.ok()) return internal::Failed<Made>(status);
    const auto made = [](const void* data, size_t size) -> Result<Made> {
      return Made(Ref<T>(std::string(static_cast<const char*>(data), size)));
    };
    using Answered = internal::Answered<Made, decltype(made)>;
    auto* answered = new Answered(made);
    Future<Made> future(answered->outcome());
    const gtrain_spawn_options c{.size = sizeof(c),
                                 .restarts = options.restarts(),
                                 .spread = static_cast<int32_t>(options.spread()),
                                 .rank = options.rank(),
                                 .keep = options.keep() ? 1 : 0,
                                 .concurrency = options.concurrency(),
                                 .detached = how.detached ? 1 : 0,
                                 .apart = how.apart,
                                 .name = options.name().c_str()};
    gtrain_actors_spawn(internal::Engine(), internal::ActorName<T>().c_str(), &c, packed.data(),
                        packed.size(), internal::Milliseconds(options.within()), &Answered::Reply, answered);
    return future;
  }
  static Status Check(const gtrain::Spawn& options, const How& how) {
    const auto wrong = [](const char* why) { return Status(StatusCode::kInvalidArgument, why); };
    if (options.name().find('\0') != std::string::npos)
      return wrong("the name of an actor has no control characters");
    if (options.restarts() < 0) return wrong("Spawn().Restarts(): 0 or more; a large number for any");
    if (options.rank() < -1) return wrong("Spawn().OnRank(): ranks are numbered from 0");
    if (options.strict() && how.apart == 0)
      return wrong("Spawn().Strict() is for the actors of a SpawnGroup");
    if (options.concurrency() < 1)
      return wrong("Spawn().Concurrency(): an actor runs one call at a time at least");
    return Status();
  }
  Cluster() = default;
  static Cluster*& Here() {
    static Cluster* here = nullptr;
    return here;
  }
  static Result<std::unique_ptr<Cluster>> Open(gtrain_session* session, const ClusterOptions& options) {
    if (internal::Engine() != nullptr)
      return Status(StatusCode::kAlreadyExists, "this process has a cluster: one at a time");
    gtrain_actors_options c{sizeof(c), options.threads, options.mailbox_calls, options.mailbox_bytes,
                            options.object_bytes};
    gtrain_actors* made = nullptr;
    Status status = internal::Call(gtrain_actors_open, session, &c, &made);
    for (const auto fill : internal::Registered()) {
      gtrain_actor_class type{};
      fill(&type);
      if (status.ok()) status = internal::Call(gtrain_actors_register, made, &type);
    }
    std::unique_ptr<Cluster> cluster(new Cluster());
    internal::Engine() = made;  // what others spawn may call as soon as it is there
    Here() = cluster.get();
    if (status.ok()) status = internal::Call(gtrain_actors_join, made);
    if (status.ok()) return cluster;
    return status;
  }
};

namespace internal {

// Whoever tries again for ever would be left behind when nobody ends it any more.
class EndsWhenOver {
 public:
  explicit EndsWhenOver(Cluster& cluster) : thread_([this, &cluster] { Watch(cluster); }) {}
  ~EndsWhenOver() {
    ended_.Set();
    thread_.join();
  }

 private:
  static constexpr std::chrono::seconds kToEndItself{10};
  void Watch(Cluster& cluster) {
    Status over;
    do {
      if (ended_.WaitFor(std::chrono::milliseconds(200))) return;
      over = cluster.AwaitOver(std::chrono::milliseconds(1));
    } while (over.code() != StatusCode::kUnavailable);
    if (ended_.WaitFor(kToEndItself)) return;
    std::fprintf(stderr, "gtrain: the driver goes on, and is ended: %s\n", over.ToString().c_str());
    std::_Exit(over.exit_code());
  }

  Event ended_;
  std::thread thread_;
};

}  // namespace internal

// Runs a program of actors. All ranks of the job are hosts of them; one of them, rank 0 first, runs the
// driver, a Task that gets the cluster. Returns the exit code that gtrain understands: 0, when the driver has
// ended well; 75 to be run again; 1 with the error on stderr. A driver that goes on for 10 s when its
// generation is over and no other one comes for this process is ended with 75.
template <typename Driver>
requires std::invocable<Driver, Cluster&>
int Main(int /*argc*/, char** /*argv*/, Driver driver, const ClusterOptions& cluster_options) {
  static_assert(internal::kIsOne<std::invoke_result_t<Driver, Cluster&>, Task>,
                "gtrain: the driver of actors returns a gtrain::Task<>");
  SessionOptions options;
  options.stays = true;
  Result<Session> session = Session::Join(options);
  Status status = session.status();
  if (session.ok()) {
    Result<std::unique_ptr<Cluster>> cluster = Cluster::Open(*session, cluster_options);
    status = cluster.status();
    if (cluster.ok()) {
      const Result<bool> drives = (*cluster)->AwaitTurn();
      status = drives.status();
      if (drives.ok() && *drives) {
        {
          const internal::EndsWhenOver ends(**cluster);
          status = internal::RunToEnd(driver(**cluster)).status();
        }
        if (status.ok()) (*cluster)->Finish();
      }
    }
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "gtrain: %s\n", status.ToString().c_str());
  return status.exit_code();
}

template <typename Driver>
requires std::invocable<Driver, Cluster&>
int Main(int argc, char** argv, Driver driver) {
  return Main(argc, argv, std::move(driver), ClusterOptions());
}

}  // namespace gtrain
