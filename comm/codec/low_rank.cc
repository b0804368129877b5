// Loops over whole rows, compiled for each instruction set as those of reduce.cc are. Memory is what a pass
// costs, so a row is read once for up to four columns of a factor. A sum along a row has a fixed number of
// lanes, so that its bits do not depend on the width of the machine's vectors.
#include "comm/codec/low_rank.h"

#if GTRAIN_HAVE_HWY
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/codec/low_rank.cc"
#include "hwy/foreach_target.h"
//
#include "comm/codec/simd_choice.h"
#include "hwy/highway.h"
#define LOOPS_NAMESPACE HWY_NAMESPACE
#define LOOPS_BEGIN HWY_BEFORE_NAMESPACE()
#define LOOPS_END HWY_AFTER_NAMESPACE()
#define LOOPS_ONCE HWY_ONCE
#else
#define LOOPS_NAMESPACE portable
#define LOOPS_BEGIN static_assert(true)
#define LOOPS_END static_assert(true)
#define LOOPS_ONCE 1
#endif

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rng.h"
#include "gtrain/compression.h"

LOOPS_BEGIN;
namespace gtrain::comm::LOOPS_NAMESPACE {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kTogether = 4;  // arrays
// A column is dependent on those before it if only this share of its length is left beside them: less is
// rounding.
constexpr double kDependent = 1e-6;

// sums[k] = row . factor[k]: `factor` is kCount arrays of n, one behind the other.
template <size_t kCount>
void Dots(const float* row, const float* factor, size_t n, float* sums) {
  alignas(64) float lanes[kCount][kLanes] = {};
  size_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (size_t k = 0; k < kCount; ++k) {
      for (size_t l = 0; l < kLanes; ++l) lanes[k][l] += row[j + l] * factor[k * n + j + l];
    }
  }
  for (size_t k = 0; k < kCount; ++k) {
    for (size_t l = 0; j + l < n; ++l) lanes[k][l] += row[j + l] * factor[k * n + j + l];
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t l = 0; l < half; ++l) lanes[k][l] += lanes[k][l + half];
    }
    sums[k] = lanes[k][0];
  }
}

// out (kAdd: +)= weights[0] arrays[0] + ...: kCount arrays of n, one behind the other. Each element by the
// same operations in the same order, however they are vectorised.
template <size_t kCount, bool kAdd>
void Combine(const float* weights, const float* __restrict arrays, size_t n, float* __restrict out) {
  for (size_t j = 0; j < n; ++j) {
    float sum = weights[0] * arrays[j];
    for (size_t k = 1; k < kCount; ++k) sum += weights[k] * arrays[k * n + j];
    out[j] = kAdd ? out[j] + sum : sum;
  }
}

template <bool kAdd>
void CombineSome(size_t count, const float* weights, const float* arrays, size_t n, float* out) {
  switch (count) {
    case 1:
      return Combine<1, kAdd>(weights, arrays, n, out);
    case 2:
      return Combine<2, kAdd>(weights, arrays, n, out);
    case 3:
      return Combine<3, kAdd>(weights, arrays, n, out);
    default:
      return Combine<4, kAdd>(weights, arrays, n, out);
  }
}

// out = the sum of `count` weighted arrays.
void CombineAll(size_t count, const float* weights, const float* arrays, size_t n, float* out) {
  CombineSome<false>(std::min(count, kTogether), weights, arrays, n, out);
  for (size_t k = kTogether; k < count; k += kTogether) {
    CombineSome<true>(std::min(count - k, kTogether), weights + k, arrays + k * n, n, out);
  }
}

double Dot(const float* a, const float* b, size_t n) {
  double lanes[kLanes] = {};
  for (size_t j = 0; j < n; j += kLanes) {
    const size_t width = std::min(kLanes, n - j);
    for (size_t l = 0; l < width; ++l) lanes[l] += static_cast<double>(a[j + l]) * b[j + l];
  }
  for (size_t l = 1; l < kLanes; ++l) lanes[0] += lanes[l];
  return lanes[0];
}

// row += residual (null: nothing), clipped. Zero times what is not finite is NaN, which hides from no sum.
size_t AddAndClip(float* row, const float* residual, size_t n) {
  uint32_t clipped = 0;
  for (size_t j = 0; j < n; ++j) {
    const float sum = residual == nullptr ? row[j] : row[j] + residual[j];
    clipped += std::fabs(sum) > kLargestInMatrix ? 1 : 0;
    row[j] = std::clamp(sum, -kLargestInMatrix, kLargestInMatrix) + row[j] * 0;
  }
  return clipped;
}

}  // namespace

size_t MultiplyRightLoop(float* a, const float* residual, const Matrix& shape, size_t rank,
                         const float* right, float* left) {
  const size_t n = shape.columns;
  float sums[kTogether];
  size_t clipped = 0;
  for (size_t i = 0; i < shape.rows; ++i) {
    float* row = a + i * n;
    clipped += AddAndClip(row, residual == nullptr ? nullptr : residual + i * n, n);
    for (size_t k = 0; k < rank; k += kTogether) {
      const size_t some = std::min(rank - k, kTogether);
      const auto dots = some == 1 ? Dots<1> : some == 2 ? Dots<2> : some == 3 ? Dots<3> : Dots<4>;
      dots(row, right + k * n, n, sums);
      for (size_t l = 0; l < some; ++l) left[(k + l) * shape.rows + i] = sums[l];
    }
  }
  return clipped;
}

void OrthonormaliseLoop(float* left, size_t rows, size_t rank) {
  for (size_t k = 0; k < rank; ++k) {
    float* column = left + k * rows;
    const double before = std::sqrt(Dot(column, column, rows));
    for (size_t done = 0; done < 2 * k; ++done) {
      const float* other = left + done % k * rows;
      const auto part = static_cast<float>(Dot(other, column, rows));
      for (size_t i = 0; i < rows; ++i) column[i] -= part * other[i];
    }
    const double rest = std::sqrt(Dot(column, column, rows));
    const double factor = rest > kDependent * before ? 1 / rest : 0;
    for (size_t i = 0; i < rows; ++i) column[i] = static_cast<float>(column[i] * factor);
  }
}

void MultiplyLeftLoop(const float* a, const Matrix& shape, size_t rank, const float* left, float* right) {
  const size_t n = shape.columns;
  std::fill_n(right, rank * n, 0.0f);
  for (size_t i = 0; i < shape.rows; i += kTogether) {
    const size_t some = std::min(shape.rows - i, kTogether);
    for (size_t k = 0; k < rank; ++k) {
      CombineSome<true>(some, left + k * shape.rows + i, a + i * n, n, right + k * n);
    }
  }
}

void ExpandLoop(float* a, float* residual, const Matrix& shape, size_t rank, const float* left,
                const float* sent, const float* mean) {
  const size_t n = shape.columns;
  float weights[kMatrixRankMax];
  for (size_t i = 0; i < shape.rows; ++i) {
    for (size_t k = 0; k < rank; ++k) weights[k] = left[k * shape.rows + i];
    float* row = a + i * n;
    if (residual != nullptr) {
      float* rest = residual + i * n;
      CombineAll(rank, weights, sent, n, rest);
      for (size_t j = 0; j < n; ++j) rest[j] = row[j] - rest[j];
    }
    CombineAll(rank, weights, mean, n, row);
  }
}

}  // namespace gtrain::comm::LOOPS_NAMESPACE
LOOPS_END;

#if LOOPS_ONCE
namespace gtrain::comm {
#if GTRAIN_HAVE_HWY
namespace {
GT_SIMD_EXPORT(MultiplyRightLoop);
GT_SIMD_EXPORT(OrthonormaliseLoop);
GT_SIMD_EXPORT(MultiplyLeftLoop);
GT_SIMD_EXPORT(ExpandLoop);
}  // namespace
#define LOOPS_BEST(F) GT_SIMD_BEST(F)
#else
#define LOOPS_BEST(F) portable::F
#endif

absl::StatusOr<std::vector<Matrix>> MatricesOf(absl::Span<const std::vector<int64_t>> shapes, size_t count,
                                               size_t rank) {
  std::vector<Matrix> matrices;
  size_t offset = 0;
  for (const std::vector<int64_t>& shape : shapes) {
    size_t rows = 1, columns = 1;
    for (size_t i = 0; i < shape.size(); ++i) {
      size_t& extent = i == 0 ? rows : columns;
      const auto length = static_cast<size_t>(shape[i]);
      if (shape[i] < 1 || length > count / extent) {
        return absl::InvalidArgumentError(absl::StrCat("powersgd: a tensor of ", absl::StrJoin(shape, " x "),
                                                       " among ", count, " elements"));
      }
      extent *= length;
    }
    if (rows > count / columns || rows * columns > count - offset) {
      return absl::InvalidArgumentError(absl::StrCat("powersgd: tensors of more than the ", count,
                                                     " elements, up to one of ",
                                                     absl::StrJoin(shape, " x ")));
    }
    if ((rows + columns) * rank < rows * columns) matrices.push_back({offset, rows, columns});
    offset += rows * columns;
  }
  if (offset != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("powersgd: the tensors have ", offset, " elements, not ", count));
  }
  return matrices;
}

size_t FactorElements(absl::Span<const Matrix> matrices, size_t count, size_t rank) {
  for (const Matrix& m : matrices) count = count - m.size() + (m.rows + m.columns) * rank;
  return count;
}

void FillZeroColumns(float* right, size_t columns, size_t rank, uint64_t seed) {
  for (size_t k = 0; k < rank; ++k) {
    float* column = right + k * columns;
    if (std::any_of(column, column + columns, [](float value) { return value != 0; })) continue;
    Rng rng(seed + k);
    // Uniform, not normal: exact on every machine, and as good a start for an iteration.
    for (size_t j = 0; j < columns; ++j) column[j] = static_cast<float>(rng.Unit() * 2 - 1);
  }
}

void ScaleColumns(float* right, size_t columns, size_t rank) {
  for (size_t k = 0; k < rank; ++k) {
    float* column = right + k * columns;
    double squares = 0;
    for (size_t j = 0; j < columns; ++j) squares += double{column[j]} * column[j];
    if (squares == 0) continue;
    int exponent = 0;
    (void)std::frexp(std::sqrt(squares), &exponent);
    const double factor = std::ldexp(1.0, -exponent);
    for (size_t j = 0; j < columns; ++j) column[j] = static_cast<float>(column[j] * factor);
  }
}

size_t MultiplyRight(float* a, const float* residual, const Matrix& shape, size_t rank, const float* right,
                     float* left) {
  return LOOPS_BEST(MultiplyRightLoop)(a, residual, shape, rank, right, left);
}

void Orthonormalise(float* left, size_t rows, size_t rank) {
  LOOPS_BEST(OrthonormaliseLoop)(left, rows, rank);
}

void MultiplyLeft(const float* a, const Matrix& shape, size_t rank, const float* left, float* right) {
  LOOPS_BEST(MultiplyLeftLoop)(a, shape, rank, left, right);
}

void Expand(float* a, float* residual, const Matrix& shape, size_t rank, const float* left, const float* sent,
            const float* mean) {
  LOOPS_BEST(ExpandLoop)(a, residual, shape, rank, left, sent, mean);
}

}  // namespace gtrain::comm
#endif  // LOOPS_ONCE
