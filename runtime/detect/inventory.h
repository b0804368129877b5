// The inventory of this machine. Blocks on the driver for at most some seconds; call it at start, outside
// loops.
#pragma once
#include <string>
#include <vector>

#include "runtime/core/values/messages.h"
#include "runtime/detect/nvml.h"

namespace gtrain::detect {

struct DetectOptions {
  int cpus = 0;                     // 0: those this process may run on
  int fake_gpus = 0;                // that many pretended GPUs, and the driver is not asked
  std::string fake_model = "Fake";  // with "MIG " in it they are instances of GPUs
};

core::Inventory DetectInventory(const DetectOptions& options);

// Through NVML, with the instances of a GPU in the place of the GPU where MIG is on; loaded at run time; no
// library, driver or device means none. CUDA_VISIBLE_DEVICES of this process (set by Slurm, for example)
// restricts and orders them.
std::vector<core::GpuInfo> DetectGpus();

// Keeps those of `all` that a CUDA_VISIBLE_DEVICES value names (indices or UUID prefixes), in its order. The
// index of a GPU means all instances of it.
std::vector<Device> RestrictGpus(const std::vector<Device>& all, const std::string& visible);

}  // namespace gtrain::detect
