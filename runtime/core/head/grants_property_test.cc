// Property test of grants: ranks are killed, machines are lost and come back, and others come up beside them,
// all at random, in jobs of many shapes that go on in place. What holds of each grant is checked: a process
// holds its memory and its GPUs, so it cannot go on anywhere else, and a job has the size that it asked for.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "gmock/gmock.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

constexpr int kSeeds = 30;
constexpr int kRounds = 200;

struct Shape {
  bool nodes = false;  // the job counts nodes, each with as many ranks
  bool gpus = false;   // each rank has one, and CPUs are plenty
  int machines = 4;
  int each = 2;  // ranks that a machine has room for
  int min = 2, max = 4, spares = 0;
  int unit = 1;  // ranks of a copy of the model
};

class GrantsPropertyTest : public HeadTestWorld, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    HeadTestWorld::SetUp();
    Draw();
    config_.parse_job = [this](absl::string_view) -> absl::StatusOr<spec::JobSpec> { return Spec(); };
    Boot();
    gpus_hello_ = shape_.gpus ? shape_.each : 0;
    for (int i = 0; i < shape_.machines; ++i) Join(absl::StrCat(i));
    job_ = Submit("train");
  }

  bool OneIn(int count) { return rng_.Below(static_cast<uint64_t>(count)) == 0; }
  int From(int least, int most) {
    return least + static_cast<int>(rng_.Below(static_cast<uint64_t>(most - least + 1)));
  }

  void Draw() {
    shape_.machines = From(3, 7);
    shape_.each = From(1, 2) * 2;
    shape_.gpus = !OneIn(3);
    shape_.nodes = OneIn(2);
    shape_.unit = shape_.nodes ? 1 : 1 << From(0, 2);
    // A third of the machines may be lost at a time, and the job is to go on with what is left.
    const int all = shape_.nodes ? shape_.machines : shape_.machines * shape_.each / shape_.unit;
    shape_.max = From(std::max(1, all / 2), all) * shape_.unit;
    shape_.min = From(1, std::max(1, all / 3)) * shape_.unit;
    shape_.spares = From(0, 2);
  }

  spec::JobSpec Spec() const {
    spec::JobSpec spec;
    spec.name = "train";
    spec.in_place = true;
    spec.overlap = spec::Overlap::kAllow;
    spec.restart.budget = 1'000'000;
    spec.spares = shape_.spares;
    if (shape_.gpus) spec.resources.gpus = 1;
    if (shape_.unit > 1) spec.mesh = {{"dp", std::nullopt}, {"tp", shape_.unit}};
    if (shape_.nodes) {
      spec.nodes = spec::Range{shape_.min, shape_.max};
      spec.ranks_per_node = shape_.each;
    } else {
      spec.ranks = spec::Range{shape_.min, shape_.max};
    }
    return spec;
  }

  bool Up(const NodeId& node) const { return !down_.contains(node.value); }
  int Count() const { return static_cast<int>(grant_.ranks.size() + grant_.waiting.size()); }
  int Members() const { return static_cast<int>(grant_.ranks.size()); }
  const RankPlace& Place(int number) const { return PlaceOfRank(grant_, number); }
  bool Revoked() const { return head_->RecordOf(job_)->revoked >= grant_.generation; }

  void Join(const std::string& node) {
    Hello(node, shape_.gpus ? 64 : shape_.each, {}, absl::StrCat(++lives_[node]));
  }
  void Beat(absl::Duration time) {
    const Instant end = clock_.Now() + time;
    while (clock_.Now() < end) {
      clock_.Advance(absl::Seconds(1));
      for (int i = 0; i < shape_.machines; ++i) {
        if (Up(NodeId(absl::StrCat(i)))) FromNode(absl::StrCat(i), AgentHeartbeat{++heartbeats_, {}, {}});
      }
      Do(head_->Step(Tick{}, clock_.Now()));
    }
  }

  // True: there is a newer grant, and it has been checked.
  bool TakeGrant() {
    std::optional<GenerationGrant> newest;
    for (const auto& [node, start] : Sent<StartGeneration>()) {
      if (!newest || newest->generation < start.grant.generation) newest = start.grant;
    }
    sent_.clear();
    if (!newest || newest->generation <= grant_.generation) return false;
    grant_ = *std::move(newest);
    SCOPED_TRACE(absl::StrCat("generation ", grant_.generation.value, " of ",
                              shape_.nodes ? "nodes " : "ranks ", shape_.min, "..", shape_.max));
    CheckProcesses();
    CheckNumbers();
    CheckSize();
    return true;
  }

  void CheckProcesses() {
    std::map<ProcessId, Process> next;
    for (int number = 0; number < Count(); ++number) {
      const RankPlace& place = Place(number);
      const ProcessId id = ProcessOf(grant_, number);
      Process process{place.node, place.gpus, std::nullopt};
      if (number < Members() && shape_.unit > 1) process.cell = number % shape_.unit;
      const auto was = alive_.find(id);
      if (was != alive_.end()) {
        EXPECT_EQ(was->second.node, place.node) << "process of rank " << number << " is elsewhere";
        EXPECT_EQ(was->second.gpus, place.gpus) << "process of rank " << number << " has other GPUs";
        if (was->second.cell && process.cell) {
          EXPECT_EQ(*was->second.cell, *process.cell) << "rank " << number << " holds another part";
        }
        if (was->second.cell) process.cell = was->second.cell;
      } else if (place.process.generation.value != 0) {
        EXPECT_FALSE(Up(place.node)) << "process of rank " << number << " is nowhere";
      }
      EXPECT_TRUE(next.emplace(id, process).second) << "process of rank " << number << " is named twice";
    }
    alive_ = std::move(next);
  }

  void CheckNumbers() {
    std::map<NodeId, std::set<int>> local;
    std::set<std::pair<NodeId, int>> gpus;
    for (int number = 0; number < Count(); ++number) {
      const RankPlace& place = Place(number);
      EXPECT_EQ(place.rank, number);
      EXPECT_TRUE(local[place.node].insert(place.local_rank).second) << "rank " << number;
      EXPECT_EQ(place.gpus.size(), shape_.gpus ? 1u : 0u);
      for (const int gpu : place.gpus)
        EXPECT_TRUE(gpus.emplace(place.node, gpu).second) << "GPU " << gpu << " is given twice";
    }
    for (const auto& [node, numbers] : local)
      EXPECT_EQ(*numbers.rbegin(), std::ssize(numbers) - 1) << "local ranks of " << node;
  }

  void CheckSize() {
    EXPECT_EQ(grant_.world_size, Members());
    std::map<NodeId, int> of_node;
    for (const RankPlace& place : grant_.ranks) ++of_node[place.node];
    const int size = shape_.nodes ? static_cast<int>(of_node.size()) : Members();
    EXPECT_GE(size, shape_.min);
    EXPECT_LE(size, shape_.max);
    EXPECT_EQ(size % shape_.unit, 0);
    for (const auto& [node, ranks] : of_node) {
      EXPECT_TRUE(!shape_.nodes || ranks == shape_.each) << node << " has " << ranks << " ranks";
    }
  }

  // Machines that were lost come back meanwhile, in another life.
  void AwaitGrant() {
    for (int i = 0; i < 600; ++i) {
      if (TakeGrant()) return;
      Beat(absl::Seconds(1));
      if (down_.empty() || !OneIn(8)) continue;
      const std::string node = *down_.begin();
      down_.erase(node);
      Join(node);
    }
    FAIL() << "no grant follows generation " << grant_.generation.value << ": " << Status(job_).at("reason");
  }

  RankStatus StatusOf(int number, RankState state) const {
    RankStatus status{job_, grant_.generation, number, 1000 + number, state};
    status.stays = true;
    return status;
  }
  void Is(int number, RankState state) {
    const NodeId& node = Place(number).node;
    if (Up(node)) FromNode(node.value, RanksStarted{job_, grant_.generation, {StatusOf(number, state)}});
  }

  // All run. Mostly the members make a step, and some of those that wait are ready. Twice without a first
  // step would end the job.
  void ComeUp() {
    dead_.clear();
    ready_.clear();
    for (int number = 0; number < Count(); ++number) Is(number, RankState::kRunning);
    if (step_ == 0 || !OneIn(10)) {
      for (int rank = 0; rank < Members(); ++rank) Is(rank, RankState::kJoined);
      ++step_;
      for (int rank = 0; rank < Members(); ++rank) {
        RankStatus status = StatusOf(rank, RankState::kJoined);
        status.step = step_;
        if (Up(Place(rank).node))
          FromNode(Place(rank).node.value, AgentHeartbeat{++heartbeats_, {status}, {}});
      }
    }
    if (OneIn(2)) {
      for (int number = Members(); number < Count(); ++number) {
        if (!OneIn(3)) Ready(number);
      }
    }
    Beat(absl::Seconds(From(0, 2)));
  }
  void Ready(int number) {
    if (!Up(Place(number).node) || dead_.contains(number)) return;
    ready_.insert(number);
    Is(number, RankState::kJoined);
  }

  void KillOne(int number) {
    const NodeId& node = Place(number).node;
    if (Up(node) && dead_.insert(number).second) Kill(node.value, job_, grant_.generation.value, number);
  }
  void Lose() {
    if (!OneIn(3)) {
      for (int kills = From(1, 3); kills > 0; --kills) KillOne(From(0, Count() - 1));
    }
    if (!OneIn(10) || std::ssize(down_) >= shape_.machines / 3) return;
    down_.insert(absl::StrCat(From(0, shape_.machines - 1)));
    Beat(absl::Seconds(15));
  }

  // What nothing has ended yet: those that wait join, or the next rank is killed.
  void End() {
    for (int number = Members(); number < Count() && !Revoked(); ++number) Ready(number);
    for (int rank = 0; rank < Members() && !Revoked(); ++rank) KillOne(rank);
    if (!Revoked()) Beat(absl::Seconds(30));
  }

  // Each machine says which of its processes wait for the next generation.
  void LetGo() {
    std::map<NodeId, GenerationGone> gone;
    for (const NodePlace& place : grant_.nodes) {
      if (Up(place.node)) gone[place.node] = GenerationGone{job_, grant_.generation};
    }
    for (int number = 0; number < Count(); ++number) {
      const NodeId& node = Place(number).node;
      const ProcessId id = ProcessOf(grant_, number);
      if (dead_.contains(number) || !Up(node)) {
        alive_.erase(id);
        continue;
      }
      const bool comes = number >= Members() && !ready_.contains(number);
      (comes ? gone[node].coming : gone[node].kept).push_back(id);
    }
    for (const auto& [node, word] : gone) FromNode(node.value, word);
  }

  struct Process {
    NodeId node;
    std::vector<int> gpus;
    std::optional<int> cell;  // of a member: the part of the model that it holds
  };
  Rng rng_{static_cast<uint64_t>(GetParam())};
  Shape shape_;
  JobId job_;
  GenerationGrant grant_;               // the newest
  std::map<ProcessId, Process> alive_;  // of those that it names
  std::map<std::string, int> lives_;    // of each machine
  std::set<std::string> down_;          // machines
  std::set<int> dead_, ready_;          // of its ranks, and of those that wait
  int64_t step_ = 0;
};

TEST_P(GrantsPropertyTest, WhoGoesOnKeepsItsPlaceAndTheJobItsSize_P1_N7) {
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    AwaitGrant();
    if (HasFailure()) return;
    ComeUp();
    Lose();
    End();
    LetGo();
  }
}

INSTANTIATE_TEST_SUITE_P(Seed, GrantsPropertyTest, ::testing::Range(1, kSeeds + 1));

}  // namespace
}  // namespace gtrain::core
