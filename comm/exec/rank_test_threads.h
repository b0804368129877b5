// For tests: every rank a thread, over a network in memory.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "gtest/gtest.h"

namespace gtrain::comm {

using Body = std::function<absl::Status(Communicator&)>;

inline constexpr absl::Duration kPatience = absl::Seconds(60);

// Runs `body` as every rank; returns what each said. `algorithm` and `network`: of a rank, what
// GTRAIN_COMM_ALGO and GTRAIN_COMM_TLS would say.
inline std::vector<absl::Status> RunThreads(FakeWorld& world, const Body& body,
                                            absl::Duration timeout = kPatience,
                                            const std::function<std::string(int rank)>& algorithm = nullptr,
                                            const std::function<std::string(int rank)>& network = nullptr) {
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
      options.transport = [&](const Bootstrap&, uint64_t) { return messages.MakeTransport(); };
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

}  // namespace gtrain::comm
