#include "tests/sim/disk.h"

#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "runtime/core/values/job_records.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::sim {

void Disk::Commit(core::OutboxBatch batch, std::function<void(Outcome)> done) {
  GT_CHECK(!in_flight_);
  Fault fault = std::exchange(next_fault_, Fault::kNone);
  if (full_) fault = Fault::kFull;
  in_flight_ = std::move(batch);
  commit_ = [this, fault, done = std::move(done)] {
    writing_ = true;
    Run(1, [this, fault, done] { Write(fault, done); });
  };
  Next();
}

void Disk::Join(std::vector<std::string> keys, std::function<void(Outcome)> done) {
  GT_CHECK(joining_.empty() && !keys.empty());
  joining_ = std::move(keys);
  join_ = [this, done = std::move(done)] {
    Run(3, [this, done] {
      if (full_) {
        joining_.clear();
        return done(Outcome::kNoRoom);
      }
      LetIn();
      done(Outcome::kDurable);
    });
  };
  Next();
}

void Disk::Next() {
  if (busy_) return;
  std::function<void()>& next = commit_ ? commit_ : join_;
  if (!next) return;
  busy_ = true;
  std::exchange(next, nullptr)();
}

void Disk::Run(int syncs, std::function<void()> task) {
  int64_t took = 0;
  for (int i = 0; i < syncs; ++i) took += sync_mean_ / 2 + kernel_.Between(0, sync_mean_);
  kernel_.After(took, [this, life = life_, task = std::move(task)] {
    if (life != life_) return;
    busy_ = writing_ = false;
    task();
    if (life == life_) Next();
  });
}

void Disk::Write(Fault fault, const std::function<void(Outcome)>& done) {
  kernel_.Note(0xD15C, "disk: batch ", in_flight_->sequence,
               fault == Fault::kNone  ? " is durable"
               : fault == Fault::kEio ? " failed with EIO"
                                      : " found no room");
  if (fault == Fault::kNone) {
    const core::OutboxBatch batch = *std::exchange(in_flight_, std::nullopt);
    Apply(batch);
  } else if (fault == Fault::kFull) {
    in_flight_.reset();  // nothing of it was written
  }
  done(fault == Fault::kNone ? Outcome::kDurable : fault == Fault::kEio ? Outcome::kError : Outcome::kNoRoom);
}

void Disk::LetIn() {
  kernel_.Note(0xD15B, "disk: ", joining_.size(), " nodes are members");
  members_.insert(joining_.begin(), joining_.end());
  joining_.clear();
}

void Disk::Apply(const core::OutboxBatch& batch) {
  std::set<JobId> changed;
  for (const core::RecordWrite& write : batch.writes) {
    absl::string_view id = write.key;
    if (absl::ConsumePrefix(&id, "job/")) changed.insert(JobId(std::string(id.substr(0, id.find('/')))));
    if (write.record) {
      absl::StatusOr<core::Record> read = wire::DecodeRecord(wire::EncodeRecord(*write.record));
      if (read.ok()) {
        durable_.insert_or_assign(write.key, *std::move(read));
      } else {
        kernel_.Fail("INV-3", absl::StrCat("the record ", write.key,
                                           " is stored and cannot be read: ", read.status().message()));
      }
    } else {
      durable_.erase(write.key);
    }
  }
  for (const JobId& job : changed) JoinRecords(job);
  if (on_durable) on_durable(batch.writes);
}

// INV-3: a batch leaves all records of a job or none.
void Disk::JoinRecords(const JobId& job) {
  jobs_.erase(job);
  core::StoredJob stored = core::GatherJob(durable_, job);
  if (core::KeysOf(stored).empty()) return;
  absl::StatusOr<core::JobRecord> joined = core::JoinJob(std::move(stored));
  if (!joined.ok()) return kernel_.Fail("INV-3", absl::StrCat(job.value, ": ", joined.status().message()));
  jobs_[job] = *std::move(joined);
}

void Disk::Lose(bool power_cut) {
  ++life_;
  // A commit or join that still waited for the thread was never written.
  if (!joining_.empty() && kernel_.rng.Chance(0.5) && !join_) LetIn();
  joining_.clear();
  commit_ = join_ = nullptr;
  busy_ = false;
  if (!std::exchange(writing_, false)) return in_flight_.reset();
  const core::OutboxBatch batch = *std::exchange(in_flight_, std::nullopt);
  const bool survives = unsynced_survives_.value_or(kernel_.rng.Chance(power_cut ? 0.3 : 0.5));
  kernel_.Note(0xD15D, "disk: the batch that was not synced is ", survives ? "there" : "lost");
  ++kernel_.counts[survives    ? "unsynced batch kept"
                   : power_cut ? "unsynced batch torn"
                               : "unsynced batch lost"];
  if (survives) Apply(batch);
}

}  // namespace gtrain::sim
