// One save at a time beside training: keeps what the last one came to, and the thread that waits for it.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/format/names.h"
#include "checkpoint/store/file_writer.h"

namespace gtrain::ckpt {

// Who writes the snapshot.
class SaveRoute {
 public:
  virtual ~SaveRoute() = default;
  // Where the data of the shard plan goes, one piece after the other. Only while no save runs.
  virtual char* buffer() = 0;
  // On the training thread, never blocks. From here on the snapshot is the route's.
  virtual void Begin(const SaveId& id) = 0;
  // On the Saver's thread: blocks until the save is over; its status, or nullopt when `stop` was set and
  // somebody else goes on with it. `committed` is called as soon as it is.
  virtual std::optional<absl::Status> Finish(const SaveId& id, StopFlag* stop,
                                             absl::FunctionRef<void()> committed) = 0;
  // False: it can save nothing more. Only while no save runs.
  virtual bool usable() = 0;
};

// This process writes, out of memory of its own, made once. Whatever ends the process ends the save.
class OwnRoute final : public SaveRoute {
 public:
  // `store` must outlive it.
  OwnRoute(port::BlobStore* store, CommitterConfig config)
      : committer_(store, std::move(config)),
        memory_(static_cast<char*>(operator new(Lead() + committer_.plan().data_bytes,
                                                std::align_val_t(FileWriter::kBlock)))) {}
  char* buffer() override { return memory_.get() + Lead(); }
  void Begin(const SaveId&) override {}
  std::optional<absl::Status> Finish(const SaveId& id, StopFlag* stop,
                                     absl::FunctionRef<void()> committed) override {
    return committer_.Save(id, {buffer(), committer_.plan().data_bytes}, stop, committed);
  }
  bool usable() override { return true; }

 private:
  // The data lies in its block of memory as it will in one of the file.
  size_t Lead() const { return committer_.plan().header.size() % FileWriter::kBlock; }
  struct Free {
    void operator()(char* memory) const { operator delete(memory, std::align_val_t(FileWriter::kBlock)); }
  };

  Committer committer_;
  const std::unique_ptr<char, Free> memory_;
};

// One owner thread calls the public methods; a thread of its own waits for the route and ends in the
// destructor, which stops a save that is not committed yet and waits for the storage call that is out.
class Saver {
 public:
  // `committed` is called on the Saver's thread. For people: `place` is where it goes, `bytes` how much of
  // it.
  Saver(std::unique_ptr<SaveRoute> route, std::function<void(const SaveId&)> committed, int rank,
        std::string place, uint64_t bytes);
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  bool busy() const;
  // Only while not busy.
  char* buffer() { return route_->buffer(); }
  bool usable() { return route_->usable(); }
  void Replace(std::unique_ptr<SaveRoute> route);
  // Writes the buffer as `id`. Never blocks. Must not be busy.
  void Start(const SaveId& id);
  // Until not busy: the last save's status. DeadlineExceeded after `timeout`.
  absl::Status Wait(absl::Duration timeout);
  // Of the last save that ended.
  absl::Status last_status() const;
  std::optional<int64_t> last_committed() const;
  absl::Duration last_duration() const;

 private:
  void Loop();

  const std::function<void(const SaveId&)> committed_;
  const int rank_;
  const std::string place_;
  const uint64_t bytes_;
  const RealClock clock_;
  std::unique_ptr<SaveRoute> route_;  // changed while not busy only
  StopFlag stop_;

  mutable Mutex mu_;
  std::optional<SaveId> request_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool end_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status last_status_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> last_committed_ ABSL_GUARDED_BY(mu_);
  absl::Duration last_duration_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last: everything above is there when it starts
};

}  // namespace gtrain::ckpt
