// The state that a program registered on one rank: tensors, state of the rank, and bytes of any length. Used
// by the training thread; registered memory is the caller's.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/engine/agreement.h"
#include "checkpoint/engine/checkpoint.h"
#include "checkpoint/engine/snapshot.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"

namespace gtrain::ckpt {

// Not thread-safe.
class Registration {
 public:
  Registration(int rank, int world_size) : rank_(rank), world_size_(world_size) {}

  // These functions add as Checkpointer's do.
  absl::Status AddReplicated(absl::string_view name, const Memory& memory, std::vector<int64_t> shape,
                             DType dtype);
  absl::Status AddSharded(absl::string_view name, const Memory& memory, std::vector<int64_t> shape,
                          const Sharding& sharding, DType dtype);
  absl::Status AddBox(absl::string_view name, const Memory& memory, std::vector<int64_t> shape,
                      const std::vector<int64_t>& begin, const std::vector<int64_t>& local_shape,
                      DType dtype);
  absl::Status AddPerRank(absl::string_view name, const Memory& memory, PerRankRule rule);
  absl::Status AddBytes(absl::string_view name, std::function<absl::StatusOr<std::string>()> save,
                        std::function<absl::Status(absl::string_view)> load, PerRankRule rule);

  // Collective: whether all ranks registered the same, which boxes they hold, and whether that can be saved
  // where a file has at most `file_bytes_max` (CheckLimits). Nothing is added afterwards. FailedPrecondition
  // and InvalidArgument name ranks and tensors, ResourceExhausted the limit.
  absl::Status Freeze(Agreement* agree, uint64_t file_bytes_max);

  const std::vector<Registered>& all() const { return all_; }
  bool has_tail() const { return HasTail(all_); }

  // This rank's memory of each of all(); null of bytes of any length.
  std::vector<void*> Data() const;

  // Calls what AddBytes was given. ResourceExhausted over kByteEntriesMax. Not collective.
  absl::Status CollectTail();
  // The part of the current save besides its tensors, as CollectTail found it.
  const SaveTail& tail() const { return tail_; }
  // The sources of the data of a shard, in its order. `plan` is that of this rank's saves, with any tail.
  // Strings of CollectTail stay where they are until it is called again.
  std::vector<Snapshot::Source> Sources(const ShardPlan& plan) const;

  // During a restore: keeps what lies in the tensors that match `may_be_missing` (MatchesGlob), a copy of
  // each. A checkpoint that turns out to be damaged is read in part, and the one before may lack what it had.
  void KeepInitial(const std::vector<std::string>& may_be_missing);
  // Puts back the tensors that `plan` says are missing.
  void PutBackInitial(const LoadPlan& plan) const;
  void ForgetInitial() { initial_.clear(); }

  // During a restore: whether this rank can hold the state that it would have to keep. ResourceExhausted.
  absl::Status CheckKept(const LoadPlan& plan) const;
  // The memory for a tensor or blob that `plan` reads; state of ranks goes to `staged` first, which has a
  // string for each of plan.blobs, because the older checkpoint that a damaged one falls back to may hold
  // none for this rank.
  char* MemoryFor(size_t registered, std::vector<std::string>* staged) const;
  // Called when everything is verified: moves state of ranks from `staged` to where it belongs. Returns the
  // error of a `load`.
  absl::Status Take(const LoadPlan& plan, std::vector<std::string> staged);

 private:
  struct Entry {
    char* data = nullptr;
    sharding::Box box;  // with Layout::kBoxes
    std::function<absl::StatusOr<std::string>()> save;
    std::function<absl::Status(absl::string_view)> load;
    std::string bytes;  // what `save` gave last
  };
  struct Kept {
    KeptBlob what;
    std::string bytes;
  };

  // Checks every registration first.
  static absl::Status Check(absl::string_view name, const Memory& memory, DType dtype = DType::kUint8);
  absl::Status Add(Registered registered, const Memory& memory, Entry entry);
  // Sums stay far from overflow, so that plans may add sizes. ResourceExhausted.
  absl::Status Count(const Registered& registered);

  const int rank_;
  const int world_size_;
  bool frozen_ = false;
  std::vector<Registered> all_;
  std::vector<Entry> entries_;  // of each of all_
  absl::flat_hash_set<std::string> names_;
  uint64_t tensor_bytes_ = 0;                            // of whole tensors
  uint64_t rank_bytes_ = 0;                              // of AddPerRank
  std::vector<Kept> kept_;                               // ascending
  std::vector<std::pair<size_t, std::string>> initial_;  // of all_, during a restore
  SaveTail tail_;
};

}  // namespace gtrain::ckpt
