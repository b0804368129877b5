#include "runtime/core/values/near_peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

NodePlace At(const std::string& zone, const std::string& rack, int index) {
  return {.node = NodeId(absl::StrCat("n", index)),
          .address = "10.0.0.1",
          .hostname = absl::StrCat("h", index),
          .zone = zone,
          .rack = rack,
          .near_port = 7000,
          .near_key = "k"};
}

// Zones with so many nodes each, which come in any order.
std::vector<NodePlace> Zones(const std::vector<int>& sizes) {
  std::vector<NodePlace> nodes;
  for (int round = 0, more = 1; more > 0; ++round) {
    more = 0;
    for (size_t zone = 0; zone < sizes.size(); ++zone) {
      if (round >= sizes[zone]) continue;
      nodes.push_back(At(absl::StrCat("z", zone), "", static_cast<int>(nodes.size())));
      more = 1;
    }
  }
  return nodes;
}

std::vector<size_t> Kept(const std::vector<std::vector<size_t>>& holders) {
  std::vector<size_t> keeps(holders.size());
  for (const auto& mine : holders) {
    for (size_t holder : mine) ++keeps[holder];
  }
  return keeps;
}

TEST(NearPeers, NeverInTheSameZoneWhileAnotherExists) {
  for (const auto& sizes :
       std::vector<std::vector<int>>{{1, 1}, {2, 1}, {5, 1}, {3, 3}, {4, 2, 2}, {7, 2, 1}, {1, 1, 1}}) {
    const auto nodes = Zones(sizes);
    const auto holders = ChooseHolders(nodes, 1);
    for (size_t i = 0; i < nodes.size(); ++i) {
      ASSERT_EQ(holders[i].size(), 1u);
      EXPECT_NE(nodes[holders[i][0]].zone, nodes[i].zone) << "node " << i << " of " << nodes.size();
    }
  }
}

TEST(NearPeers, EachKeepsOneWhereNoZoneHasMoreThanHalf) {
  for (const auto& sizes :
       std::vector<std::vector<int>>{{1, 1}, {3, 3}, {4, 2, 2}, {2, 2, 1}, {8, 5, 4}, {1, 1, 1, 1}}) {
    for (size_t keeps : Kept(ChooseHolders(Zones(sizes), 1))) EXPECT_EQ(keeps, 1u);
  }
  // Otherwise the machines of the small zone share it evenly.
  const auto nodes = Zones({6, 2});
  const auto keeps = Kept(ChooseHolders(nodes, 1));
  for (size_t i = 0; i < nodes.size(); ++i) {
    EXPECT_LE(keeps[i], nodes[i].zone == "z0" ? 1u : 3u) << i;
  }
}

TEST(NearPeers, WithoutZonesAnotherRackAndWithoutRacksAnotherHost) {
  std::vector<NodePlace> nodes = {At("", "a", 0), At("", "a", 1), At("", "b", 2), At("", "b", 3)};
  for (size_t i = 0; i < nodes.size(); ++i)
    EXPECT_NE(nodes[ChooseHolders(nodes, 1)[i][0]].rack, nodes[i].rack);
  for (NodePlace& node : nodes) node.rack.clear();
  nodes[1].hostname = nodes[0].hostname;  // two agents of one machine
  EXPECT_NE(nodes[ChooseHolders(nodes, 1)[0][0]].hostname, "h0");
  EXPECT_NE(nodes[ChooseHolders(nodes, 1)[1][0]].hostname, "h0");
  EXPECT_THAT(ChooseHolders({nodes[0], nodes[1]}, 1), ElementsAre(ElementsAre(1), ElementsAre(0)));
}

TEST(NearPeers, SeveralReplicasAreInDifferentZones) {
  const auto nodes = Zones({3, 3, 3});
  const auto holders = ChooseHolders(nodes, 2);
  for (size_t i = 0; i < nodes.size(); ++i) {
    ASSERT_EQ(holders[i].size(), 2u);
    EXPECT_NE(nodes[holders[i][0]].zone, nodes[holders[i][1]].zone);
    for (size_t holder : holders[i]) EXPECT_NE(nodes[holder].zone, nodes[i].zone);
  }
  for (size_t keeps : Kept(holders)) EXPECT_EQ(keeps, 2u);
}

TEST(NearPeers, OneThatCannotHoldIsNotChosen_N13) {
  auto nodes = Zones({2, 2});
  nodes[1].near_port = 0;  // an older agent
  for (const auto& mine : ChooseHolders(nodes, 3)) {
    for (size_t holder : mine) EXPECT_NE(holder, 1u);
  }
  for (NodePlace& node : nodes) node.near_port = 0;
  EXPECT_THAT(NearPeers(nodes, 0, 1), IsEmpty());
  EXPECT_THAT(ChooseHolders({nodes[0]}, 1)[0], IsEmpty());
}

TEST(NearPeers, OneOutsideTheJobOnlyWhereNoneOfItIsAsFarAway) {
  const std::vector<NodePlace> outside = {At("z0", "", 90), At("z2", "", 91), At("z2", "", 92)};
  // Both in one zone: each has its holder in the other zone, evenly.
  EXPECT_THAT(ChooseHolders(Zones({2}), 1, outside), ElementsAre(ElementsAre(3), ElementsAre(4)));
  // In two: nobody is needed.
  EXPECT_THAT(ChooseHolders(Zones({1, 1}), 1, outside), ElementsAre(ElementsAre(1), ElementsAre(0)));
  // Alone: as far away as can be had; a second copy in the zone that is left.
  EXPECT_THAT(ChooseHolders(Zones({1}), 1, outside), ElementsAre(ElementsAre(2)));
  EXPECT_THAT(ChooseHolders(Zones({1}), 1, {outside[0]}), ElementsAre(ElementsAre(1)));
  const auto several = ChooseHolders(Zones({1}), 2, {At("z1", "", 93), At("z1", "", 94), At("z2", "", 95)});
  EXPECT_THAT(several, ElementsAre(ElementsAre(1, 3)));
  // Nothing is gained on the same host, nor where nothing is kept.
  NodePlace same = At("z0", "", 96), deaf = At("z1", "", 97);
  same.hostname = "h0";
  deaf.near_port = 0;
  EXPECT_THAT(ChooseHolders(Zones({1}), 1, {same, deaf}), ElementsAre(IsEmpty()));
}

TEST(NearPeers, ThoseNobodyChoseChangeNothing) {
  const auto nodes = Zones({5});
  std::vector<NodePlace> outside;
  for (int i = 0; i < 40; ++i) outside.push_back(At(absl::StrCat("z", i % 4), absl::StrCat(i % 3), 100 + i));
  const auto all = ChooseHolders(nodes, 3, outside);
  std::vector<NodePlace> chosen;
  for (size_t i = 0; i < outside.size(); ++i) {
    for (const auto& mine : all) {
      if (std::find(mine.begin(), mine.end(), nodes.size() + i) == mine.end()) continue;
      chosen.push_back(outside[i]);
      break;
    }
  }
  const auto again = ChooseHolders(nodes, 3, chosen);
  ASSERT_LT(chosen.size(), outside.size());
  for (size_t node = 0; node < nodes.size(); ++node) {
    ASSERT_EQ(again[node].size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(chosen[again[node][i] - nodes.size()], outside[all[node][i] - nodes.size()]);
    }
  }
}

TEST(NearPeers, AllOthersAreAskedHoldersFirst) {
  const auto nodes = Zones({2, 2});
  const auto peers = NearPeers(nodes, 2, 1);
  ASSERT_EQ(peers.size(), 3u);
  EXPECT_EQ(peers[0], ChooseHolders(nodes, 1)[2][0]);
  EXPECT_EQ(NearPeers(Zones({100, 100}), 0, 1).size(), kNearPeersMax);
  // One outside that is not chosen had copies before.
  EXPECT_THAT(NearPeers(Zones({1, 1}), 0, 1, {At("z1", "", 90)}), ElementsAre(1, 2));
}

TEST(NearPeers, ALargeJobIsPlannedQuickly) {
  EXPECT_EQ(Kept(ChooseHolders(Zones({512, 512, 512, 512}), 1)), std::vector<size_t>(2048, 1));
  std::vector<NodePlace> outside;
  for (int i = 0; i < 2048; ++i) outside.push_back(At("z1", "", 10000 + i));
  const auto holders = ChooseHolders(Zones({2048}), 1, outside);
  EXPECT_EQ(std::set<std::vector<size_t>>(holders.begin(), holders.end()).size(), 2048u);
}

}  // namespace
}  // namespace gtrain::core
