// Where a head served last, for the next one that is not told: a file beside its keys that stays when it
// ends.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gtrain::net {

struct ServedAt {
  std::vector<std::string> listen;  // with the ports it got
  std::string advertise;
};
std::string ServedAtPath(const std::string& cluster_dir);
absl::Status WriteServedAt(const std::string& path, const ServedAt& served);
// NotFound: no head has served yet. DataLoss: the file is damaged.
absl::StatusOr<ServedAt> ReadServedAt(const std::string& path);

}  // namespace gtrain::net
