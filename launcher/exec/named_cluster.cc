#include "launcher/exec/named_cluster.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file_lock.h"
#include "base/status_macros.h"
#include "launcher/exec/contexts.h"
#include "runtime/control/cluster_dir.h"

namespace gtrain::exec {
namespace {

constexpr absl::Duration kHeadPoll = absl::Milliseconds(50);

// A head that was killed leaves its file, which nobody holds then; it may just be started again.
absl::Status AwaitHead(const Context& context, absl::Duration patience,
                       absl::StatusOr<net::Endpoint>& endpoint) {
  const std::string path = context.dir + "/endpoint.json";
  const RealClock clock;
  const Instant deadline = clock.Now() + patience;
  while (endpoint.ok() && endpoint->IsHere() && !IsLocked(path)) {
    if (clock.Now() >= deadline) {
      return absl::UnavailableError(absl::StrCat(
          "the head of context ", context.name, " (process ", endpoint->pid, ", at ", endpoint->endpoint,
          ") has died. Ranks go on without it. Start it again: gtrain head --context ", context.name));
    }
    absl::SleepFor(kHeadPoll);
    endpoint = net::ReadEndpoint(path);
  }
  return endpoint.status();
}

}  // namespace

absl::StatusOr<RunningHead> NamedCluster::Find(Start /*start*/, absl::Duration patience) {
  GT_ASSIGN_OR_RETURN(const Context context, FindContext(name_));
  RunningHead head;
  head.dir = context.dir;
  head.options.endpoint = context.endpoint;
  head.options.server_public_key = context.head_public_key;
  if (!context.dir.empty()) {
    absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(context.dir + "/endpoint.json");
    if (!endpoint.ok()) {
      return absl::UnavailableError(absl::StrCat("the head of context ", context.name, " does not run (",
                                                 endpoint.status().message(),
                                                 "); start it with: gtrain head --context ", context.name));
    }
    GT_RETURN_IF_ERROR(AwaitHead(context, std::min(patience, kDeadHeadPatience), endpoint));
    head.options.endpoint = endpoint->endpoint;
    head.options.server_public_key = endpoint->head_public_key;
  }
  const std::string key_file = context.key_file.empty() ? context.dir + "/admin.key" : context.key_file;
  GT_ASSIGN_OR_RETURN(head.options.keys, net::LoadKeyPair(key_file));
  return head;
}

absl::StatusOr<std::string> NamedCluster::HeadDirectory() const {
  GT_ASSIGN_OR_RETURN(const Context context, FindContext(name_));
  if (!context.dir.empty()) return context.dir;
  return absl::FailedPreconditionError(
      absl::StrCat("the head of context ", name_, " is not on this machine: run this there"));
}

}  // namespace gtrain::exec
