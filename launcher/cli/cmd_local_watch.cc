// `gtrain local-watch`: the third process of the local cluster, see launcher/exec/local_watch.h. People never
// run it.
#include "base/daemon.h"
#include "base/logging.h"
#include "launcher/cli/verbs.h"
#include "launcher/exec/local_watch.h"

namespace gtrain::cli {
namespace {

int WatchLocal(const Args& args) {
  SetLogTag("watch");
  HideFromOtherProcesses();
  const absl::Status status = exec::RunLocalWatch(args.Get("dir"));
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb LocalWatchVerb() {
  Verb verb;
  verb.name = "local-watch";
  verb.summary = "Start again what dies of the local cluster (used by launch)";
  verb.hidden = true;
  verb.flags = {{"dir", '\0', "DIR", "of the local cluster"}};
  verb.run = WatchLocal;
  return verb;
}

}  // namespace gtrain::cli
