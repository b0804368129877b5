// The daemons of the local cluster, from inside: what `gtrain head --local` and `gtrain agent --local` are
// beyond an ordinary head and agent. The third, `gtrain local-watch`, is RunLocalWatch of local_watch.h.
#pragma once
#include "absl/status/status.h"
#include "runtime/agent/agent.h"
#include "runtime/head/head.h"

namespace gtrain::exec {

// Serves until the cluster ends. FailedPrecondition: another head runs in its directory.
absl::Status ServeLocalHead(head::HeadOptions options);

// `options.state_dir` is the directory of the cluster, which holds everything; the state of the agent is a
// folder in it. Serves until the agent is told to end, or has been without a head for 20 s and has no ranks.
absl::Status ServeLocalAgent(agent::AgentOptions options);

}  // namespace gtrain::exec
