// A recorded trace of a spot market (docs/formats/spot-run.md). PURE.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::spec {

// How many machines there are in each stretch of `gap`; at least one stretch.
struct SpotTrace {
  absl::Duration gap;
  std::vector<int> nodes;
};

// InvalidArgument says for people what is wrong with the text; who read the file adds its name.
absl::StatusOr<SpotTrace> ParseSpotTrace(absl::string_view text);

}  // namespace gtrain::spec
