// SaveCore decides, this file does: take the next effect, call the storage, hand the answer back. Between
// effects the thread sleeps until the core's next deadline; it wakes for a stop at once and asks each time
// whether it shall go on.
#include "checkpoint/engine/committer.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/checkpoint.h"
#include "checkpoint/engine/parallel.h"
#include "checkpoint/engine/shard_io.h"

namespace gtrain::ckpt {

namespace {

// An index that should come by way of the board is looked for in the storage after so long, and put there. As
// often, a gathering leader checks whether the save was given up.
constexpr absl::Duration kBoardPatience = absl::Seconds(1);
constexpr absl::Duration kReadBackWithin = absl::Seconds(1);
// All ranks together do not poll more often a second than a store answers (committer.h).
constexpr absl::Duration kPollMin = absl::Milliseconds(5), kPollMinOfRank = absl::Microseconds(25);
constexpr absl::Duration kPollMax = absl::Milliseconds(500), kPollMaxOfRank = absl::Microseconds(250);
constexpr double kJitter = 0.25;  // of a pause, at most, on top

ckpt::SaveConfig CoreOf(const CommitterConfig& config) {
  return {.rank = config.rank,
          .world_size = config.world_size,
          .part_ranks = kPartRanks,
          .commit_timeout = config.commit_timeout,
          .poll_min = std::max(kPollMin, config.world_size * kPollMinOfRank),
          .poll_max = std::max(kPollMax, config.world_size * kPollMaxOfRank),
          .spread = config.world_size * kPollMaxOfRank,
          .phase = Rng::FromSystem().Unit()};
}

// The oldest of `names`; empty when one is.
std::string OldestOf(const std::vector<std::string>& names) {
  std::optional<SaveId> oldest;
  for (const std::string& name : names) {
    const std::optional<SaveId> id = ParseAttemptName(name);
    if (!id) return "";
    oldest = oldest ? std::min(*oldest, *id) : *id;
  }
  return oldest ? AttemptName(*oldest) : "";
}

// `verified` does not count: a writer that repeats a save may have verified something else than the first
// one.
bool SaysTheSame(ManifestPart a, ManifestPart b) {
  a.verified = b.verified = "";
  return a == b;
}
bool SaysTheSame(ShardIndex a, ShardIndex b) {
  a.verified = b.verified = "";
  return a == b;
}

// Puts what was found under its number into `taken`, and tells of it by seen(number, status). False: one of
// them is an error, which ends the save.
template <typename T, typename Seen>
bool TakeFound(const std::vector<int>& numbers, const std::vector<std::optional<absl::StatusOr<T>>>& found,
               std::map<int, T>* taken, Seen seen) {
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i]) continue;
    if (found[i]->ok()) (*taken)[numbers[i]] = **found[i];
    seen(numbers[i], found[i]->status());
    if (!found[i]->ok()) return false;
  }
  return true;
}

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
  const std::vector<HashBytes>& hashes;
  StopFlag* stop;
  absl::FunctionRef<void()> committed;
  ShardFile file;                     // ours
  std::string verified;               // ours
  std::map<int, ShardIndex> indices;  // leaders: of the ranks of their part
  std::map<int, StoredPart> parts;  // leaders: their own; rank 0: of all. Empty while the root has the files
  std::vector<SaveId> there;        // rank 0: manifests before we put ours
  uint64_t bytes = 0;               // rank 0: of all shards
  std::optional<SaveId> oldest_verified;  // rank 0
  std::string manifest;                   // rank 0: the text we put
  bool finite = true;                     // and what it says of the state
  std::deque<save::Effect> effects;
  std::optional<absl::Status> result;
  bool told_stop = false;
  Instant ask_storage;  // not before, for what should be on the board
};

Committer::Committer(port::BlobStore* store, CommitterConfig config)
    : store_(store),
      config_(std::move(config)),
      plan_(PlanShard(config_.registered, config_.rank, config_.world_size)),
      core_(CoreOf(config_)),
      retention_(store, config_.keep, config_.world_size),
      near_(config_.near, store),
      read_back_(store, config_.copying) {}

void Committer::SetTail(const SaveTail& tail) {
  plan_ = PlanShard(config_.registered, config_.rank, config_.world_size, tail);
}

uint64_t Committer::DataBytesMax() const {
  return plan_.data_bytes + (HasTail(config_.registered) ? kByteEntriesMax : 0);
}

absl::Status Committer::Save(const SaveId& id, absl::string_view data, const std::vector<HashBytes>& hashes,
                             StopFlag* stop, absl::FunctionRef<void()> committed) {
  GT_CHECK(data.size() == plan_.data_bytes);
  TakeFailedAway(id);
  Run run{.id = id, .data = data, .hashes = hashes, .stop = stop, .committed = committed};
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
  if (!run.result->ok()) {
    retention_.ListNextTime();
    failed_.push_back(id);
    if (failed_.size() > kFailedMax) failed_.erase(failed_.begin());
  }
  if (run.result->ok() && config_.rank == 0) verified_ = run.oldest_verified;
  if (run.result->ok() && !shard_is_written_ && !config_.verified) read_back_.Begin(id, run.file);
  unstored_.reset();
  near_.End(run.result->ok() ? std::optional(id) : std::nullopt);
  return *run.result;
}

// On a full disk no commit would come whose retention removes what failed saves have written. Behind an abort
// marker nobody ever commits an attempt, so what this rank put there is of no use; the others look after
// theirs. By now they have seen the marker, and look at no file any more.
void Committer::TakeFailedAway(const SaveId& next) {
  std::erase_if(failed_, [&](const SaveId& id) {
    if (id == next) return false;
    const auto read = ReadManifest(store_, id);
    if (!read.ok()) return false;                                  // asked again, before the next save
    if (!std::holds_alternative<AbortMarker>(*read)) return true;  // it was committed after all
    std::vector<std::string> keys = {AttemptKey(id, ShardName(config_.rank, config_.world_size)),
                                     AttemptKey(id, IndexName(config_.rank, config_.world_size))};
    if (config_.rank % kPartRanks == 0)
      keys.push_back(AttemptKey(id, PartName(PartOf(config_.rank), PartCount(config_.world_size))));
    absl::Status gone = store_->DeleteAll(keys);
    if (gone.ok()) gone = store_->DropEmptyFolder(AttemptName(id));
    if (!gone.ok()) {
      LogWarning("checkpoint: what the failed save of step ", id.step,
                 " left stays for now: ", gone.message());
    }
    return gone.ok();
  });
}

void Committer::Pause(Run* run, Instant deadline) {
  // Once told, nothing new can wake us: wait out the time.
  StopFlag never;
  const absl::Duration pause = deadline - clock_.Now();
  const bool stop = (run->told_stop ? &never : run->stop)->Await(pause * (1 + kJitter * rng_.Unit()));
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
    PollIndices(run, *poll);
  } else if (const auto* part = std::get_if<save::PutPart>(&effect)) {
    Apply(run, save::PartPut{PutPart(run, part->failed)});
  } else if (std::holds_alternative<save::CheckAuthority>(effect)) {
    Apply(run, save::AuthorityChecked{CheckAuthority(run)});
  } else if (std::holds_alternative<save::PutManifest>(effect)) {
    Apply(run, save::ManifestPut{store_->PutIfAbsent(ManifestKey(run->id), run->manifest)});
  } else if (std::holds_alternative<save::ReadManifest>(effect)) {
    Apply(run, LookAtKey(run));
  } else if (const auto* abort = std::get_if<save::PutAbort>(&effect)) {
    PutAbort(run, abort->reason);
  } else if (std::holds_alternative<save::ReportCommitted>(effect)) {
    if (config_.board != nullptr && config_.rank == 0) config_.board->SayCommitted(ManifestKey(run->id));
    run->committed();
  } else if (std::holds_alternative<save::ApplyRetention>(effect)) {
    Apply(run, save::RetentionApplied{Retain(*run)});
  } else {
    run->result = std::get<save::Finish>(effect).status;
  }
}

void Committer::PutAbort(Run* run, const std::string& reason) {
  const absl::Status put =
      store_->PutIfAbsent(ManifestKey(run->id), Print(AbortMarker{.id = run->id, .reason = reason}));
  if (!put.ok()) LogWarning("checkpoint: no abort marker for step ", run->id.step, ": ", put.message());
  Apply(run, save::AbortPut{});
}

absl::Status Committer::Retain(const Run& run) {
  bool indices =
      config_.board == nullptr || config_.board->stored(config_.rank) || config_.world_size > kPartRanks;
  for (const auto& [rank, index] : run.indices)
    indices = indices || !config_.board->attends(rank) || config_.board->stored(rank);
  // It may be gone by now, where reading back takes as long as `keep` saves: then an older one that is
  // there stands for it.
  if (run.oldest_verified && std::count(run.there.begin(), run.there.end(), *run.oldest_verified) > 0)
    retention_.Verified(*run.oldest_verified);
  if (store_->ChecksEveryPut()) retention_.Verified(run.id);
  const absl::Status retained = retention_.Apply(
      run.id, run.finite, run.bytes, {.indices = indices, .parts = !run.parts.empty()}, run.there);
  if (!retained.ok()) {
    LogWarning("checkpoint: old checkpoints could not be deleted and stay until the next commit: ",
               retained.message());
  }
  return retained;
}

absl::Status Committer::WriteOwnShard(Run* run) {
  if (shard_is_written_) {
    const std::string key = AttemptKey(run->id, IndexName(config_.rank, config_.world_size));
    GT_ASSIGN_OR_RETURN(const std::string text, store_->Get(key, kManifestBytesMax));
    GT_ASSIGN_OR_RETURN(const ShardIndex index, ParseShardIndex(key, text));
    run->file = index.file;
    run->verified = index.verified;
    return index.error.empty() ? absl::OkStatus() : absl::AbortedError(index.error);
  }
  near_.Begin(run->id, ShardName(config_.rank, config_.world_size), plan_.header, run->data);
  // Hashed while it is written: the storage is what takes the time.
  std::thread hasher([&] {
    run->file = DescribeShard(plan_, run->data, config_.registered, config_.rank, config_.world_size);
    if (CheckCopied(*run).ok()) DescribeNear(*run);
  });
  absl::Status written =
      WriteShard(store_, run->id, plan_, ShardName(config_.rank, config_.world_size), run->data);
  hasher.join();
  GT_RETURN_IF_ERROR(CheckCopied(*run));
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

std::string Committer::TakeNote() {
  std::vector<std::string> notes = {near_.note(), read_back_.TakeNote()};
  std::erase(notes, "");
  return absl::StrJoin(notes, "; ");
}

void Committer::DescribeNear(const Run& run) {
  if (config_.near.own == nullptr) return;  // the texts of many tensors take a while to print
  const ShardIndex index{
      .id = run.id, .rank = config_.rank, .world_size = config_.world_size, .file = run.file};
  std::vector<std::pair<std::string, std::string>> texts;
  texts.emplace_back(IndexName(config_.rank, config_.world_size), Print(index));
  if (config_.rank == 0) {
    SaveOrder order{.location = store_->Describe(),
                    .owner = config_.owner,
                    .epoch = config_.epoch,
                    .world_size = config_.world_size};
    for (const Registered& r : config_.registered) {
      order.tensors.push_back(r.tensor);
      order.bytes.push_back(r.bytes);
    }
    texts.emplace_back(OrderName(config_.world_size), Print(order));
  }
  near_.Describe(std::move(texts));
}

absl::Status Committer::CheckCopied(const Run& run) {
  for (size_t i = 0; i < run.hashes.size(); ++i) {
    if (i < run.file.chunks.size() && run.file.chunks[i] == HashHex(run.hashes[i])) continue;
    return absl::DataLossError(absl::StrCat(
        "bytes ", i * kChunkBytes, " to ", std::min((i + 1) * kChunkBytes, run.file.bytes), " of ",
        run.file.name,
        " changed between the copy of the state and its writing: the state was changed during Save (with "
        "lazy: "
        "before Fence), something wrote to memory that is not its own, or the memory is faulty"));
  }
  return absl::OkStatus();
}

absl::Status Committer::WriteIndex(Run* run, const absl::Status& shard) {
  ShardIndex index{.id = run->id, .rank = config_.rank, .world_size = config_.world_size};
  if (shard.ok()) {
    // Asked now and not before: the shard of the save before may have been read back meanwhile.
    if (!shard_is_written_) {
      // The read-back of a small shard is there in a moment; training keeps the processors from larger ones
      // for longer.
      if (run->file.bytes <= kChunkBytes) read_back_.Await(kReadBackWithin);
      const std::optional<SaveId> read_back = read_back_.verified();
      run->verified = config_.verified ? config_.verified() : read_back ? AttemptName(*read_back) : "";
    }
    index.file = run->file;
    index.verified = run->verified;
  } else {
    index.error = absl::StrCat("error: ", shard.message());
  }
  run->indices[config_.rank] = index;
  const std::string key = AttemptKey(run->id, IndexName(config_.rank, config_.world_size));
  const std::string text = Print(index);
  run->ask_storage = clock_.Now() + kBoardPatience;
  if (config_.board == nullptr) return PutIndex(key, text);
  if (!LeaderReadsBoard() || !config_.board->Post(config_.rank, text)) {
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

// Called after a put that failed: its answer may be lost, or an earlier try of this save made the key.
// Returns `put` where nothing can be read.
absl::StatusOr<std::string> Committer::WhatIsThere(const absl::Status& put, const std::string& key,
                                                   size_t bytes_max) const {
  absl::StatusOr<std::string> there = store_->Get(key, bytes_max);
  return there.ok() || absl::IsAlreadyExists(put) ? there : put;
}

absl::Status Committer::PutIndex(const std::string& key, const std::string& text) {
  const absl::Status put = store_->PutIfAbsent(key, text);
  if (put.ok()) return put;
  GT_ASSIGN_OR_RETURN(const std::string there, WhatIsThere(put, key, kManifestBytesMax));
  if (there == text) return absl::OkStatus();
  const absl::StatusOr<ShardIndex> theirs = ParseShardIndex(key, there), ours = ParseShardIndex(key, text);
  if (theirs.ok() && ours.ok() && SaysTheSame(*theirs, *ours)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(key, " says something else than this rank wrote"));
}

// Whether the writer that gathers our index looks for it on the board of this machine.
bool Committer::LeaderReadsBoard() const {
  const int leader = PartOf(config_.rank) * kPartRanks;
  return leader == 0 ? config_.board->open() : config_.board->attends(leader);
}

// Takes what is on the board, and says which others of poll.missing the storage is asked for.
std::vector<size_t> Committer::TakePosted(
    const Run& run, const save::PollIndices& poll, bool ask_all,
    std::vector<std::optional<absl::StatusOr<ShardIndex>>>* indices) const {
  std::vector<size_t> ask;
  for (size_t i = 0; i < poll.missing.size(); ++i) {
    const int rank = poll.missing[i];
    const std::string key = AttemptKey(run.id, IndexName(rank, config_.world_size));
    if (const std::optional<std::string> posted = PostedIndex(key, rank)) {
      (*indices)[i] = CheckedIndex(run, key, *posted, false);
    } else if (ask_all || config_.board == nullptr || !config_.board->attends(rank) ||
               config_.board->stored(rank)) {
      ask.push_back(i);
    }
  }
  return ask;
}

void Committer::PollIndices(Run* run, const save::PollIndices& poll) {
  const bool ask_all = clock_.Now() >= run->ask_storage;
  if (ask_all) run->ask_storage = clock_.Now() + kBoardPatience;
  std::vector<std::optional<absl::StatusOr<StoredPart>>> parts(poll.parts.size());
  std::vector<std::optional<absl::StatusOr<ShardIndex>>> indices(poll.missing.size());
  const std::vector<size_t> ask = TakePosted(*run, poll, ask_all, &indices);
  // All of them are needed in the end, so the first stands for the others: they are asked for when it is
  // there.
  std::optional<std::string> given_up;
  const auto look_for_index = [&](size_t i) { indices[ask[i]] = LookForIndex(*run, poll.missing[ask[i]]); };
  std::vector<std::function<void()>> looks;  // none while the board says all
  if (!parts.empty()) looks.emplace_back([&] { parts[0] = LookForPart(*run, poll.parts[0]); });
  if (!ask.empty()) looks.emplace_back([&] { look_for_index(0); });
  if (ask_all) looks.emplace_back([&] { given_up = LookForMarker(*run); });
  ForEachAtOnce(looks.size(), [&](size_t i) { looks[i](); });
  const size_t more_parts = !parts.empty() && parts[0] ? parts.size() - 1 : 0;
  const size_t more_indices = !ask.empty() && indices[ask[0]] ? ask.size() - 1 : 0;
  ForEachAtOnce(more_parts + more_indices, [&](size_t i) {
    if (i < more_parts)
      parts[1 + i] = LookForPart(*run, poll.parts[1 + i]);
    else
      look_for_index(1 + i - more_parts);
  });
  if (given_up) return Apply(run, save::ManifestRead{save::KeyHolds::kAbortMarker, *given_up});
  const auto part_seen = [&](int number, const absl::Status& status) {
    Apply(run, save::PartSeen{number, status});
  };
  const auto index_seen = [&](int rank, const absl::Status& status) {
    Apply(run, save::IndexSeen{rank, status});
  };
  if (TakeFound(poll.parts, parts, &run->parts, part_seen))
    TakeFound(poll.missing, indices, &run->indices, index_seen);
}

// Why somebody else gave the save up; nullopt: nobody did, or the storage has a bad moment.
std::optional<std::string> Committer::LookForMarker(const Run& run) const {
  const auto read = ReadManifest(store_, run.id);
  if (!read.ok() || !std::holds_alternative<AbortMarker>(*read)) return std::nullopt;
  return std::get<AbortMarker>(*read).reason;
}

// nullopt: it is not there yet, or the storage has a bad moment. It is asked again until the deadline.
std::optional<absl::StatusOr<ShardIndex>> Committer::LookForIndex(const Run& run, int rank) const {
  const std::string key = AttemptKey(run.id, IndexName(rank, config_.world_size));
  const absl::StatusOr<std::string> text = store_->Get(key, kManifestBytesMax);
  if (!text.ok()) return std::nullopt;
  return CheckedIndex(run, key, *text, true);
}

// Looks for a part in the same way as for an index. A part that gives the save up is Aborted with its
// message.
std::optional<absl::StatusOr<Committer::StoredPart>> Committer::LookForPart(const Run& run,
                                                                            int number) const {
  const std::string key = AttemptKey(run.id, PartName(number, PartCount(config_.world_size)));
  const absl::StatusOr<std::string> text = store_->Get(key, kPartBytesMax);
  if (!text.ok()) return std::nullopt;
  const absl::StatusOr<ManifestPart> part = ParseManifestPart(key, *text);
  if (!part.ok()) return absl::StatusOr<StoredPart>(part.status());
  if (!part->error.empty()) return absl::StatusOr<StoredPart>(absl::AbortedError(part->error));
  return absl::StatusOr<StoredPart>(StoredPart{RefOf(*part, *text), part->verified});
}

// Returns the index on the board for `rank`, if it is of this save and whole.
std::optional<std::string> Committer::PostedIndex(const std::string& key, int rank) const {
  if (config_.board == nullptr) return std::nullopt;
  std::optional<std::string> text = config_.board->Read(rank);
  if (text && !ParseShardIndex(key, *text).ok()) text.reset();
  return text;
}

// `look`: whether the shard can be seen from here; on one machine the rank that put it has seen to that.
// nullopt: the storage does not say.
std::optional<absl::StatusOr<ShardIndex>> Committer::CheckedIndex(const Run& run, const std::string& key,
                                                                  const std::string& text, bool look) const {
  absl::StatusOr<ShardIndex> index = ParseShardIndex(key, text);
  if (!index.ok()) return index;
  if (!index->error.empty()) return absl::StatusOr<ShardIndex>(absl::AbortedError(index->error));
  if (!look) return index;
  const std::string shard = AttemptKey(run.id, index->file.name);
  const absl::StatusOr<uint64_t> bytes = store_->Size(shard);
  if (!bytes.ok() && !absl::IsNotFound(bytes.status())) return std::nullopt;
  if (bytes.ok() && *bytes == index->file.bytes) return index;
  const std::string there = bytes.ok() ? absl::StrCat(*bytes, " bytes") : "no file";
  return absl::StatusOr<ShardIndex>(absl::DataLossError(
      absl::StrCat(shard, ": there is ", there, ", its index says ", index->file.bytes, " bytes")));
}

// Rank 0 of few ranks has nothing to put while their files fit into the root.
absl::Status Committer::PutPart(Run* run, const absl::Status& failed) {
  ManifestPart part{.id = run->id, .world_size = config_.world_size, .part = PartOf(config_.rank)};
  absl::Status sound = failed;
  if (failed.ok()) {
    std::vector<std::string> verified;
    for (const auto& [rank, index] : run->indices) {
      part.files.push_back(index.file);
      verified.push_back(index.verified);
    }
    part.verified = OldestOf(verified);
    std::vector<GlobalTensor> tensors;
    for (const Registered& r : config_.registered) tensors.push_back(r.tensor);
    sound = ValidateFiles(tensors, config_.world_size, config_.rank, part.files);
  }
  if (sound.ok() && config_.world_size <= kPartRanks) {
    GT_RETURN_IF_ERROR(PrintManifest(run));
    if (run->manifest.size() < kFilesInRootBytesMax) return absl::OkStatus();
  }
  std::string text = sound.ok() ? Print(part) : "";
  if (text.size() > kPartBytesMax) {
    sound = absl::ResourceExhaustedError(absl::StrCat("the part of rank ", config_.rank,
                                                      " and those after it ", "would have ", text.size(),
                                                      " bytes, over ", kPartBytesMax));
  }
  if (!sound.ok()) {
    part.error = std::string(sound.message());
    part.files.clear();
    part.verified.clear();
    text = Print(part);
  }
  GT_ASSIGN_OR_RETURN(run->parts[part.part], PutOrTakeUp(part, text));
  return failed.ok() ? sound : absl::OkStatus();
}

// The part of this attempt may have been put by a writer that was killed: then it is as good as ours.
absl::StatusOr<Committer::StoredPart> Committer::PutOrTakeUp(const ManifestPart& part,
                                                             const std::string& text) const {
  const std::string key = AttemptKey(part.id, PartName(part.part, PartCount(part.world_size)));
  const absl::Status put = store_->PutIfAbsent(key, text);
  if (put.ok()) return StoredPart{RefOf(part, text), part.verified};
  GT_ASSIGN_OR_RETURN(const std::string there, WhatIsThere(put, key, kPartBytesMax));
  GT_ASSIGN_OR_RETURN(const ManifestPart theirs, ParseManifestPart(key, there));
  if (!theirs.error.empty()) return absl::AbortedError(theirs.error);
  if (SaysTheSame(theirs, part)) return StoredPart{RefOf(theirs, there), theirs.verified};
  return absl::DataLossError(absl::StrCat(key, " says something else than its ranks wrote"));
}

absl::Status Committer::PrintManifest(Run* run) {
  Manifest manifest{.id = run->id, .owner = config_.owner, .world_size = config_.world_size};
  for (const Registered& r : config_.registered) manifest.tensors.push_back(r.tensor);
  std::vector<std::string> verified;
  for (const auto& [number, part] : run->parts) {
    manifest.parts.push_back(part.ref);
    verified.push_back(part.verified);
  }
  if (run->parts.empty()) {
    for (const auto& [rank, index] : run->indices) {
      manifest.files.push_back(index.file);
      verified.push_back(index.verified);
    }
  } else {
    manifest.files.resize(static_cast<size_t>(config_.world_size));
  }
  GT_RETURN_IF_ERROR(Validate(manifest));
  run->manifest = Print(manifest);
  run->bytes = manifest.file_bytes();
  run->oldest_verified = ParseAttemptName(OldestOf(verified));
  if (run->manifest.size() <= kManifestBytesMax) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the manifest would have ", run->manifest.size(), " bytes, over ", kManifestBytesMax));
}

absl::Status Committer::CheckAuthority(Run* run) {
  // Where the files stand in the manifest itself, it is printed already.
  if (!run->parts.empty()) GT_RETURN_IF_ERROR(PrintManifest(run));
  GT_ASSIGN_OR_RETURN(DirectoryNames names, ListNames(store_));
  if (names.newest_owner > config_.epoch) {
    const std::string key = OwnerKey(names.newest_owner);
    const absl::StatusOr<std::string> text = store_->Get(key, kSmallFileBytesMax);
    const absl::StatusOr<OwnerClaim> claim = text.ok() ? ParseOwnerClaim(key, *text) : text.status();
    return absl::FailedPreconditionError(absl::StrCat(store_->Describe(), " was taken over by job \"",
                                                      claim.ok() ? claim->owner.job : "(unknown)",
                                                      "\"; give this job a checkpoint directory of its own"));
  }
  if (names.newest_owner < config_.epoch) {
    return absl::UnavailableError(
        absl::StrCat(store_->Describe(), " is not the directory that was opened: ", OwnerKey(config_.epoch),
                     " is not there. Is the file system still mounted?"));
  }
  run->there = std::move(names.manifests);
  return config_.may_commit(run->id, run->there);  // last: nothing lies between this answer and the put
}

// Asks the board what the manifest's key holds; nullopt: the storage is to be asked.
std::optional<save::ManifestRead> Committer::AskBoard(const Run& run) {
  if (config_.rank == 0 || config_.board == nullptr) return std::nullopt;
  if (config_.board->IsCommitted(ManifestKey(run.id)))
    return save::ManifestRead{save::KeyHolds::kThisManifest, ""};
  if (!unstored_ || run.told_stop) return std::nullopt;
  if (clock_.Now() < run.ask_storage) return save::ManifestRead{save::KeyHolds::kNothing, ""};
  if (const absl::Status stored = StoreIndex(); !stored.ok())
    return save::ManifestRead{save::KeyHolds::kUnreadable, std::string(stored.message())};
  return std::nullopt;
}

bool Committer::ListsOurShard(const Run& run, const Manifest& manifest) const {
  if (config_.rank == 0 || manifest.world_size != config_.world_size) return false;
  if (manifest.parts.empty()) return manifest.files[config_.rank] == run.file;
  // A part is what its leader put; that it holds what its ranks wrote the leader has seen.
  const auto part = run.parts.find(PartOf(config_.rank));
  return part == run.parts.end() ||
         manifest.parts[static_cast<size_t>(PartOf(config_.rank))] == part->second.ref;
}

save::ManifestRead Committer::LookAtKey(Run* run) {
  if (const auto said = AskBoard(*run)) return *said;
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
  const bool same = ListsOurShard(*run, std::get<Manifest>(*read));
  return {same ? save::KeyHolds::kThisManifest : save::KeyHolds::kOther,
          "it lists another shard of this rank"};
}

}  // namespace gtrain::ckpt
