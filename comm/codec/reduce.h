// Reductions of dense buffers of every element type. PURE. Each element of each source is read once and each
// of each output written once; scratch is 16 KiB of stack, however many of them there are.
#pragma once
#include <cstddef>
#include <cstdint>

#include "comm/codec/halves.h"
#include "gtrain/types.h"

namespace gtrain::comm {

struct Reduction {
  size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;
};

// outputs[o][i] = sources[0][i] op sources[1][i] op ... for every o, in exactly that order, then divided by
// `divisor`. kMean sums: the caller gives the divisor where the sum is complete. Outputs may be
// sources; they overlap in no other way. 8-bit and 16-bit floats accumulate in float and are rounded (to
// nearest, ties to even) once; what is too large for float8_e4m3 is 448 with its sign. Minimum and maximum of
// floats: a NaN wins; which NaN of two a sum has is not specified (IEEE 754-2019, 6.2.3: the compiler may
// swap the operands). Integers wrap around; division truncates (a mean that is right wants
// comm/exec/integer_mean.h). Bool: every byte but 0 is true, results are 0 or 1. A product of complex numbers
// is computed from the four products of their parts, without what C's Annex G adds for infinities. Reductions
// that IsReducible refuses end the process.
void ReduceInto(void* const* outputs, size_t output_count, const void* const* sources, size_t source_count,
                const Reduction& reduction);

// memcpy that leaves the copy in memory instead of in this core's caches: for a reader on a core far away.
void CopyAroundCaches(void* to, const void* from, size_t bytes);

// One output.
void Reduce(void* output, const void* const* sources, size_t source_count, size_t count, DType dtype,
            ReduceOp op, int divisor = 1);

}  // namespace gtrain::comm
