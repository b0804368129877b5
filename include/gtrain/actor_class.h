// What a class of actors is to others: its name, what it is made of, its methods and their types.
// gtrain/actor.h says how it is used; programs include that.
#pragma once
#include <gtrain/actor_c.h>
#include <gtrain/status.h>
#include <gtrain/task.h>
#include <gtrain/value.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

// The types that an actor is made of.
template <typename... Arguments>
struct Ctor {};

// The methods that others may call.
template <auto... kMethods>
struct Methods {};

template <typename T>
class Ref;

namespace internal {

// ---- what a method is

// What gtrain::Reduces lists.
template <auto kMethod, typename Op>
struct TreeOf {
  bool operator==(const TreeOf&) const = default;
};
template <typename T>
inline constexpr bool kIsTree = false;
template <auto kMethod, typename Op>
inline constexpr bool kIsTree<TreeOf<kMethod, Op>> = true;

template <typename T>
struct ResultOf {
  using Type = T;
};
template <>
struct ResultOf<Status> {
  using Type = void;
};
template <typename T>
struct ResultOf<Result<T>> {
  using Type = T;
};
template <typename T>
struct ResultOf<Task<T>> {
  using Type = T;
};

template <typename Method>
struct MethodTraits {
  static_assert(kAlwaysFalse<Method>,
                "gtrain: gtrain::Methods<> takes pointers to member functions: &Class::Method");
};
template <typename Class, typename Returns, typename... Parameters, bool kNoexcept>
struct MethodTraits<Returns (Class::*)(Parameters...) noexcept(kNoexcept)> {
  using Owner = Class;
  using Raw = Returns;
  using Value = typename ResultOf<std::remove_cvref_t<Returns>>::Type;
  using Arguments = std::tuple<std::remove_cvref_t<Parameters>...>;
  static constexpr bool kConst = false;
};
template <typename Class, typename Returns, typename... Parameters, bool kNoexcept>
struct MethodTraits<Returns (Class::*)(Parameters...) const noexcept(kNoexcept)>
    : MethodTraits<Returns (Class::*)(Parameters...)> {
  static constexpr bool kConst = true;
};

template <auto kMethod>
using TraitsOf = MethodTraits<std::remove_cv_t<decltype(kMethod)>>;

// The actors below the one that is called come before the arguments of the method.
template <typename First, typename Rest>
struct Before;
template <typename First, typename... Rest>
struct Before<First, std::tuple<Rest...>> {
  using Type = std::tuple<First, Rest...>;
};
template <auto kMethod, typename Op>
struct MethodTraits<TreeOf<kMethod, Op>> {
  using Owner = typename TraitsOf<kMethod>::Owner;
  using Value = typename TraitsOf<kMethod>::Value;
  using Raw = Task<Value>;
  using Arguments = typename Before<std::vector<Ref<Owner>>, typename TraitsOf<kMethod>::Arguments>::Type;
  static constexpr bool kConst = TraitsOf<kMethod>::kConst;
  static_assert(!std::is_void_v<Value>,
                "gtrain: gtrain::Reduces<> combines values, and this method gives none");
};

// ---- names, from what compilers call the functions below

template <typename kSubject>
std::string_view PrettyType() {
  return __PRETTY_FUNCTION__;
}
template <auto kSubject>
std::string_view PrettyMethod() {
  return __PRETTY_FUNCTION__;
}
inline std::string Subject(std::string_view pretty) {
  const size_t at = pretty.find("kSubject = ") + 11;
  std::string name(pretty.substr(at, std::min(pretty.find(';', at), pretty.rfind(']')) - at));
  for (const std::string_view unnamed : {"{anonymous}::", "(anonymous namespace)::"}) {
    for (size_t found; (found = name.find(unnamed)) != std::string::npos;) name.erase(found, unnamed.size());
  }
  return name;
}
template <typename T>
std::string ActorName() {
  return Subject(PrettyType<T>());
}
template <auto kMethod>
std::string MethodName();
template <auto kMethod, typename Op>
std::string TreeName(TreeOf<kMethod, Op> /*tree*/) {
  return MethodName<kMethod>() + " by " + ActorName<Op>();
}
template <auto kMethod>
std::string MethodName() {
  if constexpr (kIsTree<std::remove_cv_t<decltype(kMethod)>>) return TreeName(kMethod);
  std::string name = Subject(PrettyMethod<kMethod>());
  const size_t colons = name.rfind("::");
  if (colons != std::string::npos) name.erase(0, colons + 2);
  while (!name.empty() && name.back() == ')') name.pop_back();
  return name;
}

// ---- packing

class Packed {
 public:
  Packed() : packer_(gtrain_packer_new()) {}
  template <typename... Values>
  Status Pack(const Values&... values) {
    if (packer_ == nullptr) return Status(StatusCode::kResourceExhausted, "there is no memory for a value");
    Packing packing(packer_.get());
    packing(values...);
    if (!packing.status().ok()) return packing.status();
    return internal::Call(gtrain_packer_data, packer_.get(), &data_, &size_);
  }
  const void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<gtrain_packer, Freer<gtrain_packer, gtrain_packer_free>> packer_;
  const void* data_ = nullptr;
  size_t size_ = 0;
};

template <typename Arguments>
Status UnpackAll(const void* data, size_t size, Arguments& arguments) {
  Unpacking unpacking(data, size);
  std::apply([&](auto&... each) { unpacking(each...); }, arguments);
  return unpacking.End();
}

// A number with a fraction for one without, which C++ converts in silence.
template <typename Given, typename Wanted>
inline constexpr bool kLosesFraction =
    std::is_floating_point_v<std::remove_cvref_t<Given>>&& std::is_integral_v<Wanted>;
template <typename Wanted, typename... Given>
constexpr bool LosesFraction() {
  if constexpr (std::tuple_size_v<Wanted> != sizeof...(Given)) {
    return false;
  } else {
    return []<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return (kLosesFraction<std::tuple_element_t<kIndex, std::tuple<Given...>>,
                             std::tuple_element_t<kIndex, Wanted>> ||
              ...);
    }
    (std::index_sequence_for<Given...>());
  }
}

// The arguments as the values that the method, or the constructor, takes.
template <typename Wanted, typename... Given>
constexpr bool Convertible() {
  if constexpr (std::tuple_size_v<Wanted> != sizeof...(Given)) {
    return false;
  } else {
    return []<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return (std::convertible_to<std::tuple_element_t<kIndex, std::tuple<Given...>>,
                                  std::tuple_element_t<kIndex, Wanted>> &&
              ...);
    }
    (std::index_sequence_for<Given...>());
  }
}

// ---- the functions of a class behind the C interface

inline void Answer(gtrain_call* call, const Status& status, bool crashed = false) {
  gtrain_call_reply(call, static_cast<gtrain_status>(status.code()), status.message().c_str(),
                    crashed ? 1 : 0, nullptr, 0);
}
template <typename T>
void AnswerValue(gtrain_call* call, const T& value) {
  Packed packed;
  const Status status = packed.Pack(value);
  if (!status.ok()) return Answer(call, status);
  gtrain_call_reply(call, GTRAIN_OK, "", 0, packed.data(), packed.size());
}

// The actor's own value, and those of two others, each with half of the ones below.
template <auto kMethod, typename Op, typename Class, typename... Arguments>
auto RunTree(TreeOf<kMethod, Op> tree, Class* self, std::vector<Ref<Class>> below, Arguments... arguments)
    -> Task<typename TraitsOf<kMethod>::Value> {
  using Value = typename TraitsOf<kMethod>::Value;
  using Raw = typename TraitsOf<kMethod>::Raw;
  std::vector<Future<Value>> others;
  const auto half = static_cast<std::ptrdiff_t>(below.size() + 1) / 2;
  for (auto from = below.begin(); from != below.end();) {
    const auto to = from == below.begin() ? below.begin() + half : below.end();
    const std::vector<Ref<Class>> rest(from + 1, to);
    others.push_back(from->template Call<TreeOf<kMethod, Op>{}>(rest, arguments...));
    from = to;
  }
  (void)tree;
  std::optional<Value> value;
  if constexpr (kIsOne<Raw, Task> || kIsOne<Raw, Result>) {
    value.emplace(co_await (self->*kMethod)(arguments...));
  } else {
    value.emplace((self->*kMethod)(arguments...));
  }
  for (Future<Value>& one : others) {
    Value other = co_await std::move(one);
    value.emplace(Op()(*std::move(value), std::move(other)));
  }
  co_return *std::move(value);
}

template <auto kMethod, typename Class, typename... Arguments>
decltype(auto) Invoke(Class* self, Arguments&&... arguments) {
  if constexpr (kIsTree<std::remove_cv_t<decltype(kMethod)>>) {
    return RunTree(kMethod, self, std::forward<Arguments>(arguments)...);
  } else {
    return (self->*kMethod)(std::forward<Arguments>(arguments)...);
  }
}

// A method that is a coroutine, until it has answered.
template <typename T, typename Arguments>
class RunningMethod final : public Waiter {
 public:
  template <auto kMethod, typename Class>
  static void Run(Class* self, std::unique_ptr<Arguments> arguments, gtrain_call* call) {
    auto made = std::unique_ptr<RunningMethod>(new RunningMethod(std::move(arguments), call));
    made->task_.emplace(
        std::apply([&](auto&... each) { return Invoke<kMethod>(self, each...); }, *made->arguments_));
    const auto handle = made->task_->handle();
    handle.promise().deadline = CallDeadline();
    handle.promise().waiter = made.release();  // it deletes itself when it has answered
    handle.resume();
  }
  std::coroutine_handle<> Done() override {
    auto result = task_->handle().promise().Take();
    gtrain_call* const call = call_;
    delete this;  // the actor may be gone as soon as it has answered, and its frame refers to it
    if (!result.ok()) {
      Answer(call, result.status());
    } else if constexpr (std::is_void_v<T>) {
      Answer(call, Status());
    } else {
      AnswerValue(call, *result);
    }
    return std::noop_coroutine();
  }

 private:
  RunningMethod(std::unique_ptr<Arguments> arguments, gtrain_call* call)
      : arguments_(std::move(arguments)), call_(call) {}
  std::unique_ptr<Arguments> arguments_;  // the coroutine may refer to them
  gtrain_call* call_;
  std::optional<Task<T>> task_;
};

template <auto kMethod, typename Class>
void CallMethod(Class* self, const void* data, size_t size, gtrain_call* call) {
  using Traits = TraitsOf<kMethod>;
  using Raw = typename Traits::Raw;
  auto arguments = std::make_unique<typename Traits::Arguments>();
  const Status taken = UnpackAll(data, size, *arguments);
  if (!taken.ok()) {
    return Answer(call, Status(StatusCode::kInvalidArgument,
                               "an argument of " + MethodName<kMethod>() + " is wrong: " + taken.message()));
  }
  const auto run = [&]() -> decltype(auto) {
    return std::apply([&](auto&... each) -> Raw { return Invoke<kMethod>(self, std::move(each)...); },
                      *arguments);
  };
  if constexpr (kIsOne<Raw, Task>) {
    RunningMethod<typename Traits::Value, typename Traits::Arguments>::template Run<kMethod>(
        self, std::move(arguments), call);
  } else if constexpr (std::is_void_v<Raw>) {
    run();
    Answer(call, Status());
  } else if constexpr (std::same_as<Raw, Status>) {
    Answer(call, run());
  } else if constexpr (kIsOne<Raw, Result>) {
    const Raw result = run();
    if (result.ok()) {
      AnswerValue(call, *result);
    } else {
      Answer(call, result.status());
    }
  } else {
    AnswerValue(call, run());
  }
}

template <typename T>
struct ActorTag {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wnon-template-friend"
#endif
  friend constexpr auto GtrainActorOf(ActorTag<T>);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
};

inline std::vector<void (*)(gtrain_actor_class*)>& Registered() {
  static std::vector<void (*)(gtrain_actor_class*)> all;
  return all;
}

template <typename Described>
struct Registrar {
  Registrar() { Registered().push_back(&Described::Fill); }
  static const Registrar kInstance;
};
template <typename Described>
const Registrar<Described> Registrar<Described>::kInstance;

template <typename T, typename Constructor, typename Listed>
struct Description;
template <typename T, typename... Parameters, auto... kMethods>
struct Description<T, Ctor<Parameters...>, Methods<kMethods...>> {
  static_assert(sizeof...(kMethods) > 0,
                "gtrain: an actor has one method at least: gtrain::Methods<&Class::Method>");
  static_assert((std::is_base_of_v<typename TraitsOf<kMethods>::Owner, T> && ...),
                "gtrain: gtrain::Methods<> lists a method of another class");
  static_assert(std::is_constructible_v<T, Parameters...>,
                "gtrain: no constructor of this class takes the types of gtrain::Ctor<>");
  friend constexpr auto GtrainActorOf(ActorTag<T> /*tag*/) { return Description(); }
  using Arguments = std::tuple<std::remove_cvref_t<Parameters>...>;

  const void* registrar = &Registrar<Description>::kInstance;

  // The number of a method; -1: it is none of these.
  template <auto kMethod>
  static constexpr int Index() {
    int index = -1, at = 0;
    ((index = Same<kMethod, kMethods>() ? at : index, ++at), ...);
    return index;
  }
  template <auto kOne, auto kOther>
  static constexpr bool Same() {
    if constexpr (std::same_as<decltype(kOne), decltype(kOther)>) {
      return kOne == kOther;
    } else {
      return false;
    }
  }

  static std::string Signature() {
    std::string text = "(" + TypeNames<std::remove_cvref_t<Parameters>...>() + ")";
    ((text += "; " + MethodText<kMethods>()), ...);
    return text;
  }
  template <auto kMethod>
  static std::string MethodText() {
    using Traits = TraitsOf<kMethod>;
    return MethodName<kMethod>() + "(" + NamesOf<typename Traits::Arguments>::Text() + ")" +
           (Traits::kConst ? " const" : "") + " -> " + TypeName<typename Traits::Value>();
  }

  static void Fill(gtrain_actor_class* out) {
    static const std::string name = ActorName<T>(), signature = Signature();
    *out = {sizeof(gtrain_actor_class),
            name.c_str(),
            signature.c_str(),
            static_cast<int32_t>(sizeof...(kMethods)),
            nullptr,
            &Create,
            &Destroy,
            &CallOne,
            nullptr,
            nullptr,
            kConstant.data()};
    if constexpr (HasPersist<T>) {
      out->save = &Save;
      out->load = &Load;
    }
  }
  static gtrain_status Create(void* /*user*/, const void* data, size_t size, void** self,
                              gtrain_error* error) {
    const NoWaiting no_waiting;
    Status status;
    try {
      Arguments arguments{};
      status = UnpackAll(data, size, arguments);
      if (status.ok()) {
        *self = std::apply([](auto&... each) { return new T(std::move(each)...); }, arguments);
        return GTRAIN_OK;
      }
    } catch (const std::exception& thrown) {
      status =
          Status(StatusCode::kUnknown, "the constructor of " + ActorName<T>() + " threw: " + thrown.what());
    } catch (...) {
      status = Status(StatusCode::kUnknown, "the constructor of " + ActorName<T>() + " threw");
    }
    std::snprintf(error->message, sizeof(error->message), "%s", status.message().c_str());
    return static_cast<gtrain_status>(status.code());
  }
  static void Destroy(void* /*user*/, void* self) {
    const NoWaiting no_waiting;
    delete static_cast<T*>(self);
  }
  static constexpr std::array<uint8_t, sizeof...(kMethods)> kConstant = {
      static_cast<uint8_t>(TraitsOf<kMethods>::kConst ? 1 : 0)...};
  static gtrain_status Fail(const Status& status, gtrain_error* error) {
    std::snprintf(error->message, sizeof(error->message), "%s", status.message().c_str());
    return static_cast<gtrain_status>(status.code());
  }
  static gtrain_status Save(void* /*user*/, void* self, gtrain_packer* packer, gtrain_error* error) {
    const NoWaiting no_waiting;
    Status packed;
    const Status thrown = Guarded([&] {
      Packing packing(packer);
      packing(*static_cast<const T*>(self));
      packed = packing.status();
    });
    if (!packed.ok()) return Fail(packed, error);
    return thrown.ok() ? GTRAIN_OK : Fail(thrown, error);
  }
  static gtrain_status Load(void* /*user*/, void* self, const void* data, size_t size, gtrain_error* error) {
    const NoWaiting no_waiting;
    Status status;
    const Status thrown = Guarded([&] {
      Unpacking unpacking(data, size);
      unpacking(*static_cast<T*>(self));
      status = unpacking.End();
    });
    if (!thrown.ok()) return Fail(thrown, error);
    if (!status.ok())
      return Fail(
          Status(status.code(), "the state of a " + ActorName<T>() + " is wrong: " + status.message()),
          error);
    return GTRAIN_OK;
  }
  static void CallOne(void* /*user*/, void* self, int32_t method, const void* data, size_t size,
                      gtrain_call* call) {
    static constexpr std::array<void (*)(T*, const void*, size_t, gtrain_call*), sizeof...(kMethods)> kAll = {
        &CallMethod<kMethods, T>...};
    const NoWaiting no_waiting;
    CallDeadline() = std::chrono::steady_clock::now() + std::chrono::milliseconds(gtrain_call_left_ms(call));
    const Status thrown =
        Guarded([&] { kAll[static_cast<size_t>(method)](static_cast<T*>(self), data, size, call); });
    if (!thrown.ok()) Answer(call, thrown, /*crashed=*/true);
  }
  template <typename Body>
  static Status Guarded(const Body& body) {
    try {
      body();
      return Status();
    } catch (const std::exception& error) {
      return Status(StatusCode::kUnknown, ActorName<T>() + " threw: " + error.what());
    } catch (...) {
      return Status(StatusCode::kUnknown, ActorName<T>() + " threw what is no std::exception");
    }
  }
};

template <typename T>
concept HasDescription = requires {
  GtrainActorOf(ActorTag<T>());
};

}  // namespace internal

// Stands among Methods<> beside a method that gives a value: GroupRef::Reduce combines what it gives of all
// actors of a group by `Op`, which is made anew each time and called with two values.
template <auto kMethod, typename Op>
inline constexpr internal::TreeOf<kMethod, Op> Reduces{};

// Ops of Reduces: of numbers, and of vectors and arrays of them, each element with its like.
template <typename Each>
struct Elementwise {
  template <typename T>
  T operator()(T value, const T& other) const {
    if constexpr (std::is_arithmetic_v<T>) {
      return Each()(value, other);
    } else {
      if (value.size() != other.size())
        throw Error(Status(StatusCode::kInvalidArgument, "values of two sizes cannot be combined"));
      for (size_t i = 0; i < value.size(); ++i) value[i] = Each()(value[i], other[i]);
      return value;
    }
  }
};
using Sum = Elementwise<std::plus<>>;
struct Larger {
  auto operator()(const auto& one, const auto& other) const { return std::max(one, other); }
};
struct Smaller {
  auto operator()(const auto& one, const auto& other) const { return std::min(one, other); }
};
using Max = Elementwise<Larger>;
using Min = Elementwise<Smaller>;

// Declares what a class is to others; one line, at namespace scope, wherever its actors are called or live.
template <typename T, typename Constructor, typename Listed>
inline constexpr internal::Description<T, Constructor, Listed> Actor{};

}  // namespace gtrain
