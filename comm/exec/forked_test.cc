// The whole communicator among forked processes: real memory, real UCX between pretended machines, real
// deaths.
#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/unique_fd.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/communicator.h"
#include "comm/exec/held_test_counts.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_world.h"
#include "comm/shm/mapping.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/ucx_test_here.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr absl::Duration kEndsWithin = absl::Seconds(10);
#else
constexpr absl::Duration kEndsWithin = absl::Seconds(2);
#endif

// A page that parent and children share.
struct Board {
  std::atomic<int> steps[32];
  std::atomic<int64_t> returned_at_ns[32];
  std::atomic<int> code[32];
};

class Forked : public testing::Test {
 protected:
  Forked() {
    void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    GT_CHECK(page != MAP_FAILED);
    board_ = static_cast<Board*>(page);
  }
  ~Forked() override {
    for (pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    munmap(board_, sizeof(Board));
  }

  // Exit code of a child: 0 body OK, 1 not. Real UCX between pretended machines.
  void Start(FakeWorld& world, const Body& body) {
    for (int rank = 0; rank < world.size(); ++rank) {
      const pid_t pid = fork();
      GT_CHECK(pid >= 0);
      if (pid == 0) _exit(Child(world, rank, body));
      pids_.push_back(pid);
    }
  }

  int Child(FakeWorld& world, int rank, const Body& body) {
    std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
    ExecOptions options;
    options.user.timeout = timeouts_.empty() ? kPatience : timeouts_[static_cast<size_t>(rank)];
    options.network = network_;
    options.algorithm = algorithm_;
    auto communicator = MakeCommunicator(bootstrap.get(), options);
    absl::Status status = communicator.ok() ? body(**communicator) : communicator.status();
    board_->returned_at_ns[rank] = RealClock().Now().ns;
    board_->code[rank] = static_cast<int>(status.code());
    if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }

  int RefusedNetwork(FakeWorld& world, int rank) {
    std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
    ExecOptions options;
    options.user.timeout = kPatience;
    options.network = network_;
    const absl::Status status = MakeCommunicator(bootstrap.get(), options).status();
    const std::string said(status.message());
    std::fprintf(stderr, "rank %d: %s\n", rank, said.c_str());
    return absl::IsFailedPrecondition(status) && absl::StrContains(said, "rank 0 (127.0.0.1)") &&
                   absl::StrContains(said,
                                     "GTRAIN_COMM_TLS is 'rc,tcp', which cannot be used: no rc on lo;") &&
                   absl::StrContains(said, "tcp on lo")
               ? 0
               : 1;
  }

  void ExpectAllSucceed(FakeWorld& world, const Body& body) {
    Start(world, body);
    ExpectStartedSucceed();
  }

  void ExpectStartedSucceed() {
    const std::vector<pid_t> pids = std::exchange(pids_, {});
    for (size_t rank = 0; rank < pids.size(); ++rank) {
      int status = 0;
      ASSERT_EQ(waitpid(pids[rank], &status, 0), pids[rank]);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << " status " << status;
    }
  }

  // All-reduces until it fails; kills `victim` in the middle, revokes, and checks that all others return
  // Unavailable within two seconds of the verdict.
  void KillInTheMiddle(const std::vector<std::string>& nodes, int victim, size_t count = 400'000,
                       bool direct = false) {
    KillInTheMiddle(nodes, victim, [&](Communicator& c) -> absl::Status {
      std::vector<float> own(count, 1.0f);
      void* data = own.data();
      if (direct) {
        auto memory = c.Allocate(count * sizeof(float));
        RETURN_IF_BAD(memory.status());
        data = *memory;
      }
      for (;;) {
        RETURN_IF_BAD(c.AllReduce(data, count, DType::kFloat32, ReduceOp::kMax));
        ++board_->steps[c.rank()];
      }
    });
  }

  void KillInTheMiddle(const std::vector<std::string>& nodes, int victim, const Body& body) {
    for (auto& steps : board_->steps) steps = 0;
    FakeWorld world(nodes);
    Start(world, body);
    const Instant start = RealClock().Now();
    while (board_->steps[victim] < 5) {
      ASSERT_LT(RealClock().Now() - start, kPatience);
      absl::SleepFor(absl::Milliseconds(1));
    }
    kill(pids_[static_cast<size_t>(victim)], SIGKILL);
    waitpid(pids_[static_cast<size_t>(victim)], nullptr, 0);
    world.Revoke("rank was killed");
    const Instant revoked = RealClock().Now();
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (static_cast<int>(rank) == victim) continue;
      int status = 0;
      ASSERT_EQ(waitpid(pids_[rank], &status, 0), pids_[rank]);
      EXPECT_TRUE(WIFEXITED(status)) << "rank " << rank << " ended by signal " << WTERMSIG(status);
      EXPECT_EQ(board_->code[rank], static_cast<int>(absl::StatusCode::kUnavailable)) << "rank " << rank;
      EXPECT_LT(Instant{board_->returned_at_ns[rank]} - revoked, kEndsWithin) << "rank " << rank;
    }
    pids_.clear();
  }

  // Rank 0 blocks in two communicators at once, which rank 1 never serves. 0: both returned Unavailable.
  int BlockInTwo(FakeWorld& world, int rank) {
    std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
    auto a = MakeCommunicator(bootstrap.get()), b = MakeCommunicator(bootstrap.get());
    if (!a.ok() || !b.ok()) return 2;
    if (rank == 1) {
      ++board_->steps[1];
      while (bootstrap->Alive().ok()) absl::SleepFor(absl::Milliseconds(5));
      return 0;
    }
    absl::Status first, second;
    std::thread other([&] { ++board_->steps[0], first = (*a)->Barrier(); });
    ++board_->steps[0];
    second = (*b)->Barrier();
    other.join();
    return absl::IsUnavailable(first) && absl::IsUnavailable(second) ? 0 : 1;
  }

  std::string network_, algorithm_;       // what GTRAIN_COMM_TLS and GTRAIN_COMM_ALGO would say
  std::vector<absl::Duration> timeouts_;  // by rank; empty: kPatience
  Board* board_ = nullptr;
  std::vector<pid_t> pids_;
};

TEST_F(Forked, OneMachine) {
  for (int ranks : {2, 4, 8}) {
    FakeWorld world(FakeWorld::OneNode(ranks));
    ExpectAllSucceed(world, Everything);
  }
}

TEST_F(Forked, DirectMemory) {
  FakeWorld world(FakeWorld::OneNode(4));
  ExpectAllSucceed(world, DirectMemory);
}

// Every rank hands on what it got, so all wait for the victim soon, some in Send and some in Receive.
TEST_F(Forked, L1L3L7KilledRankInSendAndReceive) {
  std::vector<std::vector<std::string>> worlds{FakeWorld::OneNode(4)};
  if (UcxHere()) worlds.push_back({"a", "b", "c", "d"});
  if (UcxHere()) worlds.push_back({"a", "a", "b", "b"});
  for (const auto& nodes : worlds) {
    for (int victim : {0, 3}) {
      for (size_t count : {1, 400'000}) {
        SCOPED_TRACE(testing::Message()
                     << testing::PrintToString(nodes) << " victim " << victim << " of " << count);
        KillInTheMiddle(nodes, victim, [&](Communicator& c) -> absl::Status {
          std::vector<float> data(count, 1.0f);
          const int next = (c.rank() + 1) % c.size(), previous = (c.rank() + c.size() - 1) % c.size();
          for (;;) {
            if (c.rank() % 2 == 0) RETURN_IF_BAD(c.Send(data.data(), count, DType::kFloat32, next));
            RETURN_IF_BAD(c.Receive(data.data(), count, DType::kFloat32, previous));
            if (c.rank() % 2 == 1) RETURN_IF_BAD(c.Send(data.data(), count, DType::kFloat32, next));
            ++board_->steps[c.rank()];
          }
        });
      }
    }
  }
}

TEST_F(Forked, L1L3L7KilledRankOnOneMachine) {
  for (int victim : {0, 3}) KillInTheMiddle(FakeWorld::OneNode(4), victim);
}

// The rank is killed in a post, in staging, and in the midst of memory that others write to.
TEST_F(Forked, L1L3L7KilledRankInEveryWayInsideAMachine) {
  for (size_t count : {16, 2'000, 30'000, 2'000'000}) {
    KillInTheMiddle(FakeWorld::OneNode(3), 1, count, /*direct=*/false);
    KillInTheMiddle(FakeWorld::OneNode(3), 2, count, /*direct=*/true);
  }
}

TEST_F(Forked, L1L3L7KilledRankInEveryCollective) {
  const Body body = [&](Communicator& c) -> absl::Status {
    for (size_t count = 1;; count = count * 7 % 100'003) {
      const size_t all = count * static_cast<size_t>(c.size());
      std::vector<float> in(all), out(all);
      RETURN_IF_BAD(c.ReduceScatter(in.data(), out.data(), count, DType::kFloat32, ReduceOp::kSum));
      RETURN_IF_BAD(c.AllGather(in.data(), out.data(), count, DType::kFloat32));
      RETURN_IF_BAD(c.Reduce(in.data(), all, DType::kFloat32, ReduceOp::kMax, 1));
      RETURN_IF_BAD(c.AllToAll(in.data(), out.data(), count, DType::kFloat32));
      RETURN_IF_BAD(c.Broadcast(in.data(), all, DType::kFloat32, 2));
      auto half = c.Split(c.rank() % 2, 0);
      RETURN_IF_BAD(half.status());
      RETURN_IF_BAD((*half)->AllReduce(in.data(), count, DType::kFloat32, ReduceOp::kSum));
      ++board_->steps[c.rank()];
    }
  };
  for (int victim : {0, 1, 2}) KillInTheMiddle(FakeWorld::OneNode(3), victim, body);
  if (UcxHere()) KillInTheMiddle({"a", "b", "c"}, 1, body);
}

// More ranks than cores, none of which gets to look without pause.
TEST_F(Forked, RanksOutnumberCores) {
  FakeWorld world(FakeWorld::OneNode(8));
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  for (size_t core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  Start(world, [](Communicator& c) -> absl::Status {
    for (int i = 0; i < 300; ++i) {
      RETURN_IF_BAD(CheckAllReduce(c, 10, DType::kFloat32, ReduceOp::kSum));
      RETURN_IF_BAD(c.Barrier());
    }
    return CheckAllReduce(c, 100'000, DType::kFloat64, ReduceOp::kMean);
  });
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  ExpectStartedSucceed();
}

TEST_F(Forked, UcxBetweenPretendedMachines) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  const std::vector<std::vector<std::string>> worlds{
      {"a", "b"}, {"a", "b", "c", "d"}, {"a", "a", "b", "b"}, {"a", "b", "b", "a", "c"}};
  for (const auto& nodes : worlds) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllSucceed(world, Everything);
    FakeWorld again(nodes);
    ExpectAllSucceed(again, [](Communicator& c) -> absl::Status {
      RETURN_IF_BAD(SendAndReceive(c));
      RETURN_IF_BAD(Uneven(c));
      return Messages(c);
    });
  }
  FakeWorld mesh({"a", "b", "b", "a"});
  ExpectAllSucceed(mesh, RowsAndColumns);
}

// This holds even where one of them is gone: only two barriers and a sum are left of a first communicator's
// messages.
TEST_F(Forked, UcxALaterCommunicatorMeasuresNothing) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  FakeWorld all({"a", "b", "c"}), fewer({"a", "b"});
  for (int rank = 0; rank < 3; ++rank) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      _exit([&] {
        std::unique_ptr<Bootstrap> bootstrap = all.Rank(rank);
        uint64_t first = 0, second = 0, third = 0;
        {
          auto made = MakeCommunicator(bootstrap.get());
          if (!made.ok()) return 2;
          first = bootstrap->fabric()->given();
          auto again = MakeCommunicator(bootstrap.get());
          if (!again.ok() || !CheckAllReduce(**again, 1000, DType::kFloat32, ReduceOp::kSum).ok()) return 3;
          second = bootstrap->fabric()->given() - first;
        }
        if (rank < 2) {
          std::unique_ptr<Bootstrap> less = fewer.Rank(rank);
          less->fabric() = bootstrap->fabric();
          const uint64_t before = less->fabric()->given();
          auto made = MakeCommunicator(less.get());
          if (!made.ok() || !CheckAllReduce(**made, 1000, DType::kFloat32, ReduceOp::kSum).ok()) return 4;
          third = less->fabric()->given() - before;
        }
        if (first < 30 || second > 20 || third > 20)
          std::fprintf(stderr, "rank %d: %d, %d, %d pieces\n", rank, int(first), int(second), int(third));
        // A busy machine ends the measurement, which has 40 rounds at most, a little earlier.
        return first >= 30 && second <= 20 && third <= 20 ? 0 : 5;
      }());
    }
    pids_.push_back(pid);
  }
  ExpectStartedSucceed();
}

// Transports are chosen by the names of GTRAIN_COMM_TLS; no RDMA device belongs to the loopback interface.
TEST_F(Forked, UcxTransportsByName) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  network_ = "tcp";
  FakeWorld by_tcp({"a", "b", "b"});
  ExpectAllSucceed(by_tcp, Everything);
  network_ = "rc,tcp";
  FakeWorld world({"a", "b"});
  for (int rank = 0; rank < world.size(); ++rank) {
    const pid_t pid = fork();
    if (pid == 0) _exit(RefusedNetwork(world, rank));
    pids_.push_back(pid);
  }
  ExpectStartedSucceed();
}

// Many connections whose two ends want to speak first.
TEST_F(Forked, UcxConnectionsThatBothEndsNeedAtOnce) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  FakeWorld world({"a", "b", "c"});
  ExpectAllSucceed(world, [](Communicator& c) -> absl::Status {
    for (int i = 0; i < 20; ++i) {
      auto next = c.Split(0, (c.rank() + i) % c.size());
      RETURN_IF_BAD(next.status());
      int64_t out[3] = {i, i, i}, in[3];
      RETURN_IF_BAD((*next)->AllToAll(out, in, 1, DType::kInt64));
    }
    return absl::OkStatus();
  });
}

// Checks the counts of comm/ucx/fabric.h: a process has some descriptors of its own and a connection to each
// other one that it has spoken with, and further communicators among those have none.
TEST_F(Forked, UcxDescriptorsOfCommunicators) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  constexpr size_t kOwn = 11;
  algorithm_ = "leader+deterministic";
  std::vector<std::string> twenty;
  for (int machine = 0; machine < 20; ++machine) twenty.push_back(absl::StrCat("m", machine));
  for (const auto& nodes : {kFours[1], kFours[2], twenty}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    const size_t machines = std::set<std::string>(nodes.begin(), nodes.end()).size();
    const size_t before = OpenDescriptors();
    FakeWorld world(nodes);
    ExpectAllSucceed(world, [&](Communicator& c) -> absl::Status {
      const bool speaks = machines == nodes.size() || c.rank() % 2 == 0;
      const size_t connections = speaks ? machines - 1 : 0;
      if (const size_t more = OpenDescriptors() - before; more > kOwn + connections)
        return absl::InternalError(absl::StrCat(more, " descriptors with ", connections, " connections"));
      std::vector<std::unique_ptr<Communicator>> parts;
      const auto split = [&]() -> absl::Status {
        for (const int color : {0, c.rank() % 2}) {
          auto part = c.Split(color, 0);
          RETURN_IF_BAD(part.status());
          float number = 1;
          RETURN_IF_BAD((*part)->AllReduce(&number, 1, DType::kFloat32, ReduceOp::kSum));
          if (number != static_cast<float>((*part)->size())) return absl::InternalError("a wrong sum");
          parts.push_back(*std::move(part));
        }
        return c.Barrier();  // so that all have made theirs
      };
      RETURN_IF_BAD(split());
      const size_t first = OpenDescriptors();
      for (int i = 0; i < 10; ++i) RETURN_IF_BAD(split());
      if (const size_t now = OpenDescriptors(); now > first)
        return absl::InternalError(absl::StrCat(now - first, " descriptors of further communicators"));
      return c.Barrier();
    });
  }
}

// Communicators of several threads share the connections of a process: the thread that waits drives for all.
TEST_F(Forked, UcxThreadsOnOneFabric) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  constexpr int kThreads = 3;
  for (const auto& nodes : {kFours[1], kFours[2]}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllSucceed(world, [](Communicator& c) -> absl::Status {
      std::vector<std::unique_ptr<Communicator>> parts;
      for (int i = 0; i < kThreads; ++i) {
        auto part = c.Split(0, i % 2 == 0 ? c.rank() : -c.rank());
        RETURN_IF_BAD(part.status());
        parts.push_back(*std::move(part));
      }
      std::vector<absl::Status> results(kThreads);
      std::vector<std::thread> threads;
      for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
          const auto at = static_cast<size_t>(i);
          for (int step = 0; step < 60 && results[at].ok(); ++step) {
            const size_t count = step % 10 == 0 ? 200'000 : static_cast<size_t>(1 + step * 37 % 500);
            results[at] = CheckAllReduce(*parts[at], count, DType::kFloat32, ReduceOp::kSum);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (const absl::Status& result : results) RETURN_IF_BAD(result);
      return c.Barrier();
    });
  }
}

// Ranks 1 and 3 are connected with the communicator, but where leaders carry everything rank 3 does not look
// at its connections until somebody speaks with it.
TEST_F(Forked, UcxSendWaitsForNobodyElse) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  algorithm_ = "leader";
  FakeWorld world({"a", "a", "b", "b"});
  ExpectAllSucceed(world, [](Communicator& c) -> absl::Status {
    float x = 1;
    if (c.rank() == 1) RETURN_IF_BAD(c.Send(&x, 1, DType::kFloat32, 2));
    if (c.rank() == 2) RETURN_IF_BAD(c.Receive(&x, 1, DType::kFloat32, 1));
    return c.Barrier();
  });
}

TEST_F(Forked, UcxAnAbortEndsTheCallsOfAll) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  timeouts_.assign(4, kNever);
  for (const auto& nodes : {kFours[1], kFours[2]}) {
    for (const std::string algorithm : {"leader", "rails"}) {
      for (int victim = 1; victim < 3; ++victim) {
        SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << algorithm << victim);
        algorithm_ = algorithm;
        FakeWorld world(nodes);
        ExpectAllSucceed(world, [&](Communicator& c) -> absl::Status {
          std::vector<float> data(100'000);
          absl::Status status;
          for (int i = 0; status.ok(); ++i) {
            if (i == 3 && c.rank() == victim) c.Abort(absl::InternalError("words of its own"));
            status = c.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum);
          }
          const std::string notice = absl::StrCat("rank ", victim, " gave up: words of its own");
          if (c.rank() == victim) return status.message() == "words of its own" ? absl::OkStatus() : status;
          return absl::IsUnavailable(status) && absl::EndsWith(status.message(), notice) ? absl::OkStatus()
                                                                                         : status;
        });
      }
    }
  }
}

// An error inside a call, which leaves messages under way, is told as well: rank 1 gives up by its own
// deadline, the others, one of whom comes late, would wait much longer.
TEST_F(Forked, UcxAnErrorInACallEndsThoseOfAll) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  timeouts_ = {kNever, absl::Seconds(3), kNever};
  FakeWorld world({"a", "b", "c"});
  for (auto& steps : board_->steps) steps = 0;
  ExpectAllSucceed(world, [&](Communicator& c) -> absl::Status {
    RETURN_IF_BAD(c.Barrier());
    const Instant give_up = RealClock().Now() + kPatience;
    while (c.rank() == 0 && board_->steps[1] == 0 && RealClock().Now() < give_up)
      absl::SleepFor(absl::Milliseconds(5));
    std::vector<float> data(400'000);
    const absl::Status status = c.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum);
    board_->steps[c.rank()] = 1;
    if (c.rank() == 1) return absl::IsDeadlineExceeded(status) ? absl::OkStatus() : status;
    const bool heard =
        absl::IsUnavailable(status) && absl::StrContains(status.message(), "rank 1 gave up: all-reduce");
    return heard ? absl::OkStatus() : status;
  });
}

// Ranks that wait for a closed communicator hear of it, while its process lives on.
TEST_F(Forked, UcxAClosedCommunicatorIsHeardOf) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  for (const auto& nodes : std::vector<std::vector<std::string>>{
           {"a", "b"}, {"a", "b", "c"}, {"a", "a", "b", "b"}, {"a", "b", "b", "b"}}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    timeouts_.assign(nodes.size(), kNever);
    FakeWorld world(nodes);
    ExpectAllSucceed(world, [&](Communicator& c) -> absl::Status {
      RETURN_IF_BAD(c.Barrier());
      if (c.rank() == 0) return absl::OkStatus();
      const absl::Status status = c.Barrier();
      const bool heard = absl::IsUnavailable(status) &&
                         absl::StrContains(status.message(), "rank 0 has closed its communicator");
      return heard ? absl::OkStatus() : status;
    });
  }
}

TEST_F(Forked, L1L3L7KilledRankAcrossMachines) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  KillInTheMiddle({"a", "b", "c"}, 1);
  KillInTheMiddle({"a", "a", "b", "b"}, 0);  // a leader
  KillInTheMiddle({"a", "a", "b", "b"}, 3);  // not a leader
}

TEST_F(Forked, L2TwoCommunicatorsOfAProcessEndTogether) {
  FakeWorld world({"a", "b"});
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  for (auto& steps : board_->steps) steps = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) _exit(BlockInTwo(world, rank));
    pids_.push_back(pid);
  }
  const Instant start = RealClock().Now();
  while (board_->steps[0] < 2 || board_->steps[1] < 1) {
    ASSERT_LT(RealClock().Now() - start, kPatience);
    absl::SleepFor(absl::Milliseconds(1));
  }
  world.Revoke("the head said so");
  for (pid_t pid : std::exchange(pids_, {})) {
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

// A sanitized build has the handlers of the sanitizer's run time (libasan.so, libtsan.so) from its start.
bool OfSanitizer(const void* handler) {
  Dl_info image;
  return dladdr(handler, &image) != 0 && absl::StrContains(image.dli_fname, "san.so");
}

TEST_F(Forked, UcxLeavesTheProcessAsItWas) {
  if (!UcxHere()) GTEST_SKIP() << "built without UCX";
  FakeWorld world({"a", "b"});
  const auto code_of = [](auto* function) {
    return std::string(reinterpret_cast<const char*>(function), 16);
  };
  const std::string unmap = code_of(&munmap), map = code_of(&mmap);
  ExpectAllSucceed(world, [&](Communicator& c) -> absl::Status {
    RETURN_IF_BAD(c.Barrier());
    if (code_of(&munmap) != unmap || code_of(&mmap) != map) return absl::InternalError("memory hooks");
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTERM}) {
      struct sigaction now;
      sigaction(signal, nullptr, &now);
      if (now.sa_handler != SIG_DFL && !OfSanitizer(reinterpret_cast<const void*>(now.sa_handler)))
        return absl::InternalError(absl::StrCat("handler of signal ", signal));
    }
    return absl::OkStatus();
  });
}

// How many arenas this process has mapped.
int ArenasMapped() {
  const absl::StatusOr<std::string> maps = ReadFile("/proc/self/maps", 1 << 20);
  int count = 0;
  for (size_t at = 0; maps.ok() && (at = maps->find("/arena-", at)) != std::string::npos; ++at) ++count;
  return count;
}

// A data loader needs what the program has in memory, and nothing of what ranks say to each other.
TEST_F(Forked, AForkedChildHasTheProgramsMemoryAlone) {
  FakeWorld world(FakeWorld::OneNode(2));
  ExpectAllSucceed(world, [](Communicator& c) -> absl::Status {
    auto memory = c.Allocate(1000 * sizeof(float));
    RETURN_IF_BAD(memory.status());
    auto* const data = static_cast<float*>(*memory);
    std::fill_n(data, 1000, 3.0f);
    RETURN_IF_BAD(c.AllReduce(data, 1000, DType::kFloat32, ReduceOp::kSum));
    if (ArenasMapped() < 2) return absl::InternalError("the test does not see arenas");
    const pid_t child = fork();
    if (child == 0) _exit(ArenasMapped() == 1 && data[0] == 6 && data[999] == 6 ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return absl::InternalError("the child has other memory");
    return CheckAllReduce(c, 100'000, DType::kFloat32, ReduceOp::kSum);
  });
}

// What it has in its place is not unmapped with it.
TEST(Mapping, IsUnmappedWhereItIs) {
  UniqueFd fd(memfd_create("arena-of-a-test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  auto mapping = Mapping::OfFile(fd.get(), 4096);
  ASSERT_TRUE(mapping.ok());
  mapping->KeepFromChildren();
  const pid_t child = fork();
  if (child == 0) {
    void* const own = mmap(mapping->data(), 4096, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    *mapping = Mapping();
    if (own != MAP_FAILED) *static_cast<volatile char*>(own) = 1;
    _exit(own == MAP_FAILED ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  mapping->data()[0] = 1;
}

TEST_F(Forked, ForkedChildOfARankIsInert) {
  FakeWorld world(FakeWorld::OneNode(2));
  ExpectAllSucceed(world, [](Communicator& c) -> absl::Status {
    RETURN_IF_BAD(c.Barrier());
    const pid_t child = fork();
    if (child == 0) _exit(absl::IsFailedPrecondition(c.Barrier()) ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return absl::InternalError("the child could use the communicator");
    return c.Barrier();
  });
}

}  // namespace
}  // namespace gtrain::comm
