#include "actors/exec/directory.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"

namespace gtrain::actors {
namespace {

constexpr absl::Duration kTellWithin = absl::Minutes(10);  // another process that keeps the names

}  // namespace

class Directory::Core : public std::enable_shared_from_this<Directory::Core> {
 public:
  Core(const CallerId& self, Functions functions) : self_(self), functions_(std::move(functions)) {}

  void Join() {
    MutexLock lock(&mutex_);
    joined_ = true;
  }

  void SetKeeper(const CallerId& process, std::set<CallerId> members) {
    std::vector<NamedActor> own;
    bool changed = false;
    {
      MutexLock lock(&mutex_);
      members_ = std::move(members);
      changed = keeper_ != process;
      keeper_ = process;
      if (changed) {
        for (const auto& [id, named] : own_) own.push_back(named);
      }
    }
    if (changed) {
      for (const NamedActor& named : own) {
        Send(named, NameRequest::kAgain, kTellWithin,
             [name = named.name](const absl::Status& status, absl::string_view) {
               if (absl::IsAlreadyExists(status))
                 LogWarning("two actors are called '", name,
                            "' since another rank drives: ", status.message());
             });
      }
      Send({}, NameRequest::kTold, kTellWithin, [](const absl::Status&, absl::string_view) {});
    }
    GoOn();
  }

  void ProcessLost(const CallerId& process) {
    {
      MutexLock lock(&mutex_);
      names_.DropOwner(process);
      members_.erase(process);
    }
    GoOn();
  }

  void Name(const NamedActor& named, absl::Duration timeout, Reply reply) {
    {
      MutexLock lock(&mutex_);
      own_[named.id] = named;  // before it is said to anybody, who may not keep the names any more then
    }
    Send(named, NameRequest::kNew, timeout,
         [core = shared_from_this(), id = named.id, reply = std::move(reply)](
             const absl::Status& status, absl::string_view result) mutable {
           if (!status.ok()) {
             MutexLock lock(&core->mutex_);
             core->own_.erase(id);
           }
           reply(status, result);
         });
  }

  void NameAgain(const NamedActor& named, Reply reply) {
    {
      MutexLock lock(&mutex_);
      own_[named.id] = named;
    }
    OnName(self_, named, NameRequest::kAgain, kTellWithin, std::move(reply));
  }

  void AwaitNames(absl::AnyInvocable<void()> then) {
    {
      MutexLock lock(&mutex_);
      if (!Ready() && (!keeper_ || keeper_ == self_) && waiting_.size() < kNamesMax) {
        waiting_.emplace_back(std::move(then));
        return;
      }
    }
    then();
  }

  std::optional<CallerId> keeper() const {
    MutexLock lock(&mutex_);
    return joined_ ? keeper_ : std::nullopt;
  }

  void Release(uint64_t id) {
    NamedActor named;
    {
      MutexLock lock(&mutex_);
      auto own = own_.extract(id);
      if (own.empty()) return;
      named = std::move(own.mapped());
    }
    Send(named, NameRequest::kDrop, kTellWithin, [](const absl::Status&, absl::string_view) {});
  }

  void Find(const FindRequest& request, absl::Duration timeout, Reply reply) {
    const std::optional<CallerId> to = WhomToAsk();
    if (!to) return OnFind(self_, request, timeout, std::move(reply));
    functions_.ask(*to, Control::kFind, PrintFind(request), timeout, std::move(reply));
  }

  void OnName(const CallerId& caller, const NamedActor& named, uint8_t kind, absl::Duration timeout,
              Reply reply) {
    if (kind == NameRequest::kTold) {
      {
        MutexLock lock(&mutex_);
        told_.insert(caller);
      }
      reply(absl::OkStatus(), {});
      return GoOn();
    }
    if (kind == NameRequest::kNew) {
      std::optional<Reply> now = Await(
          caller, std::move(reply),
          [core = shared_from_this(), caller, named, timeout](Reply later) {
            core->OnName(caller, named, NameRequest::kNew, timeout, std::move(later));
          },
          [this, &named, timeout](const CallerId& keeper, Reply later) {
            functions_.ask(keeper, Control::kName, Print(named, NameRequest::kNew), timeout,
                           std::move(later));
          });
      if (!now) return;
      reply = *std::move(now);
    }
    absl::Status status = CheckName(named.name);
    absl::StatusOr<ActorRef> before = absl::NotFoundError("");
    NamedActor holder;
    if (status.ok()) {
      MutexLock lock(&mutex_);
      if (kind == NameRequest::kDrop) {
        names_.Drop(named.name, named.owner, named.id);
      } else {
        status = names_.Put(named);
        const NamedActor* const has = names_.Find(named.name);
        if (absl::IsAlreadyExists(status) && has != nullptr) {
          holder = *has;
          before = ActorRef::Parse(holder.reference);
        }
      }
    }
    if (!before.ok()) return reply(status, {});
    // It may have ended without a word of its owner.
    functions_.locate(*before, timeout,
                      [core = shared_from_this(), named, holder, taken = status, reply = std::move(reply)](
                          const absl::Status& located, absl::string_view) mutable {
                        if (!absl::IsNotFound(located) && !absl::IsUnavailable(located))
                          return reply(taken, {});
                        absl::Status status;
                        {
                          MutexLock lock(&core->mutex_);
                          core->names_.Drop(holder.name, holder.owner, holder.id);
                          status = core->names_.Put(named);
                        }
                        reply(status, {});
                      });
  }

  void OnFind(const CallerId& caller, const FindRequest& request, absl::Duration timeout, Reply reply) {
    std::optional<Reply> now = Await(
        caller, std::move(reply),
        [core = shared_from_this(), caller, timeout, bytes = PrintFind(request)](Reply later) {
          core->OnFind(caller, *ParseFind(bytes), timeout, std::move(later));
        },
        [this, &request, timeout](const CallerId& keeper, Reply later) {
          functions_.ask(keeper, Control::kFind, PrintFind(request), timeout, std::move(later));
        });
    if (!now) return;
    absl::Status status;
    absl::StatusOr<ActorRef> ref = absl::NotFoundError("");
    {
      MutexLock lock(&mutex_);
      const NamedActor* const named = names_.Find(request.name);
      if (named == nullptr) {
        status = absl::NotFoundError(absl::StrCat("no actor of this job is called '", request.name, "'"));
      } else if (named->type != request.type || named->signature != request.signature) {
        status = absl::FailedPreconditionError(absl::StrCat("'", request.name, "' is a ", named->type, ", ",
                                                            named->signature, ", and not a ", request.type,
                                                            ", ", request.signature));
      } else {
        ref = ActorRef::Parse(named->reference);
        status = ref.status();
      }
    }
    if (!status.ok()) return (*now)(status, {});
    functions_.locate(
        *ref, timeout,
        [ref = *ref, reply = *std::move(now)](const absl::Status& located, absl::string_view result) mutable {
          const absl::StatusOr<ActorAddress> at = located.ok() ? ActorAddress::Parse(result) : located;
          if (!at.ok()) return reply(at.status(), {});
          ref.at = *at;
          reply(absl::OkStatus(), ref.Pack());
        });
  }

 private:
  // All who may have named an actor have said so here. With nobody else this process is enough.
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!joined_) return true;
    return keeper_ == self_ && std::ranges::includes(told_, members_);
  }

  // The reply where it may be answered now. Else it waits until that is so, or is sent to who keeps the
  // names.
  template <typename Later, typename Forward>
  std::optional<Reply> Await(const CallerId& caller, Reply reply, Later later, const Forward& forward) {
    std::optional<CallerId> other;
    bool full = false;
    {
      MutexLock lock(&mutex_);
      if (Ready()) return reply;
      if (keeper_ && *keeper_ != self_) {
        other = keeper_;
      } else if (waiting_.size() >= kNamesMax) {
        full = true;
      } else {
        waiting_.push_back(
            [later = std::move(later), reply = std::move(reply)]() mutable { later(std::move(reply)); });
        return std::nullopt;
      }
    }
    if (full) {
      reply(absl::ResourceExhaustedError(
                "too many wait until all ranks have said how their actors are called: try again"),
            {});
    } else if (other && caller == self_) {
      forward(*other, std::move(reply));
    } else if (other) {
      reply(absl::UnavailableError("another rank drives now, and keeps the names of actors: try again"), {});
    }
    return std::nullopt;
  }
  void GoOn() {
    std::vector<absl::AnyInvocable<void()>> now;
    {
      MutexLock lock(&mutex_);
      if (!Ready() && (!keeper_ || keeper_ == self_)) return;
      now = std::exchange(waiting_, {});
    }
    for (absl::AnyInvocable<void()>& one : now) one();
  }

  // None: this process knows all names. Itself: it does not know yet who does, and awaits that with a
  // deadline, as all calls have.
  std::optional<CallerId> WhomToAsk() {
    MutexLock lock(&mutex_);
    if (!joined_) return std::nullopt;
    return keeper_.value_or(self_);
  }
  static std::string Print(const NamedActor& named, uint8_t kind) {
    NameRequest request;
    request.kind = kind;
    request.name = named.name;
    request.type = named.type;
    request.signature = named.signature;
    request.id = named.id;
    request.reference = named.reference;
    return PrintName(request);
  }
  void Send(const NamedActor& named, uint8_t kind, absl::Duration timeout, Reply reply) {
    const std::optional<CallerId> to = WhomToAsk();
    if (!to) return OnName(self_, named, kind, timeout, std::move(reply));
    functions_.ask(*to, Control::kName, Print(named, kind), timeout, std::move(reply));
  }

  const CallerId self_;
  const Functions functions_;
  mutable Mutex mutex_;
  bool joined_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<CallerId> keeper_ ABSL_GUARDED_BY(mutex_);
  std::set<CallerId> members_ ABSL_GUARDED_BY(mutex_);
  std::set<CallerId> told_ ABSL_GUARDED_BY(mutex_);  // who has said all of its names to this process
  std::vector<absl::AnyInvocable<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  NameTable names_ ABSL_GUARDED_BY(mutex_);                     // of all, where this process keeps them
  std::map<uint64_t, NamedActor> own_ ABSL_GUARDED_BY(mutex_);  // that this process owns
};

Directory::Directory(const CallerId& self, Functions functions)
    : core_(std::make_shared<Core>(self, std::move(functions))) {}
void Directory::Join() { core_->Join(); }
void Directory::SetKeeper(const CallerId& process, std::set<CallerId> members) {
  core_->SetKeeper(process, std::move(members));
}
void Directory::ProcessLost(const CallerId& process) { core_->ProcessLost(process); }
void Directory::Name(const NamedActor& named, absl::Duration timeout, Reply reply) {
  core_->Name(named, timeout, std::move(reply));
}
void Directory::NameAgain(const NamedActor& named, Reply reply) { core_->NameAgain(named, std::move(reply)); }
void Directory::AwaitNames(absl::AnyInvocable<void()> then) { core_->AwaitNames(std::move(then)); }
std::optional<CallerId> Directory::keeper() const { return core_->keeper(); }
void Directory::Release(uint64_t id) { core_->Release(id); }
void Directory::Find(const FindRequest& request, absl::Duration timeout, Reply reply) {
  core_->Find(request, timeout, std::move(reply));
}
void Directory::OnName(const CallerId& caller, const NameRequest& request, absl::Duration timeout,
                       Reply reply) {
  NamedActor named;
  named.name = std::string(request.name);
  named.type = std::string(request.type);
  named.signature = std::string(request.signature);
  named.owner = caller;
  named.id = request.id;
  named.reference = std::string(request.reference);
  core_->OnName(caller, named, request.kind, timeout, std::move(reply));
}
void Directory::OnFind(const CallerId& caller, const FindRequest& request, absl::Duration timeout,
                       Reply reply) {
  core_->OnFind(caller, request, timeout, std::move(reply));
}

}  // namespace gtrain::actors
