#include "runtime/core/head/head_core.h"

#include <algorithm>
#include <utility>

#include "runtime/core/head/head_state.h"

namespace gtrain::core {

// An agent takes no shorter interval than this one (head_talk.cc).
void SetNodeTimeout(absl::Duration timeout, HeadConfig& config) {
  config.dead_after = timeout;
  config.suspect_after = timeout * 3 / 10;
  config.heartbeat_interval = std::clamp(timeout / 10, absl::Milliseconds(50), absl::Seconds(1));
}

HeadCore::HeadCore(HeadConfig config, Rng rng)
    : state_(std::make_unique<HeadState>(std::move(config), rng)) {}
HeadCore::~HeadCore() = default;

absl::StatusOr<StepResult> HeadCore::Recover(StoredRecords stored, Instant now, absl::Time wall) {
  return state_->Recover(std::move(stored), now, wall);
}
StepResult HeadCore::Step(const HeadEvent& event, Instant now) { return state_->Step(event, now); }
std::optional<Instant> HeadCore::NextDeadline() const { return state_->NextDeadline(); }
HeadSnapshot HeadCore::Snapshot() const { return state_->Snapshot(); }
const JobRecord* HeadCore::RecordOf(const JobId& job) const { return state_->RecordOf(job); }
std::vector<std::pair<JobId, std::string>> HeadCore::Finished() const { return state_->Finished(); }
std::optional<WriteResult> HeadCore::ResultOf(const JobId& job) const { return state_->ResultOf(job); }
HeadEpoch HeadCore::epoch() const { return state_->epoch(); }
const std::string* HeadCore::RouteOf(const NodeId& node) const { return state_->RouteOf(node); }
const HeadCounters& HeadCore::counters() const { return state_->counters(); }

}  // namespace gtrain::core
