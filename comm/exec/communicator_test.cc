// Tests the results of collectives, among threads, on one machine and on several pretended ones.
#include "comm/exec/communicator.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/held_test_counts.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "comm/fake/forwarding_transport.h"
#include "comm/plan/cost.h"
#include "comm/plan/link_drift.h"
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

// The order of machines is not that of their ranks.
TEST(Communicator, MachinesInTheOrderOfTheFabric) {
  const std::vector<std::pair<std::vector<std::string>, std::vector<int>>> worlds{
      {{"a", "b", "c", "d"}, {0, 2, 1, 3}},
      {{"a", "b", "c"}, {2, 1, 0}},
      {{"a", "b", "a", "c", "b"}, {1, 2, 1, 0, 2}},
      {{"a", "a", "b", "b", "c", "c"}, {0, 0, 2, 2, 1, 1}}};
  for (const auto& [nodes, order] : worlds) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    for (const Body& body : {Body(Everything), Body(DirectMemory), Body(Uneven), Body(Messages)}) {
      FakeWorld world(nodes);
      world.SetFabricOrder(order);
      ExpectAllOk(RunThreads(world, body));
    }
    if (nodes.size() % 2 != 0) continue;
    FakeWorld world(nodes);
    world.SetFabricOrder(order);
    ExpectAllOk(RunThreads(world, RowsAndColumns));
  }
}

// As where an agent is older than the others.
TEST(Communicator, AnotherOrderOfMachinesIsNamed) {
  FakeWorld world({"a", "b", "c"});
  std::vector<std::thread> threads;
  std::vector<absl::Status> results(3);
  world.SetFabricOrder({0, 2, 1});
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      class Told final : public Bootstrap {
       public:
        explicit Told(std::unique_ptr<Bootstrap> as) : as_(std::move(as)), members_(as_->members()) {
          if (as_->rank() == 1) {
            for (Member& member : members_) member.fabric_order = 0;
          }
        }
        int rank() const override { return as_->rank(); }
        int world_size() const override { return as_->world_size(); }
        Generation generation() const override { return as_->generation(); }
        const std::vector<Member>& members() const override { return members_; }
        absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob,
                                                           absl::Duration t) override {
          return as_->AllGather(blob, t);
        }
        absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, uint64_t zeros,
                                       absl::Duration t) override {
          return as_->Arena(id, bytes, zeros, t);
        }
        void FreeArena(uint64_t id) override { as_->FreeArena(id); }
        absl::Status Alive() const override { return as_->Alive(); }

       private:
        std::unique_ptr<Bootstrap> as_;
        std::vector<Member> members_;
      } bootstrap(world.Rank(rank));
      results[static_cast<size_t>(rank)] = MakeCommunicator(&bootstrap, {}).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("another order of the machines"));
  }
}

// The values of GTRAIN_COMM_ALGO that fit: where each machine has one rank, and where some have several.
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

// Measurements used to choose the order of additions anew in each start.
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

// Between machines of one rank a collective of more than 16 MiB is one of several blocks, and of several
// ranks one of more than 512 KiB goes in chunks, of which the network carries one while others are copied.
TEST(Communicator, WhatTakesSeveralBlocksBetweenMachines) {
  for (const auto& nodes : std::vector<std::vector<std::string>>{
           {"a", "b"}, {"a", "a", "b", "b"}, {"a", "b", "b"}, {"a", "b", "a", "c", "b", "b"}}) {
    for (const std::string algorithm : {"auto", "rails"}) {
      SCOPED_TRACE(testing::PrintToString(nodes) + algorithm);
      FakeWorld world(nodes);
      ExpectAllOk(RunThreads(
          world,
          [](Communicator& c) -> absl::Status {
            const size_t count = (size_t{17} << 20) / sizeof(int32_t) + 7;
            const size_t block = count / static_cast<size_t>(c.size());
            RETURN_IF_BAD(CheckAllReduce(c, count, DType::kInt32, ReduceOp::kSum));
            RETURN_IF_BAD(CheckReduce(c, count, DType::kInt32, ReduceOp::kMax, 1));
            RETURN_IF_BAD(CheckReduceScatter(c, block, DType::kInt32, ReduceOp::kSum, false));
            RETURN_IF_BAD(CheckReduceScatter(c, block, DType::kFloat64, ReduceOp::kMean, true));
            return CheckAllToAll(c, block);
          },
          kPatience, [&](int) { return algorithm; }));
    }
  }
}

// Each machine reaches the memory of its ranks, or does not, whatever the others do.
TEST(Communicator, AllocatedMemoryOfSomeMachines) {
  const std::vector<std::string> nodes{"a", "a", "b", "b", "c"};
  for (const std::set<int>& allocate :
       std::vector<std::set<int>>{{0, 1, 2, 3, 4}, {0, 1}, {0, 2}, {3}, {4}}) {
    SCOPED_TRACE(testing::PrintToString(allocate));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      const size_t count = (size_t{3} << 20) / sizeof(float) + 5;
      auto memory = c.Allocate(count * sizeof(float) + 64);
      if (!memory.ok()) return memory.status();
      char* const data = allocate.contains(c.rank()) ? static_cast<char*>(*memory) : nullptr;
      for (const size_t offset : {0, 64}) {
        char* const at = data == nullptr ? nullptr : data + offset;
        RETURN_IF_BAD(CheckAllReduce(c, count, DType::kFloat32, ReduceOp::kMean, at));
        RETURN_IF_BAD(CheckAllReduce(c, count / 2, DType::kInt32, ReduceOp::kMax, at));
      }
      return c.Free(*memory);
    }));
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

// Several times what an exchange among threads takes here, also where a sanitizer slows that down.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowMs = 40;
#else
constexpr int kSlowMs = 4;
#endif
// A transport whose exchanges take some milliseconds more from a moment on. It notes the exchanges that
// measure what a round costs.
class SlowerTransport final : public ForwardingTransport {
 public:
  SlowerTransport(std::unique_ptr<DataTransport> inner, const std::atomic<bool>* slow,
                  std::atomic<int>* measuring, int slow_ms = kSlowMs)
      : ForwardingTransport(std::move(inner)), slow_(slow), measuring_(measuring), slow_ms_(slow_ms) {}
  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    if (*slow_) {
      Mutex mutex;  // the link of a test is slow: nothing is waited for
      const MutexLock lock(&mutex);
      (void)mutex.AwaitFor(absl::Milliseconds(slow_ms_), [] { return false; });
    }
    if (std::ranges::any_of(transfers, [](const Transfer& t) { return t.bytes == LinkCost::kSizes[0]; }))
      ++*measuring_;
    return ForwardingTransport::Exchange(transfers, done, watch);
  }

 private:
  const std::atomic<bool>* const slow_;
  std::atomic<int>* const measuring_;
  const int slow_ms_;
};

// The links that were measured when a communicator was made are measured again when they have changed, by all
// ranks, in the middle of whatever collective they call.
TEST(Communicator, LinksThatChangeAreMeasuredAgain) {
  std::vector<std::string> seventeen{"m0"};
  for (int machine = 0; machine < 17; ++machine) seventeen.push_back(absl::StrCat("m", machine));
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "b"}, {"a", "b", "c"}, {"a", "a", "b", "b"}, seventeen}) {
    for (const bool deterministic : {false, true}) {
      if (deterministic && nodes.size() > 4) continue;
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << deterministic);
      FakeWorld world(nodes);
      std::atomic<bool> slow = false;
      std::vector<std::atomic<int>> measuring(nodes.size());
      const Body body = [&](Communicator& c) -> absl::Status {
        std::atomic<int>& own = measuring[static_cast<size_t>(c.rank())];
        for (int phase = 0; phase < 2; ++phase) {
          RETURN_IF_BAD(c.Barrier());
          if (c.rank() == 0) slow = phase == 1;
          RETURN_IF_BAD(c.Barrier());
          own = 0;
          int32_t seen = 0;
          // The loop runs until the first rank has measured, which all hear of; without a change no rank
          // does.
          const int calls = (phase == 0 ? 2 : deterministic ? 5 : 12) * LinkDrift::kWindow;
          for (int call = 0; call < calls && seen == 0; ++call) {
            RETURN_IF_BAD(CheckAllReduce(c, 10'000, DType::kInt32, ReduceOp::kSum));
            if (call % 8 != 0) continue;
            seen = own > 0 ? 1 : 0;
            RETURN_IF_BAD(c.Broadcast(&seen, 1, DType::kInt32, 0));
          }
          const bool wanted = phase == 1 && !deterministic;
          if (wanted && seen == 0) return absl::DataLossError("nobody has measured again");
        }
        return c.Barrier();
      };
      ExpectAllOk(RunThreads(
          world, body, kPatience, [&](int) { return deterministic ? "deterministic" : "leader"; }, nullptr,
          [&](int rank, std::unique_ptr<DataTransport> inner) {
            return std::make_unique<SlowerTransport>(std::move(inner), &slow,
                                                     &measuring[static_cast<size_t>(rank)]);
          }));
      EXPECT_EQ(measuring[0] > 0, !deterministic);
    }
  }
}

// A call in which links are measured again has all of its time for itself: what it measures takes longer than
// that.
// (Rank 1 waits for rank 0, and so asks for the time.)
TEST(Communicator, MeasuringAgainIsNotPaidByADeadline) {
  constexpr int kStepMs = 40;
  FakeWorld world({"a", "b"});
  std::atomic<bool> slow = false, never = false;
  std::vector<std::atomic<int>> measuring(2);
  ExpectAllOk(RunThreads(
      world,
      [&](Communicator& c) -> absl::Status {
        for (int call = 0; call < 6 * LinkDrift::kWindow; ++call) {
          if (call == 2 * LinkDrift::kWindow && c.rank() == 0) slow = true, measuring[0] = 0;
          RETURN_IF_BAD(CheckAllReduce(c, 10'000, DType::kInt32, ReduceOp::kSum));
        }
        return absl::OkStatus();
      },
      absl::Milliseconds(24 * kStepMs), nullptr, nullptr,
      [&](int rank, std::unique_ptr<DataTransport> inner) {
        return std::make_unique<SlowerTransport>(std::move(inner), rank == 0 ? &slow : &never,
                                                 &measuring[static_cast<size_t>(rank)], kStepMs);
      }));
  EXPECT_GT(measuring[0], 0) << "nothing was measured again";
}

// Data that arrive before the ranks have compared their calls must not reach the output.
TEST(Communicator, L6AnAllToAllOfOtherCountsChangesNothing) {
  for (const auto& nodes : kFours) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    RunThreads(world, [](Communicator& c) {
      const size_t count = c.rank() == 2 ? 20'001 : 20'000;
      const std::vector<int32_t> input(4 * count, 1);
      std::vector<int32_t> output(4 * count, 7);
      const absl::Status status = c.AllToAll(input.data(), output.data(), count, DType::kInt32);
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_EQ(output, std::vector<int32_t>(4 * count, 7));
      return status;
    });
  }
}

// Nothing holds the ranks together behind it, so one of them may free the memory while others look for it.
TEST(Communicator, NoElementsOfMemoryThatIsFreedAtOnce) {
  for (const auto& nodes : kFours) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [](Communicator& c) -> absl::Status {
      for (int i = 0; i < 30; ++i) {
        auto memory = c.Allocate(64);
        if (!memory.ok()) return memory.status();
        RETURN_IF_BAD(c.AllReduce(*memory, 0, DType::kFloat32, ReduceOp::kSum));
        RETURN_IF_BAD(c.Free(*memory));
      }
      return absl::OkStatus();
    }));
  }
}

// All ranks report what is wrong with the setting of one rank, with the same message.
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

// The errors about GTRAIN_COMM_TLS say which rank has which value, with the address of its machine.
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

// Freed memory is unmapped on all ranks once they have used memory of Allocate again, also where the same
// size is allocated again and again.
TEST(Communicator, FreedMemoryGoes) {
  FakeWorld world(FakeWorld::OneNode(3));
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    uint64_t first = 0;
    for (int turn = 0; turn < 20; ++turn) {
      auto memory = c.Allocate(1 << 20);
      RETURN_IF_BAD(memory.status());
      auto* data = static_cast<float*>(*memory);
      for (int i = 0; i < 1 << 18; ++i) data[i] = static_cast<float>(turn);
      RETURN_IF_BAD(c.AllReduce(data, 1 << 18, DType::kFloat32, ReduceOp::kSum));
      EXPECT_EQ(data[1000], 3 * turn);
      RETURN_IF_BAD(c.Barrier());
      RETURN_IF_BAD(c.Free(data));
      EXPECT_TRUE(absl::IsInvalidArgument(c.Free(data)));
      RETURN_IF_BAD(c.Barrier());
      if (turn == 1) first = world.ArenaBytes();
      if (turn > 1) {
        EXPECT_EQ(world.ArenaBytes(), first) << turn;
      }
      RETURN_IF_BAD(c.Barrier());
    }
    return c.Barrier();
  }));
}

TEST(Communicator, L6PartsThatDoNotFitAreNamed) {
  FakeWorld world(FakeWorld::OneNode(2));
  const auto run = [](const Body& body) {
    FakeWorld two(FakeWorld::OneNode(2));
    const auto results = RunThreads(two, body);
    return absl::StrCat(results[0].message(), " / ", results[1].message());
  };
  std::vector<int32_t> data(100);
  EXPECT_THAT(run([&](Communicator& c) {
                const std::vector<size_t> counts{3, c.rank() == 0 ? size_t{4} : size_t{5}};
                std::vector<int32_t> all(10);
                return c.AllGatherV(data.data(), all.data(), counts, DType::kInt32);
              }),
              testing::HasSubstr("all-gather #2 of 7 int32 in uneven parts"));
  EXPECT_THAT(run([&](Communicator& c) {
                std::vector<int32_t> all(10);
                return c.AllGatherV(data.data(), all.data(), {3, 4, 5}, DType::kInt32);
              }),
              testing::HasSubstr("3 counts were given, one for each of 2 ranks is needed"));
  EXPECT_THAT(run([&](Communicator& c) {
                std::vector<int32_t> in(10), out(10);
                const std::vector<size_t> sends{1, c.rank() == 0 ? size_t{2} : size_t{1}}, receives{1, 1};
                return c.AllToAllV(in.data(), sends, out.data(), receives, DType::kInt32);
              }),
              testing::HasSubstr("receive of 1 int32 from rank 0, tag -2: rank 0 sent 2 int32"));
  EXPECT_THAT(run([&](Communicator& c) {
                int32_t x = 0;
                return c.Gather(&x, c.rank() == 0 ? nullptr : &x, 1, DType::kInt32, 0);
              }),
              testing::HasSubstr("data is null"));
}

TEST(Communicator, ATimeoutMayChange) {
  FakeWorld world(FakeWorld::OneNode(2));
  const auto results = RunThreads(world, [&](Communicator& c) -> absl::Status {
    if (c.rank() == 1) return c.Receive(nullptr, 0, DType::kUint8, 0);
    c.SetTimeout(absl::Milliseconds(100));
    EXPECT_EQ(c.timeout(), absl::Milliseconds(100));
    return c.Barrier();
  });
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[0])) << results[0];
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
    ExpectAllOk(RunThreads(world, [](Communicator& c) -> absl::Status {
      RETURN_IF_BAD(SendAndReceive(c));
      RETURN_IF_BAD(Uneven(c));
      return Messages(c);
    }));
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
    EXPECT_THAT(std::string(results[0].message()),
                testing::HasSubstr("receive of 1 float32 from rank 1, tag 0: not over after 3s"));
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
      using U = std::numeric_limits<uint64_t>;
      RETURN_IF_BAD(check(c, DType::kUint8, std::vector<uint8_t>{200, 200, 255, 255, 0, 1, 7}));
      RETURN_IF_BAD(check(c, DType::kInt8, std::vector<int8_t>{127, 127, -128, -128, -127, -1, 0, -7, 5}));
      RETURN_IF_BAD(
          check(c, DType::kInt16, std::vector<int16_t>{32767, 32767, -32768, -32768, -32767, -1, 0, -7, 5}));
      RETURN_IF_BAD(check(c, DType::kUint16, std::vector<uint16_t>{65535, 65535, 65534, 40'000, 0, 1, 7}));
      RETURN_IF_BAD(check(c, DType::kUint32,
                          std::vector<uint32_t>{~0u, ~0u, ~0u - 1, 3'000'000'000, 3'000'000'000, 0, 1}));
      RETURN_IF_BAD(check(c, DType::kUint64,
                          std::vector<uint64_t>{U::max(), U::max(), U::max() - 1, U::max() / 2 + 1,
                                                U::max() / 2 + 2, 0, 1, 7}));
      RETURN_IF_BAD(
          check(c, DType::kInt32,
                std::vector<int32_t>{I::max(), I::max(), I::min(), I::min(), I::min() + 1, -1, 0, -7, 5}));
      return check(c, DType::kInt64,
                   std::vector<int64_t>{L::max(), L::max(), L::max() - 1, L::min(), L::min(), L::min() + 1,
                                        -1, 0, -7, 3});
    }));
  }
}

}  // namespace
}  // namespace gtrain::comm
