// The head of a bench: one real `gtrain head` on loopback, in a process of its own, which may be killed and
// started again at the same place. Not thread-safe.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "net/zmq/keys.h"
#include "runtime/control/cluster_dir.h"

namespace gtrain::bench {

// User and system time of all threads of this process so far.
double OwnCpuSeconds();
const RealClock& BenchClock();

// Raises this process's limit of open files as far as it goes. ResourceExhausted: `clients` ZeroMQ clients
// need more, 9 each; `whose` says what they are.
absl::Status AllowFilesOf(size_t clients, const std::string& whose);

// A new cluster in a folder of its own, whose head lets in nodes "node-0", "node-1", ... with these keys. The
// folder goes with it.
class BenchCluster {
 public:
  BenchCluster() = default;
  ~BenchCluster();
  BenchCluster(const BenchCluster&) = delete;
  BenchCluster& operator=(const BenchCluster&) = delete;

  absl::Status Make(int nodes);  // once
  const std::string& home() const { return home_; }
  const net::ClusterFiles& files() const { return files_; }
  const std::vector<net::KeyPair>& keys() const { return keys_; }

 private:
  std::string home_;
  net::ClusterFiles files_;
  std::vector<net::KeyPair> keys_;
};

class HeadProcess {
 public:
  // `flags` follow `gtrain head --dir DIR --listen ADDRESS`. It listens below the ephemeral ports: a client
  // that looks for a dead head must not find itself there.
  HeadProcess(std::string gtrain, std::string dir, std::vector<std::string> flags = {});

  // Unavailable: it did not come up within a minute; its log is DIR/head.log.
  absl::Status Start();
  void Kill(int signal);

  const std::string& endpoint() const { return listen_; }
  std::string log() const { return dir_ + "/head.log"; }
  double CpuSeconds() const;                        // user and system time of all its threads so far
  double MemoryMiB(const std::string& line) const;  // "VmRSS:", "VmHWM:"

 private:
  const std::string gtrain_, dir_;
  const std::vector<std::string> flags_;
  std::string listen_;
  pid_t pid_ = -1;
};

}  // namespace gtrain::bench
