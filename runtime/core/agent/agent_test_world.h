// An agent's core with everything around it made up, as its tests use it: what it is asked, and what it then
// tells the head and commands the keepers.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_core.h"

namespace gtrain::core {

inline const NodeId kMe("00000000000000aa");
inline const NodeId kOther("00000000000000bb");
inline const JobId kJob("train-1");
inline constexpr char kSealed[] = "bytes that only a newer head can read";

// An agent of that node without any wishes, which reads every job as an empty one.
inline AgentConfig PlainAgent() {
  AgentConfig config;
  config.cluster = ClusterId("c1");
  config.node = kMe;
  config.incarnation = Incarnation("boot-1");
  config.parse_spec = [](absl::string_view) -> absl::StatusOr<spec::JobSpec> { return spec::JobSpec(); };
  return config;
}

// What a keeper says that holds rank 0, process 100, of generation 1 of the job.
inline FromKeeper KeeperHoldsOneRank() {
  keeper::GenerationHeld held;
  held.generation = 1;
  held.note = R"({"run_dir":"/run","world_size":1,"timeline":1,"spec":"spec"})";
  held.ranks = {{0, 100, 5, true, false}};
  keeper::State state;
  state.job = kJob.value;
  state.generations = {held};
  return {kJob, state};
}

inline AgentWelcome WelcomeOf(uint64_t epoch = 5) {
  return {ClusterId("c1"), {epoch}, kMe, absl::Seconds(1), absl::Seconds(120)};
}

// The messages to the head of that kind among the effects of a step.
template <typename T>
std::vector<T> SentBy(const AgentStep& step) {
  std::vector<T> found;
  for (const AgentEffect& effect : step.effects) {
    const auto* to_head = std::get_if<ToHead>(&effect);
    const T* message = to_head == nullptr ? nullptr : std::get_if<T>(&to_head->message);
    if (message != nullptr) found.push_back(*message);
  }
  return found;
}

// The commands to keepers of that kind among the effects of a step.
template <typename T>
std::vector<T> CommandsOf(const AgentStep& step) {
  std::vector<T> found;
  for (const AgentEffect& effect : step.effects) {
    const auto* to_keeper = std::get_if<ToKeeper>(&effect);
    const T* command = to_keeper == nullptr ? nullptr : std::get_if<T>(&to_keeper->command);
    if (command != nullptr) found.push_back(*command);
  }
  return found;
}

// An agent with a job of its own making; what it may do and holds is in the members.
class AgentCoreTest : public ::testing::Test {
 protected:
  AgentCoreTest() : core_(Config()) {}

  AgentConfig Config() {
    AgentConfig config = PlainAgent();
    config.near_memory = "/dev/shm/gtrain-me";
    config.near_bytes_max = 1000;
    config.hostname = "host-a";
    config.own_env = {{"GTRAIN_CHECKPOINT_READ_ONLY", "1"},  // of an outer launch
                      {"GTRAIN_CHECKPOINT_MEMORY_MAX", "1"}, {"PATH", "/own/bin"}, {"HOME", "/home/me"},
                      {"FROM_AGENT", "agent-secret"},        {"OTHER", "x"}};
    config.parse_spec = [this](absl::string_view text) -> absl::StatusOr<spec::JobSpec> {
      if (text != "spec") return absl::InvalidArgumentError("bad text");
      return spec_;
    };
    config.find_program = [](const std::string& name, const std::string& path) {
      return absl::StrCat(path, "/", name);
    };
    config.job_hash = [](const spec::JobSpec&) { return "hash"; };
    config.unpack_grant = [this](const std::string& bytes) -> absl::StatusOr<GenerationGrant> {
      if (bytes != kSealed) return absl::InvalidArgumentError("not a grant");
      return Grant(1, 1, 1);
    };
    config.too_many_ranks = [this](size_t ranks) -> std::string {
      return ranks > ranks_max_ ? absl::StrCat(ranks, " are too many") : "";
    };
    config.make_token = [this] { return std::string(30, 't') + absl::StrCat(10 + tokens_++); };
    for (int i = 0; i < gpus_; ++i) config.inventory.gpus.push_back({absl::StrCat("GPU-", i), "Fake"});
    config.inventory.cpu_infos = {{8, 0}, {12, 0}};
    return config;
  }

  // `local` ranks here, the others on another node.
  GenerationGrant Grant(uint64_t generation, int local, int world) {
    GenerationGrant grant;
    grant.job = kJob;
    grant.generation = {generation};
    grant.timeline = {3};
    grant.spec_text = "spec";
    grant.run_dir = "/run";
    grant.master_address = "10.0.0.1";
    grant.master_port = 23456;
    grant.world_size = world;
    grant.restart_count = 2;
    grant.nodes = {{kMe, "10.0.0.1", "host-a"}};
    if (world > local) grant.nodes.push_back({kOther, "10.0.0.2", "host-b"});
    for (int rank = 0; rank < world; ++rank) {
      RankPlace place;
      place.rank = rank;
      place.node = rank < local ? kMe : kOther;
      place.local_rank = rank < local ? rank : rank - local;
      grant.ranks.push_back(place);
    }
    return grant;
  }

  std::vector<AgentEffect> Step(AgentEvent event) {
    if (auto* from = std::get_if<FromHead>(&event)) from->facts = facts_;
    last_ = core_.Step(event, now_);
    return last_.effects;
  }
  void Advance(absl::Duration d) { now_ = now_ + d; }
  void Welcome(uint64_t epoch = 5) {
    Step(HeadUp{"10.0.0.1"});
    Step(FromHead{WelcomeOf(epoch)});
  }
  void StartIt(uint64_t generation, int local, int world) {
    Step(FromHead{StartGeneration{{5}, Grant(generation, local, world)}});
  }
  void FromRank(int rank, const std::string& json, uint64_t id = 1, uint64_t generation = 1) {
    Step(FromKeeper{kJob, keeper::RelayUp{generation, rank, id, json}});
  }
  void Exit(int rank, int code, uint64_t generation = 1) {
    keeper::Exited exit;
    exit.generation = generation;
    exit.rank = rank;
    exit.code = code;
    exit.message = "exited";
    Step(FromKeeper{kJob, exit});
  }

  template <typename T>
  std::vector<T> Sent() const {
    return SentBy<T>(last_);
  }
  template <typename T>
  std::vector<T> Commands() const {
    return CommandsOf<T>(last_);
  }
  static std::map<std::string, std::string> EnvOf(const keeper::StartRank& start) {
    return {start.env.begin(), start.env.end()};
  }

  spec::JobSpec spec_ = [] {
    spec::JobSpec spec;
    spec.name = "train";
    spec.run = {"python", "train.py"};
    spec.workdir = "/work";
    return spec;
  }();
  StartFacts facts_ = {.secrets = {{"/secret", "file-secret"}}, .run_dir = {}};  // of each grant
  size_t ranks_max_ = 100'000;
  int tokens_ = 0;
  int gpus_ = 0;
  Instant now_{1'000'000'000};
  AgentCore core_;
  AgentStep last_;
};

}  // namespace gtrain::core
