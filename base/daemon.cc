#include "base/daemon.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <initializer_list>

namespace gtrain {

void HideFromOtherProcesses() { prctl(PR_SET_DUMPABLE, 0); }

void RaiseFileLimit() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

bool InContainer() {
  // Docker, Podman, and what systemd passes on for nspawn and LXC.
  for (const char* mark : {"/.dockerenv", "/run/.containerenv", "/run/host/container-manager"}) {
    if (access(mark, F_OK) == 0) return true;
  }
  return false;
}

}  // namespace gtrain
