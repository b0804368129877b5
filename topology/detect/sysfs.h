// What sysfs says about PCI devices and network ports. Some small files a port; nothing is cached. `root`:
// another folder than /, for tests; a machine has its /sys and /dev in it.
//
// The files are described in Linux: Documentation/ABI/stable/sysfs-class-infiniband (ports/P/state, rate,
// link_layer, gid_attrs/ndevs/N), Documentation/ABI/testing/sysfs-class-net (device, dev_port, speed) and
// Documentation/ABI/testing/sysfs-bus-pci (numa_node).
#pragma once
#include <string>
#include <vector>

namespace gtrain::topology {

struct PciDevice {
  int numa = -1;  // of the operating system; -1: unknown
  // Its way from the root complex: "pci0000:15/0000:15:01.0/0000:16:00.0". Devices whose ways begin alike
  // hang on one switch, or at least on one root complex. Empty: it is no PCI device.
  std::string path;
  bool operator==(const PciDevice&) const = default;
};

// A port of an RDMA device: InfiniBand, RoCE or EFA.
struct RdmaPort {
  std::string device;      // "mlx5_0"
  int port = 1;            // counted from 1
  std::string driver;      // of the PCI device: "mlx5_core", "efa"
  std::string link_layer;  // "InfiniBand", "Ethernet"; EFA says "Unknown"
  std::string state;       // "ACTIVE", "DOWN", "INIT", ...
  double gb_s = 0;         // as its link runs; 0: it is down, or does not say
  std::string verbs;       // "/dev/infiniband/uverbs0", through which programs use it; empty: there is none
  bool may_open = false;   // this process may open that
  // Network interfaces that belong to it, the port's own first. RoCE: those of its GIDs, which also finds
  // VLANs and bonds. InfiniBand: the port's IPoIB one.
  std::vector<std::string> interfaces;
  PciDevice pci;
};

// In the order of their PCI ways, then of the ports: the same slots come in the same order on machines that
// are built alike, whatever names the kernel gave them.
std::vector<RdmaPort> RdmaPorts(const std::string& root = "");

// GB/s of a network interface's link; 0: it is down, or does not say.
double InterfaceGbS(const std::string& interface, const std::string& root = "");

// The PCI device with this address, "0000:1b:00.0".
PciDevice PciDeviceAt(const std::string& address, const std::string& root = "");

}  // namespace gtrain::topology
