// Log lines for daemons: "I 12:00:00.123 head: text". One line a call, to
// stderr by default. Thread-safe. The text is made by absl::StrCat of the arguments.
#pragma once
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace gtrain {

enum class LogLevel { kInfo, kWarning, kError };

// The tag before each line ("head", "agent node-1"); set once by main().
void SetLogTag(absl::string_view tag);
// Replaces stderr; tests use it to declare expected warnings. nullptr restores.
void SetLogSink(std::function<void(LogLevel, absl::string_view)> sink);
void LogLine(LogLevel level, absl::string_view text);

template <typename... Args>
void LogInfo(const Args&... args) {
  LogLine(LogLevel::kInfo, absl::StrCat(args...));
}
template <typename... Args>
void LogWarning(const Args&... args) {
  LogLine(LogLevel::kWarning, absl::StrCat(args...));
}
template <typename... Args>
void LogError(const Args&... args) {
  LogLine(LogLevel::kError, absl::StrCat(args...));
}

}  // namespace gtrain
