// Errors of one member, mistakes of a program and members that do not come: who hears what of whom.
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
#include "base/clock.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/communicator.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_world.h"
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
    ExpectAllHear(results, 2, absl::StatusCode::kInvalidArgument,
                  "from rank 2 to rank 9: the other rank must be one of 0..3");
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
      ExpectAllHear(results, victim, absl::StatusCode::kResourceExhausted,
                    "splitting off communicator 0: no arena for you");
      if (testing::Test::HasFailure()) return;
    }
  }
}

// A network whose memory is used up when `*throws`.
class Throwing final : public DataTransport {
 public:
  Throwing(std::unique_ptr<DataTransport> real, const std::atomic<bool>* throws)
      : real_(std::move(real)), throws_(throws) {}
  absl::StatusOr<std::string> Address() override { return real_->Address(); }
  absl::Status Connect(const std::vector<std::string>& addresses, int self) override {
    return real_->Connect(addresses, self);
  }
  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    if (*throws_) throw std::bad_alloc();
    return real_->Exchange(transfers, done, watch);
  }
  void Fail(absl::string_view notice) override { real_->Fail(notice); }
  absl::Status Heard() override { return real_->Heard(); }

 private:
  const std::unique_ptr<DataTransport> real_;
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

}  // namespace
}  // namespace gtrain::comm
