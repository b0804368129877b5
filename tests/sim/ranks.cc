#include "tests/sim/ranks.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "elastic/plan/agree.h"
#include "runtime/core/agent/rank_reports.h"
#include "runtime/core/values/rank_notes.h"
#include "tests/sim/checker.h"

namespace gtrain::sim {

namespace {
constexpr int64_t kPause = 2 * kSec;
}  // namespace

int64_t Training::TimeOf(int64_t rate) const {
  if (rate == 0) return 0;
  return static_cast<int64_t>(static_cast<double>(state_bytes) / static_cast<double>(rate) * kSec);
}

Gang* Ranks::FindGang(const JobId& job, uint64_t generation) {
  const auto it = gangs_.find({job, generation});
  return it == gangs_.end() ? nullptr : &it->second;
}

const Program& Ranks::ProgramOf(const JobId& job) {
  const auto it = programs.find(job);
  return it != programs.end() ? it->second : programs.emplace(job, program_of(job)).first->second;
}

RankPtr Ranks::Random() {
  if (living_.empty()) return nullptr;
  auto it = living_.begin();
  std::advance(it, static_cast<long>(kernel_.rng.Below(living_.size())));
  return it->second;
}

bool IsOf(const RankProcess& rank, const Gang& gang) {
  return rank.generation == gang.generation && !rank.kept && !rank.waits;
}

Gang& Ranks::GangOf(const RankProcess& rank, int world, uint64_t timeline) {
  Gang& gang = gangs_[{rank.job, rank.generation}];
  if (gang.world == 0) {
    gang.job = rank.job;
    gang.generation = rank.generation;
    gang.timeline = timeline;
    gang.world = world;
    gang.step = checkpoints[rank.job].newest_step;
  }
  return gang;
}

RankPtr Ranks::Spawn(RankPtr rank, int world, uint64_t timeline) {
  rank->pid = next_pid_++;
  rank->born = {rank->generation, rank->rank};
  Gang& gang = GangOf(*rank, world, timeline);
  const Program& program = ProgramOf(rank->job);
  if (program.sdk) rank->worker.emplace(world);
  checker_.RankStarts(*rank, gang);
  living_[rank->pid] = rank;
  gang.ranks[rank->rank] = rank;
  if (kernel_.rng.Chance(program.crash_at_start)) {
    kernel_.After(kernel_.Between(0, program.startup),
                  [this, rank] { KillProcess(rank, keeper::Cause::kExited, 3, 0); });
  }
  kernel_.After(program.startup / 2 + kernel_.Between(0, program.startup), [this, rank] {
    if (!rank->alive || rank->asked_to_end) return;
    if (!rank->worker) return Up(rank);
    rank->stays = rank->in_place && ProgramOf(rank->job).stays;
    Join(rank);
  });
  return rank;
}

void Ranks::SpawnBeside(const RankPtr& rank, int world) {
  rank->pid = next_pid_++;
  rank->born = {rank->generation, rank->rank};
  rank->waits = true;
  const Program& program = ProgramOf(rank->job);
  if (program.sdk) rank->worker.emplace(world);
  checker_.StartsBeside(*rank);
  living_[rank->pid] = rank;
  if (kernel_.rng.Chance(program.crash_at_start)) {
    kernel_.After(kernel_.Between(0, program.startup),
                  [this, rank] { KillProcess(rank, keeper::Cause::kExited, 3, 0); });
  }
  ComeUp(rank, program.startup / 2 + kernel_.Between(0, program.startup));
}

// Wherever it waits by then.
void Ranks::ComeUp(const RankPtr& rank, int64_t delay) {
  kernel_.After(delay, [this, rank] {
    if (!rank->alive || rank->stuck || rank->hung || rank->asked_to_end || !rank->waits) return;
    if (rank->frozen) return ComeUp(rank, kSec);
    rank->stays = rank->in_place && ProgramOf(rank->job).stays && rank->worker.has_value();
    if (rank->let_go) rank->let_go();
  });
}

void Ranks::Join(const RankPtr& rank) {
  Do(rank, rank->worker->Step(
               core::WorkerJoin{absl::StrCat(rank->job.value, "/", rank->generation, "/", rank->rank)},
               kernel_.Now()));
  AwaitTable(rank, rank->generation, ProgramOf(rank->job).join_timeout);
}

// The library answers, whatever the program does; only a process that gets no processor time does not.
void Ranks::Revoke(const RankPtr& rank) {
  rank->over = rank->asked_to_end = true;
  if (kernel_.now() < rank->computes_until) rank->computed = rank->share;
  (void)rank->worker->Step(core::WorkerOver{"the generation is over"}, kernel_.Now());
  const int64_t mostly = ProgramOf(rank->job).letting_go;
  if (mostly == 0 || rank->stuck) return;
  const bool slow = kernel_.rng.Chance(ProgramOf(rank->job).lets_go_late);
  LetGo(rank, slow ? kernel_.Between(0, 20 * kSec) : kernel_.Between(kMs, mostly));
}

void Ranks::Ask(const RankPtr& rank) {
  rank->asked = true;
  const int64_t mostly = ProgramOf(rank->job).letting_go;  // it has nothing else to do
  if (mostly > 0 && !rank->stuck) LetGo(rank, kernel_.Between(kMs, mostly));
}

void Ranks::LetGo(const RankPtr& rank, int64_t delay) {
  kernel_.After(delay, [this, rank, generation = rank->generation] {
    if (!rank->alive || rank->stuck || rank->generation != generation) return;
    if (rank->frozen) return LetGo(rank, kSec);
    if (rank->let_go) rank->let_go();
  });
}

void Ranks::GoOn(const RankPtr& rank, uint64_t generation, int number, int world, uint64_t timeline) {
  kernel_.Note(static_cast<uint64_t>(rank->pid), "process ", rank->job.value, " g", rank->generation,
               " rank ", rank->rank, " on m", rank->machine, " goes on as g", generation, " rank ", number);
  rank->generation = generation;
  rank->rank = number;
  rank->kept = rank->released = rank->over = rank->asked_to_end = rank->up = rank->waits = false;
  rank->noticed = false;
  rank->worker.emplace(world);
  Gang& gang = GangOf(*rank, world, timeline);
  checker_.RankGoesOn(*rank, gang);
  gang.ranks[number] = rank;
  const Program& program = ProgramOf(rank->job);
  const int64_t busy =
      program.training ? std::max<int64_t>(0, rank->computes_until - kernel_.now()) : program.startup / 4;
  Rejoin(rank, busy + kernel_.Between(kMs, 300 * kMs));
}

// When the program comes to it.
void Ranks::Rejoin(const RankPtr& rank, int64_t delay) {
  kernel_.After(delay, [this, rank, generation = rank->generation] {
    if (!rank->alive || rank->hung || rank->asked_to_end || rank->generation != generation) return;
    if (rank->frozen) return Rejoin(rank, kSec);
    Join(rank);
  });
}

// A program that waits in vain for the others asks who is missing and ends.
void Ranks::AwaitTable(const RankPtr& rank, uint64_t generation, int64_t timeout) {
  kernel_.After(timeout, [this, rank, generation] {
    if (!rank->alive || rank->up || rank->asked_to_end || rank->generation != generation) return;
    if (rank->frozen || rank->hung) return AwaitTable(rank, generation, kSec);
    Do(rank, rank->worker->Step(core::WorkerOverdue{0}, kernel_.Now()));
    kernel_.After(2 * kSec, [this, rank, generation] {
      const bool goes_on = rank->stays && (rank->over || rank->generation != generation);
      if (!rank->up && !rank->hung && !goes_on) KillProcess(rank, keeper::Cause::kExited, 1, 0);
    });
  });
}

bool Ranks::Committed(const JobId& job, uint64_t timeline, int64_t step) const {
  const auto own = checkpoints.find(job);
  if (own != checkpoints.end() && own->second.committed.contains({timeline, step})) return true;
  return saves.Committed(job.value, timeline, step);
}

void Ranks::Freeze(const RankPtr& rank, int64_t duration) {
  if (!rank->alive || rank->frozen) return;
  rank->frozen = true;
  kernel_.Note(0xF4EE, "process ", rank->pid, " stands still for ", duration / kMs, " ms");
  kernel_.After(duration, [this, rank] {
    rank->frozen = false;
    rank->thawed_at = kernel_.now();
    for (const std::string& text : std::exchange(rank->unread, {})) FromAgent(rank, text);
  });
}

void Ranks::FreezeMachine(int machine, int64_t duration) {
  for (const auto& [pid, rank] : std::map(living_)) {
    if (rank->machine == machine) Freeze(rank, duration);
  }
}

void Ranks::Do(const RankPtr& rank, core::WorkerStepResult result) {
  for (const core::WorkerEffect& effect : result.effects) {
    if (!rank->relay) return;
    if (std::holds_alternative<core::SendJoined>(effect)) rank->relay(R"({"type":"joined"})");
    if (const auto* exchange = std::get_if<core::SendExchange>(&effect)) {
      rank->relay(absl::StrCat(R"({"type":"exchange","sequence":)", exchange->sequence, R"(,"blob":")",
                               absl::Base64Escape(exchange->blob), "\"}"));
    }
    if (const auto* overdue = std::get_if<core::SendOverdue>(&effect)) {
      rank->relay(absl::StrCat(R"({"type":"overdue","sequence":)", overdue->sequence, "}"));
    }
    if (const auto* link = std::get_if<core::SendLinkDown>(&effect)) {
      rank->relay(absl::StrCat(R"({"type":"link","peer":)", link->peer, R"(,"text":")", link->text, "\"}"));
    }
    if (const auto* pause = std::get_if<core::SendPause>(&effect))
      rank->relay(absl::StrCat(R"({"type":"pause","paused":)", pause->paused ? "true}" : "false}"));
    if (const auto* note = std::get_if<core::SendNote>(&effect)) {
      rank->relay(absl::StrCat(R"({"type":")", note->kind, R"(","text":")", note->text, "\"}"));
    }
  }
}

void Ranks::FromAgent(const RankPtr& rank, const std::string& text) {
  if (!rank->alive || !rank->worker || rank->hung) return;
  if (rank->frozen) return rank->unread.push_back(text);
  if (text == core::kPauseText) return Do(rank, rank->worker->Step(core::WorkerPause{}, kernel_.Now()));
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  core::WorkerTable event;
  if (lines.empty() || !absl::StartsWith(lines[0], "table ")) return;
  if (!absl::SimpleAtoi(lines[0].substr(6), &event.sequence)) return;
  for (size_t i = 1; i < lines.size(); ++i) {
    event.blobs.emplace_back();
    absl::Base64Unescape(lines[i], &event.blobs.back());
  }
  Do(rank, rank->worker->Step(event, kernel_.Now()));
  if (auto blobs = rank->worker->TakeTable(0)) {
    checker_.BarrierPassed(*rank, *blobs);
    Up(rank);
  }
}

void Ranks::Up(const RankPtr& rank) {
  if (rank->up) return;
  rank->up = true;
  Gang& gang = gangs_[{rank->job, rank->generation}];
  if (++gang.ups < gang.world || gang.ticking) return;
  gang.ticking = true;
  const Program& program = ProgramOf(gang.job);
  const bool saves_some = program.checkpoint_every > 0 || program.training;
  if (!program.sdk || !saves_some) return Begin(gang, gang.step);
  saves.Restore(gang, program, [this, job = gang.job, g = gang.generation](absl::StatusOr<int64_t> step) {
    Gang& resumed = gangs_[{job, g}];
    if (resumed.ranks.at(0)->stays && resumed.ranks.at(0)->over) return;
    if (!IsOf(*resumed.ranks.at(0), resumed)) return;
    if (step.ok()) return Begin(resumed, *step);
    const RankPtr rank = resumed.ranks.at(0);
    if (absl::IsUnavailable(step.status())) MeetStorageFault(rank, std::string(step.status().message()));
    KillProcess(rank, keeper::Cause::kExited, kernel_.rng.Chance(0.2) ? 75 : 1, 0);
  });
}

// Does what the library does: it reports the fault, and the program ends with the error.
void Ranks::MeetStorageFault(const RankPtr& rank, const std::string& text) {
  if (!rank->alive || !rank->worker || !rank->relay) return;
  const auto said = rank->worker->Step(core::WorkerNote{core::kStorageNote, text}, kernel_.Now());
  if (said.effects.empty()) return;  // its generation is over
  ++kernel_.counts["storage fault met"];
  Do(rank, said);
  if (!rank->asked_to_end) checker_.RankMeetsStorageFault(*rank);
}

// As a sample ledger: where its generation begins, and once more when nothing is left.
void Ranks::SayWhere(const Gang& gang, const std::string& text) {
  const RankPtr& rank = gang.ranks.at(0);
  if (!rank->alive || !rank->worker || !rank->relay || !IsOf(*rank, gang)) return;
  const auto said = rank->worker->Step(core::WorkerNote{core::kSamplesNote, text}, kernel_.Now());
  if (said.effects.empty()) return;  // its generation is over
  Do(rank, said);
  if (text == kAllTrained) checker_.RankIsDone(*rank);
}

void Ranks::Begin(Gang& gang, int64_t step) {
  if (ProgramOf(gang.job).training) return BeginTraining(gang, step);
  gang.step = step;
  for (const auto& [number, rank] : gang.ranks) {  // what those that stayed have, the others get from them
    if (IsOf(*rank, gang)) gang.step = std::max(gang.step, rank->step);
  }
  gang.stepped_at = kernel_.now();
  kernel_.Note(gang.generation, "gang ", gang.job.value, " g", gang.generation, " is whole at step ",
               gang.step);
  SayWhere(gang, absl::StrCat("from step ", gang.step));
  MayPause(gang);
  const int64_t step_time = ProgramOf(gang.job).step_time;
  kernel_.After(step_time, [this, job = gang.job, g = gang.generation] { Tick(job, g); });
}

// As elastic/exec/elastic_run.cc: who has the newest step gives its state to those that have it not; the
// checkpoint counts where nobody has a state.
void Ranks::BeginTraining(Gang& gang, int64_t restored) {
  const Training& training = *ProgramOf(gang.job).training;
  std::vector<elastic::MemberState> members;
  for (const auto& [number, rank] : gang.ranks)
    members.push_back({.applied = rank->step, .held = -1, .as_made = rank->step < 0});
  const elastic::Agreement agreed = elastic::Agree(members, std::vector<int>(members.size()), 1);
  int64_t takes = kernel_.Between(kMs, 20 * kMs), transfer = 0;
  sharding::SampleCursor cursor;
  if (agreed.step >= 0) {
    cursor = gang.ranks.at(agreed.source())->cursor;
    if (agreed.AnyNeeds()) transfer = training.TimeOf(training.link_rate);
  } else {
    cursor = sharding::Advance(training.samples, {}, restored);
    if (restored > 0) takes += training.TimeOf(training.store_rate);
  }
  // A copy is up to half as fast as its link.
  takes += kernel_.Between(0, takes);
  transfer += kernel_.Between(0, transfer);
  const FirstBatch first = FirstBatchOf(gang, agreed, transfer);
  kernel_.After(takes,
                [this, job = gang.job, g = gang.generation, cursor, first] { Train(job, g, cursor, first); });
}

// Those that are new get the state while the others compute, or have what these computed when they came.
Ranks::FirstBatch Ranks::FirstBatchOf(const Gang& gang, const elastic::Agreement& agreed, int64_t transfer) {
  FirstBatch first;
  std::vector<elastic::BatchShare> computed;
  const std::vector<int> cells(gang.ranks.size());
  const elastic::PartHandOver hand_over = elastic::HandOverOf(agreed, cells, 0);
  const bool any_new = agreed.step >= 0 && agreed.AnyNeeds();
  for (const auto& [number, rank] : gang.ranks) {
    computed.push_back(rank->computed);
    first.shares.push_back(any_new ? elastic::FirstShareOf(hand_over, number)
                                   : elastic::BatchShare{number, gang.world});
  }
  if (agreed.step >= 0 && elastic::IsComputed(agreed, computed)) {
    first.takes = transfer;
    ++kernel_.counts["batch kept when others came"];
    return first;
  }
  const Training& training = *ProgramOf(gang.job).training;
  first.computes = training.StepTime(any_new ? static_cast<int>(hand_over.sources.size()) : gang.world);
  first.takes = std::max(transfer, first.computes);
  return first;
}

void Ranks::Train(const JobId& job, uint64_t generation, const sharding::SampleCursor& cursor,
                  const FirstBatch& first) {
  Gang& gang = gangs_[{job, generation}];
  if (!CanStep(gang)) return;  // somebody was lost meanwhile, and what has come of the copy is nothing
  gang.step = cursor.step;
  gang.cursor = cursor;
  gang.stepped_at = gang.saved_at = kernel_.now();
  // What is in memory is as old as it was: a new generation puts no save off.
  std::optional<int64_t> saved_at;
  for (const auto& [number, rank] : gang.ranks) {
    if (rank->step >= 0 && rank->saved_at) saved_at = std::max(saved_at.value_or(0), *rank->saved_at);
  }
  gang.saved_at = saved_at.value_or(gang.saved_at);
  for (const auto& [number, rank] : gang.ranks) {
    rank->saved_at = gang.saved_at;
    rank->step = rank->stays ? cursor.step : -1;
    rank->cursor = cursor;
  }
  kernel_.Note(gang.generation, "gang ", gang.job.value, " g", gang.generation, " trains from step ",
               gang.step);
  if (on_begin) on_begin(gang);
  SayWhere(gang, absl::StrCat("from step ", gang.step));
  MayPause(gang);
  Compute(gang, first.computes);
  for (const auto& [number, rank] : gang.ranks) rank->share = first.shares[static_cast<size_t>(number)];
  kernel_.After(first.takes, [this, job, generation] { Tick(job, generation); });
}

int64_t Ranks::StepTime(const Gang& gang) {
  const Program& program = ProgramOf(gang.job);
  return program.training ? program.training->StepTime(gang.world) : program.step_time;
}

// Each rank computes its share of the next batch, and hears of nothing meanwhile.
void Ranks::Compute(const Gang& gang, int64_t takes) {
  for (const auto& [number, rank] : gang.ranks) {
    rank->computes_until = kernel_.now() + takes;
    rank->share = {number, gang.world};
    rank->computed = {0, 0};
  }
}

// All ranks have the sum of the gradients, and make the update.
void Ranks::Apply(Gang& gang) {
  const Program& program = ProgramOf(gang.job);
  if (!program.training) return;
  const sharding::SampleOptions& samples = program.training->samples;
  const sharding::SampleRange batch = sharding::BatchAt(samples, gang.cursor);
  gang.cursor = sharding::Advance(samples, gang.cursor);
  for (const auto& [number, rank] : gang.ranks) rank->cursor = gang.cursor;
  if (on_batch) on_batch(gang, batch);
  Compute(gang, StepTime(gang));
}

bool Ranks::CanStep(const Gang& gang) const {
  if (static_cast<int>(gang.ranks.size()) < gang.world) return false;
  const int first = gang.ranks.begin()->second->machine;
  for (const auto& [number, rank] : gang.ranks) {
    if (!rank->alive || rank->hung || rank->frozen || !rank->up || rank->asked_to_end || !IsOf(*rank, gang) ||
        !reachable(first, rank->machine))
      return false;
  }
  return true;
}

void Ranks::Tick(const JobId& job, uint64_t generation) {
  Gang& gang = gangs_[{job, generation}];
  bool any = false;
  for (const auto& [number, rank] : gang.ranks) any = any || (rank->alive && IsOf(*rank, gang));
  if (!any) return;
  const Program& program = ProgramOf(job);
  if (CanStep(gang)) {
    ++gang.step;
    gang.stepped_at = kernel_.now();
    for (const auto& [number, rank] : gang.ranks) rank->step = rank->stays ? gang.step : -1;
    checker_.GangSteps(gang);
    Apply(gang);
    Report(gang);
    if (program.steps > 0 && gang.step >= program.steps) {
      SayWhere(gang, kAllTrained);
      for (const auto& [number, rank] : std::map(gang.ranks)) {
        kernel_.After(kernel_.Between(0, kSec),
                      [this, rank = rank] { KillProcess(rank, keeper::Cause::kExited, 0, 0); });
      }
      return;
    }
  } else {
    ReportLinks(gang);
    for (const auto& [number, rank] : gang.ranks) {
      if (!rank->alive || !rank->lies || !rank->report || !IsOf(*rank, gang)) continue;
      constexpr int64_t kLie = 999999;
      rank->report(absl::StrCat("{\"step\":", kLie, "}\n"));
      checker_.RankLies(*rank, kLie);
    }
  }
  const int64_t pause = CanStep(gang) && Pauses(gang) ? kPause : 0;
  kernel_.After(pause + StepTime(gang), [this, job, generation] { Tick(job, generation); });
}

void Ranks::MayPause(const Gang& gang) {
  const RankPtr rank = gang.ranks.at(0);
  if (!rank->stays || !IsOf(*rank, gang) || !ProgramOf(gang.job).pauses) return;
  Do(rank, rank->worker->Step(core::WorkerPauses{false}, kernel_.Now()));
}

// As elastic/exec/elastic_run.cc: they stand still for others, who come, or do not.
bool Ranks::Pauses(Gang& gang) {
  const RankPtr rank = gang.ranks.at(0);
  if (!rank->worker || !rank->worker->pause_requested()) return false;
  ++kernel_.counts["pause for others"];
  if (ProgramOf(gang.job).training) Compute(gang, 0);
  Do(rank, rank->worker->Step(core::WorkerPauses{true}, kernel_.Now()));
  kernel_.After(kPause, [this, job = gang.job, generation = gang.generation, rank] {
    Gang& paused = gangs_[{job, generation}];
    if (!CanStep(paused)) return;
    ++kernel_.counts["pause in vain"];
    Do(rank, rank->worker->Step(core::WorkerPauses{false}, kernel_.Now()));
    if (ProgramOf(paused.job).training) Compute(paused, StepTime(paused));
  });
  return true;
}

// A rank that waits long finds out which way is broken (comm/ucx/link_probe.h); either side may be the first,
// or the only one.
void Ranks::ReportLinks(const Gang& gang) {
  constexpr int64_t kFoundOut = 13 * kSec;
  if (kernel_.now() - gang.stepped_at < kFoundOut) return;
  const RankPtr first = gang.ranks.begin()->second;
  const auto say = [&](const RankPtr& from, const RankPtr& to) {
    if (!from->worker || !from->alive || from->hung || from->frozen || !from->up || !IsOf(*from, gang))
      return;
    if (kernel_.rng.Chance(0.7))
      Do(from, from->worker->Step(core::WorkerLinkDown{to->rank, "no answer"}, kernel_.Now()));
  };
  for (const auto& [number, rank] : gang.ranks) {
    if (reachable(first->machine, rank->machine)) continue;
    say(first, rank);
    say(rank, first);
  }
}

// Its time has come, or a machine goes: then once.
bool Ranks::SaveIsDue(const Gang& gang) {
  const Program& program = ProgramOf(gang.job);
  const bool saves = program.training || program.checkpoint_every > 0;
  const bool noticed = std::ranges::any_of(gang.ranks, [](const auto& item) { return item.second->noticed; });
  if (saves && program.sdk && noticed && !gang.saved_for_notice) return true;
  if (!program.training) return saves && gang.step % program.checkpoint_every == 0;
  const int64_t every = program.training->save_every;
  return every > 0 && kernel_.now() - gang.saved_at >= every;
}

void Ranks::Save(Gang& gang) {
  if (!saves.Save(gang)) return;
  gang.saved_at = kernel_.now();
  for (const auto& [number, rank] : gang.ranks) rank->saved_at = gang.saved_at;
  gang.saved_for_notice =
      std::ranges::any_of(gang.ranks, [](const auto& item) { return item.second->noticed; });
}

void Ranks::Report(Gang& gang) {
  const Program& program = ProgramOf(gang.job);
  const bool due = SaveIsDue(gang);
  if (due && program.sdk) Save(gang);
  if (due && !program.sdk) {
    Checkpoints& kept = checkpoints[gang.job];
    kept.committed.insert({gang.timeline, gang.step});
    kept.newest_step = std::max(kept.newest_step, gang.step);
  }
  for (const auto& [number, rank] : gang.ranks) {
    if (!rank->report || !rank->relay) continue;
    if (program.sdk) {
      rank->relay(absl::StrCat(R"({"type":"progress","step":)", gang.step,
                               R"(,"loss":0.5,"samples":64,"collective":)", gang.step, "}"));
    } else {
      rank->report(
          absl::StrCat("{\"step\":", gang.step, due && number == 0 ? ",\"checkpoint\":\"c\"" : "", "}\n"));
    }
  }
}

// SIGTERM, or for an SDK rank the word of its keeper. Most end soon.
void Ranks::Term(const RankPtr& rank, bool save) {
  if (!rank->alive) return;
  rank->asked_to_end = true;
  rank->over = rank->over || !save;
  rank->termed = rank->termed || !save;
  if (rank->hung || rank->stuck || rank->frozen || kernel_.rng.Chance(ProgramOf(rank->job).ignores_term))
    return;
  kernel_.After(kernel_.Between(5 * kMs, save ? 4 * kSec : 1500 * kMs), [this, rank, save] {
    KillProcess(rank, save && rank->worker ? keeper::Cause::kExited : keeper::Cause::kStopped, 0,
                save && rank->worker ? 0 : 15);
  });
}

// An SDK rank sees it; a program that does not expect the signal dies of it, one that does saves and asks to
// be run again, or takes no notice.
void Ranks::Notice(const RankPtr& rank, uint32_t seconds, int signal) {
  if (!rank->alive || rank->stuck || rank->frozen) return;
  rank->noticed = true;
  if (rank->worker && rank->up)
    return Do(rank, rank->worker->Step(core::WorkerNotice{absl::Seconds(seconds)}, kernel_.Now()));
  if (signal == 0 || kernel_.rng.Chance(0.3)) return;
  const bool saves = kernel_.rng.Chance(0.5);
  kernel_.After(kernel_.Between(kMs, saves ? 20 * kSec : 10 * kMs), [this, rank, saves, signal] {
    KillProcess(rank, saves ? keeper::Cause::kExited : keeper::Cause::kSignal, saves ? 75 : 0,
                saves ? 0 : signal);
  });
}

void Ranks::KillProcess(const RankPtr& rank, keeper::Cause cause, int code, int signal) {
  if (!rank->alive) return;
  rank->alive = false;
  living_.erase(rank->pid);
  checker_.RankEnds(*rank, cause, code);
  kernel_.Note(static_cast<uint64_t>(rank->pid), "process ", rank->job.value, " g", rank->generation,
               " rank ", rank->rank, " on m", rank->machine, " ends: cause ", static_cast<int>(cause),
               " code ", code, " signal ", signal);
  if (rank->exited) {
    rank->exited(keeper::Exited{rank->generation, rank->rank, rank->pid, cause, code, signal, "",
                                code != 0 || signal != 0 ? absl::StrCat("line ", kernel_.rng.Below(3)) : ""});
  }
  rank->relay = nullptr;
  rank->report = nullptr;
  rank->exited = nullptr;
  rank->let_go = nullptr;
}

void Ranks::Orphan(const RankPtr& rank) {
  rank->relay = nullptr;
  rank->report = nullptr;
  rank->exited = nullptr;
  rank->let_go = nullptr;
  if (rank->worker) {
    kernel_.After(kernel_.Between(kMs, 2 * kSec),
                  [this, rank] { KillProcess(rank, keeper::Cause::kLost, 1, 0); });
  }
}

}  // namespace gtrain::sim
