// A cluster whose daemons people start by hand (`gtrain head`, `gtrain agent`), known by its name in the list
// of contexts. Nothing of it is ever started here.
#pragma once
#include <string>

#include "launcher/exec/cluster_backend.h"

namespace gtrain::exec {

class NamedCluster final : public ClusterBackend {
 public:
  explicit NamedCluster(std::string name) : name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  bool is_own() const override { return false; }
  bool on_this_machine() const override { return false; }
  absl::StatusOr<RunningHead> Find(Start start, absl::Duration patience) override;
  absl::StatusOr<std::string> HeadDirectory() const override;

 private:
  const std::string name_;
};

}  // namespace gtrain::exec
