// Tests where copies of checkpoints lie, who is told of them, and when they go.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::IsEmpty;

TEST_F(AgentCoreTest, CopiesOfCheckpointsLieWhereTheJobSaysAndGoWithIt) {
  const auto near_of = [&](uint64_t generation, const std::string& near) {
    spec_.checkpoint = {.uri = "/ckpt", .near = near};
    Step(FromHead{Revoke{{5}, kJob, {generation - 1}, EndMode::kReform, absl::Seconds(1), "next"}});
    StartIt(generation, 1, 1);
    return EnvOf(Commands<keeper::StartRank>()[0])["GTRAIN_CHECKPOINT_NEAR"];
  };
  const auto dropped = [&](const JobId& job) {
    Step(FromHead{ForgetJob{{5}, job}});
    std::string folder;
    for (const AgentEffect& effect : last_.effects) {
      if (const auto* drop = std::get_if<DropCopies>(&effect)) folder = drop->folder;
    }
    return folder;
  };
  Welcome();
  EXPECT_EQ(near_of(1, ""), "");
  EXPECT_EQ(near_of(2, "memory"), "1000 /dev/shm/gtrain-me");
  EXPECT_EQ(near_of(3, "/scratch"), absl::StrCat("1000 /scratch/", kMe.value));
  EXPECT_EQ(dropped(kJob), absl::StrCat("/scratch/", kMe.value));
  EXPECT_EQ(dropped(kJob), "");
}

TEST_F(AgentCoreTest, RanksLearnWhoHasCopiesAndTheAgentSharesItsOwn) {
  spec_.checkpoint = {.uri = "/ckpt", .near = "memory", .replicas = 1};
  Welcome();
  GenerationGrant grant = Grant(1, 1, 1);
  grant.nodes.push_back({NodeId("b"), "10.0.0.2", "b c", "", "", 7071, "key-b"});
  grant.nodes.push_back({NodeId("c"), "fd00::3", "c", "z2", "", 7072, "key-c"});
  grant.near_secret = "5ec2e7";
  Step(FromHead{StartGeneration{{5}, grant}});
  auto env = EnvOf(Commands<keeper::StartRank>()[0]);
  EXPECT_EQ(env["GTRAIN_CHECKPOINT_PEERS"], "1 c [fd00::3]:7072 key-c,b_c 10.0.0.2:7071 key-b");
  EXPECT_EQ(env["GTRAIN_JOB_SECRET"], "5ec2e7");
  EXPECT_EQ(env["GTRAIN_CHECKPOINT_SECRET"], "5ec2e7");
  bool shared = false;
  for (const AgentEffect& effect : last_.effects) {
    const auto* share = std::get_if<ShareCopies>(&effect);
    shared |= share != nullptr && share->job == kJob && share->folder == "/dev/shm/gtrain-me" &&
              share->secret == "5ec2e7";
  }
  EXPECT_TRUE(shared);
}

TEST_F(AgentCoreTest, RanksLearnWhoHasCopiesOutsideTheJob) {
  spec_.checkpoint = {.uri = "/ckpt", .near = "memory", .replicas = 1};
  Welcome();
  GenerationGrant grant = Grant(1, 1, 1);
  grant.nodes[0].zone = "z1";
  grant.holders.push_back({NodeId("b"), "10.0.0.2", "b", "z1", "", 7071, "key-b"});  // had some before
  grant.holders.push_back({NodeId("c"), "10.0.0.3", "c", "z2", "", 7072, "key-c"});
  grant.near_secret = "5ec2e7";
  Step(FromHead{StartGeneration{{5}, grant}});
  EXPECT_EQ(EnvOf(Commands<keeper::StartRank>()[0])["GTRAIN_CHECKPOINT_PEERS"],
            "1 c 10.0.0.3:7072 key-c,b 10.0.0.2:7071 key-b");
}

TEST_F(AgentCoreTest, CopiesAreKeptForAJobWithoutRanksHereUntilItIsOver) {
  AgentConfig config = Config();
  config.near_port = 7000;
  config.near_left = {JobId("of-an-earlier-agent")};
  core_ = AgentCore(std::move(config));
  const auto hello = [&] {
    Step(HeadUp{"10.0.0.1"});
    return Sent<AgentHello>().at(0);
  };
  EXPECT_TRUE(hello().takes_copies);
  EXPECT_EQ(hello().copies_of, std::vector<JobId>{JobId("of-an-earlier-agent")});
  Welcome();
  Step(FromHead{ForgetJob{{5}, JobId("of-an-earlier-agent")}});
  EXPECT_EQ(std::get<DropCopies>(last_.effects.at(0)).folder, "/dev/shm/gtrain-me");
  for (const auto& [near, folder] : std::map<std::string, std::string>{
           {"memory", "/dev/shm/gtrain-me"}, {"/scratch", absl::StrCat("/scratch/", kMe.value)}}) {
    Step(FromHead{KeepCopies{{5}, kJob, near, "5ec2e7"}});
    ASSERT_EQ(last_.effects.size(), 1u);
    const auto& shared = std::get<ShareCopies>(last_.effects[0]);
    EXPECT_EQ(shared.folder, folder);
    EXPECT_EQ(shared.secret, "5ec2e7");
    EXPECT_EQ(hello().copies_of, std::vector<JobId>{kJob});
    Welcome();
    Step(FromHead{ForgetJob{{5}, kJob}});
    ASSERT_EQ(last_.effects.size(), 1u);
    const auto& dropped = std::get<DropCopies>(last_.effects[0]);
    EXPECT_EQ(dropped.job, kJob);
    EXPECT_EQ(dropped.folder, folder);
    EXPECT_THAT(hello().copies_of, IsEmpty());
    Welcome();
  }
  EXPECT_THAT(Commands<keeper::BeginGeneration>(), IsEmpty());
}

// A head of before, or one that was not asked for any (N13).
TEST_F(AgentCoreTest, WithoutASecretOrPeersNothingIsShared_N13) {
  spec_.checkpoint = {.uri = "/ckpt", .near = "memory", .replicas = 1};
  Welcome();
  StartIt(1, 1, 1);
  const auto env = EnvOf(Commands<keeper::StartRank>()[0]);
  EXPECT_TRUE(env.contains("GTRAIN_CHECKPOINT_NEAR"));
  EXPECT_FALSE(env.contains("GTRAIN_CHECKPOINT_PEERS") || env.contains("GTRAIN_JOB_SECRET"));
  for (const AgentEffect& effect : last_.effects) EXPECT_FALSE(std::holds_alternative<ShareCopies>(effect));
}

}  // namespace
}  // namespace gtrain::core
