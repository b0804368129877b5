// Storage that fails or was damaged: no manifest without its shards, and a restore that falls back loudly.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/unique_fd.h"
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
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

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

TEST_F(EngineTest, DamageToAnyFileFallsBackLoudly_C4_C9) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1, 2}).ok());
  const std::vector<std::string> files = FilesOfStep(folder, 2);
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
  ASSERT_EQ(unlink(FilesOfStep(folder, 1).back().c_str()), 0);
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

TEST_F(EngineTest, VerifyFindsWhatADumpShows) {
  const std::string folder = TestFolder();
  ASSERT_TRUE(SaveSteps({}, folder, {3}).ok());
  auto store = *OpenDirectoryStore(folder);
  const SaveId id = (*ListManifests(store.get()))[0];
  const Manifest manifest = std::get<Manifest>(*ReadManifest(store.get(), id));
  EXPECT_TRUE(VerifyShard(store.get(), manifest, 0).ok());
  const std::string path = FilesOfStep(folder, 3).back();
  std::string bytes = *ReadFile(path, 64 << 20);
  bytes[100000] ^= 4;
  ASSERT_TRUE(WriteFileDurable(path, bytes).ok());
  EXPECT_TRUE(absl::IsDataLoss(VerifyShard(store.get(), manifest, 0)));
}

}  // namespace
}  // namespace gtrain::ckpt
