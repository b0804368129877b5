// The invariants S1 to S7 of save_core.h.
#include "checkpoint/plan/save_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "base/rng.h"

namespace gtrain::ckpt::save {
namespace {

using ::testing::HasSubstr;

const char* Name(const Effect& e) {
  static const char* const kNames[] = {"write-shard", "write-index", "poll",   "put-part", "authority", "put",
                                       "read",        "put-abort",   "report", "retain",   "finish"};
  return kNames[e.index()];
}

// Feeds events and keeps what came out.
struct Driver {
  explicit Driver(int rank = 0, int world = 1, int part_ranks = 64)
      : core({.rank = rank,
              .world_size = world,
              .part_ranks = part_ranks,
              .commit_timeout = absl::Seconds(60)}) {}
  std::string Do(const Event& event) {
    const Result result = core.Step(event, now);
    EXPECT_FALSE(result.why.empty());
    std::string out;
    for (const Effect& e : result.effects) {
      absl::StrAppend(&out, out.empty() ? "" : " ", Name(e));
      if (const auto* finish = std::get_if<Finish>(&e)) {
        ++finished;
        status = finish->status;
      }
      if (const auto* part = std::get_if<PutPart>(&e)) failed = part->failed;
      if (const auto* abort = std::get_if<PutAbort>(&e)) marker = abort->reason;
    }
    return out;
  }
  void ToGathering() {
    EXPECT_EQ(Do(SnapshotTaken{7}), "write-shard");
    EXPECT_EQ(Do(ShardWritten{}), "write-index");
  }
  // Rank 0 without others, until the manifest may be put.
  void ToPutting() {
    ToGathering();
    EXPECT_EQ(Do(IndexWritten{}), "put-part");
    EXPECT_EQ(Do(PartPut{}), "authority");
    EXPECT_EQ(Do(AuthorityChecked{}), "put");
  }
  SaveCore core;
  Instant now{1};
  int finished = 0;
  absl::Status status;
  absl::Status failed;  // what the newest part says
  std::string marker;   // what the newest abort marker says
};

TEST(SaveCore, OneRankCommits) {
  Driver d;
  d.ToPutting();
  EXPECT_EQ(d.Do(ManifestPut{}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kThisManifest}), "report retain");
  EXPECT_FALSE(d.core.idle());
  EXPECT_EQ(d.Do(RetentionApplied{}), "finish");
  EXPECT_TRUE(d.status.ok());
  EXPECT_TRUE(d.core.idle());
  EXPECT_EQ(d.Do(SnapshotTaken{8}), "write-shard");
}

TEST(SaveCore, S1_EveryIndexThenAuthorityThenPut_C4) {
  Driver d(0, 3);
  d.ToGathering();
  EXPECT_EQ(d.Do(IndexWritten{}), "poll");
  EXPECT_EQ(d.Do(IndexSeen{2}), "");
  EXPECT_EQ(d.Do(IndexSeen{2}), "");  // the same one again does not count
  EXPECT_EQ(d.Do(IndexSeen{1}), "put-part");
  EXPECT_EQ(d.Do(PartPut{}), "authority");
  EXPECT_EQ(d.Do(AuthorityChecked{absl::UnavailableError("revoked")}), "put-abort");
  EXPECT_EQ(d.Do(AbortPut{}), "finish");
  EXPECT_TRUE(absl::IsUnavailable(d.status));
}

TEST(SaveCore, S1_AnUnsoundIndexGivesUp_C4) {
  Driver d(0, 2);
  d.ToGathering();
  d.Do(IndexWritten{});
  EXPECT_EQ(d.Do(IndexSeen{1, absl::ResourceExhaustedError("disk full")}), "put-abort");
  EXPECT_EQ(d.Do(IndexSeen{1}), "");  // late: changes nothing
  EXPECT_EQ(d.Do(AbortPut{}), "finish");
  EXPECT_THAT(std::string(d.status.message()), HasSubstr("rank 1: disk full"));
}

TEST(SaveCore, S2_NoReportWithoutReadBack_C2) {
  for (KeyHolds holds : {KeyHolds::kAbortMarker, KeyHolds::kOther}) {
    Driver d;
    d.ToPutting();
    EXPECT_EQ(d.Do(ManifestPut{}), "read");
    EXPECT_EQ(d.Do(ManifestRead{holds, "x"}), "finish");
    EXPECT_FALSE(d.status.ok());
  }
  Driver d;
  d.ToPutting();
  d.Do(ManifestPut{});
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kNothing}), "put-abort");  // said OK and is not there
}

TEST(SaveCore, AManifestThatRetentionTookIsNoLieOfTheStorage) {
  for (const bool answered : {true, false}) {
    Driver d;
    d.ToPutting();
    d.Do(ManifestPut{answered ? absl::OkStatus() : absl::UnavailableError("timeout")});
    EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kOutranked, "timeline 2 is newer"}),
              answered ? "finish" : "put-abort");
    if (!answered) d.Do(AbortPut{});
    EXPECT_EQ(d.status.code(), answered ? absl::StatusCode::kAborted : absl::StatusCode::kUnavailable);
  }
}

TEST(SaveCore, S6_ALostAnswerIsNotAFailure_C1) {
  Driver d;
  d.ToPutting();
  EXPECT_EQ(d.Do(ManifestPut{absl::UnavailableError("timeout")}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kUnreadable, "timeout"}), "");
  d.now = *d.core.NextDeadline();
  EXPECT_EQ(d.Do(Tick{}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kThisManifest}), "report retain");
}

TEST(SaveCore, S3_NoPutAfterARevoke_C3) {
  for (int when = 0; when < 5; ++when) {
    Driver d(0, 2);
    std::string effects;
    const auto revoke_at = [&](int place) {
      if (when == place) absl::StrAppend(&effects, " ", d.Do(Revoked{"rank 1 died"}));
    };
    d.Do(SnapshotTaken{7});
    revoke_at(0);
    d.Do(ShardWritten{});
    revoke_at(1);
    absl::StrAppend(&effects, " ", d.Do(IndexWritten{}));
    if (d.core.state() == State::kGathering) revoke_at(2);
    if (d.core.state() == State::kGathering) absl::StrAppend(&effects, " ", d.Do(IndexSeen{1}));
    if (d.core.state() == State::kParting) {
      revoke_at(3);
      absl::StrAppend(&effects, " ", d.Do(PartPut{}));
    }
    if (d.core.state() == State::kAuthorizing) {
      revoke_at(4);
      absl::StrAppend(&effects, " ", d.Do(AuthorityChecked{}));
    }
    EXPECT_EQ(d.core.state(), State::kAborting) << when;
    d.Do(AbortPut{});
    EXPECT_THAT(effects, Not(HasSubstr("put "))) << when;
    EXPECT_TRUE(absl::IsUnavailable(d.status)) << when;
  }
}

TEST(SaveCore, AFollowerLearnsOfTheCommit) {
  Driver d(1, 2);
  d.ToGathering();
  EXPECT_EQ(d.Do(IndexWritten{}), "");
  d.now = *d.core.NextDeadline();
  EXPECT_EQ(d.Do(Tick{}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kNothing}), "");
  EXPECT_EQ(d.Do(Tick{}), "");  // not due yet
  d.now = *d.core.NextDeadline();
  EXPECT_EQ(d.Do(Tick{}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kThisManifest}), "report finish");
  EXPECT_TRUE(d.status.ok());
}

// Each look is a request to the storage, which somebody pays for: not twenty a save.
TEST(SaveCore, AFollowerLooksWhenTheManifestCameLastTime) {
  Driver d(1, 2);
  const auto looks = [&](absl::Duration commit) {
    d.ToGathering();
    d.Do(IndexWritten{});
    const Instant there = d.now + commit;
    for (int n = 1;; ++n) {
      d.now = *d.core.NextDeadline();
      EXPECT_EQ(d.Do(Tick{}), "read");
      if (d.Do(ManifestRead{d.now >= there ? KeyHolds::kThisManifest : KeyHolds::kNothing}) != "") return n;
    }
  };
  EXPECT_GE(looks(absl::Milliseconds(400)), 6);
  EXPECT_LE(looks(absl::Milliseconds(400)), 3);
  EXPECT_EQ(looks(absl::Milliseconds(40)), 1);  // faster than expected: seen at the first look
  EXPECT_LE(looks(absl::Milliseconds(400)), 6);
  int all = 0;
  for (int i = 0; i < 20; ++i) all += looks(absl::Milliseconds(100));
  EXPECT_LE(all, 35);
}

TEST(SaveCore, AFollowerWithoutAShardSaysSoAndEnds) {
  Driver d(1, 2);
  d.Do(SnapshotTaken{7});
  EXPECT_EQ(d.Do(ShardWritten{absl::ResourceExhaustedError("disk full")}), "write-index");
  EXPECT_EQ(d.Do(IndexWritten{}), "finish");
  EXPECT_TRUE(absl::IsResourceExhausted(d.status));
}

// Nobody reads an index that is not there: the others would wait for it until commit_timeout.
TEST(SaveCore, S7_AMemberThatCannotPutItsIndexPutsTheMarker) {
  const absl::Status why = absl::PermissionDeniedError("403");
  struct Case {
    KeyHolds holds;
    const char* effects;
  };
  // kThisManifest: the index had arrived, and rank 0 was first.
  for (const Case c :
       {Case{KeyHolds::kAbortMarker, "finish"}, Case{KeyHolds::kNothing, "finish"},
        Case{KeyHolds::kUnreadable, "finish"}, Case{KeyHolds::kThisManifest, "report finish"}}) {
    Driver d(1, 2);
    d.ToGathering();
    EXPECT_EQ(d.Do(IndexWritten{why}), "put-abort");
    EXPECT_EQ(d.marker, "rank 1: 403");
    EXPECT_EQ(d.Do(AbortPut{}), "read");
    EXPECT_EQ(d.Do(ManifestRead{c.holds, "x"}), c.effects);
    EXPECT_EQ(d.status, c.holds == KeyHolds::kThisManifest ? absl::OkStatus() : why);
    EXPECT_EQ(d.Do(SnapshotTaken{8}), "write-shard");
  }
  Driver d(1, 2);  // neither a shard nor an index
  d.Do(SnapshotTaken{7});
  d.Do(ShardWritten{absl::ResourceExhaustedError("disk full")});
  EXPECT_EQ(d.Do(IndexWritten{why}), "put-abort");
  EXPECT_EQ(d.marker, "rank 1: disk full");
}

TEST(SaveCore, S7_ALeaderThatCannotPutItsPartPutsTheMarker) {
  const absl::Status why = absl::PermissionDeniedError("403");
  for (const bool given_up : {false, true}) {
    Driver d(2, 5, 2);
    d.ToGathering();
    d.Do(IndexWritten{});
    EXPECT_EQ(d.Do(IndexSeen{3, given_up ? absl::AbortedError("disk full") : absl::OkStatus()}), "put-part");
    EXPECT_EQ(d.Do(PartPut{why}), "put-abort");
    EXPECT_EQ(d.marker, given_up ? "rank 2: rank 3: disk full" : "rank 2: 403");
    EXPECT_EQ(d.Do(AbortPut{}), "read");
    EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kAbortMarker, "x"}), "finish");
    EXPECT_EQ(d.status.code(), given_up ? absl::StatusCode::kAborted : absl::StatusCode::kPermissionDenied);
  }
}

TEST(SaveCore, S7_WhoGathersEndsWhenSomebodyGaveTheSaveUp) {
  for (const int rank : {0, 2}) {
    Driver d(rank, 5, 2);
    d.ToGathering();
    EXPECT_EQ(d.Do(IndexWritten{}), "poll");
    for (const KeyHolds other : {KeyHolds::kNothing, KeyHolds::kUnreadable, KeyHolds::kOther})
      EXPECT_EQ(d.Do(ManifestRead{other, "x"}), "");
    EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kAbortMarker, "rank 3: 403"}), "finish");
    EXPECT_TRUE(absl::IsAborted(d.status));
    EXPECT_EQ(std::string(d.status.message()), "step 7 was given up: rank 3: 403");
    EXPECT_EQ(d.Do(IndexSeen{rank + 1}), "");  // late: changes nothing
  }
}

TEST(SaveCore, AStoppedFollowerLooksOnceMore) {
  Driver d(1, 2);
  d.ToGathering();
  d.Do(IndexWritten{});
  EXPECT_EQ(d.Do(Cancelled{}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kNothing}), "finish");
  EXPECT_TRUE(absl::IsCancelled(d.status));
}

TEST(SaveCore, S4_DeadlinesNameWhoIsMissing) {
  Driver d(0, 4);
  d.ToGathering();
  d.Do(IndexWritten{});
  d.Do(IndexSeen{1});
  while (d.finished == 0) {
    ASSERT_TRUE(d.core.NextDeadline());
    d.now = *d.core.NextDeadline();
    if (d.Do(Tick{}) == "put-abort") d.Do(AbortPut{});
    ASSERT_LE(d.now, Instant{1} + absl::Seconds(61));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(d.status));
  EXPECT_THAT(std::string(d.status.message()), HasSubstr("rank 2 and 1 more did not write"));
}

TEST(SaveCore, S4_AFollowerDoesNotWaitForever) {
  Driver d(1, 2);
  d.ToGathering();
  d.Do(IndexWritten{});
  while (d.finished == 0) {
    d.now = *d.core.NextDeadline();
    ASSERT_EQ(d.Do(Tick{}), "read");
    d.Do(ManifestRead{KeyHolds::kNothing});
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(d.status));
  EXPECT_LE(d.now, Instant{1} + absl::Seconds(60));
}

// Rank 0 of five ranks in parts of two.
TEST(SaveCore, S1_TheManifestAwaitsEveryPart) {
  Driver d(0, 5, 2);
  d.ToGathering();
  EXPECT_EQ(d.Do(IndexWritten{}), "poll");
  EXPECT_EQ(d.Do(PartSeen{2}), "");
  EXPECT_EQ(d.Do(PartSeen{2}), "");  // the same one again does not count
  EXPECT_EQ(d.Do(IndexSeen{1}), "put-part");
  EXPECT_EQ(d.Do(PartPut{}), "poll");  // part 1 lacks
  d.now = *d.core.NextDeadline();
  const Result looks = d.core.Step(Tick{}, d.now);
  ASSERT_EQ(looks.effects.size(), 1u);
  EXPECT_TRUE(std::get<PollIndices>(looks.effects[0]).missing.empty());
  EXPECT_EQ(std::get<PollIndices>(looks.effects[0]).parts, std::vector<int>{1});
  EXPECT_EQ(d.Do(PartSeen{1}), "authority");
  EXPECT_EQ(d.Do(AuthorityChecked{}), "put");
}

TEST(SaveCore, S1_APartThatSaysWhyGivesUpAtOnce_C4) {
  for (const bool parting : {false, true}) {
    Driver d(0, 5, 2);
    d.ToGathering();
    d.Do(IndexWritten{});
    const absl::Status why = absl::AbortedError("rank 3: error: disk full");
    if (parting) {
      EXPECT_EQ(d.Do(IndexSeen{1}), "put-part");
      EXPECT_EQ(d.Do(PartSeen{1, why}), "");  // remembered while the call is out
      EXPECT_EQ(d.Do(PartPut{}), "put-abort");
    } else {
      EXPECT_EQ(d.Do(PartSeen{1, why}), "put-abort");
    }
    EXPECT_EQ(d.Do(PartSeen{2}), "");  // late: changes nothing
    EXPECT_EQ(d.Do(AbortPut{}), "finish");
    EXPECT_EQ(d.status, why);
  }
}

TEST(SaveCore, TheLeaderOfAPartPutsItAndFollows) {
  Driver d(2, 5, 2);
  d.ToGathering();
  EXPECT_EQ(d.Do(IndexWritten{}), "poll");
  EXPECT_EQ(d.Do(IndexSeen{3}), "put-part");
  EXPECT_TRUE(d.failed.ok());
  EXPECT_EQ(d.Do(PartPut{}), "");
  d.now = *d.core.NextDeadline();
  EXPECT_EQ(d.Do(Tick{}), "read");
  EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kThisManifest}), "report finish");
  EXPECT_TRUE(d.status.ok());
  Driver alone(4, 5, 2);  // the only rank of the last part
  alone.ToGathering();
  EXPECT_EQ(alone.Do(IndexWritten{}), "put-part");
}

TEST(SaveCore, AMemberFollowsItsLeader) {
  Driver d(3, 5, 2);
  d.ToGathering();
  EXPECT_EQ(d.Do(IndexWritten{}), "");
  EXPECT_EQ(d.core.state(), State::kFollowing);
}

TEST(SaveCore, ALeaderThatCannotGoOnSaysSoInItsPart) {
  const absl::Status full = absl::ResourceExhaustedError("disk full");
  {
    Driver d(2, 5, 2);  // its own shard
    d.Do(SnapshotTaken{7});
    EXPECT_EQ(d.Do(ShardWritten{full}), "write-index");
    EXPECT_EQ(d.Do(IndexWritten{}), "put-part");
    EXPECT_THAT(std::string(d.failed.message()), HasSubstr("rank 2: disk full"));
    EXPECT_EQ(d.Do(PartPut{}), "finish");
    EXPECT_EQ(d.status, full);
  }
  {
    Driver d(2, 5, 2);  // a member's
    d.ToGathering();
    d.Do(IndexWritten{});
    EXPECT_EQ(d.Do(IndexSeen{3, full}), "put-part");
    EXPECT_THAT(std::string(d.failed.message()), HasSubstr("rank 3: disk full"));
    EXPECT_EQ(d.Do(PartPut{}), "finish");
  }
  {
    Driver d(2, 5, 2);  // a member that never comes
    d.ToGathering();
    d.Do(IndexWritten{});
    while (d.failed.ok()) {
      ASSERT_TRUE(d.core.NextDeadline());
      d.now = *d.core.NextDeadline();
      d.Do(Tick{});
    }
    EXPECT_THAT(std::string(d.failed.message()), HasSubstr("rank 3 did not write a shard of step 7"));
    EXPECT_EQ(d.Do(PartPut{}), "finish");
  }
  {
    Driver d(2, 5, 2);  // a stop
    d.ToGathering();
    d.Do(IndexWritten{});
    EXPECT_EQ(d.Do(Cancelled{}), "put-part");
    EXPECT_FALSE(d.failed.ok());
    EXPECT_EQ(d.Do(PartPut{}), "finish");
    EXPECT_TRUE(absl::IsCancelled(d.status));
  }
  {
    Driver d(2, 5, 2);  // a stop while the part is put: the save may be committed with it
    d.ToGathering();
    d.Do(IndexWritten{});
    EXPECT_EQ(d.Do(IndexSeen{3}), "put-part");
    EXPECT_EQ(d.Do(Cancelled{}), "");
    EXPECT_EQ(d.Do(PartPut{}), "read");
    EXPECT_EQ(d.Do(ManifestRead{KeyHolds::kNothing}), "finish");
  }
}

TEST(SaveCore, S4_DeadlinesNameThePartThatIsMissing) {
  Driver d(0, 7, 2);
  d.ToGathering();
  d.Do(IndexWritten{});
  d.Do(IndexSeen{1});
  d.Do(PartPut{});
  d.Do(PartSeen{1});
  while (d.finished == 0) {
    ASSERT_TRUE(d.core.NextDeadline());
    d.now = *d.core.NextDeadline();
    if (d.Do(Tick{}) == "put-abort") d.Do(AbortPut{});
    ASSERT_LE(d.now, Instant{1} + absl::Seconds(61));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(d.status));
  EXPECT_THAT(std::string(d.status.message()),
              HasSubstr("rank 4 did not put the part of ranks 4 to 5 (and 1 more parts) of step 7"));
}

TEST(SaveCore, S5_ASecondSaveIsRefused_C12) {
  Driver d;
  EXPECT_TRUE(d.core.idle());
  d.Do(SnapshotTaken{7});
  EXPECT_FALSE(d.core.idle());
}

// Random answers and stops: the order of effects obeys S1 to S4 whatever happens.
TEST(SaveCore, RandomAnswersKeepTheInvariants) {
  Rng rng(11);
  const auto maybe = [&] { return rng.Chance(0.85) ? absl::OkStatus() : absl::UnavailableError("storage"); };
  for (int round = 0; round < 3000; ++round) {
    const int world = 1 + static_cast<int>(rng.Below(6));
    const int rank = static_cast<int>(rng.Below(world));
    const int part_ranks = 1 + static_cast<int>(rng.Below(3));
    SaveCore core(
        {.rank = rank, .world_size = world, .part_ranks = part_ranks, .commit_timeout = absl::Seconds(5)});
    Instant now{0};
    bool revoked = false, authorized = false, read_back = false;
    std::set<int> indices = {rank}, parts;  // that are sound
    int finishes = 0;
    std::vector<Effect> todo;
    const auto apply = [&](const Event& event) {
      Result result = core.Step(event, now);
      for (Effect& e : result.effects) todo.push_back(std::move(e));
    };
    apply(SnapshotTaken{1});
    for (int turn = 0; finishes == 0; ++turn) {
      ASSERT_LT(turn, 10000);
      now = now + absl::Milliseconds(static_cast<int64_t>(rng.Below(50)));
      if (!revoked && rng.Chance(0.02)) {
        revoked = true;
        apply(Revoked{"test"});
      }
      if (todo.empty()) {
        ASSERT_TRUE(core.NextDeadline());
        now = std::max(now, *core.NextDeadline());
        apply(Tick{});
        continue;
      }
      const Effect effect = todo.front();
      todo.erase(todo.begin());
      if (std::holds_alternative<WriteShard>(effect)) apply(ShardWritten{maybe()});
      if (std::holds_alternative<WriteIndex>(effect)) apply(IndexWritten{maybe()});
      if (const auto* poll = std::get_if<PollIndices>(&effect)) {
        EXPECT_EQ(rank % part_ranks, 0);
        if (rng.Chance(0.02)) {
          apply(ManifestRead{KeyHolds::kAbortMarker, "x"});
          continue;
        }
        for (int missing : poll->parts) {
          if (!rng.Chance(0.4)) continue;
          const absl::Status answer = maybe();
          if (answer.ok()) parts.insert(missing);
          apply(PartSeen{missing, answer});
        }
        for (int missing : poll->missing) {
          if (!rng.Chance(0.4)) continue;
          const absl::Status answer = maybe();
          if (answer.ok()) indices.insert(missing);
          apply(IndexSeen{missing, answer});
        }
      }
      if (const auto* part = std::get_if<PutPart>(&effect)) {
        EXPECT_EQ(rank % part_ranks, 0);
        if (part->failed.ok()) {
          EXPECT_EQ(static_cast<int>(indices.size()), std::min(part_ranks, world - rank));
        }
        const absl::Status answer = maybe();
        if (answer.ok() && part->failed.ok()) parts.insert(rank / part_ranks);
        apply(PartPut{answer});
      }
      if (std::holds_alternative<CheckAuthority>(effect)) {
        const absl::Status answer = maybe();
        authorized = answer.ok() && !revoked;
        apply(AuthorityChecked{answer});
      }
      if (std::holds_alternative<PutManifest>(effect)) {
        EXPECT_TRUE(authorized);
        EXPECT_EQ(rank, 0);
        EXPECT_EQ(static_cast<int>(parts.size()), (world + part_ranks - 1) / part_ranks);
        apply(ManifestPut{maybe()});
      }
      if (std::holds_alternative<ReadManifest>(effect)) {
        const KeyHolds holds = static_cast<KeyHolds>(rng.Below(5));
        read_back |= holds == KeyHolds::kThisManifest;
        apply(ManifestRead{holds, "x"});
      }
      if (std::holds_alternative<PutAbort>(effect)) {
        EXPECT_FALSE(read_back);
        apply(AbortPut{});
      }
      if (std::holds_alternative<ReportCommitted>(effect)) {
        EXPECT_TRUE(read_back);
      }
      if (std::holds_alternative<ApplyRetention>(effect)) {
        EXPECT_TRUE(read_back);
        apply(RetentionApplied{maybe()});
      }
      if (const auto* finish = std::get_if<Finish>(&effect)) {
        ++finishes;
        EXPECT_EQ(finish->status.ok(), read_back);
      }
    }
    EXPECT_TRUE(todo.empty());
    EXPECT_TRUE(core.idle());
  }
}

}  // namespace
}  // namespace gtrain::ckpt::save
