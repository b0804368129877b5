// Which types are values, what those of a program are made of, and what they are called.
#pragma once
#include <gtrain/status.h>
#include <gtrain/types.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

namespace gtrain::internal {

template <typename T>
inline constexpr bool kAlwaysFalse = false;

template <typename T, template <typename...> class Template>
inline constexpr bool kIsOne = false;
template <template <typename...> class Template, typename... Arguments>
inline constexpr bool kIsOne<Template<Arguments...>, Template> = true;

template <typename T>
inline constexpr bool kIsArray = false;
template <typename T, size_t kSize>
inline constexpr bool kIsArray<std::array<T, kSize>> = true;

template <typename T>
inline constexpr bool kIsSpan = false;
template <typename T, size_t kSize>
inline constexpr bool kIsSpan<std::span<T, kSize>> = true;
// What others own. It is packed, and only a parameter of a method can be unpacked as one.
template <typename T>
inline constexpr bool kIsView = kIsSpan<T> || std::is_same_v<T, std::string_view>;

template <typename T>
concept Number = std::is_arithmetic_v<T> && !std::same_as<T, bool> && sizeof(T) <= 8;

template <Number T>
constexpr DType NumberType() {
  if constexpr (std::floating_point<T>) {
    return sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
  } else if constexpr (std::is_signed_v<T>) {
    constexpr std::array kTypes = {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64};
    return kTypes[sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
  } else {
    constexpr std::array kTypes = {DType::kUint8, DType::kUint16, DType::kUint32, DType::kUint64};
    return kTypes[sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
  }
}

template <Number T>
std::string NumberName() {
  const char* kind = std::floating_point<T> ? "f" : std::is_signed_v<T> ? "i" : "u";
  return kind + std::to_string(sizeof(T) * 8);
}

// `std::in_range` takes no character types.
template <std::integral T>
using Standard =
    typename std::conditional_t<std::is_signed_v<T>, std::make_signed<T>, std::make_unsigned<T>>::type;
template <std::integral T, std::integral Given>
constexpr bool InRange(Given value) {
  return std::in_range<Standard<T>>(static_cast<Standard<Given>>(value));
}

struct AnyArchive {
  template <typename... Members>
  void operator()(Members&...) {}
};
template <typename T>
concept HasPersist = requires(T& value, AnyArchive& archive) {
  value.Persist(archive);
};

template <typename T>
concept MapLike = kIsOne<T, std::map> || kIsOne<T, std::unordered_map>;
template <typename T>
concept SetLike = kIsOne<T, std::set> || kIsOne<T, std::unordered_set>;

// ---- members of aggregates

struct Anything {
  template <typename T>
  operator T() const;  // NOLINT(google-explicit-constructor): never defined, it is what an initialiser takes
};
template <typename T, size_t... kIndex>
constexpr bool Takes(std::index_sequence<kIndex...> /*members*/) {
  return requires { T{((void)kIndex, Anything{})...}; };
}
inline constexpr size_t kMembersMax = 12;
template <typename T, size_t kCount = kMembersMax + 1>
constexpr size_t MemberCount() {
  if constexpr (kCount == 0 || Takes<T>(std::make_index_sequence<kCount>())) {
    return kCount;
  } else {
    return MemberCount<T, kCount - 1>();
  }
}

// The elements of a C array are initialised as if they were members, unless there are braces around them.
template <typename T, size_t... kBefore, size_t... kBehind>
constexpr bool TakesBraced(std::index_sequence<kBefore...> /*before*/,
                           std::index_sequence<kBehind...> /*behind*/) {
  return requires { T{((void)kBefore, Anything{})..., {Anything{}}, ((void)kBehind, Anything{})...}; };
}
template <typename T, size_t kCount, size_t kAt = 0>
constexpr bool HasArray() {
  if constexpr (kAt + 1 >= kCount) {
    return false;
  } else if constexpr (!TakesBraced<T>(std::make_index_sequence<kAt>(),
                                       std::make_index_sequence<kCount - kAt - 1>()) &&
                       TakesBraced<T>(std::make_index_sequence<kAt>(), std::make_index_sequence<0>())) {
    return true;
  } else {
    return HasArray<T, kCount, kAt + 1>();
  }
}
template <typename T>
struct AnyBase {
  template <typename Base>
  requires(std::is_base_of_v<Base, T> && !std::same_as<Base, T>) operator Base()
      const;  // NOLINT(google-explicit-constructor): as that of Anything
};
template <typename T>
constexpr bool HasBase() {
  return requires { T{AnyBase<T>{}}; };
}

// Whether its members can be told apart.
template <typename T>
constexpr bool CheckMembers() {
  constexpr size_t kCount = MemberCount<T>();
  static_assert(kCount <= kMembersMax,
                "gtrain: a value may be an aggregate of up to 12 members (of a C array all elements count). "
                "Give this one `void Persist(auto& archive) { archive(a, b, ...); }`");
  constexpr bool kArray = kCount <= kMembersMax && HasArray<T, kCount>();
  static_assert(!kArray, "gtrain: a C array is no value, also as a member: std::array and std::vector are");
  static_assert(!HasBase<T>(),
                "gtrain: an aggregate that has a base class is no value by itself. Give it `void "
                "Persist(auto& archive) { archive(a, b, ...); }` with all members");
  return kCount <= kMembersMax && !kArray && !HasBase<T>();
}

template <typename T, typename Function>
void WithMembers(T& value, Function&& function) {
  constexpr size_t kCount = MemberCount<std::remove_const_t<T>>();
  if constexpr (!CheckMembers<std::remove_const_t<T>>()) {
    return;
  } else if constexpr (kCount == 0) {
    function();
  } else if constexpr (kCount == 1) {
    auto& [a] = value;
    function(a);
  } else if constexpr (kCount == 2) {
    auto& [a, b] = value;
    function(a, b);
  } else if constexpr (kCount == 3) {
    auto& [a, b, c] = value;
    function(a, b, c);
  } else if constexpr (kCount == 4) {
    auto& [a, b, c, d] = value;
    function(a, b, c, d);
  } else if constexpr (kCount == 5) {
    auto& [a, b, c, d, e] = value;
    function(a, b, c, d, e);
  } else if constexpr (kCount == 6) {
    auto& [a, b, c, d, e, f] = value;
    function(a, b, c, d, e, f);
  } else if constexpr (kCount == 7) {
    auto& [a, b, c, d, e, f, g] = value;
    function(a, b, c, d, e, f, g);
  } else if constexpr (kCount == 8) {
    auto& [a, b, c, d, e, f, g, h] = value;
    function(a, b, c, d, e, f, g, h);
  } else if constexpr (kCount == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = value;
    function(a, b, c, d, e, f, g, h, i);
  } else if constexpr (kCount == 10) {
    auto& [a, b, c, d, e, f, g, h, i, j] = value;
    function(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (kCount == 11) {
    auto& [a, b, c, d, e, f, g, h, i, j, k] = value;
    function(a, b, c, d, e, f, g, h, i, j, k);
  } else {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l] = value;
    function(a, b, c, d, e, f, g, h, i, j, k, l);
  }
}

template <typename T>
concept PlainAggregate = std::is_aggregate_v<T> && std::is_class_v<T> && !kIsArray<T> && !HasPersist<T>;

// Says why this type is no value.
template <typename T>
constexpr void RefuseValue() {
  constexpr bool kArray = std::is_array_v<T>, kPointer = std::is_pointer_v<T> || std::is_member_pointer_v<T>;
  static_assert(!kArray, "gtrain: a C array is no value: std::array and std::vector are");
  static_assert(!kPointer,
                "gtrain: a pointer is no value: what it points to is of this process alone. Take "
                "what it points to, std::optional, std::unique_ptr or a gtrain::Ref");
  static_assert(!kIsView<T>,
                "gtrain: a std::span or a std::string_view owns nothing, so it is no value but as "
                "a parameter of a method: std::vector and std::string are values");
  static_assert(!std::is_arithmetic_v<T>, "gtrain: a number of more than 8 bytes is no value");
  static_assert(kArray || kPointer || kIsView<T> || std::is_arithmetic_v<T>,
                "gtrain: this type is no value (gtrain/value.h lists them). A class of your own becomes "
                "one with `void Persist(auto& archive) { archive(a, b, ...); }`");
}

// One to be unpacked into.
template <typename T>
T Fresh() {
  static_assert(std::is_default_constructible_v<T>,
                "gtrain: a value has a default constructor: it is made first, and then unpacked");
  return T{};
}

// ---- names of types, the same whichever compiler made the program

template <typename T>
std::string TypeName();

struct NamingArchive {
  template <typename... Members>
  void operator()(Members&... /*members*/) {
    ((text += (text.empty() ? "" : ", ") + TypeName<std::remove_const_t<Members>>()), ...);
  }
  std::string text;
};

template <typename... Types>
std::string TypeNames() {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + TypeName<Types>()), ...);
  return text;
}

template <typename T>
struct NamesOf;
template <template <typename...> class Template, typename... Types>
struct NamesOf<Template<Types...>> {
  static std::string Text() { return TypeNames<Types...>(); }
};

// A type that has itself in it would have no end.
inline int& NamingDepth() {
  static thread_local int depth = 0;
  return depth;
}

template <typename T>
std::string ClassName() {
  if (NamingDepth() > 8) return "...";
  ++NamingDepth();
  T value = Fresh<T>();
  NamingArchive archive;
  if constexpr (HasPersist<T>) {
    value.Persist(archive);
  } else {
    WithMembers(value, archive);
  }
  --NamingDepth();
  return "{" + archive.text + "}";
}

// Of a type that is made of others.
template <typename T>
std::string CompoundName() {
  if constexpr (kIsOne<T, std::optional>) {
    return TypeName<typename T::value_type>() + "?";
  } else if constexpr (kIsOne<T, std::unique_ptr> || kIsOne<T, std::shared_ptr>) {
    return TypeName<typename T::element_type>() + "?";
  } else if constexpr (MapLike<T>) {
    return "{" + TypeName<typename T::key_type>() + ": " + TypeName<typename T::mapped_type>() + "}";
  } else if constexpr (kIsArray<T>) {
    return "[" + TypeName<typename T::value_type>() + "; " + std::to_string(std::tuple_size_v<T>) + "]";
  } else if constexpr (SetLike<T> || kIsOne<T, std::vector> || kIsSpan<T>) {
    return "[" + TypeName<typename T::value_type>() + "]";
  } else if constexpr (kIsOne<T, std::pair> || kIsOne<T, std::tuple>) {
    return "(" + NamesOf<T>::Text() + ")";
  } else if constexpr (kIsOne<T, std::variant>) {
    return "<" + NamesOf<T>::Text() + ">";
  } else if constexpr (PlainAggregate<T>) {
    return ClassName<T>();
  } else {
    RefuseValue<T>();
    return "";
  }
}

template <typename T>
std::string TypeName() {
  if constexpr (std::is_void_v<T> || std::same_as<T, std::monostate>) {
    return "nothing";
  } else if constexpr (std::same_as<T, bool>) {
    return "bool";
  } else if constexpr (std::same_as<T, std::byte>) {
    return "byte";
  } else if constexpr (std::is_enum_v<T>) {
    return NumberName<std::underlying_type_t<T>>();
  } else if constexpr (Number<T>) {
    return NumberName<T>();
  } else if constexpr (std::same_as<T, std::string> || std::same_as<T, std::string_view>) {
    return "string";
  } else if constexpr (std::same_as<T, Status>) {
    return "status";
  } else if constexpr (HasPersist<T>) {
    return ClassName<T>();
  } else {
    return CompoundName<T>();
  }
}

}  // namespace gtrain::internal
