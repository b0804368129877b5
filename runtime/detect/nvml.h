// The part of NVML that is used here, as functions that a test may make up. Private to runtime/detect.
#pragma once
#include <vector>

#include "runtime/core/values/messages.h"

namespace gtrain::detect {

// NVML's ABI; the library may be absent, so it is never linked. All functions return 0 when they succeed.
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
  // Of drivers that know MIG; else null.
  int (*mig_mode)(void*, unsigned* current, unsigned* pending) = nullptr;
  int (*mig_count_max)(void*, unsigned*) = nullptr;
  int (*mig_by_index)(void*, unsigned, void**) = nullptr;

  // From libnvidia-ml.so.1. False: it is not there, or not as it should be.
  bool Load();
};

// What ranks can be given: a GPU, or, where MIG is on, each of its instances and not the GPU.
struct Device {
  core::GpuInfo info;
  int index = 0;  // of the GPU, as CUDA_VISIBLE_DEVICES counts
};

std::vector<Device> AskDriver(const Nvml& nvml);

}  // namespace gtrain::detect
