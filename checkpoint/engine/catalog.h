// The content of a checkpoint directory: owners and manifests. The names are found by listing, the rest by
// reading.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Attempts that have something under their manifest's key, newest first. Not everything is a usable manifest.
absl::StatusOr<std::vector<SaveId>> ListManifests(port::BlobStore* store);
struct DirectoryNames {
  std::vector<SaveId> manifests;  // as of ListManifests
  uint64_t newest_owner = 0;      // epoch; 0: there is no claim
};
absl::StatusOr<DirectoryNames> ListNames(port::BlobStore* store);
// DataLoss: there is something that cannot be used; other errors are the storage's. `text`, if given, gets
// the bytes.
absl::StatusOr<std::variant<Manifest, AbortMarker>> ReadManifest(port::BlobStore* store, const SaveId& id,
                                                                 std::string* text = nullptr);
// For people: where the manifest of `id` lies.
std::string WhereIs(const port::BlobStore& store, const SaveId& id);
// The newest usable manifest; damaged ones are logged and passed over.
absl::StatusOr<std::optional<Manifest>> NewestManifest(port::BlobStore* store);

// Says "step 80 holds NaN or infinity; the newest finite one is step 20" of `id`, which is not finite, and
// the newest committed finite checkpoint before `before`; damaged ones are passed over. Facts that cannot be
// read from the storage are left out. Costs a listing, and one manifest for each checkpoint that is looked
// at; rank 0 alone asks.
struct FiniteAdvice {
  std::string text;
  std::optional<SaveId> finite;
};
FiniteAdvice AdviceForNotFinite(port::BlobStore* store, const SaveId& id,
                                const std::optional<SaveId>& before = std::nullopt);

// Epochs taken so far, oldest first. Damaged claims keep their epoch, with an unknown owner.
absl::StatusOr<std::vector<OwnerClaim>> ListOwners(port::BlobStore* store);
// Returns the epoch of the next owner, after all claims, which become `owners`, and all checkpoints: an epoch
// that was in use and whose claim was deleted by hand is not given again. Everyone who claims after this call
// gets the same epoch, whatever the others save meanwhile. ResourceExhausted: none is left.
absl::StatusOr<uint64_t> NextEpoch(port::BlobStore* store, std::vector<OwnerClaim>* owners);
// Takes the directory for `owner`; `epoch` is the result of NextEpoch before the newest owner was judged.
// AlreadyExists: another owner has taken it since then.
absl::StatusOr<OwnerClaim> ClaimOwnership(port::BlobStore* store, const Identity& owner, uint64_t epoch);

// The next number for attempts of (epoch, timeline, generation) of `like`: nothing there is overwritten.
absl::StatusOr<uint64_t> NextAttempt(port::BlobStore* store, const SaveId& like);

}  // namespace gtrain::ckpt
