#include "comm/ucx/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/test_folder.h"

namespace gtrain::comm {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
namespace fs = std::filesystem;

// A /sys of its own. Which files there are is what the kernel's Documentation/ABI says.
class FakeSysfs {
 public:
  const std::string root = TestFolder();

  void Write(const std::string& file, const std::string& text) {
    const fs::path path = fs::path(root) / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  void Port(const std::string& device, int port, const std::string& state) {
    Write(absl::StrCat("class/infiniband/", device, "/ports/", port, "/state"), state);
  }
  void Gid(const std::string& device, int port, int index, const std::string& interface) {
    Write(absl::StrCat("class/infiniband/", device, "/ports/", port, "/gid_attrs/ndevs/", index), interface);
  }
  void Interface(const std::string& name, const std::string& dev_port, const std::string& device) {
    Write(absl::StrCat("class/net/", name, "/dev_port"), dev_port);
    if (!device.empty())
      fs::create_directories(fs::path(root) / "class/net" / name / "device/infiniband" / device);
  }
};

TEST(RdmaPortsOf, NoneWithoutDevices) {
  FakeSysfs sys;
  EXPECT_THAT(RdmaPortsOf("eth0", sys.root), IsEmpty());
  sys.Interface("eth0", "0\n", "");
  EXPECT_THAT(RdmaPortsOf("eth0", sys.root), IsEmpty());
  EXPECT_THAT(RdmaPortsOf("eth0", sys.root + "/none"), IsEmpty());
}

TEST(RdmaPortsOf, RoceByTheInterfaceOfAGid) {
  FakeSysfs sys;
  sys.Port("mlx5_0", 1, "4: ACTIVE\n");
  sys.Gid("mlx5_0", 1, 0, "eth0\n");
  sys.Gid("mlx5_0", 1, 2, "eth0.100\n");
  sys.Gid("mlx5_0", 1, 3, "");
  sys.Port("mlx5_1", 1, "4: ACTIVE\n");
  sys.Gid("mlx5_1", 1, 0, "eth1\n");
  EXPECT_THAT(RdmaPortsOf("eth0", sys.root), ElementsAre("mlx5_0:1"));
  EXPECT_THAT(RdmaPortsOf("eth0.100", sys.root), ElementsAre("mlx5_0:1"));
  EXPECT_THAT(RdmaPortsOf("eth1", sys.root), ElementsAre("mlx5_1:1"));
  EXPECT_THAT(RdmaPortsOf("eth", sys.root), IsEmpty());
  EXPECT_THAT(RdmaPortsOf("", sys.root), IsEmpty());
}

TEST(RdmaPortsOf, TwoPortsBehindOneBond) {
  FakeSysfs sys;
  for (const char* device : {"bnxt_re1", "bnxt_re0"}) {
    sys.Port(device, 1, "4: ACTIVE\n");
    sys.Gid(device, 1, 0, "bond0\n");
  }
  EXPECT_THAT(RdmaPortsOf("bond0", sys.root), ElementsAre("bnxt_re0:1", "bnxt_re1:1"));
}

TEST(RdmaPortsOf, InfinibandByThePortOfTheInterface) {
  FakeSysfs sys;
  sys.Port("mlx4_0", 1, "4: ACTIVE\n");
  sys.Port("mlx4_0", 2, "4: ACTIVE\n");
  sys.Interface("ib0", "0\n", "mlx4_0");
  sys.Interface("ib1", "1\n", "mlx4_0");
  EXPECT_THAT(RdmaPortsOf("ib0", sys.root), ElementsAre("mlx4_0:1"));
  EXPECT_THAT(RdmaPortsOf("ib1", sys.root), ElementsAre("mlx4_0:2"));
}

TEST(RdmaPortsOf, OnlyPortsThatAreUp) {
  FakeSysfs sys;
  sys.Port("mlx5_0", 1, "1: DOWN\n");
  sys.Gid("mlx5_0", 1, 0, "eth0\n");
  sys.Port("mlx5_1", 1, "2: INIT\n");
  sys.Interface("eth1", "0\n", "mlx5_1");
  EXPECT_THAT(RdmaPortsOf("eth0", sys.root), IsEmpty());
  EXPECT_THAT(RdmaPortsOf("eth1", sys.root), IsEmpty());
}

std::string Chosen(const std::string& wish, const std::string& interface,
                   const std::vector<std::string>& rdma_ports) {
  const auto chosen = ChooseNetwork(wish, interface, rdma_ports);
  if (!chosen.ok()) return std::string(chosen.status().message());
  return absl::StrCat(chosen->transports, " on ", chosen->devices, chosen->every ? ", every" : "");
}

TEST(ChooseNetwork, WhatTheInterfaceHasUnlessAsked) {
  EXPECT_EQ(Chosen("", "eth0", {}), "tcp on eth0");
  EXPECT_EQ(Chosen("", "", {}), "tcp on all");
  EXPECT_EQ(Chosen("auto", "eth0", {"mlx5_0:1"}), "rc,ud,dc,tcp on mlx5_0:1,eth0");
  EXPECT_EQ(Chosen("tcp", "eth0", {"mlx5_0:1"}), "tcp on mlx5_0:1,eth0, every");
  EXPECT_EQ(Chosen("rc_verbs,tcp", "eth0", {}), "rc_verbs,tcp on eth0, every");
}

TEST(ChooseNetwork, WhatIsNoListOfNames) {
  for (const std::string wish : {",", "rc,", "rc tcp", "^tcp", "RC", "auto,tcp", "tcp\n"}) {
    EXPECT_THAT(Chosen(wish, "eth0", {}), testing::HasSubstr("it must be auto, or names of UCX's transports"))
        << wish;
  }
}

}  // namespace
}  // namespace gtrain::comm
