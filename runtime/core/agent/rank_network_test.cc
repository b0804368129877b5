// Tests which NICs and interfaces ranks are told to use, on machines that are made up.
#include "runtime/core/agent/rank_network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Env = std::map<std::string, std::string>;

// Behind the switch of this root complex.
std::string Way(const std::string& bus, int slot) {
  return absl::StrCat("pci0000:", bus, "/0000:", bus, ":01.0/0000:", bus, ":02.0/0000:", bus, ":0", slot,
                      ".0");
}

NicInfo InfinibandPort(const std::string& name, const std::string& way, int numa) {
  return {.name = name, .mbit_s = 400'000, .numa = numa, .pci_path = way};
}

NicInfo RocePort(const std::string& name, const std::string& interface, uint64_t mbit_s = 100'000) {
  return {.name = name, .kind = NicKind::kRoce, .interfaces = {interface}, .mbit_s = mbit_s};
}

// Eight GPUs, each behind a switch with a port, four on a NUMA node; a storage port of Ethernet on the first
// switch, a slower one of InfiniBand, and eight CPUs on each node.
Inventory Dgx() {
  Inventory machine;
  for (int i = 0; i < 8; ++i) {
    const std::string bus = absl::StrCat(i + 1, "0");
    machine.gpus.push_back({absl::StrCat("GPU-", i), "H100", 0, i / 4, Way(bus, 1)});
    machine.network.nics.push_back(InfinibandPort(absl::StrCat("mlx5_", i, ":1"), Way(bus, 2), i / 4));
  }
  NicInfo storage = RocePort("mlx5_8:1", "ens1", 400'000);
  storage.pci_path = Way("10", 3);
  storage.numa = 0;
  machine.network.nics.push_back(storage);
  NicInfo slow = InfinibandPort("mlx5_9:1", "pci0000:a0/0000:a0:01.0", 1);
  slow.mbit_s = 200'000;
  machine.network.nics.push_back(slow);
  machine.network.interfaces = {{"ens1", {"10.9.0.1"}}, {"eno1", {"10.0.0.1"}}};
  machine.cpus = 16;
  for (int i = 0; i < 16; ++i) machine.cpu_infos.push_back({i, i / 8});
  return machine;
}

// Places of one node, in the order of their local ranks.
std::vector<RankPlace> Places(const std::vector<std::vector<int>>& gpus,
                              const std::vector<std::vector<int>>& cpus = {}) {
  std::vector<RankPlace> places;
  for (size_t i = 0; i < std::max(gpus.size(), cpus.size()); ++i) {
    RankPlace place{.rank = static_cast<int>(i), .local_rank = static_cast<int>(i), .node = kMe};
    if (i < gpus.size()) place.gpus = gpus[i];
    if (i < cpus.size()) place.cpus = cpus[i];
    places.push_back(place);
  }
  return places;
}

// What each rank has, with commas between its ports.
std::vector<std::string> Chosen(const Inventory& machine, const std::vector<RankPlace>& places,
                                const std::string& address = "10.0.0.1") {
  std::vector<const RankPlace*> all;
  for (const RankPlace& place : places) all.push_back(&place);
  std::vector<std::string> texts;
  for (const auto& nics : NicsOfRanks(machine, RailsOf(machine, machine.network, address), all))
    texts.push_back(absl::StrJoin(nics, ","));
  return texts;
}

std::vector<std::string> RailNames(const Inventory& machine, const std::string& address = "10.0.0.1") {
  std::vector<std::string> names;
  for (const NicInfo* nic : RailsOf(machine, machine.network, address)) names.push_back(nic->name);
  return names;
}

Env EnvOf(const Inventory& machine, const std::vector<RankPlace>& places, int rank, Env env = {},
          const Env& own = {}) {
  GenerationGrant grant;
  grant.world_size = static_cast<int>(places.size());
  grant.ranks = places;
  grant.nodes = {{kMe, "10.0.0.1", "here"}};
  AddNetwork(machine, machine.network, grant, rank, own, &env);
  return env;
}

TEST(RankNetworkTest, OnADgxEachRankHasThePortOfItsGpu) {
  EXPECT_THAT(Chosen(Dgx(), Places({{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}})),
              ElementsAre("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1", "mlx5_4:1", "mlx5_5:1", "mlx5_6:1",
                          "mlx5_7:1"));
  EXPECT_THAT(Chosen(Dgx(), Places({{5}, {1}})), ElementsAre("mlx5_5:1", "mlx5_1:1"))
      << "the GPU counts, not the number of the rank";
  EXPECT_THAT(Chosen(Dgx(), Places({{0, 1}, {6, 7}})), ElementsAre("mlx5_0:1,mlx5_1:1", "mlx5_6:1,mlx5_7:1"));
}

// The storage port is behind the same switch as the first GPU, and just as fast.
TEST(RankNetworkTest, StorageAndSlowPortsAreNoRails) {
  EXPECT_THAT(RailNames(Dgx()), ElementsAre("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1", "mlx5_4:1",
                                            "mlx5_5:1", "mlx5_6:1", "mlx5_7:1"));
}

TEST(RankNetworkTest, TheGpuOfAPortThatIsDownTakesOneOfItsNumaNode) {
  Inventory machine = Dgx();
  machine.network.nics[6].unusable = "its port is DOWN";
  EXPECT_THAT(Chosen(machine, Places({{4}, {5}, {6}, {7}})),
              ElementsAre("mlx5_4:1", "mlx5_5:1", "mlx5_4:1,mlx5_5:1,mlx5_7:1", "mlx5_7:1"));
  // Two of them share out what is left.
  machine.network.nics[7].unusable = "its port is DOWN";
  EXPECT_THAT(Chosen(machine, Places({{6}, {7}})), ElementsAre("mlx5_4:1", "mlx5_5:1"));
}

// Of a switch with two GPUs and one port, of a root complex, and of the other socket: the nearest first.
TEST(RankNetworkTest, ASwitchIsNearerThanARootComplexAndThatThanANumaNode) {
  Inventory machine;
  const std::string gpu = Way("10", 1);
  machine.gpus = {{"GPU-0", "A100", 0, 0, gpu}};
  const NicInfo elsewhere = InfinibandPort("far:1", Way("40", 2), 1),
                numa = InfinibandPort("numa:1", Way("20", 2), 0),
                complex = InfinibandPort("complex:1", "pci0000:10/0000:10:05.0/0000:1f:00.0", 0),
                same = InfinibandPort("switch:1", Way("10", 2), 0);
  machine.network.nics = {elsewhere, numa, complex, same};
  for (const char* nearest : {"switch:1", "complex:1", "numa:1", "far:1"}) {
    EXPECT_THAT(Chosen(machine, Places({{0}})), ElementsAre(nearest));
    machine.network.nics.pop_back();
  }
  EXPECT_THAT(Chosen(machine, Places({{0}})), ElementsAre(""));
}

// A virtual machine has all devices on one root complex, of which their NUMA nodes say more.
TEST(RankNetworkTest, AnotherNumaNodeIsFarOnTheSameRootComplex) {
  Inventory machine;
  machine.gpus = {{"GPU-0", "A100", 0, 1, "pci0000:00/0000:00:05.0"}};
  machine.network.nics = {InfinibandPort("a:1", "pci0000:00/0000:00:06.0", 0),
                          InfinibandPort("b:1", "pci0000:00/0000:00:07.0", 1)};
  EXPECT_THAT(Chosen(machine, Places({{0}})), ElementsAre("b:1"));
}

TEST(RankNetworkTest, PortsWithoutANumaNodeAreSharedOutInTurn) {
  Inventory machine;
  for (int i = 0; i < 4; ++i) machine.gpus.push_back({absl::StrCat("GPU-", i), "any", 0, i / 2, ""});
  machine.network.nics = {InfinibandPort("a:1", "pci0000:00/0000:00:06.0", -1),
                          InfinibandPort("b:1", "pci0000:00/0000:00:07.0", -1)};
  EXPECT_THAT(Chosen(machine, Places({{0}, {1}, {2}, {3}})), ElementsAre("a:1", "b:1", "a:1", "b:1"));
  machine.network.nics[1].numa = 1;  // one port says it: those of that node take it
  EXPECT_THAT(Chosen(machine, Places({{2}, {3}})), ElementsAre("b:1", "b:1"));
  // Nothing is known of the GPU either: then of the CPUs.
  machine.gpus[0].numa = -1;
  machine.cpu_infos = {{0, 1}};
  EXPECT_THAT(Chosen(machine, Places({{0}}, {{0}})), ElementsAre("b:1"));
}

TEST(RankNetworkTest, RanksOfCpusTakeThePortsOfTheirNumaNode) {
  EXPECT_THAT(Chosen(Dgx(), Places({}, {{0, 1}, {8, 9}})),
              ElementsAre("mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1", "mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1"));
  EXPECT_THAT(Chosen(Dgx(), Places({}, {{0}, {1}, {2}})),
              ElementsAre("mlx5_0:1", "mlx5_1:1", "mlx5_2:1,mlx5_3:1"));
  const std::vector<std::string> unbound = Chosen(Dgx(), Places({{}, {}, {}, {}, {}, {}, {}, {}, {}}));
  EXPECT_EQ(unbound[1], "mlx5_1:1");
  EXPECT_EQ(unbound[8], "mlx5_0:1") << "in turn";
  EXPECT_THAT(Chosen(Dgx(), Places({}, {{7, 8}})), ElementsAre("mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,"
                                                               "mlx5_5:1,mlx5_6:1,mlx5_7:1"))
      << "its CPUs are on both nodes";
}

TEST(RankNetworkTest, RoceOfAMachineWithoutGpusIsThatOfTheDataPlane) {
  Inventory machine;
  machine.network = {{RocePort("mlx5_0:1", "eth0"), RocePort("mlx5_1:1", "eth1")},
                     {{"eth0", {"10.0.0.1"}}, {"eth1", {"192.168.0.1"}}}};
  EXPECT_THAT(RailNames(machine), ElementsAre("mlx5_0:1"));
  EXPECT_THAT(RailNames(machine, "172.16.0.1"), ElementsAre("mlx5_0:1", "mlx5_1:1")) << "it is on neither";
  machine.gpus = {{"GPU-0", "any", 0, -1, ""}};
  EXPECT_THAT(RailNames(machine), ElementsAre("mlx5_0:1", "mlx5_1:1"));
  machine.network.nics.push_back(RocePort("bnxt_re0:1", "eth2", 25'000));
  EXPECT_THAT(RailNames(machine), ElementsAre("mlx5_0:1", "mlx5_1:1")) << "that one is for people";
}

TEST(RankNetworkTest, TheEnvironmentNamesPortsAndInterface) {
  const auto places = Places({{0}, {1}});
  const std::string all = "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1";
  EXPECT_EQ(EnvOf(Dgx(), places, 1), (Env{{"NCCL_IB_HCA", all},
                                          {"UCX_NET_DEVICES", "mlx5_1:1"},
                                          {"NCCL_SOCKET_IFNAME", "=eno1"},
                                          {"GLOO_SOCKET_IFNAME", "eno1"},
                                          {"TP_SOCKET_IFNAME", "eno1"}}));
  EXPECT_EQ(EnvOf(Dgx(), places, 0)["NCCL_IB_HCA"], all) << "NCCL wants the same on all ranks of a machine";
}

TEST(RankNetworkTest, OnEfaOnlyTheInterfaceIsNamed) {
  Inventory machine = Dgx();
  machine.network.nics[3] = {.name = "rdmap16s27:1", .kind = NicKind::kEfa, .mbit_s = 100'000};
  EXPECT_EQ(
      EnvOf(machine, Places({{0}}), 0),
      (Env{{"NCCL_SOCKET_IFNAME", "=eno1"}, {"GLOO_SOCKET_IFNAME", "eno1"}, {"TP_SOCKET_IFNAME", "eno1"}}));
  machine.network.nics[3].unusable = "its port is DOWN";
  EXPECT_FALSE(EnvOf(machine, Places({{0}}), 0).contains("NCCL_IB_HCA"));
}

TEST(RankNetworkTest, WithoutRdmaOnlyTheInterfaceIsNamed) {
  Inventory machine;
  machine.network.interfaces = {{"eth0", {"10.0.0.1", "fd00::1"}}, {"eth1", {"10.1.0.1"}}};
  EXPECT_EQ(
      EnvOf(machine, Places({{}}), 0),
      (Env{{"NCCL_SOCKET_IFNAME", "=eth0"}, {"GLOO_SOCKET_IFNAME", "eth0"}, {"TP_SOCKET_IFNAME", "eth0"}}));
  machine.network.interfaces[1].addresses.push_back("10.0.0.1");
  EXPECT_THAT(EnvOf(machine, Places({{}}), 0), IsEmpty()) << "the address is of two interfaces";
  machine.network.interfaces.clear();
  EXPECT_THAT(EnvOf(machine, Places({{}}), 0), IsEmpty());
}

TEST(RankNetworkTest, WhatTheUserOrTheAdministratorSaysStays) {
  const auto places = Places({{0}});
  const Env said = {{"NCCL_IB_HCA", "mlx5_7"},
                    {"UCX_NET_DEVICES", ""},
                    {"NCCL_SOCKET_IFNAME", "^docker"},
                    {"GLOO_SOCKET_IFNAME", "ib0"},
                    {"TP_SOCKET_IFNAME", "ib1"}};
  EXPECT_EQ(EnvOf(Dgx(), places, 0, said), said);
  EXPECT_EQ(EnvOf(Dgx(), places, 0, {}, said), said) << "of the agent's own environment";
  Env both = said;
  both["NCCL_IB_HCA"] = "mlx5_5";
  EXPECT_EQ(EnvOf(Dgx(), places, 0, {{"NCCL_IB_HCA", "mlx5_5"}}, said), both) << "the user's comes first";
  EXPECT_FALSE(EnvOf(Dgx(), places, 0, {}, {{"PATH", "/bin"}}).contains("PATH"));
  // Of tcp alone UCX would find no device left.
  EXPECT_FALSE(EnvOf(Dgx(), places, 0, {{"UCX_TLS", "tcp"}}).contains("UCX_NET_DEVICES"));
  EXPECT_EQ(EnvOf(Dgx(), places, 0, {{"UCX_TLS", "tcp"}}, said)["UCX_NET_DEVICES"], "");
}

// ---------------------------------------------------------------- the agent

class AgentNetworkTest : public AgentCoreTest {
 protected:
  // A generation whose grant says where this node is reached.
  GenerationGrant GrantHere(uint64_t generation, int ranks) {
    GenerationGrant grant = Grant(generation, ranks, ranks);
    for (NodePlace& node : grant.nodes) {
      if (node.node == kMe) node.address = "10.0.0.1";
    }
    return grant;
  }
};

// A port that went down since the agent started is not in the facts of the grant.
TEST_F(AgentNetworkTest, ARankIsStartedWithTheNetworkOfThatMomentAndSaysWhatItGot) {
  Welcome();
  facts_.network = Dgx().network;
  Step(FromHead{StartGeneration{{5}, GrantHere(1, 2)}});
  const auto starts = Commands<keeper::StartRank>();
  ASSERT_EQ(starts.size(), 2u);
  const Env env(starts[0].env.begin(), starts[0].env.end());
  EXPECT_EQ(env.at("UCX_NET_DEVICES"), "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1");
  Step(FromKeeper{kJob, keeper::Started{1, 1, 101, 7}});
  ASSERT_EQ(Sent<RanksStarted>().size(), 1u);
  EXPECT_EQ(Sent<RanksStarted>()[0].ranks.at(0).nics, "mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1");
}

TEST_F(AgentNetworkTest, WithoutRdmaARankSaysItsInterface) {
  Welcome();
  facts_.network = Network{{}, {{"eth0", {"10.0.0.1"}}}};
  Step(FromHead{StartGeneration{{5}, GrantHere(1, 1)}});
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7}});
  EXPECT_EQ(Sent<RanksStarted>().at(0).ranks.at(0).nics, "eth0");
}

// The next agent reads it from the keeper's note: ports may have changed meanwhile.
TEST_F(AgentNetworkTest, ARestartedAgentKnowsWhatRanksWereStartedWith) {
  Welcome();
  facts_.network = Dgx().network;
  Step(FromHead{StartGeneration{{5}, GrantHere(1, 2)}});
  const std::string note = Commands<keeper::BeginGeneration>().at(0).note;
  core_ = AgentCore(PlainAgent());
  facts_.network.reset();
  keeper::GenerationHeld held;
  held.generation = 1;
  held.note = note;
  held.ranks = {{0, 100, 5, true, false}, {1, 101, 5, true, false}};
  keeper::State state;
  state.job = kJob.value;
  state.generations = {held};
  Step(FromKeeper{kJob, state});
  Step(HeadUp{"10.0.0.1"});
  const auto hello = Sent<AgentHello>();
  ASSERT_EQ(hello.size(), 1u);
  EXPECT_EQ(hello[0].held.at(0).live.at(1).nics, "mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1");
}

// The environment of a process does not change when it goes on in another generation.
TEST_F(AgentNetworkTest, AProcessThatGoesOnKeepsItsNics) {
  Welcome();
  facts_.network = Dgx().network;
  Step(FromHead{StartGeneration{{5}, GrantHere(1, 1)}});
  const std::string all = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1";
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7}});
  EXPECT_EQ(Sent<RanksStarted>().at(0).ranks.at(0).nics, all);
  Revoke revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(3), "another size"};
  revoke.keep = true;
  Step(FromHead{revoke});
  Step(FromKeeper{kJob, keeper::Gone{1, true, "", {{1, 0}}, {}}});
  GenerationGrant next = GrantHere(2, 2);
  next.ranks[1].process = {{1}, 0};
  facts_.network->nics[0].unusable = "its port is DOWN";
  Step(FromHead{StartGeneration{{5}, next}});
  Step(FromKeeper{kJob, keeper::Started{2, 1, 100, 7}});
  EXPECT_EQ(Sent<RanksStarted>().at(0).ranks.at(0).nics, all);
  Step(FromKeeper{kJob, keeper::Started{2, 0, 102, 9}});
  EXPECT_EQ(Sent<RanksStarted>().at(0).ranks.at(0).nics, "mlx5_1:1,mlx5_2:1,mlx5_3:1")
      << "half of what is left";
}

}  // namespace
}  // namespace gtrain::core
