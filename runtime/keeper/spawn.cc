// The starter is an ordinary fork, so it may allocate. Each rank is a vfork of the starter: no page tables
// are copied, and whether exec worked is known when clone() returns. The child shares the descriptor table
// until it takes a copy of the lowest few (close_range with UNSHARE), so starting one rank costs the same
// whether the keeper holds ten descriptors or thousands.
#include "runtime/keeper/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/keeper/posix.h"

#define GTRAIN_SHARES_MEMORY __attribute__((no_sanitize("address", "undefined", "thread")))

namespace gtrain::keeper {

namespace {

// Where a starter puts what its next child needs, below everything else it holds.
enum Slot : int { kResults = 3, kOut = 4, kErr = 5, kIn = 6, kFirstOther = 7 };

// The limit of descriptors that the keeper was given: processes that it starts have no more. Set once, before
// any start.
rlimit given_files = {};

struct Child {
  const SpawnRequest* request;
  char** argv;
  char** env;
  pid_t keeper;
  SpawnFailure failure;  // written by the child, read by the starter: they share memory
  bool not_as_bound;     // likewise
};

void ResetSignals() {
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) sigaction(signal, &standard, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

// False: a control group allows only some of them, or none, which is no error to the kernel.
GTRAIN_SHARES_MEMORY bool Bind(const std::vector<int32_t>& cpus) {
  if (cpus.empty()) return true;
  cpu_set_t set, got;
  CPU_ZERO(&set);
  for (int32_t cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  sched_setaffinity(0, sizeof(set), &set);
  return sched_getaffinity(0, sizeof(got), &got) == 0 && CPU_EQUAL(&set, &got);
}

// For execvp, a folder of $PATH that may not be searched and a program that may not be run are the same
// error.
GTRAIN_SHARES_MEMORY int WhyNotRun(const char* program, int error) {
  const char* folder = getenv("PATH");
  if (error != EACCES || folder == nullptr || strchr(program, '/') != nullptr) return error;
  char path[4096];
  while (true) {
    const char* end = strchrnul(folder, ':');
    snprintf(path, sizeof(path), "%.*s/%s", static_cast<int>(end - folder), folder, program);
    if (access(path, F_OK) == 0) return error;
    if (*end == '\0') return ENOENT;
    folder = end + 1;
  }
}

// Out of reach of the keeper's descriptors and terminal: a session of its own, nothing inherited but 0, 1, 2.
GTRAIN_SHARES_MEMORY int Become(void* argument) {
  Child& child = *static_cast<Child*>(argument);
  const SpawnRequest& request = *child.request;
  if (syscall(SYS_close_range, unsigned{kFirstOther}, ~0u, 2u /* CLOSE_RANGE_UNSHARE */) != 0) {
    unshare(CLONE_FILES);  // an old kernel: the rest closes at exec
  }
  dup2(kIn, 0);
  dup2(kOut, 1);
  dup2(kErr, 2);
  setsid();
  if (request.owns_terminal) ioctl(0, TIOCSCTTY, 0);
  // Where Yama lets processes trace only their children, debuggers that the keeper starts may trace this one.
  prctl(PR_SET_PTRACER, child.keeper);
  if (given_files.rlim_max > 0) setrlimit(RLIMIT_NOFILE, &given_files);
  if (request.cgroup != nullptr) request.cgroup->Enter();
  child.not_as_bound = !Bind(request.cpus);
  if (!request.cwd.empty() && chdir(request.cwd.c_str()) != 0) {
    child.failure = {1, errno};
    _exit(126);
  }
  environ = child.env;
  execvp(child.argv[0], child.argv);
  child.failure = {2, WhyNotRun(child.argv[0], errno)};
  _exit(child.failure.error == ENOENT ? 127 : 126);
}

void MoveTo(UniqueFd fd, int slot) {
  dup3(fd.get(), slot, O_CLOEXEC);
  (void)fd.release();  // one of the low numbers may be a slot: the table goes with this process anyway
}

SpawnResult StartOne(const SpawnRequest& request, const std::pair<std::string, std::string>& extra_env,
                     pid_t keeper) {
  alignas(16) static char stack[256 << 10];
  std::vector<char*> argv, env;
  std::vector<std::string> env_text;
  for (const std::string& word : *request.argv) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  env_text.reserve(request.env->size() + 1);
  for (const auto& [name, value] : *request.env) env_text.push_back(name + "=" + value);
  env_text.push_back(extra_env.first + "=" + extra_env.second);
  for (const std::string& text : env_text) env.push_back(const_cast<char*>(text.c_str()));
  env.push_back(nullptr);
  SpawnResult result;
  Child child{&request, argv.data(), env.data(), keeper, {}, false};
  result.pid = clone(Become, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | CLONE_FILES | SIGCHLD, &child);
  result.failure = result.pid > 0 ? child.failure : SpawnFailure{3, errno};
  result.not_as_bound = child.not_as_bound;
  ProcessEntry entry;
  if (result.pid > 0 && ReadProcess(result.pid, &entry)) result.start_time = entry.start_time;
  return result;
}

// Highest first: descriptors that lie in the slots must be out of the way before a slot is taken.
void ClearSlots(std::vector<SpawnRequest>* requests, UniqueFd* results) {
  auto lift = [](UniqueFd* fd) {
    if (fd->valid() && fd->get() < kFirstOther) fd->reset(fcntl(fd->get(), F_DUPFD_CLOEXEC, kFirstOther));
  };
  for (SpawnRequest& request : *requests) {
    lift(&request.out);
    lift(&request.err);
    lift(&request.in);
  }
  lift(results);
}

[[noreturn]] void StarterMain(std::vector<SpawnRequest> requests,
                              const std::pair<std::string, std::string>& extra_env, UniqueFd results,
                              pid_t keeper) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != keeper) _exit(1);
  ResetSignals();
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  // Hidden like the keeper whose copy it is, so that even its own files in /proc belong to root.
  prctl(PR_SET_DUMPABLE, 1);
  WriteSmallFile("/proc/self/oom_score_adj", "500");  // the kernel should take a rank before the daemons
  prctl(PR_SET_DUMPABLE, 0);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);  // ranks gain nothing by set-uid programs (fault X6)
  umask(022);
  ClearSlots(&requests, &results);
  dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  MoveTo(std::move(results), kResults);
  for (uint32_t i = 0; i < requests.size(); ++i) {
    SpawnRequest& request = requests[i];
    dup3(request.err.valid() ? request.err.get() : request.out.get(), kErr, O_CLOEXEC);
    dup3(request.out.get(), kOut, O_CLOEXEC);
    dup3(request.in.valid() ? request.in.get() : 0, kIn, O_CLOEXEC);
    SpawnResult result = StartOne(request, extra_env, keeper);
    result.index = i;
    if (write(kResults, &result, sizeof(result)) != sizeof(result)) _exit(1);
  }
  _exit(0);
}

}  // namespace

void RaiseFileLimit() {
  if (getrlimit(RLIMIT_NOFILE, &given_files) != 0) return;
  const rlimit most = {given_files.rlim_max, given_files.rlim_max};
  setrlimit(RLIMIT_NOFILE, &most);
}

bool SpawnBatch::Start(std::vector<SpawnRequest> requests,
                       const std::pair<std::string, std::string>& extra_env, const Cgroup* cgroup) {
  UniqueFd write_end;
  if (!MakePipe(&results_, &write_end) || !SetNonBlocking(results_.get())) return false;
  const pid_t keeper = getpid();
  pid_ = cgroup != nullptr ? cgroup->Fork() : fork();
  if (pid_ == 0) StarterMain(std::move(requests), extra_env, std::move(write_end), keeper);
  return pid_ > 0;
}

pid_t SpawnWriter(const std::string& program, const std::vector<std::pair<std::string, std::string>>& env,
                  const std::string& cwd, const UniqueFd& arena, const UniqueFd& channel) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  ResetSignals();
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  umask(022);
  setsid();
  std::vector<std::string> text;
  for (const auto& [name, value] : env) text.push_back(name + "=" + value);
  std::vector<char*> pointers;
  for (std::string& line : text) pointers.push_back(line.data());
  pointers.push_back(nullptr);
  // Above both slots first, then into them; stderr stays the keeper's log.
  const int arena_fd = fcntl(arena.get(), F_DUPFD_CLOEXEC, 5),
            channel_fd = fcntl(channel.get(), F_DUPFD_CLOEXEC, 5);
  dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  dup2(2, 1);
  if (dup2(arena_fd, 3) < 0 || dup2(channel_fd, 4) < 0) _exit(126);
  if (!cwd.empty() && chdir(cwd.c_str()) != 0) _exit(126);
  if (given_files.rlim_max > 0) setrlimit(RLIMIT_NOFILE, &given_files);
  char* argv[] = {const_cast<char*>("gtrain-writer"), nullptr};
  execve(program.c_str(), argv, pointers.data());
  fprintf(stderr, "gtrain-keeper: cannot run %s: %s\n", program.c_str(), strerror(errno));
  _exit(errno == ENOENT ? 127 : 126);
}

std::vector<SpawnResult> SpawnBatch::Take() {
  char buffer[16 << 10];
  while (results_.valid()) {
    const ssize_t n = read(results_.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) results_.reset();
    if (n > 0) in_.append(buffer, static_cast<size_t>(n));
  }
  std::vector<SpawnResult> taken(in_.size() / sizeof(SpawnResult));
  if (!taken.empty()) memcpy(taken.data(), in_.data(), taken.size() * sizeof(SpawnResult));
  in_.erase(0, taken.size() * sizeof(SpawnResult));
  return taken;
}

FailureWords DescribeFailure(const SpawnFailure& failure, const std::vector<std::string>& argv,
                             const std::vector<std::pair<std::string, std::string>>& env,
                             const std::string& cwd) {
  const std::string why = strerror(failure.error);
  FailureWords words;
  words.code = failure.stage == 2 && failure.error == ENOENT ? 127 : 126;
  if (failure.stage == 1) {
    words.message = "cannot enter the working directory " + cwd + ": " + why;
    return words;
  }
  if (failure.stage == 3) {
    words.message = "cannot start a process: " + why;
    return words;
  }
  words.message = "cannot run " + argv[0] + ": " + why;
  if (argv[0].find('/') == std::string::npos) {
    for (const auto& [name, value] : env) {
      if (name == "PATH") words.detail = argv[0] + " was looked for in PATH=" + value + "\n";
    }
  } else if (failure.error == ENOENT) {
    words.message +=
        " (the file, or the interpreter in its first line, does not exist; working directory " + cwd + ")";
  }
  return words;
}

}  // namespace gtrain::keeper
