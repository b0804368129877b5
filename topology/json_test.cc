#include "topology/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/rng.h"
#include "topology/json_lines.h"

namespace gtrain::topology {
namespace {

using ::testing::HasSubstr;

constexpr char kSmall[] = R"({
  "gtrain_topology": 1,
  "name": "small",
  "shapes": [
    {"name": "box", "numa": [{"socket": 0, "cores": 32, "memory_gb": 256}],
     "gpus": [{"count": 4, "model": "H100", "numa": 0, "memory_gb": 80}],
     "nics": [{"names": "mlx5_[0-1]", "numa": 0, "gb_s": 50}],
     "nvlink": [{"gpus": "0-3", "gb_s": 450, "us": 1}], "pcie_gb_s": 55}
  ],
  "machines": [
    {"names": "n[0-3]", "shape": "box", "labels": {"rack": "a"}},
    {"names": "n4", "shape": "box", "broken_gpus": "2", "unusable": "drained"}
  ],
  "switches": [{"names": "leaf[0-1]"}, {"names": "spine"}],
  "links": [
    {"from": "n[0-4]", "nic": "mlx5_0", "to": "leaf0", "gb_s": 50, "us": 1},
    {"from": "n[0-4]", "nic": "mlx5_1", "to": "leaf1", "gb_s": 50, "us": 1},
    {"from": "leaf[0-1]", "to": "spine", "gb_s": 100}
  ]
})";

TEST(JsonTest, AFileIsReadAndWhatIsPrintedReadsBackEqual) {
  const absl::StatusOr<Topology> topology = ParseTopology(kSmall, "small.json");
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->machines.size(), 5);
  EXPECT_EQ(topology->shapes[0].nics[1].name, "mlx5_1");
  EXPECT_EQ(topology->machines[4].broken_gpus, std::vector<int>{2});
  EXPECT_EQ(topology->links.size(), 12);
  EXPECT_EQ(topology->links[5].from, (End{false, 0, 1}));
  const absl::StatusOr<Topology> again = ParseTopology(PrintTopology(*topology), "again.json");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, *topology);
}

std::string ErrorsOf(const std::string& find, const std::string& replace) {
  std::string text = kSmall;
  const size_t at = text.find(find);
  EXPECT_NE(at, std::string::npos) << find;
  text.replace(at, find.size(), replace);
  return std::string(ParseTopology(text, "f.json").status().message());
}

TEST(JsonTest, ErrorsHaveTheLineAndThePlace) {
  EXPECT_THAT(ErrorsOf("\"shape\": \"box\", \"broken", "\"shape\": \"bix\", \"broken"),
              HasSubstr("f.json:12: machines/1/shape: no shape is called \"bix\""));
  EXPECT_THAT(ErrorsOf("\"gb_s\": 450", "\"gb_s\": -1"),
              HasSubstr("f.json:8: shapes/0/nvlink/0/gb_s: must be a number from 0 to 1e9"));
  EXPECT_THAT(ErrorsOf("\"0-3\"", "\"0-4\""),
              HasSubstr("kind of machine box: nvlink names GPU 4, there are 4"));
  EXPECT_THAT(ErrorsOf("\"cores\"", "\"kores\""), HasSubstr("f.json:5: shapes/0/numa/0/kores: is not known"));
  EXPECT_THAT(ErrorsOf("\"to\": \"spine\"", "\"to\": \"spain\""),
              HasSubstr("f.json:18: links/2/to: \"spain\" is no machine and no switch of this file"));
  EXPECT_THAT(ErrorsOf("\"n4\"", "\"n3\""), HasSubstr("machines/1/names: n3 is listed twice"));
  EXPECT_THAT(ErrorsOf("\"spine\"}", "\"spine\"}}"), HasSubstr("f.json:14: this is no JSON"));
  EXPECT_THAT(ErrorsOf("\"gtrain_topology\": 1", "\"gtrain_topology\": 2"),
              HasSubstr("f.json:2: gtrain_topology"));
  EXPECT_THAT(ErrorsOf("{\"rack\": \"a\"}", "[1]"), HasSubstr("labels: must be an object of texts"));
}

TEST(JsonTest, AllErrorsComeAtOnce) {
  std::string text = kSmall;
  text.replace(text.find("\"count\": 4"), 10, "\"count\": 0");
  text.replace(text.find("\"cores\": 32"), 11, "\"cores\": -2");
  const std::string errors(ParseTopology(text, "f.json").status().message());
  EXPECT_THAT(errors, HasSubstr("gpus/0/count"));
  EXPECT_THAT(errors, HasSubstr("numa/0/cores"));
}

TEST(JsonTest, OddDocumentsAreRefused) {
  for (const std::string text :
       {"", "[]", "null", "{", "{\"gtrain_topology\": 1, \"machines\": {}}", "\"x\""})
    EXPECT_FALSE(ParseTopology(text, "f.json").ok()) << text;
}

// Bytes of a good file changed at random: an answer comes, and what is taken is valid.
TEST(JsonTest, DamagedFilesAreRefusedOrValid) {
  Rng rng(7);
  for (int i = 0; i < 3000; ++i) {
    std::string text = kSmall;
    for (uint64_t n = 0; n <= rng.Below(3); ++n) {
      const size_t at = rng.Below(text.size());
      if (rng.Chance(0.3)) {
        text.erase(at, rng.Below(20));
      } else {
        text[at] = "0123456789-[]{},:\"x\n"[rng.Below(20)];
      }
      if (text.empty()) break;
    }
    const absl::StatusOr<Topology> topology = ParseTopology(text, "f.json");
    if (topology.ok()) {
      EXPECT_EQ(Validate(*topology), absl::OkStatus());
    }
  }
}

TEST(JsonTest, NamesAreOneWord) {
  for (const std::string name : {"", "a b", "a#", "a,b", "a=b", "a[1]", "a\n"}) {
    Topology topology = *ParseTopology(kSmall, "small.json");
    topology.machines[0].name = name;
    EXPECT_THAT(Validate(topology).message(), HasSubstr("that is no name")) << name;
    topology = *ParseTopology(kSmall, "small.json");
    topology.switches[0].name = name;
    EXPECT_THAT(Validate(topology).message(), HasSubstr("that is no name")) << name;
  }
}

TEST(JsonTest, DescribeNamesWhatThereIs) {
  const std::string text = Describe(*ParseTopology(kSmall, "small.json"));
  EXPECT_THAT(text, HasSubstr("small: 5 machines, 3 switches, 12 links"));
  EXPECT_THAT(text, HasSubstr("machines: n[0-4]"));
  EXPECT_THAT(text, HasSubstr("unusable: drained: n4"));
  EXPECT_THAT(text, HasSubstr("from n[0-4]: 50 GB/s, 1 us each"));
}

// Of each value's path something is kept: what is nested 300,000 deep took a minute.
TEST(JsonLinesTest, NothingIsKeptOfWhatIsDeep) {
  const std::string text = "{\"shapes\": [" + std::string(300'000, '[') + std::string(300'000, ']') + "]}";
  EXPECT_LT(JsonLines(text).size(), 64u);
  EXPECT_THAT(ParseTopology(text, "deep.json").status().message(), ::testing::HasSubstr("deep.json:1: "));
}

TEST(JsonLinesTest, EveryValueHasItsLine) {
  const std::map<std::string, int> lines = JsonLines("{\n \"a\": [1,\n  {\"b\":\n 2}],\n \"c\": 3}");
  EXPECT_EQ(lines.at("/a"), 2);
  EXPECT_EQ(lines.at("/a/1"), 3);
  EXPECT_EQ(lines.at("/a/1/b"), 3);
  EXPECT_EQ(lines.at("/c"), 5);
}

}  // namespace
}  // namespace gtrain::topology
