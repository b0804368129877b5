// The small readers of text: words of `run:`, variables, names, paths, sizes, durations.
#include <map>

#include "base/check.h"
#include "base/path.h"
#include "base/units.h"
#include "job/spec/parse.h"
#include "job/spec/words.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

GT_FUZZ_RUN(small_text) {
  if (const auto size = ParseBytes(bytes); size.ok()) GT_CHECK(!PrintBytes(*size).empty());
  if (const auto time = ParseDuration(bytes); time.ok())
    GT_CHECK(*ParseDuration(PrintDuration(*time)) == *time);
  (void)spec::SplitWords(bytes);
  (void)spec::ExpandVariables(bytes, {{"A", "${A}"}, {"HOME", "/home"}});
  (void)spec::LooksLikeSecret(bytes);
  GT_CHECK(spec::IsJobName(spec::NameFrom(bytes)));
  const std::string path = JoinPath("/a/b", bytes);
  GT_CHECK(JoinPath("/a/b", path) == path);
}

GT_FUZZ_SEEDS(small_text) {
  return {"64KiB",
          "2TB",
          "90s",
          "500ms",
          "python3 train.py --name 'a b' \"c d\" e\\ f",
          "${HOME}/x $$ ${A}",
          "AKIAIOSFODNN7EXAMPLE",
          "train_v2.py",
          "../x/./y"};
}

}  // namespace gtrain::fuzz
