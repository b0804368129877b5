// Streams of state and step copies between two ranks that are threads.
#include "elastic/exec/step_copies.h"

#include <atomic>
#include <thread>

#include "base/status_macros.h"
#include "elastic/exec/run_test_world.h"
#include "gmock/gmock.h"

namespace gtrain::elastic {
namespace {

// Runs `rank` as so many ranks of one generation.
std::vector<absl::Status> RunRanks(int ranks,
                                   const std::function<absl::Status(std::shared_ptr<Communicator>)>& rank) {
  ThreadJob job;
  std::vector<int> all;
  for (int i = 0; i < ranks; ++i) all.push_back(i);
  job.Begin(all);
  std::vector<absl::Status> ends(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int i = 0; i < ranks; ++i) {
    threads.emplace_back([&, i] {
      ThreadSession session(&job, i, 0);
      absl::StatusOr<std::unique_ptr<Communicator>> comm = session.MakeCommunicator({});
      ends[static_cast<size_t>(i)] = comm.ok() ? rank(std::move(*comm)) : comm.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

std::vector<char> Filled(size_t bytes, int with) {
  std::vector<char> memory(bytes);
  for (size_t i = 0; i < bytes; ++i)
    memory[i] = static_cast<char>(i * 31 + i / 4096 + static_cast<size_t>(with));
  return memory;
}

TEST(StateStreams, PiecesEndWithTheirBlocks) {
  std::vector<char> one(5), none, two((4 << 20) + 1);
  const std::vector<absl::Span<char>> pieces =
      PiecesOf({absl::MakeSpan(one), absl::MakeSpan(none), absl::MakeSpan(two)});
  ASSERT_EQ(pieces.size(), 3);
  EXPECT_EQ(pieces[0].size(), 5);
  EXPECT_EQ(pieces[1].size(), 4 << 20);
  EXPECT_EQ(pieces[2].data(), two.data() + (4 << 20));
}

// Round a ring, of different sizes: each sends what it has and receives that of the one before it.
TEST(StateStreams, AllSendAndReceiveAtOnce) {
  const auto bytes = [](int rank) { return static_cast<size_t>(11'000'000 * rank + 1); };
  const auto ends = RunRanks(3, [&](std::shared_ptr<Communicator> comm) -> absl::Status {
    const int me = comm->rank(), next = (me + 1) % 3, before = (me + 2) % 3;
    std::vector<char> mine = Filled(bytes(me), me), other(bytes(before));
    StreamsBeside beside(comm);
    GT_RETURN_IF_ERROR(
        beside.Start({{Message::Kind::kSend, next, 1, PiecesOf({absl::MakeSpan(mine)})},
                      {Message::Kind::kReceive, before, 1, PiecesOf({absl::MakeSpan(other)})}}));
    int64_t sum = 1;  // collectives go on meanwhile
    GT_RETURN_IF_ERROR(comm->AllReduce(&sum, 1, DType::kInt64, ReduceOp::kSum));
    GT_RETURN_IF_ERROR(beside.Wait());
    EXPECT_EQ(sum, 3);
    EXPECT_TRUE(other == Filled(bytes(before), before));
    return comm->Barrier();
  });
  for (const absl::Status& end : ends) EXPECT_TRUE(end.ok()) << end;
}

// The sender's memory changes when some of it has gone: the receiver does not take it for the state.
TEST(StateStreams, WhatIsChangedMeanwhileIsAnErrorOfTheReceiver) {
  const auto ends = RunRanks(2, [&](std::shared_ptr<Communicator> comm) -> absl::Status {
    std::vector<char> memory = Filled(1000, 1);
    const auto pieces = PiecesOf({absl::MakeSpan(memory)});
    if (comm->rank() == 1) return RunStreams(*comm, {{{Message::Kind::kReceive, 0, 1, pieces}}});
    GT_RETURN_IF_ERROR(comm->Send(memory.data(), memory.size(), DType::kUint8, 1, 1));
    std::vector<char> hash(16, 'x');
    return comm->Send(hash.data(), hash.size(), DType::kUint8, 1, 1);
  });
  EXPECT_TRUE(ends[0].ok()) << ends[0];
  EXPECT_TRUE(absl::IsFailedPrecondition(ends[1]));
  EXPECT_NE(ends[1].message().find("rank 0 sent has come with another hash"), std::string::npos) << ends[1];
}

// Who gives up beside a stream that nobody receives ends at once, and so does the other one.
TEST(StateStreams, ARunThatEndsWaitsForNobody) {
  std::atomic<bool> gone{false};
  const auto ends = RunRanks(2, [&](std::shared_ptr<Communicator> comm) -> absl::Status {
    std::vector<char> memory(size_t{200} << 20);
    if (comm->rank() == 0) {
      {
        StreamsBeside beside(comm);
        GT_RETURN_IF_ERROR(
            beside.Start({{Message::Kind::kReceive, 1, 1, PiecesOf({absl::MakeSpan(memory)})}}));
      }
      gone = true;
      return absl::OkStatus();
    }
    const absl::Status ended = comm->Barrier();
    EXPECT_TRUE(gone || !ended.ok());
    return ended;
  });
  EXPECT_TRUE(ends[0].ok()) << ends[0];
  EXPECT_TRUE(absl::IsUnavailable(ends[1])) << ends[1];
}

TEST(StepCopies, AStateCanBeHadAgain) {
  std::vector<char> one = {'a', 'b'}, two = {'c'};
  StepCopies copies({absl::MakeSpan(one), absl::MakeSpan(two)});
  EXPECT_EQ(copies.undo_step(), -1);
  copies.TakeUndo(4);
  one[1] = two[0] = 'x';
  EXPECT_EQ(copies.undo_step(), 4);
  copies.Undo();
  EXPECT_EQ(one[1], 'b');
  EXPECT_EQ(two[0], 'c');
  copies.Forget(4);
  EXPECT_EQ(copies.undo_step(), 4);
  copies.Forget(3);
  EXPECT_EQ(copies.undo_step(), -1);
}

// Two ranks keep copies for each other: the two newest, and of those none that is later than what all went
// back to.
TEST(StepCopies, WhatIsOfAnUndoneStepIsForgotten) {
  const auto ends = RunRanks(2, [&](std::shared_ptr<Communicator> comm) -> absl::Status {
    const int me = comm->rank(), other = 1 - me;
    std::vector<char> state(static_cast<size_t>(me + 1), 'a');
    StepCopies copies({absl::MakeSpan(state)});
    GT_RETURN_IF_ERROR(copies.Meet(*comm, me, /*copy=*/0, {0, 1}, {0, 0}));
    for (int64_t step = 1; step <= 3; ++step) {
      state[0] = static_cast<char>('0' + step);
      GT_RETURN_IF_ERROR(RunStreams(*comm, copies.Streams()));
      EXPECT_TRUE(copies.Pieces(other, step).empty()) << "it is not whole yet";
      copies.Arrived(step);
    }
    EXPECT_THAT(copies.held(), testing::UnorderedElementsAre(PartCopy{other, 2}, PartCopy{other, 3}));
    copies.Forget(2);
    EXPECT_THAT(copies.held(), testing::UnorderedElementsAre(PartCopy{other, 2}, PartCopy{}));
    const std::vector<absl::Span<char>> pieces = copies.Pieces(other, 2);
    EXPECT_TRUE(pieces.size() == 1 && pieces[0].size() == static_cast<size_t>(other + 1) &&
                pieces[0][0] == '2');
    return absl::OkStatus();
  });
  for (const absl::Status& end : ends) EXPECT_TRUE(end.ok()) << end;
}

}  // namespace
}  // namespace gtrain::elastic
