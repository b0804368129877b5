// Ranks that rest: neither output, nor a step, nor processor time. The head is told of each, with the
// function of the kernel in which it waits; the head, which hears of all ranks, decides what that means for
// the job.
//
// It costs nothing while ranks write or step. Ranks that have been silent for a quarter of `progress.stall`
// (15 min) are looked at together, every quarter of it, at least 1 s and at most 60 s apart, and the look
// comes with a heartbeat, so that it wakes no process of its own. However many ranks are silent it is one
// pass over /proc; the head hears of a rank when it begins to rest, waits elsewhere, or works again.
#include "runtime/core/agent/idleness.h"

#include <algorithm>

#include "base/probe.h"

namespace gtrain::core {
namespace {

// A program that waits still looks at the clock now and then.
constexpr int64_t kRestShare = 100;                              // one part in so many is no work
constexpr absl::Duration kRestAtLeast = absl::Milliseconds(10);  // a tick of the kernel's accounting

}  // namespace

void Idleness::LookForIdle() {
  for (auto& [job, record] : model_.jobs) {
    for (auto& [number, generation] : record.generations) {
      if (generation.gone || generation.ended) continue;
      const absl::Duration quarter = generation.spec.progress.stall / 4;
      if (context_.now() - generation.looked_at < std::clamp(quarter, absl::Seconds(1), absl::Minutes(1)))
        continue;
      LookAtRanks look{job, number, {}};
      for (const auto& [rank, info] : generation.ranks) {
        if (info.exit || info.status.pid <= 0 || context_.now() - info.heard_at < quarter) continue;
        look.ranks.emplace_back(rank, info.status.pid);
      }
      if (look.ranks.empty()) continue;
      generation.looked_at = context_.now();
      context_.Do(std::move(look));
    }
  }
}

void Idleness::OnRanksSeen(const RanksSeen& event) {
  const AgentGeneration* generation = model_.Find(event.job, event.generation);
  if (generation == nullptr) return;
  for (const RankSeen& seen : event.ranks) {
    AgentRank* rank = model_.Find(event.job, event.generation, seen.rank);
    if (rank == nullptr || rank->exit) continue;
    const absl::Duration rest = std::max(kRestAtLeast, (context_.now() - rank->seen_at) / kRestShare);
    const uint64_t before = rank->cpu_ms.value_or(0);
    const uint64_t used = std::max(seen.cpu_ms, before) - std::min(seen.cpu_ms, before);
    if (!rank->cpu_ms || absl::Milliseconds(used) > rest) rank->rests_since = context_.now();
    rank->cpu_ms = seen.cpu_ms;
    rank->seen_at = context_.now();
    const absl::Duration idle = context_.now() - std::max(rank->heard_at, rank->rests_since);
    // Half the limit, so that the head knows of all ranks when the whole is over.
    const bool rests = idle >= generation->spec.progress.stall / 2;
    const bool known = rank->status.idle > absl::ZeroDuration();
    if (rests == known && (!rests || rank->status.blocked_in == seen.blocked_in)) continue;
    GT_PROBE("agent.rank_rests");
    rank->status.idle = rests ? idle : absl::ZeroDuration();
    rank->status.blocked_in = rests ? seen.blocked_in : "";
    rank->status_changed = true;
  }
}

void Idleness::Heard(AgentRank& rank) {
  rank.heard_at = context_.now();
  if (rank.status.idle == absl::ZeroDuration()) return;
  rank.status.idle = absl::ZeroDuration();
  rank.status.blocked_in.clear();
  rank.status_changed = true;
}

}  // namespace gtrain::core
