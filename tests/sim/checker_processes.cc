// The invariants of processes: who runs where, as which rank, and in whose room.
#include <algorithm>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "job/spec/mesh.h"
#include "runtime/core/values/job_state.h"
#include "runtime/core/values/rank_notes.h"
#include "tests/sim/checker.h"
#include "tests/sim/machine.h"

namespace gtrain::sim {

// The head goes by the time of the notice that it heard last, and the cloud has taken that back since, or not
// done by then what it said, and may have given another notice that nobody has heard.
bool Checker::CloudKeptItsMachine(int machine) const {
  const auto node = node_on ? nodes_.find(node_on(machine)) : nodes_.end();
  if (node == nodes_.end() || !node->second.heard_leave) return false;
  const bool stands = node->second.announced_until == std::numeric_limits<int64_t>::max();
  return !stands || node->second.leaves_at <= kernel_.now();
}

// INV-2: no two processes hold one rank of one generation, and without the SDK none of two unless the job
// waives that.
void Checker::RankStarts(const RankProcess& rank, const Gang& gang) {
  const core::JobRecord* record = Record(rank.job);
  const spec::JobSpec* spec = record == nullptr ? nullptr : spec_of(record->spec_text);
  if (spec != nullptr && spec->overlap == spec::Overlap::kAllow) {
    for (const RankProcess* other : unfenced_[rank.job])
      kernel_.counts["rank beside an older generation, allowed"] += other->generation < rank.generation;
    if (!rank.worker) unfenced_[rank.job].insert(&rank);
  } else if (!rank.worker) {
    for (const RankProcess* other : unfenced_[rank.job]) {
      // SIGKILL has been sent to one in state D: it writes nothing more. The others are exceptions of
      // docs/protocols/invariants.md: a copy of a node's state, and ranks whose keeper was killed.
      const bool keeper_killed = !other->exited;
      if (CloudKeptItsMachine(other->machine)) continue;
      if (other->generation >= rank.generation || other->stuck || keeper_killed || shares_key(other->machine))
        continue;
      kernel_.Fail("INV-2", absl::StrCat("rank ", rank.rank, " of ", G(rank.job, rank.generation),
                                         " starts on m", rank.machine, " while rank ", other->rank,
                                         " of generation ", other->generation, " runs on m", other->machine,
                                         ": nothing keeps both from writing"));
    }
    unfenced_[rank.job].insert(&rank);
  }
  CheckTrueRoom(rank, spec == nullptr ? 1 : spec->resources.cpus.value_or(1));
  HoldsRank(rank, gang);
}

void Checker::StartsBeside(const RankProcess& rank) {
  const core::JobRecord* record = Record(rank.job);
  const spec::JobSpec* spec = record == nullptr ? nullptr : spec_of(record->spec_text);
  ++kernel_.counts["process starts beside a generation"];
  CheckTrueRoom(rank, spec == nullptr ? 1 : spec->resources.cpus.value_or(1));
  HoldsPlace(rank);
}

void Checker::ComesUp(const RankProcess& rank) {
  ++kernel_.counts["process comes up beside a generation"];
  if (!rank.kept) ++generations_[{rank.job, rank.generation}].up_beside;
}

void Checker::WaitsOn(const RankProcess& rank) {
  ++kernel_.counts["process waits on"];
  if (kept_.erase(rank.pid) == 0)
    kernel_.Fail("INV-2", absl::StrCat("process ", rank.pid, " waits on and was not kept"));
  HoldsPlace(rank);
  if (rank.released) ++generations_[{rank.job, rank.generation}].up_beside;
}

// INV-2 and INV-6: a process waits where the grant says, and alone.
void Checker::HoldsPlace(const RankProcess& rank) {
  const std::string what = absl::StrCat("process ", rank.pid, " waits as rank ", rank.rank, " of ",
                                        G(rank.job, rank.generation), " on m", rank.machine);
  const bool another = ++alive_[{rank.job, rank.generation, rank.rank}] > 1;
  if (another && !shares_key(rank.machine)) kernel_.Fail("INV-2", what + ", as another does");
  const GenerationTruth& truth = generations_[{rank.job, rank.generation}];
  if (truth.content == 0 || !node_on) return;  // a keeper alone, or reported already
  const size_t index = static_cast<size_t>(rank.rank) - truth.grant.ranks.size();
  if (index >= truth.grant.waiting.size() || truth.grant.waiting[index].node != node_on(rank.machine))
    kernel_.Fail("INV-6", what + ", and the grant does not say so");
}

// INV-2 and INV-6: the process, new or not, is this rank of this generation from now on.
void Checker::HoldsRank(const RankProcess& rank, const Gang& gang) {
  if (++alive_[{rank.job, rank.generation, rank.rank}] > 1) {
    kernel_.Fail("INV-2",
                 absl::StrCat("two processes are rank ", rank.rank, " of ", G(rank.job, rank.generation)));
  }
  GenerationTruth& truth = generations_[{rank.job, rank.generation}];
  if (truth.content == 0) {
    kernel_.Fail("INV-6", absl::StrCat(G(rank.job, rank.generation), " starts on m", rank.machine,
                                       " and was never granted"));
  }
  ++truth.started;
  ++truth.running;
  if (truth.started >= gang.world) truth.all_started_at = kernel_.now();
}

// INV-2: a process is kept once, by its generation's end, and only of a job that lets it.
void Checker::RankKept(const RankProcess& rank) {
  ++kernel_.counts["process kept"];
  const std::string what = absl::StrCat("process ", rank.pid, ", rank ", rank.rank, " of ",
                                        G(rank.job, rank.generation), " on m", rank.machine);
  if (!kept_.emplace(rank.pid, &rank).second) kernel_.Fail("INV-2", what + ", is kept twice");
  if (alive_.erase({rank.job, rank.generation, rank.rank}) == 0)
    kernel_.Fail("INV-2", what + ", is kept and was none of it");
  const spec::JobSpec* spec = SpecOf(rank.job);
  if (spec != nullptr && !spec->in_place) kernel_.Fail("INV-2", what + ", is kept, and its job restarts");
  if (!rank.waits) --generations_[{rank.job, rank.generation}].running;
}

// INV-2: only a kept process goes on, and as the rank for which the grant names it.
void Checker::RankGoesOn(const RankProcess& rank, const Gang& gang) {
  ++kernel_.counts["process goes on"];
  const std::string what = absl::StrCat("process ", rank.pid, " goes on as rank ", rank.rank, " of ",
                                        G(rank.job, rank.generation), " on m", rank.machine);
  if (kept_.erase(rank.pid) == 0) kernel_.Fail("INV-2", what + " and was not kept");
  HoldsRank(rank, gang);
  const std::vector<core::RankPlace>& places = generations_[{rank.job, rank.generation}].grant.ranks;
  if (places.empty() || !node_on) return;  // a keeper alone, or reported already
  const core::RankPlace& place = places[static_cast<size_t>(rank.rank)];
  if (place.process != core::ProcessId{Generation{rank.born.born}, rank.born.born_rank} ||
      place.node != node_on(rank.machine))
    kernel_.Fail("INV-2", what + ", and the grant names another");
}

int Checker::Kept(const JobId& job) const {
  return static_cast<int>(
      std::count_if(kept_.begin(), kept_.end(), [&](const auto& item) { return item.second->job == job; }));
}

// INV-5: nor do more processes run there, whatever the head believes to be over. The exceptions are those of
// INV-2: what has got SIGKILL and stays, ranks whose keeper was killed, copies of a node's state, a cloud
// that changed its mind.
void Checker::CheckTrueRoom(const RankProcess& rank, int cpus) {
  if (!cpus_of) return;  // a keeper alone, without a world
  auto& here = cpus_[rank.machine];
  here[&rank] = cpus;
  const int room = cpus_of(node_on(rank.machine));
  int used = 0;
  int kept = 0;
  for (const auto& [other, taken] : here) {
    if (other->stuck || !other->exited) continue;
    (other->kept ? kept : used) += taken;
  }
  if (used <= room && used + kept > room) ++kernel_.counts["rank starts in the room of kept processes"];
  if (used <= room || shares_key(rank.machine) || CloudKeptItsMachine(rank.machine)) return;
  std::set<std::string> who;
  for (const auto& [other, taken] : here) who.insert(G(other->job, other->generation));
  kernel_.Fail("INV-5", absl::StrCat("m", rank.machine, " has ", room, " cpus, ", used, " are in use by ",
                                     absl::StrJoin(who, ", ")));
}

void Checker::RankEnds(const RankProcess& rank, keeper::Cause cause, int code) {
  cpus_[rank.machine].erase(&rank);
  if (kept_.erase(rank.pid) > 0) return;  // it was none of a generation
  alive_.erase({rank.job, rank.generation, rank.rank});
  if (rank.waits) {
    generations_[{rank.job, rank.generation}].ended_beside = true;
    return;
  }
  unfenced_[rank.job].erase(&rank);
  --generations_[{rank.job, rank.generation}].running;
  const bool well = cause == keeper::Cause::kExited && code == 0;
  if (well || rank.asked_to_end) return;
  GenerationTruth& truth = generations_[{rank.job, rank.generation}];
  truth.bad_end = true;
  if (truth.storage_fault != rank.rank) truth.other_fault = true;
}

void Checker::RankNeverRuns(const JobId& job, uint64_t generation) {
  GenerationTruth& truth = generations_[{job, generation}];
  truth.bad_end = truth.other_fault = true;
}

void Checker::RankMeetsStorageFault(const RankProcess& rank) {
  GenerationTruth& truth = generations_[{rank.job, rank.generation}];
  if (!truth.storage_fault) truth.storage_fault = rank.rank;
}

void Checker::RankIsDone(const RankProcess& rank) {
  generations_[{rank.job, rank.generation}].said_done = true;
}

void Checker::HeadTells(const core::EmitEvent& event) {
  if (event.kind != core::kSamplesNote || !absl::EndsWith(event.text, kAllTrained)) return;
  generations_[{event.job, event.generation.value}].told_done = true;
}

// INV-16: of a job that succeeded its events have the end of its data, unless the machine or the keeper that
// knew of it is gone.
void Checker::CheckRecords() {
  for (const auto& [id, record] : disk_.jobs()) {
    if (record.state != core::JobState::kSucceeded) continue;
    const auto it = generations_.find({id, record.generation.value});
    if (it == generations_.end() || !it->second.said_done) continue;
    const GenerationTruth& truth = it->second;
    ++kernel_.counts["job with the end of its data"];
    if (truth.told_done) continue;
    if (truth.lost) {
      ++kernel_.counts["end of its data lost with its keeper"];
      continue;
    }
    kernel_.Fail("INV-16", absl::StrCat(G(id, record.generation.value),
                                        " has succeeded, and its events lack that it trained all its data"));
  }
}

// INV-12: a generation that ended because its storage could not be read is charged to nothing. The head's
// decision is seen once it has decided.
void Checker::CheckCharges(const core::JobRecord& record) {
  JobTruth& job = jobs_[record.id];
  const bool decided = record.ending == core::Ending::kNone;
  for (const core::FaultRecord& fault : record.faults) {
    if (!decided && &fault == &record.faults.back()) break;
    const GenerationTruth& truth = generations_[{record.id, fault.generation.value}];
    const bool by_itself = fault.kind == core::FaultKind::kCrash || fault.kind == core::FaultKind::kOom ||
                           fault.kind == core::FaultKind::kSaved;
    if (!truth.storage_fault || truth.other_fault || truth.lost || !by_itself) continue;
    kernel_.Fail("INV-12", absl::StrCat(G(record.id, fault.generation.value),
                                        " ended because its storage could not be read, and counts as ",
                                        core::Name(fault.kind)));
  }
  if (record.restarts > job.restarts && !record.faults.empty() &&
      record.faults.back().kind == core::FaultKind::kStorage) {
    kernel_.Fail("INV-12", absl::StrCat(record.id.value, " counts a storage fault as a restart"));
  }
  if (record.waits_for_storage && record.state != core::JobState::kWaiting) {
    kernel_.Fail("INV-12",
                 absl::StrCat(record.id.value, " waits for its storage and is ", core::Name(record.state)));
  }
  job.restarts = record.restarts;
}

// INV-1: a generation that is over makes no step once a lease has passed, nor one with a process that is in
// another one.
void Checker::GangSteps(const Gang& gang) {
  for (const auto& [number, rank] : gang.ranks) {
    if (!IsOf(*rank, gang) || rank->rank != number) {
      kernel_.Fail("INV-1", absl::StrCat("process ", rank->pid, " makes a step as rank ", number, " of ",
                                         G(gang.job, gang.generation), " and is rank ", rank->rank, " of g",
                                         rank->generation, rank->kept ? ", kept" : ""));
    }
    if (rank->step >= 0) {
      JobTruth& job = jobs_[gang.job];
      job.step_in_memory = std::max(job.step_in_memory, rank->step);
    }
  }
  GenerationTruth& truth = generations_[{gang.job, gang.generation}];
  truth.stalled = kernel_.now() - truth.stepped_at;
  truth.stepped_at = kernel_.now();
  if (truth.revoked) ++kernel_.counts["step of a revoked generation"];
}

// Nobody can see what a process has in memory: its word counts, and a lie spends no budget but its job's.
void Checker::RankLies(const RankProcess& rank, int64_t step) {
  const spec::JobSpec* spec = SpecOf(rank.job);
  if (spec == nullptr || !spec->in_place) return;
  JobTruth& job = jobs_[rank.job];
  job.step_in_memory = std::max(job.step_in_memory, step);
}

// INV-14: a process has one part of the model as long as it lives.
void Checker::KeepsItsPart(const RankProcess& rank) {
  const spec::JobSpec* spec = SpecOf(rank.job);
  const auto unit = spec == nullptr ? 1 : static_cast<int>(spec::ShapeOf(spec->mesh).model_ranks);
  if (unit == 1 || !spec->in_place) return;
  const int part = rank.rank % unit;
  const auto [had, first] = parts_.try_emplace({rank.job, rank.born.born, rank.born.born_rank}, part);
  if (first || had->second == part) return;
  kernel_.Fail("INV-14", absl::StrCat("process ", rank.pid, " of ", rank.job.value, " has part ", had->second,
                                      " of ", unit, " in memory, and is rank ", rank.rank, " of ",
                                      G(rank.job, rank.generation)));
}

// INV-1: one entry barrier a generation.
void Checker::BarrierPassed(const RankProcess& rank, const std::vector<std::string>& blobs) {
  KeepsItsPart(rank);
  std::string all;
  for (const std::string& blob : blobs) absl::StrAppend(&all, blob, ";");
  const uint64_t hash = std::hash<std::string>()(all);
  std::optional<uint64_t>& table = generations_[{rank.job, rank.generation}].table;
  if (table && *table != hash) {
    kernel_.Fail("INV-1", absl::StrCat("two ranks of ", G(rank.job, rank.generation),
                                       " passed different entry barriers"));
  }
  table = hash;
  for (size_t i = 0; i < blobs.size(); ++i) {
    if (blobs[i] != absl::StrCat(rank.job.value, "/", rank.generation, "/", i)) {
      kernel_.Fail("INV-1", absl::StrCat("the entry barrier of ", G(rank.job, rank.generation), " mixes in ",
                                         blobs[i]));
      break;
    }
  }
}

}  // namespace gtrain::sim
