#include "base/daemon.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"

namespace gtrain {
namespace {

// Threads of the process whose folder in /proc this is, if it is this user's.
int64_t OwnThreads(int proc, const char* pid) {
  struct stat info;
  if (fstatat(proc, pid, &info, 0) != 0 || info.st_uid != getuid()) return 0;
  constexpr size_t kStatusBytesMax = 64 << 10;
  const auto status = ReadFile(absl::StrCat("/proc/", pid, "/status"), kStatusBytesMax);
  if (!status.ok()) return 0;
  for (absl::string_view line : absl::StrSplit(*status, '\n')) {
    int64_t threads = 0;
    if (absl::ConsumePrefix(&line, "Threads:") && absl::SimpleAtoi(line, &threads)) return threads;
  }
  return 1;
}

}  // namespace

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

std::optional<int64_t> ProcessesLeft() {
  rlimit processes = {};
  if (getuid() == 0 || getrlimit(RLIMIT_NPROC, &processes) != 0 || processes.rlim_cur == RLIM_INFINITY)
    return std::nullopt;
  DIR* const proc = opendir("/proc");
  if (proc == nullptr) return std::nullopt;
  int64_t used = 0;
  while (const dirent* entry = readdir(proc)) {
    if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9') used += OwnThreads(dirfd(proc), entry->d_name);
  }
  closedir(proc);
  return std::max<int64_t>(0, static_cast<int64_t>(processes.rlim_cur) - used);
}

absl::Status EnsureProcessesLeft(int least) {
  const std::optional<int64_t> left = ProcessesLeft();
  if (!left || *left >= least) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this user may start ", *left,
                                                    " more processes and threads, and this program needs ",
                                                    least, ": raise `ulimit -u`, or end some"));
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
