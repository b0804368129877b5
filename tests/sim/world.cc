#include "tests/sim/world.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "job/spec/parse.h"
#include "nlohmann/json.hpp"
#include "runtime/core/values/job_state.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kSettleBound = 8 * kMin;
constexpr int64_t kCheckEvery = 30 * kSec;

}  // namespace

World::World(uint64_t seed, const Profile& chosen)
    : kernel(seed),
      profile(chosen),
      network(kernel, profile.network),
      disk(kernel),
      checker(kernel, disk),
      ranks(kernel, checker),
      joins(kernel, network, disk),
      elastic_rng_(seed ^ 0x656c6173746963) {
  core::HeadConfig config;
  config.cluster = ClusterId("sim");
  if (!profile.usual_times)
    config.quarantine_max = config.avoid_for = absl::Minutes(2);  // below that of INV-9
  config.check_deadlines = profile.nodes > 0;  // it looks at all nodes that there ever were
  config.parse_job = [this](absl::string_view text) -> absl::StatusOr<spec::JobSpec> {
    const spec::JobSpec* spec = SpecOf(std::string(text));
    if (spec == nullptr) return absl::InvalidArgumentError("not a job");
    return *spec;
  };
  config.check_record = [](const core::Record& record) {
    return wire::DecodeRecord(wire::EncodeRecord(record)).status();
  };
  config.near_secret = [](const JobId&) { return std::string(64, '5'); };
  config.seal_grant = [](const core::GenerationGrant& grant) {
    return core::GrantSeal{wire::Encode(core::StartGeneration{HeadEpoch{}, grant, {}}), "sealed"};
  };
  config.proves_grant = [](const core::GrantSeal& seal) { return seal.mac == "sealed"; };
  checker.config = config;
  checker.spec_of = [this](const std::string& text) { return SpecOf(text); };
  checker.cpus_of = [this](const NodeId& node) {
    for (const auto& machine : machines) {
      if (machine->config().node == node) return machine->config().cpus;
    }
    return 0;
  };
  checker.committed = [this](const JobId& job, uint64_t timeline, int64_t step) {
    return ranks.Committed(job, timeline, step);
  };
  checker.node_on = [this](int machine) { return machines[static_cast<size_t>(machine)]->config().node; };
  checker.shares_key = [this](int machine) {
    const NodeId& node = machines[static_cast<size_t>(machine)]->config().node;
    return std::count_if(machines.begin(), machines.end(),
                         [&](const auto& other) { return other->config().node == node; }) > 1;
  };
  checker.node_called = [this](const std::string& hostname) {
    for (const auto& machine : machines) {
      if (machine->config().hostname == hostname) return machine->config().node;
    }
    return NodeId();
  };
  const auto cut_after = [this](int a, int b, int64_t then) {
    const auto it = partial_.find({std::min(a, b), std::max(a, b)});
    return it != partial_.end() && it->second > then;
  };
  ranks.reachable = [this, cut_after](int a, int b) { return !cut_after(a, b, kernel.now()); };
  checker.somebody_hangs = [this](const JobId& job, uint64_t generation) {
    const auto gang = ranks.gangs().find({job, generation});
    // What it says once it moves again takes a while to get to the head.
    const auto hangs = [this](const auto& item) {
      const RankProcess& rank = *item.second;
      return rank.hung || rank.frozen || (rank.thawed_at >= 0 && kernel.now() - rank.thawed_at < 5 * kSec);
    };
    return gang != ranks.gangs().end() && std::ranges::any_of(gang->second.ranks, hangs);
  };
  checker.link_was_cut = [this](const NodeId& a, const NodeId& b, int64_t then) {
    return std::ranges::any_of(partial_, [&](const auto& item) {
      const NodeId& one = machines[static_cast<size_t>(item.first.first)]->config().node;
      const NodeId& other = machines[static_cast<size_t>(item.first.second)]->config().node;
      return item.second > then && ((one == a && other == b) || (one == b && other == a));
    });
  };
  ranks.program_of = [this](const JobId& job) {
    const auto record = disk.jobs().find(job);
    return record == disk.jobs().end() ? Program{} : programs_of_text_[record->second.spec_text];
  };
  disk.set_sync_time(profile.sync_time);
  head = std::make_unique<HeadProcess>(kernel, network, disk, checker, config);
  for (int i = 0; i < profile.nodes; ++i) AddMachine(static_cast<int>(2 + 2 * kernel.rng.Below(4)));
  for (int i = 0; i < profile.clients; ++i) {
    clients.push_back(
        std::make_unique<Client>(kernel, network, checker, 100'000 + i, absl::StrCat("client", i)));
  }
  operator_ = std::make_unique<Client>(kernel, network, checker, 200'000, "operator");
}

World::~World() = default;

void World::CutPair(int a, int b, int64_t duration) {
  if (a == b) return;
  kernel.Note(0x9A12, "the ranks of m", a, " and m", b, duration > 0 ? " cannot talk" : " can talk");
  partial_[{std::min(a, b), std::max(a, b)}] = kernel.now() + duration;
}

const spec::JobSpec* World::SpecOf(const std::string& text) {
  const auto [it, fresh] = specs_.try_emplace(text);
  if (fresh) {
    spec::ParseResult parsed = spec::ParseJob(text, "job.yaml");
    if (parsed.ok()) it->second = std::move(parsed.spec);
  }
  return it->second ? &*it->second : nullptr;
}

void World::AddMachine(int cpus, int clone_of) {
  MachineConfig config;
  config.index = static_cast<int>(machines.size());
  const int node = clone_of >= 0 ? clone_of : config.index;
  config.node = NodeId(absl::StrFormat("%016x", node + 1));
  config.hostname = absl::StrCat("n", node);
  config.cpus = cpus;
  config.clone = clone_of >= 0;
  machines.push_back(
      std::make_unique<Machine>(kernel, network, ranks, checker, config,
                                [this](absl::string_view text) -> absl::StatusOr<spec::JobSpec> {
                                  const spec::JobSpec* spec = SpecOf(std::string(text));
                                  if (spec == nullptr) return absl::InvalidArgumentError("not a job");
                                  return *spec;
                                }));
  machines.back()->port_taken = profile.port_taken;
  machines.back()->keeper_start_fails = profile.keeper_start_fails;
}

void World::Boot() {
  head->Start();
  for (auto& machine : machines) {
    kernel.After(kernel.Between(0, 2 * kSec), [m = machine.get()] { m->StartAgent(); });
  }
}

void World::RunFor(int64_t duration) {
  const int64_t until = kernel.now() + duration;
  while (!kernel.failed() && kernel.RunOne(until)) {
  }
}

bool World::RunUntil(const std::function<bool()>& condition, int64_t limit) {
  const int64_t until = kernel.now() + limit;
  while (!kernel.failed() && kernel.now() < until) {
    if (condition()) return true;
    RunFor(std::min(kSec, until - kernel.now()));
  }
  return !kernel.failed() && condition();
}

void World::RunSwarm() {
  Boot();
  for (size_t i = 0; i < clients.size(); ++i) ClientLoop(static_cast<int>(i));
  FaultLoop();
  const int64_t end = profile.faults_for;
  while (!kernel.failed() && (kernel.now() < end || faults_ < profile.faults_min)) {
    RunFor(kCheckEvery);
    CheckQueues();
  }
  HealAll();
  if (kernel.failed()) return;
  const int64_t healed = kernel.now();
  // A backoff or a grace may end and begin something anew, so rest means rest for a while.
  std::string open;
  const bool rest = RunUntil(
      [&] {
        open = Unsettled();
        return open.empty();
      },
      kSettleBound);
  recovery = kernel.now() - healed;
  if (!kernel.failed() && !rest) {
    kernel.Fail("INV-9", absl::StrCat(kSettleBound / kMin, " minutes after the last fault ", open));
  }
  CheckQueues();
  CheckJoins();
  ranks.saves.CheckAll();
  checker.CheckRecords();
}

// INV-9: at rest all nodes that come at once are let in before their patience ends.
void World::CheckJoins() {
  constexpr int kNodes = 200;
  if (!RunUntil([&] { return joins.asking() == 0; }, kMin)) return;
  const int before = joins.joined();
  joins.Storm(kNodes, 2);
  (void)RunUntil([&] { return joins.asking() == 0; }, kMin);
  if (!kernel.failed() && joins.joined() != before + kNodes)
    kernel.Fail("INV-9", absl::StrCat("of ", kNodes, " nodes that came at rest ", joins.joined() - before,
                                      " were let in"));
}

// INV-8: queues are bounded.
void World::CheckQueues() {
  size_t relays = 0;
  for (const auto& machine : machines) {
    for (const auto& [job, keeper] : machine->keepers()) relays = std::max(relays, keeper->relays_held());
  }
  const size_t held = head->serving() ? head->outbox().stats().held_now : 0;
  if (relays > 300 || held > 50'000 || network.waiting_max() > 10'000) {
    kernel.Fail("INV-8", absl::StrCat("queues grow: ", relays, " relays at a rank, ", held, " effects held, ",
                                      network.waiting_max(), " messages waiting"));
  }
}

// ---------------------------------------------------------------- users

std::string World::DrawSpec(Program* program) {
  Rng& rng = kernel.rng;
  program->sdk = rng.Chance(0.6);
  program->step_time = kernel.Between(5 * kSec, 20 * kSec);
  program->startup = kernel.Between(200 * kMs, 8 * kSec);
  if (rng.Chance(0.5)) program->steps = static_cast<int64_t>(5 + rng.Below(60));
  if (rng.Chance(0.7)) program->checkpoint_every = static_cast<int>(1 + rng.Below(6));
  if (rng.Chance(0.1)) program->crash_at_start = 0.1;
  if (profile.shared_directory && rng.Chance(0.5)) program->directory = "shared";
  program->keep = static_cast<int>(1 + rng.Below(4));
  if (rng.Chance(0.5)) program->commit_timeout = kernel.Between(20 * kSec, 5 * kMin);
  if (rng.Chance(0.5)) program->join_timeout = kernel.Between(kMin, 5 * kMin);
  program->ignores_term = rng.Chance(0.3) ? 0.5 : 0.05;
  int room = 0;
  for (const auto& machine : machines) room += machine->config().cpus;
  const int most = std::max(1, std::min(room / 2, 64));
  const int count = 1 + static_cast<int>(rng.Below(static_cast<uint64_t>(most)) * rng.Unit());
  std::string text =
      absl::StrCat("name: j", submitted_, "\nrun: train\nresources: {cpus: ", 1 + rng.Below(2), "}\n");
  ranks_drawn_ = {count, count};
  if (rng.Chance(0.3)) {
    ranks_drawn_.second = count + static_cast<int>(rng.Below(8));
    absl::StrAppend(&text, "ranks: {min: ", count, ", max: ", ranks_drawn_.second, "}\n");
  } else {
    absl::StrAppend(&text, "ranks: ", count, "\n");
  }
  absl::StrAppend(&text, "restart: {budget: ", 1 + rng.Below(30), ", oom: ", rng.Below(4),
                  ", before_first_step: ", rng.Below(4), "}\n");
  absl::StrAppend(&text, "progress: {stall: ", 60 + rng.Below(120),
                  "s, startup: 5m, on_stall: ", rng.Chance(0.4) ? "kill" : "report", "}\n");
  absl::StrAppend(&text, "stop_grace: ", 1 + rng.Below(20), "s\n");
  if (rng.Chance(0.1)) absl::StrAppend(&text, "overlap: allow\n");
  if (rng.Chance(0.1)) absl::StrAppend(&text, "limits: {time: ", 2 + rng.Below(10), "m}\n");
  if (rng.Chance(0.3)) absl::StrAppend(&text, "priority: ", rng.Below(3), "\n");
  if (submitted_ % 2 == 0) {
    absl::StrAppend(&text, "checkpoint: {uri: /ckpt/",
                    program->directory.empty() ? absl::StrCat(submitted_) : program->directory,
                    ", replicas: ", 1 + submitted_ % 3, "}\n");
  }
  DrawInPlace(program, &text);
  return text;
}

// Most programs of such a job join to stay, and a few of those let go so late that their keeper ends them.
void World::DrawInPlace(Program* program, std::string* text) {
  if (!elastic_rng_.Chance(profile.in_place)) return;
  ++kernel.counts["job in place"];
  const uint64_t spares = elastic_rng_.Chance(0.3) ? 1 + elastic_rng_.Below(2) : 0;
  if (spares > 0) ++kernel.counts["job with spares"];
  absl::StrAppend(text, "elastic: {mode: in-place, spares: ", spares, "}\n");
  program->stays = program->sdk && elastic_rng_.Chance(0.9);
  // Where it may be: two to four ranks have a copy of the model together.
  const int unit = 2 + static_cast<int>(elastic_rng_.Below(3));
  if (ranks_drawn_.first % unit == 0 && ranks_drawn_.second % unit == 0 && elastic_rng_.Chance(0.7)) {
    ++kernel.counts["job of a mesh in place"];
    absl::StrAppend(text, "mesh: {dp: \"*\", tp: ", unit, "}\n");
  }
  if (elastic_rng_.Chance(0.2)) program->letting_go = static_cast<int64_t>(elastic_rng_.Below(10 * kSec));
  program->pauses = elastic_rng_.Chance(0.7);
}

void World::Submit(Client& client) {
  ++submitted_;
  Program program;
  const std::string text = DrawSpec(&program);
  GT_CHECK(SpecOf(text) != nullptr);
  programs_of_text_[text] = program;
  core::ClientSubmit submit{text, {}, "/runs/{job}"};
  if (kernel.rng.Chance(0.03)) {  // fits as it is sent and not as it is stored
    submit.run_dir = "/";
    for (int i = 0; i < 600; ++i) submit.run_dir += "{job}/";
  }
  submit.takeover = kernel.rng.Chance(0.7);  // else a second launch into the shared directory is refused
  client.Ask(submit, kernel.Between(20 * kSec, 3 * kMin),
             [this](const std::optional<core::ClientReply>& reply) {
               if (reply && reply->ok) known_jobs_.emplace_back(nlohmann::json::parse(reply->json).at("job"));
             });
}

void World::ClientLoop(int index) {
  kernel.After(kernel.Between(kSec, 40 * kSec), [this, index] {
    if (quiet_) return;
    Client& client = *clients[static_cast<size_t>(index)];
    if (!client.busy()) {
      const bool more = submitted_ < profile.jobs_max;
      const JobId job = known_jobs_.empty() ? JobId() : known_jobs_[kernel.rng.Below(known_jobs_.size())];
      const double dice = kernel.rng.Unit();
      if (more && (known_jobs_.empty() || dice < 0.5)) {
        Submit(client);
      } else if (!job.empty() && dice < 0.08) {
        client.Ask(core::ClientStop{job, dice < 0.02, "enough"}, kMin, nullptr);
      } else if (!job.empty() && dice < 0.14) {  // most are refused: their job files allow one number
        client.Ask(core::ClientScale{job, 1 + static_cast<int>(kernel.rng.Below(6)), kernel.rng.Chance(0.2)},
                   kMin, nullptr);
      } else if (!job.empty() && dice < 0.6) {
        client.Ask(core::ClientEvents{job, 0, absl::Seconds(20)}, kMin, nullptr);
      } else if (!job.empty() && dice < 0.7) {
        client.Ask(core::ClientLogs{job, std::nullopt, 0, false, 0}, kMin, nullptr);
      } else if (!job.empty() && dice < 0.8) {
        client.Ask(core::ClientWhy{job}, kMin, nullptr);
      } else {
        client.AskAgain(kMin, nullptr);
      }
    }
    ClientLoop(index);
  });
}

// ---------------------------------------------------------------- rest

bool World::TrulyRunning(const core::HeadSnapshot::Job& job) {
  const Gang* gang = ranks.FindGang(job.id, job.generation.value);
  if (gang == nullptr) return false;
  for (int rank = 0; rank < static_cast<int>(job.rank_nodes.size()); ++rank) {
    const auto it = gang->ranks.find(rank);
    if (it == gang->ranks.end()) return false;
    if (it->second->hung) continue;  // the job asked that it only be told of it
    if (!it->second->alive) return false;
  }
  return true;
}

// Whether what the living nodes have free is less than the job needs.
bool World::TrulyWaiting(const core::HeadSnapshot::Job& waiting) {
  const spec::JobSpec* spec = SpecOf(disk.jobs().at(waiting.id).spec_text);
  const int need = spec->resources.cpus.value_or(1);
  std::map<NodeId, int> free;
  for (const auto& machine : machines) {
    if (machine->config().clone) continue;
    const auto node = disk.durable().find(absl::StrCat("node/", machine->config().node.value));
    if (node == disk.durable().end()) continue;
    const auto& its = std::get<core::NodeRecord>(node->second);
    if (its.unclean || its.drain.kind == core::NoticeKind::kLeave) continue;
    free[machine->config().node] = machine->config().cpus;
  }
  for (const auto& [id, job] : disk.jobs()) {
    if (core::IsFinal(job.state) || !job.grant) continue;
    for (const NodeId& node : job.unreleased) {
      if (id == waiting.id) free[node] = 0;
    }
    if (job.generation <= job.revoked && job.unreleased.empty()) continue;
    const spec::JobSpec* other = SpecOf(job.spec_text);
    for (const auto* ranks : {&job.grant->ranks, &job.grant->waiting}) {
      for (const core::RankPlace& rank : *ranks) free[rank.node] -= other->resources.cpus.value_or(1);
    }
  }
  int room = 0;
  for (const auto& [node, cpus] : free) room += std::max(0, cpus) / need;
  return room < spec->ranks.value_or(spec::Range{}).min;
}

// INV-7 at rest: no process is left of what is over.
std::string World::Leftovers() {
  for (const auto& [pid, rank] : ranks.living()) {
    if (rank->stuck) continue;
    const auto it = disk.jobs().find(rank->job);
    const bool over = it == disk.jobs().end() || core::IsFinal(it->second.state);
    // A job that waits may keep processes, one that runs needs those that are in it.
    if (!over && rank->kept && it->second.generation <= it->second.revoked) continue;
    if (over || rank->kept || it->second.revoked.value >= rank->generation) {
      return absl::StrCat("a process of ", rank->job.value, " g", rank->generation, " rank ", rank->rank,
                          " is left on m", rank->machine);
    }
  }
  return "";
}

// No copies of the checkpoints of a job that is over are left either; and the holders of copies of a running
// job have been told so.
std::string World::LeftoverCopies() {
  for (const auto& machine : machines) {
    if (machine->config().clone || !machine->agent_alive()) continue;
    for (const JobId& job : machine->copies()) {
      const auto it = disk.jobs().find(job);
      if (it == disk.jobs().end() || core::IsFinal(it->second.state))
        return absl::StrCat("copies of ", job.value, " are left on m", machine->index());
    }
    for (const auto& [id, job] : disk.jobs()) {
      if (core::IsFinal(job.state) || !job.grant) continue;
      for (const core::NodePlace& holder : job.grant->holders) {
        kernel.counts["holders outside at rest"] += 1;
        if (holder.node == machine->config().node && !machine->copies().contains(id))
          return absl::StrCat("m", machine->index(), " keeps no copies of ", id.value);
      }
    }
  }
  return "";
}

// Finds, at rest, living nodes on which nothing of an ended generation runs and which have not said so.
std::string World::Unreleased() {
  for (const auto& [id, job] : disk.jobs()) {
    for (const NodeId& node : job.unreleased) {
      for (const auto& machine : machines) {
        if (machine->config().node != node || machine->config().clone || !machine->agent_alive()) continue;
        const bool runs =
            std::any_of(ranks.living().begin(), ranks.living().end(), [&, &job = id](const auto& item) {
              return item.second->job == job && item.second->machine == machine->index() &&
                     !item.second->kept;
            });
        if (!runs)
          return absl::StrCat("m", machine->index(), " has not said that it holds nothing of ", id.value);
      }
    }
  }
  return "";
}

std::string World::Unsettled() {
  if (!head->serving() || head->paused()) return "the head does not serve";
  if (!head->outbox().Idle()) return "the head's outbox is not empty";
  const core::HeadSnapshot snapshot = head->core()->Snapshot();
  for (const core::HeadSnapshot::Job& job : snapshot.jobs) {
    if (core::IsFinal(job.state)) continue;
    if (job.state == core::JobState::kRunning && TrulyRunning(job)) continue;
    const bool waits = job.state == core::JobState::kQueued || job.state == core::JobState::kWaiting;
    if (waits && TrulyWaiting(job)) continue;
    return absl::StrCat(job.id.value, " is ", core::Name(job.state), " at g", job.generation.value, " (",
                        job.reason, ")");
  }
  if (const std::string copies = LeftoverCopies(); !copies.empty()) return copies;
  if (const std::string node = Unreleased(); !node.empty()) return node;
  return Leftovers();
}

}  // namespace gtrain::sim
