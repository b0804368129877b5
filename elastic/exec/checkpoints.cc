#include "elastic/exec/checkpoints.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace gtrain::elastic {

struct Checkpoints::Opening {
  Mutex mu;
  bool given_up ABSL_GUARDED_BY(mu) = false;
  std::unique_ptr<Checkpointer> checkpointer ABSL_GUARDED_BY(mu);  // null: the thread has it, or gave it up
  absl::Status status ABSL_GUARDED_BY(mu);
  bool done ABSL_GUARDED_BY(mu) = false;
};

namespace {
constexpr size_t kTasksMax = 1 << 16;  // a storage that does not answer for so many generations is an error
}  // namespace

Checkpoints::Checkpoints() : thread_(kTasksMax) {}

Checkpoints::~Checkpoints() {
  Leave();
  thread_.Finish(absl::InfiniteDuration());
}

void Checkpoints::Start(Opening* opening) {
  std::unique_ptr<Checkpointer> checkpointer;
  {
    MutexLock lock(&opening->mu);
    checkpointer = std::move(opening->checkpointer);
  }
  if (checkpointer == nullptr) return;  // given up before it began
  absl::Status status = checkpointer->Start();
  if (status.ok()) status = checkpointer->PrepareToSave();
  MutexLock lock(&opening->mu);
  if (!opening->given_up) opening->checkpointer = std::move(checkpointer);
  opening->status = status;
  opening->done = true;
}

void Checkpoints::Open(std::unique_ptr<Checkpointer> made) {
  Leave();
  opening_ = std::make_shared<Opening>();
  {
    MutexLock lock(&opening_->mu);
    opening_->checkpointer = std::move(made);
  }
  if (thread_.Post([opening = opening_] { Start(opening.get()); })) return;
  MutexLock lock(&opening_->mu);
  opening_->status =
      absl::ResourceExhaustedError("the storage of checkpoints has not answered in thousands of generations");
  opening_->done = true;
}

bool Checkpoints::Opened() const {
  MutexLock lock(&opening_->mu);
  return opening_->done;
}

absl::Status Checkpoints::Adopt() {
  const std::shared_ptr<Opening> opening = std::exchange(opening_, nullptr);
  MutexLock lock(&opening->mu);
  opening->mu.Await([&opening]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(opening->mu) { return opening->done; });
  if (opening->status.ok()) Set(std::move(opening->checkpointer));
  return opening->status;
}

void Checkpoints::Set(std::unique_ptr<Checkpointer> started) {
  current_ = std::move(started);
  if (const std::optional<uint64_t> device = current_->device()) device_ = device;
}

absl::Status Checkpoints::SaveIfDue(int64_t step, Communicator* comm) {
  LookForCommit();
  const Instant now = RealClock().Now();
  GT_ASSIGN_OR_RETURN(const bool began, current_->SaveIfDue(step, comm));
  if (began) saving_ = {step, now};
  return absl::OkStatus();
}

void Checkpoints::LookForCommit() {
  if (!saving_ || current_ == nullptr || current_->LastCommitted().value_or(-1) < saving_->step) return;
  newest_ = std::exchange(saving_, std::nullopt);
}

void Checkpoints::Leave() {
  LookForCommit();
  saving_.reset();
  if (opening_ != nullptr) {
    std::unique_ptr<Checkpointer> not_begun;
    MutexLock lock(&opening_->mu);
    opening_->given_up = true;
    if (!opening_->done) not_begun = std::move(opening_->checkpointer);
  }
  // An opening that has ended with a checkpointer nobody took is closed there, too.
  std::shared_ptr<Opening> opened = std::move(opening_);
  std::shared_ptr<Checkpointer> over = std::move(current_);
  if (opened == nullptr && over == nullptr) return;
  thread_.Post([opened = std::move(opened), over = std::move(over)] {});
}

std::string Say(const UnsavedEnd& end, absl::string_view why) {
  const std::string made = end.all ? absl::StrCat("all ", end.step, " steps are made")
                                   : absl::StrCat("the run was stopped after step ", end.step);
  const std::string newest =
      end.saved > 0 ? absl::StrCat("the newest checkpoint is of step ", end.saved) : "there is no checkpoint";
  std::string said = absl::StrCat(made, ", and step ", end.step, " is not saved: ", newest);
  if (end.stops) {
    absl::StrAppend(&said, "; the save is tried until the grace of the stop is over");
  } else if (end.left > absl::ZeroDuration()) {
    // To the minute: it is said anew with each try.
    absl::StrAppend(&said, "; only the last save is missing and is tried for ",
                    absl::FormatDuration(absl::Ceil(end.left, absl::Minutes(1))),
                    " more. Mend the storage and it goes on; `gtrain stop` gives the steps up");
  }
  return absl::StrCat(said, ". ", why);
}

absl::Duration PausesAfter(int tries, int tries_max, absl::Duration retry) {
  absl::Duration all;
  for (; tries < tries_max; ++tries) all += retry * (1 << std::min(tries - 1, 4));
  return all;
}

}  // namespace gtrain::elastic
