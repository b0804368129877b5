#include "launcher/exec/cluster_backend.h"

#include "absl/strings/str_cat.h"
#include "launcher/exec/local_cluster.h"
#include "launcher/exec/named_cluster.h"

namespace gtrain::exec {

std::unique_ptr<ClusterBackend> BackendOf(const std::string& name) {
  if (name.empty() || name == kLocalName) return std::make_unique<LocalCluster>();
  return std::make_unique<NamedCluster>(name);
}

std::string NoneRuns(absl::string_view name) { return absl::StrCat("no ", name, " cluster runs"); }

}  // namespace gtrain::exec
