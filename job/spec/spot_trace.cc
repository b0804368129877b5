#include "job/spec/spot_trace.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace gtrain::spec {
namespace {

constexpr int kNodesOfTraceMax = 10'000;
constexpr int64_t kGapSecondsMax = 86'400;

absl::Status Wrong(const char* what) {
  return absl::InvalidArgumentError(absl::StrCat("it is no spot trace: ", what));
}

}  // namespace

absl::StatusOr<SpotTrace> ParseSpotTrace(absl::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("data") || !json["data"].is_array())
    return Wrong("it is no JSON object with a list `data`");
  const auto metadata = json.value("metadata", nlohmann::json::object());
  const auto gap = metadata.is_object() ? metadata.value("gap_seconds", nlohmann::json()) : nlohmann::json();
  if (!gap.is_number_integer() || gap.get<int64_t>() < 1 || gap.get<int64_t>() > kGapSecondsMax)
    return Wrong("`metadata.gap_seconds` is no number of seconds up to a day");
  SpotTrace trace{absl::Seconds(gap.get<int64_t>()), {}};
  for (const auto& nodes : json["data"]) {
    if (!nodes.is_number_integer() || nodes.get<int64_t>() < 0 || nodes.get<int64_t>() > kNodesOfTraceMax)
      return Wrong("an element of `data` is no number of nodes up to 10,000");
    trace.nodes.push_back(nodes.get<int>());
  }
  if (trace.nodes.empty()) return Wrong("`data` is empty");
  return trace;
}

}  // namespace gtrain::spec
