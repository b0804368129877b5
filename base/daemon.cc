#include "base/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <initializer_list>

#include "absl/strings/str_cat.h"

namespace gtrain {

void HideFromOtherProcesses() { prctl(PR_SET_DUMPABLE, 0); }

void RaiseFileLimit() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

absl::Status EnsureFileLimit(int least) {
  const auto wanted = static_cast<rlim_t>(least);
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= wanted) return absl::OkStatus();
  if (files.rlim_max >= wanted) {
    files.rlim_cur = wanted;
    setrlimit(RLIMIT_NOFILE, &files);
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("this process may have ", files.rlim_max,
                                                    " open files and needs ", least, ": raise `ulimit -n`"));
}

void OpenStandardFiles() {
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(standard, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is this one: those below are open by now.
    if (open("/dev/null", standard == STDIN_FILENO ? O_RDONLY : O_WRONLY) < 0) return;
  }
}

bool InContainer() {
  // Docker, Podman, and what systemd passes on for nspawn and LXC.
  for (const char* mark : {"/.dockerenv", "/run/.containerenv", "/run/host/container-manager"}) {
    if (access(mark, F_OK) == 0) return true;
  }
  return false;
}

}  // namespace gtrain
