// Tests saves of more ranks than one part holds: the gathering, the reading, and the result when a rank fails
// or is killed.
#include "checkpoint/engine/parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/test_folder.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/settle.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"
#include "sharding/local_box.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

const Identity kOwner{.cluster = "c1", .job = "many-1", .job_hash = "h"};

SaveId At(int64_t step) { return {.step = step}; }

// A tensor of which each rank holds three elements, and bytes of each rank.
std::vector<Registered> StateOf(int world) {
  Registered tensor{{.name = "w",
                     .layout = Layout::kSharded,
                     .dtype = DType::kFloat32,
                     .shape = {3 * world},
                     .sharding = {.mesh = {{"dp", world}}, .splits = {{0, "dp"}}}},
                    12};
  return {tensor, {{.name = "rng", .layout = Layout::kPerRank}, 5}};
}

CommitterConfig ConfigOf(int rank, int world) {
  return {.rank = rank,
          .world_size = world,
          .owner = kOwner,
          .registered = StateOf(world),
          .commit_timeout = kLong,
          .alive = [] { return absl::OkStatus(); },
          .may_commit = [](const SaveId&, const std::vector<SaveId>&) { return absl::OkStatus(); }};
}

// The content of the shard of `rank`: floats and then bytes that say whose they are.
std::string DataOf(const SaveId& id, int rank) {
  std::string out;
  for (int i = 0; i < 3; ++i) {
    const auto value = static_cast<float>(id.step * 1000 + rank * 3 + i);
    out.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return absl::StrCat(out, std::string(5, static_cast<char>(rank)));
}

absl::Status SaveAs(port::BlobStore* store, CommitterConfig config, const SaveId& id) {
  const int rank = config.rank;
  store->PutIfAbsent(OwnerKey(id.epoch), Print(OwnerClaim{.epoch = id.epoch})).IgnoreError();
  Committer committer(store, std::move(config));
  StopFlag never;
  return committer.Save(id, DataOf(id, rank), {}, &never, [] {});
}

// A thread a rank; `save` makes its part of the save.
std::vector<absl::Status> OnAllRanks(int world, const std::function<absl::Status(int rank)>& save) {
  std::vector<absl::Status> results(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = save(rank); });
  for (std::thread& t : threads) t.join();
  return results;
}

void SaveAll(port::BlobStore* store, int world, const SaveId& id) {
  const auto results = OnAllRanks(world, [&](int rank) { return SaveAs(store, ConfigOf(rank, world), id); });
  for (const absl::Status& result : results) ASSERT_TRUE(result.ok()) << result;
}

absl::Status VerifyEverything(port::BlobStore* store, const Manifest& manifest) {
  return VerifyAll(store, manifest, [](uint64_t, uint64_t) { return absl::OkStatus(); });
}

TEST(Parts, ThreePartsAndASmallRoot) {
  MemoryStore store;
  SaveAll(&store, 130, At(10));
  const auto root = FindCheckpoint(&store, "latest");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->parts.size(), 3u);
  EXPECT_FALSE(root->Has(0));
  EXPECT_LT(*store.Size(ManifestKey(At(10))), 2000u);
  EXPECT_EQ(*store.List(absl::StrCat(AttemptName(At(10)), "/part-")),
            (std::vector<std::string>{AttemptKey(At(10), "part-00000-of-00003.json"),
                                      AttemptKey(At(10), "part-00001-of-00003.json"),
                                      AttemptKey(At(10), "part-00002-of-00003.json")}));
  EXPECT_TRUE(VerifyEverything(&store, *root).ok());
}

TEST(Parts, UpTo64RanksTheRootHasTheFiles) {
  MemoryStore store;
  SaveAll(&store, 64, At(10));
  const auto root = FindCheckpoint(&store, "latest");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_TRUE(root->parts.empty());
  EXPECT_TRUE(root->Has(63));
  EXPECT_TRUE(store.List(absl::StrCat(AttemptName(At(10)), "/part-"))->empty());
}

TEST(Parts, ARootOfMuchTextNamesAPartOfFewRanks) {
  MemoryStore store;
  std::vector<Registered> registered = StateOf(2);
  for (int i = 0; i < 12'000; ++i)
    registered.push_back({{.name = absl::StrCat("a_tensor_without_elements_", i), .shape = {0}}, 0});
  const auto results = OnAllRanks(2, [&](int rank) {
    CommitterConfig config = ConfigOf(rank, 2);
    config.registered = registered;
    return SaveAs(&store, std::move(config), At(10));
  });
  for (const absl::Status& result : results) ASSERT_TRUE(result.ok()) << result;
  const auto root = FindCheckpoint(&store, "latest");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->parts.size(), 1u);
  EXPECT_TRUE(VerifyEverything(&store, *root).ok());
}

// A rank loads few parts of sharded state before it restores, also in another world.
TEST(Parts, ARankLoadsThePartsThatItNeeds) {
  MemoryStore base;
  SaveAll(&base, 320, At(10));
  FaultyStore store(&base, {.fault = [](uint64_t, absl::string_view) { return Fault::kNone; }});
  const Manifest root = *FindCheckpoint(&base, "latest");
  for (const int world : {320, 5, 700}) {
    for (const int rank : {0, world / 2, world - 1}) {
      const size_t before = store.calls().size();
      Manifest manifest = root;
      std::vector<Registered> wanted = StateOf(world);
      wanted[0].tensor.shape = {3 * 320};
      ASSERT_TRUE(LoadPartsToRestore(&store, wanted, rank, world, {}, &manifest).ok());
      // These are the part of its own bytes, that of its elements and that of the lengths that it checks.
      EXPECT_LE(store.calls().size() - before, 3u) << rank << " of " << world;
      const auto plan = PlanLoad(manifest, wanted, rank, world);
      ASSERT_TRUE(plan.ok()) << plan.status();
      ASSERT_TRUE(CheckLengths(&store, nullptr, manifest, rank, world).ok());
      std::string w(4 * 3 * 320, '\0'), rng(5, '\0');
      const auto loaded = LoadShards(
          &store, nullptr, nullptr, manifest, *plan, [] { return absl::OkStatus(); },
          [&](size_t i) { return i == 0 ? w.data() : rng.data(); });
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_EQ(rng, rank < 320 ? std::string(5, static_cast<char>(rank)) : std::string(5, '\0'));
      float first = 0;
      std::memcpy(&first, w.data(), sizeof(first));
      const int64_t begin = LocalBoxOf({3 * 320}, wanted[0].tensor.sharding, rank)->begin[0];
      EXPECT_EQ(first, static_cast<float>(10'000 + begin));
    }
  }
}

// Fails the put of one key with an error of the storage that is final.
class FullStore final : public FaultyStore {
 public:
  FullStore(port::BlobStore* base, std::string key)
      : FaultyStore(base, {.fault = [](uint64_t, absl::string_view) { return Fault::kNone; }}),
        key_(std::move(key)) {}
  using port::BlobStore::PutIfAbsent;
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    if (key == key_) return absl::ResourceExhaustedError("disk full");
    return FaultyStore::PutIfAbsent(key, parts);
  }

 private:
  const std::string key_;
};

// The failing rank is a member of another part, the leader of one, and a member of rank 0's own: the save is
// given up long before the deadline, which would outlast the test.
TEST(Parts, OneRanksErrorGivesTheSaveUpWithItsWords_C4) {
  for (const int failing : {70, 64, 3}) {
    MemoryStore base;
    FullStore store(&base, AttemptKey(At(10), ShardName(failing, 80)));
    const auto results = OnAllRanks(80, [&](int rank) {
      CommitterConfig config = ConfigOf(rank, 80);
      config.commit_timeout = absl::Hours(1);
      return SaveAs(&store, std::move(config), At(10));
    });
    for (const absl::Status& result : results) EXPECT_FALSE(result.ok());
    EXPECT_THAT(std::string(results[0].message()),
                AllOf(HasSubstr(absl::StrCat("rank ", failing)), HasSubstr("disk full")));
    EXPECT_THAT(std::string(results[79].message()), HasSubstr("disk full"));
    const auto at_key = ReadManifest(&base, At(10));
    ASSERT_TRUE(at_key.ok()) << at_key.status();
    EXPECT_TRUE(std::holds_alternative<AbortMarker>(*at_key));
  }
}

// The failing rank cannot put its index or its part either.
TEST(Parts, ARankThatCanPutNeitherIndexNorPartEndsTheSaveOfAllRanks) {
  struct Case {
    int failing;
    std::string key;
  };
  for (const Case& c : {Case{70, IndexName(70, 80)}, Case{64, PartName(1, 2)}, Case{3, IndexName(3, 80)}}) {
    MemoryStore base;
    FullStore store(&base, AttemptKey(At(10), c.key));
    const auto results = OnAllRanks(80, [&](int rank) {
      CommitterConfig config = ConfigOf(rank, 80);
      config.commit_timeout = absl::Hours(1);
      return SaveAs(&store, std::move(config), At(10));
    });
    for (const absl::Status& result : results)
      EXPECT_THAT(std::string(result.message()), HasSubstr("disk full"));
    for (const int rank : {0, 79})
      EXPECT_THAT(std::string(results[rank].message()), HasSubstr(absl::StrCat("rank ", c.failing)));
    const auto at_key = ReadManifest(&base, At(10));
    ASSERT_TRUE(at_key.ok()) << at_key.status();
    EXPECT_TRUE(std::holds_alternative<AbortMarker>(*at_key));
  }
}

// A writer of `killed` that is killed at a storage call, before or after it happened, and another one that
// goes on. Both say something else about what they have verified.
void ExpectAnotherWriterGoesOn(int killed, int world) {
  for (const Fault fault : {Fault::kBefore, Fault::kAfter}) {
    bool cut = true;
    for (uint64_t last = 0; cut; ++last) {
      MemoryStore base;
      ASSERT_TRUE(base.PutIfAbsent(OwnerKey(1), Print(OwnerClaim{.owner = kOwner})).ok());
      std::atomic<bool> dead = false;
      std::atomic<uint64_t> calls = 0;
      FaultyStore dying(&base, {.fault = [&](uint64_t, absl::string_view name) {
        // Rank 0 looks for 65 other ranks, of which two stand for all.
        const bool one_more =
            killed == 0 && absl::StrContains(name, "/rank-000") && !absl::StrContains(name, "/rank-0000");
        if (dead) return Fault::kBefore;
        if (one_more || calls++ < last) return Fault::kNone;
        const bool first = !dead.exchange(true);
        return first ? fault : Fault::kBefore;
      }});
      const auto results = OnAllRanks(world, [&](int rank) {
        if (rank != killed) return SaveAs(&base, ConfigOf(rank, world), At(10));
        CommitterConfig config = ConfigOf(rank, world);
        config.alive = [&dead] { return dead ? absl::UnavailableError("killed") : absl::OkStatus(); };
        config.may_commit = [&dead](const SaveId&, const std::vector<SaveId>&) {
          return dead ? absl::UnavailableError("killed") : absl::OkStatus();
        };
        config.verified = [] { return AttemptName(At(5)); };
        const absl::Status first = SaveAs(&dying, std::move(config), At(10));
        cut = dead;
        return dead ? SaveAs(&base, ConfigOf(rank, world), At(10)) : first;
      });
      for (const absl::Status& result : results)
        ASSERT_TRUE(result.ok()) << "rank " << killed << " at call " << last << ": " << result;
      const auto root = FindCheckpoint(&base, "latest");
      ASSERT_TRUE(root.ok()) << root.status();
      ASSERT_TRUE(VerifyEverything(&base, *root).ok()) << last;
    }
  }
}

TEST(Parts, ALeaderKilledAtAnyCallIsRepeated_C1) { ExpectAnotherWriterGoesOn(64, 66); }
TEST(Parts, AMemberKilledAtAnyCallIsRepeated_C1) { ExpectAnotherWriterGoesOn(65, 66); }
TEST(Parts, Rank0KilledAtAnyCallIsRepeated_C1) { ExpectAnotherWriterGoesOn(0, 66); }

TEST(Parts, TheOldestThatEveryRankVerifiedIsKnown) {
  for (const bool all : {true, false}) {
    MemoryStore store;
    ASSERT_TRUE(store.PutIfAbsent(OwnerKey(1), Print(OwnerClaim{.epoch = 1})).ok());
    std::optional<SaveId> verified;
    const auto results = OnAllRanks(66, [&](int rank) {
      CommitterConfig config = ConfigOf(rank, 66);
      config.verified = [rank, all] {
        if (rank == 65 && !all) return std::string();
        return AttemptName(At(rank == 64 ? 4 : 5 + rank));
      };
      Committer committer(&store, std::move(config));
      StopFlag never;
      const absl::Status saved = committer.Save(At(90), DataOf(At(90), rank), {}, &never, [] {});
      if (rank == 0) verified = committer.verified();
      return saved;
    });
    for (const absl::Status& result : results) ASSERT_TRUE(result.ok()) << result;
    EXPECT_EQ(verified, all ? std::optional(At(4)) : std::nullopt);
  }
}

// Ranks 0 to 69 of one machine leave their indices on its board, those of the second part for rank 64; ranks
// 70 to 71 are elsewhere.
TEST(Parts, WritersOfOneMachineMeetOnTheBoard) {
  MemoryStore base;
  FaultyStore store(&base, {.fault = [](uint64_t, absl::string_view) { return Fault::kNone; }});
  const auto board = *IndexBoard::Make(72, BoardName("many-1", 1));
  for (int rank = 0; rank < 70; ++rank) board->Attend(rank);
  board->SetOpen(true);
  const auto results = OnAllRanks(72, [&](int rank) {
    CommitterConfig config = ConfigOf(rank, 72);
    if (rank < 70) config.board = board.get();
    return SaveAs(&store, std::move(config), At(10));
  });
  for (const absl::Status& result : results) ASSERT_TRUE(result.ok()) << result;
  EXPECT_TRUE(VerifyEverything(&base, *FindCheckpoint(&base, "latest")).ok());
  // A machine so slow that ranks do not meet within a second puts more of them.
  const std::vector<std::string> keys = *base.List(AttemptName(At(10)));
  const auto indices = std::count_if(
      keys.begin(), keys.end(), [](const std::string& key) { return absl::EndsWith(key, ".index.json"); });
  EXPECT_GE(indices, 2);
  EXPECT_LT(indices, 72);
}

// A save that was under way when somebody took the directory: nothing looks at the claims between but the
// commit.
TEST(Parts, WhatWasTakenOverSinceIsNotCommitted_C3) {
  MemoryStore store;
  ASSERT_TRUE(
      store.PutIfAbsent(OwnerKey(2), Print(OwnerClaim{.epoch = 2, .owner = {.job = "other-2"}})).ok());
  const auto saved = OnAllRanks(2, [&](int rank) { return SaveAs(&store, ConfigOf(rank, 2), At(10)); });
  EXPECT_TRUE(absl::IsFailedPrecondition(saved[0])) << saved[0];
  for (const absl::Status& status : saved)
    EXPECT_THAT(std::string(status.message()), HasSubstr("was taken over by job \"other-2\""));
  EXPECT_FALSE(absl::IsNotFound(store.Size(ManifestKey(At(10))).status())) << "the marker";
  EXPECT_TRUE(std::holds_alternative<AbortMarker>(*ReadManifest(&store, At(10))));
}

// An index of a page was that of a shard of 400 MB at most.
TEST(Parts, TheBoardHasRoomForTheIndexOfALargeShard) {
  const auto board = *IndexBoard::Make(2, BoardName("many-1", 1));
  const auto index_of = [](uint64_t bytes) {
    ShardIndex index{.id = At(10), .rank = 1, .world_size = 2};
    index.file = {.name = ShardName(1, 2), .bytes = bytes};
    index.file.chunks.assign((bytes + kChunkBytes - 1) / kChunkBytes, std::string(32, 'a'));
    return Print(index);
  };
  const std::string large = index_of(uint64_t{90} << 30);
  ASSERT_TRUE(board->Post(1, large));
  EXPECT_EQ(board->Read(1), large);
  EXPECT_FALSE(board->Post(1, index_of(uint64_t{200} << 30)));
}

// Its index was too long for the board: the leader does not wait a second before it looks in the storage.
TEST(Parts, WhatIsStoredInsteadOfPostedIsAskedForAtOnce) {
  MemoryStore base;
  FaultyStore store(&base, {});
  const auto board = *IndexBoard::Make(2, BoardName("many-1", 1));
  board->Attend(1);
  board->NoteStored(1);
  const auto count = [&](const std::string& key) {
    const std::vector<std::string> calls = store.calls();
    return std::count(calls.begin(), calls.end(), absl::StrCat("Get ", key));
  };
  absl::Status saved;
  std::thread leader([&] {
    CommitterConfig config = ConfigOf(0, 2);
    config.board = board.get();
    saved = SaveAs(&store, std::move(config), At(10));
  });
  const RealClock clock;
  const Instant end = clock.Now() + kLong;
  const std::string index = AttemptKey(At(10), IndexName(1, 2));
  while (count(index) < 5 && clock.Now() < end) std::this_thread::yield();
  EXPECT_GE(count(index), 5);
  EXPECT_LE(count(ManifestKey(At(10))), 2) << "a look a second, at both";
  EXPECT_TRUE(SaveAs(&base, ConfigOf(1, 2), At(10)).ok());
  leader.join();
  EXPECT_TRUE(saved.ok()) << saved;
}

// 63 requests a look, of 128 leaders at 8,192 ranks, were more than a store answers.
TEST(Parts, ALeaderAsksForTheFirstThatLacks) {
  MemoryStore base;
  FaultyStore store(&base, {});
  const int world = 8;
  const auto asked_for = [&](int rank) {
    const std::vector<std::string> calls = store.calls();
    return std::count(calls.begin(), calls.end(),
                      absl::StrCat("Get ", AttemptKey(At(10), IndexName(rank, world))));
  };
  absl::Status saved;
  std::thread leader([&] { saved = SaveAs(&store, ConfigOf(0, world), At(10)); });
  const RealClock clock;
  const Instant end = clock.Now() + kLong;
  while (asked_for(1) < 5 && clock.Now() < end) std::this_thread::yield();
  for (int rank = 2; rank < world; ++rank) EXPECT_EQ(asked_for(rank), 0) << rank;
  const auto results =
      OnAllRanks(world - 1, [&](int i) { return SaveAs(&base, ConfigOf(i + 1, world), At(10)); });
  leader.join();
  EXPECT_TRUE(saved.ok()) << saved;
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

TEST(Parts, RetentionDeletesThemWithTheirAttempt) {
  MemoryStore store;
  const std::string claim = OwnerKey(1);
  ASSERT_TRUE(store.PutIfAbsent(claim, Print(OwnerClaim{.epoch = 1})).ok());
  const int world = 66;
  std::vector<std::unique_ptr<Committer>> committers;
  for (int rank = 0; rank < world; ++rank) {
    CommitterConfig config = ConfigOf(rank, world);
    config.keep = 1;
    committers.push_back(std::make_unique<Committer>(&store, std::move(config)));
  }
  // The first commit lists everything, the others go by names.
  for (const int64_t step : {10, 20, 30}) {
    const auto results = OnAllRanks(world, [&](int rank) {
      StopFlag never;
      return committers[static_cast<size_t>(rank)]->Save(At(step), DataOf(At(step), rank), {}, &never, [] {});
    });
    for (const absl::Status& result : results) ASSERT_TRUE(result.ok()) << result;
    const std::vector<std::string> keys = *store.List("");
    for (const std::string& key : keys) {
      EXPECT_TRUE(key == claim || absl::StrContains(key, AttemptName(At(step))))
          << key << " after step " << step;
    }
  }
}

TEST(Parts, SettleTakesAPartForTheIndicesOfItsRanks) {
  for (const bool whole : {true, false}) {
    MemoryStore base, store;
    SaveAll(&base, 66, At(10));
    const std::vector<std::string> keys = *base.List("");
    for (const std::string& key : keys) {
      const bool lacks = key == ManifestKey(At(10)) || absl::EndsWith(key, ".index.json") ||
                         (!whole && absl::StrContains(key, "part-00001"));
      if (lacks) continue;
      ASSERT_TRUE(store.PutIfAbsent(key, *base.Get(key, 1 << 20)).ok());
    }
    SaveId self = At(0);
    self.generation = 2;
    const absl::Status settled = SettleEarlier(&store, self, [] { return absl::CancelledError("waits"); },
                                               {.shards = absl::ZeroDuration(), .commit = absl::Hours(1)});
    // For the whole save only the commit is waited for; of the other a shard may never come.
    EXPECT_TRUE(absl::IsCancelled(settled)) << settled;
    EXPECT_EQ(ReadManifest(&store, At(10)).ok(), !whole);
  }
}

TEST(Parts, ACopyHasThemToo) {
  MemoryStore from, to;
  SaveAll(&from, 66, At(10));
  const Manifest root = *FindCheckpoint(&from, "latest");
  const absl::Status copied =
      CopyCheckpoint(&from, root, &to, [](uint64_t, uint64_t) { return absl::OkStatus(); });
  ASSERT_TRUE(copied.ok()) << copied;
  EXPECT_TRUE(VerifyEverything(&to, *FindCheckpoint(&to, "latest")).ok());
  EXPECT_EQ(*to.Get(ManifestKey(At(10)), 1 << 20), *from.Get(ManifestKey(At(10)), 1 << 20));
}

// ------------------------------------------------------------------ whole jobs

class ManyRanksTest : public EngineTest {
 protected:
  static constexpr int kElements = 200;

  // Saves or restores: what one rank of `job` holds is split over all of its ranks.
  std::vector<absl::Status> Run(const FakeJob& job, std::vector<int64_t> saves,
                                const StoreFactory& factory = &OpenDirectoryStore) {
    std::vector<absl::Status> results(static_cast<size_t>(job.world_size));
    restored_.assign(results.size(), -1);
    RunRanks(job, [&](FakeSession* session) {
      results[static_cast<size_t>(session->rank())] = OneRank(job, session, saves, factory);
    });
    return results;
  }

  const std::string folder_ = TestFolder();
  std::vector<int64_t> restored_;  // step of each rank

 private:
  absl::Status OneRank(const FakeJob& job, FakeSession* session, const std::vector<int64_t>& saves,
                       const StoreFactory& factory) {
    GT_ASSIGN_OR_RETURN(auto c, OpenCheckpointer(session, {.uri = folder_, .commit_timeout = kLong},
                                                 EnvironmentOf(job), factory));
    const Sharding sharding{.mesh = {{"dp", job.world_size}}, .splits = {{0, "dp"}}};
    const LocalBox box = *LocalBoxOf({kElements}, sharding, session->rank());
    std::vector<int64_t> data(static_cast<size_t>(box.shape[0]), -1);
    GT_RETURN_IF_ERROR(c->AddSharded("w", MemoryOf(&data), {kElements}, sharding, DType::kInt64));
    for (const int64_t step : saves) {
      for (size_t i = 0; i < data.size(); ++i) data[i] = step * 1000 + box.begin[0] + static_cast<int64_t>(i);
      GT_RETURN_IF_ERROR(c->Save(step).status());
      GT_RETURN_IF_ERROR(c->Wait(kLong));
    }
    if (!saves.empty()) return absl::OkStatus();
    GT_ASSIGN_OR_RETURN(const auto step, c->Restore());
    if (!step) return absl::NotFoundError("nothing is there");
    restored_[static_cast<size_t>(session->rank())] = step->step;
    for (size_t i = 0; i < data.size(); ++i) {
      if (data[i] != step->step * 1000 + box.begin[0] + static_cast<int64_t>(i))
        return absl::InternalError("another element");
    }
    return absl::OkStatus();
  }
};

TEST_F(ManyRanksTest, RestoreInAnyWorld) {
  FakeJob job{.world_size = 66};
  for (const absl::Status& s : Run(job, {10, 20})) ASSERT_TRUE(s.ok()) << s;
  for (const int world : {66, 1, 5, 130}) {
    job.world_size = world;
    ++job.generation;
    const auto results = Run(job, {});
    for (int rank = 0; rank < world; ++rank) {
      ASSERT_TRUE(results[static_cast<size_t>(rank)].ok()) << results[static_cast<size_t>(rank)];
      EXPECT_EQ(restored_[static_cast<size_t>(rank)], 20);
    }
  }
  EXPECT_EQ(loud(), "");
}

// A world shrinks and grows again; the state of the ranks that were not there lies in another part than that
// of these ranks, and each comes back (C6).
TEST_F(ManyRanksTest, StateOfRanksThatAreNoMoreIsKeptInParts_C6) {
  FakeJob job{.world_size = 140};
  // Returns the state that each rank restored, before it saves `step` with letters of its own.
  const auto run = [&](int world, int64_t step) {
    job.world_size = world;
    std::vector<std::string> out(static_cast<size_t>(world));
    RunRanks(job, [&](FakeSession* session) {
      auto c = OpenCheckpointer(session, {.uri = folder_, .commit_timeout = kLong}, EnvironmentOf(job),
                                &OpenDirectoryStore);
      ASSERT_TRUE(c.ok()) << c.status();
      std::string& mine = out[static_cast<size_t>(session->rank())];
      mine = std::string(4, ' ');
      ASSERT_TRUE((*c)->AddPerRank("cursor", MemoryOf(&mine), PerRankRule::kKeep).ok());
      const auto restored = (*c)->Restore();
      ASSERT_TRUE(restored.ok()) << restored.status();
      const std::string was = mine;
      mine = absl::StrFormat("%04d", step * 1000 + session->rank());
      ASSERT_TRUE((*c)->Save(step).ok());
      const absl::Status saved = (*c)->Wait(kLong);
      ASSERT_TRUE(saved.ok()) << saved;
      mine = was;
    });
    ++job.generation;
    return out;
  };
  const auto at = [](int64_t step, int rank) { return absl::StrFormat("%04d", step * 1000 + rank); };
  for (const std::string& was : run(140, 1)) EXPECT_EQ(was, "    ");
  const std::vector<std::string> fewer = run(66, 2);
  for (int rank = 0; rank < 66; ++rank) EXPECT_EQ(fewer[static_cast<size_t>(rank)], at(1, rank));
  const auto store = *OpenDirectoryStore(folder_);
  const Manifest m = *FindCheckpoint(store.get(), "2");
  ASSERT_EQ(m.parts.size(), 2u);
  EXPECT_EQ(m.parts[0].kept, 72u);  // ranks 66 to 129 by 0 to 63, and 132 to 139 by 0 to 7
  EXPECT_EQ(m.parts[1].kept, 2u);
  run(5, 3);
  const std::vector<std::string> again = run(140, 4);
  for (int rank = 0; rank < 140; ++rank)
    EXPECT_EQ(again[static_cast<size_t>(rank)], at(rank < 5 ? 3 : rank < 66 ? 2 : 1, rank));
  EXPECT_EQ(loud(), "");
}

TEST_F(ManyRanksTest, APartThatIsGoneOrDamagedFallsBackLoudly_C4_C9) {
  FakeJob job{.world_size = 66};
  for (const absl::Status& s : Run(job, {10, 20, 30})) ASSERT_TRUE(s.ok()) << s;
  const auto path = [&](int64_t step, const char* part) {
    return absl::StrCat(folder_, "/", AttemptKey({.step = step}, part));
  };
  std::filesystem::remove(path(30, "part-00001-of-00002.json"));
  // Another save's, whole and sealed, where this one's was.
  std::filesystem::copy_file(path(10, "part-00000-of-00002.json"), path(20, "part-00000-of-00002.json"),
                             std::filesystem::copy_options::overwrite_existing);
  job.generation = 2;
  job.environment["GTRAIN_CHECKPOINT_MAX_ROLLBACK"] = "2";
  for (const absl::Status& s : Run(job, {})) ASSERT_TRUE(s.ok()) << s;
  EXPECT_EQ(restored_, std::vector<int64_t>(66, 10));
  EXPECT_THAT(loud(), AllOf(HasSubstr("part-00001-of-00002.json"),
                            HasSubstr("is not the part that the manifest names")));
}

// An error of the storage says nothing about the checkpoint.
TEST_F(ManyRanksTest, APartThatCannotBeReadStops) {
  FakeJob job{.world_size = 66};
  for (const absl::Status& s : Run(job, {10, 20})) ASSERT_TRUE(s.ok()) << s;
  job.generation = 2;
  std::vector<std::unique_ptr<port::BlobStore>> bases;
  Mutex mu;
  const auto results = Run(job, {}, [&](const std::string& where) {
    MutexLock lock(&mu);
    bases.push_back(*OpenDirectoryStore(where));
    return std::make_unique<FaultyStore>(
        bases.back().get(), FaultPlan{.fault = [](uint64_t, absl::string_view name) {
          const bool part =
              absl::StartsWith(name, "Get step-000000000020") && absl::StrContains(name, "/part-");
          return part ? Fault::kBefore : Fault::kNone;
        }});
  });
  for (const absl::Status& s : results) EXPECT_TRUE(absl::IsUnavailable(s)) << s;
}

TEST_F(ManyRanksTest, WhatANewerGtrainWroteStopsARestoreAndIsNotDeleted) {
  FakeJob job{.world_size = 2};
  for (const absl::Status& s : Run(job, {10, 20})) ASSERT_TRUE(s.ok()) << s;
  const auto store = *OpenDirectoryStore(folder_);
  SaveId newer{.step = 30};
  std::string text = *store->Get(ManifestKey(At(20)), 1 << 20);
  text.resize(text.rfind(",\n \"checksum\""));
  text = absl::StrReplaceAll(text, {{"\"step\": 20", "\"step\": 30"}, {"\"version\": 3", "\"version\": 4"}});
  ASSERT_TRUE(store
                  ->PutIfAbsent(ManifestKey(newer),
                                absl::StrCat(text, ",\n \"checksum\": \"", Xxh3Hex(text), "\"\n}\n"))
                  .ok());
  job.generation = 2;
  for (const absl::Status& s : Run(job, {})) {
    EXPECT_TRUE(absl::IsFailedPrecondition(s)) << s;
    EXPECT_THAT(std::string(s.message()),
                HasSubstr("written by a newer gtrain (version 4); this one reads 1 to 3"));
  }
  // A job that runs beside it does not delete it either, however few checkpoints are kept.
  job.generation = 3;
  for (const absl::Status& s : Run(job, {40, 50, 60, 70})) ASSERT_TRUE(s.ok()) << s;
  EXPECT_TRUE(store->Size(ManifestKey(newer)).ok());
  EXPECT_THAT(loud(), HasSubstr("written by a newer gtrain"));
}

}  // namespace
}  // namespace gtrain::ckpt
