#include "runtime/keeper/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

struct Roots {
  std::string unified, memory_v1;  // directory of our own group in each hierarchy; empty: none
};

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

Roots FindRoots() {
  Roots roots;
  std::istringstream lines(ReadSmallFile("/proc/self/mounts", 1 << 20));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string device, where, type, options;
    words >> device >> where >> type >> options;
    const bool memory = type == "cgroup" && ("," + options + ",").find(",memory,") != std::string::npos;
    if (type != "cgroup2" && !memory) continue;
    const std::string own = OwnPath(memory ? "memory" : "");
    const std::string dir = own.empty() || own == "/" ? where : where + own;
    if (access((dir + "/cgroup.procs").c_str(), W_OK) != 0) continue;
    (memory ? roots.memory_v1 : roots.unified) = dir;
  }
  return roots;
}

const Roots& OwnRoots() {
  static const Roots roots = FindRoots();
  return roots;
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

void Cgroup::SweepStale() {
  for (const std::string& root : {OwnRoots().unified, OwnRoots().memory_v1}) {
    DIR* dir = root.empty() ? nullptr : opendir(root.c_str());
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

void Cgroup::Create(const std::string& name, uint64_t memory_limit) {
  const Roots& roots = OwnRoots();
  const std::string limit = std::to_string(memory_limit);
  if (!roots.unified.empty()) {
    unified_ = roots.unified + "/gtrain-" + name;
    if (mkdir(unified_.c_str(), 0755) != 0 && errno != EEXIST) unified_.clear();
    if (!unified_.empty() && memory_limit > 0) limited_ = WriteSmallFile(unified_ + "/memory.max", limit);
  }
  if (!roots.memory_v1.empty()) {
    memory_v1_ = roots.memory_v1 + "/gtrain-" + name;
    if (mkdir(memory_v1_.c_str(), 0755) != 0 && errno != EEXIST) memory_v1_.clear();
    if (!memory_v1_.empty() && memory_limit > 0) {
      limited_ = WriteSmallFile(memory_v1_ + "/memory.limit_in_bytes", limit) || limited_;
    }
  }
}

void Cgroup::Enter() const {
  if (!unified_.empty()) WriteSmallFile(unified_ + "/cgroup.procs", "0");
  if (!memory_v1_.empty()) WriteSmallFile(memory_v1_ + "/cgroup.procs", "0");
}

bool Cgroup::Kill() const { return !unified_.empty() && WriteSmallFile(unified_ + "/cgroup.kill", "1"); }

uint64_t Cgroup::OomKills() const {
  uint64_t kills = 0;
  if (!unified_.empty()) kills += CounterIn(ReadSmallFile(unified_ + "/memory.events"), "oom_kill");
  if (!memory_v1_.empty()) kills += CounterIn(ReadSmallFile(memory_v1_ + "/memory.oom_control"), "oom_kill");
  return kills;
}

void Cgroup::Remove() {
  if (!unified_.empty() && rmdir(unified_.c_str()) == 0) unified_.clear();
  if (!memory_v1_.empty() && rmdir(memory_v1_.c_str()) == 0) memory_v1_.clear();
}

}  // namespace gtrain::keeper
