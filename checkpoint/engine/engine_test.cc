// The Checkpointer as a training program uses it, over fakes of the session and real or failing storage.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/test_folder.h"
#include "base/unique_fd.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/retain.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

TEST_F(EngineTest, SavesAndRestoresBitIdentical) {
  for (int world : {1, 4}) {
    FakeJob job{.world_size = world};
    const std::string folder = TestFolder();
    ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
    job.generation = 2;
    job.timeline = 2;
    ExpectRestored(job, folder, 20);
  }
  EXPECT_EQ(loud(), "");
}

// A restore takes the highest step, so what a program saves under numbers that begin anew would be lost.
TEST_F(EngineTest, AStepThatFallsIsRefused) {
  const std::string folder = TestFolder();
  const absl::Status status = SaveSteps({.world_size = 2}, folder, {5, 5, 9, 3});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("step 3 cannot be saved behind step 9"));
  std::vector<absl::Status> results(2);
  const FakeJob job{.world_size = 2, .generation = 2};
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    ASSERT_TRUE(rank->checkpointer->Restore().ok());
    results[session->rank()] = rank->checkpointer->Save(8).status();
  });
  for (const absl::Status& each : results)
    EXPECT_THAT(std::string(each.message()), HasSubstr("step 8 cannot be saved behind step 9"));
}

TEST_F(EngineTest, NothingThereIsNotAnError) {
  const std::vector<Restored> all = RestoreAll({.world_size = 2}, TestFolder());
  for (const Restored& r : all) {
    EXPECT_TRUE(r.status.ok()) << r.status;
    EXPECT_FALSE(r.step.has_value());
  }
}

TEST_F(EngineTest, StateMayChangeAsSoonAsSaveReturns_C5) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    Fill(rank->state.get(), State::At(5, session->rank()));
    auto saved = rank->checkpointer->Save(5);
    std::fill(rank->state->large.begin(), rank->state->large.end(), -1.0f);
    std::fill(rank->state->small.begin(), rank->state->small.end(), -1.0f);
    rank->state->counter = -1;
    rank->state->rng.assign(37, '!');
    ASSERT_TRUE(saved.ok() && *saved) << saved.status();
    ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  ExpectRestored(job, folder, 5);
}

TEST_F(EngineTest, AnotherWorldSize_C6) {
  FakeJob job{.world_size = 3};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {10}).ok());
  for (int world : {1, 2, 5}) {
    job.world_size = world;
    const std::vector<Restored> all = RestoreAll(job, folder);
    for (int rank = 0; rank < world; ++rank) {
      ASSERT_TRUE(all[rank].status.ok()) << all[rank].status;
      State expected = State::At(10, rank);
      if (rank >= 3) expected.rng = State().rng;  // it had none: untouched
      EXPECT_TRUE(all[rank].state == expected) << world << " ranks, rank " << rank;
    }
  }
}

// Larger than a few chunks: these are read to where they belong, whatever damage is found there is
// overwritten by the checkpoint before.
TEST_F(EngineTest, LargeTensorsComeBackAndDamageInTheMiddleFallsBack) {
  constexpr int64_t kRows = 13'000, kColumns = 257;  // 13 MiB
  const std::string folder = TestFolder();
  std::string note;  // what people are told of the last restore
  const auto run = [&](int world, const std::function<void(Checkpointer*, std::vector<float>*)>& body) {
    RunRanks({.world_size = world}, [&](FakeSession* session) {
      auto checkpointer = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong},
                                           EnvironmentOf({.world_size = world}), &OpenDirectoryStore);
      ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
      std::vector<float> w(kRows * kColumns);
      ASSERT_TRUE((*checkpointer)->AddReplicated("w", MemoryOf(&w), {kRows, kColumns}, DType::kFloat32).ok());
      body(checkpointer->get(), &w);
      if (session->rank() == 0) note = session->note(kNoteRestore);
    });
  };
  const auto value = [](int64_t step, size_t i) {
    return static_cast<float>(step) + 0.25f * static_cast<float>(i % 9973);
  };
  run(2, [&](Checkpointer* checkpointer, std::vector<float>* w) {
    for (const int64_t step : {10, 20}) {
      for (size_t i = 0; i < w->size(); ++i) (*w)[i] = value(step, i);
      const auto saved = checkpointer->Save(step);
      ASSERT_TRUE(saved.ok() && *saved) << saved.status();
      ASSERT_TRUE(checkpointer->Wait(kLong).ok());
    }
  });
  const auto expect = [&](int64_t step) {
    for (const int world : {1, 3}) {
      run(world, [&](Checkpointer* checkpointer, std::vector<float>* w) {
        const auto restored = checkpointer->Restore();
        ASSERT_TRUE(restored.ok() && restored->has_value()) << restored.status();
        EXPECT_EQ((*restored)->step, step);
        EXPECT_EQ((*restored)->bytes, w->size() * sizeof(float));
        bool same = true;
        for (size_t i = 0; i < w->size(); ++i) same &= (*w)[i] == value(step, i);
        EXPECT_TRUE(same) << world << " ranks";
      });
    }
  };
  expect(20);
  EXPECT_THAT(note, AllOf(HasSubstr("step 20 in "), HasSubstr(" from copies on others"),
                          Not(HasSubstr("passed over"))));
  auto store = *OpenDirectoryStore(folder);
  const SaveId newest = (*ListManifests(store.get()))[0];
  const std::string path = absl::StrCat(folder, "/", AttemptName(newest), "/", ShardName(1, 2));
  const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  char byte;
  ASSERT_EQ(pread(file.get(), &byte, 1, 5 << 20), 1);
  byte = static_cast<char>(byte ^ 4);
  ASSERT_EQ(pwrite(file.get(), &byte, 1, 5 << 20), 1);
  expect(10);
  EXPECT_THAT(loud(), HasSubstr("IS DAMAGED, falling back to the one before"));
  EXPECT_THAT(note, AllOf(HasSubstr("step 10 in "), HasSubstr("; passed over step 20: "),
                          HasSubstr("rank-00001-of-00002.safetensors")));
}

TEST_F(EngineTest, AnAutomaticIntervalSaysWhyItIsWhatItIs) {
  for (const bool automatic : {false, true}) {
    const FakeJob job{.generation = 3};
    const std::string folder = TestFolder();
    RunRanks(job, [&](FakeSession* session) {
      CheckpointOptions options{.uri = folder};
      if (!automatic) options.every_steps = 1;
      auto checkpointer = OpenCheckpointer(session, options, EnvironmentOf(job), &OpenDirectoryStore);
      ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
      State state;
      ASSERT_TRUE(Register(checkpointer->get(), &state).ok());
      for (const int64_t step : {1, 2}) {
        EXPECT_THAT(info(), Not(HasSubstr("saves are due")));  // the first save has nothing to go by
        ASSERT_TRUE((*checkpointer)->Save(step).ok());
        ASSERT_TRUE((*checkpointer)->Wait(kLong).ok());
      }
      EXPECT_EQ(session->policy().empty(), !automatic);
    });
    if (automatic) {
      EXPECT_THAT(info(), HasSubstr("one interruption in 2.7 h is expected (2 seen in "));
    } else {
      EXPECT_THAT(info(), Not(HasSubstr("saves are due")));
    }
  }
}

TEST_F(EngineTest, RetentionKeepsTheNewest) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1, 2, 3, 4, 5}, 2).ok());
  auto store = *OpenDirectoryStore(folder);
  const std::vector<SaveId> ids = *ListManifests(store.get());
  ASSERT_THAT(ids, SizeIs(2));
  EXPECT_EQ(ids[0].step, 5);
  EXPECT_EQ(ids[1].step, 4);
  EXPECT_THAT(*store->ListFolders(),
              ElementsAre("manifests", "owners", AttemptName(ids[1]), AttemptName(ids[0])));
  EXPECT_THAT(*store->ListUnfinished(), IsEmpty());
}

// Each save of a job pays for it, and listing costs an object store most.
TEST_F(EngineTest, ALaterCommitListsManifestsOnly) {
  MemoryStore memory;
  Mutex mu;
  std::vector<std::string> lists;
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(&memory, FaultPlan{[&](uint64_t, absl::string_view call) {
      MutexLock lock(&mu);
      if (absl::StartsWith(call, "List")) lists.emplace_back(call);
      return Fault::kNone;
    }});
  };
  RunRanks({}, [&](FakeSession* session) {
    auto rank = OpenRank({}, session, "x", 2, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    for (int64_t step = 1; step <= 6; ++step) {
      if (step == 3) {
        MutexLock lock(&mu);
        lists.clear();
      }
      // A person keeps one and removes one meanwhile.
      if (step == 4) {
        const std::vector<SaveId> ids = *ListManifests(&memory);
        ASSERT_THAT(ids, SizeIs(2));
        ASSERT_TRUE(Pin(&memory, ids[1]).ok());
        ASSERT_TRUE(RemoveCheckpoint(&memory, ids[0]).ok());
      }
      ASSERT_TRUE(rank->checkpointer->Save(step).ok());
      ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    }
  });
  EXPECT_THAT(lists, Each(AnyOf("ListAll manifests/ owners/", "List pins/")));
  std::vector<int64_t> steps;
  const std::vector<SaveId> left = *ListManifests(&memory);
  for (const SaveId& id : left) steps.push_back(id.step);
  EXPECT_THAT(steps, ElementsAre(6, 5, 2));
  EXPECT_THAT(*memory.ListFolders(), SizeIs(6));  // manifests, owners, pins and those three
}

// A machine that was thought lost may leave something behind later: it is found now and then.
TEST_F(EngineTest, WhatSomebodyElseLeftGoesWithinTwentyCommits) {
  MemoryStore memory;
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(&memory, FaultPlan{});
  };
  const FakeJob job{.generation = 2, .timeline = 2};
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, "x", 1, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    for (int64_t step = 1; step <= 22; ++step) {
      if (step == 2) {
        ASSERT_TRUE(memory.PutIfAbsent(AttemptKey({.epoch = 1}, ShardName(0, 1)), "late").ok());
      }
      ASSERT_TRUE(rank->checkpointer->Save(step).ok());
      ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    }
  });
  EXPECT_THAT(*memory.ListFolders(), SizeIs(3));  // manifests, owners and the last
}

// Retention deletes manifests before shards, so there is no moment at which a crash leaves half a checkpoint.
TEST_F(EngineTest, NoManifestIsEverWithoutItsShards_C1) {
  MemoryStore memory;
  const auto whole = [&](uint64_t, absl::string_view call) {
    const std::vector<SaveId> ids = *ListManifests(&memory);
    for (const SaveId& id : ids) {
      // Another rank's call may be retention's: what is missing counts if the manifest is there after that.
      const auto is_there = [&] { return memory.Size(ManifestKey(id)).ok(); };
      const auto manifest = ReadManifest(&memory, id);
      EXPECT_TRUE(manifest.ok() || !is_there()) << manifest.status();
      if (!manifest.ok()) continue;
      for (const ShardFile& file : std::get<Manifest>(*manifest).files) {
        EXPECT_TRUE(memory.Size(AttemptKey(id, file.name)).ok() || !is_there())
            << "step " << id.step << " before " << call;
      }
    }
    return Fault::kNone;
  };
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(&memory, FaultPlan{whole});
  };
  ASSERT_TRUE(SaveSteps({.world_size = 2}, "x", {1, 2, 3}, 1, factory).ok());
}

TEST_F(EngineTest, NonFiniteStateIsMarkedAndTheLastFiniteOneStays_C14) {
  const FakeJob job;
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 1);
    ASSERT_TRUE(rank.ok()) << rank.status();
    for (int64_t step : {1, 2, 3}) {
      Fill(rank->state.get(), State::At(step, 0));
      if (step > 1)
        rank->state->large[step * 1000] = step == 2 ? std::nanf("") : std::numeric_limits<float>::infinity();
      ASSERT_TRUE(rank->checkpointer->Save(step).ok());
      ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
    }
  });
  auto store = *OpenDirectoryStore(folder);
  const std::vector<SaveId> ids = *ListManifests(store.get());
  // The newest, the one that is finite, and step 2 unless step 3 was read back before the others were looked
  // at.
  ASSERT_THAT(ids, AnyOf(SizeIs(2), SizeIs(3)));
  EXPECT_EQ(ids.front().step, 3);
  EXPECT_FALSE(std::get<Manifest>(*ReadManifest(store.get(), ids.front())).finite());
  EXPECT_EQ(ids.back().step, 1);
  EXPECT_TRUE(std::get<Manifest>(*ReadManifest(store.get(), ids.back())).finite());

  // A program that resumes from it gets a warning that says what to do.
  std::string note;
  const FakeJob next{.world_size = job.world_size, .generation = job.generation + 1};
  RunRanks(next, [&](FakeSession* session) {
    auto rank = OpenRank(next, session, folder, 1);
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto restored = rank->checkpointer->Restore();
    ASSERT_TRUE(restored.ok() && *restored) << restored.status();
    EXPECT_EQ((**restored).step, 3);
    note = session->note(kNoteRestore);
  });
  EXPECT_THAT(
      note, testing::EndsWith("; step 3 holds NaN or infinity; the newest finite one is step 1: --resume 1"));
}

TEST(AllFinite, EveryType) {
  const float f[] = {1.0f, -std::numeric_limits<float>::infinity()};
  const double d[] = {1.0, std::nan("")};
  const uint16_t half[] = {0x3c00, 0x7c01}, brain[] = {0x3f80, 0x7f80};
  const auto view = [](const void* p, size_t n) { return absl::string_view(static_cast<const char*>(p), n); };
  EXPECT_TRUE(AllFinite(view(f, 4), DType::kFloat32));
  EXPECT_FALSE(AllFinite(view(f, 8), DType::kFloat32));
  EXPECT_TRUE(AllFinite(view(d, 8), DType::kFloat64));
  EXPECT_FALSE(AllFinite(view(d, 16), DType::kFloat64));
  EXPECT_TRUE(AllFinite(view(half, 2), DType::kFloat16));
  EXPECT_FALSE(AllFinite(view(half, 4), DType::kFloat16));
  EXPECT_TRUE(AllFinite(view(brain, 2), DType::kBFloat16));
  EXPECT_FALSE(AllFinite(view(brain, 4), DType::kBFloat16));
  const float complex[] = {1.0f, 2.0f, 3.0f, std::nanf("")};
  EXPECT_TRUE(AllFinite(view(complex, 8), DType::kComplex64));
  EXPECT_FALSE(AllFinite(view(complex, 16), DType::kComplex64));
  // E5M2 is finite up to 0x7b; E4M3 has no infinity and one NaN of each sign.
  EXPECT_TRUE(AllFinite("\x7b\xfb\x01", DType::kFloat8E5M2));
  for (const char* bad : {"\x7c", "\xfc", "\x7d", "\xff"}) EXPECT_FALSE(AllFinite(bad, DType::kFloat8E5M2));
  EXPECT_TRUE(AllFinite("\x7c\xfc\x7e\xfe", DType::kFloat8E4M3));
  for (const char* bad : {"\x7f", "\xff"}) EXPECT_FALSE(AllFinite(bad, DType::kFloat8E4M3));
  for (DType integer : {DType::kInt32, DType::kInt64, DType::kUint8, DType::kBool, DType::kInt8,
                        DType::kInt16, DType::kUint16, DType::kUint32, DType::kUint64})
    EXPECT_TRUE(AllFinite(view("\xff\xff\xff\xff\xff\xff\xff\xff", 8), integer));
}

// --- failure at any call (crash_test.cc: the end of the program at any call)

// One call fails: the save fails or succeeds, says which, and the next one works.
TEST_F(EngineTest, EveryStorageCallOfASaveFailing_C1) {
  for (Fault kind : {Fault::kBefore, Fault::kAfter}) {
    for (uint64_t at = 0;; ++at) {
      ASSERT_LT(at, 100u);
      const FakeJob job;
      MemoryStore memory;
      bool armed = false;
      uint64_t calls = 0;
      bool hit = false;
      const StoreFactory factory =
          [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
        return std::make_unique<FaultyStore>(&memory, FaultPlan{[&](uint64_t, absl::string_view) {
          if (!armed || calls++ != at) return Fault::kNone;
          hit = true;
          return kind;
        }});
      };
      RunRanks(job, [&](FakeSession* session) {
        auto rank = OpenRank(job, session, "x", 1, factory);
        ASSERT_TRUE(rank.ok()) << rank.status();
        Fill(rank->state.get(), State::At(1, 0));
        ASSERT_TRUE(rank->checkpointer->Save(1).ok());
        ASSERT_TRUE(rank->checkpointer->Wait(kLong).ok());
        armed = true;
        Fill(rank->state.get(), State::At(2, 0));
        ASSERT_TRUE(rank->checkpointer->Save(2).ok());
        const absl::Status saved = rank->checkpointer->Wait(kLong);
        armed = false;
        Fill(rank->state.get(), State());
        auto restored = rank->checkpointer->Restore();
        ASSERT_TRUE(restored.ok()) << restored.status();
        EXPECT_EQ((*restored)->step, saved.ok() ? 2 : 1) << "call " << at << ": " << saved;
        EXPECT_TRUE(*rank->state == State::At((*restored)->step, 0));
        Fill(rank->state.get(), State::At(3, 0));
        ASSERT_TRUE(rank->checkpointer->Save(3).ok());
        EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
      });
      if (!hit) break;
    }
  }
}

// --- damage

std::vector<std::string> FilesOf(const std::string& folder, int64_t step) {
  auto store = *OpenDirectoryStore(folder);
  std::vector<std::string> out;
  const std::vector<std::string> keys = *store->List("");
  for (const std::string& key : keys) {
    if (absl::StrContains(key, absl::StrCat("step-00000000000", step)) &&
        !absl::EndsWith(key, "index.json")) {
      out.push_back(absl::StrCat(folder, "/", key));
    }
  }
  return out;
}

TEST_F(EngineTest, DamageToAnyFileFallsBackLoudly_C4_C9) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1, 2}).ok());
  const std::vector<std::string> files = FilesOf(folder, 2);
  ASSERT_THAT(files, SizeIs(3));
  for (const std::string& path : files) {
    const std::string good = *ReadFile(path, 64 << 20);
    std::string flipped = good, header = good;
    flipped[good.size() - 30] = static_cast<char>(flipped[good.size() - 30] ^ 1);
    header[9] = static_cast<char>(header[9] ^ 1);
    for (const std::string& bad :
         {flipped, header, good.substr(0, good.size() - 1), good + "x", std::string()}) {
      ASSERT_TRUE(WriteFileDurable(path, bad).ok());
      loud_.clear();
      ExpectRestored(job, folder, 1);
      EXPECT_THAT(loud(), HasSubstr("falling back to the one before"));
    }
    ASSERT_EQ(unlink(path.c_str()), 0);
    // Without its manifest a checkpoint does not exist: nothing to be loud about.
    ExpectRestored(job, folder, 1);
    ASSERT_TRUE(WriteFileDurable(path, good).ok());
    ExpectRestored(job, folder, 2);
  }
}

TEST_F(EngineTest, WhenNothingIsIntactItIsAnErrorNotAFreshStart_C9) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1}).ok());
  ASSERT_EQ(unlink(FilesOf(folder, 1).back().c_str()), 0);
  for (const Restored& r : RestoreAll(job, folder)) {
    EXPECT_TRUE(absl::IsDataLoss(r.status)) << r.status;
    EXPECT_TRUE(r.state == State()) << "memory was touched before everything was verified";
  }
}

// A late commit of the generation before deletes, for something newer, what a restart has just chosen (C3).
// It was in no list yet, so the restart looks again rather than go further back or find nothing whole.
TEST_F(EngineTest, WhatIsReplacedWhileItIsReadIsLookedForAgain_C3) {
  // A second rank would wait long for the manifest to become visible.
  for (const auto& [moment, world] : {std::pair("Get manifests/", 2), std::pair("Read ", 1)}) {
    MemoryStore memory;
    FakeJob job{.world_size = world};
    const StoreFactory plain = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(
          &memory, FaultPlan{[](uint64_t, absl::string_view) { return Fault::kNone; }});
    };
    ASSERT_TRUE(SaveSteps(job, "x", {1, 2}, 2, plain).ok());
    const std::vector<SaveId> ids = *ListManifests(&memory);
    const std::string newest = *memory.Get(ManifestKey(ids[0]), 1 << 20);
    ASSERT_TRUE(memory.Delete(ManifestKey(ids[0])).ok());
    std::atomic<bool> replaced = false;
    const auto replace = [&, moment = moment](uint64_t, absl::string_view call) {
      if (!absl::StartsWith(call, moment) || replaced.exchange(true)) return Fault::kNone;
      EXPECT_TRUE(memory.PutIfAbsent(ManifestKey(ids[0]), newest).ok());
      EXPECT_TRUE(DeletePlanned(&memory, {.manifests = {ids[1]}, .folders = {ids[1]}}).ok());
      return Fault::kNone;
    };
    job.generation = job.timeline = 2;
    const std::vector<Restored> all =
        RestoreAll(job, "x", [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
          return std::make_unique<FaultyStore>(&memory, FaultPlan{replace});
        });
    EXPECT_TRUE(replaced) << moment;
    for (const Restored& r : all) {
      ASSERT_TRUE(r.status.ok()) << moment << ": " << r.status;
      ASSERT_TRUE(r.step.has_value());
      EXPECT_EQ(r.step->step, 2);
    }
  }
}

TEST_F(EngineTest, AProgramThatDoesNotFitIsRefused_C4) {
  const FakeJob job;
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1}).ok());
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    std::vector<float> adam(10);
    ASSERT_TRUE(rank->checkpointer->AddReplicated("adam.m", MemoryOf(&adam), {10}, DType::kFloat32).ok());
    const auto restored = rank->checkpointer->Restore();
    EXPECT_TRUE(absl::IsFailedPrecondition(restored.status()));
    EXPECT_THAT(std::string(restored.status().message()), HasSubstr("\"adam.m\" is not in it"));
  });
}

// --- who may commit

TEST_F(EngineTest, ARevokedGenerationNeverCommits_C3) {
  FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1}).ok());
  job.generation = 2;
  std::vector<absl::Status> results(2);
  std::atomic<bool> revoked{false};
  RunRanks(job, [&](FakeSession* session) {
    const bool slow = session->rank() == 1;
    const StoreFactory factory =
        [&](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      GT_ASSIGN_OR_RETURN(auto base, OpenDirectoryStore(path));
      // Leaks are none: the process of the test owns both until the rank is done.
      static std::vector<std::unique_ptr<port::BlobStore>> bases;
      static Mutex mu;
      port::BlobStore* raw = base.get();
      MutexLock lock(&mu);
      bases.push_back(std::move(base));
      return std::make_unique<FaultyStore>(
          raw, FaultPlan{[&, slow](uint64_t, absl::string_view name) {
            // Rank 1 writes its shard only after the revoke.
            while (slow && absl::StrContains(name, "PutIfAbsent step-") && !revoked) {
              std::this_thread::yield();
            }
            return Fault::kNone;
          }});
    };
    auto rank = OpenRank(job, session, folder, 3, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    Fill(rank->state.get(), State::At(2, session->rank()));
    ASSERT_TRUE(rank->checkpointer->Save(2).ok());
    session->Revoke();
    if (session->rank() == 0) {
      results[0] = rank->checkpointer->Wait(kLong);
      revoked = true;
    } else {
      results[1] = rank->checkpointer->Wait(kLong);
    }
    EXPECT_TRUE(absl::IsUnavailable(rank->checkpointer->Save(3).status()));
    EXPECT_THAT(session->reported(), IsEmpty());
  });
  EXPECT_TRUE(absl::IsUnavailable(results[0])) << results[0];
  EXPECT_FALSE(results[1].ok());
  job.generation = job.timeline = 3;
  ExpectRestored(job, folder, 1);
}

// The generation is asked for last, so even a revoke that comes while owners are looked for is seen.
TEST_F(EngineTest, ARevokeJustBeforeThePutIsSeen_C3) {
  MemoryStore memory;
  RunRanks({}, [&](FakeSession* session) {
    bool saving = false;
    const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(&memory, FaultPlan{[&](uint64_t, absl::string_view name) {
        if (saving && name == "ListAll manifests/ owners/") session->Revoke();
        return Fault::kNone;
      }});
    };
    auto rank = OpenRank({}, session, "x", 3, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    saving = true;
    ASSERT_TRUE(rank->checkpointer->Save(1).ok());
    EXPECT_TRUE(absl::IsUnavailable(rank->checkpointer->Wait(kLong)));
    EXPECT_FALSE(session->Alive().ok()) << "owners were never looked for";
    EXPECT_THAT(session->reported(), IsEmpty());
  });
}

TEST_F(EngineTest, ALateCommitOfAnOldTimelineDoesNotWin_C3) {
  FakeJob zombie{.generation = 1, .timeline = 1};
  FakeJob resumed{.generation = 2, .timeline = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(zombie, folder, {100}).ok());
  ASSERT_TRUE(SaveSteps(resumed, folder, {110}).ok());
  ASSERT_TRUE(SaveSteps(zombie, folder, {200}).ok());
  resumed.generation = resumed.timeline = 3;
  ExpectRestored(resumed, folder, 110);
}

// The life after it may clean up between its put and its look: nothing lied, and the user is told so.
TEST_F(EngineTest, ALateCommitThatRetentionTakesSaysSo_C3) {
  MemoryStore memory;
  FakeJob zombie{.world_size = 1, .generation = 1, .timeline = 1};
  FakeJob resumed{.world_size = 1, .generation = 2, .timeline = 2};
  bool taken = false;
  const auto retain = [&](uint64_t, absl::string_view call) {
    const auto ids = ListManifests(&memory);
    if (taken || !absl::StartsWith(call, "Get manifests/") || (*ids).empty()) return Fault::kNone;
    if ((*ids).back().timeline != 1) return Fault::kNone;
    taken = true;
    EXPECT_TRUE(DeletePlanned(&memory, {.manifests = {(*ids).back()}, .folders = {(*ids).back()}}).ok());
    return Fault::kNone;
  };
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    return std::make_unique<FaultyStore>(&memory, FaultPlan{retain});
  };
  ASSERT_TRUE(SaveSteps(resumed, "x", {110}, 3, factory).ok());
  const absl::Status late = SaveSteps(zombie, "x", {200}, 3, factory);
  EXPECT_TRUE(taken);
  EXPECT_TRUE(absl::IsAborted(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("retention removed it"));
}

TEST_F(EngineTest, ASaveIsSkippedWhileAMachineHasNoMemoryForIt_C12) {
  const std::string folder = TestFolder();
  FakeJob job{.world_size = 2};
  job.node = "node-a";
  job.environment["GTRAIN_CHECKPOINT_MEMORY_MAX"] = "2000000";
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    for (const int64_t step : {1, 2}) {
      const auto saved = rank->checkpointer->Save(step);
      ASSERT_TRUE(saved.ok()) << saved.status();
      EXPECT_FALSE(*saved);
    }
  });
  EXPECT_THAT(loud(),
              ContainsRegex("rank 0: the copies of the state of the 2 ranks on this machine need 2[.].MiB, "
                            "and checkpoint[.]memory_max allows 1[.]9MiB"));
  EXPECT_THAT(loud(), HasSubstr("step 2 is not saved, a machine has no memory for a copy of the state (see "
                                "checkpoint.memory_max) (2 skipped "
                                "so far)"));
  job.environment["GTRAIN_CHECKPOINT_MEMORY_MAX"] = "6000000";
  EXPECT_TRUE(SaveSteps(job, folder, {3}).ok());
}

TEST_F(EngineTest, ASaveIsSkippedWhileThePreviousIsWritten_C12) {
  const FakeJob job{.world_size = 2};
  MemoryStore memory;
  std::atomic<bool> open{false};
  std::atomic<int> skipped{0}, waited{0}, committed{0};
  RunRanks(job, [&](FakeSession* session) {
    const bool slow = session->rank() == 1;
    const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(&memory, FaultPlan{[&, slow](uint64_t, absl::string_view name) {
        while (slow && absl::StrContains(name, "PutIfAbsent step-") && !open) {
          std::this_thread::yield();
        }
        return Fault::kNone;
      }});
    };
    auto rank = OpenRank(job, session, "x", 3, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    Fill(rank->state.get(), State::At(1, session->rank()));
    auto first = rank->checkpointer->Save(1);
    ASSERT_TRUE(first.ok() && *first);
    for (int64_t step : {2, 3}) {
      auto again = rank->checkpointer->Save(step);
      ASSERT_TRUE(again.ok()) << again.status();
      if (!*again) ++skipped;
    }
    EXPECT_TRUE(absl::IsDeadlineExceeded(rank->checkpointer->Wait(absl::Milliseconds(1))));
    ++waited;
    while (slow && waited < 2) std::this_thread::yield();
    if (slow) open = true;
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
    if (rank->checkpointer->LastCommitted() == 1) ++committed;
  });
  EXPECT_EQ(skipped, 4);  // both ranks, both times: never one without the other
  EXPECT_EQ(committed, 2);
  EXPECT_THAT(loud(), HasSubstr("2 skipped so far"));
}

TEST_F(EngineTest, ARankThatCannotWriteEndsTheSaveForAll) {
  const FakeJob job{.world_size = 2};
  MemoryStore memory;
  RunRanks(job, [&](FakeSession* session) {
    const bool bad = session->rank() == 1;
    const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(&memory, FaultPlan{[bad](uint64_t, absl::string_view name) {
        return bad && absl::EndsWith(name, "safetensors") ? Fault::kBefore : Fault::kNone;
      }});
    };
    auto rank = OpenRank(job, session, "x", 3, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    ASSERT_TRUE(rank->checkpointer->Save(1).ok());
    const absl::Status result = rank->checkpointer->Wait(kLong);
    EXPECT_FALSE(result.ok());
    EXPECT_THAT(std::string(result.message()), HasSubstr("injected fault"));
    auto restored = rank->checkpointer->Restore();
    EXPECT_TRUE(restored.ok() && !restored->has_value()) << restored.status();
  });
}

// --- identity and resume

TEST_F(EngineTest, ADifferentJobIsRefusedAndShown) {
  const std::string folder = TestFolder();
  FakeJob first{.job = "mnist-1", .world_size = 2, .generation = 7, .timeline = 4};
  ASSERT_TRUE(SaveSteps(first, folder, {10}).ok());
  FakeJob other{.job = "mnist-2", .job_hash = "hash-b", .world_size = 2};
  for (uint64_t generation : {1, 2}) {  // a restart of the refused job is refused as well
    other.generation = generation;
    for (const Restored& r : RestoreAll(other, folder)) {
      EXPECT_TRUE(absl::IsFailedPrecondition(r.status)) << r.status;
      EXPECT_THAT(std::string(r.status.message()), HasSubstr("hash-a"));
      EXPECT_THAT(std::string(r.status.message()), HasSubstr("hash-b"));
      EXPECT_THAT(std::string(r.status.message()), HasSubstr("--fresh"));
    }
  }
  other.resume = "latest";
  ExpectRestored(other, folder, 10);
  FakeJob same{.job = "mnist-3", .world_size = 2};
  ExpectRestored(same, folder, 10);
}

TEST_F(EngineTest, FreshIgnoresTheOldAndRecoversItsOwn) {
  const std::string folder = TestFolder();
  FakeJob first{.job = "mnist-1", .generation = 7, .timeline = 4};
  ASSERT_TRUE(SaveSteps(first, folder, {900}).ok());
  FakeJob fresh{.job = "mnist-2", .job_hash = "hash-b", .resume = "fresh"};
  EXPECT_FALSE(RestoreAll(fresh, folder)[0].step.has_value());
  fresh.generation = fresh.timeline = 2;  // failed before its first commit
  EXPECT_FALSE(RestoreAll(fresh, folder)[0].step.has_value());
  ASSERT_TRUE(SaveSteps(fresh, folder, {5}).ok());
  fresh.generation = fresh.timeline = 3;
  ExpectRestored(fresh, folder, 5);
  // A later launch of the same file continues from the newest owner, not from the highest step.
  FakeJob next{.job = "mnist-3", .job_hash = "hash-b"};
  ExpectRestored(next, folder, 5);
}

TEST_F(EngineTest, FreshSaysWhatItIgnores) {
  const std::string folder = TestFolder();
  const auto told = [&](const FakeJob& job) {
    std::string note;
    RunRanks(job, [&](FakeSession* session) {
      auto rank = OpenRank(job, session, folder, 1);
      ASSERT_TRUE(rank.ok()) << rank.status();
      const auto restored = rank->checkpointer->Restore();
      ASSERT_TRUE(restored.ok()) << restored.status();
      EXPECT_FALSE(restored->has_value());
      note = session->note(kNoteRestore);
    });
    return note;
  };
  EXPECT_THAT(told({.job = "mnist-1", .resume = "fresh"}),
              testing::StartsWith("nothing: no checkpoint is in "));
  ASSERT_TRUE(SaveSteps({.job = "mnist-2"}, folder, {1, 2}).ok());
  EXPECT_THAT(told({.job = "mnist-3", .resume = "fresh"}),
              AllOf(HasSubstr("nothing: --fresh was given, and the 2 checkpoints that are in "),
                    testing::EndsWith(" are ignored, so training begins anew")));
}

TEST_F(EngineTest, ANewLaunchOfTheSameFileOutranksTheOldOne) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({.job = "mnist-1", .generation = 9, .timeline = 9}, folder, {100}).ok());
  FakeJob next{.job = "mnist-2"};  // timelines are counted per job: this is timeline 1 again
  ExpectRestored(next, folder, 100);
  ASSERT_TRUE(SaveSteps(next, folder, {110}).ok());
  next.generation = next.timeline = 2;
  ExpectRestored(next, folder, 110);
}

TEST_F(EngineTest, TheOldOwnerCommitsNothingMore) {
  const std::string folder = TestFolder();
  const FakeJob old{.job = "mnist-1"};
  ASSERT_TRUE(SaveSteps(old, folder, {100}).ok());
  ASSERT_TRUE(SaveSteps({.job = "mnist-2"}, folder, {110}).ok());
  const absl::Status late = SaveSteps(old, folder, {120});
  EXPECT_TRUE(absl::IsFailedPrecondition(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("was taken over by job \"mnist-2\""));
  EXPECT_THAT(std::string(late.message()), HasSubstr("--takeover"));
}

TEST_F(EngineTest, ResumeFromAStepOrAUri) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({.job = "a-1"}, folder, {10, 20, 30}).ok());
  FakeJob job{.job = "a-2", .job_hash = "other", .resume = "20"};
  ExpectRestored(job, folder, 20);
  job.resume = "25";
  job.job = "a-3";
  EXPECT_TRUE(absl::IsNotFound(RestoreAll(job, folder)[0].status));

  const std::string elsewhere = TestFolder();
  job.job = "a-4";
  job.world_size = 2;
  job.resume = "file://" + folder;
  std::vector<Restored> all = RestoreAll(job, elsewhere);
  ASSERT_TRUE(all[1].status.ok()) << all[1].status;
  EXPECT_EQ(all[1].step->step, 30);
  auto store = *OpenDirectoryStore(folder);
  job.resume = absl::StrCat(folder, "/", ManifestKey((*ListManifests(store.get()))[1]));
  all = RestoreAll(job, elsewhere);
  ASSERT_TRUE(all[1].status.ok()) << all[1].status;
  EXPECT_EQ(all[1].step->step, 20);
  ASSERT_TRUE(SaveSteps(job, elsewhere, {21}).ok());
  job.generation = job.timeline = 2;
  ExpectRestored(job, elsewhere, 21);  // recovery inside the run
}

TEST_F(EngineTest, RunByHandTwice) {
  const std::string folder = TestFolder();
  const FakeJob job{
      .job = "", .cluster = "", .job_hash = "", .managed = false, .generation = 0, .timeline = 0};
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  ExpectRestored(job, folder, 20);
  ASSERT_TRUE(SaveSteps(job, folder, {20, 20}).ok());  // the same names are never taken twice
  ExpectRestored(job, folder, 20);
}

TEST_F(EngineTest, ADirectoryThatIsNotSharedIsRefused) {
  const FakeJob job{.world_size = 2};
  MemoryStore stores[2];
  RunRanks(job, [&](FakeSession* session) {
    if (session->rank() == 1) session->Revoke();  // so that it does not wait for NFS
    const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return std::make_unique<FaultyStore>(&stores[session->rank()], FaultPlan{});
    };
    const auto rank = OpenRank(job, session, "x", 3, factory);
    ASSERT_FALSE(rank.ok());
    if (session->rank() == 0) {
      EXPECT_THAT(std::string(rank.status().message()), HasSubstr("is not shared: rank 1 cannot see"));
    }
  });
}

// --- the calls themselves

TEST_F(EngineTest, MisuseIsAnError) {
  const FakeJob job;
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    Checkpointer* c = rank->checkpointer.get();
    float x = 0;
    EXPECT_TRUE(absl::IsAlreadyExists(c->AddReplicated("small", {&x, sizeof x}, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsAlreadyExists(c->AddPerRank("small", {&x, 4})));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("", {&x, sizeof x}, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("a\nb", {&x, sizeof x}, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("w[0:5]", {&x, sizeof x}, {1}, DType::kFloat32)));
    EXPECT_TRUE(
        absl::IsInvalidArgument(c->AddReplicated("__metadata__", {&x, sizeof x}, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("n", {nullptr, 4}, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("n", {&x, sizeof x}, {-1}, DType::kFloat32)));
    EXPECT_TRUE(c->AddReplicated("empty", {}, {0, 3}, DType::kFloat32).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(c->Save(-1).status()));
    EXPECT_TRUE(c->Wait(kLong).ok());
    EXPECT_EQ(c->LastCommitted(), std::nullopt);
    ASSERT_TRUE(c->Save(0).ok());
    EXPECT_TRUE(absl::IsFailedPrecondition(c->AddPerRank("late", {&x, 4})));
    EXPECT_TRUE(c->Wait(kLong).ok());
    EXPECT_EQ(c->LastCommitted(), 0);
  });
}

TEST_F(EngineTest, RanksThatDisagreeAreTold) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    const auto saved = rank->checkpointer->Save(5 + session->rank());
    EXPECT_TRUE(absl::IsFailedPrecondition(saved.status()));
    EXPECT_THAT(std::string(saved.status().message()), HasSubstr("from 5 to 6"));
  });
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    float x = 0;
    ASSERT_TRUE(rank->checkpointer
                    ->AddReplicated(session->rank() == 0 ? "x" : "y", {&x, sizeof x}, {1}, DType::kFloat32)
                    .ok());
    EXPECT_THAT(std::string(rank->checkpointer->Restore().status().message()),
                HasSubstr("rank 1 registered other"));
  });
}

TEST_F(EngineTest, SaveIfDueFollowsThePolicy) {
  const FakeJob job{.world_size = 2};
  RunRanks(job, [&](FakeSession* session) {
    const auto environment = [](const char* name) -> std::optional<std::string> {
      if (absl::string_view(name) == "GTRAIN_CHECKPOINT_EVERY") return "3 steps";
      return std::nullopt;
    };
    static const std::string folder = TestFolder();
    auto c =
        OpenCheckpointer(session, {.uri = folder, .every = absl::Hours(1)}, environment, &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    std::vector<int64_t> saved;
    for (int64_t step = 0; step <= 7; ++step) {
      auto due = (*c)->SaveIfDue(step, nullptr);
      ASSERT_TRUE(due.ok()) << due.status();
      if (*due) saved.push_back(step);
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    }
    EXPECT_THAT(saved, ElementsAre(3, 6));
  });
  RunRanks(job, [&](FakeSession* session) {
    static const std::string folder = TestFolder();
    // Rank 0's clock decides; rank 1 alone would never save.
    const absl::Duration every = session->rank() == 0 ? absl::Nanoseconds(1) : absl::Hours(1);
    auto c =
        OpenCheckpointer(session, {.uri = folder, .every = every}, EnvironmentOf(job), &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    auto due = (*c)->SaveIfDue(1, nullptr);
    ASSERT_TRUE(due.ok()) << due.status();
    EXPECT_TRUE(*due);
    EXPECT_TRUE((*c)->Wait(kLong).ok());
  });
}

TEST_F(EngineTest, ANoticeSavesOnceAndAtOnce_C13) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto c = OpenCheckpointer(session, {.uri = folder, .every_steps = 100}, EnvironmentOf(job),
                              &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    std::vector<int64_t> saved;
    for (int64_t step = 1; step <= 8; ++step) {
      // Rank 1 hears of it a step earlier than rank 0, which decides; it is taken back and comes again.
      const int64_t heard = session->rank() == 0 ? 3 : 2;
      const bool there = (step >= heard && step < 5) || step >= 6;
      session->Notice(there ? std::optional(absl::Seconds(100)) : std::nullopt);
      auto due = (*c)->SaveIfDue(step, nullptr);
      ASSERT_TRUE(due.ok()) << due.status();
      if (*due) saved.push_back(step);
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    }
    EXPECT_THAT(saved, ElementsAre(3, 6));
  });
}

TEST_F(EngineTest, AStopIsWhatRank0HasHeardAndSavesOnce) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto c = OpenCheckpointer(session, {.uri = folder, .every_steps = 100}, EnvironmentOf(job),
                              &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    for (int64_t step = 1; step <= 4; ++step) {
      if (step == (session->rank() == 0 ? 3 : 2)) session->RequestStop();
      auto due = (*c)->SaveIfDue(step, nullptr);
      ASSERT_TRUE(due.ok()) << due.status();
      EXPECT_EQ(*due, step == 3) << step;
      EXPECT_EQ((*c)->stop_agreed(), step >= 3) << step;
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    }
  });
}

// A second save is made where SaveIfDue did not save the step last, or Restore has brought another state.
TEST_F(EngineTest, ASaveOfTheStepThatSaveIfDueSavedIsOneCommit) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  const auto commits = [&] { return ListManifests(OpenDirectoryStore(folder)->get())->size(); };
  RunRanks(job, [&](FakeSession* session) {
    auto c = OpenCheckpointer(session, {.uri = folder, .keep = 100, .every_steps = 2}, EnvironmentOf(job),
                              &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    ASSERT_TRUE(*(*c)->SaveIfDue(2, nullptr));
    EXPECT_TRUE(*(*c)->Save(2));  // whether it is committed already or not
    ASSERT_TRUE((*c)->Wait(kLong).ok());
    EXPECT_TRUE(*(*c)->Save(2));
    ASSERT_TRUE((*c)->Wait(kLong).ok());
    if (session->rank() == 0) {
      EXPECT_EQ(commits(), 1);
    }
    ASSERT_TRUE((*c)->Restore().ok());
    EXPECT_TRUE(*(*c)->Save(2));
    ASSERT_TRUE((*c)->Wait(kLong).ok());
    if (session->rank() == 0) {
      EXPECT_EQ(commits(), 2);
    }
  });
}

TEST_F(EngineTest, DestroyedBeforeTheCommitItGivesUp) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    Communicator* none = nullptr;
    ASSERT_TRUE(rank->checkpointer->SaveIfDue(1, none).ok());
    ASSERT_TRUE(rank->checkpointer->Save(1).ok());
  });
  const std::vector<Restored> all = RestoreAll(job, folder);  // whole or not at all
  ASSERT_TRUE(all[0].status.ok()) << all[0].status;
  EXPECT_EQ(all[0].step.has_value(), all[1].step.has_value());
}

// Another program reads a shard with nothing but the published layout.
TEST_F(EngineTest, AShardIsPlainSafetensors) {
  const std::string folder = TestFolder();
  const FakeJob job{.world_size = 2};
  ASSERT_TRUE(SaveSteps(job, folder, {3}).ok());
  const std::string script = absl::StrCat(
      "import json,struct,sys\n"
      "names=set(); flat={}\n"
      "for path in sys.argv[1:]:\n"
      "  b=open(path,'rb').read(); n=struct.unpack('<Q',b[:8])[0]; h=json.loads(b[8:8+n]); d=b[8+n:]\n"
      "  h.pop('__metadata__'); end=0\n"
      "  for k,v in sorted(h.items(), key=lambda kv: kv[1]['data_offsets']):\n"
      "    assert v['data_offsets'][0]==end, k; end=v['data_offsets'][1]\n"
      "    f={'F32':'f','I64':'q','U8':'B'}[v['dtype']]; raw=d[v['data_offsets'][0]:end]\n"
      "    x=struct.unpack('<%d%s'%(len(raw)//struct.calcsize(f),f), raw); p=1\n"
      "    for s in v['shape']: p*=s\n"
      "    assert p==len(x), k\n"
      "    if k=='rng': continue\n"
      "    base,_,r=k.partition('['); r=int(r.split(':')[0]) if r else 0\n"
      "    flat.setdefault(base,{})[r]=x\n"
      "  assert end==len(d) and (8+n)%8==0\n"
      "j=lambda k: sum((flat[k][r] for r in sorted(flat[k])),())\n"
      "assert j('counter')==(3,), j('counter')\n"
      "assert j('small')==tuple(3+0.5*i for i in range(300))\n"
      "assert j('large')==tuple(float(3000+i%977) for i in range(700000))\n");
  std::vector<std::string> arguments = {"/usr/bin/python3", "-c", script};
  for (const std::string& path : FilesOf(folder, 3)) {
    if (absl::EndsWith(path, ".safetensors")) arguments.push_back(path);
  }
  ASSERT_THAT(arguments, SizeIs(5));
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    execv(argv[0], argv.data());
    _exit(77);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no /usr/bin/python3";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(EngineTest, VerifyFindsWhatADumpShows) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({}, folder, {3}).ok());
  auto store = *OpenDirectoryStore(folder);
  const SaveId id = (*ListManifests(store.get()))[0];
  const Manifest manifest = std::get<Manifest>(*ReadManifest(store.get(), id));
  EXPECT_TRUE(VerifyShard(store.get(), manifest, 0).ok());
  const std::string path = FilesOf(folder, 3).back();
  std::string bytes = *ReadFile(path, 64 << 20);
  bytes[100000] ^= 4;
  ASSERT_TRUE(WriteFileDurable(path, bytes).ok());
  EXPECT_TRUE(absl::IsDataLoss(VerifyShard(store.get(), manifest, 0)));
}

}  // namespace
}  // namespace gtrain::ckpt
