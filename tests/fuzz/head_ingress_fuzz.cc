// A whole head behind its socket (faults B5, B6, B7, B8, X5): frames as they come out of ZeroMQ, keys and
// roles, the codec, the core, the outbox, the store and restarts from it. Whatever peers say, the head goes
// on: it sends only messages that can be read, stores only records that can be read, and a restart accepts
// them.
#include <map>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "job/spec/parse.h"
#include "net/zmq/ingress.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/outbox.h"
#include "runtime/core/values/authority.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/record_codec.h"
#include "runtime/wire/samples.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

using core::Role;

// Fixed public keys: which bytes they are does not matter, only which role each has.
std::string PublicKey(char c) { return std::string(40, c); }
constexpr char kKeys[] = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'};
constexpr Role kRoles[] = {Role::kNode, Role::kNode, Role::kNode, Role::kUser, Role::kAdmin, Role::kReadOnly};

// One step: a first byte that says who (low 3 bits) and what (the rest), then the payload.
enum What { kMessage, kTick, kGone, kRestart, kSlowDisk, kFrames, kOldRoute };
std::string Step(int who, What what, absl::string_view payload = "") {
  return absl::StrCat(std::string(1, static_cast<char>(what << 3 | who)), payload);
}

class World {
 public:
  World() {
    std::vector<net::AllowedKey> keys;
    for (size_t i = 0; i < std::size(kRoles); ++i) keys.push_back({kRoles[i], PublicKey(kKeys[i]), ""});
    registry_.Replace(keys);
    registry_.ReplaceJoinKeys({{net::KeyId(PublicKey(kKeys[6])), clock_.Now() + absl::Minutes(15)}});
    Boot();
  }

  void Do(absl::string_view step) {
    if (step.empty()) return;
    const int who = step[0] & 7;
    const int what = static_cast<unsigned char>(step[0]) >> 3;
    const absl::string_view payload = step.substr(1);
    const std::string key = net::KeyId(PublicKey(kKeys[who]));
    switch (what) {
      case kTick:
        clock_.Advance(absl::Milliseconds(100) *
                       (payload.empty() ? 10 : static_cast<unsigned char>(payload[0])));
        return Step(core::Tick{});
      case kGone:
        return Step(core::PeerGone{{who < 6 ? kRoles[who] : Role::kJoin, key}, absl::StrCat("route-", who)});
      case kRestart:
        return Boot();
      case kSlowDisk:
        disk_works_ = !disk_works_;
        return Commit();
      default:
        return Receive(
            {.frames = {absl::StrCat(what == kOldRoute ? "old-" : "route-", who), std::string(payload)},
             .count = what == kFrames ? 3u : 2u,
             .user_id = absl::StrCat("role/", key),
             .peer_address = absl::StrCat("10.0.0.", who + 1)});
    }
  }

 private:
  void Boot() {
    core::HeadConfig config{
        .cluster = ClusterId("c1"), .jobs_max = 20, .live_jobs_max = 10, .requests_max = 20};
    config.parse_job = spec::ParseCanonical;
    core_ = std::make_unique<core::HeadCore>(std::move(config), Rng(7));
    outbox_ = core::Outbox();
    core::StoredRecords stored;
    for (const auto& [name, bytes] : disk_) {
      absl::StatusOr<core::Record> record = wire::DecodeRecord(bytes);
      Require(record.status());
      GT_CHECK(core::KeyOf(*record) == name);
      stored.Add(*std::move(record));
    }
    disk_works_ = true;
    absl::StatusOr<core::StepResult> recovered =
        core_->Recover(std::move(stored), clock_.Now(), clock_.WallNow());
    Require(recovered.status());
    Perform(outbox_.Add(*std::move(recovered)));
    Commit();
  }

  void Receive(net::Frames frames) {
    net::Drop drop;
    std::optional<port::Received> received = net::Admit(std::move(frames), registry_, clock_.Now(), &drop);
    if (!received) return;
    absl::StatusOr<core::Message> message =
        wire::Decode(received->payload, core::SenderOf(received->peer.role));
    if (!message.ok()) return;
    Step(core::PeerMessage{received->peer, received->route.id, received->address, *std::move(message)});
  }

  void Step(const core::HeadEvent& event) {
    if (stopped_) return;
    Perform(outbox_.Add(core_->Step(event, clock_.Now())));
    Commit();
    GT_CHECK(outbox_.stats().held_now < 100'000);
    (void)core_->Snapshot();
  }

  void Commit() {
    while (disk_works_) {
      std::optional<core::OutboxBatch> batch = outbox_.NextBatch();
      if (!batch) return;
      for (const core::RecordWrite& write : batch->writes) {
        if (write.record) {
          disk_[write.key] = wire::EncodeRecord(*write.record);
        } else {
          disk_.erase(write.key);
        }
      }
      Perform(outbox_.Durable(batch->sequence));
    }
  }

  void Perform(const std::vector<core::Effect>& effects) {
    for (const core::Effect& effect : effects) {
      if (const auto* send = std::get_if<core::SendToNode>(&effect)) CheckSent(*send->message);
      if (const auto* reply = std::get_if<core::ReplyToClient>(&effect)) CheckSent(Built(*reply));
      if (const auto* reply = std::get_if<core::ReplyFromSpill>(&effect))
        CheckSent(Built(*reply, std::nullopt));
      if (std::holds_alternative<core::StopHead>(effect)) stopped_ = true;
    }
  }

  static void CheckSent(const core::Message& message) {
    Require(wire::Decode(wire::Encode(message), wire::Sender::kHead).status());
  }

  ManualClock clock_;
  net::KeyRegistry registry_;
  std::unique_ptr<core::HeadCore> core_;
  core::Outbox outbox_;
  std::map<std::string, std::string> disk_;
  bool disk_works_ = true;
  bool stopped_ = false;
};

// ---------------------------------------------------------------- a conversation

std::string Say(int who, const core::Message& message) { return Step(who, kMessage, wire::Encode(message)); }

std::string Ask(int who, absl::string_view id, core::ClientRequestBody body) {
  return Say(who, core::ClientRequest{std::string(id), absl::Seconds(5), std::move(body)});
}

std::string Hello(int who, std::vector<core::HeldGeneration> held = {}) {
  core::AgentHello hello{.cluster = ClusterId("c1"),
                         .incarnation = Incarnation(absl::StrCat("boot-", who)),
                         .boot_id = "b",
                         .hostname = absl::StrCat("host-", who),
                         .address = absl::StrCat("10.0.0.", who + 1),
                         .version = "0.1.0",
                         .inventory = {.cpus = 2, .cores = 2, .numa_nodes = 1, .memory_bytes = 8ull << 30},
                         .labels = {{"pool", "spot"}},
                         .free_ports = {25000, 25001}};
  hello.held = std::move(held);
  return Say(who, hello);
}

const JobId kTrain("train-1");

core::RankStatus Running(int rank, int64_t step) {
  return {.job = kTrain,
          .generation = {1},
          .rank = rank,
          .pid = 10 + rank,
          .state = core::RankState::kRunning,
          .step = step};
}

core::RankExit Exit(uint64_t generation, int rank, int code) {
  return {.job = kTrain,
          .generation = {generation},
          .rank = rank,
          .pid = 10 + rank,
          .exit_code = code,
          .tail = "boom\n"};
}

std::string Submit() {
  return Ask(3, "r1",
             core::ClientSubmit{"name: train\nrun: [\"train\"]\nranks: 4\n", {{"A", "b"}}, "/runs/{job}"});
}

// Two nodes, a job of four ranks, steps, a checkpoint, a crash, another generation, the end.
std::vector<std::string> Life() {
  std::vector<std::string> steps = {Hello(0), Hello(1), Submit()};
  for (uint64_t generation : {1, 2}) {
    for (int who : {0, 1}) {
      core::RanksStarted started{kTrain, {generation}, {Running(2 * who, 0), Running(2 * who + 1, 0)}};
      for (core::RankStatus& rank : started.ranks) rank.generation = {generation};
      steps.push_back(Say(who, started));
    }
    steps.push_back(Say(0, core::ExchangePart{kTrain, {generation}, 0, {{0, "x"}, {1, "y"}}}));
    steps.push_back(Say(1, core::ExchangePart{kTrain, {generation}, 0, {{2, "x"}, {3, "y"}}}));
    steps.push_back(Say(0, core::AgentHeartbeat{generation, {Running(0, 5)}, {25000}}));
    steps.push_back(Step(0, kTick));
    steps.push_back(
        Say(0, core::CheckpointReport{kTrain, {generation}, {generation}, 5, "manifests/x.json"}));
    if (generation == 2) break;
    steps.push_back(Say(1, core::RankExited{Exit(1, 2, 1)}));
    for (int who : {0, 1}) steps.push_back(Say(who, core::GenerationGone{kTrain, {1}, true, ""}));
  }
  for (int rank = 0; rank < 4; ++rank) steps.push_back(Say(rank / 2, core::RankExited{Exit(2, rank, 0)}));
  return steps;
}

std::vector<std::string> Questions() {
  std::vector<std::string> steps = {Hello(0), Hello(1), Submit(), Submit()};
  int id = 10;
  for (int who : {3, 4, 5}) {
    const std::vector<core::ClientRequestBody> bodies = {core::ClientStatus{kTrain},
                                                         core::ClientStatus{},
                                                         core::ClientWhy{kTrain},
                                                         core::ClientNodes{},
                                                         core::ClientTopology{},
                                                         core::ClientLogs{.job = kTrain},
                                                         core::ClientExec{kTrain, 1, {"ls"}},
                                                         core::ClientConsole{kTrain, {}, 1, {.session = "s"}},
                                                         core::ClientEvents{kTrain, 0, absl::Seconds(1)},
                                                         core::ClientJoinToken{},
                                                         core::ClientStop{kTrain, false, "enough"}};
    for (const core::ClientRequestBody& body : bodies)
      steps.push_back(Ask(who, absl::StrCat("r", ++id), body));
  }
  steps.push_back(Say(0, core::AgentAnswer{1, true, "text", 4, true}));
  steps.push_back(Say(0, core::LogTail{kTrain, {1}, 0, true, 10, "words"}));
  steps.push_back(Say(0, core::AgentNote{kTrain, {1}, 0, "stall", "no step"}));
  return steps;
}

}  // namespace

GT_FUZZ_RUN(head_ingress) {
  World world;
  int steps = 0;
  for (absl::string_view step : SplitSteps(bytes)) {
    if (++steps > 200) break;
    world.Do(step);
  }
}

GT_FUZZ_SEEDS(head_ingress) {
  const std::vector<std::string> life = Life();
  std::vector<std::string> seeds = {JoinSteps(life), JoinSteps(Questions())};
  std::vector<std::string> restarts, slow, lost;
  for (const std::string& step : life) {
    restarts.insert(restarts.end(), {step, Step(0, kRestart), Hello(0), Hello(1)});
    slow.insert(slow.end(), {Step(0, kSlowDisk), step, Step(0, kTick, "\x05")});
  }
  lost.assign(life.begin(), life.begin() + 8);
  lost.insert(lost.end(), {Step(1, kGone), Step(0, kTick, "\xff"), Hello(1),
                           Hello(0, {{kTrain, {1}, {}, {Running(0, 3)}, {Exit(1, 1, 9)}}})});
  seeds.insert(seeds.end(), {JoinSteps(restarts), JoinSteps(slow), JoinSteps(lost)});
  std::vector<std::string> everything;
  for (const core::Message& message : wire::SampleMessages()) {
    if (wire::Encode(message).size() < 4096) {
      for (int who : {0, 4, 6}) everything.push_back(Say(who, message));
    }
  }
  seeds.push_back(JoinSteps(everything));
  seeds.push_back(
      JoinSteps({Say(6, core::AgentJoin{PublicKey('z'), "new"}), Step(6, kFrames, "x"), Step(7, kMessage)}));
  return seeds;
}

}  // namespace gtrain::fuzz
