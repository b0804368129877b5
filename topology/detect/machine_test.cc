#include "topology/detect/machine.h"

#include <gtest/gtest.h>

namespace gtrain::topology {
namespace {

TEST(MachineTest, ThisMachineHasCoresAndMemory) {
  const absl::StatusOr<Shape> shape = ShapeOfThisMachine();
  ASSERT_TRUE(shape.ok()) << shape.status();
  ASSERT_FALSE(shape->numa.empty());
  EXPECT_GT(shape->numa[0].memory_gb, 0);
}

// Two NUMA nodes of one package each, a GPU on the second, an InfiniBand port on the first.
constexpr char kXml[] = R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x0000000f" complete_cpuset="0x0000000f" allowed_cpuset="0x0000000f" nodeset="0x00000003" complete_nodeset="0x00000003" allowed_nodeset="0x00000003" gp_index="1">
  <object type="Package" os_index="0" cpuset="0x00000003" complete_cpuset="0x00000003" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="2">
   <object type="NUMANode" os_index="0" cpuset="0x00000003" complete_cpuset="0x00000003" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="3" local_memory="64000000000"/>
   <object type="Core" os_index="0" cpuset="0x00000001" complete_cpuset="0x00000001" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="4">
    <object type="PU" os_index="0" cpuset="0x00000001" complete_cpuset="0x00000001" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="5"/>
   </object>
   <object type="Core" os_index="1" cpuset="0x00000002" complete_cpuset="0x00000002" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="6">
    <object type="PU" os_index="1" cpuset="0x00000002" complete_cpuset="0x00000002" nodeset="0x00000001" complete_nodeset="0x00000001" gp_index="7"/>
   </object>
   <object type="Bridge" gp_index="8" bridge_type="0-1" depth="0" bridge_pci="0000:[00-1f]">
    <object type="PCIDev" gp_index="9" pci_busid="0000:10:00.0" pci_type="0207 [15b3:1021] [15b3:0040] 00" pci_link_speed="63.015">
     <object type="OSDev" gp_index="10" name="ib0" osdev_type="2"/>
     <object type="OSDev" gp_index="11" name="mlx5_0" osdev_type="3"/>
    </object>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0x0000000c" complete_cpuset="0x0000000c" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="12">
   <object type="NUMANode" os_index="1" cpuset="0x0000000c" complete_cpuset="0x0000000c" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="13" local_memory="64000000000"/>
   <object type="Core" os_index="2" cpuset="0x00000004" complete_cpuset="0x00000004" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="14">
    <object type="PU" os_index="2" cpuset="0x00000004" complete_cpuset="0x00000004" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="15"/>
   </object>
   <object type="Core" os_index="3" cpuset="0x00000008" complete_cpuset="0x00000008" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="16">
    <object type="PU" os_index="3" cpuset="0x00000008" complete_cpuset="0x00000008" nodeset="0x00000002" complete_nodeset="0x00000002" gp_index="17"/>
   </object>
   <object type="Bridge" gp_index="18" bridge_type="0-1" depth="0" bridge_pci="0000:[40-5f]">
    <object type="PCIDev" gp_index="19" pci_busid="0000:41:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1" pci_link_speed="63.015">
     <info name="PCIDevice" value="H100"/>
    </object>
   </object>
  </object>
 </object>
</topology>
)";

TEST(MachineTest, AnXmlOfHwlocHasGpusAndPortsOnTheirNumaNodes) {
  const absl::StatusOr<Shape> shape = ShapeOfHwlocXml(kXml, "box.xml");
  ASSERT_TRUE(shape.ok()) << shape.status();
  ASSERT_EQ(shape->numa.size(), 2);
  EXPECT_EQ(shape->numa[1], (Numa{1, 2, 64}));
  ASSERT_EQ(shape->gpus.size(), 1);
  EXPECT_EQ(shape->gpus[0], (Gpu{"H100", 1, "0000:41:00.0", 0}));
  ASSERT_EQ(shape->nics.size(), 1);
  EXPECT_EQ(shape->nics[0], (Nic{"mlx5_0", 0, "0000:10:00.0", 0}));
  EXPECT_EQ(shape->pcie_gb_s, 63);
}

TEST(MachineTest, WhatIsNoXmlOfHwlocIsRefused) {
  for (const char* text : {"", "hello", "<topology/>", "<?xml version=\"1.0\"?><a/>"})
    EXPECT_FALSE(ShapeOfHwlocXml(text, "box.xml").ok()) << text;
}

}  // namespace
}  // namespace gtrain::topology
