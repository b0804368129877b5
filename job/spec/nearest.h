// The word a person probably meant. PURE.
#pragma once
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::spec {

// Edits (insert, delete, replace, swap of neighbours) that turn one into the other.
int EditDistance(absl::string_view a, absl::string_view b);

// The candidate at the smallest distance, "" when none is near enough to be a typing error.
std::string Nearest(absl::string_view word, const std::vector<std::string>& candidates);

}  // namespace gtrain::spec
