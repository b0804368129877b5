// Counts the requests that a save makes to an object store, on the server. Each takes a store about as long
// to compute, so one request more is what every save of every job pays (docs/performance.md).
#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/hosted_fake.h"
#include "checkpoint/s3/s3_fake.h"
#include "checkpoint/s3/s3_store.h"
#include "net/http/curl_client.h"

namespace gtrain::ckpt {
namespace {

class FixedKeys final : public CredentialsProvider {
 public:
  absl::StatusOr<S3Credentials> Get() override { return S3Credentials{"AKIDEXAMPLE", "secret"}; }
  void Refused(const S3Credentials&) override {}
};

constexpr size_t kWindow = 4;  // saves

// The cheapest kWindow saves one after the other, of some: a machine so slow that ranks do not meet within a
// second costs more, and so does one save in twenty that lists everything.
void ExpectSavesTake(size_t most, int ranks, bool outside) {
  S3Fake server({.page_keys = 1000});
  const StoreFactory factory = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
    S3Options options;
    options.bucket = "bucket";
    options.endpoint = server.endpoint();
    options.path_style = true;
    return *OpenS3Store(options, *http::MakeCurlClient(""), std::make_shared<FixedKeys>());
  };
  HostedSession::Writers writers;
  writers.open_store = factory;
  writers.refuse = !outside;
  const FakeJob job{.world_size = ranks};
  std::vector<size_t> before;  // requests before each save
  RunHosted(job, &writers, [&](HostedSession* session) {
    auto rank = OpenRank(job, session, "x", 2, factory);
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto comm = *session->MakeCommunicator({});
    for (int64_t step = 1; step <= 18; ++step) {
      ASSERT_TRUE(comm->Barrier().ok());
      if (session->rank() == 0) before.push_back(server.Operations().size());
      ASSERT_TRUE(comm->Barrier().ok());
      Fill(rank->state.get(), State::At(step, session->rank()));
      auto saved = rank->checkpointer->Save(step);
      ASSERT_TRUE(saved.ok() && *saved) << saved.status();
      const absl::Status waited = rank->checkpointer->Wait(kLong);
      ASSERT_TRUE(waited.ok()) << waited;
    }
  });
  const std::vector<std::string> all = server.Operations();
  ASSERT_EQ(before.size(), 18u);
  size_t from = 4;
  for (size_t i = from; i + kWindow < before.size(); ++i) {
    if (before[i + kWindow] - before[i] < before[from + kWindow] - before[from]) from = i;
  }
  std::map<std::string, int> kinds;
  for (size_t i = before[from]; i < before[from + kWindow]; ++i) ++kinds[all[i]];
  std::string said = absl::StrCat(kWindow, " saves of ", ranks, " ranks:");
  for (const auto& [kind, count] : kinds) absl::StrAppend(&said, " ", kind, " ", count);
  std::cout << "  " << said << "\n";
  EXPECT_LE(before[from + kWindow] - before[from], most) << said;
}

TEST(SaveCost, OfOneMachine) {
  // Each four shards, one listing of owners and manifests, the manifest put and read back; and of all
  // together pins listed, manifests deleted, shards deleted.
  ExpectSavesTake(kWindow * 7 + 3, 4, true);
}

TEST(SaveCost, OfOneRank) { ExpectSavesTake(kWindow * 4 + 3, 1, true); }

TEST(SaveCost, WithoutWritersTheRanksMeetInTheStorage) {
  // There are also four indices, each read by three others who check its shard, and the manifest read by
  // three; polled files may be asked for more often.
  ExpectSavesTake(kWindow * (20 + 12) + 3, 4, false);
}

}  // namespace
}  // namespace gtrain::ckpt
