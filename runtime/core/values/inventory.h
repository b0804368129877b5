// What a machine has, as its agent tells it. PURE. runtime/detect finds it out; the wire form is
// runtime/wire/control.capnp.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace gtrain::core {

struct GpuInfo {
  std::string uuid;
  std::string model;
  uint64_t memory_bytes = 0;
  int numa = -1;         // -1: unknown to the driver
  std::string pci_path;  // as of NicInfo
  bool operator==(const GpuInfo&) const = default;
};

// A hardware thread.
struct CpuInfo {
  int id = 0;     // of the operating system
  int numa = -1;  // -1: unknown
  bool operator==(const CpuInfo&) const = default;
};

enum class NicKind { kInfiniband, kRoce, kEfa };

// A port of an RDMA device.
struct NicInfo {
  std::string name;  // as UCX and NCCL call it: "mlx5_0:1"
  NicKind kind = NicKind::kInfiniband;
  std::string unusable;  // why no rank may use it now: "its port is DOWN"; empty: it may be used
  std::vector<std::string> interfaces;  // that belong to it
  uint64_t mbit_s = 0;                  // 0: unknown
  int numa = -1;                        // -1: unknown
  // From the root complex to the device: "pci0000:15/0000:15:01.0/0000:16:00.0". What begins alike is near.
  // Empty: unknown.
  std::string pci_path;
  bool operator==(const NicInfo&) const = default;
};

// A network interface that is up, with its addresses: no loopback, no link-local ones.
struct InterfaceInfo {
  std::string name;
  std::vector<std::string> addresses;
  bool operator==(const InterfaceInfo&) const = default;
};

struct Network {
  std::vector<NicInfo> nics;  // by their places on the PCI buses
  std::vector<InterfaceInfo> interfaces;
  bool operator==(const Network&) const = default;
};

struct Inventory {
  int cpus = 0;  // hardware threads this agent may use
  int cores = 0;
  int numa_nodes = 0;
  uint64_t memory_bytes = 0;
  std::vector<GpuInfo> gpus;
  // Neighbours (threads of a core, cores of a NUMA node) one after the other; a rank's place has indices of
  // it. Empty, as agents before 0.7 say it: ids are 0 to cpus - 1.
  std::vector<CpuInfo> cpu_infos;
  Network network;  // when its agent started; a rank is started with what there is then (StartFacts)
  bool operator==(const Inventory&) const = default;
};

}  // namespace gtrain::core
