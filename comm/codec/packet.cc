// Everything that comes from the wire is compared with what the receiver expects before a byte of the payload
// is looked at; sizes are computed from the expected count, never from the packet's own claim.
#include "comm/codec/packet.h"

#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/codec/compressor.h"
#include "comm/codec/kernels.h"
#include "comm/codec/reduce.h"

namespace gtrain {
namespace comm {
namespace {

constexpr uint32_t kMagic = 0x44475447;  // "GTGD"
constexpr uint8_t kVersion = 1;
static_assert(std::endian::native == std::endian::little, "packets are little-endian");

struct RawHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t codec;
  uint8_t flags;
  uint8_t reserved;
  uint64_t count;
  uint64_t entries;
  uint64_t zero;
};
static_assert(sizeof(RawHeader) == kPacketHeader);

bool HasScales(Codec codec) {
  switch (codec) {
    case Codec::kInt8:
    case Codec::kFloat8:
    case Codec::kOneBit:
      return true;
    case Codec::kNone:
    case Codec::kFloat16:
    case Codec::kBFloat16:
    case Codec::kTopK:
    case Codec::kPowerSgd:
      return false;
  }
  return false;
}

absl::Status WrongSize(absl::Span<const uint8_t> packet, const PacketHeader& header) {
  return absl::InvalidArgumentError(
      absl::StrCat("compressed gradient: ", packet.size(), " bytes, its header says ", PacketBytes(header)));
}

}  // namespace

size_t ScaleBytes(const PacketHeader& header) {
  if ((header.flags & kPacketPoison) != 0 || !HasScales(header.codec)) return 0;
  return (header.count + kScaleBlock - 1) / kScaleBlock * sizeof(float);
}

size_t PayloadBytes(const PacketHeader& header) {
  if ((header.flags & kPacketPoison) != 0) return 0;
  switch (header.codec) {
    case Codec::kNone:
      return header.count * 4;
    case Codec::kFloat16:
    case Codec::kBFloat16:
      return header.count * 2;
    case Codec::kInt8:
    case Codec::kFloat8:
      return header.count;
    case Codec::kOneBit:
      return (header.count + 7) / 8;
    case Codec::kTopK:
      return header.entries * 8;
    case Codec::kPowerSgd:  // no packets
      return 0;
  }
  return 0;
}

void WriteHeader(const PacketHeader& header, uint8_t* out) {
  const RawHeader raw = {
      kMagic, kVersion, static_cast<uint8_t>(header.codec), header.flags, 0, header.count, header.entries, 0};
  std::memcpy(out, &raw, sizeof raw);
}

absl::StatusOr<PacketHeader> FindHeader(absl::Span<const uint8_t> packet, size_t count) {
  RawHeader raw;
  if (packet.size() < sizeof raw) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressed gradient: ", packet.size(), " bytes are less than a header"));
  }
  if (reinterpret_cast<uintptr_t>(packet.data()) % alignof(float) != 0) {
    return absl::InvalidArgumentError("compressed gradient: its memory is not aligned to 4 bytes");
  }
  std::memcpy(&raw, packet.data(), sizeof raw);
  if (raw.magic != kMagic) return absl::InvalidArgumentError("compressed gradient: does not start with GTGD");
  if (raw.version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("compressed gradient: version ",
                                                   static_cast<int>(raw.version), ", this program reads ",
                                                   static_cast<int>(kVersion)));
  }
  if (!IsCodec(raw.codec) || raw.codec == static_cast<uint8_t>(Codec::kPowerSgd) ||
      (raw.flags & ~kPacketPoison) != 0 || raw.reserved != 0 || raw.zero != 0) {
    return absl::InvalidArgumentError("compressed gradient: unknown codec or flag");
  }
  if (raw.count != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressed gradient: of ", raw.count, " elements, expected ", count));
  }
  PacketHeader header = {static_cast<Codec>(raw.codec), raw.flags, raw.count, raw.entries};
  const bool sparse = header.codec == Codec::kTopK;
  if (sparse ? header.entries > count : header.entries != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressed gradient: ", header.entries, " entries for ", count, " elements"));
  }
  if (packet.size() < PacketBytes(header)) return WrongSize(packet, header);
  return header;
}

absl::StatusOr<PacketHeader> ReadHeader(absl::Span<const uint8_t> packet, size_t count) {
  GT_ASSIGN_OR_RETURN(const PacketHeader header, FindHeader(packet, count));
  if (packet.size() != PacketBytes(header)) return WrongSize(packet, header);
  return header;
}

void ScaleTopK(absl::Span<uint8_t> packet, const PacketHeader& header, float factor) {
  uint8_t* values = packet.data() + kPacketHeader + PayloadBytes(header) / 2;  // behind the indices
  for (size_t i = 0; i < PayloadBytes(header) / 2; i += sizeof(float)) {
    float value;
    std::memcpy(&value, values + i, sizeof value);
    value *= factor;
    std::memcpy(values + i, &value, sizeof value);
  }
}

namespace {

absl::Status DecodeTopK(const uint8_t* payload, size_t entries, absl::Span<float> output, DecodeMode mode) {
  if (mode == DecodeMode::kSet) std::memset(output.data(), 0, output.size() * sizeof(float));
  const uint8_t* values = payload + entries * sizeof(uint32_t);
  uint64_t next = 0;  // indices rise, so each is named once
  for (size_t i = 0; i < entries; ++i) {
    uint32_t index;
    float value;
    std::memcpy(&index, payload + i * sizeof index, sizeof index);
    std::memcpy(&value, values + i * sizeof value, sizeof value);
    if (index < next || index >= output.size()) {
      return absl::InvalidArgumentError(absl::StrCat("compressed gradient: entry ", i, " has index ", index,
                                                     ", expected ", next, " to ", output.size() - 1));
    }
    output[index] += value;
    next = uint64_t{index} + 1;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace comm

absl::Status Decode(absl::Span<const uint8_t> packet, absl::Span<float> output, DecodeMode mode) {
  GT_ASSIGN_OR_RETURN(const comm::PacketHeader header, comm::ReadHeader(packet, output.size()));
  if (output.empty())
    return absl::OkStatus();  // its data() may be null, which memcpy and the kernels must not see
  if ((header.flags & comm::kPacketPoison) != 0) {
    for (float& value : output) value = std::numeric_limits<float>::quiet_NaN();
    return absl::OkStatus();
  }
  const bool add = mode == DecodeMode::kAdd;
  const auto* scales = reinterpret_cast<const float*>(packet.data() + comm::kPacketHeader);
  const uint8_t* payload = packet.data() + comm::kPacketHeader + comm::ScaleBytes(header);
  const comm::Kernels& kernels = comm::BestKernels();
  const auto run = [&](auto decode) { decode(payload, scales, output.size(), output.data(), add); };
  switch (header.codec) {
    case Codec::kNone:
      if (add) {
        const void* const sources[] = {output.data(), payload};
        comm::Reduce(output.data(), sources, 2, output.size(), DType::kFloat32, ReduceOp::kSum);
      } else {
        std::memcpy(output.data(), payload, output.size() * sizeof(float));
      }
      break;
    case Codec::kFloat16:
      run(kernels.decode_float16);
      break;
    case Codec::kBFloat16:
      run(kernels.decode_bfloat16);
      break;
    case Codec::kInt8:
      run(kernels.decode_int8);
      break;
    case Codec::kFloat8:
      run(kernels.decode_float8);
      break;
    case Codec::kOneBit:
      run(kernels.decode_one_bit);
      break;
    case Codec::kTopK:
      return comm::DecodeTopK(payload, header.entries, output, mode);
    case Codec::kPowerSgd:  // ReadHeader refused it
      break;
  }
  return absl::OkStatus();
}

}  // namespace gtrain
