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
constexpr size_t kAskedMax = 16'384;   // who asks where one actor is, or when it ends
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
        id = spec.id = ++last_;
        Owned& owned = owned_[id];
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
    Told told;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      if (it == owned_.end()) return;
      if (it->second.made) at = it->second.at;
      told = Forget(it, reason, /*by_owner=*/true);
    }
    if (at) functions_.end(*at, reason);
    told.Tell();
  }

  uint64_t Adopt(Spec spec, const ActorAddress& at) {
    MutexLock lock(&mutex_);
    const uint64_t id = spec.id = ++last_;
    Owned& owned = owned_[id];
    owned.spec = std::move(spec);
    owned.at = at;
    owned.on = {at.host_high, at.host_low};
    owned.made = true;
    Count(owned.spec.placement, owned.on, 1);
    return id;
  }

  void Watch(uint64_t id, Reply reply) {
    absl::Status status;
    std::string why;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      const auto ended = endings_.find(id);
      if (it != owned_.end() && !closed_ && it->second.watch.size() < kAskedMax) {
        it->second.watch.push_back(std::move(reply));
        return;
      }
      if (it != owned_.end()) {
        status = closed_ ? Closed() : TooMany("wait for the end of the actor");
      } else if (ended == endings_.end()) {
        status = Ended("its owner does not know it");
      } else if (ended->second.by_owner) {
        status = absl::CancelledError(ended->second.reason);
      } else {
        why = ended->second.reason;
      }
    }
    reply(status, why);
  }

  void Locate(uint64_t id, const ActorAddress& not_at, Reply reply) {
    absl::Status status;
    std::string at;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      if (it == owned_.end()) {
        const auto why = endings_.find(id);
        status = Ended(why == endings_.end() ? "its owner does not know it" : why->second.reason);
      } else if (it->second.made && it->second.at != not_at) {
        at = it->second.at.Pack();
      } else if (closed_) {
        status = absl::CancelledError("the cluster of its owner is closed");
      } else if (it->second.asked.size() >= kAskedMax) {
        status = TooMany("ask where the actor is");
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
    it->second.spec.unkept = false;
    return absl::OkStatus();
  }

  void EndedBy(uint64_t id, const CallerId& from, const std::string& reason) {
    Told told;
    {
      MutexLock lock(&mutex_);
      const auto it = owned_.find(id);
      if (it == owned_.end() || !it->second.made || it->second.on != from) return;
      told = Forget(it, reason);
    }
    told.Tell();
  }

  void ProcessLost(const CallerId& process) {
    std::vector<Told> told;
    std::vector<Moved> ended;
    {
      MutexLock lock(&mutex_);
      gone_.insert(process);
      on_.erase(process);
      for (auto& [group, on] : apart_) on.erase(process);
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
          told.push_back(Forget(it, reason));
        }
      }
    }
    for (const Moved& one : ended) TellMoved(one);
    for (Told& one : told) one.Tell();
    MakeSome();
  }

  void Close() {
    std::vector<Reply> waiting;
    {
      MutexLock lock(&mutex_);
      closed_ = true;
      to_make_.clear();
      for (auto& [id, owned] : owned_) {
        for (std::vector<Reply>* list : {&owned.asked, &owned.watch}) {
          for (Reply& one : std::exchange(*list, {})) waiting.push_back(std::move(one));
        }
        if (owned.spawner) waiting.push_back(std::exchange(owned.spawner, nullptr));
      }
    }
    for (Reply& one : waiting) one(Closed(), {});
  }

  // It has its name, for as long as it lives.
  void Named(uint64_t id) {
    MutexLock lock(&mutex_);
    if (const auto it = owned_.find(id); it != owned_.end()) it->second.spec.named = true;
  }
  bool IsDetached(uint64_t id) const {
    MutexLock lock(&mutex_);
    const auto it = owned_.find(id);
    return it != owned_.end() && it->second.spec.detached;
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

  static absl::Status Closed() { return absl::CancelledError("the cluster of this process is closed"); }
  static absl::Status TooMany(absl::string_view what) {
    return absl::ResourceExhaustedError(absl::StrCat(kAskedMax, " ", what, " already: try again"));
  }

  using Counts = std::map<CallerId, size_t>;
  absl::StatusOr<CallerId> Pick(const Placement& placement) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::StatusOr<CallerId> on =
        functions_.pick(placement, placement.apart > 0 ? apart_[placement.apart] : on_);
    if (on.ok()) Count(placement, *on, 1);
    return on;
  }
  static void Add(Counts& counts, const CallerId& process, int by) {
    const auto it = counts.try_emplace(process).first;
    if (by < 0 && it->second > 0) --it->second;
    if (by > 0) ++it->second;
    if (it->second == 0) counts.erase(it);
  }
  void Count(const Placement& placement, const CallerId& process, int by)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (by > 0 || on_.contains(process)) Add(on_, process, by);
    if (placement.apart == 0) return;
    const auto group = apart_.try_emplace(placement.apart).first;
    Add(group->second, process, by);
    if (by < 0 && group->second.empty()) apart_.erase(group);
  }
  void Leave(const Owned& owned) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Count(owned.spec.placement, owned.on, -1);
  }

  // Who waits for something of an actor that is no more.
  struct Told {
    std::vector<Reply> asked, watch;
    std::string reason;
    bool by_owner = false;
    void Tell() {
      for (Reply& one : asked) one(Ended(reason), {});
      for (Reply& one : watch) one(by_owner ? absl::CancelledError(reason) : absl::OkStatus(), reason);
    }
  };
  Told Forget(std::map<uint64_t, Owned>::iterator it, const std::string& reason, bool by_owner = false)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Told told{std::move(it->second.asked), std::move(it->second.watch), reason, by_owner};
    Leave(it->second);
    endings_[it->first] = {reason, by_owner};
    ended_.push_back(it->first);
    if (ended_.size() > kEndingsKept) {
      endings_.erase(ended_.front());
      ended_.pop_front();
    }
    owned_.erase(it);
    return told;
  }

  static Moved MovedOf(const Owned& owned, std::optional<CallerId> to, const std::string& reason) {
    return {owned.spec.type, owned.spec.options.name, *owned.lost_with, to, reason};
  }
  void TellMoved(const Moved& moved) const {
    if (functions_.on_moved) functions_.on_moved(moved);
  }

  // Why it ends; empty: it is made anew.
  std::string CountLoss(Owned& owned) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (owned.spec.unkept)
      return "its process was lost as it came to another owner, which does not have its state";
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
          Leave(it->second);
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
    Told told;
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
        if (it->second.spec.options.keep) ref.flags |= ActorRef::kKept;
        if (it->second.spec.detached) ref.flags |= ActorRef::kDetached;
      }
      if (!over && status.ok()) {
        it->second.at = *at;
        it->second.made = true;
        asked = std::exchange(it->second.asked, {});
      } else if (!over) {
        told = Forget(it, std::string(status.message()));
        asked = std::exchange(told.asked, {});  // they hear the status itself
      }
      over = over && !closed_;
    }
    if (moved) TellMoved(*moved);
    if (over && status.ok()) functions_.end(*at, "its owner let it go as it was made");
    for (Reply& one : asked) one(status.ok() ? status : Ended(status.message()), status.ok() ? result : "");
    told.Tell();
    if (!spawner) return;
    if (!status.ok()) return spawner(status, "");
    ref.owner_high = ref.born_high = self_.high;
    ref.owner_low = ref.born_low = self_.low;
    ref.id = ref.born_id = id;
    ref.at = *at;
    spawner(status, ref.Pack());
  }

  absl::StatusOr<CallerId> PickAgain(const Spec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::StatusOr<CallerId> on = Pick(spec.placement);
    // A kept one goes to another process than its owner's while there is one.
    const bool home = on.ok() && *on == self_ && spec.options.keep && spec.placement.spread != Spread::kHere;
    if (home) Count(spec.placement, self_, -1);
    if (!home && (on.ok() || !spec.placement.rank)) return on;
    return Pick({Spread::kProcesses, {}, spec.placement.apart, spec.placement.away});
  }

  // Those whose process was lost, a few at a time.
  void MakeSome() {
    for (;;) {
      uint64_t id = 0;
      Spec spec;
      absl::StatusOr<CallerId> on;
      Told told;
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
        on = PickAgain(it->second.spec);
        if (on.ok()) {
          ++making_;
          it->second.on = *on;
          spec = it->second.spec;
          if (it->second.spawner) timeout = it->second.deadline - clock_.Now();
        } else {
          spawner = std::exchange(it->second.spawner, nullptr);
          ended = MovedOf(it->second, std::nullopt, std::string(on.status().message()));
          told = Forget(it, ended->reason);
        }
      }
      if (ended) TellMoved(*ended);
      told.Tell();
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
  struct Ending {
    std::string reason;
    bool by_owner = false;
  };
  std::map<uint64_t, Ending> endings_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> ended_ ABSL_GUARDED_BY(mutex_);        // the same in their order
  Counts on_ ABSL_GUARDED_BY(mutex_);                         // how many each process has
  std::map<uint64_t, Counts> apart_ ABSL_GUARDED_BY(mutex_);  // of those that are to be apart, by group
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
void OwnedActors::Named(uint64_t id) { core_->Named(id); }
bool OwnedActors::IsDetached(uint64_t id) const { return core_->IsDetached(id); }
uint64_t OwnedActors::Adopt(Spec spec, const ActorAddress& at) { return core_->Adopt(std::move(spec), at); }
void OwnedActors::Watch(uint64_t id, Reply reply) { core_->Watch(id, std::move(reply)); }
absl::StatusOr<ActorAddress> OwnedActors::WhereLast(uint64_t id) const { return core_->WhereLast(id); }
size_t OwnedActors::size() const { return core_->size(); }

}  // namespace gtrain::actors
