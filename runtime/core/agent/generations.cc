#include "runtime/core/agent/generations.h"

#include <algorithm>
#include <csignal>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/json_depth.h"
#include "base/probe.h"
#include "base/units.h"
#include "nlohmann/json.hpp"
#include "runtime/core/agent/lease.h"
#include "runtime/core/agent/near_copies.h"
#include "runtime/core/agent/rank_environment.h"
#include "runtime/core/agent/starter.h"
#include "runtime/core/agent/tails.h"

namespace gtrain::core {
namespace {

int SignalNumber(const std::string& name) {
  static const std::map<std::string, int> kNumbers = {
      {"SIGTERM", SIGTERM}, {"SIGINT", SIGINT},   {"SIGUSR1", SIGUSR1}, {"SIGUSR2", SIGUSR2},
      {"SIGHUP", SIGHUP},   {"SIGQUIT", SIGQUIT}, {"SIGCONT", SIGCONT}, {"SIGALRM", SIGALRM}};
  const auto it = kNumbers.find(name);
  return it == kNumbers.end() ? SIGTERM : it->second;
}

// A keeper's numbers go on to the head, whose codec refuses a whole message for one that cannot be: an exit
// refused for ever would hold up its job (fault B7).
constexpr int kSignalMax = 1024;
int64_t PidOf(int64_t pid) { return std::max<int64_t>(pid, -1); }

ExitCause CauseOf(keeper::Cause cause) { return static_cast<ExitCause>(static_cast<int>(cause)); }
static_assert(static_cast<int>(ExitCause::kLost) == static_cast<int>(keeper::Cause::kLost));

}  // namespace

Generations::Generations(AgentContext& context, AgentModel& model, Starter& starter, Lease& lease,
                         NearCopies& copies, Tails& tails)
    : context_(context),
      model_(model),
      config_(context.config()),
      starter_(starter),
      lease_(lease),
      copies_(copies),
      tails_(tails) {}

// ---------------------------------------------------------------- the head's orders

void Generations::OnRevoke(const Revoke& revoke) {
  AgentJob& record = model_.RecordOf(revoke.job);
  record.revoked = std::max(record.revoked, revoke.generation);
  record.stopping = record.stopping || revoke.mode != EndMode::kReform;
  End(record, revoke);
  if (record.generations.count(revoke.generation) == 0) {  // never started here, or over long ago
    GT_PROBE("agent.revoke_of_unknown");
    OweGone(revoke.job, record, revoke.generation, "");
  }
}

void Generations::End(AgentJob& record, const Revoke& revoke) {
  const JobId& job = revoke.job;
  const Generation up_to = revoke.generation;
  std::set<Generation> ends;
  for (auto& [number, generation] : record.generations) {
    if (number > up_to) continue;
    generation.gone_told = false;  // the head may not have heard
    if (generation.gone) continue;
    generation.ended = true;
    ends.insert(number);  // a keeper that has never heard of it answers only where it is named
  }
  const bool ends_kept = !revoke.keep && record.Waits();
  if (ends_kept) record.LoseWaiting();
  TellGone(job, record);
  if (ends.empty() && !ends_kept) return;
  ends.insert(up_to);
  const auto grace_ms = std::clamp<int64_t>(absl::ToInt64Milliseconds(revoke.grace), 0, 24 * 3600 * 1000);
  for (const Generation number : ends) {
    const auto mode = static_cast<keeper::End>(static_cast<int>(revoke.mode));
    context_.Command(job, keeper::EndGeneration{number.value, mode, static_cast<uint64_t>(grace_ms),
                                                revoke.reason, revoke.keep});
  }
  context_.Say(absl::StrCat("end ", job.value, " up to generation ", up_to.value, ": ", revoke.reason));
}

void Generations::OnAckExit(const AckExit& ack) {
  AgentRank* rank = model_.Find(ack.job, ack.generation, ack.rank);
  if (rank == nullptr || !rank->exit) return;
  rank->acked = true;
  context_.Command(ack.job, keeper::AckExit{ack.generation.value, ack.rank});
  FinishIfSettled(ack.job);
}

void Generations::OnForget(const ForgetJob& forget) {
  copies_.Drop(forget.job);
  const auto it = model_.jobs.find(forget.job);
  if (it == model_.jobs.end()) return;
  it->second.forgotten = true;
  for (auto& [number, generation] : it->second.generations) {
    for (auto& [rank, info] : generation.ranks) info.acked = true;
  }
  context_.Command(forget.job, keeper::Quit{"the job is over"});
  FinishIfSettled(forget.job);
}

void Generations::OnNoticeRanks(const NoticeRanks& notice) {
  AgentGeneration* generation = model_.Find(notice.job, notice.generation);
  if (generation == nullptr || generation->gone) return;
  const auto seconds = std::clamp<int64_t>(absl::ToInt64Seconds(notice.left), 0, 1'000'000);
  // A head that restarted, or a connection that broke, makes it come again: the signal is given once. After a
  // restart of this agent the keeper knows.
  const bool anew = notice.notice > generation->noticed;
  const int signal = anew ? SignalNumber(generation->spec.preempt.signal) : 0;
  if (anew) generation->noticed = notice.notice;
  context_.Command(notice.job, keeper::Notice{notice.generation.value, static_cast<uint32_t>(seconds), signal,
                                              notice.notice});
}

void Generations::OnRanksLeft(const RanksLeft& left) {
  const AgentGeneration* generation = model_.Find(left.job, left.generation);
  if (generation == nullptr || generation->gone) return;
  const std::string text = LeftText(left.ranks);
  for (const auto& [rank, info] : generation->ranks) {
    context_.Command(left.job, keeper::Relay{left.generation.value, rank, text});
  }
}

// Rank 0 tells the others, with the next step.
void Generations::OnPauseRanks(const PauseRanks& pause) {
  AgentGeneration* generation = model_.Find(pause.job, pause.generation);
  if (generation == nullptr || generation->gone || !generation->ranks.contains(0)) return;
  generation->asked_to_pause = true;
  context_.Command(pause.job, keeper::Relay{pause.generation.value, 0, kPauseText});
}

// ---------------------------------------------------------------- keepers

void Generations::OnKeeperLost(const KeeperLost& event) {
  const auto it = model_.jobs.find(event.job);
  if (it == model_.jobs.end()) return;
  it->second.LoseWaiting();
  if (std::exchange(it->second.keeper_leaves, false)) {
    const std::optional<PreparedStart> next = std::exchange(it->second.next, std::nullopt);
    if (next) starter_.Start(*next);
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
      OnExited(event.job, lost);
    }
    generation.gone = true;
    generation.clean = event.clean;
    generation.gone_message = event.clean ? "" : event.reason;
  }
  TellGone(event.job, it->second);
  const bool expected = it->second.forgotten || model_.leaving;
  if (!expected) context_.Say(absl::StrCat("keeper of ", event.job.value, " lost: ", event.reason));
  FinishIfSettled(event.job);
}

// Its agent died between the last acknowledgement and the head's word to forget the job; nobody would tell
// us.
bool Generations::LetsEmptyKeeperGo(const JobId& job, const keeper::State& state) {
  const auto known = model_.jobs.find(job);
  if (!state.generations.empty() || !state.kept.empty() || !state.coming.empty() ||
      (known != model_.jobs.end() && !known->second.keeper_leaves))
    return false;
  GT_PROBE("agent.empty_keeper_may_go");
  context_.Say(absl::StrCat("the keeper of ", job.value, " holds nothing any more: it may go"));
  model_.RecordOf(job).keeper_leaves = true;
  context_.Command(job, keeper::Quit{"nothing of the job is left here"});
  return true;
}

// Commands that were under way when a connection to the keeper broke were never read. A generation that has
// ended here and never began there is gone once the keeper has said so.
void Generations::EndWhatNeverBegan(const JobId& job, const AgentJob& record, const keeper::State& state) {
  for (const auto& [number, generation] : record.generations) {
    const bool there =
        std::any_of(state.generations.begin(), state.generations.end(),
                    [&number = number](const auto& held) { return held.generation == number.value; });
    if (there || generation.gone || !generation.ended) continue;
    GT_PROBE("agent.begin_keeper_never_heard");
    context_.Command(job,
                     keeper::EndGeneration{number.value, keeper::End::kReform, 5000, "revoked by the head"});
  }
}

void Generations::OnState(const JobId& job, const keeper::State& state) {
  if (!keeper::Compatible(state.protocol, config_.keeper_protocol)) {
    GT_PROBE("agent.keeper_of_another_version");
    // Leaving ends no rank: an agent of a version in between, or of the old one, still finds the keeper.
    return context_.Do(Leave{absl::FailedPreconditionError(
        absl::StrCat("the keeper of job ", job.value, " speaks keeper protocol ", state.protocol,
                     ", more than one version away from protocol ", config_.keeper_protocol, " of gtrain ",
                     config_.version,
                     ": start an agent of the version it came from, or of one in between; its ranks run "
                     "on until the keeper's lease is over"))});
  }
  if (LetsEmptyKeeperGo(job, state)) return;
  AgentJob& record = model_.RecordOf(job);
  if (context_.welcomed()) lease_.TellLease(job);
  record.revoked = std::max(record.revoked, Generation{state.highest_revoked});
  record.stopping =
      record.stopping || (state.highest_stopped > 0 && state.highest_stopped == state.highest_revoked);
  record.kept = Processes(state.kept);
  record.coming = Processes(state.coming);
  for (const keeper::GenerationHeld& held : state.generations) {
    AgentGeneration& generation = Adopt(job, record, held);
    record.run_dir = generation.run_dir;
    if (!record.forgotten) copies_.ShareNear(job, generation);  // else they are dropped
    if (held.generation <= record.revoked.value && !held.ending) {
      GT_PROBE("agent.revoke_keeper_never_heard");
      // A revoke that the keeper never heard: its agent died in between.
      End(record, {.job = job,
                   .generation = {held.generation},
                   .grace = absl::Seconds(5),
                   .reason = "revoked by the head"});
    }
    for (const keeper::Exited& exited : held.unacked) OnExited(job, exited);
    if (held.gone) OnGone(job, keeper::Gone{held.generation, held.clean, "", state.kept, state.coming});
  }
  EndWhatNeverBegan(job, record, state);
  if (context_.welcomed()) TellKept(job, record);
}

// The head may not have heard of those, or no more: it gives them a place or has them ended.
void Generations::TellKept(const JobId& job, AgentJob& record) {
  if (!record.Waits()) return;
  // The keeper may not have read it: its connection broke.
  if (record.forgotten) return context_.Command(job, keeper::Quit{"the job is over"});
  GT_PROBE("agent.tells_late_what_is_kept");
  OweGone(job, record, record.revoked, "");
}

// Reads the note that the agent which began the generation left with the keeper.
void Generations::ReadNote(const std::string& text, AgentGeneration& generation) {
  const auto note = nlohmann::json::parse(ShallowJson(text), nullptr, false);
  if (!note.is_object()) return;
  generation.run_dir = note.value("run_dir", "");
  generation.world_size = note.value("world_size", 0);
  generation.timeline = Timeline{note.value("timeline", uint64_t{0})};
  auto spec = config_.parse_spec(note.value("spec", ""));
  if (spec.ok()) generation.spec = *std::move(spec);
  generation.patterns = ProgressPatterns(generation.spec.progress);
  const nlohmann::json of_ranks = note.value("nics", nlohmann::json::object());
  for (const auto& [rank, nics] : of_ranks.items()) {
    int number = 0;
    if (absl::SimpleAtoi(rank, &number) && nics.is_string())
      generation.nics[number] = nics.get<std::string>();
  }
  std::string packed;
  if (!config_.unpack_grant || !absl::Base64Unescape(note.value("grant", ""), &packed)) return;
  auto grant = config_.unpack_grant(packed);
  if (!grant.ok()) return;
  generation.grant = *std::move(grant);
  if (std::string mac = note.value("mac", ""); !mac.empty())
    generation.seal = {std::move(packed), std::move(mac)};
}

AgentGeneration& Generations::Adopt(const JobId& job, AgentJob& record, const keeper::GenerationHeld& held) {
  const Generation number{held.generation};
  const bool known = record.generations.count(number) > 0;
  AgentGeneration& generation = record.generations[number];
  if (!known) {
    generation.generation = number;
    generation.started = context_.now();
    ReadNote(held.note, generation);
    GT_PROBE("agent.adopts");
    context_.Say(
        absl::StrCat("adopted ", held.ranks.size(), " ranks of ", job.value, " generation ", number.value));
  }
  generation.ended = generation.ended || held.ending;
  for (const keeper::RankHeld& rank : held.ranks) {
    AgentRank& info = generation.ranks[rank.rank];
    if (!info.exit) AdoptRank(job, held, rank, info);
    if (!known) AdoptNics(record, generation, rank.rank);
    // Of one that waits it is not known whether it could go on: its keeper says so next.
    if (!generation.IsMember(rank.rank) && info.status.state == RankState::kJoined)
      info.status.state = RankState::kRunning;
  }
  if (!known && !generation.ended) LoseUnstarted(job, generation);
  return generation;
}

void Generations::AdoptNics(AgentJob& record, AgentGeneration& generation, int rank) {
  const auto nics = generation.nics.find(rank);
  if (nics == generation.nics.end()) return;
  generation.ranks[rank].status.nics = nics->second;
  const GenerationGrant& grant = generation.grant;
  const bool granted = static_cast<size_t>(rank) < grant.ranks.size() + grant.waiting.size();
  const ProcessId born = granted ? PlaceOfRank(grant, rank).process : ProcessId{};
  record.nics[born.generation.value > 0 ? born : ProcessId{generation.generation, rank}] = nics->second;
}

// The agent that began the generation ended before it had ordered all of its ranks, and nobody starts them
// any more.
void Generations::LoseUnstarted(const JobId& job, AgentGeneration& generation) {
  const GenerationGrant& grant = generation.grant;
  for (int number = 0; number < static_cast<int>(grant.ranks.size() + grant.waiting.size()); ++number) {
    if (PlaceOfRank(grant, number).node != config_.node || generation.ranks.contains(number)) continue;
    GT_PROBE("agent.rank_was_never_ordered");
    AgentRank& info = generation.ranks[number];
    info.status = {job, generation.generation, number};
    info.status.state = RankState::kExited;
    RankExit exit;
    exit.job = job;
    exit.generation = generation.generation;
    exit.rank = number;
    exit.cause = ExitCause::kLost;
    exit.message = "the agent of its node ended before it was started";
    info.exit = std::move(exit);
    context_.Tell(RankExited{*info.exit});
  }
}

void Generations::AdoptRank(const JobId& job, const keeper::GenerationHeld& held,
                            const keeper::RankHeld& rank, AgentRank& info) {
  const Generation number{held.generation};
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
  if (!exited_and_acked) return;
  const bool told = std::any_of(held.unacked.begin(), held.unacked.end(),
                                [&](const keeper::Exited& exit) { return exit.rank == rank.rank; });
  if (told) return;
  RankExit exit;  // the head has it already
  exit.job = job;
  exit.generation = number;
  exit.rank = rank.rank;
  info.exit = std::move(exit);
  info.acked = true;
  info.status.state = RankState::kExited;
}

void Generations::OnStarted(const JobId& job, const keeper::Started& started) {
  AgentRank* rank = model_.Find(job, Generation{started.generation}, started.rank);
  if (rank == nullptr || rank->exit) return;
  rank->status.pid = PidOf(started.pid);
  rank->heard_at = context_.now();
  if (rank->status.state == RankState::kStarting) rank->status.state = RankState::kRunning;
  rank->status_changed = true;
  context_.Tell(RanksStarted{job, Generation{started.generation}, {rank->status}});
  if (!started.other_cpus.empty()) {
    context_.Tell(AgentNote{
        job, Generation{started.generation}, started.rank, "warning",
        absl::StrCat("it is not bound to the CPUs that it was placed on: the kernel lets it run on ",
                     PrintRanks({started.other_cpus.begin(), started.other_cpus.end()}),
                     " (a control group of its agent allows no others; `systemctl show -p AllowedCPUs`)")});
  }
}

// To the head a rank that waits has joined when it could.
void Generations::OnReady(const JobId& job, const keeper::Ready& ready) {
  AgentRank* rank = model_.Find(job, Generation{ready.generation}, ready.rank);
  if (rank == nullptr || rank->exit) return;
  rank->sdk = rank->status.stays = rank->status_changed = true;
  if (!model_.Find(job, Generation{ready.generation})->IsMember(ready.rank))
    rank->status.state = RankState::kJoined;
  context_.Tell(RanksStarted{job, Generation{ready.generation}, {rank->status}});
}

void Generations::OnExited(const JobId& job, const keeper::Exited& exited) {
  AgentRank* rank = model_.Find(job, Generation{exited.generation}, exited.rank);
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
  context_.Say(absl::StrCat(job.value, " generation ", exited.generation, " rank ", exited.rank, ": ",
                            exited.message));
  context_.Tell(RankExited{*rank->exit});
}

std::vector<ProcessId> Generations::Processes(const std::vector<keeper::Kept>& kept) {
  std::vector<ProcessId> processes;
  for (const keeper::Kept& process : kept) {
    if (process.born > 0 && process.born_rank >= 0)
      processes.push_back({Generation{process.born}, process.born_rank});
  }
  return processes;
}

void Generations::OnGone(const JobId& job, const keeper::Gone& gone) {
  AgentGeneration* generation = model_.Find(job, Generation{gone.generation});
  // Its begin came behind an end that the keeper had answered, and the head has acknowledged that.
  if (generation == nullptr) return context_.Command(job, keeper::Forget{gone.generation});
  generation->gone = true;
  generation->clean = gone.clean;
  generation->gone_message = gone.message;
  model_.jobs[job].kept = Processes(gone.kept);
  model_.jobs[job].coming = Processes(gone.coming);
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
  tails_.MirrorTails();
  TellGone(job, model_.jobs[job]);
  FinishIfSettled(job);
}

// ---------------------------------------------------------------- what the head is told of the end

void Generations::OweGone(const JobId& job, AgentJob& record, Generation generation,
                          const std::string& message) {
  if (!record.owes_gone || record.owes_gone->generation < generation)
    record.owes_gone = GenerationGone{job, generation, true, message, record.kept, record.coming};
  TellGone(job, record);
}

void Generations::TellGone(const JobId& job, AgentJob& record) {
  if (!context_.welcomed()) return;
  const auto tell_owed = [&](Generation before) {
    if (!record.owes_gone || record.owes_gone->generation >= before) return;
    context_.Tell(*std::exchange(record.owes_gone, std::nullopt));
  };
  for (auto& [number, generation] : record.generations) {
    tell_owed(number);
    if (!generation.gone) return;
    if (std::exchange(generation.gone_told, true)) continue;
    context_.Tell(
        GenerationGone{job, number, generation.clean, generation.gone_message, record.kept, record.coming});
  }
  tell_owed(Generation{UINT64_MAX});
}

void Generations::FinishIfSettled(const JobId& job) {
  const auto it = model_.jobs.find(job);
  if (it == model_.jobs.end()) return;
  auto& generations = it->second.generations;
  for (auto entry = generations.begin(); entry != generations.end();) {
    AgentGeneration& generation = entry->second;
    const bool acked = std::all_of(generation.ranks.begin(), generation.ranks.end(),
                                   [](const auto& item) { return item.second.exit && item.second.acked; });
    // Generations of a forgotten job count, too: ForgetJob may have come before the welcome, and the head
    // waits.
    if (!generation.gone || !acked || !generation.gone_told) {
      ++entry;
      continue;
    }
    if (!it->second.forgotten) context_.Command(job, keeper::Forget{generation.generation.value});
    it->second.over = std::max(it->second.over, entry->first);
    entry = generations.erase(entry);
  }
}

}  // namespace gtrain::core
