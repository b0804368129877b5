// What it costs to lose one of n ranks in place, in messages between the head and each node: the real cores,
// one rank of n simulated ones killed, everything counted from its end until the others step again.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>

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
  int64_t time = 0;  // from the end of the rank to the first step of the others
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

// A job of so many ranks on machines of `of_each`, which may go on with one less.
Reform LoseOneOf(int ranks, int of_each) {
  Profile profile;
  profile.nodes = 0;
  profile.clients = 1;
  profile.usual_times = true;
  World world(1, profile);
  for (int i = 0; i < ranks / of_each; ++i) world.AddMachine(of_each);
  const std::string text = absl::StrCat("name: a\nrun: train\nresources: {cpus: 1}\nranks: {min: ", ranks / 2,
                                        ", max: ", ranks, "}\nelastic: {mode: in-place}\n");
  Program program;
  program.sdk = program.stays = true;
  program.letting_go = 10 * kMs;
  program.lets_go_late = program.ignores_term = 0;
  program.step_time = 2 * kSec;
  program.startup = kMin;  // who takes the place of the lost one comes later
  world.SetProgram(text, program);
  world.Boot();
  world.RunFor(5 * kSec);
  world.clients[0]->Ask(core::ClientSubmit{text, {}, "/runs/{job}"}, kMin, nullptr);
  const auto gang = [&](uint64_t generation) { return world.ranks.FindGang(JobId("a-1"), generation); };
  const auto steps = [&](uint64_t generation) {
    return gang(generation) != nullptr && gang(generation)->ticking && gang(generation)->stepped_at > 0 &&
           gang(generation)->step > 0;
  };
  EXPECT_TRUE(world.RunUntil([&] { return steps(1); }, 10 * kMin));
  world.RunFor(10 * kSec);
  if (!steps(1) || world.kernel.failed()) return {};
  EXPECT_EQ(gang(1)->world, ranks);
  Reform reform;
  world.network.on_sent = [&](const Connection& connection, Network::Direction direction,
                              const core::Message& message) {
    if (IsBeat(message) || connection.peer.role != core::Role::kNode) return;
    auto& side = direction == Network::kToHead ? reform.to_head : reform.from_head;
    Traffic& traffic = side[connection.machine];
    ++traffic.messages[KindOf(message)];
    // A grant of n ranks is encoded once, as the head does it; the others are small.
    if (std::holds_alternative<core::StartGeneration>(message)) {
      if (reform.grant_bytes == 0) reform.grant_bytes = wire::Encode(message).size();
      return;
    }
    traffic.bytes += wire::Encode(message).size();
  };
  const int64_t step = gang(1)->step, killed_at = world.kernel.now();
  world.ranks.KillProcess(gang(1)->ranks.at(0), keeper::Cause::kSignal, 0, 9);
  const auto goes_on = [&] { return steps(2) && gang(2)->step > step; };
  EXPECT_TRUE(world.RunUntil(goes_on, kMin)) << "the others go on";
  if (gang(2) != nullptr) reform.time = gang(2)->stepped_at - killed_at;
  for (const Violation& violation : world.kernel.violations())
    ADD_FAILURE() << violation.id << ": " << violation.text;
  return reform;
}

void CheckReform(int ranks, int of_each) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks");
  const Reform reform = LoseOneOf(ranks, of_each);
  const size_t machines = static_cast<size_t>(ranks / of_each);
  ASSERT_EQ(reform.to_head.size(), machines) << "each node takes part";
  ASSERT_EQ(reform.from_head.size(), machines);
  int most_up = 0, most_down = 0;
  size_t up_bytes = 0, down_bytes = 0;
  std::map<std::string, int> kinds;  // the most of each kind at any node
  for (const auto& [machine, traffic] : reform.from_head) {
    most_down = std::max(most_down, traffic.all());
    down_bytes = std::max(down_bytes, traffic.bytes);
    for (const auto& [kind, count] : traffic.messages)
      kinds["to a node: " + kind] = std::max(kinds["to a node: " + kind], count);
  }
  for (const auto& [machine, traffic] : reform.to_head) {
    most_up = std::max(most_up, traffic.all());
    up_bytes = std::max(up_bytes, traffic.bytes);
    for (const auto& [kind, count] : traffic.messages)
      kinds["of a node: " + kind] = std::max(kinds["of a node: " + kind], count);
  }
  std::string text;
  for (const auto& [kind, count] : kinds) absl::StrAppend(&text, "\n  ", kind, " ", count);
  std::printf(
      "%d ranks on %zu nodes: at most %d messages to a node (%zu bytes and a grant of %zu) and %d of one "
      "(%zu bytes); the "
      "others step %.1f s later%s\n",
      ranks, machines, most_down, down_bytes, reform.grant_bytes, most_up, up_bytes,
      static_cast<double>(reform.time) / 1e9, text.c_str());
  // To a node: the revoke, the grant, the table of the entry barrier, and that the exit was heard. Of a node:
  // the exit, that it has released its processes, the part of the barrier of all its ranks, and two words of
  // each rank: that it runs, and that it has joined.
  EXPECT_LE(most_down, 4);
  EXPECT_LE(most_up, 3 + 2 * of_each);
  EXPECT_EQ(kinds["to a node: StartGeneration"], 1);
  EXPECT_EQ(kinds["to a node: Revoke"], 1);
}

TEST(Reform, CostsANodeAsManyMessagesWhateverTheNumberOfRanks) {
  CheckReform(4, 2);
  CheckReform(64, 8);
  CheckReform(1024, 8);
}

TEST(Reform, OfTenThousandRanks) {
  if (std::getenv("GTRAIN_SOAK") == nullptr) GTEST_SKIP() << "takes minutes and gigabytes: GTRAIN_SOAK=1";
  CheckReform(10'000, 8);
}

}  // namespace
}  // namespace gtrain::sim
