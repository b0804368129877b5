#include "checkpoint/engine/catalog.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {

absl::StatusOr<std::vector<SaveId>> ListManifests(port::BlobStore* store) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(kManifestPrefix));
  std::vector<SaveId> ids;
  for (const std::string& key : keys) {
    if (const std::optional<SaveId> id = ParseManifestKey(key)) ids.push_back(*id);
  }
  std::sort(ids.rbegin(), ids.rend());
  return ids;
}

absl::StatusOr<DirectoryNames> ListNames(port::BlobStore* store) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->ListAll({kManifestPrefix, kOwnerPrefix}));
  DirectoryNames names;
  for (const std::string& key : keys) {
    if (const std::optional<SaveId> id = ParseManifestKey(key)) names.manifests.push_back(*id);
    if (const auto epoch = ParseOwnerKey(key)) names.newest_owner = std::max(names.newest_owner, *epoch);
  }
  std::sort(names.manifests.rbegin(), names.manifests.rend());
  return names;
}

absl::StatusOr<std::variant<Manifest, AbortMarker>> ReadManifest(port::BlobStore* store, const SaveId& id,
                                                                 std::string* text) {
  const std::string key = ManifestKey(id);
  absl::StatusOr<std::string> read = store->Get(key, kManifestBytesMax);
  if (absl::IsOutOfRange(read.status())) return absl::DataLossError(read.status().message());
  if (!read.ok()) return read.status();
  if (text != nullptr) *text = *read;
  auto parsed = ParseManifest(key, *read);
  if (parsed.ok()) return parsed;
  return absl::Status(parsed.status().code(),
                      absl::StrCat(store->Describe(), "/", key, ": ", parsed.status().message()));
}

std::string WhereIs(const port::BlobStore& store, const SaveId& id) {
  return absl::StrCat(store.Describe(), "/", ManifestKey(id));
}

absl::StatusOr<std::optional<Manifest>> NewestManifest(port::BlobStore* store) {
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> ids, ListManifests(store));
  for (const SaveId& id : ids) {
    auto read = ReadManifest(store, id);
    if (!read.ok() && !absl::IsDataLoss(read.status()) && !absl::IsNotFound(read.status()))
      return read.status();
    if (!read.ok()) {
      LogWarning("checkpoint: ", read.status().message());
    } else if (Manifest* manifest = std::get_if<Manifest>(&*read)) {
      return std::move(*manifest);
    }
  }
  return std::optional<Manifest>();
}

FiniteAdvice AdviceForNotFinite(port::BlobStore* store, const SaveId& id,
                                const std::optional<SaveId>& before) {
  FiniteAdvice advice{.text = absl::StrCat("step ", id.step, " holds NaN or infinity")};
  const absl::StatusOr<std::vector<SaveId>> ids = ListManifests(store);
  if (!ids.ok()) return advice;
  for (const SaveId& other : *ids) {
    if (before && !(other < *before)) continue;
    const auto read = ReadManifest(store, other);
    if (!read.ok() && !absl::IsDataLoss(read.status()) && !absl::IsNotFound(read.status())) return advice;
    const auto* manifest = read.ok() ? std::get_if<Manifest>(&*read) : nullptr;
    if (manifest == nullptr || !manifest->finite()) continue;
    advice.finite = other;
    absl::StrAppend(&advice.text, "; the newest finite one is step ", other.step);
    return advice;
  }
  absl::StrAppend(&advice.text, before ? "; no older one is finite" : "; none that is there is finite");
  return advice;
}

absl::StatusOr<std::vector<OwnerClaim>> ListOwners(port::BlobStore* store) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(kOwnerPrefix));
  std::vector<OwnerClaim> owners;
  for (const std::string& key : keys) {
    const std::optional<uint64_t> epoch = ParseOwnerKey(key);
    if (!epoch) continue;
    const absl::StatusOr<std::string> text = store->Get(key, kSmallFileBytesMax);
    if (!text.ok() && !absl::IsOutOfRange(text.status())) return text.status();
    absl::StatusOr<OwnerClaim> claim = text.ok() ? ParseOwnerClaim(key, *text) : text.status();
    if (!claim.ok()) {
      LogWarning("checkpoint: ", store->Describe(), "/", key, ": ", claim.status().message());
      claim = OwnerClaim{.epoch = *epoch, .owner = {.job = "(unknown: the claim is damaged)"}};
    }
    owners.push_back(*std::move(claim));
  }
  std::sort(owners.begin(), owners.end(), [](const auto& a, const auto& b) { return a.epoch < b.epoch; });
  return owners;
}

absl::StatusOr<uint64_t> NextEpoch(port::BlobStore* store, std::vector<OwnerClaim>* owners) {
  // The owner that committed one of these claimed before, so its claim is listed below: no owner that has
  // saved is passed over without being judged.
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> ids, ListManifests(store));
  GT_ASSIGN_OR_RETURN(*owners, ListOwners(store));
  const uint64_t newest = owners->empty() ? 0 : owners->back().epoch;
  const uint64_t epoch = std::max(newest, ids.empty() ? 0 : ids[0].epoch) + 1;
  if (epoch > kCounterMax) return absl::ResourceExhaustedError("no owner epochs are left");
  return epoch;
}

absl::StatusOr<OwnerClaim> ClaimOwnership(port::BlobStore* store, const Identity& owner, uint64_t epoch) {
  const OwnerClaim claim{.epoch = epoch, .owner = owner};
  GT_RETURN_IF_ERROR(store->PutIfAbsent(OwnerKey(claim.epoch), Print(claim)));
  return claim;
}

absl::StatusOr<uint64_t> NextAttempt(port::BlobStore* store, const SaveId& like) {
  GT_ASSIGN_OR_RETURN(std::vector<SaveId> ids, ListManifests(store));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> folders, store->ListFolders());
  for (const std::string& folder : folders) {
    if (const auto id = ParseAttemptName(folder)) ids.push_back(*id);
  }
  uint64_t next = 1;
  for (const SaveId& id : ids) {
    const bool ours =
        id.epoch == like.epoch && id.timeline == like.timeline && id.generation == like.generation;
    if (ours) next = std::max(next, id.attempt + 1);
  }
  return next;
}

}  // namespace gtrain::ckpt
