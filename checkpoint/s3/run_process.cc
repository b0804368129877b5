#include "checkpoint/s3/run_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kExitLook = absl::Milliseconds(5);

absl::StatusOr<pid_t> Start(const std::vector<std::string>& words, int output) {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  const auto destroy = absl::MakeCleanup([&] {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  });
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output, 1);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  if (error == 0) return pid;
  return absl::FailedPreconditionError(
      absl::StrCat("cannot start ", words[0], ": ", ErrnoStatus(error, "posix_spawn").message()));
}

// Waits for output until `deadline`.
absl::StatusOr<std::string> ReadAll(int fd, Instant deadline, size_t bytes_max) {
  const RealClock clock;
  std::string out;
  char some[4096];
  while (true) {
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("it did not end in time");
    pollfd wait = {fd, POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
    if (ready <= 0) continue;
    const ssize_t n = read(fd, some, sizeof(some));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "read");
    if (n == 0) return out;
    if (out.size() + static_cast<size_t>(n) > bytes_max) {
      return absl::ResourceExhaustedError(absl::StrCat("it wrote more than ", bytes_max, " bytes"));
    }
    out.append(some, static_cast<size_t>(n));
  }
}

// Its exit status; -1 where this process is told nothing of its children.
absl::StatusOr<int> Exit(pid_t pid, Instant deadline) {
  const RealClock clock;
  while (true) {
    int status = 0;
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    if (ended == pid) return status;
    if (ended < 0 && errno == ECHILD) return -1;  // SIGCHLD is ignored, or somebody else waited
    if (clock.Now() >= deadline) return absl::DeadlineExceededError("it closed its output and did not exit");
    absl::SleepFor(kExitLook);
  }
}

}  // namespace

absl::StatusOr<std::vector<std::string>> SplitCommand(absl::string_view command) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;
  for (size_t i = 0; i < command.size(); ++i) {
    const char c = command[i];
    const char next = i + 1 < command.size() ? command[i + 1] : 0;
    if (quote == 0 && absl::ascii_isspace(static_cast<unsigned char>(c))) {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    if (quote == 0 && (c == '"' || c == '\'')) {
      quote = c;
    } else if (c == quote) {
      quote = 0;
    } else if (c == '\\' && next != 0 && (quote == 0 || (quote == '"' && (next == '"' || next == '\\')))) {
      words.back() += next;
      ++i;
    } else {
      words.back() += c;
    }
  }
  if (quote != 0) return absl::InvalidArgumentError("a quote is not closed");
  if (words.empty() || words[0].empty()) return absl::InvalidArgumentError("it names no program");
  return words;
}

absl::StatusOr<std::string> RunProcess(const std::vector<std::string>& words, absl::Duration timeout,
                                       size_t bytes_max) {
  const Instant deadline = RealClock().Now() + timeout;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  GT_ASSIGN_OR_RETURN(const pid_t pid, Start(words, to.get()));
  to.reset();
  absl::StatusOr<std::string> out = ReadAll(from.get(), deadline, bytes_max);
  absl::StatusOr<int> exit = out.ok() ? Exit(pid, deadline) : absl::StatusOr<int>(out.status());
  if (!exit.ok()) {
    kill(-pid, SIGKILL);
    (void)Exit(pid, RealClock().Now() + absl::Seconds(1));  // one that cannot be killed is not waited for
    return absl::Status(exit.status().code(), absl::StrCat(words[0], ": ", exit.status().message()));
  }
  if (*exit == 0 || *exit == -1) return out;
  return absl::FailedPreconditionError(absl::StrCat(words[0],
                                                    WIFSIGNALED(*exit)
                                                        ? absl::StrCat(" ended by signal ", WTERMSIG(*exit))
                                                        : absl::StrCat(" exited with ", WEXITSTATUS(*exit)),
                                                    ". Run it by hand to see what it says"));
}

}  // namespace gtrain::ckpt
