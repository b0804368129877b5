// Sharded state through whole checkpoints: other world sizes, other meshes, other layouts (C6).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/memory_count_fake.h"
#include "base/test_folder.h"
#include "base/units.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"
#include "sharding/local_box.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

// How a program on some ranks lays out its state.
struct Program {
  std::vector<MeshAxis> mesh;
  std::string rows;     // the axis that splits dimension 0 of weights, "" for none
  std::string columns;  // the axis that splits dimension 1
  std::string zero;     // the axis over which optimizer state is split once more
  int world() const {
    int64_t ranks = 1;
    for (const MeshAxis& axis : mesh) ranks *= axis.size;
    return static_cast<int>(ranks);
  }
  Sharding Of(bool optimizer) const {
    Sharding s{.mesh = mesh};
    if (!rows.empty()) s.splits.push_back({0, rows});
    if (!columns.empty()) s.splits.push_back({1, columns});
    if (optimizer && !zero.empty()) s.splits.push_back({0, zero});
    return s;
  }
};

const Program kDp4Tp2 = {.mesh = {{"dp", 4}, {"tp", 2}}, .columns = "tp", .zero = "dp"};
const Program kDp2Tp4 = {.mesh = {{"dp", 2}, {"tp", 4}}, .columns = "tp", .zero = "dp"};
const Program kDp3Tp2 = {.mesh = {{"dp", 3}, {"tp", 2}}, .rows = "tp", .zero = "dp"};
const Program kDp3 = {.mesh = {{"dp", 3}}, .zero = "dp"};
const Program kFsdp8 = {.mesh = {{"dp", 8}}, .rows = "dp"};

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype;
  bool optimizer;
};

// 9 MB: tensors of several MiB, dimensions that no world divides, one without elements.
const std::vector<Tensor>& Model() {
  static const std::vector<Tensor> model = {
      {"embed", {1031, 1517}, DType::kBFloat16, false}, {"w", {601, 703}, DType::kFloat32, false},
      {"w.m", {601, 703}, DType::kFloat32, true},       {"w.v", {601, 703}, DType::kFloat64, true},
      {"tiny", {2, 2}, DType::kFloat32, true},          {"none", {0, 4}, DType::kInt64, true}};
  return model;
}

// Byte b of element i of a tensor.
char ByteOf(const std::string& name, uint64_t element, uint64_t b) {
  return static_cast<char>((element * 2654435761u >> (b * 4)) + name.size() * 37 + b);
}

// One rank's part of the model.
class Parts {
 public:
  Parts(const Program& program, int rank) : program_(program) {
    for (const Tensor& t : Model()) {
      boxes_.push_back(*LocalBoxOf(t.shape, program.Of(t.optimizer), rank));
      uint64_t bytes = DTypeSize(t.dtype);
      for (int64_t n : boxes_.back().shape) bytes *= static_cast<uint64_t>(n);
      data_.emplace_back(bytes, '\0');
      bytes_ += bytes;
    }
  }
  absl::Status Register(Checkpointer* c) {
    for (size_t i = 0; i < Model().size(); ++i) {
      const Tensor& t = Model()[i];
      GT_RETURN_IF_ERROR(
          c->AddSharded(t.name, MemoryOf(&data_[i]), t.shape, program_.Of(t.optimizer), t.dtype));
    }
    return c->AddReplicated("step", {&step, sizeof step}, {}, DType::kInt64);
  }
  // Calls `see` with each byte and what it ought to be.
  void ForEachByte(const std::function<void(char* have, char want)>& see) {
    for (size_t i = 0; i < data_.size(); ++i) {
      const uint64_t width = DTypeSize(Model()[i].dtype);
      const int64_t columns = boxes_[i].shape[1];
      for (uint64_t e = 0; e < data_[i].size() / width; ++e) {
        const auto row = boxes_[i].begin[0] + static_cast<int64_t>(e) / columns;
        const auto column = boxes_[i].begin[1] + static_cast<int64_t>(e) % columns;
        const auto element = static_cast<uint64_t>(row * Model()[i].shape[1] + column);
        for (uint64_t b = 0; b < width; ++b)
          see(&data_[i][e * width + b], ByteOf(Model()[i].name, element, b));
      }
    }
  }
  void Fill() {
    ForEachByte([](char* have, char want) { *have = want; });
  }
  bool IsRight() {
    bool right = true;
    ForEachByte([&](char* have, char want) { right &= *have == want; });
    return right;
  }
  uint64_t bytes() const { return bytes_ + sizeof step; }

  int64_t step = 0;

 private:
  const Program program_;
  std::vector<LocalBox> boxes_;
  std::vector<std::string> data_;
  uint64_t bytes_ = 0;
};

// Reads of shards, by place.
class ReadRecorder final : public FaultyStore {
 public:
  // How often each place was read, by all ranks.
  struct Times {
    Mutex mu;
    std::map<std::string, int> of ABSL_GUARDED_BY(mu);
  };
  ReadRecorder(std::unique_ptr<port::BlobStore> base, Times* times)
      : FaultyStore(base.get(), {[](uint64_t, absl::string_view) { return Fault::kNone; }}),
        owned_(std::move(base)),
        times_(times) {}
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
    if (absl::EndsWith(key, ".safetensors")) {
      MutexLock lock(&times_->mu);
      ++times_->of[absl::StrCat(key, " ", offset)];
      bytes_ += out.size();
    }
    return FaultyStore::Read(key, offset, out);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  const std::unique_ptr<port::BlobStore> owned_;
  Times* const times_;
  std::atomic<uint64_t> bytes_{0};
};

uint64_t BytesOfModel() {
  uint64_t bytes = 8;  // the step
  for (const Tensor& t : Model()) bytes += *ElementCount(t.shape, t.dtype) * DTypeSize(t.dtype);
  return bytes;
}

FakeJob JobAt(const Program& program, int64_t step) {
  return {.world_size = program.world(),
          .generation = static_cast<uint64_t>(step),
          .timeline = static_cast<uint64_t>(step)};
}

void SaveFirst(const Program& program, const std::string& folder) {
  const FakeJob job = JobAt(program, 1);
  RunRanks(job, [&](FakeSession* session) {
    auto checkpointer = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong},
                                         EnvironmentOf(job), &OpenDirectoryStore);
    ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
    Parts parts(program, session->rank());
    ASSERT_TRUE(parts.Register(checkpointer->get()).ok());
    parts.Fill();
    parts.step = 1;
    ASSERT_TRUE(*(*checkpointer)->Save(1));
    ASSERT_TRUE((*checkpointer)->Wait(kLong).ok());
  });
}

// Restores step - 1 and saves what came back as `step`.
void PassOn(const Program& program, const std::string& folder, int64_t step) {
  const FakeJob job = JobAt(program, step);
  int64_t before = 0, peak = 0;
  std::atomic<uint64_t> held = 0;
  ReadRecorder::Times times;
  RunRanks(job, [&](FakeSession* session) {
    ReadRecorder* reads = nullptr;
    const StoreFactory factory =
        [&](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      GT_ASSIGN_OR_RETURN(auto store, OpenDirectoryStore(path));
      auto recorder = std::make_unique<ReadRecorder>(std::move(store), &times);
      reads = recorder.get();
      return std::unique_ptr<port::BlobStore>(std::move(recorder));
    };
    auto checkpointer =
        OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job), factory);
    ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
    Parts parts(program, session->rank());
    ASSERT_TRUE(parts.Register(checkpointer->get()).ok());
    held += parts.bytes();
    const auto comm = *session->MakeCommunicator({});
    ASSERT_TRUE(comm->Barrier().ok());
    if (session->rank() == 0) {
      before = AllocatedBytes();
      ResetPeakAllocatedBytes();
    }
    ASSERT_TRUE(comm->Barrier().ok());
    const auto restored = (*checkpointer)->Restore();
    ASSERT_TRUE(restored.ok()) << restored.status();
    ASSERT_TRUE(restored->has_value());
    ASSERT_TRUE(comm->Barrier().ok());
    if (session->rank() == 0) peak = PeakAllocatedBytes() - before;

    EXPECT_EQ((*restored)->step, step - 1);
    EXPECT_TRUE(parts.IsRight()) << "rank " << session->rank() << " is not bit-identical";
    EXPECT_EQ(parts.step, step - 1);
    // Every byte this rank holds, once.
    EXPECT_EQ((*restored)->bytes, parts.bytes());
    EXPECT_EQ((*restored)->bytes_read, reads->bytes());
    parts.step = step;
    const auto saved = (*checkpointer)->Save(step);
    ASSERT_TRUE(saved.ok() && *saved) << saved.status();
    ASSERT_TRUE((*checkpointer)->Wait(kLong).ok());
  });
  // Every chunk once, by one of the ranks of this machine.
  MutexLock lock(&times.mu);
  for (const auto& [place, count] : times.of) EXPECT_EQ(count, 1) << place;
  // The limit of docs/formats/checkpoint.md for all ranks, which are in this one process: the buffers of the
  // saves to come, which together hold everything once, and four chunks and small things each.
  const auto allowed = static_cast<int64_t>(BytesOfModel() + static_cast<uint64_t>(program.world()) *
                                                                 (4 * kChunkBytes + (1 << 20)));
  std::printf("restore on %d ranks that hold %s: peak %s more, allowed %s\n", program.world(),
              PrintBytes(held).c_str(), PrintBytes(static_cast<uint64_t>(peak)).c_str(),
              PrintBytes(static_cast<uint64_t>(allowed)).c_str());
  EXPECT_LE(peak, allowed);
}

TEST(Reshard, EightToSixToThreeToEightRanks_C6) {
  const std::string folder = TestFolder();
  SaveFirst(kDp4Tp2, folder);
  PassOn(kDp3Tp2, folder, 2);
  PassOn(kDp3, folder, 3);
  PassOn(kFsdp8, folder, 4);
  PassOn(kDp4Tp2, folder, 5);
}

TEST(Reshard, Dp4Tp2ToDp2Tp4AndBack_C6) {
  const std::string folder = TestFolder();
  SaveFirst(kDp4Tp2, folder);
  PassOn(kDp2Tp4, folder, 2);
  PassOn(kDp4Tp2, folder, 3);
}

TEST(Reshard, EachByteIsWrittenOnce) {
  const std::string folder = TestFolder();
  SaveFirst(kDp4Tp2, folder);
  auto store = *OpenDirectoryStore(folder);
  const Manifest m = *FindCheckpoint(store.get(), "latest");
  uint64_t data = 0;
  for (const ShardFile& file : m.files) data += file.bytes - file.data_begin;
  EXPECT_EQ(data, BytesOfModel());
  EXPECT_TRUE(VerifyAll(store.get(), m, [](uint64_t, uint64_t) { return absl::OkStatus(); }).ok());
}

// People see whole tensors.
TEST(Reshard, TensorsAreMergedForPeople) {
  const std::string folder = TestFolder();
  SaveFirst(kDp2Tp4, folder);
  PassOn(kDp3, folder, 2);
  auto store = *OpenDirectoryStore(folder);
  const Manifest a = *FindCheckpoint(store.get(), "1"), b = *FindCheckpoint(store.get(), "2");
  for (const Tensor& t : Model()) {
    const auto bytes = LoadTensor(store.get(), a, t.name);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const uint64_t width = DTypeSize(t.dtype);
    bool right = bytes->size() == *ElementCount(t.shape, t.dtype) * width;
    for (uint64_t i = 0; i < bytes->size(); ++i) right &= (*bytes)[i] == ByteOf(t.name, i / width, i % width);
    EXPECT_TRUE(right) << t.name;
  }
  const auto progress = [](uint64_t, uint64_t) { return absl::OkStatus(); };
  const auto differences = Compare(store.get(), a, store.get(), b, progress);
  ASSERT_TRUE(differences.ok());
  ASSERT_EQ(differences->size(), 1u);  // whatever the layouts were
  EXPECT_EQ((*differences)[0].name, "step");

  const std::string path = folder + "/merged.safetensors";
  std::vector<std::string> left_out;
  ASSERT_TRUE(ExportSafetensors(store.get(), b, path, progress, &left_out).ok());
  MemoryStore target;
  const auto imported = ImportSafetensors(path, &target);
  ASSERT_TRUE(imported.ok()) << imported.status();
  const auto again = Compare(store.get(), b, &target, *imported, progress);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->empty());
}

TEST(Reshard, ATensorOfOneStageGoesToAnother) {
  const std::string folder = TestFolder();
  const Sharding saved{.mesh = {{"pp", 3}}, .only = {{"pp", 2}}};
  const Sharding wanted{.mesh = {{"pp", 2}}, .only = {{"pp", 0}}};
  for (const Sharding& s : {saved, wanted}) {
    FakeJob job{.world_size = static_cast<int>(s.mesh[0].size)};
    RunRanks(job, [&](FakeSession* session) {
      auto c = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                                &OpenDirectoryStore);
      ASSERT_TRUE(c.ok()) << c.status();
      std::vector<int64_t> layer;  // only where it is held
      const bool mine = LocalBoxOf({5}, s, session->rank())->holds;
      if (mine) layer.resize(5);
      ASSERT_TRUE((*c)->AddSharded("layer", MemoryOf(&layer), {5}, s, DType::kInt64).ok());
      if (job.world_size == 3) {
        std::fill(layer.begin(), layer.end(), 7);
        ASSERT_TRUE(*(*c)->Save(1));
        ASSERT_TRUE((*c)->Wait(kLong).ok());
      } else {
        ASSERT_TRUE((*c)->Restore().ok());
        for (int64_t v : layer) EXPECT_EQ(v, 7);
      }
    });
  }
}

TEST(Reshard, WhatCannotBeRegisteredIsSaid) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto c = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                              &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    float data[8] = {};
    const auto add = [&](const Sharding& s) {
      return std::string((*c)->AddSharded("w", {data, sizeof data}, {4, 2}, s, DType::kFloat32).message());
    };
    EXPECT_THAT(add({.mesh = {{"tp", 4}}, .splits = {{0, "tp"}}}), HasSubstr("has 4 ranks, the job has 2"));
    EXPECT_THAT(add({.mesh = {{"tp", 2}}, .splits = {{2, "tp"}}}), HasSubstr("dimension 2"));
  });
}

// A checkpoint of the first version of the format, byte for byte, restored at another world size.
TEST(Reshard, Version1IsStillRead) {
  const std::string folder = TestFolder();
  FakeJob job{.world_size = 2};
  ASSERT_TRUE(SaveSteps(job, folder, {10}).ok());
  auto store = *OpenDirectoryStore(folder);
  Manifest m = *FindCheckpoint(store.get(), "latest");
  // Describes the same files as version 1 did: by slices.
  for (int rank = 0; rank < 2; ++rank) {
    ShardFile& file = m.files[rank];
    auto shares = Shares::Make(m.tensors, 2);
    std::vector<Piece> pieces;
    PlanEntries(m.tensors, &*shares, rank, {file.per_rank, {}}, &pieces);
    for (const Piece& p : pieces)
      file.slices.push_back({m.tensors[p.tensor].name, p.begin, p.bytes, file.data_begin + p.offset});
    file.data_begin = 0;
    file.per_rank.clear();
    file.xxh3 = Xxh3Hex(*store->Get(AttemptKey(m.id, file.name), 1 << 30));
  }
  m.version = 1;
  ASSERT_TRUE(store->Delete(ManifestKey(m.id)).ok());
  ASSERT_TRUE(store->PutIfAbsent(ManifestKey(m.id), Print(m)).ok());
  EXPECT_TRUE(VerifyShard(store.get(), m, 1).ok());
  ExpectRestored(job, folder, 10);
  job.world_size = 3;
  const std::vector<Restored> all = RestoreAll(job, folder);
  for (const Restored& r : all) {
    ASSERT_TRUE(r.status.ok()) << r.status;
    EXPECT_TRUE(r.state.large == State::At(10, 0).large && r.state.counter == 10);
  }
}

}  // namespace
}  // namespace gtrain::ckpt
