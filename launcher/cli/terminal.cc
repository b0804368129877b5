#include "launcher/cli/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/clock.h"
#include "job/spec/yaml_tree.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
std::atomic<int> g_signal_fd{-1};
std::atomic<const char*> g_last_line{nullptr};
std::atomic<int> g_presses{0};  // of Ctrl-C, without a SignalPipe
std::atomic<int> g_presses_max{1};
std::atomic_flag g_ending;
std::atomic<int> g_output_error{0};
std::atomic<Colour> g_colour{Colour::kAuto};
std::atomic<bool> g_printed{false};
std::atomic<int> g_ends{0};          // signals that ask to end and that nobody has read yet
std::atomic<int64_t> g_print_ms{0};  // longest that one Print takes on a terminal; 0: as long as it does
constexpr size_t kWrittenAtOnce = PIPE_BUF;  // more goes in pieces to what may be slow
std::vector<std::string> g_errors;           // of the main thread

void OnCtrlC(int) {
  if (++g_presses < g_presses_max) return;
  if (g_ending.test_and_set()) _exit(128 + SIGINT);  // another press, while the line is written
  for (const char* part : {"gtrain: ", g_last_line.load(), "\n"}) (void)!write(2, part, strlen(part));
  _exit(128 + SIGINT);
}

void OnSignal(int number) {
  const int saved = errno;
  const char byte = static_cast<char>(number);
  const int fd = g_signal_fd.load(std::memory_order_relaxed);
  // A full pipe already holds a signal to act on.
  if (fd >= 0 && write(fd, &byte, 1) == 1 && number != SIGWINCH) ++g_ends;
  errno = saved;
}

// A reader that ended, or the window of a terminal that was closed.
bool NobodyReads(int error) {
  struct stat info {};
  return error == EPIPE || (error == EIO && fstat(STDOUT_FILENO, &info) == 0 && S_ISCHR(info.st_mode));
}

// Marks of direction that CharacterProblem lets into job files: there they may stand in a name.
bool TurnsText(char32_t c) { return c == 0x200E || c == 0x200F || c == 0x061C; }

}  // namespace

std::string SafeText(absl::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    const std::optional<char32_t> c = spec::DecodeUtf8(text, pos);
    if (!c) {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(text[pos++]));
    } else if (*c == U'\n') {
      out += "\\n";
    } else if (*c != U'\t' && (TurnsText(*c) || !spec::CharacterProblem(*c).empty())) {
      for (size_t i = start; i < pos; ++i)
        absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(text[i]));
    } else {
      out.append(text.data() + start, pos - start);
    }
  }
  return out;
}

std::string SafeLines(absl::string_view text, absl::string_view indent) {
  absl::ConsumeSuffix(&text, "\n");
  return absl::StrJoin(absl::StrSplit(text, '\n'), absl::StrCat("\n", indent),
                       [](std::string* out, absl::string_view line) { *out += SafeText(line); });
}

namespace {

// East Asian wide characters and emoji.
int ColumnsOf(char32_t c) {
  constexpr std::pair<char32_t, char32_t> kWide[] = {
      {0x1100, 0x115F},   {0x2E80, 0xA4CF},   {0xAC00, 0xD7A3},   {0xF900, 0xFAFF},
      {0xFE30, 0xFE6F},   {0xFF00, 0xFF60},   {0xFFE0, 0xFFE6},   {0x1F300, 0x1F64F},
      {0x1F680, 0x1F6FF}, {0x1F900, 0x1F9FF}, {0x20000, 0x3FFFD},
  };
  for (const auto& [first, last] : kWide) {
    if (c >= first && c <= last) return 2;
  }
  return c == U'\t' ? 8 : 1;
}

}  // namespace

std::string CutToWidth(absl::string_view text, int width) {
  int columns = 0;
  bool coloured = false;
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    if (text[pos] == '\x1b') {
      coloured = true;
      pos = std::min(text.find('m', pos), text.size() - 1) + 1;
      continue;
    }
    const std::optional<char32_t> c = spec::DecodeUtf8(text, pos);
    if (!c) ++pos;
    columns += ColumnsOf(c.value_or(U' '));
    if (columns > width) return absl::StrCat(text.substr(0, start), coloured ? "\x1b[0m" : "");
  }
  return std::string(text);
}

bool IsTerminal(int fd) { return isatty(fd) == 1; }

bool CanRedraw(int fd) {
  const char* term = std::getenv("TERM");
  return IsTerminal(fd) && (term == nullptr || absl::string_view(term) != "dumb");
}

TerminalSize SizeOfTerminal(int fd) {
  winsize size{};
  TerminalSize out;
  if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0) {
    out.rows = size.ws_row;
    out.columns = size.ws_col;
  }
  return out;
}

absl::Status CheckTerminal(absl::string_view verb) {
  if (IsTerminal(STDIN_FILENO)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(verb, " -t: stdin is not a terminal. Run it in one, or give input without -t: gtrain ",
                   verb, " -i ..."));
}

int TimesContinued() {
  static std::atomic<int> times{0};
  static const bool watched = [] {
    struct sigaction action {};
    action.sa_handler = [](int) { ++times; };
    action.sa_flags = SA_RESTART;
    return sigaction(SIGCONT, &action, nullptr) == 0;
  }();
  (void)watched;
  return times;
}

void SetColour(Colour colour) { g_colour = colour; }

bool UsesColour(int fd) {
  if (g_colour != Colour::kAuto) return g_colour == Colour::kAlways;
  const char* no_colour = std::getenv("NO_COLOR");
  return CanRedraw(fd) && (no_colour == nullptr || *no_colour == '\0');
}

std::string OwnLine(absl::string_view line, Tone tone, int fd) {
  if (!UsesColour(fd)) return absl::StrCat("gtrain: ", line, "\n");
  const char* colour = tone == Tone::kGood ? "\x1b[1;32m" : tone == Tone::kBad ? "\x1b[1;31m" : "\x1b[1;36m";
  return absl::StrCat(colour, "gtrain:\x1b[0m ", line, "\n");
}

const std::vector<std::string>& Errors() { return g_errors; }

void NoteError(std::string line) { g_errors.push_back(std::move(line)); }

bool Printed() { return g_printed; }

void Complain(absl::string_view message, Tone tone) {
  if (tone == Tone::kBad) NoteError(std::string(message));
  // A name in the message may come from a file, from another user or from the keyboard, so it is made safe
  // here.
  const std::string line = OwnLine(SafeLines(message, ""), tone, STDERR_FILENO);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

int Report(const absl::Status& status) {
  for (absl::string_view line : absl::StrSplit(status.message(), '\n')) Complain(SafeText(line), Tone::kBad);
  return status.code() == absl::StatusCode::kInvalidArgument ? kUsage : kFailed;
}

namespace {

// A pipe or a socket to another program, which may read as slowly as it likes.
bool IsPipe(int fd) {
  struct stat info {};
  return fstat(fd, &info) == 0 && (S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode));
}

// Prints in pieces. A write to a slow terminal or pipe returns when it has taken everything, minutes later;
// between pieces a Ctrl-C is looked at, and then the rest is not shown. Returns the errno of a failed write,
// else 0.
int PrintInPieces(absl::string_view text) {
  // A descriptor that is ready takes so many bytes at once: a pipe that is ready has room for PIPE_BUF
  // (pipe(7)).
  const bool terminal = IsTerminal(STDOUT_FILENO);
  const size_t piece = terminal ? 256 : PIPE_BUF;
  constexpr int kLookMs = 50;
  const RealClock clock;
  const Instant start = clock.Now();
  while (!text.empty()) {
    const int64_t limit = g_print_ms;
    // Output that is read as fast as it comes, by `tee`, is not cut.
    pollfd out{STDOUT_FILENO, POLLOUT, 0};
    const bool ready = poll(&out, 1, 0) > 0;
    if ((terminal || !ready) && g_ends > 0) break;
    if (limit > 0 && clock.Now() - start > absl::Milliseconds(limit)) break;
    if (!ready && (poll(&out, 1, kLookMs) <= 0 || out.revents == 0)) continue;
    const ssize_t wrote = write(STDOUT_FILENO, text.data(), std::min(piece, text.size()));
    if (wrote < 0 && errno != EINTR && errno != EAGAIN) return errno;
    if (wrote > 0) text.remove_prefix(static_cast<size_t>(wrote));
  }
  if (text.empty()) return 0;
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  if (!terminal && poll(&out, 1, kLookMs) <= 0) return 0;  // nobody reads now: nor would they this
  const std::string mark =
      absl::StrCat("\n[", text.size(), " bytes of output are not shown here; `gtrain logs` has them]\n");
  return write(STDOUT_FILENO, mark.data(), mark.size()) < 0 ? errno : 0;
}

}  // namespace

void BoundPrint(absl::Duration longest) { g_print_ms = absl::ToInt64Milliseconds(longest); }

bool Print(absl::string_view text) {
  g_printed = g_printed || !text.empty();
  const bool may_be_slow =
      IsTerminal(STDOUT_FILENO) ? text.size() > kWrittenAtOnce : !text.empty() && IsPipe(STDOUT_FILENO);
  if (may_be_slow) {
    std::fflush(stdout);
    const int error = PrintInPieces(text);
    if (error != 0 && g_output_error == 0 && !NobodyReads(error)) g_output_error = error;
    return error == 0;
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (written && std::fflush(stdout) == 0) return true;
  const int error = errno;
  if (g_output_error == 0 && !NobodyReads(error)) g_output_error = error;
  return false;
}

int OutputError() { return g_output_error; }

void EndOnCtrlC(int presses, const char* line) {
  g_last_line = line;
  g_presses_max = presses;
  struct sigaction action {};
  action.sa_handler = OnCtrlC;
  sigfillset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

SignalPipe::SignalPipe() {
  int fds[2];
  GT_CHECK(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
  read_fd_ = fds[0];
  write_fd_ = fds[1];
  GT_CHECK(g_signal_fd.exchange(write_fd_) == -1);
  struct sigaction action {};
  action.sa_handler = OnSignal;
  for (const int number : kSignals) sigaction(number, &action, nullptr);
  for (int before = g_presses.exchange(0); before > 0; --before) OnSignal(SIGINT);
}

void SignalPipe::AlsoWindowSize() {
  struct sigaction action {};
  action.sa_handler = OnSignal;
  sigaction(SIGWINCH, &action, nullptr);
}

SignalPipe::~SignalPipe() {
  signal(SIGWINCH, SIG_DFL);
  // A closed window may be told twice, by the shell and by the kernel: the second must not spoil the exit
  // code.
  for (const int number : kSignals) {
    const bool ignored = number == SIGHUP || (number == SIGINT && ignores_ctrl_c_);
    signal(number, ignored ? SIG_IGN : SIG_DFL);
  }
  g_signal_fd = -1;
  g_ends = 0;
  close(read_fd_);
  close(write_fd_);
}

int SignalPipe::Next() {
  char byte = 0;
  if (read(read_fd_, &byte, 1) != 1) return 0;
  if (byte != SIGWINCH) --g_ends;
  return byte;
}

}  // namespace gtrain::cli
