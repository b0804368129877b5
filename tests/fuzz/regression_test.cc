// Runs every input in the corpora, every seed and every short damage of a seed through the same functions
// libFuzzer calls, in an ordinary build: a defect that was found once stays fixed.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/rng.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

const std::filesystem::path kCorpus = "tests/fuzz/corpus";  // tests run in the repository root

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Damaged(std::string bytes, Rng& rng) {
  if (bytes.empty()) return bytes;
  for (uint64_t n = 1 + rng.Below(3); n > 0; --n) bytes[rng.Below(bytes.size())] ^= 1 << rng.Below(8);
  if (rng.Chance(0.1)) bytes.resize(rng.Below(bytes.size()));
  return bytes;
}

class FuzzRegression : public testing::TestWithParam<const Target*> {};

TEST_P(FuzzRegression, CorpusIsHarmless) {
  const std::filesystem::path folder = kCorpus / GetParam()->name;
  ASSERT_TRUE(std::filesystem::is_directory(folder)) << "no corpus: run build/tests/fuzz_seeds";
  int inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path().string());
    GetParam()->run(ReadAll(entry.path()));
    ++inputs;
  }
  EXPECT_GT(inputs, 0);
}

TEST_P(FuzzRegression, SeedsAndTheirDamageAreHarmless) {
  Rng rng(11);
  for (const std::string& seed : GetParam()->seeds()) {
    GetParam()->run(seed);
    for (int i = 0; i < 20; ++i) GetParam()->run(Damaged(seed, rng));
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzRegression, testing::ValuesIn([] {
                           std::vector<const Target*> all;
                           for (const Target& target : Targets()) all.push_back(&target);
                           return all;
                         }()),
                         [](const auto& info) { return info.param->name; });

TEST(FuzzCorpus, EveryFolderHasATarget) {
  std::set<std::string> unknown;
  for (const auto& entry : std::filesystem::directory_iterator(kCorpus)) {
    if (Find(entry.path().filename().string()) == nullptr) unknown.insert(entry.path().filename().string());
  }
  EXPECT_TRUE(unknown.empty()) << *unknown.begin() << " has no line in tests/fuzz/targets.inc";
}

}  // namespace
}  // namespace gtrain::fuzz
