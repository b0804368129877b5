#include "comm/codec/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

using Array = std::vector<float>;

Array Random(size_t count, uint64_t seed) {
  Rng rng(seed);
  Array out(count);
  for (float& value : out) value = static_cast<float>(rng.Unit() * 2 - 1);
  return out;
}

double Norm(const Array& v) {
  double sum = 0;
  for (const float x : v) sum += double{x} * x;
  return std::sqrt(sum);
}

// Element (i, j) of P Q^T.
double Product(const Array& left, const Array& right, const Matrix& m, size_t rank, size_t i, size_t j) {
  double sum = 0;
  for (size_t k = 0; k < rank; ++k) sum += double{left[k * m.rows + i]} * right[k * m.columns + j];
  return sum;
}

constexpr float kOfAll = 4;  // the mean over members beside what one of them sent

// One step on one member: what was sent, and what is left of `a` + `residual`.
struct Step {
  Array left, right, approximation, rest;
};
Step OneStep(Array a, const Array* residual, const Matrix& m, size_t rank, Array right) {
  Step step{Array(m.rows * rank), Array(m.columns * rank), {}, Array(m.size())};
  FillZeroColumns(right.data(), m.columns, rank, 1);
  MultiplyRight(a.data(), residual != nullptr ? residual->data() : nullptr, m, rank, right.data(),
                step.left.data());
  Orthonormalise(step.left.data(), m.rows, rank);
  MultiplyLeft(a.data(), m, rank, step.left.data(), step.right.data());
  Array mean = step.right;
  for (float& value : mean) value *= kOfAll;
  Expand(a.data(), step.rest.data(), m, rank, step.left.data(), step.right.data(), mean.data());
  step.approximation = std::move(a);
  for (float& value : step.approximation) value /= kOfAll;
  return step;
}

// Around lanes and what goes together.
constexpr size_t kExtents[] = {1, 2, 3, 5, 15, 16, 17, 33, 64};

TEST(LowRank, AMatrixOfThatRankArrivesWhole) {
  for (const size_t rows : kExtents) {
    for (const size_t columns : kExtents) {
      for (const size_t rank : {1, 2, 3, 4, 5, 9}) {
        const Matrix m{0, rows, columns};
        const Array left = Random(rows * rank, rows), right = Random(columns * rank, columns);
        Array a(m.size());
        for (size_t i = 0; i < rows; ++i) {
          for (size_t j = 0; j < columns; ++j) {
            a[i * columns + j] = static_cast<float>(Product(left, right, m, rank, i, j));
          }
        }
        const Step step = OneStep(a, nullptr, m, rank, Array(columns * rank));
        Array wrong(m.size());
        for (size_t i = 0; i < a.size(); ++i) wrong[i] = step.approximation[i] - a[i];
        // The start hides so much of a direction: a factor of a few dozen.
        EXPECT_LT(Norm(wrong), 1e-4 * Norm(a)) << rows << " x " << columns << ", rank " << rank;
      }
    }
  }
}

TEST(LowRank, AsManyColumnsAsTheMatrixHasAreAllOfIt) {
  for (const auto& [rows, columns] : {std::pair<size_t, size_t>{7, 40}, {40, 7}, {16, 16}}) {
    const Matrix m{0, rows, columns};
    const size_t rank = std::min(rows, columns);
    const Array a = Random(m.size(), 3);
    EXPECT_LT(Norm(OneStep(a, nullptr, m, rank, Array(columns * rank)).rest), 1e-3 * Norm(a));
  }
}

TEST(LowRank, SentAndRestAreWhatCameIn) {
  for (const size_t rank : {1, 2, 3, 4, 6, 8}) {
    const Matrix m{0, 37, 53};
    const Array a = Random(m.size(), 5), carried = Random(m.size(), 6);
    const Step step = OneStep(a, &carried, m, rank, Array(m.columns * rank));
    for (size_t i = 0; i < m.rows; ++i) {
      for (size_t j = 0; j < m.columns; ++j) {
        const size_t at = i * m.columns + j;
        const double sent = Product(step.left, step.right, m, rank, i, j);
        ASSERT_NEAR(step.approximation[at], sent, 1e-5);
        ASSERT_NEAR(sent + step.rest[at], double{a[at]} + carried[at], 1e-5) << rank << " " << i << " " << j;
      }
    }
  }
}

// A start that goes on where the step before ended is an iteration towards the best approximation.
TEST(LowRank, WarmStartsFindTheLargestDirections) {
  const Matrix m{0, 24, 40};
  constexpr size_t kRank = 3, kAll = 24;
  // Orthonormal directions of sizes 1, 0.7, 0.49, ...
  Array left = Random(m.rows * kAll, 1), right = Random(m.columns * kAll, 2);
  Orthonormalise(left.data(), m.rows, kAll);
  Orthonormalise(right.data(), m.columns, kAll);
  double best = 0;
  for (size_t k = 0; k < kAll; ++k) {
    const double size = std::pow(0.7, k);
    if (k >= kRank) best += size * size;
    for (size_t j = 0; j < m.columns; ++j) right[k * m.columns + j] *= static_cast<float>(size);
  }
  Array a(m.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(Product(left, right, m, kAll, i / m.columns, i % m.columns));
  }
  Array start(m.columns * kRank);
  double first = 0, last = 0;
  for (int turn = 0; turn < 20; ++turn) {
    const Step step = OneStep(a, nullptr, m, kRank, start);
    start = step.right;
    last = Norm(step.rest);
    if (turn == 0) first = last;
  }
  EXPECT_LT(last, 1.001 * std::sqrt(best));
  EXPECT_GT(first, 1.05 * last) << "then nothing was to be found";
}

TEST(LowRank, ColumnsAreOrthonormalOrZero) {
  constexpr size_t kRows = 100, kRank = 6;
  Array left = Random(kRows * kRank, 1);
  const auto column = [&](size_t k) { return left.begin() + static_cast<ptrdiff_t>(k * kRows); };
  for (size_t i = 0; i < kRows; ++i) {
    column(1)[static_cast<ptrdiff_t>(i)] =
        column(0)[static_cast<ptrdiff_t>(i)] * (1 + 1e-4f * column(2)[static_cast<ptrdiff_t>(i)]);
  }
  std::copy_n(column(0), kRows, column(3));                          // nothing of its own
  std::fill_n(column(4), kRows, 0.0f);                               // nothing at all
  for (size_t i = 0; i < kRows; ++i) left[5 * kRows + i] *= 1e-18f;  // its square would be no float
  Orthonormalise(left.data(), kRows, kRank);
  for (size_t a = 0; a < kRank; ++a) {
    for (size_t b = 0; b <= a; ++b) {
      double dot = 0;
      for (size_t i = 0; i < kRows; ++i) dot += double{left[a * kRows + i]} * left[b * kRows + i];
      const bool zero = a == 3 || a == 4;
      EXPECT_NEAR(dot, a == b && !zero ? 1 : 0, 1e-5) << a << " " << b;
    }
  }
}

TEST(LowRank, OnlyZeroColumnsAreFilledAndEquallyEverywhere) {
  constexpr size_t kColumns = 20;
  Array right(kColumns * 3);
  right[kColumns + 7] = 5;
  Array other(kColumns * 3);
  other[kColumns] = 1;
  const Array before = right;
  FillZeroColumns(right.data(), kColumns, 3, 9);
  FillZeroColumns(other.data(), kColumns, 3, 9);
  EXPECT_TRUE(std::equal(right.begin() + kColumns, right.begin() + 2 * kColumns, before.begin() + kColumns));
  for (const size_t k : {size_t{0}, size_t{2}}) {
    const auto begin = right.begin() + static_cast<ptrdiff_t>(k * kColumns);
    EXPECT_TRUE(std::equal(begin, begin + kColumns, other.begin() + static_cast<ptrdiff_t>(k * kColumns)));
    EXPECT_GT(std::count_if(begin, begin + kColumns, [](float v) { return v != 0; }), 15);
  }
  EXPECT_FALSE(std::equal(right.begin(), right.begin() + kColumns, right.begin() + 2 * kColumns));
  // xoshiro256** from seed 9, whatever the machine.
  EXPECT_EQ(right[0], static_cast<float>(Rng(9).Unit() * 2 - 1));
}

// The values that all ranks must have in common are computed here once more, one operation after the other,
// each rounded: a fused product or another order of the sum would differ.
TEST(LowRank, MeansAndDirectionsHaveTheSameBitsOnEveryMachine) {
  constexpr size_t kRank = 6;
  const Matrix m{0, 45, 37};
  Array left = Random(m.rows * kRank, 1);
  const Array mean = Random(m.columns * kRank, 2);
  Array expected = left;
  const auto dot = [&](size_t a, size_t b) {
    volatile double lanes[16] = {};
    for (size_t i = 0; i < m.rows; ++i) {
      const volatile double product = double{expected[a * m.rows + i]} * expected[b * m.rows + i];
      lanes[i % 16] = lanes[i % 16] + product;
    }
    for (size_t l = 1; l < 16; ++l) lanes[0] = lanes[0] + lanes[l];
    return double{lanes[0]};
  };
  for (size_t k = 0; k < kRank; ++k) {
    for (size_t turn = 0; turn < 2; ++turn) {
      for (size_t other = 0; other < k; ++other) {
        const auto part = static_cast<float>(dot(other, k));
        for (size_t i = 0; i < m.rows; ++i) {
          const volatile float product = part * expected[other * m.rows + i];
          expected[k * m.rows + i] = expected[k * m.rows + i] - product;
        }
      }
    }
    const double factor = 1 / std::sqrt(dot(k, k));
    for (size_t i = 0; i < m.rows; ++i) {
      expected[k * m.rows + i] = static_cast<float>(expected[k * m.rows + i] * factor);
    }
  }
  Orthonormalise(left.data(), m.rows, kRank);
  EXPECT_EQ(left, expected);

  Array a(m.size());
  Expand(a.data(), nullptr, m, kRank, left.data(), nullptr, mean.data());
  for (size_t at = 0; at < a.size(); ++at) {
    const auto product = [&](size_t k) {
      const volatile float out = left[k * m.rows + at / m.columns] * mean[k * m.columns + at % m.columns];
      return float{out};
    };
    volatile float four = product(0), two = product(4);
    for (size_t k = 1; k < 4; ++k) four = four + product(k);
    two = two + product(5);
    ASSERT_EQ(a[at], four + two) << at;
  }
}

TEST(LowRank, MatricesAreWhatFactorsMakeSmaller) {
  const std::vector<std::vector<int64_t>> shapes = {{100}, {30, 50}, {10, 4, 10}, {4, 100}, {1, 60}};
  const auto matrices = MatricesOf(shapes, 100 + 1500 + 400 + 400 + 60, 4);
  ASSERT_TRUE(matrices.ok()) << matrices.status();
  ASSERT_EQ(matrices->size(), 2u) << "the factors of 4 x 100 are larger than it";
  EXPECT_EQ((*matrices)[0].offset, 100u);
  EXPECT_EQ((*matrices)[1].offset, 1600u);
  EXPECT_EQ((*matrices)[1].rows, 10u);
  EXPECT_EQ((*matrices)[1].columns, 40u);
  EXPECT_EQ(FactorElements(*matrices, 2460, 4), 100u + 4 * 80 + 4 * 50 + 400 + 60);
  EXPECT_EQ(MatricesOf(shapes, 2460, 8)->size(), 1u);

  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const auto& bad : std::vector<std::vector<std::vector<int64_t>>>{{{30}},
                                                                        {{40, 2}},
                                                                        {{20, 2}, {1}},
                                                                        {{20, 2}, {-1}},
                                                                        {{0, 40}},
                                                                        {{kHuge, kHuge, 3}},
                                                                        {{40, kHuge}}}) {
    EXPECT_EQ(MatricesOf(bad, 40, 1).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace gtrain::comm
