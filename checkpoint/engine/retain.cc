#include "checkpoint/engine/retain.h"

#include <tuple>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"

namespace gtrain::ckpt {
namespace {

absl::Status DeleteAttempt(port::BlobStore* store, const SaveId& id) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(AttemptName(id) + "/"));
  for (const std::string& key : keys) GT_RETURN_IF_ERROR(store->Delete(key));
  return store->DropEmptyFolder(AttemptName(id));
}

}  // namespace

absl::StatusOr<StoredCheckpoints> ListStored(port::BlobStore* store, const SaveId& newest,
                                             std::map<SaveId, bool>* finite_of) {
  StoredCheckpoints stored{.just_committed = newest};
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> ids, ListManifests(store));
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

absl::Status DeletePlanned(port::BlobStore* store, const RetentionPlan& plan) {
  for (const SaveId& id : plan.manifests) GT_RETURN_IF_ERROR(store->Delete(ManifestKey(id)));
  for (const SaveId& id : plan.folders) GT_RETURN_IF_ERROR(DeleteAttempt(store, id));
  return absl::OkStatus();
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
