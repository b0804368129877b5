#include "actors/exec/owned.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace gtrain::actors {
namespace {

constexpr size_t kMakingAtOnce = 256;
constexpr size_t kEndingsKept = 1024;  // why actors ended
constexpr size_t kAskedMax = 16'384;   // who asks where one actor is
constexpr absl::Duration kMakeWithin = absl::Minutes(1);

}  // namespace

class OwnedActors::Core : public std::enable_shared_from_this<OwnedActors::Core> {
 public:
  Core(const CallerId& self, Functions functions, const Clock& clock)
      : self_(self), functions_(std::move(functions)), clock_(clock) {}

  void Spawn(Spec spec, absl::Duration timeout, Reply reply) {
    uint64_t id = 0;
    absl::StatusOr<CallerId> on;
    Reply refused;
    {
      MutexLock lock(&mutex_);
      on = Pick(spec.placement);
      if (on.ok()) {
        id = ++last_;
        Owned& owned = owned_[id];
        spec.id = id;
        owned.spec = spec;
        owned.on = *on;
        owned.spawner = std::move(reply);
        owned.deadline = clock_.Now() + timeout;
      } else {
        refused = std::move(reply);
      }
    }
    if (refused) return refused(on.status(), {});
    Start(id, *on, spec, timeout, /*counted=*/false);
  }

  void End(uint64_t id, const std::string& reason) {
    std::optional<ActorAddress> at;
    std::vector<Reply> asked;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      if (it == owned_.end()) return;
      if (it->second.made) at = it->second.at;
      asked = Forget(it, reason);
    }
    if (at) functions_.end(*at, reason);
    for (Reply& one : asked) one(Ended(reason), {});
  }

  void Locate(uint64_t id, const ActorAddress& not_at, Reply reply) {
    absl::Status status;
    std::string at;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      if (it == owned_.end()) {
        const auto why = endings_.find(id);
        status = Ended(why == endings_.end() ? "its owner does not know it" : why->second);
      } else if (it->second.made && it->second.at != not_at) {
        at = it->second.at.Pack();
      } else if (closed_) {
        status = absl::CancelledError("the cluster of its owner is closed");
      } else if (it->second.asked.size() >= kAskedMax) {
        status = absl::ResourceExhaustedError("too many processes ask where the actor is");
      } else {
        it->second.asked.push_back(std::move(reply));
        return;
      }
    }
    reply(status, at);
  }

  absl::Status Keep(uint64_t id, const CallerId& from, absl::string_view record) {
    MutexLock lock(&mutex_);
    const auto it = owned_.find(id);
    if (it == owned_.end() || it->second.on != from) return Ended("it is elsewhere, or its owner let it go");
    it->second.spec.record = std::string(record);
    return absl::OkStatus();
  }

  void EndedBy(uint64_t id, const CallerId& from, const std::string& reason) {
    std::vector<Reply> asked;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      if (it == owned_.end() || !it->second.made || it->second.on != from) return;
      asked = Forget(it, reason);
    }
    for (Reply& one : asked) one(Ended(reason), {});
  }

  void ProcessLost(const CallerId& process) {
    std::vector<std::pair<absl::Status, std::vector<Reply>>> told;
    std::vector<Moved> ended;
    {
      MutexLock lock(&mutex_);
      gone_.insert(process);
      on_.erase(process);
      std::vector<uint64_t> lost;
      for (const auto& [id, owned] : owned_) {
        if (owned.made && owned.on == process) lost.push_back(id);
      }
      for (const uint64_t id : lost) {
        const auto it = owned_.find(id);
        it->second.made = false;
        it->second.lost_with = process;
        std::string reason = CountLoss(it->second);
        if (reason.empty()) {
          to_make_.push_back(id);
        } else {
          ended.push_back(MovedOf(it->second, std::nullopt, reason));
          told.emplace_back(Ended(reason), Forget(it, reason));
        }
      }
    }
    for (const Moved& one : ended) TellMoved(one);
    for (auto& [status, asked] : told) {
      for (Reply& one : asked) one(status, {});
    }
    MakeSome();
  }

  void Close() {
    std::vector<Reply> waiting;
    {
      MutexLock lock(&mutex_);
      closed_ = true;
      to_make_.clear();
      for (auto& [id, owned] : owned_) {
        for (Reply& one : std::exchange(owned.asked, {})) waiting.push_back(std::move(one));
        if (owned.spawner) waiting.push_back(std::exchange(owned.spawner, nullptr));
      }
    }
    for (Reply& one : waiting) one(absl::CancelledError("the cluster of this process is closed"), {});
  }

  absl::StatusOr<ActorAddress> WhereLast(uint64_t id) const {
    MutexLock lock(&mutex_);
    const auto it = owned_.find(id);
    if (it == owned_.end()) return Ended("its owner does not know it");
    return it->second.at;
  }

  size_t size() const {
    MutexLock lock(&mutex_);
    return owned_.size();
  }

 private:
  static absl::Status Ended(absl::string_view reason) {
    return absl::NotFoundError(absl::StrCat("the actor is no more: ", reason));
  }

  absl::StatusOr<CallerId> Pick(const Placement& placement) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::StatusOr<CallerId> on = functions_.pick(placement, on_);
    if (on.ok()) ++on_[*on];
    return on;
  }
  void Leave(const CallerId& process) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto it = on_.find(process);
    if (it != on_.end() && --it->second == 0) on_.erase(it);
  }

  std::vector<Reply> Forget(std::map<uint64_t, Owned>::iterator it, const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<Reply> asked = std::move(it->second.asked);
    Leave(it->second.on);
    endings_[it->first] = reason;
    if (endings_.size() > kEndingsKept) endings_.erase(endings_.begin());
    owned_.erase(it);
    return asked;
  }

  static Moved MovedOf(const Owned& owned, std::optional<CallerId> to, const std::string& reason) {
    return {owned.spec.type, owned.spec.options.name, *owned.lost_with, to, reason};
  }
  void TellMoved(const Moved& moved) const {
    if (functions_.on_moved) functions_.on_moved(moved);
  }

  // Why it ends; empty: it is made anew.
  std::string CountLoss(Owned& owned) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Instant now = clock_.Now();
    owned.losses.push_back(now);
    std::erase_if(owned.losses, [&](Instant then) { return now - then > kRestartWindow; });
    const int losses = static_cast<int>(owned.losses.size());
    if (losses <= owned.spec.options.restarts) return "";
    const std::string often =
        losses == 1 ? "" : absl::StrCat(" ", losses, " times within ", PrintDuration(kRestartWindow));
    return absl::StrCat("its process was lost", often, ", and it has ", owned.spec.options.restarts,
                        " restarts");
  }

  void Start(uint64_t id, const CallerId& on, const Spec& spec, absl::Duration timeout, bool counted) {
    functions_.make(
        on, spec, timeout,
        [core = shared_from_this(), id, counted](const absl::Status& status, absl::string_view result) {
          core->OnMade(id, counted, status, result);
        });
  }

  // `counted`: among those that are made at once.
  void OnMade(uint64_t id, bool counted, const absl::Status& status, absl::string_view result) {
    bool again = false;
    absl::Status settled = status;
    {
      MutexLock lock(&mutex_);
      if (counted) --making_;
      // The process that was to have it is lost: so is the actor, whatever had become of it.
      // One that is made anew has no caller to say that it took too long: that is a loss, too.
      const auto it = owned_.find(id);
      const bool lost = it != owned_.end() && !closed_ &&
                        (absl::IsUnavailable(status) || gone_.contains(it->second.on) ||
                         (absl::IsDeadlineExceeded(status) && !it->second.spawner));
      if (lost) {
        const std::string reason = CountLoss(it->second);
        if (!it->second.lost_with) it->second.lost_with = it->second.on;
        again = reason.empty() && (!it->second.spawner || clock_.Now() < it->second.deadline);
        if (status.ok()) settled = absl::UnavailableError(reason.empty() ? "its process was lost" : reason);
        if (again) {
          Leave(it->second.on);
          to_make_.push_back(id);
        }
      }
    }
    if (!again) Settle(id, settled, result);
    MakeSome();
  }

  // It is there, or there is none.
  void Settle(uint64_t id, absl::Status status, absl::string_view result) {
    absl::StatusOr<ActorAddress> at = ActorAddress::Parse(result);
    if (status.ok()) status = at.status();
    std::vector<Reply> asked;
    Reply spawner;
    ActorRef ref;
    std::optional<Moved> moved;
    bool over = false;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      over = it == owned_.end();
      if (!over && it->second.lost_with) {
        moved = MovedOf(it->second, it->second.on, "");
        if (!status.ok()) moved->to.reset();
        moved->reason = std::string(status.message());
        it->second.lost_with.reset();
      }
      if (!over) {
        spawner = std::exchange(it->second.spawner, nullptr);
        ref.kept = it->second.spec.options.keep ? 1 : 0;
      }
      if (!over && status.ok()) {
        it->second.at = *at;
        it->second.made = true;
        asked = std::exchange(it->second.asked, {});
      } else if (!over) {
        asked = Forget(it, std::string(status.message()));
      }
      over = over && !closed_;
    }
    if (moved) TellMoved(*moved);
    if (over && status.ok()) functions_.end(*at, "its owner let it go as it was made");
    for (Reply& one : asked) one(status, status.ok() ? result : "");
    if (!spawner) return;
    if (!status.ok()) return spawner(status, "");
    ref.owner_high = self_.high;
    ref.owner_low = self_.low;
    ref.id = id;
    ref.at = *at;
    spawner(status, ref.Pack());
  }

  // Those whose process was lost, a few at a time.
  void MakeSome() {
    for (;;) {
      uint64_t id = 0;
      Spec spec;
      absl::StatusOr<CallerId> on;
      std::vector<Reply> asked;
      Reply spawner;
      std::optional<Moved> ended;
      absl::Duration timeout = kMakeWithin;
      {
        MutexLock lock(&mutex_);
        if (closed_ || to_make_.empty() || making_ >= kMakingAtOnce) return;
        id = to_make_.front();
        to_make_.pop_front();
        const auto it = owned_.find(id);
        if (it == owned_.end()) continue;
        on = Pick(it->second.spec.placement);
        // A kept one goes to another process than its owner's while there is one.
        const bool home = on.ok() && *on == self_ && it->second.spec.options.keep &&
                          it->second.spec.placement.spread != Spread::kHere;
        if (home) Leave(self_);
        if ((!on.ok() || home) && (home || it->second.spec.placement.rank))
          on = Pick({Spread::kProcesses, {}});
        if (on.ok()) {
          ++making_;
          it->second.on = *on;
          spec = it->second.spec;
          if (it->second.spawner) timeout = it->second.deadline - clock_.Now();
        } else {
          spawner = std::exchange(it->second.spawner, nullptr);
          ended = MovedOf(it->second, std::nullopt, std::string(on.status().message()));
          asked = Forget(it, ended->reason);
        }
      }
      if (ended) TellMoved(*ended);
      for (Reply& one : asked) one(Ended(on.status().message()), {});
      if (spawner) spawner(on.status(), {});
      if (!on.ok()) continue;
      Start(id, *on, spec, timeout, /*counted=*/true);
    }
  }

  const CallerId self_;
  const Functions functions_;
  const Clock& clock_;
  mutable Mutex mutex_;
  std::map<uint64_t, Owned> owned_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> endings_ ABSL_GUARDED_BY(mutex_);
  std::map<CallerId, size_t> on_ ABSL_GUARDED_BY(mutex_);  // how many each process has
  std::set<CallerId> gone_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> to_make_ ABSL_GUARDED_BY(mutex_);
  size_t making_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

OwnedActors::OwnedActors(const CallerId& self, Functions functions, const Clock& clock)
    : core_(std::make_shared<Core>(self, std::move(functions), clock)) {}
void OwnedActors::Spawn(Spec spec, absl::Duration timeout, Reply reply) {
  core_->Spawn(std::move(spec), timeout, std::move(reply));
}
void OwnedActors::End(uint64_t id, const std::string& reason) { core_->End(id, reason); }
void OwnedActors::Locate(uint64_t id, const ActorAddress& not_at, Reply reply) {
  core_->Locate(id, not_at, std::move(reply));
}
absl::Status OwnedActors::Keep(uint64_t id, const CallerId& from, absl::string_view record) {
  return core_->Keep(id, from, record);
}
void OwnedActors::EndedBy(uint64_t id, const CallerId& from, const std::string& reason) {
  core_->EndedBy(id, from, reason);
}
void OwnedActors::ProcessLost(const CallerId& process) { core_->ProcessLost(process); }
void OwnedActors::Close() { core_->Close(); }
absl::StatusOr<ActorAddress> OwnedActors::WhereLast(uint64_t id) const { return core_->WhereLast(id); }
size_t OwnedActors::size() const { return core_->size(); }

}  // namespace gtrain::actors
