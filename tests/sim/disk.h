// The head's disk and the one thread that writes to it: the synced records, as they are read back, and the
// one batch that is not synced. A killed process leaves its batch to the page cache, a power cut takes it or
// leaves it whole (the log's torn tail is dropped at recovery), an error of fsync says nothing about the
// outcome.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "runtime/core/head/outbox.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

class Disk {
 public:
  explicit Disk(Kernel& kernel) : kernel_(kernel) {}

  enum class Fault { kNone, kEio, kFull };
  void FailNext(Fault fault) { next_fault_ = fault; }
  void set_full(bool full) { full_ = full; }
  bool full() const { return full_; }
  // Whether an unsynced batch survives; nullopt: chance decides.
  void set_unsynced_survives(std::optional<bool> survives) { unsynced_survives_ = survives; }
  // fsync takes about this long.
  void set_sync_time(int64_t mean) { sync_mean_ = mean; }

  // kError: nobody knows what is there, and the caller must not go on. kNoRoom: nothing of it was written,
  // and it may be handed in again. `done` is never called after Lose.
  enum class Outcome { kDurable, kError, kNoRoom };
  void Commit(core::OutboxBatch batch, std::function<void(Outcome)> done);
  // Lets nodes with these keys in, three syncs for all; a commit that waits goes first. One batch at a time.
  void Join(std::vector<std::string> keys, std::function<void(Outcome)> done);
  const std::set<std::string>& members() const { return members_; }
  static NodeId NodeOf(const std::string& key) { return NodeId("node-of-" + key); }
  // Ends the process (with its machine: power_cut). Writes that were not synced may be there or not.
  void Lose(bool power_cut);

  const std::map<std::string, core::Record>& durable() const { return durable_; }
  // The jobs that these make.
  const std::map<JobId, core::JobRecord>& jobs() const { return jobs_; }
  // Called for each batch when it becomes durable.
  std::function<void(const std::vector<core::RecordWrite>&)> on_durable;

 private:
  void Next();
  void Run(int syncs, std::function<void()> task);
  void Write(Fault fault, const std::function<void(Outcome)>& done);
  void LetIn();
  void Apply(const core::OutboxBatch& batch);
  void JoinRecords(const JobId& job);

  Kernel& kernel_;
  std::map<std::string, core::Record> durable_;
  std::map<JobId, core::JobRecord> jobs_;
  std::optional<core::OutboxBatch> in_flight_;
  std::set<std::string> members_;
  std::vector<std::string> joining_;
  std::function<void()> commit_, join_;  // wait for the thread
  bool busy_ = false, writing_ = false;  // the thread; with a batch of records
  uint64_t life_ = 1;
  Fault next_fault_ = Fault::kNone;
  bool full_ = false;
  std::optional<bool> unsynced_survives_;
  int64_t sync_mean_ = 3 * kMs;
};

}  // namespace gtrain::sim
