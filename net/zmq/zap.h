// Private to net/zmq: the thread that answers ZAP questions (RFC 27) and reads the server socket's
// monitor.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "net/zmq/key_registry.h"
#include "net/zmq/socket.h"

namespace gtrain::net {

struct GateCounters {
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> authenticated{0};
  std::atomic<uint64_t> denied{0};
  std::atomic<uint64_t> over_limit{0};
};

struct ConnectionLimits {
  int per_address, all;
};

// Started before anything is bound; every CURVE handshake of the context waits for its answer.
class Gate {
 public:
  // Takes over `monitor`. The thread ends with the context (zmq_ctx_shutdown).
  static absl::StatusOr<std::unique_ptr<Gate>> Start(void* context, Socket monitor,
                                                     std::shared_ptr<KeyRegistry> registry,
                                                     std::shared_ptr<const Clock> clock,
                                                     ConnectionLimits limits);
  ~Gate();                                    // after zmq_ctx_shutdown
  void StartCounting() { counting_ = true; }  // until then refusals are our own proof
  const GateCounters& counters() const { return counters_; }

 private:
  Gate(Socket zap, Socket monitor, std::shared_ptr<KeyRegistry> registry, std::shared_ptr<const Clock> clock,
       ConnectionLimits limits);
  void Run();
  bool AnswerOne();  // false: the context ended
  void CountEvents();
  void Opened(int fd);
  void Closed(int fd);
  void Refused(absl::string_view address, absl::string_view why);

  Socket zap_, monitor_;  // of the thread
  const std::shared_ptr<KeyRegistry> registry_;
  const std::shared_ptr<const Clock> clock_;
  const ConnectionLimits limits_;
  std::map<int, std::string> connections_;  // descriptor -> address
  std::map<std::string, int> per_address_;
  GateCounters counters_;
  std::atomic<bool> counting_{false};
  Instant last_log_{INT64_MIN / 2};
  uint64_t unlogged_ = 0;
  std::thread thread_;
};

}  // namespace gtrain::net
