#include "actors/exec/host.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/threads.h"
#include "base/units.h"

namespace gtrain::actors {
namespace {

constexpr int kCallsInARow = 64;       // of one actor, before others have their turn
constexpr size_t kReasonsKept = 1024;  // why actors ended
constexpr absl::Duration kIdleLook = absl::Seconds(60);
constexpr size_t kLookedAtInARow = 256;  // actors of a list, before calls have their turn
constexpr size_t kThrownBytesMax = 160;  // of what people read of an exception

thread_local bool inside_actor = false;
thread_local const int own_thread = gettid();
// What this thread, one of a host, is to do when the actor that it runs has its turn behind it.
thread_local std::vector<absl::AnyInvocable<void()>>* deferred = nullptr;

// Replies that are made when the lock is released.
struct Heard {
  Reply reply;
  absl::Status status;
  std::string result;
};
using AllHeard = std::vector<Heard>;

void Tell(AllHeard& heard) {
  for (Heard& one : heard) one.reply(one.status, one.result);
  heard.clear();
}

}  // namespace

namespace {

// Numbers one after the other, as they lie in memory: the machines of a job are alike.
template <typename T>
std::string PackPlain(const T& value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}
template <typename T>
absl::StatusOr<T> ParsePlain(absl::string_view bytes) {
  T value;
  if (bytes.size() != sizeof(T))
    return absl::InvalidArgumentError(
        absl::StrCat("a reference to an actor has ", sizeof(T), " bytes, and this one ", bytes.size()));
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

}  // namespace

std::string ActorAddress::Pack() const { return PackPlain(*this); }
absl::StatusOr<ActorAddress> ActorAddress::Parse(absl::string_view bytes) {
  return ParsePlain<ActorAddress>(bytes);
}
std::string ActorRef::Pack() const { return PackPlain(*this); }
absl::StatusOr<ActorRef> ActorRef::Parse(absl::string_view bytes) {
  if (bytes.empty())
    return absl::InvalidArgumentError("the reference is nobody's: no actor was ever given to it");
  return ParsePlain<ActorRef>(bytes);
}

class Host::Core : public std::enable_shared_from_this<Host::Core> {
  // Wakes one thread, where Mutex wakes all that wait: a call must not cost as many wake-ups as there are
  // idle threads.
  class Bell {
   public:
    void Ring() {
      MutexLock lock(&mutex_);
      rung_ = true;
    }
    void WaitFor(absl::Duration timeout) {
      MutexLock lock(&mutex_);
      mutex_.AwaitFor(timeout, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return rung_; });
      rung_ = false;
    }

   private:
    Mutex mutex_;
    bool rung_ ABSL_GUARDED_BY(mutex_) = false;
  };

  static constexpr int kMake = -1;
  struct Actor;

  // What an actor is to do: to be made first, then calls.
  struct Work {
    std::shared_ptr<Actor> actor;
    int method = kMake;
    std::string arguments;
    Reply reply;  // null: its caller has heard something
    std::optional<std::multimap<Instant, Work*>::iterator> timer;
    std::list<std::unique_ptr<Work>>::iterator place;  // in the mailbox, until it is begun
    Instant queued, deadline;
    bool begun = false;
  };

  // What List tells of an actor.
  struct Seen {
    Doing doing = Doing::kIdle;  // what a thread is inside for: kMaking, kRunning, kSaving
    int method = 0;
    int thread = 0;
    Instant since, answered;  // the last call
    bool late = false;        // no thread was free for it when it was scheduled
    int restarts = 0;
    std::string threw;                 // for which it is made anew
    std::unique_ptr<CallTimes> times;  // null: it has answered none
  };

  struct Actor {
    ActorAddress address;
    std::shared_ptr<const ActorClass> type;
    SpawnOptions options;
    std::string arguments;  // of which it is made anew
    void* self = nullptr;
    std::string saved;     // the newest that was saved, or that it was made with
    bool changed = false;  // since then
    bool saves = true;     // what was saved before is kept, and the next may be
    std::list<std::unique_ptr<Work>> mailbox;
    size_t mailbox_bytes = 0;
    std::vector<Instant> crashes;  // within kRestartWindow
    bool scheduled = false;        // in the queue of those that have work
    int inside = 0;                // threads that are in functions of its class, or about to be
    int busy = 0;                  // calls that were begun and not answered
    bool broken = false;
    bool ended = false;
    Seen seen;
  };

 public:
  Core(const HostOptions& options, const Clock& clock) : options_(options), clock_(clock) {
    Rng rng = options.seed ? Rng(*options.seed) : Rng::FromSystem();
    self_.host_high = rng.Next();
    self_.host_low = rng.Next();
  }

  void Start() {
    if (options_.threads == 0) return;
    threads_.push_back(StartWithoutSignals([core = shared_from_this()] { core->Expire(); }));
    for (int i = 0; i < std::max(1, options_.threads); ++i)
      threads_.push_back(StartWithoutSignals([core = shared_from_this()] { core->Run(); }));
  }

  void Close() {
    GT_CHECK(!inside_actor);
    AllHeard heard;
    bool over = false;
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      while (!actors_.empty()) EndLocked(actors_.begin()->second, "its host is closed", heard);
    }
    Tell(heard);
    while (threads_.empty() && Turn()) {
    }
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
      over = threads_.empty() ||
             mutex_.AwaitFor(options_.close_within,
                             [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return alive_ == 0; });
      stopping_ = true;
      while (!idle_.empty()) WakeOne();
      timers_changed_.Ring();
    }
    for (std::thread& thread : threads_) {
      if (over) {
        thread.join();
      } else {
        thread.detach();
      }
    }
  }

  absl::StatusOr<std::string> SignatureOf(absl::string_view type) const {
    MutexLock lock(&mutex_);
    const auto known = classes_.find(type);
    if (known == classes_.end()) return NoClass(type);
    return known->second->signature;
  }

  absl::Status Register(ActorClass type) {
    if (type.name.empty() || type.name.size() > 255)
      return absl::InvalidArgumentError("the name of a class has 1 to 255 bytes");
    MutexLock lock(&mutex_);
    const auto known = classes_.find(type.name);
    if (known == classes_.end()) {
      std::string name = type.name;
      classes_.emplace(std::move(name), std::make_shared<const ActorClass>(std::move(type)));
      return absl::OkStatus();
    }
    if (known->second->signature == type.signature) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat("there is another class ", type.name, ": ",
                                                 known->second->signature, "; this one is ", type.signature));
  }

  void Spawn(absl::string_view type, const SpawnOptions& options, std::string arguments,
             absl::Duration timeout, Reply reply) {
    absl::Status status;
    {
      MutexLock lock(&mutex_);
      const auto known = classes_.find(type);
      if (closing_) {
        status = absl::CancelledError("the host is closed");
      } else if (known == classes_.end()) {
        status = NoClass(type);
      } else {
        auto actor = std::make_shared<Actor>();
        actor->address = self_;
        actor->address.number = ++last_number_;
        actor->type = known->second;
        actor->options = options;
        actor->arguments = std::move(arguments);
        actors_.emplace(actor->address.number, actor);
        ++alive_;
        auto work = std::make_unique<Work>();
        work->reply = std::move(reply);
        Queue(actor, std::move(work), timeout);
        return;
      }
    }
    reply(status, {});
  }

  void Call(const ActorAddress& address, int method, std::string arguments, absl::Duration timeout,
            Reply reply) {
    const absl::Status status = Enqueue(address, method, arguments, timeout, reply);
    if (reply) reply(status, {});
  }

  bool CallIfRoom(const ActorAddress& address, int method, std::string& arguments, absl::Duration timeout,
                  Reply& reply) {
    const absl::Status status = Enqueue(address, method, arguments, timeout, reply);
    if (absl::IsResourceExhausted(status)) return false;
    if (!reply) return true;
    std::exchange(reply, nullptr)(status, {});
    MutexLock lock(&mutex_);
    if (const std::shared_ptr<Actor> actor = Find(address)) Answered(actor, method);
    return true;
  }

  void Save(uint64_t number, bool again) {
    MutexLock lock(&mutex_);
    const auto it = actors_.find(number);
    if (it == actors_.end()) return;
    if (again) {
      it->second->changed = true;  // what is on its way is not kept yet, and the next waits for that
    } else {
      it->second->saves = true;
    }
    Schedule(it->second);
  }

  bool Constant(uint64_t number, int method) const {
    MutexLock lock(&mutex_);
    const auto it = actors_.find(number);
    return it != actors_.end() && IsConstant(*it->second->type, method);
  }

  absl::Status MayKeep(absl::string_view type) const {
    MutexLock lock(&mutex_);
    const auto known = classes_.find(type);
    if (known == classes_.end()) return NoClass(type);
    if (known->second->save && known->second->load) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the state of a ", type,
                     " cannot be kept: give the class `void Persist(auto& archive) { archive(a_, b_); }`, in "
                     "Python get_state and set_state"));
  }

  void SetLookAround(LookAround look) {
    MutexLock lock(&mutex_);
    look_ = look ? std::make_shared<const LookAround>(std::move(look)) : nullptr;
  }

  bool Post(absl::AnyInvocable<void()>& task) {
    if (deferred != nullptr) {
      deferred->push_back(std::move(task));
      return true;
    }
    MutexLock lock(&mutex_);
    if (closing_) return false;
    tasks_.push_back(std::move(task));
    WakeOne();
    return true;
  }

  std::string WhyEnded(uint64_t number) const {
    MutexLock lock(&mutex_);
    const auto why = reasons_.find(number);
    return why == reasons_.end() ? "" : why->second;
  }

  bool Lives(uint64_t number) const {
    MutexLock lock(&mutex_);
    return actors_.contains(number);
  }

  void End(const ActorAddress& address, absl::string_view reason) {
    AllHeard heard;
    {
      MutexLock lock(&mutex_);
      if (const std::shared_ptr<Actor> actor = Find(address)) EndLocked(actor, reason, heard);
    }
    Tell(heard);
  }

  void Answer(Work* work, const absl::Status& status, absl::string_view result, bool crashed) {
    std::unique_ptr<Work> owned(work);
    // What is kept of an actor has the answers of the calls that are in its state: they come before it.
    if (work->actor->options.keep) {
      Reply reply;
      {
        MutexLock lock(&mutex_);
        Disarm(*work);  // its time cannot be over any more
        reply = std::exchange(work->reply, nullptr);
      }
      if (reply) reply(status, result);
    }
    const Instant now = clock_.Now();
    {
      MutexLock lock(&mutex_);
      Disarm(*work);
      Actor& actor = *work->actor;
      --actor.busy;
      --begun_;
      ++answered_;
      SeeAnswer(actor, *work, now);
      if (crashed) actor.broken = true;
      if (crashed) actor.seen.threw = std::string(status.message().substr(0, kThrownBytesMax));
      Answered(work->actor, work->method);
    }
    // What ran too long was answered by the clock.
    if (work->reply) work->reply(status, result);
  }

  const ActorAddress& address() const { return self_; }

  bool Turn() {
    AllHeard heard;
    std::shared_ptr<Actor> actor;
    absl::AnyInvocable<void()> task;
    {
      MutexLock lock(&mutex_);
      ExpireAll(heard);
      TakeOne(actor, task);
    }
    const bool any = !heard.empty() || actor != nullptr || task;
    TellExpired(heard);
    if (actor != nullptr || task) AsThread([&] { RunTaken(actor, task); });
    return any;
  }

  std::optional<Instant> NextDeadline() const {
    MutexLock lock(&mutex_);
    if (timers_.empty()) return std::nullopt;
    return timers_.begin()->first;
  }

  absl::Duration Left(Instant deadline) const {
    return std::max(absl::ZeroDuration(), deadline - clock_.Now());
  }

  Counts counts() const {
    MutexLock lock(&mutex_);
    return {alive_, waiting_, begun_, answered_};
  }

  Listing List(const ListQuestion& question) const {
    std::vector<Busy> all;
    {
      MutexLock lock(&mutex_);
      for (const auto& [number, actor] : actors_) {
        if (question.Asks(actor->type->name, actor->options.name, number)) all.push_back({actor, 0, 0});
      }
    }
    Listing listing;
    const Instant now = clock_.Now();
    for (size_t from = 0; from < all.size(); from += kLookedAtInARow) {
      MutexLock lock(&mutex_);
      for (size_t i = from; i < std::min(all.size(), from + kLookedAtInARow); ++i)
        LookAt(all[i], now, listing.classes[all[i].actor->type->name]);
    }
    const size_t listed = std::min(all.size(), question.limit);
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(listed), all.end(),
                      [](const Busy& a, const Busy& b) {
                        return std::pair(a.calls, a.per_second) > std::pair(b.calls, b.per_second);
                      });
    listing.left_out = all.size() - listed;
    for (size_t i = 0; i < listed; ++i) {
      MutexLock lock(&mutex_);
      listing.actors.push_back(FactsOf(*all[i].actor, now));
    }
    return listing;
  }

 private:
  class Begun final : public BegunCall {
   public:
    Begun(std::shared_ptr<Core> core, Work* work) : core_(std::move(core)), work_(work) {}
    void Answer(const absl::Status& status, absl::string_view result, bool crashed) override {
      core_->Answer(work_, status, result, crashed);
      delete this;
    }
    absl::Duration Left() const override { return core_->Left(work_->deadline); }

   private:
    const std::shared_ptr<Core> core_;
    Work* const work_;  // nobody else deletes it
  };

  static bool IsConstant(const ActorClass& type, int method) {
    return method >= 0 && static_cast<size_t>(method) < type.constant.size() &&
           type.constant[static_cast<size_t>(method)];
  }
  // Behind the answer, whether the call ran or not: who keeps the state of the actor holds such an answer,
  // and what others see meanwhile, until it has a state that was taken later.
  void Answered(const std::shared_ptr<Actor>& actor, int method) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    actor->changed |= !IsConstant(*actor->type, method);
    Schedule(actor);
  }
  static bool SavesNow(const Actor& actor) {
    return actor.options.keep && actor.saves && actor.changed && actor.self != nullptr;
  }

  // Whether one more thread has something to do with it, beside those that are `inside`.
  static bool HasTurn(const Actor& actor, int inside) {
    const bool alone = inside == 0 && actor.busy == 0;
    if (actor.ended || actor.broken || SavesNow(actor)) return alone;
    if (actor.mailbox.empty()) return false;
    if (actor.self == nullptr) return alone;  // it is to be made
    return inside < actor.options.concurrency && actor.busy < actor.options.concurrency;
  }

  static absl::Status NoClass(absl::string_view type) {
    return absl::NotFoundError(absl::StrCat("no class ", type, " is registered here: is gtrain::Actor<", type,
                                            ", ...> in this program?"));
  }

  // An error leaves all as it was.
  absl::Status Enqueue(const ActorAddress& address, int method, std::string& arguments,
                       absl::Duration timeout, Reply& reply) {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Actor> actor = Find(address);
    if (actor == nullptr) return NotFound(address);
    GT_RETURN_IF_ERROR(MayCall(*actor, method, arguments.size()));
    auto work = std::make_unique<Work>();
    work->method = method;
    work->arguments = std::move(arguments);
    work->reply = std::exchange(reply, nullptr);
    Queue(actor, std::move(work), timeout);
    return absl::OkStatus();
  }

  std::shared_ptr<Actor> Find(const ActorAddress& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (address.host_high != self_.host_high || address.host_low != self_.host_low) return nullptr;
    const auto it = actors_.find(address.number);
    return it == actors_.end() ? nullptr : it->second;
  }

  absl::Status NotFound(const ActorAddress& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (address.host_high != self_.host_high || address.host_low != self_.host_low)
      return absl::NotFoundError("the actor is one of another process");
    const auto why = reasons_.find(address.number);
    return absl::NotFoundError(absl::StrCat("actor ", address.number, " is no more",
                                            why == reasons_.end() ? "" : ": ",
                                            why == reasons_.end() ? "" : why->second));
  }

  absl::Status MayCall(const Actor& actor, int method, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (method < 0 || method >= actor.type->methods)
      return absl::InvalidArgumentError(absl::StrCat(actor.type->name, " has the methods 0 to ",
                                                     actor.type->methods - 1, ", and none of number ",
                                                     method));
    if (actor.mailbox.size() < options_.mailbox_calls &&
        (actor.mailbox.empty() || actor.mailbox_bytes + bytes <= options_.mailbox_bytes))
      return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        "the mailbox of ", actor.type->name, " ", actor.address.number, " is full with ",
        actor.mailbox.size(), " calls of ", PrintBytes(static_cast<int64_t>(actor.mailbox_bytes)),
        ": await answers before making other calls"));
  }

  void Queue(const std::shared_ptr<Actor>& actor, std::unique_ptr<Work> work, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    work->actor = actor;
    work->queued = clock_.Now();
    work->deadline = work->queued + timeout;
    work->timer = timers_.emplace(work->deadline, work.get());
    if (work->deadline < expires_at_) {
      expires_at_ = work->deadline;
      timers_changed_.Ring();
    }
    actor->mailbox_bytes += work->arguments.size();
    ++waiting_;
    Work& queued = *work;
    queued.place = actor->mailbox.insert(actor->mailbox.end(), std::move(work));
    Schedule(actor);
  }

  void Disarm(Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (work.timer) timers_.erase(*work.timer);
    work.timer.reset();
  }

  // Out of the mailbox.
  std::unique_ptr<Work> Take(Actor& actor, std::list<std::unique_ptr<Work>>::iterator place)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::unique_ptr<Work> work = std::move(*place);
    actor.mailbox.erase(place);
    actor.mailbox_bytes -= work->arguments.size();
    --waiting_;
    return work;
  }

  void Schedule(const std::shared_ptr<Actor>& actor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (actor->scheduled || !HasTurn(*actor, /*inside=*/actor->inside)) return;
    actor->scheduled = true;
    actor->seen.late = idle_.empty() && !looking_;
    ready_.push_back(actor);
    WakeOne();
  }
  void WakeOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (looking_ && !wanted_.exchange(true, std::memory_order_relaxed)) return;  // that one takes it
    if (idle_.empty()) return;
    idle_.back()->Ring();
    idle_.pop_back();
  }

  // A copy, since the map's own goes.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  void EndLocked(std::shared_ptr<Actor> actor, absl::string_view reason, AllHeard& heard)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    actors_.erase(actor->address.number);
    actor->ended = true;
    reasons_.emplace(actor->address.number, std::string(reason));
    if (reasons_.size() > kReasonsKept) reasons_.erase(reasons_.begin());
    while (!actor->mailbox.empty()) {
      std::unique_ptr<Work> work = Take(*actor, actor->mailbox.begin());
      Disarm(*work);
      if (!work->reply) continue;
      heard.push_back({std::move(work->reply),
                       absl::CancelledError(absl::StrCat(actor->type->name, " ", actor->address.number,
                                                         " has ended, and the call had not begun: ", reason)),
                       ""});
    }
    Schedule(actor);
  }

  // ---- what people see

  // An actor among those that List looks at.
  struct Busy {
    std::shared_ptr<Actor> actor;
    size_t calls;  // that it has begun, or that wait for it
    double per_second;
  };

  void SeeBegin(Actor& actor, Doing doing, int method, Instant now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    actor.seen.doing = doing;
    actor.seen.method = method;
    actor.seen.thread = own_thread;
    actor.seen.since = now;
  }
  // A call begins when it has come and the one before is answered, where a thread was free then: reading the
  // clock for that takes as long as a twentieth of a call.
  Instant BeginOf(const Actor& actor, const Work& work) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return actor.seen.late ? clock_.Now() : std::max(work.queued, actor.seen.answered);
  }

  static void SeeAnswer(Actor& actor, const Work& work, Instant now) {
    actor.seen.doing = Doing::kIdle;
    actor.seen.answered = now;
    if (actor.seen.times == nullptr) actor.seen.times = std::make_unique<CallTimes>();
    actor.seen.times->Count(work.queued, now);
  }

  static Doing DoingOf(const Actor& actor) {
    if (actor.busy) return actor.inside ? Doing::kRunning : Doing::kAwaiting;
    if (actor.inside && actor.seen.doing != Doing::kIdle) return actor.seen.doing;
    if (actor.mailbox.empty()) return Doing::kIdle;
    return actor.mailbox.front()->method == kMake ? Doing::kMaking : Doing::kWaiting;
  }

  void LookAt(Busy& one, Instant now, ClassFacts& of) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Actor& actor = *one.actor;
    const Doing doing = DoingOf(actor);
    ++of.actors;
    of.running += doing == Doing::kRunning ? 1 : 0;
    of.awaiting += doing == Doing::kAwaiting ? 1 : 0;
    of.waiting += actor.mailbox.size();
    of.waiting_bytes += actor.mailbox_bytes;
    of.restarts += static_cast<uint64_t>(actor.seen.restarts);
    one.calls = actor.mailbox.size() + static_cast<size_t>(actor.busy);
    if (actor.seen.times == nullptr) return;
    one.per_second = actor.seen.times->PerSecond(now);
    of.per_second += one.per_second;
    of.times.Add(*actor.seen.times);
  }

  ActorFacts FactsOf(const Actor& actor, Instant now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ActorFacts facts;
    facts.number = actor.address.number;
    facts.type = actor.type->name;
    facts.name = actor.options.name;
    facts.doing = DoingOf(actor);
    facts.waiting = actor.mailbox.size();
    facts.waiting_bytes = actor.mailbox_bytes;
    facts.restarts = actor.seen.restarts;
    facts.kept = actor.options.keep;
    Instant since = actor.inside || actor.busy || actor.mailbox.empty() ? actor.seen.since
                                                                        : actor.mailbox.front()->queued;
    facts.since = std::max(absl::ZeroDuration(), now - since);
    // One that has answered may not have left it yet.
    if (actor.inside && facts.doing != Doing::kIdle && facts.doing != Doing::kWaiting)
      facts.thread = actor.seen.thread;
    if (actor.busy) facts.method = MethodOf(actor.type->signature, actor.type->methods, actor.seen.method);
    if (actor.seen.times == nullptr) return facts;
    facts.answered = actor.seen.times->count();
    facts.per_second = actor.seen.times->PerSecond(now);
    facts.half = actor.seen.times->Quantile(0.5);
    facts.most = actor.seen.times->Quantile(0.99);
    return facts;
  }

  void TellNews(const Actor& actor, absl::string_view what) const {
    if (!options_.on_news) return;
    options_.on_news(absl::StrCat(
        actor.type->name, " ",
        actor.options.name.empty() ? absl::StrCat(actor.address.number) : actor.options.name, " ", what));
  }

  // ---- threads that run actors

  void Run() {
    Bell bell;
    bool looked = false;  // and found nothing
    for (;;) {
      std::shared_ptr<Actor> actor;
      absl::AnyInvocable<void()> task;
      std::shared_ptr<const LookAround> look;
      {
        MutexLock lock(&mutex_);
        if (!TakeOne(actor, task)) {
          if (stopping_) return;
          if (look_ != nullptr && !looking_ && !looked && !closing_) {
            look = look_;
            looking_ = true;
            wanted_.store(false, std::memory_order_relaxed);
          } else {
            idle_.push_back(&bell);
          }
        }
      }
      if (actor == nullptr && !task && look == nullptr) {
        bell.WaitFor(absl::InfiniteDuration());
        looked = false;
        continue;
      }
      looked = false;
      AsThread([&] {
        if (look == nullptr) return RunTaken(actor, task);
        looked = !(*look)([this] { return wanted_.load(std::memory_order_relaxed); });
        MutexLock lock(&mutex_);
        looking_ = false;
      });
    }
  }

  // A task or an actor that has its turn. False: there is none.
  bool TakeOne(std::shared_ptr<Actor>& actor, absl::AnyInvocable<void()>& task)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!tasks_.empty()) {
      task = std::move(tasks_.front());
      tasks_.pop_front();
      return true;
    }
    if (ready_.empty()) return false;
    actor = std::move(ready_.front());
    ready_.pop_front();
    actor->scheduled = false;
    ++actor->inside;
    return true;
  }

  void RunTaken(const std::shared_ptr<Actor>& actor, absl::AnyInvocable<void()>& task) {
    if (task) return task();
    RunOne(actor);
    MutexLock lock(&mutex_);
    --actor->inside;
    Schedule(actor);
  }

  // `run`, and behind it what was posted meanwhile.
  void AsThread(absl::FunctionRef<void()> run) {
    std::vector<absl::AnyInvocable<void()>> later;
    inside_actor = true;
    deferred = &later;
    run();
    while (!later.empty()) {
      std::vector<absl::AnyInvocable<void()>> now = std::exchange(later, {});
      LeaveToOthers(now);
      now.front()();
    }
    inside_actor = false;
    deferred = nullptr;
  }

  // This thread goes on with the first, which may take long. What else there is waits for no thread that
  // could have it.
  void LeaveToOthers(std::vector<absl::AnyInvocable<void()>>& later) {
    MutexLock lock(&mutex_);
    for (size_t i = 1; i < later.size(); ++i) tasks_.push_back(std::move(later[i]));
    for (size_t i = 0; i < ready_.size() + tasks_.size() && !idle_.empty(); ++i) WakeOne();
  }

  void RunOne(const std::shared_ptr<Actor>& actor) {
    for (int i = 0; i < kCallsInARow; ++i) {
      // Whoever goes on with an answer is not to wait for the calls behind it.
      if (!deferred->empty()) return;
      std::unique_ptr<Work> work;
      bool ended = false, broken = false, saves = false;
      {
        MutexLock lock(&mutex_);
        if (actor->busy == 0) actor->seen.doing = Doing::kIdle;
        if (!HasTurn(*actor, actor->inside - 1)) return;
        ended = actor->ended;
        broken = std::exchange(actor->broken, false);
        saves = !ended && !broken && SavesNow(*actor);
        if (saves) {
          actor->changed = actor->saves = false;
          SeeBegin(*actor, Doing::kSaving, 0, clock_.Now());
        } else if (broken) {
          SeeBegin(*actor, Doing::kMaking, 0, clock_.Now());
        } else if (!ended) {
          work = Take(*actor, actor->mailbox.begin());
          work->begun = true;
          const bool calls = work->method >= 0;
          if (calls) {
            ++actor->busy;
            ++begun_;
          }
          SeeBegin(*actor, calls ? Doing::kRunning : Doing::kMaking, work->method, BeginOf(*actor, *work));
          actor->seen.late = false;
          if (actor->options.concurrency > 1) Schedule(actor);
        }
      }
      if (ended) return Destroy(*actor);
      if (broken) {
        MakeAnew(actor);
      } else if (saves) {
        SaveOne(*actor);
      } else if (work->method == kMake) {
        Make(actor, std::move(work));
      } else {
        // The answer deletes the work, maybe before the function returns.
        const std::string arguments = std::move(work->arguments);
        const int method = work->method;
        actor->type->call(actor->self, method, arguments, new Begun(shared_from_this(), work.release()));
      }
    }
  }

  void Destroy(Actor& actor) {
    if (actor.self != nullptr) actor.type->destroy(std::exchange(actor.self, nullptr));
    {
      MutexLock lock(&mutex_);
      actor.ended = false;  // it is done, and not scheduled again
      --alive_;
    }
    if (options_.on_end) options_.on_end(actor.address.number);
  }

  // Of its arguments, and of the state that is kept of it.
  static absl::StatusOr<void*> Create(const Actor& actor, bool with_state) {
    GT_ASSIGN_OR_RETURN(void* const self, actor.type->create(actor.arguments));
    if (!with_state) return self;
    const absl::Status loaded = actor.type->load(self, actor.saved);
    if (loaded.ok()) return self;
    actor.type->destroy(self);
    return loaded;
  }

  void SaveOne(Actor& actor) {
    absl::StatusOr<std::string> state = actor.type->save(actor.self);
    if (state.ok()) {
      actor.saved = *state;
      actor.options.state.emplace();  // there is one
    }
    if (options_.on_saved &&
        options_.on_saved(actor.address.number, state.status(), state.ok() ? *state : ""))
      return;
    MutexLock lock(&mutex_);
    actor.saves = true;
  }

  void Make(const std::shared_ptr<Actor>& actor, std::unique_ptr<Work> work) {
    if (actor->options.state) actor->saved = std::exchange(*actor->options.state, "");
    const absl::StatusOr<void*> made = Create(*actor, actor->options.state.has_value());
    absl::Status status = made.status();
    AllHeard heard;
    Reply reply;
    {
      MutexLock lock(&mutex_);
      Disarm(*work);
      reply = std::move(work->reply);
      if (made.ok()) actor->self = *made;
      if (actor->ended) {
        status = absl::CancelledError(absl::StrCat("the ", actor->type->name, " has ended as it was made"));
      } else if (!status.ok() || !reply) {  // without a reply its spawn took too long, so nobody has it
        EndLocked(actor, status.ok() ? "its spawn took too long" : status.message(), heard);
      }
    }
    Tell(heard);
    if (reply) reply(status, status.ok() ? actor->address.Pack() : "");
  }

  void MakeAnew(const std::shared_ptr<Actor>& actor) {
    const Instant now = clock_.Now();
    actor->type->destroy(std::exchange(actor->self, nullptr));
    actor->crashes.push_back(now);
    std::erase_if(actor->crashes, [&](Instant then) { return now - then > kRestartWindow; });
    std::string reason, threw;
    {
      MutexLock lock(&mutex_);
      threw = std::exchange(actor->seen.threw, "");
      ++actor->seen.restarts;
    }
    const int crashes = static_cast<int>(actor->crashes.size());
    if (crashes > actor->options.restarts) {
      reason = absl::StrCat("it threw ", crashes, " times within ", PrintDuration(kRestartWindow),
                            ", and has ", actor->options.restarts, " restarts");
    } else {
      const absl::StatusOr<void*> made = Create(*actor, actor->options.state.has_value());
      if (made.ok()) {
        actor->self = *made;
        TellNews(*actor, absl::StrCat("threw: ", threw, "; it was made anew (", crashes, " of ",
                                      actor->options.restarts, " restarts within ",
                                      PrintDuration(kRestartWindow), ")"));
        if (!actor->options.keep) return;
        if (options_.on_undone) options_.on_undone(actor->address.number);
        MutexLock lock(&mutex_);
        actor->changed = true;  // what became of those calls is not kept yet
        return;
      }
      reason = absl::StrCat("it could not be made anew after it threw: ", made.status().message());
    }
    TellNews(*actor, absl::StrCat("threw: ", threw, "; it has ended: ", reason));
    AllHeard heard;
    {
      MutexLock lock(&mutex_);
      if (!actor->ended) EndLocked(actor, reason, heard);
    }
    Tell(heard);
  }

  // ---- the thread of the deadlines

  void Expire() {
    AllHeard heard;
    for (;;) {
      absl::Duration wait;
      {
        MutexLock lock(&mutex_);
        const Instant now = ExpireAll(heard);
        if (heard.empty()) {
          if (stopping_) return;
          wait = timers_.empty() ? kIdleLook : timers_.begin()->first - now;
          expires_at_ = now + wait;
        }
      }
      if (wait > absl::ZeroDuration()) timers_changed_.WaitFor(wait);
      TellExpired(heard);
    }
  }

  // The answer waits for a save, and there would be none before the next change. It comes first, to be in it.
  void TellExpired(AllHeard& heard) {
    Tell(heard);
    MutexLock lock(&mutex_);
    for (const auto& [actor, method] : std::exchange(expired_, {})) Answered(actor, method);
  }

  Instant ExpireAll(AllHeard& heard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Instant now = clock_.Now();
    while (!timers_.empty() && timers_.begin()->first <= now) ExpireOne(*timers_.begin()->second, heard);
    return now;
  }

  void ExpireOne(Work& work, AllHeard& heard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Disarm(work);
    const std::shared_ptr<Actor> actor = work.actor;
    const std::string what =
        absl::StrCat(work.method == kMake ? "the spawn" : "a call", " of ", actor->type->name);
    if (work.method != kMake && actor->options.keep) expired_.emplace_back(actor, work.method);
    if (work.begun) {
      heard.push_back({std::exchange(work.reply, nullptr),
                       absl::DeadlineExceededError(absl::StrCat(what, " has begun and is not done")), ""});
      return;
    }
    const auto ahead = std::distance(actor->mailbox.begin(), work.place);
    const std::unique_ptr<Work> taken = Take(*actor, work.place);
    heard.push_back({std::move(taken->reply),
                     absl::DeadlineExceededError(
                         absl::StrCat(what, " had not begun, and will not: ", ahead, " were before it")),
                     ""});
    if (taken->method == kMake) EndLocked(actor, "its spawn took too long", heard);
  }

  const HostOptions options_;
  const Clock& clock_;
  ActorAddress self_;
  std::vector<std::thread> threads_;  // of Start and Close alone

  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<const ActorClass>, std::less<>> classes_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::shared_ptr<Actor>> actors_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> reasons_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Actor>> ready_ ABSL_GUARDED_BY(mutex_);
  std::deque<absl::AnyInvocable<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::multimap<Instant, Work*> timers_ ABSL_GUARDED_BY(mutex_);
  // Actors whose state is kept, and methods whose calls took too long.
  std::vector<std::pair<std::shared_ptr<Actor>, int>> expired_ ABSL_GUARDED_BY(mutex_);
  Bell timers_changed_;
  std::vector<Bell*> idle_ ABSL_GUARDED_BY(mutex_);  // of threads that wait for work, or are about to
  std::shared_ptr<const LookAround> look_ ABSL_GUARDED_BY(mutex_);
  bool looking_ ABSL_GUARDED_BY(mutex_) = false;  // a thread does
  std::atomic<bool> wanted_{false};               // it, for work that is there
  Instant expires_at_ ABSL_GUARDED_BY(mutex_);    // the thread of the deadlines looks then by itself
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0, answered_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t alive_ ABSL_GUARDED_BY(mutex_) = 0, waiting_ ABSL_GUARDED_BY(mutex_) = 0,
                begun_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false, stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

Host::Host(const HostOptions& options, const Clock& clock) : core_(std::make_shared<Core>(options, clock)) {
  core_->Start();
}
Host::~Host() { core_->Close(); }
void Host::Close() { core_->Close(); }

absl::Status Host::Register(ActorClass type) { return core_->Register(std::move(type)); }
void Host::Spawn(absl::string_view type, const SpawnOptions& options, std::string arguments,
                 absl::Duration timeout, Reply reply) {
  core_->Spawn(type, options, std::move(arguments), timeout, std::move(reply));
}
void Host::Call(const ActorAddress& address, int method, std::string arguments, absl::Duration timeout,
                Reply reply) {
  core_->Call(address, method, std::move(arguments), timeout, std::move(reply));
}
void Host::End(const ActorAddress& address, absl::string_view reason) { core_->End(address, reason); }
bool Host::CallIfRoom(const ActorAddress& address, int method, std::string& arguments, absl::Duration timeout,
                      Reply& reply) {
  return core_->CallIfRoom(address, method, arguments, timeout, reply);
}
void Host::Save(uint64_t number, bool again) { core_->Save(number, again); }
bool Host::Constant(uint64_t number, int method) const { return core_->Constant(number, method); }
absl::Status Host::MayKeep(absl::string_view type) const { return core_->MayKeep(type); }
void Host::SetLookAround(LookAround look) { core_->SetLookAround(std::move(look)); }
bool Host::Post(absl::AnyInvocable<void()>& task) { return core_->Post(task); }
std::string Host::WhyEnded(uint64_t number) const { return core_->WhyEnded(number); }
bool Host::Turn() { return core_->Turn(); }
std::optional<Instant> Host::NextDeadline() const { return core_->NextDeadline(); }
bool Host::Lives(uint64_t number) const { return core_->Lives(number); }
absl::StatusOr<std::string> Host::SignatureOf(absl::string_view type) const {
  return core_->SignatureOf(type);
}
ActorAddress Host::address() const { return core_->address(); }
bool Host::Inside() { return inside_actor; }
Host::Counts Host::counts() const { return core_->counts(); }
Listing Host::List(const ListQuestion& question) const { return core_->List(question); }

}  // namespace gtrain::actors
