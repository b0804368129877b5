#include "runtime/core/agent/lease.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/agent/generations.h"

namespace gtrain::core {

Lease::Lease(AgentContext& context, AgentModel& model, Generations& generations)
    : context_(context), model_(model), generations_(generations) {}

void Lease::SetLength(absl::Duration fence_after) {
  fence_after_ = fence_after;
  lease_known_ = true;
}

// The lease runs from the sending of the heartbeat that the head has answered: the head counts from when it
// heard that, which is later. It costs a frame a job every twelfth of a lease, however many ranks.
void Lease::ExtendLease(Instant sent) {
  lease_from_ = std::max(lease_from_, sent);
  if (fence_after_ <= absl::ZeroDuration() || context_.now() < next_fence_) return;
  next_fence_ = context_.now() + fence_after_ / 12;
  for (const auto& [job, record] : model_.jobs) {
    const bool live = std::any_of(record.generations.begin(), record.generations.end(),
                                  [](const auto& item) { return !item.second.gone && !item.second.ended; });
    if (live) TellLease(job);
  }
}

void Lease::TellLease(const JobId& job) {
  if (fence_after_ <= absl::ZeroDuration() || fence_after_ == absl::InfiniteDuration()) return;
  context_.Command(job, keeper::Fence{(lease_from_ + fence_after_).ns / 1'000'000});
}

// Generations and commits fence programs with the SDK; a program without it could run twice, so it has a
// lease. The keeper ends it, too, whatever becomes of this agent; one of an older version does not.
void Lease::CheckLease() {
  if (!lease_known_) return;  // its length is the head's word, and the keeper has what an earlier agent heard
  const absl::Duration silent = context_.now() - lease_from_;
  if (fence_after_ <= absl::ZeroDuration() || silent <= fence_after_) return;
  for (auto& [job, record] : model_.jobs) {
    for (auto& [number, generation] : record.generations) {
      const bool fenced = std::ranges::all_of(generation.ranks, [&generation = generation](const auto& item) {
        return item.second.sdk || item.second.exit || !generation.IsMember(item.first);
      });
      if (generation.ended || generation.gone || fenced) continue;
      GT_PROBE("agent.lease_ends_ranks");
      generations_.End(record,
                       {.job = job,
                        .generation = number,
                        .grace = absl::Seconds(5),
                        .reason = absl::StrCat("no word from the head for ",
                                               PrintDuration(absl::Floor(silent, absl::Seconds(1))))});
      break;
    }
  }
}

}  // namespace gtrain::core
