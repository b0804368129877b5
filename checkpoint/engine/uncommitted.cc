#include "checkpoint/engine/uncommitted.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/parallel.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/engine/settle.h"

namespace gtrain::ckpt {
namespace {

// The newest attempt of an earlier generation that any tier knows.
std::optional<SaveId> NewestNear(const std::vector<port::NearTier*>& tiers, const SaveId& self) {
  std::vector<std::vector<std::string>> names(tiers.size());
  ForEachAtOnce(tiers.size(), [&](size_t i) {
    if (auto attempts = tiers[i]->Attempts(); attempts.ok()) names[i] = *std::move(attempts);
  });
  std::optional<SaveId> newest;
  for (const std::vector<std::string>& of_tier : names) {
    for (const std::string& name : of_tier) {
      const std::optional<SaveId> id = ParseAttemptName(name);
      if (id && id->epoch == self.epoch && id->generation < self.generation)
        newest = std::max(newest.value_or(*id), *id);
    }
  }
  return newest;
}

// Where one finds the files of one attempt.
class Files {
 public:
  Files(const std::vector<port::NearTier*>& tiers, const SaveId& id) : attempt_(AttemptName(id)) {
    std::vector<std::vector<port::NearTier::Shard>> listed(tiers.size());
    ForEachAtOnce(tiers.size(), [&](size_t i) {
      if (auto files = tiers[i]->List(attempt_); files.ok()) listed[i] = *std::move(files);
    });
    for (size_t i = 0; i < tiers.size(); ++i) {
      for (const port::NearTier::Shard& file : listed[i])
        places_[file.file].push_back({tiers[i], file.bytes});
    }
  }

  // The world size according to the names of the files; 0 when there are none.
  int world_size() const {
    for (const auto& [name, places] : places_) {
      if (const auto rank = ParseRankName(name)) return rank->second;
    }
    return 0;
  }

  bool Has(const std::string& name, uint64_t bytes) const {
    const auto it = places_.find(name);
    return it != places_.end() && std::any_of(it->second.begin(), it->second.end(),
                                              [&](const Place& place) { return place.bytes == bytes; });
  }

  // NotFound when no place has it, or none gives it.
  absl::StatusOr<std::string> Read(const std::string& name) const {
    absl::Status status = absl::NotFoundError(absl::StrCat("no machine has ", attempt_, "/", name));
    const auto it = places_.find(name);
    if (it == places_.end()) return status;
    for (const Place& place : it->second) {
      if (place.bytes > kManifestBytesMax) continue;
      std::string text(place.bytes, '\0');
      const absl::Status read = place.tier->Read(attempt_, name, 0, absl::MakeSpan(text.data(), text.size()));
      if (read.ok()) return text;
      status = absl::NotFoundError(read.message());
    }
    return status;
  }

 private:
  struct Place {
    port::NearTier* tier;
    uint64_t bytes;
  };
  const std::string attempt_;
  std::map<std::string, std::vector<Place>> places_;
};

absl::StatusOr<Manifest> Compose(const Files& files, const SaveId& id, const Identity& owner,
                                 const std::string& location) {
  const int n = files.world_size();
  if (n == 0) return absl::NotFoundError("no machine has a file of it");
  GT_ASSIGN_OR_RETURN(const std::string order_text, files.Read(OrderName(n)));
  GT_ASSIGN_OR_RETURN(SaveOrder order, ParseSaveOrder(order_text));
  if (order.world_size != n || order.epoch != id.epoch || order.owner != owner ||
      AbsoluteLocation(order.location) != AbsoluteLocation(location)) {
    return absl::DataLossError(absl::StrCat(OrderName(n), " is of another save: of ", order.location));
  }
  Manifest manifest{.id = id,
                    .owner = std::move(order.owner),
                    .world_size = n,
                    .tensors = std::move(order.tensors),
                    .files = std::vector<ShardFile>(static_cast<size_t>(n))};
  std::vector<absl::Status> found(static_cast<size_t>(n));
  ForEachAtOnce(found.size(), [&](size_t i) {
    found[i] = [&]() -> absl::Status {
      const int rank = static_cast<int>(i);
      GT_ASSIGN_OR_RETURN(const std::string text, files.Read(IndexName(rank, n)));
      GT_ASSIGN_OR_RETURN(ShardIndex index, ParseShardIndex(AttemptKey(id, IndexName(rank, n)), text));
      if (!index.error.empty()) return absl::AbortedError(index.error);
      if (!files.Has(index.file.name, index.file.bytes))
        return absl::NotFoundError(absl::StrCat("no machine has ", index.file.name, " whole"));
      manifest.files[i] = std::move(index.file);
      return absl::OkStatus();
    }();
  });
  for (const absl::Status& status : found) GT_RETURN_IF_ERROR(status);
  GT_RETURN_IF_ERROR(Validate(manifest));
  return manifest;
}

}  // namespace

absl::StatusOr<std::optional<Manifest>> FindUncommitted(port::BlobStore* store, const NearTiers& near,
                                                        const SaveId& self, const Identity& owner) {
  std::vector<port::NearTier*> tiers;
  if (near.own != nullptr) tiers.push_back(near.own.get());
  for (const std::shared_ptr<port::NearTier>& peer : near.peers) tiers.push_back(peer.get());
  const std::optional<SaveId> newest = NewestNear(tiers, self);
  if (!newest || newest->timeline >= self.timeline) return std::nullopt;
  GT_ASSIGN_OR_RETURN(std::vector<SaveId> others, ListOpen(store, self));
  std::erase(others, *newest);
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> decided, ListManifests(store));
  others.insert(others.end(), decided.begin(), decided.end());
  for (const SaveId& other : others) {
    if (other.epoch == self.epoch && other >= *newest) return std::nullopt;
  }
  absl::StatusOr<Manifest> composed = Compose(Files(tiers, *newest), *newest, owner, store->Describe());
  if (composed.ok()) return std::optional(*std::move(composed));
  LogInfo("checkpoint: step ", newest->step, " of generation ", newest->generation,
          " is not committed yet and not whole near by: ", composed.status().message());
  return std::nullopt;
}

}  // namespace gtrain::ckpt
