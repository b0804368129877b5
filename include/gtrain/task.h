// Futures, and coroutines that await them.
#pragma once
#include <gtrain/actor_c.h>
#include <gtrain/status.h>
#include <gtrain/value_types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <coroutine>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

// The time of a call that nobody gave one.
inline constexpr std::chrono::milliseconds kCallTimeout = std::chrono::seconds(60);

template <typename T>
class Future;
template <typename T>
class GroupFuture;
template <typename T>
class Task;

// In place of a value that there is none of.
struct Nothing {};

namespace internal {

template <typename T>
using Stored = std::conditional_t<std::is_void_v<T>, Nothing, T>;

using Moment = std::chrono::steady_clock::time_point;

// When the call is over that this thread computes something for, if it is one.
inline std::optional<Moment>& CallDeadline() {
  static thread_local std::optional<Moment> deadline;
  return deadline;
}
// Whether this thread must not wait.
inline bool& MustNotWait() {
  static thread_local bool must_not = false;
  return must_not;
}

// The actors of this process.
inline gtrain_actors*& Engine() {
  static gtrain_actors* engine = nullptr;
  return engine;
}

// Code of actors and coroutines runs: whatever call it is for says so itself.
class NoWaiting {
 public:
  NoWaiting()
      : before_(std::exchange(MustNotWait(), true)), deadline_(std::exchange(CallDeadline(), std::nullopt)) {}
  ~NoWaiting() {
    MustNotWait() = before_;
    CallDeadline() = deadline_;
  }
  NoWaiting(const NoWaiting&) = delete;
  NoWaiting& operator=(const NoWaiting&) = delete;

 private:
  const bool before_;
  const std::optional<Moment> deadline_;
};

// Who waits for the end of something. Done is called once; what it returns is resumed next.
class Waiter {
 public:
  virtual std::coroutine_handle<> Done() = 0;

 protected:
  ~Waiter() = default;
};

// What goes on when something has ended runs on a thread that runs actors, behind what that does just now:
// whoever heard of it has other things to do, and an actor that has answered has its turn behind it.
inline void Resume(Waiter* waiter) {
  const auto go_on = [](void* user) {
    const NoWaiting no_waiting;
    static_cast<Waiter*>(user)->Done().resume();
  };
  if (Engine() != nullptr && gtrain_actors_post(Engine(), go_on, waiter, nullptr) == GTRAIN_OK) return;
  go_on(waiter);
}

// What a call comes to. Shared by who waits and who answers.
template <typename T>
class Outcome {
 public:
  void Set(Result<Stored<T>> result) {
    Waiter* waiter = nullptr;
    {
      const std::lock_guard lock(mutex_);
      result_.emplace(std::move(result));
      waiter = std::exchange(waiter_, nullptr);
    }
    set_.notify_all();
    if (waiter != nullptr) Resume(waiter);
  }
  // False: it is there already.
  bool Await(Waiter* waiter) {
    const std::lock_guard lock(mutex_);
    if (result_) return false;
    waiter_ = waiter;
    return true;
  }
  bool WaitFor(std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    return set_.wait_for(lock, timeout, [this] { return result_.has_value(); });
  }
  bool there() {
    const std::lock_guard lock(mutex_);
    return result_.has_value();
  }
  // False: it does not wait here, or is about to be told.
  bool Forget(const Waiter* waiter) {
    const std::lock_guard lock(mutex_);
    if (waiter_ != waiter) return false;
    waiter_ = nullptr;
    return true;
  }
  // Only once it is there, and by one thread.
  Result<Stored<T>>& result() { return *result_; }

 private:
  std::mutex mutex_;
  std::condition_variable set_;
  std::optional<Result<Stored<T>>> result_;
  Waiter* waiter_ = nullptr;
};

// What all coroutines of tasks have.
struct PromiseBase {
  Waiter* waiter = nullptr;
  Status status;  // of how it ended
  std::optional<Moment> deadline;

  std::coroutine_handle<> Finish() {
    return waiter == nullptr ? std::coroutine_handle<>(std::noop_coroutine()) : waiter->Done();
  }
  // It goes on no more, wherever it is: who awaits it hears why, and destroys it.
  std::coroutine_handle<> Fail(Status why) {
    status = std::move(why);
    return Finish();
  }
  void Threw() {
    try {
      throw;
    } catch (const Error& error) {
      status = error.status();
    } catch (const std::exception& error) {
      status = Status(StatusCode::kUnknown, std::string("a coroutine threw: ") + error.what());
    } catch (...) {
      status = Status(StatusCode::kUnknown, "a coroutine threw what is no std::exception");
    }
  }
};

struct FinalAwaiter {
  bool await_ready() const noexcept { return false; }
  template <typename Promise>
  std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> handle) const noexcept {
    return handle.promise().Finish();
  }
  void await_resume() const noexcept {}
};

// `kTry`: the coroutine gets errors as results, and else ends with them.
template <typename T, bool kTry>
class FutureAwaiter final : public Waiter {
 public:
  FutureAwaiter(std::shared_ptr<Outcome<T>> outcome, PromiseBase* promise)
      : outcome_(std::move(outcome)), promise_(promise) {}
  bool await_ready() const { return outcome_->there() && GoesOn(); }
  // False: it is there already. A handle that is returned is resumed on top of this call where the compiler
  // makes no tail call of it, so a loop over answers that are there would use up the stack.
  bool await_suspend(std::coroutine_handle<> handle) {
    handle_ = handle;
    if (outcome_->Await(this)) return true;
    if (GoesOn()) return false;
    Done().resume();
    return true;
  }
  std::coroutine_handle<> Done() override {
    if (GoesOn()) return handle_;
    return promise_->Fail(outcome_->result().status());
  }
  auto await_resume() {
    CallDeadline() = promise_->deadline;
    if constexpr (kTry) {
      return std::move(outcome_->result());
    } else if constexpr (!std::is_void_v<T>) {
      return *std::move(outcome_->result());
    }
  }

 private:
  bool GoesOn() const { return kTry || outcome_->result().ok(); }
  std::shared_ptr<Outcome<T>> outcome_;
  PromiseBase* promise_;
  std::coroutine_handle<> handle_;
};

template <typename T, bool kTry>
class TaskAwaiter;

template <typename T>
Task<std::vector<T>> AwaitAll(std::vector<Future<T>> futures);
Task<void> AwaitAll(std::vector<Future<void>> futures);

template <typename Inner>
struct Tried {
  Inner inner;
};

template <typename T>
struct AnyOf {
  std::vector<Future<T>>* futures;
};

// Waits for several outcomes, of which the first makes the coroutine go on. Those that are told later may
// still come when that has happened, so this lives until the last of them has, or was forgotten.
class AnyWaiter final : public Waiter {
 public:
  static std::shared_ptr<AnyWaiter> Make(std::coroutine_handle<> handle) {
    std::shared_ptr<AnyWaiter> made(new AnyWaiter(handle));
    made->self_ = made;
    return made;
  }
  void Begin() { ++told_by_; }
  // `count` fewer will tell it. Also: all that wait have been asked to.
  void End(int count) {
    if ((told_by_ -= count) == 0) self_.reset();
  }
  // An outcome is there before all were asked. Then the coroutine does not sleep.
  void Fire() { state_ = State::kFired; }
  bool Sleep() {
    State asked = State::kAsks;
    return state_.compare_exchange_strong(asked, State::kSleeps);
  }
  std::coroutine_handle<> Done() override {
    const std::shared_ptr<AnyWaiter> keep = self_;
    const std::coroutine_handle<> handle = handle_;
    const bool first = state_.exchange(State::kFired) == State::kSleeps;
    End(1);
    return first ? handle : std::coroutine_handle<>(std::noop_coroutine());
  }

 private:
  enum class State { kAsks, kSleeps, kFired };
  explicit AnyWaiter(std::coroutine_handle<> handle) : handle_(handle) {}
  const std::coroutine_handle<> handle_;
  std::atomic<State> state_{State::kAsks};
  std::atomic<int> told_by_{1};  // and whoever asks
  std::shared_ptr<AnyWaiter> self_;
};

template <typename T>
class AnyAwaiter {
 public:
  AnyAwaiter(AnyOf<T> any, PromiseBase* promise) : futures_(*any.futures), promise_(promise) {}
  bool await_ready() const { return false; }
  bool await_suspend(std::coroutine_handle<> handle) {
    if (std::ranges::none_of(futures_, [](const Future<T>& one) { return one.shared() != nullptr; })) {
      promise_->Fail(Status(StatusCode::kInvalidArgument, "WhenAny of no futures never ends")).resume();
      return true;
    }
    waiter_ = AnyWaiter::Make(handle);
    const std::shared_ptr<AnyWaiter> waiter = waiter_;  // once it sleeps, this object may be gone
    for (Future<T>& future : futures_) {
      if (future.shared() == nullptr) continue;  // it has been taken
      waiter->Begin();
      if (future.shared()->Await(waiter.get())) continue;
      waiter->End(1);
      waiter->Fire();
      break;
    }
    return waiter->Sleep();
  }
  size_t await_resume() {
    CallDeadline() = promise_->deadline;
    int forgotten = 1;
    size_t first = futures_.size();
    for (size_t i = futures_.size(); i-- > 0;) {
      if (futures_[i].shared() == nullptr) continue;
      if (futures_[i].shared()->Forget(waiter_.get())) ++forgotten;
      if (futures_[i].there()) first = i;
    }
    waiter_->End(forgotten);
    return first;
  }

 private:
  std::vector<Future<T>>& futures_;
  PromiseBase* promise_;
  std::shared_ptr<AnyWaiter> waiter_;
};

// What is awaited that cannot be. Any other overload of await_transform comes before a conversion.
struct NotAwaited {
  template <typename T>
  NotAwaited(T&& /*other*/) {  // NOLINT(google-explicit-constructor, bugprone-forwarding-reference-overload)
    using Given = std::remove_cvref_t<T>;
    constexpr bool kTaken = kIsOne<Given, Future> || kIsOne<Given, Task> || kIsOne<Given, GroupFuture>;
    static_assert(!kTaken,
                  "gtrain: a future or task is taken where it is awaited, and a const one cannot be: "
                  "co_await std::move(future)");
    static_assert(kTaken,
                  "gtrain: a gtrain::Task awaits calls, tasks, groups of calls, gtrain::Try, "
                  "gtrain::WhenAny, a Status and a Result, and nothing else");
  }
};

// A status or a result that is there already: an error ends the coroutine with it.
template <typename T>
class ResultAwaiter {
 public:
  ResultAwaiter(Result<T> result, PromiseBase* promise) : result_(std::move(result)), promise_(promise) {}
  bool await_ready() const { return result_.ok(); }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> /*handle*/) {
    return promise_->Fail(result_.status());
  }
  T await_resume() { return *std::move(result_); }

 private:
  Result<T> result_;
  PromiseBase* promise_;
};

struct TaskPromiseBase : PromiseBase {
  std::suspend_always initial_suspend() const noexcept { return {}; }
  FinalAwaiter final_suspend() const noexcept { return {}; }
  void unhandled_exception() { Threw(); }

  template <typename T>
  FutureAwaiter<T, false> await_transform(Future<T>&& future) {
    return {std::move(future).outcome(), this};
  }
  template <typename T>
  FutureAwaiter<T, true> await_transform(Tried<Future<T>>&& tried) {
    return {std::move(tried.inner).outcome(), this};
  }
  template <typename T>
  AnyAwaiter<T> await_transform(AnyOf<T> any) {
    return {any, this};
  }
  template <typename T>
  ResultAwaiter<T> await_transform(Result<T> result) {
    return {std::move(result), this};
  }
  ResultAwaiter<Nothing> await_transform(const Status& status) {
    return {status.ok() ? Result<Nothing>(Nothing{}) : Result<Nothing>(status), this};
  }
  template <typename T>
  TaskAwaiter<T, false> await_transform(Task<T>&& task) {
    return {std::move(task), this};
  }
  template <typename T>
  auto await_transform(GroupFuture<T>&& group) {
    return await_transform(AwaitAll(std::move(group).futures()));
  }
  template <typename T>
  TaskAwaiter<T, true> await_transform(Tried<Task<T>>&& tried) {
    return {std::move(tried.inner), this};
  }
  ResultAwaiter<Nothing> await_transform(const NotAwaited& /*other*/) { return {Status(), this}; }
  template <typename T>
  auto await_transform(Tried<GroupFuture<T>>&& tried) {
    return await_transform(Tried<decltype(AwaitAll(std::move(tried.inner).futures()))>{
        AwaitAll(std::move(tried.inner).futures())});
  }
};

template <typename T>
struct TaskPromise : TaskPromiseBase {
  Task<T> get_return_object();
  // `co_return value;`, or the Status or Result of one.
  void return_value(T value) { result.emplace(std::move(value)); }
  void return_value(Status why) requires(!std::is_same_v<T, Status>) {
    if (why.ok()) why = Status(StatusCode::kInternal, "a task of a value returned no value and no error");
    status = std::move(why);
  }
  void return_value(Result<T> made) requires(!kIsOne<T, Result>) {
    if (made.ok()) {
      result.emplace(*std::move(made));
    } else {
      status = made.status();
    }
  }
  Result<T> Take() {
    if (!status.ok()) return status;
    return *std::move(result);
  }
  std::optional<T> result;
};

template <>
struct TaskPromise<void> : TaskPromiseBase {
  inline Task<void> get_return_object();
  void return_void() const noexcept {}
  Result<Nothing> Take() const {
    if (!status.ok()) return status;
    return Nothing{};
  }
};

}  // namespace internal

// What a call will come to. `co_await` it in a Task: that gives the value, or ends the Task with the error;
// `co_await gtrain::Try(...)` gives a Result. Other threads `Get` it. A future that is dropped leaves the
// call to itself; nothing else does. Moved and not copied; for one thread.
template <typename T>
class [[nodiscard]] Future {
 public:
  explicit Future(std::shared_ptr<internal::Outcome<T>> outcome) : outcome_(std::move(outcome)) {}

  // Waits, and takes what is there. kDeadlineExceeded: nothing was; it may be asked again.
  // kFailedPrecondition: this thread runs an actor, or a coroutine, and is not to wait.
  Result<internal::Stored<T>> Get(std::chrono::nanoseconds timeout) {
    if (internal::MustNotWait())
      return Status(StatusCode::kFailedPrecondition,
                    "an actor does not wait in Get: let its method be a gtrain::Task and co_await the call");
    timeout = std::min<std::chrono::nanoseconds>(timeout, std::chrono::hours(24 * 365));  // without overflow
    if (!outcome_->WaitFor(timeout))
      return Status(StatusCode::kDeadlineExceeded, "the call had no answer in the time of Get");
    return std::move(outcome_->result());
  }
  bool there() const { return outcome_->there(); }
  std::shared_ptr<internal::Outcome<T>> outcome() && { return std::move(outcome_); }
  const std::shared_ptr<internal::Outcome<T>>& shared() const { return outcome_; }

 private:
  std::shared_ptr<internal::Outcome<T>> outcome_;
};

// A coroutine that awaits futures and other tasks. It begins when it is awaited, or run by Main or an actor,
// and goes on in whichever thread has the answer. The first error that it awaits, but under Try, ends it.
// Moved and not copied.
template <typename T = void>
class [[nodiscard]] Task {
  static_assert(!std::is_same_v<T, Status>,
                "gtrain: instead of a gtrain::Task<gtrain::Status> there is gtrain::Task<>, which `co_await "
                "status;` ends with an error");
  static_assert(!internal::kIsOne<T, Result>,
                "gtrain: instead of a gtrain::Task<gtrain::Result<T>> there is gtrain::Task<T>: `co_return` "
                "takes a T, a Status and a Result<T>");
  static_assert(!std::is_reference_v<T>, "gtrain: a gtrain::Task gives a value, and no reference");

 public:
  using promise_type = internal::TaskPromise<T>;
  using Handle = std::coroutine_handle<promise_type>;

  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      if (handle_) handle_.destroy();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() {
    if (handle_) handle_.destroy();
  }

  // For those that run it: once, with a waiter that outlives it.
  Handle handle() const { return handle_; }

 private:
  Handle handle_;
};

// `co_await gtrain::Try(call)` gives a Result: the task goes on with an error, too.
template <typename T>
requires(internal::kIsOne<std::remove_const_t<T>, Future> || internal::kIsOne<std::remove_const_t<T>, Task> ||
         internal::kIsOne<std::remove_const_t<T>, GroupFuture>) internal::Tried<T> Try(T& /*future*/) {
  static_assert(internal::kAlwaysFalse<T>,
                "gtrain: a future or task is taken by Try: gtrain::Try(std::move(future))");
}
template <typename T>
internal::Tried<Future<T>> Try(Future<T>&& future) {
  return {std::move(future)};
}
template <typename T>
internal::Tried<Task<T>> Try(Task<T>&& task) {
  return {std::move(task)};
}
template <typename T>
internal::Tried<GroupFuture<T>> Try(GroupFuture<T>&& group) {
  return {std::move(group)};
}

// `const size_t i = co_await gtrain::WhenAny(futures);` goes on as soon as one of them is there, a value or
// an error, and gives the first such index: `co_await std::move(futures[i])` takes it. Those that are left
// may be awaited again; those that were taken are passed over. kInvalidArgument: there is none.
template <typename T>
internal::AnyOf<T> WhenAny(std::vector<Future<T>>& futures) {
  return {&futures};
}

namespace internal {

template <typename T>
Task<T> TaskPromise<T>::get_return_object() {
  return Task<T>(std::coroutine_handle<TaskPromise<T>>::from_promise(*this));
}
inline Task<void> TaskPromise<void>::get_return_object() {
  return Task<void>(std::coroutine_handle<TaskPromise<void>>::from_promise(*this));
}

template <typename T, bool kTry>
class TaskAwaiter final : public Waiter {
 public:
  TaskAwaiter(Task<T> task, PromiseBase* promise) : task_(std::move(task)), promise_(promise) {}
  bool await_ready() const { return false; }
  // Begins the task. False: it has ended as it began, and who awaits it goes on from here (FutureAwaiter).
  bool await_suspend(std::coroutine_handle<> handle) {
    handle_ = handle;
    const auto begun = task_.handle();
    begun.promise().waiter = this;
    begun.promise().deadline = promise_->deadline;
    begun.resume();
    State begins = State::kBegins;
    if (state_.compare_exchange_strong(begins, State::kWaits)) return true;  // this object may be gone
    if (GoesOn()) return false;
    promise_->Fail(begun.promise().status).resume();
    return true;
  }
  std::coroutine_handle<> Done() override {
    if (state_.exchange(State::kEnded) == State::kBegins) return std::noop_coroutine();
    if (GoesOn()) return handle_;
    return promise_->Fail(task_.handle().promise().status);
  }
  auto await_resume() {
    CallDeadline() = promise_->deadline;
    if constexpr (kTry) {
      return task_.handle().promise().Take();
    } else if constexpr (!std::is_void_v<T>) {
      return *task_.handle().promise().Take();
    }
  }

 private:
  enum class State { kBegins, kWaits, kEnded };
  bool GoesOn() const { return kTry || task_.handle().promise().status.ok(); }
  Task<T> task_;
  PromiseBase* promise_;
  std::coroutine_handle<> handle_;
  std::atomic<State> state_{State::kBegins};
};

template <typename T>
Task<std::vector<T>> AwaitAll(std::vector<Future<T>> futures) {
  std::vector<T> values;
  for (Future<T>& future : futures) values.push_back(co_await std::move(future));
  co_return values;
}

inline Task<void> AwaitAll(std::vector<Future<void>> futures) {
  for (Future<void>& future : futures) co_await std::move(future);
}

inline int64_t Milliseconds(std::chrono::nanoseconds timeout) {
  std::chrono::nanoseconds left = timeout;
  if (const auto& deadline = CallDeadline())
    left = std::min<std::chrono::nanoseconds>(left, *deadline - std::chrono::steady_clock::now());
  return std::max<int64_t>(1, std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

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
}  // namespace gtrain
