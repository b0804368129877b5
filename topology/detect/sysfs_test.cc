#include "topology/detect/sysfs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "topology/detect/sysfs_fake.h"

namespace gtrain::topology {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(SysfsTest, NothingIsFoundOnAMachineWithoutRdma) {
  FakeSysfs sys;
  EXPECT_THAT(RdmaPorts(sys.root), IsEmpty());
  EXPECT_EQ(PciDeviceAt("0000:01:00.0", sys.root), PciDevice());
  EXPECT_EQ(InterfaceGbS("eth0", sys.root), 0);
}

TEST(SysfsTest, APortIsReadWhole) {
  FakeSysfs sys;
  sys.Port({.device = "mlx5_3",
            .way = "LNXSYSTM:00/VMBUS:00/pci0101:00/0101:00:00.0",
            .link_layer = "Ethernet",
            .rate = "100 Gb/sec (4X EDR)",
            .interface = "eth2",
            .numa = 1});
  sys.Write("/sys/devices/LNXSYSTM:00/VMBUS:00/pci0101:00/0101:00:00.0/net/eth2/dev_port", "0");
  sys.Write("/sys/class/infiniband/mlx5_3/ports/1/gid_attrs/ndevs/1", "eth2.100");
  const std::vector<RdmaPort> ports = RdmaPorts(sys.root);
  ASSERT_THAT(ports, SizeIs(1));
  EXPECT_EQ(ports[0].device, "mlx5_3");
  EXPECT_EQ(ports[0].driver, "mlx5_core");
  EXPECT_EQ(ports[0].link_layer, "Ethernet");
  EXPECT_EQ(ports[0].state, "ACTIVE");
  EXPECT_EQ(ports[0].gb_s, 12.5);
  EXPECT_EQ(ports[0].verbs, "/dev/infiniband/uverbs0");
  EXPECT_TRUE(ports[0].may_open);
  EXPECT_THAT(ports[0].interfaces, ElementsAre("eth2", "eth2.100"));
  EXPECT_EQ(ports[0].pci, (PciDevice{1, "pci0101:00/0101:00:00.0"})) << "without the hypervisor's bus";
}

// Names follow the order in which drivers found the devices, which differs from boot to boot.
TEST(SysfsTest, PortsComeInTheOrderOfTheirSlots) {
  FakeSysfs sys;
  MakeDgx(sys);
  std::vector<std::string> names;
  for (const RdmaPort& port : RdmaPorts(sys.root)) names.push_back(port.device);
  EXPECT_THAT(names, ElementsAre("mlx5_0", "mlx5_9", "mlx5_1", "mlx5_4", "mlx5_2", "mlx5_7", "mlx5_10",
                                 "mlx5_6", "mlx5_5", "mlx5_8"));
}

// The kernel says 10 Gbit/s of a port without a cable.
TEST(SysfsTest, APortThatIsDownHasNoSpeed) {
  FakeSysfs sys;
  sys.Port({.device = "mlx5_0", .way = "pci0000:00/0000:00:01.0", .state = "1: DOWN"});
  EXPECT_EQ(RdmaPorts(sys.root).at(0).gb_s, 0);
  EXPECT_EQ(RdmaPorts(sys.root).at(0).state, "DOWN");
}

TEST(SysfsTest, WithoutADeviceFileNobodyMayOpenIt) {
  FakeSysfs sys;
  sys.Port({.device = "mlx5_0", .way = "pci0000:00/0000:00:01.0"});
  sys.Port({.device = "mlx5_1", .way = "pci0000:00/0000:00:02.0", .verbs = false});
  std::filesystem::remove(sys.root + "/dev/infiniband/uverbs0");
  const std::vector<RdmaPort> ports = RdmaPorts(sys.root);
  ASSERT_THAT(ports, SizeIs(2));
  EXPECT_EQ(ports[0].verbs, "/dev/infiniband/uverbs0");
  EXPECT_FALSE(ports[0].may_open) << "a container without it";
  EXPECT_EQ(ports[1].verbs, "") << "a kernel without ib_uverbs";
}

TEST(SysfsTest, TwoPortsOfOneFunctionHaveTheirOwnInterfaces) {
  FakeSysfs sys;
  sys.Port({.device = "mlx4_0", .way = "pci0000:00/0000:00:01.0", .rate = "56 Gb/sec (4X FDR)"});
  sys.Write("/sys/class/infiniband/mlx4_0/ports/2/state", "4: ACTIVE");
  sys.Write("/sys/devices/pci0000:00/0000:00:01.0/net/ib0/dev_port", "0");
  sys.Write("/sys/devices/pci0000:00/0000:00:01.0/net/ib1/dev_port", "1");
  const std::vector<RdmaPort> ports = RdmaPorts(sys.root);
  ASSERT_THAT(ports, SizeIs(2));
  EXPECT_EQ(ports[0].port, 1);
  EXPECT_THAT(ports[0].interfaces, ElementsAre("ib0"));
  EXPECT_EQ(ports[1].port, 2);
  EXPECT_THAT(ports[1].interfaces, ElementsAre("ib1"));
}

TEST(SysfsTest, AnInterfaceSaysMegabits) {
  FakeSysfs sys;
  sys.Write("/sys/class/net/eth0/speed", "25000");
  sys.Write("/sys/class/net/eth1/speed", "-1");
  EXPECT_EQ(InterfaceGbS("eth0", sys.root), 3.125);
  EXPECT_EQ(InterfaceGbS("eth1", sys.root), 0) << "it is down";
}

}  // namespace
}  // namespace gtrain::topology
