// A call takes a connection that nobody uses, or makes one, and gives it back when it has its answer; one
// that did not answer in time is closed, so a late answer is never taken for another call's. Nobody waits
// longer than kConnectWithin and kAnswerWithin; after that the peer is not tried for a while.
#include "checkpoint/near/peer_tier.h"

#include <poll.h>

#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "checkpoint/near/near_wire.h"
#include "net/zmq/client.h"
#include "net/zmq/keys.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kConnectWithin = absl::Seconds(10);
constexpr absl::Duration kAnswerWithin = absl::Seconds(20);
constexpr absl::Duration kLeftAlone = absl::Seconds(30);  // after it did not answer
constexpr absl::Duration kLook = absl::Milliseconds(100);
constexpr absl::Duration kSendAgain = absl::Milliseconds(1);
constexpr int kConnectionsMax = 64;  // of one client's context

class PeerTier final : public port::NearTier {
 public:
  PeerTier(port::NearPeer peer, net::KeyPair keys)
      : peer_(std::move(peer)), keys_(std::move(keys)), context_(net::MakeClientContext(kConnectionsMax)) {}

  absl::StatusOr<std::vector<std::string>> Attempts() override {
    GT_ASSIGN_OR_RETURN(const std::string reply, Call({.kind = NearRequest::Kind::kAttempts}));
    GT_ASSIGN_OR_RETURN(const absl::string_view data, ParseReply(reply));
    GT_ASSIGN_OR_RETURN(const std::vector<Shard> list, ParseShards(data));
    std::vector<std::string> attempts;
    for (const Shard& attempt : list) attempts.push_back(attempt.file);
    return attempts;
  }

  absl::StatusOr<std::vector<Shard>> List(absl::string_view attempt) override {
    GT_ASSIGN_OR_RETURN(const std::string reply,
                        Call({.kind = NearRequest::Kind::kList, .attempt = std::string(attempt)}));
    GT_ASSIGN_OR_RETURN(const absl::string_view data, ParseReply(reply));
    return ParseShards(data);
  }

  absl::Status Read(absl::string_view attempt, absl::string_view file, uint64_t offset,
                    absl::Span<char> out) override {
    while (!out.empty()) {
      const size_t bytes = std::min<size_t>(out.size(), kNearPieceBytes);
      GT_ASSIGN_OR_RETURN(const std::string reply, Call({.kind = NearRequest::Kind::kRead,
                                                         .offset = offset,
                                                         .bytes = bytes,
                                                         .attempt = std::string(attempt),
                                                         .file = std::string(file)}));
      GT_ASSIGN_OR_RETURN(const absl::string_view data, ParseReply(reply));
      if (data.size() != bytes) return absl::DataLossError("an answer of another length");
      data.copy(out.data(), bytes);
      out.remove_prefix(bytes);
      offset += bytes;
    }
    return absl::OkStatus();
  }

  uint64_t ReadSize() const override { return kNearPieceBytes; }

  absl::Status Put(const Copy& copy, Source source) override {
    GT_ASSIGN_OR_RETURN(std::unique_ptr<net::ZmqClient> client, TakeConnection());
    const absl::Status put = PutOver(client.get(), copy, source);
    if (put.ok()) GiveBack(std::move(client));
    return put;
  }

  std::string Describe() const override { return absl::StrCat("the memory of ", peer_.name); }

 private:
  absl::Status PutOver(net::ZmqClient* client, const Copy& copy, Source source) {
    GT_ASSIGN_OR_RETURN(const std::string begun, CallOver(client, {.kind = NearRequest::Kind::kBegin,
                                                                   .bytes = copy.bytes,
                                                                   .attempt = copy.attempt,
                                                                   .file = copy.file,
                                                                   .committed = copy.committed}));
    const absl::Status there = ParseReply(begun).status();
    if (absl::IsAlreadyExists(there)) return absl::OkStatus();
    GT_RETURN_IF_ERROR(there);
    for (uint64_t at = 0; at < copy.bytes;) {
      GT_ASSIGN_OR_RETURN(absl::string_view piece, source(at));
      piece = piece.substr(0, kNearPieceBytes);
      GT_ASSIGN_OR_RETURN(const std::string reply,
                          CallOver(client, {.kind = NearRequest::Kind::kPiece, .offset = at, .data = piece}));
      GT_RETURN_IF_ERROR(ParseReply(reply).status());
      at += piece.size();
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Call(const NearRequest& request) {
    GT_ASSIGN_OR_RETURN(std::unique_ptr<net::ZmqClient> client, TakeConnection());
    absl::StatusOr<std::string> reply = CallOver(client.get(), request);
    if (reply.ok()) GiveBack(std::move(client));
    return reply;
  }

  absl::StatusOr<std::string> CallOver(net::ZmqClient* client, const NearRequest& request) {
    const Instant deadline = clock_.Now() + kAnswerWithin;
    const std::string message = PrintRequest(request);
    absl::Status sent = client->Send(message);
    // A connection is known a moment before it takes messages.
    while (absl::IsResourceExhausted(sent) && clock_.Now() < deadline) {
      absl::SleepFor(kSendAgain);
      sent = client->Send(message);
    }
    if (!sent.ok()) return NotThere(absl::StrCat("does not take requests: ", sent.message()));
    while (clock_.Now() < deadline) {
      if (std::optional<std::string> reply = client->Receive()) return *std::move(reply);
      if (!client->Connected()) break;
      Wait(*client);
    }
    return NotThere("does not answer");
  }

  absl::StatusOr<std::unique_ptr<net::ZmqClient>> TakeConnection() {
    {
      MutexLock lock(&mu_);
      if (clock_.Now() < left_alone_until_)
        return absl::UnavailableError(absl::StrCat(peer_.name, " was not there"));
      if (!idle_.empty()) {
        std::unique_ptr<net::ZmqClient> client = std::move(idle_.back());
        idle_.pop_back();
        if (client->Connected()) return client;
      }
    }
    GT_ASSIGN_OR_RETURN(auto client, net::ZmqClient::Connect({.endpoint = peer_.endpoint,
                                                              .server_public_key = peer_.public_key,
                                                              .keys = keys_,
                                                              .message_bytes_max = kNearMessageBytesMax,
                                                              .send_bytes_max = kNearMessageBytesMax,
                                                              .queue_messages_max = 4,
                                                              .context = context_}));
    const Instant deadline = clock_.Now() + kConnectWithin;
    while (!client->Connected()) {
      if (clock_.Now() >= deadline || client->KeyRefused())
        return NotThere(
            absl::StrCat("cannot be reached at ", peer_.endpoint, ": ", client->status().message()));
      Wait(*client);
    }
    return client;
  }

  void GiveBack(std::unique_ptr<net::ZmqClient> client) {
    MutexLock lock(&mu_);
    idle_.push_back(std::move(client));
  }

  absl::Status NotThere(absl::string_view why) {
    MutexLock lock(&mu_);
    left_alone_until_ = clock_.Now() + kLeftAlone;
    return absl::UnavailableError(absl::StrCat(peer_.name, " ", why));
  }

  static void Wait(const net::ZmqClient& client) {
    pollfd fd = {client.PollFd(), POLLIN, 0};
    poll(&fd, 1, static_cast<int>(absl::ToInt64Milliseconds(kLook)));
  }

  const port::NearPeer peer_;
  const net::KeyPair keys_;
  const std::shared_ptr<void> context_;
  const RealClock clock_;
  Mutex mu_;
  std::vector<std::unique_ptr<net::ZmqClient>> idle_ ABSL_GUARDED_BY(mu_);
  Instant left_alone_until_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<port::NearTier>> OpenPeerTier(const port::NearPeer& peer,
                                                             const std::string& secret) {
  GT_ASSIGN_OR_RETURN(net::KeyPair keys, net::KeyPairOfHex(secret));
  if (!net::ValidKey(peer.public_key)) return absl::InvalidArgumentError("no public key of a node");
  return std::make_unique<PeerTier>(peer, std::move(keys));
}

}  // namespace gtrain::ckpt
