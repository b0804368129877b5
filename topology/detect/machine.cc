#include "topology/detect/machine.h"

#include <hwloc.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "topology/detect/sysfs.h"

namespace gtrain::topology {
namespace {

constexpr unsigned kNvidia = 0x10de, kAmd = 0x1002;

struct Destroy {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Hwloc = std::unique_ptr<hwloc_topology, Destroy>;

absl::StatusOr<Hwloc> Load(const std::string* xml) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return absl::InternalError("hwloc does not start");
  Hwloc hwloc(raw);
  if (xml != nullptr &&
      hwloc_topology_set_xmlbuffer(raw, xml->data(), static_cast<int>(xml->size()) + 1) != 0)
    return absl::InvalidArgumentError("this is no XML of hwloc; `lstopo --of xml FILE` writes one");
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(raw) != 0) return absl::InvalidArgumentError("hwloc finds nothing in it");
  return hwloc;
}

int NumaOf(hwloc_topology_t hwloc, hwloc_obj_t io) {
  hwloc_obj_t host = hwloc_get_non_io_ancestor_obj(hwloc, io);
  if (host == nullptr || host->nodeset == nullptr || hwloc_bitmap_weight(host->nodeset) != 1) return -1;
  const hwloc_obj_t node =
      hwloc_get_numanode_obj_by_os_index(hwloc, static_cast<unsigned>(hwloc_bitmap_first(host->nodeset)));
  return node == nullptr ? -1 : static_cast<int>(node->logical_index);
}

std::string PciOf(const hwloc_obj_attr_u::hwloc_pcidev_attr_s& pci) {
  return absl::StrFormat("%04x:%02x:%02x.%x", unsigned{pci.domain}, unsigned{pci.bus}, unsigned{pci.dev},
                         unsigned{pci.func});
}

void AddNuma(hwloc_topology_t hwloc, Shape& shape) {
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(hwloc, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    const hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(hwloc, HWLOC_OBJ_PACKAGE, node);
    const int cores = hwloc_get_nbobjs_inside_cpuset_by_type(hwloc, node->cpuset, HWLOC_OBJ_CORE);
    const double gb = std::round(static_cast<double>(node->attr->numanode.local_memory) / 1e8) / 10;
    shape.numa.push_back(
        {package == nullptr ? 0 : static_cast<int>(package->logical_index), std::max(0, cores), gb});
  }
}

// GPUs are PCI devices of the display and accelerator classes of makers whose GPUs train.
void AddGpus(hwloc_topology_t hwloc, Shape& shape) {
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_pcidev(hwloc, device)) != nullptr;) {
    const auto& pci = device->attr->pcidev;
    const unsigned klass = pci.class_id >> 8;
    if ((klass != 0x03 && klass != 0x12) || (pci.vendor_id != kNvidia && pci.vendor_id != kAmd)) continue;
    const char* model = hwloc_obj_get_info_by_name(device, "PCIDevice");
    shape.gpus.push_back({model == nullptr
                              ? absl::StrFormat("%04x:%04x", unsigned{pci.vendor_id}, unsigned{pci.device_id})
                              : model,
                          NumaOf(hwloc, device), PciOf(pci), 0});
    shape.pcie_gb_s = std::max(shape.pcie_gb_s, std::round(static_cast<double>(pci.linkspeed) * 10) / 10);
  }
}

// Network ports with a PCI device. One that is both an InfiniBand device and an interface is named as the
// former.
void AddNics(hwloc_topology_t hwloc, Shape& shape) {
  std::map<hwloc_obj_t, Nic> by_device;
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_osdev(hwloc, device)) != nullptr;) {
    const auto type = device->attr->osdev.type;
    const bool infiniband = type == HWLOC_OBJ_OSDEV_OPENFABRICS;
    if (!infiniband && type != HWLOC_OBJ_OSDEV_NETWORK) continue;
    const hwloc_obj_t parent = device->parent;
    if (parent == nullptr || parent->type != HWLOC_OBJ_PCI_DEVICE) continue;
    Nic& nic = by_device[parent];
    if (!infiniband && !nic.name.empty()) continue;
    nic = {device->name, NumaOf(hwloc, device), PciOf(parent->attr->pcidev), 0};
  }
  for (auto& [device, nic] : by_device) shape.nics.push_back(std::move(nic));
  std::ranges::sort(shape.nics, {}, &Nic::pci);
}

absl::StatusOr<Shape> ShapeOf(const Hwloc& hwloc, absl::string_view name) {
  Shape shape;
  shape.name = std::string(name);
  AddNuma(hwloc.get(), shape);
  AddGpus(hwloc.get(), shape);
  AddNics(hwloc.get(), shape);
  Topology whole;
  whole.shapes = {shape};
  GT_RETURN_IF_ERROR(Validate(whole));
  return shape;
}

// hwloc names a device, not its ports: the first one speaks for it.
double PortGbS(const std::string& name, const std::vector<RdmaPort>& ports) {
  const auto port = std::ranges::find(ports, name, &RdmaPort::device);
  return port == ports.end() ? InterfaceGbS(name) : port->gb_s;
}

}  // namespace

absl::StatusOr<Shape> ShapeOfThisMachine() {
  GT_ASSIGN_OR_RETURN(const Hwloc hwloc, Load(nullptr));
  GT_ASSIGN_OR_RETURN(Shape shape, ShapeOf(hwloc, "this"));
  const std::vector<RdmaPort> ports = RdmaPorts();
  for (Nic& nic : shape.nics) nic.gb_s = PortGbS(nic.name, ports);
  return shape;
}

absl::StatusOr<Shape> ShapeOfHwlocXml(absl::string_view xml, absl::string_view filename) {
  const std::string text(xml);
  const absl::StatusOr<Hwloc> hwloc = Load(&text);
  if (!hwloc.ok()) return absl::InvalidArgumentError(absl::StrCat(filename, ": ", hwloc.status().message()));
  return ShapeOf(*hwloc, "hwloc");
}

}  // namespace gtrain::topology
