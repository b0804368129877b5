#include "launcher/exec/local_daemons.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "net/zmq/key_registry.h"
#include "runtime/agent/agent.h"
#include "runtime/control/cluster_dir.h"

namespace gtrain::exec {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(30);
constexpr absl::Duration kReapInterval = absl::Milliseconds(20);
constexpr int kLoopbackPatienceMs = 1000;
constexpr char kOurselves[] = "/proc/self/exe";

const char* VerbOf(Daemon daemon) {
  return daemon == Daemon::kHead ? "head" : daemon == Daemon::kAgent ? "agent" : "local-watch";
}

std::string LogPath(const std::string& dir, Daemon daemon) {
  return dir + (daemon == Daemon::kHead    ? "/head.log"
                : daemon == Daemon::kAgent ? "/agent.log"
                                           : "/watch.log");
}

// ---------------------------------------------------------------- the loopback interface

sockaddr_storage LoopbackSocketAddress(bool v6, int port) {
  sockaddr_storage storage{};
  if (v6) {
    auto& address = reinterpret_cast<sockaddr_in6&>(storage);
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<uint16_t>(port));
    address.sin6_addr = in6addr_loopback;
  } else {
    auto& address = reinterpret_cast<sockaddr_in&>(storage);
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  return storage;
}

absl::StatusOr<UniqueFd> BindLoopback(bool v6, int port) {
  UniqueFd fd(socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "a socket");
  const int on = 1;  // as the head does: connections of a killed head linger
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const sockaddr_storage address = LoopbackSocketAddress(v6, port);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "bind");
  }
  return fd;
}

// Listens there and connects to itself.
absl::Status TryLoopback(bool v6) {
  GT_ASSIGN_OR_RETURN(const UniqueFd listening, BindLoopback(v6, 0));
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  const UniqueFd caller(socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listen(listening.get(), 1) != 0 ||
      getsockname(listening.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0 || !caller.valid()) {
    return ErrnoStatus(errno, "listen");
  }
  if (connect(caller.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 && errno != EINPROGRESS) {
    return ErrnoStatus(errno, "connect");
  }
  pollfd accepted{listening.get(), POLLIN, 0};
  if (poll(&accepted, 1, kLoopbackPatienceMs) == 1) return absl::OkStatus();
  return absl::UnavailableError("connect: no answer within a second");
}

// A free loopback port below the usual ephemeral range, so that a restarted head finds it free again;
// `preferred` if that one is.
absl::StatusOr<int> FreePort(bool v6, std::optional<int> preferred) {
  Rng rng = Rng::FromSystem();
  for (int attempt = 0; attempt < 100; ++attempt) {
    const bool wanted = preferred && attempt == 0;
    const int port = wanted ? *preferred : 20'000 + static_cast<int>(rng.Below(12'000));
    if (BindLoopback(v6, port).ok()) return port;
  }
  return absl::ResourceExhaustedError("no free loopback port between 20000 and 32000");
}

// ---------------------------------------------------------------- processes

// Where our program is installed: after it was replaced in place, the new one. Ourselves when it was removed.
absl::StatusOr<std::string> Program() {
  std::string path(4096, '\0');
  const ssize_t length = readlink(kOurselves, path.data(), path.size());
  if (length <= 0) return ErrnoStatus(errno, kOurselves);
  path.resize(static_cast<size_t>(length));
  if (access(path.c_str(), X_OK) == 0) return path;
  path = std::string(absl::StripSuffix(path, " (deleted)"));
  return access(path.c_str(), X_OK) == 0 ? path : kOurselves;
}

// Starts a daemon in a session of its own: no terminal, no descriptors of ours, default signals, and its
// output appended to `log`.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& arguments, const std::string& log) {
  GT_ASSIGN_OR_RETURN(const std::string program, Program());
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  const auto cleanup = absl::MakeCleanup([&] {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  });
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  posix_spawn_file_actions_addchdir_np(&actions, "/");
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> words = {const_cast<char*>(program == kOurselves ? "gtrain" : program.c_str())};
  for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, program.c_str(), &actions, &attributes, words.data(), environ);
  if (error != 0) return ErrnoStatus(error, absl::StrCat("start ", program, " ", arguments[0]));
  return pid;
}

// Returns the last lines of the file at `path`, as the end of a sentence about it.
std::string LastLines(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return " does not open";
  const off_t size = lseek(fd.get(), 0, SEEK_END);
  constexpr off_t kBytes = 1500;
  std::string text(static_cast<size_t>(std::min(size, kBytes)), '\0');
  const ssize_t got = pread(fd.get(), text.data(), text.size(), std::max<off_t>(0, size - kBytes));
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (lines.size() > 5) lines.erase(lines.begin(), lines.end() - 5);
  if (lines.empty()) return " says nothing";
  std::string out = " says:";
  for (const std::string& line : lines) absl::StrAppend(&out, "\n  ", line);
  return out;
}

// Starts single daemons, and waits for them.
class Starter {
 public:
  Starter(const std::string& dir, std::vector<pid_t>* children, const std::stop_token& stop)
      : dir_(dir), children_(children), stop_(stop) {}

  struct Started {
    Daemon daemon;
    pid_t pid;
  };

  // Agents and clients of a head that is gone look for it where it was. One that ended in order leaves no
  // word of where, so its first choice is always the same.
  absl::Status StartHead() {
    constexpr size_t kPorts = 12'000;
    int preferred = 20'000 + static_cast<int>(std::hash<std::string>()(dir_) % kPorts);
    if (const auto before = net::ReadEndpoint(dir_ + "/endpoint.json"); before.ok()) {
      int port = 0;
      if (absl::SimpleAtoi(before->endpoint.substr(before->endpoint.rfind(':') + 1), &port)) preferred = port;
    }
    GT_ASSIGN_OR_RETURN(const std::string address, LoopbackAddress());
    absl::Status status;
    for (int attempt = 0; attempt < 3; ++attempt) {
      GT_ASSIGN_OR_RETURN(
          const int port,
          FreePort(address[0] == '[', attempt == 0 ? std::optional<int>(preferred) : std::nullopt));
      GT_ASSIGN_OR_RETURN(const Started head,
                          Begin(Daemon::kHead, {"head", "--local", "--dir", dir_, "--listen",
                                                absl::StrCat(address, ":", port)}));
      status = Await(head);
      if (!absl::IsUnavailable(status)) return status;
    }
    return status;
  }

  // An agent whose state directory was removed has a new key.
  absl::StatusOr<Started> BeginAgent() {
    const std::string list = dir_ + "/authorized";
    GT_ASSIGN_OR_RETURN(const std::string key, agent::NodePublicKey(LocalAgentDir(dir_)));
    GT_ASSIGN_OR_RETURN(const std::vector<net::AllowedKey> allowed, net::ReadAllowedKeys(list));
    const bool known = std::any_of(allowed.begin(), allowed.end(),
                                   [&](const net::AllowedKey& one) { return one.public_key == key; });
    if (!known) GT_RETURN_IF_ERROR(net::AddAllowedKey(list, {core::Role::kNode, key, "local agent"}));
    return Begin(Daemon::kAgent, {"agent", "--local", "--dir", dir_});
  }

  absl::StatusOr<Started> BeginWatch() { return Begin(Daemon::kWatch, {"local-watch", "--dir", dir_}); }

  // Waits until the daemon serves, or ends, or the deadline passes.
  absl::Status Await(const Started& started) {
    const auto [daemon, pid] = started;
    const std::string log = LogPath(dir_, daemon);
    const RealClock clock;
    const Instant deadline = clock.Now() + kStartTimeout;
    while (!Runs(dir_, daemon)) {
      int status = 0;
      if (waitpid(pid, &status, WNOHANG) == pid) return Ended(daemon, status, log);
      if (clock.Now() > deadline) {
        kill(pid, SIGTERM);
        return absl::DeadlineExceededError(absl::StrCat(
            "the ", VerbOf(daemon), " of the local cluster did not come up in 30 s; ", log, LastLines(log)));
      }
      if (stop_.stop_requested()) return absl::CancelledError("this process ends");
      absl::SleepFor(kReapInterval);
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<Started> Begin(Daemon daemon, const std::vector<std::string>& arguments) {
    GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(arguments, LogPath(dir_, daemon)));
    if (children_ != nullptr) children_->push_back(pid);
    return Started{daemon, pid};
  }

  static absl::Status Ended(Daemon daemon, int status, const std::string& log) {
    const std::string how = WIFSIGNALED(status)
                                ? absl::StrFormat("was killed at its start by signal %d (%s)",
                                                  WTERMSIG(status), strsignal(WTERMSIG(status)))
                                : absl::StrCat("ended at its start with exit code ", WEXITSTATUS(status));
    return absl::UnavailableError(
        absl::StrCat("the ", VerbOf(daemon), " of the local cluster ", how, "; ", log, LastLines(log)));
  }

  const std::string& dir_;
  std::vector<pid_t>* const children_;
  const std::stop_token& stop_;
};

}  // namespace

std::string LocalAgentDir(const std::string& dir) { return dir + "/agent"; }

std::string LockPath(const std::string& dir, Daemon daemon) {
  if (daemon == Daemon::kAgent) return LocalAgentDir(dir) + "/lock";
  return dir + (daemon == Daemon::kHead ? "/head.lock" : "/watch.lock");
}

bool Runs(const std::string& dir, Daemon daemon) {
  return IsLocked(daemon == Daemon::kHead ? dir + "/endpoint.json" : LockPath(dir, daemon));
}

absl::Status StartMissing(const std::string& dir, const std::vector<Daemon>& wanted,
                          std::vector<pid_t>* children, const std::stop_token& stop) {
  const auto is_missing = [&](Daemon daemon) {
    return std::find(wanted.begin(), wanted.end(), daemon) != wanted.end() && !Runs(dir, daemon);
  };
  Starter starter(dir, children, stop);
  if (is_missing(Daemon::kHead)) GT_RETURN_IF_ERROR(starter.StartHead());
  std::vector<Starter::Started> started;
  if (is_missing(Daemon::kAgent)) {
    GT_ASSIGN_OR_RETURN(const Starter::Started agent, starter.BeginAgent());
    started.push_back(agent);
  }
  if (is_missing(Daemon::kWatch)) {
    GT_ASSIGN_OR_RETURN(const Starter::Started watch, starter.BeginWatch());
    started.push_back(watch);
  }
  for (const Starter::Started& one : started) GT_RETURN_IF_ERROR(starter.Await(one));
  return absl::OkStatus();
}

absl::StatusOr<std::string> LoopbackAddress() {
  const absl::Status v4 = TryLoopback(/*v6=*/false);
  if (v4.ok()) return "127.0.0.1";
  const absl::Status v6 = TryLoopback(/*v6=*/true);
  if (v6.ok()) return "[::1]";
  return absl::UnavailableError(absl::StrCat(
      "the loopback interface of this machine or container does not work (127.0.0.1: ", v4.message(),
      "; ::1: ", v6.message(), "), and a local cluster needs it. Try: ip link set lo up"));
}

}  // namespace gtrain::exec
