// The user's own cluster, started by the first `gtrain launch` and ended by itself after the last job. Its
// head and agent are the ordinary `gtrain head` and `gtrain agent`; killing one and starting it with the same
// command line continues where it was. They look after each other (local_watch.h), so that no client is
// needed.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "net/zmq/client.h"

namespace gtrain::cli {

struct LocalCluster {
  std::string dir;
  net::ClientOptions options;
  int64_t head_pid = 0;  // tells one head from the next
};

// How the error begins that says that there is none.
inline constexpr char kNoLocalCluster[] = "no local cluster runs";

// `$XDG_STATE_HOME/gtrain/local`.
absl::StatusOr<std::string> LocalClusterDir();

// Starts what does not run; blocks at most about a minute. Unavailable with the last lines of the log when
// a daemon does not come up.
absl::StatusOr<LocalCluster> EnsureLocalCluster();

// Like EnsureLocalCluster, but NotFound when there is none, because the user did not launch anything.
absl::StatusOr<LocalCluster> ReviveLocalCluster();

// The running one; starts and changes nothing. NotFound when there is none; waits at most `patience` for a
// head that is being started again, and is Unavailable then.
absl::StatusOr<LocalCluster> FindLocalCluster(absl::Duration patience);

}  // namespace gtrain::cli
