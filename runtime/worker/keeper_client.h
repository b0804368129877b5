// One rank's connection to its keeper: frames of runtime/keeper/rank_protocol.h over a unix socket.
#pragma once
#include <cstdint>
#include <deque>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::worker {

struct KeeperFrame {
  uint16_t kind = 0;
  std::string body;
  UniqueFd fd;  // kKeeperArena, kKeeperWriter and kKeeperChannel only
};

// Not thread-safe: the session's background thread owns it. Nothing blocks.
class KeeperClient {
 public:
  static absl::StatusOr<KeeperClient> Connect(const std::string& path);

  int fd() const { return fd_.get(); }
  bool wants_to_write() const { return !out_.empty(); }

  void Queue(uint16_t kind, const std::string& body);
  // Writes what the socket takes. Unavailable: the keeper is gone.
  absl::Status Write();
  // Reads what is there. Unavailable: the keeper is gone or sends nonsense.
  absl::Status Read();
  // The next whole frame, if there is one.
  bool Next(KeeperFrame* frame);

 private:
  explicit KeeperClient(UniqueFd fd) : fd_(std::move(fd)) {}
  absl::Status Check() const;

  UniqueFd fd_;
  std::string out_;
  std::string in_;
  std::deque<UniqueFd> fds_;  // received, in the order of their frames
};

}  // namespace gtrain::worker
