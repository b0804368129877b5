#include "checkpoint/engine/retain.h"

#include <algorithm>
#include <tuple>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/leftovers.h"

namespace gtrain::ckpt {
namespace {

constexpr int kUnlistedMax = 20;

std::vector<std::string> FilesOf(const SaveId& id, int world_size, BesideShards beside) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size; ++rank) {
    keys.push_back(AttemptKey(id, ShardName(rank, world_size)));
    if (beside.indices) keys.push_back(AttemptKey(id, IndexName(rank, world_size)));
  }
  for (int part = 0; beside.parts && part < PartCount(world_size); ++part)
    keys.push_back(AttemptKey(id, PartName(part, PartCount(world_size))));
  return keys;
}

// Sorts these attempts into committed, aborted and damaged ones.
absl::StatusOr<StoredCheckpoints> SortManifests(port::BlobStore* store, const std::vector<SaveId>& ids,
                                                std::map<SaveId, bool>* finite_of) {
  StoredCheckpoints stored;
  for (const SaveId& found : ids) {
    const auto known = finite_of->find(found);
    if (known != finite_of->end()) {
      stored.committed.push_back({found, known->second});
      continue;
    }
    const auto read = ReadManifest(store, found);
    if (absl::IsDataLoss(read.status())) {
      stored.damaged.push_back(found);
    } else if (!read.ok()) {
      return read.status();  // a bad moment of the storage must not look like a bad checkpoint
    } else if (const auto* manifest = std::get_if<Manifest>(&*read)) {
      (*finite_of)[found] = manifest->finite();
      stored.committed.push_back({found, manifest->finite()});
    } else {
      stored.aborted.push_back(found);
    }
  }
  return stored;
}

absl::Status AddPins(port::BlobStore* store, StoredCheckpoints* stored) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> pins, store->List(kPinPrefix));
  for (const std::string& pin : pins) {
    if (const auto attempt = ParsePinKey(pin)) stored->pinned.push_back(*attempt);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StoredCheckpoints> ListStored(port::BlobStore* store, const SaveId& newest,
                                             std::map<SaveId, bool>* finite_of) {
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> ids, ListManifests(store));
  GT_ASSIGN_OR_RETURN(StoredCheckpoints stored, SortManifests(store, ids, finite_of));
  stored.just_committed = newest;
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> folders, store->ListFolders());
  for (const std::string& folder : folders) {
    if (const auto attempt = ParseAttemptName(folder)) stored.folders.push_back(*attempt);
  }
  GT_RETURN_IF_ERROR(AddPins(store, &stored));
  return stored;
}

absl::Status DeletePlanned(port::BlobStore* store, const RetentionPlan& plan,
                           const std::map<SaveId, BesideShards>& whole, int world_size) {
  std::vector<std::string> manifests, files;
  for (const SaveId& id : plan.manifests) manifests.push_back(ManifestKey(id));
  std::vector<SaveId> folders;
  for (const SaveId& id : plan.folders) {
    // The list that shows no manifest may be out of date (fault S7): the key decides.
    if (!std::count(plan.manifests.begin(), plan.manifests.end(), id)) {
      const absl::Status manifest = store->Size(ManifestKey(id)).status();
      if (manifest.ok()) continue;
      if (!absl::IsNotFound(manifest)) return manifest;
    }
    folders.push_back(id);
    std::vector<std::string> keys;
    if (const auto known = whole.find(id); known != whole.end()) {
      keys = FilesOf(id, world_size, known->second);
    } else {
      GT_ASSIGN_OR_RETURN(keys, store->List(AttemptName(id) + "/"));
    }
    files.insert(files.end(), keys.begin(), keys.end());
  }
  GT_RETURN_IF_ERROR(store->DeleteAll(manifests));
  GT_RETURN_IF_ERROR(store->DeleteAll(files));
  for (const SaveId& id : folders) GT_RETURN_IF_ERROR(store->DropEmptyFolder(AttemptName(id)));
  return absl::OkStatus();
}

absl::Status Retention::Apply(const SaveId& id, bool finite, uint64_t bytes, BesideShards beside,
                              std::vector<SaveId> before) {
  finite_of_[id] = finite;
  whole_[id] = beside;
  const bool list = unlisted_left_ == 0;
  const int left = list ? kUnlistedMax : unlisted_left_ - 1;
  unlisted_left_ = 0;  // after an error
  GT_ASSIGN_OR_RETURN(const StoredCheckpoints stored,
                      list ? LookAtAll(id) : LookAtManifests(id, bytes, std::move(before)));
  const RetentionPlan plan = PlanRetention(stored, keep_);
  GT_RETURN_IF_ERROR(DeletePlanned(store_, plan, whole_, world_size_));
  for (const SaveId& old : plan.manifests) finite_of_.erase(old);
  for (const SaveId& old : plan.folders) whole_.erase(old);
  unlisted_left_ = left;
  return absl::OkStatus();
}

absl::StatusOr<StoredCheckpoints> Retention::LookAtAll(const SaveId& id) {
  GT_ASSIGN_OR_RETURN(StoredCheckpoints stored, ListStored(store_, id, &finite_of_));
  GT_RETURN_IF_ERROR(SpareInFlight(store_, kAbandonedAge, &stored).status());
  GT_ASSIGN_OR_RETURN(const auto unfinished, ListAbandonedPuts(store_, kAbandonedAge, stored));
  for (const auto& u : unfinished) GT_RETURN_IF_ERROR(store_->DropUnfinished(u));
  // The writer that commits was the newest owner a moment ago.
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> leases,
                      ListAbandonedLeases(store_, kAbandonedAge, id.epoch));
  GT_RETURN_IF_ERROR(store_->DeleteAll(leases));
  stored.resumed = resumed_;
  stored.verified = verified_;
  return stored;
}

absl::StatusOr<StoredCheckpoints> Retention::LookAtManifests(const SaveId& id, uint64_t bytes,
                                                             std::vector<SaveId> there) {
  there.push_back(id);
  GT_ASSIGN_OR_RETURN(StoredCheckpoints stored, SortManifests(store_, there, &finite_of_));
  stored.just_committed = id;
  stored.resumed = resumed_;
  stored.verified = verified_;
  stored.folders = PlanRetention(stored, keep_).manifests;
  const size_t old = stored.folders.size();
  if (store_->DeletesTogether() && old < kTogether && bytes * old <= kWaitingBytesMax)
    return StoredCheckpoints{.just_committed = id};  // of a job, one is as large as the other
  if (old == 0) return stored;
  GT_RETURN_IF_ERROR(AddPins(store_, &stored));
  return stored;
}

ckpt::save::ManifestRead WhyNothingIsThere(port::BlobStore* store, const SaveId& id) {
  using ckpt::save::KeyHolds;
  const auto newest = NewestManifest(store);
  if (!newest.ok()) return {KeyHolds::kUnreadable, std::string(newest.status().message())};
  if (!*newest) return {KeyHolds::kNothing, ""};
  const SaveId& taker = (*newest)->id;
  if (std::tie(taker.epoch, taker.timeline) <= std::tie(id.epoch, id.timeline)) {
    return {KeyHolds::kNothing, ""};
  }
  return {KeyHolds::kOutranked,
          absl::StrCat(AttemptName(taker), " was committed by a later life of the job, or by a new owner, ",
                       "and its retention removed it")};
}

}  // namespace gtrain::ckpt
