// What is made of the driver's answers, here made up.
#include "runtime/detect/nvml.h"

#include <cstdio>
#include <string>

#include "gtest/gtest.h"

namespace gtrain::detect {
namespace {

// Two GPUs; of the first MIG is on, with instances at 0 and 2 of three.
int handles[5];
int Zero() { return 0; }
int Count(unsigned* count) {
  *count = 2;
  return 0;
}
int ByIndex(unsigned index, void** device) {
  *device = &handles[index];
  return 0;
}
int Name(void* device, char* text, unsigned size) {
  const auto index = static_cast<int*>(device) - handles;
  std::snprintf(text, size, index < 2 ? "NVIDIA H100 80GB HBM3" : "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
  return 0;
}
int Uuid(void* device, char* text, unsigned size) {
  const auto index = static_cast<int*>(device) - handles;
  std::snprintf(text, size, "%s-%d", index < 2 ? "GPU" : "MIG", static_cast<int>(index));
  return 0;
}
int MemoryOf(void* device, Nvml::Memory* memory) {
  memory->total = device < &handles[2] ? 80 : 10;
  return 0;
}
int PciOf(void*, Nvml::Pci*) { return 1; }
int MigMode(void* device, unsigned* current, unsigned*) {
  *current = device == &handles[0] ? 1 : 0;
  return 0;
}
int MigCountMax(void*, unsigned* count) {
  *count = 3;
  return 0;
}
int MigByIndex(void*, unsigned index, void** instance) {
  *instance = &handles[2 + index];
  return index == 1 ? 6 : 0;  // NVML_ERROR_NOT_FOUND
}

Nvml Driver() {
  Nvml nvml;
  nvml.init = Zero;
  nvml.count = Count;
  nvml.by_index = ByIndex;
  nvml.name = Name;
  nvml.uuid = Uuid;
  nvml.memory = MemoryOf;
  nvml.pci = PciOf;
  nvml.mig_mode = MigMode;
  nvml.mig_count_max = MigCountMax;
  nvml.mig_by_index = MigByIndex;
  return nvml;
}

TEST(AskDriver, InstancesTakeThePlaceOfTheirGpu) {
  const std::vector<Device> devices = AskDriver(Driver());
  ASSERT_EQ(devices.size(), 3u);
  EXPECT_EQ(devices[0].info.uuid, "MIG-2");
  EXPECT_EQ(devices[0].info.model, "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
  EXPECT_EQ(devices[0].info.memory_bytes, 10u);
  EXPECT_EQ(devices[1].info.uuid, "MIG-4");
  EXPECT_EQ(devices[1].index, 0);
  EXPECT_EQ(devices[2].info.uuid, "GPU-1");
  EXPECT_EQ(devices[2].index, 1);
}

TEST(AskDriver, ADriverThatKnowsNoInstancesHasWholeGpus) {
  Nvml nvml = Driver();
  nvml.mig_by_index = nullptr;
  const std::vector<Device> devices = AskDriver(nvml);
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(devices[0].info.uuid, "GPU-0");
}

}  // namespace
}  // namespace gtrain::detect
