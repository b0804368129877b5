// Starts processes for ranks. A starter, a fork of the keeper, starts a whole batch and exits; its processes
// become the keeper's children then (the keeper is their subreaper). So nothing that an exec waits for (a
// network file system, a slow disk) ever holds up the keeper, and settings that all ranks share (signals,
// cgroup, limits) are made once a batch.
#pragma once
#include <stdint.h>
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
  std::string cwd;
  std::vector<int32_t> cpus;       // empty: not bound
  UniqueFd out, err;               // `err` may be empty: the same as `out`
  const Cgroup* cgroup = nullptr;  // of its own, else the batch's
  UniqueFd in = {};                // empty: nothing to read
  bool owns_terminal = false;      // `in` is one and becomes its controlling terminal
};

// Why a child could not become the program.
struct SpawnFailure {
  int stage = 0;  // 0 it did, 1 directory, 2 program, 3 no process
  int error = 0;  // errno
};

// The result of starting requests[index].
struct SpawnResult {
  uint32_t index = 0;
  pid_t pid = -1;
  uint64_t start_time = 0;
  SpawnFailure failure;
  bool not_as_bound = false;  // it may run on others than SpawnRequest::cpus
};

// Owner thread only; nothing blocks.
class SpawnBatch {
 public:
  // False: errno says why no starter could be made. `extra_env` is added to every request's.
  bool Start(std::vector<SpawnRequest> requests, const std::pair<std::string, std::string>& extra_env,
             const Cgroup* cgroup);
  int fd() const { return results_.get(); }
  pid_t pid() const { return pid_; }  // of the starter, a child of ours
  // Results that arrived since the last call. A process that exited is in them before it can be waited for.
  std::vector<SpawnResult> Take();

 private:
  UniqueFd results_;
  pid_t pid_ = -1;
  std::string in_;
};

// A program of our own, in a session of its own, outside of every rank's control group; `arena` becomes its
// descriptor 3 and `channel` 4. Returns at once: a program that cannot be run exits with 126 or 127. -1:
// errno says why there is no process.
pid_t SpawnWriter(const std::string& program, const std::vector<std::pair<std::string, std::string>>& env,
                  const std::string& cwd, const UniqueFd& arena, const UniqueFd& channel);

// Raises this process's limit of open files as far as the system allows, because it needs several a rank.
// Started processes keep the limit from before: programs rely on small numbers. Call it once, before anything
// is started.
void RaiseFileLimit();

// Why a process was not started, for people.
struct FailureWords {
  std::string message;  // one sentence, said wherever the rank is spoken of
  std::string detail;   // lines that are said once
  int code = 126;       // the shell's: 126 found but not runnable, 127 not found
};
FailureWords DescribeFailure(const SpawnFailure& failure, const std::vector<std::string>& argv,
                             const std::vector<std::pair<std::string, std::string>>& env,
                             const std::string& cwd);

}  // namespace gtrain::keeper
