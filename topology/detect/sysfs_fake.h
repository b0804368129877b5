// A /sys and /dev of its own in a folder, as the kernel lays them out: devices below the PCI buses, classes
// of links to them. For tests.
#pragma once
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/test_folder.h"

namespace gtrain::topology {

struct FakePort {
  std::string device;                        // "mlx5_0"
  std::string way;                           // "pci0000:15/0000:15:01.0/0000:18:00.0"
  std::string link_layer = "InfiniBand";     // or "Ethernet"
  std::string state = "4: ACTIVE";           // as the kernel writes it
  std::string rate = "400 Gb/sec (4X NDR)";  // likewise
  std::string interface = {};                // of its first GID
  int numa = -1;
  std::string driver = "mlx5_core";
  bool verbs = true;  // there is a device file for programs
};

class FakeSysfs {
 public:
  const std::string root = TestFolder();

  void Write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = root + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  void Link(const std::string& file, const std::string& target) const {
    const std::filesystem::path path = root + file;
    std::filesystem::create_directories(path.parent_path());
    std::filesystem::create_directories(root + target);
    std::filesystem::create_symlink(root + target, path);
  }
  // A PCI device, found by its address, which is the end of its way.
  void Device(const std::string& way, int numa) const {
    const std::string device = "/sys/devices/" + way;
    if (std::filesystem::exists(root + device)) return;
    Write(device + "/numa_node", absl::StrCat(numa));
    Link("/sys/bus/pci/devices/" + way.substr(way.rfind('/') + 1), device);
  }
  void Port(const FakePort& port) {
    const std::string own = "/sys/devices/" + port.way + "/infiniband/" + port.device;
    const std::string files = own + "/ports/1";
    Device(port.way, port.numa);
    Link(own + "/device", "/sys/devices/" + port.way);
    Link("/sys/class/infiniband/" + port.device, own);
    Link("/sys/devices/" + port.way + "/driver", "/sys/bus/pci/drivers/" + port.driver);
    Write(files + "/state", port.state);
    Write(files + "/rate", port.rate);
    Write(files + "/link_layer", port.link_layer);
    if (!port.interface.empty()) Write(files + "/gid_attrs/ndevs/0", port.interface);
    if (!port.verbs) return;
    const std::string verbs = absl::StrCat("uverbs", verbs_++);
    Write("/sys/class/infiniband_verbs/" + verbs + "/ibdev", port.device);
    Write("/dev/infiniband/" + verbs, "");
  }

 private:
  int verbs_ = 0;
};

// The way to a device behind the switch of a root port, as on a DGX: the bus says where.
inline std::string WayBehindSwitch(const std::string& bus, const std::string& slot) {
  return absl::StrCat("pci0000:", bus, "/0000:", bus, ":01.0/0000:", bus, ":02.0/0000:", slot, ":00.0");
}

// As a DGX H100: eight GPUs, each behind a switch with an InfiniBand port of 400 Gbit/s, four on a NUMA node.
// The names of the ports are not in the order of the slots. mlx5_4, beside the third GPU, is down; mlx5_9 is
// for storage and speaks Ethernet, mlx5_10 is an InfiniBand port of 200 Gbit/s.
inline const std::vector<std::string>& DgxBuses() {
  static const std::vector<std::string> kBuses = {"15", "3a", "4b", "5c", "95", "ba", "cb", "dc"};
  return kBuses;
}
inline void MakeDgx(FakeSysfs& sys) {
  const std::vector<std::string> names = {"mlx5_0", "mlx5_1", "mlx5_4", "mlx5_2",
                                          "mlx5_7", "mlx5_6", "mlx5_5", "mlx5_8"};
  for (size_t i = 0; i < 8; ++i) {
    const std::string& bus = DgxBuses()[i];
    const int numa = i < 4 ? 0 : 1;
    sys.Device(WayBehindSwitch(bus, bus + "00"), numa);  // the GPU
    sys.Port({.device = names[i],
              .way = WayBehindSwitch(bus, bus + "01"),
              .state = i == 2 ? "1: DOWN" : "4: ACTIVE",
              .rate = i == 2 ? "10 Gb/sec (4X SDR)" : "400 Gb/sec (4X NDR)",
              .numa = numa});
  }
  sys.Port({.device = "mlx5_9",
            .way = "pci0000:29/0000:29:01.0/0000:2a:00.0",
            .link_layer = "Ethernet",
            .interface = "ens1",
            .numa = 0});
  sys.Port({.device = "mlx5_10",
            .way = "pci0000:a9/0000:a9:01.0/0000:aa:00.0",
            .rate = "200 Gb/sec (4X HDR)",
            .numa = 1});
}

}  // namespace gtrain::topology
