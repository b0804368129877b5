// Reads and checks the agent's own machine: addresses, ports, identity of the boot, log files, stacks. Free
// functions.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/rng.h"
#include "base/unique_fd.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/core/values/messages.h"

namespace gtrain::agent {

std::string BootId();
std::string Hostname();

// Where this node's jobs keep copies of checkpoints in memory; empty: nowhere (no /dev/shm).
std::string NearMemory(const NodeId& node);

// Local address of the route to host:port (nothing is sent); "127.0.0.1" when there is none.
std::string LocalAddressTowards(const std::string& endpoint);

// Can a program listen on `port` now?
bool PortIsFree(int port);
// Finds up to `count` free ports outside the range the kernel gives to outgoing connections (fault: a
// MASTER_PORT taken by a passing connection).
std::vector<int> ProbeFreePorts(int count, Rng* rng);

// How many ranks of one job this machine can hold at all, and what sets the bound.
struct RankRoom {
  int64_t ranks = 0;
  std::string why;
};
RankRoom RoomForRanks();
// The sentence with which so many ranks are refused here; empty: they can be held.
std::string TooManyRanks(size_t ranks);

// The file that execvp would run for `name`, of the absolute folders in `path`; empty: none, or `name` is a
// path itself. Symbolic links of its folder are followed, but not of the file: the Python of a virtual
// environment is one.
std::string FindProgram(const std::string& name, const std::string& path);

// Makes the folders that a generation needs in its run directory: for its logs and for its ranks' files. No
// other user can have prepared them (base/folder.h); PermissionDenied otherwise. FailedPrecondition: the
// directory is another job's (base/run_folder.h), or the ranks of this node would append to files that were
// there before the job: `fresh` says that the job has written nothing there.
absl::Status MakeRunDir(const core::GenerationGrant& grant, const ClusterId& cluster, const NodeId& self,
                        bool fresh);
// Checks in the same way the directory of a log that is to be read. OK if the directory is not there.
absl::Status CheckRunDirOfLog(const std::string& log_path, const ClusterId& cluster, const JobId& job);

// A secret is the content of its file but for one line end, with which editors and `echo` end a file.
inline constexpr size_t kSecretBytesMax = 64 << 10;
absl::StatusOr<std::string> ReadSecret(const std::string& path);

struct LogPiece {
  std::string text;
  uint64_t next_offset = 0;
  bool at_end = false;
};
// Opens a log file, for readers of many pieces of one. NotFound: nothing was written to it yet.
absl::StatusOr<UniqueFd> OpenLog(const std::string& path);
// Reads at most `bytes_max` from `offset` (0: 256 KiB; less than 4 are 4), cut between UTF-8 characters.
// Bytes that were punched out are named, not returned. `path` is for messages. The memory of *piece is used
// again.
absl::Status ReadLogPiece(const UniqueFd& log, const std::string& path, uint64_t offset, uint64_t bytes_max,
                          LogPiece* piece);
absl::StatusOr<LogPiece> ReadLogPiece(const std::string& path, uint64_t offset, uint64_t bytes_max = 0);

// Looks at what ranks do: for each the processor time of all its processes, and where it waits; where it only
// waits for a process that it started, where that process waits. One pass over /proc: a few small files a
// process of the machine.
std::vector<core::RankSeen> LookAtProcesses(const std::vector<std::pair<int, int64_t>>& rank_and_pid);

}  // namespace gtrain::agent
