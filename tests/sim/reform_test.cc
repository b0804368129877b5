// What it costs to lose one of n ranks in place, or to have some more, in messages between the head and each
// node: the real cores and n simulated ranks, everything counted from the end of one, or from the word that
// those that come are ready, until all step again.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "runtime/wire/codec.h"
#include "tests/sim/world.h"

namespace gtrain::sim {
namespace {

struct Traffic {
  std::map<std::string, int> messages;  // by kind
  size_t bytes = 0;
  int all() const {
    int sum = 0;
    for (const auto& [kind, count] : messages) sum += count;
    return sum;
  }
};

struct Reform {
  size_t grant_bytes = 0;
  std::map<int, Traffic> to_head, from_head;  // by machine
};

// By the name that a trace has for it.
std::string KindOf(const core::Message& message) {
  const std::string text = Describe(message);
  return text.substr(0, text.find(' '));
}

bool IsBeat(const core::Message& message) {
  return std::holds_alternative<core::AgentHeartbeat>(message) ||
         std::holds_alternative<core::HeartbeatAck>(message);
}

// A job in place of so many ranks on machines of `of_each`, which trains.
class Job {
 public:
  // It begins on all machines but `missing`. A process takes about `startup` to come up.
  Job(int ranks, int of_each, int missing, int64_t startup) : of_each_(of_each), world_(1, AProfile()) {
    for (int i = 0; i < ranks / of_each - missing; ++i) world_.AddMachine(of_each);
    const std::string text =
        absl::StrCat("name: a\nrun: train\nresources: {cpus: 1}\nranks: {min: ", ranks / 2, ", max: ", ranks,
                     "}\nelastic: {mode: in-place}\n");
    Program program;
    program.sdk = program.stays = true;
    program.letting_go = 10 * kMs;
    program.lets_go_late = program.ignores_term = 0;
    program.step_time = 2 * kSec;
    program.startup = startup;
    world_.SetProgram(text, program);
    world_.Boot();
    world_.RunFor(5 * kSec);
    world_.clients[0]->Ask(core::ClientSubmit{text, {}, "/runs/{job}"}, kMin, nullptr);
    EXPECT_TRUE(world_.RunUntil([&] { return Steps(1); }, 10 * kMin));
    world_.RunFor(10 * kSec);
    trains_ = Steps(1) && !world_.kernel.failed();
  }
  ~Job() {
    for (const Violation& violation : world_.kernel.violations())
      ADD_FAILURE() << violation.id << ": " << violation.text;
  }

  bool trains() const { return trains_; }
  Gang& OfGeneration(uint64_t generation) { return *world_.ranks.FindGang(JobId("a-1"), generation); }
  // What is sent between head and nodes, from now or from the first message `since` on.
  void Count(Reform* reform, const std::string& since) {
    world_.network.on_sent = [this, reform, since, counts = since.empty()](
                                 const Connection& connection, Network::Direction direction,
                                 const core::Message& message) mutable {
      if (IsBeat(message) || connection.peer.role != core::Role::kNode) return;
      counts = counts || KindOf(message) == since;
      if (!counts) return;
      auto& side = direction == Network::kToHead ? reform->to_head : reform->from_head;
      Traffic& traffic = side[connection.machine];
      ++traffic.messages[KindOf(message)];
      // A grant of n ranks is encoded once, as the head does it; the others are small.
      if (std::holds_alternative<core::StartGeneration>(message)) {
        if (reform->grant_bytes == 0) reform->grant_bytes = wire::Encode(message).size();
        return;
      }
      traffic.bytes += wire::Encode(message).size();
    };
  }
  void LoseARank() { world_.ranks.KillProcess(OfGeneration(1).ranks.at(0), keeper::Cause::kSignal, 0, 9); }
  void AddAMachine() {
    world_.AddMachine(of_each_);
    world_.machines.back()->StartAgent();
  }
  // Until a later generation than the first, of so many ranks, has made a step more than `step`.
  void AwaitStepAfter(int64_t step, int ranks) {
    const auto goes_on = [&] {
      for (uint64_t generation = 2; generation <= 4; ++generation) {
        if (Steps(generation) && OfGeneration(generation).step > step &&
            OfGeneration(generation).world == ranks)
          return true;
      }
      return false;
    };
    EXPECT_TRUE(world_.RunUntil(goes_on, 10 * kMin)) << "all go on";
  }

 private:
  static Profile AProfile() {
    Profile profile;
    profile.nodes = 0;
    profile.clients = 1;
    profile.usual_times = true;
    return profile;
  }
  bool Steps(uint64_t generation) {
    const Gang* gang = world_.ranks.FindGang(JobId("a-1"), generation);
    return gang != nullptr && gang->ticking && gang->stepped_at > 0 && gang->step > 0;
  }

  const int of_each_;
  World world_;
  bool trains_ = false;
};

Reform LoseOneOf(int ranks, int of_each) {
  Reform reform;
  Job job(ranks, of_each, 0, kMin);  // who takes the place of the lost one comes later
  if (!job.trains()) return {};
  EXPECT_EQ(job.OfGeneration(1).world, ranks);
  job.Count(&reform, "");
  const int64_t step = job.OfGeneration(1).step;
  job.LoseARank();
  job.AwaitStepAfter(step, ranks - 1);
  return reform;
}

// The ranks of a machine that comes new join the others, which stand still for them behind a step.
Reform JoinTo(int ranks, int of_each) {
  Reform reform;
  Job job(ranks, of_each, 1, 2 * kSec);
  if (!job.trains()) return {};
  EXPECT_EQ(job.OfGeneration(1).world, ranks - of_each);
  job.Count(&reform, "PauseRanks");
  const int64_t step = job.OfGeneration(1).step;
  job.AddAMachine();
  job.AwaitStepAfter(step, ranks);
  return reform;
}

// The most of each kind of message that any node gets or sends, as "to a node: Revoke", and their sums.
struct MostOfANode {
  std::map<std::string, int> kinds;
  int down = 0, up = 0;
  explicit MostOfANode(const Reform& reform) {
    size_t up_bytes = 0, down_bytes = 0;
    Take("to a node: ", reform.from_head, &down, &down_bytes);
    Take("of a node: ", reform.to_head, &up, &up_bytes);
    std::string text;
    for (const auto& [kind, count] : kinds) absl::StrAppend(&text, "\n  ", kind, " ", count);
    std::printf(
        "%zu nodes: at most %d messages to a node (%zu bytes and a grant of %zu) and %d of one (%zu "
        "bytes)%s\n",
        reform.from_head.size(), down, down_bytes, reform.grant_bytes, up, up_bytes, text.c_str());
  }

 private:
  void Take(const std::string& way, const std::map<int, Traffic>& of, int* messages, size_t* bytes) {
    for (const auto& [machine, traffic] : of) {
      *messages = std::max(*messages, traffic.all());
      *bytes = std::max(*bytes, traffic.bytes);
      for (const auto& [kind, count] : traffic.messages)
        kinds[way + kind] = std::max(kinds[way + kind], count);
    }
  }
};

void CheckLoss(int ranks, int of_each) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks, one is lost");
  const Reform reform = LoseOneOf(ranks, of_each);
  const size_t machines = static_cast<size_t>(ranks / of_each);
  ASSERT_EQ(reform.to_head.size(), machines) << "each node takes part";
  ASSERT_EQ(reform.from_head.size(), machines);
  std::printf("%d ranks, one is lost; ", ranks);
  MostOfANode most(reform);
  // To a node: the revoke, the grant, the table of the entry barrier, and that the exit was heard. Of a node:
  // the exit, that it has released its processes, the part of the barrier of all its ranks, and two words of
  // each rank: that it runs, and that it has joined.
  EXPECT_LE(most.down, 4);
  EXPECT_LE(most.up, 3 + 2 * of_each);
  EXPECT_EQ(most.kinds["to a node: StartGeneration"], 1);
  EXPECT_EQ(most.kinds["to a node: Revoke"], 1);
}

void CheckJoin(int ranks, int of_each) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks, some of them join");
  const Reform reform = JoinTo(ranks, of_each);
  std::printf("%d ranks, some of them join; ", ranks);
  MostOfANode most(reform);
  int asked = 0;
  for (const auto& [machine, traffic] : reform.from_head)
    asked += static_cast<int>(traffic.messages.count("PauseRanks"));
  EXPECT_EQ(asked, 1) << "rank 0 tells the others between two steps";
  EXPECT_EQ(most.kinds["to a node: PauseRanks"], 1);
  EXPECT_EQ(most.kinds["to a node: StartGeneration"], 1);
  EXPECT_EQ(most.kinds["to a node: Revoke"], 1);
  EXPECT_LE(most.down, 4);
  // With the word that they stand still, and what rank 0 says of its samples.
  EXPECT_LE(most.up, 4 + 2 * of_each);
}

TEST(Reform, CostsANodeAsManyMessagesWhateverTheNumberOfRanks) {
  for (const auto& [ranks, of_each] : {std::pair(4, 2), std::pair(64, 8), std::pair(1024, 8)}) {
    CheckLoss(ranks, of_each);
    CheckJoin(ranks, of_each);
  }
}

TEST(Reform, OfTenThousandRanks) {
  if (std::getenv("GTRAIN_SOAK") == nullptr) GTEST_SKIP() << "takes minutes and gigabytes: GTRAIN_SOAK=1";
  CheckLoss(10'000, 8);
  CheckJoin(10'000, 8);
}

}  // namespace
}  // namespace gtrain::sim
