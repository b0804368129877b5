// How gradients are compressed: codecs and their options.
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
#include <vector>

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

// The element type of a residual and of DGC's momentum.
enum class ResidualType : uint8_t {
  kFloat32 = 0,
  // Half the memory, and half the bytes that a step reads and writes for it. Values are rounded up or down at
  // random, so that nothing is lost on average; every run rounds to the same bits.
  kBFloat16 = 1,
};

// How many numbers the state "progress" of a Compressor has.
inline constexpr size_t kProgressNumbers = 3;
// The most columns that PowerSGD's factors may have.
inline constexpr int kMatrixRankMax = 64;
inline constexpr int kWarmupStepsMax = 1'000'000;

struct CompressionOptions {
  Codec codec = Codec::kNone;
  // The part of a gradient that a step did not send is added to the next step's. This costs one residual of
  // the gradient's size, and one more while a step is pending.
  bool error_feedback = true;
  // For all codecs but PowerSGD.
  ResidualType residual = ResidualType::kFloat32;
  // Seeds the random rounding of kBFloat16 residuals: ranks that round with different seeds make different
  // errors, which partly cancel in a mean. A CompressedCollective gives each rank its own seed.
  uint32_t rounding_seed = 0;
  // Top-k only: share of elements sent, in (0, 1].
  double density = 0.01;
  // Top-k only. False: between 0.9 and 1.1 of density x count elements are sent, by a threshold carried from
  // step to step. True: exactly that many are sent, the largest ones.
  bool exact = false;
  // Top-k only. Above 0, momentum is accumulated before selecting and masked where sent (DGC); the optimiser
  // must not apply momentum of its own then. This costs one more residual. In [0, 1).
  float momentum = 0;
  // PowerSGD only, 1 to kMatrixRankMax: more columns are closer to the gradient, and more bytes.
  int matrix_rank = 4;
  // For other codecs than top-k, in a CompressedCollective: the momentum that the optimiser applies to the
  // mean it gets. Above 0, the collective compresses not the gradient but that momentum, which it computes
  // from the mean that all ranks agreed on before and this step's gradient (1-bit Adam, Tang et al. 2021,
  // arXiv 2102.02888), and returns the gradient that the optimiser turns into this momentum. 1-bit wants it:
  // the error of a compressed gradient is as large as the gradient and momentum repeats it, so that without
  // this only small learning rates are stable. Under Adam this is its beta1, and Adam must not update its
  // variance when ReducedStep::momentum_travelled is set: it would measure the compression's error and
  // training would end much worse (docs/design/comm.md). This costs one more array of the gradient's size,
  // and one more while a step is pending. In [0, 1).
  float optimizer_momentum = 0;
  // The first gradients are the largest and change most from step to step. In a CompressedCollective this
  // many applied steps travel as float32. For top-k with momentum, or a Compressor by itself, the density
  // falls exponentially from 0.25 to `density` over these steps. At most kWarmupStepsMax.
  int warmup_steps = 0;
};

// The compression that a job asks for: one codec, or a choice made for every bucket while it runs.
struct CompressionPolicy {
  bool automatic = false;
  std::vector<CompressionOptions> codecs;  // automatic: what may be used beside float32; else at most one
};

// How many elements a step of top-k sent, and how many its density asks for.
struct Selected {
  size_t sent = 0;
  size_t wanted = 0;
  Selected& operator+=(const Selected& other) {
    sent += other.sent;
    wanted += other.wanted;
    return *this;
  }
};

}  // namespace gtrain
