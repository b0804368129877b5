// One save of one checkpoint, as this rank sees it: what to do next and whether it may be committed.
//
//   kIdle -1-> kWriting -2-> kIndexing -3-> kGathering -4-> kAuthorizing -5-> kPutting -6-> kVerifying -7->
//   kRetaining -8-> kDone
//                  |             |    -9-> kFollowing -10-> kDone                               |
//                  +-----11------+------------11------------------11-> kAborting -12-> kDone <--+ 13
//
//   1 snapshot taken: the shard is written       2 shard written, or not: its index says which
//   3 rank 0: the other ranks' indices are awaited   9 other ranks: the manifest is awaited
//   4 every index is there and sound             5 the generation lives and the directory is still ours
//   6 the conditional put was answered, in whatever way   7 read back: the manifest under the key is ours
//   8 older checkpoints are gone                10 the manifest, or an abort marker, was seen
//  11 it cannot be committed (rank 0 puts the abort marker)   12 marker put, or not
//  13 the key holds something else, retention took it, or nobody can say before the deadline
//
// Invariants, each with a test:
//   S1 PutManifest only after a sound index of every rank and a successful authority check after the last of
//   them. S2 ReportCommitted, ApplyRetention only after the manifest was read under its key and is this one.
//   S3 after a revoke or a cancel no PutManifest is made.
//   S4 every save ends with exactly one Finish, at latest when the deadline has passed and a call has
//   returned. S5 while a save runs another one is refused, never queued (fault C12). S6 the answer to
//   PutManifest decides nothing; the key does (a lost answer is not a failure).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain::core {

namespace save {

// --- events
struct SnapshotTaken {
  int64_t step = 0;
};
struct ShardWritten {
  absl::Status status;
};
struct IndexWritten {
  absl::Status status;
};
// One answer to PollIndices: the index of `rank` exists. Not OK: it is unsound or says that the rank failed.
struct IndexSeen {
  int rank = 0;
  absl::Status status;
};
struct AuthorityChecked {
  absl::Status status;
};
struct ManifestPut {
  absl::Status status;
};
// kOutranked: nothing, and a checkpoint of a newer timeline is committed, whose retention takes older ones.
enum class KeyHolds { kThisManifest, kNothing, kOutranked, kAbortMarker, kOther, kUnreadable };
struct ManifestRead {
  KeyHolds holds = KeyHolds::kNothing;
  std::string detail;
};
struct AbortPut {};
struct RetentionApplied {
  absl::Status status;
};
struct Revoked {
  std::string reason;
};
struct Cancelled {};
struct Tick {};
using Event = std::variant<SnapshotTaken, ShardWritten, IndexWritten, IndexSeen, AuthorityChecked,
                           ManifestPut, ManifestRead, AbortPut, RetentionApplied, Revoked, Cancelled, Tick>;

// --- effects: each is answered by the event of the same name
struct WriteShard {};
struct WriteIndex {
  absl::Status shard;  // not OK: the index says why there is no shard
};
struct PollIndices {
  std::vector<int> missing;
};
struct CheckAuthority {};
struct PutManifest {};
struct ReadManifest {};
struct PutAbort {
  std::string reason;
};
struct ReportCommitted {};
struct ApplyRetention {};
struct Finish {
  absl::Status status;
};
using Effect = std::variant<WriteShard, WriteIndex, PollIndices, CheckAuthority, PutManifest, ReadManifest,
                            PutAbort, ReportCommitted, ApplyRetention, Finish>;

struct Result {
  std::vector<Effect> effects;
  std::string why;
};

enum class State {
  kIdle,
  kWriting,
  kIndexing,
  kGathering,
  kAuthorizing,
  kPutting,
  kVerifying,
  kRetaining,
  kFollowing,
  kAborting,
  kDone
};
const char* StateName(State state);

}  // namespace save

struct SaveConfig {
  int rank = 0;
  int world_size = 1;
  absl::Duration commit_timeout = absl::Minutes(10);
  absl::Duration poll_min = absl::Milliseconds(5);
  absl::Duration poll_max = absl::Milliseconds(500);
};

// Not thread-safe. A value: no files, threads or clocks. SnapshotTaken starts the next save after Finish.
class SaveCore {
 public:
  explicit SaveCore(SaveConfig config) : config_(config) {}

  // Whether a new save may start; else it is skipped (S5).
  bool idle() const { return state_ == save::State::kIdle || state_ == save::State::kDone; }
  save::Result Step(const save::Event& event, Instant now);
  // When Tick is due; nullopt while a call is out or nothing runs.
  std::optional<Instant> NextDeadline() const;
  save::State state() const { return state_; }

 private:
  save::Result Start(const save::SnapshotTaken& event, Instant now);
  save::Result OnShardWritten(const save::ShardWritten& event);
  save::Result OnIndexWritten(const save::IndexWritten& event, Instant now);
  save::Result OnIndexSeen(const save::IndexSeen& event);
  save::Result OnAuthority(const save::AuthorityChecked& event);
  save::Result OnManifestRead(const save::ManifestRead& event, Instant now);
  save::Result OnTick(Instant now);
  save::Result OnStop(absl::Status why);
  save::Result Abort(absl::Status why);
  save::Result Done(absl::Status status, std::string why);
  void Move(save::State next);
  void PollLater(Instant now);
  save::Result Poll() const;

  const SaveConfig config_;
  save::State state_ = save::State::kIdle;
  int64_t step_ = 0;
  Instant deadline_;
  std::optional<Instant> next_poll_;
  absl::Duration poll_interval_;
  Instant follows_since_;
  absl::Duration followed_;  // how long the manifest took to come last time
  int looks_ = 0;            // for it
  std::vector<bool> index_seen_;
  int missing_ = 0;
  absl::Status shard_;                // how writing our own shard ended
  absl::Status failure_;              // why the attempt is being aborted
  absl::Status put_;                  // what PutManifest answered
  std::optional<absl::Status> stop_;  // revoked or cancelled while a call was out
};

}  // namespace gtrain::core
