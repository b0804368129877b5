// The world of the tests of HeadCore: a head between a disk and agents that do as they are told. For tests
// only.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/outbox.h"

namespace gtrain::core {

// "name min max [word ...]" stands for the job file; the real parser is job/spec.
absl::StatusOr<spec::JobSpec> ParseFake(absl::string_view text);

// A head between a disk that is as fast as told and agents that do as told.
class HeadTestWorld : public ::testing::Test {
 protected:
  HeadTestWorld();
  ~HeadTestWorld() override;
  void SetUp() override;

  void Boot();
  StoredRecords OnDisk() const;
  // Performs a step, and checks that what it writes of a job is all that it changed.
  void Do(StepResult step);
  void Perform(Effect effect);
  void MakePlans();  // that were asked for
  void FromNode(const std::string& node, Message message);
  ClientReply FromClient(ClientRequestBody body, std::string id = "", Role role = Role::kUser,
                         std::string name = "");
  // Says hello on a new connection.
  void Hello(const std::string& node, int cpus = 4, std::vector<HeldGeneration> held = {},
             std::string incarnation = "1");
  // Says hello on the same connection.
  void HelloAgain(const std::string& node);
  // Lets time pass in heartbeats of the given nodes.
  void Pass(absl::Duration time, const std::vector<std::string>& alive);
  JobId Submit(const std::string& spec);
  nlohmann::json Status(const JobId& job);
  std::string State(const JobId& job);
  // The texts of its events of one kind, the oldest first.
  std::vector<std::string> Events(const JobId& job, const std::string& kind);
  // The record of a job as it is on disk.
  JobRecord Stored(const JobId& job) const;

  template <typename T>
  std::vector<std::pair<std::string, T>> Sent() const {
    std::vector<std::pair<std::string, T>> all;
    for (const Effect& effect : sent_) {
      const auto* send = std::get_if<SendToNode>(&effect);
      if (send == nullptr) continue;
      if (const T* message = std::get_if<T>(&*send->message)) all.emplace_back(send->node.value, *message);
    }
    return all;
  }

  // Sends the answers of the agents to the newest grants: all ranks run.
  void StartRanks(const JobId& job);

  RankExit Exit(const JobId& job, uint64_t generation, int rank, int code, std::string tail = "");
  // The node says that SIGKILL has ended the rank.
  void Kill(const std::string& node, const JobId& job, uint64_t generation, int rank);
  RankStatus StepOf(const JobId& job, int rank, int64_t step);
  RankStatus Step(const JobId& job, uint64_t generation, int rank, int64_t step);

  std::string RouteOf(const std::string& node);

  std::vector<KeptProcesses> kept_hello_;         // what the next Hello says that waits
  int gpus_hello_ = 0;                            // GPUs of a machine that says Hello
  std::vector<std::shared_ptr<PlanWork>> plans_;  // to be made
  bool relays_hello_ = false;                     // of one that goes through others
  std::map<std::string, std::string> labels_hello_;
  std::map<std::string, std::string> via_;  // node: the one through which it speaks from its next Hello on
  bool old_hello_ = false;                  // of an agent of the version before
  std::map<std::string, std::pair<std::string, int>> connections_;  // incarnation, number
  HeadConfig config_;
  ManualClock clock_;
  std::unique_ptr<HeadCore> head_;
  Outbox outbox_;
  std::map<std::string, Record> disk_;
  std::map<std::string, Record> written_;  // and what waits for it
  std::vector<std::string> set_aside_;     // keys that Boot is told of
  std::vector<AuditEntry> audit_;
  bool disk_works_ = true;
  std::vector<Effect> sent_;
  std::map<TailKey, SpilledTail> spilled_;
  uint64_t heartbeats_ = 0;
  int requests_ = 0;
};

}  // namespace gtrain::core
