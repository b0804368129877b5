// The entry of libgtrain_net.so, which connects the processes of one job and is loaded on demand, since
// libgtrain links no ZeroMQ. Built together with its loader; the number catches a stray library.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "net/port/transport.h"

namespace gtrain::port {

inline constexpr uint32_t kNetModuleAbi = 1;
inline constexpr char kNetModuleEntry[] = "gtrain_net_module";

struct NetOptions {
  std::string secret;  // of the job, 64 hex digits: only who has it connects, and is connected to
  int64_t message_bytes_max = 0;
  int queue_messages_max = 0;  // a connection, each way
};

struct NetModule {
  uint32_t abi = kNetModuleAbi;
  // `listen`: "address:port"; port 0 is any. `endpoint` becomes what others connect to.
  absl::StatusOr<std::unique_ptr<ServerTransport>> (*serve)(const std::string& listen,
                                                            const NetOptions& options,
                                                            std::string* endpoint) = nullptr;
  // Does not wait for the connection.
  absl::StatusOr<std::unique_ptr<ClientTransport>> (*connect)(const std::string& endpoint,
                                                              const NetOptions& options) = nullptr;
};

}  // namespace gtrain::port
