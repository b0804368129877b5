#include "actors/exec/directory.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/logging.h"

namespace gtrain::actors {
namespace {

constexpr absl::Duration kTellWithin = absl::Minutes(10);  // another process that keeps the names

}  // namespace

class Directory::Core : public std::enable_shared_from_this<Directory::Core> {
 public:
  Core(const CallerId& self, Functions functions)
      : self_(self), functions_(std::move(functions)), keeper_(self) {}

  void SetKeeper(const CallerId& process) {
    std::vector<NamedActor> own;
    {
      MutexLock lock(&mutex_);
      if (process == keeper_) return;
      keeper_ = process;
      for (const auto& [id, named] : own_) own.push_back(named);
    }
    for (const NamedActor& named : own) {
      Send(named, /*drop=*/false, kTellWithin,
           [name = named.name](const absl::Status& status, absl::string_view) {
             if (absl::IsAlreadyExists(status))
               LogWarning("two actors are called '", name, "' since another rank drives: ", status.message());
           });
    }
  }

  void ProcessLost(const CallerId& process) {
    MutexLock lock(&mutex_);
    names_.DropOwner(process);
  }

  void Name(const NamedActor& named, absl::Duration timeout, Reply reply) {
    {
      MutexLock lock(&mutex_);
      own_[named.id] = named;  // before it is said to anybody, who may not keep the names any more then
    }
    Send(named, /*drop=*/false, timeout,
         [core = shared_from_this(), id = named.id, reply = std::move(reply)](
             const absl::Status& status, absl::string_view result) mutable {
           if (!status.ok()) {
             MutexLock lock(&core->mutex_);
             core->own_.erase(id);
           }
           reply(status, result);
         });
  }

  void Release(uint64_t id) {
    NamedActor named;
    {
      MutexLock lock(&mutex_);
      auto own = own_.extract(id);
      if (own.empty()) return;
      named = std::move(own.mapped());
    }
    Send(named, /*drop=*/true, kTellWithin, [](const absl::Status&, absl::string_view) {});
  }

  void Find(const FindRequest& request, absl::Duration timeout, Reply reply) {
    const CallerId keeper = Keeper();
    if (keeper == self_) return OnFind(request, timeout, std::move(reply));
    functions_.ask(keeper, Control::kFind, PrintFind(request), timeout, std::move(reply));
  }

  void OnName(const NamedActor& named, bool drop, absl::Duration timeout, Reply reply) {
    absl::Status status = CheckName(named.name);
    absl::StatusOr<ActorRef> before = absl::NotFoundError("");
    NamedActor holder;
    if (status.ok()) {
      MutexLock lock(&mutex_);
      if (drop) {
        names_.Drop(named.name, named.owner, named.id);
      } else {
        status = names_.Put(named);
        if (const NamedActor* has = names_.Find(named.name);
            absl::IsAlreadyExists(status) && has != nullptr) {
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

  void OnFind(const FindRequest& request, absl::Duration timeout, Reply reply) {
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
    if (!status.ok()) return reply(status, {});
    functions_.locate(*ref, timeout,
                      [ref = *ref, reply = std::move(reply)](const absl::Status& located,
                                                             absl::string_view result) mutable {
                        const absl::StatusOr<ActorAddress> at =
                            located.ok() ? ActorAddress::Parse(result) : located;
                        if (!at.ok()) return reply(at.status(), {});
                        ref.at = *at;
                        reply(absl::OkStatus(), ref.Pack());
                      });
  }

 private:
  CallerId Keeper() {
    MutexLock lock(&mutex_);
    return keeper_;
  }
  void Send(const NamedActor& named, bool drop, absl::Duration timeout, Reply reply) {
    const CallerId keeper = Keeper();
    if (keeper == self_) return OnName(named, drop, timeout, std::move(reply));
    NameRequest request;
    request.drop = drop ? 1 : 0;
    request.name = named.name;
    request.type = named.type;
    request.signature = named.signature;
    request.id = named.id;
    request.reference = named.reference;
    functions_.ask(keeper, Control::kName, PrintName(request), timeout, std::move(reply));
  }

  const CallerId self_;
  const Functions functions_;
  Mutex mutex_;
  CallerId keeper_ ABSL_GUARDED_BY(mutex_);
  NameTable names_ ABSL_GUARDED_BY(mutex_);                     // of all, where this process keeps them
  std::map<uint64_t, NamedActor> own_ ABSL_GUARDED_BY(mutex_);  // that this process owns
};

Directory::Directory(const CallerId& self, Functions functions)
    : core_(std::make_shared<Core>(self, std::move(functions))) {}
void Directory::SetKeeper(const CallerId& process) { core_->SetKeeper(process); }
void Directory::ProcessLost(const CallerId& process) { core_->ProcessLost(process); }
void Directory::Name(const NamedActor& named, absl::Duration timeout, Reply reply) {
  core_->Name(named, timeout, std::move(reply));
}
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
  core_->OnName(named, request.drop != 0, timeout, std::move(reply));
}
void Directory::OnFind(const FindRequest& request, absl::Duration timeout, Reply reply) {
  core_->OnFind(request, timeout, std::move(reply));
}

}  // namespace gtrain::actors
