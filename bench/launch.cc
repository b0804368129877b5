// bench_launch: how long N ranks of `true` take through gtrain, from the command to its exit, against a
// bare fork and exec of the same N processes. A cluster of its own runs meanwhile (state in a temporary
// folder, kept alive by one waiting job), so what is measured is a job, not the start of the daemons.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"

extern char** environ;

namespace gtrain::bench {
namespace {

constexpr absl::Duration kCommandDeadline = absl::Seconds(20);

// Starts a command with its output thrown away.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& words) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (int fd = 0; fd < 3; ++fd) {
    posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", O_RDWR, 0);
  }
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, absl::StrCat("start ", words[0]));
  return pid;
}

// Waits for a child of ours; past the deadline it is killed.
absl::Status WaitFor(pid_t pid, absl::string_view what) {
  const RealClock clock;
  const Instant deadline = clock.Now() + kCommandDeadline;
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (clock.Now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return absl::DeadlineExceededError(absl::StrCat(what, " did not end within 20 s"));
    }
    poll(nullptr, 0, 1);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " failed: wait status ", status));
}

class LaunchBench {
 public:
  explicit LaunchBench(std::string gtrain) : gtrain_(std::move(gtrain)) {}

  // A home of its own, and a job that keeps its cluster alive.
  absl::Status Start() {
    std::string pattern = (std::filesystem::temp_directory_path() / "gt-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) return ErrnoStatus(errno, "mkdtemp");
    home_ = pattern;
    for (const char* name : {"HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"}) {
      setenv(name, home_.c_str(), 1);
    }
    if (chdir(home_.c_str()) != 0) return ErrnoStatus(errno, home_);
    return Run({gtrain_, "launch", "-d", "-n", "1", "--set", "name=waits", "--set", "stop_grace=1s", "--",
                "sleep", "3600"});
  }

  void Stop() {
    if (home_.empty()) return;
    const absl::Status stopped = Run({gtrain_, "stop", "waits", "--now"});
    if (!stopped.ok()) std::fprintf(stderr, "bench_launch: %s\n", stopped.ToString().c_str());
    std::error_code ignored;
    if (chdir("/") == 0) std::filesystem::remove_all(home_, ignored);
  }

  absl::StatusOr<double> Ours(int ranks) {
    const Instant start = clock_.Now();
    GT_RETURN_IF_ERROR(
        Run({gtrain_, "launch", "-n", absl::StrCat(ranks), "--set", "name=trues", "--", "true"}));
    return absl::ToDoubleSeconds(clock_.Now() - start);
  }

  absl::StatusOr<double> Bare(int ranks) {
    const Instant start = clock_.Now();
    std::vector<pid_t> pids;
    for (int rank = 0; rank < ranks; ++rank) {
      GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn({"true"}));
      pids.push_back(pid);
    }
    for (pid_t pid : pids) GT_RETURN_IF_ERROR(WaitFor(pid, "true"));
    return absl::ToDoubleSeconds(clock_.Now() - start);
  }

 private:
  static absl::Status Run(const std::vector<std::string>& words) {
    GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(words));
    return WaitFor(pid, absl::StrCat(words[0], " ", words[1]));
  }

  const RealClock clock_;
  const std::string gtrain_;
  std::string home_;
};

int Main(const Options& options) {
  LaunchBench bench(std::filesystem::absolute(options.folder + "/gtrain").string());
  if (const absl::Status started = bench.Start(); !started.ok()) {
    std::fprintf(stderr, "bench_launch: %s\n", started.ToString().c_str());
    bench.Stop();
    return 1;
  }
  std::vector<Outcome> outcomes;
  int failed = 0;
  for (int ranks : {1, 8, 32}) {
    auto outcome = Measure({absl::StrCat("launch ", ranks, " ranks of true"), "s", "bare fork and exec",
                            [&] { return bench.Ours(ranks); }, [&] { return bench.Bare(ranks); }},
                           options.quick ? 5 : 15);
    if (outcome.ok()) {
      outcomes.push_back(*std::move(outcome));
    } else {
      std::fprintf(stderr, "bench_launch: %d ranks: %s\n", ranks, outcome.status().ToString().c_str());
      failed = 1;
    }
  }
  bench.Stop();
  return Report(options, "launch", outcomes) | failed;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
