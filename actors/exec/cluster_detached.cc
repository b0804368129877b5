// Detached actors: they are owned by the process that keeps the names, and when that is lost by the next one
// that does. Each process that has one knows what it was made of, and says so to the next owner before it
// says that these were all of its names: so who looks for it there finds it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "actors/exec/cluster.h"
#include "actors/plan/bytes.h"

namespace gtrain::actors {
namespace {

constexpr absl::Duration kAdoptWithin = absl::Minutes(1);
constexpr absl::Duration kNamedWithin = absl::Minutes(1);

std::string PrintId(uint64_t id) {
  std::string bytes;
  PutNumber(id, &bytes);
  return bytes;
}
// 0: that is none.
uint64_t ParseId(absl::string_view bytes) {
  uint64_t id = 0;
  return TakeNumber(&bytes, &id) && bytes.empty() ? id : 0;
}

}  // namespace

void Cluster::SpawnDetached(absl::string_view name, absl::string_view type, const SpawnOptions& options,
                            const Placement& placement, std::string arguments, absl::Duration timeout,
                            Reply reply) {
  if (const absl::Status is_name = CheckName(name); !is_name.ok()) return reply(is_name, {});
  const absl::StatusOr<std::string> signature = host_->SignatureOf(type);
  if (!signature.ok()) return reply(signature.status(), {});
  const std::optional<CallerId> keeper = directory_->keeper();
  if (!keeper || *keeper == self_) {
    return SpawnNamed(name, type, options, placement, std::move(arguments), timeout, std::move(reply),
                      /*detached=*/true);
  }
  OwnedActors::Spec spec;
  spec.type = std::string(type);
  spec.options = options;
  spec.placement = placement;
  spec.options.name = std::string(name);
  spec.detached = true;
  spec.arguments = std::move(arguments);
  peers_->Ask(*keeper, static_cast<uint32_t>(Control::kDetach), PrintSpawn(RequestOf(spec, *signature)),
              timeout, std::move(reply));
}

void Cluster::OnDetach(absl::string_view bytes, absl::Duration timeout, Reply reply) {
  const absl::StatusOr<SpawnRequest> request = ParseSpawn(bytes);
  if (!request.ok()) return reply(request.status(), {});
  if (const absl::Status same = CheckClass(*request); !same.ok()) return reply(same, {});
  const OwnedActors::Spec spec = SpecOf(*request);
  SpawnNamed(spec.options.name, spec.type, spec.options, spec.placement, spec.arguments, timeout,
             std::move(reply),
             /*detached=*/true);
}

void Cluster::EndDetached(const ActorRef& ref, absl::Duration timeout, Reply reply) {
  if (!ref.detached())
    return reply(absl::InvalidArgumentError("this actor is not detached: it ends with its owner"), {});
  AskOwner(ref, Control::kRelease, ref.Pack(), timeout, std::move(reply));
}

void Cluster::OnRelease(const ActorRef& ref, Reply reply) {
  const std::optional<uint64_t> id = OwnIdOf(ref);
  const absl::Status there =
      id ? owned_->WhereLast(*id).status() : absl::NotFoundError("the actor is no more: nobody owns it");
  if (!there.ok()) return reply(there, {});
  if (!owned_->IsDetached(*id))
    return reply(absl::InvalidArgumentError("this actor is not detached: it ends with its owner"), {});
  owned_->End(*id, "it was ended by its reference");
  directory_->Release(*id);
  reply(absl::OkStatus(), {});
}

void Cluster::OnLocate(const ActorRef& ref, Reply reply) {
  const std::optional<uint64_t> id = OwnIdOf(ref);
  if (!id) return reply(absl::NotFoundError("the actor is no more: nobody owns it"), {});
  owned_->Locate(*id, ref.at, std::move(reply));
}

// ---- who owns it

// The number that this process has for an actor that it owns, or has adopted.
std::optional<uint64_t> Cluster::OwnIdOf(const ActorRef& ref) const {
  const OwnedName name{{ref.owner_high, ref.owner_low}, ref.id};
  if (name.owner == self_) return ref.id;
  MutexLock lock(&mutex_);
  const auto it = adopted_.find(name);
  if (it == adopted_.end()) return std::nullopt;
  return it->second;
}

// The owner that its reference names, or who owns a detached one since that was lost.
void Cluster::AskOwner(const ActorRef& ref, Control method, const std::string& arguments,
                       absl::Duration timeout, Reply reply) {
  const CallerId owner{ref.owner_high, ref.owner_low};
  bool gone = false;
  {
    MutexLock lock(&mutex_);
    gone = gone_.contains(owner) || (!there_.empty() && !there_.contains(owner));
  }
  if (owner == self_ || peers_ == nullptr)
    return OnControl(self_, static_cast<uint32_t>(method), arguments, timeout, std::move(reply));
  if (gone && ref.detached()) return AskNextOwner(method, arguments, timeout, std::move(reply));
  if (!ref.detached())
    return peers_->Ask(owner, static_cast<uint32_t>(method), arguments, timeout, std::move(reply));
  const Instant deadline = clock_.Now() + timeout;
  peers_->Ask(owner, static_cast<uint32_t>(method), arguments, timeout,
              [this, method, arguments, deadline, reply = std::move(reply)](
                  const absl::Status& status, absl::string_view result) mutable {
                if (!absl::IsUnavailable(status)) return reply(status, result);
                AskNextOwner(method, arguments, deadline - clock_.Now(), std::move(reply));
              });
}

// Whoever keeps the names then, when that one is lost, too. Also of this process itself: a call has a
// deadline.
void Cluster::AskNextOwner(Control method, const std::string& arguments, absl::Duration timeout,
                           Reply reply) {
  const std::optional<CallerId> keeper = directory_->keeper();
  if (!keeper || timeout <= absl::ZeroDuration())
    return reply(absl::UnavailableError("its owner is gone, and nobody owns it now"), {});
  const Instant deadline = clock_.Now() + timeout;
  peers_->Ask(*keeper, static_cast<uint32_t>(method), arguments, timeout,
              [this, asked = *keeper, method, arguments, deadline, reply = std::move(reply)](
                  const absl::Status& status, absl::string_view result) mutable {
                if (!absl::IsUnavailable(status) || directory_->keeper() == asked)
                  return reply(status, result);
                AskNextOwner(method, arguments, deadline - clock_.Now(), std::move(reply));
              });
}

// ---- adoption

// Whoever spawned it hears of it when the process that has it knows that it has its name: only then it is
// offered to another owner, so that of two spawns of one name the one that was too late is not.
void Cluster::TellNamed(uint64_t id, const std::string& reference, Reply reply) {
  owned_->Named(id);
  const ActorAddress at = ActorRef::Parse(reference)->at;
  const CallerId process{at.host_high, at.host_low};
  if (process == self_ || peers_ == nullptr) return reply(absl::OkStatus(), reference);
  peers_->Ask(process, static_cast<uint32_t>(Control::kNamed), PrintId(at.number), kNamedWithin,
              [reference, reply = std::move(reply)](const absl::Status&, absl::string_view) mutable {
                reply(absl::OkStatus(), reference);  // one that is lost is made anew, and knows
              });
}

void Cluster::OnNamed(const CallerId& caller, absl::string_view bytes, Reply reply) {
  {
    MutexLock lock(&mutex_);
    const auto it = detached_.find(ParseId(bytes));
    if (it != detached_.end() && it->second.names.front().owner == caller) it->second.named = true;
  }
  reply(absl::OkStatus(), {});
}

// Those of this process whose owners are not among `members`. Before the keeper hears that it has heard of
// all names.
void Cluster::OfferOrphans(const std::set<CallerId>& members, const CallerId& keeper) {
  std::vector<std::pair<uint64_t, std::string>> offers;
  {
    MutexLock lock(&mutex_);
    for (auto& [number, detached] : detached_) {
      if (!detached.named || members.contains(detached.names.front().owner) || detached.offered == keeper)
        continue;
      detached.offered = keeper;
      offers.emplace_back(number, PrintAdopt({detached.names, number, detached.spawn}));
    }
  }
  for (auto& [number, offer] : offers) {
    Reply reply = [this, number = number, keeper](const absl::Status& status, absl::string_view id) {
      OnOffered(number, keeper, status, ParseId(id));
    };
    if (keeper == self_) {
      OnAdopt(self_, offer, std::move(reply));
    } else {
      peers_->Ask(keeper, static_cast<uint32_t>(Control::kAdopt), offer, kAdoptWithin, std::move(reply));
    }
  }
}

void Cluster::OnOffered(uint64_t number, const CallerId& keeper, const absl::Status& status, uint64_t id) {
  bool ended = false, again = false;
  std::set<CallerId> members;
  {
    MutexLock lock(&mutex_);
    members = there_;
    const auto it = detached_.find(number);
    ended = it == detached_.end();
    // What ends because this process closes is lost with it: its new owner makes it anew.
    if (ended && closing_) return;
    if (!ended && it->second.offered != keeper) return;  // somebody else has been asked since
    if (!ended) it->second.offered.reset();
    // Another one keeps the names meanwhile, or none could be asked: who does now is.
    again = !ended && (!members.contains(keeper) || absl::IsUnavailable(status) ||
                       absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status));
    if (!ended && !again && status.ok()) {
      std::vector<OwnedName>& names = it->second.names;
      names.insert(names.begin(), {keeper, id});
      if (names.size() > kAdoptionsMax) names.erase(names.end() - 2);
      owner_of_[number] = {keeper, id};
      if (keeper != self_) owners_[keeper].insert(number);
    }
  }
  if (again) {
    const std::optional<CallerId> now = directory_->keeper();
    // The one that was asked is about to be lost: then the next table comes.
    if (now && members.contains(*now) && (*now != keeper || !absl::IsUnavailable(status)))
      OfferOrphans(members, *now);
    return;
  }
  if (ended) {
    if (status.ok() && peers_ != nullptr) {
      peers_->Ask(keeper, static_cast<uint32_t>(Control::kEnded), PrintOwned({id, host_->WhyEnded(number)}),
                  kAdoptWithin, [](const absl::Status&, absl::string_view) {});
    }
    return;
  }
  if (status.ok()) return peers_->KeptBy(number, keeper, id);
  if (absl::IsCancelled(status)) return;
  ActorAddress address = host_->address();
  address.number = number;
  host_->End(address, absl::StrCat("its owner is gone, and no other process owns it: ", status.message()));
}

void Cluster::OnAdopt(const CallerId& caller, absl::string_view bytes, Reply reply) {
  const absl::StatusOr<AdoptRequest> request = ParseAdopt(bytes);
  if (!request.ok()) return reply(request.status(), {});
  const absl::StatusOr<SpawnRequest> spawn = ParseSpawn(request->spawn);
  if (!spawn.ok()) return reply(spawn.status(), {});
  if (const absl::Status same = CheckClass(*spawn); !same.ok()) return reply(same, {});
  if (const absl::Status is_name = CheckName(spawn->name); !is_name.ok()) return reply(is_name, {});
  if (spawn->detached == 0) return reply(absl::InvalidArgumentError("it ends with its owner"), {});
  const ActorAddress at{caller.high, caller.low, request->number};
  OwnedActors::Spec spec = SpecOf(*spawn);
  spec.named = true;
  spec.unkept = spec.options.keep;
  uint64_t id = 0;
  {
    MutexLock lock(&mutex_);
    const auto known = adopted_.find(request->names.front());
    if (known != adopted_.end()) id = known->second;  // it has asked before
  }
  if (id != 0) return reply(absl::OkStatus(), PrintId(id));
  id = owned_->Adopt(spec, at);
  {
    MutexLock lock(&mutex_);
    for (const OwnedName& name : request->names) adopted_[name] = id;
  }
  ActorRef ref;
  ref.owner_high = self_.high;
  ref.owner_low = self_.low;
  ref.id = id;
  ref.born_high = request->names.back().owner.high;
  ref.born_low = request->names.back().owner.low;
  ref.born_id = request->names.back().id;
  ref.flags = ActorRef::kDetached;
  if (spec.options.keep) ref.flags |= ActorRef::kKept;
  ref.at = at;
  directory_->NameAgain(
      {spec.options.name, spec.type, std::string(spawn->signature), self_, id, ref.Pack()},
      [this, id, reply = std::move(reply)](const absl::Status& status, absl::string_view) mutable {
        if (!status.ok()) owned_->End(id, "another actor has its name");
        reply(status, PrintId(id));
      });
}

}  // namespace gtrain::actors
