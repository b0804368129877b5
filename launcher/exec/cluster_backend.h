// The port between the command line and the daemons of a cluster: how a command comes to a head that serves.
// Commands know this and nothing of how the daemons of one kind of cluster are started, found and ended.
// Another kind (over ssh, by a scheduler) is an implementation beside local_cluster.h and a line in
// BackendOf.
#pragma once
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "net/zmq/client.h"

namespace gtrain::exec {

// How long somebody at a terminal waits without a word where nobody listens.
inline constexpr absl::Duration kDeadHeadPatience = absl::Seconds(3);

enum class Start {
  kNever,  // nothing is started or changed; a cluster that does not run is an error that says how to start it
  kIfDied,    // what was killed of the cluster is started again; else as kNever
  kIfNeeded,  // starts the cluster, or joins the one that runs
};

struct RunningHead {
  net::ClientOptions options;  // its address and public key, and the keys of this client
  std::string dir;             // its directory, when that is on this machine
  int64_t pid = 0;             // tells one head from the next; 0: not known
};

// One cluster. Not thread-safe; the functions that return a status block on files, Find also on daemons.
class ClusterBackend {
 public:
  virtual ~ClusterBackend() = default;

  // The word for it after --context.
  virtual const std::string& name() const = 0;

  // Whether gtrain started it for this user. Then its daemons come back by themselves when they are killed,
  // the head perhaps at another address, and end by themselves after the last job; NotFound of Find begins
  // with NoneRuns.
  virtual bool is_own() const = 0;

  // Whether its ranks run on this machine, where they see the files that this process sees.
  virtual bool on_this_machine() const = 0;

  // The head that runs. Starts what `start` allows, which takes about a minute at most; otherwise waits at
  // most `patience` for a head that is being started again, and is Unavailable then.
  virtual absl::StatusOr<RunningHead> Find(Start start, absl::Duration patience) = 0;

  // Where the head keeps its state, whether it runs or not. FailedPrecondition: not on this machine.
  virtual absl::StatusOr<std::string> HeadDirectory() const = 0;
};

// The cluster of that name, "" for the local one, whether there is one or not: Find and HeadDirectory say so.
std::unique_ptr<ClusterBackend> BackendOf(const std::string& name);

// "no local cluster runs"
std::string NoneRuns(absl::string_view name);

}  // namespace gtrain::exec
