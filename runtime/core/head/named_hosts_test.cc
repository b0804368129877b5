// Jobs that name the hosts of their ranks, and ranks that share a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class NamedHostsTest : public HeadTestWorld {
 protected:
  std::vector<std::string> NodesOf(const JobId& job) {
    std::vector<std::string> nodes;
    const JobRecord record = Stored(job);
    for (const RankPlace& place : record.grant->ranks) nodes.push_back(place.node.value);
    return nodes;
  }
  nlohmann::json Why(const JobId& job) { return nlohmann::json::parse(FromClient(ClientWhy{job}).json); }
};

TEST_F(NamedHostsTest, EachRankGoesWhereTheJobSays) {
  for (const char* node : {"1", "2", "3"}) Hello(node);
  const JobId job = Submit("train 4 4 on=host-3,host-1,host-3,2");
  EXPECT_THAT(NodesOf(job), ElementsAre("3", "1", "3", "2")) << "the last one is an id";
  EXPECT_EQ(Why(job).at("placement"), "4 ranks by where.ranks: 1 on host-1, 1 on host-2, 2 on host-3");
}

TEST_F(NamedHostsTest, WithoutTheHostTheJobWaitsAndSaysForWhom) {
  Hello("1");
  Hello("2", 1);
  const JobId job = Submit("train 2 2 on=host-1,host-9");
  nlohmann::json why = Why(job);
  EXPECT_EQ(why.at("state"), "WAITING");
  ASSERT_EQ(why.at("blocked_by").size(), 1u) << why.dump();
  EXPECT_EQ(why.at("blocked_by")[0].at("constraint"),
            "rank 1 goes on host-9 by where.ranks, and no node that is up is called so");
  EXPECT_EQ(why.at("blocked_by")[0].at("unblocked_by"), "a node of that name joins, or another where.ranks");
  Hello("9");
  EXPECT_THAT(NodesOf(job), ElementsAre("1", "9"));

  const JobId full = Submit("full 3 3 on=host-2,host-1,host-2");
  EXPECT_THAT(Status(full).at("reason").get<std::string>(),
              HasSubstr("ranks 0,2 go on host-2 by where.ranks, and that takes 1 (cpus: 1 of 1 free)"));
}

// All of its ranks wait for the machine of one of them, whatever else is free: that is what was asked for.
TEST_F(NamedHostsTest, AfterALossTheRankWaitsForItsHost) {
  for (const char* node : {"1", "2", "3"}) Hello(node);
  const JobId job = Submit("train 2 2 on=host-1,host-2");
  StartRanks(job);
  Pass(absl::Seconds(11), {"1", "3"});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(5), {"1", "3"});
  EXPECT_EQ(Status(job).at("state"), "WAITING");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(), HasSubstr("rank 1 goes on host-2 by where.ranks"));
  Hello("2", 4, {}, "another life");
  Pass(absl::Seconds(1), {"1", "2", "3"});
  EXPECT_THAT(NodesOf(job), ElementsAre("1", "2"));
  EXPECT_EQ(Stored(job).generation.value, 2u);
}

TEST_F(NamedHostsTest, WhoWaitsForRank0sHostSaysSo) {
  Hello("1");
  Hello("2", 0);
  const JobId job = Submit("train 1 1 rank0=host-2");
  const nlohmann::json blocked = Why(job).at("blocked_by");
  EXPECT_EQ(blocked[0].at("node"), "host-2");
  EXPECT_EQ(blocked[0].at("constraint"), "cpus: 0 of 0 free");
  for (const nlohmann::json& one : blocked)
    EXPECT_EQ(one.at("unblocked_by"), "room on host-2, or another where.rank0");
}

class SharedGpuTest : public NamedHostsTest {
 protected:
  std::vector<std::vector<int>> GpusOf(const JobId& job) {
    std::vector<std::vector<int>> gpus;
    const JobRecord record = Stored(job);
    for (const RankPlace& place : record.grant->ranks) gpus.push_back(place.gpus);
    return gpus;
  }
};

TEST_F(SharedGpuTest, TwoHalvesAreOneGpuAlsoOfTwoJobs) {
  gpus_hello_ = 2;
  Hello("1", 16);
  const JobId one = Submit("one 1 1 half-gpu");
  const JobId two = Submit("two 2 2 half-gpu");
  EXPECT_THAT(GpusOf(one), ElementsAre(ElementsAre(0)));
  EXPECT_THAT(GpusOf(two), ElementsAre(ElementsAre(0), ElementsAre(1))) << "the fullest first";
  const nlohmann::json node = nlohmann::json::parse(FromClient(ClientNodes{}).json).at("nodes")[0];
  EXPECT_EQ(node.at("gpus_free").size(), 0u);
  EXPECT_EQ(node.at("gpu_shares").dump(), R"([{"gpu":0,"taken":1000},{"gpu":1,"taken":500}])");
  EXPECT_EQ(Status(two).at("ranks")[1].at("gpus").dump(), "[1]");
  const JobId whole = Submit("whole 1 1 whole-gpu");
  EXPECT_EQ(Status(whole).at("state"), "QUEUED") << "half a GPU is none";
  EXPECT_THAT(Status(whole).at("reason").get<std::string>(), HasSubstr("gpus: 0 of 2 free"));
  const JobId last = Submit("last 1 1 half-gpu");
  EXPECT_THAT(GpusOf(last), ElementsAre(ElementsAre(1)));
  EXPECT_EQ(Status(Submit("full 1 1 half-gpu")).at("state"), "QUEUED");
}

}  // namespace
}  // namespace gtrain::core
