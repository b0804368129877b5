#include "checkpoint/engine/saver.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/logging.h"
#include "base/units.h"

namespace gtrain::ckpt {

Saver::Saver(std::unique_ptr<SaveRoute> route, std::function<void(const SaveId&)> committed, int rank,
             std::string place, uint64_t bytes)
    : committed_(std::move(committed)),
      rank_(rank),
      place_(std::move(place)),
      bytes_(bytes),
      route_(std::move(route)),
      thread_([this] { Loop(); }) {}

Saver::~Saver() {
  stop_.Set();
  {
    MutexLock lock(&mu_);
    end_ = true;
  }
  thread_.join();
}

bool Saver::busy() const {
  MutexLock lock(&mu_);
  return busy_;
}

void Saver::Replace(std::unique_ptr<SaveRoute> route) {
  MutexLock lock(&mu_);
  GT_CHECK(!busy_);
  route_ = std::move(route);
}

void Saver::Start(const SaveId& id) {
  route_->Begin(id);
  MutexLock lock(&mu_);
  GT_CHECK(!busy_ && !request_);
  busy_ = true;
  request_ = id;
}

absl::Status Saver::Wait(absl::Duration timeout) {
  MutexLock lock(&mu_);
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !busy_; };
  if (!mu_.AwaitFor(timeout, idle)) {
    return absl::DeadlineExceededError(
        absl::StrCat("the checkpoint is still being written after ", absl::FormatDuration(timeout)));
  }
  return last_status_;
}

absl::Status Saver::last_status() const {
  MutexLock lock(&mu_);
  return last_status_;
}

std::optional<int64_t> Saver::last_committed() const {
  MutexLock lock(&mu_);
  return last_committed_;
}

absl::Duration Saver::last_duration() const {
  MutexLock lock(&mu_);
  return last_duration_;
}

void Saver::Loop() {
  while (true) {
    SaveId id;
    {
      MutexLock lock(&mu_);
      const auto work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return end_ || request_.has_value(); };
      mu_.Await(work);
      if (!request_) return;
      id = *request_;
      request_.reset();
    }
    const Instant begin = clock_.Now();
    const std::optional<absl::Status> status = route_->Finish(id, &stop_, [&] {
      committed_(id);
      MutexLock lock(&mu_);
      last_committed_ = id.step;
    });
    const absl::Duration took = clock_.Now() - begin;
    if (!status) {
      LogInfo("checkpoint: rank ", rank_, ": step ", id.step,
              " is left to the writer outside this process, which goes on with it");
    } else if (!status->ok()) {
      LogWarning("checkpoint: rank ", rank_, ": step ", id.step,
                 " is not saved, the previous one stands: ", status->message());
    } else if (rank_ == 0) {
      LogInfo("checkpoint: step ", id.step, " is committed as ", place_, "/", ManifestKey(id), " (",
              PrintBytes(bytes_), " by this rank, ", absl::ToInt64Milliseconds(took), " ms)");
    }
    MutexLock lock(&mu_);
    last_status_ = status.value_or(absl::OkStatus());
    last_duration_ = took;
    busy_ = false;
  }
}

}  // namespace gtrain::ckpt
