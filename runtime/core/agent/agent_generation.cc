// Life of a generation on one node: start from a grant, adopt from a keeper, exchange, progress, end.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json_depth.h"
#include "base/probe.h"
#include "runtime/core/agent/agent_core_impl.h"
#include "runtime/core/agent/rank_environment.h"

namespace gtrain::core {

namespace {

constexpr size_t kTailMax = 64 << 10;
constexpr size_t kTablesKept = 4;

// A keeper's numbers go on to the head, whose codec refuses a whole message for one that cannot be: an exit
// refused for ever would hold up its job (fault B7).
constexpr int kSignalMax = 1024;
int64_t PidOf(int64_t pid) { return std::max<int64_t>(pid, -1); }

ExitCause CauseOf(keeper::Cause cause) { return static_cast<ExitCause>(static_cast<int>(cause)); }
static_assert(static_cast<int>(ExitCause::kLost) == static_cast<int>(keeper::Cause::kLost));

// What a later agent needs to adopt the generation; the keeper keeps it.
std::string NoteOf(const AgentConfig& config, const GenerationGrant& grant, const GrantSeal& seal) {
  nlohmann::json note = {{"run_dir", grant.run_dir},
                         {"world_size", grant.world_size},
                         {"timeline", grant.timeline.value},
                         {"spec", grant.spec_text}};
  if (!seal.bytes.empty()) {
    note["grant"] = absl::Base64Escape(seal.bytes);
    note["mac"] = seal.mac;
  } else if (config.pack_grant) {
    note["grant"] = absl::Base64Escape(config.pack_grant(grant));
  }
  return note.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

// A fork bomb stops at half of what the machine can name, so everybody else goes on (fault P12).
uint64_t AgentCore::Impl::ProcessesMax(const spec::JobSpec& spec) const {
  if (spec.resources.processes) return static_cast<uint64_t>(*spec.resources.processes);
  return static_cast<uint64_t>(config_.pid_max) / 2;
}

AgentGeneration* AgentCore::Impl::Find(const JobId& job, Generation generation) {
  const auto record = jobs_.find(job);
  if (record == jobs_.end()) return nullptr;
  const auto it = record->second.generations.find(generation);
  return it == record->second.generations.end() ? nullptr : &it->second;
}

AgentRank* AgentCore::Impl::Find(const JobId& job, Generation generation, int rank) {
  AgentGeneration* found = Find(job, generation);
  if (found == nullptr) return nullptr;
  const auto it = found->ranks.find(rank);
  return it == found->ranks.end() ? nullptr : &it->second;
}

// ---------------------------------------------------------------- start

void AgentCore::Impl::ShareNear(const JobId& job, const AgentGeneration& generation) {
  const spec::CheckpointPolicy& policy = generation.spec.checkpoint;
  const std::string folder = policy.uri.empty() ? "" : NearFolderOf(config_, policy.near);
  if (folder.empty()) return;
  copies_[job] = folder;
  if (policy.replicas == 0 || generation.grant.near_secret.empty()) return;
  effects_.push_back(ShareCopies{job, folder, generation.grant.near_secret});
}

// Of a bare name each machine finds its own, by a PATH that need not have the virtual environment in which
// the job was launched; a program that lacks a package then says nothing of why.
void AgentCore::Impl::CompareProgram(const GenerationGrant& grant, const AgentGeneration& generation,
                                     const std::map<std::string, std::string>& env) {
  const auto launched = env.find(kClientPython);
  const auto path = env.find("PATH");
  if (launched == env.end() || path == env.end() || generation.spec.run.empty()) return;
  const std::string& name = generation.spec.run[0];
  const std::string found = config_.find_program ? config_.find_program(name, path->second) : "";
  if (found.empty() || found == launched->second) return;
  Tell(AgentNote{grant.job, grant.generation, -1, "warning",
                 absl::StrCat(name, " is ", found, " here and was ", launched->second,
                              " where the job was launched. If it lacks packages: write the path of the "
                              "right one in the job, or `inherit_env: [PATH]`")});
}

void AgentCore::Impl::SayUnlimitedMemory(const GenerationGrant& grant, const AgentGeneration& generation) {
  if (config_.limits_memory || !generation.spec.resources.memory) return;
  Tell(AgentNote{
      grant.job, grant.generation, -1, "warning",
      "resources.memory only chooses the machine: its agent may make no control group (cgroup) that "
      "limits memory, so a rank that takes more is not stopped. As a service with Delegate=yes, or as "
      "root, the agent may"});
}

void AgentCore::Impl::Start(const StartGeneration& message) {
  const GenerationGrant& grant = message.grant;
  const auto [it, fresh] = jobs_.try_emplace(grant.job);
  if (fresh) job_order_.push_back(grant.job);
  AgentJob& record = it->second;
  record.run_dir = grant.run_dir;
  record.forgotten = false;
  if (grant.generation <= record.revoked) {
    GT_PROBE("agent.grant_after_revoke");
    return OweGone(grant.job, record, grant.generation, "it was revoked before it started here");
  }
  if (grant.generation <= record.over) {
    // The head died before it had stored what it was told, and the next one takes it for still running.
    GT_PROBE("agent.grant_of_what_is_over");
    return OweGone(grant.job, record, grant.generation, "it is over here");
  }
  if (record.generations.count(grant.generation) > 0) GT_PROBE("agent.grant_repeated");
  if (record.generations.count(grant.generation) > 0) return;  // repeated grant
  if (record.keeper_leaves) {
    GT_PROBE("agent.grant_waits_for_keeper");
    record.next = message;
    return;
  }
  AgentGeneration& generation = record.generations[grant.generation];
  generation.generation = grant.generation;
  generation.timeline = grant.timeline;
  generation.run_dir = grant.run_dir;
  generation.world_size = grant.world_size;
  generation.grant = grant;
  generation.seal = message.seal;
  generation.started = now_;
  for (size_t rank = 0; rank < grant.ranks.size(); ++rank) {
    if (grant.ranks[rank].node != config_.node) continue;
    const int number = static_cast<int>(rank);
    generation.ranks[number].status = {grant.job, grant.generation, number};
  }
  auto spec = config_.parse_spec(grant.spec_text);
  if (!spec.ok()) {
    return FailStart(generation, grant, ExitCause::kStartFailed,
                     absl::StrCat("the job text cannot be read here: ", spec.status().message()));
  }
  generation.spec = *std::move(spec);
  generation.patterns = ProgressPatterns(generation.spec.progress);
  ShareNear(grant.job, generation);
  const bool hosts_master =
      !grant.ranks.empty() && grant.ranks[0].node == config_.node && grant.master_port > 0;
  if (hosts_master && !config_.port_is_free(grant.master_address, grant.master_port)) {
    return FailStart(generation, grant, ExitCause::kAddressInUse,
                     absl::StrCat("MASTER_PORT ", grant.master_port, " on ", grant.master_address,
                                  " is taken by another program"));
  }
  if (config_.too_many_ranks) {
    const std::string why = config_.too_many_ranks(generation.ranks.size());
    if (!why.empty()) return FailStart(generation, grant, ExitCause::kStartFailed, why);
  }
  if (config_.make_run_dir) {
    const absl::Status made = config_.make_run_dir(grant.run_dir, grant.generation);
    if (!made.ok()) {
      return FailStart(generation, grant, ExitCause::kStartFailed,
                       absl::StrCat("the run directory cannot be used: ", made.message(),
                                    ". Another place: gtrain launch --run-dir DIR"));
    }
  }
  const std::string hash = config_.job_hash(generation.spec);
  std::vector<keeper::StartRank> starts;
  for (const auto& [number, info] : generation.ranks) {
    keeper::StartRank start;
    start.token = config_.make_token();
    auto env = RankEnvironment(config_, grant, generation.spec, number, start.token);
    if (!env.ok())
      return FailStart(generation, grant, ExitCause::kStartFailed, std::string(env.status().message()));
    if (starts.empty() && record.over.value == 0) {
      CompareProgram(grant, generation, *env);
      SayUnlimitedMemory(grant, generation);
    }
    start.generation = grant.generation.value;
    start.rank = number;
    start.argv = RankCommand(grant, generation.spec, config_.node, hash);
    start.env.assign(env->begin(), env->end());
    start.cwd = generation.spec.workdir.empty() ? grant.run_dir : generation.spec.workdir;
    start.out_path = RankLogPath(grant.run_dir, grant.generation, number, false);
    start.err_path = RankLogPath(grant.run_dir, grant.generation, number, true);
    start.report_path = ReportPath(grant.run_dir, grant.generation, number);
    start.notice_path = NoticePath(grant.run_dir, grant.generation, number);
    const std::vector<int>& cpus = grant.ranks[static_cast<size_t>(number)].cpus;
    start.cpus.assign(cpus.begin(), cpus.end());
    start.memory_limit = generation.spec.resources.memory.value_or(0);
    start.tty = generation.spec.tty;
    start.takes_input = generation.spec.takes_input && number == 0;
    starts.push_back(std::move(start));
  }
  effects_.push_back(WriteFile{MembersPath(grant, config_.node), MembersJson(grant), grant.job});
  Command(grant.job,
          keeper::BeginGeneration{grant.generation.value, static_cast<uint32_t>(starts.size()),
                                  generation.spec.resources.shm, NoteOf(config_, grant, message.seal),
                                  ProcessesMax(generation.spec)});
  TellLease(grant.job);  // before its ranks: the lease of those that it held before may be over
  for (keeper::StartRank& start : starts) Command(grant.job, std::move(start));
  why_ = absl::StrCat("start ", generation.ranks.size(), " of ", grant.world_size, " ranks of ",
                      grant.job.value, " generation ", grant.generation.value);
}

// No process was started: each local rank's exit says why, and there is nothing to wait for.
void AgentCore::Impl::FailStart(AgentGeneration& generation, const GenerationGrant& grant, ExitCause cause,
                                const std::string& message) {
  for (auto& [number, info] : generation.ranks) {
    RankExit exit;
    exit.job = grant.job;
    exit.generation = grant.generation;
    exit.rank = number;
    exit.cause = cause;
    exit.message = message;
    info.status.state = RankState::kExited;
    info.exit = std::move(exit);
    Tell(RankExited{*info.exit});
  }
  GT_PROBE("agent.start_failed");
  generation.gone = true;
  why_ = message;
  TellGone(grant.job, jobs_[grant.job]);
}

void AgentCore::Impl::End(const JobId& job, AgentJob& record, Generation up_to, EndMode mode,
                          absl::Duration grace, const std::string& reason) {
  std::set<Generation> ends;
  for (auto& [number, generation] : record.generations) {
    if (number > up_to) continue;
    generation.gone_told = false;  // the head may not have heard
    if (generation.gone) continue;
    generation.ended = true;
    ends.insert(number);  // a keeper that has never heard of it answers only where it is named
  }
  TellGone(job, record);
  if (ends.empty()) return;
  ends.insert(up_to);
  const auto grace_ms = std::clamp<int64_t>(absl::ToInt64Milliseconds(grace), 0, 24 * 3600 * 1000);
  for (const Generation number : ends) {
    Command(job, keeper::EndGeneration{number.value, static_cast<keeper::End>(static_cast<int>(mode)),
                                       static_cast<uint64_t>(grace_ms), reason});
  }
  why_ = absl::StrCat("end ", job.value, " up to generation ", up_to.value, ": ", reason);
}

// ---------------------------------------------------------------- keepers

void AgentCore::Impl::On(const FromKeeper& event) {
  std::visit([&](const auto& report) { Hear(event.job, report); }, event.report);
}

void AgentCore::Impl::On(const KeeperLost& event) {
  const auto it = jobs_.find(event.job);
  if (it == jobs_.end()) return;
  if (std::exchange(it->second.keeper_leaves, false)) {
    const std::optional<StartGeneration> next = std::exchange(it->second.next, std::nullopt);
    if (next) Start(*next);
    return;
  }
  for (auto& [number, generation] : it->second.generations) {
    if (generation.gone) continue;
    for (auto& [rank, info] : generation.ranks) {
      if (info.exit) continue;
      keeper::Exited lost;
      lost.generation = number.value;
      lost.rank = rank;
      lost.pid = info.status.pid;
      lost.cause = keeper::Cause::kLost;
      lost.message = event.reason;
      lost.tail = info.err.text.empty() ? info.out.text : info.err.text;
      Hear(event.job, lost);
    }
    generation.gone = true;
    generation.clean = event.clean;
    generation.gone_message = event.clean ? "" : event.reason;
  }
  TellGone(event.job, it->second);
  const bool expected = it->second.forgotten || leaving_;
  if (!expected) why_ = absl::StrCat("keeper of ", event.job.value, " lost: ", event.reason);
  FinishIfSettled(event.job);
}

void AgentCore::Impl::Hear(const JobId& job, const keeper::State& state) {
  if (!keeper::Compatible(state.protocol, config_.keeper_protocol)) {
    GT_PROBE("agent.keeper_of_another_version");
    // Leaving ends no rank: an agent of a version in between, or of the old one, still finds the keeper.
    effects_.push_back(Leave{absl::FailedPreconditionError(
        absl::StrCat("the keeper of job ", job.value, " speaks keeper protocol ", state.protocol,
                     ", more than one version away from protocol ", config_.keeper_protocol, " of gtrain ",
                     config_.version,
                     ": start an agent of the version it came from, or of one in between; its ranks run "
                     "on until the keeper's lease is over"))});
    return;
  }
  const auto known = jobs_.find(job);
  if (state.generations.empty() && (known == jobs_.end() || known->second.keeper_leaves)) {
    // Its agent died between the last acknowledgement and the head's word to forget the job; nobody would
    // tell us.
    GT_PROBE("agent.empty_keeper_may_go");
    why_ = absl::StrCat("the keeper of ", job.value, " holds nothing any more: it may go");
    if (known == jobs_.end()) job_order_.push_back(job);
    jobs_[job].keeper_leaves = true;
    return Command(job, keeper::Quit{"nothing of the job is left here"});
  }
  const auto [it, fresh] = jobs_.try_emplace(job);
  if (fresh) job_order_.push_back(job);
  AgentJob& record = it->second;
  if (welcomed_) TellLease(job);
  record.revoked = std::max(record.revoked, Generation{state.highest_revoked});
  record.stopping =
      record.stopping || (state.highest_stopped > 0 && state.highest_stopped == state.highest_revoked);
  for (const keeper::GenerationHeld& held : state.generations) {
    AgentGeneration* generation = AdoptOne(job, held);
    if (generation == nullptr) continue;
    record.run_dir = generation->run_dir;
    ShareNear(job, *generation);
    if (held.generation <= record.revoked.value && !held.ending) {
      GT_PROBE("agent.revoke_keeper_never_heard");
      // A revoke that the keeper never heard: its agent died in between.
      End(job, record, Generation{held.generation}, EndMode::kReform, absl::Seconds(5),
          "revoked by the head");
    }
    for (const keeper::Exited& exited : held.unacked) Hear(job, exited);
    if (held.gone) Hear(job, keeper::Gone{held.generation, held.clean, ""});
  }
  // What was under way when a connection to the keeper broke was never read. A generation that has ended here
  // and never began there is gone once the keeper has said so.
  for (const auto& [number, generation] : record.generations) {
    const bool there =
        std::any_of(state.generations.begin(), state.generations.end(),
                    [&number = number](const auto& held) { return held.generation == number.value; });
    if (there || generation.gone || !generation.ended) continue;
    GT_PROBE("agent.begin_keeper_never_heard");
    Command(job, keeper::EndGeneration{number.value, keeper::End::kReform, 5000, "revoked by the head"});
  }
}

AgentGeneration* AgentCore::Impl::AdoptOne(const JobId& job, const keeper::GenerationHeld& held) {
  AgentJob& record = jobs_[job];
  const Generation number{held.generation};
  const bool known = record.generations.count(number) > 0;
  AgentGeneration& generation = record.generations[number];
  if (!known) {
    const auto note = nlohmann::json::parse(ShallowJson(held.note), nullptr, false);
    generation.generation = number;
    generation.started = now_;
    if (note.is_object()) {
      generation.run_dir = note.value("run_dir", "");
      generation.world_size = note.value("world_size", 0);
      generation.timeline = Timeline{note.value("timeline", uint64_t{0})};
      auto spec = config_.parse_spec(note.value("spec", ""));
      if (spec.ok()) generation.spec = *std::move(spec);
      generation.patterns = ProgressPatterns(generation.spec.progress);
      std::string packed;
      if (config_.unpack_grant && absl::Base64Unescape(note.value("grant", ""), &packed)) {
        auto grant = config_.unpack_grant(packed);
        if (grant.ok()) generation.grant = *std::move(grant);
        if (std::string mac = note.value("mac", ""); grant.ok() && !mac.empty())
          generation.seal = {std::move(packed), std::move(mac)};
      }
    }
    GT_PROBE("agent.adopts");
    why_ = absl::StrCat("adopted ", held.ranks.size(), " ranks of ", job.value, " generation ", number.value);
  }
  generation.ended = generation.ended || held.ending;
  for (const keeper::RankHeld& rank : held.ranks) {
    AgentRank& info = generation.ranks[rank.rank];
    if (info.exit) continue;
    info.sdk = rank.sdk;
    info.status.job = job;
    info.status.generation = number;
    info.status.rank = rank.rank;
    info.status.pid = PidOf(rank.pid);
    info.status.state = rank.sdk       ? RankState::kJoined
                        : rank.running ? RankState::kRunning
                                       : RankState::kStarting;
    info.status_changed = true;
    const bool exited_and_acked = !rank.running && rank.pid < 0;
    if (!exited_and_acked) continue;
    const bool told = std::any_of(held.unacked.begin(), held.unacked.end(),
                                  [&](const keeper::Exited& exit) { return exit.rank == rank.rank; });
    if (!told) {  // the head has it already
      RankExit exit;
      exit.job = job;
      exit.generation = number;
      exit.rank = rank.rank;
      info.exit = std::move(exit);
      info.acked = true;
      info.status.state = RankState::kExited;
    }
  }
  return &generation;
}

void AgentCore::Impl::Hear(const JobId& job, const keeper::Started& started) {
  AgentRank* rank = Find(job, Generation{started.generation}, started.rank);
  if (rank == nullptr || rank->exit) return;
  rank->status.pid = PidOf(started.pid);
  rank->heard_at = now_;
  if (rank->status.state == RankState::kStarting) rank->status.state = RankState::kRunning;
  rank->status_changed = true;
  Tell(RanksStarted{job, Generation{started.generation}, {rank->status}});
}

void AgentCore::Impl::Hear(const JobId& job, const keeper::Exited& exited) {
  AgentRank* rank = Find(job, Generation{exited.generation}, exited.rank);
  if (rank == nullptr || rank->exit) return;
  RankExit exit;
  exit.job = job;
  exit.generation = Generation{exited.generation};
  exit.rank = exited.rank;
  exit.pid = PidOf(exited.pid);
  exit.cause = CauseOf(exited.cause);
  exit.exit_code = exited.code;
  exit.signal = std::clamp(exited.signal, 0, kSignalMax);
  // Code and signal speak for themselves; the head words them.
  const bool plain = exit.cause == ExitCause::kExited || exit.cause == ExitCause::kSignal;
  if (!plain) exit.message = exited.message;
  exit.tail = exited.tail;
  if (exit.exit_code != 0 && absl::StrContains(exit.tail, kSetupFailed)) {
    exit.message = "the job's `setup` failed on this node";
  }
  exit.storage = rank->storage;
  exit.step = rank->status.step;
  exit.loss = rank->status.loss;
  exit.diverged = rank->status.diverged;
  rank->exit = std::move(exit);
  rank->status.state = RankState::kExited;
  why_ =
      absl::StrCat(job.value, " generation ", exited.generation, " rank ", exited.rank, ": ", exited.message);
  Tell(RankExited{*rank->exit});
}

void AgentCore::Impl::Hear(const JobId& job, const keeper::Gone& gone) {
  AgentGeneration* generation = Find(job, Generation{gone.generation});
  // Its begin came behind an end that the keeper had answered, and the head has acknowledged that.
  if (generation == nullptr) return Command(job, keeper::Forget{gone.generation});
  generation->gone = true;
  generation->clean = gone.clean;
  generation->gone_message = gone.message;
  for (auto& [number, rank] : generation->ranks) {
    if (rank.exit) continue;  // else it never began: its end was quicker, and nobody has to hear of it
    RankExit never;
    never.job = job;
    never.generation = generation->generation;
    never.rank = number;
    never.cause = ExitCause::kStopped;
    rank.exit = std::move(never);
    rank.acked = true;
    rank.status.state = RankState::kExited;
  }
  MirrorTails();
  TellGone(job, jobs_[job]);
  FinishIfSettled(job);
}

// Of a generation that has nothing here. The head takes it for "this node holds nothing of the job up to
// there" and begins the next one, so it waits for those before it.
void AgentCore::Impl::OweGone(const JobId& job, AgentJob& record, Generation generation,
                              const std::string& message) {
  if (!record.owes_gone || record.owes_gone->generation < generation)
    record.owes_gone = GenerationGone{job, generation, true, message};
  TellGone(job, record);
}

// In the order of the generations: none before those that are older.
void AgentCore::Impl::TellGone(const JobId& job, AgentJob& record) {
  if (!welcomed_) return;
  const auto tell_owed = [&](Generation before) {
    if (!record.owes_gone || record.owes_gone->generation >= before) return;
    Tell(*std::exchange(record.owes_gone, std::nullopt));
  };
  for (auto& [number, generation] : record.generations) {
    tell_owed(number);
    if (!generation.gone) return;
    if (std::exchange(generation.gone_told, true)) continue;
    Tell(GenerationGone{job, number, generation.clean, generation.gone_message});
  }
  tell_owed(Generation{UINT64_MAX});
}

// Forgets what the head has acknowledged whole.
void AgentCore::Impl::FinishIfSettled(const JobId& job) {
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) return;
  auto& generations = it->second.generations;
  for (auto entry = generations.begin(); entry != generations.end();) {
    AgentGeneration& generation = entry->second;
    const bool acked = std::all_of(generation.ranks.begin(), generation.ranks.end(),
                                   [](const auto& item) { return item.second.exit && item.second.acked; });
    // Also of a job that is forgotten: the word may have come before the welcome, and the head waits.
    if (!generation.gone || !acked || !generation.gone_told) {
      ++entry;
      continue;
    }
    if (!it->second.forgotten) Command(job, keeper::Forget{generation.generation.value});
    it->second.over = std::max(it->second.over, entry->first);
    entry = generations.erase(entry);
  }
}

// ---------------------------------------------------------------- what ranks say

void AgentCore::Impl::Hear(const JobId& job, const keeper::RelayUp& relay) {
  AgentGeneration* generation = Find(job, Generation{relay.generation});
  AgentRank* rank = Find(job, Generation{relay.generation}, relay.rank);
  const RankSaid said = ReadRelay(relay.json);
  if (rank != nullptr && !generation->gone && said.kind == RankSaid::Kind::kExchange) {
    return Exchange(job, *generation, relay.rank, said, relay.id);
  }
  const bool of_storage = said.kind == RankSaid::Kind::kNote && said.note == kStorageNote;
  std::optional<uint64_t> done = relay.id;
  if (rank != nullptr && of_storage) {
    done = std::exchange(rank->storage_relay, relay.id);
    if (done == relay.id) done.reset();  // the keeper says it again to a new connection
  }
  if (done) Command(job, keeper::AckRelay{relay.generation, relay.rank, *done});
  if (rank == nullptr) return;
  rank->sdk = true;
  if (said.kind == RankSaid::Kind::kOverdue)
    return SayWhoIsMissing(job, *generation, relay.rank, said.sequence);
  if (said.kind == RankSaid::Kind::kLink)
    return Tell(LinkDown{job, generation->generation, relay.rank, said.peer, said.text});
  if (said.kind == RankSaid::Kind::kNote) return TakeNote(job, *generation, relay.rank, said);
  Apply(job, *generation, relay.rank, said);
}

// A storage that is away is away for all ranks of a machine: one of them speaks to the head, so that a job of
// many ranks costs a message a machine. The first word counts whatever it is: an earlier generation may have
// said that the storage is away.
void AgentCore::Impl::TakeNote(const JobId& job, AgentGeneration& generation, int number,
                               const RankSaid& said) {
  const bool first = !generation.notes.contains(said.note);
  AgentNote& note = generation.notes[said.note];
  if (said.note == kStorageNote) {
    generation.ranks.at(number).storage = said.text;
    if (!first && note.rank != number && (said.text.empty() || !note.text.empty())) return;
  }
  note = {job, generation.generation, number, said.note, said.text};
  Tell(note);
}

void AgentCore::Impl::Apply(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said) {
  AgentRank& rank = generation.ranks[number];
  if (rank.exit || said.kind == RankSaid::Kind::kNothing) return;
  if (said.kind == RankSaid::Kind::kJoined) {
    // The head is told now, not with the next heartbeat: should this machine be lost before, it would wait
    // for the lease of ranks that need none.
    rank.status.state = RankState::kJoined;
    next_heartbeat_ = now_;
  }
  rank.status_changed = true;
  if (said.kind == RankSaid::Kind::kCheckpoint || said.checkpoint) {
    const Timeline timeline = said.timeline ? Timeline{*said.timeline} : generation.timeline;
    generation.checkpoint = CheckpointReport{job,           generation.generation,
                                             timeline,      said.step.value_or(rank.status.step.value_or(0)),
                                             said.manifest, said.text};
    Tell(*generation.checkpoint);
  }
  if (said.kind != RankSaid::Kind::kProgress) return Heard(rank);
  if (said.step && said.step != rank.status.step) {
    Heard(rank);
    rank.status.step = said.step;
  }
  if (said.loss) {
    rank.status.diverged = !std::isfinite(*said.loss);
    rank.status.loss = rank.status.diverged ? std::nullopt : said.loss;
  }
  if (said.collective) rank.status.collective_sequence = *said.collective;
  if (said.waited) rank.status.waited_seconds = said.waited;
  if (said.joined) rank.status.joined_seconds = said.joined;
  if (!said.samples || *said.samples < 0) return;
  rank.samples += *said.samples;
  if (!rank.samples_at) {  // the first count began at an unknown time
    rank.samples_at = now_;
    rank.samples = 0;
    return;
  }
  const double seconds = absl::ToDoubleSeconds(now_ - *rank.samples_at);
  if (seconds < 0.5) return;
  const double rate = rank.samples / seconds;
  const double before = rank.status.samples_per_second.value_or(rate);
  rank.status.samples_per_second = 0.5 * (before + rate);
  rank.samples = 0;
  rank.samples_at = now_;
}

void AgentCore::Impl::Hear(const JobId& job, const keeper::Output& output) {
  AgentGeneration* generation = Find(job, Generation{output.generation});
  AgentRank* rank = Find(job, Generation{output.generation}, output.rank);
  if (rank == nullptr) return;
  AgentTail& tail = output.is_stderr ? rank->err : rank->out;
  tail.text += output.bytes;
  if (tail.text.size() > kTailMax) tail.text.erase(0, tail.text.size() - kTailMax);
  tail.end_offset = output.end_offset;
  tail.unsent += output.bytes.size();
  tail.changed = true;
  if (!output.bytes.empty()) Heard(*rank);
  TakeRefusal(job, *generation, output.rank, output);
  if (output.refused == 0 && output.dropped > rank->dropped_told) {
    rank->dropped_told = output.dropped * 2;  // said again when it doubles
    Tell(AgentNote{job, generation->generation, output.rank, "log-dropped",
                   absl::StrCat("rank ", output.rank,
                                " writes faster than its log may grow, or the disk refused a part: ",
                                output.dropped, " bytes dropped so far")});
  }
  if (generation->patterns.empty()) return;
  for (const std::string& line : tail.lines.Take(output.bytes)) {
    Apply(job, *generation, output.rank, generation->patterns.Match(line));
  }
}

// A full disk is full for all ranks of a machine: one of them speaks for all, and the last to be written
// again takes it back (fault P8).
void AgentCore::Impl::TakeRefusal(const JobId& job, AgentGeneration& generation, int number,
                                  const keeper::Output& output) {
  AgentRank& rank = generation.ranks.at(number);
  int& known = output.is_stderr ? rank.err_refused : rank.out_refused;
  if (std::exchange(known, output.refused) == output.refused) return;
  std::string text;
  if (output.refused != 0) {
    text =
        absl::StrCat("what ranks write is dropped, ", generation.run_dir,
                     "/logs cannot be written: ", strerror(output.refused),
                     output.refused == EFBIG
                         ? ". A file may not grow further there: raise `ulimit -f` where the agent is started"
                         : ". Free some space there",
                     "; they go on meanwhile");
  } else if (std::any_of(generation.ranks.begin(), generation.ranks.end(), [](const auto& item) {
               return item.second.out_refused != 0 || item.second.err_refused != 0;
             })) {
    return;
  }
  AgentNote& note = generation.notes[kLogsNote];
  if (note.text == text) return;
  note = {job, generation.generation, number, kLogsNote, std::move(text)};
  Tell(note);
}

void AgentCore::Impl::Hear(const JobId& job, const keeper::ReportBytes& report) {
  AgentGeneration* generation = Find(job, Generation{report.generation});
  AgentRank* rank = Find(job, Generation{report.generation}, report.rank);
  if (rank == nullptr) return;
  for (const std::string& line : rank->report_lines.Take(report.bytes)) {
    Apply(job, *generation, report.rank, ReadReportLine(line));
  }
}

void AgentCore::Impl::Hear(const JobId&, const keeper::ExecDone& done) {
  Tell(AgentAnswer{done.id, done.ok, done.output, static_cast<uint64_t>(done.status), true, done.err,
                   done.timed_out});
}

void AgentCore::Impl::Hear(const JobId&, const keeper::ConsoleTurn& turn) {
  Tell(AgentAnswer{.query = turn.id,
                   .ok = turn.ok,
                   .text = turn.out,
                   .next_offset = static_cast<uint64_t>(turn.status),
                   .end = turn.over || !turn.ok,
                   .err = turn.err,
                   .taken = turn.taken,
                   .at = turn.out_at});
}

// ---------------------------------------------------------------- exchange

void AgentCore::Impl::Exchange(const JobId& job, AgentGeneration& generation, int number,
                               const RankSaid& said, uint64_t relay) {
  AgentRank& rank = generation.ranks[number];
  rank.sdk = true;
  rank.exchange_relays[said.sequence] = relay;
  const auto done = generation.tables.find(said.sequence);
  if (done != generation.tables.end()) {  // repeated: its table got lost with a connection
    GT_PROBE("agent.table_given_again");
    Command(job, keeper::Relay{generation.generation.value, number, TableText(said.sequence, done->second)});
    Command(job, keeper::AckRelay{generation.generation.value, number, relay});
    rank.exchange_relays.erase(said.sequence);
    return;
  }
  AgentExchange& exchange = generation.exchanges[said.sequence];
  exchange.blobs[number] = said.blob;
  if (exchange.blobs.size() < generation.ranks.size()) return;
  if (static_cast<int>(exchange.blobs.size()) < generation.world_size) {
    return SendExchangePart(job, generation, said.sequence);
  }
  std::vector<std::string> blobs;  // every rank of the job is here: no need to ask the head
  for (auto& [member, blob] : exchange.blobs) blobs.push_back(std::move(blob));
  CompleteExchange(job, generation, said.sequence, blobs);
}

void AgentCore::Impl::SendExchangePart(const JobId& job, const AgentGeneration& generation,
                                       uint64_t sequence) {
  const auto it = generation.exchanges.find(sequence);
  if (it == generation.exchanges.end() || it->second.blobs.size() < generation.ranks.size()) return;
  ExchangePart part{job, generation.generation, sequence, {}};
  part.blobs.assign(it->second.blobs.begin(), it->second.blobs.end());
  Tell(std::move(part));
}

// A rank has waited long enough to give up and asks for whom. Of other nodes only the head knows: it answers
// a part that it has already.
void AgentCore::Impl::SayWhoIsMissing(const JobId& job, const AgentGeneration& generation, int number,
                                      uint64_t sequence) {
  const auto exchange = generation.exchanges.find(sequence);
  if (exchange == generation.exchanges.end()) return;  // the table is on its way
  std::vector<int> missing;
  for (const auto& [rank, info] : generation.ranks) {
    if (!exchange->second.blobs.contains(rank)) missing.push_back(rank);
  }
  GT_PROBE("agent.exchange_overdue");
  if (missing.empty()) return SendExchangePart(job, generation, sequence);
  Command(job, keeper::Relay{generation.generation.value, number, MissingText(sequence, missing)});
}

// Tables first, acknowledgements after: a crash in between repeats a table rather than losing one.
void AgentCore::Impl::CompleteExchange(const JobId& job, AgentGeneration& generation, uint64_t sequence,
                                       const std::vector<std::string>& blobs) {
  const std::string table = TableText(sequence, blobs);
  const uint64_t number = generation.generation.value;
  for (const auto& [rank, info] : generation.ranks) Command(job, keeper::Relay{number, rank, table});
  for (auto& [rank, info] : generation.ranks) {
    const auto relay = info.exchange_relays.find(sequence);
    if (relay == info.exchange_relays.end()) continue;
    Command(job, keeper::AckRelay{number, rank, relay->second});
    info.exchange_relays.erase(relay);
  }
  generation.exchanges.erase(sequence);
  generation.tables[sequence] = blobs;
  while (generation.tables.size() > kTablesKept) generation.tables.erase(generation.tables.begin());
}

}  // namespace gtrain::core
