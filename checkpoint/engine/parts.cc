#include "checkpoint/engine/parts.h"

#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/engine/parallel.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/plan/load_plan.h"

namespace gtrain::ckpt {

absl::Status LoadParts(port::BlobStore* store, const std::vector<int>& ranks, Manifest* manifest) {
  std::set<int> lacking;
  for (const int rank : ranks) {
    if (!manifest->Has(rank)) lacking.insert(PartOf(rank));
  }
  if (lacking.empty()) return absl::OkStatus();
  const std::vector<int> parts(lacking.begin(), lacking.end());
  std::vector<absl::StatusOr<std::string>> texts(parts.size(), absl::UnknownError("not read"));
  const auto key_of = [&](size_t i) {
    return AttemptKey(manifest->id, PartName(parts[i], PartCount(manifest->world_size)));
  };
  ForEachAtOnce(parts.size(), [&](size_t i) { texts[i] = store->Get(key_of(i), kPartBytesMax); });
  std::vector<PartText> found;
  for (size_t i = 0; i < parts.size(); ++i) {
    const absl::Status status = texts[i].status();
    if (absl::IsNotFound(status) || absl::IsOutOfRange(status))
      return absl::DataLossError(absl::StrCat(key_of(i), ": ", status.message()));
    GT_RETURN_IF_ERROR(status);
    found.push_back({parts[i], *std::move(texts[i])});
  }
  return AddParts(found, manifest);
}

absl::StatusOr<Manifest> WithParts(port::BlobStore* store, Manifest manifest) {
  std::vector<int> all(static_cast<size_t>(manifest.world_size));
  std::iota(all.begin(), all.end(), 0);
  GT_RETURN_IF_ERROR(LoadParts(store, all, &manifest));
  return manifest;
}

absl::Status LoadPartsToRestore(port::BlobStore* store, const std::vector<Registered>& registered, int rank,
                                int world_size, const std::vector<std::string>& may_be_missing,
                                Manifest* manifest) {
  if (manifest->parts.empty()) return absl::OkStatus();
  LoadPlanner planner(manifest, registered, world_size, may_be_missing);
  std::vector<int> ranks = planner.FilesFor(rank, 0, registered.size());
  const auto [first, last] = LengthsOf(*manifest, rank, world_size);
  for (int file = first; file < last; ++file) ranks.push_back(file);
  return LoadParts(store, ranks, manifest);
}

}  // namespace gtrain::ckpt
