#include "tests/sim/actor_world.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "base/check.h"

namespace gtrain::sim {
namespace {

constexpr char kActorType[] = "Log";
constexpr int64_t kTurnMax = 50'000;       // until a thread that has something to do goes on
constexpr uint64_t kTurnsMax = 2'000'000;  // of all processes in kTurnsIn
constexpr int64_t kTurnsIn = kSec;
constexpr int64_t kActorRest = 150 * kSec;  // longer than any deadline, and than a spawn that is made again

const char* const kActorFaults[] = {"kill", "break", "cut", "give-up", "pause"};
static_assert(std::size(kActorFaults) == static_cast<size_t>(ActorFault::kCount));

double DrawAround(Rng& rng, double low, double high) { return low * std::pow(high / low, rng.Unit()); }
int64_t DrawTime(Rng& rng, int64_t low, int64_t high) {
  return static_cast<int64_t>(DrawAround(rng, static_cast<double>(low), static_cast<double>(high)));
}

}  // namespace

ActorProfile DrawActors(Rng& rng) {
  ActorProfile profile;
  profile.processes = rng.Chance(0.02) ? 64 : static_cast<int>(DrawAround(rng, 2, 13));
  profile.length = DrawTime(rng, 5 * kSec, 40 * kSec);
  profile.fault_gap = DrawTime(rng, kSec / 2, 8 * kSec);
  profile.work_gap = DrawTime(rng, 20 * kMs, kSec) * profile.processes / 4;
  for (double& weight : profile.weights) weight = rng.Chance(0.6) ? DrawAround(rng, 0.1, 3) : 0;
  profile.weights[static_cast<int>(ActorFault::kBreak)] += 0.1;
  profile.kept = rng.Chance(0.7) ? rng.Unit() : 0;
  profile.throws = rng.Chance(0.5) ? rng.Unit() * 0.05 : 0;
  profile.comes_again = rng.Unit();
  profile.same_address = rng.Unit();
  profile.runs_max = DrawTime(rng, kMs / 10, 200 * kMs);
  profile.told_within = DrawTime(rng, 10 * kMs, 6 * kSec);
  profile.actors_max = static_cast<int>(DrawAround(rng, 2, 80));
  if (rng.Chance(0.4)) profile.mailbox_calls = 1 + rng.Below(8);
  profile.network.delay_max = DrawTime(rng, kMs / 5, 100 * kMs);
  if (rng.Chance(0.6)) profile.network.breaks = DrawAround(rng, 0.0005, 0.05);
  profile.network.notice_max = DrawTime(rng, kMs, 8 * kSec);
  if (rng.Chance(0.3)) profile.network.queue_max = 1 + rng.Below(8);
  return profile;
}

class ActorWorld::Ranks final : public actors::Gathering {
 public:
  explicit Ranks(const Process* process) : process_(process) {}
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view, absl::Duration) override {
    return absl::UnimplementedError("the simulation tells");
  }
  int rank() const override { return process_->rank; }
  std::vector<int> left() const override { return {}; }
  bool late() const override { return false; }
  absl::Status AwaitNext(absl::Duration) override { return absl::UnimplementedError("likewise"); }
  void Report(uint64_t) override {}
  void Note(const std::string& /*text*/) override {}

 private:
  const Process* const process_;
};

ActorWorld::ActorWorld(uint64_t seed, const ActorProfile& with)
    : profile(with), kernel(seed), truth(kernel), net(kernel, with.network, [this](int process) {
        Process& woken = *processes_[static_cast<size_t>(process)];
        if (woken.alive) Wake(woken, kernel.now() + kernel.Between(0, kTurnMax));
      }) {}

ActorWorld::~ActorWorld() {
  for (const auto& process : processes_) {
    if (process->alive) Kill(process->index);
  }
}

// ---- processes

int ActorWorld::Start(int slot, const std::string& endpoint) {
  const int index = truth.NewProcess();
  processes_.push_back(std::make_unique<Process>(index, slot, kernel, kernel.Between(0, kMin)));
  Process& process = *processes_.back();
  process.endpoint = endpoint;
  net.Expect(index, endpoint);
  actors::HostOptions host;
  host.threads = 0;
  host.seed = kernel.rng.Next();
  host.mailbox_calls = profile.mailbox_calls;
  process.cluster = std::make_unique<actors::Cluster>(host, process.clock);
  GT_CHECK(process.cluster->Register(TypeOf(&process)).ok());
  actors::ClusterNetwork network;
  network.gathering = std::make_unique<Ranks>(&process);
  network.net = &ActorNet::Module();
  network.secret = ActorNet::SecretOf(index);
  network.address = "simulated";
  network.node = absl::StrCat("node-", slot / 2);
  network.shared_memory = false;
  GT_CHECK(process.cluster->JoinWithoutThreads(std::move(network)).ok());
  Wake(process, kernel.now());
  kernel.Note(static_cast<uint64_t>(index), "process ", index, " comes up as slot ", slot, " at ", endpoint);
  return index;
}

void ActorWorld::Wake(Process& process, int64_t when) {
  when = std::max(when, process.paused_until);
  if (process.wakes_at && *process.wakes_at <= when) return;
  process.wakes_at = when;
  kernel.At(when, [this, &process, when] {
    if (process.alive && process.wakes_at == when) Turn(process);
  });
}

void ActorWorld::Turn(Process& process) {
  process.wakes_at.reset();
  if (kernel.now() < process.paused_until) return Wake(process, process.paused_until);
  if (kernel.now() - turns_since_ > kTurnsIn) turns_since_ = kernel.now(), turns_ = 0;
  if (++turns_ == kTurnsMax) kernel.Fail("actors rest", "processes have something to do again and again");
  const int64_t wait = absl::ToInt64Nanoseconds(process.cluster->Turn());
  Wake(process, kernel.now() + (wait > 0 ? wait : kernel.Between(1, kTurnMax)));
}

void ActorWorld::Kill(int index) {
  Process& process = *processes_[static_cast<size_t>(index)];
  kernel.Note(static_cast<uint64_t>(index), "process ", index, " is killed");
  process.alive = false;
  truth.Lost(index, /*dead=*/true);
  net.Dead(index);
  for (actors::BegunCall* const call : std::exchange(process.begun, {}))
    call->Answer(absl::CancelledError("killed"), "", false);
  process.cluster.reset();
}

std::vector<int> ActorWorld::Members() const {
  std::vector<int> members;
  for (const int index : slots_) {
    const Process& process = *processes_[static_cast<size_t>(index)];
    if (process.alive && !process.given_up) members.push_back(index);
  }
  return members;
}

ActorWorld::Process* ActorWorld::AnyMember() {
  const std::vector<int> members = Members();
  return processes_[static_cast<size_t>(members[kernel.rng.Below(members.size())])].get();
}

void ActorWorld::GenerationSoon() {
  if (std::exchange(generation_soon_, true)) return;
  kernel.After(kernel.Between(10 * kMs, 5 * kSec), [this] {
    generation_soon_ = false;
    Generation(kernel.rng.Chance(profile.comes_again));
  });
}

void ActorWorld::Generation(bool replace) {
  ++generation_;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const Process& before = *processes_[static_cast<size_t>(slots_[slot])];
    if (before.given_up) truth.Lost(before.index, /*dead=*/false);
    if ((before.alive && !before.given_up) || !replace) continue;
    const bool same = !before.alive && kernel.rng.Chance(profile.same_address);
    slots_[slot] =
        Start(static_cast<int>(slot), same ? before.endpoint : absl::StrCat("simulated:", processes_.size()));
    if (working_) WorkLoop(slots_[slot]);
  }
  std::vector<std::string> table;
  const std::vector<int> members = Members();
  for (const int index : members) {
    const Process& one = *processes_[static_cast<size_t>(index)];
    actors::Introduction introduction;
    introduction.process = one.cluster->self();
    introduction.endpoint = one.endpoint;
    introduction.node = absl::StrCat("node-", one.slot / 2);
    introduction.drives = one.cluster->drives();
    table.push_back(actors::PrintIntroduction(introduction));
  }
  for (size_t rank = 0; rank < members.size(); ++rank) {
    Process& process = *processes_[static_cast<size_t>(members[rank])];
    process.told = generation_;  // whoever has said something in a generation hears of none before it
    kernel.After(kernel.Between(0, profile.told_within),
                 [this, &process, generation = generation_, rank = static_cast<int>(rank), table] {
                   Tell(process, generation, rank, table);
                 });
  }
}

void ActorWorld::Tell(Process& process, int generation, int rank, const std::vector<std::string>& table) {
  if (!process.alive || process.given_up || process.told != generation) return;
  if (process.deaf) {
    kernel.After(10 * kMs,
                 [this, &process, generation, rank, table] { Tell(process, generation, rank, table); });
    return;
  }
  kernel.Note(static_cast<uint64_t>(generation), "process ", process.index, " hears of generation ",
              generation, ": rank ", rank, " of ", table.size());
  process.rank = rank;
  GT_CHECK(process.cluster->SetMembers(table).ok());
  Wake(process, kernel.now());
}

// ---- actors

actors::ActorClass ActorWorld::TypeOf(Process* process) {
  actors::ActorClass type;
  type.name = kActorType;
  type.signature = "one";
  type.methods = ActorTruth::kMethods;
  type.constant = {false, true, false};
  type.create = [this, process](absl::string_view arguments) -> absl::StatusOr<void*> {
    int actor = 0;
    GT_CHECK(absl::SimpleAtoi(arguments, &actor));
    ActorTruth::Life* const life = truth.Made(actor, process->index);
    kernel.Note(life->index, "actor ", actor, " is object ", life->index, " of process ", process->index);
    return life;
  };
  type.destroy = [this](void* self) { truth.Destroyed(*static_cast<ActorTruth::Life*>(self)); };
  type.save = [this](void* self) -> absl::StatusOr<std::string> {
    return truth.Save(*static_cast<ActorTruth::Life*>(self));
  };
  type.load = [this](void* self, absl::string_view state) {
    return truth.Load(*static_cast<ActorTruth::Life*>(self), state);
  };
  type.call = [this, process](void* self, int /*method*/, absl::string_view arguments,
                              actors::BegunCall* begun) {
    auto* const life = static_cast<ActorTruth::Life*>(self);
    size_t call = 0;
    GT_CHECK(absl::SimpleAtoi(arguments, &call));
    if (kernel.rng.Chance(0.3)) return Finish(life, call, begun);
    process->begun.insert(begun);
    kernel.After(kernel.Between(0, profile.runs_max), [this, process, life, call, begun] {
      if (process->begun.erase(begun) == 0) return;
      Finish(life, call, begun);
      Wake(*process, kernel.now() + kernel.Between(0, kTurnMax));
    });
  };
  return type;
}

void ActorWorld::Finish(ActorTruth::Life* life, size_t call, actors::BegunCall* begun) {
  kernel.Note(call, "object ", life->index, " of actor ", life->actor, " runs call ", call);
  if (truth.calls()[call].method != ActorTruth::kThrow)
    return begun->Answer(absl::OkStatus(), truth.Run(*life, call), false);
  truth.Threw(*life, call);
  begun->Answer(absl::UnknownError("thrown"), "", true);
}

int ActorWorld::Spawn(int index, const Spawning& how) {
  Process& process = *processes_[static_cast<size_t>(index)];
  const int actor = truth.NewActor(index, how.keep, how.restarts);
  names_.push_back(how.name);
  kernel.Note(static_cast<uint64_t>(actor), "process ", index, " spawns actor ", actor,
              how.keep ? ", kept" : "");
  ++kernel.counts["spawns"];
  actors::SpawnOptions options;
  options.restarts = how.restarts;
  options.keep = how.keep;
  actors::Reply reply = [this, actor](const absl::Status& status, absl::string_view result) {
    kernel.Note(static_cast<uint64_t>(status.code()), "the spawn of actor ", actor, ": ", status.ToString());
    truth.Spawned(actor, status, result);
  };
  const absl::Duration timeout = absl::Nanoseconds(how.timeout);
  if (how.name.empty()) {
    process.cluster->Spawn(kActorType, options, how.placement, absl::StrCat(actor), timeout,
                           std::move(reply));
  } else {
    process.cluster->SpawnNamed(how.name, kActorType, options, how.placement, absl::StrCat(actor), timeout,
                                std::move(reply));
  }
  Wake(process, kernel.now() + kernel.Between(0, kTurnMax));
  return actor;
}

size_t ActorWorld::Call(int index, int actor, int method, int64_t timeout) {
  Process& process = *processes_[static_cast<size_t>(index)];
  const size_t call = truth.NewCall(actor, index, method, kernel.now() + timeout);
  kernel.Note(call, "process ", index, " makes call ", call, " to actor ", actor);
  ++kernel.counts["calls"];
  process.cluster->Call(truth.actors()[static_cast<size_t>(actor)].ref, method, absl::StrCat(call),
                        absl::Nanoseconds(timeout),
                        [this, call](const absl::Status& status, absl::string_view result) {
                          kernel.Note(static_cast<uint64_t>(status.code()), "call ", call,
                                      " is answered: ", status.ok() ? result : status.message());
                          ++kernel.counts[absl::StrCat("answer ", absl::StatusCodeToString(status.code()))];
                          truth.Answered(call, status, result);
                        });
  Wake(process, kernel.now() + kernel.Between(0, kTurnMax));
  return call;
}

// ---- what programs ask

void ActorWorld::WorkLoop(int index) {
  kernel.After(kernel.Between(0, 2 * profile.work_gap), [this, index] {
    Process& process = *processes_[static_cast<size_t>(index)];
    if (!working_ || !process.alive) return;
    if (process.rank >= 0 && kernel.now() >= process.paused_until) WorkOnce(process);
    WorkLoop(index);
  });
}

void ActorWorld::WorkOnce(Process& process) {
  const double what = kernel.rng.Unit();
  if (what < 0.1) return SpawnAny(process);
  if (what < 0.12) return EndAny(process);
  if (what < 0.15) return FindAny(process);
  CallAny(process);
}

void ActorWorld::SpawnAny(Process& process) {
  if (truth.actors().size() >= static_cast<size_t>(profile.actors_max)) return;
  Spawning how;
  how.keep = kernel.rng.Chance(profile.kept);
  if (kernel.rng.Chance(0.2)) how.restarts = static_cast<int>(kernel.rng.Below(3));
  how.timeout = DrawTime(kernel.rng, 20 * kMs, kMin);
  how.placement.spread = static_cast<actors::Spread>(kernel.rng.Below(4));
  if (kernel.rng.Chance(0.5))
    how.placement.rank = static_cast<int>(kernel.rng.Below(static_cast<uint64_t>(profile.processes)));
  if (kernel.rng.Chance(0.2)) how.name = absl::StrCat("actor ", truth.actors().size());
  Spawn(process.index, how);
}

void ActorWorld::EndAny(Process& process) {
  for (size_t actor = 0; actor < truth.actors().size(); ++actor) {
    const ActorTruth::Actor& one = truth.actors()[actor];
    if (one.owner != process.index || !one.spawned || !one.spawned->ok() || one.ended ||
        !kernel.rng.Chance(0.3))
      continue;
    kernel.Note(actor, "process ", process.index, " lets actor ", actor, " go");
    ++kernel.counts["ends"];
    truth.LetGo(static_cast<int>(actor));
    process.cluster->End(one.ref, "its owner has let it go");
    return Wake(process, kernel.now());
  }
}

void ActorWorld::CallAny(Process& process) {
  if (truth.actors().empty()) return;
  const auto actor = kernel.rng.Below(truth.actors().size());
  const ActorTruth::Actor& one = truth.actors()[actor];
  if (!one.spawned || !one.spawned->ok()) return;
  if (one.ended && kernel.rng.Chance(0.9)) return;
  const uint64_t calls = kernel.rng.Chance(0.05) ? 60 : 1 + kernel.rng.Below(6);
  const bool patient = kernel.rng.Chance(0.5);
  for (uint64_t i = 0; i < calls; ++i) {
    int method = kernel.rng.Chance(0.2) ? ActorTruth::kRead : ActorTruth::kAdd;
    if (kernel.rng.Chance(profile.throws)) method = ActorTruth::kThrow;
    const int64_t timeout = patient ? kMin : DrawTime(kernel.rng, 5 * kMs, 10 * kSec);
    Call(process.index, static_cast<int>(actor), method, timeout);
  }
}

void ActorWorld::FindAny(Process& process) {
  if (truth.actors().empty()) return;
  const size_t actor = kernel.rng.Below(truth.actors().size());
  if (!names_[actor].empty()) AuditName(static_cast<int>(actor), process);
}

// ---- faults

void ActorWorld::FaultLoop() {
  const double gap = -std::log(1 - kernel.rng.Unit()) * static_cast<double>(profile.fault_gap);
  kernel.After(static_cast<int64_t>(gap), [this] {
    if (!working_) return;
    double all = 0;
    for (const double weight : profile.weights) all += weight;
    double at = kernel.rng.Unit() * all;
    for (int fault = 0; fault < static_cast<int>(ActorFault::kCount); ++fault) {
      at -= profile.weights[fault];
      if (at >= 0) continue;
      ++kernel.counts[absl::StrCat("fault ", kActorFaults[fault])];
      Inject(static_cast<ActorFault>(fault));
      break;
    }
    FaultLoop();
  });
}

void ActorWorld::Inject(ActorFault fault) {
  Process& process = *AnyMember();
  const bool enough = Members().size() > 1;
  switch (fault) {
    case ActorFault::kKill:
      if (!enough) return;
      Kill(process.index);
      return GenerationSoon();
    case ActorFault::kBreak:
      kernel.Note(1, "connections break");
      return net.Break(kernel.rng.Unit());
    case ActorFault::kCut:
      return CutSome();
    case ActorFault::kGiveUp:
      if (!enough) return;
      GiveUp(process.index);
      return GenerationSoon();
    case ActorFault::kPause:
      process.paused_until = kernel.now() + DrawTime(kernel.rng, 10 * kMs, 20 * kSec);
      truth.Pause(process.index, process.paused_until);
      kernel.Note(2, "process ", process.index, " stands still");
      return Wake(process, process.paused_until);
    case ActorFault::kCount:
      return;
  }
}

void ActorWorld::GiveUp(int index) {
  Process& process = *processes_[static_cast<size_t>(index)];
  kernel.Note(3, "process ", index, " is given up");
  process.given_up = true;
  kernel.After(kernel.Between(0, profile.given_up_within), [this, &process] {
    if (process.alive) Kill(process.index);
  });
}

void ActorWorld::CutSome() {
  std::set<int> group;
  for (const int index : Members()) {
    if (kernel.rng.Chance(0.4)) group.insert(index);
  }
  kernel.Note(4, group.size(), " processes are cut off");
  net.Cut(std::move(group));
  kernel.After(DrawTime(kernel.rng, 50 * kMs, 90 * kSec), [this, cut = ++cuts_] {
    if (cut != cuts_) return;
    kernel.Note(5, "nothing is cut off any more");
    net.Heal();
  });
}

// ---- a run

void ActorWorld::Begin() {
  for (int slot = 0; slot < profile.processes; ++slot)
    slots_.push_back(Start(slot, absl::StrCat("simulated:", processes_.size())));
  const int64_t told_within = std::exchange(profile.told_within, 0);
  Generation(false);
  profile.told_within = told_within;
  Run(kMs);
}

void ActorWorld::Run(int64_t time) {
  RunUntil([] { return false; }, time);
}

bool ActorWorld::RunUntil(const std::function<bool()>& condition, int64_t limit) {
  const int64_t until = kernel.now() + limit;
  while (!kernel.failed() && !condition()) {
    if (!kernel.RunOne(until)) return condition();
  }
  return !kernel.failed();
}

void ActorWorld::RunSwarm() {
  Begin();
  working_ = true;
  for (const int index : Members()) WorkLoop(index);
  FaultLoop();
  Run(profile.length);
  CalmDown();
  Run(kActorRest);
  if (kernel.failed()) return;
  truth.CheckRest();
  if (!kernel.failed()) Audit();
}

void ActorWorld::CalmDown() {
  kernel.Note(6, "no more faults");
  working_ = false;
  ++cuts_;
  net.Heal();
  net.CalmDown();
  for (const auto& process : processes_) {
    if (process->alive && process->given_up) Kill(process->index);
    process->paused_until = std::min(process->paused_until, kernel.now());
    if (process->alive) Wake(*process, kernel.now());
  }
  Generation(true);
}

// Whoever calls an actor, by whatever reference, finds it where it is.
void ActorWorld::Audit() {
  std::vector<size_t> calls;
  for (int turn = 0; turn < 2; ++turn) {
    for (size_t actor = 0; actor < truth.actors().size(); ++actor) {
      if (!truth.ShouldLive(static_cast<int>(actor))) continue;
      calls.push_back(Call(AnyMember()->index, static_cast<int>(actor), ActorTruth::kAdd, kMin));
      if (!names_[actor].empty()) AuditName(static_cast<int>(actor), *AnyMember());
    }
    RunUntil([this] { return truth.unanswered() == 0; }, 2 * kMin);
  }
  if (kernel.failed()) return;
  truth.CheckRest();
  for (const size_t call : calls) {
    if (truth.calls()[call].code != absl::StatusCode::kOk)
      kernel.Fail("actors locate", absl::StrCat("call ", call, " to actor ", truth.calls()[call].actor,
                                                ", which lives, came to ",
                                                absl::StatusCodeToString(truth.calls()[call].code)));
  }
}

// At rest it is found, and where it is.
void ActorWorld::AuditName(int actor, Process& from) {
  ++kernel.counts["searches"];
  from.cluster->Find(
      names_[static_cast<size_t>(actor)], kActorType, absl::Minutes(1),
      [this, actor, index = from.index, at_rest = !working_](const absl::Status& status,
                                                             absl::string_view result) {
        if (!processes_[static_cast<size_t>(index)]->alive) return;
        const ActorTruth::Actor& one = truth.actors()[static_cast<size_t>(actor)];
        const absl::StatusOr<actors::ActorRef> ref = status.ok() ? actors::ActorRef::Parse(result) : status;
        if (ref.ok() && one.spawned && one.spawned->ok() &&
            (ref->owner_high != one.ref.owner_high || ref->owner_low != one.ref.owner_low ||
             ref->id != one.ref.id))
          kernel.Fail("actors names", absl::StrCat("another actor is found by the name of actor ", actor));
        if (!at_rest || !truth.ShouldLive(actor)) return;
        const ActorTruth::Life* const only = truth.Only(actor);
        if (!ref.ok() || only == nullptr ||
            processes_[static_cast<size_t>(only->process)]->cluster->self() !=
                actors::CallerId{ref->at.host_high, ref->at.host_low})
          kernel.Fail("actors names",
                      absl::StrCat("actor ", actor, " is not found where it is: ", ref.status().ToString()));
      });
  Wake(from, kernel.now());
}

}  // namespace gtrain::sim
