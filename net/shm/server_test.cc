#include "net/shm/server.h"

#include <poll.h>

#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace gtrain::net {
namespace {

ShmOptions Options() {
  ShmOptions options;
  options.secret = "secret";
  return options;
}

// Waits until the server has something.
port::Received Await(ShmServer& server) {
  for (;;) {
    if (auto received = server.Receive()) return *received;
    pollfd one{server.fd(), POLLIN, 0};
    if (server.Arm() && poll(&one, 1, 20'000) != 1) {
      ADD_FAILURE() << "nothing came";
      return {};
    }
    server.OnReadable();
  }
}

TEST(ShmServerTest, AnswersGoToWhoAsked) {
  const auto server = ShmServer::Start(Options());
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::unique_ptr<ShmLink>> clients;
  for (int i = 0; i < 200; ++i) {
    auto client = ShmLink::Connect((*server)->name(), Options());
    ASSERT_TRUE(client.ok()) << i << ": " << client.status();
    clients.push_back(*std::move(client));
    ASSERT_TRUE(clients.back()->Send(std::to_string(i)).ok());
  }
  std::set<std::string> routes;
  for (int i = 0; i < 200; ++i) {
    const port::Received received = Await(**server);
    EXPECT_TRUE(ShmServer::IsRoute(received.route));
    routes.insert(received.route.id);
    ASSERT_TRUE((*server)->Send(received.route, received.payload + "!").ok());
  }
  EXPECT_EQ(routes.size(), 200u);
  for (int i = 0; i < 200; ++i)
    EXPECT_EQ(clients[static_cast<size_t>(i)]->Receive(), std::to_string(i) + "!");
}

// One that always has something holds up no other one.
TEST(ShmServerTest, EachHasItsTurn) {
  const auto server = ShmServer::Start(Options());
  const auto loud = ShmLink::Connect((*server)->name(), Options());
  const auto quiet = ShmLink::Connect((*server)->name(), Options());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE((*loud)->Send("loud").ok());
  ASSERT_TRUE((*quiet)->Send("quiet").ok());
  int before = 0;
  while (Await(**server).payload != "quiet") ++before;
  EXPECT_LE(before, 2);
}

TEST(ShmServerTest, WhoIsGoneIsForgotten) {
  const auto server = ShmServer::Start(Options());
  auto client = ShmLink::Connect((*server)->name(), Options());
  ASSERT_TRUE((*client)->Send("one").ok());
  const port::Received received = Await(**server);
  ASSERT_TRUE((*client)->Send("two").ok());
  client->reset();
  EXPECT_EQ(Await(**server).payload, "two");
  pollfd one{(*server)->fd(), POLLIN, 0};
  ASSERT_EQ(poll(&one, 1, 20'000), 1);
  (*server)->OnReadable();
  EXPECT_TRUE((*server)->HasWork());
  EXPECT_FALSE((*server)->Receive());
  EXPECT_EQ((*server)->connections(), 0u);
  EXPECT_TRUE(absl::IsUnavailable((*server)->Send(received.route, "x")));
}

}  // namespace
}  // namespace gtrain::net
