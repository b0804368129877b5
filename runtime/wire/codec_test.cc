#include "runtime/wire/codec.h"

#include <cmath>
#include <limits>
#include <set>

#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::wire {
namespace {

using ::testing::HasSubstr;

const JobId kJob("fashion-mnist-7");
const Generation kGeneration{3};
const HeadEpoch kEpoch{12};

core::RankStatus Status() {
  return {.job = kJob,
          .generation = kGeneration,
          .rank = 2,
          .pid = 4711,
          .state = core::RankState::kJoined,
          .step = -1,
          .loss = 0.25,
          .samples_per_second = 1e6,
          .collective_sequence = std::numeric_limits<uint64_t>::max()};
}

core::RankExit Exit(core::ExitCause cause) {
  return {.job = kJob,
          .generation = kGeneration,
          .rank = 1,
          .pid = 99,
          .cause = cause,
          .exit_code = -7,
          .signal = 11,
          .message = "ended by signal 11 \xe2\x82\xac",
          .tail = std::string("raw \xff\x00 bytes", 12)};
}

core::GenerationGrant Grant() {
  return {
      .job = kJob,
      .generation = kGeneration,
      .timeline = {2},
      .restart_count = 1,
      .spec_text = "name: x\nranks: 2\n",
      .client_env = {{"A", "1"}, {"B", std::string("\xff", 1)}},
      .run_dir = "/run/dir",
      .resume = "fresh",
      .master_address = "10.0.0.1",
      .master_port = 29500,
      .world_size = 2,
      .nodes = {{NodeId("0123456789abcdef"), "10.0.0.1", "a"}},
      .ranks = {{.rank = 0, .local_rank = 0, .node = NodeId("0123456789abcdef"), .cpus = {0, 1}, .gpus = {3}},
                {.rank = 1, .local_rank = 1, .node = NodeId("0123456789abcdef")}}};
}

std::vector<core::ClientRequestBody> Bodies() {
  return {core::ClientSubmit{"name: x", {{"K", "V"}}, "/run", "latest", true},
          core::ClientStop{kJob, true, "enough"},
          core::ClientStatus{},
          core::ClientStatus{kJob},
          core::ClientWhy{kJob},
          core::ClientNodes{},
          core::ClientLogs{kJob, 4, 1, true, 77},
          core::ClientLogs{.job = kJob},
          core::ClientExec{kJob, 1, {"nvidia-smi", "-L"}},
          core::ClientEvents{kJob, 5, absl::Seconds(20)},
          core::ClientShutdown{false},
          core::ClientJoinToken{}};
}

// At least one value of every alternative, every field away from its default.
std::vector<core::Message> Samples() {
  core::AgentHello hello{.cluster = ClusterId("00112233445566778899aabbccddeeff"),
                         .incarnation = Incarnation("boot-1:77"),
                         .boot_id = "b-1",
                         .hostname = "node-1",
                         .address = "fe80::1",
                         .version = "0.1.0",
                         .protocol = 1,
                         .inventory = {4, 2, 1, 1ull << 40, {{"GPU-1", "H200", 1ull << 37, -1}}},
                         .labels = {{"pool", "spot"}},
                         .free_ports = {29500, 29501},
                         .held = {{kJob, kGeneration, {2}, {Status()}, {Exit(core::ExitCause::kOom)}}}};
  std::vector<core::Message> all = {
      hello,
      core::AgentHeartbeat{8, {Status()}, {1, 65535}},
      core::RanksStarted{kJob, kGeneration, {Status(), Status()}},
      core::GenerationGone{kJob, kGeneration, false, "rank 1 is stuck"},
      core::ExchangePart{kJob, kGeneration, 9, {{0, "abc"}, {3, std::string(100000, 'x')}}},
      core::CheckpointReport{kJob, kGeneration, {2}, 500, "ckpt/manifest-500.json"},
      core::LogTail{kJob, kGeneration, 1, true, 1ull << 50, "last words \xfe"},
      core::AgentNote{kJob, kGeneration, -1, "stall", "no step for 900 s"},
      core::AgentAnswer{4, false, "no such file", 10, true},
      core::AgentWelcome{ClusterId("c1"), kEpoch, NodeId("n1"), absl::Seconds(1), absl::InfiniteDuration()},
      core::AgentRefused{"wrong cluster"},
      core::HeartbeatAck{kEpoch, 8},
      core::StartGeneration{kEpoch, Grant()},
      core::AckExit{kEpoch, kJob, kGeneration, 1},
      core::ExchangeTable{kEpoch, kJob, kGeneration, 9, {"abc", "", "d"}},
      core::ForgetJob{kEpoch, kJob},
      core::NoticeRanks{kEpoch, kJob, kGeneration, absl::Seconds(119)},
      core::AgentShutdown{kEpoch, "idle"},
      core::AgentJoin{std::string(40, 'k'), "node-1"},
      core::AgentJoined{ClusterId("c1"), NodeId("n1")},
      core::ClientReply{"id-1", false, 5, "no such job", std::string(2 << 20, '{')}};
  for (int cause = 0; cause <= static_cast<int>(core::ExitCause::kLost); ++cause) {
    all.push_back(core::RankExited{Exit(static_cast<core::ExitCause>(cause))});
  }
  for (core::EndMode mode : {core::EndMode::kReform, core::EndMode::kStop, core::EndMode::kStopNow}) {
    all.push_back(core::Revoke{kEpoch, kJob, kGeneration, mode, absl::Seconds(30), "rank 1 failed"});
  }
  using Kind = core::AgentQuery::Kind;
  for (Kind kind : {Kind::kReadLog, Kind::kStacks, Kind::kExec}) {
    all.push_back(core::AgentQuery{kEpoch, 4, kind, kJob, kGeneration, 1, true, 77, {"ls", "-l"}});
  }
  for (auto& body : Bodies()) all.push_back(core::ClientRequest{"id-1", absl::Milliseconds(1500), body});
  return all;
}

core::Message Roundtrip(const core::Message& message) {
  absl::StatusOr<core::Message> back = Decode(Encode(message));
  EXPECT_TRUE(back.ok()) << KindName(message) << ": " << back.status();
  return back.ok() ? *back : core::Message();
}

TEST(Codec, EveryAlternativeComesBackEqual) {
  std::set<size_t> kinds, bodies;
  for (const core::Message& message : Samples()) {
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
  for (const core::Message& message : Samples()) {
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

// A list of 2^29 empty structs costs the sender a few bytes; it must not cost us memory (B6).
TEST(Codec, ListsOfNothingAreRefused) {
  core::AgentHeartbeat beat{1, std::vector<core::RankStatus>(3, Status()), {}};
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
  core::StartGeneration start{kEpoch, Grant()};
  start.grant.master_port = 70000;
  EXPECT_THAT(error(start), HasSubstr("master_port"));
  start = {kEpoch, Grant()};
  start.grant.run_dir = std::string(5000, 'x');
  EXPECT_THAT(error(start), HasSubstr("run_dir"));
  core::AgentHeartbeat beat{1, {}, {0}};
  EXPECT_THAT(error(beat), HasSubstr("free_ports"));
}

TEST(Codec, WriterRepairsWhatTheReaderWouldRefuse) {
  core::RankStatus status = Status();
  status.loss = std::nan("");
  core::Message back = Roundtrip(core::AgentHeartbeat{1, {status}, {}});
  EXPECT_EQ(std::get<core::AgentHeartbeat>(back).changed[0].loss, std::nullopt);

  back = Roundtrip(core::AgentRefused{std::string("bad \xff\x1b[31m text ") + std::string(100000, 'x')});
  EXPECT_THAT(std::get<core::AgentRefused>(back).reason, testing::StartsWith("bad ??[31m text xxx"));

  core::RankExit exit = Exit(core::ExitCause::kSignal);
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

TEST(Ids, Syntax) {
  for (const char* good : {"a", "fashion-mnist-7", "0123456789abcdef", "boot:1+2_x.y"})
    EXPECT_TRUE(ValidId(good)) << good;
  for (const char* bad : {"", "-rf", ".", "../x", "a/b", "a b", "a\n", "\xc3\xa9"})
    EXPECT_FALSE(ValidId(bad)) << bad;
  EXPECT_FALSE(ValidId(std::string(129, 'a')));
}

}  // namespace
}  // namespace gtrain::wire
