// Tests of `gtrain ckpt` beside jobs that run: nothing is lost (finding 8 of issue 14).
#include "checkpoint/engine/admin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/leftovers.h"
#include "checkpoint/engine/retain.h"
#include "checkpoint/format/lease_mark.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

absl::Status Quiet(uint64_t, uint64_t) { return absl::OkStatus(); }

// A safetensors file with one tensor of `bytes` bytes a name.
std::string Model(const std::vector<std::pair<std::string, uint64_t>>& tensors) {
  std::vector<TensorEntry> entries;
  uint64_t end = 0;
  for (const auto& [name, bytes] : tensors) {
    entries.push_back({name, DType::kFloat32, {static_cast<int64_t>(bytes / 4)}, end, end + bytes});
    end += bytes;
  }
  std::string text = PrintShardHeader(entries);
  for (uint64_t i = 0; i < end; ++i) text += static_cast<char>(i * 2654435761u >> 13 & 0x3f);
  const std::string path = TestFolder() + "/model.safetensors";
  EXPECT_TRUE(WriteFileDurable(path, text).ok());
  return path;
}

// A committed checkpoint of one rank, under the name that `id` gives.
Manifest Commit(port::BlobStore* store, const SaveId& id) {
  static const auto made = [] {
    MemoryStore imported;
    const Manifest manifest = *ImportSafetensors(Model({{"w", 6 << 20}, {"b", 400}}), &imported);
    return std::pair(manifest, *imported.Get(AttemptKey(manifest.id, ShardName(0, 1)), 8 << 20));
  }();
  Manifest manifest = made.first;
  manifest.id = id;
  EXPECT_TRUE(store->PutIfAbsent(AttemptKey(id, ShardName(0, 1)), made.second).ok());
  EXPECT_TRUE(store->PutIfAbsent(ManifestKey(id), Print(manifest)).ok());
  return manifest;
}

SaveId Id(uint64_t epoch, int64_t step) { return {.epoch = epoch, .step = step}; }

// The retention of a job that runs in the directory, at its next commit.
void CommitAndRetain(port::BlobStore* store, const SaveId& id, int keep) {
  Commit(store, id);
  Retention retention(store, keep, 1);
  ASSERT_EQ(retention.Apply(id, true, 6 << 20, {.indices = true}, *ListManifests(store)), absl::OkStatus());
}

// In an earlier version the copy of an older epoch was deleted at the next commit of the job that runs there.
TEST(Cp, ACopyOutlivesTheRetentionOfTheJobThatRunsThere_C2) {
  MemoryStore source, target;
  const Manifest old = Commit(&source, Id(1, 100));
  Commit(&target, Id(2, 10));
  ASSERT_EQ(CopyCheckpoint(&source, old, &target, Quiet), absl::OkStatus());
  CommitAndRetain(&target, Id(2, 20), 1);
  EXPECT_THAT(*ListManifests(&target), ElementsAre(Id(2, 20), Id(1, 100)));
  EXPECT_EQ(VerifyAll(&target, old, Quiet), absl::OkStatus());
  ASSERT_EQ(Unpin(&target, old.id), absl::OkStatus());
  CommitAndRetain(&target, Id(2, 30), 1);
  EXPECT_THAT(*ListManifests(&target), ElementsAre(Id(2, 30)));
}

// The job commits, applies retention and gc runs, at every call of a copy.
TEST(Cp, WhateverTheJobThatRunsThereCommitsMeanwhile_C2) {
  for (const uint64_t epoch : {1, 2}) {  // a copy of the job's own epoch is overtaken at once
    MemoryStore source, target;
    const Manifest old = Commit(&source, Id(epoch, 5));
    Commit(&target, Id(2, 10));
    int64_t step = 10;
    FaultyStore watched(&target, {[&](uint64_t, absl::string_view call) {
      if (absl::StartsWith(call, "PutIfAbsent") || absl::StartsWith(call, "Read")) {
        step += 10;
        CommitAndRetain(&target, Id(2, step), 1);
        EXPECT_EQ(DropGarbage(&target, *FindGarbage(&target)), absl::OkStatus());
      }
      return Fault::kNone;
    }});
    ASSERT_EQ(CopyCheckpoint(&source, old, &watched, Quiet), absl::OkStatus());
    EXPECT_GT(step, 50);
    CommitAndRetain(&target, Id(2, step + 10), 1);
    EXPECT_THAT(*ListManifests(&target), ElementsAre(Id(2, step + 10), old.id));
    EXPECT_EQ(VerifyAll(&target, old, Quiet), absl::OkStatus());
  }
}

// A pin that an earlier copy left counts as garbage when it is old; this copy found it, and then gc took it.
TEST(Cp, APinThatIsCollectedDuringTheCopyIsPutAgain_C2) {
  MemoryStore source, target;
  const Manifest old = Commit(&source, Id(1, 100));
  Commit(&target, Id(2, 10));
  ASSERT_EQ(Pin(&target, old.id), absl::OkStatus());
  target.Age(absl::Hours(100));
  bool collected = false;
  FaultyStore watched(&target, {[&](uint64_t, absl::string_view call) {
    if (!collected && absl::StartsWith(call, "PutIfAbsent step-")) {
      collected = true;
      EXPECT_EQ(DropGarbage(&target, *FindGarbage(&target)), absl::OkStatus());
      EXPECT_FALSE(*IsPinned(&target, old.id));
    }
    return Fault::kNone;
  }});
  ASSERT_EQ(CopyCheckpoint(&source, old, &watched, Quiet), absl::OkStatus());
  EXPECT_TRUE(collected);
  CommitAndRetain(&target, Id(2, 20), 1);
  EXPECT_THAT(*ListManifests(&target), ElementsAre(Id(2, 20), Id(1, 100)));
  EXPECT_EQ(VerifyAll(&target, old, Quiet), absl::OkStatus());
}

TEST(Cp, ACopyThatWasCutOffIsCompletedByAnother_C1) {
  MemoryStore source;
  const Manifest old = Commit(&source, Id(1, 100));
  for (const Fault fault : {Fault::kBefore, Fault::kAfter}) {
    for (uint64_t at = 0;; ++at) {
      MemoryStore target;
      Commit(&target, Id(2, 10));
      FaultyStore cut(&target,
                      {[&](uint64_t call, absl::string_view) { return call >= at ? fault : Fault::kNone; }});
      const absl::Status copied = CopyCheckpoint(&source, old, &cut, Quiet);
      const auto garbage = FindGarbage(&target);
      ASSERT_TRUE(garbage.ok()) << garbage.status();
      EXPECT_EQ(DropGarbage(&target, *garbage), absl::OkStatus());
      const absl::Status again = CopyCheckpoint(&source, old, &target, Quiet);
      EXPECT_TRUE(again.ok() || absl::IsAlreadyExists(again)) << again;
      EXPECT_EQ(VerifyAll(&target, old, Quiet), absl::OkStatus());
      EXPECT_TRUE(*IsPinned(&target, old.id));
      if (copied.ok()) break;
      ASSERT_LT(at, 100u);
    }
  }
}

// A store that takes no more than 1 MiB that is in memory together, and sees how long the pieces of a stream
// are.
class OnlyStreams final : public FaultyStore {
 public:
  explicit OnlyStreams(port::BlobStore* base) : FaultyStore(base, {}), base_(base) {}
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    uint64_t bytes = 0;
    for (const absl::string_view part : parts) bytes += part.size();
    if (bytes > 1 << 20) return absl::ResourceExhaustedError("held in memory whole");
    return base_->PutIfAbsent(key, parts);
  }
  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override {
    return base_->PutStream(key, bytes, [&](uint64_t at) {
      absl::StatusOr<absl::string_view> piece = source(at);
      if (piece.ok()) longest = std::max(longest, piece->size());
      return piece;
    });
  }
  size_t longest = 0;

 private:
  port::BlobStore* const base_;
};

// In an earlier version cp held the largest file, import the whole one, twice.
TEST(Cp, NeitherACopyNorAnImportHoldsAFile) {
  MemoryStore source, target;
  OnlyStreams copied(&target), imported(&source);
  const auto manifest = ImportSafetensors(Model({{"w", 20 << 20}}), &imported);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  ASSERT_EQ(CopyCheckpoint(&source, *manifest, &copied, Quiet), absl::OkStatus());
  EXPECT_LE(imported.longest, kChunkBytes);
  EXPECT_LE(copied.longest, kChunkBytes);
  EXPECT_GT(copied.longest, 0u);
}

TEST(Cp, WhatWasCopiedIsNotReadAgain) {
  MemoryStore source, target;
  const Manifest old = Commit(&source, Id(1, 100));
  ASSERT_EQ(target.PutIfAbsent(AttemptKey(old.id, ShardName(0, 1)),
                               *source.Get(AttemptKey(old.id, ShardName(0, 1)), 8 << 20)),
            absl::OkStatus());
  FaultyStore counted(&source, {});
  ASSERT_EQ(CopyCheckpoint(&counted, old, &target, Quiet), absl::OkStatus());
  EXPECT_THAT(counted.calls(), IsEmpty());
}

// In an earlier version every attempt of a lower epoch was "never committed", also while its writer wrote.
TEST(Gc, AnAttemptOfALowerEpochIsLeftWhileItChanges_C2) {
  MemoryStore store;
  const std::string under_way = AttemptKey(Id(1, 50), ShardName(0, 1));
  ASSERT_TRUE(store.PutIfAbsent(under_way, "half").ok());
  Commit(&store, Id(2, 10));
  auto garbage = FindGarbage(&store);
  ASSERT_TRUE(garbage.ok()) << garbage.status();
  EXPECT_THAT(garbage->plan.folders, IsEmpty());
  EXPECT_THAT(garbage->in_flight, ElementsAre(Id(1, 50)));
  CommitAndRetain(&store, Id(2, 20), 1);
  EXPECT_TRUE(store.Size(under_way).ok());  // retention goes by the same rule

  store.Age(absl::Hours(23));
  ASSERT_TRUE(store.PutIfAbsent(AttemptKey(Id(1, 50), IndexName(0, 1)), "index").ok());  // it lives
  store.Age(absl::Hours(2));
  EXPECT_THAT(FindGarbage(&store)->plan.folders, IsEmpty());
  store.Age(absl::Hours(22));
  garbage = FindGarbage(&store);
  EXPECT_THAT(garbage->plan.folders, ElementsAre(Id(1, 50)));
  EXPECT_EQ(garbage->bytes, 9u);
  CommitAndRetain(&store, Id(2, 30), 1);
  EXPECT_TRUE(absl::IsNotFound(store.Size(under_way).status()));
}

TEST(Gc, ANewerCommitOfTheSameEpochOvertakes_C2) {
  MemoryStore store;
  ASSERT_TRUE(store.PutIfAbsent(AttemptKey(Id(2, 5), ShardName(0, 1)), "half").ok());
  ASSERT_TRUE(store.PutIfAbsent(AttemptKey(Id(2, 15), ShardName(0, 1)), "half").ok());
  Commit(&store, Id(2, 10));
  const auto garbage = FindGarbage(&store);
  EXPECT_THAT(garbage->plan.folders, ElementsAre(Id(2, 5)));
  EXPECT_THAT(garbage->in_flight, ElementsAre(Id(2, 15)));
}

TEST(Gc, APinnedAttemptWithoutAManifestIsReportedAndLeft) {
  MemoryStore store;
  ASSERT_TRUE(store.PutIfAbsent(AttemptKey(Id(2, 5), ShardName(0, 1)), "half").ok());
  Commit(&store, Id(2, 10));
  ASSERT_TRUE(Pin(&store, Id(2, 5)).ok());
  ASSERT_TRUE(Pin(&store, Id(2, 6)).ok());  // of nothing
  store.Age(absl::Hours(100));
  ASSERT_TRUE(Pin(&store, Id(2, 7)).ok());  // of nothing yet
  const auto garbage = FindGarbage(&store);
  EXPECT_THAT(garbage->pinned, ElementsAre(Id(2, 5)));
  EXPECT_THAT(garbage->small, ElementsAre(PinKey(Id(2, 6))));
  EXPECT_THAT(garbage->plan.folders, IsEmpty());
  ASSERT_EQ(DropGarbage(&store, *garbage), absl::OkStatus());
  EXPECT_TRUE(*IsPinned(&store, Id(2, 5)));
  EXPECT_FALSE(*IsPinned(&store, Id(2, 6)));
  EXPECT_TRUE(*IsPinned(&store, Id(2, 7)));
}

// A lease of an owner that was killed stayed for ever.
TEST(Gc, LeasesOfOwnersThatAreNoMoreGoWhenOld) {
  for (const bool by_a_commit : {false, true}) {
    MemoryStore store;
    const auto put = [&](const LeaseName& name) {
      ASSERT_TRUE(store.PutIfAbsent(LeaseKey(name), Print(LeaseMark{.name = name})).ok());
    };
    for (const uint64_t epoch : {1, 2, 3})
      ASSERT_TRUE(store.PutIfAbsent(OwnerKey(epoch), Print(OwnerClaim{.epoch = epoch})).ok());
    put({.epoch = 1, .renewal = 7});
    put({.epoch = 3, .renewal = 4});  // the newest owner's: it tells whether somebody is at work
    store.Age(absl::Hours(23));
    put({.epoch = 2, .renewal = 9});  // an owner that has not found out yet
    EXPECT_THAT(FindGarbage(&store)->small, IsEmpty());
    store.Age(absl::Hours(2));
    EXPECT_THAT(FindGarbage(&store)->small, ElementsAre(LeaseKey({.epoch = 1, .renewal = 7})));
    if (by_a_commit) {
      CommitAndRetain(&store, Id(3, 10), 1);
    } else {
      ASSERT_EQ(DropGarbage(&store, *FindGarbage(&store)), absl::OkStatus());
    }
    EXPECT_THAT(*store.List(kLeasePrefix),
                ElementsAre(LeaseKey({.epoch = 2, .renewal = 9}), LeaseKey({.epoch = 3, .renewal = 4})));
  }
}

// A store whose unfinished puts are what the test says.
class WithUnfinished final : public FaultyStore {
 public:
  explicit WithUnfinished(port::BlobStore* base) : FaultyStore(base, {}) {}
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override { return unfinished; }
  absl::Status DropUnfinished(const Unfinished& put) override {
    dropped.push_back(put.key);
    return absl::OkStatus();
  }
  std::vector<Unfinished> unfinished;
  std::vector<std::string> dropped;
};

// In an earlier version files that belong to no attempt stayed for ever, and a copy's upload was dropped in
// the middle.
TEST(Gc, UnfinishedPutsGoWhenTheirWritersAreGone_S8) {
  MemoryStore memory;
  WithUnfinished store(&memory);
  Commit(&memory, Id(2, 10));
  ASSERT_TRUE(Pin(&memory, Id(2, 4)).ok());
  const absl::Duration young = absl::Hours(1), old = absl::Hours(25);
  const auto key = [](uint64_t epoch, int64_t step) { return AttemptKey(Id(epoch, step), ShardName(0, 1)); };
  store.unfinished = {{key(2, 5), "overtaken", young},         {key(2, 4), "a copy", young},
                      {key(1, 50), "of a lower epoch", young}, {key(2, 15), "the next save", old},
                      {OwnerKey(3), "a claim", young},         {ProbeKey(1, 2), "a probe", young},
                      {PinKey(Id(2, 4)), "a pin", young},      {"leases/epoch-00000002", "a lease", young}};
  EXPECT_EQ(FindGarbage(&store)->unfinished.size(), 1u);
  EXPECT_EQ(FindGarbage(&store)->unfinished[0].handle, "overtaken");
  for (auto& put : store.unfinished) put.age = old;
  const auto garbage = FindGarbage(&store);
  EXPECT_EQ(garbage->unfinished.size(), 7u);
  EXPECT_TRUE(
      absl::c_none_of(garbage->unfinished, [](const auto& put) { return put.handle == "the next save"; }));
  // Retention goes by the same rule.
  store.unfinished[1].age = young;
  CommitAndRetain(&store, Id(2, 12), 1);
  EXPECT_THAT(store.dropped, Contains(OwnerKey(3)));
  EXPECT_THAT(store.dropped, Not(Contains(key(2, 4))));
}

// Finding 4, as far as import goes: a trainer that may live keeps its directory.
TEST(Import, ADirectoryOfAJobIsNotTakenFromIt) {
  const std::string path = Model({{"w", 4096}});
  MemoryStore store;
  ASSERT_TRUE(ImportSafetensors(path, &store).ok());
  ASSERT_TRUE(ImportSafetensors(path, &store).ok());  // an import holds nothing
  ASSERT_TRUE(ClaimOwnership(&store, {.cluster = "c", .job = "gpt-7", .job_hash = "abc"}, 3).ok());
  const auto refused = ImportSafetensors(path, &store);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("gpt-7"));
  EXPECT_EQ(ListOwners(&store)->back().owner.job, "gpt-7");
  EXPECT_TRUE(ImportSafetensors(path, &store, true).ok());
  EXPECT_EQ(ListOwners(&store)->back().owner.job, "import");
}

TEST(Import, WhatIsPutIsWhatWasRead) {
  const std::string path = Model({{"a", 5 << 20}, {"b", 12}, {"empty", 0}, {"c", (3 << 20) + 4}});
  MemoryStore store;
  const auto manifest = ImportSafetensors(path, &store);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(VerifyAll(&store, *manifest, Quiet), absl::OkStatus());
  const std::string out = TestFolder() + "/out.safetensors";
  std::vector<std::string> left_out;
  ASSERT_EQ(ExportSafetensors(&store, *manifest, out, Quiet, &left_out), absl::OkStatus());
  EXPECT_TRUE(*ReadFile(out, 16 << 20) == *ReadFile(path, 16 << 20));
  for (const absl::string_view bad : {"", "x", "1234567890123456", "\x08\0\0\0\0\0\0\0{}      left"}) {
    ASSERT_TRUE(WriteFileDurable(path, bad).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(ImportSafetensors(path, &store).status())) << bad;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(ImportSafetensors("/dev/zero", &store).status()));
}

// In an earlier version each batch of tensors asked for the lengths of all files. 1 file, 3 tensors too large
// to share a batch.
TEST(Export, AsksForTheLengthOfAFileOnce) {
  const std::string path = Model({{"a", 40 << 20}, {"b", 40 << 20}, {"c", 40 << 20}});
  MemoryStore memory;
  const auto manifest = ImportSafetensors(path, &memory);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  FaultyStore store(&memory, {});
  std::vector<std::string> left_out;
  ASSERT_EQ(ExportSafetensors(&store, *manifest, TestFolder() + "/out", Quiet, &left_out), absl::OkStatus());
  const auto sizes = [](absl::string_view call) { return absl::StartsWith(call, "Size "); };
  EXPECT_EQ(absl::c_count_if(store.calls(), sizes), 1);
  FaultyStore diffed(&memory, {});
  ASSERT_TRUE(Compare(&diffed, *manifest, &memory, *manifest, Quiet).ok());
  EXPECT_EQ(absl::c_count_if(diffed.calls(), sizes), 1);
}

// Retention of a job that runs there takes the newest checkpoint between the list and the read of it.
TEST(Find, TheNewestThatGoesMeanwhileIsLookedForOnceMore) {
  MemoryStore memory;
  Commit(&memory, Id(1, 10));
  bool done = false;
  FaultyStore store(&memory, {[&](uint64_t, absl::string_view call) {
    if (!done && absl::StartsWith(call, "Get ")) {
      done = true;
      Commit(&memory, Id(1, 20));
      EXPECT_EQ(RemoveCheckpoint(&memory, Id(1, 10)), absl::OkStatus());
    }
    return Fault::kNone;
  }});
  const auto found = FindCheckpoint(&store, "latest");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->id.step, 20);
  EXPECT_TRUE(*IsGone(&store, Id(1, 10)));
  EXPECT_FALSE(*IsGone(&store, Id(1, 20)));
}

TEST(Find, AStepThatGoesMeanwhileIsNotThere) {
  MemoryStore memory;
  Commit(&memory, Id(1, 10));
  Commit(&memory, Id(1, 20));
  FaultyStore store(&memory, {[&](uint64_t, absl::string_view call) {
    if (absl::StartsWith(call, "Get ")) {
      EXPECT_EQ(RemoveCheckpoint(&memory, Id(1, 10)), absl::OkStatus());
    }
    return Fault::kNone;
  }});
  const absl::Status found = FindCheckpoint(&store, "10").status();
  EXPECT_TRUE(absl::IsNotFound(found)) << found;
  EXPECT_THAT(std::string(found.message()), HasSubstr("has no committed checkpoint 10; it has steps 20"));
}

// A safetensors file with these tensors: name, type, shape and bytes.
struct Given {
  std::string name;
  DType dtype;
  std::string bytes;
};
Manifest Import(port::BlobStore* store, const std::vector<Given>& tensors) {
  std::vector<TensorEntry> entries;
  std::string data;
  for (const Given& t : tensors) {
    const auto count = static_cast<int64_t>(t.bytes.size() / DTypeSize(t.dtype));
    entries.push_back({t.name, t.dtype, {count}, data.size(), data.size() + t.bytes.size()});
    data += t.bytes;
  }
  const std::string path = TestFolder() + "/given.safetensors";
  EXPECT_TRUE(WriteFileDurable(path, PrintShardHeader(entries) + data).ok());
  return *ImportSafetensors(path, store);
}

template <typename Number>
std::string BytesOfAll(const std::vector<Number>& numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

template <typename Number>
std::string DifferenceOf(DType dtype, const std::vector<Number>& a, const std::vector<Number>& b) {
  MemoryStore store_a, store_b;
  const Manifest in_a = Import(&store_a, {{"t", dtype, BytesOfAll(a)}});
  const Manifest in_b = Import(&store_b, {{"t", dtype, BytesOfAll(b)}});
  const auto differences = Compare(&store_a, in_a, &store_b, in_b, Quiet);
  return differences.ok() && differences->size() == 1 ? (*differences)[0].what : "";
}

// In an earlier version a number after the NaN was larger than nothing, and took its place.
TEST(Diff, ANaNStaysTheLargestDifference) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(DifferenceOf<float>(DType::kFloat32, {1, 1, 1}, {1, nan, 2}),
            "differs in 2 of 3 elements, at most by nan");
  EXPECT_EQ(DifferenceOf<float>(DType::kFloat32, {1, 1, 1}, {3, 1, 2}),
            "differs in 2 of 3 elements, at most by 2");
}

// In an earlier version 2^60 and 2^60 + 1, which are one number as doubles, differed "at most by 0".
TEST(Diff, IntegersDifferByIntegers) {
  constexpr int64_t kLarge = int64_t{1} << 60;
  EXPECT_EQ(DifferenceOf<int64_t>(DType::kInt64, {kLarge, 0}, {kLarge + 1, 0}),
            "differs in 1 of 2 elements, at most by 1");
  EXPECT_EQ(DifferenceOf<int64_t>(DType::kInt64, {INT64_MIN}, {INT64_MAX}),
            "differs in 1 of 1 elements, at most by 18446744073709551615");
  EXPECT_EQ(DifferenceOf<uint64_t>(DType::kUint64, {UINT64_MAX}, {UINT64_MAX - 3}),
            "differs in 1 of 1 elements, at most by 3");
  EXPECT_EQ(DifferenceOf<int8_t>(DType::kInt8, {-128, 5}, {127, 4}),
            "differs in 2 of 2 elements, at most by 255");
  EXPECT_EQ(DifferenceOf<uint32_t>(DType::kUint32, {0}, {1234567}),
            "differs in 1 of 1 elements, at most by 1234567");
}

// In an earlier version each tensor was looked for among all, and its chunk read again for it.
TEST(Diff, SmallTensorsAreReadTogether) {
  std::vector<Given> tensors;
  for (int i = 0; i < 3000; ++i) tensors.push_back({absl::StrCat("t", i), DType::kUint8, "abcd"});
  MemoryStore memory_a, memory_b;
  const Manifest a = Import(&memory_a, tensors);
  tensors[1000].bytes = "abcf";
  tensors[2999].bytes = "zbcd";
  tensors.insert(tensors.begin() + 500, {"new", DType::kUint8, "x"});
  const Manifest b = Import(&memory_b, tensors);
  FaultyStore store_a(&memory_a, {}), store_b(&memory_b, {});
  const auto differences = Compare(&store_a, a, &store_b, b, Quiet);
  ASSERT_TRUE(differences.ok()) << differences.status();
  std::vector<std::string> found;
  for (const TensorDifference& d : *differences) found.push_back(absl::StrCat(d.name, "  ", d.what));
  EXPECT_THAT(found, ElementsAre("new  only in the second", "t1000  differs in 1 of 4 elements, at most by 2",
                                 "t2999  differs in 1 of 4 elements, at most by 25"));
  EXPECT_LE(store_a.calls().size(), 10u);
  EXPECT_LE(store_b.calls().size(), 10u);
}

}  // namespace
}  // namespace gtrain::ckpt
