#include "runtime/control/cluster_dir.h"

#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "net/zmq/key_registry.h"
#include "runtime/wire/codec.h"

namespace gtrain::net {
namespace {

constexpr size_t kSmallFileMax = 64 << 10;

std::string Here() {
  char name[256] = "";
  (void)gethostname(name, sizeof(name) - 1);
  return name;
}

// Says why a variable that should hold an absolute path cannot be used.
std::string WhyUnusable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return "is not set";
  if (value[0] == '\0') return "is empty";
  return absl::StrCat("is \"", value, "\", which is not an absolute path");
}

absl::StatusOr<ClusterId> ReadClusterId(const std::string& path) {
  GT_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kSmallFileMax));
  ClusterId id{std::string(absl::StripAsciiWhitespace(text))};
  if (!wire::ValidId(id.value)) return absl::DataLossError(absl::StrCat(path, " does not hold a cluster id"));
  return id;
}

}  // namespace

absl::StatusOr<std::string> DefaultClusterDir(const std::string& name) {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && state[0] == '/') {
    return absl::StrCat(state, "/gtrain/", name);
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/') {
    return absl::StrCat(home, "/.local/state/gtrain/", name);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("there is no directory for the state of gtrain: XDG_STATE_HOME ",
                   WhyUnusable("XDG_STATE_HOME"), " and HOME ", WhyUnusable("HOME"),
                   ". Set one of them to an absolute path: XDG_STATE_HOME=/DIR gtrain ..."));
}

absl::StatusOr<ClusterFiles> InitCluster(const std::string& dir) {
  GT_RETURN_IF_ERROR(MakeDirs(dir, 0700));
  absl::StatusOr<ClusterId> id = ReadClusterId(dir + "/cluster");
  if (absl::IsNotFound(id.status())) {
    GT_RETURN_IF_ERROR(WriteFileDurable(dir + "/new", "", 0600));
    GT_RETURN_IF_ERROR(WriteFileDurable(dir + "/cluster", RandomHex(16) + "\n", 0600));
  } else if (!id.ok()) {
    return id.status();
  }
  GT_RETURN_IF_ERROR(LoadOrMakeKeyPair(dir + "/head.key").status());
  GT_ASSIGN_OR_RETURN(KeyPair admin, LoadOrMakeKeyPair(dir + "/admin.key"));
  absl::StatusOr<std::vector<AllowedKey>> allowed = ReadAllowedKeys(dir + "/authorized");
  if (absl::IsNotFound(allowed.status())) {
    GT_RETURN_IF_ERROR(
        AddAllowedKey(dir + "/authorized", {core::Role::kAdmin, admin.public_key, "admin@" + Here()}));
  } else if (!allowed.ok()) {
    return allowed.status();
  }
  return LoadCluster(dir);
}

absl::StatusOr<ClusterFiles> LoadCluster(const std::string& dir) {
  ClusterFiles files{.dir = dir};
  absl::StatusOr<ClusterId> id = ReadClusterId(dir + "/cluster");
  if (absl::IsNotFound(id.status())) {
    return absl::NotFoundError(
        absl::StrCat("there is no cluster in ", dir, "; make one with: gtrain head --init --context NAME"));
  }
  if (!id.ok()) return id.status();
  files.cluster = *id;
  GT_ASSIGN_OR_RETURN(files.head, LoadKeyPair(dir + "/head.key"));
  return files;
}

Place ThisPlace() {
  Place place{.host = Here()};
  if (absl::StatusOr<std::string> boot = ReadFile("/proc/sys/kernel/random/boot_id", kSmallFileMax);
      boot.ok()) {
    place.boot_id = std::string(absl::StripAsciiWhitespace(*boot));
  }
  const auto name_of = [](const char* link) {
    char name[64];
    const ssize_t length = readlink(link, name, sizeof(name));
    return length > 0 ? std::string(name, static_cast<size_t>(length)) : std::string();
  };
  place.network = name_of("/proc/self/ns/net");
  place.processes = name_of("/proc/self/ns/pid");
  return place;
}

bool Endpoint::IsHere() const {
  const Place here = ThisPlace();
  return place.boot_id == here.boot_id && place.network == here.network;
}

bool Endpoint::SeesItsProcesses() const {
  return IsHere() && (place.processes.empty() || place.processes == ThisPlace().processes);
}

absl::StatusOr<UniqueFd> WriteEndpoint(const std::string& path, const Endpoint& e) {
  nlohmann::json json = {{"endpoint", e.endpoint},
                         {"endpoints", e.endpoints},
                         {"head_public_key", e.head_public_key},
                         {"cluster", e.cluster.value},
                         {"pid", e.pid},
                         {"host", e.place.host},
                         {"boot_id", e.place.boot_id},
                         {"network", e.place.network},
                         {"processes", e.place.processes}};
  return WriteLockedFile(path, json.dump() + "\n");
}

absl::StatusOr<Endpoint> ReadEndpoint(const std::string& path) {
  GT_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kSmallFileMax));
  nlohmann::json json = nlohmann::json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  auto bad = [&] { return absl::DataLossError(absl::StrCat(path, " is not an endpoint file of a head")); };
  if (!json.is_object()) return bad();
  try {
    Endpoint e{.endpoint = json.at("endpoint").get<std::string>(),
               .endpoints = json.at("endpoints").get<std::vector<std::string>>(),
               .head_public_key = json.at("head_public_key").get<std::string>(),
               .cluster = ClusterId(json.at("cluster").get<std::string>()),
               .pid = json.at("pid").get<int64_t>(),
               .place = {.host = json.value("host", ""),
                         .boot_id = json.value("boot_id", ""),
                         .network = json.value("network", ""),
                         .processes = json.value("processes", "")}};
    if (!ValidKey(e.head_public_key)) return bad();
    return e;
  } catch (const nlohmann::json::exception&) {
    return bad();
  }
}

}  // namespace gtrain::net
