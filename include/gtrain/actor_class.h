// What a class of actors is to others: its name, what it is made of, its methods and their types.
// gtrain/actor.h says how it is used; programs include that.
#pragma once
#include <gtrain/actor_arguments.h>
#include <gtrain/actor_c.h>
#include <gtrain/actor_methods.h>
#include <gtrain/actor_reduce.h>
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

namespace internal {

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

// A method that is a coroutine, until it has answered.
template <typename Traits>
class RunningMethod final : public Waiter {
 public:
  using Arguments = typename Traits::Unpacked;
  template <typename Body>
  static void Run(const Body& body, std::unique_ptr<Arguments> arguments, gtrain_call* call) {
    auto made = std::unique_ptr<RunningMethod>(new RunningMethod(std::move(arguments), call));
    made->task_.emplace(Traits::Pass(body, *made->arguments_));
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
    } else if constexpr (std::is_void_v<typename Traits::Value>) {
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
  std::optional<typename Traits::Raw> task_;
};

template <auto kMethod, typename Class>
void CallMethod(Class* self, const void* data, size_t size, gtrain_call* call) {
  using Traits = TraitsOf<kMethod>;
  using Raw = typename Traits::Raw;
  auto arguments = std::make_unique<typename Traits::Unpacked>();
  const Status taken = UnpackAll(data, size, *arguments);
  if (!taken.ok()) {
    return Answer(call, Status(StatusCode::kInvalidArgument,
                               "an argument of " + MethodName<kMethod>() + " is wrong: " + taken.message()));
  }
  const auto body = [self](auto&&... each) -> Raw {
    return Invoke<kMethod>(self, std::forward<decltype(each)>(each)...);
  };
  const auto run = [&]() -> Raw { return Traits::Pass(body, *arguments); };
  if constexpr (kIsOne<Raw, Task>) {
    RunningMethod<Traits>::Run(body, std::move(arguments), call);
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
  static_assert((std::is_convertible_v<T*, typename TraitsOf<kMethods>::Owner*> && ...),
                "gtrain: gtrain::Methods<> lists a method of a base class that is private, or there twice");
  static_assert(!std::is_abstract_v<T>,
                "gtrain: an abstract class has no actors: declare those derived of it");
  static_assert(std::is_abstract_v<T> || std::is_constructible_v<T, Parameters...>,
                "gtrain: no constructor of this class takes the types of gtrain::Ctor<>");
  friend constexpr auto GtrainActorOf(ActorTag<T> /*tag*/) { return Description(); }
  using Arguments = std::tuple<typename Parameter<Parameters>::Given...>;

  const void* registrar = &Registrar<Description>::kInstance;

  // The number of a method; -1: it is none of these.
  template <auto kMethod>
  static constexpr int Index() {
    int index = -1, at = 0;
    ((index = Same<kMethod, kMethods>() ? at : index, ++at), ...);
    return index;
  }
  // Types are compared, since g++ with -fsanitize=undefined takes no comparison of pointers for a constant.
  template <auto kOne, auto kOther>
  static constexpr bool Same() {
    return std::same_as<Methods<kOne>, Methods<kOther>>;
  }

  static std::string Signature() {
    std::string text = "(" + NamesOf<Arguments>::Text() + ")";
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
      std::tuple<typename Parameter<Parameters>::Unpacked...> arguments{};
      status = UnpackAll(data, size, arguments);
      if (status.ok()) {
        const auto make = [](auto&&... each) { return new T(std::forward<decltype(each)>(each)...); };
        *self = PassAll<Parameters...>(make, arguments);
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

// Declares what a class is to others; one line, at namespace scope, wherever its actors are called or live.
template <typename T, typename Constructor, typename Listed>
inline constexpr internal::Description<T, Constructor, Listed> Actor{};

}  // namespace gtrain
