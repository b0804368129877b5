#include "runtime/wire/record_codec.h"

#include <set>

#include "base/rng.h"
#include "gtest/gtest.h"

namespace gtrain::wire {
namespace {

core::JobRecord Job() {
  core::JobRecord job{
      .id = JobId("train-3"),
      .number = 3,
      .name = "train",
      .spec_text = "name: train\n",
      .env = {{"A", "b"}},
      .run_dir = "/runs/3",
      .resume = "latest",
      .client_key = "0011223344556677",
      .request_id = "abc",
      .end_with_client = true,
      .state = core::JobState::kReconfiguring,
      .reason = "rank 1 was killed by signal 9",
      .generation = {4},
      .revoked = {3},
      .timeline = {2},
      .grant = core::GenerationGrant{.job = JobId("train-3"), .generation = {4}, .world_size = 2},
      .ending = core::Ending::kReform,
      .ending_reason = "rank 1",
      .exits = {{.job = JobId("train-3"), .generation = {4}, .rank = 1, .signal = 9}},
      .unreleased = {NodeId("n1")},
      .kept = {NodeId("n1"), NodeId("n2")},
      .restarts = 2,
      .run_time = absl::Seconds(77),
      .exit_code = -1,
      .event_sequence = 99};
  for (core::FaultKind kind : {core::FaultKind::kCrash, core::FaultKind::kAddressInUse}) {
    job.faults.push_back({.generation = {3},
                          .kind = kind,
                          .rank = -1,
                          .node = NodeId("n1"),
                          .hostname = "h",
                          .cause = core::ExitCause::kOom,
                          .exit_code = 3,
                          .signal = 9,
                          .message = "killed",
                          .tail = "\xff tail",
                          .signature = "sig\x01",
                          .step = 12,
                          .progressed = true});
  }
  return job;
}

std::vector<core::Record> Samples() {
  return {core::ClusterRecord{ClusterId("c1"), {9}, 5, 6},
          core::NodeRecord{NodeId("n1"),
                           Incarnation("i1"),
                           "b1",
                           "host",
                           "10.0.0.1",
                           "0.1.0",
                           {.cpus = 2},
                           {{"k", "v"}},
                           true},
          Job(),
          core::JobRecord{.id = JobId("bare-1")},
          core::RequestRecord{"0011223344556677", "abc", 7, {"abc", false, 3, "why", "{}"}},
          core::CheckpointRecord{JobId("train-3"), {4}, {2}, 500, "m/500", 11}};
}

TEST(RecordCodec, EveryKindComesBackEqual) {
  std::set<size_t> kinds;
  for (const core::Record& record : Samples()) {
    kinds.insert(record.index());
    absl::StatusOr<core::Record> back = DecodeRecord(EncodeRecord(record));
    ASSERT_TRUE(back.ok()) << KeyOf(record) << ": " << back.status();
    EXPECT_EQ(*back, record) << KeyOf(record);
  }
  EXPECT_EQ(kinds.size(), std::variant_size_v<core::Record>);
}

TEST(RecordCodec, DamageIsDataLossOrHarmless) {
  Rng rng(11);
  for (const core::Record& record : Samples()) {
    std::string bytes = EncodeRecord(record);
    for (size_t length = 0; length < bytes.size(); ++length) (void)DecodeRecord(bytes.substr(0, length));
    for (int i = 0; i < 3000; ++i) {
      std::string bad = bytes;
      bad[rng.Below(bad.size())] ^= 1 << rng.Below(8);
      absl::StatusOr<core::Record> result = DecodeRecord(bad);
      EXPECT_TRUE(result.ok() || absl::IsDataLoss(result.status())) << result.status();
    }
  }
}

}  // namespace
}  // namespace gtrain::wire
