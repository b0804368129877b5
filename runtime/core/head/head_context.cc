#include "runtime/core/head/head_context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {

HeadContext::HeadContext(HeadConfig config, Rng rng) : config_(std::move(config)), rng_(rng) {
  GT_CHECK(config_.parse_job != nullptr);
  if (config_.local && !config_.expected_nodes) config_.expected_nodes = 1;
}

void HeadContext::ReadWall(absl::Time wall, Instant now) {
  wall_ = wall;
  wall_read_at_ = now;
}

absl::Duration HeadContext::Since(absl::Time then, Instant now) const {
  const absl::Time built = absl::FromUnixSeconds(1'600'000'000);  // no cluster is older than its program
  if (then < built || then > Wall(now)) return absl::ZeroDuration();
  return Wall(now) - then;
}

void HeadContext::Say(const std::string& why) {
  if (!why_.empty()) why_ += "; ";
  why_ += why;
}

void HeadContext::Send(const NodeId& node, SendKind kind, SharedMessage message) {
  out_.push_back(SendToNode{node, kind, std::move(message)});
}

void HeadContext::Emit(Job& job, const std::string& kind, std::string text, std::string goodput) {
  EmitEvent event{
      job.record.id,   job.record.run_dir, ++job.record.event_sequence, job.record.generation, kind,
      std::move(text), Wall(step_at_),     std::move(goodput)};
  job.events.push_back(std::make_shared<const EmitEvent>(event));
  news_.insert(job.record.id);
  if (static_cast<int>(job.events.size()) > config_.events_kept_max) job.events.pop_front();
  out_.push_back(std::move(event));
}

void HeadContext::Answer(const std::string& route, const std::string& id, const absl::Status& status,
                         std::string json) {
  out_.push_back(ReplyToClient{route, status.ok() ? ReplyOf(id, std::move(json)) : ReplyOf(id, status)});
}

// A document is built when it is delivered.
void HeadContext::Answer(const PeerMessage& event, const std::string& id,
                         std::shared_ptr<const Document> document) {
  out_.push_back(
      ReplyToClient{event.route, ClientReply{.id = id}, false, std::move(document), event.peer.key_id});
}

// Refusals are bounded, so that who may do nothing cannot fill the log; how many were left out is said.
void HeadContext::Audit(const PeerMessage& event, absl::string_view action, std::string target,
                        const absl::Status& status, Instant now) {
  constexpr int kRefusalsPerMinute = 60;
  AuditEntry entry{event.peer, event.address, std::string(action), std::move(target)};
  if (const auto* request = std::get_if<ClientRequest>(&event.message))
    entry.reason = ReasonOf(request->body);
  if (!status.ok()) {
    if (now - refusals_since_ >= absl::Minutes(1)) {
      refusals_since_ = now;
      refusals_ = 0;
    }
    if (++refusals_ > kRefusalsPerMinute) return (void)++refusals_left_out_;
    entry.outcome = Shortened(
        absl::StrCat(absl::IsPermissionDenied(status) ? "denied: " : "failed: ", status.message()), 1 << 10);
  }
  if (refusals_left_out_ > 0) {
    absl::StrAppend(&entry.outcome, " (", refusals_left_out_, " refusals before this are not listed)");
    refusals_left_out_ = 0;
  }
  audit_.push_back(std::move(entry));
}

void HeadContext::Write(Record record) {
  std::string key = KeyOf(record);
  writes_.push_back({std::move(key), std::move(record)});
}

void HeadContext::Forget(const JobId& job) {
  dirty_jobs_.erase(job);
  news_.insert(job);
}

StepResult HeadContext::TakeStep() {
  if (!writes_.empty() || !audit_.empty())
    out_.push_back(Persist{std::exchange(writes_, {}), std::exchange(audit_, {})});
  StepResult result{std::move(out_), std::move(why_), std::exchange(writes_may_wait_, false)};
  out_.clear();
  why_.clear();
  return result;
}

}  // namespace gtrain::core
