// Which checkpoints are kept, and what of others is deleted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "base/test_folder.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

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

// On a full disk no commit removes it.
TEST_F(EngineTest, WhatAFailedSaveLeftGoesWithTheNextSave) {
  MemoryStore memory;
  std::atomic<bool> full = false;
  std::barrier together(3);
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    FaultPlan plan{[&](uint64_t, absl::string_view call) {
      const bool shard = absl::StartsWith(call, "PutIfAbsent") && absl::EndsWith(call, ShardName(1, 3));
      return full && shard ? Fault::kBefore : Fault::kNone;
    }};
    plan.error = absl::ResourceExhaustedError("No space left on device");
    return std::make_unique<FaultyStore>(&memory, std::move(plan));
  };
  const FakeJob job{.world_size = 3};
  const auto steps_with_files = [&] {
    std::vector<int64_t> steps;
    const std::vector<std::string> folders = *memory.ListFolders();
    for (const std::string& folder : folders) {
      if (const auto id = ParseAttemptName(folder)) steps.push_back(id->step);
    }
    return steps;
  };
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, "x", 2, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    for (int64_t step = 1; step <= 8; ++step) {
      const bool fails = step >= 3 && step <= 6;
      together.arrive_and_wait();
      full = fails;
      ASSERT_TRUE(rank->checkpointer->Save(step).ok());
      EXPECT_EQ(rank->checkpointer->Wait(kLong).ok(), !fails) << step;
      together.arrive_and_wait();
      if (session->rank() == 0 && fails) {
        EXPECT_THAT(steps_with_files(), ElementsAre(1, 2, step));
      }
    }
  });
  EXPECT_THAT(steps_with_files(), ElementsAre(7, 8));
  EXPECT_THAT(*ListManifests(&memory), SizeIs(2)) << "markers stay as long as an older checkpoint";
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

}  // namespace
}  // namespace gtrain::ckpt
