// Machines outside a job that keep copies of its checkpoints.
#include "absl/strings/str_cat.h"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class HeadCopiesTest : public HeadTestWorld {
 protected:
  void SetUp() override {
    config_.near_secret = [](const JobId& job) { return "secret of " + job.value; };
    HeadTestWorld::SetUp();
  }

  // Without cpus it takes no ranks.
  AgentHello At(const std::string& node, const std::string& zone, int cpus = 0) {
    AgentHello hello;
    hello.cluster = ClusterId("c");
    hello.incarnation = Incarnation("1");
    hello.hostname = "host-" + node;
    hello.address = "10.0.0." + node;
    hello.inventory.cpus = cpus;
    hello.inventory.memory_bytes = uint64_t{8} << 30;
    hello.labels = {{"zone", zone}};
    hello.free_ports = {25000};
    hello.near_port = 7000;
    hello.near_key = "key-" + node;
    hello.takes_copies = true;
    return hello;
  }
  void Join(const std::string& node, const std::string& zone, int cpus = 0) {
    FromNode(node, At(node, zone, cpus));
  }

  // The holders in the newest grant.
  std::vector<std::string> Holders() const {
    std::vector<std::string> ids;
    const auto grants = Sent<StartGeneration>();
    if (grants.empty()) return {"no grant"};
    for (const NodePlace& place : grants.back().second.grant.holders) ids.push_back(place.node.value);
    return ids;
  }
  std::vector<std::string> Told() const {
    std::vector<std::string> ids;
    for (const auto& [node, keep] : Sent<KeepCopies>()) ids.push_back(node);
    return ids;
  }

  // All other nodes are lost.
  void OnlyTheseAreLeft(const JobId& job, const std::vector<std::string>& alive) {
    sent_.clear();
    Pass(absl::Seconds(40), alive);
    StartRanks(job);
  }
};

TEST_F(HeadCopiesTest, AJobWithinOneZoneHasHoldersInAnother) {
  Join("1", "a", 4);
  Join("2", "a");
  Join("3", "b");
  const JobId job = Submit("train 2 2 copies");
  EXPECT_THAT(Holders(), ElementsAre("3"));
  ASSERT_THAT(Told(), ElementsAre("3"));
  const KeepCopies keep = Sent<KeepCopies>()[0].second;
  EXPECT_EQ(keep.job, job);
  EXPECT_EQ(keep.near, "memory");
  EXPECT_EQ(keep.secret, "secret of " + job.value);
  EXPECT_EQ(Sent<StartGeneration>()[0].second.grant.holders[0].near_key, "key-3");
  EXPECT_EQ(Status(job).at("holders").at(0).at("hostname"), "host-3");
  StartRanks(job);
  for (int rank = 0; rank < 2; ++rank) FromNode("1", RankExited{Exit(job, 1, rank, 0)});
  ASSERT_EQ(State(job), "SUCCEEDED");
  std::vector<std::string> forgotten;
  for (const auto& [node, forget] : Sent<ForgetJob>()) forgotten.push_back(node);
  EXPECT_THAT(forgotten, ElementsAre("1", "3"));
}

TEST_F(HeadCopiesTest, ItsOwnMachinesArePreferredWhereTheyAreAsFarAway) {
  Join("1", "a", 1);
  Join("2", "b", 1);
  Join("3", "c");
  Submit("train 2 2 one-per-node copies");
  EXPECT_THAT(Holders(), IsEmpty());
  EXPECT_THAT(Told(), IsEmpty());
}

TEST_F(HeadCopiesTest, WithoutReplicasNobodyIsAsked) {
  Join("1", "a", 4);
  Join("2", "b");
  Submit("train 1 1");
  EXPECT_THAT(Holders(), IsEmpty());
}

// N13: an agent that does not know KeepCopies, one that serves no copies, one that leaves.
TEST_F(HeadCopiesTest, OneThatCannotOrShallNotIsNotAsked) {
  Join("1", "a", 4);
  AgentHello older = At("2", "b"), closed = At("3", "b");
  older.takes_copies = false;
  closed.near_port = 0;
  FromNode("2", older);
  FromNode("3", closed);
  Join("4", "b");
  EXPECT_TRUE(FromClient(ClientDrainNode{"4", absl::Hours(1), "work"}, "", Role::kAdmin).ok);
  Submit("train 1 1 copies");
  EXPECT_THAT(Holders(), IsEmpty());
}

TEST_F(HeadCopiesTest, TheMachineThatTakesALostOnesPlaceAsksTheHolderOfBefore) {
  Join("1", "a", 4);
  Join("4", "c");
  const JobId job = Submit("train 1 1 copies");
  EXPECT_THAT(Holders(), ElementsAre("4"));
  StartRanks(job);
  // This node is in the zone of the holder: another one is the next holder, and the earlier one stays for its
  // copies.
  Join("2", "c", 4);
  Join("3", "b");
  OnlyTheseAreLeft(job, {"2", "3", "4"});
  ASSERT_EQ(State(job), "RUNNING") << Status(job);
  EXPECT_EQ(Status(job).at("ranks").at(0).at("node"), "2");
  EXPECT_THAT(Holders(), ElementsAre("4", "3"));
  EXPECT_THAT(Told(), ElementsAre("4", "3"));
}

TEST_F(HeadCopiesTest, ALostHolderIsReplacedInTheNextGeneration) {
  Join("1", "a", 4);
  Join("2", "a", 4);
  Join("4", "b");
  const JobId job = Submit("train 1 1 copies");
  StartRanks(job);
  EXPECT_THAT(Holders(), ElementsAre("4"));
  const std::string home = Status(job).at("ranks").at(0).at("node"), other = home == "1" ? "2" : "1";
  Join("5", "b");
  OnlyTheseAreLeft(job, {other, "5"});
  EXPECT_THAT(Holders(), ElementsAre("5"));
}

TEST_F(HeadCopiesTest, ThoseThatKeepForFewerJobsComeFirst) {
  Join("1", "a", 4);
  Join("2", "b");
  Join("3", "b");
  std::multiset<std::string> holders;
  for (int i = 0; i < 4; ++i) {
    Submit(absl::StrCat("train-", i, " 1 1 copies"));
    for (const std::string& holder : Holders()) holders.insert(holder);
  }
  EXPECT_THAT(holders, ElementsAre("2", "2", "3", "3"));
}

TEST_F(HeadCopiesTest, AHolderThatRestartsIsToldAgainAndWhatIsOverGoes) {
  Join("1", "a", 4);
  Join("2", "b");
  const JobId job = Submit("train 1 1 copies");
  for (int life = 0; life < 2; ++life) {
    if (life == 1) Boot();  // the head as well
    sent_.clear();
    AgentHello again = At("2", "b");
    again.copies_of = {job, JobId("of-long-ago")};
    FromNode("2", again);
    EXPECT_THAT(Told(), ElementsAre("2"));
    ASSERT_EQ(Sent<ForgetJob>().size(), 1u);
    EXPECT_EQ(Sent<ForgetJob>()[0].second.job, JobId("of-long-ago"));
  }
  EXPECT_TRUE(FromClient(ClientStop{job, true, ""}).ok);
  Join("1", "a", 4);
  ASSERT_EQ(State(job), "CANCELLED");
  sent_.clear();
  AgentHello again = At("2", "b");
  again.copies_of = {job};
  FromNode("2", again);
  EXPECT_THAT(Told(), IsEmpty());
  ASSERT_EQ(Sent<ForgetJob>().size(), 1u);
  EXPECT_EQ(Sent<ForgetJob>()[0].first, "2");
}

}  // namespace
}  // namespace gtrain::core
