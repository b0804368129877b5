#include "net/shm/link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::net {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

ShmOptions Options() {
  ShmOptions options;
  options.secret = "the secret of the job";
  options.message_bytes_max = 4 << 20;
  return options;
}

bool Readable(int fd, int timeout_ms) {
  pollfd one{fd, POLLIN, 0};
  return poll(&one, 1, timeout_ms) == 1;
}

class ShmLinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto listener = ShmListener::Start(Options());
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  void Meet() {
    auto client = ShmLink::Connect(listener_->name(), Options());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ASSERT_TRUE(Readable(listener_->fd(), 10'000));
    auto links = listener_->Accept();
    ASSERT_THAT(links, SizeIs(1));
    server_ = std::move(links[0]);
  }
  // The memory and the socket of somebody who does as he likes.
  UniqueFd Dial() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, listener_->name().data(), listener_->name().size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + listener_->name().size());
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    return socket;
  }
  static void Greet(int socket, const std::string& greeting, const std::vector<int>& descriptors) {
    std::string bytes = greeting;
    iovec data{bytes.data(), bytes.size()};
    alignas(cmsghdr) std::array<char, 256> control{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    }
    ASSERT_EQ(sendmsg(socket, &message, 0), static_cast<ssize_t>(bytes.size()));
  }
  // What ShmLink::Connect says.
  static std::string Greeting(const std::string& secret, uint32_t version = 1) {
    std::string bytes(12 + 128, '\0');
    const uint32_t magic = 0x4c4d5347, size = static_cast<uint32_t>(secret.size());
    std::memcpy(bytes.data(), &magic, 4);
    std::memcpy(bytes.data() + 4, &version, 4);
    std::memcpy(bytes.data() + 8, &size, 4);
    std::memcpy(bytes.data() + 12, secret.data(), std::min<size_t>(secret.size(), 128));
    return bytes;
  }
  // What a connection has in common, as this process sees it.
  struct Memory {
    uint64_t* words = nullptr;
    size_t bytes = 0;
  };
  static Memory Mapped() {
    Memory memory;
    FILE* const maps = fopen("/proc/self/maps", "r");
    std::array<char, 512> line;
    while (fgets(line.data(), line.size(), maps) != nullptr) {
      unsigned long from = 0, to = 0;
      if (std::strstr(line.data(), "gtrain-link") != nullptr &&
          sscanf(line.data(), "%lx-%lx", &from, &to) == 2)
        memory = {reinterpret_cast<uint64_t*>(from), to - from};
    }
    fclose(maps);
    return memory;
  }

  std::unique_ptr<ShmListener> listener_;
  std::unique_ptr<ShmLink> client_, server_;
};

TEST_F(ShmLinkTest, MessagesGoBothWaysInTheirOrder) {
  Meet();
  ASSERT_TRUE(client_->Send("one").ok());
  ASSERT_TRUE(client_->Send("two").ok());
  EXPECT_EQ(server_->Receive(), "one");
  ASSERT_TRUE(server_->Send("answer").ok());
  EXPECT_EQ(server_->Receive(), "two");
  EXPECT_EQ(server_->Receive(), std::nullopt);
  EXPECT_EQ(client_->Receive(), "answer");
  EXPECT_TRUE(absl::IsInvalidArgument(client_->Send("")));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->Send(std::string((4 << 20) + 1, 'x'))));
}

// Each of two threads writes and reads, sleeps when it has nothing to do, and is woken.
TEST_F(ShmLinkTest, AnyMessagesArriveAndWhoSleepsIsWoken) {
  Meet();
  static constexpr int kMessages = 3000;
  const auto run = [](ShmLink& link, uint64_t out_seed, uint64_t in_seed) {
    Rng out(out_seed), in(in_seed);
    const auto next = [](Rng& rng) {
      const uint64_t kind = rng.Below(100);
      const uint64_t size = kind < 80   ? 1 + rng.Below(300)
                            : kind < 98 ? 1 + rng.Below(70'000)
                                        : 1 + rng.Below(1 << 20);
      return std::string(size, static_cast<char>('a' + rng.Below(26)));
    };
    std::optional<std::string> message;
    int sent = 0, got = 0;
    // A message that was taken may still wait for room: that is no work, and it is not over.
    while ((sent < kMessages || got < kMessages || link.Flush()) && !link.lost()) {
      bool worked = false;
      link.Flush();
      if (sent < kMessages) {
        if (!message) message = next(out);
        if (link.Send(*message).ok()) message.reset(), ++sent, worked = true;
      }
      while (const auto received = link.Receive()) {
        if (*received != next(in)) ADD_FAILURE() << "message " << got << " is another one";
        ++got;
        worked = true;
      }
      if (worked || (got == kMessages && sent == kMessages && !link.Flush())) continue;
      if (link.Arm()) {
        ASSERT_TRUE(Readable(link.fd(), 20'000)) << "sent " << sent << ", got " << got;
      }
      link.OnReadable();
    }
    EXPECT_EQ(got, kMessages);
  };
  std::thread other([&] { run(*server_, 1, 2); });
  run(*client_, 2, 1);
  other.join();
}

TEST_F(ShmLinkTest, WhoDoesNotSleepIsNotRung) {
  Meet();
  ASSERT_TRUE(client_->Send("one").ok());
  EXPECT_FALSE(Readable(server_->fd(), 0));
  EXPECT_FALSE(server_->Arm()) << "there is something already";
  EXPECT_EQ(server_->Receive(), "one");
  EXPECT_TRUE(server_->Arm());
  ASSERT_TRUE(client_->Send("two").ok());
  EXPECT_TRUE(Readable(server_->fd(), 10'000));
  server_->OnReadable();
  EXPECT_FALSE(Readable(server_->fd(), 0));
}

// Whoever has written a part of a length is not done, and rings when it goes on.
TEST_F(ShmLinkTest, APartOfALengthIsNothingYet) {
  Meet();
  for (size_t first = 262'130; first <= 262'144; ++first) {  // the ring has room for 0 to 4 bytes behind it
    ASSERT_TRUE(client_->Send(std::string(first, 'x')).ok());
    ASSERT_TRUE(client_->Send(std::string(100, 'y')).ok() || client_->Flush());
    while (server_->Receive()) continue;
    EXPECT_TRUE(!server_->HasWork() || server_->Receive()) << first;
    for (int i = 0; i < 10 && client_->Flush(); ++i) continue;
    while (server_->Receive()) continue;
    EXPECT_TRUE(server_->Arm()) << first;
  }
}

TEST_F(ShmLinkTest, TheOtherEndIsGone) {
  Meet();
  ASSERT_TRUE(client_->Send("last words").ok());
  client_.reset();
  ASSERT_TRUE(Readable(server_->fd(), 10'000));
  server_->OnReadable();
  EXPECT_TRUE(server_->lost());
  EXPECT_EQ(server_->Receive(), "last words");
  EXPECT_TRUE(absl::IsUnavailable(server_->Send("x")));
}

TEST_F(ShmLinkTest, NobodyListens) {
  const std::string name = listener_->name();
  listener_.reset();
  EXPECT_TRUE(absl::IsUnavailable(ShmLink::Connect(name, Options()).status()));
}

TEST_F(ShmLinkTest, WhoHasAnotherSecretIsRefused_X1) {
  ShmOptions other = Options();
  other.secret.back() = '!';
  const auto client = ShmLink::Connect(listener_->name(), other);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE(Readable(listener_->fd(), 10'000));
  EXPECT_THAT(listener_->Accept(), IsEmpty());
  ASSERT_TRUE(Readable((*client)->fd(), 10'000));
  (*client)->OnReadable();
  EXPECT_TRUE((*client)->lost());
}

TEST_F(ShmLinkTest, WhatIsNoGreetingIsRefused_B2) {
  Meet();
  const size_t bytes = Mapped().bytes;
  ASSERT_GT(bytes, 0u);
  UniqueFd good(memfd_create("test-good", MFD_ALLOW_SEALING)),
      open(memfd_create("test-open", MFD_ALLOW_SEALING)),
      small(memfd_create("test-small", MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(good.get(), static_cast<off_t>(bytes)), 0);
  ASSERT_EQ(ftruncate(open.get(), static_cast<off_t>(bytes)), 0);
  ASSERT_EQ(ftruncate(small.get(), 4096), 0);
  for (const int fd : {good.get(), small.get()})
    ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  const std::string secret = Options().secret;
  const struct {
    const char* what;
    std::string greeting;
    std::vector<int> descriptors;
    size_t taken;
  } cases[] = {
      {"a right one", Greeting(secret), {good.get()}, 1},
      {"no memory", Greeting(secret), {}, 0},
      {"memory that may shrink under the reader", Greeting(secret), {open.get()}, 0},
      {"too little of it", Greeting(secret), {small.get()}, 0},
      {"two of them", Greeting(secret), {good.get(), good.get()}, 0},
      {"no file of memory", Greeting(secret), {0}, 0},
      {"another version", Greeting(secret, 2), {good.get()}, 0},
      {"a long secret", Greeting(std::string(4000, 's')), {good.get()}, 0},
      {"half of it", Greeting(secret).substr(0, 20), {good.get()}, 0},
  };
  for (const auto& one : cases) {
    const UniqueFd socket = Dial();
    Greet(socket.get(), one.greeting, one.descriptors);
    ASSERT_TRUE(Readable(listener_->fd(), 10'000));
    EXPECT_THAT(listener_->Accept(), SizeIs(one.taken)) << one.what;
  }
  Meet();
}

// A process that may open no more descriptors sends others away and does not look at them for ever.
TEST_F(ShmLinkTest, WithoutDescriptorsOthersAreSentAway) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd waits = Dial();
  const UniqueFd highest(dup(waits.get()));
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(highest.get() + 1);
  std::vector<UniqueFd> filled;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (int fd = dup(waits.get()); fd >= 0; fd = dup(waits.get())) filled.emplace_back(fd);
  EXPECT_THAT(listener_->Accept(), IsEmpty());
  EXPECT_FALSE(Readable(listener_->fd(), 0)) << "it is looked at again and again";
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  filled.clear();
  Meet();
}

// It says that there is more than a ring has, in the middle of a long message.
TEST_F(ShmLinkTest, MoreThanARingHasIsNotRead_B2) {
  Meet();
  ASSERT_TRUE(client_->Send(std::string(1 << 20, 'x')).ok());
  const Memory memory = Mapped();
  int changed = 0;
  for (size_t i = 0; i < memory.bytes / sizeof(uint64_t); ++i) {
    if (memory.words[i] != 256 << 10) continue;  // what was written fills the ring
    memory.words[i] += 512 << 10;
    ++changed;
  }
  ASSERT_EQ(changed, 1);
  EXPECT_FALSE(server_->Receive());
  EXPECT_TRUE(server_->lost());
}

// Those that say nothing keep nobody out.
TEST_F(ShmLinkTest, SilentConnectionsMakeRoom) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 300; ++i) {
    silent.push_back(Dial());
    listener_->Accept();
  }
  Meet();
}

// The other process has the memory, and may write there whatever it likes. Nothing is said of what arrives,
// but that no more is believed than there is.
TEST_F(ShmLinkTest, WildPositionsAndLengthsLoseTheConnection_B2) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Meet();
    ASSERT_TRUE(client_->Send("a message of an honest beginning").ok());
    const Memory memory = Mapped();
    ASSERT_NE(memory.words, nullptr);
    Rng rng(seed);
    for (int i = 0; i < 200; ++i) {
      const size_t count = rng.Chance(0.5) ? 64 : memory.bytes / sizeof(uint64_t);
      memory.words[rng.Below(count)] = rng.Chance(0.3) ? rng.Next() : rng.Below(1 << 20);
      (void)server_->Send("x");
      for (int j = 0; j < 10 && server_->Receive(); ++j) continue;
      server_->Flush();
      server_->Arm();
    }
  }
}

}  // namespace
}  // namespace gtrain::net
