// A checkpointer of a process that lives on into other generations of its job.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/test_folder.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/store/memory_store.h"
#include "gtest/gtest.h"

namespace gtrain::ckpt {
namespace {

std::unique_ptr<Checkpointer> Make(const FakeJob& job, FakeSession* session, const std::string& folder,
                                   State* state, const StoreFactory& factory = &OpenDirectoryStore) {
  std::unique_ptr<Communicator> comm;
  if (job.world_size > 1) comm = *session->MakeCommunicator({});
  auto made = MakeCheckpointer(session, std::move(comm), {.uri = folder, .commit_timeout = kLong},
                               EnvironmentOf(job), factory);
  EXPECT_TRUE(made.ok()) << made.status();
  EXPECT_TRUE(Register(made->get(), state).ok());
  return *std::move(made);
}

size_t Leases(const std::string& folder) { return (*OpenDirectoryStore(folder))->List("leases/")->size(); }

TEST(CheckpointGenerations, OpensInTwoHalvesAndTheFirstSaveWaitsForNothing) {
  const FakeJob job{.world_size = 2};
  const std::string folder = TestFolder();
  RunRanks(job, [&](FakeSession* session) {
    State state = State::At(5, session->rank());
    const auto checkpointer = Make(job, session, folder, &state);
    absl::Status started, prepared;
    std::thread([&] {
      started = checkpointer->Start();
      prepared = checkpointer->PrepareToSave();
    }).join();
    ASSERT_TRUE(started.ok()) << started;
    ASSERT_TRUE(prepared.ok()) << prepared;
    ASSERT_TRUE(checkpointer->Save(5).value());
    ASSERT_TRUE(checkpointer->Wait(kLong).ok());
  });
  ExpectRestored(job, folder, 5);
}

TEST(CheckpointGenerations, OnceAnotherGenerationIsJoinedItSavesNothingAndLeavesTheDirectoryToTheJob) {
  const FakeJob job;
  const std::string folder = TestFolder();
  FakeSession session(job, 0);
  State state = State::At(1, 0);
  auto checkpointer = Make(job, &session, folder, &state);
  ASSERT_TRUE(checkpointer->Start().ok());
  ASSERT_TRUE(checkpointer->Save(1).value());
  ASSERT_TRUE(checkpointer->Wait(kLong).ok());
  session.BeginGeneration(2);
  ASSERT_TRUE(session.Alive().ok());
  EXPECT_TRUE(absl::IsUnavailable(checkpointer->Save(2).status()));
  ASSERT_EQ(Leases(folder), 1);
  std::thread([&] { checkpointer.reset(); }).join();
  EXPECT_EQ(Leases(folder), 1) << "between two generations the directory is not free";
  State next = State::At(2, 0);
  checkpointer = Make(job, &session, folder, &next);
  ASSERT_TRUE(checkpointer->Start().ok());
  ASSERT_TRUE(checkpointer->Save(2).value());
  ASSERT_TRUE(checkpointer->Wait(kLong).ok());
  EXPECT_NE(session.reported().back().second.find(".g0002."), std::string::npos);
}

// It is Make that asks which generation this is, however late its thread comes to open.
TEST(CheckpointGenerations, OneThatOpensTooLateBelongsToTheGenerationItWasMadeIn) {
  const FakeJob job;
  const std::string folder = TestFolder();
  FakeSession session(job, 0);
  State state = State::At(1, 0);
  const auto late = Make(job, &session, folder, &state);
  session.BeginGeneration(2);
  (void)late->Start();
  EXPECT_TRUE(absl::IsUnavailable(late->PrepareToSave()) || absl::IsUnavailable(late->Save(1).status()));
}

}  // namespace
}  // namespace gtrain::ckpt
