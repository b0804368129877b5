// Every collective begins with Enter: each rank puts down what it is about to do, all read what all put
// down, and a difference is an error with the same words on every rank (L6). A barrier is nothing but that.
#include "comm/exec/communicator.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "comm/backends/flat/flat_backend.h"
#include "comm/backends/hierarchical/hierarchical_backend.h"
#include "comm/backends/shared_memory/shared_memory_backend.h"
#include "comm/exec/exec_communicator.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/fabric_transport.h"
#include "comm/ucx/network.h"

namespace gtrain::comm {
namespace {

// A rank with impossible arguments waits so long for the others, to tell them.
constexpr absl::Duration kTellRefused = absl::Seconds(30);
// A communicator that is destroyed waits so long for its sent messages to be received.
constexpr absl::Duration kSentIsTaken = absl::Seconds(30);

// Returns the status of `body`, or an exception of it as a status, which is mostly that there is no memory:
// the others must not wait for this rank.
absl::Status OrException(absl::FunctionRef<absl::Status()> body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return absl::ResourceExhaustedError(e.what());
  }
}

// First byte of each rank's blob, so that all ranks report the error of one. A restart helps against
// kMeetError, not against kMeetNever: a requested thing that does not exist.
constexpr char kMeetOk = '+', kMeetError = '-', kMeetNever = '!';
constexpr uint32_t kMeetVersion = (15 << 16) | sizeof(OpRecord);
constexpr size_t kSettingBytesMax = 64;
constexpr char kBetweenSettings = '\0';  // no variable holds it

// Checks a variable that all ranks must have alike: if they have not, all get the same error.
absl::Status CheckAlike(absl::string_view name, const std::vector<std::string>& by_rank,
                        const std::vector<Member>& members) {
  std::map<std::string, std::vector<size_t>> ranks_of;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) ranks_of[by_rank[rank]].push_back(rank);
  if (ranks_of.size() == 1) return absl::OkStatus();
  std::vector<std::string> parts;
  for (const auto& [value, ranks] : ranks_of) {
    std::set<std::string> addresses;
    for (size_t rank : ranks) addresses.insert(members[rank].address);
    parts.push_back(absl::StrCat("'", value, "' on rank", ranks.size() > 1 ? "s " : " ",
                                 absl::StrJoin(ranks, ","), " (", absl::StrJoin(addresses, ","), ")"));
  }
  return absl::FailedPreconditionError(absl::StrCat(name, " differs: ", absl::StrJoin(parts, ", "),
                                                    ". Set the same for all ranks, or for none"));
}

// Parses the algorithm of every rank. All get the same error when one is unknown, or when they differ.
absl::StatusOr<AllReduceWish> AgreedWish(const std::vector<std::string>& by_rank,
                                         const std::vector<Member>& members) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const std::string& name = by_rank[rank];
    if (!AllReduceWishFrom(name)) {
      return absl::InvalidArgumentError(absl::StrCat("GTRAIN_COMM_ALGO is '", absl::CHexEscape(name),
                                                     "' on rank ", rank, "; it must be one of ",
                                                     kAllReduceWishes));
    }
  }
  GT_RETURN_IF_ERROR(CheckAlike("GTRAIN_COMM_ALGO", by_rank, members));
  return *AllReduceWishFrom(by_rank[0]);
}

// Checks the setting of every rank for the network between machines in the same way.
absl::Status CheckNetworks(const std::vector<std::string>& by_rank, const std::vector<Member>& members) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (absl::Status good = CheckTransportsWish(by_rank[rank]); !good.ok())
      return Annotate(good, absl::StrCat("rank ", rank, " (", members[rank].address, ")"));
  }
  return CheckAlike("GTRAIN_COMM_TLS", by_rank, members);
}

// The rank `name` could not open what it needs; `never`: nor could it in another generation.
absl::Status CannotOpen(const std::string& name, const Member& member, bool never, absl::string_view why) {
  return absl::Status(never ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kUnavailable,
                      absl::StrCat(name, " (", member.address, ") ", why));
}

std::string Setting(const std::string& value) {
  return value.empty() ? "auto" : value.substr(0, kSettingBytesMax);
}

}  // namespace

// A call of this communicator, or one within another.
class ExecCommunicator::Running {
 public:
  explicit Running(ExecCommunicator* of) ABSL_NO_THREAD_SAFETY_ANALYSIS
      : of_(of),
        outer_(of->caller_ != std::this_thread::get_id()) {
    if (!outer_) return;
    of_->running_.Lock();
    of_->caller_ = std::this_thread::get_id();
  }
  ~Running() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!outer_) return;
    of_->caller_ = std::thread::id();
    of_->running_.Unlock();
    of_->DieIfAborted();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  ExecCommunicator* const of_;
  const bool outer_;
};

// Some ranks of a generation as if they were all of it.
class ExecCommunicator::SubBootstrap final : public Bootstrap {
 public:
  SubBootstrap(Bootstrap* whole, const std::vector<int>& ranks, int rank)
      : whole_(whole), ranks_(ranks), rank_(rank) {
    for (int r : ranks) {
      Member member = whole->members()[static_cast<size_t>(r)];
      member.rank = static_cast<int>(members_.size());
      members_.push_back(std::move(member));
    }
  }
  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }
  Generation generation() const override { return whole_->generation(); }
  const std::vector<Member>& members() const override { return members_; }
  int OfWhole(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  // Makes the Bootstrap of some of these members, which may outlive this one.
  std::unique_ptr<SubBootstrap> Part(const std::vector<int>& ranks, int rank) const {
    std::vector<int> of_whole;
    for (int r : ranks) of_whole.push_back(ranks_[static_cast<size_t>(r)]);
    return std::make_unique<SubBootstrap>(whole_, of_whole, rank);
  }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view, absl::Duration) override {
    return absl::InternalError("a sub-communicator meets through its parent");
  }
  std::shared_ptr<Fabric>& fabric() override { return whole_->fabric(); }
  Wakers& wakers() override { return whole_->wakers(); }
  absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, uint64_t zeros,
                                 absl::Duration timeout) override {
    return whole_->Arena(id, bytes, zeros, timeout);
  }
  void FreeArena(uint64_t id) override { whole_->FreeArena(id); }
  absl::Status Alive() const override { return whole_->Alive(); }
  std::vector<int> Left() const override {
    std::vector<int> left;
    for (const int rank : whole_->Left()) {
      const auto it = std::ranges::find(ranks_, rank);
      if (it != ranks_.end()) left.push_back(static_cast<int>(it - ranks_.begin()));
    }
    return left;
  }
  void ReportLink(int rank, const std::string& text) override {
    whole_->ReportLink(ranks_[static_cast<size_t>(rank)], text);
  }
  void ReportCompression(const std::string& text) override { whole_->ReportCompression(text); }

 private:
  Bootstrap* const whole_;
  const std::vector<int> ranks_;  // of the whole
  const int rank_;
  std::vector<Member> members_;
};

// Some of those on a transport: a rail.
class ExecCommunicator::Members final : public DataTransport {
 public:
  Members(DataTransport* all, std::vector<int> members) : all_(all), members_(std::move(members)) {}
  absl::StatusOr<std::string> Address() override {
    return absl::InternalError("some members of a transport");
  }
  absl::Status Connect(const std::vector<std::string>&, int) override {
    return absl::InternalError("some members of a transport are connected already");
  }
  absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>&, int, uint64_t) override {
    return absl::InternalError("some members of a transport");
  }
  absl::StatusOr<std::unique_ptr<MessageLink>> Messages(MessageLink::Listener*) override {
    return absl::InternalError("some members of a transport");
  }
  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    transfers_.assign(transfers.begin(), transfers.end());
    for (Transfer& t : transfers_) t.peer = members_[static_cast<size_t>(t.peer)];
    return all_->Exchange(transfers_, done, watch);
  }
  void Fail(absl::string_view notice) override { all_->Fail(notice); }
  void Leave(absl::string_view) override {}  // the others go on
  std::vector<int> Unfinished() const override {
    std::vector<int> own;
    for (const int peer : all_->Unfinished()) {
      const auto it = std::ranges::find(members_, peer);
      if (it != members_.end()) own.push_back(static_cast<int>(it - members_.begin()));
    }
    return own;
  }
  absl::Status Heard() override { return all_->Heard(); }

 private:
  DataTransport* const all_;
  const std::vector<int> members_;
  std::vector<Transfer> transfers_;  // kept to allocate nothing in a call
};

ExecCommunicator::ExecCommunicator(Bootstrap* bootstrap, ExecOptions options)
    : bootstrap_(bootstrap), options_(std::move(options)), timeout_(options_.user.timeout) {
  std::vector<NodeId> nodes;
  std::vector<int> order;
  for (const Member& m : bootstrap->members()) {
    nodes.push_back(m.node);
    order.push_back(m.fabric_order);
  }
  hierarchy_ = MakeHierarchy(nodes, bootstrap->rank(), order);
  if (this->nodes() > 1 && !options_.transport) links_.KeepWith(bootstrap);
}

ExecCommunicator::~ExecCommunicator() {
  if (fork_guard_.Forked()) {
    // A forked child must not speak on its parent's connections, not even to close them.
    (void)transport_.release();
    if (messages_ != nullptr) (void)new std::shared_ptr<PointToPoint>(messages_);
    return;
  }
  if (messages_ != nullptr) messages_->Close(Dead().ok() ? kSentIsTaken : absl::ZeroDuration());
  if (!Dead().ok() || transport_ == nullptr) return;
  // Others may know what a member of this machine has said only through this one.
  if (const absl::Status heard = Check(); !heard.ok()) {
    (void)Die(heard);
  } else {
    transport_->Leave(absl::StrCat(NameOf(rank()), kClosed));
  }
}

// Whether another generation may go better: a share of shared memory that is too small, or a library that is
// not there, will be so again.
bool WillMend(const absl::Status& status) {
  return !absl::IsFailedPrecondition(status) && !absl::IsInvalidArgument(status) &&
         !absl::IsResourceExhausted(status) && !absl::IsNotFound(status) && !absl::IsUnimplemented(status);
}

// Ranks that go through the machines in different orders would wait for each other without end. FNV-1a.
uint32_t OrderHash(const Hierarchy& hierarchy) {
  uint32_t hash = 2166136261u;
  for (const int rank : hierarchy.NodeMajor()) hash = (hash ^ static_cast<uint32_t>(rank)) * 16777619u;
  return hash;
}

// First what all must agree on, then each rank's transport address, or what it could not open: nobody waits
// for a rank that has no memory or no network.
absl::StatusOr<std::vector<std::string>> ExecCommunicator::Meet(const GatherFn& gather, const Watch& watch) {
  const uint64_t mine = Rng::FromSystem().Next();
  const uint32_t order = OrderHash(hierarchy_);
  std::string blob(1 + sizeof(kMeetVersion) + sizeof(mine) + sizeof(order), kMeetOk);
  std::memcpy(&blob[1], &kMeetVersion, sizeof(kMeetVersion));
  std::memcpy(&blob[1 + sizeof(kMeetVersion)], &mine, sizeof(mine));
  std::memcpy(&blob[1 + sizeof(kMeetVersion) + sizeof(mine)], &order, sizeof(order));
  const size_t fixed = blob.size();
  blob +=
      absl::StrCat(Setting(options_.algorithm), std::string(1, kBetweenSettings), Setting(options_.network));
  GT_ASSIGN_OR_RETURN(std::vector<std::string> first, gather(blob));
  for (size_t r = 0; r < first.size(); ++r) {
    if (first[r].size() < fixed || std::memcmp(first[r].data(), blob.data(), 1 + sizeof(kMeetVersion))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", r, " runs another version of libgtrain: start all ranks from the same build"));
    }
    if (std::memcmp(&first[r][fixed - sizeof(order)], &order, sizeof(order)) != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          NameOf(static_cast<int>(r)), " was told another order of the machines than ", NameOf(rank()),
          ": their agents are of different versions (gtrain nodes --json); bring all to the same"));
    }
  }
  std::memcpy(&nonce_, &first[0][1 + sizeof(kMeetVersion)], sizeof(nonce_));
  std::vector<std::string> algorithms, networks;
  for (const std::string& of_rank : first) {
    const size_t between = std::min(of_rank.find(kBetweenSettings, fixed), of_rank.size());
    algorithms.push_back(of_rank.substr(fixed, between - fixed));
    networks.push_back(of_rank.substr(std::min(between + 1, of_rank.size())));
  }
  GT_ASSIGN_OR_RETURN(wish_, AgreedWish(algorithms, bootstrap_->members()));
  GT_RETURN_IF_ERROR(CheckNetworks(networks, bootstrap_->members()));

  const absl::StatusOr<std::string> own = OpenOwn(watch);
  const char how = own.ok() ? kMeetOk : WillMend(own.status()) ? kMeetError : kMeetNever;
  GT_ASSIGN_OR_RETURN(
      std::vector<std::string> all,
      gather(absl::StrCat(std::string(1, how), own.ok() ? links_.Mark() + *own : own.status().message())));
  std::vector<std::string> marks;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty() || all[r][0] != kMeetOk) {
      const bool never = !all[r].empty() && all[r][0] == kMeetNever;
      return CannotOpen(NameOf(static_cast<int>(r)), bootstrap_->members()[r], never,
                        all[r].empty() ? "" : all[r].substr(1));
    }
    marks.push_back(all[r].substr(1, LinkMemory::kMarkBytes));
    all[r].erase(0, 1 + LinkMemory::kMarkBytes);
  }
  links_.TakeMarks(marks);
  return all;
}

absl::StatusOr<std::string> ExecCommunicator::OpenOwn(const Watch& watch) {
  GT_RETURN_IF_ERROR(OpenMemory(watch));
  absl::StatusOr<std::string> address = OpenTransport();
  if (!address.ok()) return Annotate(address.status(), "cannot open its connection to other machines");
  return address;
}

absl::Status ExecCommunicator::OpenMemory(const Watch& watch) {
  if (hierarchy_.one_rank_a_node()) return absl::OkStatus();
  const std::vector<int>& ranks = hierarchy_.peers();
  auto shm = ShmGroup::Open(bootstrap_, ranks, NamesOf(ranks), hierarchy_.local, nonce_, watch);
  if (!shm.ok()) return Annotate(shm.status(), "has no shared memory");
  shm_ = *std::move(shm);
  return absl::OkStatus();
}

// Returns the address of this rank for its peers.
absl::StatusOr<std::string> ExecCommunicator::OpenTransport() {
  if (nodes() == 1) return std::string();
  if (options_.transport) {
    GT_ASSIGN_OR_RETURN(transport_, options_.transport(*bootstrap_, nonce_));
    return transport_->Address();
  }
  std::shared_ptr<Fabric>& fabric = bootstrap_->fabric();
  if (fabric == nullptr || fabric->wish() != options_.network) {
    const Member& me = bootstrap_->members()[static_cast<size_t>(rank())];
    GT_ASSIGN_OR_RETURN(fabric, Fabric::Open(me.address, options_.network));
  }
  // This is used by parts, too, which may outlive this communicator but not the bootstrap.
  const auto broken = [bootstrap = bootstrap_](int rank, const std::string& symptom) {
    bootstrap->ReportLink(rank, symptom);
  };
  transport_ = OpenFabricTransport(fabric, {bootstrap_->generation().value, nonce_}, broken);
  WakeWithGeneration();
  return transport_->Address();
}

absl::Status ExecCommunicator::Connect() {
  if (size() == 1) {
    GT_RETURN_IF_ERROR(CheckNetworks({Setting(options_.network)}, bootstrap_->members()));
    GT_RETURN_IF_ERROR(AgreedWish({Setting(options_.algorithm)}, bootstrap_->members()).status());
    return OpenMessages();
  }
  const Watch watch = MakeWatch();
  return Connect([&](const std::string& blob) { return bootstrap_->AllGather(blob, watch.Left()); }, watch);
}

absl::Status ExecCommunicator::Connect(const GatherFn& gather, const Watch& watch) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, Meet(gather, watch));
  if (nodes() > 1) GT_RETURN_IF_ERROR(transport_->Connect(addresses, rank()));
  MakeBackend();
  if (shm_ != nullptr) GT_RETURN_IF_ERROR(shm_->Join(watch));
  GT_RETURN_IF_ERROR(OpenMessages());
  // Connections are made here, so that a network that does not work shows now and not in the first step.
  if (nodes() > 1)
    GT_RETURN_IF_ERROR(links_.Learn(between_.get(), shm_ == nullptr ? nullptr : shm_->Result(0), watch));
  return options_.user.meet ? Barrier() : absl::OkStatus();
}

void ExecCommunicator::MakeBackend() {
  if (nodes() == 1) {
    backend_ = MakeSharedMemoryBackend(&hierarchy_, shm_.get());
    return;
  }
  if (const std::vector<int> rail = hierarchy_.Rail(); !rail.empty())
    rail_ = std::make_unique<Members>(transport_.get(), rail);
  between_ = std::make_unique<BetweenMachines>(&hierarchy_, shm_.get(), rail_.get(), wish_);
  between_->on_measured_again = [this] { links_.Remember(*between_); };
  backend_ = shm_ == nullptr ? MakeFlatBackend(&hierarchy_, between_.get())
                             : MakeHierarchicalBackend(&hierarchy_, shm_.get(), between_.get());
}

// ------------------------------------------------------------------ sub-communicators

// A revoke ends a sleep over the network; shared memory sees to itself.
void ExecCommunicator::WakeWithGeneration() {
  if (const std::shared_ptr<Fabric> fabric = bootstrap_->fabric(); fabric != nullptr)
    waking_ = bootstrap_->wakers().Add([fabric] { fabric->Interrupt(); });
}

std::unique_ptr<ExecCommunicator::SubBootstrap> ExecCommunicator::Part(const std::vector<int>& ranks,
                                                                       int rank) const {
  if (own_bootstrap_ != nullptr) return own_bootstrap_->Part(ranks, rank);
  return std::make_unique<SubBootstrap>(bootstrap_, ranks, rank);
}

absl::StatusOr<std::unique_ptr<Communicator>> ExecCommunicator::Split(int color, int key) {
  GT_RETURN_IF_ERROR(NotForked());
  const Running running(this);
  GT_RETURN_IF_ERROR(Dead());
  std::unique_ptr<Communicator> part;
  const absl::Status made = OrException([&]() -> absl::Status {
    GT_ASSIGN_OR_RETURN(part, MakePart(color, key));
    return absl::OkStatus();
  });
  if (made.ok()) return part;
  return Dead().ok() ? Die(Annotate(made, absl::StrCat("splitting off communicator ", color))) : made;
}

absl::StatusOr<std::unique_ptr<Communicator>> ExecCommunicator::MakePart(int color, int key) {
  const int64_t mine[2] = {color, key};
  std::vector<int64_t> all(2 * static_cast<size_t>(size()));
  GT_RETURN_IF_ERROR(AllGather(mine, all.data(), 2, DType::kInt64));
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (all[2 * static_cast<size_t>(r)] == color) ranks.push_back(r);
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return all[2 * static_cast<size_t>(a) + 1] < all[2 * static_cast<size_t>(b) + 1];
  });
  if (color < 0) return nullptr;
  const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  std::unique_ptr<SubBootstrap> bootstrap = Part(ranks, place);
  ExecOptions options = options_;
  options.user.timeout = timeout();
  options.on_start = nullptr;  // ranks of different groups may differ in how many collectives they called
  auto group = std::make_unique<ExecCommunicator>(bootstrap.get(), std::move(options));
  group->own_bootstrap_ = std::move(bootstrap);
  // Unlike all others: the members know it without asking each other.
  group->nonce_ = Rng(nonce_ ^ Rng(sequence_ << 32 | static_cast<uint32_t>(color)).Next()).Next();
  // Meanwhile the others wait in the new one, and hear of an error in either.
  group->parent_ = this;
  const absl::Status connected = group->ConnectPart(*this, ranks);
  group->parent_ = nullptr;
  GT_RETURN_IF_ERROR(connected);
  return group;
}

// Connects a part that consists of `ranks` of `whole`; it takes over the connections, measured links and
// settings of `whole`.
absl::Status ExecCommunicator::ConnectPart(const ExecCommunicator& whole, const std::vector<int>& ranks) {
  wish_ = whole.wish_;
  if (size() == 1) return OpenMessages();
  const Watch watch = MakeWatch();
  if (const absl::Status opened = OpenMemory(watch); !opened.ok())
    return CannotOpen(NameOf(rank()), bootstrap_->members()[static_cast<size_t>(rank())], !WillMend(opened),
                      opened.message());
  if (nodes() > 1) {
    GT_ASSIGN_OR_RETURN(transport_, whole.transport_->Part(ranks, rank(), nonce_));
    WakeWithGeneration();
  }
  MakeBackend();
  if (between_ != nullptr) between_->TakeLinks(whole.between_->carriers());
  if (shm_ != nullptr) GT_RETURN_IF_ERROR(shm_->Join(watch));
  GT_RETURN_IF_ERROR(OpenMessages());
  return Barrier();
}

// ------------------------------------------------------------------ point to point

// Messages that arrive before this are not lost: inboxes and links keep them.
absl::Status ExecCommunicator::OpenMessages() {
  PointToPoint::Place place;
  place.self = rank();
  place.size = size();
  place.local.assign(static_cast<size_t>(size()), -1);
  const std::vector<int>& here = hierarchy_.peers();
  for (size_t i = 0; i < here.size(); ++i) place.local[static_cast<size_t>(here[i])] = static_cast<int>(i);
  place.shm = shm_.get();
  place.bootstrap = bootstrap_;
  place.name_of = [this](int rank) { return NameOf(rank); };
  place.give_up = [this](const absl::Status& why) { Abort(why); };
  messages_ = std::make_shared<PointToPoint>(std::move(place));
  return transport_ == nullptr ? absl::OkStatus() : messages_->Connect(transport_.get());
}

absl::Status ExecCommunicator::Refused(absl::Status status) {
  if (absl::IsInvalidArgument(status)) Abort(status);
  return status;
}

// A tag of callers.
absl::Status ExecCommunicator::CheckTags(absl::Span<const Message> messages) {
  if (std::ranges::none_of(messages, [](const Message& m) { return m.tag == kCollectiveTag; }))
    return absl::OkStatus();
  return Refused(absl::InvalidArgumentError(absl::StrCat("tag ", kCollectiveTag, ": a tag is 0 or more")));
}

absl::Status ExecCommunicator::SendMessage(const Message& message) {
  GT_RETURN_IF_ERROR(Usable());
  GT_RETURN_IF_ERROR(CheckTags({&message, 1}));
  return Refused(OrException([&] { return messages_->Send(message, timeout()); }));
}

absl::StatusOr<std::shared_ptr<PendingMessages>> ExecCommunicator::Start(absl::Span<const Message> messages) {
  GT_RETURN_IF_ERROR(Usable());
  GT_RETURN_IF_ERROR(CheckTags(messages));
  std::shared_ptr<PendingMessages> started;
  GT_RETURN_IF_ERROR(Refused(OrException([&]() -> absl::Status {
    GT_ASSIGN_OR_RETURN(started, messages_->Start(messages, timeout()));
    return absl::OkStatus();
  })));
  return started;
}

// ------------------------------------------------------------------ giving up

std::string ExecCommunicator::NameOf(int rank) const {
  const int of_job = own_bootstrap_ == nullptr ? rank : own_bootstrap_->OfWhole(rank);
  return absl::StrCat("rank ", rank, rank == of_job ? "" : absl::StrCat(" (", of_job, " of the job)"));
}

std::vector<std::string> ExecCommunicator::NamesOf(const std::vector<int>& ranks) const {
  std::vector<std::string> names;
  for (const int rank : ranks) names.push_back(NameOf(rank));
  return names;
}

// Adds the ranks that the call waited for, where it waited over the network: shared memory adds them itself.
absl::Status ExecCommunicator::WithMissing(const absl::Status& why) const {
  const DataTransport* const network = transport_ != nullptr ? transport_.get() : rail_.get();
  if (!absl::IsDeadlineExceeded(why) || network == nullptr || network->Unfinished().empty()) return why;
  return absl::DeadlineExceededError(
      absl::StrCat(why.message(), ", waiting for ", absl::StrJoin(NamesOf(network->Unfinished()), ", ")));
}

absl::Status ExecCommunicator::SomebodyLeft() const {
  const std::vector<int> left = bootstrap_->Left();
  if (left.empty()) return absl::OkStatus();
  const MutexLock lock(&state_);
  return left_.Look(NameOf(left[0]));
}

// Called in every wait: finds the notice of a peer in whichever way the peer sent it.
absl::Status ExecCommunicator::Check() const {
  if (shm_ != nullptr) GT_RETURN_IF_ERROR(shm_->Failure());
  if (transport_ != nullptr) GT_RETURN_IF_ERROR(transport_->Heard());
  if (aborted_) {
    const MutexLock lock(&state_);
    return aborted_for_;
  }
  GT_RETURN_IF_ERROR(SomebodyLeft());
  return parent_ == nullptr ? absl::OkStatus() : parent_->Check();
}

// A notice from another rank is passed on unchanged.
std::string ExecCommunicator::Notice(const absl::Status& why) const {
  if (IsKnownToAll(why) || !bootstrap_->Alive().ok()) return "";
  if (std::string heard = NoticeIn(why); !heard.empty()) return heard;
  const std::string call = calling_ == nullptr ? "" : absl::StrCat(Describe(*calling_), ": ");
  // A call that was refused waits for the others only to tell them.
  const absl::Status& reason = refused_.ok() ? why : refused_;
  const std::string words = absl::StrCat(NameOf(rank()), kGaveUp, call, WithMissing(reason).message());
  return absl::StrReplaceAll(words, {{absl::string_view("\0", 1), " "}}).substr(0, kNoticeBytesMax);
}

// A running call ends itself, as soon as it checks; where none runs this thread does it. Both look at
// `running_` after `aborted_for_` is set, so one of them does it.
void ExecCommunicator::Abort(const absl::Status& why) {
  if (why.ok() || !Usable().ok()) return;
  {
    const MutexLock lock(&state_);
    if (aborted_) return;
    aborted_for_ = why;
    aborted_ = true;
  }
  if (messages_ != nullptr) messages_->Fail(why);
  bootstrap_->wakers().WakeAll();
  DieIfAborted();
}

void ExecCommunicator::DieIfAborted() {
  if (!aborted_ || caller_ == std::this_thread::get_id() || !running_.TryLock()) return;
  if (Dead().ok()) (void)Die(aborted_for_);
  running_.Unlock();
}

absl::Status ExecCommunicator::Dead() const {
  const MutexLock lock(&state_);
  return dead_;
}

// The ranks of this machine find the notice in the arena, those that this one is connected with get a
// message: with rails one of each machine, which leaves it in the arena there. Where this rank does not speak
// with other machines its leader reads the arena and tells the other leaders.
absl::Status ExecCommunicator::Die(absl::Status why) {
  {
    const MutexLock lock(&state_);
    dead_ = why;
  }
  if (messages_ != nullptr) messages_->Fail(why);
  const std::string notice = Notice(why);
  if (!notice.empty() && shm_ != nullptr) shm_->Fail(notice);
  // Nobody needs the unsent messages of a generation that is over.
  if (transport_ != nullptr && (!notice.empty() || !bootstrap_->Alive().ok())) transport_->Fail(notice);
  rail_.reset();
  transport_.reset();
  return why;
}

// ------------------------------------------------------------------ every collective

absl::Status ExecCommunicator::NotForked() const {
  if (!fork_guard_.Forked()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this is a forked child: a communicator can be used only by the process that made it");
}

absl::Status ExecCommunicator::Usable() const {
  GT_RETURN_IF_ERROR(NotForked());
  return Dead();
}

absl::Status ExecCommunicator::TwoSums(const OpRecord& record, const void* data,
                                       absl::FunctionRef<absl::Status()> sums) {
  GT_RETURN_IF_ERROR(NotForked());
  const Running running(this);
  GT_RETURN_IF_ERROR(Dead());
  GT_RETURN_IF_ERROR(
      Call(record, data, [&](const OpRecord& r, const Watch& watch) { return backend_->Enter(r, watch); }));
  const absl::Status status = OrException(sums);
  if (status.ok() || !Dead().ok()) return status;
  return Die(Annotate(status, Describe(record)));
}

absl::Status ExecCommunicator::Call(OpRecord record, const void* data,
                                    absl::FunctionRef<absl::Status(const OpRecord&, const Watch&)> body) {
  GT_RETURN_IF_ERROR(NotForked());
  const Running running(this);
  GT_RETURN_IF_ERROR(Dead());
  record.sequence = ++sequence_;
  record.no_data = data == nullptr && record.count > 0;
  if (options_.on_start) options_.on_start(sequence_);
  calling_ = &record;
  {
    const MutexLock lock(&state_);
    left_ = LeftPatience();
  }
  const Watch watch = MakeWatch();
  absl::Status status = CheckArguments(record, size());
  // Ranks of other machines see what is wrong in the record; those of this one hear of it at once.
  if (!status.ok() && nodes() > 1) {
    refused_ = status;
    const absl::Status told = OrException(
        [&] { return backend_->Enter(record, Watch(bootstrap_, std::min(kTellRefused, timeout()), this)); });
    if (IsKnownToAll(told)) status = KnownToAll(status);
    refused_ = absl::OkStatus();
  }
  if (status.ok()) status = bootstrap_->Alive();
  if (status.ok() && size() > 1) status = OrException([&] { return body(record, watch); });
  calling_ = nullptr;
  if (options_.on_waited) {
    const absl::Duration waited = watch.Waited();
    if (waited > absl::ZeroDuration()) options_.on_waited(waited);
  }
  if (status.ok()) return status;
  return Die(Annotate(WithMissing(status), Describe(record)));
}

absl::Status ExecCommunicator::Barrier() {
  OpRecord record;
  record.kind = OpKind::kBarrier;
  return Call(record, nullptr,
              [&](const OpRecord& r, const Watch& watch) { return backend_->Enter(r, watch); });
}

absl::StatusOr<void*> ExecCommunicator::Allocate(size_t bytes) {
  GT_RETURN_IF_ERROR(NotForked());
  const Running running(this);
  GT_RETURN_IF_ERROR(Dead());
  if (shm_ != nullptr) return shm_->Allocate(bytes, MakeWatch());
  GT_ASSIGN_OR_RETURN(Mapping memory, Mapping::Private(std::max<size_t>(bytes, 1)));
  private_.push_back(std::move(memory));
  return static_cast<void*>(private_.back().data());
}

absl::Status ExecCommunicator::Free(void* memory) {
  GT_RETURN_IF_ERROR(NotForked());
  const Running running(this);
  if (shm_ != nullptr && shm_->Free(memory)) return absl::OkStatus();
  if (std::erase_if(private_, [&](const Mapping& m) { return m.data() == memory; }) > 0)
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      "this is not the begin of memory that Allocate has given and Free not taken");
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(Bootstrap* bootstrap, ExecOptions options) {
  auto communicator = std::make_unique<ExecCommunicator>(bootstrap, std::move(options));
  if (absl::Status status = communicator->Connect(); !status.ok()) {
    communicator->Abort(status);
    return Annotate(status, "making a communicator");
  }
  return communicator;
}

}  // namespace gtrain::comm
