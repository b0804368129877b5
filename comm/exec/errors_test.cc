// Errors of one member, mistakes of a program and members that do not come: which ranks hear of them, and
// how.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/communicator.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_world.h"
#include "comm/fake/forwarding_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

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
        ExpectAllHear(results, victim, absl::StatusCode::kInternal, "words of its own");
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

// The error ends the calls of ranks that wait for a message of the failing rank, and of those in another
// call.
TEST(Communicator, AnErrorOfASendEndsTheCallsOfAll) {
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
    ExpectAllHear(results, 2, absl::StatusCode::kInvalidArgument, "send to rank 9: the ranks are 0..3");
    if (testing::Test::HasFailure()) return;
  }
}

// All ranks learn which rank failed, in a split and in the first communicator of all, where there is no
// communicator yet to tell them with.
TEST(Communicator, ARankWithoutMemoryIsNamedByAll) {
  for (const auto& nodes : {kFours[0], kFours[1]}) {
    for (int victim = 0; victim < 4; ++victim) {
      for (const bool first : {true, false}) {
        SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << victim << first);
        FakeWorld world(nodes);
        std::atomic<bool> full = first;
        world.before_arena = [&](int rank) {
          return full && rank == victim ? absl::ResourceExhaustedError("no arena for you") : absl::OkStatus();
        };
        const auto results = RunThreads(
            world,
            [&](Communicator& c) -> absl::Status {
              if (c.rank() == victim) full = true;
              return c.Split(0, 0).status();
            },
            kNever);
        int never = 0;
        for (const absl::Status& status : results) {
          // A rank that hears of it from one that gave up already knows no more than that.
          EXPECT_TRUE(absl::IsFailedPrecondition(status) || absl::IsUnavailable(status)) << status;
          never += absl::IsFailedPrecondition(status) ? 1 : 0;
          EXPECT_THAT(std::string(status.message()),
                      testing::HasSubstr(absl::StrCat(
                          "rank ", victim, " (127.0.0.1) has no shared memory: no arena for you")));
        }
        EXPECT_GE(never, 1) << "a restart has no more of it";
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(Communicator, AnExceptionInASplitEndsTheCallsOfAll) {
  for (const auto& nodes : {kFours[0], kFours[1]}) {
    {
      SCOPED_TRACE(testing::PrintToString(nodes));
      constexpr int kVictim = 1;
      FakeWorld world(nodes);
      std::atomic<bool> throws = false;
      world.before_arena = [&](int rank) -> absl::Status {
        if (throws && rank == kVictim) throw std::bad_alloc();
        return absl::OkStatus();
      };
      const auto results = RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            if (c.rank() == kVictim) throws = true;
            return c.Split(0, 0).status();
          },
          kNever);
      ExpectAllHear(results, kVictim, absl::StatusCode::kResourceExhausted, "bad_alloc");
    }
  }
}

// A rank that is slow to look for a peer's memory, whose owner has given up and closed meanwhile, was given a
// new file of zeros, and OK.
TEST(Communicator, MemoryThatIsGoneIsAnErrorAndNotZeros) {
  constexpr size_t kCount = 100'000;
  for (const bool broadcast : {true, false}) {
    FakeWorld world(FakeWorld::OneNode(2));
    std::atomic<bool> slow = false, gone = false;
    world.before_arena = [&](int rank) {
      const Instant start = RealClock().Now();
      while (rank == 1 && slow && !gone && RealClock().Now() - start < kPatience)
        absl::SleepFor(absl::Milliseconds(1));
      return absl::OkStatus();
    };
    absl::Status late;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const auto bootstrap = world.Rank(rank);
        ExecOptions options;
        options.user.timeout = rank == 0 ? absl::Seconds(1) : kPatience;
        auto c = MakeCommunicator(bootstrap.get(), options);
        ASSERT_TRUE(c.ok()) << c.status();
        const auto memory = (*c)->Allocate(kCount * sizeof(float));
        ASSERT_TRUE(memory.ok()) << memory.status();
        float* const data = static_cast<float*>(*memory);
        std::fill(data, data + kCount, 5.0f);
        ASSERT_TRUE((*c)->Barrier().ok());
        if (rank == 1) slow = true;
        const absl::Status status = broadcast
                                        ? (*c)->Broadcast(data, kCount, DType::kFloat32, 0)
                                        : (*c)->AllReduce(data, kCount, DType::kFloat32, ReduceOp::kSum);
        if (rank == 1) late = status;
        c->reset();
        if (rank == 0) gone = true;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(absl::IsUnavailable(late)) << late;
  }
}

// A network whose memory is used up when `*throws`.
class Throwing final : public ForwardingTransport {
 public:
  Throwing(std::unique_ptr<DataTransport> inner, const std::atomic<bool>* throws)
      : ForwardingTransport(std::move(inner)), throws_(throws) {}
  absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                      uint64_t id) override {
    auto part = ForwardingTransport::Part(members, self, id);
    if (!part.ok()) return part.status();
    return std::make_unique<Throwing>(*std::move(part), throws_);
  }
  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    if (*throws_) throw std::bad_alloc();
    return ForwardingTransport::Exchange(transfers, done, watch);
  }

 private:
  const std::atomic<bool>* const throws_;
};

// It does not end the program either.
TEST(Communicator, AnExceptionInACallEndsThoseOfAll) {
  for (const auto& nodes : {kFours[1], kFours[2]}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    constexpr int kVictim = 2;
    std::atomic<bool> throws = false;
    FakeWorld world(nodes);
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          absl::Status status = c.Barrier();
          if (c.rank() == kVictim) throws = true;
          std::vector<float> data(100'000);
          while (status.ok()) status = c.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum);
          return status;
        },
        kNever, nullptr, nullptr,
        [&](int rank, std::unique_ptr<DataTransport> real) -> std::unique_ptr<DataTransport> {
          if (rank != kVictim) return real;
          return std::make_unique<Throwing>(std::move(real), &throws);
        });
    ExpectAllHear(results, kVictim, absl::StatusCode::kResourceExhausted, "all-reduce");
    EXPECT_THAT(std::string(results[kVictim].message()), testing::HasSubstr("bad_alloc"));
  }
}

// More elements than their remainders have memory for, and a count that is not that of the others: before
// the data is touched.
TEST(Communicator, MeansOfIntegersWithoutMemoryOrWithOtherCounts) {
  for (const auto& nodes : kFours) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    const auto mean = [&](const std::function<size_t(int rank)>& count) {
      FakeWorld world(nodes);
      return RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            std::vector<uint8_t> data(10, 1);
            const absl::Status status =
                c.AllReduce(data.data(), count(c.rank()), DType::kUint8, ReduceOp::kMean);
            EXPECT_EQ(data, std::vector<uint8_t>(10, 1));
            return status;
          },
          kNever);
    };
    for (const absl::Status& status : mean([](int) { return size_t{1} << 60; })) {
      EXPECT_TRUE(absl::IsResourceExhausted(status) || absl::IsUnavailable(status)) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("1152921504606846976"));
    }
    for (const absl::Status& status : mean([](int rank) { return rank == 2 ? 5'000'000 : 10; })) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("5000000"));
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

// Where machines are too many for a table in one round: a leader and another rank of a machine that differ.
TEST(Communicator, L6AmongManyMachinesOfSeveralRanks) {
  std::vector<std::string> nodes;
  for (int rank = 0; rank < 36; ++rank) nodes.push_back(absl::StrCat("m", rank / 2));
  for (const int odd : {6, 7}) {
    SCOPED_TRACE(odd);
    FakeWorld world(nodes);
    const auto results = RunThreads(world, [&](Communicator& c) -> absl::Status {
      float data[2] = {1, 1};
      for (int i = 0; i < 3; ++i) {
        RETURN_IF_BAD(c.AllReduce(data, 2, DType::kFloat32, ReduceOp::kSum));
        RETURN_IF_BAD(c.Barrier());
      }
      if (data[0] != 36 * 36 * 36) return absl::DataLossError("a wrong sum");
      return c.AllReduce(data, c.rank() == odd ? 1 : 2, DType::kFloat32, ReduceOp::kMax);
    });
    for (const absl::Status& status : results) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()),
                  testing::HasSubstr(absl::StrCat("; rank ", odd, " calls all-reduce #8 of 1 float32")));
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

TEST(Communicator, ReductionsThatATypeDoesNotHaveAreNamedOnEveryRank) {
  struct Case {
    DType dtype;
    ReduceOp op;
    const char* text;
  };
  const Case kCases[] = {{DType::kBool, ReduceOp::kMean, "bool has no mean: "},
                         {DType::kComplex64, ReduceOp::kMax, "complex64 has no max: "},
                         {DType::kFloat8E4M3, ReduceOp::kBitOr, "float8_e4m3fn has no bit_or: "}};
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a"}, {"a", "b"}}) {
    for (const auto& [dtype, op, text] : kCases) {
      SCOPED_TRACE(text);
      const std::vector<std::function<absl::Status(Communicator&, char*, char*)>> reductions = {
          [&](Communicator& c, char* in, char*) { return c.AllReduce(in, 4, dtype, op); },
          [&](Communicator& c, char* in, char*) { return c.Reduce(in, 4, dtype, op, 0); },
          [&](Communicator& c, char* in, char* out) { return c.ReduceScatter(in, out, 2, dtype, op); }};
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
          EXPECT_THAT(std::string(s.message()), testing::HasSubstr(text));
        }
      }
    }
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
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "c"}}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    std::atomic<int> gave_up = 0;
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          const Instant start = RealClock().Now();
          while (c.rank() == 1 && gave_up < 2 && RealClock().Now() - start < kPatience)
            absl::SleepFor(absl::Milliseconds(1));
          const absl::Status status = c.Barrier();
          ++gave_up;
          return status;
        },
        absl::Seconds(2));
    // At least one rank saw its own deadline; the other may have heard of it first. Rank 1 comes to a barrier
    // that all have entered: either answer is right for it. Between machines a rank can only name the rank
    // that it waits for itself, which may in turn wait for rank 1.
    int deadline = 0, named = 0;
    for (const absl::Status& s : {results[0], results[2]}) {
      EXPECT_FALSE(s.ok());
      named += absl::StrContains(s.message(), "for rank 1") ? 1 : 0;
      if (!absl::IsDeadlineExceeded(s)) continue;
      ++deadline;
      EXPECT_THAT(std::string(s.message()), testing::ContainsRegex("for rank [012]"));
    }
    EXPECT_GE(deadline, 1);
    EXPECT_GE(named, nodes[1] == "a" ? 1 : 0);
  }
}

// A rank that ended with exit code 0 is an error of those that wait for it, and of nobody else.
TEST(Communicator, ARankThatEndedWellEndsTheCallsThatWaitForIt) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "c"}, {"a", "a", "b"}}) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    std::atomic<int> over = 0;
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          auto part = c.Split(c.rank() == 1 ? 1 : 0, 0);
          RETURN_IF_BAD(part.status());
          if (c.rank() == 1) {
            world.Leave(1);
            const Instant start = RealClock().Now();
            while (over < 2 && RealClock().Now() - start < kPatience) absl::SleepFor(absl::Milliseconds(1));
            return absl::OkStatus();
          }
          for (int step = 0; step < 50; ++step) RETURN_IF_BAD((*part)->Barrier());  // without it all goes on
          float x = 1;
          const absl::Status status = c.AllReduce(&x, 1, DType::kFloat32, ReduceOp::kSum);
          ++over;
          return status;
        },
        kNever);
    for (const int rank : {0, 2}) {
      EXPECT_TRUE(absl::IsUnavailable(results[static_cast<size_t>(rank)]))
          << results[static_cast<size_t>(rank)];
      EXPECT_THAT(std::string(results[static_cast<size_t>(rank)].message()),
                  testing::HasSubstr("rank 1 ended with exit code 0"));
    }
  }
}

// Ranks on its machine and on others hear of it, by the name that it has there.
TEST(Communicator, L5PeerThatClosedItsCommunicatorIsAnErrorNotAHang) {
  for (const auto& nodes : kFours) {
    for (int closes = 0; closes < 4; ++closes) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << closes);
      FakeWorld world(nodes);
      const auto results = RunThreads(
          world, [&](Communicator& c) { return c.rank() == closes ? absl::OkStatus() : c.Barrier(); },
          kNever);
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == closes) continue;
        const absl::Status& status = results[static_cast<size_t>(rank)];
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        EXPECT_THAT(std::string(status.message()), testing::HasSubstr("has closed its communicator"));
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Communicator, WhoClosesAPartIsCalledAsInTheJob) {
  for (const auto& nodes : {kFours[0], kFours[2]}) {
    FakeWorld world(nodes);
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          auto part = c.Split(c.rank() / 2, 0);
          RETURN_IF_BAD(part.status());
          return c.rank() == 2 ? (*part)->Barrier() : absl::OkStatus();
        },
        kNever);
    EXPECT_THAT(std::string(results[2].message()),
                testing::HasSubstr("rank 1 (3 of the job) has closed its communicator"));
  }
}

// Its leader is outside any call when the rank gives up, and closes without another one: what it knows
// reaches the other machines all the same.
TEST(Communicator, AnAbortReachesOtherMachinesThroughALeaderThatCloses) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "b", "b"}, {"a", "a", "a", "b"}}) {
    for (const std::string algorithm : {"auto", "leader"}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << algorithm);
      constexpr int kVictim = 1, kLeader = 0;
      FakeWorld world(nodes);
      std::atomic<bool> aborted = false;
      const auto results = RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            RETURN_IF_BAD(c.Barrier());
            if (c.rank() == kVictim) {
              c.Abort(absl::InternalError("words of its own"));
              aborted = true;
            }
            const Instant start = RealClock().Now();
            while (c.rank() == kLeader && !aborted && RealClock().Now() - start < kPatience)
              absl::SleepFor(absl::Milliseconds(1));
            return c.rank() == kLeader ? absl::OkStatus() : c.Barrier();
          },
          kNever, [&](int) { return algorithm; });
      for (const int rank : {2, 3}) {
        EXPECT_THAT(std::string(results[static_cast<size_t>(rank)].message()),
                    testing::HasSubstr("rank 1 gave up: words of its own"));
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

// The message arrives also when the rank's own wait, which is only to tell the others, ends first; and
// whatever it contains.
TEST(Communicator, TheWordsOfARankReachTheOthers) {
  using std::string_literals::operator""s;
#if defined(__SANITIZE_THREAD__)
  constexpr absl::Duration kWait = absl::Seconds(5);  // a communicator is made within it
#else
  constexpr absl::Duration kWait = absl::Seconds(1);
#endif
  for (const auto& nodes : kFours) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    constexpr int kVictim = 1;
    FakeWorld world(nodes);
    std::atomic<bool> refused = false;
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          std::vector<float> data(100);
          const Instant start = RealClock().Now();
          while (c.rank() != kVictim && !refused && RealClock().Now() - start < kPatience)
            absl::SleepFor(absl::Milliseconds(1));
          const absl::Status status = c.AllReduce(c.rank() == kVictim ? nullptr : data.data(), data.size(),
                                                  DType::kFloat32, ReduceOp::kSum);
          if (c.rank() == kVictim) refused = true;
          return status;
        },
        kWait);
    // A rank hears of it by the record, or by the notice: a rank that looks late may still find the record.
    for (size_t rank = 0; rank < results.size(); ++rank) {
      const std::string words(results[rank].message());
      EXPECT_THAT(words, testing::HasSubstr(rank == kVictim ? "" : "rank 1 "));
      EXPECT_THAT(words, testing::HasSubstr("data is null"));
    }
    FakeWorld again(nodes);
    for (const absl::Status& status : RunThreads(
             again,
             [&](Communicator& c) {
               if (c.rank() == kVictim) c.Abort(absl::InternalError("before\0after"s));
               return c.Barrier();
             },
             kNever)) {
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("after"));
    }
    if (testing::Test::HasFailure()) return;
  }
}

// A notice that this rank quotes, of another job or of long ago, counts as this rank's own reason.
TEST(Communicator, WordsLikeANoticeAreNone) {
  for (const auto& nodes : kFours) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    constexpr int kVictim = 1;
    FakeWorld world(nodes);
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          const absl::Status why = absl::UnavailableError("the loader said: rank 7 gave up: no such file");
          if (c.rank() != kVictim) return c.Barrier();
          c.Abort(why);
          return why;
        },
        kNever);
    ExpectAllHear(results, kVictim, absl::StatusCode::kUnavailable, "rank 7 gave up: no such file");
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace gtrain::comm
