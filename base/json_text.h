// Texts in and of JSON documents. Pure; for .cc files, which pay for the library's header themselves.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace gtrain {

// The text of a field; "" where it is missing or of another type: who wrote the document may be older or
// newer.
inline std::string TextOf(const nlohmann::json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

// A document in one line. Bytes that are no UTF-8 are replaced: never throws.
inline std::string OneLine(const nlohmann::json& document) {
  return document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace gtrain
