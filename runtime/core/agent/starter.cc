#include "runtime/core/agent/starter.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "runtime/core/agent/generations.h"
#include "runtime/core/agent/lease.h"
#include "runtime/core/agent/near_copies.h"
#include "runtime/core/agent/rank_environment.h"
#include "runtime/core/agent/rank_network.h"

namespace gtrain::core {
namespace {

// The note that a later agent needs to adopt the generation; the keeper keeps it.
std::string NoteOf(const AgentConfig& config, const AgentGeneration& generation, const GrantSeal& seal) {
  const GenerationGrant& grant = generation.grant;
  nlohmann::json note = {{"run_dir", grant.run_dir},
                         {"world_size", grant.world_size},
                         {"timeline", grant.timeline.value},
                         {"spec", grant.spec_text}};
  for (const auto& [rank, nics] : generation.nics) note["nics"][absl::StrCat(rank)] = nics;
  if (!seal.bytes.empty()) {
    note["grant"] = absl::Base64Escape(seal.bytes);
    note["mac"] = seal.mac;
  } else if (config.pack_grant) {
    note["grant"] = absl::Base64Escape(config.pack_grant(grant));
  }
  return note.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

Starter::Starter(AgentContext& context, AgentModel& model, Generations& generations, Lease& lease,
                 NearCopies& copies)
    : context_(context),
      model_(model),
      config_(context.config()),
      generations_(generations),
      lease_(lease),
      copies_(copies) {}

// A fork bomb stops at half of what the machine can name, so everybody else goes on (fault P12).
uint64_t Starter::ProcessesMax(const spec::JobSpec& spec) const {
  if (spec.resources.processes) return static_cast<uint64_t>(*spec.resources.processes);
  return static_cast<uint64_t>(config_.pid_max) / 2;
}

// Each machine finds its own program for a bare name, by a PATH that need not have the virtual environment in
// which the job was launched; the error of a program that lacks a package does not say so.
void Starter::CompareProgram(const GenerationGrant& grant, const AgentGeneration& generation,
                             const std::map<std::string, std::string>& env) {
  const auto launched = env.find(kClientPython);
  const auto path = env.find("PATH");
  if (launched == env.end() || path == env.end() || generation.spec.run.empty()) return;
  const std::string& name = generation.spec.run[0];
  const std::string found = config_.find_program ? config_.find_program(name, path->second) : "";
  if (found.empty() || found == launched->second) return;
  context_.Tell(
      AgentNote{grant.job, grant.generation, -1, "warning",
                absl::StrCat(name, " is ", found, " here and was ", launched->second,
                             " where the job was launched. If it lacks packages: write the path of the "
                             "right one in the job, or `inherit_env: [PATH]`")});
}

void Starter::SayUnlimitedMemory(const GenerationGrant& grant, const AgentGeneration& generation) {
  if (config_.limits_memory || !generation.spec.resources.memory) return;
  context_.Tell(AgentNote{
      grant.job, grant.generation, -1, "warning",
      "resources.memory only chooses the machine: its agent may make no control group (cgroup) that "
      "limits memory, so a rank that takes more is not stopped. As a service with Delegate=yes, or as "
      "root, the agent may"});
}

void Starter::OnGrant(const PreparedStart& start) {
  if (model_.leaving) return;
  Start(start);
  while (model_.jobs.size() > kJobsMax) {
    const auto old = std::find_if(model_.job_order.begin(), model_.job_order.end(), [this](const JobId& job) {
      const AgentJob& record = model_.jobs[job];
      return record.generations.empty() && !record.Waits();
    });
    if (old == model_.job_order.end()) break;
    model_.jobs.erase(*old);
    model_.job_order.erase(old);
  }
}

// False: it is over before it began, runs already, or waits for the next keeper.
bool Starter::MayBegin(AgentJob& record, const PreparedStart& prepared) {
  const GenerationGrant& grant = prepared.start.grant;
  if (grant.generation <= record.revoked) {
    GT_PROBE("agent.grant_after_revoke");
    generations_.OweGone(grant.job, record, grant.generation, "it was revoked before it started here");
    return false;
  }
  if (grant.generation <= record.over) {
    // The head died before it had stored what it was told, and the next one takes it for still running.
    GT_PROBE("agent.grant_of_what_is_over");
    generations_.OweGone(grant.job, record, grant.generation, "it is over here");
    return false;
  }
  if (record.generations.count(grant.generation) > 0) {
    GT_PROBE("agent.grant_repeated");
    return false;
  }
  if (record.keeper_leaves) {
    GT_PROBE("agent.grant_waits_for_keeper");
    record.next = prepared;
    return false;
  }
  return true;
}

AgentGeneration& Starter::AddGeneration(AgentJob& record, const StartGeneration& message) {
  const GenerationGrant& grant = message.grant;
  AgentGeneration& generation = record.generations[grant.generation];
  generation.generation = grant.generation;
  generation.timeline = grant.timeline;
  generation.run_dir = grant.run_dir;
  generation.world_size = grant.world_size;
  generation.grant = grant;
  generation.seal = message.seal;
  generation.started = context_.now();
  const int all = grant.world_size + static_cast<int>(grant.waiting.size());
  for (int number = 0; number < all; ++number) {
    if (PlaceOfRank(grant, number).node != config_.node) continue;
    generation.ranks[number].status = {grant.job, grant.generation, number};
  }
  return generation;
}

// Checks and makes what a process needs before it is started. nullopt: everything is there.
std::optional<Starter::Failure> Starter::Prepare(AgentGeneration& generation, const StartFacts& facts) {
  const GenerationGrant& grant = generation.grant;
  auto spec = config_.parse_spec(grant.spec_text);
  if (!spec.ok()) {
    return Failure{ExitCause::kStartFailed,
                   absl::StrCat("the job text cannot be read here: ", spec.status().message())};
  }
  generation.spec = *std::move(spec);
  generation.patterns = ProgressPatterns(generation.spec.progress);
  copies_.ShareNear(grant.job, generation);
  const bool hosts_master =
      !grant.ranks.empty() && grant.ranks[0].node == config_.node && grant.master_port > 0;
  if (hosts_master && !facts.port_is_free) {
    return Failure{ExitCause::kAddressInUse,
                   absl::StrCat("MASTER_PORT ", grant.master_port, " on ", grant.master_address,
                                " is taken by another program")};
  }
  if (config_.too_many_ranks) {
    std::string why = config_.too_many_ranks(generation.ranks.size());
    if (!why.empty()) return Failure{ExitCause::kStartFailed, std::move(why)};
  }
  if (facts.run_dir.ok()) return std::nullopt;
  return Failure{ExitCause::kStartFailed,
                 absl::StrCat("the run directory cannot be used: ", facts.run_dir.message(),
                              ". Another place: gtrain launch --run-dir DIR")};
}

absl::StatusOr<keeper::StartRank> Starter::StartOf(const AgentGeneration& generation, const StartFacts& facts,
                                                   int number, const std::string& hash, bool compare) {
  const GenerationGrant& grant = generation.grant;
  keeper::StartRank start;
  start.token = config_.make_token();
  auto env = RankEnvironment(config_, grant, generation.spec, facts, number, start.token);
  if (!env.ok()) return env.status();
  if (compare) {
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
  const std::vector<CpuInfo>& infos = config_.inventory.cpu_infos;
  for (const int cpu : PlaceOfRank(grant, number).cpus) {
    // `gtrain agent --cpus` may say more than there are: such a rank is not bound.
    if (cpu < static_cast<int>(infos.size())) start.cpus.push_back(infos[cpu].id);
    if (infos.empty()) start.cpus.push_back(cpu);
  }
  start.memory_limit = generation.spec.resources.memory.value_or(0);
  start.tty = generation.spec.tty;
  start.takes_input = generation.spec.takes_input && number == 0;
  const ProcessId& process = PlaceOfRank(grant, number).process;
  start.born = process.generation.value;
  start.born_rank = process.rank;
  start.waits = number >= grant.world_size;
  return start;
}

// A process that goes on has the environment with which it was started.
void Starter::RememberNics(AgentJob& record, AgentGeneration& generation,
                           const std::vector<keeper::StartRank>& starts) {
  std::map<ProcessId, std::string> all;
  for (const keeper::StartRank& start : starts) {
    const ProcessId born{Generation{start.born}, start.born_rank};
    const bool goes_on = std::ranges::find(record.kept, born) != record.kept.end() ||
                         std::ranges::find(record.coming, born) != record.coming.end();
    std::string nics = goes_on ? record.nics[born] : NicsOf({start.env.begin(), start.env.end()});
    generation.ranks[start.rank].status.nics = nics;
    if (!nics.empty()) generation.nics[start.rank] = nics;
    all[goes_on ? born : ProcessId{generation.generation, start.rank}] = std::move(nics);
  }
  record.nics = std::move(all);
}

void Starter::Start(const PreparedStart& prepared) {
  const StartGeneration& message = prepared.start;
  AgentJob& record = model_.RecordOf(message.grant.job);
  record.run_dir = message.grant.run_dir;
  record.forgotten = false;
  if (!MayBegin(record, prepared)) return;
  AgentGeneration& generation = AddGeneration(record, message);
  const GenerationGrant& grant = generation.grant;
  if (const std::optional<Failure> failure = Prepare(generation, prepared.facts))
    return FailStart(generation, *failure);
  const std::string hash = config_.job_hash(generation.spec);
  std::vector<keeper::StartRank> starts;
  for (const auto& [number, info] : generation.ranks) {
    const bool compare = starts.empty() && record.over.value == 0;
    auto start = StartOf(generation, prepared.facts, number, hash, compare);
    if (!start.ok())
      return FailStart(generation, {ExitCause::kStartFailed, std::string(start.status().message())});
    starts.push_back(*std::move(start));
  }
  RememberNics(record, generation, starts);
  context_.Do(WriteFile{MembersPath(grant, config_.node), MembersJson(grant), grant.job});
  context_.Command(grant.job, keeper::BeginGeneration{
                                  grant.generation.value, static_cast<uint32_t>(starts.size()),
                                  generation.spec.resources.shm, NoteOf(config_, generation, message.seal),
                                  ProcessesMax(generation.spec)});
  record.LoseWaiting();         // they go on in this generation, or are ended
  lease_.TellLease(grant.job);  // before its ranks: the lease of those that it held before may be over
  for (keeper::StartRank& start : starts) context_.Command(grant.job, std::move(start));
  const size_t members = generation.Members(), waiting = generation.ranks.size() - members;
  context_.Say(absl::StrCat("start ", members, " of ", grant.world_size, " ranks of ", grant.job.value,
                            " generation ", grant.generation.value,
                            waiting == 0 ? "" : absl::StrCat(", and ", waiting, " for the next")));
}

// No process was started: each local rank's exit says why, and there is nothing to wait for.
void Starter::FailStart(AgentGeneration& generation, const Failure& failure) {
  const GenerationGrant& grant = generation.grant;
  for (auto& [number, info] : generation.ranks) {
    RankExit exit;
    exit.job = grant.job;
    exit.generation = grant.generation;
    exit.rank = number;
    exit.cause = failure.cause;
    exit.message = failure.message;
    info.status.state = RankState::kExited;
    info.exit = std::move(exit);
    context_.Tell(RankExited{*info.exit});
  }
  GT_PROBE("agent.start_failed");
  generation.gone = true;
  context_.Say(failure.message);
  generations_.TellGone(grant.job, model_.jobs[grant.job]);
}

}  // namespace gtrain::core
