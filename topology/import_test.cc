#include "topology/import.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "base/rng.h"

namespace gtrain::topology {
namespace {

using ::testing::HasSubstr;

std::string Shown(const absl::StatusOr<Topology>& topology) {
  return topology.ok() ? Describe(*topology) : std::string(topology.status().message());
}

TEST(ImportTest, ATreeOfSlurm) {
  const std::string text =
      Shown(ImportSlurm("# comment\n"
                        "SwitchName=s0 Nodes=tux[0-3] LinkSpeed=900\n"
                        "switchname=s1 \\\n  Nodes=tux[4-7]\n"
                        "SwitchName=s4 Switches=s[0-1]\n",
                        "topology.conf", ShapeOfOneSlot()));
  EXPECT_THAT(text, HasSubstr("8 machines, 3 switches, 10 links"));
  EXPECT_THAT(text, HasSubstr("switch s1\n  from tux[4-7]: unknown GB/s each\n  up to s4"));
}

TEST(ImportTest, BlocksOfSlurmAreNvlinkDomains) {
  const absl::StatusOr<Topology> topology = ImportSlurm(
      "BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18\n", "t", ShapeOfOneSlot());
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->switches[1].kind, SwitchKind::kNvlink);
  EXPECT_EQ(topology->machines.size(), 36);
}

TEST(ImportTest, WrongLinesOfSlurmAreNamed) {
  EXPECT_EQ(
      Shown(ImportSlurm("SwitchName=a Nodes=x\nSwitchName=s0 Nodes=tux[0-\n", "t.conf", ShapeOfOneSlot())),
      "t.conf:2: hostlist \"tux[0-\": a [ without a ]");
  EXPECT_EQ(Shown(ImportSlurm("hello\n", "t.conf", ShapeOfOneSlot())),
            "t.conf:1: \"hello\" is not KEY=VALUE");
  EXPECT_EQ(Shown(ImportSlurm("SwitchName=a Nodes=x\nSwitchNme=b Nodes=y\n", "t.conf", ShapeOfOneSlot())),
            "t.conf:2: Nodes= or Switches= without SwitchName= or BlockName=");
  EXPECT_EQ(
      Shown(ImportSlurm("SwitchName=a Nodes=x\nSwitchName=s Switches=a,b\n", "t.conf", ShapeOfOneSlot())),
      "t.conf: b is named in Switches= and has no SwitchName= line");
  EXPECT_EQ(Shown(ImportSlurm("SwitchName=s0\n", "t.conf", ShapeOfOneSlot())),
            "t.conf:1: s0 has neither Nodes= nor Switches=");
  EXPECT_THAT(Shown(ImportSlurm("", "t.conf", ShapeOfOneSlot())), HasSubstr("no SwitchName="));
}

constexpr char kIb[] = R"(#
# Topology file: generated on Thu Jan  1 00:00:00 2026
#
vendid=0x2c9
switchguid=0xb8cef60300000001(b8cef60300000001)
Switch	40 "S-b8cef60300000001"		# "MF0;leaf0:MQM8700/U1" enhanced port 0 lid 1 lmc 0
[1]	"H-0c42a10300000001"[1](c42a10300000001) 		# "node01 mlx5_0" lid 7 4xHDR
[2]	"H-0c42a10300000003"[1](c42a10300000003) 		# "node02 mlx5_0" lid 8 4xHDR
[33]	"S-b8cef60300000002"[1]		# "MF0;spine0:MQM8700/U1" lid 2 4xHDR
[34]	"S-b8cef60300000002"[2]		# "MF0;spine0:MQM8700/U1" lid 2 4xHDR

switchguid=0xb8cef60300000002(b8cef60300000002)
Switch	40 "S-b8cef60300000002"		# "MF0;spine0:MQM8700/U1" enhanced port 0 lid 2 lmc 0
[1]	"S-b8cef60300000001"[33]		# "MF0;leaf0:MQM8700/U1" lid 1 4xHDR
[2]	"S-b8cef60300000001"[34]		# "MF0;leaf0:MQM8700/U1" lid 1 4xHDR

caguid=0xc42a10300000001
Ca	1 "H-0c42a10300000001"		# "node01 mlx5_0"
[1](c42a10300000001) 	"S-b8cef60300000001"[1]		# lid 7 lmc 0 "MF0;leaf0:MQM8700/U1" lid 1 4xHDR
)";

TEST(ImportTest, AFabricOfIbnetdiscover) {
  const std::string text = Shown(ImportIbnetdiscover(kIb, "ib.txt", ShapeOfOneSlot()));
  EXPECT_THAT(text, HasSubstr("2 machines, 2 switches, 3 links"));
  EXPECT_THAT(text, HasSubstr("switch leaf0\n  from node[01-02]: 25 GB/s each\n  up to spine0: 50 GB/s"));
  EXPECT_THAT(text, HasSubstr("NIC mlx5_0: 25 GB/s"));
}

TEST(ImportTest, WrongRowsOfIbnetdiscoverAreNamed) {
  EXPECT_THAT(
      Shown(ImportIbnetdiscover("Switch 40 \"S-1\" # \"leaf\"\n[1] broken\n", "ib.txt", ShapeOfOneSlot())),
      HasSubstr("ib.txt:2: a port without"));
  EXPECT_THAT(Shown(ImportIbnetdiscover("Switch 40\n", "ib.txt", ShapeOfOneSlot())),
              HasSubstr("ib.txt:1: this row"));
  EXPECT_THAT(Shown(ImportIbnetdiscover("nothing\n", "ib.txt", ShapeOfOneSlot())),
              HasSubstr("no switch with an adapter"));
}

TEST(ImportTest, DamagedInputIsRefusedOrValid) {
  Rng rng(11);
  constexpr char kSlurm[] =
      "SwitchName=s0 Nodes=tux[0-3]\nSwitchName=s1 Nodes=tux[4-7]\nSwitchName=s4 Switches=s[0-1]\n";
  for (int i = 0; i < 3000; ++i) {
    for (const auto& [good, import] : {std::pair(absl::string_view(kIb), &ImportIbnetdiscover),
                                       std::pair(absl::string_view(kSlurm), &ImportSlurm),
                                       std::pair(absl::string_view("a /x/y\nb /x/z\n"), &ImportPaths)}) {
      std::string text(good);
      for (int n = 0; n < 3; ++n) text[rng.Below(text.size())] = "S-H\"[]#,=/0 \n"[rng.Below(13)];
      const absl::StatusOr<Topology> topology = import(text, "f", ShapeOfOneSlot());
      if (topology.ok()) {
        EXPECT_EQ(Validate(*topology), absl::OkStatus());
      }
    }
  }
}

TEST(ImportTest, RacksAsPaths) {
  const absl::StatusOr<Topology> topology = ImportPaths(
      "a1 /east/rack1  # first\n\na2 east/rack1\nb1 /west/rack1\n", "racks.txt", ShapeOfOneSlot());
  const std::string text = Shown(topology);
  EXPECT_THAT(text, HasSubstr("3 machines, 4 switches, 5 links"));
  EXPECT_THAT(text, HasSubstr("switch east/rack1\n  from a[1-2]: unknown GB/s each\n  up to east"));
  EXPECT_EQ(ImportPaths("a[1-3] /x\nb /y\n", "racks.txt", ShapeOfOneSlot())->machines.size(), 4u);
  EXPECT_EQ(Shown(ImportPaths("a /x\nb /x\na /y\n", "racks.txt", ShapeOfOneSlot())),
            "racks.txt:3: a is there twice");
  EXPECT_THAT(Shown(ImportPaths("a1\n", "racks.txt", ShapeOfOneSlot())),
              HasSubstr("racks.txt:1: must be HOST"));
}

TEST(ImportTest, NetworkNodesOfAws) {
  const std::string text = Shown(ImportAws(
      R"({"Instances": [
        {"InstanceId": "i-1", "InstanceType": "p4d.24xlarge", "NetworkNodes": ["nn-a", "nn-b", "nn-c"]},
        {"InstanceId": "i-2", "InstanceType": "p4d.24xlarge", "NetworkNodes": ["nn-a", "nn-b", "nn-d"]}]})",
      "aws.json", ShapeOfOneSlot()));
  EXPECT_THAT(text, HasSubstr("2 machines, 4 switches, 5 links"));
  EXPECT_THAT(Shown(ImportAws("{}", "aws.json", ShapeOfOneSlot())), HasSubstr("no \"Instances\""));
  EXPECT_THAT(Shown(ImportAws("{\"Instances\": [{}]}", "aws.json", ShapeOfOneSlot())),
              HasSubstr("instance 0 has no"));
}

TEST(ImportTest, PhysicalHostsOfGcp) {
  const std::string text = Shown(ImportGcp(
      R"([{"name": "a3-0", "resourceStatus": {"physicalHost": "/c1/r1/h1"}},
          {"name": "a3-1", "resourceStatus": {"physicalHost": "/c1/r2/h9"}}])",
      "gcp.json", ShapeOfOneSlot()));
  EXPECT_THAT(text, HasSubstr("2 machines, 3 switches, 4 links"));
  EXPECT_THAT(Shown(ImportGcp("[{\"name\": \"x\"}]", "gcp.json", ShapeOfOneSlot())),
              HasSubstr("no resourceStatus.physicalHost"));
  EXPECT_THAT(Shown(ImportGcp("[1,\n2", "gcp.json", ShapeOfOneSlot())),
              HasSubstr("gcp.json:2: this is no JSON"));
}

}  // namespace
}  // namespace gtrain::topology
