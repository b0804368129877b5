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
//   constexpr auto kCounter = gtrain::Actor<Counter, gtrain::Ctor<int64_t>,
//                                           gtrain::Methods<&Counter::Add, &Counter::Value>>;
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
#include <gtrain/elastic.h>
#include <gtrain/session.h>
#include <gtrain/status.h>
#include <gtrain/task.h>
#include <gtrain/task_run.h>
#include <gtrain/value.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

// The time of a call that nobody gave one.
inline constexpr std::chrono::milliseconds kCallTimeout = std::chrono::seconds(60);

namespace internal {

inline int64_t Milliseconds(std::chrono::nanoseconds timeout) {
  std::chrono::nanoseconds left = timeout;
  if (const auto& deadline = CallDeadline())
    left = std::min<std::chrono::nanoseconds>(left, *deadline - std::chrono::steady_clock::now());
  return std::max<int64_t>(1, std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

// What an answer becomes.
template <typename T>
struct AsValue {
  Result<Stored<T>> operator()(const void* data, size_t size) const {
    Stored<T> value{};
    if constexpr (!std::is_void_v<T>) {
      Unpacking unpacking(data, size);
      unpacking(value);
      if (!unpacking.End().ok())
        return Status(StatusCode::kInternal, "the result is wrong: " + unpacking.End().message());
    }
    return value;
  }
};

template <typename T, typename Unpack>
class Answered {
 public:
  explicit Answered(Unpack unpack) : unpack_(std::move(unpack)) {}
  std::shared_ptr<Outcome<T>> outcome() const { return outcome_; }
  // Deletes it.
  static void Reply(void* user, gtrain_status status, const char* message, const void* data, size_t size) {
    const std::unique_ptr<Answered> self(static_cast<Answered*>(user));
    if (status != GTRAIN_OK) {
      self->outcome_->Set(Status(static_cast<StatusCode>(status), message));
    } else {
      self->outcome_->Set(self->unpack_(data, size));
    }
  }

 private:
  Unpack unpack_;
  std::shared_ptr<Outcome<T>> outcome_ = std::make_shared<Outcome<T>>();
};

template <typename T>
Future<T> Failed(Status why) {
  auto outcome = std::make_shared<Outcome<T>>();
  outcome->Set(std::move(why));
  return Future<T>(std::move(outcome));
}

inline Status NoCluster() {
  return Status(StatusCode::kFailedPrecondition,
                "there is no cluster: gtrain::Main or Cluster::Open makes it");
}

}  // namespace internal

// Whom to call. It owns nothing, may be copied, and is a value: it travels in arguments and results.
template <typename T>
class Ref {
 public:
  Ref() = default;  // nobody's: calls are kInvalidArgument
  explicit Ref(std::string bytes) : bytes_(std::move(bytes)) {}

  // The time of calls that are made with it; within a call never more than what is left of that one's.
  Ref With(std::chrono::nanoseconds timeout) const {
    Ref with = *this;
    with.timeout_ = timeout;
    return with;
  }

  // What becomes of it is in gtrain_actors_call (gtrain/actor_c.h). Never blocks.
  template <auto kMethod, typename... Given>
  Future<typename internal::TraitsOf<kMethod>::Value> Call(Given&&... given) const {
    using T_ = typename internal::TraitsOf<kMethod>::Value;
    internal::Packed packed;
    const Status status = Pack<kMethod>(packed, std::forward<Given>(given)...);
    if (!status.ok()) return internal::Failed<T_>(status);
    using Answered = internal::Answered<T_, internal::AsValue<T_>>;
    auto* answered = new Answered({});
    Future<T_> future(answered->outcome());
    gtrain_actors_call_packed(internal::Engine(), bytes_.data(), bytes_.size(), kIndex<kMethod>,
                              packed.packer(), internal::Milliseconds(timeout_), &Answered::Reply, answered);
    return future;
  }
  // A call of which nobody hears what it came to; gtrain logs that it failed. Never blocks.
  template <auto kMethod, typename... Given>
  void Tell(Given&&... given) const {
    internal::Packed packed;
    const Status status = Pack<kMethod>(packed, std::forward<Given>(given)...);
    if (!status.ok()) {
      std::fprintf(stderr, "gtrain: a call whose result nobody awaits failed: %s\n",
                   status.message().c_str());
      return;
    }
    gtrain_actors_call_packed(internal::Engine(), bytes_.data(), bytes_.size(), kIndex<kMethod>,
                              packed.packer(), internal::Milliseconds(timeout_), nullptr, nullptr);
  }

  void Persist(auto& archive) { archive(bytes_); }
  const std::string& bytes() const { return bytes_; }
  bool operator==(const Ref& other) const { return bytes_ == other.bytes_; }

 private:
  template <auto kMethod>
  static constexpr int Index() {
    static_assert(internal::HasDescription<T>,
                  "gtrain: this class is no actor here: constexpr auto kName = gtrain::Actor<Class, "
                  "gtrain::Ctor<...>, gtrain::Methods<...>>; stands before it is called");
    static_assert(std::is_base_of_v<typename internal::TraitsOf<kMethod>::Owner, T>,
                  "gtrain: this is a method of another class than the actor's");
    constexpr int index = decltype(GtrainActorOf(internal::ActorTag<T>()))::template Index<kMethod>();
    static_assert(index >= 0, "gtrain: gtrain::Methods<> of this class does not list this method");
    return index;
  }
  template <auto kMethod>
  static constexpr int kIndex = Index<kMethod>();

  template <auto kMethod, typename... Given>
  Status Pack(internal::Packed& packed, Given&&... given) const {
    using Arguments = typename internal::TraitsOf<kMethod>::Arguments;
    internal::CheckMethodArguments<Arguments, Given&&...>();
    if (internal::Engine() == nullptr) return internal::NoCluster();
    return packed.PackAs<Arguments>(&internal::MethodName<kMethod>, std::forward<Given>(given)...);
  }

  std::string bytes_;
  std::chrono::nanoseconds timeout_ = kCallTimeout;
};

// Owns an actor, which ends with it: calls that have not begun are kCancelled. Moved and not copied.
template <typename T>
class Owner {
 public:
  Owner() = default;
  explicit Owner(Ref<T> ref) : ref_(std::move(ref)) {}
  Owner(Owner&& other) noexcept : ref_(std::exchange(other.ref_, Ref<T>())) {}
  Owner& operator=(Owner&& other) noexcept {
    if (this != &other) {
      End();
      ref_ = std::exchange(other.ref_, Ref<T>());
    }
    return *this;
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() { End(); }

  const Ref<T>& ref() const { return ref_; }
  operator Ref<T>() const { return ref_; }  // NOLINT(google-explicit-constructor): an owner is passed as one
  Ref<T> With(std::chrono::nanoseconds timeout) const { return ref_.With(timeout); }
  template <auto kMethod, typename... Given>
  auto Call(Given&&... given) const {
    return ref_.template Call<kMethod>(std::forward<Given>(given)...);
  }
  template <auto kMethod, typename... Given>
  void Tell(Given&&... given) const {
    ref_.template Tell<kMethod>(std::forward<Given>(given)...);
  }

 private:
  void End() {
    if (ref_.bytes().empty() || internal::Engine() == nullptr) return;
    gtrain_actors_end(internal::Engine(), ref_.bytes().data(), ref_.bytes().size(), "its owner let it go");
  }
  Ref<T> ref_;
};

// What calls to all of a group will come to, in its order. `co_await` gives a vector of the values, or the
// first error.
template <typename T>
class [[nodiscard]] GroupFuture {
 public:
  explicit GroupFuture(std::vector<Future<T>> futures) : futures_(std::move(futures)) {}
  std::vector<Future<T>> futures() && { return std::move(futures_); }

 private:
  std::vector<Future<T>> futures_;
};

template <typename T>
class GroupRef {
 public:
  GroupRef() = default;
  explicit GroupRef(std::vector<Ref<T>> refs) : refs_(std::move(refs)) {}
  size_t size() const { return refs_.size(); }
  const Ref<T>& operator[](size_t index) const { return refs_[index]; }
  GroupRef With(std::chrono::nanoseconds timeout) const {
    GroupRef with;
    for (const Ref<T>& ref : refs_) with.refs_.push_back(ref.With(timeout));
    return with;
  }
  // The same call to all of them.
  template <auto kMethod, typename... Given>
  GroupFuture<typename internal::TraitsOf<kMethod>::Value> Call(const Given&... given) const {
    std::vector<Future<typename internal::TraitsOf<kMethod>::Value>> futures;
    for (const Ref<T>& ref : refs_) futures.push_back(ref.template Call<kMethod>(given...));
    return GroupFuture(std::move(futures));
  }
  template <auto kMethod, typename... Given>
  void Tell(const Given&... given) const {
    for (const Ref<T>& ref : refs_) ref.template Tell<kMethod>(given...);
  }
  void Persist(auto& archive) { archive(refs_); }

 private:
  std::vector<Ref<T>> refs_;
};

// Actors of one class that one owner has: they end with it.
template <typename T>
class ActorGroup {
 public:
  ActorGroup() = default;
  explicit ActorGroup(std::vector<Owner<T>> owners) : owners_(std::move(owners)) {}
  size_t size() const { return owners_.size(); }
  const Owner<T>& operator[](size_t index) const { return owners_[index]; }
  GroupRef<T> ref() const {
    std::vector<Ref<T>> refs;
    for (const Owner<T>& owner : owners_) refs.push_back(owner);
    return GroupRef<T>(std::move(refs));
  }
  operator GroupRef<T>() const { return ref(); }  // NOLINT(google-explicit-constructor): as an Owner
  GroupRef<T> With(std::chrono::nanoseconds timeout) const { return ref().With(timeout); }
  template <auto kMethod, typename... Given>
  auto Call(const Given&... given) const {
    return ref().template Call<kMethod>(given...);
  }
  template <auto kMethod, typename... Given>
  void Tell(const Given&... given) const {
    ref().template Tell<kMethod>(given...);
  }

 private:
  std::vector<Owner<T>> owners_;
};

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
  const std::string& name() const { return name_; }  // empty: it has none
  int restarts() const { return restarts_; }
  bool keep() const { return keep_; }
  Spread spread() const { return spread_; }
  int rank() const { return rank_; }  // -1: none was said
  std::chrono::nanoseconds within() const { return timeout_; }

 private:
  std::string name_;
  int restarts_ = 3, rank_ = -1;
  bool keep_ = false;
  Spread spread_ = Spread::kProcesses;
  std::chrono::nanoseconds timeout_ = kCallTimeout;
};

struct ClusterOptions {
  int threads = 0;            // that run actors; 0: one a core, two at least
  int64_t mailbox_calls = 0;  // that wait for an actor at most; 0: 1024
  int64_t mailbox_bytes = 0;  // of their arguments; 0: 64 MiB
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
    static_assert(internal::HasDescription<T>,
                  "gtrain: this class is no actor here: constexpr auto kName = gtrain::Actor<Class, "
                  "gtrain::Ctor<...>, gtrain::Methods<...>>; stands before it is spawned");
    using Arguments = typename decltype(GtrainActorOf(internal::ActorTag<T>()))::Arguments;
    internal::CheckCtorArguments<Arguments, Given&&...>();
    if (options.name().find('\0') != std::string::npos)
      return internal::Failed<Owner<T>>(
          Status(StatusCode::kInvalidArgument, "the name of an actor has no control characters"));
    if (options.rank() < -1)
      return internal::Failed<Owner<T>>(
          Status(StatusCode::kInvalidArgument, "Spawn().OnRank(): ranks are numbered from 0"));
    internal::Packed packed;
    const Status status = packed.PackAs<Arguments>(&internal::ActorName<T>, std::forward<Given>(given)...);
    if (!status.ok()) return internal::Failed<Owner<T>>(status);
    const auto owner = [](const void* data, size_t size) -> Result<Owner<T>> {
      return Owner<T>(Ref<T>(std::string(static_cast<const char*>(data), size)));
    };
    using Answered = internal::Answered<Owner<T>, decltype(owner)>;
    auto* answered = new Answered(owner);
    Future<Owner<T>> future(answered->outcome());
    const gtrain_spawn_options c{
        sizeof(c),      options.restarts(),     static_cast<int32_t>(options.spread()),
        options.rank(), options.keep() ? 1 : 0, options.name().c_str()};
    gtrain_actors_spawn(internal::Engine(), internal::ActorName<T>().c_str(), &c, packed.data(),
                        packed.size(), internal::Milliseconds(options.within()), &Answered::Reply, answered);
    return future;
  }
  template <typename T, typename... Given>
  requires(!std::same_as<std::remove_cvref_t<std::tuple_element_t<0, std::tuple<Given..., void>>>,
                         gtrain::Spawn>) Future<Owner<T>> Spawn(Given&&... given) {
    return Spawn<T>(gtrain::Spawn(), std::forward<Given>(given)...);
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
  // `count` of them, all made of the same arguments.
  template <typename T, typename... Given>
  Task<ActorGroup<T>> SpawnGroup(size_t count, gtrain::Spawn options, Given... given) {
    std::vector<Future<Owner<T>>> making;
    for (size_t i = 0; i < count; ++i) {
      gtrain::Spawn one = options;
      if (!options.name().empty()) one.Named(options.name() + "/" + std::to_string(i));
      making.push_back(Spawn<T>(one, given...));
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
  Cluster() = default;
  static Cluster*& Here() {
    static Cluster* here = nullptr;
    return here;
  }
  static Result<std::unique_ptr<Cluster>> Open(gtrain_session* session, const ClusterOptions& options) {
    if (internal::Engine() != nullptr)
      return Status(StatusCode::kAlreadyExists, "this process has a cluster: one at a time");
    gtrain_actors_options c{sizeof(c), options.threads, options.mailbox_calls, options.mailbox_bytes};
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
