// The parameters of methods and constructors of actors: how they are given, packed, unpacked and passed.
#pragma once
#include <gtrain/actor_c.h>
#include <gtrain/status.h>
#include <gtrain/value.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace gtrain::internal {

// ---- what a parameter is

template <typename T>
struct UnpackedAs {
  using Type = T;
};
template <typename T>
struct UnpackedAs<std::span<const T>> {
  using Type = Viewed<T>;
};
template <>
struct UnpackedAs<std::string_view> {
  using Type = ViewedText;
};

template <typename T>
inline constexpr bool kMayBeViewed = std::same_as<T, std::string_view>;
template <typename T>
inline constexpr bool kMayBeViewed<std::span<const T>> = Number<T> || std::same_as<T, std::byte>;

template <typename Declared>
struct Parameter {
  using Type = std::remove_cvref_t<Declared>;
  static constexpr bool kView = kIsView<Type>;
  static_assert(
      !std::is_pointer_v<Type>,
      "gtrain: a parameter is a pointer (an array as a parameter is one, too), and what it points to "
      "is of its own process alone. Take a value, or std::span<const T> or std::string_view");
  static_assert(!std::is_array_v<Type>,
                "gtrain: a parameter is a C array. Take std::array, std::vector or std::span<const T>");
  static_assert(!std::is_lvalue_reference_v<Declared> || std::is_const_v<std::remove_reference_t<Declared>>,
                "gtrain: a parameter is a reference to what is not const, and arguments are copies: what the "
                "method writes there nobody sees. Take a value or a const reference, and return what is new");
  static_assert(!kView || kMayBeViewed<Type>,
                "gtrain: a parameter is a view that arguments cannot have: std::string_view and "
                "std::span<const T> of numbers or std::byte are those that they can");
  static constexpr bool kValid =
      !std::is_pointer_v<Type> && !std::is_array_v<Type> && (!kView || kMayBeViewed<Type>);
  static_assert(!kValid || std::is_default_constructible_v<Type>,
                "gtrain: a parameter has no default constructor, and every value has: it is made first, and "
                "then unpacked");
  // What a caller gives, and what it is unpacked into.
  using Given = std::conditional_t<kValid, Type, Status>;
  using Unpacked = typename UnpackedAs<Given>::Type;
};

// An argument, as the parameter takes it.
template <typename Declared, typename Unpacked>
decltype(auto) Pass(Unpacked& unpacked) {
  if constexpr (kIsOne<Unpacked, Viewed>) {
    return std::span(unpacked.span);
  } else if constexpr (std::same_as<Unpacked, ViewedText>) {
    return std::string_view(unpacked.text);
  } else {
    return static_cast<Declared&&>(unpacked);
  }
}
// `function` of all of them.
template <typename... Declared, typename Function>
decltype(auto) PassAll(const Function& function, std::tuple<typename Parameter<Declared>::Unpacked...>& all) {
  return std::apply([&](auto&... each) -> decltype(auto) { return function(Pass<Declared>(each)...); }, all);
}

template <typename Unpacked>
Status UnpackAll(const void* data, size_t size, Unpacked& arguments) {
  Unpacking unpacking(data, size);
  std::apply([&](auto&... each) { unpacking(each...); }, arguments);
  return unpacking.End();
}

// ---- what is given

template <typename T>
inline constexpr bool kIsTuple = kIsOne<T, std::pair> || kIsOne<T, std::tuple>;

// A number with a fraction for one without, which C++ converts in silence.
template <typename Wanted, typename Given>
constexpr bool LosesFraction() {
  if constexpr (kIsOne<Wanted, std::optional> && kIsOne<Given, std::optional>) {
    return LosesFraction<typename Wanted::value_type, typename Given::value_type>();
  } else if constexpr (kIsOne<Wanted, std::optional>) {
    return LosesFraction<typename Wanted::value_type, Given>();
  } else if constexpr (kIsTuple<Wanted> && kIsTuple<Given>) {
    if constexpr (std::tuple_size_v<Wanted> == std::tuple_size_v<Given>) {
      return []<size_t... kIndex>(std::index_sequence<kIndex...>) {
        return (LosesFraction<std::tuple_element_t<kIndex, Wanted>,
                              std::remove_cvref_t<std::tuple_element_t<kIndex, Given>>>() ||
                ...);
      }
      (std::make_index_sequence<std::tuple_size_v<Wanted>>());
    } else {
      return false;
    }
  } else {
    return std::is_floating_point_v<Given> && std::is_integral_v<Wanted>;
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

template <typename Wanted, typename... Given>
constexpr void CheckMethodArguments() {
  constexpr bool kAsMany = std::tuple_size_v<Wanted> == sizeof...(Given);
  static_assert(kAsMany,
                "gtrain: these are not the arguments of the method: it takes another number of them (default "
                "arguments are no part of the type of a method: give all)");
  static_assert(!kAsMany || Convertible<Wanted, Given...>(),
                "gtrain: these are not the arguments of the method");
  static_assert(!LosesFraction<Wanted, std::tuple<Given...>>(),
                "gtrain: the method takes a whole number, and a number with a fraction is given");
}
template <typename Wanted, typename... Given>
constexpr void CheckCtorArguments() {
  static_assert(Convertible<Wanted, Given...>(),
                "gtrain: these are not the arguments of gtrain::Ctor<> of this class");
  static_assert(!LosesFraction<Wanted, std::tuple<Given...>>(),
                "gtrain: gtrain::Ctor<> of this class takes a whole number, and a number with a fraction is "
                "given");
}

// What is wrong with integers that are given for smaller ones, which C++ converts in silence, too.
template <typename Wanted, typename Given>
void CheckFits(const Given& given, std::string& why) {
  if constexpr (std::same_as<Wanted, Given> || std::same_as<Wanted, bool> || std::same_as<Given, bool>) {
    return;
  } else if constexpr (std::is_enum_v<Given> && std::is_integral_v<Wanted>) {
    CheckFits<Wanted>(static_cast<std::underlying_type_t<Given>>(given), why);
  } else if constexpr (std::is_integral_v<Wanted> && std::is_integral_v<Given>) {
    if (!InRange<Wanted>(given))
      why = "the integer " + std::to_string(given) + " does not fit into " + NumberName<Wanted>();
  } else if constexpr (kIsOne<Wanted, std::optional> && kIsOne<Given, std::optional>) {
    if (given) CheckFits<typename Wanted::value_type>(*given, why);
  } else if constexpr (kIsOne<Wanted, std::optional>) {
    CheckFits<typename Wanted::value_type>(given, why);
  } else if constexpr (kIsTuple<Wanted> && kIsTuple<Given>) {
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      (CheckFits<std::tuple_element_t<kIndex, Wanted>>(std::get<kIndex>(given), why), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<Wanted>>());
  }
}

// What is given, where it is what is wanted already: nothing is copied before it is packed.
template <typename Wanted, typename Given>
decltype(auto) As(Given&& given) {
  if constexpr (std::same_as<std::remove_cvref_t<Given>, Wanted>) {
    return static_cast<const Wanted&>(given);
  } else {
    return static_cast<Wanted>(std::forward<Given>(given));
  }
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
  // kInvalidArgument: an integer does not fit; `whose` gives the name of the method.
  template <typename Wanted, typename... Given>
  Status PackAs(std::string (*whose)(), Given&&... given) {
    if constexpr (Convertible<Wanted, Given&&...>()) {
      std::string why;
      CheckFits<Wanted>(std::tie(given...), why);
      if (!why.empty())
        return Status(StatusCode::kInvalidArgument, "an argument of " + whose() + " is wrong: " + why);
      return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        return Pack(As<std::tuple_element_t<kIndex, Wanted>>(std::forward<Given>(given))...);
      }
      (std::index_sequence_for<Given...>());
    } else {
      return Status();  // who calls it has said so
    }
  }
  const void* data() const { return data_; }
  size_t size() const { return size_; }
  gtrain_packer* packer() const { return packer_.get(); }

 private:
  std::unique_ptr<gtrain_packer, Freer<gtrain_packer, gtrain_packer_free>> packer_;
  const void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace gtrain::internal
