#include "runtime/keeper/posix.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include "base/folder.h"

namespace gtrain::keeper {

namespace {

int64_t Ms(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000;
}

}  // namespace

int64_t NowMs() { return Ms(CLOCK_MONOTONIC); }
int64_t BootMs() { return Ms(CLOCK_BOOTTIME); }

bool SetNonBlocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

bool MakePipe(UniqueFd* read_end, UniqueFd* write_end) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return false;
  read_end->reset(fds[0]);
  write_end->reset(fds[1]);
  return true;
}

bool MakeTerminal(UniqueFd* read_end, UniqueFd* write_end, Terminal kind) {
  read_end->reset(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!read_end->valid() || unlockpt(read_end->get()) != 0) return false;
  write_end->reset(ioctl(read_end->get(), TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios settings;
  if (!write_end->valid() || tcgetattr(write_end->get(), &settings) != 0) return false;
  if (kind == Terminal::kRaw) {
    cfmakeraw(&settings);
  } else {
    settings.c_iflag |= IUTF8;
  }
  const winsize size = {30, 100, 0, 0};
  return tcsetattr(write_end->get(), TCSANOW, &settings) == 0 &&
         ioctl(write_end->get(), TIOCSWINSZ, &size) == 0;
}

bool ListenOn(const std::string& path, const char* name, UniqueFd* fd) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  fd->reset();
  if (path.size() >= sizeof(address.sun_path)) return false;
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  unlink(path.c_str());
  fd->reset(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd->valid() && bind(fd->get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      listen(fd->get(), 1024) == 0) {
    return true;
  }
  fprintf(stderr, "gtrain-keeper: cannot listen on %s (%s): %s\n", path.c_str(), name, strerror(errno));
  fd->reset();
  return false;
}

bool WriteFileAtomic(const std::string& path, const std::string& data) {
  const auto [folder, name] = OpenFolderOf(path);
  if (!folder.valid()) return false;
  const std::string temporary = name + ".tmp";
  unlinkat(folder.get(), temporary.c_str(), 0);  // of a writer that was killed, or put there for us to follow
  const UniqueFd fd(
      openat(folder.get(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return false;
  for (size_t done = 0; done < data.size();) {
    const ssize_t n = write(fd.get(), data.data() + done, data.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = errno;
      unlinkat(folder.get(), temporary.c_str(), 0);
      errno = error;
      return false;
    }
    done += static_cast<size_t>(n);
  }
  return renameat(folder.get(), temporary.c_str(), folder.get(), name.c_str()) == 0;
}

std::string ReadSmallFile(const std::string& path, size_t bytes_max) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::string text;
  if (!fd.valid()) return text;
  char buffer[4096];
  while (text.size() < bytes_max) {
    ssize_t n = read(fd.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
  }
  return text;
}

bool WriteSmallFile(const std::string& path, const std::string& data) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  return fd.valid() && write(fd.get(), data.data(), data.size()) == static_cast<ssize_t>(data.size());
}

int PidfdOpen(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

bool PidfdSignal(int pidfd, int signal) {
  return syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0) == 0;
}

bool ReadProcess(pid_t pid, ProcessEntry* entry) {
  const std::string stat = ReadSmallFile("/proc/" + std::to_string(pid) + "/stat", 4096);
  // The name is in parentheses and may hold anything, so parse after the last one.
  const size_t close = stat.rfind(')');
  if (close == std::string::npos) return false;
  char state = 0;
  long long parent = 0;
  unsigned long long start = 0, own[2] = {}, reaped[2] = {};
  const int read =
      sscanf(stat.c_str() + close + 1,
             " %c %lld %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %llu %llu %*d %*d %*d %*d %llu", &state,
             &parent, &own[0], &own[1], &reaped[0], &reaped[1], &start);
  if (read != 7) return false;
  const size_t open = stat.find('(');
  *entry = {pid,
            static_cast<pid_t>(parent),
            start,
            state == 'Z' || state == 'X',
            stat.substr(open + 1, close - open - 1),
            own[0] + own[1] + reaped[0] + reaped[1],
            state == 'T'};
  return true;
}

bool LivesStill(const ProcessEntry& known) {
  ProcessEntry process;
  if (known.pid <= 0) return true;
  if (!ReadProcess(known.pid, &process) || process.start_time != known.start_time) return false;
  struct stat threads = {};
  const std::string folder = "/proc/" + std::to_string(known.pid) + "/task";
  return !process.zombie || (stat(folder.c_str(), &threads) == 0 && threads.st_nlink > 3);
}

std::optional<std::vector<pid_t>> KeepersAbove(pid_t pid) {
  constexpr int kDepthMax = 10000;  // a walk is not atomic: it must not run in a circle
  constexpr int kWalks = 3;
  for (int walk = 0; walk < kWalks; ++walk) {
    std::vector<pid_t> keepers;
    ProcessEntry entry;
    if (!ReadProcess(pid, &entry)) return std::nullopt;
    for (int depth = 0; depth < kDepthMax; ++depth) {
      ProcessEntry parent;
      if (entry.parent <= 0) {  // the first process; but of one that is just ending the kernel says the same
        const bool stays = ReadProcess(entry.pid, &parent) && parent.start_time == entry.start_time &&
                           parent.parent <= 0 && !parent.zombie;
        if (stays) return keepers;
        break;
      }
      // The parent has just ended, and its children have another parent; its number may be another process's
      // now.
      if (!ReadProcess(entry.parent, &parent) || parent.start_time > entry.start_time) break;
      entry = std::move(parent);
      if (entry.name == kKeeperName) keepers.push_back(entry.pid);
    }
  }
  return std::nullopt;
}

bool IsAgentOrKeeper(int socket) {
  ucred peer;
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) return false;
  const auto ours = KeepersAbove(getpid()), theirs = KeepersAbove(peer.pid);
  return ours && theirs && std::all_of(theirs->begin(), theirs->end(), [&](pid_t keeper) {
           return std::find(ours->begin(), ours->end(), keeper) != ours->end();
         });
}

std::vector<ProcessEntry> ListProcesses() {
  std::vector<ProcessEntry> all;
  DIR* dir = opendir("/proc");
  if (dir == nullptr) return all;
  while (dirent* item = readdir(dir)) {
    if (item->d_name[0] < '1' || item->d_name[0] > '9') continue;
    ProcessEntry entry;
    if (ReadProcess(static_cast<pid_t>(atoi(item->d_name)), &entry)) all.push_back(entry);
  }
  closedir(dir);
  return all;
}

std::vector<Descendant> LivingDescendants(pid_t root) {
  const std::vector<ProcessEntry> all = ListProcesses();
  std::unordered_map<pid_t, std::vector<const ProcessEntry*>> children;
  for (const ProcessEntry& entry : all) children[entry.parent].push_back(&entry);
  std::vector<Descendant> found;
  std::vector<std::pair<pid_t, pid_t>> open = {{root, 0}};  // (process, its top)
  while (!open.empty()) {
    const auto [pid, top] = open.back();
    open.pop_back();
    for (const ProcessEntry* child : children[pid]) {
      const pid_t child_top = top == 0 ? child->pid : top;
      if (!child->zombie) found.push_back({*child, child_top});
      open.push_back({child->pid, child_top});
    }
    children.erase(pid);  // a scan is not atomic: never walk a loop
  }
  return found;
}

namespace {

// Bit i: it has a handler for signal i + 1.
uint64_t Caught(pid_t pid) {
  const std::string status = ReadSmallFile("/proc/" + std::to_string(pid) + "/status");
  const size_t at = status.find("\nSigCgt:");
  return at == std::string::npos ? 0 : strtoull(status.c_str() + at + sizeof("\nSigCgt:") - 1, nullptr, 16);
}

bool HasHandler(pid_t pid, int signal) { return (Caught(pid) >> (signal - 1) & 1) != 0; }

// bash with a trap for EXIT catches every signal that would end it, to run that trap and die: this is no trap
// for any of them. Nobody traps an illegal instruction or a file that is too large.
bool Traps(pid_t shell, int signal) {
  const uint64_t caught = Caught(shell), of_exit = uint64_t{1} << (SIGILL - 1) | uint64_t{1} << (SIGXFSZ - 1);
  return (caught >> (signal - 1) & 1) != 0 && (caught & of_exit) != of_exit;
}

// True for a shell, or another program that only waits for what it runs. The file decides: a script that is
// run by its `#!` line calls itself by its own name.
bool IsShell(pid_t pid) {
  static constexpr const char* kShells[] = {"sh",  "bash",    "dash", "ash",   "ksh",   "mksh",
                                            "zsh", "busybox", "time", "flock", "setsid"};
  char path[PATH_MAX];
  const ssize_t length = readlink(("/proc/" + std::to_string(pid) + "/exe").c_str(), path, sizeof(path));
  if (length <= 0) return false;
  std::string name(path, static_cast<size_t>(length));
  name.erase(0, name.rfind('/') + 1);
  return std::any_of(std::begin(kShells), std::end(kShells),
                     [&](const char* shell) { return name == shell; });
}

}  // namespace

std::vector<pid_t> HearersOf(pid_t leader, int signal, std::vector<ProcessEntry>* all) {
  if (!IsShell(leader) || Traps(leader, signal)) return {leader};
  if (all->empty()) *all = ListProcesses();
  std::vector<pid_t> hearers, shells = {leader};
  for (size_t at = 0; at < shells.size() && shells.size() <= all->size(); ++at) {  // it may show a circle
    for (const ProcessEntry& child : *all) {
      if (child.parent != shells[at] || child.zombie) continue;
      const bool shell = IsShell(child.pid);
      if (shell ? Traps(child.pid, signal) : HasHandler(child.pid, signal)) {
        hearers.push_back(child.pid);
      } else if (shell) {
        shells.push_back(child.pid);
      }
    }
  }
  return hearers.empty() ? std::vector<pid_t>{leader} : hearers;
}

std::string ProcessEnvironment(pid_t pid, const char* name) {
  const std::string all = ReadSmallFile("/proc/" + std::to_string(pid) + "/environ", 4 << 20);
  const std::string key = std::string(name) + "=";
  for (size_t at = 0; at < all.size();) {
    const size_t end = all.find('\0', at);
    const std::string item = all.substr(at, end == std::string::npos ? end : end - at);
    if (item.compare(0, key.size(), key) == 0) return item.substr(key.size());
    if (end == std::string::npos) break;
    at = end + 1;
  }
  return "";
}

bool SignalProcess(const ProcessEntry& process, int signal) {
  UniqueFd pidfd(PidfdOpen(process.pid));
  if (!pidfd.valid()) return false;
  ProcessEntry now;
  if (!ReadProcess(process.pid, &now) || now.start_time != process.start_time) return false;
  return PidfdSignal(pidfd.get(), signal);
}

std::string SignalName(int signal) {
  const char* abbreviation = sigabbrev_np(signal);
  const char* text = sigdescr_np(signal);
  std::string name =
      abbreviation != nullptr ? std::string("SIG") + abbreviation : "signal " + std::to_string(signal);
  if (text != nullptr) name += std::string(" (") + text + ")";
  return name;
}

}  // namespace gtrain::keeper
