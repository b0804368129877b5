// Starts one process for a rank. Never blocks on what the child does: whether exec worked arrives on a pipe.
#pragma once
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/cgroup.h"

namespace gtrain::keeper {

struct SpawnRequest {
  const std::vector<std::string>* argv = nullptr;
  const std::vector<std::pair<std::string, std::string>>* env = nullptr;
  std::vector<std::pair<std::string, std::string>> extra_env;
  std::string cwd;
  std::vector<int32_t> cpus;  // empty: not bound
  int out = -1;
  int err = -1;
  const Cgroup* cgroup = nullptr;
};

// What the child writes to the status pipe when it could not become the program. Nothing written = it did.
struct SpawnFailure {
  int stage;  // 1 directory, 2 program
  int error;  // errno
};

struct Spawned {
  pid_t pid = -1;
  UniqueFd pidfd;
  UniqueFd status;  // non-blocking
  int error = 0;    // errno when pid < 0
};

Spawned Spawn(const SpawnRequest& request);

// One sentence for people, and the shell's code for it (126 found but not runnable, 127 not found).
std::string DescribeFailure(const SpawnFailure& failure, const SpawnRequest& request, int* code);

}  // namespace gtrain::keeper
