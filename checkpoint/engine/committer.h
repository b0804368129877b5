// Carries out what SaveCore decides for one save of one rank: shard, index and, on rank 0, the commit. The
// same in the rank's own process and in the writer outside it.
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
#include "checkpoint/engine/retain.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/blob_store.h"
#include "runtime/core/save_core.h"

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
};

// One thread at a time. `store` must outlive it.
class Committer {
 public:
  Committer(port::BlobStore* store, CommitterConfig config);

  const ShardPlan& plan() const { return plan_; }
  // Of a registration that HasTail: how the next Save differs. Not during one.
  void SetTail(const SaveTail& tail);
  // Of any save.
  uint64_t DataBytesMax() const;
  // Writes `data`, that of plan().pieces, as `id` and sees it committed or failed. Blocks as the storage
  // does, and until commit_timeout for other ranks; `stop` gives it up. What an earlier try for the same `id`
  // and data left is taken up: whoever died in the middle is repeated whole. `committed` is called before old
  // ones are deleted.
  absl::Status Save(const SaveId& id, absl::string_view data, StopFlag* stop,
                    absl::FunctionRef<void()> committed);
  // What people should know of a save that went well: where there is no copy of it. Mostly empty.
  const std::string& note() const { return near_.note(); }
  // The index of `id` is there already: `data` is not looked at any more.
  void ShardIsWritten() { shard_is_written_ = true; }
  // During Save, from `alive`: once it returns OK another writer can go on from ShardIsWritten, and a
  // generation that settles sees that this rank's part is done.
  absl::Status StoreIndex();

 private:
  struct Run;  // of one save
  // Waits until `deadline` or a stop; tells the core about the stop once.
  void Pause(Run* run, Instant deadline);
  void Do(Run* run, const core::save::Effect& effect);
  void Apply(Run* run, const core::save::Event& event);
  absl::Status WriteOwnShard(Run* run);
  absl::Status WriteIndex(Run* run, const absl::Status& shard);
  absl::Status PutIndex(const std::string& key, const std::string& text);
  std::optional<std::string> PostedIndex(const std::string& key, int rank) const;
  void PollIndices(Run* run, const std::vector<int>& missing);
  absl::Status CheckIndex(const Run& run, const ShardIndex& index, int rank, bool look) const;
  absl::Status CheckAuthority(Run* run);
  core::save::ManifestRead LookAtKey(Run* run);

  port::BlobStore* const store_;
  const CommitterConfig config_;
  ShardPlan plan_;
  const RealClock clock_;
  core::SaveCore core_;
  Rng rng_ = Rng::FromSystem();
  bool shard_is_written_ = false;
  std::optional<std::pair<std::string, std::string>>
      unstored_;  // key and text of an index that is posted only
  Retention retention_;
  NearSaves near_;
};

}  // namespace gtrain::ckpt
