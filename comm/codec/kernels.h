// Inner loops of the codecs: the scalar reference, and the same with Highway's run-time dispatch where it was
// found at build time. Both give the same bytes, except that sums of a 1-bit block may differ in the last
// place. They go once over their arrays and use no memory but these; a selection needs room for 8 bytes an
// element. PURE.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gtrain::comm {

// Elements that share a scale. Every array below that is cut into blocks starts at the start of a block.
inline constexpr size_t kScaleBlock = 256;
// A block whose largest magnitude is below this is sent as zero (and carried over): 127 / largest would leave
// the range of float.
inline constexpr float kSmallestScaled = 1e-30f;
// From this many elements on, an array does not stay in a cache until the next step.
inline constexpr size_t kStreamFrom = size_t{1} << 20;

// The parameters of a selection beside its arrays.
struct Selection {
  float threshold = 0;  // |value| >= threshold is taken, NaN too
  uint32_t first = 0;   // index of element 0; for bfloat16 of the start of a block (carried.h)
  uint32_t* indices;    // room for count + 16 more
  float* values;        // likewise
  bool stream =
      false;          // the written arrays are too large for the caches: write around them, and flush() then
  uint32_t seed = 0;  // of what is rounded to bfloat16
};

// The momentum of DGC: factor * velocity + gradient goes to pending.
template <typename T>
struct Momentum {
  float factor = 0;
  const T* velocity = nullptr;
  T* pending = nullptr;
};

// Kernels on carried state: T is float, or uint16_t for the bfloat16 of carried.h. Such arrays are 64-byte
// aligned.
template <typename T>
struct CarryKernels {
  // value = gradient + residual (null: gradient alone) is appended to the selection or left in pending (null:
  // not kept). Returns how many were taken. *poison becomes NaN if any value is not finite, else stays as it
  // was.
  size_t (*select)(const float* gradient, const T* residual, T* pending, size_t count,
                   const Selection& selection, float* poison);
  // DGC: u = momentum * velocity + gradient; value = residual + u. Taken elements leave 0 in both. The
  // velocity is rounded with OtherSeed.
  size_t (*select_momentum)(const float* gradient, const Momentum<T>& momentum, const T* residual,
                            T* pending_residual, size_t count, const Selection& selection, float* poison);
  // sum = a + b (b null: a alone, for the rare array that is not `within`), clipped to -largest..largest.
  // Returns how many were clipped. *poison becomes NaN if any element of a is not finite; b must be finite.
  // `sum` overlaps neither.
  size_t (*add)(const float* a, const T* b, float* sum, size_t count, float largest, float* poison);
  // out = a - b; `stream`, `seed` and `first` as in Selection.
  void (*subtract)(const float* a, const float* b, T* out, size_t count, bool stream, uint32_t seed,
                   size_t first);
};

struct Kernels {
  const char* name;
  CarryKernels<float> floats;
  CarryKernels<uint16_t> halves;
  template <typename T>
  const CarryKernels<T>& Carrying() const {
    if constexpr (std::is_same_v<T, float>) {
      return floats;
    } else {
      return halves;
    }
  }

  // Makes writes around the caches visible to other threads. Call it once for a whole array, because it
  // waits.
  void (*flush)();

  // Whether all elements are finite and in -largest..largest.
  bool (*within)(const float* in, size_t count, float largest);

  // The block codecs: payload of `count` elements, a scale a block where the codec has them.
  void (*encode_float16)(const float* in, size_t count, uint8_t* payload, float* scales);
  void (*encode_bfloat16)(const float* in, size_t count, uint8_t* payload, float* scales);
  void (*encode_int8)(const float* in, size_t count, uint8_t* payload, float* scales);
  void (*encode_float8)(const float* in, size_t count, uint8_t* payload, float* scales);
  void (*encode_one_bit)(const float* in, size_t count, uint8_t* payload, float* scales);
  // Into out, or added to it.
  void (*decode_float16)(const uint8_t* payload, const float* scales, size_t count, float* out, bool add);
  void (*decode_bfloat16)(const uint8_t* payload, const float* scales, size_t count, float* out, bool add);
  void (*decode_int8)(const uint8_t* payload, const float* scales, size_t count, float* out, bool add);
  void (*decode_float8)(const uint8_t* payload, const float* scales, size_t count, float* out, bool add);
  void (*decode_one_bit)(const uint8_t* payload, const float* scales, size_t count, float* out, bool add);
};

const Kernels& ScalarKernels();
// The best for this processor.
const Kernels& BestKernels();

}  // namespace gtrain::comm
