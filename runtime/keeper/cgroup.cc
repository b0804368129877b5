// One directory in each hierarchy that helps: v2, and of v1 the controllers below. A machine may have either
// or both (hybrid); v2 without a controller has no file for its limit, so writing it does nothing.
#include "runtime/keeper/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "base/unique_fd.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr char kUnified[] = "";
constexpr const char* kV1Controllers[] = {"memory", "pids", "freezer"};
constexpr int kFreezeTries = 100;

bool use_unified = true;

// Our path inside a hierarchy: "0::/path" or "4:memory:/path".
std::string OwnPath(const std::string& controller) {
  std::istringstream lines(ReadSmallFile("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (names == "," + controller + "," ||
        (!controller.empty() && names.find("," + controller + ",") != names.npos)) {
      return line.substr(second + 1);
    }
  }
  return "";
}

// Hierarchy -> directory of our own group in it, where we may write.
std::map<std::string, std::string> FindRoots() {
  std::map<std::string, std::string> roots;
  std::istringstream lines(ReadSmallFile("/proc/self/mounts", 1 << 20));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string device, where, type, options;
    words >> device >> where >> type >> options;
    auto take = [&](const std::string& hierarchy) {
      const std::string own = OwnPath(hierarchy);
      const std::string dir = own.empty() || own == "/" ? where : where + own;
      if (access((dir + "/cgroup.procs").c_str(), W_OK) == 0) roots[hierarchy] = dir;
    };
    if (type == "cgroup2") take(kUnified);
    if (type != "cgroup") continue;
    for (const char* controller : kV1Controllers) {
      if (("," + options + ",").find("," + std::string(controller) + ",") != std::string::npos)
        take(controller);
    }
  }
  return roots;
}

const std::map<std::string, std::string>& OwnRoots() {
  static const std::map<std::string, std::string> roots = FindRoots();
  return roots;
}

void Limit(const std::string& file, uint64_t limit) {
  if (limit > 0) WriteSmallFile(file, std::to_string(limit));
}

// Frozen, nobody can fork while each is sent SIGKILL; it takes effect at the thaw (faults P6, P10, P12).
void FreezeAndKill(const std::string& dir) {
  WriteSmallFile(dir + "/freezer.state", "FROZEN");
  for (int i = 0; i < kFreezeTries; ++i) {
    if (ReadSmallFile(dir + "/freezer.state").rfind("FROZEN", 0) == 0) break;
    usleep(100);  // FREEZING: a member in a system call that cannot be interrupted must not hold us up
  }
  std::istringstream pids(ReadSmallFile(dir + "/cgroup.procs", 4 << 20));
  for (pid_t pid = 0; pids >> pid;) kill(pid, SIGKILL);
  WriteSmallFile(dir + "/freezer.state", "THAWED");
}

uint64_t CounterIn(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  std::string key;
  uint64_t value = 0;
  while (lines >> key >> value) {
    if (key == name) return value;
  }
  return 0;
}

}  // namespace

void Cgroup::UseUnified(bool use) { use_unified = use; }

// The first move of a process after a while takes the kernel 7 to 15 ms: it waits until every CPU has let go
// of the lock that forks take. While nobody has been moved, so that ranks need not wait: into the group it is
// in.
void Cgroup::WarmUp() {
  if (OwnRoots().empty() || fork() != 0) return;
  for (const auto& [hierarchy, root] : OwnRoots()) {
    if (WriteSmallFile(root + "/cgroup.procs", "0")) break;
  }
  _exit(0);
}

void Cgroup::SweepStale() {
  for (const auto& [hierarchy, root] : OwnRoots()) {
    DIR* dir = opendir(root.c_str());
    if (dir == nullptr) continue;
    while (dirent* item = readdir(dir)) {
      int pid = 0;
      ProcessEntry keeper;
      if (sscanf(item->d_name, "gtrain-%d-", &pid) != 1 || ReadProcess(pid, &keeper)) continue;
      rmdir((root + "/" + item->d_name).c_str());
    }
    closedir(dir);
  }
}

void Cgroup::Create(const std::string& name, const CgroupLimits& limits) {
  if (!made_.empty()) return;
  for (const auto& [hierarchy, root] : OwnRoots()) {
    if (hierarchy == kUnified && !use_unified) continue;
    const auto unified = made_.find(kUnified);  // sorts first
    if (hierarchy == "freezer" && unified != made_.end() &&
        access((unified->second + "/cgroup.kill").c_str(), W_OK) == 0) {
      continue;
    }
    const std::string dir = root + "/gtrain-" + name;
    if (mkdir(dir.c_str(), 0755) == 0 || errno == EEXIST) made_[hierarchy] = dir;
  }
  for (const auto& [hierarchy, dir] : made_) {
    const bool unified = hierarchy == kUnified;
    if (unified || hierarchy == "pids") Limit(dir + "/pids.max", limits.processes);
    if (unified) Limit(dir + "/memory.max", limits.memory);
    if (hierarchy == "memory") Limit(dir + "/memory.limit_in_bytes", limits.memory);
  }
}

bool Cgroup::LimitsMemory() {
  Cgroup probe;
  probe.Create(std::to_string(getpid()) + "-0", {});
  return std::any_of(probe.made_.begin(), probe.made_.end(), [](const auto& made) {
    const char* file = made.first == kUnified ? "/memory.max" : "/memory.limit_in_bytes";
    return access((made.second + file).c_str(), W_OK) == 0;
  });
}

// Being born in the group costs nothing (WarmUp says what moving costs), but v1 does not have it.
pid_t Cgroup::Fork() const {
  const auto unified = made_.find(kUnified);
  UniqueFd group;
  if (unified != made_.end()) group.reset(open(unified->second.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  pid_t pid = -1;
  if (group.valid()) {
    clone_args args = {};
    args.flags = CLONE_INTO_CGROUP;
    args.exit_signal = SIGCHLD;
    args.cgroup = static_cast<uint64_t>(group.get());
    pid = static_cast<pid_t>(syscall(SYS_clone3, &args, sizeof(args)));
  }
  const bool born_inside = pid >= 0;
  if (!born_inside) pid = fork();  // no v2, an old kernel, or a sandbox without clone3
  if (pid != 0) return pid;
  for (const auto& [hierarchy, dir] : made_) {
    if (hierarchy != kUnified || !born_inside) WriteSmallFile(dir + "/cgroup.procs", "0");
  }
  return 0;
}

void Cgroup::Enter() const {
  for (const auto& [hierarchy, dir] : made_) WriteSmallFile(dir + "/cgroup.procs", "0");
}

bool Cgroup::Kill() const {
  const auto unified = made_.find(kUnified);
  if (unified != made_.end() && WriteSmallFile(unified->second + "/cgroup.kill", "1")) return true;
  const auto freezer = made_.find("freezer");
  if (freezer == made_.end()) return false;
  FreezeAndKill(freezer->second);
  return true;
}

uint64_t Cgroup::OomKills() const {
  uint64_t kills = 0;
  for (const auto& [hierarchy, dir] : made_) {
    if (hierarchy == kUnified) kills += CounterIn(ReadSmallFile(dir + "/memory.events"), "oom_kill");
    if (hierarchy == "memory") kills += CounterIn(ReadSmallFile(dir + "/memory.oom_control"), "oom_kill");
  }
  return kills;
}

bool Cgroup::MetItsLimit() const {
  return std::any_of(made_.begin(), made_.end(), [](const auto& made) {
    const auto& [hierarchy, dir] = made;
    if (hierarchy == kUnified) return CounterIn(ReadSmallFile(dir + "/memory.events"), "oom") > 0;
    return hierarchy == "memory" && strtoull(ReadSmallFile(dir + "/memory.failcnt").c_str(), nullptr, 10) > 0;
  });
}

void Cgroup::Remove() {
  for (auto it = made_.begin(); it != made_.end();) {
    it = rmdir(it->second.c_str()) == 0 ? made_.erase(it) : std::next(it);
  }
}

}  // namespace gtrain::keeper
