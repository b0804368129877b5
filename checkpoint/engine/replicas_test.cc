// State that is registered as equal and is not (finding 6: two halves of two replicas were stitched,
// "intact").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/test_folder.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;

std::vector<absl::Status> SaveWith(const FakeJob& job, const std::string& folder, const std::string& verify,
                                   int saves, const std::function<void(int rank, State*)>& drift) {
  std::vector<absl::Status> out(job.world_size);
  RunRanks(job, [&](FakeSession* session) {
    auto rank =
        OpenRankWith(job, session, {.uri = folder, .commit_timeout = kLong, .verify_replicas = verify});
    ASSERT_TRUE(rank.ok()) << rank.status();
    for (int step = 1; step <= saves && out[session->rank()].ok(); ++step) {
      Fill(rank->state.get(), State::At(step, session->rank()));
      if (step == saves) drift(session->rank(), rank->state.get());
      out[session->rank()] = rank->checkpointer->Save(step).status();
      if (out[session->rank()].ok()) out[session->rank()] = rank->checkpointer->Wait(kLong);
    }
  });
  return out;
}

TEST_F(EngineTest, ReplicasThatDifferAreNamedAndNothingIsWritten) {
  const std::string folder = TestFolder();
  const FakeJob job{.world_size = 4};
  const auto drift = [](int rank, State* state) {
    if (rank == 2) state->large[699'999] += 1;
    if (rank >= 2) state->counter = 17;
  };
  for (const absl::Status& status : SaveWith(job, folder, "every 100", 1, drift)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"large\" on rank 2; "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"counter\" on rank 2, 3"));
    EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr("small")));
  }
  EXPECT_EQ(ListManifests(OpenDirectoryStore(folder)->get())->size(), 0u);
}

TEST_F(EngineTest, ReplicasAreComparedAsOftenAsAskedFor) {
  const FakeJob job{.world_size = 2};
  const auto drift = [](int rank, State* state) { state->small[0] += static_cast<float>(rank); };
  const auto fails = [&](const std::string& verify, int saves) {
    return !SaveWith(job, TestFolder(), verify, saves, drift)[0].ok();
  };
  EXPECT_FALSE(fails("off", 1));
  EXPECT_TRUE(fails("first", 1));
  EXPECT_FALSE(fails("first", 2));
  EXPECT_TRUE(fails("every 2", 1));
  EXPECT_FALSE(fails("every 2", 2));
  EXPECT_TRUE(fails("every 2", 3));
  EXPECT_THAT(info(), HasSubstr("replicas are equal: "));
}

// Sharded tensors have replicas too: the ranks with the same coordinates on the axes that they are split
// over.
TEST_F(EngineTest, ReplicasOfABoxAreCompared) {
  const std::string folder = TestFolder();
  const FakeJob job{.world_size = 4};
  const Sharding sharding{.mesh = {{"dp", 2}, {"tp", 2}}, .splits = {{0, "tp"}}};
  RunRanks(job, [&](FakeSession* session) {
    auto opened = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                                   &OpenDirectoryStore);
    ASSERT_TRUE(opened.ok());
    // Equal on ranks 0 and 2, and on 1 and 3; these pairs differ, as they should. Only the second tensor
    // drifts.
    std::vector<float> good(5, static_cast<float>(session->rank() % 2)), bad = good;
    if (session->rank() == 3) bad[4] = -1;
    ASSERT_TRUE((*opened)->AddSharded("good", MemoryOf(&good), {2, 5}, sharding, DType::kFloat32).ok());
    ASSERT_TRUE((*opened)->AddSharded("bad", MemoryOf(&bad), {2, 5}, sharding, DType::kFloat32).ok());
    const absl::Status saved = (*opened)->Save(1).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(saved)) << saved;
    EXPECT_THAT(std::string(saved.message()), HasSubstr("equal: \"bad\" on rank 3."));
  });
}

TEST_F(EngineTest, ReplicasOfABoxThatWasAddedAreCompared) {
  const std::string folder = TestFolder();
  RunRanks({.world_size = 4}, [&](FakeSession* session) {
    const FakeJob job{.world_size = 4};
    auto opened = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                                   &OpenDirectoryStore);
    ASSERT_TRUE(opened.ok());
    // Ranks 0 and 2 hold the first three elements, ranks 1 and 3 the other seven: no Sharding cuts so.
    const bool head = session->rank() % 2 == 0;
    std::vector<float> good(head ? 3 : 7, head ? 1.f : 2.f), bad = good;
    if (session->rank() == 3) bad[6] = -1;
    for (const auto& [name, values] : {std::pair("good", &good), std::pair("bad", &bad)}) {
      ASSERT_TRUE((*opened)
                      ->AddBox(name, MemoryOf(values), {10}, {head ? 0 : 3}, {head ? 3 : 7}, DType::kFloat32)
                      .ok());
    }
    const absl::Status saved = (*opened)->Save(1).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(saved)) << saved;
    EXPECT_THAT(std::string(saved.message()), HasSubstr("equal: \"bad\" on rank 3."));
  });
}

// A large tensor is hashed in parts by several threads: none of them may be left out.
TEST_F(EngineTest, ALargeReplicaIsComparedToItsEnd) {
  const std::string folder = TestFolder();
  RunRanks({.world_size = 2}, [&](FakeSession* session) {
    const FakeJob job{.world_size = 2};
    auto opened = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                                   &OpenDirectoryStore);
    ASSERT_TRUE(opened.ok());
    std::vector<char> values((33 << 20) + 1);
    if (session->rank() == 1) values.back() = 1;
    ASSERT_TRUE(
        (*opened)
            ->AddReplicated("w", MemoryOf(&values), {static_cast<int64_t>(values.size())}, DType::kUint8)
            .ok());
    const absl::Status saved = (*opened)->Save(1).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(saved)) << saved;
    EXPECT_THAT(std::string(saved.message()), HasSubstr("equal: \"w\" on rank 1."));
  });
}

}  // namespace
}  // namespace gtrain::ckpt
