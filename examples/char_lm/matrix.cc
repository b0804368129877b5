// Tiles of four rows and four vectors: sixteen sums stay in registers while `inner` runs.
#include "examples/char_lm/matrix.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/char_lm/matrix.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gtrain::examples::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <size_t kVectors, class D>
HWY_INLINE void Tile(D d, Strided a, const float* HWY_RESTRICT b, float* HWY_RESTRICT c, size_t inner,
                     size_t columns) {
  constexpr size_t kLanes = hn::MaxLanes(d);
  hn::Vec<D> sums[4][kVectors];
  for (size_t r = 0; r < 4; ++r) {
    for (size_t v = 0; v < kVectors; ++v) sums[r][v] = hn::LoadU(d, c + r * columns + v * kLanes);
  }
  for (size_t k = 0; k < inner; ++k) {
    hn::Vec<D> row[kVectors];
    for (size_t v = 0; v < kVectors; ++v) row[v] = hn::LoadU(d, b + k * columns + v * kLanes);
    for (size_t r = 0; r < 4; ++r) {
      const auto factor = hn::Set(d, a.data[r * a.down + k * a.across]);
      for (size_t v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, row[v], sums[r][v]);
    }
  }
  for (size_t r = 0; r < 4; ++r) {
    for (size_t v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, c + r * columns + v * kLanes);
  }
}

void MultiplyAddHere(Strided a, const float* b, float* c, size_t rows, size_t inner, size_t columns) {
  const hn::CappedTag<float, 16> d;  // not wider than what `columns` is a multiple of
  constexpr size_t kLanes = hn::MaxLanes(d);
  size_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) {
    for (size_t row = 0; row < rows; row += 4) {
      Tile<4>(d, {a.data + row * a.down, a.down, a.across}, b + column, c + row * columns + column, inner,
              columns);
    }
  }
  for (; column < columns; column += kLanes) {
    for (size_t row = 0; row < rows; row += 4) {
      Tile<1>(d, {a.data + row * a.down, a.down, a.across}, b + column, c + row * columns + column, inner,
              columns);
    }
  }
}

}  // namespace gtrain::examples::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gtrain::examples {

HWY_EXPORT(MultiplyAddHere);
void MultiplyAdd(Strided a, const float* b, float* c, size_t rows, size_t inner, size_t columns) {
  HWY_DYNAMIC_DISPATCH(MultiplyAddHere)(a, b, c, rows, inner, columns);
}

}  // namespace gtrain::examples
#endif
