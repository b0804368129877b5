// Fuzzes the messages between ranks and near servers of other machines about copies of shards
// (docs/protocols/copies.md): any bytes are understood or refused, and an understood message is encoded again
// to the same bytes.
#include "base/check.h"
#include "checkpoint/near/near_wire.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

GT_FUZZ_RUN(near_messages) {
  if (const auto request = ckpt::ParseRequest(bytes); request.ok()) {
    GT_CHECK(ckpt::PrintRequest(*request) == bytes);
  }
  if (const auto data = ckpt::ParseReply(bytes); data.ok()) {
    GT_CHECK(ckpt::PrintReply(absl::OkStatus(), *data) == bytes);
  }
  if (const auto shards = ckpt::ParseShards(bytes); shards.ok()) {
    GT_CHECK(ckpt::PrintShards(*shards) == bytes);
  }
}

GT_FUZZ_SEEDS(near_messages) {
  using Kind = ckpt::NearRequest::Kind;
  const std::string attempt = "step-000000000120.e0002.t0001.g0005.a01",
                    file = "rank-00003-of-00008.safetensors";
  return {ckpt::PrintRequest({.kind = Kind::kList, .attempt = attempt}),
          ckpt::PrintRequest(
              {.kind = Kind::kRead, .offset = 4 << 20, .bytes = 7, .attempt = attempt, .file = file}),
          ckpt::PrintRequest(
              {.kind = Kind::kBegin, .bytes = 9, .attempt = attempt, .file = file, .committed = attempt}),
          ckpt::PrintRequest({.kind = Kind::kPiece, .offset = 3, .data = "abc"}),
          ckpt::PrintRequest({.kind = Kind::kAttempts}),
          ckpt::PrintReply(absl::OkStatus(), "data"),
          ckpt::PrintReply(absl::ResourceExhaustedError("no room")),
          ckpt::PrintShards({{file, 1 << 20}, {"rank-00004-of-00008.safetensors", 5}})};
}

}  // namespace gtrain::fuzz
