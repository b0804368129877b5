// The three processes of the local cluster: `gtrain head`, `gtrain agent` and `gtrain local-watch`, in
// sessions of their own, with state, keys and logs in one directory. Whether one lives is read from locks,
// which end with their process; process ids are for people alone.
//
//   <dir>/start.lock   held while somebody looks and starts
//   <dir>/head.lock, endpoint.json   held by the head from its first moment; locked once it serves
//   <dir>/agent/lock   held by the agent, whose state directory agent/ is
//   <dir>/watch.lock   held by the watch
//   <dir>/head.log agent.log watch.log  their stderr; the rest is net::InitCluster's
#pragma once
#include <sys/types.h>

#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gtrain::exec {

enum class Daemon { kHead, kAgent, kWatch };

std::string LocalAgentDir(const std::string& dir);
std::string LockPath(const std::string& dir, Daemon daemon);

// Whether it serves; an agent and a watch serve from their first moment.
bool Runs(const std::string& dir, Daemon daemon);

// Starts those of `wanted` that do not run, the head first; the caller holds start.lock. Waits until they
// serve, at most half a minute each: Unavailable with the last lines of its log when one does not come up,
// Cancelled once `stop` says so. Adds what it started to `children`, for the caller to reap.
absl::Status StartMissing(const std::string& dir, const std::vector<Daemon>& wanted,
                          std::vector<pid_t>* children = nullptr, const std::stop_token& stop = {});

// An address of the loopback interface that works, as in "ADDRESS:PORT". Unavailable: none does.
absl::StatusOr<std::string> LoopbackAddress();

}  // namespace gtrain::exec
