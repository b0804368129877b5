// Reads a shard back after its save was committed, beside everything else. A disk that lost or changed what
// it acknowledged is found while older checkpoints are still there: retention keeps the newest one that every
// rank has read back.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// One owner thread, and a thread of its own at the lowest priority. Reads each byte of a shard
// once, a chunk of memory at a time. A save that comes while another is still being read is left out, so that
// there is always one that gets to its end.
class ReadBack {
 public:
  // `store` must outlive it. `copying`, called from the thread: whether a next save copies its state right
  // now, which training waits for; nothing is read meanwhile. Null: never.
  explicit ReadBack(port::BlobStore* store, std::function<bool()> copying = nullptr)
      : store_(store), copying_(std::move(copying)) {}
  // Gives up what is being read and waits for the call that is out.
  ~ReadBack();
  ReadBack(const ReadBack&) = delete;
  ReadBack& operator=(const ReadBack&) = delete;

  // `file` of the committed `id` is this rank's shard. Never blocks.
  void Begin(const SaveId& id, const ShardFile& file);
  // Waits for what is being read, at most `timeout`: mostly it is over, and retention then need not keep one
  // more.
  void Await(absl::Duration timeout);
  // The newest save whose shard was found to be as it should be.
  std::optional<SaveId> verified() const;
  // A note for people about a shard that differs from what was written. Mostly empty; each note is given
  // once.
  std::string TakeNote();

 private:
  void Read(const SaveId& id, const ShardFile& file);
  // Takes the time from `patience`. False: it is given up.
  bool StandAside(absl::Duration* patience);

  port::BlobStore* const store_;
  const std::function<bool()> copying_;
  mutable Mutex mu_;
  bool give_up_ ABSL_GUARDED_BY(mu_) = false;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<SaveId> verified_ ABSL_GUARDED_BY(mu_);
  std::string note_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace gtrain::ckpt
