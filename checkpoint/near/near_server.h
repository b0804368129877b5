// Serves the copies that this machine keeps (near_folder.h) to ranks and writers of the same jobs on other
// machines, and takes theirs. ZeroMQ with CURVE; who may connect are the keys of jobs, and a key opens
// nothing but the copies of its own job.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "checkpoint/near/near_folder.h"
#include "checkpoint/near/near_wire.h"
#include "net/zmq/server.h"

namespace gtrain::ckpt {

// Thread-safe. One thread of its own serves; it waits for nobody, and a put that stops is given up.
class NearServer {
 public:
  // `listen`: "address:port"; port 0 is any. `keys`: of the node.
  static absl::StatusOr<std::unique_ptr<NearServer>> Start(const std::string& listen,
                                                           const net::KeyPair& keys);
  ~NearServer();

  int port() const { return port_; }
  // From now on the holder of the secret key of `public_key` may use copies of `job`, which lie in `folder`.
  // A job has one key; a repeated call changes nothing.
  void Allow(const std::string& job, const std::string& public_key, const std::string& folder,
             uint64_t bytes_max);
  void Forbid(const std::string& job);
  net::ServerCounters counters() const { return server_->counters(); }

 private:
  struct Job {
    std::string public_key;
    std::shared_ptr<NearFolder> folder;
  };
  struct Coming {
    ComingCopy copy;
    uint64_t at = 0;
    uint64_t bytes = 0;
    Instant heard;
  };

  struct Waiting {
    port::Route route;
    std::string message;
    Instant since;
  };

  NearServer(std::unique_ptr<net::ZmqServer> server, std::shared_ptr<net::KeyRegistry> registry, int port);
  void Run();
  std::string Answer(const port::Received& received);
  absl::Status Begin(const std::string& job, NearFolder* folder, const std::string& route,
                     const NearRequest& request);
  absl::Status Piece(const std::string& route, const NearRequest& request);
  void SendAnswers();
  void DropStopped();
  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::unique_ptr<net::ZmqServer> server_;  // of the thread
  const std::shared_ptr<net::KeyRegistry> registry_;
  const int port_;
  const RealClock clock_;
  std::map<std::string, Coming> coming_;  // by route; of the thread
  std::deque<Waiting> answers_;           // not sent yet; of the thread
  Mutex mu_;
  std::map<std::string, Job> jobs_ ABSL_GUARDED_BY(mu_);
  std::atomic<bool> ending_{false};
  UniqueFd wake_;
  std::thread thread_;
};

}  // namespace gtrain::ckpt
