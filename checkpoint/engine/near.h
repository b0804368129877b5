// What a restore takes from near tiers, and what a save gives them (checkpoint/port/near_tier.h). Neither can
// make a restore wrong or a save fail.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/blob_store.h"
#include "checkpoint/port/near_tier.h"

namespace gtrain::ckpt {

// The near tier of this machine, for one job. Null, with a warning, where it cannot be had.
std::shared_ptr<port::NearTier> OpenNear(const NearPlace& place, const std::string& job);

// The copies of one checkpoint that are near. Thread-safe.
class NearShards {
 public:
  // Asks each of `tiers`, the nearest first, which shards it holds. The tiers and `manifest` must outlive it.
  NearShards(const std::vector<port::NearTier*>& tiers, const Manifest& manifest);

  // Whether somebody says that it holds the whole file.
  bool Holds(size_t file) const;
  // How to read the bytes of a copy from an offset on, best in pieces of `size`.
  struct ReadFrom {
    uint64_t size;
    absl::FunctionRef<absl::Status(uint64_t, absl::Span<char>)> read;
  };
  // Lets `read`, which compares what it gets with its hash, try one copy of `file` after the other until one
  // is right. False: none is; then a warning has said which are bad and why.
  bool Read(size_t file, absl::FunctionRef<absl::Status(const ReadFrom&)> read);
  // Read from the tier, verified.
  uint64_t bytes(size_t tier) const { return places_[tier].bytes; }

 private:
  struct Place {
    port::NearTier* tier = nullptr;
    std::map<std::string, uint64_t> shards;
    std::atomic<uint64_t> bytes{0};
    std::atomic<int> bad{0};  // chunks; from kBadMax on it is not asked again
  };
  static constexpr int kBadMax = 8;

  void Refuse(Place* place, const ShardFile& file, absl::string_view why);

  const Manifest& manifest_;
  std::vector<Place> places_;
};

// Gives this rank's shards to a near tier, beside the save. One owner thread.
class NearSaves {
 public:
  // `tier` may be null: then nothing happens. `store` tells, once, what is committed already. Both must
  // outlive it.
  NearSaves(port::NearTier* tier, port::BlobStore* store);
  ~NearSaves() { End(std::nullopt); }

  // `header` and `data` make up the shard `file` of `id`; they must stay until End.
  void Begin(const SaveId& id, const std::string& file, absl::string_view header, absl::string_view data);
  // The save is over. Returns when nothing is read from `data` any more: a copy that is not there yet has as
  // long again as the save took, at least kEndWithin, then it is given up. `committed`: what the save came
  // to.
  void End(const std::optional<SaveId>& committed);
  // What people should know of the newest save's copy; empty: it is there.
  const std::string& note() const { return note_; }

  static constexpr absl::Duration kEndWithin = absl::Seconds(5);

 private:
  absl::Status Copy(const SaveId& id, const std::string& file, absl::string_view header,
                    absl::string_view data);

  port::NearTier* const tier_;
  port::BlobStore* const store_;
  std::optional<SaveId> committed_;
  uint64_t skipped_ = 0;
  std::string note_;
  const RealClock clock_;
  Instant begun_;
  std::atomic<bool> give_up_{false};
  Mutex mu_;
  std::optional<absl::Status> result_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // between Begin and End
};

}  // namespace gtrain::ckpt
