// Copies on another machine, over the real transport.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "base/test_folder.h"
#include "checkpoint/near/near_server.h"
#include "checkpoint/near/near_wire.h"
#include "checkpoint/near/peer_tier.h"
#include "net/zmq/client.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Copy = port::NearTier::Copy;
using Shard = port::NearTier::Shard;

constexpr char kFile[] = "rank-00003-of-00008.safetensors";
constexpr char kAttempt[] = "step-000000000120.e0001.t0001.g0001.a01";
constexpr char kSecret[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
constexpr char kOther[] = "ff112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

class PeerTest : public testing::Test {
 protected:
  PeerTest() { Start("127.0.0.1:0"); }
  void Start(const std::string& listen) {
    auto server = NearServer::Start(listen, keys_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->Allow("job-1", net::KeyPairOfHex(kSecret)->public_key, root_, 64 << 20);
  }
  std::unique_ptr<port::NearTier> Tier(const char* secret = kSecret) {
    auto tier =
        OpenPeerTier({"node-b", absl::StrCat("127.0.0.1:", server_->port()), keys_.public_key}, secret);
    EXPECT_TRUE(tier.ok()) << tier.status();
    return *std::move(tier);
  }
  static absl::Status Put(port::NearTier* tier, absl::string_view data) {
    return tier->Put({.attempt = kAttempt, .file = kFile, .bytes = data.size()},
                     [&](uint64_t at) { return data.substr(at); });
  }
  // Longer than one piece.
  static std::string Data() {
    std::string data(kNearPieceBytes + 1000, '\0');
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 7 + i / 1000);
    return data;
  }

  const net::KeyPair keys_ = net::MakeKeyPair();
  const std::string root_ = TestFolder();
  std::unique_ptr<NearServer> server_;
};

TEST_F(PeerTest, WhatIsPutIsListedAndRead) {
  auto tier = Tier();
  const std::string data = Data();
  EXPECT_THAT(*tier->List(kAttempt), IsEmpty());
  ASSERT_TRUE(Put(tier.get(), data).ok());
  ASSERT_TRUE(Put(tier.get(), data).ok());
  EXPECT_THAT(*tier->List(kAttempt), ElementsAre(Shard{kFile, data.size()}));
  EXPECT_THAT(*tier->Attempts(), ElementsAre(kAttempt));
  std::string out(data.size() - 5, '?');
  ASSERT_TRUE(tier->Read(kAttempt, kFile, 5, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out, data.substr(5));
  EXPECT_TRUE(absl::IsOutOfRange(tier->Read(kAttempt, kFile, 6, absl::MakeSpan(out))));
  EXPECT_TRUE(absl::IsInvalidArgument(tier->Read(kAttempt, "../x", 0, absl::MakeSpan(out))));
  EXPECT_EQ(tier->Describe(), "the memory of node-b");
}

TEST_F(PeerTest, SeveralAtOnce) {
  auto tier = Tier();
  const std::string data = Data();
  ASSERT_TRUE(Put(tier.get(), data).ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 5; ++k) {
        std::string out(1000, '?');
        const absl::Status read = tier->Read(kAttempt, kFile, i * 1000, absl::MakeSpan(out));
        EXPECT_TRUE(read.ok()) << read;
        EXPECT_TRUE(out == data.substr(i * 1000, 1000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(PeerTest, WithoutTheKeyOfTheJobNothingIsReadOrPlanted_X2) {
  ASSERT_TRUE(Put(Tier().get(), "secret weights").ok());
  auto stranger = Tier(kOther);
  EXPECT_TRUE(absl::IsUnavailable(stranger->List(kAttempt).status()));
  EXPECT_TRUE(absl::IsUnavailable(Put(stranger.get(), "planted")));
  EXPECT_GT(server_->counters().denied, 0u);
  // A key opens the copies of its own job alone.
  server_->Allow("job-2", net::KeyPairOfHex(kOther)->public_key, root_, 64 << 20);
  auto other = Tier(kOther);
  EXPECT_THAT(*other->List(kAttempt), IsEmpty());
  std::string out(6, '?');
  EXPECT_TRUE(absl::IsNotFound(other->Read(kAttempt, kFile, 0, absl::MakeSpan(out))));
}

TEST_F(PeerTest, AKeyOfAJobThatIsOverOpensNothing) {
  auto tier = Tier();
  ASSERT_TRUE(Put(tier.get(), "weights").ok());
  server_->Forbid("job-1");
  EXPECT_FALSE(tier->List(kAttempt).ok());
  EXPECT_FALSE(Tier()->List(kAttempt).ok());
}

TEST_F(PeerTest, AMachineThatIsNotThereIsSaidOnceAndLeftAlone) {
  auto tier = Tier();
  server_.reset();
  const absl::Status first = tier->List(kAttempt).status();
  EXPECT_TRUE(absl::IsUnavailable(first)) << first;
  EXPECT_THAT(first.ToString(), HasSubstr("node-b"));
  EXPECT_THAT(Put(tier.get(), "weights").ToString(), HasSubstr("was not there"));  // not tried again so soon
}

TEST_F(PeerTest, AnotherServerAtThatAddressIsNotBelieved_X2) {
  ASSERT_TRUE(Put(Tier().get(), "weights").ok());
  auto tier = OpenPeerTier(
      {"node-b", absl::StrCat("127.0.0.1:", server_->port()), net::MakeKeyPair().public_key}, kSecret);
  EXPECT_TRUE(absl::IsUnavailable((*tier)->List(kAttempt).status()));
}

TEST_F(PeerTest, AFullOneRefusesAndHalfACopyIsNeverListed) {
  server_->Allow("job-1", net::KeyPairOfHex(kSecret)->public_key, root_, 1000);
  auto tier = Tier();
  EXPECT_TRUE(absl::IsResourceExhausted(Put(tier.get(), Data())));
  const absl::Status given_up = tier->Put({.attempt = kAttempt, .file = kFile, .bytes = 500},
                                          [](uint64_t at) -> absl::StatusOr<absl::string_view> {
                                            if (at > 0) return absl::CancelledError("enough");
                                            return "begun";
                                          });
  EXPECT_TRUE(absl::IsCancelled(given_up)) << given_up;
  EXPECT_THAT(*tier->List(kAttempt), IsEmpty());
  EXPECT_TRUE(Put(tier.get(), "whole").ok());
}

// A peer with the key of a job may still send anything.
TEST_F(PeerTest, MessagesThatAreNoRequestsAreAnsweredAndHarmless_B5) {
  auto client = net::ZmqClient::Connect({.endpoint = absl::StrCat("127.0.0.1:", server_->port()),
                                         .server_public_key = keys_.public_key,
                                         .keys = *net::KeyPairOfHex(kSecret)});
  ASSERT_TRUE(client.ok());
  const RealClock clock;
  const auto until = [&](const std::function<bool()>& condition) {
    const Instant end = clock.Now() + absl::Seconds(60);
    Mutex mu;
    while (!condition()) {
      if (clock.Now() > end) return false;
      MutexLock lock(&mu);
      mu.AwaitFor(absl::Milliseconds(5), [] { return false; });
    }
    return true;
  };
  ASSERT_TRUE(until([&] { return (*client)->Connected(); }));
  std::vector<std::string> hostile = {"", "x", std::string(1000, '\xff')};
  const std::string whole = PrintRequest(
      {.kind = NearRequest::Kind::kBegin, .bytes = UINT64_MAX, .attempt = kAttempt, .file = kFile});
  for (size_t cut = 0; cut < whole.size(); ++cut) hostile.push_back(whole.substr(0, cut));
  hostile.push_back(whole);
  hostile.push_back(PrintRequest({.kind = NearRequest::Kind::kPiece, .offset = 5, .data = "x"}));
  hostile.push_back(PrintRequest(
      {.kind = NearRequest::Kind::kRead, .bytes = UINT64_MAX, .attempt = kAttempt, .file = kFile}));
  hostile.push_back(PrintRequest({.kind = NearRequest::Kind::kList, .attempt = "../.."}));
  for (const std::string& message : hostile) {
    ASSERT_TRUE((*client)->Send(message).ok());
    std::optional<std::string> reply;
    ASSERT_TRUE(until([&] { return (reply = (*client)->Receive()).has_value(); }));
    EXPECT_FALSE(ParseReply(*reply).ok());
  }
  EXPECT_TRUE(Put(Tier().get(), "weights").ok());
}

TEST(NearWire, WhatIsPrintedIsParsed) {
  const NearRequest request{.kind = NearRequest::Kind::kPiece,
                            .offset = 1,
                            .bytes = 2,
                            .attempt = "a",
                            .file = "f",
                            .committed = "c",
                            .data = "data"};
  const std::string text = PrintRequest(request);
  const auto parsed = ParseRequest(text);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(PrintRequest(*parsed), text);
  const std::vector<Shard> shards = {{"a", 1}, {"b", UINT64_MAX}};
  EXPECT_EQ(*ParseShards(PrintShards(shards)), shards);
  EXPECT_FALSE(ParseShards("\x05"
                           "ab")
                   .ok());
  const std::string reply = PrintReply(absl::NotFoundError("not there"));
  EXPECT_EQ(ParseReply(reply).status(), absl::NotFoundError("not there"));
  EXPECT_TRUE(absl::IsDataLoss(ParseReply("?").status()));
}

}  // namespace
}  // namespace gtrain::ckpt
