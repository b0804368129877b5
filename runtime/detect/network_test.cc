#include "runtime/detect/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "topology/detect/sysfs_fake.h"

namespace gtrain::detect {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using topology::FakeSysfs;

std::map<std::string, core::NicInfo> NicsIn(const FakeSysfs& sys,
                                            std::vector<core::InterfaceInfo> interfaces = {}) {
  std::map<std::string, core::NicInfo> found;
  for (core::NicInfo& nic : NetworkIn(sys.root, std::move(interfaces)).nics) found[nic.name] = nic;
  return found;
}

TEST(NetworkTest, ADgxHasItsPortsWithKindSpeedAndPlace) {
  FakeSysfs sys;
  topology::MakeDgx(sys);
  const auto nics = NicsIn(sys, {{"ens1", {"10.1.0.1"}}});
  ASSERT_THAT(nics, SizeIs(10));
  const core::NicInfo& first = nics.at("mlx5_0:1");
  EXPECT_EQ(first.kind, core::NicKind::kInfiniband);
  EXPECT_EQ(first.unusable, "");
  EXPECT_EQ(first.mbit_s, 400'000u);
  EXPECT_EQ(first.numa, 0);
  EXPECT_EQ(first.pci_path, "pci0000:15/0000:15:01.0/0000:15:02.0/0000:1501:00.0");
  EXPECT_EQ(nics.at("mlx5_8:1").numa, 1);
  EXPECT_EQ(nics.at("mlx5_4:1").unusable, "its port is DOWN");
  EXPECT_EQ(nics.at("mlx5_9:1").kind, core::NicKind::kRoce);
  EXPECT_EQ(nics.at("mlx5_9:1").unusable, "");
}

// Its ports have no link layer that anybody knows; the driver's name tells.
TEST(NetworkTest, EfaIsKnownByItsDriver) {
  FakeSysfs sys;
  sys.Port({.device = "rdmap16s27",
            .way = "pci0000:10/0000:10:1b.0",
            .link_layer = "Unknown",
            .rate = "100 Gb/sec (4X EDR)",
            .driver = "efa"});
  EXPECT_EQ(NicsIn(sys).at("rdmap16s27:1").kind, core::NicKind::kEfa);
}

TEST(NetworkTest, WhyAPortMayNotBeUsed) {
  FakeSysfs sys;
  const auto roce = [&sys](const std::string& device, const std::string& interface, bool verbs = true) {
    sys.Port({.device = device,
              .way = "pci0000:00/0000:00:01." + device.substr(device.size() - 1),
              .link_layer = "Ethernet",
              .interface = interface,
              .verbs = verbs});
  };
  roce("mlx5_0", "eth0");
  roce("mlx5_1", "eth1");
  roce("mlx5_2", "eth2", false);
  sys.Port({.device = "rxe0", .way = "virtual/infiniband", .link_layer = "Ethernet", .interface = "eth0"});
  const auto nics = NicsIn(sys, {{"eth0", {"10.0.0.1"}}});
  EXPECT_EQ(nics.at("mlx5_0:1").unusable, "");
  EXPECT_EQ(nics.at("mlx5_1:1").unusable, "its interface has no address");
  EXPECT_EQ(nics.at("mlx5_2:1").unusable, "it has no device in /dev/infiniband");
  EXPECT_EQ(nics.at("rxe0:1").unusable, "it is no PCI device") << "RDMA made of software";
  std::filesystem::remove(sys.root + "/dev/infiniband/uverbs0");
  EXPECT_THAT(NicsIn(sys, {{"eth0", {"10.0.0.1"}}}).at("mlx5_0:1").unusable, HasSubstr("may not open"));
}

TEST(NetworkTest, InterfacesOfThisMachineHaveAddressesForOthers) {
  for (const core::InterfaceInfo& interface : DetectInterfaces()) {
    EXPECT_NE(interface.name, "lo");
    ASSERT_FALSE(interface.addresses.empty()) << interface.name;
    for (const std::string& address : interface.addresses) {
      EXPECT_NE(address, "127.0.0.1");
      EXPECT_NE(address.substr(0, 5), "fe80:");
    }
  }
  FakeSysfs none;
  EXPECT_THAT(NicsIn(none), IsEmpty());
}

}  // namespace
}  // namespace gtrain::detect
