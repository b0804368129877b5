// The user's own cluster: a head and an agent on this machine, started by the first `gtrain launch` and ended
// by themselves after the last job. They are the ordinary `gtrain head` and `gtrain agent`, in sessions of
// their own, with state, keys and logs in one directory; killing one and starting it with the same command
// line continues where it was.
//
//   <dir>/start.lock   held while one command looks and starts
//   <dir>/head.log agent.log  their stderr
//   <dir>/agent/, agent.pid  of the agent; the rest is net::InitCluster's
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "runtime/zmq/client.h"

namespace gtrain::cli {

struct LocalCluster {
  std::string dir;
  net::ClientOptions options;
};

// `$XDG_STATE_HOME/gtrain/local`.
absl::StatusOr<std::string> LocalClusterDir();

std::string LocalAgentDir(const std::string& dir);

// Starts what does not run; blocks at most about a minute. Unavailable with the last lines of the log when
// a daemon does not come up.
absl::StatusOr<LocalCluster> EnsureLocalCluster();

// The running one. Starts a head or agent that died without saying goodbye; NotFound when there is none.
absl::StatusOr<LocalCluster> FindLocalCluster();

// Whether the head that wrote `<dir>/endpoint.json` is a living process.
bool LocalHeadRuns(const std::string& dir);

// Starts an agent that died, beside a head that runs; does nothing when the head does not run: while it is
// away or on its way out, nobody can say whether an agent is wanted. True when one was started. Cheap when
// all is well.
absl::StatusOr<bool> ReviveLocalAgent(const std::string& dir);

// Written by `gtrain agent --local` about itself, removed at a clean end.
absl::Status WriteAgentPid(const std::string& dir);
void RemoveAgentPid(const std::string& dir);

// True for a living, not defunct process whose command line is `gtrain <verb> ...`.
bool RunsVerb(int64_t pid, const std::string& verb);

}  // namespace gtrain::cli
