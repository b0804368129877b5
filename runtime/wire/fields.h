// Private to runtime/wire. One description of each struct's fields serves both directions, so that
// writer and reader cannot disagree:
//
//   GT_FIELDS(core::GpuInfo) { GT_TEXT(uuid, Uuid, 256); GT_NUMBER(numa, Numa, -1, 4096); }
//
// `m` is a Cap'n Proto Reader or Builder, `v` the plain value, `a` collects the first error of a reader.
// A reader goes on after an error (cheap and bounded); the caller looks at a.error at the end.
#pragma once
#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::wire {

struct Archive {
  std::string error;  // "field: what is wrong" of the first error; empty = none
  bool ok() const { return error.empty(); }
  void Fail(absl::string_view field, absl::string_view what) {
    if (error.empty()) error = absl::StrCat(field, ": ", what);
  }
};

template <class M>
inline constexpr bool kReading = requires {
  typename M::Reads;
};

bool ValidId(absl::string_view id);
// UTF-8 without control characters other than newline and tab.
bool ValidText(absl::string_view text);
// Makes it so, and at most `limit` bytes.
std::string CleanText(absl::string_view text, size_t limit);

inline absl::string_view View(capnp::Text::Reader t) { return {t.begin(), t.size()}; }
inline absl::string_view View(capnp::Data::Reader d) {
  return {reinterpret_cast<const char*>(d.begin()), d.size()};
}
inline void Fill(capnp::Text::Builder to, absl::string_view from) {
  if (!from.empty()) std::memcpy(to.begin(), from.data(), from.size());
}
inline void Fill(capnp::Data::Builder to, absl::string_view from) {
  if (!from.empty()) std::memcpy(to.begin(), from.data(), from.size());
}

inline const std::string& RawId(const std::string& id) { return id; }
inline std::string& RawId(std::string& id) { return id; }
template <class T>
auto& RawId(T& id) {
  return id.value;
}

inline void ReadId(Archive& a, absl::string_view from, bool optional, absl::string_view field,
                   std::string& to) {
  if (from.empty() ? !optional : !ValidId(from)) return a.Fail(field, "not an id");
  to.assign(from.data(), from.size());
}
inline void ReadText(Archive& a, absl::string_view from, size_t limit, absl::string_view field,
                     std::string& to) {
  if (from.size() > limit) return a.Fail(field, absl::StrCat("longer than ", limit, " bytes"));
  if (!ValidText(from)) return a.Fail(field, "not printable UTF-8");
  to.assign(from.data(), from.size());
}
inline void ReadBytes(Archive& a, absl::string_view from, size_t limit, absl::string_view field,
                      std::string& to) {
  if (from.size() > limit) return a.Fail(field, absl::StrCat("longer than ", limit, " bytes"));
  to.assign(from.data(), from.size());
}
template <class From, class To>
void ReadNumber(Archive& a, From from, int64_t low, int64_t high, absl::string_view field, To& to) {
  if (from < low || from > high)
    return a.Fail(field, absl::StrCat(from, " is not in [", low, ", ", high, "]"));
  to = static_cast<To>(from);
}
inline void ReadDuration(Archive& a, int64_t ns, absl::string_view field, absl::Duration& to) {
  if (ns < 0) return a.Fail(field, "negative duration");
  to = ns == std::numeric_limits<int64_t>::max() ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
}
inline int64_t WireDuration(absl::Duration d) {
  return d < absl::ZeroDuration() ? 0 : absl::ToInt64Nanoseconds(d);  // saturates at int64 max = infinite
}
inline absl::Time ReadWallTime(int64_t ns) {
  return ns == 0 ? absl::InfinitePast() : absl::FromUnixNanos(ns);
}
inline int64_t WireWallTime(absl::Time t) { return t == absl::InfinitePast() ? 0 : absl::ToUnixNanos(t); }
// False: more elements than the limit.
inline bool ListFits(Archive& a, size_t size, size_t limit, absl::string_view field) {
  if (size <= limit) return true;
  a.Fail(field, absl::StrCat(size, " elements, the limit is ", limit));
  return false;
}

template <class T>
bool Finite(const T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::isfinite(value);
  } else {
    return true;
  }
}

template <class List, class Map>
void ReadMap(Archive& a, List list, size_t limit, absl::string_view field, Map& to) {
  if (!ListFits(a, list.size(), limit, field)) return;
  for (auto pair : list) {
    absl::string_view key = View(pair.getKey()), value = View(pair.getValue());
    if (key.empty() || key.size() > 1024 || !ValidText(key) || value.size() > (1u << 20) ||
        !to.emplace(std::string(key), std::string(value)).second) {
      return a.Fail(field, "bad, doubled or too long entry");
    }
  }
}
template <class List, class Map>
void WriteMap(List list, const Map& from) {
  unsigned index = 0;
  for (const auto& [key, value] : from) {
    auto pair = list[index++];
    Fill(pair.initKey(key.size()), key);
    Fill(pair.initValue(value.size()), value);
  }
}

}  // namespace gtrain::wire

#define GT_FIELDS(Type)                                 \
  template <class M, class V>                           \
  requires std::is_same_v<std::remove_const_t<V>, Type> \
  void Fields([[maybe_unused]] Archive& a, [[maybe_unused]] M m, [[maybe_unused]] V& v)

#define GT_ID_(field, Cap, optional)                                 \
  if constexpr (kReading<M>)                                         \
    ReadId(a, View(m.get##Cap()), optional, #field, RawId(v.field)); \
  else                                                               \
    Fill(m.init##Cap(RawId(v.field).size()), RawId(v.field))
#define GT_ID(field, Cap) GT_ID_(field, Cap, false)
#define GT_ID_OR_EMPTY(field, Cap) GT_ID_(field, Cap, true)
#define GT_COUNTER(field, Cap) /* strong number ids */ \
  if constexpr (kReading<M>)                           \
    v.field.value = m.get##Cap();                      \
  else                                                 \
    m.set##Cap(v.field.value)
#define GT_PLAIN(field, Cap) /* every value of the type is fine: bool, uint64 */ \
  if constexpr (kReading<M>)                                                     \
    v.field = m.get##Cap();                                                      \
  else                                                                           \
    m.set##Cap(v.field)
#define GT_NUMBER(field, Cap, low, high)                     \
  if constexpr (kReading<M>)                                 \
    ReadNumber(a, m.get##Cap(), low, high, #field, v.field); \
  else                                                       \
    m.set##Cap(v.field)
#define GT_DURATION(field, Cap)                     \
  if constexpr (kReading<M>)                        \
    ReadDuration(a, m.get##Cap(), #field, v.field); \
  else                                              \
    m.set##Cap(WireDuration(v.field))
#define GT_WALL_TIME(field, Cap) /* 0: not known */ \
  if constexpr (kReading<M>)                        \
    v.field = ReadWallTime(m.get##Cap());           \
  else                                              \
    m.set##Cap(WireWallTime(v.field))
#define GT_TEXT(field, Cap, limit)                           \
  if constexpr (kReading<M>) {                               \
    ReadText(a, View(m.get##Cap()), limit, #field, v.field); \
  } else {                                                   \
    std::string clean = CleanText(v.field, limit);           \
    Fill(m.init##Cap(clean.size()), clean);                  \
  }
#define GT_BYTES(field, Cap, limit)                           \
  if constexpr (kReading<M>)                                  \
    ReadBytes(a, View(m.get##Cap()), limit, #field, v.field); \
  else                                                        \
    Fill(m.init##Cap(v.field.size()), v.field)
#define GT_TAIL(field, Cap, limit) /* only the last `limit` bytes matter */ \
  if constexpr (kReading<M>) {                                              \
    ReadBytes(a, View(m.get##Cap()), limit, #field, v.field);               \
  } else {                                                                  \
    absl::string_view tail = v.field;                                       \
    if (tail.size() > (limit)) tail.remove_prefix(tail.size() - (limit));   \
    Fill(m.init##Cap(tail.size()), tail);                                   \
  }
#define GT_ENUM(field, Cap, last)                                                                   \
  if constexpr (kReading<M>)                                                                        \
    ReadNumber(a, static_cast<uint16_t>(m.get##Cap()), 0, static_cast<int>(last), #field, v.field); \
  else                                                                                              \
    m.set##Cap(static_cast<decltype(m.get##Cap())>(v.field))
#define GT_OPTIONAL(field, Cap)                                              \
  if constexpr (kReading<M>) {                                               \
    if (m.getHas##Cap()) v.field = m.get##Cap();                             \
    if (v.field && !Finite(*v.field)) a.Fail(#field, "not a finite number"); \
  } else if (v.field && Finite(*v.field)) {                                  \
    m.setHas##Cap(true);                                                     \
    m.set##Cap(*v.field);                                                    \
  }
#define GT_STRUCT(field, Cap)         \
  if constexpr (kReading<M>)          \
    Fields(a, m.get##Cap(), v.field); \
  else                                \
    Fields(a, m.init##Cap(), v.field)
// Elements are made one by one and reading stops at the first bad one, so a tiny message
// that claims a long list of empty structs makes nothing big.
#define GT_LIST(field, Cap, limit)                                                \
  if constexpr (kReading<M>) {                                                    \
    auto list = m.get##Cap();                                                     \
    if (ListFits(a, list.size(), limit, #field)) {                                \
      v.field.reserve(list.size());                                               \
      for (unsigned i = 0; i < list.size() && a.ok(); ++i) {                      \
        v.field.emplace_back();                                                   \
        Fields(a, list[i], v.field.back());                                       \
      }                                                                           \
    }                                                                             \
  } else {                                                                        \
    auto list = m.init##Cap(v.field.size());                                      \
    for (unsigned i = 0; i < v.field.size(); ++i) Fields(a, list[i], v.field[i]); \
  }
#define GT_NUMBER_LIST(field, Cap, limit, low, high)                       \
  if constexpr (kReading<M>) {                                             \
    auto list = m.get##Cap();                                              \
    if (ListFits(a, list.size(), limit, #field)) {                         \
      for (unsigned i = 0; i < list.size() && a.ok(); ++i) {               \
        v.field.emplace_back();                                            \
        ReadNumber(a, list[i], low, high, #field, v.field.back());         \
      }                                                                    \
    }                                                                      \
  } else {                                                                 \
    auto list = m.init##Cap(v.field.size());                               \
    for (unsigned i = 0; i < v.field.size(); ++i) list.set(i, v.field[i]); \
  }
#define GT_BYTES_LIST(field, Cap, limit, bytes_limit)                                                \
  if constexpr (kReading<M>) {                                                                       \
    auto list = m.get##Cap();                                                                        \
    if (ListFits(a, list.size(), limit, #field)) {                                                   \
      for (unsigned i = 0; i < list.size() && a.ok(); ++i) {                                         \
        v.field.emplace_back();                                                                      \
        ReadBytes(a, View(list[i]), bytes_limit, #field, v.field.back());                            \
      }                                                                                              \
    }                                                                                                \
  } else {                                                                                           \
    auto list = m.init##Cap(v.field.size());                                                         \
    for (unsigned i = 0; i < v.field.size(); ++i) Fill(list.init(i, v.field[i].size()), v.field[i]); \
  }
#define GT_MAP(field, Cap, limit)                     \
  if constexpr (kReading<M>)                          \
    ReadMap(a, m.get##Cap(), limit, #field, v.field); \
  else                                                \
    WriteMap(m.init##Cap(v.field.size()), v.field)
#define GT_ID_LIST(field, Cap, limit)                                   \
  if constexpr (kReading<M>) {                                          \
    auto list = m.get##Cap();                                           \
    if (ListFits(a, list.size(), limit, #field)) {                      \
      for (unsigned i = 0; i < list.size() && a.ok(); ++i) {            \
        v.field.emplace_back();                                         \
        ReadId(a, View(list[i]), false, #field, RawId(v.field.back())); \
      }                                                                 \
    }                                                                   \
  } else {                                                              \
    auto list = m.init##Cap(v.field.size());                            \
    for (unsigned i = 0; i < v.field.size(); ++i)                       \
      Fill(list.init(i, RawId(v.field[i]).size()), RawId(v.field[i]));  \
  }
