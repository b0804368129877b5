// A head whose jobs go on in place, for tests of what comes up beside their generations.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "gmock/gmock.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {

class NewcomersTest : public HeadTestWorld {
 protected:
  GenerationGrant Newest() const {
    const auto grants = Sent<StartGeneration>();
    GT_CHECK(!grants.empty());
    return grants.back().second.grant;
  }
  static std::vector<ProcessId> Processes(const std::vector<RankPlace>& places) {
    std::vector<ProcessId> processes;
    for (const RankPlace& place : places) processes.push_back(place.process);
    return processes;
  }
  void IsNow(const std::string& node, const JobId& job, uint64_t generation, int rank, RankState state) {
    FromNode(node, RanksStarted{job, {generation}, {{job, {generation}, rank, 200 + rank, state}}});
  }
  // The ranks say that their program can go on, and report a step.
  void StayAndStep(const JobId& job, uint64_t generation, int64_t step) {
    for (const RankPlace& place : Newest().ranks) {
      RankStatus status{job, {generation}, place.rank, 200 + place.rank, RankState::kJoined};
      status.stays = true;
      FromNode(place.node.value, RanksStarted{job, {generation}, {status}});
    }
    for (const RankPlace& place : Newest().ranks) {
      RankStatus status = Step(job, generation, place.rank, step);
      status.stays = true;
      FromNode(place.node.value, AgentHeartbeat{++beats_, {status}, {}});
    }
  }
  // Two ranks on two machines and, once they are known to stay, a spare in the second generation.
  JobId TwoAndASpare() {
    Hello("1", 2);
    Hello("2", 2);
    const JobId job = Submit("train 2 2 in-place spare");
    EXPECT_THAT(Newest().waiting, ::testing::IsEmpty()) << "nobody knows yet whether the program stays";
    const std::string node = Newest().ranks[0].node.value;
    StartRanks(job);
    StayAndStep(job, 1, 5);
    EXPECT_THAT(Sent<Revoke>(), ::testing::SizeIs(1));
    FromNode(node, GenerationGone{job, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
    EXPECT_EQ(Newest().world_size, 2);
    EXPECT_THAT(Newest().waiting, ::testing::SizeIs(1));
    StartRanks(job);
    IsNow(Newest().waiting[0].node.value, job, 2, 2, RankState::kJoined);
    StayAndStep(job, 2, 6);
    return job;
  }
  // Its members have come to the newest generation.
  void AllJoin(const JobId& job) {
    for (const RankPlace& place : Newest().ranks)
      IsNow(place.node.value, job, Newest().generation.value, place.rank, RankState::kJoined);
  }
  // All of the newest generation but these waits for the next one.
  void GoneBut(const std::vector<int>& dead) {
    const GenerationGrant last = Newest();
    for (const NodePlace& node : last.nodes) {
      GenerationGone gone{last.job, last.generation};
      for (int number = 0; number < static_cast<int>(last.ranks.size() + last.waiting.size()); ++number) {
        if (PlaceOfRank(last, number).node == node.node && std::ranges::count(dead, number) == 0)
          gone.kept.push_back(ProcessOf(last, number));
      }
      FromNode(node.node.value, gone);
    }
  }
  // Members of a generation report a step.
  void Steps(const JobId& job, uint64_t generation, int64_t step) {
    for (const RankPlace& place : Newest().ranks)
      FromNode(place.node.value, AgentHeartbeat{++beats_, {Step(job, generation, place.rank, step)}, {}});
  }
  // Four ranks on two machines, of which the first has been killed: three go on.
  JobId ThreeGoOn(const std::string& spec, absl::Duration step_time = absl::ZeroDuration()) {
    Hello("1", 2);
    Hello("2", 2);
    const JobId job = Submit(spec);
    StartRanks(job);
    Steps(job, 1, 5);
    if (step_time > absl::ZeroDuration()) {
      Pass(step_time, {"1", "2"});
      Steps(job, 1, 6);
    }
    sent_.clear();
    Kill("1", job, 1, 0);
    FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
    FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
    return job;
  }
  // Of those three another one is killed, while who was to join them comes up: two go on.
  JobId TwoGoOn() {
    const JobId job = ThreeGoOn("train 2 4 in-place");
    StartRanks(job);
    IsNow("1", job, 2, 3, RankState::kRunning);
    Steps(job, 2, 8);
    Kill("1", job, 2, 0);
    FromNode("1", GenerationGone{job, {2}, true, "", {}, {{{2}, 3}}});
    FromNode("2", GenerationGone{job, {2}, true, "", {{{1}, 2}, {{1}, 3}}});
    return job;
  }
  std::vector<NodeId> GrantsNodes() const {
    std::vector<NodeId> nodes;
    for (const NodePlace& place : last_.nodes) nodes.push_back(place.node);
    return nodes;
  }
  static ProcessId ProcessIn(const GenerationGrant& grant, int rank) {
    const ProcessId& process = grant.ranks[static_cast<size_t>(rank)].process;
    return process.generation.value > 0 ? process : ProcessId{grant.generation, rank};
  }
  uint64_t beats_ = 100;
  GenerationGrant last_;
};

}  // namespace gtrain::core
