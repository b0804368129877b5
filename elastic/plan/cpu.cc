#include "elastic/plan/cpu.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"

namespace gtrain::elastic {
namespace {

// Keys of the file, and the words for people before their values.
constexpr std::pair<absl::string_view, absl::string_view> kIdentity[] = {
    {"vendor_id", ""},           {"cpu family", "family "},   {"model", "model "},
    {"stepping", "stepping "},   {"CPU implementer", "Arm "}, {"CPU architecture", "architecture "},
    {"CPU variant", "variant "}, {"CPU part", "part "},       {"CPU revision", "revision "}};
// The sets of vector and matrix instructions: a feature belongs to one whose name it begins with.
constexpr absl::string_view kX86Sets[] = {"sse", "ssse3", "avx", "amx", "fma", "f16c", "xop"};
constexpr absl::string_view kArmSets[] = {"asimd", "sve", "sme", "fphp", "fcma", "i8mm", "bf16"};

std::vector<absl::string_view> FeaturesOf(absl::string_view list, absl::Span<const absl::string_view> sets) {
  std::vector<absl::string_view> features;
  for (const absl::string_view feature : absl::StrSplit(list, ' ', absl::SkipEmpty())) {
    const auto begins = [&](absl::string_view set) { return absl::StartsWith(feature, set); };
    if (std::ranges::any_of(sets, begins)) features.push_back(feature);
  }
  std::ranges::sort(features);
  return features;
}

}  // namespace

std::string DescribeCpu(absl::string_view cpuinfo) {
  std::vector<std::string> words;
  std::vector<absl::string_view> features;
  for (const absl::string_view line : absl::StrSplit(cpuinfo, '\n')) {
    if (line.empty() && !words.empty()) break;  // the next processor
    const std::pair<absl::string_view, absl::string_view> cells =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    const absl::string_view key = absl::StripAsciiWhitespace(cells.first);
    const absl::string_view value = absl::StripAsciiWhitespace(cells.second);
    for (const auto& [known, before] : kIdentity) {
      if (key == known) words.push_back(absl::StrCat(before, value));
    }
    if (key == "flags") features = FeaturesOf(value, kX86Sets);
    if (key == "Features") features = FeaturesOf(value, kArmSets);
  }
  if (!features.empty()) words.push_back(absl::StrCat("with ", absl::StrJoin(features, " ")));
  return absl::StrJoin(words, ", ");
}

}  // namespace gtrain::elastic
