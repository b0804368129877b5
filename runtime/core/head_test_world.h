// What the tests of HeadCore share: a head between a disk and agents that do as they are told. For tests
// only.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head_core.h"
#include "runtime/core/outbox.h"

namespace gtrain::core {

// "name min max [key=value ...]" stands for the job file; the real parser is launcher/spec.
inline absl::StatusOr<spec::JobSpec> ParseFake(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  if (words.size() < 3) return absl::InvalidArgumentError("fake spec: name min max");
  spec::JobSpec spec;
  spec.name = words[0];
  spec.ranks = spec::Range{std::stoi(words[1]), std::stoi(words[2])};
  for (const std::string& word : words) {
    if (word == "one-per-node") spec.ranks_per_node = 1;
    if (word == "budget0") spec.restart.budget = 0;
    if (word == "limit60s") spec.time_limit = absl::Seconds(60);
    if (word == "stall-kill") {
      spec.progress.step = "step";
      spec.progress.on_stall = spec::OnStall::kKill;
    }
  }
  return spec;
}

// A head between a disk that is as fast as told and agents that do as told.
class HeadTestWorld : public ::testing::Test {
 protected:
  void SetUp() override {
    config_.cluster = ClusterId("c");
    config_.parse_job = ParseFake;
    Boot();
  }

  void Boot() {
    head_ = std::make_unique<HeadCore>(config_, Rng(7));
    outbox_ = Outbox();
    sent_.clear();
    std::vector<Record> records;
    for (const auto& [key, record] : disk_) records.push_back(record);
    auto recovered = head_->Recover(records, clock_.Now());
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    Do(*std::move(recovered));
  }

  void Do(StepResult step) {
    for (Effect& effect : outbox_.Add(std::move(step))) sent_.push_back(std::move(effect));
    if (!disk_works_) return;
    while (auto batch = outbox_.NextBatch()) {
      audit_.insert(audit_.end(), batch->audit.begin(), batch->audit.end());
      for (const RecordWrite& write : batch->writes) {
        if (write.record) {
          disk_[write.key] = *write.record;
        } else {
          disk_.erase(write.key);
        }
      }
      for (Effect& effect : outbox_.Durable(batch->sequence)) sent_.push_back(std::move(effect));
    }
  }

  void FromNode(const std::string& node, Message message) {
    Do(head_->Step(PeerMessage{{Role::kNode, node}, "route-" + node, "10.0.0.1", std::move(message)},
                   clock_.Now()));
  }

  ClientReply FromClient(ClientRequestBody body, std::string id = "", Role role = Role::kUser,
                         std::string name = "") {
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

  void Hello(const std::string& node, int cpus = 4, std::vector<HeldGeneration> held = {},
             std::string incarnation = "1") {
    AgentHello hello;
    hello.cluster = ClusterId("c");
    hello.incarnation = Incarnation(incarnation);
    hello.hostname = "host-" + node;
    hello.address = "10.0.0." + node;
    hello.inventory.cpus = cpus;
    hello.inventory.memory_bytes = uint64_t{8} << 30;
    hello.free_ports = {25000, 25001, 25002};
    hello.held = std::move(held);
    FromNode(node, hello);
  }

  // Lets time pass in heartbeats of the given nodes.
  void Pass(absl::Duration time, std::vector<std::string> alive) {
    const Instant end = clock_.Now() + time;
    while (clock_.Now() < end) {
      clock_.Advance(absl::Milliseconds(500));
      for (const std::string& node : alive) FromNode(node, AgentHeartbeat{++heartbeats_, {}, {}});
      Do(head_->Step(Tick{}, clock_.Now()));
    }
  }

  RankStatus StepOf(const JobId& job, int rank, int64_t step) {
    return {
        .job = job, .generation = {1}, .rank = rank, .pid = 1, .state = RankState::kRunning, .step = step};
  }

  JobId Submit(const std::string& spec) {
    const ClientReply reply = FromClient(ClientSubmit{spec, {}, "/runs/{job}"});
    EXPECT_TRUE(reply.ok) << reply.error;
    return JobId(nlohmann::json::parse(reply.json).at("job").get<std::string>());
  }

  nlohmann::json Status(const JobId& job) {
    return nlohmann::json::parse(FromClient(ClientStatus{job}).json).at("jobs").at(0);
  }
  std::string State(const JobId& job) { return Status(job).at("state"); }

  template <typename T>
  std::vector<std::pair<std::string, T>> Sent() const {
    std::vector<std::pair<std::string, T>> all;
    for (const Effect& effect : sent_) {
      const auto* send = std::get_if<SendToNode>(&effect);
      if (send == nullptr) continue;
      if (const T* message = std::get_if<T>(&send->message)) all.emplace_back(send->node.value, *message);
    }
    return all;
  }

  // What the agents of the newest grants answer: all ranks run.
  void StartRanks(const JobId& job) {
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

  RankExit Exit(const JobId& job, uint64_t generation, int rank, int code, std::string tail = "") {
    RankExit exit;
    exit.job = job;
    exit.generation = {generation};
    exit.rank = rank;
    exit.exit_code = code;
    exit.tail = std::move(tail);
    return exit;
  }

  RankStatus Step(const JobId& job, uint64_t generation, int rank, int64_t step) {
    RankStatus status{job, {generation}, rank, 100, RankState::kRunning};
    status.step = step;
    return status;
  }

  HeadConfig config_;
  ManualClock clock_;
  std::unique_ptr<HeadCore> head_;
  Outbox outbox_;
  std::map<std::string, Record> disk_;
  std::vector<AuditEntry> audit_;
  bool disk_works_ = true;
  std::vector<Effect> sent_;
  uint64_t heartbeats_ = 0;
  int requests_ = 0;
};

}  // namespace gtrain::core
