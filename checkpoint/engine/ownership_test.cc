// The owner of a checkpoint directory, and who may take it. Opening for reading takes nothing; opening for
// writing is refused while another owner is at work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/engine/resume.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
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
      // Registers only some of the tensors: an evaluation needs no optimiser.
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

// Both would take the same attempts, so a commit could be made of shards of the two.
TEST_F(EngineTest, OneProgramSavesInADirectoryOnceAtATime) {
  const std::string folder = TestFolder();
  const FakeJob job{.world_size = 2};
  RunRanks(job, [&](FakeSession* session) {
    auto first = OpenRank(job, session, folder);
    ASSERT_TRUE(first.ok()) << first.status();
    const absl::Status second = OpenRank(job, session, folder).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
    EXPECT_THAT(std::string(second.message()), HasSubstr("this program saves in "));
    ASSERT_TRUE(*first->checkpointer->Save(5));
    ASSERT_TRUE(first->checkpointer->Wait(kLong).ok());
    first->checkpointer.reset();
    auto third = OpenRank(job, session, folder);
    ASSERT_TRUE(third.ok()) << third.status();
    ASSERT_TRUE(*third->checkpointer->Save(5)) << "its names are others";
    EXPECT_TRUE(third->checkpointer->Wait(kLong).ok());
  });
}

// Its newest checkpoint may be gone, as the new owner deleted it: that is no file system to be mounted.
TEST_F(EngineTest, WhoLostTheDirectoryIsToldSoAndNotThatItIsNotMounted) {
  const std::string folder = TestFolder();
  FakeJob job;
  ASSERT_TRUE(SaveSteps(job, folder, {5}).ok());
  FakeJob other;
  other.job = "train-2";
  other.resume = "latest";
  ASSERT_TRUE(SaveSteps(other, folder, {6}, 1).ok());
  job.generation = job.timeline = 2;
  job.environment["GTRAIN_CHECKPOINT_NEWEST"] = absl::StrCat(folder, "/", ManifestKey({.step = 5}));
  ASSERT_FALSE(std::filesystem::exists(absl::StrCat(folder, "/", ManifestKey({.step = 5}))));
  RunRanks(job, [&](FakeSession* session) {
    const absl::Status told = OpenRank(job, session, folder).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(told)) << told;
    EXPECT_THAT(std::string(told.message()), HasSubstr("was taken over by job \"train-2\""));
    EXPECT_THAT(session->note(kNoteOwner), HasSubstr("was taken over by"));
  });
}

// Nobody was there, and two come at once: one has the directory, the other hears whose it is.
TEST_F(EngineTest, OfTwoThatOpenAtOnceOneIsRefusedByName) {
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(round);
    const std::string folder = TestFolder();
    StopFlag go, refused;
    std::atomic<int> opened{0}, late{0};
    const auto program = [&] {
      RunRanks(ByHand(), [&](FakeSession* session) {
        ASSERT_TRUE(go.Await(kLong));
        auto rank = OpenRank(ByHand(), session, folder);
        if (!rank.ok()) {
          ++late;
          EXPECT_TRUE(absl::IsFailedPrecondition(rank.status())) << rank.status();
          EXPECT_THAT(
              std::string(rank.status().message()),
              HasSubstr(absl::StrCat("is in use: it belongs to a program that was run by hand, process ",
                                     getpid(), " on host ")));
          return refused.Set();
        }
        if (++opened > 1) refused.Set();
        EXPECT_TRUE(refused.Await(kLong));
        for (const int64_t step : {1, 2}) {
          const auto saved = rank->checkpointer->Save(step);
          ASSERT_TRUE(saved.ok() && *saved) << saved.status();
          EXPECT_EQ(rank->checkpointer->Wait(kLong), absl::OkStatus());
        }
      });
    };
    std::thread one(program), two(program);
    go.Set();
    one.join();
    two.join();
    EXPECT_EQ(opened, 1);
    EXPECT_EQ(late, 1);
    const auto store = *OpenDirectoryStore(folder);
    EXPECT_EQ((*NewestManifest(store.get()))->id.step, 2);
    EXPECT_EQ(ListOwners(store.get())->size(), 1u);
  }
}

// While one watches whether a dead owner lives, another opens the directory, renews its lease and saves.
TEST_F(EngineTest, WhoWatchesADeadOwnerIsRefusedWhenAnotherWasFaster) {
  for (const bool saves : {false, true}) {
    SCOPED_TRACE(saves);
    MemoryStore store;
    const OwnerClaim dead = *ClaimOwnership(&store, {}, 1);
    const LeaseMark mark{.name = {dead.epoch, 7},
                         .holder = {.host = "far-away", .machine = 42, .pid = 1, .started = 1}};
    ASSERT_TRUE(store.PutIfAbsent(LeaseKey(mark.name), Print(mark)).ok());
    const absl::Duration short_time = absl::Milliseconds(20);
    std::unique_ptr<Lease> lease_a, lease_b;
    const auto hold = [&](std::unique_ptr<Lease>* lease, absl::Duration every) {
      return [&store, lease, every](uint64_t epoch, bool fresh) {
        lease->reset();
        *lease = std::make_unique<Lease>(
            &store, epoch, 0, fresh, [](const absl::Status&) {}, every);
        return (*lease)->first();
      };
    };
    std::string taken_from;
    absl::StatusOr<OwnerClaim> b = absl::UnknownError("it has not opened yet");
    const auto open_b = [&] {
      b = TakeDirectory(&store, {}, false, {.patience = short_time}, &taken_from,
                        hold(&lease_b, absl::Milliseconds(5)));
      ASSERT_TRUE(b.ok()) << b.status();
      // The key of its first lease is free again by then.
      const Instant deadline = RealClock().Now() + kLong;
      StopFlag never;
      const LeaseName first{b->epoch, 1};
      while (store.Size(LeaseKey(first)).ok() && RealClock().Now() < deadline)
        (void)never.Await(absl::Milliseconds(1));
      const SaveId id{.epoch = b->epoch, .step = 1};
      const auto marker = Print(AbortMarker{.id = id});
      ASSERT_TRUE(!saves || store.PutIfAbsent(ManifestKey(id), marker).ok());
    };
    const absl::StatusOr<OwnerClaim> a =
        TakeDirectory(&store, {}, false,
                      {.patience = short_time,
                       .alive =
                           [&] {
                             if (lease_b == nullptr) open_b();
                             return absl::OkStatus();
                           }},
                      &taken_from, hold(&lease_a, kLong), [&] { lease_a.reset(); });
    EXPECT_TRUE(absl::IsFailedPrecondition(a.status())) << a.status();
    EXPECT_THAT(std::string(a.status().message()),
                HasSubstr(absl::StrCat("is in use: it belongs to a program that was run by hand, process ",
                                       getpid())));
    EXPECT_EQ(lease_a, nullptr) << "it leaves nothing there";
    ASSERT_TRUE(b.ok());
    EXPECT_EQ(ListOwners(&store)->back(), *b);
    EXPECT_EQ(lease_b->held(), absl::OkStatus());
    EXPECT_NE(*WhoHolds(&store, *b, {}), std::nullopt);
  }
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
  const OwnerClaim claim = *ClaimOwnership(&store, {}, 1);
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

// Two programs that open a directory after one that died there renew the same lease at once: each has its
// own.
TEST(Lease, NeverTakesTheRenewalOfAnotherForItsOwn) {
  MemoryStore memory;
  const OwnerClaim claim = *ClaimOwnership(&memory, {}, 1);
  const LeaseMark theirs{.name = {claim.epoch, 1},
                         .holder = {.host = "far-away", .machine = 42, .pid = 1, .started = 1}};
  FaultyStore store(&memory, {[&](uint64_t, absl::string_view call) {
    const bool now = call == absl::StrCat("PutIfAbsent ", LeaseKey(theirs.name));
    EXPECT_TRUE(!now || memory.PutIfAbsent(LeaseKey(theirs.name), Print(theirs)).ok());
    return Fault::kNone;
  }});
  {
    const Lease lease(&store, claim.epoch, 0, false, [](const absl::Status&) {});
    EXPECT_THAT(*memory.List(kLeasePrefix), ElementsAre(LeaseKey(theirs.name), LeaseKey({claim.epoch, 2})));
  }
  EXPECT_THAT(*memory.List(kLeasePrefix), ElementsAre(LeaseKey(theirs.name)));
}

TEST(Lease, ARenewalWhoseAnswerIsLostIsItsOwn) {
  MemoryStore memory;
  const OwnerClaim claim = *ClaimOwnership(&memory, {}, 1);
  FaultyStore store(&memory, {[&](uint64_t, absl::string_view call) {
                                return absl::StartsWith(call, "PutIfAbsent ") ? Fault::kAfter : Fault::kNone;
                              },
                              absl::AlreadyExistsError("a retransmission found it")});
  {
    const Lease lease(&store, claim.epoch, 0, false, [](const absl::Status&) {});
    EXPECT_THAT(*memory.List(kLeasePrefix), ElementsAre(LeaseKey({claim.epoch, 1})));
  }
  EXPECT_TRUE(memory.List(kLeasePrefix)->empty());
}

// A holder that cannot be asked (another machine) is watched: it lives if its lease moves.
TEST(Lease, OfAnotherMachineIsWatched) {
  MemoryStore store;
  const OwnerClaim claim = *ClaimOwnership(&store, {}, 1);
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
  const OwnerClaim claim = *ClaimOwnership(&store, {}, 1);
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
