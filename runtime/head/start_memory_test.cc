// Measures the memory of a starting head beside what it keeps: thousands of jobs of the past have hundreds of
// thousands of exits.
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/memory_count_fake.h"
#include "job/spec/parse.h"
#include "runtime/core/head/head_core.h"
#include "runtime/head/rescue.h"
#include "runtime/store/memory_store.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::head {
namespace {

constexpr int kJobs = 40;
constexpr int kRanks = 300;

core::JobRecord JobOf(int number) {
  core::JobRecord job{{.id = JobId(absl::StrCat("train-", number)), .number = static_cast<uint64_t>(number)},
                      {.state = core::JobState::kSucceeded, .generation = {1}, .revoked = {1}}};
  job.grant = core::GenerationGrant{.job = job.id, .generation = {1}, .world_size = kRanks};
  for (int rank = 0; rank < kRanks; ++rank) {
    job.exits.push_back(
        {.job = job.id, .generation = {1}, .rank = rank, .message = "it ended with exit code 0"});
  }
  return job;
}

// The worst form: a record for each exit.
void Fill(store::MemoryStore& store) {
  const auto put = [&](const core::Record& record) {
    ASSERT_TRUE(store.Commit({{core::KeyOf(record), wire::EncodeRecord(record)}}).ok());
  };
  put(core::ClusterRecord{ClusterId("c1")});
  for (int number = 1; number <= kJobs; ++number) {
    const core::JobRecord job = JobOf(number);
    put(core::JobSubmission(job));
    put(core::StatusRecordOf(job));
    put(core::JobGrantRecord{job.id, *job.grant, {}});
    for (int i = 0; i < kRanks; ++i) put(core::JobExitRecord{job.id, i, job.exits[static_cast<size_t>(i)]});
  }
}

TEST(StartMemory, NothingIsThereTwiceWhileRecordsAreReadAndTakenUp) {
  store::MemoryStore store;
  ASSERT_NO_FATAL_FAILURE(Fill(store));
  constexpr int64_t kExits = int64_t{kJobs} * kRanks;
  const ManualClock clock;
  core::HeadConfig config{.cluster = ClusterId("c1")};
  config.parse_job = spec::ParseCanonical;
  core::HeadCore head(std::move(config), Rng(1));

  const int64_t before = AllocatedBytes();
  ResetPeakAllocatedBytes();
  {
    absl::StatusOr<core::StoredRecords> stored = LoadRecords(store);
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->count, static_cast<size_t>(1 + 3 * kJobs + kExits));
    const auto recovered = head.Recover(*std::move(stored), clock.Now(), clock.WallNow());
    ASSERT_TRUE(recovered.ok()) << recovered.status();
  }
  const int64_t kept = AllocatedBytes() - before, peak = PeakAllocatedBytes() - before;
  EXPECT_EQ(head.RecordOf(JobId("train-1"))->exits.size(), static_cast<size_t>(kRanks));
  std::printf("an exit: %ld bytes kept, %ld at the peak\n", static_cast<long>(kept / kExits),
              static_cast<long>(peak / kExits));
  // A `Record` of each alone would be five times what is kept of an exit; all bytes of the store once more
  // would be as much as what is kept.
  EXPECT_LT(peak, kept * 5 / 4);
}

}  // namespace
}  // namespace gtrain::head
