#include "tests/sim/checkpoint_model.h"

#include <deque>

#include "absl/strings/str_cat.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/resume.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/format/names.h"

namespace gtrain::sim {

namespace save = ckpt::save;

std::string CheckpointModel::Launch(const std::string& name, const std::string& hash,
                                    const std::string& resume) {
  Job& job = jobs_[name];
  job.identity.cluster = "sim";
  job.identity.job = name;
  job.identity.job_hash = hash;
  const ckpt::Resume how = resume == "fresh"    ? ckpt::Resume::kFresh
                           : resume == "latest" ? ckpt::Resume::kLatest
                                                : ckpt::Resume::kIfSameJob;
  ckpt::Settings settings;
  settings.identity = job.identity;
  settings.resume = how;
  std::string taken_from;
  const auto claim = ckpt::TakeDirectory(&store_, settings, true, {}, &taken_from);
  if (!claim.ok()) {
    jobs_.erase(name);
    return std::string(claim.status().message());
  }
  job.epoch = claim->epoch;
  return absl::StrCat("epoch ", job.epoch);
}

std::string CheckpointModel::Save(const std::string& name, int64_t step, int64_t timeline, int64_t generation,
                                  bool hold, Instant now) {
  Job& job = jobs_[name];
  job.id = {job.epoch, static_cast<uint64_t>(timeline), step, static_cast<uint64_t>(generation), 1};
  const auto attempt = ckpt::NextAttempt(&store_, job.id);
  if (!attempt.ok()) return std::string(attempt.status().message());
  job.id.attempt = *attempt;
  ckpt::Manifest manifest{.id = job.id, .owner = job.identity, .world_size = 1};
  manifest.files.push_back({.name = ckpt::ShardName(0, 1)});
  if (const absl::Status valid = ckpt::Validate(manifest); !valid.ok()) return std::string(valid.message());
  job.manifest = ckpt::Print(manifest);
  job.core.emplace(ckpt::SaveConfig{});
  job.held = hold;
  job.result = "the put is held";
  Do(job, save::SnapshotTaken{step}, now);
  return job.result;
}

std::string CheckpointModel::Put(const std::string& name, Instant now) {
  Job& job = jobs_[name];
  if (!job.held) return "nothing is held";
  job.held = false;
  Do(job, save::ManifestPut{store_.PutIfAbsent(ckpt::ManifestKey(job.id), job.manifest)}, now);
  return job.result;
}

// Answers the effects of one rank, rank 0, as checkpoint/engine/saver.cc does.
void CheckpointModel::Do(Job& job, const save::Event& first, Instant now) {
  std::deque<save::Event> events = {first};
  while (!events.empty()) {
    const save::Event event = std::move(events.front());
    events.pop_front();
    for (const save::Effect& effect : job.core->Step(event, now).effects) {
      if (std::holds_alternative<save::WriteShard>(effect))
        events.push_back(save::ShardWritten{absl::OkStatus()});
      if (std::holds_alternative<save::WriteIndex>(effect))
        events.push_back(save::IndexWritten{absl::OkStatus()});
      if (std::holds_alternative<save::PollIndices>(effect))
        events.push_back(save::IndexSeen{0, absl::OkStatus()});
      if (std::holds_alternative<save::PutPart>(effect)) events.push_back(save::PartPut{absl::OkStatus()});
      if (std::holds_alternative<save::CheckAuthority>(effect)) {
        const bool taken = store_.Size(ckpt::OwnerKey(job.epoch + 1)).ok();
        events.push_back(save::AuthorityChecked{
            taken ? absl::FailedPreconditionError("the directory was taken over") : absl::OkStatus()});
      }
      if (std::holds_alternative<save::PutManifest>(effect) && !job.held) {
        events.push_back(save::ManifestPut{store_.PutIfAbsent(ckpt::ManifestKey(job.id), job.manifest)});
      }
      if (std::holds_alternative<save::ReadManifest>(effect)) {
        const auto text = store_.Get(ckpt::ManifestKey(job.id), 1 << 20);
        events.push_back(save::ManifestRead{
            text.ok() && *text == job.manifest ? save::KeyHolds::kThisManifest : save::KeyHolds::kOther, ""});
      }
      if (std::holds_alternative<save::PutAbort>(effect)) events.push_back(save::AbortPut{});
      if (std::holds_alternative<save::ApplyRetention>(effect)) {
        events.push_back(save::RetentionApplied{absl::OkStatus()});
      }
      if (const auto* finish = std::get_if<save::Finish>(&effect)) {
        job.result = finish->status.ok() ? "committed" : std::string(finish->status.message());
      }
    }
  }
}

std::string CheckpointModel::Resume(const std::string& name) {
  const auto ids = ckpt::ListManifests(&store_);
  if (!ids.ok()) return std::string(ids.status().message());
  ckpt::Settings settings;
  settings.resume = ckpt::Resume::kIfSameJob;
  const auto candidates = ckpt::Candidates(settings, jobs_[name].epoch, *ids, {});
  if (candidates.empty()) return "nothing";
  return absl::StrCat("step ", candidates[0].id.step, " of timeline ", candidates[0].id.timeline);
}

}  // namespace gtrain::sim
