// Copies of shards in near tiers (checkpoint/port/near_tier.h): a restore reads them, a save writes them.
// Neither can make a restore wrong or a save fail.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
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

// Near tiers of one job, as one machine sees them.
struct NearTiers {
  std::shared_ptr<port::NearTier> own;                 // null: no copies are kept
  std::vector<std::shared_ptr<port::NearTier>> peers;  // other machines
  size_t holders = 0;                                  // the first so many of them get copies of our shards
};

// Opens the tiers of `place`. A tier that cannot be opened is left out, with a warning.
NearTiers OpenNear(const NearPlace& place, const std::string& job);

// The copies of one checkpoint that are near. Thread-safe.
class NearShards {
 public:
  // Asks each of `tiers` which shards it holds, other machines several at a time. `tiers` and `manifest` must
  // outlive it.
  NearShards(const NearTiers& tiers, const Manifest& manifest);

  // Whether somebody says that it holds the whole file; whether this machine does.
  bool Holds(size_t file) const;
  bool HoldsHere(size_t file) const { return HoldsIn(places_[0], file); }
  // Reads the bytes of a copy from an offset on, best in pieces of `size`.
  struct ReadFrom {
    uint64_t size;
    absl::FunctionRef<absl::Status(uint64_t, absl::Span<char>)> read;
  };
  // Lets `read`, which compares what it gets with its hash, try one copy of `file` after the other until one
  // is right. False: none is; then a warning has said which are bad and why.
  bool Read(size_t file, absl::FunctionRef<absl::Status(const ReadFrom&)> read);
  // Bytes that were read and verified, from copies on this machine and on others.
  uint64_t own_bytes() const { return places_[0].bytes; }
  uint64_t peer_bytes() const;

 private:
  struct Place {
    port::NearTier* tier = nullptr;
    std::set<std::string> shards;  // that are as long as they should be
    std::atomic<uint64_t> bytes{0};
    std::atomic<int> bad{0};  // chunks; from kBadMax on it is not asked again
  };
  static constexpr int kBadMax = 8;

  bool HoldsIn(const Place& place, size_t file) const;
  void Ask(Place* place);
  void Refuse(Place* place, const ShardFile& file, absl::string_view why);

  const Manifest& manifest_;
  std::vector<Place> places_;
};

// Gives copies that lie on this machine to others, one after the other, on a thread of its own.
class NearPushes {
 public:
  explicit NearPushes(NearTiers tiers);
  // Waits for what is under way, at most kEndWithin.
  ~NearPushes();

  // Never blocks. `copies` of one save; one that still waits for its turn is left out for this one.
  void Push(std::vector<port::NearTier::Copy> copies);
  // A note for people about copies that are missing since the last call; empty: all are there.
  std::string TakeNote();

  static constexpr absl::Duration kEndWithin = absl::Seconds(8);  // a keeper that quits gives writers 15 s

 private:
  void Run();
  absl::Status PushTo(port::NearTier* peer, const port::NearTier::Copy& copy);

  const NearTiers tiers_;
  Mutex mu_;
  std::vector<port::NearTier::Copy> next_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t left_out_ ABSL_GUARDED_BY(mu_) = 0;
  std::string note_ ABSL_GUARDED_BY(mu_);
  std::atomic<bool> give_up_{false};
  std::vector<char> buffer_;  // of the thread
  std::thread thread_;
};

// Gives this rank's shards to near tiers, beside the save. One owner thread.
class NearSaves {
 public:
  // `store` tells, once, which saves are committed already, and must outlive it.
  NearSaves(NearTiers tiers, port::BlobStore* store);
  ~NearSaves() { Finish(kEndWithin); }

  // `header` and `data` make up the shard `file` of `id`; they must stay until End.
  void Begin(const SaveId& id, const std::string& file, absl::string_view header, absl::string_view data);
  // Gives the index of that shard, and on rank 0 the order, by their names: with them a later generation can
  // restore the save before it is committed (engine/uncommitted.h). From any thread, once a save at most.
  void Describe(std::vector<std::pair<std::string, std::string>> texts);
  // Says that the save is over. Returns when nothing is read from `data` any more: a copy that is not there
  // yet has as long again as the save took, at least kEndWithin and the time of its bytes at kSlowest (in the
  // destructor kEndWithin), then it is given up. Other machines get theirs afterwards, from the copy here.
  // `committed`: the save, if it was committed.
  void End(const std::optional<SaveId>& committed);
  // A note for people about the newest save's copies, here and so far on other machines, that are missing;
  // empty: all are there.
  const std::string& note() const { return note_; }

  static constexpr absl::Duration kEndWithin = absl::Seconds(5);
  // Bytes a second. Fresh pages of memory come at 1 GB/s on a slow machine, to all of its ranks together.
  static constexpr double kSlowest = 256e6;

 private:
  void Finish(absl::Duration patience);
  absl::Status Put(const port::NearTier::Copy& copy, absl::string_view first, absl::string_view rest);
  void PutAll(const SaveId& id, const std::string& file, absl::string_view header, absl::string_view data);

  const NearTiers tiers_;
  port::BlobStore* const store_;
  std::optional<SaveId> committed_;
  uint64_t left_out_ = 0;
  std::string note_;
  const RealClock clock_;
  Instant begun_;
  uint64_t bytes_ = 0;  // of the copy under way
  std::atomic<bool> give_up_{false};
  Mutex mu_;
  std::optional<absl::Status> result_ ABSL_GUARDED_BY(mu_);
  std::optional<std::vector<std::pair<std::string, std::string>>> texts_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<NearPushes> pushes_;  // null: nobody else gets any
  std::thread thread_;                  // between Begin and End
};

}  // namespace gtrain::ckpt
