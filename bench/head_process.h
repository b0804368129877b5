// The head of a bench: one real `gtrain head` on loopback, in a process of its own, which may be killed and
// started again at the same place. Not thread-safe.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"

namespace gtrain::bench {

// User and system time of all threads of this process so far.
double OwnCpuSeconds();
const RealClock& BenchClock();

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
