// The keys of a job file, for those who offer them. PURE.
#pragma once
#include <string>
#include <vector>

namespace gtrain::spec {

// The keys in the form that --set takes: "ranks", "checkpoint.every".
std::vector<std::string> JobKeys();

}  // namespace gtrain::spec
