#include "runtime/wire/codec.h"

#include <cmath>
#include <limits>
#include <set>

#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/wire/packed.h"
#include "runtime/wire/samples.h"

namespace gtrain::wire {
namespace {

using ::testing::HasSubstr;

const JobId kJob = SampleJob();
const Generation kGeneration = SampleGeneration();
const HeadEpoch kEpoch{12};

core::Message Roundtrip(const core::Message& message) {
  absl::StatusOr<core::Message> back = Decode(Encode(message));
  EXPECT_TRUE(back.ok()) << KindName(message) << ": " << back.status();
  return back.ok() ? *back : core::Message();
}

TEST(Codec, EveryAlternativeComesBackEqual) {
  std::set<size_t> kinds, bodies;
  for (const core::Message& message : SampleMessages()) {
    kinds.insert(message.index());
    if (auto* request = std::get_if<core::ClientRequest>(&message)) bodies.insert(request->body.index());
    EXPECT_EQ(Roundtrip(message), message) << KindName(message);
  }
  EXPECT_EQ(kinds.size(), std::variant_size_v<core::Message>) << "a kind has no sample above";
  EXPECT_EQ(bodies.size(), std::variant_size_v<core::ClientRequestBody>);
}

TEST(Codec, KindsAreBoundToTheirSender) {
  std::string revoke = Encode(core::Revoke{kEpoch, kJob, kGeneration});
  EXPECT_TRUE(Decode(revoke, Sender::kHead).ok());
  EXPECT_THAT(Decode(revoke, Sender::kAgent).status().message(), HasSubstr("Revoke may not come from"));
  std::string submit = Encode(core::ClientRequest{"id", absl::Seconds(1), core::ClientNodes{}});
  EXPECT_FALSE(Decode(submit, Sender::kAgent).ok());
  EXPECT_FALSE(Decode(submit, Sender::kJoiner).ok());
  EXPECT_TRUE(Decode(submit, Sender::kClient).ok());
}

// B6: cut and damaged bytes give an error or another valid message, never a crash.
TEST(Codec, TruncationsAndBitFlipsAreHarmless) {
  Rng rng(7);
  for (const core::Message& message : SampleMessages()) {
    std::string bytes = Encode(message);
    if (bytes.size() > 8192) continue;
    for (size_t length = 0; length < bytes.size(); ++length) (void)Decode(bytes.substr(0, length));
    for (int i = 0; i < 2000; ++i) {
      std::string bad = bytes;
      for (uint64_t n = 1 + rng.Below(4); n > 0; --n) bad[rng.Below(bad.size())] ^= 1 << rng.Below(8);
      absl::StatusOr<core::Message> result = Decode(bad);
      if (result.ok()) {
        EXPECT_EQ(Roundtrip(*result), *result);
      }
    }
  }
}

TEST(Codec, GarbageIsRefused) {
  EXPECT_FALSE(Decode("").ok());
  EXPECT_FALSE(Decode("GET / HTTP/1.1\r\n\r\n").ok());
  EXPECT_FALSE(Decode(std::string(16, '\0')).ok());    // the union is unset
  EXPECT_FALSE(Decode(std::string(16, '\xff')).ok());  // 2^32 segments
  EXPECT_FALSE(Decode(std::string(kMessageBytesMax + 8, '\0')).ok());
  Rng rng(3);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(8 * (1 + rng.Below(40)), '\0');
    for (char& c : bytes) c = static_cast<char>(rng.Chance(0.6) ? 0 : rng.Next());
    (void)Decode(bytes);
  }
}

TEST(Codec, ASealHoldsAGrantAndNoOtherSeal) {
  core::StartGeneration start{kEpoch, SampleGrant(), {}};
  start.seal = {Encode(start), "mac"};
  EXPECT_TRUE(Decode(Encode(start)).ok());
  start.seal.bytes = Encode(start);
  EXPECT_THAT(Decode(Encode(start)).status().message(), HasSubstr("seal: not a grant"));
  start.seal.bytes = Encode(core::AckExit{kEpoch, kJob, kGeneration, 1});
  EXPECT_THAT(Decode(Encode(start)).status().message(), HasSubstr("seal: not a grant"));
  start.seal.bytes = "0123456789abcdef";
  EXPECT_FALSE(Decode(Encode(start)).ok());
  core::StartGeneration broken{kEpoch, SampleGrant(), {}};
  broken.grant.world_size = -1;
  start.seal.bytes = Encode(broken);
  EXPECT_THAT(Decode(Encode(start)).status().message(), HasSubstr("world_size"));
}

// A list of 2^29 empty structs costs the sender a few bytes; it must not cost us memory (B6).
TEST(Codec, ListsOfNothingAreRefused) {
  core::AgentHeartbeat beat{1, std::vector<core::RankStatus>(3, SampleStatus()), {}};
  std::string bytes = Encode(beat);
  int refused = 0;
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {  // put a hostile list pointer into every word
    std::string bad = bytes;
    uint64_t pointer = 1 | (uint64_t{7} << 32) | (uint64_t{0x1fffffff} << 35);
    for (int i = 0; i < 8; ++i) bad[at + i] = static_cast<char>(pointer >> (8 * i));
    refused += !Decode(bad).ok();
  }
  EXPECT_GT(refused, 0);
}

// B7: well-formed bytes with values no honest peer sends.
TEST(Codec, HostileValuesAreNamed) {
  auto error = [](const core::Message& message) {
    return std::string(Decode(Encode(message)).status().message());
  };
  EXPECT_THAT(error(core::ForgetJob{kEpoch, JobId("../../etc/passwd")}),
              HasSubstr("ForgetJob.job: not an id"));
  EXPECT_THAT(error(core::ForgetJob{kEpoch, JobId()}), HasSubstr("not an id"));
  EXPECT_THAT(error(core::AckExit{kEpoch, kJob, kGeneration, -1}), HasSubstr("rank"));
  core::Revoke revoke{kEpoch, kJob, kGeneration, static_cast<core::EndMode>(17)};
  EXPECT_THAT(error(revoke), HasSubstr("mode"));
  core::StartGeneration start{kEpoch, SampleGrant()};
  start.grant.master_port = 70000;
  EXPECT_THAT(error(start), HasSubstr("master_port"));
  start = {kEpoch, SampleGrant()};
  start.grant.run_dir = std::string(5000, 'x');
  EXPECT_THAT(error(start), HasSubstr("run_dir"));
  core::AgentHeartbeat beat{1, {}, {0}};
  EXPECT_THAT(error(beat), HasSubstr("free_ports"));
}

TEST(Codec, WriterRepairsWhatTheReaderWouldRefuse) {
  core::RankStatus status = SampleStatus();
  status.loss = std::nan("");
  core::Message back = Roundtrip(core::AgentHeartbeat{1, {status}, {}});
  EXPECT_EQ(std::get<core::AgentHeartbeat>(back).changed[0].loss, std::nullopt);

  back = Roundtrip(core::AgentRefused{std::string("bad \xff\x1b[31m text ") + std::string(100000, 'x')});
  EXPECT_THAT(std::get<core::AgentRefused>(back).reason, testing::StartsWith("bad ??[31m text xxx"));

  core::RankExit exit = SampleExit(core::ExitCause::kSignal);
  exit.tail = std::string(100000, 'a') + "end";
  back = Roundtrip(core::RankExited{exit});
  EXPECT_THAT(std::get<core::RankExited>(back).exit.tail, testing::EndsWith("aaend"));
  EXPECT_EQ(std::get<core::RankExited>(back).exit.tail.size(), 64u << 10);

  back = Roundtrip(core::NoticeRanks{kEpoch, kJob, kGeneration, -absl::Seconds(3)});
  EXPECT_EQ(std::get<core::NoticeRanks>(back).left, absl::ZeroDuration());
}

TEST(Codec, SmallKindsHaveTheSmallLimit) {
  // Cap'n Proto ignores words after the message: that is how a sender would make a small kind large.
  std::string bytes = Encode(core::AckExit{kEpoch, kJob, kGeneration, 1});
  EXPECT_TRUE(Decode(bytes + std::string(64, '\0')).ok());
  EXPECT_THAT(Decode(bytes + std::string(kControlBytesMax, '\0')).status().message(),
              HasSubstr("AckExit of"));
}

TEST(Codec, TheIdOfARequestThatIsRefusedCanStillBeRead) {
  core::ClientRequest request{.id = "0a1b", .deadline = absl::Seconds(1)};
  request.body = core::ClientStatus{JobId("a b")};
  EXPECT_FALSE(Decode(Encode(request)).ok());
  EXPECT_EQ(RequestIdOf(Encode(request)), "0a1b");
  request.id = "a\nb";
  EXPECT_EQ(RequestIdOf(Encode(request)), "");
  EXPECT_EQ(RequestIdOf(Encode(core::AckExit{kEpoch, kJob, kGeneration, 1})), "");
  for (const size_t bytes : {0, 3, 16, 64}) EXPECT_EQ(RequestIdOf(std::string(bytes, '\xff')), "");
}

TEST(Packed, ComesBackEqualAndShorterAndNothingElseDoes) {
  core::ExchangeTable table{kEpoch, kJob, kGeneration, 1, {}};
  for (int rank = 0; rank < 1000; ++rank) table.blobs.push_back("10.0.0.1:20001 " + std::to_string(rank));
  const std::string bytes = Encode(table), packed = Pack(bytes);
  EXPECT_LT(4 * packed.size(), bytes.size());
  EXPECT_EQ(Unpack(packed).value(), bytes);
  EXPECT_EQ(Unpack(Pack("")).value(), "");
  for (size_t cut = 0; cut < packed.size(); cut += 7) EXPECT_FALSE(Unpack(packed.substr(0, cut)).ok()) << cut;
  EXPECT_FALSE(Unpack(bytes).ok()) << "it was not packed";
  EXPECT_FALSE(Unpack(Pack(std::string(kMessageBytesMax + 1, 'x'))).ok())
      << "a few bytes would become too many";
  Rng rng(7);
  for (int i = 0; i < 2000; ++i) {  // never a crash, and never more than it says
    std::string changed = packed;
    changed[rng.Below(changed.size())] ^= static_cast<char>(1 + rng.Below(255));
    EXPECT_LE(Unpack(changed).value_or("").size(), kMessageBytesMax);
  }
}

TEST(Ids, Syntax) {
  for (const char* good : {"a", "fashion-mnist-7", "0123456789abcdef", "boot:1+2_x.y"})
    EXPECT_TRUE(ValidId(good)) << good;
  for (const char* bad : {"", "-rf", ".", "../x", "a/b", "a b", "a\n", "\xc3\xa9"})
    EXPECT_FALSE(ValidId(bad)) << bad;
  EXPECT_FALSE(ValidId(std::string(129, 'a')));
}

}  // namespace
}  // namespace gtrain::wire
