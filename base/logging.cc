#include "base/logging.h"

#include <unistd.h>

#include "absl/base/const_init.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace gtrain {
namespace {

// The one piece of process-wide state in base: a log line must not need a handle.
struct LogState {
  Mutex mu;
  std::string tag ABSL_GUARDED_BY(mu);
  std::function<void(LogLevel, absl::string_view)> sink ABSL_GUARDED_BY(mu);
};

LogState& State() {
  static auto* state = new LogState;  // never destroyed: exit handlers may log
  return *state;
}

// A name that a peer gives itself must not drive the terminal in which a person reads the log.
std::string WithoutControls(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {  // U+0080 to U+009F
      absl::StrAppendFormat(&out, "\\x%02x\\x%02x", byte, next);
      ++i;
    } else if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F) {
      absl::StrAppendFormat(&out, "\\x%02x", byte);
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

}  // namespace

void SetLogTag(absl::string_view tag) {
  MutexLock lock(&State().mu);
  State().tag = std::string(tag);
}

void SetLogSink(std::function<void(LogLevel, absl::string_view)> sink) {
  MutexLock lock(&State().mu);
  State().sink = std::move(sink);
}

void LogLine(LogLevel level, absl::string_view text) {
  MutexLock lock(&State().mu);
  if (State().sink) return State().sink(level, text);
  constexpr char kLetters[] = {'I', 'W', 'E'};
  const std::string line =
      absl::StrCat(std::string(1, kLetters[static_cast<int>(level)]), " ",
                   absl::FormatTime("%H:%M:%E3S", absl::Now(), absl::UTCTimeZone()),
                   State().tag.empty() ? "" : " ", State().tag, ": ", WithoutControls(text), "\n");
  // A full or closed stderr must never stop a daemon.
  [[maybe_unused]] ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace gtrain
