// The arithmetic of PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727): a gradient that is a
// matrix A of rows x columns is sent as P (rows x rank) and Q (columns x rank), A being about P Q^T.
//
// One step of subspace iteration: P = A Q, summed over the ranks; its columns made orthonormal; Q = A^T P,
// summed; the mean is P Q^T. Both are linear in A, so factors are added up on their way as any float32 array
// is. A is row-major; a factor is `rank` arrays, column after column of P or Q. Functions that take A go over
// it once, with O(rank) operations an element, and use no memory beside their arrays. Independent of the
// number of ranks. PURE.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace gtrain::comm {

// A matrix among the elements of a bucket.
struct Matrix {
  size_t offset = 0;  // of its first element
  size_t rows = 0, columns = 0;
  size_t size() const { return rows * columns; }
};

// Finds, among tensors that lie one behind the other, those that are worth sending as factors of `rank`
// columns: two and more dimensions, of which the first are the rows and the others together the columns, and
// fewer elements in both factors than in the tensor. InvalidArgument: a dimension below 1, or another number
// of elements than `count` altogether.
absl::StatusOr<std::vector<Matrix>> MatricesOf(absl::Span<const std::vector<int64_t>> shapes, size_t count,
                                               size_t rank);

// Elements that go over the wire for `count`.
size_t FactorElements(absl::Span<const Matrix> matrices, size_t count, size_t rank);

// Gradient and residual together are clipped to this: with matrices of 2^32 elements on 2^15 ranks no factor,
// and nothing that is computed on the way to one, becomes infinite.
inline constexpr float kLargestInMatrix = 0x1p96f;

// Columns of the right factor that are all zero (in the first step, and where a gradient had a smaller rank)
// become random ones: they would stay zero for ever. Equal seeds give equal bits on every machine.
void FillZeroColumns(float* right, size_t columns, size_t rank, uint64_t seed);

// Columns get a length from 0.5 to 1 by a power of two, which rounds nothing: only their direction matters,
// and the length of a right factor is that of the gradient it came from. Columns of zeros stay.
void ScaleColumns(float* right, size_t columns, size_t rank);

// a += residual (null: nothing), clipped to +-kLargestInMatrix; left = a right. Elements of `a` that are not
// finite become NaN. Returns how many elements were clipped.
size_t MultiplyRight(float* a, const float* residual, const Matrix& shape, size_t rank, const float* right,
                     float* left);

// Makes the columns orthonormal by modified Gram-Schmidt, twice. A column that is only rounding error of
// those before it becomes zero. The result has the same bits on every machine.
void Orthonormalise(float* left, size_t rows, size_t rank);

// right = a^T left.
void MultiplyLeft(const float* a, const Matrix& shape, size_t rank, const float* left, float* right);

// residual (null: not kept) = a - left sent^T; then a = left mean^T, the same bits on every machine.
void Expand(float* a, float* residual, const Matrix& shape, size_t rank, const float* left, const float* sent,
            const float* mean);

}  // namespace gtrain::comm
