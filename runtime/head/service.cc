// A turn of the loop: take what arrived and step the core with it, take what the disk finished and send
// what that released, fire the timer only when no input is left, hand the next batch to the disk, wait.
// Nothing here blocks but the wait.
#include "runtime/head/service.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "runtime/head/run_files.h"
#include "runtime/store/rocks_store.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::head {
namespace {

constexpr int kMessagesPerTurn = 500;
constexpr size_t kStoreTasksMax = 1'000;
constexpr size_t kRunFileTasksMax = 10'000;
// A message on a connection that closes at once may be dropped by the receiver: agents are given this long to
// read their shutdown before the sockets go.
constexpr absl::Duration kFarewell = absl::Milliseconds(500);
constexpr int kFarewellPollMs = 50;
constexpr absl::Duration kJoinTokenLife = absl::Minutes(15);
constexpr absl::Duration kHousekeepingPause = absl::Seconds(1);
constexpr absl::Duration kTimerOverdue = absl::Seconds(1);
constexpr absl::Duration kSlowTurn = absl::Milliseconds(250);

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

wire::Sender SenderOf(core::Role role) {
  switch (role) {
    case core::Role::kNode:
      return wire::Sender::kAgent;
    case core::Role::kJoin:
      return wire::Sender::kJoiner;
    default:
      return wire::Sender::kClient;
  }
}

absl::StatusOr<std::vector<core::Record>> LoadRecords(port::MetaStore& store) {
  GT_ASSIGN_OR_RETURN(auto pairs, store.LoadAll());
  std::vector<core::Record> records;
  for (const auto& [key, value] : pairs) {
    absl::StatusOr<core::Record> record = wire::DecodeRecord(value);
    if (!record.ok()) {
      return absl::DataLossError(absl::StrCat("record \"", key, "\": ", record.status().message()));
    }
    if (core::KeyOf(*record) != key) {
      return absl::DataLossError(
          absl::StrCat("record \"", core::KeyOf(*record), "\" lies under \"", key, "\""));
    }
    records.push_back(*std::move(record));
  }
  return records;
}

std::vector<port::Write> EncodeBatch(const core::OutboxBatch& batch) {
  std::vector<port::Write> writes;
  for (const core::RecordWrite& write : batch.writes) {
    std::optional<std::string> value;
    if (write.record) value = wire::EncodeRecord(*write.record);
    writes.push_back({write.key, std::move(value)});
  }
  return writes;
}

// A node's own key, registered for good. Keys with another role keep it: a token makes nodes, nothing else.
absl::Status RegisterNode(const std::string& path, const core::AgentJoin& join, net::KeyRegistry& registry) {
  GT_ASSIGN_OR_RETURN(std::vector<net::AllowedKey> keys, net::ReadAllowedKeys(path));
  for (const net::AllowedKey& key : keys) {
    if (key.public_key != join.public_key) continue;
    if (key.role != core::Role::kNode)
      return absl::PermissionDeniedError("this key already has another role");
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(net::AddAllowedKey(path, {core::Role::kNode, join.public_key, join.hostname}));
  return registry.Reload(path);
}

}  // namespace

Completions::Completions() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { GT_CHECK(event_.valid()); }

void Completions::Push(Item item) {
  absl::MutexLock lock(&mutex_);
  items_.push_back(std::move(item));
  const uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof(one));
}

std::vector<Completions::Item> Completions::Take() {
  absl::MutexLock lock(&mutex_);
  uint64_t drained;
  (void)!read(event_.get(), &drained, sizeof(drained));
  return std::exchange(items_, {});
}

HeadService::HeadService(const HeadOptions& options) : options_(options) {}

HeadService::~HeadService() {
  if (published_) unlink(files_.endpoint_path().c_str());
  if (store_thread_) (void)store_thread_->Finish(absl::Seconds(10));
  if (files_thread_ && !files_thread_->Finish(absl::Seconds(3))) {
    LogWarning("a run directory does not answer; its newest event lines are lost");
  }
}

absl::Status HeadService::Start() {
  GT_CHECK(options_.parse_job != nullptr);
  const bool loopback = std::all_of(options_.listen.begin(), options_.listen.end(), IsLoopback);
  if (geteuid() == 0 && !loopback && !options_.allow_root) {
    return absl::PermissionDeniedError(
        "root serves only loopback addresses: run the head as an ordinary user, or add --allow-root");
  }
  GT_ASSIGN_OR_RETURN(files_, net::LoadCluster(options_.cluster_dir));
  GT_RETURN_IF_ERROR(registry_->Reload(files_.authorized_path()));
  GT_RETURN_IF_ERROR(Recover());
  GT_RETURN_IF_ERROR(Listen());
  store_thread_ = std::make_unique<TaskThread>(kStoreTasksMax);
  files_thread_ = std::make_unique<TaskThread>(kRunFileTasksMax);
  return absl::OkStatus();
}

// Nothing is served before the new epoch is durable (fault H9).
absl::Status HeadService::Recover() {
  GT_ASSIGN_OR_RETURN(store_, store::OpenRocksStore(files_.store_path()));
  GT_ASSIGN_OR_RETURN(std::vector<core::Record> records, LoadRecords(*store_));
  core::HeadConfig config{.cluster = files_.cluster,
                          .local = options_.local,
                          .exit_when_idle = options_.exit_when_idle,
                          .expected_nodes = options_.expected_nodes,
                          .parse_job = options_.parse_job};
  core_ = std::make_unique<core::HeadCore>(std::move(config), Rng::FromSystem());
  GT_ASSIGN_OR_RETURN(core::StepResult step, core_->Recover(records, clock_->Now()));
  if (!step.why.empty()) LogInfo(step.why);
  std::vector<core::Effect> effects = outbox_.Add(std::move(step));
  while (std::optional<core::OutboxBatch> batch = outbox_.NextBatch()) {
    GT_RETURN_IF_ERROR(store_->Commit(EncodeBatch(*batch)));
    for (core::Effect& effect : outbox_.Durable(batch->sequence)) effects.push_back(std::move(effect));
  }
  // Nobody is connected yet, so only what goes to files and to ourselves is left of them.
  for (core::Effect& effect : effects) {
    if (auto* event = std::get_if<core::EmitEvent>(&effect)) recovered_.push_back(std::move(*event));
  }
  return absl::OkStatus();
}

absl::Status HeadService::Listen() {
  std::vector<std::string> listen = options_.listen;
  if (listen.empty()) listen.push_back("127.0.0.1:0");
  GT_ASSIGN_OR_RETURN(
      server_,
      net::ZmqServer::Start({.listen = listen, .keys = files_.head, .registry = registry_, .clock = clock_}));
  const std::string& first = server_->endpoints()[0];
  char hostname[256] = "";
  (void)gethostname(hostname, sizeof(hostname) - 1);
  token_endpoint_ = first;
  std::string local = first;
  if (IsWildcard(first)) {
    token_endpoint_ = WithHost(hostname, first);
    local = WithHost(absl::StartsWith(first, "[") ? "[::1]" : "127.0.0.1", first);
  }
  if (!options_.advertise.empty()) token_endpoint_ = local = options_.advertise;
  GT_RETURN_IF_ERROR(net::WriteEndpoint(files_.endpoint_path(), {.endpoint = local,
                                                                 .endpoints = server_->endpoints(),
                                                                 .head_public_key = files_.head.public_key,
                                                                 .cluster = files_.cluster,
                                                                 .pid = getpid()}));
  published_ = true;
  LogInfo("serving cluster ", files_.cluster.value, " at ", absl::StrJoin(server_->endpoints(), ", "));
  return absl::OkStatus();
}

absl::Status HeadService::Loop(int stop_fd) {
  for (const core::EmitEvent& event : std::exchange(recovered_, {})) (*this)(event);
  absl::Status status;
  while (status.ok() && (!stopping_ || clock_->Now() < farewell_until_)) status = Turn(stop_fd);
  LogInfo("the head ends", stopping_ ? absl::StrCat(": ", *stopping_) : "", "; longest loop turn ",
          absl::FormatDuration(counters_.longest_turn), ", longest commit ",
          absl::FormatDuration(counters_.longest_commit));
  return status;
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
  if (wake <= now) return 0;
  return static_cast<int>(std::min<int64_t>(1000, absl::ToInt64Milliseconds(wake - now) + 1));
}

bool HeadService::ReceiveSome() {
  for (int i = 0; i < kMessagesPerTurn; ++i) {
    std::optional<port::Received> received = server_->Receive();
    if (!received) return true;
    OnReceived(*std::move(received));
  }
  return false;
}

void HeadService::OnReceived(port::Received received) {
  absl::StatusOr<core::Message> message = wire::Decode(received.payload, SenderOf(received.peer.role));
  if (!message.ok()) {
    if (++counters_.undecodable == 1) {
      LogWarning("dropped a message of ", received.peer.key_id, " at ", received.address, ": ",
                 message.status().message(), " (further ones are only counted)");
    }
    return;
  }
  Step(core::PeerMessage{std::move(received.peer), std::move(received.route.id), std::move(received.address),
                         *std::move(message)});
}

absl::Status HeadService::OnCompletions() {
  for (const Completions::Item& item : completions_->Take()) {
    if (item.batch != 0) {
      GT_RETURN_IF_ERROR(OnDurable(item));
    } else {
      OnJoined(item);
    }
  }
  DrainLater();
  return absl::OkStatus();
}

absl::Status HeadService::OnDurable(const Completions::Item& item) {
  const absl::Duration took = clock_->Now() - commit_began_;
  counters_.longest_commit = std::max(counters_.longest_commit, took);
  if (!item.status.ok()) {
    LogError("the head stops: ", item.status.message(),
             "; what it had acknowledged is safe, ranks go on; look after the disk and start it again");
    return item.status;
  }
  if (took > absl::Seconds(1)) LogWarning("a commit took ", absl::FormatDuration(took), ": slow disk");
  Do(outbox_.Durable(item.batch));
  return absl::OkStatus();
}

void HeadService::OnJoined(const Completions::Item& item) {
  if (item.status.ok()) {
    LogInfo("node ", item.node, " joined with a token");
    (void)Send(item.route, core::AgentJoined{files_.cluster, NodeId(item.node)});
  } else {
    (void)Send(item.route, core::AgentRefused{std::string(item.status.message())});
  }
}

void HeadService::Step(const core::HeadEvent& event) {
  later_.push_back(event);
  DrainLater();
}

void HeadService::DrainLater() {
  while (!later_.empty()) {
    const core::HeadEvent next = std::move(later_.front());
    later_.pop_front();
    core::StepResult step = core_->Step(next, clock_->Now());
    if (!step.why.empty()) LogInfo(step.why);
    Do(outbox_.Add(std::move(step)));
  }
}

void HeadService::Do(const std::vector<core::Effect>& effects) {
  for (const core::Effect& effect : effects) {
    std::visit([this](const auto& one) { (*this)(one); }, effect);
  }
}

void HeadService::StartCommit() {
  std::optional<core::OutboxBatch> batch = outbox_.NextBatch();
  if (!batch) return;
  commit_began_ = clock_->Now();
  const auto sequence = batch->sequence;
  const bool posted =
      store_thread_->Post([batch = *std::move(batch), store = store_, completions = completions_] {
        completions->Push({.batch = batch.sequence, .status = store->Commit(EncodeBatch(batch))});
      });
  if (!posted) {
    completions_->Push(
        {.batch = sequence, .status = absl::ResourceExhaustedError("the store does not keep up")});
  }
}

void HeadService::operator()(const core::SendToNode& send) {
  const std::string* route = core_->RouteOf(send.node);
  if (route == nullptr || Send(*route, send.message)) return;
  later_.push_back(core::PeerGone{{core::Role::kNode, send.node.value}, *route});
}

void HeadService::operator()(const core::ReplyToClient& reply) { (void)Send(reply.route, reply.reply); }

void HeadService::operator()(const core::RefusePeer& refuse) {
  (void)Send(refuse.route, core::AgentRefused{refuse.reason});
}

void HeadService::operator()(const core::ServiceRequest& request) {
  if (const auto* join = std::get_if<core::AgentJoin>(&request.message)) return Join(request, *join);
  if (const auto* body = std::get_if<core::ClientRequest>(&request.message)) MakeToken(request, *body);
}

void HeadService::MakeToken(const core::ServiceRequest& request, const core::ClientRequest& body) {
  const net::KeyPair keys = net::MakeKeyPair();
  core::ClientReply reply{.id = body.id};
  const absl::Status status = registry_->AddJoinKey(keys.public_key, clock_->Now() + kJoinTokenLife);
  if (status.ok()) {
    const std::string token = net::PrintJoinToken({token_endpoint_, files_.head.public_key, keys.secret_key});
    reply.json = nlohmann::json({{"token", token},
                                 {"endpoint", token_endpoint_},
                                 {"expires_seconds", absl::ToInt64Seconds(kJoinTokenLife)}})
                     .dump();
  } else {
    reply.ok = false;
    reply.code = static_cast<int>(status.code());
    reply.error = std::string(status.message());
  }
  (void)Send(request.route, reply);
}

void HeadService::Join(const core::ServiceRequest& request, const core::AgentJoin& join) {
  absl::Status status;
  if (!net::ValidKey(join.public_key)) {
    status = absl::InvalidArgumentError("that is not a public key");
  } else if (!registry_->SpendJoinKey(request.peer.key_id, join.public_key, clock_->Now())) {
    status = absl::PermissionDeniedError("this join token is used or too old");
  }
  Completions::Item item{.status = status, .route = request.route};
  if (!status.ok()) return completions_->Push(std::move(item));
  item.node = net::KeyId(join.public_key);
  const bool posted = store_thread_->Post([item, join, path = files_.authorized_path(), registry = registry_,
                                           completions = completions_]() mutable {
    item.status = RegisterNode(path, join, *registry);
    completions->Push(std::move(item));
  });
  if (!posted) LogWarning("dropped a join: the store does not keep up");
}

void HeadService::operator()(const core::EmitEvent& event) {
  if (event.run_dir.empty()) return;
  PostRunFile([dir = event.run_dir, line = EventLine(event, clock_->WallNow()),
               make = options_.local] { return AppendEvent(dir, line, make); },
              event.run_dir);
}

void HeadService::operator()(const core::WriteFailure& failure) {
  if (failure.run_dir.empty()) return;
  PostRunFile([dir = failure.run_dir, json = failure.json,
               make = options_.local] { return WriteFailureFile(dir, json, make); },
              failure.run_dir);
}

void HeadService::PostRunFile(std::function<absl::Status()> write, const std::string& what) {
  const bool posted = files_thread_->Post([write = std::move(write)] {
    const absl::Status status = write();
    // Without the directory the job came from another machine, whose client has its own.
    if (!status.ok() && !absl::IsNotFound(status)) LogWarning("run directory: ", status.message());
  });
  if (posted) return;
  ++counters_.run_file_drops;
  const Instant now = clock_->Now();
  if (now - run_file_log_ < absl::Seconds(10)) return;
  run_file_log_ = now;
  LogWarning("the run directory ", what, " does not keep up; ", counters_.run_file_drops,
             " lines dropped so far");
}

void HeadService::operator()(const core::StopHead& stop) {
  stopping_ = stop.reason;
  farewell_until_ = clock_->Now() + kFarewell;
}

bool HeadService::Send(const std::string& route, const core::Message& message) {
  const absl::Status status = server_->Send({route}, wire::Encode(message));
  if (status.ok()) return true;
  ++counters_.unsent;
  if (absl::IsInvalidArgument(status))
    LogError("cannot send ", wire::KindName(message), ": ", status.message());
  return false;
}

void HeadService::Housekeeping(Instant now) {
  if (now < next_housekeeping_) return;
  next_housekeeping_ = now + kHousekeepingPause;
  std::string stats = StatsJson();
  if (stats == last_stats_) stats.clear();
  if (!stats.empty()) last_stats_ = stats;
  (void)store_thread_->Post([path = files_.authorized_path(), registry = registry_, stats = std::move(stats),
                             stats_path = files_.dir + "/stats.json"] {
    const absl::Status status = registry->Reload(path);
    if (!status.ok()) LogWarning("the list of allowed keys stays as it was: ", status.message());
    if (!stats.empty()) (void)WriteFileDurable(stats_path, stats, 0600);
  });
}

std::string HeadService::StatsJson() const {
  const net::ServerCounters net = server_->counters();
  const core::HeadCounters& core = core_->counters();
  // Only what stays the same while nothing happens, so that an idle head writes nothing.
  const nlohmann::ordered_json json = {
      {"connections_accepted", net.accepted},
      {"connections_authenticated", net.authenticated},
      {"keys_denied", net.denied},
      {"handshakes_failed", net.bad_handshakes},
      {"messages_not_one_frame", net.bad_frames},
      {"messages_of_removed_keys", net.revoked_dropped},
      {"messages_undecodable", counters_.undecodable},
      {"messages_unsent", counters_.unsent},
      {"run_file_lines_dropped", counters_.run_file_drops},
      {"requests_denied", core.denied},
      {"messages_stale", core.stale_dropped},
      {"longest_turn_ms", absl::ToInt64Milliseconds(counters_.longest_turn)},
      {"longest_commit_ms", absl::ToInt64Milliseconds(counters_.longest_commit)}};
  return json.dump(2) + "\n";
}

}  // namespace gtrain::head
