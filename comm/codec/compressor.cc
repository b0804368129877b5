// The transaction around the codecs. Residuals are kept twice: the applied one is only read by a step, the
// pending one only written, so forgetting a step costs nothing and remembering it is an exchange of two
// pointers.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "comm/codec/kernels.h"
#include "comm/codec/packet.h"
#include "comm/codec/top_k.h"
#include "gtrain/compression.h"

namespace gtrain {
namespace comm {
namespace {

// Elements at a time of the block codecs: sum, approximation and packet stay in the first-level cache.
constexpr size_t kPiece = 2048;
static_assert(kPiece % kScaleBlock == 0);
constexpr double kWarmupDensity = 0.25;
// An approximate top-k sends between these shares of k.
constexpr double kLow = 0.9, kHigh = 1.1;
constexpr char kProgress[] = "progress";

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

// An array and its successor-to-be, zeroed.
class Pending {
 public:
  Pending() = default;
  explicit Pending(size_t count) {
    const size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    for (auto& array : arrays_) {
      array.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      if (array != nullptr) std::memset(array.get(), 0, bytes);
    }
  }
  bool Made() const { return arrays_[0] != nullptr && arrays_[1] != nullptr; }
  float* current() const { return arrays_[0].get(); }
  float* next() const { return arrays_[1].get(); }
  void Apply() { arrays_[0].swap(arrays_[1]); }

 private:
  std::unique_ptr<float, Free> arrays_[2];
};

using EncodeBlocks = void (*)(const float*, size_t, uint8_t*, float*);
using DecodeBlocks = void (*)(const uint8_t*, const float*, size_t, float*, bool);

class CompressorImpl : public Compressor {
 public:
  CompressorImpl(const CompressionOptions& options, size_t count)
      : options_(options), count_(count), kernels_(BestKernels()), selector_(kernels_) {
    if (options.error_feedback) residual_ = Pending(count);
    if (options.momentum > 0) velocity_ = Pending(count);
  }
  // False: no memory.
  bool Made() const {
    return (!options_.error_feedback || residual_.Made()) && (options_.momentum == 0 || velocity_.Made());
  }

  const CompressionOptions& options() const override { return options_; }
  size_t count() const override { return count_; }

  size_t MaxBytes() const override {
    const bool warms_up = options_.warmup_steps > 0;
    const size_t most = Wanted(warms_up ? std::max(kWarmupDensity, options_.density) : options_.density).high;
    return PacketBytes({options_.codec, 0, count_, options_.codec == Codec::kTopK ? most : count_});
  }

  absl::StatusOr<size_t> Encode(absl::Span<const float> gradient, absl::Span<uint8_t> packet) override {
    if (gradient.size() != count_ || packet.size() < MaxBytes()) {
      return absl::InvalidArgumentError(absl::StrCat("compress: ", gradient.size(), " elements into ",
                                                     packet.size(), " bytes; this compressor is for ", count_,
                                                     " elements and ", MaxBytes(), " bytes"));
    }
    pending_ = false;
    selected_ = {};
    PacketHeader header = {options_.codec, 0, count_, count_};
    const bool finite = options_.codec == Codec::kTopK ? EncodeTopK(gradient, packet, &header)
                                                       : EncodeAll(gradient, packet, header);
    if (!finite) header.flags = kPacketPoison;
    WriteHeader(header, packet.data());
    pending_ = finite;
    return PacketBytes(header);
  }

  Selected selected() const override { return selected_; }

  absl::Status Apply() override {
    if (!pending_) {
      return absl::FailedPreconditionError(
          "compress: nothing to apply; Encode was not called, or its gradient was not finite");
    }
    pending_ = false;
    if (applied_ < options_.warmup_steps) ++applied_;
    if (residual_.Made()) residual_.Apply();
    if (velocity_.Made()) velocity_.Apply();
    return absl::OkStatus();
  }
  void Drop() override { pending_ = false; }

  std::vector<State> Export() const override {
    std::vector<State> states;
    if (residual_.Made()) states.push_back({"residual", absl::MakeConstSpan(residual_.current(), count_)});
    if (velocity_.Made()) states.push_back({"momentum", absl::MakeConstSpan(velocity_.current(), count_)});
    if (options_.codec == Codec::kTopK) {
      const bool selected = selector_.carried() > 0;
      progress_ = {static_cast<float>(applied_), selector_.carried(), selected ? selector_.margin() : 0};
      states.push_back({kProgress, absl::MakeConstSpan(progress_)});
    }
    return states;
  }

  absl::Status Load(absl::string_view name, absl::Span<const float> values) override {
    for (const State& state : Export()) {
      if (state.name != name) continue;
      if (values.size() != state.values.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("compress: ", values.size(), " values of ", name, " for ", count_, " elements"));
      }
      if (name == kProgress) return LoadProgress(values);
      pending_ = false;
      std::copy(values.begin(), values.end(), (name == "residual" ? residual_ : velocity_).current());
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("compress: there is no state \"", name, "\" with these options"));
  }

 private:
  struct Range {
    size_t low, k, high;
  };
  Range Wanted(double density) const {
    const double k =
        std::clamp(std::round(density * static_cast<double>(count_)), 1.0, static_cast<double>(count_));
    const auto exact = static_cast<size_t>(k);
    if (options_.exact) return {exact, exact, exact};
    const size_t high = std::min(static_cast<size_t>(k * kHigh), count_);
    return {static_cast<size_t>(std::ceil(k * kLow)), exact, std::max(exact, high)};
  }

  double Density() const {
    if (applied_ >= options_.warmup_steps || options_.density >= kWarmupDensity) return options_.density;
    const double progress = static_cast<double>(applied_) / options_.warmup_steps;
    return kWarmupDensity * std::pow(options_.density / kWarmupDensity, progress);
  }

  absl::Status LoadProgress(absl::Span<const float> values) {
    for (const float value : values) {
      if (std::isfinite(value) && value >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("compress: ", value, " cannot be part of ", kProgress));
    }
    pending_ = false;
    applied_ = static_cast<int>(std::min(values[0], static_cast<float>(options_.warmup_steps)));
    selector_.BeginWith(values[1], values[2]);
    return absl::OkStatus();
  }

  bool EncodeTopK(absl::Span<const float> gradient, absl::Span<uint8_t> packet, PacketHeader* header) {
    const Range wanted = Wanted(Density());
    const TopKInput input = {gradient,          residual_.current(), residual_.next(),
                             options_.momentum, velocity_.current(), velocity_.next()};
    if (!selector_.Select(input, wanted.low, wanted.k, wanted.high)) return false;
    header->entries = selector_.indices().size();
    selected_ = {selector_.indices().size(), wanted.k};
    uint8_t* payload = packet.data() + kPacketHeader;
    std::memcpy(payload, selector_.indices().data(), header->entries * sizeof(uint32_t));
    std::memcpy(payload + header->entries * sizeof(uint32_t), selector_.values().data(),
                header->entries * sizeof(float));
    return true;
  }

  bool EncodeAll(absl::Span<const float> gradient, absl::Span<uint8_t> packet, const PacketHeader& header) {
    uint8_t* scales = packet.data() + kPacketHeader;
    uint8_t* payload = scales + ScaleBytes(header);
    const auto [encode, decode] = BlockCodec();
    alignas(64) float sum[kPiece], approximation[kPiece], scale[kPiece / kScaleBlock];
    float poison = 0;
    for (size_t begin = 0; begin < count_; begin += kPiece) {
      const size_t n = std::min(kPiece, count_ - begin);
      const float* residual = residual_.Made() ? residual_.current() + begin : nullptr;
      kernels_.add(gradient.data() + begin, residual, sum, n, &poison);
      // n elements of payload start at a whole number of bytes: begin is a multiple of 8.
      uint8_t* bytes = payload + PayloadBytes({options_.codec, 0, begin, begin});
      if (encode == nullptr) {
        std::memcpy(bytes, sum, n * sizeof(float));
        continue;
      }
      encode(sum, n, bytes, scale);
      if (ScaleBytes(header) > 0) {
        std::memcpy(scales + ScaleBytes({options_.codec, 0, begin, begin}), scale,
                    ScaleBytes({options_.codec, 0, n, n}));
      }
      if (residual == nullptr) continue;
      decode(bytes, scale, n, approximation, false);
      kernels_.subtract(sum, approximation, residual_.next() + begin, n, count_ >= kStreamFrom);
    }
    return !std::isnan(poison);
  }

  std::pair<EncodeBlocks, DecodeBlocks> BlockCodec() const {
    switch (options_.codec) {
      case Codec::kFloat16:
        return {kernels_.encode_float16, kernels_.decode_float16};
      case Codec::kBFloat16:
        return {kernels_.encode_bfloat16, kernels_.decode_bfloat16};
      case Codec::kInt8:
        return {kernels_.encode_int8, kernels_.decode_int8};
      case Codec::kFloat8:
        return {kernels_.encode_float8, kernels_.decode_float8};
      case Codec::kOneBit:
        return {kernels_.encode_one_bit, kernels_.decode_one_bit};
      case Codec::kNone:
      case Codec::kTopK:
      case Codec::kPowerSgd:
        return {nullptr, nullptr};
    }
    return {nullptr, nullptr};
  }

  const CompressionOptions options_;
  const size_t count_;
  const Kernels& kernels_;
  TopKSelector selector_;
  Pending residual_, velocity_;
  bool pending_ = false;
  Selected selected_;
  int applied_ = 0;                                            // steps, up to the end of the warm-up
  mutable std::array<float, kProgressNumbers> progress_ = {};  // as Export last said
};

constexpr absl::string_view kNames[] = {"none", "fp16", "bf16", "int8", "fp8", "topk", "onebit", "powersgd"};

absl::Status Check(const CompressionOptions& options, size_t count) {
  const bool top_k = options.codec == Codec::kTopK;
  if (options.codec == Codec::kPowerSgd) {
    return absl::InvalidArgumentError("compress: powersgd has no packets, it needs a compressed collective");
  }
  if (count == 0 || count > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("compress: ", count, " elements; a bucket has 1 to 2^32 - 1"));
  }
  if (top_k && !(options.density > 0 && options.density <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("compress: density ", options.density, " is not in (0, 1]"));
  }
  if (!(options.momentum >= 0 && options.momentum < 1) || options.warmup_steps < 0) {
    return absl::InvalidArgumentError("compress: momentum must be in [0, 1), warm-up steps not negative");
  }
  if (!top_k && options.momentum > 0) {
    return absl::InvalidArgumentError(absl::StrCat("compress: momentum before compressing belongs to topk; ",
                                                   CodecName(options.codec), " has optimizer_momentum"));
  }
  if (options.optimizer_momentum > 0 || (!top_k && options.warmup_steps > 0)) {
    return absl::InvalidArgumentError(
        "compress: optimizer_momentum, and warm-up of other codecs than topk, need a compressed collective");
  }
  if (options.momentum > 0 && !options.error_feedback) {
    return absl::InvalidArgumentError("compress: momentum correction needs error feedback");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace comm

absl::string_view CodecName(Codec codec) { return comm::kNames[static_cast<size_t>(codec)]; }

absl::StatusOr<Codec> ParseCodec(absl::string_view name) {
  for (size_t i = 0; i < std::size(comm::kNames); ++i) {
    if (comm::kNames[i] == name) return static_cast<Codec>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", name, "\" is not a codec; none, fp16, bf16, int8, fp8, topk, onebit and powersgd are"));
}

absl::StatusOr<std::unique_ptr<Compressor>> Compressor::Create(const CompressionOptions& options,
                                                               size_t count) {
  if (absl::Status status = comm::Check(options, count); !status.ok()) return status;
  CompressionOptions used = options;
  if (used.codec == Codec::kNone) used.error_feedback = false;  // nothing is lost, nothing to carry over
  auto made = std::make_unique<comm::CompressorImpl>(used, count);
  if (!made->Made()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("compress: no memory for the residuals of ", count, " elements"));
  }
  return made;
}

}  // namespace gtrain
