// A compressed gradient as bytes: header, scales, payload. docs/formats/compression.md is the description. 32
// bytes, and of an element: 2 as fp16 or bf16, 1 + 1/64 as int8 or fp8, 1/8 + 1/64 as 1-bit, and 8 where
// top-k selects it. PURE.
#pragma once
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtrain/compression.h"

namespace gtrain::comm {

inline constexpr size_t kPacketHeader = 32;
inline constexpr uint8_t kPacketPoison = 1;  // flag: the gradient was not finite
// The bound to which carried state, and the values that codecs other than fp16 and top-k send, are clipped:
// the sum of 2^15 such values, and the sums of a block, are finite.
inline constexpr float kLargestSent = 0x1p112f;

struct PacketHeader {
  Codec codec = Codec::kNone;
  uint8_t flags = 0;
  uint64_t count = 0;    // elements of the gradient
  uint64_t entries = 0;  // top-k: elements sent; else `count`
};

// Bytes of scales and of payload that the header implies. Both are 0 for a poisoned packet.
size_t ScaleBytes(const PacketHeader& header);
size_t PayloadBytes(const PacketHeader& header);
inline size_t PacketBytes(const PacketHeader& header) {
  return kPacketHeader + ScaleBytes(header) + PayloadBytes(header);
}

// `out` has at least kPacketHeader bytes.
void WriteHeader(const PacketHeader& header, uint8_t* out);

// Multiplies the values of a top-k packet that Encode wrote.
void ScaleTopK(absl::Span<uint8_t> packet, const PacketHeader& header, float factor);

// The header of the packet at the start of `slot`, which may have more bytes, and that decodes to `count`
// elements. InvalidArgument says what is wrong, e.g. that the slot ends before the packet.
absl::StatusOr<PacketHeader> FindHeader(absl::Span<const uint8_t> slot, size_t count);

// The header of a packet of exactly these bytes that decodes to `count` elements. InvalidArgument says what
// is wrong.
absl::StatusOr<PacketHeader> ReadHeader(absl::Span<const uint8_t> packet, size_t count);

}  // namespace gtrain::comm
