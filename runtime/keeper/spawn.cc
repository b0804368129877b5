#include "runtime/keeper/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

void ResetSignals() {
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) sigaction(signal, &standard, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

void Bind(const std::vector<int32_t>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int32_t cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  sched_setaffinity(0, sizeof(set), &set);
}

[[noreturn]] void Fail(int status, int stage) {
  const SpawnFailure failure{stage, errno};
  ssize_t ignored = write(status, &failure, sizeof(failure));
  (void)ignored;
  _exit(errno == ENOENT ? 127 : 126);
}

// Out of reach of the keeper's descriptors, terminal and signals: a session of its own, nothing inherited but
// 0, 1, 2.
[[noreturn]] void Child(const SpawnRequest& request, char** argv, char** env, int status) {
  setsid();
  ResetSignals();
  if (request.cgroup != nullptr) request.cgroup->Enter();
  Bind(request.cpus);
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  WriteSmallFile("/proc/self/oom_score_adj", "500");  // the kernel should take a rank before the daemons
  umask(022);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(null, 0);
  dup2(request.out, 1);
  dup2(request.err, 2);
  syscall(SYS_close_range, 3u, ~0u, 4u /* CLOSE_RANGE_CLOEXEC */);
  if (!request.cwd.empty() && chdir(request.cwd.c_str()) != 0) Fail(status, 1);
  environ = env;
  execvp(argv[0], argv);
  Fail(status, 2);
}

std::string PathOf(const SpawnRequest& request) {
  for (const auto& [name, value] : *request.env) {
    if (name == "PATH") return value;
  }
  return "";
}

}  // namespace

Spawned Spawn(const SpawnRequest& request) {
  Spawned spawned;
  std::vector<char*> argv, env;
  std::vector<std::string> env_text;
  for (const std::string& word : *request.argv) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  for (const auto& list : {*request.env, request.extra_env}) {
    for (const auto& [name, value] : list) env_text.push_back(name + "=" + value);
  }
  for (const std::string& text : env_text) env.push_back(const_cast<char*>(text.c_str()));
  env.push_back(nullptr);
  UniqueFd status_write;
  if (!MakePipe(&spawned.status, &status_write)) {
    spawned.error = errno;
    return spawned;
  }
  spawned.pid = fork();
  if (spawned.pid == 0) Child(request, argv.data(), env.data(), status_write.get());
  if (spawned.pid < 0) {
    spawned.error = errno;
    return spawned;
  }
  spawned.pidfd.reset(PidfdOpen(spawned.pid));
  SetNonBlocking(spawned.status.get());
  return spawned;
}

std::string DescribeFailure(const SpawnFailure& failure, const SpawnRequest& request, int* code) {
  *code = failure.stage == 2 && failure.error == ENOENT ? 127 : 126;
  const std::string why = strerror(failure.error);
  if (failure.stage == 1) return "cannot enter the working directory " + request.cwd + ": " + why;
  std::string text = "cannot run " + (*request.argv)[0] + ": " + why;
  if ((*request.argv)[0].find('/') == std::string::npos) {
    text += "; it was looked for in PATH=" + PathOf(request);
  } else if (failure.error == ENOENT) {
    text += " (the file, or the interpreter in its first line, does not exist; working directory " +
            request.cwd + ")";
  }
  return text;
}

}  // namespace gtrain::keeper
