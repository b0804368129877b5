// The tree of sums: every rank plays its part with values whose sum knows in which order it was made.
#include "elastic/plan/tree.h"

#include <bit>
#include <map>
#include <set>
#include <tuple>

#include "gtest/gtest.h"

namespace gtrain::elastic {
namespace {

// Neither commutative nor associative: one order of adding has this result.
uint64_t Add(uint64_t left, uint64_t right) {
  return (left * 0x9E3779B97F4A7C15) ^ (right + 0x7F4A7C15) * 31;
}
uint64_t Leaf(int leaf) { return PartSeed(1, 2, leaf); }

// The definition, which knows nothing of ranks.
uint64_t Root(int begin, int size, int leaves) {
  if (size == 1) return Leaf(begin);
  const uint64_t left = Root(begin, size / 2, leaves);
  return begin + size / 2 < leaves ? Add(left, Root(begin + size / 2, size / 2, leaves)) : left;
}
uint64_t Root(int leaves) {
  return Root(0, static_cast<int>(std::bit_ceil(static_cast<unsigned>(leaves))), leaves);
}

struct Rank {
  std::vector<uint64_t> blocks;
  size_t first = 0;
  std::vector<TreeRound> rounds;
  size_t next = 0;
};

// Folds the leaves of one rank with the same calls that a run makes.
Rank Fold(int leaves, int rank, int ranks) {
  Rank made{.rounds = RoundsOf(leaves, rank, ranks)};
  std::vector<TreeBlock> blocks;
  const TreeBlock run = RunOf(leaves, rank, ranks);
  for (int leaf = run.begin; leaf < run.end; ++leaf) {
    blocks.push_back({leaf, leaf + 1});
    made.blocks.push_back(Leaf(leaf));
    for (int merges = MergeEnd(blocks, leaves); merges > 0; --merges) {
      const uint64_t right = made.blocks.back();
      made.blocks.pop_back();
      made.blocks.back() = Add(made.blocks.back(), right);
    }
  }
  EXPECT_EQ(blocks, BlocksOf(leaves, run));
  return made;
}

// Plays all rounds, level by level, and returns what rank 0 has.
uint64_t Play(int leaves, int ranks) {
  std::vector<Rank> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(Fold(leaves, rank, ranks));
  const int levels = std::bit_width(static_cast<unsigned>(leaves - 1));
  for (int level = 0; level < levels; ++level) {
    std::map<std::pair<int, int>, uint64_t> messages;
    const auto at_level = [&](Rank& rank) {
      return rank.next < rank.rounds.size() && rank.rounds[rank.next].level == level;
    };
    for (int rank = 0; rank < ranks; ++rank) {
      Rank& own = all[static_cast<size_t>(rank)];
      if (!at_level(own) || own.rounds[own.next].send_to < 0) continue;
      messages[{rank, own.rounds[own.next].send_to}] = own.blocks[own.first++];
    }
    for (int rank = 0; rank < ranks; ++rank) {
      Rank& own = all[static_cast<size_t>(rank)];
      if (!at_level(own)) continue;
      const TreeRound round = own.rounds[own.next++];
      if (round.receive_from < 0) continue;
      const auto message = messages.find({round.receive_from, rank});
      if (message == messages.end()) return 0;
      own.blocks.back() = Add(own.blocks.back(), message->second);
      messages.erase(message);
      for (int merges = round.merges; merges > 0; --merges) {
        const uint64_t right = own.blocks.back();
        own.blocks.pop_back();
        own.blocks.back() = Add(own.blocks.back(), right);
      }
    }
    EXPECT_TRUE(messages.empty()) << "nobody took a message of level " << level;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const Rank& own = all[static_cast<size_t>(rank)];
    EXPECT_EQ(own.next, own.rounds.size());
    EXPECT_EQ(own.blocks.size() - own.first, rank == 0 ? 1u : 0u) << "rank " << rank;
  }
  return all[0].blocks[0];
}

TEST(TreeTest, AnyNumberOfRanksAddsInTheSameOrder) {
  for (int leaves = 1; leaves <= 40; ++leaves) {
    for (int ranks = 1; ranks <= leaves + 3; ++ranks)
      ASSERT_EQ(Play(leaves, ranks), Root(leaves)) << leaves << " leaves, " << ranks << " ranks";
  }
  for (const int leaves : {63, 64, 65, 255, 256, 257, 1000, 1023, 1024}) {
    for (const int ranks :
         {1, 2, 3, 4, 5, 7, 16, 31, 60, 63, 64, 100, 129, 500, 683, 999, 1000, 1023, 1024, 1500})
      ASSERT_EQ(Play(leaves, ranks), Root(leaves)) << leaves << " leaves, " << ranks << " ranks";
  }
}

TEST(TreeTest, EachLeafHasOneOwner) {
  for (int leaves = 1; leaves <= 70; ++leaves) {
    for (int ranks = 1; ranks <= 75; ++ranks) {
      int next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const TreeBlock run = RunOf(leaves, rank, ranks);
        ASSERT_EQ(run.begin, next);
        ASSERT_TRUE(run.size() == leaves / ranks || run.size() == leaves / ranks + 1);
        for (int leaf = run.begin; leaf < run.end; ++leaf)
          ASSERT_EQ(OwnerOf(leaf, leaves, ranks), rank) << leaf << " of " << leaves << ", " << ranks;
        next = run.end;
      }
      ASSERT_EQ(next, leaves);
    }
  }
}

TEST(TreeTest, RanksOfOnePowerOfTwoSendOnce) {
  for (int rank = 0; rank < 256; ++rank) {
    int sends = 0, receives = 0;
    for (const TreeRound& round : RoundsOf(1024, rank, 256)) {
      sends += round.send_to >= 0 ? 1 : 0;
      receives += round.receive_from >= 0 ? 1 : 0;
    }
    EXPECT_EQ(sends, rank == 0 ? 0 : 1);
    EXPECT_EQ(receives, rank == 0 ? 8 : std::countr_zero(static_cast<unsigned>(rank)));
  }
}

TEST(TreeTest, RoundsAndBlocksAreFew) {
  for (const int leaves : {1, 2, 1000, 1024, 65536}) {
    for (const int ranks : {1, 3, 7, 100, 999, 1000}) {
      for (int rank = 0; rank < ranks; ++rank) {
        const TreeBlock run = RunOf(leaves, rank, ranks);
        EXPECT_LE(RoundsOf(leaves, rank, ranks).size(),
                  static_cast<size_t>(std::bit_width(static_cast<unsigned>(leaves - 1))));
        EXPECT_LE(BlocksOf(leaves, run).size(),
                  run.size() == 0
                      ? 0u
                      : 2u * static_cast<size_t>(std::bit_width(static_cast<unsigned>(run.size()))));
      }
    }
  }
}

// Training that is continued rests on these numbers.
TEST(TreeTest, SeedsOfPartsDifferAndStayWhatTheyAre) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    for (int64_t step = 1; step <= 50; ++step) {
      for (int64_t part = 0; part < 16; ++part) seeds.insert(PartSeed(seed, step, part));
    }
  }
  EXPECT_EQ(seeds.size(), 4u * 50 * 16);
  EXPECT_EQ(PartSeed(0, 0, 0), 2558736989570252433u);
  EXPECT_EQ(PartSeed(7, 12, 3), 13503035711154546848u);
}

}  // namespace
}  // namespace gtrain::elastic
