#include "checkpoint/near/near_server.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {
namespace {

constexpr int kQueueMessagesMax = 16;           // a connection, each way: they hold a piece each
constexpr int kConnectionsPerAddressMax = 256;  // ranks and writers of one machine
constexpr size_t kComingMax = 256;
constexpr absl::Duration kComingWithin = absl::Seconds(30);  // from one piece to the next
constexpr int kLookMs = 1000;
constexpr int kRequestsATurn = 64;
constexpr size_t kAnswersMax = 64;                           // that wait for room; then nobody is heard
constexpr absl::Duration kAnswerWithin = absl::Seconds(20);  // whoever asked has given up by then
constexpr int kSendAgainMs = 1;

}  // namespace

absl::StatusOr<std::unique_ptr<NearServer>> NearServer::Start(const std::string& listen,
                                                              const net::KeyPair& keys) {
  auto registry = std::make_shared<net::KeyRegistry>();
  GT_ASSIGN_OR_RETURN(auto server,
                      net::ZmqServer::Start({.listen = {listen},
                                             .keys = keys,
                                             .registry = registry,
                                             .clock = std::make_shared<RealClock>(),
                                             .message_bytes_max = kNearMessageBytesMax,
                                             .queue_messages_max = kQueueMessagesMax,
                                             .connections_per_address_max = kConnectionsPerAddressMax}));
  const std::string& endpoint = server->endpoints()[0];
  int port = 0;
  if (!absl::SimpleAtoi(endpoint.substr(endpoint.rfind(':') + 1), &port))
    return absl::InternalError(absl::StrCat("no port in ", endpoint));
  return std::unique_ptr<NearServer>(new NearServer(std::move(server), std::move(registry), port));
}

NearServer::NearServer(std::unique_ptr<net::ZmqServer> server, std::shared_ptr<net::KeyRegistry> registry,
                       int port)
    : server_(std::move(server)),
      registry_(std::move(registry)),
      port_(port),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Run(); }) {}

NearServer::~NearServer() {
  ending_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void NearServer::Allow(const std::string& job, const std::string& public_key, const std::string& folder,
                       uint64_t bytes_max) {
  auto opened = NearFolder::Open(folder, bytes_max);
  if (!opened.ok()) {
    LogWarning("copies of checkpoints of ", job, " cannot be kept here: ", opened.status().message());
    return;
  }
  MutexLock lock(&mu_);
  jobs_[job] = {public_key, *std::move(opened)};
  Publish();
}

void NearServer::Forbid(const std::string& job) {
  MutexLock lock(&mu_);
  if (jobs_.erase(job) > 0) Publish();
}

// The name of a key is its job.
void NearServer::Publish() {
  std::vector<net::AllowedKey> keys;
  for (const auto& [name, job] : jobs_)
    keys.push_back({.role = net::Role::kUser, .public_key = job.public_key, .comment = name});
  registry_->Replace(keys);
}

void NearServer::Run() {
  while (!ending_) {
    pollfd fds[] = {{server_->PollFd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    poll(fds, 2, answers_.empty() ? kLookMs : kSendAgainMs);
    SendAnswers();
    for (int i = 0; i < kRequestsATurn && answers_.size() < kAnswersMax && !ending_; ++i) {
      const std::optional<port::Received> received = server_->Receive();
      if (!received) break;
      answers_.push_back({received->route, Answer(*received), clock_.Now()});
      SendAnswers();
    }
    DropStopped();
  }
}

// ZeroMQ may refuse a message for a moment although the peer reads: its queue is short, and it learns late
// that there is room again.
void NearServer::SendAnswers() {
  for (size_t left = answers_.size(); left > 0; --left) {
    Waiting answer = std::move(answers_.front());
    answers_.pop_front();
    const absl::Status sent = server_->Send(answer.route, answer.message);
    if (absl::IsResourceExhausted(sent) && clock_.Now() - answer.since < kAnswerWithin)
      answers_.push_back(std::move(answer));
  }
}

std::string NearServer::Answer(const port::Received& received) {
  const absl::StatusOr<NearRequest> request = ParseRequest(received.payload);
  if (!request.ok()) return PrintReply(request.status());
  const std::string& job = received.peer.name;
  std::shared_ptr<NearFolder> folder;
  {
    MutexLock lock(&mu_);
    const auto it = jobs_.find(job);
    if (it == jobs_.end()) return PrintReply(absl::PermissionDeniedError("the job is over here"));
    folder = it->second.folder;
  }
  switch (request->kind) {
    case NearRequest::Kind::kList: {
      const auto shards = folder->List(job, request->attempt);
      return PrintReply(shards.status(), shards.ok() ? PrintShards(*shards) : "");
    }
    case NearRequest::Kind::kRead: {
      if (request->bytes > kNearPieceBytes)
        return PrintReply(absl::InvalidArgumentError("a piece is smaller"));
      std::string data(request->bytes, '\0');
      const absl::Status read = folder->Read(job, request->attempt, request->file, request->offset,
                                             absl::MakeSpan(data.data(), data.size()));
      return PrintReply(read, data);
    }
    case NearRequest::Kind::kAttempts: {
      const auto attempts = folder->Attempts(job);
      std::vector<port::NearTier::Shard> list;
      if (attempts.ok()) {
        for (const std::string& attempt : *attempts) list.push_back({attempt, 0});
      }
      return PrintReply(attempts.status(), PrintShards(list));
    }
    case NearRequest::Kind::kBegin:
      return PrintReply(Begin(job, folder.get(), received.route.id, *request));
    case NearRequest::Kind::kPiece:
      return PrintReply(Piece(received.route.id, *request));
  }
  return PrintReply(absl::InvalidArgumentError("not a request for copies"));
}

absl::Status NearServer::Begin(const std::string& job, NearFolder* folder, const std::string& route,
                               const NearRequest& request) {
  coming_.erase(route);
  if (coming_.size() >= kComingMax) return absl::ResourceExhaustedError("too many copies come at once");
  if (request.bytes == 0) return absl::InvalidArgumentError("a copy of nothing");
  GT_ASSIGN_OR_RETURN(ComingCopy copy, folder->Begin(job, {.attempt = request.attempt,
                                                           .file = request.file,
                                                           .bytes = request.bytes,
                                                           .committed = request.committed}));
  coming_.emplace(route, Coming{std::move(copy), 0, request.bytes, clock_.Now()});
  return absl::OkStatus();
}

absl::Status NearServer::Piece(const std::string& route, const NearRequest& request) {
  const auto it = coming_.find(route);
  if (it == coming_.end() || it->second.at != request.offset) {
    return absl::FailedPreconditionError("no copy is being put here, or not this piece of it");
  }
  Coming& coming = it->second;
  absl::Status status = coming.copy.Append(request.data);
  coming.at += request.data.size();
  coming.heard = clock_.Now();
  if (status.ok() && coming.at < coming.bytes) return status;
  if (status.ok()) status = coming.copy.Finish();
  coming_.erase(it);
  return status;
}

void NearServer::DropStopped() {
  const Instant now = clock_.Now();
  for (auto it = coming_.begin(); it != coming_.end();) {
    it = now - it->second.heard > kComingWithin ? coming_.erase(it) : std::next(it);
  }
}

}  // namespace gtrain::ckpt
