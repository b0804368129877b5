// Gradient compression: a codec with error feedback, and what it needs to be a transaction. The options are
// in gtrain/compression.h.
#pragma once
#include <gtrain/compression.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gtrain {

// "none", "fp16", "bf16", "int8", "fp8", "topk", "onebit", "powersgd": the words of the job file.
absl::string_view CodecName(Codec codec);
bool IsCodec(int64_t number);
// Those that have packets, in the order of their numbers.
std::vector<Codec> PacketCodecs();
absl::StatusOr<Codec> ParseCodec(absl::string_view name);

// Parses $GTRAIN_COMPRESSION (docs/protocols/rank-environment.md): "none", "topk density=0.01 warmup=100",
// "topk residual=bf16" (or fp32), "onebit momentum=0.9", "powersgd rank=2", "auto: fp16, topk density=0.001".
// Options that are not given have the values of published practice: topk density=0.01 warmup=100, onebit
// momentum=0.9 warmup=100, powersgd rank=4 warmup=100. InvalidArgument says which word is wrong.
absl::StatusOr<CompressionPolicy> ParseCompression(absl::string_view text);

// Compresses the gradient of one bucket, step after step. A step is a transaction: Encode writes what would
// be carried over into a pending buffer; Apply makes it the residual once the step is known to be applied by
// all, Drop forgets it. Encode after Encode drops the first. Not thread-safe; different objects are
// independent. Never blocks.
//
// It keeps with error feedback two residuals, 8 bytes an element or 4 as bfloat16, and as much again with
// momentum; without, nothing. Top-k works in half a MiB and 32 bytes for each selected element, which a
// thread has once for all its objects, the others on the stack. Independent of the number of ranks.
class Compressor {
 public:
  // InvalidArgument: an option out of range, PowerSGD, or count of 0 or 2^32 and above.
  static absl::StatusOr<std::unique_ptr<Compressor>> Create(const CompressionOptions& options, size_t count);
  virtual ~Compressor() = default;

  virtual const CompressionOptions& options() const = 0;
  virtual size_t count() const = 0;
  // Bytes that Encode may need: a bound for every step; and for the next one, which are less once a warm-up
  // of top-k is over.
  virtual size_t MaxBytes() const = 0;
  virtual size_t MaxBytesNow() const = 0;

  // Encodes gradient[count], float32, read only, into `packet` (at least MaxBytesNow()). Returns the bytes
  // used. A gradient with a NaN or an infinity gives a packet that decodes to NaN everywhere, as a dense sum
  // would poison at least some, and carries nothing over: a loss scaler sees it and skips the step. Finite
  // values stay finite: gradient and residual together are clipped to +-65504 (fp16) or +-2^112 (bf16, int8,
  // fp8, onebit), and the excess is lost, as with a clipped gradient, and counted. Top-k clips nothing; where
  // gradient, residual and momentum add up to no number, that step is poisoned, and what is carried over is
  // clipped to +-2^112. InvalidArgument: sizes do not match.
  virtual absl::StatusOr<size_t> Encode(absl::Span<const float> gradient, absl::Span<uint8_t> packet) = 0;

  // The elements that the last Encode selected; zeros before it, for other codecs and for a gradient that was
  // not finite.
  virtual Selected selected() const = 0;
  // Elements that the last Encode clipped. 0 for top-k, which sends large values as they are.
  virtual size_t clipped() const = 0;

  // FailedPrecondition: nothing is pending.
  virtual absl::Status Apply() = 0;
  virtual void Drop() = 0;

  // State of the applied steps, for checkpoints: with error feedback "residual", and "momentum" if used,
  // float32[count] each, whatever they are kept in; of top-k, and where residuals are bfloat16, "progress",
  // kProgressNumbers: steps so far (of top-k with float32 residuals those of the warm-up alone), and
  // threshold and margin that the next selection begins with, both 0 before the first one. An object of the
  // same options that loads all of them goes on with the same packets, bit by bit.
  struct State {
    std::string name;
    std::vector<float> values;
  };
  virtual std::vector<State> Export() const = 0;
  // A residual that was float32 and becomes bfloat16 is rounded to nearest; what is not finite in one becomes
  // 0. InvalidArgument: no such state, another count, or a progress that is negative or not finite. Drops
  // what is pending.
  virtual absl::Status Load(absl::string_view name, absl::Span<const float> values) = 0;
};

enum class DecodeMode : uint8_t { kSet, kAdd };

// A packet, aligned to 4 bytes, into output[count]: overwritten, or added to. Bytes from anywhere are safe:
// InvalidArgument (what is wrong with them; output then is undefined) for a wrong version, size, index, count
// or alignment.
absl::Status Decode(absl::Span<const uint8_t> packet, absl::Span<float> output, DecodeMode mode);

}  // namespace gtrain
