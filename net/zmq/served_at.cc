#include "net/zmq/served_at.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "base/status_macros.h"

namespace gtrain::net {

std::string ServedAtPath(const std::string& cluster_dir) { return cluster_dir + "/served.json"; }

absl::Status WriteServedAt(const std::string& path, const ServedAt& served) {
  const nlohmann::json json = {{"listen", served.listen}, {"advertise", served.advertise}};
  return WriteFileDurable(path, json.dump() + "\n", 0600);
}

absl::StatusOr<ServedAt> ReadServedAt(const std::string& path) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, 64 << 10));
  const nlohmann::json json = nlohmann::json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  ServedAt served;
  try {
    served = {json.at("listen").get<std::vector<std::string>>(), json.at("advertise").get<std::string>()};
  } catch (const nlohmann::json::exception&) {
  }
  if (!served.listen.empty()) return served;
  return absl::DataLossError(absl::StrCat(path, " does not say where the head served last"));
}

}  // namespace gtrain::net
