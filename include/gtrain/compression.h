// Gradient compression: codecs, error feedback, and what they need to be transactions.
//
// Sources: top-k with error feedback, Stich et al. 2018 (arXiv 1809.07599); momentum correction, factor
// masking and warm-up, DGC, Lin et al. 2018 (arXiv 1712.01887); 1-bit with error feedback, Seide et al. 2014
// and Karimireddy et al. 2019 (arXiv 1901.09847); PowerSGD, Vogels et al. 2019 (arXiv 1905.13727); error
// feedback kept in few bits, MicroAdam, Modoranu et al. 2024 (arXiv 2405.15593), here bfloat16 with the
// stochastic rounding that Zamirai et al. 2020 (arXiv 2010.06192) found it to need. Bytes on the wire:
// docs/formats/compression.md.
#pragma once
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

enum class Codec : uint8_t {
  kNone = 0,      // float32 as it is
  kFloat16 = 1,   // 2 bytes an element; clipped at 65504
  kBFloat16 = 2,  // 2 bytes an element
  kInt8 = 3,      // 1 byte an element and a float32 scale every 256
  kFloat8 = 4,    // e4m3, 1 byte an element and a float32 scale every 256
  kTopK = 5,      // 8 bytes a selected element: index and float32 value
  kOneBit = 6,    // 1 bit an element and a float32 scale every 256
  // Two float32 factors of `matrix_rank` columns for each gradient that is a matrix; in a
  // CompressedCollective alone, where the factors are added up on their way. There are no packets of it.
  // Matrices, with their residuals, are clipped at 2^96.
  kPowerSgd = 7,
};

// What a residual, and DGC's momentum, is kept in.
enum class ResidualType : uint8_t {
  kFloat32 = 0,
  // Half the memory, and half of what a step moves through it. Rounded up or down at random, so that nothing
  // is lost on average; the same bits in every run.
  kBFloat16 = 1,
};

// Of the state "progress" of a Compressor.
inline constexpr size_t kProgressNumbers = 3;
// Columns of a factor that PowerSGD may send.
inline constexpr int kMatrixRankMax = 64;
inline constexpr int kWarmupStepsMax = 1'000'000;

// "none", "fp16", "bf16", "int8", "fp8", "topk", "onebit", "powersgd": the words of the job file.
absl::string_view CodecName(Codec codec);
absl::StatusOr<Codec> ParseCodec(absl::string_view name);

struct CompressionOptions {
  Codec codec = Codec::kNone;
  // What a step did not send is added to the next one. Costs one residual of the gradient's size, and one
  // more while a step is pending.
  bool error_feedback = true;
  // Of all codecs but PowerSGD.
  ResidualType residual = ResidualType::kFloat32;
  // Of bfloat16: ranks that round with different seeds make different errors, which partly cancel in a mean.
  // A CompressedCollective gives each its own.
  uint32_t rounding_seed = 0;
  // Top-k only. Share of elements sent, in (0, 1].
  double density = 0.01;
  // Top-k only. False: between 0.9 and 1.1 of density x count are sent, by a threshold carried from step to
  // step. True: exactly that many, the largest ones.
  bool exact = false;
  // Top-k only. Above 0: momentum is accumulated before selecting and masked where sent (DGC); then
  // the optimiser must not apply momentum of its own. One more residual. In [0, 1).
  float momentum = 0;
  // PowerSGD only, 1 to kMatrixRankMax: more are closer to the gradient, and more bytes.
  int matrix_rank = 4;
  // Others than top-k, in a CompressedCollective. The momentum that the optimiser applies to what comes back.
  // Above 0, what is compressed is that momentum, made here of what all ranks agreed on before and this
  // step's gradient (1-bit Adam, Tang et al. 2021, arXiv 2102.02888), and what comes back is what the
  // optimiser turns into it. 1-bit wants it: the error of a compressed gradient is as large as the gradient
  // and momentum repeats it, so that without this only small learning rates are stable. Under Adam this is
  // its beta1, and Adam leaves its variance alone when ReducedStep::momentum_travelled says so: one that goes
  // on measures the error of the compression and ends much worse (docs/design/comm.md). One more array of the
  // gradient's size, and one more while a step is pending. In [0, 1).
  float optimizer_momentum = 0;
  // The first gradients are the largest and change most from step to step. In a CompressedCollective so many
  // applied steps travel as float32. Top-k with momentum, or a Compressor by itself: the density falls
  // exponentially from 0.25 to `density` over them. At most kWarmupStepsMax.
  int warmup_steps = 0;
};

// What a job wants: one codec, or a choice to be made for every bucket while it runs.
struct CompressionPolicy {
  bool automatic = false;
  std::vector<CompressionOptions> codecs;  // automatic: what may be used beside float32; else at most one
};

// The words of $GTRAIN_COMPRESSION (docs/protocols/rank-environment.md): "none", "topk density=0.01
// warmup=100", "topk residual=bf16" (or fp32), "onebit momentum=0.9", "powersgd rank=2", "auto: fp16, topk
// density=0.001". What is not said
// is as published practice has it: topk density=0.01 warmup=100, onebit momentum=0.9 warmup=100, powersgd
// rank=4 warmup=100. InvalidArgument says which word is wrong.
absl::StatusOr<CompressionPolicy> ParseCompression(absl::string_view text);

// Of top-k: how many elements a step sent, and how many its density asks for.
struct Selected {
  size_t sent = 0;
  size_t wanted = 0;
  Selected& operator+=(const Selected& other) {
    sent += other.sent;
    wanted += other.wanted;
    return *this;
  }
};

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

  // gradient[count], float32, read only, into `packet` (at least MaxBytesNow()). Returns the bytes used. A
  // gradient with a NaN or an infinity gives a packet that decodes to NaN everywhere, as a dense sum would
  // poison at least some, and carries nothing over: a loss scaler sees it and skips the step. What is finite
  // stays finite: gradient and residual together are clipped to +-65504 (fp16) or +-2^112 (bf16, int8, fp8,
  // onebit), and what is above is lost, as with a clipped gradient, and counted. Top-k clips nothing; where
  // gradient, residual and momentum add up to no number, that step is poisoned, and what is carried over is
  // clipped to +-2^112. InvalidArgument: sizes do not match.
  virtual absl::StatusOr<size_t> Encode(absl::Span<const float> gradient, absl::Span<uint8_t> packet) = 0;

  // By the last Encode; zeros before it, for other codecs and for a gradient that was not finite.
  virtual Selected selected() const = 0;
  // Elements that the last Encode clipped. 0 for top-k, which sends what is large as it is.
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
