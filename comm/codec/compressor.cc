// The transaction around the codecs. Residuals are kept twice: the applied one is only read by a step, the
// pending one only written, so forgetting a step costs nothing and remembering it is an exchange of two
// pointers.
#include "comm/codec/compressor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rng.h"
#include "comm/codec/carried.h"
#include "comm/codec/halves.h"
#include "comm/codec/kernels.h"
#include "comm/codec/packet.h"
#include "comm/codec/top_k.h"

namespace gtrain {
namespace {
constexpr absl::string_view kUnknown = "unknown";
}  // namespace

namespace comm {
namespace {

// Elements at a time of the block codecs: sum, approximation and packet stay in the first-level cache.
constexpr size_t kPiece = 2048;
static_assert(kPiece % kScaleBlock == 0 && kPiece % kHalvesBlock == 0);
constexpr double kWarmupDensity = 0.25;
// An approximate top-k sends between these shares of k.
constexpr double kLow = 0.9, kHigh = 1.1;
constexpr float kLargestFloat16 = 65504;
constexpr char kResidual[] = "residual", kMomentum[] = "momentum", kProgress[] = "progress";

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Steps are counted as a float, too: from here on as many anew. More than any warm-up has.
constexpr int kStepsMax = 1 << 24;
static_assert(kStepsMax / 2 >= kWarmupStepsMax);

// An array and its successor-to-be, zeroed.
template <typename T>
class Pending {
 public:
  Pending() = default;
  explicit Pending(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    for (auto& array : arrays_) {
      array.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      if (array != nullptr) std::memset(array.get(), 0, bytes);
    }
  }
  bool Made() const { return arrays_[0] != nullptr && arrays_[1] != nullptr; }
  T* current() const { return arrays_[0].get(); }
  T* next() const { return arrays_[1].get(); }
  void Apply() { arrays_[0].swap(arrays_[1]); }

 private:
  std::unique_ptr<T, Free> arrays_[2];
};

using EncodeBlocks = void (*)(const float*, size_t, uint8_t*, float*);
using DecodeBlocks = void (*)(const uint8_t*, const float*, size_t, float*, bool);

std::vector<float> AsFloats(const float* array, size_t count) { return {array, array + count}; }
std::vector<float> AsFloats(const uint16_t* array, size_t count) {
  std::vector<float> floats(count);
  for (size_t i = 0; i < count; ++i) floats[i] = CarriedAt(array, i);
  return floats;
}
// A checkpoint of a version whose residuals could become infinite heals.
float Finite(float value) { return std::isfinite(value) ? value : 0; }
void Assign(absl::Span<const float> values, float* array) {
  for (size_t i = 0; i < values.size(); ++i) array[i] = Finite(values[i]);
}
void Assign(absl::Span<const float> values, uint16_t* array) {
  for (size_t i = 0; i < values.size(); ++i) array[PlaceOf(i)] = ToBFloat16(Finite(values[i]));
}

void Limit(float* array, size_t count) {
  for (size_t i = 0; i < count; ++i) array[i] = std::clamp(array[i], -kLargestSent, kLargestSent);
}
void Limit(uint16_t* array, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = CarriedAt(array, i);
    if (std::fabs(value) > kLargestSent) array[PlaceOf(i)] = ToBFloat16(std::copysign(kLargestSent, value));
  }
}

float LargestOf(Codec codec) {
  if (codec == Codec::kNone) return std::numeric_limits<float>::infinity();
  return codec == Codec::kFloat16 ? kLargestFloat16 : kLargestSent;
}

// T: what is carried over, float or uint16_t (carried.h).
template <typename T>
class CompressorImpl : public Compressor {
 public:
  CompressorImpl(const CompressionOptions& options, size_t count)
      : options_(options), count_(count), kernels_(BestKernels()), selector_(kernels_) {
    if (options.error_feedback) residual_ = Pending<T>(count);
    if (options.momentum > 0) velocity_ = Pending<T>(count);
  }
  // False: no memory.
  bool Made() const {
    return (!options_.error_feedback || residual_.Made()) && (options_.momentum == 0 || velocity_.Made());
  }

  const CompressionOptions& options() const override { return options_; }
  size_t count() const override { return count_; }

  size_t MaxBytes() const override {
    return BytesAt(options_.warmup_steps > 0 ? std::max(kWarmupDensity, options_.density) : options_.density);
  }
  size_t MaxBytesNow() const override { return BytesAt(DensityAfter(applied_)); }

  absl::StatusOr<size_t> Encode(absl::Span<const float> gradient, absl::Span<uint8_t> packet) override {
    if (gradient.size() != count_ || packet.size() < MaxBytesNow()) {
      return absl::InvalidArgumentError(absl::StrCat("compress: ", gradient.size(), " elements into ",
                                                     packet.size(), " bytes; this compressor is for ", count_,
                                                     " elements and ", MaxBytesNow(), " bytes"));
    }
    pending_ = false;
    selected_ = {};
    clipped_ = 0;
    PacketHeader header = {options_.codec, 0, count_, count_};
    const bool finite = options_.codec == Codec::kTopK ? EncodeTopK(gradient, packet, &header)
                                                       : EncodeAll(gradient, packet, header);
    if (!finite) header.flags = kPacketPoison, clipped_ = 0;
    if (!finite && options_.codec == Codec::kTopK) {
      // A residual and a momentum may both be so large that they add up to no number in any later step.
      if (residual_.Made()) Limit(residual_.current(), count_);
      if (velocity_.Made()) Limit(velocity_.current(), count_);
    }
    WriteHeader(header, packet.data());
    pending_ = finite;
    return PacketBytes(header);
  }

  Selected selected() const override { return selected_; }
  size_t clipped() const override { return clipped_; }

  absl::Status Apply() override {
    if (!pending_) {
      return absl::FailedPreconditionError(
          "compress: nothing to apply; Encode was not called, or its gradient was not finite");
    }
    pending_ = false;
    if (applied_ < options_.warmup_steps || kRounds) ++applied_;
    if (applied_ == kStepsMax) applied_ = kStepsMax / 2;
    if (residual_.Made()) residual_.Apply();
    if (velocity_.Made()) velocity_.Apply();
    return absl::OkStatus();
  }
  void Drop() override { pending_ = false; }

  std::vector<State> Export() const override {
    std::vector<State> states;
    if (residual_.Made()) states.push_back({kResidual, AsFloats(residual_.current(), count_)});
    if (velocity_.Made()) states.push_back({kMomentum, AsFloats(velocity_.current(), count_)});
    if (options_.codec == Codec::kTopK || kRounds) {
      const bool selected = selector_.carried() > 0;
      states.push_back(
          {kProgress,
           {static_cast<float>(applied_), selector_.carried(), selected ? selector_.margin() : 0}});
    }
    return states;
  }

  absl::Status Load(absl::string_view name, absl::Span<const float> values) override {
    T* const array = name == kResidual   ? residual_.current()
                     : name == kMomentum ? velocity_.current()
                                         : nullptr;
    const bool progress = name == kProgress && (options_.codec == Codec::kTopK || kRounds);
    if (array == nullptr && !progress) {
      return absl::InvalidArgumentError(
          absl::StrCat("compress: there is no state \"", name, "\" with these options"));
    }
    if (values.size() != (progress ? kProgressNumbers : count_)) {
      return absl::InvalidArgumentError(
          absl::StrCat("compress: ", values.size(), " values of ", name, " for ", count_, " elements"));
    }
    if (progress) return LoadProgress(values);
    pending_ = false;
    Assign(values, array);
    return absl::OkStatus();
  }

 private:
  static constexpr bool kRounds = !std::is_same_v<T, float>;

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

  size_t BytesAt(double density) const {
    const bool top_k = options_.codec == Codec::kTopK;
    return PacketBytes({options_.codec, 0, count_, top_k ? Wanted(density).high : count_});
  }

  double DensityAfter(int steps) const {
    if (steps >= options_.warmup_steps || options_.density >= kWarmupDensity) return options_.density;
    const double progress = static_cast<double>(steps) / options_.warmup_steps;
    return kWarmupDensity * std::pow(options_.density / kWarmupDensity, progress);
  }

  uint32_t Seed() const {
    if (!kRounds) return 0;
    Rng rng(uint64_t{options_.rounding_seed} << 32 | static_cast<uint32_t>(applied_));
    return static_cast<uint32_t>(rng.Next());
  }

  absl::Status LoadProgress(absl::Span<const float> values) {
    for (const float value : values) {
      if (std::isfinite(value) && value >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("compress: ", value, " cannot be part of ", kProgress));
    }
    pending_ = false;
    const int most = kRounds ? kStepsMax - 1 : options_.warmup_steps;
    applied_ = static_cast<int>(std::min(values[0], static_cast<float>(most)));
    selector_.BeginWith(values[1], values[2]);
    return absl::OkStatus();
  }

  bool EncodeTopK(absl::Span<const float> gradient, absl::Span<uint8_t> packet, PacketHeader* header) {
    const Range wanted = Wanted(DensityAfter(applied_));
    const TopKInput<T> input = {gradient,
                                residual_.current(),
                                residual_.next(),
                                options_.momentum,
                                velocity_.current(),
                                velocity_.next(),
                                Seed()};
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
    const CarryKernels<T>& carrying = kernels_.Carrying<T>();
    const uint32_t seed = Seed();
    const bool stream = residual_.Made() && count_ >= kStreamFrom;
    const float largest = LargestOf(options_.codec);
    float poison = 0;
    for (size_t begin = 0; begin < count_; begin += kPiece) {
      const size_t n = std::min(kPiece, count_ - begin);
      const T* residual = residual_.Made() ? residual_.current() + begin : nullptr;
      const float* sent = gradient.data() + begin;
      if (residual != nullptr || !kernels_.within(sent, n, largest)) {
        clipped_ += carrying.add(sent, residual, sum, n, largest, &poison);
        sent = sum;
      }
      // n elements of payload start at a whole number of bytes: begin is a multiple of 8.
      uint8_t* bytes = payload + PayloadBytes({options_.codec, 0, begin, begin});
      if (encode == nullptr) {
        std::memcpy(bytes, sent, n * sizeof(float));
        continue;
      }
      encode(sent, n, bytes, scale);
      if (ScaleBytes(header) > 0) {
        std::memcpy(scales + ScaleBytes({options_.codec, 0, begin, begin}), scale,
                    ScaleBytes({options_.codec, 0, n, n}));
      }
      if (residual == nullptr) continue;
      decode(bytes, scale, n, approximation, false);
      carrying.subtract(sum, approximation, residual_.next() + begin, n, stream, seed, begin);
    }
    if (stream) kernels_.flush();
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
  Pending<T> residual_, velocity_;
  bool pending_ = false;
  Selected selected_;
  size_t clipped_ = 0;
  int applied_ = 0;  // steps; of float32, which nothing depends on later, to the end of the warm-up
};

absl::Status Check(const CompressionOptions& options, size_t count) {
  const bool top_k = options.codec == Codec::kTopK;
  if (!IsCodec(static_cast<int>(options.codec))) {
    return absl::InvalidArgumentError(
        absl::StrCat("compress: there is no codec ", static_cast<int>(options.codec)));
  }
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
  if (!(options.momentum >= 0 && options.momentum < 1) || options.warmup_steps < 0 ||
      options.warmup_steps > kWarmupStepsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("compress: momentum must be in [0, 1), warm-up steps from 0 to ", kWarmupStepsMax));
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

template <typename T>
absl::StatusOr<std::unique_ptr<Compressor>> Make(const CompressionOptions& options, size_t count) {
  auto made = std::make_unique<CompressorImpl<T>>(options, count);
  if (made->Made()) return made;
  return absl::ResourceExhaustedError(
      absl::StrCat("compress: no memory for the residuals of ", count, " elements"));
}

}  // namespace
}  // namespace comm

absl::string_view CodecName(Codec codec) {
  switch (codec) {
    case Codec::kNone:
      return "none";
    case Codec::kFloat16:
      return "fp16";
    case Codec::kBFloat16:
      return "bf16";
    case Codec::kInt8:
      return "int8";
    case Codec::kFloat8:
      return "fp8";
    case Codec::kTopK:
      return "topk";
    case Codec::kOneBit:
      return "onebit";
    case Codec::kPowerSgd:
      return "powersgd";
  }
  return kUnknown;
}

bool IsCodec(int64_t number) {
  return number >= 0 && number <= std::numeric_limits<uint8_t>::max() &&
         CodecName(static_cast<Codec>(number)) != kUnknown;
}

std::vector<Codec> PacketCodecs() {
  std::vector<Codec> codecs;
  for (int number = 0; IsCodec(number); ++number) {
    if (const auto codec = static_cast<Codec>(number); codec != Codec::kPowerSgd) codecs.push_back(codec);
  }
  return codecs;
}

absl::StatusOr<Codec> ParseCodec(absl::string_view name) {
  std::vector<absl::string_view> names;
  for (int number = 0; IsCodec(number); ++number) {
    names.push_back(CodecName(static_cast<Codec>(number)));
    if (names.back() == name) return static_cast<Codec>(number);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not a codec; these are: ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<std::unique_ptr<Compressor>> Compressor::Create(const CompressionOptions& options,
                                                               size_t count) {
  if (absl::Status status = comm::Check(options, count); !status.ok()) return status;
  CompressionOptions used = options;
  if (used.codec == Codec::kNone) used.error_feedback = false;  // nothing is lost, nothing to carry over
  return used.residual == ResidualType::kBFloat16 && used.error_feedback ? comm::Make<uint16_t>(used, count)
                                                                         : comm::Make<float>(used, count);
}

}  // namespace gtrain
