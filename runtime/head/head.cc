#include "runtime/head/head.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "runtime/head/service.h"

namespace gtrain::head {
namespace {

int stop_write_fd = -1;  // a signal handler has nowhere else to look

void OnStopSignal(int) {
  const int saved = errno;
  (void)!write(stop_write_fd, "x", 1);
  errno = saved;
}

}  // namespace

absl::Status RunHead(const HeadOptions& options) {
  GT_CHECK(stop_write_fd == -1);
  int pipe_fds[2];
  if (pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd stop_read(pipe_fds[0]);
  stop_write_fd = pipe_fds[1];  // stays open: a late signal may still come
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  signal(SIGXFSZ, SIG_DFL);  // RocksDB aborts at a refused write; this end says that it is `ulimit -f`
  struct sigaction action {};
  action.sa_handler = OnStopSignal;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  HeadService service(options);
  GT_RETURN_IF_ERROR(service.Start());
  return service.Loop(stop_read.get());
}

}  // namespace gtrain::head
