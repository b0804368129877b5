#include "runtime/wire/record_codec.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cstring>
#include <set>

#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/values/job_records.h"
#include "runtime/wire/records.capnp.h"
#include "runtime/wire/samples.h"

namespace gtrain::wire {
namespace {

TEST(RecordCodec, EveryKindComesBackEqual) {
  std::set<size_t> kinds;
  for (const core::Record& record : SampleRecords()) {
    kinds.insert(record.index());
    absl::StatusOr<core::Record> back = DecodeRecord(EncodeRecord(record));
    ASSERT_TRUE(back.ok()) << KeyOf(record) << ": " << back.status();
    EXPECT_EQ(*back, record) << KeyOf(record);
  }
  EXPECT_EQ(kinds.size(), std::variant_size_v<core::Record>);
}

// A head of before storage faults reads records of this one (N13): to it such a fault is one that is charged
// to nobody, too.
TEST(RecordCodec, AnOlderHeadReadsAStorageFaultAsAPreemption_N13) {
  core::JobRecord job = SampleJobRecord();
  const std::string bytes = EncodeRecord(job);
  kj::Array<capnp::word> words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), bytes.size());
  capnp::FlatArrayMessageReader reader(words);
  const auto faults = reader.getRoot<proto::Record>().getJob().getFaults();
  ASSERT_EQ(faults.size(), job.faults.size());
  ASSERT_EQ(job.faults.back().kind, core::FaultKind::kStorage);
  EXPECT_EQ(faults[faults.size() - 1].getKind(), proto::FaultKind::PREEMPTED);
  EXPECT_TRUE(faults[faults.size() - 1].getStorage());
  EXPECT_FALSE(faults[0].getStorage());
}

// To a head from before jobs had several records these are of an unknown kind, which it sets aside by name,
// as this one does with those of the next version.
TEST(RecordCodec, RecordsOfANewerHeadAreRefused_N13) {
  constexpr size_t kKindAt = 2 * sizeof(capnp::word);  // behind the table of segments and the root's pointer
  constexpr uint16_t kNewestOfBefore = proto::Record::CHECKPOINT;
  const core::JobRecord job = SampleJobRecord();
  for (const core::Record& record : std::vector<core::Record>{
           core::JobSubmission(job), core::StatusRecordOf(job), core::JobGrantRecord{job.id, *job.grant, {}},
           core::JobExitRecord{job.id, 0, job.exits[0]}, core::JobFaultRecord{job.id, job.faults[0]},
           core::JobUnreleasedRecord{job.id, job.unreleased}, core::JobExitsRecord{job.id, 0, job.exits}}) {
    std::string bytes = EncodeRecord(record);
    uint16_t kind = 0;
    std::memcpy(&kind, &bytes[kKindAt], sizeof(kind));
    EXPECT_GT(kind, kNewestOfBefore) << KeyOf(record);
    kind = 4'711;
    std::memcpy(&bytes[kKindAt], &kind, sizeof(kind));
    const absl::Status status = DecodeRecord(bytes).status();
    EXPECT_TRUE(absl::IsDataLoss(status));
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("a newer head wrote it"));
  }
}

// Each exit of a rank writes the status besides itself.
TEST(RecordCodec, AStatusIsAsLongForAThousandRanksAsForOne) {
  core::JobRecord job = SampleJobRecord();
  const size_t of_one = EncodeRecord(core::StatusRecordOf(job)).size();
  EXPECT_LT(of_one, 1'000u);
  job.spec_text = std::string(100'000, 's');
  job.exits.resize(1'000, job.exits[0]);
  job.unreleased.resize(1'000, NodeId("n1"));
  job.kept.resize(1'000, NodeId("n1"));
  job.grant->ranks.resize(1'000);
  for (core::FaultRecord& fault : job.faults) fault.tail = std::string(16'000, 't');
  EXPECT_EQ(EncodeRecord(core::StatusRecordOf(job)).size(), of_one);
}

TEST(RecordCodec, DamageIsDataLossOrHarmless) {
  Rng rng(11);
  for (const core::Record& record : SampleRecords()) {
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
