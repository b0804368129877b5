// Captured machines and fabrics (README.md says which facts each has), and the placement that is expected on
// each: NAME.json is the topology, NAME.txt has commands and what they print. GTRAIN_UPDATE_GOLDEN=1 writes
// the latter anew.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "topology/json.h"
#include "topology/place/check.h"
#include "topology/place/plan.h"
#include "topology/place/rankfile.h"

namespace gtrain::topology {
namespace {

constexpr char kFolder[] = "tests/topo";
constexpr size_t kRanksShown = 32;

// "plan dp=4 tp=8 exclude=n0 gpus=2 gpu_type=H100 spares=8": the axes of the mesh in their order, and what
// else is asked.
std::string Answer(const Topology& topology, const std::string& command) {
  const std::vector<std::string> words = absl::StrSplit(command, ' ');
  EXPECT_EQ(words[0], "plan");
  PlanRequest request;
  int gpus = 1;
  for (size_t i = 1; i < words.size(); ++i) {
    const std::vector<std::string> halves = absl::StrSplit(words[i], absl::MaxSplits('=', 1));
    int number = 0;
    const bool is_number = absl::SimpleAtoi(halves.at(1), &number);
    if (halves[0] == "exclude") {
      request.exclude.insert(halves[1]);
    } else if (halves[0] == "gpu_type") {
      request.gpu_types.push_back(halves[1]);
    } else if (halves[0] == "gpus") {
      gpus = number;
    } else if (halves[0] == "spares") {
      request.spares = number;
    } else {
      EXPECT_TRUE(is_number) << command;
      request.mesh.axes.push_back(AxisNamed(halves[0], number));
    }
  }
  const absl::StatusOr<Fabric> fabric = Compile(topology, gpus);
  if (!fabric.ok()) return absl::StrCat(fabric.status().message(), "\n");
  const Plan plan = MakePlan(topology, *fabric, request);
  if (plan.placed) {
    const std::vector<int32_t> usable = UsableSlots(topology, *fabric, request);
    EXPECT_EQ(CheckPlacement(*fabric, request.mesh, usable, plan.slot_of_rank, plan.cost), absl::OkStatus());
    EXPECT_LE(plan.bound.seconds, plan.cost.seconds * (1 + 1e-9)) << command;
    const std::string rankfile = PrintRankfile(topology, *fabric, plan.slot_of_rank);
    EXPECT_EQ(*ParseRankfile(rankfile, "rankfile", topology, *fabric), plan.slot_of_rank);
  }
  return PrintPlan(topology, *fabric, request.mesh, plan, kRanksShown);
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::ranges::sort(names);
  return names;
}

class CapturedTest : public ::testing::TestWithParam<std::string> {};

TEST_P(CapturedTest, IsPlacedAsExpected) {
  const std::string path = absl::StrCat(kFolder, "/", GetParam());
  const absl::StatusOr<std::string> text = ReadFile(path + ".json", kTopologyBytesMax);
  const absl::StatusOr<std::string> golden = ReadFile(path + ".txt", kTopologyBytesMax);
  ASSERT_TRUE(text.ok() && golden.ok()) << "each topology has its commands in a .txt beside it";
  const absl::StatusOr<Topology> topology = ParseTopology(*text, path + ".json");
  ASSERT_TRUE(topology.ok()) << topology.status();
  const absl::StatusOr<Topology> again = ParseTopology(PrintTopology(*topology), "printed");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, *topology);
  std::string now;
  int commands = 0;
  for (const absl::string_view line : absl::StrSplit(*golden, '\n')) {
    if (!absl::StartsWith(line, "plan ")) continue;
    absl::StrAppend(&now, line, "\n----\n", Answer(*topology, std::string(line)), "\n");
    ++commands;
  }
  EXPECT_GT(commands, 0);
  if (getenv("GTRAIN_UPDATE_GOLDEN") != nullptr) std::ofstream(path + ".txt") << now;
  EXPECT_EQ(now, getenv("GTRAIN_UPDATE_GOLDEN") != nullptr ? now : *golden);
}

INSTANTIATE_TEST_SUITE_P(Topologies, CapturedTest, ::testing::ValuesIn(Names()), [](const auto& info) {
  std::string name = info.param;
  std::ranges::replace(name, '-', '_');
  return name;
});

TEST(CapturedTest, ThereAreAtLeastTwenty) { EXPECT_GE(Names().size(), 20); }

}  // namespace
}  // namespace gtrain::topology
