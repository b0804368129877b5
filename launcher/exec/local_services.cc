#include "launcher/exec/local_services.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file_lock.h"
#include "base/status_macros.h"
#include "launcher/exec/local_daemons.h"
#include "launcher/exec/local_secrets.h"
#include "launcher/exec/local_watch.h"
#include "runtime/control/cluster_dir.h"

namespace gtrain::exec {
namespace {

constexpr absl::Duration kPredecessorPatience = absl::Seconds(10);  // a head that ends lets go of its store

}  // namespace

// It may start the agent, whose ranks inherit the limit on open files: that stays as the user had it.
absl::Status ServeLocalHead(head::HeadOptions options) {
  const absl::StatusOr<UniqueFd> lock =
      LockFile(LockPath(options.cluster_dir, Daemon::kHead), kPredecessorPatience);
  if (absl::IsUnavailable(lock.status())) {
    return absl::FailedPreconditionError(absl::StrCat("another head runs in ", options.cluster_dir, ": ",
                                                      lock.status().message(), "; stop that one first"));
  }
  GT_RETURN_IF_ERROR(lock.status());
  options.at_idle_end = [dir = options.cluster_dir] { DropSecrets(dir); };
  const LocalWatch watch = LocalWatch::OfHead(options.cluster_dir);
  return head::RunHead(options);
}

absl::Status ServeLocalAgent(agent::AgentOptions options) {
  const std::string dir = options.state_dir;
  GT_ASSIGN_OR_RETURN(const net::Endpoint endpoint, net::ReadEndpoint(dir + "/endpoint.json"));
  options.state_dir = LocalAgentDir(dir);
  options.head_endpoint = endpoint.endpoint;
  options.head_public_key = endpoint.head_public_key;
  options.cluster = endpoint.cluster;
  options.leave_without_head = absl::Seconds(20);
  options.share_copies = false;
  const LocalWatch watch = LocalWatch::OfAgent(dir, endpoint.endpoint);
  return agent::RunAgent(options);
}

}  // namespace gtrain::exec
