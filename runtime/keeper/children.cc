#include "runtime/keeper/children.h"

#include <sys/wait.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/poll_set.h"

namespace gtrain::keeper {

bool Children::Start(uint64_t generation, std::vector<SpawnRequest> requests, const Cgroup* cgroup,
                     std::function<void(const SpawnResult&)> started, std::function<void()> starter_died) {
  auto starting = std::make_unique<Starting>();
  if (!starting->batch.Start(std::move(requests), {"GTRAIN_KEEPER_SOCKET", context_.rank_socket}, cgroup))
    return false;
  starting->generation = generation;
  starting->started = std::move(started);
  starting->starter_died = std::move(starter_died);
  starting_.push_back(std::move(starting));
  return true;
}

void Children::TakeStarted() {
  for (auto& starting : starting_) {
    for (const SpawnResult& result : starting->batch.Take()) starting->started(result);
  }
}

void Children::Reap() {
  more_zombies_ = true;
  for (int i = 0; i < 4096; ++i) {
    siginfo_t info = {};
    more_zombies_ = waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
    if (!more_zombies_) break;
    if (!OwnerHears(info)) {
      TakeStarted();  // it may be a rank whose start we have not read yet
      OwnerHears(info);
    }
    siginfo_t done = {};
    waitid(P_PID, static_cast<id_t>(info.si_pid), &done, WEXITED | WNOHANG);
  }
}

bool Children::OwnerHears(const siginfo_t& info) {
  return std::any_of(owners_.begin(), owners_.end(),
                     [&](ChildOwner* owner) { return owner->OnDied(info); }) ||
         StarterDied(info.si_pid);
}

bool Children::StarterDied(pid_t pid) {
  const auto it = std::find_if(starting_.begin(), starting_.end(),
                               [pid](const auto& starting) { return starting->batch.pid() == pid; });
  if (it == starting_.end()) return false;
  TakeStarted();  // all its results are there
  const std::unique_ptr<Starting> starting = std::move(*it);
  starting_.erase(it);
  starting->starter_died();
  return true;
}

std::optional<uint64_t> Children::GenerationOf(pid_t child) const {
  for (ChildOwner* owner : owners_) {
    if (const auto generation = owner->GenerationOf(child)) return generation;
  }
  for (const auto& starting : starting_) {
    if (starting->batch.pid() == child) return starting->generation;
  }
  return std::nullopt;
}

void Children::AddFds(std::vector<pollfd>* fds) const {
  for (const auto& starting : starting_) AddFd(fds, starting->batch.fd());
}

}  // namespace gtrain::keeper
