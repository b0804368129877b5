#include "bench/local_cluster.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

extern char** environ;

namespace gtrain::bench {
namespace {
constexpr absl::Duration kShutdownDeadline = absl::Seconds(20);

// With stderr in `err`; the other two are nothing.
absl::StatusOr<pid_t> SpawnWith(const std::vector<std::string>& words, const UniqueFd& err) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (int fd = 0; fd < 3; ++fd) {
    posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", O_RDWR, 0);
  }
  if (err.valid()) posix_spawn_file_actions_adddup2(&actions, err.get(), 2);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, absl::StrCat("start ", words[0]));
  return pid;
}

// What was written to a file of SpawnWith, its last part.
std::string Said(const UniqueFd& err) {
  constexpr off_t kMost = 2000;
  const off_t size = lseek(err.get(), 0, SEEK_END);
  std::string text(static_cast<size_t>(std::min<off_t>(kMost, std::max<off_t>(0, size))), '\0');
  const ssize_t got = pread(err.get(), text.data(), text.size(), std::max<off_t>(0, size - kMost));
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, got)));
  return std::string(absl::StripTrailingAsciiWhitespace(text));
}

}  // namespace

absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& words) { return SpawnWith(words, UniqueFd()); }

absl::Status WaitFor(pid_t pid, absl::string_view what, absl::Duration deadline) {
  // Asleep until it ends: a bench that looks every millisecond would be in its own figures.
  const UniqueFd ended(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  pollfd wait{ended.get(), POLLIN, 0};
  const bool late =
      ended.valid() && poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(deadline))) == 0;
  if (late) kill(pid, SIGKILL);
  int status = 0;
  waitpid(pid, &status, 0);
  if (late) {
    return absl::DeadlineExceededError(
        absl::StrCat(what, " did not end within ", absl::FormatDuration(deadline)));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " failed: wait status ", status));
}

absl::Status WaitForAll(const std::vector<pid_t>& children, absl::string_view what, absl::Duration deadline) {
  absl::Status result;
  for (const pid_t pid : children) {
    absl::Status one = WaitFor(pid, what, result.ok() ? deadline : absl::Seconds(1));
    if (result.ok()) result = one;
  }
  return result;
}

absl::Status Run(const std::vector<std::string>& words, absl::Duration deadline) {
  const UniqueFd err(memfd_create("stderr", MFD_CLOEXEC));
  GT_ASSIGN_OR_RETURN(const pid_t pid, SpawnWith(words, err));
  absl::Status ended = WaitFor(pid, absl::StrCat(words[0], " ", words.size() > 1 ? words[1] : ""), deadline);
  if (ended.ok()) return ended;
  return absl::Status(ended.code(), absl::StrCat(ended.message(), ": ", Said(err)));
}

bool Executable(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

void AllowOpenMpiAsRoot() {
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
}

absl::Status Home::Make() {
  std::string pattern = (std::filesystem::temp_directory_path() / "gt-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) return ErrnoStatus(errno, "mkdtemp");
  path_ = pattern;
  for (const char* name : {"HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"}) {
    setenv(name, path_.c_str(), 1);
  }
  return chdir(path_.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, path_);
}

void Home::Remove() {
  if (path_.empty()) return;
  const std::string cluster = path_ + "/gtrain/local";
  const std::string endpoint = cluster + "/endpoint.json";
  if (const auto text = ReadFile(endpoint, 64 << 10); text.ok()) {
    const auto json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (const int head = json.is_object() ? json.value("pid", 0) : 0; head > 1) kill(head, SIGTERM);
  }
  const RealClock clock;
  const Instant deadline = clock.Now() + kShutdownDeadline;
  while (access(endpoint.c_str(), F_OK) == 0 && clock.Now() < deadline) poll(nullptr, 0, 20);
  if (chdir("/") != 0) return;
  // The agent ends with its folder. Files that the daemons still write on their way out come back for a
  // moment.
  std::error_code ignored;
  while (access(path_.c_str(), F_OK) == 0 && clock.Now() < deadline) {
    std::filesystem::remove_all(path_, ignored);
    poll(nullptr, 0, 20);
  }
}

LocalCluster::LocalCluster(const std::string& folder)
    : gtrain_(std::filesystem::absolute(folder + "/gtrain").string()) {}

absl::Status LocalCluster::Start() {
  GT_RETURN_IF_ERROR(home_.Make());
  return Run({gtrain_, "launch", "-d", "-n", "1", "--set", "name=waits", "--set", "stop_grace=1s", "--",
              "sleep", "3600"});
}

void LocalCluster::Stop() {
  const absl::Status stopped = Run({gtrain_, "stop", "waits", "--now"});
  if (!stopped.ok()) std::fprintf(stderr, "bench: %s\n", stopped.ToString().c_str());
  home_.Remove();
}

}  // namespace gtrain::bench
