// A keeper's connection is made in the background: commands wait in a queue until it stands. A connection
// that breaks is made again if the keeper's process lives; if it does not, its ranks are hunted down by their
// environment, exits it recorded are delivered, and the rest is reported lost.
#include "runtime/agent/keeper_set.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "runtime/keeper/posix.h"
#include "runtime/wire/build_version.h"

namespace gtrain::agent {

namespace fs = std::filesystem;

namespace {

constexpr absl::Duration kConnectPatience = absl::Seconds(30);
constexpr absl::Duration kSweepPatience = absl::Seconds(15);
constexpr size_t kPendingMax = 100'000;

// A job id is never a path component: its hash is.
std::string FolderName(const JobId& job) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (unsigned char c : job.value) hash = (hash ^ c) * 1099511628211u;
  return absl::StrFormat("%016x", hash);
}

// True when processes of a dead keeper outlive a moment of SIGKILL.
bool Unkillable(const std::string& dir) {
  for (int tries = 0; host::KillOrphans(dir) > 0; ++tries) {
    if (tries == 50) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

const char* WhyLost(bool quitting) {
  return quitting ? "the keeper has left" : "the keeper was killed; how its ranks ended is not known";
}

}  // namespace

KeeperSet::KeeperSet(std::string dir, std::string binary, absl::Duration lease)
    : dir_(std::move(dir)), binary_(std::move(binary)), lease_(lease) {}

absl::StatusOr<int> KeeperSet::AdoptAll(Instant now) {
  GT_RETURN_IF_ERROR(MakeDirs(dir_));
  int living = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir_, error)) {
    const std::string dir = entry.path();
    const JobId job{host::KeeperJob(dir)};
    if (job.empty()) {
      host::RemoveKeeperDir(dir);
      continue;
    }
    Handle& handle = keepers_[job];
    handle.dir = dir;
    handle.deadline = now + kConnectPatience;
    if (host::KeeperPid(dir).ok()) {
      ++living;
      handle.was_up = true;
    } else {
      Lose(handle, now, "the keeper died while no agent was running");
      if (Unkillable(dir))
        ++living;  // so this is still the node's old incarnation: what made it unclean lives (P10)
    }
  }
  return living;
}

void KeeperSet::Send(const JobId& job, const keeper::Command& command, Instant now) {
  const bool begins = std::holds_alternative<keeper::BeginGeneration>(command);
  auto it = keepers_.find(job);
  if (it == keepers_.end()) {
    if (!begins) return;
    Handle& handle = keepers_[job];
    handle.dir = absl::StrCat(dir_, "/", FolderName(job));
    handle.deadline = now + kConnectPatience;
    host::RemoveKeeperDir(handle.dir);
    absl::Status started = MakeDirs(handle.dir);
    if (started.ok()) started = host::StartKeeper(binary_, handle.dir, job.value);
    if (!started.ok()) Lose(handle, now, absl::StrCat("the keeper cannot be started: ", started.message()));
    it = keepers_.find(job);
  }
  Handle& handle = it->second;
  if (std::holds_alternative<keeper::Quit>(command)) handle.quitting = true;
  if (handle.phase == Phase::kUp) {
    handle.client->Send(command);
  } else if (handle.phase == Phase::kConnecting && handle.pending.size() < kPendingMax) {
    handle.pending.push_back(command);
  }
}

void KeeperSet::Lose(Handle& handle, Instant now, const std::string& reason) {
  handle.client.reset();
  handle.pending.clear();
  handle.phase = Phase::kSweeping;
  handle.deadline = now + kSweepPatience;
  handle.reason = reason;
}

void KeeperSet::Connect(Handle& handle, Instant now) {
  auto client = host::KeeperClient::Connect(handle.dir);
  if (client.ok()) {
    handle.client = *std::move(client);
    handle.phase = Phase::kUp;
    handle.was_up = true;
    handle.client->Send(keeper::Attach{wire::kThisBuild.keeper_protocol,
                                       static_cast<uint64_t>(absl::ToInt64Milliseconds(lease_))});
    for (const keeper::Command& command : handle.pending) handle.client->Send(command);
    handle.pending.clear();
    return;
  }
  if (now < handle.deadline) return;
  // Its ranks are ended now; one that only slept must not wake up to start more of them.
  const absl::StatusOr<int64_t> silent = host::KeeperPid(handle.dir);
  if (silent.ok()) kill(static_cast<pid_t>(*silent), SIGKILL);
  const std::string words = keeper::ReadSmallFile(handle.dir + "/keeper.log", 4096);
  Lose(handle, now,
       absl::StrCat("the keeper did not answer: ", client.status().message(), words.empty() ? "" : "; ",
                    words));
}

void KeeperSet::Receive(const JobId& job, Handle& handle, Instant now,
                        std::vector<core::AgentEvent>* events) {
  absl::Status flushed = handle.client->Flush();
  auto reports = handle.client->Receive();
  if (reports.ok()) {
    for (keeper::Report& report : *reports) events->push_back(core::FromKeeper{job, std::move(report)});
    if (flushed.ok()) return;
  }
  handle.client.reset();
  if (host::KeeperPid(handle.dir).ok()) {  // it lives: it dropped us, or is about to exit
    handle.phase = Phase::kConnecting;
    handle.deadline = now + kConnectPatience;
    return;
  }
  Lose(handle, now, WhyLost(handle.quitting));
}

// True when nothing is left and the handle can go.
bool KeeperSet::Sweep(const JobId& job, Handle& handle, Instant now, std::vector<core::AgentEvent>* events) {
  const size_t left = host::LeftNobody(handle.dir) ? 0 : host::KillOrphans(handle.dir);
  if (left > 0 && now < handle.deadline) return false;
  for (keeper::Exited& exit : host::ReadExitRecords(handle.dir)) {
    events->push_back(core::FromKeeper{job, std::move(exit)});
  }
  events->push_back(core::KeeperLost{
      job, left == 0,
      left == 0 ? handle.reason
                : absl::StrCat(handle.reason, "; ", left, " of its processes survived SIGKILL")});
  if (left == 0) host::RemoveKeeperDir(handle.dir);  // else the next agent still finds them by it
  return true;
}

std::vector<core::AgentEvent> KeeperSet::Poll(Instant now) {
  std::vector<core::AgentEvent> events;
  for (auto it = keepers_.begin(); it != keepers_.end();) {
    Handle& handle = it->second;
    if (handle.phase == Phase::kConnecting) {
      Connect(handle, now);
      const bool died =
          handle.phase == Phase::kConnecting && handle.was_up && !host::KeeperPid(handle.dir).ok();
      if (died) Lose(handle, now, WhyLost(handle.quitting));
    }
    if (handle.phase == Phase::kUp) Receive(it->first, handle, now, &events);
    if (handle.phase == Phase::kSweeping && Sweep(it->first, handle, now, &events)) {
      it = keepers_.erase(it);
    } else {
      ++it;
    }
  }
  return events;
}

void KeeperSet::AddPollFds(std::vector<pollfd>* fds) const {
  for (const auto& [job, handle] : keepers_) {
    if (handle.client == nullptr) continue;
    fds->push_back(
        {handle.client->fd(), static_cast<short>(POLLIN | (handle.client->wants_write() ? POLLOUT : 0)), 0});
  }
}

bool KeeperSet::unsent() const {
  return std::any_of(keepers_.begin(), keepers_.end(), [](const auto& item) {
    const Handle& handle = item.second;
    return !handle.pending.empty() || (handle.client != nullptr && handle.client->wants_write());
  });
}

bool KeeperSet::starting() const {
  return std::any_of(keepers_.begin(), keepers_.end(), [](const auto& item) {
    return item.second.phase == Phase::kConnecting && !item.second.was_up;
  });
}

bool KeeperSet::busy() const {
  for (const auto& [job, handle] : keepers_) {
    if (handle.phase != Phase::kUp || handle.quitting) return true;
  }
  return false;
}

}  // namespace gtrain::agent
