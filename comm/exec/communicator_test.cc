// The whole communicator: threads and forked processes, one machine and several pretended ones.
#include "comm/exec/communicator.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "comm/plan/cost.h"
#include "comm/ucx/ucx_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

TEST(Communicator, OneMachine) {
  for (int ranks : {1, 2, 3, 4, 8}) {
    SCOPED_TRACE(ranks);
    FakeWorld world(FakeWorld::OneNode(ranks));
    ExpectAllOk(RunThreads(world, Everything));
  }
}

TEST(Communicator, DirectMemory) {
  for (int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    FakeWorld world(FakeWorld::OneNode(ranks));
    ExpectAllOk(RunThreads(world, DirectMemory));
  }
}

TEST(Communicator, EveryWayInsideAMachine) {
  for (int ranks : {2, 3, 5}) {
    SCOPED_TRACE(ranks);
    FakeWorld world(FakeWorld::OneNode(ranks));
    ExpectAllOk(RunThreads(world, EveryWay));
  }
}

TEST(Communicator, SeveralMachinesOverAFakeNetwork) {
  const std::vector<std::vector<std::string>> worlds{
      {"a", "b"}, {"a", "b", "c"}, {"a", "a", "b", "b"}, {"a", "b", "a", "c", "b"}, {"b", "a", "a", "a"}};
  for (const auto& nodes : worlds) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, Everything));
    FakeWorld again(nodes);
    ExpectAllOk(RunThreads(again, DirectMemory));
  }
}

// Of GTRAIN_COMM_ALGO, where each machine has one rank and where some have several.
std::vector<std::string> AlgorithmsOn(const std::vector<std::string>& nodes) {
  if (std::set<std::string>(nodes.begin(), nodes.end()).size() == nodes.size())
    return {"auto", "ring", "doubling", "halving-doubling", "double-tree"};
  return {"leader", "rails", "ring+rails", "double-tree+rails"};
}

// Sums whose value depends on the order of additions.
TEST(Communicator, ResultsAreBitIdenticalOnAllRanks) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a", "a", "a"},
                                                                 {"a", "b", "c"},
                                                                 {"a", "b", "c", "d"},
                                                                 {"a", "b", "a", "b", "b"},
                                                                 {"a", "b", "c", "c", "b", "a"}}) {
    for (const std::string& algorithm : AlgorithmsOn(nodes)) {
      FakeWorld world(nodes);
      std::vector<std::vector<float>> results(nodes.size());
      const Body body = [&](Communicator& c) {
        std::vector<float> data(200'003);
        for (size_t i = 0; i < data.size(); ++i) {
          data[i] =
              1.0f / static_cast<float>(i + 3) * static_cast<float>(c.rank() % 2 ? 1e4 : 1) + float(c.rank());
        }
        absl::Status s = c.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kMean);
        results[static_cast<size_t>(c.rank())] = data;
        return s;
      };
      ExpectAllOk(RunThreads(world, body, kPatience, [&](int) { return algorithm; }));
      for (const auto& result : results) {
        EXPECT_EQ(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)), 0);
      }
    }
  }
}

// What was measured chose the order of additions anew in each start.
TEST(Communicator, DeterministicIsThePlanOfTheTopologyAlone) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{
           {"a", "b", "c", "d", "e"}, {"a", "a", "b", "b", "c", "c", "d", "d", "e", "e"}}) {
    const auto start = [&](const std::string& algorithm, size_t count) {
      FakeWorld world(nodes);
      std::vector<float> of_first(count);
      ExpectAllOk(RunThreads(
          world,
          [&](Communicator& c) {
            std::vector<float> data(count);
            for (size_t i = 0; i < count; ++i)
              data[i] = 1.0f / static_cast<float>(i + 3) * static_cast<float>(c.rank() * 977 % 13 + 1);
            const absl::Status s = c.AllReduce(data.data(), count, DType::kFloat32, ReduceOp::kSum);
            if (c.rank() == 0) of_first = data;
            return s;
          },
          kPatience, [&](int) { return algorithm; }));
      return of_first;
    };
    const std::vector<int> rails = comm::RailsFor(comm::Speakers::kAuto, nodes.size() > 5 ? 2 : 1);
    std::vector<comm::Carriers> carriers;
    for (const int of : rails) carriers.push_back({of, comm::LinkCost{}});
    for (const size_t count : {size_t{100}, size_t{20'000}, size_t{100'000}}) {
      // The words for the plan that the costs which nobody measured make the best.
      const comm::AllReducePlan plan =
          comm::PlanAllReduce(comm::AllReduceAlgorithm::kAuto, carriers, 5, count * sizeof(float));
      const char* const kNames[] = {"auto", "ring", "doubling", "halving-doubling", "double-tree"};
      const std::string words = absl::StrCat(kNames[static_cast<size_t>(plan.algorithm)],
                                             plan.rails > 1 ? "+rails" : "+leader", "+deterministic");
      const std::vector<float> wanted = start(words, count);
      for (int i = 0; i < 6; ++i) EXPECT_EQ(start("deterministic", count), wanted) << words << " " << count;
    }
  }
}

TEST(Communicator, EveryAlgorithmBetweenMachines) {
  const std::vector<std::vector<std::string>> worlds{
      {"a", "b", "c"}, {"a", "a", "b", "b"}, {"a", "b", "b", "a", "b"}, {"a", "b", "c", "d", "e"}};
  for (const auto& nodes : worlds) {
    for (const std::string& algorithm : AlgorithmsOn(nodes)) {
      SCOPED_TRACE(algorithm);
      FakeWorld world(nodes);
      ExpectAllOk(RunThreads(world, Everything, kPatience, [&](int) { return algorithm; }));
    }
  }
}

// What is wrong with the setting of one rank, all say, with the same words.
TEST(Communicator, AlgorithmsThatDifferOrAreNone) {
  const auto refused = [](const std::vector<std::string>& nodes, const std::vector<std::string>& algorithms) {
    FakeWorld world(nodes);
    const auto results = RunThreads(
        world, [](Communicator&) { return absl::OkStatus(); }, kPatience,
        [&](int rank) { return algorithms[static_cast<size_t>(rank)]; });
    for (const absl::Status& s : results) EXPECT_EQ(s, results[0]);
    return results[0].ToString();
  };
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "a"}, {"a", "b", "c"}}) {
    EXPECT_THAT(
        refused(nodes, {"ring", "auto", "ring"}),
        testing::HasSubstr("GTRAIN_COMM_ALGO differs: 'auto' on rank 1 (127.0.0.1), 'ring' on ranks 0,2 "
                           "(127.0.0.1)"));
    EXPECT_THAT(refused(nodes, {"ring", "", ""}),
                testing::HasSubstr("'auto' on ranks 1,2 (127.0.0.1), 'ring' on rank 0 (127.0.0.1)"));
    EXPECT_THAT(
        refused(nodes, {"ring", "ring", "Ring"}),
        testing::HasSubstr(
            "GTRAIN_COMM_ALGO is 'Ring' on rank 2; it must be one of auto, ring, doubling, "
            "halving-doubling, double-tree; leader or rails; deterministic; or several, as ring+rails"));
  }
  EXPECT_THAT(refused({"a"}, {"best"}), testing::HasSubstr("GTRAIN_COMM_ALGO is 'best'"));
}

// Of GTRAIN_COMM_TLS: who has which, with the address of the machine.
TEST(Communicator, NetworksThatDifferOrAreNone) {
  const auto refused = [](const std::vector<std::string>& nodes, const std::vector<std::string>& networks) {
    std::vector<std::string> addresses;
    for (size_t rank = 0; rank < nodes.size(); ++rank) addresses.push_back(absl::StrCat("10.0.0.", rank));
    FakeWorld world(nodes, addresses);
    const auto results = RunThreads(
        world, [](Communicator&) { return absl::OkStatus(); }, kPatience, nullptr,
        [&](int rank) { return networks[static_cast<size_t>(rank)]; });
    for (const absl::Status& s : results) EXPECT_EQ(s, results[0]);
    return results[0].ToString();
  };
  EXPECT_THAT(refused({"a", "b", "c"}, {"tcp", "rc,tcp", "tcp"}),
              testing::HasSubstr("GTRAIN_COMM_TLS differs: 'rc,tcp' on rank 1 (10.0.0.1), 'tcp' on ranks 0,2 "
                                 "(10.0.0.0,10.0.0.2). Set the same for all ranks, or for none"));
  EXPECT_THAT(refused({"a", "b"}, {"", "tcp"}),
              testing::HasSubstr("'auto' on rank 0 (10.0.0.0), 'tcp' on rank 1 (10.0.0.1)"));
  EXPECT_THAT(
      refused({"a", "b"}, {"tcp", "tcp;rc"}),
      testing::HasSubstr("rank 1 (10.0.0.1): GTRAIN_COMM_TLS is 'tcp;rc'; it must be auto, or names of "
                         "UCX's transports"));
  EXPECT_THAT(refused({"a"}, {"^tcp"}), testing::HasSubstr("GTRAIN_COMM_TLS is '^tcp'"));
  EXPECT_EQ(refused({"a", "b"}, {"auto", ""}), "OK");
}

TEST(Communicator, TwoAtOnce) {
  FakeWorld world(FakeWorld::OneNode(3));
  std::vector<absl::Status> results(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      auto bootstrap = world.Rank(rank);
      auto a = MakeCommunicator(bootstrap.get()), b = MakeCommunicator(bootstrap.get());
      absl::Status& result = results[static_cast<size_t>(rank)];
      if (result = a.status(); !a.ok()) return;
      if (result = b.status(); !b.ok()) return;
      for (size_t i = 0; i < 20 && result.ok(); ++i) {
        result = CheckAllReduce(**a, 100, DType::kFloat32, ReduceOp::kSum);
        if (result.ok()) result = CheckAllReduce(**b, 5000, DType::kInt32, ReduceOp::kMax);
      }
    });
  }
  for (auto& t : threads) t.join();
  ExpectAllOk(results);
}

// Rows and columns of a mesh, each a communicator of its own, on one machine, on several, and mixed.
absl::Status RowsAndColumns(Communicator& c) {
  constexpr int kColumns = 2;
  const int row = c.rank() / kColumns, column = c.rank() % kColumns;
  auto across = c.Split(row, column);
  RETURN_IF_BAD(across.status());
  auto down = c.Split(column, -row);  // the other way round
  RETURN_IF_BAD(down.status());
  auto some = c.Split(c.rank() == 1 ? 7 : -1, 0);
  RETURN_IF_BAD(some.status());
  if ((*some != nullptr) != (c.rank() == 1)) return absl::InternalError("split for nobody");
  if ((*across)->size() != kColumns || (*across)->rank() != column) return absl::InternalError("row");
  const int rows = c.size() / kColumns;
  if ((*down)->size() != rows || (*down)->rank() != rows - 1 - row) return absl::InternalError("column");
  for (Communicator* group : {across->get(), down->get()}) {
    RETURN_IF_BAD(CheckAllReduce(*group, 1000, DType::kFloat32, ReduceOp::kSum));
    RETURN_IF_BAD(CheckAllReduce(*group, 100'000, DType::kFloat32, ReduceOp::kSum));
    RETURN_IF_BAD(CheckBroadcast(*group, 10, 0));
  }
  int32_t sum[2] = {c.rank(), 1};
  RETURN_IF_BAD((*across)->AllReduce(sum, 2, DType::kInt32, ReduceOp::kSum));
  if (sum[0] != 2 * row * kColumns + 1 || sum[1] != kColumns) return absl::DataLossError("other ranks' row");
  across->reset();
  return c.Barrier();
}

TEST(Communicator, SplitIntoRowsAndColumns) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a"},
                                                                 {"a", "a", "a", "a", "a", "a"},
                                                                 {"a", "b", "c", "d"},
                                                                 {"a", "a", "b", "b"},
                                                                 {"a", "b", "b", "a"}}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, RowsAndColumns));
  }
}

// The parent of a communicator may be closed before it, also where that is itself a part.
TEST(Communicator, APartOutlivesWhatItIsFrom) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "a"}}) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [](Communicator& c) -> absl::Status {
      auto part = c.Split(0, -c.rank());
      RETURN_IF_BAD(part.status());
      auto of_part = (*part)->Split((*part)->rank() == 0 ? 1 : 0, 0);
      RETURN_IF_BAD(of_part.status());
      part->reset();
      RETURN_IF_BAD(CheckAllReduce(**of_part, 1000, DType::kFloat32, ReduceOp::kSum));
      return c.Barrier();
    }));
  }
}

size_t MappedArenas() {
  std::ifstream maps("/proc/self/maps");
  size_t mapped = 0;
  for (std::string line; std::getline(maps, line);) mapped += absl::StrContains(line, "/arena-") ? 1 : 0;
  return mapped;
}

size_t OpenDescriptors() {
  size_t open = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    open += entry.path().empty() ? 0 : 1;
  return open;
}

TEST(Communicator, NothingPilesUpWithSplitsThatAreClosed) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "a", "a"}, {"a", "a", "b", "b"}}) {
    const int splits = nodes[3] == "a" ? 300 : 50;
    FakeWorld world(nodes);
    uint64_t bytes_after_one = 0;
    size_t mapped_after_one = 0, open_after_one = 0;
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      for (int i = 0; i < splits; ++i) {
        {
          auto part = c.Split(c.rank() / 2, 0);
          RETURN_IF_BAD(part.status());
          RETURN_IF_BAD((*part)->Allocate(100).status());
          int32_t x = i;
          const bool sends = (*part)->rank() == 0;
          RETURN_IF_BAD(sends ? (*part)->Send(&x, 1, DType::kInt32, 1)
                              : (*part)->Receive(&x, 1, DType::kInt32, 0));
        }
        RETURN_IF_BAD(c.Barrier());  // all have closed it
        if (c.rank() == 0 && i == 0) {
          bytes_after_one = world.ArenaBytes();
          mapped_after_one = MappedArenas();
          open_after_one = OpenDescriptors();
        }
        RETURN_IF_BAD(c.Barrier());
      }
      if (c.rank() == 0) {
        EXPECT_GT(bytes_after_one, 0);
        EXPECT_EQ(world.ArenaBytes(), bytes_after_one);
        EXPECT_EQ(MappedArenas(), mapped_after_one);
        EXPECT_EQ(OpenDescriptors(), open_after_one);
      }
      return c.Barrier();
    }));
    EXPECT_EQ(world.ArenaBytes(), 0);
  }
}

TEST(Communicator, SendAndReceive) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a"},
                                                                 {"a", "a", "a", "a"},
                                                                 {"a", "b"},
                                                                 {"a", "b", "c"},
                                                                 {"a", "a", "b", "b"},
                                                                 {"b", "a", "b", "c", "a"}}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, SendAndReceive));
  }
}

// Both of a pair hear the same; the third rank knows nothing of it.
TEST(Communicator, L6SendAndReceiveThatDoNotFit) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "b"}, {"a", "b", "c"}}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    const auto both = [&](const Body& one, const Body& two) {
      FakeWorld world(nodes);
      const auto results = RunThreads(world, [&](Communicator& c) {
        return c.rank() == 1 ? one(c) : c.rank() == 2 ? two(c) : absl::OkStatus();
      });
      EXPECT_TRUE(results[0].ok());
      EXPECT_EQ(results[1].code(), absl::StatusCode::kFailedPrecondition) << results[1];
      EXPECT_EQ(results[2].code(), absl::StatusCode::kFailedPrecondition) << results[2];
      return std::string(results[1].message()) + " / " + std::string(results[2].message());
    };
    std::vector<float> data(11);
    const auto send = [](size_t count, int to) {
      return [=](Communicator& c) {
        const std::vector<float> mine(count);
        return c.Send(mine.data(), count, DType::kFloat32, to);
      };
    };
    EXPECT_THAT(
        both(send(10, 2), [&](Communicator& c) { return c.Receive(data.data(), 11, DType::kFloat32, 1); }),
        testing::AllOf(testing::HasSubstr("rank 1 calls send #1 of 10 float32 from rank 1; rank 2 calls send "
                                          "#1 of 11 float32 from rank 1"),
                       testing::HasSubstr("/ from rank 1 to rank 2: send #1 of 11")));
    EXPECT_THAT(
        both(send(5, 2), send(5, 1)),
        testing::HasSubstr("rank 1 calls send #1 of 5 float32 from rank 1; rank 2 calls send #1 of 5 float32 "
                           "from rank 2"));
  }
}

TEST(Communicator, SendToNobodyAndToOneself) {
  for (int to : {-1, 0, 2}) {
    FakeWorld world(FakeWorld::OneNode(2));
    const auto results = RunThreads(world, [&](Communicator& c) {
      float x = 0;
      if (c.rank() == 1) return absl::OkStatus();
      const absl::Status status = c.Send(&x, 1, DType::kFloat32, to);
      EXPECT_EQ(c.Send(&x, 1, DType::kFloat32, 1), status) << "dead after an error";
      return status;
    });
    EXPECT_EQ(results[0].code(), absl::StatusCode::kInvalidArgument) << results[0];
  }
}

TEST(Communicator, ReceiveOfWhatNobodySendsEndsByItsDeadline) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a"}, {"a", "b"}}) {
    FakeWorld world(nodes);
    std::atomic<bool> ended = false;
    const auto results = RunThreads(
        world,
        [&](Communicator& c) {
          float x = 0;
          if (c.rank() == 0) {
            const absl::Status status = c.Receive(&x, 1, DType::kFloat32, 1);
            ended = true;
            return status;
          }
          while (!ended) absl::SleepFor(absl::Milliseconds(5));
          return absl::OkStatus();
        },
        absl::Seconds(3));
    EXPECT_EQ(results[0].code(), absl::StatusCode::kDeadlineExceeded) << results[0];
    EXPECT_THAT(std::string(results[0].message()), testing::HasSubstr("from rank 1 to rank 0"));
  }
}

// So long that nobody gets there.
constexpr absl::Duration kNever = absl::Minutes(10);

// `victim` has an error of its own and `words`, the others hear of it.
void ExpectAllHear(const std::vector<absl::Status>& results, int victim, const std::string& words) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const bool own = static_cast<int>(rank) == victim;
    EXPECT_EQ(absl::IsUnavailable(results[rank]), !own) << rank << results[rank];
    EXPECT_THAT(std::string(results[rank].message()),
                testing::AllOf(testing::HasSubstr(words),
                               testing::HasSubstr(own ? words : absl::StrCat("rank ", victim, " gave up: "))))
        << rank;
  }
}

const std::vector<std::vector<std::string>> kFours = {
    {"a", "a", "a", "a"}, {"a", "a", "b", "b"}, {"a", "b", "c", "d"}};

TEST(Communicator, AnAbortEndsTheCallsOfAll) {
  for (const auto& nodes : kFours) {
    for (const std::string algorithm : {"leader", "rails"}) {
      if (algorithm == "rails" && nodes != kFours[1]) continue;
      for (int victim = 0; victim < 4; ++victim) {
        SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << algorithm << victim);
        FakeWorld world(nodes);
        const auto results = RunThreads(
            world,
            [&](Communicator& c) -> absl::Status {
              std::vector<float> data(100'000);
              for (int i = 0;; ++i) {
                if (i == 3 && c.rank() == victim) c.Abort(absl::InternalError("words of its own"));
                const absl::Status status =
                    c.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum);
                if (status.ok()) continue;
                EXPECT_EQ(c.Barrier(), status) << "dead after an error";
                return status;
              }
            },
            kNever, [&](int) { return algorithm; });
        ExpectAllHear(results, victim, "words of its own");
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// The names are those of the job where they differ.
TEST(Communicator, AnAbortInAPartStaysThere) {
  FakeWorld world({"a", "b", "a", "b"});
  const auto results = RunThreads(
      world,
      [&](Communicator& c) -> absl::Status {
        auto part = c.Split(c.rank() / 2, 0);
        RETURN_IF_BAD(part.status());
        if (c.rank() == 3) (*part)->Abort(absl::InternalError("words of its own"));
        const absl::Status of_part = (*part)->Barrier();
        RETURN_IF_BAD(c.Barrier());
        return of_part;
      },
      kNever);
  EXPECT_TRUE(results[0].ok() && results[1].ok()) << results[0] << results[1];
  EXPECT_THAT(std::string(results[2].message()),
              testing::HasSubstr("rank 1 (3 of the job) gave up: words of its own"));
  EXPECT_EQ(results[3].message(), "words of its own");
}

// Of those that wait in a pair for the rank that errs, and of those that wait in another call.
TEST(Communicator, AnErrorInAPairEndsTheCallsOfAll) {
  for (const auto& nodes : kFours) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          float x = 0;
          if (c.rank() == 2) return c.Send(&x, 1, DType::kFloat32, 9);
          return c.rank() == 1 ? c.Receive(&x, 1, DType::kFloat32, 2) : c.Barrier();
        },
        kNever);
    ExpectAllHear(results, 2, "from rank 2 to rank 9: the other rank must be one of 0..3");
    if (testing::Test::HasFailure()) return;
  }
}

// The others wait in the communicator that is being made.
TEST(Communicator, AnErrorInASplitEndsItOnAll) {
  for (const auto& nodes : {kFours[0], kFours[1]}) {
    for (int victim = 0; victim < 4; ++victim) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << victim);
      FakeWorld world(nodes);
      const auto results = RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            if (c.rank() == victim) world.RefuseArenas(victim);
            return c.Split(0, 0).status();
          },
          kNever);
      ExpectAllHear(results, victim, "splitting off communicator 0: no arena for you");
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Communicator, L6DifferentCollectivesAreNamedOnEveryRank) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "a"}, {"a", "b", "c"}}) {
    FakeWorld world(nodes);
    const auto results = RunThreads(world, [](Communicator& c) {
      std::vector<float> data(10);
      RETURN_IF_BAD(c.AllReduce(data.data(), 10, DType::kFloat32, ReduceOp::kSum));
      absl::Status s =
          c.rank() == 1 ? c.Barrier() : c.AllReduce(data.data(), 10, DType::kFloat32, ReduceOp::kSum);
      EXPECT_EQ(c.Barrier(), s) << "dead after an error";
      return s;
    });
    for (const absl::Status& s : results) {
      EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition) << s;
      EXPECT_THAT(
          std::string(s.message()),
          testing::HasSubstr("ranks 0,2 call all-reduce #3 of 10 float32, sum; rank 1 calls barrier #3"));
    }
  }
}

TEST(Communicator, L6DifferentCounts) {
  FakeWorld world(FakeWorld::OneNode(3));
  const auto results = RunThreads(world, [](Communicator& c) {
    std::vector<float> data(300'000);
    return c.AllReduce(data.data(), c.rank() == 2 ? 299'999 : 300'000, DType::kFloat32, ReduceOp::kSum);
  });
  for (const absl::Status& s : results) {
    EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition) << s;
    EXPECT_THAT(std::string(s.message()), testing::HasSubstr("rank 2 calls all-reduce #2 of 299999 float32"));
  }
}

TEST(Communicator, BadArguments) {
  FakeWorld world(FakeWorld::OneNode(1));
  const auto with = [&](const Body& body) { return RunThreads(world, body)[0].code(); };
  float x = 0;
  EXPECT_EQ(with([&](Communicator& c) { return c.Broadcast(&x, 1, DType::kFloat32, 1); }),
            absl::StatusCode::kInvalidArgument);
  FakeWorld second(FakeWorld::OneNode(1));
  EXPECT_EQ(
      RunThreads(second,
                 [&](Communicator& c) { return c.AllReduce(nullptr, 1, DType::kFloat32, ReduceOp::kSum); })[0]
          .code(),
      absl::StatusCode::kInvalidArgument);
}

// Types that only checkpoints compute with are moved as they are, and no reduction takes their bytes for
// others.
TEST(Communicator, TypesThatCannotBeReducedAreNamedOnEveryRank) {
  const std::pair<DType, const char*> kTypes[] = {{DType::kBool, "bool"},
                                                  {DType::kInt8, "int8"},
                                                  {DType::kInt16, "int16"},
                                                  {DType::kUint16, "uint16"},
                                                  {DType::kUint32, "uint32"},
                                                  {DType::kUint64, "uint64"},
                                                  {DType::kFloat8E4M3, "float8_e4m3fn"},
                                                  {DType::kFloat8E5M2, "float8_e5m2"},
                                                  {DType::kComplex64, "complex64"}};
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a"}, {"a", "b"}}) {
    for (const auto& [dtype, name] : kTypes) {
      SCOPED_TRACE(name);
      const std::vector<std::function<absl::Status(Communicator&, char*, char*)>> reductions = {
          [&](Communicator& c, char* in, char*) { return c.AllReduce(in, 4, dtype, ReduceOp::kSum); },
          [&](Communicator& c, char* in, char*) { return c.Reduce(in, 4, dtype, ReduceOp::kMax, 0); },
          [&](Communicator& c, char* in, char* out) {
            return c.ReduceScatter(in, out, 2, dtype, ReduceOp::kMean);
          }};
      for (const auto& reduction : reductions) {
        FakeWorld world(nodes);
        const auto results = RunThreads(world, [&](Communicator& c) {
          char in[32], out[32] = {};
          std::fill(in, in + 32, static_cast<char>(c.rank() + 1));
          RETURN_IF_BAD(c.Broadcast(in, 4, dtype, 1));
          EXPECT_EQ(std::count(in, in + 4 * DTypeSize(dtype), 2), 4 * static_cast<int>(DTypeSize(dtype)));
          return reduction(c, in, out);
        });
        for (const absl::Status& s : results) {
          EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument) << s;
          EXPECT_THAT(std::string(s.message()), testing::HasSubstr(absl::StrCat(name, " cannot be reduced")));
        }
      }
    }
  }
}

// 200 and 200 were 72, and 256 ranks divided by zero.
TEST(Communicator, MeansOfIntegersAreThoseOfTheirExactSums) {
  const auto check = []<typename T>(Communicator& c, DType dtype, std::vector<T> values) -> absl::Status {
    // Rank r has values[(i + r) % n]: other values meet in each element.
    const size_t n = values.size(), ranks = static_cast<size_t>(c.size());
    const auto own = [&](size_t rank, size_t i) { return values[(i + rank) % n]; };
    const auto mean = [&](size_t i) {
      absl::int128 sum = 0;
      for (size_t rank = 0; rank < ranks; ++rank) sum += own(rank, i);
      return static_cast<T>(sum / static_cast<int64_t>(ranks));
    };
    for (const size_t count : {n, size_t{5000}, size_t{200'000}}) {
      std::vector<T> all(count), given(count), reduced(count), scattered(count);
      for (size_t i = 0; i < count; ++i)
        all[i] = given[i] = reduced[i] = own(static_cast<size_t>(c.rank()), i);
      RETURN_IF_BAD(c.AllReduce(all.data(), count, dtype, ReduceOp::kMean));
      RETURN_IF_BAD(c.Reduce(reduced.data(), count, dtype, ReduceOp::kMean, 1));
      const size_t block = count / ranks;
      RETURN_IF_BAD(c.ReduceScatter(given.data(), scattered.data(), block, dtype, ReduceOp::kMean));
      for (size_t i = 0; i < count; ++i) {
        if (all[i] != mean(i)) return absl::DataLossError(absl::StrCat("all-reduce ", i));
        if (reduced[i] != (c.rank() == 1 ? mean(i) : given[i]))
          return absl::DataLossError(absl::StrCat("reduce ", i));
        if (i < block && scattered[i] != mean(static_cast<size_t>(c.rank()) * block + i))
          return absl::DataLossError(absl::StrCat("reduce-scatter ", i));
      }
    }
    return absl::OkStatus();
  };
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a"}, {"a", "b", "c"}, {"a", "a", "a", "b"}}) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) {
      using L = std::numeric_limits<int64_t>;
      using I = std::numeric_limits<int32_t>;
      RETURN_IF_BAD(check(c, DType::kUint8, std::vector<uint8_t>{200, 200, 255, 255, 0, 1, 7}));
      RETURN_IF_BAD(check(c, DType::kInt32,
                          std::vector<int32_t>{I::max(), I::max(), I::min(), I::min(), -1, 0, -7, 5}));
      return check(c, DType::kInt64,
                   std::vector<int64_t>{L::max(), L::max(), L::max() - 1, L::min(), L::min(), -1, 0, -7, 3});
    }));
  }
}

// Ranks of other machines hear of it from the record, and not by their deadline.
TEST(Communicator, BadArgumentsOfOneRankAreNamedOnEveryRank) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "b", "c"}, {"a", "b", "a", "b"}, {"a", "a", "b"}}) {
    for (const size_t count : {10, 300'000}) {
      const auto all_get = [&](const Body& call, const char* what) {
        SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << count << what);
        FakeWorld world(nodes);
        const auto results = RunThreads(world, [&](Communicator& c) {
          RETURN_IF_BAD(c.Barrier());
          const absl::Status status = call(c);
          EXPECT_EQ(c.Barrier(), status) << "dead after an error";
          return status;
        });
        for (size_t rank = 0; rank < results.size(); ++rank) {
          EXPECT_EQ(results[rank].code(), absl::StatusCode::kInvalidArgument) << results[rank];
          EXPECT_THAT(std::string(results[rank].message()), testing::HasSubstr(what));
          if (rank == 1) continue;
          EXPECT_THAT(std::string(results[rank].message()), testing::HasSubstr("rank 1 calls "));
        }
      };
      std::vector<std::vector<float>> data(nodes.size(), std::vector<float>(count * nodes.size()));
      std::vector<std::vector<float>> out = data;
      const auto of = [](Communicator& c, std::vector<std::vector<float>>& arrays, int bad = 1) {
        return c.rank() == bad ? nullptr : arrays[static_cast<size_t>(c.rank())].data();
      };
      all_get(
          [&](Communicator& c) { return c.AllReduce(of(c, data), count, DType::kFloat32, ReduceOp::kSum); },
          ": data is null");
      all_get(
          [&](Communicator& c) {
            return c.AllReduce(of(c, data, -1), count,
                               c.rank() == 1 ? static_cast<DType>(99) : DType::kFloat32, ReduceOp::kSum);
          },
          ": unknown element type 99");
      all_get(
          [&](Communicator& c) {
            return c.Broadcast(of(c, data, -1), count, DType::kFloat32, c.rank() == 1 ? 7 : 0);
          },
          ": root 7 is not a rank of 0..");
      all_get(
          [&](Communicator& c) { return c.AllGather(of(c, data), of(c, out, -1), count, DType::kFloat32); },
          ": data is null");
      all_get(
          [&](Communicator& c) {
            return c.ReduceScatter(of(c, data), of(c, out, -1), count, DType::kFloat32, ReduceOp::kSum);
          },
          ": data is null");
      all_get(
          [&](Communicator& c) { return c.AllToAll(of(c, data), of(c, out, -1), count, DType::kFloat32); },
          ": data is null");
      all_get(
          [&](Communicator& c) { return c.Reduce(of(c, data), count, DType::kFloat32, ReduceOp::kSum, 0); },
          ": data is null");
    }
  }
}

TEST(Communicator, DeadlineNamesTheRankThatDidNotCome) {
  FakeWorld world(FakeWorld::OneNode(3));
  const auto results = RunThreads(
      world,
      [&](Communicator& c) {
        if (c.rank() != 1) return c.Barrier();
        // Stays away until the others have given up.
        const Instant start = RealClock().Now();
        while (RealClock().Now() - start < absl::Seconds(3)) absl::SleepFor(absl::Milliseconds(50));
        return c.Barrier();
      },
      absl::Seconds(2));
  // At least one saw its own deadline; the other may have heard of it first. Rank 1 comes to a barrier that
  // all have entered: either answer is right for it.
  int deadline = 0;
  for (const absl::Status& s : {results[0], results[2]}) {
    EXPECT_FALSE(s.ok());
    if (absl::IsDeadlineExceeded(s)) {
      ++deadline;
      EXPECT_THAT(std::string(s.message()), testing::HasSubstr("for rank 1"));
    }
  }
  EXPECT_GE(deadline, 1);
}

TEST(Communicator, L5PeerThatClosedItsCommunicatorIsAnErrorNotAHang) {
  FakeWorld world(FakeWorld::OneNode(3));
  const auto results =
      RunThreads(world, [](Communicator& c) { return c.rank() == 0 ? absl::OkStatus() : c.Barrier(); });
  EXPECT_TRUE(results[0].ok());
  for (size_t rank : {1, 2}) {
    EXPECT_EQ(results[rank].code(), absl::StatusCode::kUnavailable);
  }
}

// ------------------------------------------------------------------ forked processes

// Without loading it here: children must not inherit its state.
bool UcxHere() {
  const char* build = getenv("GTRAIN_BUILD_DIR");
  return build == nullptr || std::filesystem::exists(absl::StrCat(build, "/lib/libgtrain_comm_ucx.so"));
}

// A page that parent and children share.
struct Board {
  std::atomic<int> steps[16];
  std::atomic<int64_t> returned_at_ns[16];
  std::atomic<int> code[16];
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
      EXPECT_LT(Instant{board_->returned_at_ns[rank]} - revoked, absl::Seconds(2)) << "rank " << rank;
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

// In a post, staged, and in the midst of memory that others write to.
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
    ExpectAllSucceed(again, SendAndReceive);
  }
  FakeWorld mesh({"a", "b", "b", "a"});
  ExpectAllSucceed(mesh, RowsAndColumns);
}

// By the names of GTRAIN_COMM_TLS; no RDMA device belongs to the loopback interface.
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
