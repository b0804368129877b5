#include "runtime/detect/inventory.h"

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

namespace gtrain::detect {

namespace {

// A broken driver can hang its first call; the machine is then offered without GPUs.
constexpr std::chrono::seconds kDriverPatience{20};

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

std::vector<Device> RestrictGpus(const std::vector<Device>& all, const std::string& visible) {
  std::vector<Device> kept;
  for (absl::string_view word : absl::StrSplit(visible, ',')) {
    word = absl::StripAsciiWhitespace(word);
    int index = 0;
    const bool number = absl::SimpleAtoi(word, &index);
    const size_t before = kept.size();
    for (const Device& device : all) {
      const bool meant =
          number ? device.index == index
                 : !word.empty() && kept.size() == before && absl::StartsWith(device.info.uuid, word);
      if (meant) kept.push_back(device);
    }
    if (kept.size() == before) break;  // as CUDA: the first wrong entry ends the list
  }
  return kept;
}

std::vector<core::GpuInfo> DetectGpus() {
  auto answer = std::make_shared<std::promise<std::vector<Device>>>();
  std::future<std::vector<Device>> result = answer->get_future();
  std::thread([answer] {
    Nvml nvml;
    answer->set_value(nvml.Load() ? AskDriver(nvml) : std::vector<Device>());
  }).detach();
  if (result.wait_for(kDriverPatience) != std::future_status::ready) {
    LogWarning("the NVIDIA driver did not answer within ", kDriverPatience.count(),
               " s: this machine is offered ", "without GPUs; see `nvidia-smi`");
    return {};
  }
  std::vector<Device> devices = result.get();
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr)
    devices = RestrictGpus(devices, visible);
  std::vector<core::GpuInfo> gpus;
  for (Device& device : devices) gpus.push_back(std::move(device.info));
  return gpus;
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
    const bool instance = absl::StrContains(options.fake_model, "MIG ");
    inventory.gpus.push_back({absl::StrCat(instance ? "MIG-fake-" : "GPU-fake-", i), options.fake_model,
                              uint64_t{16} << 30, i % inventory.numa_nodes, ""});
  }
  return inventory;
}

}  // namespace gtrain::detect
