#include "actors/exec/cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "actors/plan/frames.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/threads.h"

namespace gtrain::actors {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(200);  // whether the cluster is being closed
constexpr absl::Duration kReportEvery = absl::Seconds(1);
constexpr absl::Duration kFinishWithin = absl::Seconds(10);
constexpr absl::Duration kEndWithin = absl::Minutes(1);
constexpr absl::Duration kKeepWithin = absl::Minutes(1);
constexpr absl::Duration kLocateWithin =
    absl::Minutes(10);                // calls that wait for it have deadlines of their own
constexpr int kMessagesInQueue = 64;  // of a connection: about 16 MiB, or a few long ones

// In an endpoint, between where it is on the network and its name on its machine.
constexpr char kBesides = '+';

CallerId ProcessOf(const ActorAddress& address) { return {address.host_high, address.host_low}; }

}  // namespace

// Threads of the host that are left to themselves may outlive the cluster.
struct Cluster::Ends {
  Mutex mutex;
  std::function<void(uint64_t)> on_end ABSL_GUARDED_BY(mutex), on_undone ABSL_GUARDED_BY(mutex);
  std::function<void(uint64_t, const absl::Status&, const std::string&)> on_saved ABSL_GUARDED_BY(mutex);
};

Cluster::Cluster(const HostOptions& options, const Clock& clock, const ObjectOptions& objects)
    : clock_(clock), ends_(std::make_shared<Ends>()), news_(std::make_shared<News>(clock)) {
  HostOptions host = options;
  host.on_end = [ends = ends_](uint64_t actor) {
    MutexLock lock(&ends->mutex);
    if (ends->on_end) ends->on_end(actor);
  };
  host.on_saved = [ends = ends_](uint64_t actor, const absl::Status& status, const std::string& state) {
    MutexLock lock(&ends->mutex);
    if (ends->on_saved) ends->on_saved(actor, status, state);
    return ends->on_saved != nullptr;
  };
  host.on_undone = [ends = ends_](uint64_t actor) {
    MutexLock lock(&ends->mutex);
    if (ends->on_undone) ends->on_undone(actor);
  };
  host.on_news = [news = news_](const std::string& text) { news->Add(text); };
  host_ = std::make_unique<Host>(host, clock);
  self_ = ProcessOf(host_->address());
  OwnedActors::Functions functions;
  functions.pick = [this](const Placement& placement, const std::map<CallerId, size_t>& actors) {
    return Pick(placement, actors);
  };
  functions.make = [this](const CallerId& at, const OwnedActors::Spec& spec, absl::Duration timeout,
                          Reply reply) { Make(at, spec, timeout, std::move(reply)); };
  functions.end = [this](const ActorAddress& at, const std::string& reason) { EndAt(at, reason); };
  functions.on_moved = [this](const OwnedActors::Moved& moved) { OnMoved(moved); };
  owned_ = std::make_unique<OwnedActors>(self_, std::move(functions), clock);
  directory_ = std::make_unique<Directory>(
      self_, Directory::Functions{[this](const CallerId& process, Control method,
                                         const std::string& arguments, absl::Duration timeout, Reply reply) {
                                    peers_->Ask(process, static_cast<uint32_t>(method), arguments, timeout,
                                                std::move(reply));
                                  },
                                  [this](const ActorRef& ref, absl::Duration timeout, Reply reply) {
                                    const CallerId owner{ref.owner_high, ref.owner_low};
                                    if (owner != self_)
                                      return Locate(ref, ActorAddress(), timeout, std::move(reply));
                                    const absl::StatusOr<ActorAddress> at = owned_->WhereLast(ref.id);
                                    reply(at.status(), at.ok() ? at->Pack() : "");
                                  }});
  objects_ = MakeObjects(objects);
  {
    MutexLock lock(&ends_->mutex);
    ends_->on_end = [this](uint64_t actor) { OnEnd(actor, /*tell=*/true); };
  }
  members_.push_back({self_, "", {}, false});
  drives_ = true;
}

absl::Status Cluster::Join(ClusterNetwork network) {
  GT_RETURN_IF_ERROR(Connect(std::move(network), /*threads=*/true));
  MutexLock lock(&mutex_);
  drives_ = false;
  gathering_ = StartWithoutSignals([this] { Gather(); });
  // A driver that ends as this process comes up gathers with nobody.
  mutex_.Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return gathered_ || over_; });
  return gathered_.value_or(absl::OkStatus());
}

absl::Status Cluster::JoinWithoutThreads(ClusterNetwork network) {
  GT_RETURN_IF_ERROR(Connect(std::move(network), /*threads=*/false));
  MutexLock lock(&mutex_);
  drives_ = false;
  return absl::OkStatus();
}

absl::Duration Cluster::Turn() {
  const bool any = host_->Turn();
  absl::Duration wait = peers_->Turn();
  if (const auto next = host_->NextDeadline())
    wait = std::clamp(*next - clock_.Now(), absl::ZeroDuration(), wait);
  return any ? absl::ZeroDuration() : wait;
}

absl::Status Cluster::Connect(ClusterNetwork network, bool threads) {
  network_ = std::move(network);
  port::NetOptions net;
  net.secret = network_->secret;
  net.message_bytes_max = static_cast<int64_t>(kCallBytesMax) + (1 << 20);
  net.queue_messages_max = kMessagesInQueue;
  const bool v6 = network_->address.find(':') != std::string::npos;
  GT_ASSIGN_OR_RETURN(auto server, network_->net->serve(v6 ? absl::StrCat("[", network_->address, "]:0")
                                                           : absl::StrCat(network_->address, ":0"),
                                                        net, &endpoint_));
  Peers::Options options;
  options.self = self_;
  options.thread = threads;
  options.connect = [module = network_->net, net](const std::string& endpoint) {
    return module->connect(endpoint.substr(0, endpoint.find(kBesides)), net);
  };
  if (network_->shared_memory) ListenHere(net, &options);
  options.control = [this](const CallerId& caller, uint32_t method, const std::string& arguments,
                           absl::Duration timeout,
                           Reply reply) { OnControl(caller, method, arguments, timeout, std::move(reply)); };
  options.on_gone = [this](const CallerId& process) { OnGone(process); };
  options.keep = [this](const CallerId& owner, uint64_t id, const std::string& record, Reply reply) {
    peers_->Ask(owner, static_cast<uint32_t>(Control::kKeep), PrintOwned({id, record}), kKeepWithin,
                std::move(reply));
  };
  options.locate = [this](const ActorRef& ref, const ActorAddress& not_at, Reply reply) {
    Locate(ref, not_at, kLocateWithin, std::move(reply));
  };
  directory_->Join();
  peers_ = std::make_unique<Peers>(host_.get(), std::move(server), std::move(options), clock_);
  {
    MutexLock lock(&ends_->mutex);
    ends_->on_end = [this, tell = peers_->OnEnd()](uint64_t actor) {
      OnEnd(actor, /*tell=*/true);
      tell(actor);
    };
    ends_->on_undone = peers_->OnUndone();
    ends_->on_saved = peers_->OnSaved();
  }
  return absl::OkStatus();
}

// Where that is not to be had, all goes over the network.
void Cluster::ListenHere(const port::NetOptions& net, Peers::Options* options) {
  net::ShmOptions here;
  here.secret = net.secret;
  here.message_bytes_max = static_cast<size_t>(net.message_bytes_max);
  auto server = net::ShmServer::Start(here);
  if (!server.ok())
    return LogWarning("actors of this machine call each other over the network: ", server.status().message());
  absl::StrAppend(&endpoint_, std::string(1, kBesides), (*server)->name());
  options->local = *std::move(server);
  options->connect_near = [here](const std::string& endpoint) -> std::unique_ptr<net::ShmLink> {
    const size_t at = endpoint.find(kBesides);
    if (at == std::string::npos) return nullptr;
    auto link = net::ShmLink::Connect(endpoint.substr(at + 1), here);
    return link.ok() ? *std::move(link) : nullptr;
  };
}

// The actors' last calls may need the others, and the others their answers.
Cluster::~Cluster() {
  bool lost = false;
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    lost = !over_ && !finished_;
  }
  if (lost && peers_ != nullptr) peers_->Quiet();
  owned_->Close();
  host_->Close();
  {
    MutexLock lock(&ends_->mutex);
    ends_->on_end = ends_->on_undone = nullptr;
    ends_->on_saved = nullptr;
  }
  if (gathering_.joinable()) gathering_.join();
  objects_->Close();
  if (peers_ != nullptr) peers_->Stop();  // its replies still come here
}

// ---- who is there

void Cluster::Gather() {
  for (;;) {
    absl::Status status = GatherOnce();
    {
      MutexLock lock(&mutex_);
      if (status.ok()) gathered_ = status;
    }
    if (status.ok() || absl::IsUnavailable(status)) {
      reported_ = 0;  // each generation has its first step
      do {
        ReportProgress();
        TellNews();
        status = network_->gathering->AwaitNext(kLook);
        const absl::Status left = LookWhoLeft();
        MutexLock lock(&mutex_);
        if (closing_) return;
        if (!left.ok()) status = left;
      } while (absl::IsDeadlineExceeded(status));
    }
    if (status.ok()) continue;
    peers_->SetProcesses({{self_, endpoint_, "this process"}});
    MutexLock lock(&mutex_);
    gathered_ = status;
    return;
  }
}

// Whether a generation gets anywhere is known by its first step; later ones are for people.
void Cluster::ReportProgress() {
  {
    MutexLock lock(&mutex_);
    if (!drives_) return;
  }
  const uint64_t answered = host_->counts().answered + peers_->answered();
  const Instant now = clock_.Now();
  if (answered == reported_ || (reported_ > 0 && now - reported_at_ < kReportEvery)) return;
  reported_ = answered;
  reported_at_ = now;
  network_->gathering->Report(answered);
}

void Cluster::TellNews() {
  while (const std::optional<std::string> text = news_->Take()) network_->gathering->Note(*text);
}

void Cluster::OnMoved(const OwnedActors::Moved& moved) {
  const auto name_of = [this](const CallerId& process) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const Member& member : members_) {
      if (member.process == process) return member.reach.name;
    }
    const auto lost = lost_names_.find(process);
    return lost == lost_names_.end() ? std::string("another process") : lost->second;
  };
  std::string text = absl::StrCat(moved.type, moved.name.empty() ? "" : " ", moved.name, " was lost with ");
  {
    MutexLock lock(&mutex_);
    absl::StrAppend(&text, name_of(moved.from));
    if (moved.to) absl::StrAppend(&text, "; it was made anew on ", name_of(*moved.to));
  }
  if (!moved.to) absl::StrAppend(&text, "; it has ended: ", moved.reason);
  news_->Add(std::move(text));
}

std::optional<int> Cluster::OwnerOf(uint64_t actor) const {
  MutexLock lock(&mutex_);
  const auto elsewhere = owner_of_.find(actor);
  const CallerId owner = elsewhere == owner_of_.end() ? self_ : elsewhere->second.owner;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].process == owner) return static_cast<int>(rank);
  }
  return std::nullopt;
}

std::string Cluster::List(absl::string_view question) const {
  const absl::StatusOr<ListQuestion> parsed = ParseListQuestion(question);
  if (!parsed.ok()) return PrintListError(parsed.status().message());
  Listing listing = host_->List(*parsed);
  for (ActorFacts& actor : listing.actors) actor.owner = OwnerOf(actor.number);
  return PrintListing(listing);
}

absl::Status Cluster::GatherOnce() {
  Introduction own{self_, endpoint_, network_->node, false};
  {
    MutexLock lock(&mutex_);
    own.drives = drives_;
  }
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> table,
                      network_->gathering->AllGather(PrintIntroduction(own), network_->join_timeout));
  return SetMembers(table);
}

absl::Status Cluster::SetMembers(const std::vector<std::string>& table) {
  std::vector<Introduction> all;
  std::vector<PeerProcess> processes;
  for (size_t rank = 0; rank < table.size(); ++rank) {
    absl::StatusOr<Introduction> one = ParseIntroduction(table[rank]);
    if (!one.ok())
      return absl::Status(one.status().code(), absl::StrCat("rank ", rank, ": ", one.status().message()));
    processes.push_back({one->process, one->endpoint, absl::StrCat("rank ", rank, " (", one->node, ")")});
    all.push_back(*std::move(one));
  }
  // Before this process knows that it drives, and looks for actors by their names.
  std::set<CallerId> members;
  for (const Introduction& one : all) members.insert(one.process);
  OfferOrphans(members, all[DriverOf(all)].process);
  directory_->SetKeeper(all[DriverOf(all)].process, members);
  std::vector<CallerId> unheard;
  {
    MutexLock lock(&mutex_);
    lost_names_.clear();
    for (const Member& member : members_) lost_names_[member.process] = member.reach.name;
    members_.clear();
    for (size_t rank = 0; rank < all.size(); ++rank)
      members_.push_back({all[rank].process, all[rank].node, processes[rank], false});
    rank_ = network_->gathering->rank();
    there_ = members;
    driver_ = DriverOf(all);
    drives_ |= all[driver_].process == self_;
    // Who heard of the generation before, in which this process was to be, and has not lived to see this one.
    for (const auto& [owner, actors] : owners_) {
      if (!members.contains(owner)) unheard.push_back(owner);
    }
  }
  objects_->SetShares(static_cast<size_t>(
      std::ranges::count(all, network_->node, [](const Introduction& one) { return one.node; })));
  peers_->SetProcesses(std::move(processes));
  for (const CallerId& owner : unheard) OnGone(owner);
  return absl::OkStatus();
}

// A process that has ended well before its driver is lost as any other.
absl::Status Cluster::LookWhoLeft() {
  const std::vector<int> left = network_->gathering->left();
  if (left.empty()) return absl::OkStatus();
  std::vector<PeerProcess> processes;
  bool changed = false;
  {
    MutexLock lock(&mutex_);
    if (!gathered_ && network_->gathering->late()) over_ = true;  // none ends well before the driver has
    if (!gathered_ && !over_) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", left[0], " has ended and runs no actors: all ranks of a job of actors call gtrain::Main"));
    }
    for (const int rank : left) {
      if (rank < 0 || static_cast<size_t>(rank) >= members_.size()) continue;
      over_ |= static_cast<size_t>(rank) == driver_;
      changed |= !std::exchange(members_[static_cast<size_t>(rank)].left, true);
    }
    for (const Member& member : members_) {
      if (!member.left) processes.push_back(member.reach);
    }
  }
  if (changed) peers_->SetProcesses(std::move(processes));
  return absl::OkStatus();
}

absl::StatusOr<bool> Cluster::AwaitTurn() {
  MutexLock lock(&mutex_);
  mutex_.Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return over_ || drives_ || (gathered_ && !gathered_->ok());
  });
  if (over_) return false;
  if (gathered_ && !gathered_->ok()) return *gathered_;
  return true;
}

absl::Status Cluster::AwaitOver(absl::Duration timeout) {
  MutexLock lock(&mutex_);
  const auto over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return gathered_ && !gathered_->ok(); };
  if (mutex_.AwaitFor(timeout, over)) return absl::UnavailableError(gathered_->message());
  return absl::DeadlineExceededError("the generation goes on, or another one may come");
}

void Cluster::Finish() {
  {
    MutexLock lock(&mutex_);
    finished_ = true;
  }
  if (peers_ == nullptr) return;
  struct Waiting {
    Mutex mutex;
    size_t left ABSL_GUARDED_BY(mutex) = 0;
  };
  auto waiting = std::make_shared<Waiting>();
  std::vector<CallerId> others;
  {
    MutexLock lock(&mutex_);
    for (const Member& member : members_) {
      if (member.process != self_) others.push_back(member.process);
    }
  }
  {
    MutexLock lock(&waiting->mutex);
    waiting->left = others.size();
  }
  for (const CallerId& process : others) {
    peers_->Ask(process, static_cast<uint32_t>(Control::kFinish), "", kFinishWithin,
                [waiting](const absl::Status&, absl::string_view) {
                  MutexLock lock(&waiting->mutex);
                  --waiting->left;
                });
  }
  MutexLock lock(&waiting->mutex);
  waiting->mutex.AwaitFor(kFinishWithin + absl::Seconds(1),
                          [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(waiting->mutex) { return waiting->left == 0; });
}

bool Cluster::drives() const {
  MutexLock lock(&mutex_);
  return drives_;
}

int Cluster::processes() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(members_.size());
}

// ---- objects

std::shared_ptr<Objects> Cluster::MakeObjects(const ObjectOptions& options) {
  Objects::Functions functions;
  functions.ask = [this](const CallerId& process, Control method, const std::string& arguments,
                         absl::Duration timeout, Reply reply) {
    if (peers_ == nullptr) return reply(absl::NotFoundError("it is of another job"), {});
    peers_->Ask(process, static_cast<uint32_t>(method), arguments, timeout, std::move(reply));
  };
  functions.is_near = [this](const CallerId& process) { return IsNear(process); };
  functions.copies_at = [this] { return CopiesAt(); };
  functions.name = [this](const CallerId& process) { return NameOf(process); };
  return std::make_shared<Objects>(self_, options, std::move(functions), clock_);
}

bool Cluster::IsNear(const CallerId& process) const {
  MutexLock lock(&mutex_);
  for (const Member& member : members_) {
    if (member.process == process) return network_ && member.node == network_->node;
  }
  return false;
}

CallerId Cluster::CopiesAt() const {
  MutexLock lock(&mutex_);
  for (const Member& member : members_) {
    if (!member.left && network_ && member.node == network_->node) return member.process;
  }
  return self_;
}

std::string Cluster::NameOf(const CallerId& process) const {
  MutexLock lock(&mutex_);
  for (const Member& member : members_) {
    if (member.process == process && !member.reach.name.empty()) return member.reach.name;
  }
  return process == self_ ? "this process" : "a process that is no more";
}

// ---- actors

absl::StatusOr<CallerId> Cluster::Pick(const Placement& placement,
                                       const std::map<CallerId, size_t>& actors) const {
  MutexLock lock(&mutex_);
  std::vector<Place> places;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    // One may be known to be dead before the generation that goes on without it has begun.
    if (members_[rank].left || gone_.contains(members_[rank].process)) continue;
    const auto mine = actors.find(members_[rank].process);
    places.push_back({static_cast<int>(rank), members_[rank].node, mine == actors.end() ? 0 : mine->second});
  }
  const std::optional<size_t> at = placement.rank
                                       ? PlaceOfRank(places, *placement.rank)
                                       : PickPlace(places, placement.spread, rank_,
                                                   {.strict = placement.apart > 0, .away = placement.away});
  if (at) return members_[static_cast<size_t>(places[*at].rank)].process;
  if (placement.apart > 0 && !placement.rank) {
    return absl::FailedPreconditionError(
        absl::StrCat("each ", placement.spread == Spread::kNodes ? "machine" : "process",
                     " of the job has an actor of this group, which are to be apart: it has ", places.size(),
                     " processes now, and so large a group needs more"));
  }
  return absl::NotFoundError(placement.rank
                                 ? absl::StrCat("there is no rank ", *placement.rank,
                                                " to spawn on: the job has ", places.size(), " now")
                                 : "this process is no rank of the job now");
}

void Cluster::Spawn(absl::string_view type, const SpawnOptions& options, const Placement& placement,
                    std::string arguments, absl::Duration timeout, Reply reply) {
  OwnedActors::Spec spec;
  spec.type = std::string(type);
  spec.options = options;
  spec.placement = placement;
  spec.arguments = std::move(arguments);
  SpawnSpec(std::move(spec), timeout, std::move(reply));
}

void Cluster::SpawnSpec(OwnedActors::Spec spec, absl::Duration timeout, Reply reply) {
  absl::Status may;
  if (spec.options.concurrency < 1 || spec.options.concurrency > kConcurrencyMax) {
    may = absl::InvalidArgumentError(absl::StrCat("an actor has 1 to ", kConcurrencyMax, " calls at a time"));
  } else if (spec.options.keep && spec.options.concurrency > 1) {
    may = absl::InvalidArgumentError(
        "an actor that is kept has one call at a time: its state is what is there between two");
  } else if (spec.options.keep && spec.arguments.size() > kKeptArgumentsMax) {
    may =
        absl::InvalidArgumentError(absl::StrCat("the arguments of a kept actor have ", spec.arguments.size(),
                                                " bytes, and ", kKeptArgumentsMax, " are the most"));
  } else if (spec.options.keep) {
    may = host_->MayKeep(spec.type);
  }
  if (!may.ok()) return reply(may, {});
  owned_->Spawn(std::move(spec), timeout, std::move(reply));
}

void Cluster::SpawnNamed(absl::string_view name, absl::string_view type, const SpawnOptions& options,
                         const Placement& placement, std::string arguments, absl::Duration timeout,
                         Reply reply, bool detached) {
  if (const absl::Status is_name = CheckName(name); !is_name.ok()) return reply(is_name, {});
  const absl::StatusOr<std::string> signature = host_->SignatureOf(type);
  if (!signature.ok()) return reply(signature.status(), {});
  NamedActor named;
  named.name = std::string(name);
  named.type = std::string(type);
  named.signature = *signature;
  named.owner = self_;
  const Instant deadline = clock_.Now() + timeout;
  OwnedActors::Spec spec;
  spec.type = named.type;
  spec.options = options;
  spec.options.name = named.name;
  spec.placement = placement;
  spec.arguments = std::move(arguments);
  spec.detached = detached;
  named.detached = detached;
  if (detached) spec.placement.away = true;
  SpawnSpec(std::move(spec), timeout,
            [this, named, deadline, reply = std::move(reply)](const absl::Status& status,
                                                              absl::string_view result) mutable {
              const absl::StatusOr<ActorRef> ref = status.ok() ? ActorRef::Parse(result) : status;
              if (!ref.ok()) return reply(ref.status(), {});  // the cluster may be gone then
              named.id = ref->id;
              named.reference = std::string(result);
              // Nobody has heard of it yet.
              directory_->Name(named, deadline - clock_.Now(),
                               [this, named, reply = std::move(reply)](const absl::Status& status,
                                                                       absl::string_view) mutable {
                                 if (!status.ok()) owned_->End(named.id, "it could not have its name");
                                 if (status.ok() && named.detached)
                                   return TellNamed(named.id, named.reference, std::move(reply));
                                 reply(status, status.ok() ? named.reference : "");
                               });
            });
}

void Cluster::Find(absl::string_view name, absl::string_view type, absl::Duration timeout, Reply reply) {
  const absl::StatusOr<std::string> signature = host_->SignatureOf(type);
  if (!signature.ok()) return reply(signature.status(), {});
  FindRequest request;
  request.name = name;
  request.type = type;
  request.signature = *signature;
  if (const absl::Status is_name = CheckName(name); !is_name.ok()) return reply(is_name, {});
  directory_->Find(request, timeout, std::move(reply));
}

void Cluster::Make(const CallerId& at, const OwnedActors::Spec& spec, absl::Duration timeout, Reply reply) {
  const absl::StatusOr<std::string> signature = host_->SignatureOf(spec.type);
  if (!signature.ok()) return reply(signature.status(), {});
  const SpawnRequest request = RequestOf(spec, *signature);
  if (at == self_) return MakeHere(self_, request, timeout, std::move(reply));
  // Nobody has an actor whose spawn took too long.
  const auto late = [this](absl::string_view result) {
    if (const auto made = ActorAddress::Parse(result); made.ok()) EndAt(*made, "its spawn took too long");
  };
  peers_->Ask(at, static_cast<uint32_t>(Control::kSpawn), PrintSpawn(request), timeout, std::move(reply),
              late);
}

// Views into `spec` and `signature`.
SpawnRequest Cluster::RequestOf(const OwnedActors::Spec& spec, absl::string_view signature) {
  SpawnRequest request;
  request.type = spec.type;
  request.signature = signature;
  request.restarts = spec.options.restarts;
  request.concurrency = spec.options.concurrency;
  request.id = spec.id;
  request.kept = spec.options.keep ? 1 : 0;
  request.record = spec.record;
  request.name = spec.options.name;
  request.detached = spec.detached ? (spec.named ? 2 : 1) : 0;
  request.spread = static_cast<uint8_t>(spec.placement.spread);
  request.rank = spec.placement.rank.value_or(-1);
  request.arguments = spec.arguments;
  return request;
}

// Without what belongs to one owner.
OwnedActors::Spec Cluster::SpecOf(const SpawnRequest& request) {
  OwnedActors::Spec spec;
  spec.type = std::string(request.type);
  spec.options.restarts = request.restarts;
  spec.options.concurrency = request.concurrency;
  spec.options.keep = request.kept != 0;
  spec.placement.spread = static_cast<Spread>(request.spread);
  if (request.rank >= 0) spec.placement.rank = request.rank;
  spec.placement.away = request.detached != 0;
  spec.options.name = std::string(request.name);
  spec.detached = request.detached != 0;
  spec.named = request.detached == 2;
  spec.arguments = std::string(request.arguments);
  return spec;
}

absl::Status Cluster::CheckClass(const SpawnRequest& request) const {
  GT_ASSIGN_OR_RETURN(const std::string signature, host_->SignatureOf(request.type));
  if (signature == request.signature) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the class ", request.type, " is ", signature, " there, and ", request.signature,
                   " where it is spawned: all ranks of a job run one build of the program"));
}

void Cluster::MakeHere(const CallerId& owner, const SpawnRequest& request, absl::Duration timeout,
                       Reply reply) {
  SpawnOptions options;
  options.restarts = request.restarts;
  options.concurrency = request.concurrency;
  options.name = std::string(request.name);
  options.keep = request.kept != 0;
  std::string spawn;
  if (request.detached != 0 && owner != self_) {
    SpawnRequest again = request;
    again.record = {};  // whoever adopts it gets what it has then
    spawn = PrintSpawn(again);
  }
  KeptRecord record;
  if (!request.record.empty()) {
    absl::StatusOr<KeptRecord> kept = ParseRecord(request.record);
    if (!kept.ok()) return reply(kept.status(), {});
    record = *std::move(kept);
    options.state = std::exchange(record.state, "");
  }
  host_->Spawn(request.type, options, std::string(request.arguments), timeout,
               [this, owner, id = request.id, kept = request.kept != 0, record = std::move(record),
                spawn = std::move(spawn),
                reply = std::move(reply)](const absl::Status& status, absl::string_view result) mutable {
                 const auto address = ActorAddress::Parse(result);
                 if (status.ok() && address.ok()) {
                   if (kept && peers_ != nullptr)
                     peers_->Keep(address->number, owner, id, std::move(record), !spawn.empty());
                   OwnedBy(owner, id, *address, std::move(spawn));
                 }
                 reply(status, result);
               });
}

void Cluster::Call(const ActorRef& ref, int method, std::string arguments, absl::Duration timeout,
                   Reply reply) {
  // Calls to one whose state is kept have numbers wherever it is.
  if (peers_ == nullptr || (ProcessOf(ref.at) == self_ && !ref.kept()))
    return host_->Call(ref.at, method, std::move(arguments), timeout, std::move(reply));
  peers_->Call(ref, method, std::move(arguments), timeout, std::move(reply));
}

void Cluster::End(const ActorRef& ref, absl::string_view reason) {
  if (CallerId{ref.owner_high, ref.owner_low} != self_) return;
  owned_->End(ref.id, std::string(reason));
  directory_->Release(ref.id);
}

// All endings that wait go as one call, so that whoever has thousands of actors may let them go at once.
void Cluster::EndAt(const ActorAddress& at, const std::string& reason) {
  const CallerId process = ProcessOf(at);
  if (process == self_) return host_->End(at, reason);
  {
    MutexLock lock(&mutex_);
    if (gone_.contains(process)) return;
    endings_[process].waiting[reason].push_back(at.number);
  }
  SendEndings(process);
}

void Cluster::SendEndings(const CallerId& process) {
  EndRequest request;
  std::string reason;
  {
    MutexLock lock(&mutex_);
    const auto it = endings_.find(process);
    if (it == endings_.end() || it->second.sent || closing_) return;
    if (it->second.waiting.empty() || gone_.contains(process)) {
      endings_.erase(it);
      return;
    }
    it->second.sent = true;
    auto next = it->second.waiting.extract(it->second.waiting.begin());
    reason = next.key();
    request.actors = std::move(next.mapped());
  }
  request.reason = reason;
  peers_->Ask(
      process, static_cast<uint32_t>(Control::kEnd), PrintEnd(request), kEndWithin,
      [this, process, reason, actors = request.actors](const absl::Status& status, absl::string_view) {
        {
          MutexLock lock(&mutex_);
          const auto it = endings_.find(process);
          if (it == endings_.end()) return;
          it->second.sent = false;
          if (absl::IsDeadlineExceeded(status)) {
            auto& waiting = it->second.waiting[reason];
            waiting.insert(waiting.end(), actors.begin(), actors.end());
          }
        }
        SendEndings(process);
      });
}

void Cluster::Watch(const ActorRef& ref, Reply reply) {
  if (CallerId{ref.owner_high, ref.owner_low} != self_) {
    return reply(absl::FailedPreconditionError("another process owns this actor, and hears of its end"), {});
  }
  owned_->Watch(ref.id, std::move(reply));
}

void Cluster::Locate(const ActorRef& ref, const ActorAddress& not_at, absl::Duration timeout, Reply reply) {
  ActorRef asked = ref;
  asked.at = not_at;
  AskOwner(ref, Control::kLocate, asked.Pack(), timeout, std::move(reply));
}

// ---- what others ask of this process

void Cluster::OnControl(const CallerId& caller, uint32_t method, const std::string& arguments,
                        absl::Duration timeout, Reply reply) {
  switch (static_cast<Control>(method)) {
    case Control::kSpawn:
      return OnSpawn(caller, arguments, timeout, std::move(reply));
    case Control::kEnd: {
      const absl::StatusOr<EndRequest> request = ParseEnd(arguments);
      if (!request.ok()) return reply(request.status(), {});
      ActorAddress address = host_->address();
      for (const uint64_t number : request->actors) {
        OnEnd(number, /*tell=*/false);  // its owner knows
        address.number = number;
        host_->End(address, request->reason);
      }
      return reply(absl::OkStatus(), {});
    }
    case Control::kKeep: {
      const absl::StatusOr<OwnedReport> report = ParseOwned(arguments);
      if (!report.ok()) return reply(report.status(), {});
      return reply(owned_->Keep(report->id, caller, report->text), {});
    }
    case Control::kEnded: {
      const absl::StatusOr<OwnedReport> report = ParseOwned(arguments);
      if (report.ok()) owned_->EndedBy(report->id, caller, std::string(report->text));
      return reply(report.status(), {});
    }
    case Control::kName: {
      const absl::StatusOr<NameRequest> request = ParseName(arguments);
      if (!request.ok()) return reply(request.status(), {});
      return directory_->OnName(caller, *request, timeout, std::move(reply));
    }
    case Control::kFind: {
      const absl::StatusOr<FindRequest> request = ParseFind(arguments);
      if (!request.ok()) return reply(request.status(), {});
      return directory_->OnFind(caller, *request, timeout, std::move(reply));
    }
    case Control::kFinish: {
      {
        MutexLock lock(&mutex_);
        over_ = true;
      }
      return reply(absl::OkStatus(), {});
    }
    case Control::kLocate:
    case Control::kDetach:
    case Control::kAdopt:
    case Control::kRelease:
    case Control::kNamed:
      return OnDetachedControl(caller, static_cast<Control>(method), arguments, timeout, std::move(reply));
    case Control::kPart:
    case Control::kCopy:
      return OnObjectControl(static_cast<Control>(method), arguments, timeout, std::move(reply));
  }
  reply(absl::UnimplementedError(absl::StrCat("a process has no method ", method)), {});
}

void Cluster::OnDetachedControl(const CallerId& caller, Control method, const std::string& arguments,
                                absl::Duration timeout, Reply reply) {
  if (method == Control::kDetach) return OnDetach(arguments, timeout, std::move(reply));
  if (method == Control::kAdopt) return OnAdopt(caller, arguments, std::move(reply));
  if (method == Control::kNamed) return OnNamed(caller, arguments, std::move(reply));
  const absl::StatusOr<ActorRef> ref = ActorRef::Parse(arguments);
  if (!ref.ok()) return reply(ref.status(), {});
  absl::AnyInvocable<void()> then = [this, method, ref = *ref, reply = std::move(reply)]() mutable {
    if (method == Control::kLocate) return OnLocate(ref, std::move(reply));
    OnRelease(ref, std::move(reply));
  };
  if (OwnIdOf(*ref)) return then();
  directory_->AwaitNames(std::move(then));  // whoever has it may still be about to say so
}

void Cluster::OnObjectControl(Control method, const std::string& arguments, absl::Duration timeout,
                              Reply reply) {
  if (method == Control::kPart) {
    const absl::StatusOr<PartRequest> request = ParsePart(arguments);
    if (!request.ok()) return reply(request.status(), {});
    return objects_->OnPart(*request, std::move(reply));
  }
  const absl::StatusOr<ObjectRef> ref = ParseObject(arguments);
  if (!ref.ok()) return reply(ref.status(), {});
  objects_->OnCopy(*ref, timeout, std::move(reply));
}

void Cluster::OnSpawn(const CallerId& caller, absl::string_view bytes, absl::Duration timeout, Reply reply) {
  const absl::StatusOr<SpawnRequest> request = ParseSpawn(bytes);
  if (!request.ok()) return reply(request.status(), {});
  if (const absl::Status same = CheckClass(*request); !same.ok()) return reply(same, {});
  MakeHere(caller, *request, timeout, std::move(reply));
}

// So that it ends with the process of its owner.
void Cluster::OwnedBy(const CallerId& owner, uint64_t id, const ActorAddress& address, std::string spawn) {
  bool gone = false;
  {
    MutexLock lock(&mutex_);
    gone = gone_.contains(owner);
    if (!gone) {
      if (owner != self_) owners_[owner].insert(address.number);
      if (!spawn.empty()) {
        const absl::StatusOr<SpawnRequest> request = ParseSpawn(spawn);
        const bool named = request.ok() && request->detached == 2;
        detached_[address.number] = {{{owner, id}}, std::move(spawn), named, {}};
      }
      owner_of_[address.number] = {owner, id};
    }
  }
  if (gone) host_->End(address, "the process of its owner has ended");
}

void Cluster::OnGone(const CallerId& process) {
  std::set<uint64_t> owned;
  {
    MutexLock lock(&mutex_);
    gone_.insert(process);
    endings_.erase(process);
    if (const auto it = owners_.find(process); it != owners_.end()) {
      owned = std::move(it->second);
      owners_.erase(it);
    }
    // Detached ones are offered to another process (OfferOrphans), but for those that have no name yet.
    std::erase_if(owned, [this](uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const auto detached = detached_.find(number);
      return detached != detached_.end() && detached->second.named;
    });
    for (const uint64_t number : owned) owner_of_.erase(number);
  }
  ActorAddress address = host_->address();
  for (const uint64_t number : owned) {
    address.number = number;
    host_->End(address, "the process of its owner has ended");
  }
  owned_->ProcessLost(process);
  directory_->ProcessLost(process);
}

void Cluster::OnEnd(uint64_t actor, bool tell) {
  OwnedElsewhere of;
  {
    MutexLock lock(&mutex_);
    const auto it = owner_of_.find(actor);
    if (it == owner_of_.end()) return;
    of = it->second;
    if (const auto owner = owners_.find(of.owner); owner != owners_.end()) {
      owner->second.erase(actor);
      if (owner->second.empty()) owners_.erase(owner);
    }
    owner_of_.erase(it);
    detached_.erase(actor);
    tell = tell && !closing_;
  }
  if (!tell) return;
  const std::string why = host_->WhyEnded(actor);
  if (of.owner == self_) return owned_->EndedBy(of.id, self_, why);
  peers_->Ask(of.owner, static_cast<uint32_t>(Control::kEnded), PrintOwned({of.id, why}), kEndWithin,
              [](const absl::Status&, absl::string_view) {});
}

}  // namespace gtrain::actors
