// Texts of others' JSON documents for a terminal.
#pragma once
#include "base/json_text.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {

inline std::string SafeTextOf(const nlohmann::json& object, const char* key) {
  return SafeText(TextOf(object, key));
}

}  // namespace gtrain::cli
