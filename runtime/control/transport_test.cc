// Real sockets on loopback. Every wait is for a condition with a generous deadline.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "net/zmq/client.h"
#include "net/zmq/server.h"
#include "net/zmq/socket.h"
#include "runtime/control/control_client.h"
#include "runtime/wire/codec.h"

namespace gtrain::net {
namespace {

using ::testing::HasSubstr;

class Transport : public ::testing::Test {
 protected:
  void SetUp() override {
    SetLogSink([](LogLevel, absl::string_view) {});  // refusals are what this file provokes
    Allow({{core::Role::kNode, node_.public_key, ""}, {core::Role::kUser, user_.public_key, ""}});
    StartServer("127.0.0.1:0");
  }
  void TearDown() override { SetLogSink(nullptr); }

  void Allow(const std::vector<AllowedKey>& keys) { registry_->Replace(keys); }
  void StartServer(const std::string& listen, int64_t bytes_max = 1 << 20) {
    auto server = ZmqServer::Start({.listen = {listen},
                                    .keys = head_,
                                    .registry = registry_,
                                    .clock = std::make_shared<RealClock>(),
                                    .message_bytes_max = bytes_max,
                                    .handshake_limit = absl::Seconds(1)});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    endpoint_ = server_->endpoints()[0];
  }
  std::unique_ptr<ZmqClient> Client(const KeyPair& keys) {
    auto client =
        ZmqClient::Connect({.endpoint = endpoint_, .server_public_key = head_.public_key, .keys = keys});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  // Waits on the server's descriptor between looks, as the head does.
  testing::AssertionResult Eventually(const std::function<bool()>& condition) {
    Instant deadline = clock_.Now() + absl::Seconds(30);
    while (!condition()) {
      if (clock_.Now() > deadline) return testing::AssertionFailure() << "not within 30 s";
      pollfd fd{server_ ? server_->PollFd() : -1, POLLIN, 0};
      poll(&fd, 1, 10);
    }
    return testing::AssertionSuccess();
  }
  std::optional<port::Received> NextAtServer() {
    std::optional<port::Received> received;
    EXPECT_TRUE(Eventually([&] { return (received = server_->Receive()).has_value(); }));
    return received;
  }
  // A round trip: the proof that a client works.
  void ExpectWorks(ZmqClient& client, const KeyPair& keys) {
    ASSERT_TRUE(Eventually([&] { return client.Connected(); })) << client.status();
    ASSERT_TRUE(client.Send("ping").ok());
    std::optional<port::Received> at_server = NextAtServer();
    ASSERT_TRUE(at_server.has_value());
    EXPECT_EQ(at_server->payload, "ping");
    EXPECT_EQ(at_server->peer.key_id, KeyId(keys.public_key));
    ASSERT_TRUE(server_->Send(at_server->route, "pong").ok());
    std::optional<std::string> back;
    EXPECT_TRUE(Eventually([&] { return (back = client.Receive()).has_value(); }));
    EXPECT_EQ(back, "pong");
  }
  UniqueFd RawConnection(const std::string& from = "127.0.0.1") {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    EXPECT_EQ(inet_pton(AF_INET, from.c_str(), &address.sin_addr), 1);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(std::stoi(endpoint_.substr(endpoint_.rfind(':') + 1)));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }

  // A socket without the manners of ZmqClient.
  Socket RawClient(const std::string& url, const KeyPair& keys) {
    Socket dealer(zmq_socket(raw_context_.get(), ZMQ_DEALER));
    EXPECT_TRUE(dealer && SetInt(dealer.get(), ZMQ_LINGER, 0) &&
                SetText(dealer.get(), ZMQ_CURVE_SERVERKEY, head_.public_key) &&
                SetText(dealer.get(), ZMQ_CURVE_PUBLICKEY, keys.public_key) &&
                SetText(dealer.get(), ZMQ_CURVE_SECRETKEY, keys.secret_key));
    EXPECT_EQ(zmq_connect(dealer.get(), url.c_str()), 0);
    return dealer;
  }

  RealClock clock_;
  Context raw_context_{zmq_ctx_new()};
  KeyPair head_ = MakeKeyPair(), node_ = MakeKeyPair(), user_ = MakeKeyPair();
  std::shared_ptr<KeyRegistry> registry_ = std::make_shared<KeyRegistry>();
  std::unique_ptr<ZmqServer> server_;
  std::string endpoint_;
};

TEST_F(Transport, IdentityComesFromTheKey) {
  EXPECT_EQ(server_->counters().denied, 0u);  // the proof at start is not a stranger
  auto node = Client(node_);
  auto user = Client(user_);
  ExpectWorks(*node, node_);
  ExpectWorks(*user, user_);
  ASSERT_TRUE(user->Send("x").ok());
  std::optional<port::Received> got = NextAtServer();
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->peer, (core::Peer{core::Role::kUser, KeyId(user_.public_key)}));
  EXPECT_EQ(got->address, "127.0.0.1");
}

// X2: CURVE alone lets every key in; the ZAP handler must not.
TEST_F(Transport, UnregisteredKeyIsRefusedAndCounted) {
  KeyPair stranger = MakeKeyPair();
  auto bad = Client(stranger);
  EXPECT_TRUE(Eventually([&] { return absl::IsPermissionDenied(bad->status()); }));
  EXPECT_TRUE(absl::IsUnavailable(bad->Send("let me in")));
  EXPECT_GE(server_->counters().denied, 1u);
  EXPECT_EQ(server_->Receive(), std::nullopt);
  auto good = Client(node_);
  ExpectWorks(*good, node_);
}

// A key that is allowed a moment after its owner came works without a new client: ZeroMQ by itself
// never tries again after a refusal.
TEST_F(Transport, RefusedKeyWorksOnceItIsAllowed) {
  KeyPair late = MakeKeyPair();
  auto client = Client(late);
  ASSERT_TRUE(Eventually([&] { return absl::IsPermissionDenied(client->status()); }));
  Allow({{core::Role::kNode, late.public_key, ""}});
  ExpectWorks(*client, late);
}

// An impostor that does not hold the head's secret key learns nothing and is noticed.
TEST_F(Transport, WrongServerKeyIsRefused) {
  auto client = ZmqClient::Connect(
      {.endpoint = endpoint_, .server_public_key = MakeKeyPair().public_key, .keys = node_});
  ASSERT_TRUE(client.ok());
  EXPECT_TRUE(Eventually([&] { return absl::IsPermissionDenied((*client)->status()); }));
  EXPECT_TRUE(Eventually([&] { return server_->counters().bad_handshakes > 0; }));
}

// A key that is put on the list after its first attempt gets in without a restart of its owner.
TEST_F(Transport, RefusedKeyIsTriedAgain) {
  KeyPair late = MakeKeyPair();
  auto client = Client(late);
  ASSERT_TRUE(Eventually([&] { return absl::IsPermissionDenied(client->status()); }));
  Allow({{core::Role::kNode, node_.public_key, ""}, {core::Role::kNode, late.public_key, ""}});
  EXPECT_TRUE(Eventually([&] { return client->Connected(); }));
  ExpectWorks(*client, late);
}

// B1, B3: what scanners send, and a ZeroMQ peer without a key.
TEST_F(Transport, RubbishIsCountedAndHarmless) {
  std::vector<std::string> openings = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n", std::string(500, '\xff'),
      std::string("\x16\x03\x01\x02\x00\x01", 6) + std::string(600, 'a'),
      std::string("\xff\0\0\0\0\0\0\0\1\x7f\1\0", 12) + std::string(100, 'b')};
  uint64_t before = server_->counters().bad_handshakes;
  for (const std::string& opening : openings) {
    UniqueFd fd = RawConnection();
    EXPECT_GT(send(fd.get(), opening.data(), opening.size(), MSG_NOSIGNAL), 0);
    char reply[4096];
    while (recv(fd.get(), reply, sizeof(reply), 0) > 0) {  // until the server closes it
    }
  }
  Context context(zmq_ctx_new());
  Socket null(zmq_socket(context.get(), ZMQ_DEALER));
  ASSERT_TRUE(SetInt(null.get(), ZMQ_LINGER, 0));
  ASSERT_EQ(zmq_connect(null.get(), absl::StrCat("tcp://", endpoint_).c_str()), 0);
  ASSERT_EQ(zmq_send(null.get(), "hello", 5, ZMQ_DONTWAIT), 5);
  EXPECT_TRUE(Eventually([&] { return server_->counters().bad_handshakes >= before + openings.size() + 1; }))
      << server_->counters().bad_handshakes - before;
  EXPECT_EQ(server_->Receive(), std::nullopt);
  auto good = Client(node_);
  ExpectWorks(*good, node_);
}

// B4: a connection that says nothing is closed by the handshake limit.
TEST_F(Transport, SilentConnectionsAreClosed) {
  UniqueFd fd = RawConnection();
  char reply[4096];
  ssize_t n;
  while ((n = recv(fd.get(), reply, sizeof(reply), 0)) > 0) {
  }
  EXPECT_EQ(n, 0);
}

// B4: one address takes its share and no more; others are served all the while, and it is too once it lets
// go.
TEST_F(Transport, GreedyAddressStarvesNobody) {
  server_.reset();
  auto server = ZmqServer::Start({.listen = {"0.0.0.0:0"},
                                  .keys = head_,
                                  .registry = registry_,
                                  .clock = std::make_shared<RealClock>(),
                                  .handshake_limit = absl::Seconds(30),
                                  .connections_per_address_max = 20});
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  const std::string port = server_->endpoints()[0].substr(server_->endpoints()[0].rfind(':'));
  endpoint_ = "127.0.0.1" + port;
  std::vector<UniqueFd> greedy;
  for (int i = 0; i < 120; ++i) greedy.push_back(RawConnection());  // from 127.0.0.1
  EXPECT_TRUE(Eventually([&] { return server_->counters().over_limit >= 100; }));
  int open = 0;
  EXPECT_TRUE(Eventually([&] {
    open = 0;
    char byte;
    for (const UniqueFd& fd : greedy) {
      while (recv(fd.get(), &byte, 1, MSG_DONTWAIT) > 0) {
      }
      open += recv(fd.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }
    return open <= 20;
  }));
  EXPECT_EQ(open, 20);
  std::vector<std::unique_ptr<ZmqClient>> others;
  for (int i = 2; i < 7; ++i) {  // ZeroMQ's "source;destination"
    endpoint_ = absl::StrCat("127.0.0.", i, ":0;127.0.0.1", port);
    auto client = RawClient(absl::StrCat("tcp://", endpoint_), node_);
    ASSERT_EQ(zmq_send(client.get(), "ping", 4, 0), 4);
    std::optional<port::Received> got = NextAtServer();
    ASSERT_TRUE(got.has_value());
    EXPECT_EQ(got->address, absl::StrCat("127.0.0.", i));
  }
  greedy.clear();
  endpoint_ = "127.0.0.1" + port;
  auto again = Client(node_);
  ExpectWorks(*again, node_);
}

// B4: many addresses that each keep within their share leave the process the descriptors that it needs
// itself.
TEST_F(Transport, ManyAddressesTogetherHaveALimitToo_B4) {
  server_.reset();
  auto server = ZmqServer::Start({.listen = {"0.0.0.0:0"},
                                  .keys = head_,
                                  .registry = registry_,
                                  .clock = std::make_shared<RealClock>(),
                                  .handshake_limit = absl::Seconds(30),
                                  .connections_per_address_max = 20,
                                  .connections_max = 50});
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  const std::string port = server_->endpoints()[0].substr(server_->endpoints()[0].rfind(':'));
  endpoint_ = "127.0.0.1" + port;
  auto honest = Client(node_);
  ExpectWorks(*honest, node_);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 90; ++i) strangers.push_back(RawConnection(absl::StrCat("127.0.0.", 2 + i % 9)));
  EXPECT_TRUE(Eventually([&] { return server_->counters().over_limit >= 41; }));
  EXPECT_EQ(server_->counters().over_limit, 41u) << "90 and the honest one, of 50";
  ASSERT_TRUE(honest->Send("who was there stays").ok());
  EXPECT_EQ(NextAtServer()->payload, "who was there stays");
  strangers.clear();
  auto again = Client(user_);
  ExpectWorks(*again, user_);
}

// B5: exactly one frame, or the message does not exist.
TEST_F(Transport, OtherFrameCountsAreDropped) {
  Socket dealer = RawClient(absl::StrCat("tcp://", endpoint_), node_);
  for (int i = 0; i < 999; ++i) ASSERT_EQ(zmq_send(dealer.get(), "", 0, ZMQ_SNDMORE), 0);
  ASSERT_EQ(zmq_send(dealer.get(), "", 0, 0), 0);
  ASSERT_EQ(zmq_send(dealer.get(), "", 0, ZMQ_SNDMORE), 0);
  ASSERT_EQ(zmq_send(dealer.get(), "late", 4, 0), 4);
  ASSERT_EQ(zmq_send(dealer.get(), "good", 4, 0), 4);
  std::optional<port::Received> got = NextAtServer();
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->payload, "good");
  EXPECT_EQ(server_->counters().bad_frames, 2u);
}

// B2: a frame above the limit ends the connection before it is read.
TEST_F(Transport, OversizedMessagesEndTheConnection) {
  auto client = Client(node_);
  ExpectWorks(*client, node_);
  ASSERT_TRUE(client->Send(std::string(2 << 20, 'x')).ok());  // the server's limit is 1 MiB here
  EXPECT_TRUE(Eventually([&] { return !client->Connected(); }));
  ExpectWorks(*client, node_);
}

// It would lose the connection, and again with each repetition: the client knows what the head takes.
TEST_F(Transport, WhatTheServerDoesNotTakeIsNotSent) {
  server_.reset();
  StartServer("127.0.0.1:0", port::kToServerBytesMax);
  std::unique_ptr<ZmqClient> client = Client(user_);
  ASSERT_TRUE(Eventually([&] { return client->Connected(); }));
  const absl::Status sent = client->Send(std::string(port::kToServerBytesMax + 1, 'x'));
  EXPECT_EQ(sent.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sent.message(), "a message of 4194305 bytes, and the head takes 4194304 at most");
  ExpectWorks(*client, user_);
  ASSERT_TRUE(client->Send(std::string(port::kToServerBytesMax, 'x')).ok());
  EXPECT_EQ(NextAtServer()->payload.size(), static_cast<size_t>(port::kToServerBytesMax));
}

// X3: two connections with one key are two routes; neither gets the other's messages.
TEST_F(Transport, SameKeyTwiceDoesNotStealMessages) {
  auto first = Client(node_), second = Client(node_);
  ASSERT_TRUE(Eventually([&] { return first->Connected() && second->Connected(); }));
  ASSERT_TRUE(first->Send("first").ok());
  port::Route route_first = NextAtServer()->route;
  ASSERT_TRUE(second->Send("second").ok());
  port::Route route_second = NextAtServer()->route;
  EXPECT_NE(route_first, route_second);
  ASSERT_TRUE(server_->Send(route_first, "for first").ok());
  std::optional<std::string> got;
  EXPECT_TRUE(Eventually([&] { return (got = first->Receive()).has_value(); }));
  EXPECT_EQ(got, "for first");
  EXPECT_EQ(second->Receive(), std::nullopt);
}

// W11: nothing vanishes silently on the way to a peer that is gone.
TEST_F(Transport, SendingToAGhostIsAnError) {
  EXPECT_TRUE(absl::IsUnavailable(server_->Send({"ghost"}, "x")));
  auto client = Client(node_);
  ASSERT_TRUE(Eventually([&] { return client->Connected(); }));
  ASSERT_TRUE(client->Send("x").ok());
  port::Route route = NextAtServer()->route;
  client.reset();
  EXPECT_TRUE(Eventually([&] { return absl::IsUnavailable(server_->Send(route, "x")); }));
}

// W12: a client without a connection keeps nothing to be executed later.
TEST_F(Transport, NothingIsQueuedWithoutAConnection) {
  auto client = Client(node_);
  ExpectWorks(*client, node_);
  std::string listen = endpoint_;
  server_.reset();
  ASSERT_TRUE(Eventually([&] { return !client->Connected(); }));
  absl::Status stale = client->Send("stale");
  EXPECT_TRUE(absl::IsUnavailable(stale)) << stale;
  StartServer(listen);
  ASSERT_TRUE(Eventually([&] { return client->Connected(); }));
  ASSERT_TRUE(client->Send("fresh").ok());
  EXPECT_EQ(NextAtServer()->payload, "fresh");
}

// W9: a peer that does not read is an error for the sender, not a silent loss: accepted messages arrive,
// whole and in order, and nothing else does.
TEST_F(Transport, SlowReaderLosesNothingThatWasAccepted_W9) {
  constexpr int kMost = 200'000;
  const std::string filler(1000, 'x');
  const auto accepted = [&](const std::function<absl::Status(const std::string&)>& send) {
    for (int i = 0; i < kMost; ++i) {
      const absl::Status status = send(absl::StrCat(i, " ", filler));
      if (status.ok()) continue;
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      return i;
    }
    return kMost;
  };
  const auto expect_all = [&](int count, const std::function<std::optional<std::string>()>& receive) {
    for (int i = 0; i < count; ++i) {
      std::optional<std::string> got;
      ASSERT_TRUE(Eventually([&] { return (got = receive()).has_value(); })) << i << " of " << count;
      ASSERT_EQ(*got, absl::StrCat(i, " ", filler));
    }
    EXPECT_EQ(receive(), std::nullopt);
  };
  auto client = Client(node_);
  ASSERT_TRUE(Eventually([&] { return client->Connected(); }));
  ASSERT_TRUE(client->Send("where I am").ok());
  const port::Route route = NextAtServer()->route;
  int count = accepted([&](const std::string& text) { return server_->Send(route, text); });
  EXPECT_GT(count, 1000);
  EXPECT_LT(count, kMost) << "the queue has a bound";
  expect_all(count, [&] { return client->Receive(); });
  count = accepted([&](const std::string& text) { return client->Send(text); });
  EXPECT_GT(count, 1000);
  EXPECT_LT(count, kMost) << "the queue has a bound";
  expect_all(count, [&]() -> std::optional<std::string> {
    std::optional<port::Received> received = server_->Receive();
    if (!received) return std::nullopt;
    return std::move(received->payload);
  });
  ExpectWorks(*client, node_);
}

// W10: a connected peer is heard from its first message on, and hears the first answer. (It asks for earlier
// events: ClientEvents, HeadCoreTest.EventsAreALongPoll_W10.)
TEST_F(Transport, TheFirstMessageOfAConnectionArrives_W10) {
  for (int i = 0; i < 50; ++i) {
    auto client = Client(node_);
    ASSERT_TRUE(Eventually([&] { return client->Connected(); })) << client->status();
    ASSERT_TRUE(client->Send(absl::StrCat("first ", i)).ok());
    const std::optional<port::Received> received = NextAtServer();
    ASSERT_TRUE(received.has_value()) << i;
    ASSERT_EQ(received->payload, absl::StrCat("first ", i));
    ASSERT_TRUE(server_->Send(received->route, absl::StrCat("answer ", i)).ok());
    std::optional<std::string> answer;
    ASSERT_TRUE(Eventually([&] { return (answer = client->Receive()).has_value(); })) << i;
    ASSERT_EQ(*answer, absl::StrCat("answer ", i));
  }
}

// A connection that was lost and made again between two looks still shows as lost once.
TEST_F(Transport, EveryLostConnectionIsSeen) {
  auto client = Client(node_);
  ASSERT_TRUE(Eventually([&] { return client->Connected(); }));
  std::string listen = endpoint_;
  server_.reset();
  StartServer(listen);
  ASSERT_TRUE(Eventually([&] { return server_->counters().authenticated > 0; }));
  EXPECT_FALSE(client->Connected());
  EXPECT_TRUE(Eventually([&] { return client->Connected(); }));
}

// A key that is taken off the list loses its open connections too.
// H15: the head answers a repeated id with the first answer, so a client that asks again must not change it.
// An owner that waits on the descriptor would else sleep through a handshake that another call of its turn
// read.
TEST_F(Transport, ANewConnectionIsToldWhateverCallSawItFirst) {
  auto client = Client(user_);
  const auto readable = [&] {
    pollfd fd{client->PollFd(), POLLIN, 0};
    return poll(&fd, 1, 0) == 1;
  };
  ASSERT_TRUE(Eventually([&] { return client->status().ok(); }));
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(client->Receive().has_value());
  EXPECT_TRUE(readable());
  EXPECT_TRUE(client->Connected());
  EXPECT_TRUE(Eventually([&] { return !client->Receive().has_value() && !readable(); }));
}

TEST_F(Transport, ARepeatedRequestKeepsItsId_H15) {
  auto control =
      *ControlClient::Connect({.endpoint = endpoint_, .server_public_key = head_.public_key, .keys = user_});
  absl::StatusOr<core::ClientReply> reply;
  std::thread caller([&] { reply = control->Call(core::ClientNodes{}, absl::Seconds(30)); });
  port::Route route;
  const auto next_id = [&]() -> std::string {
    const std::optional<port::Received> received = NextAtServer();
    if (!received) return "";
    auto message = wire::Decode(received->payload, wire::Sender::kClient);
    EXPECT_TRUE(message.ok()) << message.status();
    const auto* request = message.ok() ? std::get_if<core::ClientRequest>(&*message) : nullptr;
    if (request == nullptr) return "";
    route = received->route;
    return request->id;
  };
  const std::string first = next_id();
  server_.reset();  // no reply comes, and the connection is gone
  StartServer(endpoint_);
  const std::string second = next_id();
  EXPECT_NE(first, "");
  EXPECT_EQ(first, second);
  EXPECT_TRUE(server_->Send(route, wire::Encode(core::ClientReply{.id = second, .ok = true})).ok());
  caller.join();
  EXPECT_TRUE(reply.ok()) << reply.status();
}

// A read that the head has no room for is repeated, and its refusal is returned when the time is over; a
// change that was refused stays refused.
TEST_F(Transport, AReadThatWasRefusedIsAskedAgainAndAChangeIsNot) {
  auto control =
      *ControlClient::Connect({.endpoint = endpoint_, .server_public_key = head_.public_key, .keys = user_});
  const core::ClientReply busy{
      .ok = false, .code = static_cast<int>(absl::StatusCode::kResourceExhausted), .error = "many readers"};
  const auto answer = [&](core::ClientReply reply) -> std::string {
    const std::optional<port::Received> received = NextAtServer();
    if (!received) return "";
    reply.id = std::get<core::ClientRequest>(*wire::Decode(received->payload, wire::Sender::kClient)).id;
    EXPECT_TRUE(server_->Send(received->route, wire::Encode(reply)).ok());
    return reply.id;
  };
  absl::StatusOr<core::ClientReply> reply;
  const auto call = [&](core::ClientRequestBody body, absl::Duration timeout) {
    return std::thread([&, body, timeout] { reply = control->Call(body, timeout); });
  };

  std::thread caller = call(core::ClientNodes{}, absl::Seconds(30));
  const std::string first = answer(busy), second = answer(busy), third = answer({.ok = true, .json = "{}"});
  caller.join();
  EXPECT_TRUE(first == second && second == third) << first << " " << second << " " << third;
  ASSERT_TRUE(reply.ok() && reply->ok) << reply.status();

  const Instant asked = clock_.Now();
  caller = call(core::ClientStop{JobId("j"), false, ""}, absl::Seconds(30));
  answer(busy);
  caller.join();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->error, "many readers");
  EXPECT_LT(clock_.Now() - asked, absl::Seconds(25)) << "at once, not at the end";

  caller = call(core::ClientNodes{}, absl::Seconds(2));
  answer(busy);
  caller.join();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->error, "many readers");
}

TEST_F(Transport, RequestsUnderWayTogetherGetTheirOwnReplies) {
  auto control =
      *ControlClient::Connect({.endpoint = endpoint_, .server_public_key = head_.public_key, .keys = user_});
  std::vector<absl::StatusOr<core::ClientReply>> replies;
  std::thread caller([&] {
    std::vector<core::ClientRequest> requests(3);
    for (size_t i = 0; i < 3; ++i) requests[i] = {.id = absl::StrCat("r", i), .body = core::ClientNodes{}};
    replies = control->CallAll(std::move(requests), absl::Seconds(30));
  });
  std::vector<std::pair<port::Route, std::string>> heard;
  while (heard.size() < 3) {
    const std::optional<port::Received> received = NextAtServer();
    if (!received) break;
    auto message = wire::Decode(received->payload, wire::Sender::kClient);
    ASSERT_TRUE(message.ok()) << message.status();
    heard.emplace_back(received->route, std::get<core::ClientRequest>(*message).id);
  }
  EXPECT_EQ(heard.size(), 3u) << "all are sent before the first is answered";
  for (size_t i = heard.size(); i-- > 0;) {
    const core::ClientReply reply{.id = heard[i].second, .ok = true, .json = heard[i].second};
    EXPECT_TRUE(server_->Send(heard[i].first, wire::Encode(reply)).ok());
  }
  caller.join();
  ASSERT_EQ(replies.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(replies[i].ok()) << replies[i].status();
    EXPECT_EQ(replies[i]->json, absl::StrCat("r", i));
  }
}

TEST_F(Transport, WorkAsideGoesOnWhileACallWaits) {
  auto control =
      *ControlClient::Connect({.endpoint = endpoint_, .server_public_key = head_.public_key, .keys = user_});
  std::atomic<int> steps{0};
  const auto step = [&]() -> absl::StatusOr<Instant> {
    ++steps;
    return clock_.Now() + (steps % 2 == 0 ? absl::ZeroDuration() : absl::Milliseconds(1));
  };
  control->set_aside(ControlClient::Aside{clock_.Now(), step});
  absl::StatusOr<core::ClientReply> reply;
  std::thread caller([&] { reply = control->Call(core::ClientNodes{}, absl::Seconds(30)); });
  const std::optional<port::Received> received = NextAtServer();
  const int before = steps;
  EXPECT_TRUE(Eventually([&] { return steps > before + 9; }));
  if (received) {
    const auto request = wire::Decode(received->payload, wire::Sender::kClient);
    const core::ClientReply answer{.id = std::get<core::ClientRequest>(*request).id, .ok = true};
    EXPECT_TRUE(server_->Send(received->route, wire::Encode(answer)).ok());
  }
  caller.join();
  EXPECT_TRUE(reply.ok()) << reply.status();

  control->set_aside(ControlClient::Aside{
      clock_.Now(), []() -> absl::StatusOr<Instant> { return absl::CancelledError("nobody reads"); }});
  reply = control->Call(core::ClientNodes{}, absl::Seconds(30));
  EXPECT_EQ(reply.status(), absl::CancelledError("nobody reads"));
}

// A way to the server that can be frozen as a process is: its machine goes on answering, nobody reads.
class Relay {
 public:
  explicit Relay(int to) : to_(to) {
    listen_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listen_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listen_.get(), 8), 0);
    EXPECT_EQ(getsockname(listen_.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Relay() {
    end_ = true;
    thread_.join();
  }
  int port() const { return port_; }
  void Freeze() { frozen_ = true; }
  // The client has closed its end since.
  bool GivenUp() const { return given_up_; }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }
  void Run() {
    UniqueFd client(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    UniqueFd server(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = Loopback(to_);
    EXPECT_EQ(connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    while (!end_) {
      const bool frozen = frozen_;
      pollfd fds[2] = {{client.get(), static_cast<short>(frozen ? POLLRDHUP : POLLIN), 0},
                       {server.get(), static_cast<short>(frozen ? 0 : POLLIN), 0}};
      if (poll(fds, 2, 10) <= 0) continue;
      if (frozen) given_up_ = given_up_ || fds[0].revents != 0;
      if (!frozen && fds[0].revents != 0 && !Pass(client.get(), server.get())) return;
      if (!frozen && fds[1].revents != 0 && !Pass(server.get(), client.get())) return;
    }
  }
  static bool Pass(int from, int to) {
    char bytes[4096];
    const ssize_t count = recv(from, bytes, sizeof(bytes), 0);
    return count > 0 && send(to, bytes, static_cast<size_t>(count), MSG_NOSIGNAL) == count;
  }

  const int to_;
  int port_ = 0;
  UniqueFd listen_;
  std::atomic<bool> frozen_{false}, given_up_{false}, end_{false};
  std::thread thread_;
};

// Somebody waits in front of a client: a head that stands still is noticed within 6 s. An agent asks less
// often, which would be noticed after 15 s here.
TEST_F(Transport, AClientNoticesAHeadThatStandsStill) {
  Relay relay(std::stoi(endpoint_.substr(endpoint_.rfind(':') + 1)));
  auto control = *ControlClient::Connect({.endpoint = absl::StrCat("127.0.0.1:", relay.port()),
                                          .server_public_key = head_.public_key,
                                          .keys = user_});
  const UniqueFd interrupt(eventfd(0, EFD_CLOEXEC));
  control->set_interrupt_fd(interrupt.get());
  absl::StatusOr<core::ClientReply> reply;
  std::atomic<bool> ended{false};
  std::thread caller([&] {
    reply = control->Call(core::ClientNodes{}, absl::Seconds(12));
    ended = true;
  });
  EXPECT_TRUE(NextAtServer().has_value());
  relay.Freeze();
  EXPECT_TRUE(Eventually([&] { return relay.GivenUp() || ended; }));
  EXPECT_TRUE(relay.GivenUp()) << "the request was over before";
  EXPECT_EQ(eventfd_write(interrupt.get(), 1), 0);
  caller.join();
  EXPECT_FALSE(reply.ok());
}

// Its kernel takes the connection, and the handshake runs out of time: that is no refusal, however often.
TEST_F(Transport, AHeadThatStandsStillRefusesNobody) {
  UniqueFd still(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(still.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(still.get(), 16), 0);
  ASSERT_EQ(getsockname(still.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  auto client = *ZmqClient::Connect({.endpoint = absl::StrCat("127.0.0.1:", ntohs(address.sin_port)),
                                     .server_public_key = head_.public_key,
                                     .keys = node_,
                                     .handshake_limit = absl::Milliseconds(100)});
  std::vector<UniqueFd> taken;
  absl::Status status;
  ASSERT_TRUE(Eventually([&] {
    UniqueFd next(accept4(still.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (next.valid()) taken.push_back(std::move(next));
    status = client->status();
    return taken.size() > 5 || absl::IsPermissionDenied(status);
  }));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("takes the connection but does not answer"));
  still.reset();
  taken.clear();
  EXPECT_TRUE(Eventually([&] { return absl::StrContains(client->status().message(), "nothing answers"); }))
      << client->status();
}

TEST_F(Transport, RevokedKeyIsHeardNoLonger) {
  auto node = Client(node_), user = Client(user_);
  ExpectWorks(*node, node_);
  ExpectWorks(*user, user_);
  Allow({{core::Role::kUser, user_.public_key, ""}});
  ASSERT_TRUE(node->Send("still here").ok());
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(server_->Receive(), std::nullopt);
    return server_->counters().revoked_dropped > 0;
  }));
  EXPECT_TRUE(Eventually([&] {
    (void)server_->Receive();
    return absl::IsPermissionDenied(node->status());
  })) << "its connection is cut, and the next one refused";
  ExpectWorks(*user, user_);
}

// Whatever is sent in between, a message that arrived makes the descriptor readable.
TEST_F(Transport, DescriptorDoesNotLoseWakeups) {
  auto client = Client(node_);
  ExpectWorks(*client, node_);
  ASSERT_TRUE(client->Send("hello").ok());
  port::Route route = NextAtServer()->route;
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(server_->Receive(), std::nullopt);
    ASSERT_TRUE(client->Send(absl::StrCat(i)).ok());
    ASSERT_TRUE(server_->Send(route, "noise").ok());  // looks at the socket and may use up its event
    while (client->Receive()) {
    }
    pollfd fd{server_->PollFd(), POLLIN, 0};
    std::optional<port::Received> got;
    for (int turns = 0; !got && turns < 100; ++turns) {
      ASSERT_EQ(poll(&fd, 1, 30'000), 1) << "slept through message " << i;
      got = server_->Receive();
    }
    ASSERT_TRUE(got.has_value());
    EXPECT_EQ(got->payload, absl::StrCat(i));
  }
}

// W16: the error says who has the port. Many times, because ZeroMQ's own errno is right most of the time
// only.
TEST_F(Transport, PortInUseNamesTheOwner) {
  for (int i = 0; i < 100; ++i) {
    auto second = ZmqServer::Start({.listen = {endpoint_},
                                    .keys = head_,
                                    .registry = registry_,
                                    .clock = std::make_shared<RealClock>()});
    ASSERT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists) << second.status() << " time " << i;
    EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat("pid ", getpid())));
  }
}

TEST_F(Transport, BadAddressesAreErrors) {
  for (const char* bad :
       {"", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "::1:80", "a b:1", "203.0.113.77:0"}) {
    auto server = ZmqServer::Start(
        {.listen = {bad}, .keys = head_, .registry = registry_, .clock = std::make_shared<RealClock>()});
    EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument) << bad << " " << server.status();
  }
  EXPECT_FALSE(
      ZmqClient::Connect({.endpoint = "nowhere", .server_public_key = head_.public_key, .keys = node_}).ok());
  EXPECT_FALSE(ZmqClient::Connect({.endpoint = "127.0.0.1:1", .server_public_key = "x", .keys = node_}).ok());
}

}  // namespace
}  // namespace gtrain::net
