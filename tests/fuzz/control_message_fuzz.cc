// Bytes of the control plane (faults B6, B7): refused, or a message that is written and read back unchanged.
#include "base/check.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/samples.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

GT_FUZZ_RUN(control_message) {
  using wire::Sender;
  const absl::StatusOr<core::Message> message = wire::Decode(bytes);
  int senders = 0;
  for (Sender sender : {Sender::kAgent, Sender::kClient, Sender::kHead, Sender::kJoiner}) {
    const absl::StatusOr<core::Message> bound = wire::Decode(bytes, sender);
    if (!bound.ok()) continue;
    ++senders;
    GT_CHECK(message.ok() && *bound == *message);
  }
  if (!message.ok()) return;
  GT_CHECK(senders == 1);  // every kind belongs to exactly one sender
  GT_CHECK(!wire::KindName(*message).empty());
  const std::string written = wire::Encode(*message);
  const absl::StatusOr<core::Message> back = wire::Decode(written);
  GT_CHECK(back.ok());
  GT_CHECK(*back == *message);
  GT_CHECK(wire::Encode(*back) == written);
}

GT_FUZZ_SEEDS(control_message) {
  std::vector<std::string> seeds;
  for (const core::Message& message : wire::SampleMessages()) {
    std::string bytes = wire::Encode(message);
    if (bytes.size() <= 8192) seeds.push_back(std::move(bytes));
  }
  return seeds;
}

}  // namespace gtrain::fuzz
