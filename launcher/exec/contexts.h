// The clusters that this user knows by name: ~/.config/gtrain/contexts.json. Free functions; they block on
// files.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gtrain::exec {

// One cluster in contexts.json. Either `dir` (the head runs on this machine, endpoint.json is in it) or
// `endpoint` and `head_public_key`.
struct Context {
  std::string name;
  std::string dir;
  std::string endpoint;         // "host:port"
  std::string head_public_key;  // Z85
  std::string key_file;         // this client's keys, mode 0600
  bool operator==(const Context&) const = default;
};

struct Contexts {
  std::string current;  // "" = the local cluster
  std::vector<Context> contexts;
};

// `$XDG_CONFIG_HOME/gtrain/contexts.json` or under ~/.config.
absl::StatusOr<std::string> ContextsPath();
absl::StatusOr<Contexts> ReadContexts();  // empty when there is no file
// InvalidArgument with the nearest name when there is none of that name.
absl::StatusOr<Context> FindContext(const std::string& name);

enum class MakeCurrent { kNo, kYes };
// Adds or replaces by name.
absl::Status SaveContext(const Context& context, MakeCurrent make_current);
absl::Status UseLocalContext();  // makes the local cluster the current one

}  // namespace gtrain::exec
