// Numbers and texts one after the other, as messages between processes have them: integers little-endian, as
// all machines have them that gtrain runs on, of their own size; texts behind their length in four bytes.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"

namespace gtrain::actors {

template <typename T>
void PutNumber(T value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}
// False, all three: the bytes end before that.
template <typename T>
bool TakeNumber(absl::string_view* from, T* value) {
  if (from->size() < sizeof(T)) return false;
  std::memcpy(value, from->data(), sizeof(T));
  from->remove_prefix(sizeof(T));
  return true;
}

inline void PutText(absl::string_view text, std::string* to) {
  PutNumber(static_cast<uint32_t>(text.size()), to);
  to->append(text.data(), text.size());
}
// Also: it is longer than `most`.
inline bool TakeText(absl::string_view* from, size_t most, absl::string_view* text) {
  uint32_t size = 0;
  if (!TakeNumber(from, &size) || size > most || size > from->size()) return false;
  *text = from->substr(0, size);
  from->remove_prefix(size);
  return true;
}

}  // namespace gtrain::actors
