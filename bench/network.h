// Machines for a bench: network namespaces joined by a switch, or by leaf switches with an uplink each to one
// in the middle, every cable limited in both directions. Root
// only; needs ip(8), tc(8) and taskset(1). Not thread-safe.
#pragma once
#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gtrain::bench {

// Forks: body runs on that core, or below 0 on any, and ends with this process. The exit status is 0 if it is
// OK.
pid_t StartOnCore(int core, const std::function<absl::Status()>& body);

// Named after this process; taken away at the end.
class Network {
 public:
  // With `leaves`, equally many machines that follow each other are on each; else all are on one switch.
  explicit Network(int machines, int leaves = 0);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // FailedPrecondition: not root, or without ip or tc.
  absl::Status Make();
  // In tc's words. `burst`: what a cable that was idle lets through at the speed of memory.
  absl::Status Limit(const std::string& rate, const std::string& burst) const;
  absl::Status LimitUplinks(const std::string& rate, const std::string& burst) const;

  int machines() const { return machines_; }
  std::string NameOf(int machine) const;
  static std::string AddressOf(int machine);
  // Each rank stays on one core, ours and the peers': where the scheduler happens to put four ranks on two
  // cores is worth a factor of two.
  static int CoreOf(int machine);
  // The words with which a command on that machine begins. The interface there is eth0.
  std::vector<std::string> Inside(int machine) const;
  // Forks: body runs on that machine, on its core or this one, and ends with this process. The exit status is
  // 0 if it is OK.
  pid_t Start(int machine, const std::function<absl::Status()>& body) const;
  pid_t StartOnCore(int machine, int core, const std::function<absl::Status()>& body) const;

  // A bound for all algorithms: machine 0 sends so many bytes and machine 1 answers with one; with `all` each
  // machine to the next at the same time, as in a collective. Medians of microseconds, of the slowest sender.
  absl::StatusOr<std::vector<double>> PlainTcp(const std::vector<size_t>& bytes, int times,
                                               bool all = false) const;

  struct Calls {
    size_t bytes;
    int times;  // at least 1
  };
  // A bound for small all-reduces: recursive doubling of floats over plain sockets that are polled without
  // sleep, each call after a barrier of the same kind. Medians of microseconds, of the slowest machine. The
  // number of machines is a power of two.
  absl::StatusOr<std::vector<double>> PlainDoubling(const std::vector<Calls>& sizes) const;

 private:
  absl::Status Add(const std::string& name);
  absl::Status AddBridge(const std::string& name);
  absl::Status LimitEnd(const std::string& name, const std::string& device, const std::string& rate,
                        const std::string& burst) const;

  const int machines_, leaves_;
  const std::string name_, switch_;
  std::vector<std::string> made_;
};

}  // namespace gtrain::bench
