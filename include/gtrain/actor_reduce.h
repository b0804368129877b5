// Values of all actors of a group, combined in a tree of them (GroupRef::Reduce). gtrain/actor.h says how
// actors are used; programs include that.
#pragma once
#include <gtrain/actor_methods.h>
#include <gtrain/status.h>
#include <gtrain/task.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

namespace internal {

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
typename TraitsOf<kMethod>::Raw Invoke(Class* self, Arguments&&... arguments) {
  if constexpr (kIsTree<std::remove_cv_t<decltype(kMethod)>>) {
    return RunTree(kMethod, self, std::forward<Arguments>(arguments)...);
  } else {
    return (self->*kMethod)(std::forward<Arguments>(arguments)...);
  }
}

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
// A NaN on either side is the result, wherever it stands in the tree.
struct Larger {
  template <typename T>
  T operator()(const T& one, const T& other) const {
    if constexpr (std::is_floating_point_v<T>) return one > other || std::isnan(one) ? one : other;
    return std::max(one, other);
  }
};
struct Smaller {
  template <typename T>
  T operator()(const T& one, const T& other) const {
    if constexpr (std::is_floating_point_v<T>) return one < other || std::isnan(one) ? one : other;
    return std::min(one, other);
  }
};
using Max = Elementwise<Larger>;
using Min = Elementwise<Smaller>;

}  // namespace gtrain
