// Which cluster a command talks to, and the connection to its head.
//
//   --context NAME, else $GTRAIN_CONTEXT, else "current" of ~/.config/gtrain/contexts.json,
//   else the user's own local cluster.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "launcher/cli/args.h"
#include "runtime/control/control_client.h"

namespace gtrain::cli {

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
enum class MakeCurrent { kNo, kYes };
// Adds or replaces by name.
absl::Status SaveContext(const Context& context, MakeCurrent make_current);

absl::Status UseLocalContext();  // makes the local cluster the current one

struct Cluster {
  std::string name;
  bool local = false;    // the user's own local cluster
  int64_t head_pid = 0;  // of the local cluster
  std::string dir;       // when the head's directory is on this machine
  net::ClientOptions options;
  std::unique_ptr<net::ControlClient> client;
};

enum class Start {
  kNever,     // nothing is started or changed; no local cluster is an error that says how to start one
  kIfDied,    // what was killed of the local cluster is started again; else as kNever
  kIfNeeded,  // starts the local cluster, or joins the one that runs
};

Flag ContextFlag();
absl::StatusOr<Cluster> OpenCluster(const Args& args, Start start);
// Whether OpenCluster would choose the local cluster.
absl::StatusOr<bool> UsesLocalCluster(const Args& args);
// Connects to the local head that runs now, if it is another one than before.
absl::Status Reconnect(Cluster& cluster, Start start);

// Directory of the head on this machine: --dir, else that of the chosen context.
absl::StatusOr<std::string> HeadDirectory(const Args& args);

// Internal unless `text` is a JSON object with that key.
absl::Status ExpectKey(const std::string& text, const std::string& key);

// How long somebody at a terminal waits without a word where nobody listens.
inline constexpr absl::Duration kDeadHeadPatience = absl::Seconds(3);
// Unavailable, with what to do about it.
absl::Status NobodyListens(const Cluster& cluster);

// One request; an answer with ok = false becomes a Status of its code. Returns the JSON text.
absl::StatusOr<std::string> Ask(Cluster& cluster, core::ClientRequestBody body,
                                absl::Duration timeout = absl::Seconds(20));
// Several requests under way together.
std::vector<absl::StatusOr<std::string>> AskAll(Cluster& cluster, std::vector<core::ClientRequestBody> bodies,
                                                absl::Duration timeout);

}  // namespace gtrain::cli
