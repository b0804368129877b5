#include "tests/sim/actor_fleet.h"

#include <malloc.h>

#include <algorithm>

#include "tests/sim/actor_world.h"

namespace gtrain::sim {
namespace {

constexpr int kFleetActors = 10'000, kFleetProcesses = 64, kFleetLost = 8;
constexpr int64_t kFleetWithin = 2 * kMin;  // each part

ActorProfile Quiet(int processes) {
  ActorProfile profile;
  profile.processes = processes;
  profile.runs_max = kMs;
  return profile;
}

size_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

class Fleet {
 public:
  Fleet(uint64_t seed, int processes) : world(seed, Quiet(processes)) { world.Begin(); }

  void Expect(const std::function<bool()>& condition, const char* what) {
    if (!world.RunUntil(condition, kFleetWithin)) world.kernel.Fail("fleet", absl::StrCat(what, " in vain"));
  }
  void SpawnAll(std::optional<int> rank) {
    Begin();
    ActorWorld::Spawning how;
    how.placement.rank = rank;
    for (int i = 0; i < kFleetActors; ++i) world.Spawn(0, how);
    Expect(
        [this] {
          return std::ranges::all_of(world.truth.actors(), [](auto& one) { return one.spawned.has_value(); });
        },
        "spawns are awaited");
    Say("spawned", kFleetActors);
    for (const ActorTruth::Actor& one : world.truth.actors()) {
      if (one.spawned && !one.spawned->ok()) world.kernel.Fail("fleet", one.spawned->ToString());
    }
  }
  void CallAll(int caller, const char* what) {
    Begin();
    const size_t first = world.truth.calls().size();
    for (int actor = 0; actor < kFleetActors; ++actor) world.Call(caller, actor, ActorTruth::kAdd, kMin);
    Expect([this] { return world.truth.unanswered() == 0; }, "answers are awaited");
    Say(what, kFleetActors);
    for (size_t call = first; call < world.truth.calls().size(); ++call) {
      if (world.truth.calls()[call].code != absl::StatusCode::kOk)
        world.kernel.Fail("fleet", absl::StrCat("call ", call, " came to ",
                                                absl::StatusCodeToString(world.truth.calls()[call].code)));
    }
  }
  void LoseSome() {
    size_t before = 0, lost = 0;
    for (const ActorTruth::Actor& one : world.truth.actors()) before += one.alive;
    for (int process = 1; process <= kFleetLost; ++process) world.Kill(process);
    for (const ActorTruth::Actor& one : world.truth.actors()) lost += one.alive == 0 ? 1 : 0;
    Begin();
    world.Generation(/*replace=*/false);
    Expect(
        [this] {
          return std::ranges::all_of(world.truth.actors(), [](auto& one) { return one.alive == 1; });
        },
        "lost actors are awaited");
    Say(absl::StrCat("made anew of those lost with ", kFleetLost, " processes").c_str(),
        static_cast<int>(lost));
    world.Run(world.profile.told_within);  // what is sent before is lost with its process
  }
  // What goes with a process, an actor.
  double BytesOf(int process) {
    const size_t before = HeapBytes();
    world.Kill(process);
    return (static_cast<double>(before) - static_cast<double>(HeapBytes())) / kFleetActors;
  }

  ActorWorld world;
  std::vector<std::string> lines;

 private:
  void Begin() {
    counts_ = world.net.counts();
    begun_ = world.kernel.now();
  }
  void Say(const char* what, int count) {
    const ActorNet::Counts& now = world.net.counts();
    const auto each = [&](uint64_t after, uint64_t before) {
      return static_cast<double>(after - before) / count;
    };
    lines.push_back(
        absl::StrFormat("%s: %d in %.3f s; each %.2f calls and %.2f answers between processes, in %.3f "
                        "messages and %.0f bytes",
                        what, count, static_cast<double>(world.kernel.now() - begun_) / 1e9,
                        each(now.calls, counts_.calls), each(now.answers, counts_.answers),
                        each(now.messages, counts_.messages), each(now.bytes, counts_.bytes)));
  }
  ActorNet::Counts counts_;
  int64_t begun_ = 0;
};

}  // namespace

FleetResult RunFleet(uint64_t seed) {
  FleetResult result;
  {
    Fleet fleet(seed, kFleetProcesses);
    fleet.SpawnAll({});
    fleet.CallAll(0, "called by the owner");
    fleet.CallAll(kFleetLost + 1, "called by another process");
    fleet.LoseSome();
    fleet.CallAll(0, "called by the owner");
    fleet.CallAll(kFleetLost + 1, "called by another process");
    fleet.world.truth.CheckRest();
    result.lines = fleet.lines;
    result.violations = fleet.world.kernel.violations();
  }
  Fleet two(seed, 2);
  two.SpawnAll(1);
  two.CallAll(0, "called");
  two.world.Run(kSec);  // and what was answered is acknowledged
  const double host = two.BytesOf(1), owner = two.BytesOf(0);
  result.lines.push_back(
      host > 0 ? absl::StrFormat("memory an actor: %.0f bytes where it is, %.0f at its owner", host, owner)
               : "memory an actor: not measured under this allocator");
  for (const Violation& violation : two.world.kernel.violations()) result.violations.push_back(violation);
  return result;
}

}  // namespace gtrain::sim
