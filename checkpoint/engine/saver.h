// One save at a time beside training: keeps what the last one came to, and the thread that waits for it.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/engine/snapshot.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/names.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/store/file_writer.h"

namespace gtrain::ckpt {

// The way in which a snapshot is written: by this process, or by a writer outside it.
class SaveRoute {
 public:
  virtual ~SaveRoute() = default;
  // The buffer for the data of the shard plan, one piece after the other. It never moves.
  virtual char* buffer() = 0;
  // Sets the part of the next save besides its tensors, when the registration HasTail. Called on the training
  // thread, before the copy.
  virtual absl::Status SetTail(const SaveTail& tail) = 0;
  // Says whether the training thread copies into the buffer, and waits or will wait for that: other work
  // stands aside. Called on the training thread, never blocks.
  virtual void SetCopying(bool copying) = 0;
  // Hands the snapshot to the route. `hashes` are Snapshot::hashes. Called on the training thread, never
  // blocks.
  virtual void Begin(const SaveId& id, const std::vector<HashBytes>& hashes) = 0;
  // Says from which checkpoint this run was resumed; nothing newer is deleted before it is known to be
  // worthless. Called before Begin.
  virtual void Resumed(const SaveId& id) = 0;
  // Called on the Saver's thread. Blocks until the save is over and returns its status, or nullopt when
  // `stop` was set and another process goes on with the save. `committed` is called as soon as it is
  // committed.
  virtual std::optional<absl::Status> Finish(const SaveId& id, StopFlag* stop,
                                             absl::FunctionRef<void()> committed) = 0;
  // False: the route can save nothing more. Called only while no save runs.
  virtual bool usable() = 0;
};

// This process writes, out of memory of its own, made once. Whatever ends the process ends the save.
class OwnRoute final : public SaveRoute {
 public:
  // `store` must outlive it.
  OwnRoute(port::BlobStore* store, CommitterConfig config)
      : rank_(config.rank),
        committer_(store, WithCopying(std::move(config))),
        memory_(static_cast<char*>(operator new(Lead() + committer_.DataBytesMax(),
                                                std::align_val_t(FileWriter::kBlock)))) {}
  char* buffer() override { return memory_.get() + Lead(); }
  absl::Status SetTail(const SaveTail& tail) override {
    tail_ = tail;
    return absl::OkStatus();
  }
  void SetCopying(bool copying) override { copying_ = copying; }
  void Begin(const SaveId&, const std::vector<HashBytes>& hashes) override { hashes_ = hashes; }
  void Resumed(const SaveId& id) override { committer_.Resumed(id); }
  std::optional<absl::Status> Finish(const SaveId& id, StopFlag* stop,
                                     absl::FunctionRef<void()> committed) override {
    if (tail_) committer_.SetTail(*tail_);
    const absl::Status saved =
        committer_.Save(id, {buffer(), committer_.plan().data_bytes}, hashes_, stop, committed);
    const std::string note = saved.ok() ? committer_.TakeNote() : "";
    if (!note.empty()) LogWarning("checkpoint: rank ", rank_, ": step ", id.step, ": ", note);
    return saved;
  }
  bool usable() override { return true; }

 private:
  // The data lies in its block of memory as it will in one of the file.
  size_t Lead() const { return committer_.plan().header.size() % FileWriter::kBlock; }
  CommitterConfig WithCopying(CommitterConfig config) {
    config.copying = [this] { return copying_.load(); };
    return config;
  }
  struct Free {
    void operator()(char* memory) const { operator delete(memory, std::align_val_t(FileWriter::kBlock)); }
  };

  const int rank_;
  std::atomic<bool> copying_{false};
  std::optional<SaveTail> tail_;  // of the newest save; none: it never changes
  Committer committer_;
  const std::unique_ptr<char, Free> memory_;
  std::vector<HashBytes> hashes_;  // of the save under way
};

// One owner thread calls the public methods; a thread of its own copies, waits for the route and ends in the
// destructor, which stops a save that is not committed yet and waits for the storage call that is out.
class Saver {
 public:
  // `header` is that of the shard, `sources` the state behind it, in the order of the route's buffer.
  // `ended` is called on the Saver's thread: with OK as soon as a save is committed, or with why it came to
  // nothing. For people: `place` is where it goes.
  Saver(std::unique_ptr<SaveRoute> route, absl::string_view header,
        const std::vector<Snapshot::Source>& sources,
        std::function<void(const SaveId&, const absl::Status&)> ended, int rank, std::string place);
  ~Saver();  // a save that nobody fenced is dropped: it may be torn
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  bool busy() const;
  // Both are called only while not busy.
  bool usable() { return route_->usable(); }
  void Replace(std::unique_ptr<SaveRoute> route);
  // Sets, only while not busy, the part of the next save besides its tensors, the header of its shard, and
  // all sources that it is copied from. ResourceExhausted: the shard or its description would be too large.
  absl::Status SetTail(const SaveTail& tail, absl::string_view header,
                       const std::vector<Snapshot::Source>& sources);
  void Resumed(const SaveId& id);  // SaveRoute::Resumed, of routes to come too
  // Begins to copy the state, to be written as `id`. Never blocks. Must not be busy.
  void Start(const SaveId& id);
  // Returns when the state is copied, and helps to copy it. From here on the snapshot is the route's and will
  // be written.
  void Fence();
  // True between Start and Fence.
  bool copying() const;
  // Gives up the save instead of Fence: the copy may be torn. Returns when nothing is read from the state any
  // more.
  void Drop();
  // From now on the pages of the buffer are made in the background, so that the first save need not make
  // them. The time is the kernel's, for zeroing and mapping them: as much as for several copies.
  void Warm();
  // Waits until not busy and returns the last save's status. DeadlineExceeded after `timeout`.
  absl::Status Wait(absl::Duration timeout);
  // The results of the last save that ended.
  absl::Status last_status() const;
  std::optional<int64_t> last_committed() const;
  absl::Duration last_duration() const;

 private:
  enum class Stage { kIdle, kCopying, kDropped, kWriting };

  void Loop();
  void Carry(const SaveId& id);  // from the copy to the commit
  void WarmUp();                 // some pages more

  const std::function<void(const SaveId&, const absl::Status&)> ended_;
  const int rank_;
  const std::string place_;
  Snapshot snapshot_;
  const RealClock clock_;
  std::unique_ptr<SaveRoute> route_;  // changed while not busy only
  std::optional<SaveId> resumed_;     // of the owner thread
  StopFlag stop_;

  mutable Mutex mu_;
  std::optional<SaveId> request_ ABSL_GUARDED_BY(mu_);  // not yet seen by the thread
  SaveId newest_ ABSL_GUARDED_BY(mu_);
  Stage stage_ ABSL_GUARDED_BY(mu_) = Stage::kIdle;  // only the owner leaves kIdle and kCopying
  uint64_t cold_ ABSL_GUARDED_BY(mu_) = 0;  // bytes at the end of the buffer that WarmUp has not seen
  bool end_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status last_status_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> last_committed_ ABSL_GUARDED_BY(mu_);
  absl::Duration last_duration_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last: everything above is there when it starts
};

}  // namespace gtrain::ckpt
