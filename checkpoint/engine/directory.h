// The checkpoint directory of one generation of a job: it is proven to be one directory for all ranks, rank 0
// claims it and holds its lease, and every save gets a name there that no other save has.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/context.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/format/names.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Used by the training thread, or by the one that opens it; `store` by any, once it is open.
class Directory {
 public:
  Directory(CheckpointContext* context, StoreFactory open_store)
      : context_(*context), open_store_(std::move(open_store)) {}
  // Leaves the directory free, unless the job has another generation to come. Nothing is saved any more.
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  // Collective, once. FailedPrecondition: it is not shared, or somebody else's; rank 0 has told the head.
  // Read-only it claims and writes nothing.
  absl::Status Open();

  port::BlobStore* store() const { return store_.get(); }
  // `elsewhere`: that of Settings::resume_uri, which the first call opens.
  absl::StatusOr<port::BlobStore*> StoreOf(bool elsewhere);

  // Epoch, timeline, generation and attempt of the next save.
  const SaveId& next() const { return next_; }
  // The name of the save of `step` that begins now.
  const SaveId& NameSave(int64_t step);

  // FailedPrecondition on rank 0 once another owner has the directory.
  absl::Status held() const { return lease_ == nullptr ? absl::OkStatus() : lease_->held(); }
  // Rank 0: the claim that this has made is not there any more.
  bool claim_gone() const { return lease_ != nullptr && lease_->claim_gone(); }
  // Rank 0, once it is open: Checkpointer::device.
  std::optional<uint64_t> device() const { return device_; }
  // A save that failed may have failed because the directory is no longer ours. Never blocks.
  void LookSoon();

 private:
  // Rank 0, where a program had it open before: OK when it is there, and nothing else in its place.
  absl::Status CheckSamePlace() const;
  absl::Status ProveShared();
  absl::Status TakeOwnership();
  // Rank 0: returns epoch and attempt, as the others are told them.
  absl::StatusOr<std::string> Claim();
  absl::Status HoldLease(uint64_t epoch, bool fresh);

  CheckpointContext& context_;
  Session* const session_ = context_.session;
  const Settings& settings_ = context_.settings;
  Agreement& agree_ = context_.agree;
  const StoreFactory open_store_;
  std::unique_ptr<port::BlobStore> store_;
  std::unique_ptr<port::BlobStore> elsewhere_;  // of resume_uri, when asked for
  std::unique_ptr<Lease> lease_;                // rank 0 of one that writes
  SaveId next_;
  std::optional<uint64_t> device_;
  std::string place_;          // taken (openings.h), of rank 0
  int64_t highest_step_ = -1;  // saved with the current attempt number
};

// Get that waits for what another rank is known to have written.
absl::StatusOr<std::string> GetVisible(port::BlobStore* store, const std::string& key, size_t bytes_max,
                                       absl::FunctionRef<absl::Status()> still_wanted);

}  // namespace gtrain::ckpt
