// Patterns of job files against lines of output (faults J12, P9): refused, or matched within the line
// whatever both are. libFuzzer's -timeout finds the pair that takes long.
#include "base/check.h"
#include "base/pattern.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

// Steps: the pattern, then lines.
GT_FUZZ_RUN(user_pattern) {
  const std::vector<absl::string_view> steps = SplitSteps(bytes);
  const auto pattern = Pattern::Compile(steps[0].substr(0, 512));  // as job/spec has it
  if (!pattern.ok()) return;
  for (size_t i = 1; i < steps.size(); ++i) {
    const absl::string_view line = steps[i].substr(0, 1024);
    const auto group = pattern->FirstGroup(line);
    if (group) GT_CHECK(pattern->groups() > 0 && line.find(*group) != absl::string_view::npos);
  }
}

GT_FUZZ_SEEDS(user_pattern) {
  return {JoinSteps({R"(step[ =:]+(\d+))", "epoch 1 step=12", "step: x", "\xff step 3"}),
          JoinSteps({R"(loss[ =:]+([-+.\deE]+))", "loss: 1e-3"}),
          JoinSteps({"(a+)+b", std::string(1024, 'a')}),
          JoinSteps({"((a|a)*)*b", std::string(200, 'a')}),
          JoinSteps({"(?:a{1,30}){1,30}(b)?", std::string(1024, 'a')}),
          JoinSteps({R"(^(?i:[[:alpha:]]\b|.*?)$)", "x"}),
          JoinSteps({"()", "", "x"})};
}

}  // namespace gtrain::fuzz
