#pragma once
#include <cstddef>

namespace gtrain::examples {

// A matrix that is read element by element: element (row, column) is at data[row * down + column * across].
struct Strided {
  const float* data;
  size_t down, across;
};

// c[rows][columns] += a[rows][inner] x b[inner][columns]. `rows` is a multiple of 4, `columns` of 16; b and c
// are dense. Compiled for each instruction set, the best one chosen at run time.
void MultiplyAdd(Strided a, const float* b, float* c, size_t rows, size_t inner, size_t columns);

}  // namespace gtrain::examples
