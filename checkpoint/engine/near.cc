#include "checkpoint/engine/near.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/near/near_folder.h"

namespace gtrain::ckpt {

std::shared_ptr<port::NearTier> OpenNear(const NearPlace& place, const std::string& job) {
  auto folder = NearFolder::Open(place.folder, place.bytes_max);
  if (folder.ok()) return MakeNearTier(*std::move(folder), job);
  LogWarning("checkpoint: no copies are kept on this machine: ", folder.status().message());
  return nullptr;
}

// ------------------------------------------------------------------ restore

NearShards::NearShards(const std::vector<port::NearTier*>& tiers, const Manifest& manifest)
    : manifest_(manifest), places_(tiers.size()) {
  const std::string attempt = AttemptName(manifest.id);
  for (size_t i = 0; i < tiers.size(); ++i) {
    places_[i].tier = tiers[i];
    const auto listed = tiers[i]->List(attempt);
    if (!listed.ok()) {
      LogWarning("checkpoint: ", tiers[i]->Describe(), " is not asked for copies of step ", manifest.id.step,
                 ": ", listed.status().message());
      continue;
    }
    for (const port::NearTier::Shard& shard : *listed) places_[i].shards[shard.file] = shard.bytes;
  }
  for (const ShardFile& file : manifest.files) {
    for (Place& place : places_) {
      const auto it = place.shards.find(file.name);
      if (it == place.shards.end() || it->second == file.bytes) continue;
      Refuse(&place, file, absl::StrCat("it has ", it->second, " bytes, not ", file.bytes));
      place.shards.erase(it);
    }
  }
}

bool NearShards::Holds(size_t file) const {
  return std::any_of(places_.begin(), places_.end(), [&](const Place& place) {
    return place.shards.contains(manifest_.files[file].name) && place.bad < kBadMax;
  });
}

void NearShards::Refuse(Place* place, const ShardFile& file, absl::string_view why) {
  LogWarning("checkpoint: the copy of ", AttemptKey(manifest_.id, file.name), " in ", place->tier->Describe(),
             " is NOT USED: ", why, "; the next place is asked");
}

bool NearShards::Read(size_t file, absl::FunctionRef<absl::Status(const ReadFrom&)> read) {
  const ShardFile& wanted = manifest_.files[file];
  const std::string attempt = AttemptName(manifest_.id);
  for (Place& place : places_) {
    if (place.bad >= kBadMax || !place.shards.contains(wanted.name)) continue;
    uint64_t bytes = 0;
    const auto from = [&](uint64_t at, absl::Span<char> out) {
      bytes += out.size();
      return place.tier->Read(attempt, wanted.name, at, out);
    };
    const absl::Status status = read({place.tier->ReadSize(), from});
    if (status.ok()) {
      place.bytes += bytes;
      return true;
    }
    // One that does not answer would cost its deadline for each chunk.
    place.bad += absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kBadMax : 1;
    Refuse(&place, wanted, status.message());
  }
  return false;
}

// ------------------------------------------------------------------ save

NearSaves::NearSaves(port::NearTier* tier, port::BlobStore* store) : tier_(tier), store_(store) {}

absl::Status NearSaves::Copy(const SaveId& id, const std::string& file, absl::string_view header,
                             absl::string_view data) {
  if (!committed_) {
    const auto newest = NewestManifest(store_);
    if (newest.ok() && *newest && (*newest)->id < id) committed_ = (*newest)->id;
  }
  const port::NearTier::Copy copy{.attempt = AttemptName(id),
                                  .file = file,
                                  .bytes = header.size() + data.size(),
                                  .committed = committed_ ? AttemptName(*committed_) : ""};
  return tier_->Put(copy, [&](uint64_t at) -> absl::StatusOr<absl::string_view> {
    if (give_up_) return absl::DeadlineExceededError("the save was over before it");
    if (at < header.size()) return header.substr(at);
    return data.substr(at - header.size(), kChunkBytes);
  });
}

void NearSaves::Begin(const SaveId& id, const std::string& file, absl::string_view header,
                      absl::string_view data) {
  if (tier_ == nullptr || thread_.joinable()) return;
  give_up_ = false;
  begun_ = clock_.Now();
  {
    MutexLock lock(&mu_);
    result_.reset();
  }
  thread_ = std::thread([this, id, file, header, data] {
    absl::Status status = Copy(id, file, header, data);
    MutexLock lock(&mu_);
    result_ = std::move(status);
  });
}

void NearSaves::End(const std::optional<SaveId>& committed) {
  if (thread_.joinable()) {
    {
      MutexLock lock(&mu_);
      mu_.AwaitFor(std::max(kEndWithin, clock_.Now() - begun_),
                   [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return result_.has_value(); });
    }
    give_up_ = true;
    thread_.join();
    MutexLock lock(&mu_);
    note_.clear();
    if (!result_->ok()) {
      ++skipped_;
      note_ = absl::StrCat("no copy of it in ", tier_->Describe(), ": ", result_->message(), " (", skipped_,
                           " left out so far)");
    }
  }
  if (committed) committed_ = committed;
}

}  // namespace gtrain::ckpt
