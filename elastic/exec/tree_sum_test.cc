// The tree's sum over ranks that are threads, of gradients that travel in several pieces.
#include "elastic/exec/tree_sum.h"

#include <gtest/gtest.h>

#include <bit>

#include "base/rng.h"
#include "elastic/exec/machine.h"
#include "elastic/exec/run_test_world.h"
#include "gmock/gmock.h"

namespace gtrain::elastic {
namespace {

constexpr size_t kSmall = 5, kLarge = 600'000;  // more than two pieces
constexpr float kScale = 1.0F / 7;

struct Gradients {
  std::vector<float> small, large;
  double loss = 0;
  bool operator==(const Gradients&) const = default;
};

// Of one leaf; sums of them are not exact.
Gradients Leaf(int leaf) {
  Rng rng(static_cast<uint64_t>(leaf));
  Gradients made{std::vector<float>(kSmall), std::vector<float>(kLarge), rng.Unit()};
  for (float& value : made.small) value = static_cast<float>(rng.Unit());
  for (float& value : made.large) value = static_cast<float>(rng.Unit());
  return made;
}

// The definition, by recursion.
Gradients Node(int begin, int size, int leaves) {
  if (size == 1) return Leaf(begin);
  Gradients left = Node(begin, size / 2, leaves);
  if (begin + size / 2 >= leaves) return left;
  const Gradients right = Node(begin + size / 2, size / 2, leaves);
  for (size_t i = 0; i < kSmall; ++i) left.small[i] += right.small[i];
  for (size_t i = 0; i < kLarge; ++i) left.large[i] += right.large[i];
  left.loss += right.loss;
  return left;
}
Gradients Root(int leaves) {
  Gradients root = Node(0, static_cast<int>(std::bit_ceil(static_cast<unsigned>(leaves))), leaves);
  for (float& value : root.small) value *= kScale;
  for (float& value : root.large) value *= kScale;
  return root;
}

TEST(TreeSumTest, AddsAsTheTreeSays) {
  for (const int leaves : {1, 3, 6}) {
    const Gradients wanted = Root(leaves);
    for (const int ranks : {1, 2, 3, 5, 8}) {
      SCOPED_TRACE(absl::StrCat(leaves, " leaves, ", ranks, " ranks"));
      ForRanks(ranks, [&](Communicator& comm) {
        Gradients mine{std::vector<float>(kSmall), std::vector<float>(kLarge)};
        TreeSum sum({absl::MakeSpan(mine.small), absl::MakeSpan(mine.large)});
        for (int step = 0; step < 2; ++step) {
          sum.Begin(leaves, comm.rank(), comm.size());
          const TreeBlock run = RunOf(leaves, comm.rank(), comm.size());
          for (int leaf = run.begin; leaf < run.end; ++leaf) {
            const Gradients computed = Leaf(leaf);
            std::ranges::copy(computed.small, mine.small.begin());
            std::ranges::copy(computed.large, mine.large.begin());
            sum.Add(computed.loss);
          }
          const absl::StatusOr<double> loss = sum.Finish(comm, kScale);
          ASSERT_TRUE(loss.ok()) << loss.status();
          mine.loss = *loss;
          EXPECT_TRUE(mine == wanted) << "step " << step;
        }
      });
    }
  }
}

TEST(TreeSumTest, SaysWhatItCosts) {
  ForRanks(3, [&](Communicator& comm) {
    std::vector<float> gradient(1000, 1);
    TreeSum sum({absl::MakeSpan(gradient)});
    for (int step = 0; step < 20; ++step) {
      sum.Begin(3, comm.rank(), comm.size());
      sum.Add(1);
      ASSERT_EQ(sum.Finish(comm, 1).value(), 3);
      ASSERT_EQ(gradient[999], 3) << "measuring changes nothing";
      std::ranges::fill(gradient, 1);
      EXPECT_EQ(sum.cost().empty(), step < 12);
    }
    EXPECT_THAT(sum.cost(),
                testing::MatchesRegex("bitwise, a tree of 3 virtual ranks over 3 ranks: [0-9.e+-]+ ms a "
                                      "step, an all-reduce takes [0-9.e+-]+ ms"));
  });
}

TEST(MachineTest, ThisMachineIsDescribed) {
  const absl::StatusOr<std::string> machine = DescribeMachine("OMP_NUM_THREADS=1");
  ASSERT_TRUE(machine.ok()) << machine.status();
  EXPECT_THAT(*machine, testing::MatchesRegex(".+, .+; OMP_NUM_THREADS=1"));
}

}  // namespace
}  // namespace gtrain::elastic
