// Writers outside the rank: as processes that die at every call of the storage, and under a Checkpointer.
#include "checkpoint/engine/outside.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/logging.h"
#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/hosted_fake.h"
#include "checkpoint/engine/settle.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

constexpr int kKilled = 77;  // exit code of a writer that a test ended in the middle

// One rank of a job without threads: it asked for one save and is gone. Its writers are processes.
class LostRank {
 public:
  // `board`: an address, 0 for none.
  LostRank(const std::string& folder, int rank, int world_size, uint64_t timeline = 1, int64_t board = 0)
      : rank_(rank),
        board_(board),
        id_{.epoch = 1, .timeline = timeline, .step = 7, .generation = timeline, .attempt = 1} {
    order_ = {.location = folder,
              .owner = {.cluster = "c1", .job = "fashion-1", .job_hash = "hash-a"},
              .rank = rank,
              .world_size = world_size,
              .commit_timeout_ms = 60'000,
              .tensors = {{.name = "w", .dtype = DType::kFloat32, .shape = {1000, 30}},
                          {.name = "rng", .layout = Layout::kPerRank}},
              .bytes = {1000 * 30 * 4, 11}};
    std::vector<Registered> registered;
    for (size_t i = 0; i < order_.tensors.size(); ++i)
      registered.push_back({order_.tensors[i], order_.bytes[i]});
    data_bytes_ = PlanShard(registered, rank, world_size).data_bytes;
    Ask(Print(order_));
  }

  // A process that writes; it ends itself at the call `dies_at` of its storage, before or after it happened.
  pid_t StartWriter(uint64_t dies_at = UINT64_MAX, Fault when = Fault::kBefore) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    const int code =
        RunWriter(UniqueFd(dup(memfd_.get())), UniqueFd(dup(channel_.get())),
                  [&](const std::string& location) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
                    auto base = OpenDirectoryStore(location);
                    if (!base.ok()) return base.status();
                    return std::make_unique<FaultyStore>(
                        *std::move(base), FaultPlan{[dies_at, when](uint64_t call, absl::string_view) {
                          // kAfter: the call happens, and the next one finds nobody. Calls may come from two
                          // threads.
                          if (call == dies_at + (when == Fault::kAfter ? 1 : 0)) _exit(kKilled);
                          return Fault::kNone;
                        }});
                  });
    _exit(code);
  }
  static int Wait(pid_t pid) {
    int status = 0;
    GT_CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
  }

  SaveArenaHeader* header() { return arena_->header(); }
  absl::Status answer() {
    return absl::Status(static_cast<absl::StatusCode>(header()->code), TakeText(header()->message));
  }
  bool data_is_gone() {
    const char* data = *arena_->Data(data_bytes_);
    return std::all_of(data, data + data_bytes_, [](char c) { return c == 0; });
  }
  const SaveId& id() const { return id_; }
  int rank() const { return rank_; }

  void Ask(const std::string& order) {
    memfd_ = MakeArena(SaveArena::BytesFor(order.size(), 1001 + data_bytes_));
    arena_.emplace(*SaveArena::Map(UniqueFd(dup(memfd_.get()))));
    arena_->header()->board = board_;
    arena_->PutOrder(order, 1001, 1001 + data_bytes_);
    arena_->header()->hashes = 0;  // as a rank of a version without them
    char* data = *arena_->Data(data_bytes_);
    for (uint64_t i = 0; i < data_bytes_; ++i) data[i] = static_cast<char>(1 + (i * 7 + rank_) % 97);
    PutText(ManifestKey(id_), absl::MakeSpan(header()->request));
    header()->requested = 1;
    int ends[2];
    GT_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    channel_.reset(ends[0]);
    close(ends[1]);  // the rank is gone
  }

 private:
  const int rank_;
  const int64_t board_;
  const SaveId id_;
  SaveOrder order_;
  uint64_t data_bytes_ = 0;
  UniqueFd memfd_, channel_;
  std::optional<SaveArena> arena_;
};

std::string ClaimedFolder() {
  const std::string folder = TestFolder();
  auto store = *OpenDirectoryStore(folder);
  GT_CHECK(ClaimOwnership(store.get(), {.cluster = "c1", .job = "fashion-1", .job_hash = "hash-a"}, 1).ok());
  return folder;
}

absl::Status CheckCommitted(const std::string& folder, const SaveId& id) {
  auto store = *OpenDirectoryStore(folder);
  GT_ASSIGN_OR_RETURN(const auto read, ReadManifest(store.get(), id));
  const auto* manifest = std::get_if<Manifest>(&read);
  if (manifest == nullptr) return absl::AbortedError(std::get<AbortMarker>(read).reason);
  for (int rank = 0; rank < manifest->world_size; ++rank)
    GT_RETURN_IF_ERROR(VerifyShard(store.get(), *manifest, rank));
  return absl::OkStatus();
}

TEST(OutsideWriter, KilledAtEveryCallAnotherOneCommits) {
  for (const Fault when : {Fault::kBefore, Fault::kAfter}) {
    int killed = 0;
    for (uint64_t call = 0;; ++call) {
      const std::string folder = ClaimedFolder();
      LostRank rank(folder, 0, 1);
      const int code = LostRank::Wait(rank.StartWriter(call, when));
      if (code != kKilled) {
        EXPECT_EQ(code, 0);
        break;
      }
      ++killed;
      EXPECT_EQ(LostRank::Wait(rank.StartWriter()), 0);
      EXPECT_TRUE(rank.answer().ok()) << "call " << call << ": " << rank.answer();
      EXPECT_EQ(rank.header()->finished, 1u);
      EXPECT_TRUE(CheckCommitted(folder, rank.id()).ok())
          << "call " << call << ": " << CheckCommitted(folder, rank.id());
      EXPECT_EQ(rank.header()->starts, 2u);
    }
    EXPECT_GT(killed, 8);  // owner, shard, index, authority, manifest, retention
  }
}

// Which of two ranks know the board on which their writers meet.
struct OnBoard {
  bool ranks[2];
  bool again;  // those that are started anew find it once more
};

void ExpectTwoCommitWhenOneIsKilledAtEveryCall(const OnBoard& knows) {
  for (int victim : {0, 1}) {
    for (uint64_t call = 0;; ++call) {
      const std::string folder = ClaimedFolder();
      const auto board = *IndexBoard::Make(2, BoardName("fashion-1", 1));
      const auto address = [&](int rank) { return knows.ranks[rank] ? board->address() : 0; };
      LostRank ranks[] = {{folder, 0, 2, 1, address(0)}, {folder, 1, 2, 1, address(1)}};
      const pid_t other = ranks[1 - victim].StartWriter();
      const int code = LostRank::Wait(ranks[victim].StartWriter(call));
      if (code == kKilled) {
        if (!knows.again) ranks[victim].header()->board = 0;
        EXPECT_EQ(LostRank::Wait(ranks[victim].StartWriter()), 0);
      }
      EXPECT_EQ(LostRank::Wait(other), 0);
      EXPECT_TRUE(CheckCommitted(folder, ranks[0].id()).ok())
          << "victim " << victim << ", call " << call << ": " << CheckCommitted(folder, ranks[0].id());
      for (LostRank& rank : ranks) EXPECT_TRUE(rank.answer().ok()) << rank.answer();
      // The polls of one that waits have no end: the first dozen calls hold every kind.
      if (code != kKilled || call == 12) break;
    }
  }
}

TEST(OutsideWriter, EachOfTwoIsKilledAtEveryCall) {
  ExpectTwoCommitWhenOneIsKilledAtEveryCall({{false, false}, false});
}

TEST(OutsideWriter, EachOfTwoThatMeetOnABoardIsKilledAtEveryCall) {
  ExpectTwoCommitWhenOneIsKilledAtEveryCall({{true, true}, true});
}

// Rank 0's process is gone with the board's address.
TEST(OutsideWriter, EachOfTwoIsKilledAtEveryCallAndDoesNotFindTheBoardAgain) {
  ExpectTwoCommitWhenOneIsKilledAtEveryCall({{true, true}, false});
}

// A writer of the version before boards.
TEST(OutsideWriter, OneOfTwoKnowsNoBoard_N13) {
  ExpectTwoCommitWhenOneIsKilledAtEveryCall({{true, false}, true});
  ExpectTwoCommitWhenOneIsKilledAtEveryCall({{false, true}, true});
}

TEST(OutsideWriter, WhileItWaitsForOthersItNeedsNoMemory_C12) {
  for (const bool on_board : {false, true}) {
    for (const int waits : {0, 1}) {
      const std::string folder = ClaimedFolder();
      const auto board = *IndexBoard::Make(2, BoardName("fashion-1", 1));
      const int64_t address = on_board ? board->address() : 0;
      LostRank first(folder, waits, 2, 1, address), second(folder, 1 - waits, 2, 1, address);
      board->SetOpen(true);  // by a writer of rank 0, whoever of them comes first
      pid_t writer = first.StartWriter();
      ASSERT_TRUE(Until([&] { return first.header()->released != 0; }));
      ASSERT_TRUE(Until([&] { return first.data_is_gone(); }));
      // A writer that starts anew then takes its shard as written, even if it does not find the board again.
      kill(writer, SIGKILL);
      int status = 0;
      ASSERT_EQ(waitpid(writer, &status, 0), writer);
      first.header()->board = 0;
      writer = first.StartWriter();
      EXPECT_EQ(LostRank::Wait(second.StartWriter()), 0);
      EXPECT_EQ(LostRank::Wait(writer), 0);
      EXPECT_TRUE(CheckCommitted(folder, first.id()).ok()) << CheckCommitted(folder, first.id());
    }
  }
}

TEST(OutsideWriter, NothingIsCommittedBehindALaterTimeline_C3) {
  const std::string folder = ClaimedFolder();
  LostRank late(folder, 0, 1, 1), next(folder, 0, 1, 2);
  EXPECT_EQ(LostRank::Wait(next.StartWriter()), 0);
  EXPECT_EQ(LostRank::Wait(late.StartWriter()), 0);
  EXPECT_TRUE(CheckCommitted(folder, next.id()).ok());
  EXPECT_THAT(CheckCommitted(folder, late.id()).ToString(), HasSubstr("timeline 2"));
}

TEST(OutsideWriter, AnOrderItCannotReadIsRefusedWithTheReason) {
  const std::string folder = ClaimedFolder();
  for (const std::string& order : {std::string("{}"), std::string(3000, 'x')}) {
    LostRank rank(folder, 0, 1);
    rank.Ask(order);
    EXPECT_EQ(LostRank::Wait(rank.StartWriter()), 3);
    EXPECT_EQ(rank.header()->state, WriterState::kRefused);
    EXPECT_NE(TakeText(rank.header()->message), "");
  }
  LostRank elsewhere(TestFolder(), 0, 1);  // a folder without our claim
  EXPECT_EQ(LostRank::Wait(elsewhere.StartWriter()), 3);
  EXPECT_THAT(TakeText(elsewhere.header()->message), HasSubstr("owners/"));
}

// ------------------------------------------------------------------ settling

TEST(Settle, WhatIsLateGetsAMarkerAndCanNeverBeCommitted) {
  const std::string folder = ClaimedFolder();
  auto store = *OpenDirectoryStore(folder);
  LostRank first(folder, 0, 2);
  const pid_t writer = first.StartWriter();
  ASSERT_TRUE(Until([&] { return first.header()->released != 0; }));
  SaveId self = first.id();
  const auto alive = [] { return absl::OkStatus(); };
  // Saves of its own generation are not settled.
  ASSERT_TRUE(SettleEarlier(store.get(), self, alive, {absl::ZeroDuration(), absl::ZeroDuration()}).ok());
  ++self.generation;
  const SettlePatience for_shards{absl::ZeroDuration(), kLong};
  ASSERT_TRUE(SettleEarlier(store.get(), self, alive, for_shards).ok());
  LostRank second(folder, 1, 2);
  EXPECT_EQ(LostRank::Wait(second.StartWriter()), 0);
  EXPECT_EQ(LostRank::Wait(writer), 0);
  EXPECT_THAT(CheckCommitted(folder, first.id()).ToString(), HasSubstr("generation 2"));
  EXPECT_THAT(first.answer().ToString(), HasSubstr("generation 2"));
}

TEST(Settle, ACommitThatComesIsWaitedFor) {
  const std::string folder = ClaimedFolder();
  auto store = *OpenDirectoryStore(folder);
  LostRank first(folder, 0, 2), second(folder, 1, 2);
  EXPECT_EQ(LostRank::Wait(second.StartWriter(5, Fault::kAfter)), kKilled);  // its index may be there or not
  SaveId self = first.id();
  ++self.generation;
  pid_t writers[2] = {0, 0};
  const auto alive = [&] {  // asked in each turn: the writers come after the wait began
    if (writers[0] == 0) {
      writers[0] = first.StartWriter();
      writers[1] = second.StartWriter();
    }
    return absl::OkStatus();
  };
  ASSERT_TRUE(SettleEarlier(store.get(), self, alive, {kLong, kLong}).ok());
  EXPECT_TRUE(CheckCommitted(folder, first.id()).ok()) << CheckCommitted(folder, first.id());
  for (pid_t writer : writers) EXPECT_EQ(LostRank::Wait(writer), 0);
}

TEST(Settle, EndsWithItsGeneration) {
  const std::string folder = ClaimedFolder();
  auto store = *OpenDirectoryStore(folder);
  LostRank first(folder, 0, 2);
  EXPECT_EQ(LostRank::Wait(first.StartWriter(5)), kKilled);
  SaveId self = first.id();
  ++self.generation;
  const auto over = [] { return absl::UnavailableError("rank 1 was lost"); };
  EXPECT_TRUE(absl::IsUnavailable(SettleEarlier(store.get(), self, over, {kLong, kLong})));
}

// ------------------------------------------------------------------ under a Checkpointer

class HostedTest : public testing::Test {
 protected:
  HostedTest() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      MutexLock lock(&mu_);
      if (level != LogLevel::kInfo) loud_.push_back(std::string(line));
    });
  }
  ~HostedTest() override { SetLogSink(nullptr); }
  std::string loud() {
    MutexLock lock(&mu_);
    return absl::StrJoin(loud_, "\n");
  }
  Mutex mu_;
  std::vector<std::string> loud_;
};

TEST_F(HostedTest, SavesAreReportedAndTheStateMayChange_C5) {
  const std::string folder = TestFolder();
  FakeJob job{.world_size = 3};
  {
    HostedSession::Writers writers;
    RunHosted(job, &writers, [&](HostedSession* session) {
      auto rank = OpenRank(job, session, folder);
      ASSERT_TRUE(rank.ok()) << rank.status();
      for (int64_t step : {5, 6}) {
        Fill(rank->state.get(), State::At(step, session->rank()));
        auto saved = rank->checkpointer->Save(step);
        ASSERT_TRUE(saved.ok() && *saved) << saved.status();
        Fill(rank->state.get(), State::At(99, 9));
        const absl::Status waited = rank->checkpointer->Wait(kLong);
        ASSERT_TRUE(waited.ok()) << waited;
        EXPECT_EQ(rank->checkpointer->LastCommitted(), step);
        EXPECT_EQ(session->reported().back().first, step);
      }
    });
  }
  job.generation = job.timeline = 2;
  ExpectRestored(job, folder, 6);
  EXPECT_EQ(loud(), "");
}

// Between machines they meet in the storage; here each needs a file for its index only if a rank is lost.
TEST_F(HostedTest, OfOneMachineNoIndexIsStored) {
  const std::string folder = TestFolder();
  const FakeJob job{.world_size = 3};
  {
    HostedSession::Writers writers;
    RunHosted(job, &writers, [&](HostedSession* session) {
      auto rank = OpenRank(job, session, folder, 20);
      ASSERT_TRUE(rank.ok()) << rank.status();
      for (int64_t step = 1; step <= 10; ++step) {
        ASSERT_TRUE(rank->checkpointer->Save(step).ok());
        const absl::Status waited = rank->checkpointer->Wait(kLong);
        ASSERT_TRUE(waited.ok()) << waited;
      }
    });
  }
  auto store = *OpenDirectoryStore(folder);
  const std::vector<std::string> keys = *store->List(kAttemptPrefix);
  size_t indices = 0;
  for (const std::string& key : keys) indices += absl::EndsWith(key, ".index.json") ? 1 : 0;
  EXPECT_EQ(keys.size() - indices, 30u);
  EXPECT_LT(indices, 30u) << "each was stored, too";  // some on a machine that is slow for a second
}

TEST_F(HostedTest, ASaveNobodyWaitsForIsTheOneTheNextGenerationResumes) {
  const std::string folder = TestFolder();
  FakeJob job{.world_size = 2};
  HostedSession::Writers writers;
  RunHosted(job, &writers, [&](HostedSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    Fill(rank->state.get(), State::At(5, session->rank()));
    auto saved = rank->checkpointer->Save(5);
    ASSERT_TRUE(saved.ok() && *saved) << saved.status();
    session->Revoke();
    Fill(rank->state.get(), State::At(99, 9));
  });
  job.generation = job.timeline = 2;
  RunHosted(job, &writers, [&](HostedSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    auto restored = rank->checkpointer->Restore();
    ASSERT_TRUE(restored.ok() && *restored) << restored.status();
    EXPECT_EQ((*restored)->step, 5);
    EXPECT_TRUE(*rank->state == State::At(5, session->rank()));
  });
  EXPECT_EQ(loud(), "");
}

TEST_F(HostedTest, WithoutAWriterARankWritesItselfAndSaysSo) {
  const std::string folder = TestFolder();
  FakeJob job{.world_size = 2};
  HostedSession::Writers writers;
  writers.refuse = true;
  RunHosted(job, &writers, [&](HostedSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    Fill(rank->state.get(), State::At(5, session->rank()));
    ASSERT_TRUE(rank->checkpointer->Save(5).ok());
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  ExpectRestored(job, folder, 5);
  EXPECT_THAT(loud(), HasSubstr("writes its saves itself"));
  EXPECT_THAT(loud(), HasSubstr("no gtrain-writer beside the keeper"));
}

TEST_F(HostedTest, AWriterThatIsLostFailsItsSaveLoudlyAndTheRankGoesOnByItself) {
  const std::string folder = TestFolder();
  FakeJob job;
  HostedSession::Writers writers;
  writers.die = true;
  RunHosted(job, &writers, [&](HostedSession* session) {
    auto rank = OpenRank(job, session, folder);
    ASSERT_TRUE(rank.ok()) << rank.status();
    ASSERT_TRUE(rank->checkpointer->Save(5).ok());
    EXPECT_TRUE(absl::IsUnavailable(rank->checkpointer->Wait(kLong)));
    EXPECT_THAT(loud(), HasSubstr("step 5 is not saved"));
    Fill(rank->state.get(), State::At(6, session->rank()));
    ASSERT_TRUE(rank->checkpointer->Save(6).ok());
    EXPECT_TRUE(rank->checkpointer->Wait(kLong).ok());
  });
  ExpectRestored(job, folder, 6);
}

}  // namespace
}  // namespace gtrain::ckpt
