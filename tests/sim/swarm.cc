// Draws a seed's world and faults, and injects each fault.
#include <algorithm>
#include <cmath>

#include "runtime/core/values/job_state.h"
#include "tests/sim/world.h"

namespace gtrain::sim {
namespace {

const char* const kNames[] = {
    "head-kill",    "head-power",  "head-pause",  "disk-slow",  "disk-error", "disk-full",    "agent-kill",
    "agent-long",   "agent-pause", "keeper-kill", "power",      "rank-crash", "rank-oom",     "rank-saved",
    "rank-hang",    "rank-stuck",  "rank-freeze", "rank-lies",  "cut",        "one-way",      "rack-cut",
    "clog",         "reset",       "half-open",   "partial",    "clone",      "notice",       "at-risk",
    "freeze",       "keeper-link", "other-agent", "stale-head", "slow-files", "storage-slow", "storage-error",
    "storage-gone", "drain",       "client-kill", "join-storm"};
static_assert(std::size(kNames) == static_cast<size_t>(FaultKind::kCount));

double LogUniform(Rng& rng, double low, double high) { return low * std::pow(high / low, rng.Unit()); }

}  // namespace

const char* Name(FaultKind kind) { return kNames[static_cast<int>(kind)]; }

Profile Draw(Rng& rng) {
  Profile profile;
  profile.nodes = rng.Chance(0.01) ? 256 : static_cast<int>(LogUniform(rng, 3, 65));
  profile.fault_gap = static_cast<int64_t>(LogUniform(rng, 3, 14) * static_cast<double>(kSec));
  bool any = false;
  for (double& weight : profile.weights) {
    weight = rng.Chance(0.6) ? LogUniform(rng, 0.1, 3) : 0;
    any = any || weight > 0;
  }
  if (!any) profile.weights[static_cast<int>(FaultKind::kHeadKill)] = 1;
  // A whole rack at once and lost power cost infrastructure budgets: seldom.
  profile.weights[static_cast<int>(FaultKind::kRackCut)] *= 0.2;
  profile.weights[static_cast<int>(FaultKind::kRankStuck)] *= 0.2;
  profile.weights[static_cast<int>(FaultKind::kJoinStorm)] *= 0.2;
  profile.network.delay_spread = static_cast<int64_t>(LogUniform(rng, 0.2, 200) * static_cast<double>(kMs));
  if (rng.Chance(0.4)) profile.network.half_open = rng.Unit() * 0.5;
  if (rng.Chance(0.4)) profile.network.loss = rng.Unit() * 0.3;
  if (rng.Chance(0.3)) profile.network.duplicate = rng.Unit() * 0.1;
  if (rng.Chance(0.4)) profile.network.reorder = rng.Unit();
  if (rng.Chance(0.2)) profile.network.queue_max = static_cast<size_t>(LogUniform(rng, 8, 400));
  profile.shared_directory = rng.Chance(0.2);
  profile.network.through_codec = rng.Chance(0.04);
  profile.clients = 1 + static_cast<int>(rng.Below(3));
  profile.jobs_max = 1 + static_cast<int>(rng.Below(static_cast<uint64_t>(2 + profile.nodes / 4)));
  profile.jobs_max = std::min(profile.jobs_max, 12);
  if (rng.Chance(0.2)) profile.port_taken = 0.1;
  if (rng.Chance(0.2)) profile.keeper_start_fails = 0.02;
  profile.sync_time = static_cast<int64_t>(LogUniform(rng, 0.5, 200) * static_cast<double>(kMs));
  if (rng.Chance(0.4)) profile.in_place = 0.2 + 0.8 * rng.Unit();  // last: the others stay as they were
  return profile;
}

void World::FaultLoop() {
  const double gap = -std::log(1 - kernel.rng.Unit()) * static_cast<double>(profile.fault_gap);
  kernel.After(static_cast<int64_t>(gap), [this] {
    if (quiet_) return;
    NextFault();
    FaultLoop();
  });
}

void World::NextFault() {
  double all = 0;
  for (const double weight : profile.weights) all += weight;
  double dice = kernel.rng.Unit() * all;
  for (int kind = 0; kind < static_cast<int>(FaultKind::kCount); ++kind) {
    dice -= profile.weights[kind];
    if (dice < 0 && profile.weights[kind] > 0) return Inject(static_cast<FaultKind>(kind));
  }
}

void World::Inject(FaultKind kind) {
  kernel.Note(static_cast<uint64_t>(kind) + 0xFA000, "fault: ", Name(kind));
  if (kind <= FaultKind::kDiskFull) return HeadFault(kind);
  if (kind <= FaultKind::kPower || (kind >= FaultKind::kClone && kind <= FaultKind::kStaleHead))
    return AgentFault(kind);
  if (kind <= FaultKind::kRankLies) return RankFault(kind);
  if (kind <= FaultKind::kPartial) return LinkFault(kind);
  Count(kind);
  if (kind == FaultKind::kSlowFiles) return SlowFiles();
  if (kind == FaultKind::kStorageSlow) return ranks.saves.SlowFor(kernel.Between(5 * kSec, 2 * kMin));
  if (kind == FaultKind::kStorageError) return ranks.saves.FailFor(kernel.Between(500 * kMs, 30 * kSec));
  if (kind == FaultKind::kStorageGone) return ranks.saves.GoneFor(kernel.Between(kSec, 4 * kMin));
  if (kind == FaultKind::kDrain) return DrainByHand();
  if (kind == FaultKind::kJoinStorm)
    return joins.Storm(static_cast<int>(LogUniform(kernel.rng, 2, 1'000)),
                       1 + static_cast<int>(kernel.rng.Below(3)));
  ClientFault();
}

void World::ClientFault() {
  Client& client = *clients[kernel.rng.Below(clients.size())];
  client.Kill();
  if (kernel.rng.Chance(0.5)) {
    kernel.After(kernel.Between(kMs, 10 * kSec), [&client] { client.AskAgain(kMin, nullptr); });
  }
}

void World::HeadFault(FaultKind kind) {
  Count(kind);
  switch (kind) {
    case FaultKind::kHeadKill:
      return head->Kill(false);
    case FaultKind::kHeadPower:
      return head->Kill(true);
    case FaultKind::kHeadPause:
      return head->Pause(kernel.Between(kSec, 40 * kSec));
    case FaultKind::kDiskSlow:
      disk.set_sync_time(kernel.Between(500 * kMs, 10 * kSec));
      return kernel.After(kernel.Between(5 * kSec, 30 * kSec),
                          [this] { disk.set_sync_time(profile.sync_time); });
    case FaultKind::kDiskError:
      return disk.FailNext(Disk::Fault::kEio);
    default:
      disk.set_full(true);
      return kernel.After(kernel.Between(kSec, 40 * kSec), [this] { disk.set_full(false); });
  }
}

void World::AgentFault(FaultKind kind) {
  const bool busy = kind >= FaultKind::kNotice || kind == FaultKind::kKeeperKill;
  Machine& machine = busy ? BusyMachine() : AnyMachine();
  const bool of_keeper =
      kind == FaultKind::kKeeperKill || kind == FaultKind::kKeeperLink || kind == FaultKind::kStaleHead;
  if (machine.config().clone || (of_keeper && machine.keepers().empty())) return;
  Count(kind);
  switch (kind) {
    case FaultKind::kAgentKill:
      return machine.KillAgent(kernel.Between(500 * kMs, 20 * kSec));
    case FaultKind::kAgentLong:
      return machine.KillAgent(kernel.Between(30 * kSec, 200 * kSec));
    case FaultKind::kAgentPause:
      return machine.PauseAgent(kernel.Between(kSec, 60 * kSec));
    case FaultKind::kKeeperKill:
    case FaultKind::kKeeperLink: {
      const auto& keepers = machine.keepers();
      auto it = keepers.begin();
      std::advance(it, static_cast<long>(kernel.rng.Below(keepers.size())));
      if (kind == FaultKind::kKeeperLink)
        return machine.DropKeeperLink(it->first, kernel.Between(kMs, 8 * kSec));
      return machine.KillKeeper(JobId(it->first));
    }
    case FaultKind::kNotice:
      return AnnounceLeave(machine);
    case FaultKind::kAtRisk:
      machine.CloudSays(kernel.Between(0, 5 * kMin), core::NoticeKind::kAtRisk);
      return kernel.After(kernel.Between(10 * kSec, 5 * kMin), [&machine, notice = machine.notice()] {
        if (machine.notice() == notice) machine.CloudSays(std::nullopt);
      });
    case FaultKind::kFreeze:
      return AnnounceFreeze(machine);
    case FaultKind::kOtherAgent:
      return machine.InstallOtherAgent(kernel.Between(5 * kSec, 100 * kSec));
    case FaultKind::kStaleHead:
      return SpeakAsStaleHead(machine);
    case FaultKind::kPower:
      return machine.PowerOff(kernel.Between(10 * kSec, 120 * kSec));
    default:
      if (machines.size() > static_cast<size_t>(profile.nodes) + 2) return;
      AddMachine(machine.config().cpus, machine.index());
      return machines.back()->StartAgent();
  }
}

// One with ranks, if there is any: notices of idle machines matter little.
Machine& World::BusyMachine() {
  std::vector<Machine*> busy;
  for (const auto& machine : machines) {
    if (!machine->keepers().empty() && !machine->config().clone) busy.push_back(machine.get());
  }
  return busy.empty() || kernel.rng.Chance(0.2) ? AnyMachine() : *busy[kernel.rng.Below(busy.size())];
}

// A spot machine: mostly it goes when it said, sometimes the cloud changes its mind, before or after.
void World::AnnounceLeave(Machine& machine) {
  constexpr int64_t kLeads[] = {0, 30 * kSec, 120 * kSec, 10 * kMin};
  const int64_t left = kLeads[kernel.rng.Below(std::size(kLeads))];
  const bool goes = kernel.rng.Chance(0.6);
  machine.CloudSays(left);
  const uint64_t notice = machine.notice();
  const auto at = goes ? left : static_cast<int64_t>(kernel.rng.Unit() * static_cast<double>(left + kMin));
  kernel.After(at, [this, &machine, notice, goes] {
    if (machine.notice() != notice) return;
    if (goes && !quiet_) return machine.PowerOff(kernel.Between(10 * kSec, 120 * kSec));
    machine.CloudSays(std::nullopt);
  });
}

// A live migration: the machine stands still about as long as was said, now and then longer.
void World::AnnounceFreeze(Machine& machine) {
  const int64_t left = kernel.Between(0, kMin), frozen = kernel.Between(kSec, 40 * kSec);
  machine.CloudSays(left, core::NoticeKind::kFreeze, frozen);
  kernel.After(left, [this, &machine, notice = machine.notice(), frozen] {
    if (machine.notice() != notice || quiet_) return;
    machine.Freeze(kernel.rng.Chance(0.2) ? 3 * frozen : frozen);
    machine.CloudSays(std::nullopt);
  });
}

// The words of a head that does not know that another serves reach an agent that has heard the other.
void World::SpeakAsStaleHead(Machine& machine) {
  if (!head->serving()) return;
  const uint64_t epoch = head->core()->epoch().value;
  if (epoch < 2 || checker.EpochHeard(machine.index()) != epoch) return;
  const JobId job = machine.keepers().begin()->first;
  uint64_t newest = 1;
  for (const auto& [key, gang] : ranks.gangs()) {
    if (key.first == job) newest = std::max(newest, key.second);
  }
  const HeadEpoch old{1 + kernel.rng.Below(epoch - 1)};
  switch (kernel.rng.Below(3)) {
    case 0:
      return network.Inject(machine.index(),
                            core::Revoke{old, job, Generation{newest}, core::EndMode::kStopNow,
                                         absl::ZeroDuration(), "a stale head"});
    case 1:
      return network.Inject(machine.index(), core::ForgetJob{old, job});
    default:
      return network.Inject(machine.index(), core::AgentShutdown{old, "a stale head"});
  }
}

// The file system of one job answers late, on one machine or on all that mount it, or no more on one.
void World::SlowFiles() {
  std::vector<JobId> open;
  for (const auto& [id, job] : disk.jobs()) {
    if (!core::IsFinal(job.state)) open.push_back(id);
  }
  if (open.empty()) return;
  const JobId job = open[kernel.rng.Below(open.size())];
  Machine& one = BusyMachine();
  if (kernel.rng.Chance(0.15)) {
    one.SlowFiles(job, Machine::kNever);
    if (kernel.rng.Chance(0.5)) return;  // until the faults end
    return kernel.After(kernel.Between(10 * kSec, 2 * kMin), [this, &one] {
      if (!quiet_) one.PowerOff(kernel.Between(10 * kSec, 30 * kSec));
    });
  }
  const auto each = static_cast<int64_t>(LogUniform(kernel.rng, 0.1, 60) * static_cast<double>(kSec));
  const int64_t healed = kernel.Between(5 * kSec, 3 * kMin);
  const bool everywhere = kernel.rng.Chance(0.3);
  for (const auto& machine : machines) {
    if (!everywhere && machine.get() != &one) continue;
    machine->SlowFiles(job, each);
    kernel.After(healed, [m = machine.get(), job, each] {
      const auto slow = m->slow_files().find(job);
      if (slow != m->slow_files().end() && slow->second == each) m->SlowFiles(job, 0);
    });
  }
}

// A person drains a node, and mostly takes it back.
void World::DrainByHand() {
  if (operator_->busy()) return;
  const std::string hostname = BusyMachine().config().hostname;
  constexpr int64_t kLeads[] = {0, 30 * kSec, 10 * kMin};
  const int64_t left = kLeads[kernel.rng.Below(std::size(kLeads))];
  operator_->Ask(core::ClientDrainNode{hostname, absl::Nanoseconds(left), "the simulator", false}, kMin,
                 nullptr);
  if (kernel.rng.Chance(0.1)) return;
  kernel.After(kernel.Between(10 * kSec, 5 * kMin), [this, hostname] {
    if (operator_->busy()) return;
    operator_->Ask(core::ClientDrainNode{hostname, absl::ZeroDuration(), "", true}, 2 * kMin, nullptr);
  });
}

void World::RankFault(FaultKind kind) {
  const RankPtr rank = ranks.Random();
  if (rank == nullptr || (rank->asked_to_end && !rank->kept)) return;
  Count(kind);
  switch (kind) {
    case FaultKind::kRankCrash:
      if (kernel.rng.Chance(0.5)) return ranks.KillProcess(rank, keeper::Cause::kSignal, 0, 11);
      return ranks.KillProcess(rank, keeper::Cause::kExited, 1, 0);
    case FaultKind::kRankOom:
      return ranks.KillProcess(rank, keeper::Cause::kOom, 0, 9);
    case FaultKind::kRankSaved:
      return ranks.KillProcess(rank, keeper::Cause::kExited, 75, 0);
    case FaultKind::kRankHang:
      return ranks.Hang(rank);
    case FaultKind::kRankFreeze:
      return ranks.Freeze(rank, kernel.Between(kSec, 2 * kMin));
    case FaultKind::kRankStuck:
      rank->stuck = rank->hung = true;
      return;
    default:
      rank->lies = rank->hung = true;
      return;
  }
}

void World::LinkFault(FaultKind kind) {
  Count(kind);
  const int machine = AnyMachine().index();
  const int64_t healed = static_cast<int64_t>(LogUniform(kernel.rng, 0.2, 60) * static_cast<double>(kSec));
  switch (kind) {
    case FaultKind::kCut:
      network.Cut(machine, true, true);
      return kernel.After(healed, [this, machine] { network.Heal(machine); });
    case FaultKind::kOneWay: {
      const bool up = kernel.rng.Chance(0.5);
      network.Cut(machine, up, !up);
      return kernel.After(healed, [this, machine] { network.Heal(machine); });
    }
    case FaultKind::kRackCut:
      for (size_t i = 0; i < machines.size(); i += 2) {
        network.Cut(static_cast<int>(i), true, true);
        kernel.After(healed, [this, i] { network.Heal(static_cast<int>(i)); });
      }
      return;
    case FaultKind::kClog:
      return network.Clog(machine, std::min(healed, 20 * kSec));
    case FaultKind::kReset:
      return network.Reset(machine);
    case FaultKind::kHalfOpen:
      return network.BreakHalfOpen(machine);
    default:
      return CutPair(machine, AnyMachine().index(), healed);
  }
}

void World::HealAll() {
  quiet_ = true;
  kernel.Note(0x4EA1, "the faults end");
  network.CalmDown();
  for (const auto& machine : machines) {
    network.Heal(machine->index());
    machine->port_taken = machine->keeper_start_fails = 0;
    machine->CloudSays(std::nullopt);
    for (const auto& [job, each] : std::map(machine->slow_files())) {
      if (each != Machine::kNever) machine->SlowFiles(job, 0);
    }
    // A file system that never answers goes with its machine.
    if (!machine->slow_files().empty()) machine->PowerOff(kernel.Between(10 * kSec, 30 * kSec));
  }
  ranks.saves.CalmDown();
  disk.set_full(false);
  disk.FailNext(Disk::Fault::kNone);
  disk.set_sync_time(profile.sync_time);
  for (auto& [pair, until] : partial_) until = std::min(until, kernel.now());
  for (auto& [job, program] : ranks.programs) program.crash_at_start = 0;
}

}  // namespace gtrain::sim
