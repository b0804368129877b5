// Ranks of one machine read each chunk once together, and each restores whatever becomes of the others.
#include "checkpoint/engine/chunk_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/logging.h"
#include "base/test_folder.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/s3/s3_fake.h"
#include "checkpoint/s3/s3_store.h"
#include "checkpoint/store/faulty_store.h"
#include "net/http/curl_client.h"

namespace gtrain::ckpt {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Pair;
using Kind = ChunkShare::Task::Kind;

constexpr absl::Duration kShort = absl::Milliseconds(200);
absl::Status Alive() { return absl::OkStatus(); }

class FixedKeys final : public CredentialsProvider {
 public:
  absl::StatusOr<S3Credentials> Get() override { return S3Credentials{"AKIDEXAMPLE", "secret"}; }
  void Refused(const S3Credentials&) override {}
};

// How often each part of a shard was asked for.
class Counted {
 public:
  StoreFactory Factory() {
    return [this](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      S3Options options;
      options.bucket = "bucket";
      options.endpoint = server_.endpoint();
      options.path_style = true;
      return *OpenS3Store(options, *http::MakeCurlClient(""), std::make_shared<FixedKeys>());
    };
  }
  std::map<std::string, int> Take() {
    MutexLock lock(&mu_);
    return std::exchange(times_, {});
  }

 private:
  Mutex mu_;
  std::map<std::string, int> times_;
  S3Fake server_{{.before = [this](const S3FakeRequest& request, S3FakeReply*) {
    const std::string operation = request.Operation();
    if (absl::EndsWith(request.path, ".safetensors") &&
        (operation == "GetObject" || operation == "HeadObject")) {
      const auto range = request.headers.find("range");
      MutexLock lock(&mu_);
      ++times_[absl::StrCat(operation, " ", request.path, " ",
                            range == request.headers.end() ? "" : range->second)];
    }
    return false;
  }}};
};

// 50 MiB of replicated state: more chunks than readers, of several files.
struct Weights {
  static constexpr int64_t kCount = 13'000'000;
  std::vector<float> w = std::vector<float>(kCount);
  void Fill(int64_t step) {
    for (size_t i = 0; i < w.size(); ++i)
      w[i] = static_cast<float>(step) + 0.5f * static_cast<float>(i % 9973);
  }
  absl::Status Register(Checkpointer* c) {
    return c->AddReplicated("w", MemoryOf(&w), {kCount}, DType::kFloat32);
  }
};

// Saves or restores on `world` ranks on `machines` machines, and returns what each rank read.
std::vector<RestoredStep> SaveOrRestore(int world, int machines, uint64_t generation,
                                        const StoreFactory& factory) {
  std::vector<RestoredStep> out(static_cast<size_t>(world));
  RunRanks(
      {.world_size = world, .generation = generation, .timeline = generation}, [&](FakeSession* session) {
        const FakeJob job{.node = absl::StrCat("node-", session->rank() % machines), .world_size = world};
        auto checkpointer = OpenCheckpointer(session, {.uri = "s3://bucket", .commit_timeout = kLong},
                                             EnvironmentOf(job), factory);
        ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
        Weights weights, expected;
        ASSERT_TRUE(weights.Register(checkpointer->get()).ok());
        expected.Fill(7);
        if (generation == 1) {
          weights.Fill(7);
          ASSERT_TRUE(*(*checkpointer)->Save(7));
          ASSERT_TRUE((*checkpointer)->Wait(kLong).ok());
          return;
        }
        const auto restored = (*checkpointer)->Restore();
        ASSERT_TRUE(restored.ok() && *restored) << restored.status();
        out[static_cast<size_t>(session->rank())] = **restored;
        EXPECT_EQ((*restored)->bytes, Weights::kCount * sizeof(float));
        EXPECT_TRUE(weights.w == expected.w) << "rank " << session->rank() << " is not bit-identical";
      });
  return out;
}

TEST(ChunkShare, RanksOfAMachineAskTheStorageForEachChunkOnce) {
  Counted storage;
  SaveOrRestore(4, 1, 1, storage.Factory());
  storage.Take();
  uint64_t read = 0;
  for (const RestoredStep& step : SaveOrRestore(4, 1, 2, storage.Factory())) read += step.bytes_read;
  std::map<std::string, int> times = storage.Take();
  EXPECT_THAT(times, Each(Pair(testing::_, 1)));
  EXPECT_EQ(std::count_if(times.begin(), times.end(), [](const auto& t) { return t.first[0] == 'G'; }), 16);
  EXPECT_GE(read, Weights::kCount * sizeof(float));
  EXPECT_LT(read, Weights::kCount * sizeof(float) + (1 << 20));  // headers
  // Each on a machine of its own, they do not.
  SaveOrRestore(4, 4, 3, storage.Factory());
  times = storage.Take();
  std::erase_if(times, [](const auto& t) { return t.first[0] != 'G'; });
  EXPECT_THAT(times, Each(Pair(testing::_, 4)));
  SaveOrRestore(4, 2, 4, storage.Factory());
  times = storage.Take();
  std::erase_if(times, [](const auto& t) { return t.first[0] != 'G'; });
  EXPECT_THAT(times, Each(Pair(testing::_, 2)));
}

// Every chunk of rows holds a little of each column: read whole by each machine, not by each rank.
TEST(ChunkShare, ColumnsOfRowsAreReadOnceAMachine) {
  constexpr int64_t kRows = 3000, kColumns = 4000;  // 46 MiB
  constexpr int kRanks = 4;
  Counted storage;
  // How often each chunk is read, and bytes for one that is needed, with `machines`.
  const auto run = [&](uint64_t generation, int dim, int machines) {
    std::atomic<uint64_t> needed = 0, read = 0;
    RunRanks(
        {.world_size = kRanks, .generation = generation, .timeline = generation}, [&](FakeSession* session) {
          const FakeJob job{.node = absl::StrCat("node-", session->rank() % machines), .world_size = kRanks};
          auto checkpointer = OpenCheckpointer(session, {.uri = "s3://bucket", .commit_timeout = kLong},
                                               EnvironmentOf(job), storage.Factory());
          ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
          const int64_t rows = dim == 0 ? kRows / kRanks : kRows;
          const int64_t columns = dim == 0 ? kColumns : kColumns / kRanks;
          std::vector<float> part(static_cast<size_t>(rows * columns)), right = part;
          for (int64_t i = 0; i < rows * columns; ++i) {
            const int64_t row = i / columns + (dim == 0 ? session->rank() * rows : 0);
            const int64_t column = i % columns + (dim == 1 ? session->rank() * columns : 0);
            right[static_cast<size_t>(i)] = static_cast<float>(row * kColumns + column);
          }
          ASSERT_TRUE((*checkpointer)
                          ->AddSharded("w", MemoryOf(&part), {kRows, kColumns},
                                       {.mesh = {{"tp", kRanks}}, .splits = {{dim, "tp"}}}, DType::kFloat32)
                          .ok());
          if (generation == 1) {
            part = right;
            ASSERT_TRUE(*(*checkpointer)->Save(7));
            ASSERT_TRUE((*checkpointer)->Wait(kLong).ok());
            return;
          }
          const auto restored = (*checkpointer)->Restore();
          ASSERT_TRUE(restored.ok() && *restored) << restored.status();
          EXPECT_TRUE(part == right) << "rank " << session->rank() << " is not bit-identical";
          needed += (*restored)->bytes;
          read += (*restored)->bytes_read;
        });
    if (generation > 1) {
      std::printf("rows to columns, %d ranks on %d machines: %.2f bytes read for one that is needed\n",
                  kRanks, machines, static_cast<double>(read) / static_cast<double>(needed));
    }
    std::map<std::string, int> times = storage.Take();
    std::erase_if(times, [](const auto& t) { return t.first[0] != 'G'; });
    return times;
  };
  run(1, 0, 1);
  EXPECT_THAT(run(2, 1, 1), Each(Pair(testing::_, 1)));
  EXPECT_THAT(run(3, 1, 2), Each(Pair(testing::_, 2)));
  EXPECT_THAT(run(4, 1, 4), Each(Pair(testing::_, 4)));
}

// A checkpoint in a folder, and how a rank restores it with a share of its own.
class LoadTest : public testing::Test {
 protected:
  void SetUp() override {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      MutexLock lock(&mu_);
      if (level != LogLevel::kInfo) loud_.push_back(std::string(line));
    });
    SaveOrRestore(1, 1, 1, [this](const std::string&) { return OpenDirectoryStore(folder_); });
    store_ = *OpenDirectoryStore(folder_);
    manifest_ = *FindCheckpoint(store_.get(), "latest");
    registered_ = {{{.name = "w", .dtype = DType::kFloat32, .shape = {Weights::kCount}},
                    Weights::kCount * sizeof(float)}};
    plan_ = *PlanLoad(manifest_, registered_, 0, 1);
    for (const ShardFile& file : manifest_.files) chunks_ += file.chunks.size();
  }
  void TearDown() override { SetLogSink(nullptr); }
  std::unique_ptr<ChunkShare> Join(const ChunkShare& made) {
    return *ChunkShare::Join(made.address(), chunks_, 2, "it", kShort);
  }
  // How many bytes were read by this rank.
  absl::StatusOr<uint64_t> Load(ChunkShare* share, port::BlobStore* store = nullptr) {
    Weights weights, expected;
    expected.Fill(7);
    const auto read = LoadShards(store == nullptr ? store_.get() : store, nullptr, share, manifest_, plan_,
                                 &Alive, [&](size_t) { return reinterpret_cast<char*>(weights.w.data()); });
    EXPECT_TRUE(!read.ok() || weights.w == expected.w);
    return read;
  }

  const std::string folder_ = TestFolder();
  std::unique_ptr<port::BlobStore> store_;
  Manifest manifest_;
  std::vector<Registered> registered_;
  LoadPlan plan_;
  uint64_t chunks_ = 0;
  Mutex mu_;
  std::vector<std::string> loud_;
};

TEST_F(LoadTest, ARankThatIsKilledWithAChunkOnItsHandsHoldsUpNobody) {
  auto share = *ChunkShare::Make(chunks_, 2, "it", kShort);
  int to_child[2], from_child[2];
  ASSERT_EQ(pipe(to_child) + pipe(from_child), 0);
  char byte = 0;
  const pid_t child = fork();
  if (child == 0) {
    const auto theirs = Join(*share);
    WantChunks(manifest_, plan_, nullptr, theirs.get());
    (void)!write(from_child[1], "w", 1);
    (void)!read(to_child[0], &byte, 1);
    theirs->Start();
    const auto task = theirs->Next(&Alive);
    if (task.ok() && *task && (*task)->kind == Kind::kRead) kill(getpid(), SIGKILL);
    _exit(1);
  }
  ASSERT_EQ(read(from_child[0], &byte, 1), 1);
  WantChunks(manifest_, plan_, nullptr, share.get());
  ASSERT_EQ(write(to_child[1], "s", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  share->Start();
  EXPECT_EQ(*Load(share.get()), plan_.read_bytes);
  for (const int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(fd);
}

// One of three processes is killed when it has a chunk and reads others, while the rest begins.
TEST_F(LoadTest, ARankThatIsKilledInTheMiddleOfItHoldsUpNoneOfTheOthers) {
  constexpr int kRanks = 3, kVictim = 1;
  auto share = *ChunkShare::Make(chunks_, kRanks, "it", kShort);
  int wanted[2], go[2], start[2];
  ASSERT_EQ(pipe(wanted) + pipe(go) + pipe(start), 0);
  char byte = 0;
  std::vector<pid_t> children;
  for (int rank = 1; rank < kRanks; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    const auto theirs = *ChunkShare::Join(share->address(), chunks_, kRanks, "it", kShort);
    WantChunks(manifest_, plan_, nullptr, theirs.get());
    (void)!write(wanted[1], "w", 1);
    (void)!read(rank == kVictim ? go[0] : start[0], &byte, 1);
    theirs->Start();
    FaultyStore store(store_.get(), {.fault = [&](uint64_t call, absl::string_view) {
                        if (rank == kVictim && call == 40) (void)!write(start[1], "ss", kRanks - 1);
                        if (rank == kVictim && call == 44) kill(getpid(), SIGKILL);
                        return Fault::kNone;
                      }});
    _exit(Load(theirs.get(), &store).ok() && !HasFailure() ? 0 : 1);
  }
  WantChunks(manifest_, plan_, nullptr, share.get());
  for (int rank = 1; rank < kRanks; ++rank) ASSERT_EQ(read(wanted[0], &byte, 1), 1);
  ASSERT_EQ(write(go[1], "g", 1), 1);
  ASSERT_EQ(read(start[0], &byte, 1), 1);
  share->Start();
  EXPECT_TRUE(Load(share.get()).ok());
  for (int rank = 1; rank < kRanks; ++rank) {
    int status = 0;
    const pid_t child = children[static_cast<size_t>(rank - 1)];
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (rank == kVictim) {
      EXPECT_TRUE(WIFSIGNALED(status)) << status;
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    }
  }
  for (const int fd : {wanted[0], wanted[1], go[0], go[1], start[0], start[1]}) close(fd);
}

TEST_F(LoadTest, WhatAnotherRankReadIsBelievedByNobody) {
  auto share = *ChunkShare::Make(chunks_, 2, "it", kShort);
  auto theirs = Join(*share);
  for (ChunkShare* s : {share.get(), theirs.get()}) WantChunks(manifest_, plan_, nullptr, s);
  for (ChunkShare* s : {share.get(), theirs.get()}) s->Start();
  const auto task = theirs->Next(&Alive);
  ASSERT_TRUE(task.ok() && *task && (*task)->kind == Kind::kRead);
  std::fill_n((*task)->slot, kChunkBytes, 'x');
  theirs->Publish(**task);
  EXPECT_EQ(*Load(share.get()), plan_.read_bytes);
  EXPECT_THAT(absl::StrJoin(loud_, "\n"), HasSubstr("rank-00000-of-00001.safetensors as another rank of this "
                                                    "machine read it is NOT USED: bytes 0 to "));
}

TEST_F(LoadTest, ADamagedChunkEndsItForAll) {
  const std::string path = absl::StrCat(folder_, "/", AttemptName(manifest_.id), "/", ShardName(0, 1));
  std::filesystem::resize_file(path, manifest_.files[0].bytes - 1);
  auto share = *ChunkShare::Make(chunks_, 2, "it");
  auto theirs = *ChunkShare::Join(share->address(), chunks_, 2, "it");
  for (ChunkShare* s : {share.get(), theirs.get()}) WantChunks(manifest_, plan_, nullptr, s);
  for (ChunkShare* s : {share.get(), theirs.get()}) s->Start();
  const absl::Status mine = Load(share.get()).status();
  EXPECT_TRUE(absl::IsDataLoss(mine)) << mine;
  const absl::Status other = Load(theirs.get()).status();
  EXPECT_TRUE(absl::IsDataLoss(other)) << other;
  EXPECT_EQ(other.message(), absl::StrCat("another rank of this machine: ", mine.message()));
}

TEST(ChunkShare, ItsMemoryIsAWindowThatWaitsForTheSlowest) {
  constexpr uint64_t kChunks = 40, kSlots = 2 * ChunkShare::kSlotsOfARank;
  auto fast = *ChunkShare::Make(kChunks, 2, "it", kShort);
  auto slow = *ChunkShare::Join(fast->address(), kChunks, 2, "it", kShort);
  for (ChunkShare* s : {fast.get(), slow.get()}) {
    for (uint64_t i = 0; i < kChunks; ++i) s->Want(i, true);
  }
  for (ChunkShare* s : {fast.get(), slow.get()}) s->Start();
  const auto step = [](ChunkShare* s) {
    const auto task = s->Next(&Alive);
    EXPECT_TRUE(task.ok() && *task) << task.status();
    if ((*task)->kind == Kind::kRead) s->Publish(**task);
    s->Done(**task);
    return std::pair((*task)->kind, (*task)->wanted);
  };
  for (size_t i = 0; i < kSlots; ++i) EXPECT_EQ(step(fast.get()), std::pair(Kind::kRead, i));
  EXPECT_EQ(step(slow.get()), std::pair(Kind::kCopy, size_t{0}));
  EXPECT_EQ(step(fast.get()), std::pair(Kind::kRead, kSlots));
  // The slow one does nothing more: what is left is read without it.
  for (size_t i = kSlots + 1; i < kChunks; ++i) EXPECT_EQ(step(fast.get()), std::pair(Kind::kAlone, i));
  const auto none = fast->Next(&Alive);
  EXPECT_TRUE(none.ok() && !*none);
}

TEST(ChunkShare, WhatOneWantsAloneGoesThroughNoMemory) {
  auto share = *ChunkShare::Make(10, 2, "it");
  auto theirs = *ChunkShare::Join(share->address(), 10, 2, "it");
  share->Want(1, true);
  share->Want(3, true);
  share->Want(5, false);
  theirs->Want(3, false);
  theirs->Want(5, true);
  for (ChunkShare* s : {share.get(), theirs.get()}) s->Start();
  for (ChunkShare* s : {share.get(), theirs.get()}) {
    while (const auto task = *s->Next(&Alive)) {
      EXPECT_EQ(task->kind, Kind::kAlone);
      s->Done(*task);
    }
  }
}

TEST(ChunkShare, AnotherShareIsRefused) {
  const auto share = *ChunkShare::Make(10, 2, "it");
  EXPECT_FALSE(ChunkShare::Join(share->address(), 10, 2, "another").ok());
  EXPECT_FALSE(ChunkShare::Join(share->address(), 10, 3, "it").ok());
  EXPECT_FALSE(ChunkShare::Join((int64_t{1} << 62) | 77, 10, 2, "it").ok());
}

}  // namespace
}  // namespace gtrain::ckpt
