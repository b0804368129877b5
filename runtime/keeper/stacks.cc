// The cheapest part comes first and each part is written when it is there: a tool that is ended at a time
// limit has written what it knew.
#include "runtime/keeper/stacks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr int kThreadsMax = 64;
constexpr size_t kProcessesMax = 16;
constexpr int64_t kToolsMs = 8000;  // a second less than a command beside a rank may run
constexpr size_t kToolBytesMax = 256 << 10;
constexpr int kCapSysPtrace = 19;

std::string Trimmed(std::string text) {
  while (!text.empty() && strchr(" \t\n", text.back()) != nullptr) text.pop_back();
  const size_t start = text.find_first_not_of(" \t\n");
  return start == std::string::npos ? "" : text.substr(start);
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

std::string ProcPath(int64_t pid, const char* name) { return "/proc/" + std::to_string(pid) + "/" + name; }

// Value of "Name:\tvalue" in /proc/PID/status.
std::string StatusField(int64_t pid, const char* name) {
  const std::string prefix = std::string(name) + ":";
  for (const std::string& line : Lines(ReadSmallFile(ProcPath(pid, "status")))) {
    if (line.rfind(prefix, 0) == 0) return Trimmed(line.substr(prefix.size()));
  }
  return "";
}

struct NamedCall {
  long number;
  const char* name;
};

// The calls in which threads of a training wait; others are named by their number.
constexpr NamedCall kNamedCalls[] = {
    {SYS_read, "read"},
    {SYS_write, "write"},
    {SYS_readv, "readv"},
    {SYS_writev, "writev"},
    {SYS_pread64, "pread64"},
    {SYS_pwrite64, "pwrite64"},
    {SYS_ppoll, "ppoll"},
    {SYS_pselect6, "pselect6"},
    {SYS_epoll_pwait, "epoll_pwait"},
    {SYS_futex, "futex"},
    {SYS_nanosleep, "nanosleep"},
    {SYS_clock_nanosleep, "clock_nanosleep"},
    {SYS_recvfrom, "recvfrom"},
    {SYS_recvmsg, "recvmsg"},
    {SYS_sendto, "sendto"},
    {SYS_sendmsg, "sendmsg"},
    {SYS_accept, "accept"},
    {SYS_accept4, "accept4"},
    {SYS_connect, "connect"},
    {SYS_wait4, "wait4"},
    {SYS_waitid, "waitid"},
    {SYS_openat, "openat"},
    {SYS_fsync, "fsync"},
    {SYS_fdatasync, "fdatasync"},
    {SYS_flock, "flock"},
    {SYS_fcntl, "fcntl"},
    {SYS_ioctl, "ioctl"},
    {SYS_rt_sigtimedwait, "rt_sigtimedwait"},
    {SYS_rt_sigsuspend, "rt_sigsuspend"},
    {SYS_restart_syscall, "restart_syscall"},
    {SYS_io_getevents, "io_getevents"},
#ifdef SYS_poll
    {SYS_poll, "poll"},
    {SYS_select, "select"},
    {SYS_epoll_wait, "epoll_wait"},
    {SYS_pause, "pause"},
#endif
};

std::string SystemCallName(long number) {
  for (const NamedCall& call : kNamedCalls) {
    if (call.number == number) return call.name;
  }
  return "";
}

// "futex" from "202 0x7f.. ...": the registers that follow help nobody.
std::string SystemCall(const std::string& text) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return "";
  const long number = strtol(text.c_str(), nullptr, 10);
  const std::string name = SystemCallName(number);
  return std::to_string(number) + (name.empty() ? "" : " (" + name + ")");
}

std::string ThreadText(const std::string& path, const std::string& id) {
  const auto part = [&path](const char* name) { return Trimmed(ReadSmallFile(path + "/" + name, 8192)); };
  const std::string stat = part("stat");
  const size_t close = stat.rfind(')');
  std::string text =
      "thread " + id + " (" + part("comm") + ") state " +
      (close == std::string::npos || close + 2 >= stat.size() ? "?" : stat.substr(close + 2, 1));
  if (const std::string wchan = part("wchan"); !wchan.empty() && wchan != "0") text += ", waits in " + wchan;
  if (const std::string call = SystemCall(part("syscall")); !call.empty()) text += ", system call " + call;
  text += "\n";
  for (std::string line : Lines(part("stack"))) {  // "[<0>] futex_wait_queue+0x5e/0x90"
    if (const size_t bracket = line.find("] "); bracket != std::string::npos) line.erase(0, bracket + 2);
    text += "    " + line.substr(0, line.find('+')) + "\n";
  }
  return text;
}

// ---------------------------------------------------------------- debuggers

std::string OnPath(const std::string& program) {
  const char* path = getenv("PATH");
  std::string left = path == nullptr ? "" : path;
  while (!left.empty()) {
    const size_t colon = std::min(left.find(':'), left.size());
    const std::string file = left.substr(0, colon) + "/" + program;
    struct stat info;
    if (colon > 0 && stat(file.c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
        access(file.c_str(), X_OK) == 0)
      return file;
    left.erase(0, colon + 1);
  }
  return "";
}

struct ToolResult {
  std::string output;
  bool timed_out = false;
};

ToolResult RunTool(const std::vector<std::string>& argv, int64_t deadline_ms) {
  ToolResult result;
  UniqueFd read_end, write_end;
  if (!MakePipe(&read_end, &write_end)) return result;
  const pid_t pid = fork();
  if (pid == 0) {
    setpgid(0, 0);                     // with all that it starts it can be ended
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // or the process it looks at would stand still for ever
    dup2(write_end.get(), 1);
    dup2(write_end.get(), 2);
    std::vector<char*> words, env;
    for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    for (char** variable = environ; *variable != nullptr; ++variable) {
      // Nothing is fetched from elsewhere while a job stands still.
      if (strncmp(*variable, "DEBUGINFOD_URLS=", 16) != 0) env.push_back(*variable);
    }
    env.push_back(nullptr);
    execve(words[0], words.data(), env.data());
    _exit(127);
  }
  write_end.reset();
  char buffer[16 << 10];
  while (pid > 0) {
    pollfd ready{read_end.get(), POLLIN, 0};
    const int64_t left = deadline_ms - NowMs();
    if (left <= 0 || poll(&ready, 1, static_cast<int>(left)) == 0) {
      result.timed_out = true;
      break;
    }
    const ssize_t n = read(read_end.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    if (result.output.size() < kToolBytesMax) result.output.append(buffer, static_cast<size_t>(n));
  }
  if (pid <= 0) return result;
  if (result.timed_out) kill(-pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return result;
}

void Say(const std::string& indent, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) printf("%s%s\n", indent.c_str(), line.c_str());
  fflush(stdout);
}

// Returns only frames and the threads they belong to; all lines where there are no frames, since they say
// why.
std::vector<std::string> FramesOf(const ToolResult& result) {
  std::vector<std::string> frames, all;
  bool in_frame = false;
  for (const std::string& line : Lines(result.output)) {
    if (!Trimmed(line).empty()) all.push_back(line);
    const bool head = line.rfind("Thread ", 0) == 0 || line.rfind("TID ", 0) == 0;
    in_frame = line.rfind("#", 0) == 0 || (in_frame && line.rfind(" ", 0) == 0);
    if (head || in_frame) frames.push_back(line);
  }
  return frames.empty() ? all : frames;
}

void SayTool(const char* what, const std::string& program, const std::vector<std::string>& words,
             int64_t deadline_ms, bool filter) {
  std::vector<std::string> argv = words;
  argv.insert(argv.begin(), program);
  const ToolResult result = RunTool(argv, deadline_ms);
  Say("  ", {std::string(what) + ", by " + program + ":"});
  Say("    ", filter ? FramesOf(result) : Lines(result.output));
  if (result.timed_out) Say("    ", {"(ended: it took too long)"});
}

bool IsPython(pid_t pid) {
  char exe[4096] = {};
  if (readlink(ProcPath(pid, "exe").c_str(), exe, sizeof(exe) - 1) > 0) {
    const char* name = strrchr(exe, '/');
    if (strstr(name == nullptr ? exe : name, "python") != nullptr) return true;
  }
  return ReadSmallFile(ProcPath(pid, "maps"), 4 << 20).find("libpython") != std::string::npos;
}

// An attempt alone tells: seccomp filters and security modules are asked by nothing else. The tracer is a
// child, whose exit lets go of the process.
int TryToTrace(pid_t pid) {
  const pid_t child = fork();
  if (child == 0) _exit(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) == 0 ? 0 : errno);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return errno;
  return WIFEXITED(status) ? WEXITSTATUS(status) : EPERM;
}

PtraceFacts FactsOf(pid_t pid, int error) {
  PtraceFacts facts;
  facts.error = error;
  facts.yama = Trimmed(ReadSmallFile("/proc/sys/kernel/yama/ptrace_scope"));
  facts.capability =
      (strtoull(StatusField(getpid(), "CapEff").c_str(), nullptr, 16) >> kCapSysPtrace & 1) != 0;
  facts.seccomp = StatusField(getpid(), "Seccomp") == "2";
  struct stat info;
  const std::string user = StatusField(pid, "Uid");
  if (stat(ProcPath(pid, "stat").c_str(), &info) == 0 && !user.empty())
    facts.dumpable = info.st_uid == strtoul(user.c_str(), nullptr, 10);
  const std::string tracer = StatusField(pid, "TracerPid");
  if (tracer != "0") facts.tracer = tracer;
  return facts;
}

void SayDebuggers(pid_t pid, int64_t deadline_ms) {
  if (const int error = TryToTrace(pid); error != 0)
    return Say("  ", {"no native and no Python frames: " + WhyNotTraced(pid, FactsOf(pid, error))});
  const std::string id = std::to_string(pid);
  if (IsPython(pid)) {
    if (const std::string spy = OnPath("py-spy"); !spy.empty()) {
      SayTool("Python frames", spy, {"dump", "--pid", id}, deadline_ms, false);
    } else {
      Say("  ", {"no Python frames: no py-spy in the rank's $PATH (pip install py-spy)"});
    }
  }
  if (const std::string stack = OnPath("eu-stack"); !stack.empty()) {
    SayTool("native frames", stack, {"-p", id}, deadline_ms, true);
  } else if (const std::string gdb = OnPath("gdb"); !gdb.empty()) {
    SayTool("native frames", gdb,
            {"-p", id, "-batch", "-nx", "-ex", "set print frame-arguments none", "-ex",
             "thread apply all backtrace 100"},
            deadline_ms, true);
  } else {
    Say("  ", {"no native frames: neither eu-stack (elfutils) nor gdb in the rank's $PATH"});
  }
}

std::string CommandLine(pid_t pid) {
  std::string text = ReadSmallFile(ProcPath(pid, "cmdline"), 4096);
  std::replace(text.begin(), text.end(), '\0', ' ');
  std::replace(text.begin(), text.end(), '\n', ' ');
  constexpr size_t kShown = 200;
  return Trimmed(text.substr(0, kShown));
}

}  // namespace

std::string KernelStacks(int64_t pid) {
  std::vector<std::string> ids;
  if (DIR* folder = opendir(ProcPath(pid, "task").c_str())) {
    while (const dirent* item = readdir(folder)) {
      if (item->d_name[0] != '.') ids.push_back(item->d_name);
    }
    closedir(folder);
  }
  if (ids.empty()) return "process " + std::to_string(pid) + " is gone\n";
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(ids.size(), kThreadsMax); ++i)
    text += ThreadText(ProcPath(pid, "task") + "/" + ids[i], ids[i]);
  if (ids.size() > kThreadsMax) text += "(" + std::to_string(ids.size() - kThreadsMax) + " more threads)\n";
  return text;
}

std::string BlockedIn(pid_t pid) {
  const std::string stat = ReadSmallFile(ProcPath(pid, "stat"), 4096);
  const size_t close = stat.rfind(')');
  const char state = close == std::string::npos || close + 2 >= stat.size() ? '?' : stat[close + 2];
  if (state == 'T' || state == 't') return state == 'T' ? "stopped by a signal" : "stopped by a debugger";
  const std::string wchan = Trimmed(ReadSmallFile(ProcPath(pid, "wchan"), 256));
  return wchan == "0" ? "" : wchan;
}

std::string WhyNotTraced(pid_t pid, const PtraceFacts& facts) {
  std::string text =
      "process " + std::to_string(pid) + " may not be traced (ptrace: " + strerror(facts.error) + "): ";
  if (!facts.tracer.empty()) return text + "process " + facts.tracer + " traces it already";
  if (facts.error == ESRCH) return text + "it is gone";
  if (!facts.dumpable && !facts.capability)
    return text +
           "it hides from others (a set-uid program, or PR_SET_DUMPABLE 0), which takes CAP_SYS_PTRACE to "
           "see";
  if (facts.yama == "3")
    return text + "kernel.yama.ptrace_scope is 3, which forbids it until the machine is started anew";
  if ((facts.yama == "1" || facts.yama == "2") && !facts.capability) {
    return text + "kernel.yama.ptrace_scope is " + facts.yama +
           ". As root: sysctl kernel.yama.ptrace_scope=0; or give the agent CAP_SYS_PTRACE";
  }
  if (facts.seccomp) {
    return text +
           "a seccomp filter, as of a container, is in force. Start the container with --cap-add SYS_PTRACE, "
           "or "
           "with a profile that allows ptrace";
  }
  if (!facts.capability)
    return text + "the agent has no CAP_SYS_PTRACE, or the process belongs to another user";
  return text + "a security module of the kernel (SELinux, AppArmor) refuses it";
}

int StacksMain(pid_t pid) {
  const int64_t deadline_ms = NowMs() + kToolsMs;
  ProcessEntry entry;
  if (!ReadProcess(pid, &entry)) {
    printf("process %d is gone\n", pid);
    return 1;
  }
  std::vector<pid_t> all = {pid};
  for (const Descendant& descendant : LivingDescendants(pid)) all.push_back(descendant.process.pid);
  for (size_t i = 0; i < std::min(all.size(), kProcessesMax); ++i) {
    Say("", {"process " + std::to_string(all[i]) + ": " + CommandLine(all[i])});
    Say("  ", Lines(KernelStacks(all[i])));
  }
  if (all.size() > kProcessesMax) printf("(%zu more processes)\n", all.size() - kProcessesMax);
  for (size_t i = 0; i < std::min(all.size(), kProcessesMax); ++i) {
    if (all.size() > 1) Say("", {"process " + std::to_string(all[i]) + ":"});
    SayDebuggers(all[i], deadline_ms);
  }
  return 0;
}

}  // namespace gtrain::keeper
