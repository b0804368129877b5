#include "runtime/wire/record_codec.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cstring>
#include <set>

#include "base/rng.h"
#include "gtest/gtest.h"
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
