#include "checkpoint/engine/saver.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/logging.h"
#include "base/units.h"

namespace gtrain::ckpt {

Saver::Saver(std::unique_ptr<SaveRoute> route, absl::string_view header,
             const std::vector<Snapshot::Source>& sources,
             std::function<void(const SaveId&, const absl::Status&)> ended, int rank, std::string place)
    : ended_(std::move(ended)),
      rank_(rank),
      place_(std::move(place)),
      snapshot_(header, sources),
      route_(std::move(route)),
      thread_([this] { Loop(); }) {}

Saver::~Saver() {
  if (copying()) Drop();
  stop_.Set();
  {
    MutexLock lock(&mu_);
    end_ = true;
  }
  thread_.join();
}

bool Saver::busy() const {
  MutexLock lock(&mu_);
  return stage_ != Stage::kIdle;
}

bool Saver::copying() const {
  MutexLock lock(&mu_);
  return stage_ == Stage::kCopying;
}

void Saver::Replace(std::unique_ptr<SaveRoute> route) {
  MutexLock lock(&mu_);
  GT_CHECK(stage_ == Stage::kIdle);
  route_ = std::move(route);
  cold_ = 0;
  if (resumed_) route_->Resumed(*resumed_);
}

void Saver::Resumed(const SaveId& id) {
  resumed_ = id;
  route_->Resumed(id);
}

absl::Status Saver::SetTail(const SaveTail& tail, absl::string_view header,
                            const std::vector<Snapshot::Source>& sources) {
  if (header.size() > kHeaderBytesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the header of this rank's file would have ", PrintBytes(header.size()), ", over ",
                     PrintBytes(kHeaderBytesMax), ": too many byte entries of ranks that are no more"));
  }
  MutexLock lock(&mu_);
  GT_CHECK(stage_ == Stage::kIdle);
  cold_ = 0;
  snapshot_.SetSources(header, sources);
  return route_->SetTail(tail);
}

void Saver::Start(const SaveId& id) {
  MutexLock lock(&mu_);
  GT_CHECK(stage_ == Stage::kIdle && !request_);
  route_->SetCopying(true);
  snapshot_.Begin(route_->buffer());
  stage_ = Stage::kCopying;
  request_ = newest_ = id;
}

void Saver::Fence() {
  if (!copying()) return;
  snapshot_.Finish();
  MutexLock lock(&mu_);
  route_->SetCopying(false);
  route_->Begin(newest_, snapshot_.hashes());
  stage_ = Stage::kWriting;
}

void Saver::Drop() {
  MutexLock lock(&mu_);
  GT_CHECK(stage_ == Stage::kCopying);
  stage_ = Stage::kDropped;
  mu_.Await([this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stage_ == Stage::kIdle; });
  route_->SetCopying(false);
}

void Saver::Warm() {
  MutexLock lock(&mu_);
  if (stage_ == Stage::kIdle) cold_ = snapshot_.bytes();
}

absl::Status Saver::Wait(absl::Duration timeout) {
  MutexLock lock(&mu_);
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stage_ == Stage::kIdle; };
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
    std::optional<SaveId> id;
    {
      MutexLock lock(&mu_);
      mu_.Await([this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return end_ || request_ || cold_ > 0; });
      if (end_ && !request_) return;
      id = std::exchange(request_, std::nullopt);
      if (id) cold_ = 0;  // what the copy has not touched yet it does now
    }
    if (id) {
      Carry(*id);
    } else {
      WarmUp();
    }
  }
}

void Saver::WarmUp() {
  constexpr uint64_t kAtOnce = 16 << 20, kPage = 4096;
  MutexLock lock(&mu_);
  if (cold_ == 0) return;
  const uint64_t bytes = std::min(cold_, kAtOnce);
  const uintptr_t buffer = reinterpret_cast<uintptr_t>(route_->buffer());
  const uintptr_t begin = (buffer + snapshot_.bytes() - cold_) / kPage * kPage;
  const uintptr_t end = (buffer + snapshot_.bytes() - cold_ + bytes) / kPage * kPage;
  cold_ -= bytes;
  mu_.Unlock();
  // An older kernel cannot: the first save is slow, then.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
  mu_.Lock();
}

void Saver::Carry(const SaveId& id) {
  const Instant begin = clock_.Now();
  snapshot_.Finish();
  bool dropped;
  {
    MutexLock lock(&mu_);
    mu_.Await([this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stage_ != Stage::kCopying; });
    dropped = stage_ == Stage::kDropped;
  }
  std::optional<absl::Status> status;
  if (dropped) {
    status = absl::FailedPreconditionError(
        "Fence() was not called after Save, so training may have changed the state while it was copied");
  } else {
    status = route_->Finish(id, &stop_, [&] {
      {
        MutexLock lock(&mu_);
        last_committed_ = id.step;
      }
      ended_(id, absl::OkStatus());
    });
  }
  const absl::Duration took = clock_.Now() - begin;
  if (!status) {
    LogInfo("checkpoint: rank ", rank_, ": step ", id.step,
            " is left to the writer outside this process, which goes on with it");
  } else if (!status->ok()) {
    LogWarning("checkpoint: rank ", rank_, ": step ", id.step,
               " is not saved, the previous one stands: ", status->message());
    ended_(id, *status);
  } else if (rank_ == 0) {
    LogInfo("checkpoint: step ", id.step, " is committed as ", place_, "/", ManifestKey(id), " (",
            PrintBytes(snapshot_.bytes()), " by this rank, ", absl::ToInt64Milliseconds(took), " ms)");
  }
  MutexLock lock(&mu_);
  last_status_ = status.value_or(absl::OkStatus());
  last_duration_ = took;
  stage_ = Stage::kIdle;
}

}  // namespace gtrain::ckpt
