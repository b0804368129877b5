// A turn of the loop: take what arrived and step the core with it, take what the disk finished and send
// what that released, fire the timer only when no input is left, hand the next batch to the disk, wait.
// Nothing here blocks but the wait.
#include "runtime/head/service.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/daemon.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "net/zmq/client.h"
#include "runtime/core/values/authority.h"
#include "runtime/head/rescue.h"
#include "runtime/store/rocks_store.h"
#include "runtime/wire/build_version.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::head {
namespace {

constexpr int kMessagesPerTurn = 500;
constexpr absl::Duration kReceivePerTurn = absl::Milliseconds(10);  // replies wait for the end of the turn
constexpr size_t kStoreTasksMax = 1'000;
constexpr size_t kBackupTasksMax = 2;
constexpr size_t kRunFileTasksMax = 10'000;
// A document of a job of 4,000 ranks waits in 0.5 MB and is built in 15 ms: the last of a full queue after
// five seconds. Three readers who ask without end leave room for a fourth; what one asks for in one breath
// (a document for each of its jobs) is less.
constexpr size_t kReadsMax = 320;
constexpr int kReadsPerKeyMax = 100;
constexpr size_t kPlansMax = 100;
constexpr size_t kTailTasksMax = 500;  // of 64 KiB at most
// A message on a connection that closes at once may be dropped by the receiver: agents are given this long to
// read their shutdown before the sockets go.
constexpr absl::Duration kFarewell = absl::Milliseconds(500);
constexpr int kFarewellPollMs = 50;
constexpr absl::Duration kHousekeepingPause = absl::Seconds(2);
constexpr absl::Duration kTimerOverdue = absl::Seconds(1);
constexpr absl::Duration kSlowTurn = absl::Milliseconds(250);
constexpr absl::Duration kCommitPatience = absl::Milliseconds(5);  // for a loss, whose grant comes next
constexpr absl::Duration kOwnPause = absl::Seconds(2);             // longer than the loop ever sleeps

bool IsLoopback(absl::string_view listen) {
  return absl::StartsWith(listen, "127.") || absl::StartsWith(listen, "[::1]");
}

bool IsWildcard(absl::string_view listen) {
  return absl::StartsWith(listen, "0.0.0.0:") || absl::StartsWith(listen, "[::]:") ||
         absl::StartsWith(listen, "*:");
}

std::string WithHost(absl::string_view host, absl::string_view endpoint) {
  return absl::StrCat(host, endpoint.substr(endpoint.rfind(':')));
}

absl::Status CheckRecord(const core::Record& record) {
  return wire::DecodeRecord(wire::EncodeRecord(record)).status();
}

// Encodes each record and checks that it can be read back. A record that cannot is not stored: the records
// before it are good, and a request that would make such a record was refused.
absl::StatusOr<std::vector<port::Write>> EncodeBatch(const core::OutboxBatch& batch) {
  std::vector<port::Write> writes;
  for (const core::RecordWrite& write : batch.writes) {
    std::optional<std::string> value;
    if (write.record) {
      value = wire::EncodeRecord(*write.record);
      if (const absl::Status read = wire::DecodeRecord(*value).status(); !read.ok()) {
        return absl::InternalError(absl::StrCat(
            "the record \"", write.key, "\" could not be read back and is not stored: ", read.message()));
      }
    }
    writes.push_back({write.key, std::move(value)});
  }
  return writes;
}

// Records written to a store that was removed are lost with this process. So the store is looked for after
// each commit, before any client hears of it.
absl::Status StillThere(const std::string& path, const UniqueFd& opened) {
  if (!opened.valid() || LeadsTo(path, opened.get())) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the head stops: its store ", path,
                                          " was removed or replaced while it served from it, and what it "
                                          "decided since would be lost"));
}

// Writes the audit lines first: their changes may not become durable without them. ResourceExhausted: nothing
// of the batch is lost, and it may be handed in again when there is room. Audit lines that are written leave
// it.
absl::Status CommitBatch(core::OutboxBatch& batch, port::MetaStore& store, AuditLog& audit, absl::Time now) {
  GT_ASSIGN_OR_RETURN(const std::vector<port::Write> writes, EncodeBatch(batch));
  if (const port::StoreSpace space = store.Space(); space.level == port::SpaceLevel::kFull)
    return absl::ResourceExhaustedError(space.text);
  if (const absl::Status audited = audit.Append(batch.audit, now); !audited.ok())
    return absl::InternalError(audited.message());  // half a line may be there: not to be tried again
  batch.audit.clear();
  return writes.empty() ? absl::OkStatus() : store.Commit(writes);
}

using core::ReplyOf;

std::string OutcomeOf(const absl::Status& status) {
  return status.ok()
             ? "ok"
             : absl::StrCat(absl::IsPermissionDenied(status) ? "denied: " : "failed: ", status.message());
}

std::string TargetOf(const core::ClientRequestBody& body) {
  if (const auto* b = std::get_if<core::ClientRevokeToken>(&body)) return b->token;
  if (const auto* b = std::get_if<core::ClientAddUser>(&body)) return absl::StrCat(b->name, " as ", b->role);
  if (const auto* b = std::get_if<core::ClientRevokeUser>(&body)) return b->name;
  if (const auto* b = std::get_if<core::ClientRevokeNode>(&body)) return b->node;
  if (const auto* b = std::get_if<core::ClientBackup>(&body)) return b->dir;
  return "";
}

core::AuditEntry AuditOf(const core::ServiceRequest& request, const core::ClientRequest& body,
                         const absl::Status& status) {
  return {request.peer,        request.address,   std::string(core::RuleOf(body.body).name),
          TargetOf(body.body), OutcomeOf(status), core::ReasonOf(body.body)};
}

std::string EpochProof(const net::KeyPair& head, HeadEpoch epoch, const std::string& nonce) {
  return absl::StrCat(nonce, ".",
                      net::Proof(head, absl::StrCat("gtrain head epoch ", epoch.value, " start ", nonce)));
}

std::string GrantProof(const net::KeyPair& head, absl::string_view bytes) {
  return net::Proof(head, absl::StrCat("gtrain grant\n", bytes));
}

}  // namespace

Completions::Completions() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { GT_CHECK(event_.valid()); }

void Completions::Push(Item item) {
  MutexLock lock(&mutex_);
  items_.push_back(std::move(item));
  const uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof(one));
}

std::vector<Completions::Item> Completions::Take() {
  MutexLock lock(&mutex_);
  uint64_t drained;
  (void)!read(event_.get(), &drained, sizeof(drained));
  return std::exchange(items_, {});
}

// Fault X7. In a container root is the ordinary user; elsewhere it serves the network only when told to.
absl::Status RootMayServe(bool root, bool loopback, bool container, bool allow_root) {
  if (!root || loopback || container || allow_root) return absl::OkStatus();
  return absl::PermissionDeniedError(
      "root serves only loopback addresses outside a container: run the head as an ordinary user, or add "
      "--allow-root");
}

HeadService::HeadService(const HeadOptions& options) : options_(options) {}

HeadService::~HeadService() {
  if (store_thread_) (void)store_thread_->Finish(absl::Seconds(10));
  if (files_thread_ && !files_thread_->Finish(absl::Seconds(3))) {
    LogWarning("a run directory does not answer; its newest event lines are lost");
  }
}

absl::Status HeadService::Start() {
  GT_CHECK(options_.parse_job != nullptr);
  GT_ASSIGN_OR_RETURN(files_, net::LoadCluster(options_.cluster_dir));
  GT_ASSIGN_OR_RETURN(serve_at_, WhereToServe());
  const bool loopback = std::all_of(serve_at_.listen.begin(), serve_at_.listen.end(), IsLoopback);
  GT_RETURN_IF_ERROR(RootMayServe(geteuid() == 0, loopback, InContainer(), options_.allow_root));
  tails_ = std::make_shared<TailSpill>(files_.dir);
  access_ = std::make_shared<Access>(files_, registry_, clock_);
  relays_ = std::make_unique<RelayRoutes>(files_.head, registry_);
  GT_RETURN_IF_ERROR(access_->Load());
  GT_RETURN_IF_ERROR(Recover());
  GT_RETURN_IF_ERROR(Listen());
  store_thread_ = std::make_unique<TaskThread>(kStoreTasksMax);
  files_thread_ = std::make_unique<TaskThread>(kRunFileTasksMax);
  readers_thread_ = std::make_unique<TaskThread>(kReadsMax);
  tail_queue_ = std::make_unique<TailQueue>(tails_, kTailTasksMax);
  tail_queue_->Clear();
  if (options_.local) runs_ = std::make_shared<RunIndex>(files_.dir + "/runs.json", files_.cluster);
  FindUnwritten();
  return absl::OkStatus();
}

// Adds to the error what a person can do about a store that cannot be served.
absl::Status HeadService::WithRemedy(const absl::Status& status) const {
  if (!absl::IsDataLoss(status) && !absl::IsNotFound(status)) return status;
  const absl::StatusOr<std::string> noted = ReadFile(files_.last_backup_path(), 64 << 10);
  const std::string backup = noted.ok() ? noted->substr(0, noted->find('\n')) : "BACKUP_DIR";
  return {absl::StatusCode::kDataLoss,
          absl::StrCat(status.message(),
                       ". Ranks are not disturbed. Put the newest backup back:\n  gtrain head restore ",
                       backup, " --dir ", files_.dir,
                       " --replace\nor, without one, rebuild what the agents know of running jobs:\n  gtrain "
                       "head recover --dir ",
                       files_.dir)};
}

core::HeadConfig HeadService::ConfigOfCore() const {
  core::HeadConfig config{
      .cluster = files_.cluster,
      .version = wire::kThisBuild.text,
      .protocol = wire::kThisBuild.protocol,
      .local = options_.local,
      .exit_when_idle = options_.exit_when_idle,
      .expected_nodes = options_.expected_nodes,
      .topology = options_.topology,
      .parse_job = options_.parse_job,
      .check_record = CheckRecord,
      .prove_epoch = [keys = files_.head,
                      nonce = net::RandomHex(8)](HeadEpoch epoch) { return EpochProof(keys, epoch, nonce); },
      .proves_epoch =
          [keys = files_.head](HeadEpoch epoch, const std::string& proof) {
            return EpochProof(keys, epoch, proof.substr(0, proof.find('.'))) == proof;
          },
      .seal_grant =
          [keys = files_.head](const core::GenerationGrant& grant) {
            std::string bytes = wire::Encode(core::StartGeneration{HeadEpoch{}, grant, {}});
            std::string mac = GrantProof(keys, bytes);
            return core::GrantSeal{std::move(bytes), std::move(mac)};
          },
      .proves_grant = [keys = files_.head](
                          const core::GrantSeal& seal) { return GrantProof(keys, seal.bytes) == seal.mac; },
      .near_secret =
          [keys = files_.head](const JobId& job) {
            return net::Proof(keys, absl::StrCat("copies of checkpoints of ", job.value));
          }};
  if (!options_.local) config.relay_from = options_.relay_from;
  if (options_.lease) config.fence_after = *options_.lease;
  if (options_.node_timeout) core::SetNodeTimeout(*options_.node_timeout, config);
  return config;
}

// Nothing is served before the new epoch is durable (fault H9). A store is only ever made for a cluster that
// never had one: a lost store must not look like a new cluster (fault H8).
absl::Status HeadService::Recover() {
  const bool is_new = access(files_.new_path().c_str(), F_OK) == 0;
  absl::StatusOr<std::shared_ptr<port::MetaStore>> opened =
      store::OpenRocksStore(files_.store_path(), {.create = is_new});
  if (!opened.ok()) return WithRemedy(opened.status());
  store_ = *std::move(opened);
  store_dir_ =
      std::make_shared<UniqueFd>(open(files_.store_path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  // The audit log opens after the store is locked: only one head writes it.
  GT_ASSIGN_OR_RETURN(AuditLog audit, AuditLog::Open(files_.dir));
  if (audit.count() > 0) LogInfo("audit log: line ", audit.count(), " has hash ", audit.hash());
  audit_ = std::make_shared<AuditLog>(std::move(audit));
  absl::StatusOr<core::StoredRecords> stored = LoadRecords(*store_);
  if (!stored.ok()) return WithRemedy(stored.status());
  core_ = std::make_unique<core::HeadCore>(ConfigOfCore(), Rng::FromSystem());
  GT_ASSIGN_OR_RETURN(core::StepResult step,
                      core_->Recover(*std::move(stored), clock_->Now(), clock_->WallNow()));
  if (!step.why.empty()) LogInfo(step.why);
  std::vector<core::Effect> effects = outbox_.Add(std::move(step));
  while (std::optional<core::OutboxBatch> batch = outbox_.NextBatch()) {
    GT_RETURN_IF_ERROR(CommitBatch(*batch, *store_, *audit_, clock_->WallNow()));
    for (core::Effect& effect : outbox_.Durable(batch->sequence)) effects.push_back(std::move(effect));
  }
  if (is_new) unlink(files_.new_path().c_str());
  OnSpace(store_->Space());
  // Nobody is connected yet, so only what goes to files and to ourselves is left of them.
  for (core::Effect& effect : effects) {
    if (auto* event = std::get_if<core::EmitEvent>(&effect)) recovered_.push_back(std::move(*event));
  }
  return absl::OkStatus();
}

// Agents and clients look for the head where it was: a head that does not know where that is must be told.
absl::StatusOr<net::ServedAt> HeadService::WhereToServe() const {
  if (!options_.advertise.empty() && !net::ValidServerAddress(options_.advertise)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--advertise \"", options_.advertise, "\" is not HOST:PORT, as in 10.0.0.2:7070"));
  }
  if (!options_.listen.empty()) return net::ServedAt{options_.listen, options_.advertise};
  absl::StatusOr<net::ServedAt> before = net::ReadServedAt(net::ServedAtPath(files_.dir));
  if (!before.ok()) {
    if (absl::IsNotFound(before.status())) return net::ServedAt{{"127.0.0.1:0"}, options_.advertise};
    return absl::FailedPreconditionError(
        absl::StrCat(before.status().message(),
                     ", and agents and clients look for it there: say where with --listen ADDRESS:PORT"));
  }
  LogInfo("no --listen: where it served before, at ", absl::StrJoin(before->listen, ", "));
  if (!options_.advertise.empty()) before->advertise = options_.advertise;
  return *before;
}

absl::Status HeadService::Listen() {
  absl::StatusOr<std::unique_ptr<net::ZmqServer>> server =
      net::ZmqServer::Start({.listen = serve_at_.listen,
                             .keys = files_.head,
                             .registry = registry_,
                             .clock = clock_,
                             .connections_per_address_max = options_.connections_per_address_max});
  if (!server.ok() && options_.listen.empty()) {
    return absl::Status(
        server.status().code(),
        absl::StrCat(server.status().message(), ". It served there before, says ",
                     net::ServedAtPath(files_.dir), "; --listen ADDRESS:PORT is another place"));
  }
  GT_ASSIGN_OR_RETURN(server_, std::move(server));
  if (!options_.local) {
    const absl::Status kept =
        net::WriteServedAt(net::ServedAtPath(files_.dir), {server_->endpoints(), serve_at_.advertise});
    if (!kept.ok()) LogWarning("the next head must be told where to listen: ", kept.message());
  }
  const std::string& first = server_->endpoints()[0];
  char hostname[256] = "";
  (void)gethostname(hostname, sizeof(hostname) - 1);
  token_endpoint_ = first;
  std::string local = first;
  if (IsWildcard(first)) {
    token_endpoint_ = WithHost(hostname, first);
    local = WithHost(absl::StartsWith(first, "[") ? "[::1]" : "127.0.0.1", first);
  }
  if (!serve_at_.advertise.empty()) token_endpoint_ = local = serve_at_.advertise;
  GT_ASSIGN_OR_RETURN(published_,
                      net::WriteEndpoint(files_.endpoint_path(), {.endpoint = local,
                                                                  .endpoints = server_->endpoints(),
                                                                  .head_public_key = files_.head.public_key,
                                                                  .cluster = files_.cluster,
                                                                  .pid = getpid(),
                                                                  .place = net::ThisPlace()}));
  LogInfo("serving cluster ", files_.cluster.value, " at ", absl::StrJoin(server_->endpoints(), ", "));
  return absl::OkStatus();
}

// The watcher of the local cluster restarts a head that left its endpoint file. The file of another head,
// after this one's directory was removed and made anew, is left alone.
void HeadService::SayGoodbye() {
  if (!published_.valid()) return;
  if (LeadsTo(files_.endpoint_path(), published_.get())) unlink(files_.endpoint_path().c_str());
  published_.reset();
}

absl::Status HeadService::Loop(int stop_fd) {
  for (const core::EmitEvent& event : std::exchange(recovered_, {})) (*this)(event);
  absl::Status status;
  while (status.ok() && (!stopping_ || clock_->Now() < farewell_until_)) status = Turn(stop_fd);
  // A head that a disk ended is missed: on the local cluster it is tried again.
  if (status.ok() || !options_.local) SayGoodbye();
  LogInfo("the head ends", stopping_ ? absl::StrCat(": ", *stopping_) : "", "; longest loop turn ",
          absl::FormatDuration(counters_.longest_turn), ", longest commit ",
          absl::FormatDuration(counters_.longest_commit));
  return status.ok() ? stop_status_ : status;
}

absl::Status HeadService::Turn(int stop_fd) {
  const Instant began = clock_->Now();
  const bool drained = ReceiveSome();
  GT_RETURN_IF_ERROR(OnCompletions());
  const Instant now = clock_->Now();
  const std::optional<Instant> deadline = core_->NextDeadline();
  if (deadline && now >= *deadline && (drained || now - *deadline > kTimerOverdue)) Step(core::Tick{});
  Housekeeping(now);
  StartCommit();
  StartJoins();
  while (relays_->Waiting()) {  // what is lost on the way is news to the core
    FlushRelays();
    DrainLater();
  }
  packed_.reset();
  ++counters_.turns;
  const absl::Duration turn = clock_->Now() - began;
  if (turn > counters_.longest_turn) {
    counters_.longest_turn = turn;
    if (turn > kSlowTurn) LogWarning("a turn of the loop took ", absl::FormatDuration(turn));
  }
  pollfd fds[3] = {{server_->PollFd(), POLLIN, 0}, {completions_->fd(), POLLIN, 0}, {stop_fd, POLLIN, 0}};
  const int wait = stopping_ ? std::min(PollMs(!drained), kFarewellPollMs) : PollMs(!drained);
  if (poll(fds, 3, wait) > 0 && fds[2].revents != 0 && !stopping_) {
    stopping_ = "asked to by a signal";
    farewell_until_ = clock_->Now();
  }
  return absl::OkStatus();
}

int HeadService::PollMs(bool more) const {
  if (more) return 0;
  const Instant now = clock_->Now();
  Instant wake = next_housekeeping_;
  if (const std::optional<Instant> deadline = core_->NextDeadline()) wake = std::min(wake, *deadline);
  if (commit_by_) wake = std::min(wake, *commit_by_);
  if (wake <= now) return 0;
  return static_cast<int>(std::min<int64_t>(1000, absl::ToInt64Milliseconds(wake - now) + 1));
}

bool HeadService::ReceiveSome() {
  const Instant now = clock_->Now(), until = now + kReceivePerTurn;
  if (received_at_ && now - *received_at_ > kOwnPause) unread_ += now - *received_at_;
  for (int i = 0; i < kMessagesPerTurn; ++i) {
    std::optional<port::Received> received = server_->Receive();
    received_at_ = clock_->Now();
    if (!received) {
      unread_ = absl::ZeroDuration();
      return true;
    }
    OnReceived(*std::move(received));
    if (*received_at_ >= until) return false;
  }
  return false;
}

void HeadService::OnRelayed(const port::Received& received, const core::RelayedUp& up) {
  RelayRoutes::Arrived arrived = relays_->Take(received, up, clock_->Now());
  const NodeId relay(received.peer.key_id);
  for (core::PeerGone& gone : arrived.gone) Step(gone);
  for (port::Received& message : arrived.messages) OnReceived(std::move(message), relay);
  if (!arrived.heard.children.empty()) Step(std::move(arrived.heard));
}

void HeadService::OnReceived(port::Received received, const NodeId& via) {
  absl::StatusOr<core::Message> message = wire::Decode(received.payload, core::SenderOf(received.peer.role));
  if (!message.ok()) {
    if (++counters_.undecodable == 1) {
      LogWarning("dropped a message of ", received.peer.key_id, " at ", received.address, ": ",
                 message.status().message(), " (further ones are only counted)");
    }
    if (core::SenderOf(received.peer.role) != wire::Sender::kClient) return;
    const std::string id = wire::RequestIdOf(received.payload);
    if (!id.empty()) {
      const absl::Status refused = absl::InvalidArgumentError(
          absl::StrCat("the head cannot read this request: ", message.status().message()));
      (void)Send(received.route.id, ReplyOf(id, refused));
    }
    return;
  }
  if (const auto* up = std::get_if<core::RelayedUp>(&*message)) {
    if (via.empty()) OnRelayed(received, *up);  // relays do not go through relays
    return;
  }
  if (via.empty() && std::holds_alternative<core::AgentHello>(*message))
    relays_->Forget(NodeId(received.peer.key_id));
  Step(core::PeerMessage{std::move(received.peer), std::move(received.route.id), std::move(received.address),
                         *std::move(message), unread_, via});
}

absl::Status HeadService::OnCompletions() {
  for (const Completions::Item& item : completions_->Take()) {
    if (item.batch != 0 && absl::IsResourceExhausted(item.status)) {
      OnNoRoom(item.status);
      continue;
    }
    if (absl::IsDataLoss(item.status)) return WithRemedy(item.status);
    if (!item.status.ok()) {
      LogError("the head stops: ", item.status.message(),
               "; what it had acknowledged is safe, ranks go on; look after the disk and start it again");
      return item.status;
    }
    if (item.batch != 0) {
      GT_RETURN_IF_ERROR(OnDurable(item));
    } else if (item.space) {
      OnSpace(*item.space);
    } else if (!item.built.empty()) {
      OnBuilt(item);
    } else if (item.plan != nullptr) {
      Step(core::PlanMade{item.plan});
    } else if (!item.unwritten.empty()) {
      WriteLate(item.unwritten);
    } else if (!item.joined.empty()) {
      OnJoinsDone(item);
    } else {
      OnKeysDone(item);
    }
  }
  DrainLater();
  return absl::OkStatus();
}

absl::Status HeadService::OnDurable(const Completions::Item& item) {
  const absl::Duration took = clock_->Now() - commit_began_;
  counters_.longest_commit = std::max(counters_.longest_commit, took);
  committing_.reset();
  if (took > absl::Seconds(1)) LogWarning("a commit took ", absl::FormatDuration(took), ": slow disk");
  Do(outbox_.Durable(item.batch));
  return absl::OkStatus();
}

// RocksDB must never meet a full disk, so nothing is written to it (fault H3). The head goes on with what it
// knows: a stop ends its job, and is stored when there is room.
void HeadService::OnNoRoom(const absl::Status& status) {
  LogError("nothing can be stored: ", status.message(),
           ". Ranks go on; what was decided is stored as soon as there is room");
  no_room_ = std::string(status.message());
  AnswerWithoutStoring();
}

void HeadService::AnswerWithoutStoring() {
  if (!no_room_) return;
  for (core::Effect& effect : outbox_.TakeAnswers()) {
    if (auto* reply = std::get_if<core::ReplyToClient>(&effect); reply != nullptr && reply->changes) {
      // The answer to a launch names its job: it exists, whatever becomes of this answer.
      const auto said = nlohmann::json::parse(reply->reply.json, nullptr, /*allow_exceptions=*/false);
      const std::string job = said.is_object() ? said.value("job", "") : "";
      reply->reply =
          ReplyOf(reply->reply.id,
                  absl::AbortedError(absl::StrCat(
                      job.empty() ? "" : absl::StrCat(job, ": "), "it is done, but not stored: ", *no_room_,
                      ". It is stored as soon as there is room; should the head end before, ask again")));
    }
    std::visit([this](const auto& one) { (*this)(one); }, effect);
  }
}

void HeadService::OnSpace(const port::StoreSpace& space) {
  if (no_room_ && space.level != port::SpaceLevel::kFull) {
    LogInfo("the store's disk has room again: what was decided meanwhile is stored now");
    no_room_.reset();
    PostCommit();
  }
  if (space.level == space_) return;
  space_ = space.level;
  if (!space.text.empty()) LogWarning(space.text);
  // Tails are the first to go: they may be what the store lacks, or a job could not be submitted for them.
  const bool plenty = space_ == port::SpaceLevel::kPlenty;
  tails_->SetRoom(plenty);
  if (!plenty && tail_queue_) tail_queue_->Clear();
  later_.push_back(core::StoreRoom{.low = space.level != port::SpaceLevel::kPlenty,
                                   .text = space.text,
                                   .full = space.level == port::SpaceLevel::kFull});
}

void HeadService::OnKeysDone(const Completions::Item& item) {
  const auto* reply = std::get_if<core::ClientReply>(&item.reply);
  if (reply != nullptr) (void)Send(key_requests_.Finish(item.request, *reply), item.reply);
}

void HeadService::Step(core::HeadEvent event) {
  later_.push_back(std::move(event));
  DrainLater();
}

void HeadService::DrainLater() {
  while (!later_.empty()) {
    const core::HeadEvent next = std::move(later_.front());
    later_.pop_front();
    core::StepResult step = core_->Step(next, clock_->Now());
    if (!step.why.empty()) LogInfo(step.why);
    Do(outbox_.Add(std::move(step)));
    AnswerWithoutStoring();
  }
}

void HeadService::Do(const std::vector<core::Effect>& effects) {
  for (const core::Effect& effect : effects) {
    std::visit([this](const auto& one) { (*this)(one); }, effect);
  }
}

void HeadService::StartCommit() {
  if (outbox_.MayWait()) {
    const Instant now = clock_->Now();
    if (!commit_by_) commit_by_ = now + kCommitPatience;
    if (now < *commit_by_) return;
  }
  commit_by_.reset();
  std::optional<core::OutboxBatch> batch = outbox_.NextBatch();
  if (!batch) return;
  committing_ = std::make_shared<core::OutboxBatch>(*std::move(batch));
  PostCommit();
}

void HeadService::PostCommit() {
  commit_began_ = clock_->Now();
  // Ahead of all that waits there, and never refused: there is one at a time.
  store_thread_->PostFirst([batch = committing_, store = store_, audit = audit_, now = clock_->WallNow(),
                            path = files_.store_path(), dir = store_dir_, completions = completions_] {
    absl::Status status = CommitBatch(*batch, *store, *audit, now);
    if (status.ok()) status = StillThere(path, *dir);
    completions->Push({.batch = batch->sequence, .status = std::move(status)});
  });
}

void HeadService::operator()(const core::SendToNode& send) {
  if (!send.route.empty()) return (void)Send(send.route, *send.message);
  const std::string* route = core_->RouteOf(send.node);
  if (route == nullptr || SendShared(*route, send.message)) return;
  later_.push_back(core::PeerGone{{core::Role::kNode, send.node.value}, *route});
}

void HeadService::operator()(const core::ReplyToClient& reply) {
  if (reply.document == nullptr) return (void)Send(reply.route, reply.reply);
  BuildReply(reply.client_key, reply.route, reply.reply.id, [reply] { return core::Built(reply); });
}

// Reads after everything that was spilled before, on the same thread. Not counted: a client asks for all
// streams of a lost node at once. When much waits for that disk, only the text in memory is returned.
void HeadService::operator()(const core::ReplyFromSpill& reply) {
  const bool posted = tail_queue_->Read(
      core::TailOf(reply.query),
      [reply, completions = completions_](const std::optional<core::SpilledTail>& spilled) {
        completions->Push({.built = wire::Encode(core::Built(reply, spilled)), .route = reply.route});
      });
  if (!posted) (void)Send(reply.route, core::Built(reply, std::nullopt));
}

void HeadService::BuildReply(const std::string& reader, const std::string& route, const std::string& id,
                             std::function<core::ClientReply()> build) {
  const auto own = reads_of_key_.find(reader);
  const bool turn = own == reads_of_key_.end() || own->second < kReadsPerKeyMax;
  if (turn && readers_thread_->Post([=, build = std::move(build), completions = completions_] {
        completions->Push({.built = wire::Encode(build()), .route = route, .reader = reader});
      })) {
    ++reads_of_key_[reader];
    return;
  }
  (void)Send(route, ReplyOf(id, absl::ResourceExhaustedError("the head has many readers: try again")));
}

void HeadService::OnBuilt(const Completions::Item& item) {
  if (const auto own = reads_of_key_.find(item.reader); own != reads_of_key_.end() && --own->second == 0)
    reads_of_key_.erase(own);
  (void)SendBytes(item.route, item.built, "a reply");
}

// The disk is the store's first.
void HeadService::operator()(const core::SpillTail& spill) {
  const bool room = !no_room_ && space_ == port::SpaceLevel::kPlenty;
  if (!room || !tail_queue_->Write(spill)) ++counters_.tails_lost;
}

void HeadService::operator()(const core::DropSpilled& drop) { tail_queue_->Drop(drop.job); }

void HeadService::operator()(const core::RefusePeer& refuse) {
  (void)Send(refuse.route, core::AgentRefused{refuse.reason, refuse.revoked});
}

void HeadService::operator()(const core::ServiceRequest& request) {
  const bool full = no_room_ || space_ == port::SpaceLevel::kFull;
  if (full && std::holds_alternative<core::AgentJoin>(request.message))
    return (void)Send(request.route, core::AgentRefused{"the disk of the head is full: try again later"});
  if (const auto* join = std::get_if<core::AgentJoin>(&request.message))
    return (void)joins_.Add({request.route, request.address, request.peer.key_id, *join}, clock_->Now());
  const auto* body = std::get_if<core::ClientRequest>(&request.message);
  if (body == nullptr) return;
  if (full && core::RuleOf(body->body).changes) {
    const absl::Status refused = absl::ResourceExhaustedError(
        absl::StrCat("nothing was done: the disk of ", files_.dir, " is full: free some space there"));
    return (void)Send(request.route, ReplyOf(body->id, refused));
  }
  const std::string id = absl::StrCat(request.peer.key_id, "/", body->id);
  std::optional<core::ClientReply> answer;
  if (!key_requests_.Begin(id, request.route, &answer)) {
    if (answer) (void)Send(request.route, *answer);
    return;
  }
  const auto* backup = std::get_if<core::ClientBackup>(&body->body);
  const bool posted =
      backup != nullptr ? Backup(id, request, *body, backup->dir) : ChangeKeys(id, request, *body);
  if (posted) return;
  const core::ClientReply busy =
      ReplyOf(body->id, absl::ResourceExhaustedError("the head has much of this to do: try again later"));
  (void)Send(key_requests_.Finish(id, busy), busy);
}

bool KeyRequests::Begin(const std::string& id, const std::string& route,
                        std::optional<core::ClientReply>* answer) {
  constexpr size_t kRemembered = 1'000;
  const auto [it, fresh] = requests_.try_emplace(id);
  it->second.route = route;
  *answer = it->second.reply;
  if (!fresh) return false;
  order_.push_back(id);
  if (order_.size() > kRemembered) {
    requests_.erase(order_.front());
    order_.pop_front();
  }
  return true;
}

std::string KeyRequests::Finish(const std::string& id, const core::ClientReply& reply) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return "";
  if (!reply.ok) {  // it changed nothing and may be made again
    const std::string route = it->second.route;
    requests_.erase(it);
    std::erase(order_, id);
    return route;
  }
  it->second.reply = reply;
  return it->second.route;
}

// False: it must be made again later.
bool HeadService::ChangeKeys(const std::string& id, const core::ServiceRequest& request,
                             const core::ClientRequest& body) {
  return store_thread_->Post([id, request, body, access = access_, audit = audit_, now = clock_->WallNow(),
                              endpoint = token_endpoint_, completions = completions_] {
    const auto json = access->Answer(body.body, endpoint, core::OwnerName(request.peer));
    const bool changes = core::RuleOf(body.body).changes;
    Completions::Item item{.request = id, .reply = ReplyOf(body.id, json)};
    if (changes) item.status = audit->Append({AuditOf(request, body, json.status())}, now);
    completions->Push(std::move(item));
  });
}

// Runs on a thread of its own: commits go on meanwhile. Its audit line is written by the thread that owns the
// log.
bool HeadService::Backup(const std::string& id, const core::ServiceRequest& request,
                         const core::ClientRequest& body, const std::string& dir) {
  if (!backup_thread_) backup_thread_ = std::make_unique<TaskThread>(kBackupTasksMax);
  return backup_thread_->Post([id, request, body, dir, store = store_, files = files_, audit = audit_,
                               store_thread = store_thread_, clock = clock_, completions = completions_] {
    absl::StatusOr<std::string> done = BackupCluster(*store, files, dir);
    if (done.ok()) *done = nlohmann::json({{"text", *done}}).dump();
    Completions::Item item{.request = id, .reply = ReplyOf(body.id, done)};
    (void)store_thread->Post([=, entry = AuditOf(request, body, done.status())]() mutable {
      item.status = audit->Append({entry}, clock->WallNow());
      completions->Push(std::move(item));
    });
  });
}

// One batch is with the store thread at a time, so a commit waits for at most one.
void HeadService::StartJoins() {
  const std::vector<core::JoinQueue::One> batch = joins_.Take();
  if (batch.empty()) return;
  const bool posted = store_thread_->Post([batch, access = access_, audit = audit_, cluster = files_.cluster,
                                           now = clock_->WallNow(), completions = completions_] {
    std::vector<Access::Joiner> joiners;
    for (const core::JoinQueue::One& one : batch) joiners.push_back({one.token, one.join});
    const std::vector<absl::StatusOr<NodeId>> nodes = access->Join(joiners);
    Completions::Item item;
    std::vector<core::AuditEntry> lines;
    for (size_t i = 0; i < batch.size(); ++i) {
      const absl::StatusOr<NodeId>& node = nodes[i];
      if (node.ok()) {
        item.joined.push_back(core::AgentJoined{cluster, *node});
      } else {
        item.joined.push_back(core::AgentRefused{std::string(node.status().message())});
      }
      const std::string target =
          absl::StrCat(batch[i].join.hostname, node.ok() ? " as node " : "", node.ok() ? node->value : "");
      lines.push_back(
          {{core::Role::kJoin, batch[i].token}, batch[i].address, "join", target, OutcomeOf(node.status())});
    }
    LogInfo(batch.size(), " joins, the last of ", lines.back().target, ": ", lines.back().outcome);
    item.status = audit->Append(lines, now);
    completions->Push(std::move(item));
  });
  if (!posted) (void)joins_.Done();  // the nodes ask again
}

void HeadService::OnJoinsDone(const Completions::Item& item) {
  const std::vector<std::string> routes = joins_.Done();
  for (size_t i = 0; i < routes.size(); ++i) (void)Send(routes[i], item.joined[i]);
}

// A peer without a key leaves no message, only these counters; a line a minute says that somebody tries
// (fault X1).
void HeadService::AuditRefusedConnections(Instant now) {
  const net::ServerCounters c = server_->counters();
  const uint64_t refused = c.denied + c.over_limit + c.bad_handshakes;
  const uint64_t told = audited_.denied + audited_.over_limit + audited_.bad_handshakes;
  if (refused <= told || now < next_refused_line_ || space_ == port::SpaceLevel::kFull) return;
  next_refused_line_ = now + absl::Minutes(1);
  core::AuditEntry entry{.action = "connect"};
  entry.outcome = absl::StrCat("denied: ", c.denied - audited_.denied, " with an unknown key, ",
                               c.bad_handshakes - std::min(c.bad_handshakes, audited_.bad_handshakes),
                               " without a proper handshake, ", c.over_limit - audited_.over_limit,
                               " over the limit of their address");
  audited_ = c;
  (void)store_thread_->Post([entry, audit = audit_, wall = clock_->WallNow(), completions = completions_] {
    const absl::Status status = audit->Append({entry}, wall);
    if (!status.ok()) completions->Push({.status = status});
  });
}

// One at a time. A queue that is full, of jobs that wait for plans, is worth a turn that takes longer.
void HeadService::operator()(const core::MakePlan& make) {
  if (!plans_thread_) plans_thread_ = std::make_unique<TaskThread>(kPlansMax);
  if (plans_thread_->Post([work = make.work, completions = completions_] {
        work->Make();
        completions->Push({.plan = work});
      }))
    return;
  make.work->Make();
  later_.push_back(core::PlanMade{make.work});
}

void HeadService::operator()(const core::StopHead& stop) {
  stopping_ = stop.reason;
  if (options_.at_idle_end && !stop.failed) options_.at_idle_end();
  SayGoodbye();  // before an agent leaves that was told to, or it would be started again
  if (stop.failed) stop_status_ = absl::FailedPreconditionError(stop.reason);
  farewell_until_ = clock_->Now() + kFarewell;
}

bool HeadService::Send(const std::string& route, const core::Message& message) {
  return SendBytes(route, wire::Encode(message), wire::KindName(message));
}

// A grant of a large job is packed once for all its nodes.
bool HeadService::SendShared(const std::string& route, const core::SharedMessage& message) {
  if (!packed_ || !packed_->message.Same(message)) packed_.emplace(Packed{message, wire::Encode(*message)});
  if (!relays_->Has(route)) return SendBytes(route, packed_->bytes, wire::KindName(*message));
  relays_->Send(route, message, packed_->bytes);
  if (relays_->Crowded()) FlushRelays();
  return true;
}

// What is for children leaves at the end of the turn, together: a frame a relay.
void HeadService::FlushRelays() {
  const std::vector<core::PeerGone> gone =
      relays_->Flush([this](const std::string& relay, const core::RelayedDown& frame) {
        return SendBytes(relay, wire::Encode(frame), "a frame of a relay");
      });
  for (const core::PeerGone& one : gone) later_.push_back(one);
}

bool HeadService::SendBytes(const std::string& route, absl::string_view bytes, absl::string_view what) {
  if (relays_->Has(route)) {
    relays_->Send(route, bytes);
    if (relays_->Crowded()) FlushRelays();
    return true;
  }
  const absl::Status status = server_->Send({route}, bytes);
  if (status.ok()) return true;
  ++counters_.unsent;
  if (absl::IsInvalidArgument(status)) LogError("cannot send ", what, ": ", status.message());
  return false;
}

void HeadService::Housekeeping(Instant now) {
  if (now < next_housekeeping_) return;
  next_housekeeping_ = now + kHousekeepingPause;
  AuditRefusedConnections(now);
  (void)tail_queue_->PayDebts();
  if (runs_ != nullptr && runs_->pending())
    (void)files_thread_->Post([runs = runs_] { (void)runs->Write(); });
  std::string stats = StatsJson();
  if (stats == last_stats_) stats.clear();
  if (!stats.empty()) last_stats_ = stats;
  const bool full = no_room_ || space_ == port::SpaceLevel::kFull;
  (void)store_thread_->Post([access = access_, store = store_, completions = completions_, full,
                             before = space_, stats = std::move(stats),
                             stats_path = files_.dir + "/stats.json", store_path = files_.store_path(),
                             store_dir = store_dir_] {
    if (absl::Status there = StillThere(store_path, *store_dir); !there.ok())
      return completions->Push({.status = std::move(there)});
    const absl::Status status = access->Refresh();
    if (!status.ok()) LogWarning("the list of allowed keys stays as it was: ", status.message());
    if (!stats.empty()) (void)WriteFileDurable(stats_path, stats, 0600);
    const port::StoreSpace space = store->Space();
    if (full || space.level != before) completions->Push({.space = space});  // else nobody is woken
  });
}

std::string HeadService::StatsJson() const {
  const net::ServerCounters net = server_->counters();
  const core::HeadCounters& core = core_->counters();
  // Contains only values that stay the same while nothing happens, so that an idle head writes nothing.
  const nlohmann::ordered_json json = {
      {"connections_accepted", net.accepted},
      {"connections_authenticated", net.authenticated},
      {"keys_denied", net.denied},
      {"handshakes_failed", net.bad_handshakes},
      {"connections_over_limit", net.over_limit},
      {"messages_not_one_frame", net.bad_frames},
      {"messages_of_removed_keys", net.revoked_dropped},
      {"messages_undecodable", counters_.undecodable},
      {"messages_unsent", counters_.unsent},
      {"run_file_lines_dropped", counters_.run_file_drops},
      {"relayed_nodes", relays_->conversations()},
      {"relayed_refused", relays_->refused()},
      {"tails_lost", counters_.tails_lost + tails_->lost()},
      {"joins_dropped", joins_.dropped()},
      {"requests_denied", core.denied},
      {"messages_stale", core.stale_dropped},
      {"longest_turn_ms", absl::ToInt64Milliseconds(counters_.longest_turn)},
      {"longest_commit_ms", absl::ToInt64Milliseconds(counters_.longest_commit)}};
  return json.dump(2) + "\n";
}

}  // namespace gtrain::head
