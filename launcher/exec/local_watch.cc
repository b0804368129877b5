#include "launcher/exec/local_watch.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file_lock.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "runtime/control/cluster_dir.h"

namespace gtrain::exec {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(500);
constexpr absl::Duration kFirstLook = absl::Milliseconds(20);  // until this process has its lock
constexpr absl::Duration kPauseMin = absl::Seconds(1);  // between two starts; doubled while nothing stays up
constexpr absl::Duration kPauseMax = absl::Minutes(1);

bool IsWanted(const std::string& dir) { return access((dir + "/endpoint.json").c_str(), F_OK) == 0; }

// Looks after `others`.
class Watcher {
 public:
  Watcher(std::string dir, std::vector<Daemon> others) : dir_(std::move(dir)), others_(std::move(others)) {}

  // Starts what died, if it is time. An error says that it was tried in vain.
  absl::Status Look(const std::stop_token& stop) {
    std::erase_if(children_, [](pid_t child) { return waitpid(child, nullptr, WNOHANG) != 0; });
    const Instant now = clock_.Now();
    if (!IsWanted(dir_) || AllRun()) {
      if (now - tried_at_ >= kPauseMin) pause_ = kPauseMin;
      return absl::OkStatus();
    }
    if (now < next_) return absl::OkStatus();
    // The process that holds the lock is starting something right now: look again when that is done.
    const absl::StatusOr<UniqueFd> lock = LockFile(dir_ + "/start.lock");
    if (!lock.ok() || !IsWanted(dir_) || AllRun()) return absl::OkStatus();
    tried_at_ = now;
    next_ = now + pause_;
    pause_ = std::min(2 * pause_, kPauseMax);
    for (const Daemon daemon : others_) {
      if (!Runs(dir_, daemon))
        LogWarning(Name(daemon), " of the local cluster has died and is started again");
    }
    const absl::Status status = StartMissing(dir_, others_, &children_, stop);
    if (!status.ok()) LogWarning(status.message());
    return status;
  }

 private:
  static const char* Name(Daemon daemon) {
    return daemon == Daemon::kHead ? "the head" : daemon == Daemon::kAgent ? "the agent" : "the watch";
  }

  bool AllRun() const {
    return std::all_of(others_.begin(), others_.end(), [this](Daemon daemon) { return Runs(dir_, daemon); });
  }

  const std::string dir_;
  const std::vector<Daemon> others_;
  const RealClock clock_;
  std::vector<pid_t> children_;  // started here, to be reaped
  Instant tried_at_, next_;      // the next start not before
  absl::Duration pause_ = kPauseMin;
};

// Whether the lock of this process was removed, and its directory with it. Known from the first time on at
// which the lock is seen.
class OwnLock {
 public:
  explicit OwnLock(std::string path) : path_(std::move(path)) {}

  bool WasRemoved() {
    if (!seen_.valid() && IsLocked(path_)) seen_.reset(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    return seen_.valid() && !LeadsTo(path_, seen_.get());
  }
  bool seen() const { return seen_.valid(); }

 private:
  const std::string path_;
  UniqueFd seen_;
};

// Looks after the others than `self`. `out_of_place` says why this process cannot stay; empty: it can.
std::jthread StartThread(const std::string& dir, Daemon self, std::function<std::string()> out_of_place) {
  std::vector<Daemon> others = {Daemon::kHead, Daemon::kAgent, Daemon::kWatch};
  std::erase(others, self);
  const auto look = [watcher = std::make_shared<Watcher>(dir, std::move(others)),
                     own_lock = std::make_shared<OwnLock>(LockPath(dir, self)),
                     out_of_place = std::move(out_of_place), dir](const std::stop_token& stop) {
    for (; !stop.stop_requested(); absl::SleepFor(own_lock->seen() ? kLook : kFirstLook)) {
      const std::string why = own_lock->WasRemoved() ? dir + " was removed" : out_of_place();
      if (!why.empty()) {
        LogWarning(why, "; this process ends");
        kill(getpid(), SIGTERM);
        return;
      }
      (void)watcher->Look(stop);
    }
  };
  // Signals of the process are for the threads that know what to do with them.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::jthread thread(look);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

LocalWatch LocalWatch::OfHead(const std::string& dir) {
  return LocalWatch(StartThread(dir, Daemon::kHead, [] { return std::string(); }));
}

LocalWatch LocalWatch::OfAgent(const std::string& dir, const std::string& head_endpoint) {
  return LocalWatch(StartThread(dir, Daemon::kAgent, [dir, head_endpoint]() -> std::string {
    if (!Runs(dir, Daemon::kHead)) return "";
    const absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(dir + "/endpoint.json");
    if (!endpoint.ok() || endpoint->endpoint == head_endpoint) return "";
    return absl::StrCat("the head is back at ", endpoint->endpoint, " instead of ", head_endpoint,
                        ": the next agent goes there");
  }));
}

absl::Status RunLocalWatch(const std::string& dir) {
  const absl::StatusOr<UniqueFd> lock = LockFile(LockPath(dir, Daemon::kWatch));
  if (absl::IsUnavailable(lock.status())) return absl::OkStatus();  // there is one
  GT_RETURN_IF_ERROR(lock.status());
  Watcher watcher(dir, {Daemon::kHead, Daemon::kAgent});
  for (; IsWanted(dir); absl::SleepFor(kLook)) {
    const absl::Status status = watcher.Look({});
    // An agent that lives has ranks to keep, and a head will be wanted whenever it can be had.
    if (!status.ok() && !Runs(dir, Daemon::kHead) && !Runs(dir, Daemon::kAgent)) return status;
  }
  return absl::OkStatus();
}

}  // namespace gtrain::exec
