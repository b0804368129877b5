// The Checkpointer as a training program uses it, over fakes of the session and real storage.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
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

TEST_F(EngineTest, RunByHandTwice) {
  const std::string folder = TestFolder();
  const FakeJob job{
      .job = "", .cluster = "", .job_hash = "", .managed = false, .generation = 0, .timeline = 0};
  ASSERT_TRUE(SaveSteps(job, folder, {10, 20}).ok());
  ExpectRestored(job, folder, 20);
  ASSERT_TRUE(SaveSteps(job, folder, {20, 20}).ok());  // the same names are never taken twice
  ExpectRestored(job, folder, 20);
}

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
  for (const std::string& path : FilesOfStep(folder, 3)) {
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

}  // namespace
}  // namespace gtrain::ckpt
