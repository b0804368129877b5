#include "runtime/host/keeper_client.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/posix.h"

namespace gtrain::host {

namespace fs = std::filesystem;

namespace {

std::string RankSocket(const std::string& dir) {
  const std::string elsewhere = keeper::ReadSmallFile(dir + "/rank-dir");
  return (elsewhere.empty() ? dir : elsewhere) + "/rank.sock";
}

// Runs in the forked child of a possibly threaded process: only async-signal-safe calls.
[[noreturn]] void BecomeKeeper(char** argv, int log) {
  setsid();
  if (fork() != 0) _exit(0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDWR);
  dup2(null, 0);
  dup2(null, 1);
  dup2(log, 2);
  syscall(SYS_close_range, 3u, ~0u, 0u);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::Status StartKeeper(const std::string& binary, const std::string& dir, const std::string& job,
                         const std::vector<std::string>& extra_args) {
  if (access(binary.c_str(), X_OK) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot run the keeper ", binary));
  std::vector<std::string> words = {binary, "--dir", dir, "--job", job};
  words.insert(words.end(), extra_args.begin(), extra_args.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  UniqueFd log(open((dir + "/keeper.log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!log.valid()) return ErrnoStatus(errno, absl::StrCat("cannot write in the keeper's directory ", dir));
  const pid_t child = fork();
  if (child < 0) return ErrnoStatus(errno, "cannot fork the keeper");
  if (child == 0) BecomeKeeper(argv.data(), log.get());
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> KeeperPid(const std::string& dir) {
  const std::string text = keeper::ReadSmallFile(dir + "/pid");
  const std::vector<std::string> words = absl::StrSplit(text, absl::ByAnyChar(" \n"));
  int64_t pid = 0;
  uint64_t start = 0;
  keeper::ProcessEntry entry;
  if (words.size() < 2 || !absl::SimpleAtoi(words[0], &pid) || !absl::SimpleAtoi(words[1], &start) ||
      !keeper::ReadProcess(static_cast<pid_t>(pid), &entry) || entry.start_time != start || entry.zombie) {
    return absl::UnavailableError(absl::StrCat("no keeper lives in ", dir));
  }
  return pid;
}

std::string KeeperJob(const std::string& dir) { return keeper::ReadSmallFile(dir + "/job"); }

absl::StatusOr<std::unique_ptr<KeeperClient>> KeeperClient::Connect(const std::string& dir) {
  UniqueFd folder(open(dir.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!folder.valid() || !fd.valid()) return ErrnoStatus(errno, dir);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;  // through /proc: the directory may be deeper than sun_path is long
  const std::string path = absl::StrCat("/proc/self/fd/", folder.get(), "/agent.sock");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(absl::StrCat("keeper in ", dir, ": ", std::strerror(errno)));
  }
  if (!keeper::IsAgentOrKeeper(fd.get())) {
    return absl::UnavailableError(
        absl::StrCat(dir, "/agent.sock is not that of a keeper: a rank has replaced it (fault X6)"));
  }
  return std::unique_ptr<KeeperClient>(new KeeperClient(std::move(fd)));
}

void KeeperClient::Send(const keeper::Command& command) { keeper::AppendFrame(command, &out_); }

absl::Status KeeperClient::Flush() {
  while (!out_.empty()) {
    const ssize_t n = send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return absl::OkStatus();
    if (n <= 0) return absl::UnavailableError("the keeper closed the connection");
    out_.erase(0, static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<keeper::Report>> KeeperClient::Receive() {
  char buffer[16 << 10];
  size_t budget = keeper::kAgentFrameBytesMax + sizeof(keeper::AgentFrame);
  while (!ended_ && in_.size() < budget) {
    const ssize_t n = read(fd_.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      ended_ = true;
      break;
    }
    in_.append(buffer, static_cast<size_t>(n));
  }
  std::vector<keeper::Report> reports;
  size_t used = 0;
  while (true) {
    keeper::Report report;
    const keeper::Take take = keeper::TakeFrame(in_, &used, &report);
    if (take == keeper::Take::kBroken) return absl::UnavailableError("the keeper sent a broken frame");
    if (take != keeper::Take::kMessage) break;
    reports.push_back(std::move(report));
  }
  in_.erase(0, used);
  if (reports.empty() && ended_) return absl::UnavailableError("the keeper closed the connection");
  return reports;
}

bool LeftNobody(const std::string& dir) {
  std::error_code error;
  return fs::exists(dir + "/job", error) && !fs::exists(dir + "/pid", error);
}

size_t KillOrphans(const std::string& dir) {
  const std::string socket = RankSocket(dir);
  size_t living = 0;
  for (const keeper::ProcessEntry& process : keeper::ListProcesses()) {
    if (process.zombie || process.pid == getpid()) continue;
    if (keeper::ProcessEnvironment(process.pid, "GTRAIN_KEEPER_SOCKET") != socket) continue;
    ++living;
    keeper::SignalProcess(process, SIGKILL);
  }
  return living;
}

std::vector<keeper::Exited> ReadExitRecords(const std::string& dir) {
  std::vector<keeper::Exited> exits;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir + "/exits", error)) {
    const std::string bytes = keeper::ReadSmallFile(entry.path(), 256 << 20);
    size_t used = 0;
    keeper::Report report;
    while (keeper::TakeFrame(bytes, &used, &report) == keeper::Take::kMessage) {
      if (auto* exit = std::get_if<keeper::Exited>(&report)) exits.push_back(std::move(*exit));
    }
  }
  return exits;
}

void RemoveKeeperDir(const std::string& dir) {
  std::error_code error;
  const std::string elsewhere = keeper::ReadSmallFile(dir + "/rank-dir");
  if (!elsewhere.empty()) fs::remove_all(elsewhere, error);
  fs::remove_all(dir, error);
}

}  // namespace gtrain::host
