// Whose a checkpoint directory is, and who may take it. Opening to look takes nothing; opening to write is
// refused while somebody else is at work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

FakeJob ByHand() {
  return {.job = "", .cluster = "", .job_hash = "", .managed = false, .generation = 0, .timeline = 0};
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Open(const FakeJob& job, FakeSession* session,
                                                   CheckpointOptions options) {
  options.commit_timeout = kLong;
  return OpenCheckpointer(session, options, EnvironmentOf(job), &OpenDirectoryStore);
}

TEST_F(EngineTest, AReadOnlyOpenTakesNothingFromTheTrainer) {
  const std::string folder = TestFolder();
  const FakeJob trainer{.job = "train-1"}, reader{.job = "eval-1", .job_hash = "another"};
  RunRanks(trainer, [&](FakeSession* session) {
    auto rank = OpenRank(trainer, session, folder);
    ASSERT_TRUE(rank.ok());
    Fill(rank->state.get(), State::At(1, 0));
    ASSERT_TRUE(*rank->checkpointer->Save(1));
    ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    const auto before = *(*OpenDirectoryStore(folder))->List("");
    RunRanks(reader, [&](FakeSession* other) {
      auto opened = Open(reader, other, {.uri = folder, .read_only = true});
      ASSERT_TRUE(opened.ok()) << opened.status();
      State state;
      // Only some of what is there: an evaluation needs no optimiser.
      ASSERT_TRUE(
          (*opened)->AddReplicated("large", MemoryOf(&state.large), {700, 1000}, DType::kFloat32).ok());
      const auto restored = (*opened)->Restore();
      ASSERT_TRUE(restored.ok() && restored->has_value()) << restored.status();
      EXPECT_EQ((*restored)->step, 1);
      EXPECT_EQ(state.large, State::At(1, 0).large);
      EXPECT_TRUE(absl::IsFailedPrecondition((*opened)->Save(2).status()));
      EXPECT_TRUE(absl::IsFailedPrecondition((*opened)->SaveIfDue(2, nullptr).status()));
    });
    EXPECT_EQ(*(*OpenDirectoryStore(folder))->List(""), before);
    ASSERT_TRUE(*rank->checkpointer->Save(2));
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
    EXPECT_EQ(rank->checkpointer->LastCommitted(), 2);
  });
}

// Finding 4: a second opening took the directory, and the first trained on and saved nothing.
TEST_F(EngineTest, ASecondOpeningIsRefusedByNameAndDisarmsNobody) {
  const std::string folder = TestFolder();
  RunRanks(ByHand(), [&](FakeSession* session) {
    auto rank = OpenRank(ByHand(), session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    RunRanks(ByHand(), [&](FakeSession* other) {
      const auto second = Open(ByHand(), other, {.uri = folder});
      ASSERT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
      const std::string said(second.status().message());
      EXPECT_THAT(said, HasSubstr("is in use: it belongs to a program that was run by hand, process "));
      EXPECT_THAT(said, HasSubstr(absl::StrCat("process ", getpid(), " on host ")));
      EXPECT_THAT(said, HasSubstr("--takeover"));
    });
    ASSERT_TRUE(*rank->checkpointer->Save(1));
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  RunRanks(ByHand(), [&](FakeSession* session) {  // it has ended: nobody is in the way
    EXPECT_TRUE(Open(ByHand(), session, {.uri = folder}).ok());
  });
}

TEST_F(EngineTest, AJobOfTheSameClusterIsInUseAsLongAsTheHeadSaysSo) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({.job = "train-1"}, folder, {1}).ok());  // between two generations: no lease
  FakeJob second{.job = "train-2", .environment = {{"GTRAIN_LIVE_JOBS", "a-1,train-1"}}};
  RunRanks(second, [&](FakeSession* session) {
    const auto opened = Open(second, session, {.uri = folder});
    EXPECT_TRUE(absl::IsFailedPrecondition(opened.status())) << opened.status();
    EXPECT_THAT(std::string(opened.status().message()), HasSubstr("job \"train-1\""));
  });
  second.environment["GTRAIN_LIVE_JOBS"] = "a-1";
  ExpectRestored(second, folder, 1);
}

TEST_F(EngineTest, WhoLosesTheDirectoryIsToldAtTheNextSave) {
  const std::string folder = TestFolder();
  const FakeJob first{.job = "train-1", .world_size = 2};
  FakeJob second{.job = "train-2",
                 .environment = {{"GTRAIN_TAKEOVER", "1"}, {"GTRAIN_LIVE_JOBS", "train-1"}}};
  std::string lost, taken;
  StopFlag taken_over;
  RunRanks(first, [&](FakeSession* session) {
    auto rank = OpenRank(first, session, folder);
    ASSERT_TRUE(rank.ok());
    ASSERT_TRUE(*rank->checkpointer->Save(1));
    ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    if (session->rank() == 0) {
      RunRanks(second, [&](FakeSession* other) {
        const auto opened = Open(second, other, {.uri = folder});
        EXPECT_TRUE(opened.ok()) << opened.status();
        taken = other->note(kNoteOwner);
      });
      taken_over.Set();
    }
    ASSERT_TRUE(taken_over.Await(kLong));
    // The first save that finds out fails in the background and lets the lease look; one after it says so to
    // the program.
    absl::Status told;
    for (int64_t step = 2; told.ok() && step < 5'000; ++step) {
      told = rank->checkpointer->Save(step).status();
      if (told.ok()) rank->checkpointer->Wait(kLong).IgnoreError();
    }
    EXPECT_TRUE(absl::IsFailedPrecondition(told)) << told;
    EXPECT_THAT(std::string(told.message()), HasSubstr("was taken over by job \"train-2\""));
    const absl::Status due = rank->checkpointer->SaveIfDue(5'001, nullptr).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(due)) << due;
    if (session->rank() == 0) lost = session->note(kNoteOwner);
  });
  EXPECT_THAT(taken, HasSubstr("was taken over from job \"train-1\""));
  EXPECT_THAT(lost, HasSubstr("LOST: "));
  EXPECT_THAT(lost, HasSubstr("train-2"));
  // It never takes the directory back by itself, not even with the flag it was once launched with.
  FakeJob again = first;
  again.world_size = 1;
  again.generation = again.timeline = 2;
  again.environment["GTRAIN_TAKEOVER"] = "1";
  RunRanks(again, [&](FakeSession* session) {
    EXPECT_TRUE(absl::IsFailedPrecondition(Open(again, session, {.uri = folder}).status()));
  });
}

// The generation is over, the job is not: its lease grows old where it lies. Only a program that has ended
// by itself leaves the directory free at once.
TEST_F(EngineTest, AGenerationThatIsRevokedLeavesItsLease) {
  const FakeJob job{.job = "train-1"};
  for (const bool revoked : {false, true}) {
    const std::string folder = TestFolder();
    RunRanks(job, [&](FakeSession* session) {
      auto rank = OpenRank(job, session, folder);
      ASSERT_TRUE(rank.ok()) << rank.status();
      if (revoked) session->Revoke();
    });
    EXPECT_EQ((*OpenDirectoryStore(folder))->List(kLeasePrefix)->size(), revoked ? 1u : 0u);
  }
}

TEST(Lease, IsRenewedAndGoesWithItsHolder) {
  MemoryStore store;
  const OwnerClaim claim = *ClaimOwnership(&store, {}, 0);
  const auto keys = [&] { return *store.List(kLeasePrefix); };
  {
    const Lease lease(
        &store, claim.epoch, 0, true, [](const absl::Status&) {}, absl::Milliseconds(5));
    const std::vector<std::string> first = keys();
    ASSERT_EQ(first.size(), 1u);
    const Instant deadline = RealClock().Now() + kLong;
    StopFlag never;
    while (keys() == first && RealClock().Now() < deadline) (void)never.Await(absl::Milliseconds(1));
    EXPECT_NE(keys(), first);
    const auto holder = WhoHolds(&store, claim, {});
    ASSERT_TRUE(holder.ok() && holder->has_value()) << holder.status();
  }
  EXPECT_EQ(keys().size(), 0u);
  EXPECT_EQ(*WhoHolds(&store, claim, {}), std::nullopt);
}

// A holder that cannot be asked (another machine) is watched: it lives if its lease moves.
TEST(Lease, OfAnotherMachineIsWatched) {
  MemoryStore store;
  const OwnerClaim claim = *ClaimOwnership(&store, {}, 0);
  LeaseMark mark{.name = {claim.epoch, 7},
                 .holder = {.host = "far-away", .machine = 42, .pid = 1, .started = 1}};
  ASSERT_TRUE(store.PutIfAbsent(LeaseKey(mark.name), Print(mark)).ok());
  EXPECT_EQ(*WhoHolds(&store, claim, {.patience = absl::Milliseconds(20)}), std::nullopt);
  StopFlag begun;
  std::thread renews([&] {
    ASSERT_TRUE(begun.Await(kLong));
    ++mark.name.renewal;
    ASSERT_TRUE(store.PutIfAbsent(LeaseKey(mark.name), Print(mark)).ok());
  });
  const auto holder = WhoHolds(&store, claim, {.patience = kLong, .alive = [&] {
                                                 begun.Set();
                                                 return absl::OkStatus();
                                               }});
  renews.join();
  ASSERT_TRUE(holder.ok() && holder->has_value()) << holder.status();
  EXPECT_THAT(**holder, HasSubstr("process 1 on host far-away"));
}

// A process of this machine that is gone holds nothing, whatever its number is used for by now.
TEST(Lease, OfAProcessThatIsGoneIsFree) {
  MemoryStore store;
  const OwnerClaim claim = *ClaimOwnership(&store, {}, 0);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  LeaseMark mark;
  {
    const Lease own(&store, claim.epoch, 0, true, [](const absl::Status&) {});
    const std::string key = (*store.List(kLeasePrefix))[0];
    mark = *ParseLeaseMark(key, *store.Get(key, kLeaseBytesMax));
  }
  mark.holder.pid = static_cast<uint64_t>(child);
  ASSERT_TRUE(store.PutIfAbsent(LeaseKey(mark.name), Print(mark)).ok());
  EXPECT_EQ(*WhoHolds(&store, claim, {.patience = kLong}), std::nullopt);
  // The number of the holder is by now that of a process that lives, and began later.
  ++mark.name.renewal;
  mark.holder.pid = static_cast<uint64_t>(getppid());
  mark.holder.started += 1'000'000'000;
  ASSERT_TRUE(store.PutIfAbsent(LeaseKey(mark.name), Print(mark)).ok());
  EXPECT_EQ(*WhoHolds(&store, claim, {.patience = kLong}), std::nullopt);
}

TEST(Lease, MarksThatNoWriterWouldProduceAreRefused) {
  const LeaseMark mark{.name = {3, 17}, .since = 5, .generation = 2, .holder = {"h", 1, 2, 3, 4}};
  const std::string key = LeaseKey(mark.name), text = Print(mark);
  const auto parsed = ParseLeaseMark(key, text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, mark);
  EXPECT_FALSE(ParseLeaseMark(LeaseKey({3, 18}), text).ok());
  for (size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] ^= 1;
    EXPECT_FALSE(ParseLeaseMark(key, other).ok()) << i;
  }
  for (const char* bad : {"leases/epoch-3.00000017.json", "leases/epoch-00000003.json", "leases/x",
                          "leases/epoch-00000003.00000000.json"})
    EXPECT_FALSE(ParseLeaseKey(bad).has_value()) << bad;
}

}  // namespace
}  // namespace gtrain::ckpt
