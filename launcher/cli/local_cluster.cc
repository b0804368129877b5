#include "launcher/cli/local_cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "runtime/agent/agent.h"
#include "runtime/zmq/cluster_dir.h"
#include "runtime/zmq/key_registry.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(30);
constexpr absl::Duration kLockTimeout = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(20);

absl::StatusOr<UniqueFd> LockStart(const std::string& dir) {
  const std::string path = dir + "/start.lock";
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
  const RealClock clock;
  const Instant deadline = clock.Now() + kLockTimeout;
  while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return ErrnoStatus(errno, absl::StrCat("lock ", path));
    if (clock.Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "another gtrain has been starting the local cluster for a minute (", path, " is locked)"));
    }
    absl::SleepFor(kPollInterval);
  }
  return fd;
}

// A free loopback port below the usual ephemeral range, so that a restarted head finds it free again;
// `preferred` if that one is.
absl::StatusOr<int> FreePort(std::optional<int> preferred) {
  Rng rng = Rng::FromSystem();
  for (int attempt = 0; attempt < 100; ++attempt) {
    const bool wanted = preferred && attempt == 0;
    const int port = wanted ? *preferred : 20'000 + static_cast<int>(rng.Below(12'000));
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return ErrnoStatus(errno, "a socket");
    const int on = 1;  // as the head does: connections of a killed head linger
    (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return port;
  }
  return absl::ResourceExhaustedError("no free loopback port between 20000 and 32000");
}

absl::StatusOr<std::string> OwnProgram() {
  std::string path(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) return ErrnoStatus(errno, "/proc/self/exe");
  path.resize(static_cast<size_t>(length));
  return path;
}

// Starts a daemon in a session of its own: no terminal, no descriptors of ours, default signals, and its
// output appended to `log`.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& argv, const std::string& log) {
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
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0].c_str(), &actions, &attributes, words.data(), environ);
  if (error != 0) return ErrnoStatus(error, absl::StrCat("start ", argv[0], " ", argv[1]));
  return pid;
}

// What the file at `path` says, as the end of a sentence about it.
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

// Waits until `ready`, or the daemon ends, or the deadline.
absl::Status WaitFor(pid_t pid, const std::string& what, const std::string& log,
                     const std::function<bool()>& ready) {
  const RealClock clock;
  const Instant deadline = clock.Now() + kStartTimeout;
  while (!ready()) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) {
      const std::string how = WIFSIGNALED(status)
                                  ? absl::StrFormat("was killed at its start by signal %d (%s)",
                                                    WTERMSIG(status), strsignal(WTERMSIG(status)))
                                  : absl::StrCat("ended at its start with exit code ", WEXITSTATUS(status));
      return absl::UnavailableError(
          absl::StrCat("the ", what, " of the local cluster ", how, "; ", log, LastLines(log)));
    }
    if (clock.Now() > deadline) {
      kill(pid, SIGTERM);
      return absl::DeadlineExceededError(
          absl::StrCat("the ", what, " of the local cluster did not come up in 30 s; ", log, LastLines(log)));
    }
    absl::SleepFor(kPollInterval);
  }
  return absl::OkStatus();
}

absl::Status StartHead(const std::string& program, const std::string& dir) {
  // Agents and clients of a head that is gone look for it where it was. One that ended in order leaves no
  // word of where, so its first choice is always the same.
  constexpr size_t kPorts = 12'000;
  int preferred = 20'000 + static_cast<int>(std::hash<std::string>()(dir) % kPorts);
  if (const auto before = net::ReadEndpoint(dir + "/endpoint.json"); before.ok()) {
    int port = 0;
    if (absl::SimpleAtoi(before->endpoint.substr(before->endpoint.rfind(':') + 1), &port)) preferred = port;
  }
  unlink((dir + "/endpoint.json").c_str());
  absl::Status status;
  for (int attempt = 0; attempt < 3; ++attempt) {
    GT_ASSIGN_OR_RETURN(const int port,
                        FreePort(attempt == 0 ? std::optional<int>(preferred) : std::nullopt));
    const std::string log = dir + "/head.log";
    GT_ASSIGN_OR_RETURN(
        const pid_t pid,
        Spawn({program, "head", "--local", "--dir", dir, "--listen", absl::StrCat("127.0.0.1:", port)}, log));
    status = WaitFor(pid, "head", log, [&] { return LocalHeadRuns(dir); });
    if (status.ok() || absl::IsDeadlineExceeded(status)) return status;
  }
  return status;
}

bool AgentRuns(const std::string& dir) {
  const absl::StatusOr<std::string> text = ReadFile(dir + "/agent.pid", 64);
  int64_t pid = 0;
  return text.ok() && absl::SimpleAtoi(*text, &pid) && RunsVerb(pid, "agent");
}

absl::Status StartAgent(const std::string& program, const std::string& dir) {
  const std::string log = dir + "/agent.log";
  GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn({program, "agent", "--local", "--dir", dir}, log));
  return WaitFor(pid, "agent", log, [&] { return AgentRuns(dir); });
}

absl::StatusOr<LocalCluster> Describe(const std::string& dir) {
  LocalCluster local;
  local.dir = dir;
  GT_ASSIGN_OR_RETURN(const net::Endpoint endpoint, net::ReadEndpoint(dir + "/endpoint.json"));
  local.options.endpoint = endpoint.endpoint;
  local.options.server_public_key = endpoint.head_public_key;
  GT_ASSIGN_OR_RETURN(local.options.keys, net::LoadKeyPair(dir + "/admin.key"));
  return local;
}

}  // namespace

std::string LocalAgentDir(const std::string& dir) { return dir + "/agent"; }

absl::StatusOr<std::string> LocalClusterDir() { return net::DefaultClusterDir("local"); }

bool RunsVerb(int64_t pid, const std::string& verb) {
  if (pid <= 1) return false;
  const std::string proc = absl::StrCat("/proc/", pid);
  // /proc files are regular files of size 0; 4 KiB hold the beginning of any command line of ours.
  UniqueFd stat(open((proc + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  UniqueFd cmdline(open((proc + "/cmdline").c_str(), O_RDONLY | O_CLOEXEC));
  if (!stat.valid() || !cmdline.valid()) return false;
  char text[4096];
  const ssize_t stat_bytes = read(stat.get(), text, sizeof(text));
  if (stat_bytes <= 0) return false;
  const absl::string_view stat_text(text, static_cast<size_t>(stat_bytes));
  const size_t paren = stat_text.rfind(')');
  if (paren == absl::string_view::npos || paren + 2 >= stat_text.size()) return false;
  if (stat_text[paren + 2] == 'Z' || stat_text[paren + 2] == 'X') return false;
  const ssize_t bytes = read(cmdline.get(), text, sizeof(text));
  if (bytes <= 0) return false;
  const std::vector<std::string> words =
      absl::StrSplit(absl::string_view(text, static_cast<size_t>(bytes)), '\0');
  return words.size() > 1 && absl::EndsWith(words[0], "gtrain") && words[1] == verb;
}

absl::StatusOr<LocalCluster> EnsureLocalCluster() {
  GT_ASSIGN_OR_RETURN(const std::string dir, LocalClusterDir());
  GT_RETURN_IF_ERROR(MakeDirs(dir));
  GT_ASSIGN_OR_RETURN(const UniqueFd lock, LockStart(dir));
  GT_ASSIGN_OR_RETURN(const net::ClusterFiles files, net::InitCluster(dir));
  GT_ASSIGN_OR_RETURN(const std::string program, OwnProgram());
  // Before the head starts: it reads the list then, so that the agent's first connection is let in.
  GT_ASSIGN_OR_RETURN(const std::string agent_key, agent::NodePublicKey(LocalAgentDir(dir)));
  GT_RETURN_IF_ERROR(
      net::AddAllowedKey(files.authorized_path(), {core::Role::kNode, agent_key, "local agent"}));
  if (!LocalHeadRuns(dir)) GT_RETURN_IF_ERROR(StartHead(program, dir));
  if (!AgentRuns(dir)) GT_RETURN_IF_ERROR(StartAgent(program, dir));
  return Describe(dir);
}

absl::StatusOr<LocalCluster> FindLocalCluster() {
  GT_ASSIGN_OR_RETURN(const std::string dir, LocalClusterDir());
  if (absl::IsNotFound(net::ReadEndpoint(dir + "/endpoint.json").status())) {
    return absl::NotFoundError(
        "no local cluster runs: it starts with `gtrain launch` and ends after its last job. "
        "For another cluster give --context NAME");
  }
  return EnsureLocalCluster();
}

bool LocalHeadRuns(const std::string& dir) {
  const absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(dir + "/endpoint.json");
  return endpoint.ok() && RunsVerb(endpoint->pid, "head");
}

absl::StatusOr<bool> ReviveLocalAgent(const std::string& dir) {
  if (AgentRuns(dir) || !LocalHeadRuns(dir)) return false;
  GT_ASSIGN_OR_RETURN(const UniqueFd lock, LockStart(dir));
  if (AgentRuns(dir) || !LocalHeadRuns(dir)) return false;  // another gtrain was faster
  GT_ASSIGN_OR_RETURN(const std::string program, OwnProgram());
  GT_RETURN_IF_ERROR(StartAgent(program, dir));
  return true;
}

absl::Status WriteAgentPid(const std::string& dir) {
  return WriteFileDurable(dir + "/agent.pid", absl::StrCat(getpid()), 0600);
}

void RemoveAgentPid(const std::string& dir) { unlink((dir + "/agent.pid").c_str()); }

}  // namespace gtrain::cli
