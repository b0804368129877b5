// References to actors, their owners, and groups of them. gtrain/actor.h says how they are used; programs
// include that.
#pragma once
#include <gtrain/actor_c.h>
#include <gtrain/actor_class.h>
#include <gtrain/status.h>
#include <gtrain/task.h>
#include <gtrain/value.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

namespace internal {

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

// Likewise, and `then` hears of it first.
template <typename T, typename Unpack, typename Then>
class AnsweredAnd : public Answered<T, Unpack> {
 public:
  AnsweredAnd(Unpack unpack, Then then) : Answered<T, Unpack>(std::move(unpack)), then_(std::move(then)) {}
  static void Reply(void* user, gtrain_status status, const char* message, const void* data, size_t size) {
    {
      std::unique_ptr<AnsweredAnd> self(static_cast<AnsweredAnd*>(user));
      self->then_(static_cast<StatusCode>(status));
      user = new Answered<T, Unpack>(std::move(*self));
    }
    Answered<T, Unpack>::Reply(user, status, message, data, size);
  }

 private:
  Then then_;
};

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
  // Likewise; `then` gets the status code that it came to, from whichever thread, before anybody else does.
  template <auto kMethod, typename Then, typename... Given>
  Future<typename internal::TraitsOf<kMethod>::Value> CallAnd(Then then, Given&&... given) const {
    using T_ = typename internal::TraitsOf<kMethod>::Value;
    internal::Packed packed;
    const Status status = Pack<kMethod>(packed, std::forward<Given>(given)...);
    if (!status.ok()) {
      then(status.code());
      return internal::Failed<T_>(status);
    }
    using Answered = internal::AnsweredAnd<T_, internal::AsValue<T_>, Then>;
    auto* answered = new Answered({}, std::move(then));
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
  // There once the actor has ended by itself, with the reason: it threw, or its process was lost, more often
  // than it has restarts, or its state could not be kept. kCancelled: this let it go. It may be dropped.
  Future<std::string> Ended() const {
    if (internal::Engine() == nullptr) return internal::Failed<std::string>(internal::NoCluster());
    const auto text = [](const void* data, size_t size) -> Result<std::string> {
      return std::string(static_cast<const char*>(data), size);
    };
    using Answered = internal::Answered<std::string, decltype(text)>;
    auto* answered = new Answered(text);
    Future<std::string> future(answered->outcome());
    gtrain_actors_await_end(internal::Engine(), ref_.bytes().data(), ref_.bytes().size(), &Answered::Reply,
                            answered);
    return future;
  }
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
  // A call with arguments of its own to each: those of the i-th are the i-th elements of the vectors.
  // kInvalidArgument: a vector has not as many elements as the group has actors.
  template <auto kMethod, typename... Given>
  GroupFuture<typename internal::TraitsOf<kMethod>::Value> Scatter(const std::vector<Given>&... given) const {
    using Value = typename internal::TraitsOf<kMethod>::Value;
    std::vector<Future<Value>> futures;
    const bool fits = ((given.size() == refs_.size()) && ...);
    for (size_t i = 0; i < refs_.size(); ++i) {
      futures.push_back(fits ? refs_[i].template Call<kMethod>(given[i]...)
                             : internal::Failed<Value>(Status(
                                   StatusCode::kInvalidArgument,
                                   "Scatter: a vector has not as many elements as the group has actors")));
    }
    return GroupFuture<Value>(std::move(futures));
  }
  // What the method gives of all of them, combined by `Op` in a tree of the actors, in the order of the
  // group: each combines its own value with those of two others below it, so nobody gets more than two, and
  // the same group combines in the same way. `gtrain::Methods` lists `gtrain::Reduces<kMethod, Op>`. An error
  // of one is that of all. kInvalidArgument: the group is empty.
  template <auto kMethod, typename Op, typename... Given>
  Future<typename internal::TraitsOf<kMethod>::Value> Reduce(const Given&... given) const {
    using Value = typename internal::TraitsOf<kMethod>::Value;
    static_assert(
        decltype(GtrainActorOf(internal::ActorTag<T>()))::template Index<Reduces<kMethod, Op>>() >= 0,
        "gtrain: gtrain::Methods<> of this class does not list gtrain::Reduces<> of this method and Op");
    static_assert(
        std::is_invocable_r_v<Value, Op, Value, Value>,
        "gtrain: the Op of gtrain::Reduces<> makes a value of two: Value operator()(Value, const Value&)");
    if (refs_.empty())
      return internal::Failed<Value>(Status(StatusCode::kInvalidArgument, "Reduce: the group is empty"));
    return refs_[0].template Call<Reduces<kMethod, Op>>(std::vector<Ref<T>>(refs_.begin() + 1, refs_.end()),
                                                        given...);
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
  template <auto kMethod, typename... Given>
  auto Scatter(const std::vector<Given>&... given) const {
    return ref().template Scatter<kMethod>(given...);
  }
  template <auto kMethod, typename Op, typename... Given>
  auto Reduce(const Given&... given) const {
    return ref().template Reduce<kMethod, Op>(given...);
  }

 private:
  std::vector<Owner<T>> owners_;
};

}  // namespace gtrain
