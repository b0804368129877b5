#include "launcher/exec/local_cluster.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/status_macros.h"
#include "launcher/exec/local_daemons.h"
#include "net/zmq/key_registry.h"
#include "runtime/agent/agent.h"
#include "runtime/control/cluster_dir.h"

namespace gtrain::exec {
namespace {

constexpr absl::Duration kLockPatience = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(20);

std::string EndpointPath(const std::string& dir) { return dir + "/endpoint.json"; }

bool AnyRuns(const std::string& dir) {
  return Runs(dir, Daemon::kHead) || Runs(dir, Daemon::kAgent) || Runs(dir, Daemon::kWatch);
}

// A home may be shared by machines and containers: another one's cluster is not ours to start, to end or to
// reach.
absl::Status CheckHere(const std::string& dir, const net::Endpoint& endpoint) {
  if (endpoint.IsHere()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "the local cluster in ", dir, " runs on ", endpoint.place.host, " (process ", endpoint.pid,
      "), another machine or container, and only reaches as far as that. Run this there; or give this one a "
      "cluster of its own: XDG_STATE_HOME=DIR"));
}

absl::StatusOr<RunningHead> Describe(const std::string& dir, const net::Endpoint& endpoint) {
  RunningHead head;
  head.dir = dir;
  head.pid = endpoint.pid;
  head.options.endpoint = endpoint.endpoint;
  head.options.server_public_key = endpoint.head_public_key;
  GT_ASSIGN_OR_RETURN(head.options.keys, net::LoadKeyPair(dir + "/admin.key"));
  return head;
}

// `dir` exists.
absl::StatusOr<RunningHead> StartWhatIsMissing(const std::string& dir) {
  const absl::StatusOr<UniqueFd> lock = LockFile(dir + "/start.lock", kLockPatience);
  if (absl::IsUnavailable(lock.status())) {
    return absl::DeadlineExceededError(absl::StrCat(
        "another gtrain has been starting the local cluster for a minute: ", lock.status().message()));
  }
  GT_RETURN_IF_ERROR(lock.status());
  GT_RETURN_IF_ERROR(LoopbackAddress().status());
  if (const auto before = net::ReadEndpoint(EndpointPath(dir)); before.ok() && AnyRuns(dir)) {
    GT_RETURN_IF_ERROR(CheckHere(dir, *before));
  }
  GT_ASSIGN_OR_RETURN(const net::ClusterFiles files, net::InitCluster(dir));
  // The key is added before the head starts: it reads the list then, so that the agent's first connection is
  // let in.
  GT_ASSIGN_OR_RETURN(const std::string agent_key, agent::NodePublicKey(LocalAgentDir(dir)));
  GT_RETURN_IF_ERROR(
      net::AddAllowedKey(files.authorized_path(), {core::Role::kNode, agent_key, "local agent"}));
  GT_RETURN_IF_ERROR(StartMissing(dir, {Daemon::kHead, Daemon::kAgent, Daemon::kWatch}));
  GT_ASSIGN_OR_RETURN(const net::Endpoint endpoint, net::ReadEndpoint(EndpointPath(dir)));
  return Describe(dir, endpoint);
}

absl::Status NoCluster() {
  return absl::NotFoundError(absl::StrCat(NoneRuns(kLocalName),
                                          ": it starts with `gtrain launch` and ends after its last job. For "
                                          "another cluster give --context NAME"));
}

// NotFound when there is none, because the user did not launch anything.
absl::StatusOr<RunningHead> Revive(const std::string& dir) {
  // Without the file the head ended in order; an agent that stays all the same has ranks to keep.
  if (access(EndpointPath(dir).c_str(), F_OK) != 0 && !Runs(dir, Daemon::kAgent)) return NoCluster();
  // Its ranks may live there without a daemon; an agent of here would call them gone.
  const auto before = net::ReadEndpoint(EndpointPath(dir));
  if (before.ok() && !before->SeesItsProcesses() &&
      (before->IsHere() ? !Runs(dir, Daemon::kHead) || !Runs(dir, Daemon::kAgent) : !AnyRuns(dir))) {
    return absl::UnavailableError(absl::StrCat(
        "the local cluster in ", dir, " ran on ", before->place.host,
        ", in another machine or container, where its ranks may go on: ask there. If that is gone for good, "
        "the next `gtrain launch` here starts it anew"));
  }
  return StartWhatIsMissing(dir);
}

// Starts and changes nothing; NotFound when there is none.
absl::StatusOr<RunningHead> Await(const std::string& dir, absl::Duration patience) {
  const RealClock clock;
  for (const Instant deadline = clock.Now() + patience;; absl::SleepFor(kPollInterval)) {
    const bool lives = Runs(dir, Daemon::kHead);
    const absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(EndpointPath(dir));
    if (absl::IsNotFound(endpoint.status())) return NoCluster();
    GT_RETURN_IF_ERROR(endpoint.status());
    if (!AnyRuns(dir)) {
      return absl::UnavailableError(absl::StrCat(
          "the local cluster was killed on ", endpoint->place.host,
          ", and nothing of it is left that would start it again: `gtrain attach`, `gtrain stop` or the next "
          "`gtrain launch` does. Its logs are in ",
          dir));
    }
    GT_RETURN_IF_ERROR(CheckHere(dir, *endpoint));
    GT_RETURN_IF_ERROR(LoopbackAddress().status());
    if (lives) return Describe(dir, *endpoint);
    if (clock.Now() >= deadline) {
      return absl::UnavailableError(absl::StrCat(
          "the head of the local cluster has died and is not back yet; ", dir, "/head.log says why"));
    }
  }
}

}  // namespace

absl::StatusOr<RunningHead> LocalCluster::Find(Start start, absl::Duration patience) {
  GT_ASSIGN_OR_RETURN(const std::string dir, HeadDirectory());
  switch (start) {
    case Start::kNever:
      return Await(dir, patience);
    case Start::kIfDied:
      return Revive(dir);
    case Start::kIfNeeded:
      GT_RETURN_IF_ERROR(MakeDirs(dir));
      return StartWhatIsMissing(dir);
  }
  return absl::InternalError("no such way to start");
}

absl::StatusOr<std::string> LocalCluster::HeadDirectory() const { return net::DefaultClusterDir(name_); }

absl::Status LocalCluster::CheckKeys() const {
  GT_ASSIGN_OR_RETURN(const std::string dir, HeadDirectory());
  for (const std::string& path : {dir + "/head.key", dir + "/admin.key", LocalAgentDir(dir) + "/node.key"}) {
    const absl::Status keys = net::LoadKeyPair(path).status();
    if (!keys.ok() && !absl::IsNotFound(keys)) return keys;
  }
  return absl::OkStatus();
}

}  // namespace gtrain::exec
