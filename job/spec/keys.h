// The keys of a job file, for those who offer them. PURE.
#pragma once
#include <string>
#include <vector>

namespace gtrain::spec {

// As --set takes them: "ranks", "checkpoint.every".
std::vector<std::string> JobKeys();

}  // namespace gtrain::spec
