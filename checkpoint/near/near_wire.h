// The messages between a rank (or its writer) and the near server of another machine. One request, one reply,
// in this order on each connection; integers little-endian. Readers take nothing a writer here would not
// produce.
//
//   request  u32 kNearMagic, u8 kind, u64 offset, u64 bytes, three texts (u8 length, bytes): attempt, file,
//            committed; then data
//   reply    u32 kNearMagic, u8 status code; then data, or the sentence of an error
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/port/near_tier.h"

namespace gtrain::ckpt {

inline constexpr uint32_t kNearMagic = 0x314e5447;  // "GTN1": the version is in it
inline constexpr uint64_t kNearPieceBytes = 4 << 20;
inline constexpr int64_t kNearMessageBytesMax = kNearPieceBytes + 4096;

struct NearRequest {
  enum class Kind : uint8_t {
    kList = 1,  // whole copies of `attempt`: the reply's data is a list
    kRead = 2,  // `bytes` from `offset` of a copy
    kBegin =
        3,  // a copy of `bytes` will come on this connection; what was being put on it before is given up
    kPiece = 4,     // the next bytes of it; with the last ones it is whole
    kAttempts = 5,  // of which there are copies: the reply's data is a list of them, with no lengths
  };
  Kind kind = Kind::kList;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::string attempt, file, committed;
  absl::string_view data;  // of the message
};

std::string PrintRequest(const NearRequest& request);
// InvalidArgument: not a request. `message` must outlive it.
absl::StatusOr<NearRequest> ParseRequest(absl::string_view message);

std::string PrintReply(const absl::Status& status, absl::string_view data = "");
// The data; or the error that the other side has.
absl::StatusOr<absl::string_view> ParseReply(absl::string_view message);

std::string PrintShards(const std::vector<port::NearTier::Shard>& shards);
absl::StatusOr<std::vector<port::NearTier::Shard>> ParseShards(absl::string_view data);

}  // namespace gtrain::ckpt
