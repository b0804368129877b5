// Reductions of dense buffers of every element type. PURE.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gtrain/types.h"

namespace gtrain::comm {

// output[i] = sources[0][i] op sources[1][i] op ..., in exactly that order, then divided by
// `divisor`. kMean sums: the caller gives the divisor where the sum is complete. `output` may be one
// of the sources. 16-bit floats accumulate in float and are rounded (to nearest, ties to
// even) once. Minimum and maximum of floats: a NaN wins. Integers wrap around; division truncates.
void Reduce(void* output, const void* const* sources, size_t source_count, size_t count, DType dtype,
            ReduceOp op, int divisor = 1);

float FromFloat16(uint16_t bits);
uint16_t ToFloat16(float value);
float FromBFloat16(uint16_t bits);
uint16_t ToBFloat16(float value);

}  // namespace gtrain::comm
