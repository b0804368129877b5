// Which cluster a command talks to, and the connection to its head.
//
//   --context NAME, else $GTRAIN_CONTEXT, else "current" of ~/.config/gtrain/contexts.json,
//   else the user's own local cluster.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "launcher/cli/args.h"
#include "launcher/exec/cluster_backend.h"
#include "runtime/control/control_client.h"

namespace gtrain::cli {

using exec::kDeadHeadPatience;
using exec::Start;

struct Cluster {
  std::unique_ptr<exec::ClusterBackend> backend;
  exec::RunningHead head;
  std::unique_ptr<net::ControlClient> client;
  const std::string& name() const { return backend->name(); }
  bool is_own() const { return backend->is_own(); }
};

Flag ContextFlag();
// The cluster that `args` choose; nothing is looked for or started yet.
absl::StatusOr<std::unique_ptr<exec::ClusterBackend>> ChosenBackend(const Args& args);
absl::StatusOr<Cluster> OpenCluster(const Args& args, Start start);
// Connects to the head that runs now, if it is another one than before.
absl::Status Reconnect(Cluster& cluster, Start start);

// Directory of the head on this machine: --dir, else that of the chosen context.
absl::StatusOr<std::string> HeadDirectory(const Args& args);

// Internal unless `text` is a JSON object with that key.
absl::Status ExpectKey(const std::string& text, const std::string& key);

// Unavailable, with what to do about it.
absl::Status NobodyListens(const Cluster& cluster);

// One request; an answer with ok = false becomes a Status of its code. Returns the JSON text.
absl::StatusOr<std::string> Ask(Cluster& cluster, core::ClientRequestBody body,
                                absl::Duration timeout = absl::Seconds(20));
// Several requests under way together.
std::vector<absl::StatusOr<std::string>> AskAll(Cluster& cluster, std::vector<core::ClientRequestBody> bodies,
                                                absl::Duration timeout);

}  // namespace gtrain::cli
