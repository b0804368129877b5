#include "checkpoint/engine/retain.h"

#include <tuple>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"

namespace gtrain::ckpt {
namespace {

constexpr int kUnlistedMax = 20;

std::vector<std::string> FilesOf(const SaveId& id, int world_size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size; ++rank) {
    keys.push_back(AttemptKey(id, ShardName(rank, world_size)));
    keys.push_back(AttemptKey(id, IndexName(rank, world_size)));
  }
  return keys;
}

// What is committed, aborted or damaged of these.
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
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> pins, store->List(kPinPrefix));
  for (const std::string& pin : pins) {
    if (const auto attempt = ParsePinKey(pin)) stored.pinned.push_back(*attempt);
  }
  return stored;
}

absl::Status DeletePlanned(port::BlobStore* store, const RetentionPlan& plan, const std::set<SaveId>& whole,
                           int world_size) {
  std::vector<std::string> manifests, files;
  for (const SaveId& id : plan.manifests) manifests.push_back(ManifestKey(id));
  for (const SaveId& id : plan.folders) {
    std::vector<std::string> keys;
    if (whole.contains(id)) {
      keys = FilesOf(id, world_size);
    } else {
      GT_ASSIGN_OR_RETURN(keys, store->List(AttemptName(id) + "/"));
    }
    files.insert(files.end(), keys.begin(), keys.end());
  }
  GT_RETURN_IF_ERROR(store->DeleteAll(manifests));
  GT_RETURN_IF_ERROR(store->DeleteAll(files));
  for (const SaveId& id : plan.folders) GT_RETURN_IF_ERROR(store->DropEmptyFolder(AttemptName(id)));
  return absl::OkStatus();
}

absl::Status Retention::Apply(const SaveId& id, bool finite, std::vector<SaveId> before) {
  finite_of_[id] = finite;
  whole_.insert(id);
  const bool list = unlisted_left_ == 0;
  const int left = list ? kUnlistedMax : unlisted_left_ - 1;
  unlisted_left_ = 0;  // after an error
  GT_ASSIGN_OR_RETURN(const StoredCheckpoints stored,
                      list ? LookAtAll(id) : LookAtManifests(id, std::move(before)));
  const RetentionPlan plan = PlanRetention(stored, keep_);
  GT_RETURN_IF_ERROR(DeletePlanned(store_, plan, whole_, world_size_));
  for (const SaveId& old : plan.manifests) finite_of_.erase(old);
  for (const SaveId& old : plan.folders) whole_.erase(old);
  unlisted_left_ = left;
  return absl::OkStatus();
}

absl::StatusOr<StoredCheckpoints> Retention::LookAtAll(const SaveId& id) {
  GT_ASSIGN_OR_RETURN(const auto unfinished, ListUnfinishedBefore(store_, id));
  for (const auto& u : unfinished) GT_RETURN_IF_ERROR(store_->DropUnfinished(u));
  return ListStored(store_, id, &finite_of_);
}

absl::StatusOr<StoredCheckpoints> Retention::LookAtManifests(const SaveId& id, std::vector<SaveId> there) {
  there.push_back(id);
  GT_ASSIGN_OR_RETURN(StoredCheckpoints stored, SortManifests(store_, there, &finite_of_));
  stored.just_committed = id;
  stored.folders = PlanRetention(stored, keep_).manifests;
  for (const SaveId& old : stored.folders) {
    const absl::Status pin = store_->Size(PinKey(old)).status();
    if (pin.ok()) stored.pinned.push_back(old);
    if (!pin.ok() && !absl::IsNotFound(pin)) return pin;
  }
  return stored;
}

absl::StatusOr<std::vector<port::BlobStore::Unfinished>> ListUnfinishedBefore(port::BlobStore* store,
                                                                              const SaveId& newest) {
  std::vector<port::BlobStore::Unfinished> before;
  GT_ASSIGN_OR_RETURN(const auto unfinished, store->ListUnfinished());
  for (const auto& u : unfinished) {
    const auto attempt = ParseManifestKey(u.key)
                             ? ParseManifestKey(u.key)
                             : ParseAttemptName(absl::string_view(u.key).substr(0, u.key.find('/')));
    if (attempt && *attempt < newest) before.push_back(u);
  }
  return before;
}

core::save::ManifestRead WhyNothingIsThere(port::BlobStore* store, const SaveId& id) {
  using core::save::KeyHolds;
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
