// The lease of a checkpoint directory. An owner claim (catalog.h) says whose the directory is, for ever; a
// lease says that this owner lives: a small file that its rank 0 renews and deletes in the end. Opening a
// directory whose owner lives is refused by name instead of disarming it. A new owner puts its lease first
// and then its claim, so nobody finds a claim whose owner only looks dead.
//
// Cost: the owner makes three requests every kRenewEvery, whatever its world size; other ranks make none.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/format/lease_mark.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Holds the lease of `epoch` from construction to destruction, on a thread of its own, and watches for a
// later owner. Thread-safe. A storage that fails meanwhile costs the lease its renewals and nothing else.
class Lease {
 public:
  static constexpr absl::Duration kRenewEvery = absl::Seconds(10);

  // `store` must outlive it. Blocks for the first renewal. `fresh`: nobody may have held a lease of `epoch`
  // before. `lost` is called once, on any thread, when a later owner is found.
  Lease(port::BlobStore* store, uint64_t epoch, uint64_t generation, bool fresh,
        std::function<void(const absl::Status&)> lost, absl::Duration every = kRenewEvery);
  // Takes the lease away, as far as the storage lets it, and waits for the call that is out.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // AlreadyExists: it is not fresh, and this one holds nothing. Else OK: a storage that fails is logged only.
  const absl::Status& first() const { return first_; }

  // The holder ends and its job goes on: the lease stays and grows old.
  void LeaveBehind() { leave_behind_ = true; }

  // FailedPrecondition that names the later owner once one was found.
  absl::Status held() const;
  // Once a look found that the claim of `epoch` is not in the storage: it was removed, or this is another
  // place.
  bool claim_gone() const;
  // Looks for a later owner at once instead of with the next renewal. Never blocks.
  void LookSoon();

 private:
  absl::Status Look();
  void Loop();
  void Renew();
  void NotRenewed(const absl::Status& why);

  port::BlobStore* const store_;
  const std::function<void(const absl::Status&)> lost_;
  const absl::Duration every_;
  LeaseMark mark_;  // of the newest renewal; of the thread, after the constructor
  absl::Status first_;
  bool told_ = false;
  bool leave_behind_ = false;
  mutable Mutex mu_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool look_ ABSL_GUARDED_BY(mu_) = false;
  bool claim_gone_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status held_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

struct LivenessCheck {
  // How long a lease is watched that no process on this machine can be asked about.
  absl::Duration patience = absl::Seconds(30);
  // Asked while it is watched; its error ends the wait.
  std::function<absl::Status()> alive = [] { return absl::OkStatus(); };
};

// Names the holder of the lease of `claim` for people ("process 4711 on host a since 2026-11-22T21:46:00Z");
// nullopt when nobody is at work: there is no lease, its process is gone, or nobody renews it. A process of
// this machine is found in /proc at once; any other holder is watched for `patience`.
absl::StatusOr<std::optional<std::string>> WhoHolds(port::BlobStore* store, const OwnerClaim& claim,
                                                    const LivenessCheck& check);

// "job \"train-1\" of cluster c", "a program that was run by hand".
std::string DescribeOwner(const Identity& owner);

}  // namespace gtrain::ckpt
