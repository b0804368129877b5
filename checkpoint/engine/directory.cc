#include "checkpoint/engine/directory.h"

#include <sys/stat.h>

#include <algorithm>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/openings.h"
#include "checkpoint/engine/resume.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/store/probe.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kVisibleWithin = absl::Seconds(30);  // a file of another machine, on a slow NFS
constexpr absl::Duration kVisiblePoll = absl::Milliseconds(20);
constexpr absl::Duration kNewestWithin = absl::Seconds(10);  // for a client of NFS that sees it late

// The file system that a directory lies on; nullopt: it is none.
std::optional<uint64_t> DeviceOf(const std::string& location) {
  struct stat info;
  if (absl::StartsWith(location, "s3://") || stat(location.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))
    return std::nullopt;
  return info.st_dev;
}

}  // namespace

absl::StatusOr<std::string> GetVisible(port::BlobStore* store, const std::string& key, size_t bytes_max,
                                       absl::FunctionRef<absl::Status()> still_wanted) {
  const RealClock clock;
  const Instant deadline = clock.Now() + kVisibleWithin;
  while (true) {
    absl::StatusOr<std::string> text = store->Get(key, bytes_max);
    if (!absl::IsNotFound(text.status()) || clock.Now() >= deadline) return text;
    if (absl::Status alive = still_wanted(); !alive.ok()) return alive;
    absl::SleepFor(kVisiblePoll);
  }
}

Directory::~Directory() {
  if (!place_.empty()) LeavePlace(place_, next_.attempt + 1);
  // The job has another generation to come: the directory is not free meanwhile.
  if (lease_ != nullptr && !context_.Alive().ok()) lease_->LeaveBehind();
}

absl::Status Directory::Open() {
  absl::StatusOr<std::unique_ptr<port::BlobStore>> store = open_store_(settings_.uri);
  GT_RETURN_IF_ERROR(agree_.AllOk(store.status()));
  store_ = MarkStorageErrors(*std::move(store));
  if (settings_.read_only) {
    // Nothing here is ours, and everything is older than what we would write.
    next_ = {.epoch = kCounterMax, .timeline = context_.timeline, .generation = context_.generation};
    return absl::OkStatus();
  }
  // This comes before anything is written: an unmounted directory would get a claim of ours.
  absl::Status there;
  if (agree_.rank() == 0 && settings_.device) there = CheckSamePlace();
  if (there.ok() && agree_.rank() == 0 && settings_.newest) {
    // A new owner of the directory may have deleted the checkpoints of this job.
    there = CheckStillOwned(store_.get(), settings_.identity, session_->managed());
    if (absl::IsFailedPrecondition(there)) session_->ReportNote(kNoteOwner, std::string(there.message()));
  }
  if (agree_.rank() == 0 && settings_.newest && there.ok()) {
    there = FindNewest(store_.get(), *settings_.newest, kNewestWithin, context_.alive);
  }
  GT_RETURN_IF_ERROR(agree_.AllOk(there));
  GT_RETURN_IF_ERROR(ProveShared());
  GT_RETURN_IF_ERROR(TakeOwnership());
  if (agree_.rank() == 0) device_ = DeviceOf(settings_.uri);
  return absl::OkStatus();
}

// What is at a mount point while nothing is mounted there would get a claim and checkpoints that nobody sees
// any more once it is mounted again. Where our claim is, it is the right place, however it is mounted now.
absl::Status Directory::CheckSamePlace() const {
  const std::optional<uint64_t> device = DeviceOf(settings_.uri);
  if (device == settings_.device) return absl::OkStatus();
  if (!device) {
    return StorageError(absl::UnavailableError(absl::StrCat(
        store_->Describe(),
        " is gone: was it unmounted, renamed, or removed? Mount it or make it again (mkdir), and "
        "saves go on")));
  }
  GT_ASSIGN_OR_RETURN(const bool ours, HasClaimOf(store_.get(), settings_.identity, session_->managed()));
  if (ours) return absl::OkStatus();
  return StorageError(absl::UnavailableError(
      absl::StrCat(store_->Describe(),
                   " lies on another file system than before, and has nothing of this job. Is the right one "
                   "mounted? To save here all the same: stop the job and launch it again")));
}

absl::StatusOr<port::BlobStore*> Directory::StoreOf(bool elsewhere) {
  if (!elsewhere) return store_.get();
  if (elsewhere_ == nullptr) {
    GT_ASSIGN_OR_RETURN(std::unique_ptr<port::BlobStore> opened, open_store_(settings_.resume_uri));
    elsewhere_ = MarkStorageErrors(std::move(opened));
  }
  return elsewhere_.get();
}

const SaveId& Directory::NameSave(int64_t step) {
  if (step <= highest_step_) ++next_.attempt;  // a step saved before: its names are taken
  highest_step_ = step;
  next_.step = step;
  return next_;
}

void Directory::LookSoon() {
  if (lease_ != nullptr) lease_->LookSoon();
}

absl::Status Directory::HoldLease(uint64_t epoch, bool fresh) {
  lease_.reset();
  lease_ = std::make_unique<Lease>(store_.get(), epoch, context_.generation, fresh,
                                   [this](const absl::Status& lost) {
                                     LogError("checkpoint: ", lost.message());
                                     session_->ReportNote(kNoteOwner, absl::StrCat("LOST: ", lost.message()));
                                   });
  return lease_->first();
}

absl::Status Directory::ProveShared() {
  Rng rng = Rng::FromSystem();
  std::string nonce = ProbeKey(absl::ToUnixSeconds(absl::Now()), rng.Next());
  absl::Status made;
  if (agree_.rank() == 0) {
    made = ProveExclusive(store_.get(), nonce);
  }
  const auto remove = absl::MakeCleanup([&] {
    if (agree_.rank() == 0) store_->Delete(nonce).IgnoreError();
  });
  GT_RETURN_IF_ERROR(agree_.AllOk(made));
  GT_RETURN_IF_ERROR(agree_.Broadcast(&nonce));
  const absl::StatusOr<std::string> seen = GetVisible(store_.get(), nonce, 1024, context_.alive);
  const absl::Status alive = context_.Alive();
  const bool unreadable = alive.ok() && !seen.ok() && !absl::IsNotFound(seen.status());
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> sees, agree_.Gather(unreadable                    ? -1
                                                                     : seen.ok() && *seen == nonce ? 1
                                                                                                   : 0));
  GT_RETURN_IF_ERROR(alive);
  if (std::find(sees.begin(), sees.end(), -1) != sees.end())
    return agree_.AllOk(unreadable ? seen.status() : absl::OkStatus());
  std::vector<int> blind;
  for (size_t rank = 0; rank < sees.size(); ++rank) {
    if (sees[rank] == 0) blind.push_back(static_cast<int>(rank));
  }
  if (blind.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the checkpoint directory ", store_->Describe(), " is not shared: rank ", absl::StrJoin(blind, ", "),
      " cannot see what rank 0 writes there. Put it on a file system that all nodes mount at this path"));
}

absl::StatusOr<std::string> Directory::Claim() {
  std::string taken_from;
  const LivenessCheck check{.alive = context_.alive};
  const absl::StatusOr<OwnerClaim> claim = TakeDirectory(
      store_.get(), settings_, session_->managed(), check, &taken_from,
      [this](uint64_t epoch, bool fresh) { return HoldLease(epoch, fresh); }, [this] { lease_.reset(); });
  if (!claim.ok()) {
    lease_.reset();
    // Somebody else's, or another job's checkpoints: people look for the reason in `gtrain status`.
    if (absl::IsFailedPrecondition(claim.status()))
      session_->ReportNote(kNoteOwner, std::string(claim.status().message()));
    return claim.status();
  }
  next_.epoch = claim->epoch;
  if (!taken_from.empty()) {
    const std::string told = absl::StrCat(store_->Describe(), " was taken over from ", taken_from);
    LogWarning("checkpoint: ", told);
    session_->ReportNote(kNoteOwner, told);
  }
  GT_ASSIGN_OR_RETURN(uint64_t attempt, NextAttempt(store_.get(), next_));
  const std::string place = PlaceOf(AbsoluteLocation(settings_.uri), next_);
  GT_ASSIGN_OR_RETURN(attempt, TakePlace(place, attempt));
  place_ = place;
  return absl::StrCat(next_.epoch, " ", attempt);
}

absl::Status Directory::TakeOwnership() {
  next_ = {.timeline = context_.timeline, .generation = context_.generation};
  absl::StatusOr<std::string> claimed = agree_.rank() == 0 ? Claim() : std::string();
  GT_RETURN_IF_ERROR(agree_.AllOk(claimed.status()));
  GT_RETURN_IF_ERROR(agree_.Broadcast(&*claimed));
  const std::vector<std::string> parts = absl::StrSplit(*claimed, ' ');
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &next_.epoch) ||
      !absl::SimpleAtoi(parts[1], &next_.attempt) || !IsValid(next_)) {
    return absl::InternalError(absl::StrCat("no valid owner epoch and attempt: \"", *claimed, "\""));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
