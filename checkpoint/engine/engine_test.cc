// The Checkpointer as a training program uses it, over fakes of the session and real or failing storage.
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
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/session_fake.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr absl::Duration kLong = absl::Seconds(60);

// A small model: one tensor large enough to be cut between ranks, small ones, a counter, per-rank state.
struct State {
  std::vector<float> large = std::vector<float>(700'000);
  std::vector<float> small = std::vector<float>(300);
  int64_t counter = 0;
  std::string rng = std::string(37, '\0');

  // What training would have made of it at `step` on `rank`.
  static State At(int64_t step, int rank) {
    State s;
    for (size_t i = 0; i < s.large.size(); ++i)
      s.large[i] = static_cast<float>(step * 1000 + static_cast<int64_t>(i % 977));
    for (size_t i = 0; i < s.small.size(); ++i)
      s.small[i] = static_cast<float>(step) + 0.5f * static_cast<float>(i);
    s.counter = step;
    for (size_t i = 0; i < s.rng.size(); ++i)
      s.rng[i] = static_cast<char>(step * 31 + rank * 7 + static_cast<int>(i));
    return s;
  }
  bool operator==(const State&) const = default;
};

// Copies the values; the registered memory stays where it is.
void Fill(State* to, const State& from) {
  std::copy(from.large.begin(), from.large.end(), to->large.begin());
  std::copy(from.small.begin(), from.small.end(), to->small.begin());
  to->counter = from.counter;
  std::copy(from.rng.begin(), from.rng.end(), to->rng.begin());
}

absl::Status Register(Checkpointer* c, State* s) {
  GT_RETURN_IF_ERROR(c->AddReplicated("small", s->small.data(), {3, 100}, DType::kFloat32));
  GT_RETURN_IF_ERROR(c->AddReplicated("large", s->large.data(), {700, 1000}, DType::kFloat32));
  GT_RETURN_IF_ERROR(c->AddReplicated("counter", &s->counter, {}, DType::kInt64));
  return c->AddPerRank("rng", s->rng.data(), s->rng.size());
}

Environment EnvironmentOf(const FakeJob& job) {
  return [job](const char* name) -> std::optional<std::string> {
    const absl::string_view n = name;
    if (n == "GTRAIN_CLUSTER") return job.cluster;
    if (n == "GTRAIN_JOB_HASH" && job.managed) return job.job_hash;
    if (n == "GTRAIN_RESUME" && !job.resume.empty()) return job.resume;
    return std::nullopt;
  };
}

std::string FreshFolder() {
  std::string path = absl::StrCat(testing::TempDir(), "/gtrain-ckpt-XXXXXX");
  EXPECT_NE(mkdtemp(path.data()), nullptr);
  return path;
}

// Everything of one rank: opened, registered.
struct Rank {
  std::unique_ptr<Checkpointer> checkpointer;
  std::unique_ptr<State> state = std::make_unique<State>();
};

absl::StatusOr<Rank> OpenRank(const FakeJob& job, FakeSession* session, const std::string& folder,
                              int keep = 3, const StoreFactory& factory = &OpenDirectoryStore) {
  Rank rank;
  GT_ASSIGN_OR_RETURN(rank.checkpointer,
                      OpenCheckpointer(session, {.uri = folder, .keep = keep, .commit_timeout = kLong},
                                       EnvironmentOf(job), factory));
  GT_RETURN_IF_ERROR(Register(rank.checkpointer.get(), rank.state.get()));
  return rank;
}

// Saves `steps` one after the other and waits for each commit, on every rank.
absl::Status SaveSteps(const FakeJob& job, const std::string& folder, std::vector<int64_t> steps,
                       int keep = 3, const StoreFactory& factory = &OpenDirectoryStore) {
  std::vector<absl::Status> results(job.world_size);
  RunRanks(job, [&](FakeSession* session) {
    results[session->rank()] = [&]() -> absl::Status {
      GT_ASSIGN_OR_RETURN(Rank rank, OpenRank(job, session, folder, keep, factory));
      for (int64_t step : steps) {
        Fill(rank.state.get(), State::At(step, session->rank()));
        GT_ASSIGN_OR_RETURN(const bool saved, rank.checkpointer->Save(step));
        if (!saved) return absl::InternalError("skipped");
        GT_RETURN_IF_ERROR(rank.checkpointer->Wait(kLong));
        if (rank.checkpointer->LastCommitted() != step) return absl::InternalError("not known as committed");
        if (session->reported().back().first != step) return absl::InternalError("not reported");
      }
      return absl::OkStatus();
    }();
  });
  for (const absl::Status& s : results) GT_RETURN_IF_ERROR(s);
  return absl::OkStatus();
}

struct Restored {
  absl::Status status;
  std::optional<RestoredStep> step;
  State state;
};

std::vector<Restored> RestoreAll(const FakeJob& job, const std::string& folder) {
  std::vector<Restored> out(job.world_size);
  RunRanks(job, [&](FakeSession* session) {
    Restored& mine = out[session->rank()];
    auto rank = OpenRank(job, session, folder);
    mine.status = rank.status();
    if (!rank.ok()) return;
    auto restored = rank->checkpointer->Restore();
    mine.status = restored.status();
    if (restored.ok()) mine.step = *restored;
    mine.state = *rank->state;
  });
  return out;
}

void ExpectRestored(const FakeJob& job, const std::string& folder, int64_t step) {
  const std::vector<Restored> all = RestoreAll(job, folder);
  for (int rank = 0; rank < job.world_size; ++rank) {
    ASSERT_TRUE(all[rank].status.ok()) << all[rank].status;
    ASSERT_TRUE(all[rank].step.has_value());
    EXPECT_EQ(all[rank].step->step, step);
    EXPECT_TRUE(all[rank].state == State::At(step, rank)) << "rank " << rank << " is not bit-identical";
  }
}

// Collects log lines; tests say which warnings they expect.
class EngineTest : public testing::Test {
 protected:
  EngineTest() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      absl::MutexLock lock(&mu_);
      if (level != LogLevel::kInfo) loud_.push_back(std::string(line));
    });
  }
  ~EngineTest() override { SetLogSink(nullptr); }
  std::string loud() {
    absl::MutexLock lock(&mu_);
    return absl::StrJoin(loud_, "\n");
  }
  absl::Mutex mu_;
  std::vector<std::string> loud_;
};

TEST_F(EngineTest, SavesAndRestoresBitIdentical) {
  for (int world : {1, 4}) {
    FakeJob job{.world_size = world};
    const std::string folder = FreshFolder();
    ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
    job.generation = 2;
    job.timeline = 2;
    ExpectRestored(job, folder, 20);
  }
  EXPECT_EQ(loud(), "");
}

TEST_F(EngineTest, NothingThereIsNotAnError) {
  const std::vector<Restored> all = RestoreAll({.world_size = 2}, FreshFolder());
  for (const Restored& r : all) {
    EXPECT_TRUE(r.status.ok()) << r.status;
    EXPECT_FALSE(r.step.has_value());
  }
}

TEST_F(EngineTest, StateMayChangeAsSoonAsSaveReturns_C5) {
  const FakeJob job{.world_size = 2};
  const std::string folder = FreshFolder();
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
  const std::string folder = FreshFolder();
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

TEST_F(EngineTest, RetentionKeepsTheNewest) {
  const FakeJob job{.world_size = 2};
  const std::string folder = FreshFolder();
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

TEST_F(EngineTest, NonFiniteStateIsMarkedAndTheLastFiniteOneStays_C14) {
  const FakeJob job;
  const std::string folder = FreshFolder();
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
  ASSERT_THAT(ids, SizeIs(2));
  EXPECT_FALSE(std::get<Manifest>(*ReadManifest(store.get(), ids[0])).finite());
  EXPECT_EQ(ids[1].step, 1);
  EXPECT_TRUE(std::get<Manifest>(*ReadManifest(store.get(), ids[1])).finite());
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
  EXPECT_TRUE(AllFinite(view("\xff\xff\xff\xff", 4), DType::kInt32));
}

// --- crash at any call

// Ends the process at storage call number `at` of the save of step 2, before or after the call happens.
int SaveAndDie(const FakeJob& job, const std::string& folder, uint64_t at, bool after) {
  const pid_t child = fork();
  if (child != 0) {
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  SetLogSink([](LogLevel, absl::string_view) {});
  std::atomic<bool> armed{false};
  std::atomic<uint64_t> calls{0};
  std::atomic<int> ready{0};
  const auto fault = [&](uint64_t, absl::string_view) {
    if (!armed || calls++ != at) return Fault::kNone;
    return after ? Fault::kEndAfter : Fault::kEndBefore;
  };
  // The base outlives this process's last call and is never freed: the process ends with _exit.
  const StoreFactory factory =
      [&](const std::string& path) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    GT_ASSIGN_OR_RETURN(auto base, OpenDirectoryStore(path));
    return std::make_unique<FaultyStore>(base.release(), FaultPlan{fault});
  };
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder, 1, factory);
    if (!rank.ok()) _exit(20);
    Fill(rank->state.get(), State::At(2, session->rank()));
    if (++ready == job.world_size) armed = true;
    while (!armed) std::this_thread::yield();
    if (!rank->checkpointer->Save(2).ok()) _exit(21);
    if (!rank->checkpointer->Wait(kLong).ok()) _exit(22);
  });
  _exit(0);
}

// Fault C1 and C2: the process ends at every single storage call of a save, before or after it. What was
// committed before can be restored, or the new one can, bit for bit; never anything else.
TEST_F(EngineTest, DyingAtEveryStorageCallOfASave_C1_C2) {
  for (int world : {1, 2}) {
    for (bool after : {false, true}) {
      bool committed_seen = false, previous_seen = false;
      for (uint64_t at = 0;; ++at) {
        ASSERT_LT(at, 200u);
        FakeJob job{.world_size = world};
        const std::string folder = FreshFolder();
        ASSERT_TRUE(SaveSteps(job, folder, {1}, 1).ok());
        job.generation = job.timeline = 2;
        const int exit_code = SaveAndDie(job, folder, at, after);
        ASSERT_TRUE(exit_code == kFaultExit || exit_code == 0) << "call " << at << ": exit " << exit_code;
        job.generation = job.timeline = 3;
        const std::vector<Restored> all = RestoreAll(job, folder);
        ASSERT_TRUE(all[0].status.ok()) << "call " << at << ": " << all[0].status;
        ASSERT_TRUE(all[0].step.has_value());
        const int64_t step = all[0].step->step;
        ASSERT_TRUE(step == 1 || step == 2);
        (step == 2 ? committed_seen : previous_seen) = true;
        for (int rank = 0; rank < world; ++rank) {
          ASSERT_TRUE(all[rank].state == State::At(step, rank)) << "call " << at << " rank " << rank;
        }
        // And the next save works and clears what the dead one left.
        ASSERT_TRUE(SaveSteps(job, folder, {3}, 1).ok());
        ASSERT_THAT(*(*OpenDirectoryStore(folder))->ListFolders(), SizeIs(3)) << "call " << at;
        if (exit_code == 0) break;
      }
      EXPECT_TRUE(committed_seen);
      EXPECT_TRUE(previous_seen);
    }
  }
}

// The same calls fail instead: the save fails or succeeds, says which, and the next one works.
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
  const std::string folder = FreshFolder();
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
  const std::string folder = FreshFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1}).ok());
  ASSERT_EQ(unlink(FilesOf(folder, 1).back().c_str()), 0);
  for (const Restored& r : RestoreAll(job, folder)) {
    EXPECT_TRUE(absl::IsDataLoss(r.status)) << r.status;
    EXPECT_TRUE(r.state == State()) << "memory was touched before everything was verified";
  }
}

TEST_F(EngineTest, AProgramThatDoesNotFitIsRefused_C4) {
  const FakeJob job;
  const std::string folder = FreshFolder();
  ASSERT_TRUE(SaveSteps(job, folder, {1}).ok());
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    std::vector<float> adam(10);
    ASSERT_TRUE(rank->checkpointer->AddReplicated("adam.m", adam.data(), {10}, DType::kFloat32).ok());
    const auto restored = rank->checkpointer->Restore();
    EXPECT_TRUE(absl::IsFailedPrecondition(restored.status()));
    EXPECT_THAT(std::string(restored.status().message()), HasSubstr("\"adam.m\" is not in it"));
  });
}

// --- who may commit

TEST_F(EngineTest, ARevokedGenerationNeverCommits_C3) {
  FakeJob job{.world_size = 2};
  const std::string folder = FreshFolder();
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
      static absl::Mutex mu;
      port::BlobStore* raw = base.get();
      absl::MutexLock lock(&mu);
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

TEST_F(EngineTest, ALateCommitOfAnOldTimelineDoesNotWin_C3) {
  FakeJob zombie{.generation = 1, .timeline = 1};
  FakeJob resumed{.generation = 2, .timeline = 2};
  const std::string folder = FreshFolder();
  ASSERT_TRUE(SaveSteps(zombie, folder, {100}).ok());
  ASSERT_TRUE(SaveSteps(resumed, folder, {110}).ok());
  ASSERT_TRUE(SaveSteps(zombie, folder, {200}).ok());
  resumed.generation = resumed.timeline = 3;
  ExpectRestored(resumed, folder, 110);
}

TEST_F(EngineTest, ASaveIsSkippedWhileThePreviousIsWritten_C12) {
  const FakeJob job{.world_size = 2};
  MemoryStore memory;
  std::atomic<bool> open{false};
  std::atomic<int> skipped{0}, committed{0};
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
  const std::string folder = FreshFolder();
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
  const std::string folder = FreshFolder();
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

TEST_F(EngineTest, ANewLaunchOfTheSameFileOutranksTheOldOne) {
  const std::string folder = FreshFolder();
  ASSERT_TRUE(SaveSteps({.job = "mnist-1", .generation = 9, .timeline = 9}, folder, {100}).ok());
  FakeJob next{.job = "mnist-2"};  // timelines are counted per job: this is timeline 1 again
  ExpectRestored(next, folder, 100);
  ASSERT_TRUE(SaveSteps(next, folder, {110}).ok());
  next.generation = next.timeline = 2;
  ExpectRestored(next, folder, 110);
}

TEST_F(EngineTest, TheOldOwnerCommitsNothingMore) {
  const std::string folder = FreshFolder();
  const FakeJob old{.job = "mnist-1"};
  ASSERT_TRUE(SaveSteps(old, folder, {100}).ok());
  ASSERT_TRUE(SaveSteps({.job = "mnist-2"}, folder, {110}).ok());
  const absl::Status late = SaveSteps(old, folder, {120});
  EXPECT_TRUE(absl::IsFailedPrecondition(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("was taken over by job \"mnist-2\""));
}

TEST_F(EngineTest, ResumeFromAStepOrAUri) {
  const std::string folder = FreshFolder();
  ASSERT_TRUE(SaveSteps({.job = "a-1"}, folder, {10, 20, 30}).ok());
  FakeJob job{.job = "a-2", .job_hash = "other", .resume = "20"};
  ExpectRestored(job, folder, 20);
  job.resume = "25";
  job.job = "a-3";
  EXPECT_TRUE(absl::IsNotFound(RestoreAll(job, folder)[0].status));

  const std::string elsewhere = FreshFolder();
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
  const std::string folder = FreshFolder();
  const FakeJob job{
      .job = "", .cluster = "", .job_hash = "", .managed = false, .generation = 0, .timeline = 0};
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  ExpectRestored(job, folder, 20);
  ASSERT_TRUE(SaveSteps(job, folder, {20, 15}).ok());  // the same names are never taken twice
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
  const std::string folder = FreshFolder();
  RunRanks(job, [&](FakeSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok());
    Checkpointer* c = rank->checkpointer.get();
    float x = 0;
    EXPECT_TRUE(absl::IsAlreadyExists(c->AddReplicated("small", &x, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsAlreadyExists(c->AddPerRank("small", &x, 4)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("", &x, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("a\nb", &x, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("w[0:5]", &x, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("__metadata__", &x, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("n", nullptr, {1}, DType::kFloat32)));
    EXPECT_TRUE(absl::IsInvalidArgument(c->AddReplicated("n", &x, {-1}, DType::kFloat32)));
    EXPECT_TRUE(c->AddReplicated("empty", nullptr, {0, 3}, DType::kFloat32).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(c->Save(-1).status()));
    EXPECT_TRUE(c->Wait(kLong).ok());
    EXPECT_EQ(c->LastCommitted(), std::nullopt);
    ASSERT_TRUE(c->Save(0).ok());
    EXPECT_TRUE(absl::IsFailedPrecondition(c->AddPerRank("late", &x, 4)));
    EXPECT_TRUE(c->Wait(kLong).ok());
    EXPECT_EQ(c->LastCommitted(), 0);
  });
}

TEST_F(EngineTest, RanksThatDisagreeAreTold) {
  const FakeJob job{.world_size = 2};
  const std::string folder = FreshFolder();
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
    ASSERT_TRUE(
        rank->checkpointer->AddReplicated(session->rank() == 0 ? "x" : "y", &x, {1}, DType::kFloat32).ok());
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
    static const std::string folder = FreshFolder();
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
    static const std::string folder = FreshFolder();
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

TEST_F(EngineTest, DestroyedBeforeTheCommitItGivesUp) {
  const FakeJob job{.world_size = 2};
  const std::string folder = FreshFolder();
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

TEST(Settings, EnvironmentWinsAndIsChecked) {
  std::map<std::string, std::string> values;
  const Environment environment = [&](const char* name) -> std::optional<std::string> {
    const auto it = values.find(name);
    if (it == values.end()) return std::nullopt;
    return it->second;
  };
  EXPECT_TRUE(absl::IsInvalidArgument(MergeSettings({}, environment).status()));
  values = {{"GTRAIN_CHECKPOINT_URI", "/data/b/"},
            {"GTRAIN_CHECKPOINT_EVERY", "30s"},
            {"GTRAIN_CHECKPOINT_KEEP", "5"},
            {"GTRAIN_CHECKPOINT_ON_ERROR", "fail"}};
  auto s = MergeSettings({.uri = "a", .keep = 2, .every_steps = 7}, environment);
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(s->uri, "/data/b");
  EXPECT_EQ(s->keep, 5);
  EXPECT_EQ(s->every, absl::Seconds(30));
  EXPECT_EQ(s->every_steps, std::nullopt);
  EXPECT_EQ(s->on_error, OnError::kFail);
  values = {{"GTRAIN_CHECKPOINT_EVERY", "auto"}};
  EXPECT_EQ(MergeSettings({.uri = "a", .every_steps = 7}, environment)->every_steps, 7);
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"GTRAIN_CHECKPOINT_EVERY", "often"},
                                                        {"GTRAIN_CHECKPOINT_EVERY", "0 steps"},
                                                        {"GTRAIN_CHECKPOINT_EVERY", "-3s"},
                                                        {"GTRAIN_CHECKPOINT_KEEP", "0"},
                                                        {"GTRAIN_CHECKPOINT_KEEP", "many"},
                                                        {"GTRAIN_CHECKPOINT_ON_ERROR", "panic"},
                                                        {"GTRAIN_CHECKPOINT_URI", "file://relative"},
                                                        {"GTRAIN_RESUME", "99999999999999999999"},
                                                        {"GTRAIN_RESUME", "/data/manifests/../x.json"},
                                                        {"GTRAIN_RESUME", "/data/manifests/latest.json"}}) {
    values = {{name, value}};
    EXPECT_TRUE(absl::IsInvalidArgument(MergeSettings({.uri = "a"}, environment).status()))
        << name << "=" << value;
  }
  values = {{"GTRAIN_CHECKPOINT_URI", "s3://bucket/x"}};
  EXPECT_TRUE(absl::IsUnimplemented(MergeSettings({}, environment).status()));
}

// Another program reads a shard with nothing but the published layout.
TEST_F(EngineTest, AShardIsPlainSafetensors) {
  const std::string folder = FreshFolder();
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
  const std::string folder = FreshFolder();
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
