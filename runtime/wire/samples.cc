#include "runtime/wire/samples.h"

#include <limits>

#include "runtime/core/values/job_records.h"
#include "runtime/wire/codec.h"

namespace gtrain::wire {

JobId SampleJob() { return JobId("fashion-mnist-7"); }
Generation SampleGeneration() { return {3}; }

namespace {

const JobId kJob = SampleJob();
const Generation kGeneration = SampleGeneration();
const HeadEpoch kEpoch{12};

core::Console SampleConsole() {
  return {"00ff", true, {"bash", "-i"}, true, "xterm", 24, 80, 7, std::string("a\0\xff", 3), true, 5,
          6,      true};
}

std::vector<core::ClientRequestBody> Bodies() {
  return {core::ClientSubmit{"name: x", {{"K", "V"}}, "/run", "latest", true, true},
          core::ClientStop{kJob, true, "enough"},
          core::ClientStatus{},
          core::ClientStatus{kJob},
          core::ClientStatus{JobId(), 1'000},
          core::ClientStatus{JobId(), 0, true},
          core::ClientWhy{kJob},
          core::ClientNodes{},
          core::ClientTopology{},
          core::ClientLogs{kJob, 4, 1, true, 77, 4096},
          core::ClientLogs{.job = kJob},
          core::ClientExec{kJob, 1, {"nvidia-smi", "-L"}, true},
          core::ClientStack{kJob, 1},
          core::ClientActors{kJob, 1, R"({"limit":20})"},
          core::ClientScale{kJob, 8, true},
          core::ClientConsole{kJob, 3, 1, SampleConsole()},
          core::ClientConsole{.job = kJob},
          core::ClientEvents{kJob, 5, absl::Seconds(20)},
          core::ClientShutdown{false},
          core::ClientJoinToken{5, absl::Hours(1)},
          core::ClientTokens{},
          core::ClientRevokeToken{"0123456789abcdef"},
          core::ClientAddUser{"alice", "user", std::string(40, 'k')},
          core::ClientUsers{},
          core::ClientRevokeUser{"alice"},
          core::ClientRevokeNode{"node-1", "stolen"},
          core::ClientBackup{"/backups/lab"},
          core::ClientDrainNode{"node-1", absl::Minutes(2), "new disk", true, true}};
}

}  // namespace

core::RankStatus SampleStatus() {
  return {.job = kJob,
          .generation = kGeneration,
          .rank = 2,
          .pid = 4711,
          .state = core::RankState::kJoined,
          .step = -1,
          .loss = 0.25,
          .samples_per_second = 1e6,
          .collective_sequence = std::numeric_limits<uint64_t>::max(),
          .waited_seconds = 0.5,
          .joined_seconds = 12,
          .idle = absl::Minutes(3),
          .blocked_in = "futex_wait_queue",
          .diverged = true,
          .stalled_seconds = 0.25,
          .nics = "mlx5_0:1,mlx5_1:1"};
}

core::RankExit SampleExit(core::ExitCause cause) {
  return {.job = kJob,
          .generation = kGeneration,
          .rank = 1,
          .pid = 99,
          .cause = cause,
          .exit_code = -7,
          .signal = 11,
          .message = "ended by signal 11 \xe2\x82\xac",
          .tail = std::string("raw \xff\x00 bytes", 12),
          .storage = "Input/output error (EIO)"};
}

core::GenerationGrant SampleGrant() {
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
      .nodes = {{NodeId("0123456789abcdef"), "10.0.0.1", "a", "z1", "r1", 7071, "key"}},
      .ranks = {{.rank = 0, .local_rank = 0, .node = NodeId("0123456789abcdef"), .cpus = {0, 1}, .gpus = {3}},
                {.rank = 1, .local_rank = 1, .node = NodeId("0123456789abcdef"), .process = {{2}, 3}}},
      .near_secret = "0a1b",
      .holders = {{NodeId("fedcba9876543210"), "10.0.0.9", "k", "z2", "", 7072, "key-k"}},
      .newest = core::CheckpointReport{kJob, {1}, {1}, 120, "/ckpt/manifests/step-120.json", ""},
      .takeover = true,
      .live_jobs = {JobId("other-6")},
      .waiting = {
          {.rank = 2, .local_rank = 2, .node = NodeId("0123456789abcdef"), .process = {{1}, 4}, .cell = 1}}};
}

core::GrantSeal SampleSeal() {
  return {Encode(core::StartGeneration{HeadEpoch{}, SampleGrant(), {}}), "0a1b2c"};
}

core::NodeNotice SampleNotice() {
  return {.kind = core::NoticeKind::kLeave,
          .left = absl::Seconds(119),
          .frozen = absl::Seconds(3),
          .source = "aws spot interruption (terminate)",
          .id = "terminate@2017-09-18T08:22:00Z",
          .raw = "{\"action\":\"terminate\"}"};
}

namespace {

core::Network SampleNetwork() {
  return {{{"mlx5_0:1", core::NicKind::kRoce, "", {"eth2"}, 400'000, 1, "pci0000:15/0000:15:02.0"},
           {"efa_0:1", core::NicKind::kEfa, "its port is DOWN", {}, 0, -1, ""}},
          {{"eth0", {"10.0.0.1", "fd00::1"}}}};
}

core::AgentHello SampleHello() {
  return {.cluster = ClusterId("00112233445566778899aabbccddeeff"),
          .incarnation = Incarnation("boot-1:77"),
          .boot_id = "b-1",
          .hostname = "node-1",
          .address = "fe80::1",
          .version = "0.1.0",
          .protocol = 1,
          .inventory = {4,
                        2,
                        1,
                        1ull << 40,
                        {{"GPU-1", "H200", 1ull << 37, -1, "pci0000:15/0000:15:01.0"}},
                        {{8, 0}, {9, -1}},
                        SampleNetwork()},
          .labels = {{"pool", "spot"}},
          .free_ports = {29500, 29501},
          .held = {{kJob, kGeneration, {2}, {SampleStatus()}, {SampleExit(core::ExitCause::kOom)}}},
          .takes_copies = true,
          .copies_of = {kJob},
          .keeps_seals = true,
          .knows_fabric_order = true,
          .kept = {{kJob, {{{1}, 0}, {{2}, 3}}, {{{2}, 4}}}},
          .knows_relays = true,
          .relay_port = 4712,
          .public_key = std::string(40, 'k')};
}

}  // namespace

std::vector<core::Message> SampleMessages() {
  std::vector<core::Message> all = {
      SampleHello(),
      core::AgentHeartbeat{8, {SampleStatus()}, {1, 65535}},
      core::RanksStarted{kJob, kGeneration, {SampleStatus(), SampleStatus()}},
      core::GenerationGone{kJob, kGeneration, false, "rank 1 is stuck", {{{1}, 0}, {{2}, 3}}, {{{2}, 4}}},
      core::ExchangePart{kJob, kGeneration, 9, {{0, "abc"}, {3, std::string(100000, 'x')}}},
      core::CheckpointReport{kJob, kGeneration, {2}, 500, "ckpt/manifest-500.json", "every 42 s"},
      core::LogTail{kJob, kGeneration, 1, true, 1ull << 50, "last words \xfe", 7},
      core::AgentNote{kJob, kGeneration, -1, "stall", "no step for 900 s"},
      core::GenerationDescribed{{kJob, kGeneration, {2}, {SampleStatus()}, {}, true}, SampleGrant(), {}, {}},
      core::GenerationDescribed{{.job = kJob, .generation = kGeneration},
                                SampleGrant(),
                                core::CheckpointReport{kJob, kGeneration, {2}, 500, "m", ""},
                                SampleSeal()},
      core::AgentAnswer{4, false, "no such file", 10, true, "err", true, 11, 12},
      core::AgentWelcome{ClusterId("c1"), kEpoch, NodeId("n1"), absl::Seconds(1), absl::InfiniteDuration(),
                         "proof", true, true},
      core::AgentRefused{"wrong cluster"},
      core::AgentRefused{"stolen", true},
      core::HeartbeatAck{kEpoch, 8, true},
      core::StartGeneration{kEpoch, SampleGrant(), {}},
      core::StartGeneration{kEpoch, SampleGrant(), SampleSeal()},
      core::AckExit{kEpoch, kJob, kGeneration, 1},
      core::ExchangeTable{kEpoch, kJob, kGeneration, 9, {"abc", "", "d"}},
      core::ExchangeMissing{kEpoch, kJob, kGeneration, 9, {1, 3}},
      core::ForgetJob{kEpoch, kJob},
      core::KeepCopies{kEpoch, kJob, "memory", "0a1b"},
      core::RanksLeft{kEpoch, kJob, kGeneration, {1, 3}},
      core::PauseRanks{kEpoch, kJob, kGeneration},
      core::RelayedUp{{{NodeId("n1"), core::RelayStage::kSealed, "0123", 0, 0, true}}, {7, 4'000'000'000}},
      core::RelayedDown{{"body"}, {{NodeId("n1"), core::RelayStage::kShared, "0123", 7, 0}}},
      core::RelayReady{4711, "the port is in use"},
      core::RelayFor{kEpoch, {{NodeId("n1"), std::string(40, 'k')}}},
      core::ConnectVia{kEpoch, NodeId("n1"), "10.0.0.2:4711", std::string(40, 'k')},
      core::NoticeRanks{kEpoch, kJob, kGeneration, absl::Seconds(119), 2},
      core::NoticeSeen{3, SampleNotice()},
      core::AckNotice{kEpoch, 3},
      core::LinkDown{kJob, kGeneration, 1, 0, "64 KiB were not acknowledged within 5s"},
      core::AgentShutdown{kEpoch, "idle"},
      core::AgentJoin{std::string(40, 'k'), "node-1"},
      core::AgentJoined{ClusterId("c1"), NodeId("n1")},
      core::ClientReply{"id-1", false, 5, "no such job", std::string(2 << 20, '{')}};
  for (int cause = 0; cause <= static_cast<int>(core::ExitCause::kLost); ++cause) {
    all.push_back(core::RankExited{SampleExit(static_cast<core::ExitCause>(cause))});
  }
  for (core::EndMode mode : {core::EndMode::kReform, core::EndMode::kStop, core::EndMode::kStopNow}) {
    all.push_back(core::Revoke{kEpoch, kJob, kGeneration, mode, absl::Seconds(30), "rank 1 failed", true});
  }
  using Kind = core::AgentQuery::Kind;
  for (Kind kind : {Kind::kReadLog, Kind::kStacks, Kind::kExec, Kind::kConsole, Kind::kActors}) {
    all.push_back(core::AgentQuery{
        kEpoch, 4, kind, kJob, kGeneration, 1, true, 77, {"ls", "-l"}, 4096, true, true, SampleConsole()});
  }
  for (auto& body : Bodies()) all.push_back(core::ClientRequest{"id-1", absl::Milliseconds(1500), body});
  return all;
}

namespace {

core::FaultRecord SampleFault(uint64_t generation, core::FaultKind kind) {
  return {.generation = {generation},
          .kind = kind,
          .rank = -1,
          .node = NodeId("n1"),
          .hostname = "h",
          .cause = core::ExitCause::kOom,
          .exit_code = 3,
          .signal = 9,
          .message = "killed",
          .tail = "\xff tail",
          .signature = "sig\x01",
          .step = 12,
          .progressed = true,
          .tries = 3,
          .committed = 11,
          .at = absl::FromUnixSeconds(1'700'000'000)};
}

core::GoodputRecord SampleGoodput() {
  return {.since = absl::FromUnixSeconds(1'700'000'001),
          .at = absl::FromUnixSeconds(1'700'000'003),
          .seconds = {1.5, 0.25, 3},
          .open = -0.125,
          .over = true,
          .stepped = {4},
          .repeats = true,
          .idle_said = true,
          .stall_said = true,
          .first = 1,
          .top = 20,
          .at_step = 12,
          .redone_to = 18,
          .redone = 7,
          .losses = 2,
          .wanted = 4};
}

}  // namespace

core::JobRecord SampleJobRecord() {
  core::JobRecord job{{.id = JobId("train-3"),
                       .number = 3,
                       .name = "train",
                       .spec_text = "name: train\n",
                       .env = {{"A", "b"}},
                       .run_dir = "/runs/3",
                       .resume = "latest",
                       .client_key = "0011223344556677",
                       .owner = "ann",
                       .request_id = "abc",
                       .end_with_client = true,
                       .takeover = true,
                       .takeover_own = true,
                       .submitted_at = absl::FromUnixSeconds(1'700'000'001)},
                      {.state = core::JobState::kReconfiguring,
                       .reason = "rank 1 was killed by signal 9",
                       .generation = {4},
                       .revoked = {3},
                       .timeline = {2},
                       .ending = core::Ending::kReform,
                       .ending_reason = "rank 1",
                       .restarts = 2,
                       .run_time = absl::Seconds(77),
                       .run_time_at = absl::FromUnixNanos(1'700'000'000'123'456'789),
                       .sdk = true,
                       .exit_code = -1,
                       .event_sequence = 99,
                       .avoided = {{NodeId("n2"), "a cannot reach it"}},
                       .waits_for_storage = true,
                       .started_at = absl::FromUnixSeconds(1'700'000'002),
                       .ended_at = absl::FromUnixSeconds(1'700'000'003),
                       .last_step = 1234,
                       .last_loss = 0.25,
                       .size_wanted = 3,
                       .diverged = true,
                       .goodput = SampleGoodput(),
                       .after_save = core::Ending::kCancel,
                       .after_save_reason = "stopped by a user",
                       .saves = true}};
  job.grant = core::GenerationGrant{.job = JobId("train-3"), .generation = {4}, .world_size = 2};
  job.exits = {{.job = JobId("train-3"), .generation = {4}, .rank = 1, .signal = 9}};
  job.unreleased = {NodeId("n1")};
  job.kept = {NodeId("n1"), NodeId("n2")};
  for (core::FaultKind kind :
       {core::FaultKind::kCrash, core::FaultKind::kPreempted, core::FaultKind::kStorage}) {
    job.faults.push_back(SampleFault(job.faults.size() + 1, kind));
  }
  return job;
}

std::vector<core::Record> SampleRecords() {
  const core::JobRecord job = SampleJobRecord();
  return {core::ClusterRecord{ClusterId("c1"), {9}, 5, 6},
          core::NodeRecord{NodeId("n1"),
                           Incarnation("i1"),
                           "b1",
                           "host",
                           "10.0.0.1",
                           "0.1.0",
                           {.cpus = 2},
                           {{"k", "v"}},
                           true,
                           SampleNotice(),
                           {.kind = core::NoticeKind::kLeave, .source = "drained by ann"}},
          job,
          core::JobRecord{{.id = JobId("bare-1")}},
          core::RequestRecord{"0011223344556677", "abc", 7, {"abc", false, 3, "why", "{}"}},
          core::CheckpointRecord{JobId("train-3"), {4}, {2}, 500, "m/500", 11},
          core::JobSubmission(job),
          core::StatusRecordOf(job),
          core::JobGrantRecord{job.id, *job.grant, job.kept},
          core::JobExitRecord{job.id, 0, job.exits[0]},
          core::JobFaultRecord{job.id, job.faults.back()},
          core::JobUnreleasedRecord{job.id, job.unreleased},
          core::JobExitsRecord{job.id, 0, job.exits}};
}

}  // namespace gtrain::wire
