#include "elastic/plan/mesh_place.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace gtrain::elastic {
namespace {

const std::vector<MeshAxis> kMesh = {{"dp", 3}, {"pp", 2}, {"fsdp", 2}, {"tp", 2}};

TEST(MeshPlace, WithoutAMeshAllAreCopies) {
  EXPECT_EQ(PlaceIn({{"dp", 4}}, 2), (MeshPlace{0, 1, 2, 4, 2, 4, true}));
}

TEST(MeshPlace, CopiesShareACellAndNothingElse) {
  std::map<int, std::set<int>> copies, by_group;
  for (int rank = 0; rank < 24; ++rank) {
    const MeshPlace place = PlaceIn(kMesh, rank);
    EXPECT_EQ(place.cells, 8);
    EXPECT_EQ(place.copies, 3);
    EXPECT_EQ(place.cell, rank % 8) << "dp is the first axis";
    copies[place.cell].insert(rank);
    by_group[GroupAlong(kMesh, rank, "dp")].insert(rank);
  }
  EXPECT_EQ(copies.size(), 8u);
  EXPECT_EQ(copies, by_group);
}

TEST(MeshPlace, RanksThatTrainTheSameSamplesSpeakOnce) {
  std::map<int, int> speakers, members;
  for (int rank = 0; rank < 24; ++rank) {
    const MeshPlace place = PlaceIn(kMesh, rank);
    EXPECT_EQ(place.shares, 6);
    ++members[place.share];
    speakers[place.share] += place.speaks ? 1 : 0;
  }
  EXPECT_EQ(members.size(), 6u);
  for (const auto& [share, ranks] : members) EXPECT_EQ(ranks, 4);
  for (const auto& [share, ranks] : speakers) EXPECT_EQ(ranks, 1);
}

TEST(MeshPlace, AGroupDiffersAlongItsAxisAlone) {
  for (const MeshAxis& axis : kMesh) {
    std::map<int, std::set<int>> groups;
    for (int rank = 0; rank < 24; ++rank) groups[GroupAlong(kMesh, rank, axis.name)].insert(rank);
    for (const auto& [group, ranks] : groups) EXPECT_EQ(std::ssize(ranks), axis.size) << axis.name;
  }
  EXPECT_EQ(GroupAlong(kMesh, 6, "tp"), GroupAlong(kMesh, 7, "tp"));
  EXPECT_NE(GroupAlong(kMesh, 7, "tp"), GroupAlong(kMesh, 8, "tp"));
  std::set<int> alone;
  for (int rank = 0; rank < 24; ++rank) alone.insert(GroupAlong(kMesh, rank, "cp"));
  EXPECT_EQ(alone.size(), 24u);
}

// Where dp is not the first axis, which only jobs that restart may have.
TEST(MeshPlace, DataParallelMayBeTheFastestAxis) {
  const std::vector<MeshAxis> mesh = {{"tp", 2}, {"dp", 2}};
  EXPECT_EQ(PlaceIn(mesh, 1), (MeshPlace{0, 2, 1, 2, 1, 2, false}));
  EXPECT_EQ(PlaceIn(mesh, 2), (MeshPlace{1, 2, 0, 2, 0, 2, true}));
}

}  // namespace
}  // namespace gtrain::elastic
