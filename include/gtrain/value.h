// Values of calls: what actors take and give, and what they keep.
//
// A value is arithmetic, a string, a vector, array, map, set, optional, pair, tuple, variant or smart-pointed
// value of values, a Status, or one of the program's own types: an aggregate of up to twelve members, or a
// class with
//
//   void Persist(auto& archive) { archive(name_, weights_); }
//
// which packs and unpacks alike. Vectors, arrays and spans of numbers are one copy.
#pragma once
#include <gtrain/actor_c.h>
#include <gtrain/status.h>
#include <gtrain/value_types.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace gtrain {
namespace internal {

// What a parameter that is a view looks at: the bytes of the call, or a copy where those are not aligned.
template <typename T>
struct Viewed {
  std::span<const T> span;
  std::vector<T> copy;
};
struct ViewedText {
  std::string_view text;
};

inline constexpr int kDepthMax = 64;
inline Status TooDeep() {
  return Status(StatusCode::kInvalidArgument,
                "values are nested more than 64 deep; a class and a vector of it are two of these levels");
}

}  // namespace internal

// ---- packing

// Packs values one after the other; the functions of the C interface below it say what they become.
class Packing {
 public:
  explicit Packing(gtrain_packer* packer) : packer_(packer) {}
  // Not OK: a value is nested too deep.
  const Status& status() const { return status_; }

  template <typename... Values>
  void operator()(const Values&... values) {
    (Pack(values), ...);
  }

 private:
  template <typename T>
  void Pack(const T& value) {
    if constexpr (std::same_as<T, bool>) {
      gtrain_pack_bool(packer_, value ? 1 : 0);
    } else if constexpr (std::is_arithmetic_v<T> && !internal::Number<T>) {
      internal::RefuseValue<T>();
    } else if constexpr (std::floating_point<T>) {
      gtrain_pack_float(packer_, value);
    } else if constexpr (std::is_enum_v<T>) {
      Pack(static_cast<std::underlying_type_t<T>>(value));
    } else if constexpr (std::unsigned_integral<T>) {
      gtrain_pack_uint(packer_, value);
    } else if constexpr (std::signed_integral<T>) {
      gtrain_pack_int(packer_, value);
    } else if constexpr (std::same_as<T, std::string> || std::same_as<T, std::string_view>) {
      gtrain_pack_string(packer_, value.data(), value.size());
    } else if constexpr (std::same_as<T, std::monostate> || std::same_as<T, std::nullopt_t>) {
      gtrain_pack_nil(packer_);
    } else if constexpr (std::same_as<T, Status>) {
      gtrain_pack_array(packer_, 2);
      (*this)(static_cast<int>(value.code()), value.message());
    } else {
      if (++depth_ > internal::kDepthMax) {  // nobody could unpack it
        if (status_.ok()) status_ = internal::TooDeep();
        gtrain_pack_nil(packer_);
      } else if constexpr (internal::HasPersist<T>) {
        const_cast<T&>(value).Persist(*this);  // NOLINT(cppcoreguidelines-pro-type-const-cast): it only reads
      } else {
        PackMany(value);
      }
      --depth_;
    }
  }
  template <typename T>
  void PackMany(const T& value) {
    using internal::kIsOne;
    if constexpr (kIsOne<T, std::optional> || kIsOne<T, std::unique_ptr> || kIsOne<T, std::shared_ptr>) {
      gtrain_pack_bool(packer_, value ? 1 : 0);
      if (value) Pack(*value);
    } else if constexpr (kIsOne<T, std::variant>) {
      Pack(static_cast<uint64_t>(value.index()));
      std::visit([this](const auto& one) { this->Pack(one); }, value);
    } else if constexpr (kIsOne<T, std::pair> || kIsOne<T, std::tuple>) {
      std::apply([this](const auto&... members) { (this->Pack(members), ...); }, value);
    } else if constexpr (internal::MapLike<T>) {
      gtrain_pack_map(packer_, value.size());
      for (const auto& [key, mapped] : value) (*this)(key, mapped);
    } else if constexpr (internal::SetLike<T>) {
      gtrain_pack_array(packer_, value.size());
      for (const auto& one : value) Pack(one);
    } else if constexpr (kIsOne<T, std::vector> || internal::kIsArray<T> || internal::kIsSpan<T>) {
      PackAll<typename T::value_type>(value);
    } else if constexpr (internal::PlainAggregate<T>) {
      internal::WithMembers(value, [this](const auto&... members) { (this->Pack(members), ...); });
    } else {
      internal::RefuseValue<T>();
    }
  }
  template <typename T, typename Values>
  void PackAll(const Values& values) {
    if constexpr (internal::Number<T>) {
      gtrain_pack_numbers(packer_, static_cast<gtrain_dtype>(internal::NumberType<T>()), values.data(),
                          values.size());
    } else if constexpr (std::same_as<T, std::byte>) {
      gtrain_pack_bytes(packer_, values.data(), values.size());
    } else {
      gtrain_pack_array(packer_, values.size());
      for (const T& one : values) Pack(one);  // a vector of bool, too
    }
  }

  gtrain_packer* packer_;
  Status status_;
  int depth_ = 0;
};

// ---- unpacking

// Takes values in the order in which they were packed. After the first that is another than asked for all
// are left as they were, and status() says what was found.
class Unpacking {
 public:
  Unpacking(const void* data, size_t size) : unpacker_{sizeof(gtrain_unpacker), data, size} {}

  template <typename... Values>
  void operator()(Values&... values) {
    (Take(values), ...);
  }
  const Status& status() const { return status_; }
  // kInvalidArgument: something is left.
  Status End() const {
    if (!status_.ok() || unpacker_.left == 0) return status_;
    return Status(StatusCode::kInvalidArgument,
                  std::to_string(unpacker_.left) + " bytes are left behind the last value");
  }

 private:
  template <typename T>
  void Take(T& value) {
    if (!status_.ok()) return;
    if constexpr (std::same_as<T, bool>) {
      if (Next(GTRAIN_VALUE_BOOL, "a bool")) value = next_.integer != 0;
    } else if constexpr (std::is_arithmetic_v<T> && !internal::Number<T>) {
      internal::RefuseValue<T>();
    } else if constexpr (std::floating_point<T>) {
      TakeFloat(value);
    } else if constexpr (std::is_enum_v<T>) {
      std::underlying_type_t<T> number{};
      Take(number);
      if (status_.ok()) value = static_cast<T>(number);
    } else if constexpr (std::integral<T>) {
      TakeInteger(value);
    } else if constexpr (std::same_as<T, std::string>) {
      if (Next(GTRAIN_VALUE_STRING, "a string"))
        value.assign(static_cast<const char*>(next_.data), next_.count);
    } else if constexpr (std::same_as<T, std::monostate>) {
      Next(GTRAIN_VALUE_NIL, "nothing");
    } else if constexpr (std::same_as<T, Status>) {
      TakeStatus(value);
    } else if constexpr (std::same_as<T, internal::ViewedText>) {
      if (Next(GTRAIN_VALUE_STRING, "a string"))
        value.text = {static_cast<const char*>(next_.data), next_.count};
    } else if constexpr (internal::kIsOne<T, internal::Viewed>) {
      TakeView(value);
    } else {
      if (++depth_ > internal::kDepthMax) {
        if (status_.ok()) status_ = internal::TooDeep();
      } else {
        TakeMany(value);
      }
      --depth_;
    }
  }

  template <typename T>
  void TakeMany(T& value) {
    using internal::kIsOne;
    if constexpr (internal::HasPersist<T>) {
      value.Persist(*this);
    } else if constexpr (kIsOne<T, std::optional>) {
      TakePresent<typename T::value_type>([&](auto one) { value.emplace(std::move(one)); },
                                          [&] { value.reset(); });
    } else if constexpr (kIsOne<T, std::unique_ptr>) {
      using Element = typename T::element_type;
      TakePresent<Element>([&](auto one) { value = std::make_unique<Element>(std::move(one)); },
                           [&] { value.reset(); });
    } else if constexpr (kIsOne<T, std::shared_ptr>) {
      using Element = typename T::element_type;
      TakePresent<Element>([&](auto one) { value = std::make_shared<Element>(std::move(one)); },
                           [&] { value.reset(); });
    } else if constexpr (kIsOne<T, std::variant>) {
      TakeVariant(value);
    } else if constexpr (kIsOne<T, std::pair> || kIsOne<T, std::tuple>) {
      std::apply([this](auto&... members) { (this->Take(members), ...); }, value);
    } else if constexpr (internal::MapLike<T>) {
      TakeMap(value);
    } else if constexpr (internal::SetLike<T>) {
      TakeSet(value);
    } else if constexpr (kIsOne<T, std::vector> || internal::kIsArray<T>) {
      TakeAll<typename T::value_type>(value);
    } else if constexpr (internal::PlainAggregate<T>) {
      internal::WithMembers(value, [this](auto&... members) { (this->Take(members), ...); });
    } else {
      internal::RefuseValue<T>();
    }
  }

  void Fail(std::string why) {
    if (status_.ok()) status_ = Status(StatusCode::kInvalidArgument, std::move(why));
  }
  bool Next() {
    next_.size = sizeof(next_);
    const Status taken = internal::Call(gtrain_unpack, &unpacker_, &next_);
    if (!taken.ok()) Fail(taken.message());
    return taken.ok();
  }
  bool Next(int kind, const char* wanted) {
    if (!Next()) return false;
    if (next_.kind == kind) return true;
    Mismatch(wanted);
    return false;
  }
  void Mismatch(const std::string& wanted) {
    static constexpr std::array kKinds = {"nothing",  "a bool",   "an integer", "an integer",
                                          "a number", "a string", "bytes",      "an array of numbers",
                                          "an array", "a map"};
    Fail("it is " + std::string(kKinds[static_cast<size_t>(next_.kind)]) + ", and should be " + wanted);
  }

  template <typename T>
  void TakeFloat(T& value) {
    if (!Next()) return;
    if (next_.kind == GTRAIN_VALUE_FLOAT) {
      value = static_cast<T>(next_.number);
    } else if (next_.kind == GTRAIN_VALUE_INT) {
      value = static_cast<T>(next_.integer);
    } else if (next_.kind == GTRAIN_VALUE_UINT) {
      value = static_cast<T>(next_.unsigned_integer);
    } else {
      Mismatch("a number");
    }
  }
  template <typename T>
  void TakeInteger(T& value) {
    if (!Next()) return;
    const bool below = next_.kind == GTRAIN_VALUE_INT;
    if (!below && next_.kind != GTRAIN_VALUE_UINT) return Mismatch("an integer");
    const bool fits =
        below ? internal::InRange<T>(next_.integer) : internal::InRange<T>(next_.unsigned_integer);
    if (!fits) {
      return Fail("the integer " +
                  (below ? std::to_string(next_.integer) : std::to_string(next_.unsigned_integer)) +
                  " does not fit into " + internal::NumberName<T>());
    }
    value = below ? static_cast<T>(next_.integer) : static_cast<T>(next_.unsigned_integer);
  }
  void TakeStatus(Status& value) {
    if (!Next(GTRAIN_VALUE_ARRAY, "a status")) return;
    int code = 0;
    std::string message;
    (*this)(code, message);
    if (status_.ok()) value = Status(static_cast<StatusCode>(code), std::move(message));
  }
  template <typename Element, typename Set, typename Reset>
  void TakePresent(const Set& set, const Reset& reset) {
    bool there = false;
    Take(there);
    if (!status_.ok()) return;
    if (!there) return reset();
    auto one = internal::Fresh<Element>();
    Take(one);
    if (status_.ok()) set(std::move(one));
  }
  template <typename... Choices>
  void TakeVariant(std::variant<Choices...>& value) {
    uint64_t index = 0;
    Take(index);
    if (!status_.ok()) return;
    if (index >= sizeof...(Choices)) return Fail("a variant has no choice " + std::to_string(index));
    uint64_t number = 0;
    ((number++ == index ? TakeChoice<Choices>(value) : void()), ...);
  }
  template <typename Choice, typename Variant>
  void TakeChoice(Variant& value) {
    auto one = internal::Fresh<Choice>();
    Take(one);
    if (status_.ok()) value = std::move(one);
  }
  template <typename T>
  void TakeMap(T& value) {
    if (!Next(GTRAIN_VALUE_MAP, "a map")) return;
    value.clear();
    for (size_t left = next_.count; left > 0 && status_.ok(); --left) {
      auto key = internal::Fresh<typename T::key_type>();
      auto mapped = internal::Fresh<typename T::mapped_type>();
      (*this)(key, mapped);
      if (status_.ok()) value.insert_or_assign(std::move(key), std::move(mapped));
    }
  }
  template <typename T>
  void TakeSet(T& value) {
    if (!Next(GTRAIN_VALUE_ARRAY, "an array")) return;
    value.clear();
    for (size_t left = next_.count; left > 0 && status_.ok(); --left) {
      auto one = internal::Fresh<typename T::value_type>();
      Take(one);
      if (status_.ok()) value.insert(std::move(one));
    }
  }
  // An array of numbers of this type, or bytes.
  template <typename T>
  bool NextAsOne() {
    if constexpr (std::same_as<T, std::byte>) {
      return Next(GTRAIN_VALUE_BYTES, "bytes");
    } else {
      if (!Next(GTRAIN_VALUE_NUMBERS, "an array of " + internal::NumberName<T>())) return false;
      if (next_.dtype == static_cast<gtrain_dtype>(internal::NumberType<T>())) return true;
      Fail("it is an array of other numbers than " + internal::NumberName<T>());
      return false;
    }
  }
  // Where they lie; null: not aligned as those of this type are.
  template <typename T>
  const T* InPlace() const {
    const bool aligned = reinterpret_cast<uintptr_t>(next_.data) % alignof(T) == 0;
    return aligned ? static_cast<const T*>(next_.data) : nullptr;
  }
  template <typename T>
  void TakeView(internal::Viewed<T>& view) {
    if (!NextAsOne<T>() || next_.count == 0) return;
    const T* const there = InPlace<T>();
    if (there == nullptr) CopyNumbers<T>(view.copy);
    view.span = {there == nullptr ? view.copy.data() : there, next_.count};
  }
  template <typename T, typename Values>
  void CopyNumbers(Values& values) {
    if constexpr (!internal::kIsArray<Values>) {
      if (const T* const there = InPlace<T>(); there != nullptr) {
        values.assign(there, there + next_.count);  // and no zeros are written before, as resize does
        return;
      }
    }
    if (Resize(values, next_.count) && next_.count > 0)
      std::memcpy(values.data(), next_.data, next_.count * sizeof(T));
  }
  template <typename T, typename Values>
  void TakeAll(Values& values) {
    if constexpr (internal::Number<T> || std::same_as<T, std::byte>) {
      if (NextAsOne<T>()) CopyNumbers<T>(values);
    } else {
      if (!Next(GTRAIN_VALUE_ARRAY, "an array")) return;
      TakeEach<T>(values, next_.count);
    }
  }
  // A vector grows as its elements come: their count alone makes nobody reserve memory for large ones.
  template <typename T, typename Values>
  void TakeEach(Values& values, size_t count) {
    if constexpr (internal::kIsArray<Values>) {
      if (!Resize(values, count)) return;
      for (T& one : values) Take(one);
    } else {
      values.clear();
      for (; count > 0 && status_.ok(); --count) {
        auto one = internal::Fresh<T>();
        Take(one);
        if (status_.ok()) values.push_back(std::move(one));
      }
    }
  }
  template <typename Values>
  bool Resize(Values& values, size_t count) {
    if constexpr (internal::kIsArray<Values>) {
      if (count == values.size()) return true;
      Fail("it has " + std::to_string(count) + " elements, and should have " + std::to_string(values.size()));
      return false;
    } else {
      values.resize(count);
      return true;
    }
  }
  bool Next(int kind, const std::string& wanted) { return Next(kind, wanted.c_str()); }

  gtrain_unpacker unpacker_;
  gtrain_value next_{};
  int depth_ = 0;
  Status status_;
};

}  // namespace gtrain
