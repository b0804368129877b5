// Compressed gradients of a peer (fault B7, docs/formats/compression.md): any bytes are decoded or refused;
// both modes agree about which and on the values, and nothing is written outside the output.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "comm/codec/compressor.h"
#include "comm/codec/packet.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

constexpr size_t kCountMax = 4096;

std::string Packet(Codec codec, size_t count, float scale) {
  CompressionOptions options;
  options.codec = codec;
  options.exact = true;
  options.density = 0.1;
  const auto compressor = Compressor::Create(options, count);
  Require(compressor.status());
  std::vector<float> gradient(count);
  for (size_t i = 0; i < count; ++i) gradient[i] = scale * static_cast<float>(std::sin(i + 1.0));
  std::vector<uint8_t> packet((*compressor)->MaxBytes());
  const auto bytes = (*compressor)->Encode(gradient, absl::MakeSpan(packet));
  Require(bytes.status());
  return std::string(packet.begin(), packet.begin() + static_cast<std::ptrdiff_t>(*bytes));
}

}  // namespace

// The receiver expects as many elements as the packet says, as far as that is a size it might expect: any
// other count is refused by one comparison.
GT_FUZZ_RUN(compression_packet) {
  uint64_t count = 0;
  if (bytes.size() >= comm::kPacketHeader) std::memcpy(&count, bytes.data() + 8, sizeof count);
  if (count > kCountMax) count = 7;
  std::vector<uint32_t> aligned(bytes.size() / 4 + 1);  // as receive buffers are
  auto* const start = reinterpret_cast<uint8_t*>(aligned.data());
  std::copy(bytes.begin(), bytes.end(), start);
  const absl::Span<const uint8_t> packet(start, bytes.size());

  std::vector<float> set(count, 1), added(count, 0), other(count + 1, 0);
  const absl::Status status = Decode(packet, absl::MakeSpan(set), DecodeMode::kSet);
  GT_CHECK(status.ok() == Decode(packet, absl::MakeSpan(added), DecodeMode::kAdd).ok());
  GT_CHECK(!Decode(packet, absl::MakeSpan(other), DecodeMode::kSet).ok());
  if (!status.ok()) return;
  for (size_t i = 0; i < count; ++i) {
    GT_CHECK(set[i] == added[i] || (std::isnan(set[i]) && std::isnan(added[i])));
  }
}

GT_FUZZ_SEEDS(compression_packet) {
  std::vector<std::string> seeds;
  for (const Codec codec : PacketCodecs()) {
    for (const size_t count : {size_t{1}, size_t{37}, size_t{300}})
      seeds.push_back(Packet(codec, count, 0.5f));
  }
  seeds.push_back(Packet(Codec::kInt8, 37, INFINITY));  // poison
  return seeds;
}

}  // namespace gtrain::fuzz
