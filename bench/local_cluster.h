// Commands that a bench starts, and a local cluster of its own for them.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::bench {

// Starts a command with its output thrown away.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& words);
// Waits for a child of ours; past the deadline it is killed.
absl::Status WaitFor(pid_t pid, absl::string_view what, absl::Duration deadline = absl::Seconds(20));
// One after the other; once one failed the rest have a second. The first error.
absl::Status WaitForAll(const std::vector<pid_t>& children, absl::string_view what, absl::Duration deadline);
// Spawn and WaitFor; a failure has what the command wrote to stderr, the last 2,000 bytes of it.
absl::Status Run(const std::vector<std::string>& words, absl::Duration deadline = absl::Seconds(20));

bool Executable(const std::string& path);

// The peers' launchers, where Debian has them.
inline constexpr const char* kMpirunOpenMpi = "/usr/bin/mpirun.openmpi";
inline constexpr const char* kMpirunMpich = "/usr/bin/mpirun.mpich";
// Root starts benches in containers; Open MPI asks whether that is meant.
void AllowOpenMpiAsRoot();

// A home of its own under the temporary folder. Its local cluster ends before the home is removed.
class Home {
 public:
  // Makes it and works in it.
  absl::Status Make();
  // Its daemons would end some seconds after their last job; here they are asked to.
  void Remove();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A cluster kept alive by one waiting job, so that what is measured is a job and not the start of daemons.
class LocalCluster {
 public:
  explicit LocalCluster(const std::string& folder);
  absl::Status Start();
  void Stop();
  const std::string& gtrain() const { return gtrain_; }
  const Home& home() const { return home_; }

 private:
  const std::string gtrain_;
  Home home_;
};

}  // namespace gtrain::bench
