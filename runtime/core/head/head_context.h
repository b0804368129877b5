// HeadContext holds what every part of the head works with: the configuration, the clock of the step that
// runs, random numbers, counters, and the step's output. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. Effects leave in the order in
// which they were added, and the records that changed follow them as one Persist: Outbox applies the writes
// of a step to all of its promises, so their place does not matter, and each job is written once.
#pragma once
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/job.h"

namespace gtrain::core {

class HeadContext {
 public:
  HeadContext(HeadConfig config, Rng rng);

  const HeadConfig& config() const { return config_; }
  Rng& rng() { return rng_; }
  HeadCounters& counters() { return counters_; }
  const HeadCounters& counters() const { return counters_; }

  void ReadWall(absl::Time wall, Instant now);  // once, before the first step
  void Begin(Instant now) { step_at_ = now; }
  Instant step_at() const { return step_at_; }
  absl::Time Wall(Instant now) const { return wall_ + (now - wall_read_at_); }
  // The time that passed between two heads; zero when the clock was not set yet or was set back.
  absl::Duration Since(absl::Time then, Instant now) const;

  // The output of the step.
  void Say(const std::string& why);
  void Do(Effect effect) { out_.push_back(std::move(effect)); }
  void Send(const NodeId& node, SendKind kind, SharedMessage message);
  void Emit(Job& job, const std::string& kind, std::string text, std::string goodput = "");
  void Answer(const std::string& route, const std::string& id, const absl::Status& status, std::string json);
  void Answer(const PeerMessage& event, const std::string& id, std::shared_ptr<const Document> document);
  void Audit(const PeerMessage& event, absl::string_view action, std::string target,
             const absl::Status& status, Instant now);
  void Dirty(const Job& job) { dirty_jobs_.insert(job.record.id); }  // it is written at the end of the step
  void Write(Record record);
  void WritesMayWait() { writes_may_wait_ = true; }  // StepResult::may_wait
  void Delete(std::string key) { writes_.push_back({std::move(key), std::nullopt}); }
  void Forget(const JobId& job);  // it is no more: nothing of it is written, and polls for it are answered

  bool changed() const { return !dirty_jobs_.empty() || !writes_.empty(); }
  std::set<JobId> TakeDirty() { return std::exchange(dirty_jobs_, {}); }
  // Hands out the jobs with new events and those that are forgotten.
  std::set<JobId> TakeNews() { return std::exchange(news_, {}); }
  StepResult TakeStep();

 private:
  HeadConfig config_;  // constant after construction
  Rng rng_;
  HeadCounters counters_;
  Instant refusals_since_;  // audit lines of refusals are limited
  int refusals_ = 0, refusals_left_out_ = 0;
  Instant wall_read_at_;
  absl::Time wall_;  // then

  // These belong to the step that runs.
  Instant step_at_;
  std::vector<Effect> out_;
  std::vector<RecordWrite> writes_;
  std::vector<AuditEntry> audit_;
  std::set<JobId> dirty_jobs_, news_;
  std::string why_;
  bool writes_may_wait_ = false;
};

}  // namespace gtrain::core
