// Holds the older parts of ranks' last output, for which LogTails has no room, in files of the cluster
// directory.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"
#include "runtime/core/values/log_tails.h"

namespace gtrain::head {

struct TailSpillLimits {
  size_t told = 64 << 10;  // of a tail; its file holds at most three times as much
  // All files together; each counts as 16 KiB at least, so there are at most 65,536. Twice what 4,000 ranks
  // with two streams of `told` bytes each need.
  size_t total = size_t{1} << 30;
};

// Blocks on the disk; one thread owns it, apart from lost() and SetRoom(). The files are `tails/<number>`,
// the bytes of one tail each. Only this object knows which file belongs to which tail: a new head begins with
// an empty folder, for after its welcome every agent sends whole tails. Only text that cannot be written, or
// has no room, is lost.
class TailSpill {
 public:
  explicit TailSpill(std::string cluster_dir, TailSpillLimits limits = {});

  // Removes all files: at first those that an earlier head has left, and later when others need the disk.
  void Clear();
  // Thread-safe. Without room nothing is written, whatever waits.
  void SetRoom(bool room);
  void Write(const core::SpillTail& spill);
  std::optional<core::SpilledTail> Read(const core::TailKey& tail);
  void Drop(const JobId& job);
  // Parts that could not be written.
  uint64_t lost() const { return lost_; }

 private:
  struct File {
    uint64_t number = 0;  // its name
    size_t size = 0;
    uint64_t bytes = 0;  // SpilledTail::bytes
    uint64_t end_offset = 0;
  };
  using Files = core::JobShares<core::TailKey, File>;

  absl::Status Open();
  absl::Status Append(File& file, const core::SpillTail& spill);
  absl::StatusOr<std::string> ReadEnd(const File& file) const;
  void Unlink(const File& file) const;

  const std::string cluster_dir_;
  const TailSpillLimits limits_;
  UniqueFd folder_;
  uint64_t last_number_ = 0;
  Files files_;
  bool failing_ = false;
  std::atomic<uint64_t> lost_ = 0;
  std::atomic<bool> room_ = true;
};

// A TailSpill on a thread of its own, behind a queue of at most `tasks_max`. A write or read that does not
// fit into it is refused. A deletion that does not fit is owed and goes with the next task that fits, in
// front of it: a part that is written after its job was dropped would stay for as long as the head runs. A
// job is dropped once, so no more deletions are owed than a head remembers jobs. Loop-owned.
class TailQueue {
 public:
  TailQueue(std::shared_ptr<TailSpill> spill, size_t tasks_max)
      : spill_(std::move(spill)), thread_(tasks_max) {}

  // False: refused.
  bool Write(const core::SpillTail& part);
  bool Read(const core::TailKey& tail, std::function<void(std::optional<core::SpilledTail>)> done);
  void Drop(const JobId& job);
  void Clear();
  // Tries the owed deletions. Where nothing else comes it must be called now and then.
  bool PayDebts();

 private:
  const std::shared_ptr<TailSpill> spill_;
  std::shared_ptr<std::set<JobId>> to_drop_ =
      std::make_shared<std::set<JobId>>();  // a task's once it is posted
  bool to_clear_ = false;
  TaskThread thread_;
};

}  // namespace gtrain::head
