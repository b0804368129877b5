// SaveCore decides, this file does: take the next effect, call the storage, hand the answer back. Between
// effects the thread sleeps until the core's next deadline; it wakes for a stop at once and asks each time
// whether it shall go on.
#include "checkpoint/engine/committer.h"

#include <gtrain/checkpoint.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/shard_io.h"

namespace gtrain::ckpt {

namespace save = core::save;

namespace {

// What should come by way of the board is looked for in the storage after so long, and put there.
constexpr absl::Duration kBoardPatience = absl::Seconds(1);

}  // namespace

void StopFlag::Set() {
  MutexLock lock(&mu_);
  set_ = true;
}

bool StopFlag::set() const {
  MutexLock lock(&mu_);
  return set_;
}

bool StopFlag::Await(absl::Duration timeout) {
  MutexLock lock(&mu_);
  return mu_.AwaitFor(timeout, [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return set_; });
}

struct Committer::Run {
  SaveId id;
  absl::string_view data;
  StopFlag* stop;
  absl::FunctionRef<void()> committed;
  ShardFile file;                  // ours
  std::map<int, ShardFile> files;  // rank 0: of all
  std::vector<SaveId> there;       // rank 0: manifests before we put ours
  std::string manifest;            // rank 0: the text we put
  bool finite = true;              // and what it says of the state
  std::deque<save::Effect> effects;
  std::optional<absl::Status> result;
  bool told_stop = false;
  Instant ask_storage;  // not before, for what should be on the board
};

Committer::Committer(port::BlobStore* store, CommitterConfig config)
    : store_(store),
      config_(std::move(config)),
      plan_(PlanShard(config_.registered, config_.rank, config_.world_size)),
      core_(
          {.rank = config_.rank, .world_size = config_.world_size, .commit_timeout = config_.commit_timeout}),
      retention_(store, config_.keep, config_.world_size),
      near_(config_.near, store) {}

void Committer::SetTail(const SaveTail& tail) {
  plan_ = PlanShard(config_.registered, config_.rank, config_.world_size, tail);
}

uint64_t Committer::DataBytesMax() const {
  return plan_.data_bytes + (HasTail(config_.registered) ? kByteEntriesMax : 0);
}

absl::Status Committer::Save(const SaveId& id, absl::string_view data, StopFlag* stop,
                             absl::FunctionRef<void()> committed) {
  GT_CHECK(data.size() == plan_.data_bytes);
  Run run{.id = id, .data = data, .stop = stop, .committed = committed};
  Apply(&run, save::SnapshotTaken{id.step});
  while (!run.result) {
    if (run.effects.empty()) {
      const std::optional<Instant> deadline = core_.NextDeadline();
      GT_CHECK(deadline.has_value());
      Pause(&run, *deadline);
      continue;
    }
    const save::Effect effect = std::move(run.effects.front());
    run.effects.pop_front();
    Do(&run, effect);
  }
  if (!run.result->ok()) retention_.ListNextTime();
  unstored_.reset();
  near_.End(run.result->ok() ? std::optional(id) : std::nullopt);
  return *run.result;
}

void Committer::Pause(Run* run, Instant deadline) {
  // Once told, nothing new can wake us: wait out the time.
  StopFlag never;
  const bool stop = (run->told_stop ? &never : run->stop)->Await(deadline - clock_.Now());
  if (stop) {
    run->told_stop = true;
    return Apply(run, save::Cancelled{});
  }
  if (const absl::Status alive = config_.alive(); !alive.ok() && !run->told_stop) {
    run->told_stop = true;
    return Apply(run, save::Revoked{std::string(alive.message())});
  }
  Apply(run, save::Tick{});
}

void Committer::Apply(Run* run, const save::Event& event) {
  save::Result result = core_.Step(event, clock_.Now());
  for (save::Effect& effect : result.effects) run->effects.push_back(std::move(effect));
}

void Committer::Do(Run* run, const save::Effect& effect) {
  if (std::holds_alternative<save::WriteShard>(effect)) {
    Apply(run, save::ShardWritten{WriteOwnShard(run)});
  } else if (const auto* index = std::get_if<save::WriteIndex>(&effect)) {
    Apply(run, save::IndexWritten{WriteIndex(run, index->shard)});
  } else if (const auto* poll = std::get_if<save::PollIndices>(&effect)) {
    PollIndices(run, poll->missing);
  } else if (std::holds_alternative<save::CheckAuthority>(effect)) {
    Apply(run, save::AuthorityChecked{CheckAuthority(run)});
  } else if (std::holds_alternative<save::PutManifest>(effect)) {
    Apply(run, save::ManifestPut{store_->PutIfAbsent(ManifestKey(run->id), run->manifest)});
  } else if (std::holds_alternative<save::ReadManifest>(effect)) {
    Apply(run, LookAtKey(run));
  } else if (const auto* abort = std::get_if<save::PutAbort>(&effect)) {
    const absl::Status put =
        store_->PutIfAbsent(ManifestKey(run->id), Print(AbortMarker{.id = run->id, .reason = abort->reason}));
    if (!put.ok()) LogWarning("checkpoint: no abort marker for step ", run->id.step, ": ", put.message());
    Apply(run, save::AbortPut{});
  } else if (std::holds_alternative<save::ReportCommitted>(effect)) {
    if (config_.board != nullptr && config_.rank == 0) config_.board->SayCommitted(ManifestKey(run->id));
    run->committed();
  } else if (std::holds_alternative<save::ApplyRetention>(effect)) {
    bool indices = config_.board == nullptr || config_.board->stored(config_.rank);
    for (const auto& [rank, file] : run->files)
      indices = indices || !config_.board->attends(rank) || config_.board->stored(rank);
    uint64_t bytes = 0;
    for (const auto& [rank, file] : run->files) bytes += file.bytes;
    const absl::Status retained = retention_.Apply(run->id, run->finite, bytes, indices, run->there);
    if (!retained.ok()) {
      LogWarning("checkpoint: old checkpoints could not be deleted and stay until the next commit: ",
                 retained.message());
    }
    Apply(run, save::RetentionApplied{retained});
  } else {
    run->result = std::get<save::Finish>(effect).status;
  }
}

absl::Status Committer::WriteOwnShard(Run* run) {
  if (shard_is_written_) {
    const std::string key = AttemptKey(run->id, IndexName(config_.rank, config_.world_size));
    GT_ASSIGN_OR_RETURN(const std::string text, store_->Get(key, kManifestBytesMax));
    GT_ASSIGN_OR_RETURN(const ShardIndex index, ParseShardIndex(key, text));
    run->file = index.file;
    return index.error.empty() ? absl::OkStatus() : absl::AbortedError(index.error);
  }
  // Hashed while it is written: the storage is what takes the time.
  std::thread hasher([&] {
    run->file = DescribeShard(plan_, run->data, config_.registered, config_.rank, config_.world_size);
  });
  near_.Begin(run->id, ShardName(config_.rank, config_.world_size), plan_.header, run->data);
  absl::Status written =
      WriteShard(store_, run->id, plan_, ShardName(config_.rank, config_.world_size), run->data);
  hasher.join();
  for (int i = 1;; ++i) {
    // The key is this attempt's alone: if it exists, an earlier try made it and its answer was lost, or its
    // writer.
    if (absl::IsAlreadyExists(written)) written = VerifyBytes(store_, run->id, run->file);
    if (written.ok() || i >= config_.shard_tries) return written;
    LogWarning("checkpoint: writing ", run->file.name, " failed, try ", i, " of ", config_.shard_tries, ": ",
               written.message());
    if (run->stop->Await(absl::Milliseconds(100 << std::min(i, 10)) * (0.5 + rng_.Unit()))) return written;
    written = WriteShard(store_, run->id, plan_, run->file.name, run->data);
  }
}

absl::Status Committer::WriteIndex(Run* run, const absl::Status& shard) {
  ShardIndex index{.id = run->id, .rank = config_.rank, .world_size = config_.world_size, .file = run->file};
  if (!shard.ok()) index.error = absl::StrCat("error: ", shard.message());
  const std::string key = AttemptKey(run->id, IndexName(config_.rank, config_.world_size));
  const std::string text = Print(index);
  run->ask_storage = clock_.Now() + kBoardPatience;
  if (config_.board == nullptr) return PutIndex(key, text);
  if (!config_.board->open() || !config_.board->Post(config_.rank, text)) {
    config_.board->NoteStored(config_.rank);
    return PutIndex(key, text);
  }
  unstored_.emplace(key, text);
  // This rank ends its part here and would not notice that nobody reads the board.
  return shard.ok() ? absl::OkStatus() : StoreIndex();
}

absl::Status Committer::StoreIndex() {
  if (!unstored_) return absl::OkStatus();
  config_.board->NoteStored(config_.rank);
  GT_RETURN_IF_ERROR(PutIndex(unstored_->first, unstored_->second));
  unstored_.reset();
  return absl::OkStatus();
}

absl::Status Committer::PutIndex(const std::string& key, const std::string& text) {
  const absl::Status put = store_->PutIfAbsent(key, text);
  if (!absl::IsAlreadyExists(put)) return put;
  // As with the shard.
  GT_ASSIGN_OR_RETURN(const std::string there, store_->Get(key, kManifestBytesMax));
  if (there == text) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(key, " says something else than this rank wrote"));
}

void Committer::PollIndices(Run* run, const std::vector<int>& missing) {
  if (run->files.empty()) run->files[config_.rank] = run->file;
  const bool ask_all = clock_.Now() >= run->ask_storage;
  if (ask_all) run->ask_storage = clock_.Now() + kBoardPatience;
  for (int rank : missing) {
    const std::string key = AttemptKey(run->id, IndexName(rank, config_.world_size));
    const std::optional<std::string> posted = PostedIndex(key, rank);
    const bool attends = config_.board != nullptr && config_.board->attends(rank);
    if (!posted && attends && !ask_all) continue;
    const absl::StatusOr<std::string> text = posted ? *posted : store_->Get(key, kManifestBytesMax);
    if (!text.ok())
      continue;  // not there yet, or the storage has a bad moment: asked again until the deadline
    const absl::StatusOr<ShardIndex> index = ParseShardIndex(key, *text);
    const absl::Status sound = index.ok() ? CheckIndex(*run, *index, rank, !posted) : index.status();
    if (sound.ok()) run->files[rank] = index->file;
    Apply(run, save::IndexSeen{rank, sound});
    if (!sound.ok()) return;
  }
}

// What stands on the board for `rank`, if it is of this save and whole.
std::optional<std::string> Committer::PostedIndex(const std::string& key, int rank) const {
  if (config_.board == nullptr) return std::nullopt;
  std::optional<std::string> text = config_.board->Read(rank);
  if (text && !ParseShardIndex(key, *text).ok()) text.reset();
  return text;
}

// `look`: whether the shard can be seen from here; on one machine who put it has seen to that.
absl::Status Committer::CheckIndex(const Run& run, const ShardIndex& index, int rank, bool look) const {
  if (!index.error.empty()) return absl::AbortedError(index.error);
  if (!look) return absl::OkStatus();
  const std::string key = AttemptKey(run.id, ShardName(rank, config_.world_size));
  GT_ASSIGN_OR_RETURN(const uint64_t bytes, store_->Size(key));
  if (bytes == index.file.bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(key, " has ", bytes, " bytes, its index says ", index.file.bytes));
}

absl::Status Committer::CheckAuthority(Run* run) {
  Manifest manifest{.id = run->id, .owner = config_.owner, .world_size = config_.world_size};
  for (const Registered& r : config_.registered) manifest.tensors.push_back(r.tensor);
  if (run->files.empty()) run->files[config_.rank] = run->file;
  for (auto& [rank, file] : run->files) manifest.files.push_back(file);
  GT_RETURN_IF_ERROR(Validate(manifest));
  run->manifest = Print(manifest);
  if (run->manifest.size() > kManifestBytesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the manifest would have ", run->manifest.size(), " bytes"));
  }
  GT_ASSIGN_OR_RETURN(DirectoryNames names, ListNames(store_));
  if (names.newest_owner > config_.epoch) {
    const std::string key = OwnerKey(names.newest_owner);
    const absl::StatusOr<std::string> text = store_->Get(key, kSmallFileBytesMax);
    const absl::StatusOr<OwnerClaim> claim = text.ok() ? ParseOwnerClaim(key, *text) : text.status();
    return absl::FailedPreconditionError(absl::StrCat(store_->Describe(), " was taken over by job \"",
                                                      claim.ok() ? claim->owner.job : "(unknown)",
                                                      "\"; give this job a checkpoint directory of its own"));
  }
  run->there = std::move(names.manifests);
  return config_.may_commit(run->id, run->there);  // last: nothing lies between this answer and the put
}

save::ManifestRead Committer::LookAtKey(Run* run) {
  if (config_.rank != 0 && config_.board != nullptr) {
    if (config_.board->IsCommitted(ManifestKey(run->id))) return {save::KeyHolds::kThisManifest, ""};
    if (unstored_ && !run->told_stop) {
      if (clock_.Now() < run->ask_storage) return {save::KeyHolds::kNothing, ""};
      if (const absl::Status stored = StoreIndex(); !stored.ok())
        return {save::KeyHolds::kUnreadable, std::string(stored.message())};
    }
  }
  std::string text;
  const auto read = ReadManifest(store_, run->id, &text);
  if (absl::IsNotFound(read.status())) {
    return config_.rank == 0 ? WhyNothingIsThere(store_, run->id)
                             : save::ManifestRead{save::KeyHolds::kNothing, ""};
  }
  if (config_.rank == 0 && !run->manifest.empty() && text == run->manifest) {
    run->finite = std::get<Manifest>(*read).finite();
    return {save::KeyHolds::kThisManifest, ""};
  }
  if (absl::IsDataLoss(read.status())) return {save::KeyHolds::kOther, std::string(read.status().message())};
  if (!read.ok()) return {save::KeyHolds::kUnreadable, std::string(read.status().message())};
  if (const auto* marker = std::get_if<AbortMarker>(&*read))
    return {save::KeyHolds::kAbortMarker, marker->reason};
  const Manifest& manifest = std::get<Manifest>(*read);
  const bool same = config_.rank != 0 && manifest.world_size == config_.world_size &&
                    manifest.files[config_.rank] == run->file;
  return {same ? save::KeyHolds::kThisManifest : save::KeyHolds::kOther,
          "it lists another shard of this rank"};
}

}  // namespace gtrain::ckpt
