#include "bench/head_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"

extern char** environ;

namespace gtrain::bench {
namespace {

constexpr absl::Duration kStartDeadline = absl::Minutes(1);

}  // namespace

double OwnCpuSeconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

const RealClock& BenchClock() {
  static const RealClock clock;
  return clock;
}

absl::Status AllowFilesOf(size_t clients, const std::string& whose) {
  const rlim_t needed = 9 * clients + 200;
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur >= needed) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(clients, " ", whose, " need ", needed, " open files, ulimit -n allows ", files.rlim_cur));
}

BenchCluster::~BenchCluster() {
  std::error_code ignored;
  if (!home_.empty()) std::filesystem::remove_all(home_, ignored);
}

absl::Status BenchCluster::Make(int nodes) {
  std::string pattern = (std::filesystem::temp_directory_path() / "gt-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) return ErrnoStatus(errno, "mkdtemp");
  home_ = pattern;
  GT_ASSIGN_OR_RETURN(files_, net::InitCluster(home_ + "/cluster"));
  std::string lines;
  for (int i = 0; i < nodes; ++i) {
    keys_.push_back(net::MakeKeyPair());
    absl::StrAppend(&lines, "node ", keys_.back().public_key, " node-", i, "\n");
  }
  GT_ASSIGN_OR_RETURN(const std::string before, ReadFile(files_.authorized_path(), 1 << 20));
  return WriteFileDurable(files_.authorized_path(), before + lines, 0600);
}

HeadProcess::HeadProcess(std::string gtrain, std::string dir, std::vector<std::string> flags)
    : gtrain_(std::move(gtrain)),
      dir_(std::move(dir)),
      flags_(std::move(flags)),
      listen_(absl::StrCat("127.0.0.1:", 20'000 + getpid() % 12'000)) {}

absl::Status HeadProcess::Start() {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  std::vector<std::string> words = {gtrain_, "head", "--dir", dir_, "--listen", listen_};
  words.insert(words.end(), flags_.begin(), flags_.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  unlink((dir_ + "/endpoint.json").c_str());
  const int error = posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, gtrain_);
  const Instant deadline = BenchClock().Now() + kStartDeadline;
  while (BenchClock().Now() < deadline) {
    if (const auto endpoint = net::ReadEndpoint(dir_ + "/endpoint.json"); endpoint.ok()) {
      listen_ = endpoint->endpoint;
      return absl::OkStatus();
    }
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) break;
    usleep(2000);
  }
  return absl::UnavailableError(absl::StrCat("the head did not start; see ", log()));
}

void HeadProcess::Kill(int signal) {
  if (pid_ <= 0) return;
  kill(pid_, signal);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

double HeadProcess::CpuSeconds() const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::vector<std::string> words =
      absl::StrSplit(text.substr(text.rfind(')') + 1), ' ', absl::SkipEmpty());
  if (words.size() < 13) return 0;
  return (std::stod(words[11]) + std::stod(words[12])) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double HeadProcess::MemoryMiB(const std::string& line) const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/status"));
  for (std::string word; file >> word;) {
    double kib = 0;
    if (word == line && file >> kib) return kib / 1024;
  }
  return 0;
}

}  // namespace gtrain::bench
