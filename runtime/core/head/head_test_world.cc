#include "runtime/core/head/head_test_world.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "runtime/core/values/job_records.h"

namespace gtrain::core {
namespace {

void Apply(const std::vector<RecordWrite>& writes, std::map<std::string, Record>& store) {
  for (const RecordWrite& write : writes) {
    if (write.record) {
      store[write.key] = *write.record;
    } else {
      store.erase(write.key);
    }
  }
}

}  // namespace

absl::StatusOr<spec::JobSpec> ParseFake(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  if (words.size() < 3) return absl::InvalidArgumentError("fake spec: name min max");
  spec::JobSpec spec;
  spec.name = words[0];
  spec.overlap = spec::Overlap::kAllow;  // tests of other things do not wait for leases
  spec.ranks = spec::Range{std::stoi(words[1]), std::stoi(words[2])};
  for (const std::string& word : words) {
    if (word == "fenced") spec.overlap = spec::Overlap::kWait;
    if (word == "one-per-node") spec.ranks_per_node = 1;
    if (word == "two-per-node") spec.ranks_per_node = 2;
    if (word == "in-twos") spec.mesh = {{"dp", std::nullopt}, {"tp", 2}};
    if (word == "in-fours") spec.mesh = {{"dp", std::nullopt}, {"tp", 4}};
    if (word == "in-place") spec.in_place = true;
    if (word == "spare") spec.spares = 1;
    if (word == "budget0") spec.restart.budget = 0;
    if (word == "limit60s") spec.time_limit = absl::Seconds(60);
    if (word == "copies") spec.checkpoint = {.uri = "/ckpt/" + words[0], .near = "memory", .replicas = 1};
    if (absl::StartsWith(word, "in=")) spec.checkpoint.uri = word.substr(3);
    if (absl::StartsWith(word, "reads=")) spec.checkpoint = {.uri = word.substr(6), .read_only = true};
    if (absl::StartsWith(word, "secret=")) spec.secrets["KEY"] = {.env = "", .file = word.substr(7)};
    if (absl::StartsWith(word, "at=")) spec.workdir = word.substr(3);
    if (absl::StartsWith(word, "rank0=")) spec.where_rank0 = word.substr(6);
    if (absl::StartsWith(word, "on=")) {
      for (const absl::string_view host : absl::StrSplit(word.substr(3), ','))
        spec.where_ranks.push_back({{static_cast<int>(spec.where_ranks.size())}, std::string(host), {}});
    }
    if (word == "half-gpu") spec.resources.gpu_share = 500;
    if (word == "whole-gpu") spec.resources.gpus = 1;
    if (word == "bound2") spec.resources.cpus = 2;
    if (word == "steps10") spec.progress.steps = 10;
    if (word == "stall20s") spec.progress.stall = absl::Seconds(20);
    if (word == "stall-kill") {
      spec.progress.step = "step";
      spec.progress.on_stall = spec::OnStall::kKill;
    }
  }
  return spec;
}

HeadTestWorld::HeadTestWorld() = default;
HeadTestWorld::~HeadTestWorld() = default;

void HeadTestWorld::SetUp() {
  config_.cluster = ClusterId("c");
  config_.check_deadlines = true;
  config_.parse_job = ParseFake;
  Boot();
}

void HeadTestWorld::Boot() {
  head_ = std::make_unique<HeadCore>(config_, Rng(7));
  outbox_ = Outbox();
  sent_.clear();
  written_ = disk_;
  auto recovered = head_->Recover(OnDisk(), clock_.Now(), clock_.WallNow());
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  Do(*std::move(recovered));
}

StoredRecords HeadTestWorld::OnDisk() const {
  StoredRecords stored;
  for (const auto& [key, record] : disk_) stored.Add(record);
  for (const std::string& key : set_aside_) stored.SetAside(key);
  return stored;
}

void HeadTestWorld::Do(StepResult step) {
  for (const Effect& effect : step.effects) {
    const auto* persist = std::get_if<Persist>(&effect);
    if (persist == nullptr) continue;
    Apply(persist->writes, written_);
    for (const RecordWrite& write : persist->writes) {
      const auto* status = write.record ? std::get_if<JobStatusRecord>(&*write.record) : nullptr;
      if (status == nullptr) continue;
      const absl::StatusOr<JobRecord> joined = JoinJob(GatherJob(written_, status->job));
      ASSERT_TRUE(joined.ok()) << status->job << ": " << joined.status();
      EXPECT_TRUE(*joined == *head_->RecordOf(status->job)) << status->job << " is not as it is written";
    }
  }
  for (Effect& effect : outbox_.Add(std::move(step))) Perform(std::move(effect));
  if (!disk_works_) return;
  while (auto batch = outbox_.NextBatch()) {
    audit_.insert(audit_.end(), batch->audit.begin(), batch->audit.end());
    Apply(batch->writes, disk_);
    for (Effect& effect : outbox_.Durable(batch->sequence)) Perform(std::move(effect));
  }
}

// Performs an effect: documents are built, and spilled tails are read, at once.
void HeadTestWorld::Perform(Effect effect) {
  if (const auto* spill = std::get_if<SpillTail>(&effect)) {
    SpilledTail& tail = spilled_[spill->tail];
    if (spill->before == 0 || spill->before != tail.bytes) tail = SpilledTail();
    tail.text += spill->text;
    tail.bytes += spill->text.size();
    tail.end_offset = spill->end_offset;
  } else if (const auto* drop = std::get_if<DropSpilled>(&effect)) {
    std::erase_if(spilled_, [&](const auto& item) { return item.first.job == drop->job; });
  } else if (const auto* read = std::get_if<ReplyFromSpill>(&effect)) {
    const auto found = spilled_.find(TailOf(read->query));
    effect = ReplyToClient{
        read->route, Built(*read, found == spilled_.end() ? std::nullopt : std::optional(found->second))};
  } else if (auto* reply = std::get_if<ReplyToClient>(&effect)) {
    reply->reply = Built(*reply);
  }
  if (const auto* make = std::get_if<MakePlan>(&effect)) plans_.push_back(make->work);
  sent_.push_back(std::move(effect));
}

void HeadTestWorld::MakePlans() {
  for (const std::shared_ptr<PlanWork>& work : std::exchange(plans_, {})) {
    work->Make();
    Do(head_->Step(PlanMade{work}, clock_.Now()));
  }
}

void HeadTestWorld::FromNode(const std::string& node, Message message) {
  Do(head_->Step(PeerMessage{{Role::kNode, node},
                             RouteOf(node),
                             "10.0.0.1",
                             std::move(message),
                             absl::ZeroDuration(),
                             NodeId(via_[node])},
                 clock_.Now()));
}

ClientReply HeadTestWorld::FromClient(ClientRequestBody body, std::string id, Role role, std::string name) {
  if (id.empty()) id = absl::StrCat("request-", ++requests_);
  Do(head_->Step(
      PeerMessage{{role, "user1", name}, "client", "10.0.0.9", ClientRequest{id, absl::Seconds(5), body}},
      clock_.Now()));
  for (auto it = sent_.rbegin(); it != sent_.rend(); ++it) {
    const auto* reply = std::get_if<ReplyToClient>(&*it);
    if (reply != nullptr && reply->reply.id == id) return reply->reply;
  }
  return ClientReply{"none"};
}

void HeadTestWorld::HelloAgain(const std::string& node) {
  --connections_[node].second;
  Hello(node, 4, {}, connections_[node].first);
}

void HeadTestWorld::Hello(const std::string& node, int cpus, std::vector<HeldGeneration> held,
                          std::string incarnation) {
  AgentHello hello;
  hello.cluster = ClusterId("c");
  hello.incarnation = Incarnation(incarnation);
  hello.hostname = "host-" + node;
  hello.address = "10.0.0." + node;
  hello.inventory.cpus = cpus;
  hello.inventory.memory_bytes = uint64_t{8} << 30;
  for (int i = 0; i < gpus_hello_; ++i) hello.inventory.gpus.push_back({absl::StrCat(node, "-", i), "A100"});
  hello.free_ports = {25000, 25001, 25002};
  hello.held = std::move(held);
  hello.kept = kept_hello_;
  hello.knows_fabric_order = !old_hello_;
  hello.knows_relays = relays_hello_;
  if (relays_hello_) hello.public_key = std::string(39, 'k') + node.back();
  hello.labels = labels_hello_;
  auto& [last, number] = connections_[node];
  // A new life comes on the old connection: on a new one it would be a rival of the one that was just heard.
  if (last != incarnation && number > 0) --number;
  ++number;
  last = incarnation;
  FromNode(node, hello);
}

std::string HeadTestWorld::RouteOf(const std::string& node) {
  const int number = connections_[node].second;
  return number <= 1 ? "route-" + node : absl::StrCat("route-", node, "-", number);
}

void HeadTestWorld::Pass(absl::Duration time, const std::vector<std::string>& alive) {
  const Instant end = clock_.Now() + time;
  while (clock_.Now() < end) {
    clock_.Advance(absl::Milliseconds(500));
    for (const std::string& node : alive) FromNode(node, AgentHeartbeat{++heartbeats_, {}, {}});
    Do(head_->Step(Tick{}, clock_.Now()));
  }
}

std::vector<std::string> HeadTestWorld::Events(const JobId& job, const std::string& kind) {
  std::vector<std::string> texts;
  const nlohmann::json why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
  for (const auto& event : why.at("events")) {
    if (event.at("kind") == kind) texts.push_back(event.at("text"));
  }
  return texts;
}

RankStatus HeadTestWorld::StepOf(const JobId& job, int rank, int64_t step) {
  return {.job = job, .generation = {1}, .rank = rank, .pid = 1, .state = RankState::kRunning, .step = step};
}

JobId HeadTestWorld::Submit(const std::string& spec) {
  const ClientReply reply = FromClient(ClientSubmit{spec, {}, "/runs/{job}"});
  EXPECT_TRUE(reply.ok) << reply.error;
  return JobId(nlohmann::json::parse(reply.json).at("job").get<std::string>());
}

nlohmann::json HeadTestWorld::Status(const JobId& job) {
  return nlohmann::json::parse(FromClient(ClientStatus{job}).json).at("jobs").at(0);
}

JobRecord HeadTestWorld::Stored(const JobId& job) const {
  const absl::StatusOr<JobRecord> joined = JoinJob(GatherJob(disk_, job));
  EXPECT_TRUE(joined.ok()) << joined.status();
  return joined.value_or(JobRecord());
}

std::string HeadTestWorld::State(const JobId& job) { return Status(job).at("state"); }

void HeadTestWorld::StartRanks(const JobId& job) {
  for (const auto& [node, start] : Sent<StartGeneration>()) {
    if (start.grant.job != job) continue;
    RanksStarted started{job, start.grant.generation, {}};
    for (const RankPlace& place : start.grant.ranks) {
      if (place.node.value == node)
        started.ranks.push_back(
            {job, start.grant.generation, place.rank, 100 + place.rank, RankState::kRunning});
    }
    FromNode(node, started);
  }
}

void HeadTestWorld::Kill(const std::string& node, const JobId& job, uint64_t generation, int rank) {
  RankExit exit = Exit(job, generation, rank, 0);
  exit.cause = ExitCause::kSignal;
  exit.signal = 9;
  FromNode(node, RankExited{exit});
}

RankExit HeadTestWorld::Exit(const JobId& job, uint64_t generation, int rank, int code, std::string tail) {
  RankExit exit;
  exit.job = job;
  exit.generation = {generation};
  exit.rank = rank;
  exit.exit_code = code;
  exit.tail = std::move(tail);
  return exit;
}

RankStatus HeadTestWorld::Step(const JobId& job, uint64_t generation, int rank, int64_t step) {
  RankStatus status{job, {generation}, rank, 100, RankState::kRunning};
  status.step = step;
  return status;
}

}  // namespace gtrain::core
