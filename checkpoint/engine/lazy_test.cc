// Lazy saves: the state is copied while the next step computes, up to its fence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/saver.h"
#include "checkpoint/engine/snapshot.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

// A rank whose saves are lazy, and state that takes long to copy beside the time it takes to change it.
struct LazyRank {
  static constexpr int64_t kCount = 24 << 20;         // 96 MiB: several blocks of the copy
  std::vector<float> w = std::vector<float>(kCount);  // outlives the checkpointer
  std::unique_ptr<Checkpointer> checkpointer;

  explicit LazyRank(FakeSession* session, const std::string& folder) {
    auto opened = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong, .lazy = true},
                                   EnvironmentOf({}), &OpenDirectoryStore);
    GT_CHECK(opened.ok());
    checkpointer = *std::move(opened);
    GT_CHECK(checkpointer->AddReplicated("w", MemoryOf(&w), {kCount}, DType::kFloat32).ok());
  }
  void Update(float value) { std::fill(w.begin(), w.end(), value); }
  bool Save(int64_t step) {
    const auto saved = checkpointer->Save(step);
    EXPECT_TRUE(saved.ok()) << saved.status();
    return saved.ok() && *saved;
  }
  bool Restores(int64_t step, float value) {
    const auto restored = checkpointer->Restore();
    EXPECT_TRUE(restored.ok() && restored->has_value()) << restored.status();
    return restored.ok() && restored->has_value() && (*restored)->step == step &&
           std::all_of(w.begin(), w.end(), [&](float v) { return v == value; });
  }
};

TEST_F(EngineTest, AfterTheFenceOfALazySaveTheStateMayChange) {
  const std::string folder = TestFolder();
  RunRanks({}, [&](FakeSession* session) {
    LazyRank rank(session, folder);
    for (int step = 1; step <= 5; ++step) {
      rank.Update(static_cast<float>(step));
      ASSERT_TRUE(rank.Save(step));
      rank.checkpointer->Fence();
      // The program overwrites from the end, where the copy would arrive last.
      std::fill(rank.w.rbegin(), rank.w.rend(), -1.0f);
      ASSERT_TRUE(rank.checkpointer->Wait(kLong).ok());
      EXPECT_TRUE(rank.Restores(step, static_cast<float>(step))) << "torn";
    }
  });
  EXPECT_EQ(loud(), "");
}

TEST_F(EngineTest, TheTimeForWhichTrainingWaitsIsCounted) {
  const std::string folder = TestFolder();
  RunRanks({}, [&](FakeSession* session) {
    LazyRank rank(session, folder);
    EXPECT_EQ(session->stalled(), absl::ZeroDuration());
    ASSERT_TRUE(rank.Save(1));
    const absl::Duration of_save = session->stalled();
    EXPECT_GT(of_save, absl::ZeroDuration());
    rank.checkpointer->Fence();
    const absl::Duration of_fence = session->stalled();
    EXPECT_GT(of_fence, of_save);
    ASSERT_TRUE(rank.checkpointer->Wait(kLong).ok());
    EXPECT_GT(session->stalled(), of_fence);
  });
}

// Only Fence says that the state has not changed since Save: a copy that anything else ends may hold values
// of two steps.
TEST_F(EngineTest, WhatEndsALazySaveBeforeItsFenceDropsIt) {
  const std::string folder = TestFolder();
  RunRanks({}, [&](FakeSession* session) {
    LazyRank rank(session, folder);
    rank.Update(3);
    ASSERT_TRUE(rank.Save(3));
    const absl::Status waited = rank.checkpointer->Wait(kLong);
    EXPECT_TRUE(absl::IsFailedPrecondition(waited)) << waited;
    EXPECT_THAT(std::string(waited.message()), HasSubstr("Fence() was not called after Save"));
    EXPECT_EQ(rank.checkpointer->LastCommitted(), std::nullopt);
    ASSERT_TRUE(rank.Save(4));
  });  // the destructor, as an exception in the step would reach it
  EXPECT_THAT(loud(), HasSubstr("step 3 is not saved"));
  EXPECT_THAT(loud(), HasSubstr("step 4 is not saved"));
  EXPECT_EQ((*ListManifests(OpenDirectoryStore(folder)->get())).size(), 0);
}

// A write to the copy between its making and its writing: by a wild pointer, or by the program itself.
TEST_F(EngineTest, ACopyThatChangesBeforeItIsWrittenIsRefused) {
  const std::string folder = TestFolder();
  auto store = *OpenDirectoryStore(folder);
  ASSERT_TRUE(ClaimOwnership(store.get(), {}, 1).ok());
  std::vector<float> w(3 << 20, 1.0f);  // three chunks
  const std::vector<Registered> registered = {
      {{.name = "w", .dtype = DType::kFloat32, .shape = {3 << 20}}, w.size() * sizeof(float)}};
  const ShardPlan plan = PlanShard(registered, 0, 1);
  for (const bool wild : {false, true}) {
    OwnRoute route(store.get(), {.registered = registered,
                                 .alive = [] { return absl::OkStatus(); },
                                 .may_commit = [](const SaveId&,
                                                  const std::vector<SaveId>&) { return absl::OkStatus(); }});
    Snapshot snapshot(plan.header, {{reinterpret_cast<const char*>(w.data()), registered[0].bytes}});
    snapshot.Begin(route.buffer());
    snapshot.Finish();
    if (wild) route.buffer()[5 << 20] ^= 1;
    const SaveId id{.step = wild ? 2 : 1};
    route.Begin(id, snapshot.hashes());
    StopFlag never;
    const absl::Status saved = *route.Finish(id, &never, [] {});
    EXPECT_EQ(saved.ok(), !wild) << saved;
    if (!wild) continue;
    EXPECT_TRUE(absl::IsDataLoss(saved)) << saved;
    EXPECT_THAT(std::string(saved.message()),
                HasSubstr("bytes 4194304 to 8388608 of rank-00000-of-00001.safetensors changed between"));
  }
  const auto newest = NewestManifest(store.get());
  ASSERT_TRUE(newest.ok() && newest->has_value());
  EXPECT_EQ((*newest)->id.step, 1);
}

TEST_F(EngineTest, ALazySaveWithoutAFenceIsGivenUpLoudly) {
  const std::string folder = TestFolder();
  RunRanks({}, [&](FakeSession* session) {
    LazyRank rank(session, folder);
    rank.Update(1);
    ASSERT_TRUE(rank.Save(1));
    // The fence is forgotten. (The state stays as it is all the same: ThreadSanitizer would see a race,
    // rightly.)
    const auto due = rank.checkpointer->SaveIfDue(2, nullptr);
    EXPECT_TRUE(due.ok() && !*due);
    const absl::Status given_up = rank.checkpointer->Wait(kLong);
    EXPECT_TRUE(absl::IsFailedPrecondition(given_up)) << given_up;
    EXPECT_EQ(rank.checkpointer->LastCommitted(), std::nullopt);

    rank.Update(3);
    ASSERT_TRUE(rank.Save(3));
    ASSERT_TRUE(rank.Save(4));  // forgotten again
    rank.checkpointer->Fence();
    rank.Update(5);
    ASSERT_TRUE(rank.checkpointer->Wait(kLong).ok());
    EXPECT_TRUE(rank.Restores(4, 3));
  });
  EXPECT_THAT(loud(),
              HasSubstr("step 1 is not saved, the previous one stands: Fence() was not called after Save"));
  EXPECT_THAT(loud(), HasSubstr("step 3 is not saved"));
  EXPECT_EQ((*ListManifests(OpenDirectoryStore(folder)->get())).size(), 1);
}

// Reading back stands aside from Save to its fence, and no longer, whatever ends the copy.
TEST(Saver, TheRouteKnowsWhileItCopies) {
  class WatchedRoute final : public SaveRoute {
   public:
    explicit WatchedRoute(std::vector<std::string>* said) : said_(said) {}
    char* buffer() override { return buffer_; }
    absl::Status SetTail(const SaveTail&) override { return absl::OkStatus(); }
    void SetCopying(bool copying) override { said_->push_back(copying ? "copying" : "copied"); }
    void Begin(const SaveId&, const std::vector<HashBytes>&) override { said_->push_back("begun"); }
    void Resumed(const SaveId&) override {}
    std::optional<absl::Status> Finish(const SaveId&, StopFlag*, absl::FunctionRef<void()>) override {
      return absl::OkStatus();
    }
    bool usable() override { return true; }

   private:
    std::vector<std::string>* const said_;
    char buffer_[64] = {};
  };
  std::vector<std::string> said;
  const std::string state(64, 's');
  {
    Saver saver(
        std::make_unique<WatchedRoute>(&said), "", {{state.data(), state.size()}},
        [](const SaveId&, const absl::Status&) {}, 0, "nowhere");
    saver.Start({.step = 1});
    EXPECT_THAT(said, ::testing::ElementsAre("copying"));
    saver.Fence();
    ASSERT_TRUE(saver.Wait(kLong).ok());
    saver.Start({.step = 2});
    saver.Drop();
    saver.Start({.step = 3});
  }
  EXPECT_THAT(said,
              ::testing::ElementsAre("copying", "copied", "begun", "copying", "copied", "copying", "copied"));
}

TEST(Snapshot, CopiesWhatIsThereWhenItIsFinished) {
  std::vector<char> large((70 << 20) + 5, 'a'), small(3, 'b');
  std::vector<char> copy(large.size() + 2 * small.size(), 'x');
  const std::string header(1001, 'h');
  Snapshot snapshot(
      header, {{small.data(), small.size()}, {nullptr, 0}, {large.data(), large.size()}, {small.data(), 3}});
  EXPECT_EQ(snapshot.bytes(), copy.size());
  snapshot.Finish();  // nothing was begun
  EXPECT_EQ(copy[0], 'x');
  for (const char value : {'c', 'd'}) {
    snapshot.Begin(copy.data());
    std::fill(large.begin(), large.end(), value);  // nobody has taken a block yet: this is what tears
    std::vector<std::thread> helpers;
    for (int i = 0; i < 3; ++i) helpers.emplace_back([&] { snapshot.Finish(); });
    snapshot.Finish();  // also of what the others copy
    EXPECT_EQ(std::count(copy.begin() + 3, copy.end() - 3, value), static_cast<ptrdiff_t>(large.size()));
    EXPECT_EQ(std::string(copy.begin(), copy.begin() + 3), "bbb");
    EXPECT_EQ(std::string(copy.end() - 3, copy.end()), "bbb");
    for (std::thread& t : helpers) t.join();
    const std::string file = header + std::string(copy.begin(), copy.end());
    ASSERT_EQ(snapshot.hashes().size(), (file.size() + kChunkBytes - 1) / kChunkBytes);
    for (size_t i = 0; i < snapshot.hashes().size(); ++i)
      EXPECT_EQ(HashHex(snapshot.hashes()[i]), Xxh3Hex(file.substr(i * kChunkBytes, kChunkBytes))) << i;
  }
}

TEST(Snapshot, AHeaderOfManyTensorsHasChunksOfItsOwn) {
  for (const size_t header_bytes : {kChunkBytes - 8, kChunkBytes, 2 * kChunkBytes + 8}) {
    const std::string header(header_bytes, 'h'), data(5 << 20, 'd');
    std::string copy(data.size(), 'x');
    Snapshot snapshot(header, {{data.data(), data.size()}});
    snapshot.Begin(copy.data());
    snapshot.Finish();
    const std::string file = header + copy;
    EXPECT_EQ(copy, data);
    ASSERT_EQ(snapshot.hashes().size(), (file.size() + kChunkBytes - 1) / kChunkBytes);
    for (size_t i = 0; i < snapshot.hashes().size(); ++i)
      EXPECT_EQ(HashHex(snapshot.hashes()[i]), Xxh3Hex(file.substr(i * kChunkBytes, kChunkBytes))) << i;
  }
}

}  // namespace
}  // namespace gtrain::ckpt
