// The connections over shared memory that others have made to this process (link.h). Not thread-safe; threads
// may take turns under a lock. Nothing blocks. Cost: HasWork, Arm and Disarm look at each connection.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"
#include "net/port/transport.h"
#include "net/shm/link.h"

namespace gtrain::net {

class ShmServer {
 public:
  static absl::StatusOr<std::unique_ptr<ShmServer>> Start(const ShmOptions& options);
  const std::string& name() const { return listener_->name(); }
  static bool IsRoute(const port::Route& route);

  // As ServerTransport::Send.
  absl::Status Send(const port::Route& route, absl::string_view message);
  // Each connection in its turn. Of what is received nothing says whose key it is.
  std::optional<port::Received> Receive();
  // More of what was sent goes out, too, with Receive.
  bool HasWork() const;
  size_t connections() const { return links_.size(); }

  // As those of ShmLink.
  bool Arm();
  void Disarm();
  int fd() const { return epoll_.get(); }
  void OnReadable();

 private:
  ShmServer() = default;
  using Links = std::map<std::string, std::unique_ptr<ShmLink>>;
  Links::iterator Drop(Links::iterator link);

  std::unique_ptr<ShmListener> listener_;
  UniqueFd epoll_;
  uint64_t last_ = 0;
  Links links_;         // by route
  std::string served_;  // the one that was received from last
};

}  // namespace gtrain::net
