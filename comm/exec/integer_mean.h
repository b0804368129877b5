// Means of integers that are right whatever their sum is: each is split into its quotient by the number of
// ranks and the remainder, both cut off towards zero, so that no sum of quotients is further from zero than
// the values themselves. It has room in the type of the data, that of the remainders in 64 bits: a mean is
// two sums, and 8 bytes an element beside the data, independent of the number of ranks. PURE.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gtrain/types.h"

namespace gtrain::comm {

// values[count] of the integer type `dtype`: quotients[i] = values[i] / ranks, which may lie in the same
// place, and remainders[i] the rest, with the sign of the value.
void SplitForMean(const void* values, void* quotients, int64_t* remainders, size_t count, DType dtype,
                  int ranks);

// Makes means from the sums over `ranks` ranks: quotients[count] become the means, cut off towards zero.
void JoinMean(void* quotients, const int64_t* remainders, size_t count, DType dtype, int ranks);

}  // namespace gtrain::comm
