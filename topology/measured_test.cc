#include "topology/measured.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "topology/import.h"

namespace gtrain::topology {
namespace {

// A tree in which each pair of a round gets its share of the narrowest link on its way.
struct Network {
  std::vector<int> leaf = {}, pod = {};  // of each machine
  double link = 10, leaf_up = 10, pod_up = 1e9;
  std::map<int, double> up_of_leaf = {};  // instead of leaf_up
  double noise = 0;                       // a measurement is slower by up to this part of it

  double Up(int of) const { return up_of_leaf.contains(of) ? up_of_leaf.at(of) : leaf_up; }
  int machines() const { return static_cast<int>(leaf.size()); }

  std::vector<PairSpeed> Round(const std::vector<Pair>& round, Rng& random) const {
    std::map<int, int> of_leaf, of_pod;
    for (const auto& [a, b] : round) {
      if (leaf[a] != leaf[b]) ++of_leaf[leaf[a]], ++of_leaf[leaf[b]];
      if (pod[a] != pod[b]) ++of_pod[pod[a]], ++of_pod[pod[b]];
    }
    std::vector<PairSpeed> speeds;
    for (const auto& [a, b] : round) {
      double gb_s = link, us = 10;
      if (leaf[a] != leaf[b])
        gb_s = std::min({gb_s, Up(leaf[a]) / of_leaf[leaf[a]], Up(leaf[b]) / of_leaf[leaf[b]]}), us = 20;
      if (pod[a] != pod[b]) gb_s = std::min(gb_s, pod_up / std::max(of_pod[pod[a]], of_pod[pod[b]])), us = 50;
      gb_s /= 1 + noise * random.Unit();
      speeds.push_back({a, b, gb_s, us});
    }
    return speeds;
  }

  // As gtrain-bench does: pairs, groups, and what leaves each group.
  Measured Measure() const {
    Rng random(7);
    Measured out;
    for (int m = 0; m < machines(); ++m) out.machines.push_back(absl::StrCat("m", m));
    for (int turn = 0; turn < 2; ++turn) {
      for (const auto& round : ProbeRounds(machines(), turn)) {
        const auto speeds = Round(round, random);
        out.pairs.insert(out.pairs.end(), speeds.begin(), speeds.end());
      }
    }
    out.levels = FindGroups(machines(), out.pairs);
    for (size_t l = 0; l < out.levels.size(); ++l) {
      for (int group = 0; group < out.levels[l].groups(); ++group) {
        double sum = 0;
        for (const PairSpeed& speed : Round(PairsAcross(out.levels, l, group), random)) sum += speed.gb_s;
        out.levels[l].gb_s.push_back(sum);
      }
    }
    return out;
  }
};

void ExpectSound(int machines, const std::vector<std::vector<Pair>>& rounds) {
  std::set<std::pair<int, int>> pairs;
  for (const auto& round : rounds) {
    std::set<int> busy;
    for (const auto& [a, b] : round) {
      EXPECT_TRUE(0 <= a && a < b && b < machines) << a << " " << b;
      EXPECT_TRUE(busy.insert(a).second && busy.insert(b).second);
      EXPECT_TRUE(pairs.emplace(a, b).second) << a << " " << b;
    }
  }
}

TEST(ProbeRounds, EveryPairOnceAndEveryMachineOnceARound) {
  for (int n = 0; n <= kAllPairsMax; ++n) {
    const auto rounds = ProbeRounds(n);
    ExpectSound(n, rounds);
    size_t pairs = 0;
    for (const auto& round : rounds) pairs += round.size();
    EXPECT_EQ(pairs, static_cast<size_t>(n * (n - 1) / 2));
    EXPECT_LE(rounds.size(), static_cast<size_t>(n));
  }
}

TEST(ProbeRounds, ManyMachinesNeedFewRounds) {
  for (const int n : {65, 1000, 10'007}) {
    const auto rounds = ProbeRounds(n);
    ExpectSound(n, rounds);
    EXPECT_LE(static_cast<double>(rounds.size()), 28 + 2 * std::ceil(std::log2(n))) << n;
  }
}

TEST(FindGroups, TwoLeavesWithANarrowWayBetweenThem) {
  const Network net{
      .leaf = {0, 1, 0, 1, 0, 1, 0, 1}, .pod = std::vector<int>(8), .leaf_up = 10.0 / 8, .noise = 0.2};
  const Measured measured = net.Measure();
  ASSERT_EQ(measured.levels.size(), 1u);
  EXPECT_EQ(measured.levels[0].group_of, net.leaf);
  for (const double up : measured.levels[0].gb_s) EXPECT_NEAR(up, 1.25, 0.25);
}

// One pair alone would not notice that: an uplink carries two machines of four.
TEST(FindGroups, UplinksOfHalfOfWhatComesUp) {
  Network net{.leaf_up = 20, .noise = 0.1};
  for (int m = 0; m < 16; ++m) net.leaf.push_back(m / 4);
  net.pod.assign(16, 0);
  const Measured measured = net.Measure();
  ASSERT_EQ(measured.levels.size(), 1u);
  EXPECT_EQ(measured.levels[0].group_of, net.leaf);
  for (const double up : measured.levels[0].gb_s) EXPECT_NEAR(up, 20, 2);
}

// In one turn alone the machine that stays while the others go round met idle leaves, and landed in one.
TEST(FindGroups, UplinksOfAThirdInManySizes) {
  for (const auto& [machines, of_leaf] :
       std::vector<std::pair<int, int>>{{12, 4}, {16, 8}, {24, 8}, {32, 4}, {48, 16}, {64, 8}, {64, 16}}) {
    Network net{.leaf_up = 10.0 * of_leaf / 3, .noise = 0.1};
    for (int m = 0; m < machines; ++m) net.leaf.push_back(m / of_leaf);
    net.pod.assign(static_cast<size_t>(machines), 0);
    const Measured measured = net.Measure();
    ASSERT_EQ(measured.levels.size(), 1u) << machines << " " << of_leaf;
    EXPECT_EQ(measured.levels[0].group_of, net.leaf) << machines << " " << of_leaf;
  }
}

TEST(FindGroups, WhatIsEquallyFastIsOnePlace) {
  for (const int n : {1, 2, 3, 8, 64, 300}) {
    const Network net{.leaf = std::vector<int>(n), .pod = std::vector<int>(n), .noise = 0.3};
    EXPECT_TRUE(FindGroups(n, net.Measure().pairs).empty()) << n;
  }
}

TEST(FindGroups, LeavesInPods) {
  Network net{.leaf_up = 15, .pod_up = 8, .noise = 0.1};
  for (int m = 0; m < 32; ++m) net.leaf.push_back(m / 4), net.pod.push_back(m / 16);
  const Measured measured = net.Measure();
  ASSERT_EQ(measured.levels.size(), 2u);
  EXPECT_EQ(measured.levels[0].group_of, net.leaf);
  EXPECT_EQ(measured.levels[1].group_of, net.pod);
  for (const double up : measured.levels[1].gb_s) EXPECT_NEAR(up, 8, 1);
}

TEST(FindGroups, AThousandMachinesInRacksOfUnlikeSizes) {
  Network net{.noise = 0.2};
  Rng random(3);
  for (int rack = 0; net.machines() < 1000; ++rack) {
    const int size = 9 + static_cast<int>(random.Below(32));
    net.up_of_leaf[rack] = net.link * size / 3;
    net.leaf.insert(net.leaf.end(), static_cast<size_t>(size), rack);
  }
  net.pod.assign(net.leaf.size(), 0);
  const Measured measured = net.Measure();
  EXPECT_LE(measured.pairs.size(), 2 * 2.5 * net.machines() * std::log2(net.machines()));
  ASSERT_FALSE(measured.levels.empty());
  EXPECT_EQ(measured.levels[0].group_of, net.leaf);
}

// A link that works badly makes its machine slow and moves it nowhere.
TEST(FindGroups, ASlowLinkIsOfItsMachine) {
  const Network net{.leaf = {0, 0, 0, 0, 1, 1, 1, 1}, .pod = std::vector<int>(8), .leaf_up = 5};
  Measured measured = net.Measure();
  for (PairSpeed& pair : measured.pairs) {
    if (pair.a == 2 || pair.b == 2) pair.gb_s = std::min(pair.gb_s, 2.0);
  }
  const auto levels = FindGroups(8, measured.pairs);
  ASSERT_EQ(levels.size(), 1u);
  EXPECT_EQ(levels[0].group_of, net.leaf);
}

TEST(PairsAcross, EachMachineInsideWithOneOutsideOfAllOtherGroups) {
  const GroupLevel level{.group_of = {0, 0, 0, 0, 1, 1, 2, 2, 2}};
  const std::vector<Pair> pairs = PairsAcross({&level, 1}, 0, 0);
  ASSERT_EQ(pairs.size(), 4u);
  std::set<int> outside, groups;
  for (const auto& [a, b] : pairs) {
    EXPECT_EQ(level.group_of[a], 0);
    outside.insert(b);
    groups.insert(level.group_of[b]);
  }
  EXPECT_EQ(outside.size(), 4u);
  EXPECT_EQ(groups, (std::set<int>{1, 2}));
  const GroupLevel few{.group_of = {0, 0, 0, 1}}, one{.group_of = {0, 0}};
  EXPECT_EQ(PairsAcross({&few, 1}, 0, 0).size(), 1u);
  EXPECT_TRUE(PairsAcross({&one, 1}, 0, 0).empty());
}

// Else what leaves a leaf would be what leaves its pod.
TEST(PairsAcross, StaysInTheWiderGroup) {
  const std::vector<GroupLevel> levels{{.group_of = {0, 0, 1, 1, 2, 2}}, {.group_of = {0, 0, 1, 1, 0, 0}}};
  EXPECT_EQ(PairsAcross(levels, 0, 0), (std::vector<Pair>{{0, 4}, {1, 5}}));
  EXPECT_EQ(PairsAcross(levels, 1, 1), (std::vector<Pair>{{2, 0}, {3, 1}}));
}

TEST(TopologyOf, ASwitchForEachGroup) {
  Network net{.leaf_up = 15, .pod_up = 8};
  for (int m = 0; m < 16; ++m) net.leaf.push_back(m / 4), net.pod.push_back(m / 8);
  const auto topology = TopologyOf(net.Measure(), ShapeOfOneSlot());
  ASSERT_TRUE(topology.ok()) << topology.status();
  std::vector<std::string> names;
  for (const Switch& one : topology->switches) names.push_back(one.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"/leaf0", "/leaf1", "/leaf2", "/leaf3", "/pod0", "/pod1", "/core"}));
  EXPECT_EQ(topology->links.size(), 16u + 4 + 2);
  for (const Link& link : topology->links) {
    const bool of_machine = !link.from.is_switch, of_leaf = !of_machine && link.from.index < 4;
    EXPECT_DOUBLE_EQ(link.gb_s, of_machine ? 10 : of_leaf ? 15 : 8);
    EXPECT_DOUBLE_EQ(link.us, of_machine ? 5 : of_leaf ? 5 : 15);
  }
}

TEST(TopologyOf, OneSwitchWhereAllAreAlike) {
  const Network net{.leaf = {0, 0, 0}, .pod = {0, 0, 0}};
  const auto topology = TopologyOf(net.Measure(), ShapeOfOneSlot());
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->switches.size(), 1u);
  EXPECT_EQ(topology->links.size(), 3u);
}

TEST(TopologyOf, MoreLevelsThanThereAreNamesForAreRefused) {
  Measured measured{.machines = {"a", "b"}, .pairs = {{0, 1, 10, 5}}};
  measured.levels.assign(kGroupLevelsMax + 1, {.group_of = {0, 1}});
  EXPECT_FALSE(TopologyOf(measured, ShapeOfOneSlot()).ok());
  measured.levels.pop_back();
  EXPECT_TRUE(TopologyOf(measured, ShapeOfOneSlot()).ok());
}

TEST(TopologyOf, WhoHeardNobodyIsNamed) {
  const Measured measured{.machines = {"a", "b", "c"}, .pairs = {{0, 1, 10, 5}}};
  const auto topology = TopologyOf(measured, ShapeOfOneSlot());
  EXPECT_EQ(topology.status().message(), "c has exchanged nothing with any other machine");
  EXPECT_FALSE(TopologyOf({.machines = {"a", "a"}, .pairs = {{0, 1, 10, 5}}}, ShapeOfOneSlot()).ok());
}

}  // namespace
}  // namespace gtrain::topology
