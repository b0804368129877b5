// One fuzz target: a function that takes bytes nobody vouches for and aborts (GT_CHECK, a sanitizer) when our
// code does what it must not. targets.inc lists them all; <name>_fuzz.cc defines each with the two macros
// below.
//
// The same function runs under libFuzzer (`make fuzz`) and, over the corpora in the repository, in
// fuzz_regression_test. Targets are deterministic and keep no state between calls.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace gtrain::fuzz {

struct Target {
  const char* name;
  void (*run)(absl::string_view bytes);
  std::vector<std::string> (*seeds)();  // real inputs, made by the code that writes them
};

const std::vector<Target>& Targets();
const Target* Find(absl::string_view name);

// Inputs that are a conversation: steps divided by this text, which libFuzzer learns from the dictionary.
inline constexpr absl::string_view kDivider = "\x7f|GT|";
std::vector<absl::string_view> SplitSteps(absl::string_view bytes);
std::string JoinSteps(const std::vector<std::string>& steps);

// Prints what is wrong and aborts unless `status` is OK.
void Require(const absl::Status& status);

}  // namespace gtrain::fuzz

#define GT_FUZZ_RUN(name) void FuzzRun_##name([[maybe_unused]] absl::string_view bytes)
#define GT_FUZZ_SEEDS(name) std::vector<std::string> FuzzSeeds_##name()
