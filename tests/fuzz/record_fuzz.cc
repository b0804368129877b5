// Fuzzes the head's store (fault B13): the sealed value and the record inside it.
#include "base/check.h"
#include "runtime/store/sealed_value.h"
#include "runtime/wire/record_codec.h"
#include "runtime/wire/samples.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

GT_FUZZ_RUN(record) {
  const absl::StatusOr<absl::string_view> opened = store::OpenValue("key", bytes);
  if (opened.ok()) GT_CHECK(store::SealValue("key", *opened) == bytes);
  const std::string sealed = store::SealValue("key", bytes);
  GT_CHECK(*store::OpenValue("key", sealed) == bytes);
  GT_CHECK(!store::OpenValue("other", sealed).ok());

  const absl::StatusOr<core::Record> record = wire::DecodeRecord(bytes);
  if (!record.ok()) return;
  const std::string written = wire::EncodeRecord(*record);
  const absl::StatusOr<core::Record> back = wire::DecodeRecord(written);
  GT_CHECK(back.ok());
  GT_CHECK(*back == *record);
  GT_CHECK(!core::KeyOf(*record).empty());
  GT_CHECK(wire::EncodeRecord(*back) == written);
}

GT_FUZZ_SEEDS(record) {
  std::vector<std::string> seeds;
  for (const core::Record& record : wire::SampleRecords()) {
    seeds.push_back(wire::EncodeRecord(record));
    seeds.push_back(store::SealValue("key", seeds.back()));
  }
  return seeds;
}

}  // namespace gtrain::fuzz
