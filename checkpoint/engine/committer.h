// Carries out what SaveCore decides for one save of one rank: shard, index, on the first of every 64 ranks
// the part of the manifest that describes them and, on rank 0, the commit. It works in the rank's own process
// and in the writer outside it.
//
// The cost of a save of n ranks in requests to the storage, apart from the shards and what retention deletes:
// n puts of indices, n GETs of them and n queries of the lengths of shards by the leaders of parts, n / 64
// puts and n / 64 GETs of parts, one listing, one put of the manifest, and GETs of it by all n ranks. Writers
// on rank 0's machine need none of their own (index_board.h). Leaders have at most 16 calls out at a time, so
// a commit takes about (64 * 2 + n / 64) / 16 round trips once the last shard is written, and not n of them.
//
// While a leader waits it asks for the first missing index (rank 0: and the first missing part), and for the
// others when that is there: a GET each time, and at worst one more for each missing one whenever the first
// one comes. Its pauses are jittered and double from max(5 ms, n * 25 us) to max(500 ms, n * 250 us), from
// the beginning again after each that came. A rank that waits for the manifest first pauses for the time of
// the last commit and then asks once in max(n * 250 us, an eighth of that) at most, at a phase of its own:
// about 4,000 times a second all together, whatever n is.
//
// A rank that can put neither its index nor its part puts the abort marker under the manifest's key, so that
// nobody waits for it until commit_timeout. A gathering leader looks at that key once a second while
// something is missing: no request of a save whose indices come within a second, n / 64 a second of one that
// waits.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "checkpoint/engine/index_board.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/engine/read_back.h"
#include "checkpoint/engine/retain.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/plan/save_core.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Set once, from any thread.
class StopFlag {
 public:
  void Set();
  bool set() const;
  // Whether it was set within `timeout`.
  bool Await(absl::Duration timeout);

 private:
  mutable Mutex mu_;
  bool set_ ABSL_GUARDED_BY(mu_) = false;
};

struct CommitterConfig {
  int rank = 0;
  int world_size = 1;
  uint64_t epoch = 1;
  Identity owner;
  std::vector<Registered> registered;
  int keep = 3;
  int shard_tries = 1;
  absl::Duration commit_timeout = absl::Minutes(10);
  // Asked while it waits for other ranks; not OK gives the save up.
  std::function<absl::Status()> alive;
  // Rank 0, asked last before the manifest is put; `there` is what has something under its manifest's key.
  std::function<absl::Status(const SaveId&, const std::vector<SaveId>& there)> may_commit;
  NearTiers near;  // get copies of each shard
  // Where writers of this machine meet; must outlive the committer. Null: they meet in the storage only.
  IndexBoard* board = nullptr;
  // Asked once a save: AttemptName of the newest save whose shard this rank has read back and found intact;
  // empty: none. Null: the committer reads its shards back itself (engine/read_back.h). A writer that repeats
  // a save may say something else than the first.
  std::function<std::string()> verified;
  // Whether the next save's state is being copied: shards are not read back meanwhile. From any thread. Null:
  // never.
  std::function<bool()> copying;
};

// One thread at a time. `store` must outlive it.
class Committer {
 public:
  Committer(port::BlobStore* store, CommitterConfig config);

  const ShardPlan& plan() const { return plan_; }
  // For a registration that HasTail: sets how the next Save differs. Not during a Save.
  void SetTail(const SaveTail& tail);
  // The most data that any save may have.
  uint64_t DataBytesMax() const;
  // Writes `data`, that of plan().pieces, as `id` and returns when it is committed or has failed. `hashes` of
  // the chunks of the shard, if there are any, are those that `data` had when it was copied: a save whose
  // data has other hashes now is given up as DataLoss, because something wrote to it. Blocks as the storage
  // does, and until commit_timeout for other ranks; `stop` gives it up. The files of an earlier try for the
  // same `id` and data are used: a writer that died in the middle is repeated whole. `committed` is called
  // before old checkpoints are deleted.
  absl::Status Save(const SaveId& id, absl::string_view data, const std::vector<HashBytes>& hashes,
                    StopFlag* stop, absl::FunctionRef<void()> committed);
  // Says from which checkpoint this run was resumed (Retention::Resumed).
  void Resumed(const SaveId& id) { retention_.Resumed(id); }
  // A note for people about a save that went well: where a copy of it is missing, or that an earlier one
  // turned out to be damaged. Mostly empty; each note is given once.
  std::string TakeNote();
  // On rank 0, for the newest save that it committed: the oldest of the `verified` of all ranks; nullopt when
  // one of them has verified nothing.
  std::optional<SaveId> verified() const { return verified_; }
  // Says that the index of `id` is there already: `data` is not looked at any more.
  void ShardIsWritten() { shard_is_written_ = true; }
  // Called from `alive` during Save: once it returns OK another writer can go on from ShardIsWritten, and a
  // generation that settles sees that this rank's part is done.
  absl::Status StoreIndex();

 private:
  struct Run;  // of one save
  // A part that is in the storage.
  struct StoredPart {
    PartRef ref;
    std::string verified;
  };
  void TakeFailedAway(const SaveId& next);
  // Waits until `deadline` or a stop; tells the core about the stop once.
  void Pause(Run* run, Instant deadline);
  void Do(Run* run, const ckpt::save::Effect& effect);
  void Apply(Run* run, const ckpt::save::Event& event);
  absl::Status WriteOwnShard(Run* run);
  static absl::Status CheckCopied(const Run& run);
  void DescribeNear(const Run& run);
  absl::Status WriteIndex(Run* run, const absl::Status& shard);
  absl::StatusOr<std::string> WhatIsThere(const absl::Status& put, const std::string& key,
                                          size_t bytes_max) const;
  absl::Status PutIndex(const std::string& key, const std::string& text);
  bool LeaderReadsBoard() const;
  std::optional<std::string> PostedIndex(const std::string& key, int rank) const;
  void PollIndices(Run* run, const ckpt::save::PollIndices& poll);
  std::vector<size_t> TakePosted(const Run& run, const ckpt::save::PollIndices& poll, bool ask_all,
                                 std::vector<std::optional<absl::StatusOr<ShardIndex>>>* indices) const;
  std::optional<std::string> LookForMarker(const Run& run) const;
  std::optional<absl::StatusOr<ShardIndex>> LookForIndex(const Run& run, int rank) const;
  std::optional<absl::StatusOr<ShardIndex>> CheckedIndex(const Run& run, const std::string& key,
                                                         const std::string& text, bool look) const;
  std::optional<absl::StatusOr<StoredPart>> LookForPart(const Run& run, int part) const;
  absl::Status PutPart(Run* run, const absl::Status& failed);
  absl::StatusOr<StoredPart> PutOrTakeUp(const ManifestPart& part, const std::string& text) const;
  absl::Status PrintManifest(Run* run);
  absl::Status CheckAuthority(Run* run);
  ckpt::save::ManifestRead LookAtKey(Run* run);
  std::optional<ckpt::save::ManifestRead> AskBoard(const Run& run);
  bool ListsOurShard(const Run& run, const Manifest& manifest) const;
  void PutAbort(Run* run, const std::string& reason);
  absl::Status Retain(const Run& run);

  port::BlobStore* const store_;
  const CommitterConfig config_;
  ShardPlan plan_;
  const RealClock clock_;
  ckpt::SaveCore core_;
  Rng rng_ = Rng::FromSystem();
  bool shard_is_written_ = false;
  std::optional<std::pair<std::string, std::string>>
      unstored_;  // key and text of an index that is posted only
  std::optional<SaveId> verified_;
  static constexpr size_t kFailedMax = 8;
  std::vector<SaveId> failed_;  // whose files may still be there, the newest
  Retention retention_;
  NearSaves near_;
  ReadBack read_back_;
};

}  // namespace gtrain::ckpt
