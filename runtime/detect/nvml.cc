#include "runtime/detect/nvml.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "topology/detect/sysfs.h"

namespace gtrain::detect {
namespace {

void AddPlaceOf(const Nvml::Pci& pci, core::GpuInfo& gpu) {
  // sysfs writes a domain of four digits where NVML writes eight.
  std::string id = absl::AsciiStrToLower(pci.id);
  if (id.size() > 12) id = id.substr(id.size() - 12);
  topology::PciDevice found = topology::PciDeviceAt(id);
  gpu.numa = found.numa;
  gpu.pci_path = std::move(found.path);
}

// False: nothing can be started on what has no UUID.
bool Describe(const Nvml& nvml, void* device, core::GpuInfo& gpu) {
  char uuid[96] = {}, name[96] = {};
  Nvml::Memory memory = {};
  if (nvml.uuid(device, uuid, sizeof(uuid)) != 0) return false;
  gpu.uuid = uuid;
  if (nvml.name(device, name, sizeof(name)) == 0) gpu.model = name;
  if (nvml.memory(device, &memory) == 0) gpu.memory_bytes = memory.total;
  return true;
}

bool HasInstances(const Nvml& nvml, void* device) {
  unsigned current = 0, pending = 0;
  return nvml.mig_mode != nullptr && nvml.mig_count_max != nullptr && nvml.mig_by_index != nullptr &&
         nvml.mig_mode(device, &current, &pending) == 0 && current == 1;
}

// The driver names an instance "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
void AddInstances(const Nvml& nvml, void* device, const Device& gpu, std::vector<Device>& devices) {
  unsigned count = 0;
  if (nvml.mig_count_max(device, &count) != 0) return;
  for (unsigned i = 0; i < count; ++i) {
    void* instance = nullptr;
    Device one;
    if (nvml.mig_by_index(device, i, &instance) != 0 || !Describe(nvml, instance, one.info)) continue;
    one.info.numa = gpu.info.numa;
    one.info.pci_path = gpu.info.pci_path;
    one.index = gpu.index;
    devices.push_back(std::move(one));
  }
}

}  // namespace

bool Nvml::Load() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  auto get = [library](const char* symbol, auto* function) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
    return *function != nullptr;
  };
  (void)get("nvmlDeviceGetMigMode", &mig_mode);
  (void)get("nvmlDeviceGetMaxMigDeviceCount", &mig_count_max);
  (void)get("nvmlDeviceGetMigDeviceHandleByIndex", &mig_by_index);
  return get("nvmlInit_v2", &init) && get("nvmlDeviceGetCount_v2", &count) &&
         get("nvmlDeviceGetHandleByIndex_v2", &by_index) && get("nvmlDeviceGetName", &name) &&
         get("nvmlDeviceGetUUID", &uuid) && get("nvmlDeviceGetMemoryInfo", &memory) &&
         get("nvmlDeviceGetPciInfo_v3", &pci);
}

std::vector<Device> AskDriver(const Nvml& nvml) {
  std::vector<Device> devices;
  unsigned count = 0;
  if (nvml.init() != 0 || nvml.count(&count) != 0) return devices;
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    Nvml::Pci pci = {};
    Device one;
    one.index = static_cast<int>(i);
    if (nvml.by_index(i, &device) != 0 || !Describe(nvml, device, one.info)) continue;
    if (nvml.pci(device, &pci) == 0) AddPlaceOf(pci, one.info);
    if (HasInstances(nvml, device)) {
      AddInstances(nvml, device, one, devices);
    } else {
      devices.push_back(std::move(one));
    }
  }
  return devices;
}

}  // namespace gtrain::detect
