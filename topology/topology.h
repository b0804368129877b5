// What a cluster is made of, as a value: machines with their GPUs, NICs and memory, switches, and links with
// GB/s and microseconds. PURE.
//
// Machines that are built alike share a Shape, so ten thousand of them cost ten thousand names. A speed of 0
// means that nobody knows it; the placement then assumes one (place/fabric.h says which) and says so. All
// speeds are of one direction. docs/formats/topology.md is the reference of the file that holds this value.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace gtrain::topology {

inline constexpr int kMachinesMax = 262'144;
inline constexpr int kSwitchesMax = 65'536;
inline constexpr int kLinksMax = 4'194'304;
inline constexpr int kDevicesMax = 1'024;  // GPUs, NICs or NUMA nodes of one machine

struct Numa {
  int socket = 0;
  int cores = 0;
  double memory_gb = 0;
  bool operator==(const Numa&) const = default;
};

struct Gpu {
  std::string model;
  int numa = -1;    // index into Shape::numa; -1: unknown
  std::string pci;  // "0000:1b:00.0"; "": unknown
  double memory_gb = 0;
  bool operator==(const Gpu&) const = default;
};

struct Nic {
  std::string name;  // "mlx5_0", "eth0"
  int numa = -1;
  std::string pci;
  double gb_s = 0;
  bool operator==(const Nic&) const = default;
};

// GPUs of one machine of which any two reach each other over NVLink or its like.
struct NvlinkGroup {
  std::vector<int> gpus;  // indices, ascending
  double gb_s = 0;        // of one GPU into the group
  double us = 0;
  bool operator==(const NvlinkGroup&) const = default;
};

// How one kind of machine is built.
struct Shape {
  std::string name;
  std::vector<Numa> numa;
  std::vector<Gpu> gpus;
  std::vector<Nic> nics;
  std::vector<NvlinkGroup> nvlink;
  double pcie_gb_s = 0;    // of one GPU to others of its NUMA node that it has no NVLink to
  double socket_gb_s = 0;  // between NUMA nodes
  int slots = 0;           // ranks that a machine without GPUs takes; 0: one
  bool operator==(const Shape&) const = default;
};

struct Machine {
  std::string name;
  int shape = 0;  // index into Topology::shapes
  std::map<std::string, std::string> labels;
  std::vector<int> broken_gpus;  // indices, ascending
  std::string unusable;          // why it takes no ranks; "": it does
  bool operator==(const Machine&) const = default;
};

enum class SwitchKind { kFabric, kNvlink };  // kNvlink: it joins GPUs of several machines, as in NVL72

struct Switch {
  std::string name;
  SwitchKind kind = SwitchKind::kFabric;
  bool operator==(const Switch&) const = default;
};

// One end of a link. `nic` says which one of a machine; -1: all of them together.
struct End {
  bool is_switch = false;
  int index = 0;
  int nic = -1;
  bool operator==(const End&) const = default;
};

struct Link {
  End from, to;
  double gb_s = 0;  // all cables of it together; 0: unknown, or what the NICs of a machine's end have
  double us = 0;
  bool operator==(const Link&) const = default;
};

struct Topology {
  std::string name;
  std::vector<Shape> shapes;
  std::vector<Machine> machines;
  std::vector<Switch> switches;
  std::vector<Link> links;
  bool operator==(const Topology&) const = default;
};

// The ranks that a machine takes by its shape alone: its GPUs, else Shape::slots, else one.
int SlotsOf(const Shape& shape);

// Names are unique, indices exist, speeds are finite and not negative, the bounds above are kept.
// InvalidArgument says what is wrong. Every reader ends with it.
absl::Status Validate(const Topology& topology);

// What `gtrain topology show` prints: kinds of machines, machines as hostlists, switches with what is on
// them.
std::string Describe(const Topology& topology);

}  // namespace gtrain::topology
