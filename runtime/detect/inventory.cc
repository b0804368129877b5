#include "runtime/detect/inventory.h"

#include <dlfcn.h>
#include <hwloc.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/available_memory.h"
#include "base/logging.h"
#include "runtime/detect/network.h"
#include "topology/detect/sysfs.h"

namespace gtrain::detect {

namespace {

// A broken driver can hang its first call; the machine is then offered without GPUs.
constexpr std::chrono::seconds kDriverPatience{20};

// The part of NVML's ABI that is used here; the library may be absent, so it is never linked.
struct Nvml {
  struct Memory {
    unsigned long long total, free, used;
  };
  struct Pci {
    char legacy[16];
    unsigned domain, bus, device, pci_device, subsystem;
    char id[32];
  };
  int (*init)() = nullptr;
  int (*count)(unsigned*) = nullptr;
  int (*by_index)(unsigned, void**) = nullptr;
  int (*name)(void*, char*, unsigned) = nullptr;
  int (*uuid)(void*, char*, unsigned) = nullptr;
  int (*memory)(void*, Memory*) = nullptr;
  int (*pci)(void*, Pci*) = nullptr;

  bool Load() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    auto get = [library](const char* symbol, auto* function) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
      return *function != nullptr;
    };
    return get("nvmlInit_v2", &init) && get("nvmlDeviceGetCount_v2", &count) &&
           get("nvmlDeviceGetHandleByIndex_v2", &by_index) && get("nvmlDeviceGetName", &name) &&
           get("nvmlDeviceGetUUID", &uuid) && get("nvmlDeviceGetMemoryInfo", &memory) &&
           get("nvmlDeviceGetPciInfo_v3", &pci);
  }
};

topology::PciDevice DeviceOf(const Nvml::Pci& pci) {
  // sysfs writes a domain of four digits where NVML writes eight.
  std::string id = absl::AsciiStrToLower(pci.id);
  if (id.size() > 12) id = id.substr(id.size() - 12);
  return topology::PciDeviceAt(id);
}

std::vector<core::GpuInfo> AskDriver() {
  std::vector<core::GpuInfo> gpus;
  Nvml nvml;
  unsigned count = 0;
  if (!nvml.Load() || nvml.init() != 0 || nvml.count(&count) != 0) return gpus;
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    char uuid[96] = {}, name[96] = {};
    Nvml::Memory memory = {};
    Nvml::Pci pci = {};
    if (nvml.by_index(i, &device) != 0 || nvml.uuid(device, uuid, sizeof(uuid)) != 0) continue;
    core::GpuInfo gpu;
    gpu.uuid = uuid;
    if (nvml.name(device, name, sizeof(name)) == 0) gpu.model = name;
    if (nvml.memory(device, &memory) == 0) gpu.memory_bytes = memory.total;
    if (nvml.pci(device, &pci) == 0) {
      topology::PciDevice found = DeviceOf(pci);
      gpu.numa = found.numa;
      gpu.pci_path = std::move(found.path);
    }
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

// The hardware threads that this process may run on, as hwloc counts them: siblings and NUMA nodes together.
std::vector<core::CpuInfo> AllowedCpuInfos(hwloc_topology_t topology) {
  cpu_set_t set;
  std::vector<core::CpuInfo> infos;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return infos;
  for (hwloc_obj_t pu = nullptr; (pu = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_PU, pu)) != nullptr;) {
    if (pu->os_index >= CPU_SETSIZE || !CPU_ISSET(pu->os_index, &set)) continue;
    const int numa = pu->nodeset == nullptr ? -1 : hwloc_bitmap_first(pu->nodeset);
    infos.push_back({static_cast<int>(pu->os_index), numa});
  }
  return infos;
}

// The number of CPUs that this process may run on, and no more than the quota of its container lets it use at
// the same time.
int AllowedCpus() {
  cpu_set_t set;
  const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;
  const int cpus = known ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const double quota = std::ceil(ProcessorLimit());
  return quota < cpus ? std::max(1, static_cast<int>(quota)) : cpus;
}

}  // namespace

std::vector<core::GpuInfo> RestrictGpus(const std::vector<core::GpuInfo>& all, const std::string& visible) {
  std::vector<core::GpuInfo> kept;
  for (absl::string_view word : absl::StrSplit(visible, ',')) {
    word = absl::StripAsciiWhitespace(word);
    size_t index = 0;
    const bool number = absl::SimpleAtoi(word, &index);
    auto it = all.end();
    if (number && index < all.size()) it = all.begin() + static_cast<std::ptrdiff_t>(index);
    if (!number && !word.empty()) {
      it = std::find_if(all.begin(), all.end(),
                        [&](const core::GpuInfo& gpu) { return absl::StartsWith(gpu.uuid, word); });
    }
    if (it == all.end()) break;  // as CUDA: the first wrong entry ends the list
    kept.push_back(*it);
  }
  return kept;
}

std::vector<core::GpuInfo> DetectGpus() {
  auto answer = std::make_shared<std::promise<std::vector<core::GpuInfo>>>();
  std::future<std::vector<core::GpuInfo>> result = answer->get_future();
  std::thread([answer] { answer->set_value(AskDriver()); }).detach();
  if (result.wait_for(kDriverPatience) != std::future_status::ready) {
    LogWarning("the NVIDIA driver did not answer within ", kDriverPatience.count(),
               " s: this machine is offered ", "without GPUs; see `nvidia-smi`");
    return {};
  }
  const std::vector<core::GpuInfo> all = result.get();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? all : RestrictGpus(all, visible);
}

core::Inventory DetectInventory(const DetectOptions& options) {
  core::Inventory inventory;
  inventory.cpus = options.cpus > 0 ? options.cpus : AllowedCpus();
  inventory.cores = inventory.cpus;
  inventory.numa_nodes = 1;
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) == 0) {
    if (hwloc_topology_load(topology) == 0) {
      const int cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
      if (cores > 0) inventory.cores = std::min(cores, inventory.cpus);
      inventory.numa_nodes = std::max(1, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE));
      inventory.memory_bytes = hwloc_get_root_obj(topology)->total_memory;
      inventory.cpu_infos = AllowedCpuInfos(topology);
      if (inventory.cpu_infos.size() > static_cast<size_t>(inventory.cpus))
        inventory.cpu_infos.resize(static_cast<size_t>(inventory.cpus));
    }
    hwloc_topology_destroy(topology);
  }
  if (inventory.memory_bytes == 0) {
    inventory.memory_bytes =
        static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  }
  inventory.memory_bytes = std::min(inventory.memory_bytes, MemoryLimit());  // a container's
  inventory.network = DetectNetwork();
  if (options.fake_gpus == 0) inventory.gpus = DetectGpus();
  for (int i = 0; i < options.fake_gpus; ++i) {
    inventory.gpus.push_back(
        {absl::StrCat("GPU-fake-", i), "Fake", uint64_t{16} << 30, i % inventory.numa_nodes, ""});
  }
  return inventory;
}

}  // namespace gtrain::detect
