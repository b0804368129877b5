// One save of one checkpoint, as this rank sees it: what to do next and whether it may be committed. The
// first rank of every part_ranks ranks leads them: it gathers their indices and puts the part that describes
// them. Rank 0 leads the first part, and gathers the other parts.
//
//   kIdle -1-> kWriting -2-> kIndexing -3-> kGathering -4-> kParting -5-> kAuthorizing -6-> kPutting
//         -7-> kVerifying -8-> kRetaining -9-> kDone
//     kIndexing -10-> kFollowing -11-> kDone        kParting -12-> kFollowing, kGathering, kDone
//     kWriting, kIndexing, kGathering, kParting, kAuthorizing, kVerifying -13-> kAborting -14-> kDone
//     kVerifying -15-> kDone        kAborting -16-> kFollowing        kGathering -17-> kDone
//
//   1 snapshot taken: the shard is written
//   2 shard written, or not: its index says which
//   3 leaders: the indices of their part are awaited, by rank 0 the other parts as well
//   4 every index of the part is there and sound; or this leader is not rank 0 and one is not, or never
//     comes: the part says why
//   5 rank 0: every part is put
//   6 the generation lives and the directory is still ours
//   7 the conditional put was answered, in whatever way
//   8 read back: the manifest under the key is ours
//   9 older checkpoints are gone
//  10 other ranks: the manifest is awaited
//  11 the manifest, or an abort marker, was seen
//  12 the part is put: rank 0 awaits the others, another leader the manifest, unless its part gave the save
//  up 13 it cannot be committed: rank 0 puts the abort marker, and so does another rank that can put neither
//  an
//     index nor a part that says why
//  14 rank 0: marker put, or not
//  15 the key holds something else, retention took it, or nobody can say before the deadline
//  16 other ranks: marker put, or not; the key is read once, because rank 0 may have created it first
//  17 another rank's abort marker was seen
//
// Invariants, each with a test:
//   S1 PutManifest only after a sound index of every rank, a part of every leader, and a successful authority
//      check after the last of them. A part without an error only after a sound index of each of its ranks.
//   S2 ReportCommitted, ApplyRetention only after the manifest was read under its key and is this one.
//   S3 after a revoke or a cancel no PutManifest is made.
//   S4 every save ends with exactly one Finish, at latest when the deadline has passed and the calls begun by
//      then have ended.
//   S5 while a save runs another one is refused, never queued (fault C12).
//   S6 the answer to PutManifest decides nothing; the key does (a lost answer is not a failure).
//   S7 the reason why a rank does not take part is in its index, in its part or in the abort marker before it
//      finishes, unless the storage refuses all of them: nobody waits until the deadline for a rank that gave
//      up.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain::ckpt {

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
// A second kind of answer to PollIndices, to rank 0: part `part` exists. Not OK: it is unsound or says which
// of its ranks failed.
struct PartSeen {
  int part = 0;
  absl::Status status;
};
// `status` is not OK where the part cannot be put or, for a PutPart without an error, where the part that is
// there gives the save up.
struct PartPut {
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
// The answer to ReadManifest, and now and then one to PollIndices: a rank that cannot take part, and cannot
// say so in an index or a part, puts the abort marker under the manifest's key.
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
using Event =
    std::variant<SnapshotTaken, ShardWritten, IndexWritten, IndexSeen, PartSeen, PartPut, AuthorityChecked,
                 ManifestPut, ManifestRead, AbortPut, RetentionApplied, Revoked, Cancelled, Tick>;

// --- effects: each is answered by the event of the same name
struct WriteShard {};
struct WriteIndex {
  absl::Status shard;  // not OK: the index says why there is no shard
};
struct PollIndices {
  std::vector<int> missing;  // ranks of this leader's part
  std::vector<int> parts;    // rank 0: of other leaders
};
// A part goes where readers will look for it: into the storage, or, while all is small, into the manifest.
struct PutPart {
  absl::Status failed;  // not OK: the part says why the save is given up
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
using Effect = std::variant<WriteShard, WriteIndex, PollIndices, PutPart, CheckAuthority, PutManifest,
                            ReadManifest, PutAbort, ReportCommitted, ApplyRetention, Finish>;

struct Result {
  std::vector<Effect> effects;
  std::string why;
};

enum class State {
  kIdle,
  kWriting,
  kIndexing,
  kGathering,
  kParting,
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
  int part_ranks = 64;
  absl::Duration commit_timeout = absl::Minutes(10);
  // Pauses between two looks: of a leader at missing indices and parts, and of the others at the manifest.
  absl::Duration poll_min = absl::Milliseconds(5);
  absl::Duration poll_max = absl::Milliseconds(500);
  // A rank that waits for the manifest looks once in so long at most, at a `phase`, 0 to 1, of its own, so
  // that all of them together ask evenly.
  absl::Duration spread = absl::ZeroDuration();
  double phase = 0;
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
  save::Result OnPartSeen(const save::PartSeen& event);
  save::Result OnPartPut(const save::PartPut& event, Instant now);
  save::Result OnAuthority(const save::AuthorityChecked& event);
  save::Result OnManifestRead(const save::ManifestRead& event, Instant now);
  save::Result OnTick(Instant now);
  save::Result OnStop(absl::Status why);
  // Leaders only: gives the save up. `words` are those of the part that gives it up; empty: this rank is why.
  save::Result Abort(absl::Status why, std::string words = "");
  save::Result PutMarker(absl::Status why);
  save::Result OnAbortPut(Instant now);
  save::Result GivenUp(const std::string& reason);
  std::string RankSays(const absl::Status& why) const;
  save::Result Follow(Instant now);
  save::Result Authorize();
  save::Result Done(absl::Status status, std::string why);
  void Move(save::State next);
  void PollLater(Instant now);
  save::Result Poll() const;
  bool leads() const { return config_.rank % config_.part_ranks == 0; }
  std::string Missing() const;  // for people: what is awaited

  const SaveConfig config_;
  save::State state_ = save::State::kIdle;
  int64_t step_ = 0;
  Instant deadline_;
  std::optional<Instant> next_poll_;
  absl::Duration poll_interval_;
  Instant follows_since_;
  absl::Duration followed_;       // how long the manifest took to come last time
  int looks_ = 0;                 // for it
  std::vector<bool> index_seen_;  // of the ranks of our part
  int missing_ = 0;               // of them
  std::vector<bool> part_seen_;   // rank 0
  int parts_missing_ = 0;         // rank 0: of the other parts
  bool part_put_ = false;
  absl::Status shard_;                // how writing our own shard ended
  absl::Status failure_;              // why the attempt is being aborted
  absl::Status put_;                  // what PutManifest answered
  std::optional<absl::Status> stop_;  // revoked or cancelled while a call was out
};

}  // namespace gtrain::ckpt
