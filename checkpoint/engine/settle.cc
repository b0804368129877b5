// The first to create the manifest's key wins: a commit that was faster is resumed from, one that comes later
// finds the marker. Without this a save that is still being written could be committed unnoticed by a job
// that went on from the one before.
#include "checkpoint/engine/settle.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kLookForIndicesEvery = absl::Milliseconds(50);

// Each rank's index is there, or the part that was made of it. Shards and indices say in their names how many
// there are.
bool HasAllIndices(port::BlobStore* store, const SaveId& id) {
  const std::string folder = absl::StrCat(AttemptName(id), "/");
  const auto keys = store->List(folder);
  if (!keys.ok()) return false;
  const std::set<std::string> there(keys->begin(), keys->end());
  int world_size = 0;
  for (const std::string& key : there) {
    if (const auto name = ParseRankName(absl::string_view(key).substr(folder.size())))
      world_size = name->second;
  }
  const auto has = [&](const std::string& file) { return there.contains(AttemptKey(id, file)); };
  for (int rank = 0; rank < world_size; ++rank) {
    if (!has(IndexName(rank, world_size)) && !has(PartName(PartOf(rank), PartCount(world_size))))
      return false;
  }
  return world_size > 0;
}

absl::Status GiveUp(port::BlobStore* store, const SaveId& id, uint64_t generation, absl::Duration waited) {
  const AbortMarker marker{.id = id,
                           .reason = absl::StrCat("generation ", generation, " waited ",
                                                  absl::FormatDuration(absl::Trunc(waited, absl::Seconds(1))),
                                                  " for it and went on without it")};
  const absl::Status put = store->PutIfAbsent(ManifestKey(id), Print(marker));
  if (absl::IsAlreadyExists(put)) return absl::OkStatus();  // its writers were faster, in whatever way
  if (put.ok()) {
    LogWarning("checkpoint: step ", id.step, " of generation ", id.generation,
               " is given up: it did not come to the storage whole in time");
  }
  return put;
}

}  // namespace

absl::StatusOr<std::vector<SaveId>> ListOpen(port::BlobStore* store, const SaveId& self) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> folders, store->ListFolders());
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> decided, ListManifests(store));
  const std::set<SaveId> closed(decided.begin(), decided.end());
  std::vector<SaveId> open;
  for (const std::string& folder : folders) {
    const auto id = ParseAttemptName(folder);
    if (id && id->epoch == self.epoch && id->generation < self.generation && !closed.contains(*id))
      open.push_back(*id);
  }
  return open;
}

absl::Status SettleEarlier(port::BlobStore* store, const SaveId& self,
                           absl::FunctionRef<absl::Status()> alive, const SettlePatience& patience) {
  const RealClock clock;
  const Instant begin = clock.Now();
  StopFlag never;
  GT_ASSIGN_OR_RETURN(std::vector<SaveId> open, ListOpen(store, self));
  for (const SaveId& id : open)
    LogInfo("checkpoint: step ", id.step, " of generation ", id.generation,
            " is not decided yet: waiting for it");
  while (!open.empty()) {
    const absl::Duration waited = clock.Now() - begin;
    for (const SaveId& id : open) {
      if (waited >= (HasAllIndices(store, id) ? patience.commit : patience.shards))
        GT_RETURN_IF_ERROR(GiveUp(store, id, self.generation, waited));
    }
    GT_RETURN_IF_ERROR(alive());
    (void)never.Await(kLookForIndicesEvery);
    GT_ASSIGN_OR_RETURN(open, ListOpen(store, self));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
