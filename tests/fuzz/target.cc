#include "tests/fuzz/target.h"

#include <cstdio>

#include "base/check.h"

namespace gtrain::fuzz {

#define GT_FUZZ_TARGET(name) \
  GT_FUZZ_RUN(name);         \
  GT_FUZZ_SEEDS(name);
#include "tests/fuzz/targets.inc"
#undef GT_FUZZ_TARGET

const std::vector<Target>& Targets() {
  static const std::vector<Target> targets = {
#define GT_FUZZ_TARGET(name) {#name, FuzzRun_##name, FuzzSeeds_##name},
#include "tests/fuzz/targets.inc"
#undef GT_FUZZ_TARGET
  };
  return targets;
}

const Target* Find(absl::string_view name) {
  for (const Target& target : Targets()) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

std::vector<absl::string_view> SplitSteps(absl::string_view bytes) {
  std::vector<absl::string_view> steps;
  for (size_t at; (at = bytes.find(kDivider)) != absl::string_view::npos;) {
    steps.push_back(bytes.substr(0, at));
    bytes.remove_prefix(at + kDivider.size());
  }
  steps.push_back(bytes);
  return steps;
}

std::string JoinSteps(const std::vector<std::string>& steps) {
  std::string bytes;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i > 0) bytes.append(kDivider.data(), kDivider.size());
    bytes += steps[i];
  }
  return bytes;
}

void Require(const absl::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  GT_CHECK(status.ok());
}

}  // namespace gtrain::fuzz
