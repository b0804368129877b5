// The agent's side of a keeper: start one, connect, send commands, take reports, and clean up after one that
// died. Owner thread only; nothing here blocks except StartKeeper (one fork) and the sweep of one /proc scan.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "runtime/core/values/keeper_messages.h"

namespace gtrain::host {

// Starts the keeper as a session of its own, child of nobody here, so that it survives the caller.
// `dir` exists with mode 0700. It is ready once KeeperClient::Connect succeeds.
absl::Status StartKeeper(const std::string& binary, const std::string& dir, const std::string& job,
                         const std::vector<std::string>& extra_args = {});

// The keeper recorded in `dir`: Unavailable when no such process lives any more (pid and start time, fault
// P14).
absl::StatusOr<int64_t> KeeperPid(const std::string& dir);
std::string KeeperJob(const std::string& dir);

class KeeperClient {
 public:
  // Unavailable while the keeper does not listen (yet, or any more).
  static absl::StatusOr<std::unique_ptr<KeeperClient>> Connect(const std::string& dir);

  int fd() const { return fd_.get(); }
  bool wants_write() const { return !out_.empty(); }

  void Send(const keeper::Command& command);
  // Writes what the socket takes; Unavailable when the keeper is gone.
  absl::Status Flush();
  // All reports that have arrived; Unavailable when the keeper is gone and everything was read.
  absl::StatusOr<std::vector<keeper::Report>> Receive();

 private:
  explicit KeeperClient(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
  std::string in_, out_;
  bool ended_ = false;
};

// True for a keeper that left in order, after the last of its ranks and of all processes they had started.
bool LeftNobody(const std::string& dir);

// Cleans up after a dead keeper: its ranks are found by the socket path in their environment and killed.
// Returns how many still lived at this call; call again until 0 or your deadline.
size_t KillOrphans(const std::string& dir);

// Exits the keeper recorded and nobody acknowledged.
std::vector<keeper::Exited> ReadExitRecords(const std::string& dir);

// Removes the state directory of a keeper that is gone.
void RemoveKeeperDir(const std::string& dir);

}  // namespace gtrain::host
