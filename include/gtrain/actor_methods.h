// What a method of an actor is: its parameters, its result and its name. gtrain/actor.h says how actors are
// used; programs include that.
#pragma once
#include <gtrain/actor_arguments.h>
#include <gtrain/status.h>
#include <gtrain/task.h>
#include <gtrain/value.h>

#include <algorithm>
#include <concepts>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

namespace gtrain {

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

template <typename Class, typename Returns, bool kIsConst, typename... Parameters>
struct Method {
  using Owner = Class;
  using Raw = Returns;
  using Value = typename ResultOf<std::remove_cvref_t<Returns>>::Type;
  using Arguments = std::tuple<typename Parameter<Parameters>::Given...>;
  using Unpacked = std::tuple<typename Parameter<Parameters>::Unpacked...>;
  static constexpr bool kConst = kIsConst;
  static_assert(!kIsView<Value>,
                "gtrain: a method gives a view, and what it looks at stays in its process. Let it give the "
                "std::vector or std::string itself, or a const reference to that");
  static_assert(
      !kIsOne<Raw, Task> || !(Parameter<Parameters>::kView || ...),
      "gtrain: a method that is a gtrain::Task takes a view, and what that looks at lives until the "
      "function first returns, which is where the coroutine first waits. Take a std::vector or a "
      "std::string");
  template <typename Function>
  static decltype(auto) Pass(const Function& function, Unpacked& arguments) {
    return PassAll<Parameters...>(function, arguments);
  }
};

template <typename Pointer>
struct MethodTraits : Method<void, void, false> {
  static_assert(kAlwaysFalse<Pointer>,
                "gtrain: gtrain::Methods<> takes pointers to member functions, &Class::Method, that are not "
                "static, have no && behind their parameters and no `...` among them");
};
// Which object it may be called for is a part of its type.
#define GTRAIN_METHOD(qualifiers, is_const)                                             \
  template <typename Class, typename Returns, typename... Parameters, bool kNoexcept>   \
  struct MethodTraits<Returns (Class::*)(Parameters...) qualifiers noexcept(kNoexcept)> \
      : Method<Class, Returns, is_const, Parameters...> {};
GTRAIN_METHOD(, false)
GTRAIN_METHOD(&, false)
GTRAIN_METHOD(volatile, false)
GTRAIN_METHOD(volatile&, false)
GTRAIN_METHOD(const, true)
GTRAIN_METHOD(const&, true)
GTRAIN_METHOD(const volatile, true)
GTRAIN_METHOD(const volatile&, true)
#undef GTRAIN_METHOD

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
  using Unpacked = Arguments;
  static constexpr bool kConst = TraitsOf<kMethod>::kConst;
  static_assert(!std::is_void_v<Value>,
                "gtrain: gtrain::Reduces<> combines values, and this method gives none");
  static_assert(
      std::same_as<typename TraitsOf<kMethod>::Arguments, typename TraitsOf<kMethod>::Unpacked>,
      "gtrain: gtrain::Reduces<> of a method that takes a view: each actor sends its arguments on, so let "
      "it take a std::vector or a std::string");
  template <typename Function>
  static Raw Pass(const Function& function, Unpacked& arguments) {  // clang 14 loses what auto would be
    return std::apply([&](auto&... each) -> Raw { return function(each...); }, arguments);
  }
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

}  // namespace internal
}  // namespace gtrain
