// The user's own cluster, started by the first `gtrain launch` and ended by itself after the last job. Its
// head and agent are the ordinary `gtrain head` and `gtrain agent`; killing one and starting it with the same
// command line continues where it was. They look after each other (local_watch.h), so that no client is
// needed.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "launcher/exec/cluster_backend.h"

namespace gtrain::exec {

inline constexpr char kLocalName[] = "local";

class LocalCluster final : public ClusterBackend {
 public:
  const std::string& name() const override { return name_; }
  bool is_own() const override { return true; }
  bool on_this_machine() const override { return true; }
  // Unavailable with the last lines of the log when a daemon does not come up.
  absl::StatusOr<RunningHead> Find(Start start, absl::Duration patience) override;
  // `$XDG_STATE_HOME/gtrain/local`.
  absl::StatusOr<std::string> HeadDirectory() const override;

  // Whether the keys of its daemons and its administrator are private and whole, or not made yet.
  absl::Status CheckKeys() const;

 private:
  const std::string name_ = kLocalName;
};

}  // namespace gtrain::exec
