#include "runtime/detect/inventory.h"

#include <sched.h>

#include "gtest/gtest.h"

namespace gtrain::detect {
namespace {

TEST(Inventory, ThisMachineHasCpusAndMemory) {
  const core::Inventory inventory = DetectInventory({});
  EXPECT_GE(inventory.cpus, 1);
  EXPECT_GE(inventory.cores, 1);
  EXPECT_GE(inventory.numa_nodes, 1);
  EXPECT_GT(inventory.memory_bytes, uint64_t{64} << 20);
}

TEST(Inventory, CpusAreThoseThatMayBeUsed) {
  cpu_set_t all, last;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  int cpu = CPU_SETSIZE - 1;
  while (!CPU_ISSET(cpu, &all)) --cpu;
  CPU_ZERO(&last);
  CPU_SET(cpu, &last);
  ASSERT_EQ(sched_setaffinity(0, sizeof(last), &last), 0);
  const core::Inventory inventory = DetectInventory({});
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  ASSERT_EQ(inventory.cpu_infos.size(), 1u);
  EXPECT_EQ(inventory.cpu_infos[0].id, cpu);
  EXPECT_EQ(inventory.cpus, 1);
  EXPECT_LE(DetectInventory({.cpus = 1}).cpu_infos.size(), 1u);
}

TEST(Inventory, FakeGpusAreDistinct) {
  const core::Inventory inventory = DetectInventory({.cpus = 3, .fake_gpus = 4});
  EXPECT_EQ(inventory.cpus, 3);
  ASSERT_EQ(inventory.gpus.size(), 4u);
  EXPECT_NE(inventory.gpus[0].uuid, inventory.gpus[3].uuid);
  EXPECT_EQ(DetectInventory({.fake_gpus = 1, .fake_model = "H100 MIG 1g.10gb"}).gpus[0].uuid, "MIG-fake-0");
}

TEST(Inventory, VisibleDevicesRestrictAndOrder) {
  const std::vector<Device> all = {{{"GPU-aa", "x"}, 0}, {{"GPU-bb", "x"}, 1}, {{"GPU-cc", "x"}, 2}};
  const auto by_index = RestrictGpus(all, "2,0");
  ASSERT_EQ(by_index.size(), 2u);
  EXPECT_EQ(by_index[0].info.uuid, "GPU-cc");
  EXPECT_EQ(by_index[1].info.uuid, "GPU-aa");
  const auto by_name = RestrictGpus(all, "GPU-b");
  ASSERT_EQ(by_name.size(), 1u);
  EXPECT_EQ(by_name[0].info.uuid, "GPU-bb");
  EXPECT_TRUE(RestrictGpus(all, "").empty());
  EXPECT_EQ(RestrictGpus(all, "1,9,0").size(), 1u);
  const std::vector<Device> parts = {{{"MIG-a", "x"}, 0}, {{"MIG-b", "x"}, 0}, {{"GPU-cc", "x"}, 1}};
  EXPECT_EQ(RestrictGpus(parts, "0").size(), 2u) << "the instances of a GPU";
  EXPECT_EQ(RestrictGpus(parts, "MIG-b,1").size(), 2u);
  EXPECT_EQ(RestrictGpus(parts, "MIG-").size(), 1u);
}

}  // namespace
}  // namespace gtrain::detect
