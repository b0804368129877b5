// The writer thread: carries out what SaveCore decides for one save at a time.
#pragma once
#include <gtrain/session.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/blob_store.h"
#include "runtime/core/save_core.h"

namespace gtrain::ckpt {

struct SaverConfig {
  int rank = 0;
  int world_size = 1;
  uint64_t epoch = 1;
  Identity owner;
  std::vector<Registered> registered;
  int keep = 3;
  int shard_tries = 1;
  absl::Duration commit_timeout = absl::Minutes(10);
};

// One owner thread calls the public methods; one writer thread of its own does the work and ends in the
// destructor, which gives up a save that is not committed yet and waits for the storage call that is out.
// `store` and `session` must outlive it. Host memory: one buffer of this rank's share, made once.
class Saver {
 public:
  Saver(port::BlobStore* store, const Session* session,
        std::function<void(int64_t, const std::string&)> committed, SaverConfig config);
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  const ShardPlan& plan() const { return plan_; }
  bool busy() const;
  // Where the data of plan().pieces goes, one after the other. Only while not busy.
  char* buffer() { return buffer_.get(); }
  // Writes the buffer as `id`. Never blocks. Must not be busy.
  void Start(const SaveId& id);
  // Until not busy: the last save's status. DeadlineExceeded after `timeout`.
  absl::Status Wait(absl::Duration timeout);
  // Of the last save that ended.
  absl::Status last_status() const;
  std::optional<int64_t> last_committed() const;
  absl::Duration last_duration() const;

 private:
  struct Run;  // of one save, on the writer thread
  void Loop();
  absl::Status Save(const SaveId& id);
  // Waits until `deadline` or a stop; tells the core about the stop once.
  void Pause(Run* run, Instant deadline);
  void Do(Run* run, const core::save::Effect& effect);
  void Apply(Run* run, const core::save::Event& event);
  absl::Status WriteOwnShard(Run* run);
  void PollIndices(Run* run, const std::vector<int>& missing);
  absl::Status CheckIndex(const Run& run, const ShardIndex& index, int rank) const;
  absl::Status CheckAuthority(Run* run);
  core::save::ManifestRead LookAtKey(Run* run);
  absl::Status Retain(const SaveId& id);
  bool AwaitStop(absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  port::BlobStore* const store_;
  const Session* const session_;
  const std::function<void(int64_t, const std::string&)> committed_;
  const SaverConfig config_;
  const ShardPlan plan_;
  const std::unique_ptr<char[]> buffer_;
  const RealClock clock_;

  // Writer thread only.
  core::SaveCore core_;
  Rng rng_ = Rng::FromSystem();
  std::map<SaveId, bool> finite_of_;  // manifests read before: they never change

  mutable Mutex mu_;
  std::optional<SaveId> request_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status last_status_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> last_committed_ ABSL_GUARDED_BY(mu_);
  absl::Duration last_duration_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last: everything above is there when it starts
};

}  // namespace gtrain::ckpt
