#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/test_folder.h"
#include "examples/char_lm/matrix.h"
#include "examples/char_lm/model.h"
#include "examples/char_lm/text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::examples {
namespace {

using ::testing::HasSubstr;

std::string Write(const std::string& name, const std::string& text) {
  const std::string path = TestFolder() + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(Text, FrequentCharactersHaveAClassEachTheOthersShareTheLast) {
  std::string characters(9'000, 'e');
  characters += std::string(1'500, 't') + "xyz";
  const auto text = ReadText(Write("text", characters), 3);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_EQ(text->classes[0], 0);
  EXPECT_EQ(text->classes[9'000], 1);
  EXPECT_EQ(std::set<uint8_t>(text->classes.end() - 3, text->classes.end()), std::set<uint8_t>{2});
  EXPECT_NEAR(static_cast<double>(text->train), 0.95 * 10'503, 20);
}

TEST(Text, FilesThatCannotBeTrainedAreErrors) {
  EXPECT_THAT(ReadText(TestFolder() + "/absent", 3).status().message(), HasSubstr("cannot open"));
  EXPECT_THAT(ReadText(Write("short", "In the beginning"), 3).status().message(),
              HasSubstr("has 16 characters"));
}

TEST(Text, SamplesDependOnSeedStepAndIndex) {
  EXPECT_EQ(SamplePosition(1, 2, 3, 1'000'000), SamplePosition(1, 2, 3, 1'000'000));
  std::set<size_t> seen;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (int64_t step = 0; step < 10; ++step) {
      for (int64_t index = 0; index < 10; ++index) seen.insert(SamplePosition(seed, step, index, 1 << 30));
    }
  }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(Matrix, EqualsThePlainLoops) {
  constexpr size_t kRows = 8, kInner = 5;
  for (const size_t columns : {16, 64, 80}) {
    std::vector<float> a(kRows * kInner), b(kInner * columns), c(kRows * columns, 1.0f);
    for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 7) - 3;
    for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 11) - 5;
    std::vector<float> expected = c;
    for (size_t i = 0; i < kRows; ++i) {
      for (size_t k = 0; k < kInner; ++k) {
        for (size_t j = 0; j < columns; ++j)
          expected[i * columns + j] += a[k * kRows + i] * b[k * columns + j];
      }
    }
    MultiplyAdd({a.data(), 1, kRows}, b.data(), c.data(), kRows, kInner, columns);  // a lies turned
    EXPECT_EQ(c, expected) << columns;
  }
}

// Every parameter's gradient against the loss a little to both sides.
TEST(Model, GradientsAreThoseOfTheLoss) {
  constexpr size_t kSamples = 5;
  std::vector<uint8_t> text;
  for (size_t i = 0; i < 100; ++i) text.push_back(static_cast<uint8_t>(i * i % kClasses));
  std::vector<const uint8_t*> windows;
  for (size_t s = 0; s < kSamples; ++s) windows.push_back(text.data() + 7 * s);
  Model model(1);
  EXPECT_NEAR(model.Forward(windows) / kSamples, std::log(kClasses), 3.0);

  std::vector<std::vector<float>> memory;
  std::vector<std::span<float>> gradients;
  for (const Parameter& parameter : Parameters())
    memory.emplace_back(parameter.count(), 7.0f);  // overwritten
  for (auto& gradient : memory) gradients.push_back(std::span(gradient));
  std::vector<size_t> ready;
  model.Backward(gradients, [&](size_t i) { ready.push_back(i); });
  EXPECT_THAT(ready, testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_EQ(ready.back(), 0u);

  size_t offset = 0;
  for (size_t p = 0; p < Parameters().size(); offset += Parameters()[p++].count()) {
    // The element with the largest gradient, so that rounding does not matter beside it.
    size_t at = 0;
    for (size_t i = 0; i < memory[p].size(); ++i)
      at = std::fabs(memory[p][i]) > std::fabs(memory[p][at]) ? i : at;
    float& value = model.values()[offset + at];
    const float before = value, step = 1e-2f;
    value = before + step;
    const double above = model.Forward(windows);
    value = before - step;
    const double below = model.Forward(windows);
    value = before;
    const double expected = (above - below) / (2 * step);
    EXPECT_NEAR(memory[p][at], expected, 0.03 * std::fabs(expected) + 1e-3) << Parameters()[p].name;
  }
}

// Two halves of a model that add up what they have are the whole one: loss and gradients.
TEST(Model, PartsAddUpToTheWhole) {
  std::vector<uint8_t> text;
  for (size_t i = 0; i < 200; ++i) text.push_back(static_cast<uint8_t>(i * i % kClasses));
  std::vector<const uint8_t*> windows;
  for (size_t s = 0; s < 20; ++s) windows.push_back(text.data() + s);
  const auto learn = [&](Model& model, const SumParts& sum, double* loss) {
    *loss = model.Forward(windows, sum);
    std::vector<std::vector<float>> gradients;
    for (const Parameter& parameter : model.parameters()) gradients.emplace_back(parameter.count());
    std::vector<std::span<float>> views(gradients.begin(), gradients.end());
    model.Backward(
        views, [](size_t) {}, sum);
    return gradients;
  };
  Model whole(3);
  double whole_loss = 0;
  const auto wanted = learn(whole, {}, &whole_loss);

  // Each half is a thread; they meet to add.
  std::array<std::vector<float>, 2> given;
  std::barrier meet(2);
  std::array<std::vector<std::vector<float>>, 2> had;
  std::array<double, 2> losses{};
  std::vector<std::thread> threads;
  for (size_t half = 0; half < 2; ++half) {
    threads.emplace_back([&, half] {
      Model model(3, {half * kHidden / 2, kHidden / 2});
      const auto sum = [&](std::span<float> values) {
        given[half].assign(values.begin(), values.end());
        meet.arrive_and_wait();
        for (size_t i = 0; i < values.size(); ++i) values[i] = given[0][i] + given[1][i];
        meet.arrive_and_wait();
      };
      had[half] = learn(model, sum, &losses[half]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NEAR(losses[0], whole_loss, 1e-3 * whole_loss);
  EXPECT_EQ(losses[0], losses[1]);
  for (size_t p = 0; p < Parameters().size(); ++p) {
    const Parameter& parameter = Parameters()[p];
    for (size_t half = 0; half < 2; ++half) {
      const Parameter part = Model(3, {half * kHidden / 2, kHidden / 2}).parameters()[p];
      const size_t row = parameter.cut == 0 ? half * kHidden / 2 : 0;
      const size_t column = parameter.cut == 1 ? half * kHidden / 2 : 0;
      double off = 0, size = 0;
      for (size_t r = 0; r < part.rows; ++r) {
        for (size_t c = 0; c < part.columns; ++c) {
          const double want = wanted[p][(row + r) * parameter.columns + column + c];
          off += std::pow(had[half][p][r * part.columns + c] - want, 2);
          size += want * want;
        }
      }
      EXPECT_LT(off, 1e-8 * size) << parameter.name << ", half " << half;
    }
  }
}

// The share of a rank changes with the number of ranks.
TEST(Model, BatchesOfAnySizeFollowEachOther) {
  std::vector<uint8_t> text;
  for (size_t i = 0; i < 200; ++i) text.push_back(static_cast<uint8_t>(i * i % kClasses));
  std::vector<const uint8_t*> windows;
  for (size_t s = 0; s < 40; ++s) windows.push_back(text.data() + s);
  const auto learn = [&](Model& model, size_t samples) {
    const double loss = model.Forward(std::span(windows).first(samples));
    std::vector<std::vector<float>> memory;
    std::vector<std::span<float>> gradients;
    for (const Parameter& parameter : Parameters()) memory.emplace_back(parameter.count(), 7.0f);
    for (auto& gradient : memory) gradients.push_back(std::span(gradient));
    model.Backward(gradients, [](size_t) {});
    return std::pair(loss, memory);
  };
  Model model(1);
  for (const size_t samples : {3, 40, 0, 17, 16}) {
    Model fresh(1);
    const auto [loss, gradients] = learn(fresh, samples);
    const auto [again, equal] = learn(model, samples);
    EXPECT_EQ(loss, again) << samples;
    EXPECT_EQ(gradients, equal) << samples;
  }
}

// The loss after `steps` of a model that sees one line again and again.
double LossAfter(int steps, const std::function<void(std::span<float> values, size_t at,
                                                     std::span<const float> gradient, int step)>& descend) {
  const std::string line = "and it came to pass in those days that ";
  std::vector<uint8_t> text;
  for (size_t i = 0; i < 300; ++i) text.push_back(static_cast<uint8_t>(line[i % line.size()]) % kClasses);
  std::vector<const uint8_t*> windows;
  for (size_t s = 0; s < 48; ++s) windows.push_back(text.data() + s);
  Model model(1);
  std::vector<std::vector<float>> memory;
  std::vector<std::span<float>> gradients;
  for (const Parameter& parameter : Parameters()) memory.emplace_back(parameter.count());
  for (auto& gradient : memory) gradients.push_back(std::span(gradient));
  double loss = 0;
  for (int step = 0; step < steps; ++step) {
    loss = model.Forward(windows) / static_cast<double>(windows.size());
    model.Backward(gradients, [](size_t) {});
    size_t at = 0;
    for (const auto& gradient : gradients) {
      descend(model.values().subspan(at, gradient.size()), at, gradient, step);
      at += gradient.size();
    }
  }
  return loss;
}

TEST(Model, DescendsToTheTextItSaw) {
  std::vector<float> momentum(Model(1).values().size());
  const double loss =
      LossAfter(60, [&](std::span<float> values, size_t at, std::span<const float> gradient, int) {
        Descend(values, std::span(momentum).subspan(at, values.size()), gradient, 0.9f, 1.0f / 48, 0.02f);
      });
  EXPECT_LT(loss, 0.1);
}

// The descent goes on behind step 30, from where on the mean of squares stays as it is.
TEST(Model, DescendsByAdam) {
  for (const int measured_steps : {60, 30}) {
    std::vector<float> momentum(Model(1).values().size()), squares(momentum.size()), before;
    const double loss =
        LossAfter(60, [&](std::span<float> values, size_t at, std::span<const float> gradient, int step) {
          const AdamStep adam{.scale = 1.0f / 48,
                              .rate = 0.002f,
                              .measures = step < measured_steps,
                              .steps = step + 1,
                              .measured = std::min(step + 1, measured_steps)};
          DescendByAdam(values, std::span(momentum).subspan(at, values.size()),
                        std::span(squares).subspan(at, values.size()), gradient, adam);
          if (step == 30 && at == 0) before = squares;
        });
    EXPECT_LT(loss, 0.1) << measured_steps;
    EXPECT_EQ(squares == before, measured_steps == 30);
  }
}

// The value that comes back for such an element is no gradient: 1-bit gives every element of a block the same
// magnitude.
TEST(Model, ElementsWithoutSquaresStayWhereTheyAre) {
  std::vector<float> values = {1, 1}, momentum(2), squares = {0, 1e-4f};
  const AdamStep adam{.scale = 1, .rate = 0.01f, .measures = false, .steps = 50, .measured = 40};
  DescendByAdam(std::span(values), std::span(momentum), std::span(squares), std::vector<float>{1e-3f, 1e-3f},
                adam);
  EXPECT_EQ(values[0], 1);
  EXPECT_LT(values[1], 1);
}

}  // namespace
}  // namespace gtrain::examples
