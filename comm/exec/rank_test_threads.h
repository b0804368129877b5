// For tests: every rank a thread, over a network in memory.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {

using Body = std::function<absl::Status(Communicator&)>;

inline constexpr absl::Duration kPatience = absl::Seconds(60);
// A time that no test waits for.
inline constexpr absl::Duration kNever = absl::Minutes(10);

// Four ranks on one machine, on two of two ranks, and with one rank on each.
inline const std::vector<std::vector<std::string>> kFours = {
    {"a", "a", "a", "a"}, {"a", "a", "b", "b"}, {"a", "b", "c", "d"}};

// Makes of a rank's network another one.
using Wrap = std::function<std::unique_ptr<DataTransport>(int rank, std::unique_ptr<DataTransport>)>;

// Runs `body` as every rank; returns what each said. `algorithm` and `network`: of a rank, what
// GTRAIN_COMM_ALGO and GTRAIN_COMM_TLS would say.
inline std::vector<absl::Status> RunThreads(FakeWorld& world, const Body& body,
                                            absl::Duration timeout = kPatience,
                                            const std::function<std::string(int rank)>& algorithm = nullptr,
                                            const std::function<std::string(int rank)>& network = nullptr,
                                            const Wrap& wrap = nullptr) {
  FakeNetwork messages;
  std::vector<absl::Status> results(static_cast<size_t>(world.size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
      ExecOptions options;
      options.user.timeout = timeout;
      if (algorithm) options.algorithm = algorithm(rank);
      if (network) options.network = network(rank);
      options.transport = [&, rank](const Bootstrap&, uint64_t) {
        auto transport = messages.MakeTransport();
        return wrap ? wrap(rank, std::move(transport)) : std::move(transport);
      };
      auto communicator = MakeCommunicator(bootstrap.get(), options);
      results[static_cast<size_t>(rank)] = communicator.ok() ? body(**communicator) : communicator.status();
    });
  }
  for (std::thread& t : threads) t.join();
  return results;
}

inline void ExpectAllOk(const std::vector<absl::Status>& results) {
  for (size_t rank = 0; rank < results.size(); ++rank)
    EXPECT_TRUE(results[rank].ok()) << rank << results[rank];
}

// The victim has an error of its own, the others one that names it and has its words.
inline void ExpectAllHear(const std::vector<absl::Status>& results, int victim, absl::StatusCode code,
                          const std::string& words) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const absl::Status& status = results[rank];
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(words)) << rank << status;
    if (static_cast<int>(rank) == victim) {
      EXPECT_EQ(status.code(), code) << rank << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << rank << status;
    EXPECT_THAT(std::string(status.message()),
                testing::AnyOf(testing::HasSubstr(absl::StrCat("rank ", victim, " gave up: ")),
                               testing::HasSubstr(absl::StrCat("(", victim, " of the job) gave up: "))))
        << rank;
  }
}

}  // namespace gtrain::comm
