// `gtrain head`: makes a cluster (--init), serves it, or asks the running head for a join token (--token).
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/daemon.h"
#include "base/file_lock.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/spec/parse.h"
#include "job/spec/values.h"
#include "job/spec/words.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/topology_plan.h"
#include "launcher/cli/verbs.h"
#include "launcher/exec/contexts.h"
#include "launcher/exec/local_services.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/core/head/head_core.h"
#include "runtime/head/head.h"
#include "runtime/head/rescue.h"
#include "topology/json.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kBackupPatience = absl::Minutes(30);

absl::StatusOr<std::string> ClusterDir(const Args& args) {
  if (args.Has("dir")) return args.Get("dir");
  const std::string context = args.Get("context");
  if (context.empty()) return absl::InvalidArgumentError("which cluster? give --context NAME (or --dir DIR)");
  if (!spec::IsJobName(context) || context == "local") {
    return absl::InvalidArgumentError("--context must be a name of a-z, 0-9 and -, other than local");
  }
  GT_ASSIGN_OR_RETURN(const exec::Contexts contexts, exec::ReadContexts());
  for (const exec::Context& c : contexts.contexts) {
    if (c.name == context && !c.dir.empty()) return c.dir;
  }
  return net::DefaultClusterDir(context);
}

absl::Status Init(const Args& args, const std::string& dir) {
  GT_ASSIGN_OR_RETURN(const net::ClusterFiles files, net::InitCluster(dir));
  std::string message = absl::StrCat("cluster ", files.cluster.value, " in ", dir, "\n");
  const std::string context = args.Get("context");
  if (!context.empty()) {
    GT_RETURN_IF_ERROR(
        exec::SaveContext({context, dir, "", "", files.admin_key_path()}, exec::MakeCurrent::kYes));
    absl::StrAppend(&message, "context ", context,
                    " is now the current one; start the head with:\n  gtrain head --context ", context,
                    " --listen ADDRESS:PORT\n");
  }
  Print(message);
  return absl::OkStatus();
}

// The flag with which the user chose the cluster.
std::string WhichFlag(const Args& args) {
  return args.Has("context") ? "--context " + args.Get("context") : "--dir " + args.Get("dir");
}

absl::Status CheckInitialized(const Args& args, const std::string& dir) {
  if (access((dir + "/cluster").c_str(), F_OK) == 0 || errno != ENOENT) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("there is no cluster in ", dir, "; make one with: gtrain head --init ", WhichFlag(args)));
}

// To the head that serves `dir`, with the keys that are there; `name` is for messages.
absl::StatusOr<Cluster> ConnectAsAdmin(const std::string& name, const std::string& dir,
                                       const net::Endpoint& endpoint) {
  Cluster cluster;
  cluster.backend = exec::BackendOf(name);
  cluster.head.options.endpoint = endpoint.endpoint;
  cluster.head.options.server_public_key = endpoint.head_public_key;
  GT_ASSIGN_OR_RETURN(cluster.head.options.keys, net::LoadKeyPair(dir + "/admin.key"));
  GT_ASSIGN_OR_RETURN(cluster.client, net::ControlClient::Connect(cluster.head.options));
  return cluster;
}

absl::Status PrintToken(const Args& args, const std::string& dir) {
  GT_RETURN_IF_ERROR(CheckInitialized(args, dir));
  const absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(dir + "/endpoint.json");
  if (absl::IsNotFound(endpoint.status()) ||
      (endpoint.ok() && endpoint->IsHere() && !IsLocked(dir + "/endpoint.json"))) {
    return absl::UnavailableError(
        absl::StrCat("the head does not run; start it with: gtrain head ", WhichFlag(args)));
  }
  GT_RETURN_IF_ERROR(endpoint.status());
  GT_ASSIGN_OR_RETURN(Cluster cluster, ConnectAsAdmin(args.Get("context", dir), dir, *endpoint));
  GT_ASSIGN_OR_RETURN(const std::string json, Ask(cluster, core::ClientJoinToken{}));
  if (args.Has("json")) {
    Print(json + "\n");
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(ExpectKey(json, "token"));
  const nlohmann::json reply = nlohmann::json::parse(json);
  Print(reply.at("token").get<std::string>() + "\n");
  return absl::OkStatus();
}

absl::Status Serve(const Args& args, const std::string& dir) {
  GT_RETURN_IF_ERROR(CheckInitialized(args, dir));
  head::HeadOptions options;
  options.cluster_dir = dir;
  options.listen = args.All("listen");
  options.advertise = args.Get("advertise");
  options.allow_root = args.Has("allow-root");
  options.local = args.Has("local");
  options.exit_when_idle = args.Has("local") || args.Has("exit-when-idle");
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> nodes, args.Int("nodes", 1, spec::kRanksMax));
  if (nodes) options.expected_nodes = static_cast<int>(*nodes);
  if (options.local) options.expected_nodes = 1;
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> connections,
                      args.Int("connections-per-address", 1, 1'000'000));
  if (connections) options.connections_per_address_max = static_cast<int>(*connections);
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> relays, args.Int("relays-from", 0, 1'000'000));
  if (relays) options.relay_from = static_cast<int>(*relays);
  if (args.Has("lease")) {
    GT_ASSIGN_OR_RETURN(options.lease, ParseDuration(args.Get("lease")));
    if (*options.lease < absl::Seconds(10) || *options.lease > absl::Hours(1))
      return absl::InvalidArgumentError(
          "--lease must be 10s to 1h: agents speak each second, and are dead after 10 s");
  }
  if (args.Has("node-timeout")) {
    GT_ASSIGN_OR_RETURN(options.node_timeout, ParseDuration(args.Get("node-timeout")));
    if (*options.node_timeout < core::kNodeTimeoutMin || *options.node_timeout > core::kNodeTimeoutMax)
      return absl::InvalidArgumentError(absl::StrCat("--node-timeout must be ",
                                                     PrintDuration(core::kNodeTimeoutMin), " to ",
                                                     PrintDuration(core::kNodeTimeoutMax)));
    if (options.lease && *options.lease < *options.node_timeout)
      return absl::InvalidArgumentError(
          "--lease is shorter than --node-timeout: ranks would end on machines that nobody misses");
  }
  if (args.Has("topology")) {
    GT_ASSIGN_OR_RETURN(topology::Topology topology, ReadTopology(args.Get("topology")));
    if (topology.machines.empty())
      return absl::InvalidArgumentError(absl::StrCat(args.Get("topology"), " has no machines"));
    if (topology::PrintTopology(topology).size() > head::kTopologyTextMax)
      return absl::InvalidArgumentError(absl::StrCat(
          args.Get("topology"), " is too large for the answers of a head, ",
          PrintBytes(head::kTopologyTextMax), " at most: machines that are built alike share a shape"));
    options.topology = std::make_shared<const topology::Topology>(std::move(topology));
  }
  options.parse_job = spec::ParseCanonical;
  SetLogTag("head");
  if (options.topology != nullptr)
    LogInfo("ranks go by the topology of ", args.Get("topology"), ": ", options.topology->machines.size(),
            " machines, ", options.topology->switches.size(), " switches");
  HideFromOtherProcesses();
  GT_RETURN_IF_ERROR(EnsureFileLimit(kDaemonFilesMin));
  GT_RETURN_IF_ERROR(EnsureProcessesLeft(kDaemonProcessesMin));
  if (options.local) return exec::ServeLocalHead(std::move(options));
  RaiseFileLimit();
  return head::RunHead(options);
}

// Through the running head, which knows no pause for it; from its files where none runs.
absl::Status Backup(const std::string& dir, const std::string& to) {
  std::error_code error;
  const std::string target = std::filesystem::absolute(to, error).lexically_normal();
  absl::StatusOr<std::string> text;
  if (const absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(dir + "/endpoint.json");
      endpoint.ok() && IsLocked(dir + "/endpoint.json")) {
    GT_ASSIGN_OR_RETURN(Cluster cluster, ConnectAsAdmin("", dir, *endpoint));
    GT_ASSIGN_OR_RETURN(const std::string json, Ask(cluster, core::ClientBackup{target}, kBackupPatience));
    const nlohmann::json reply = nlohmann::json::parse(json, nullptr, false);
    text = reply.is_object() ? reply.value("text", "") : "";
  } else {
    text = head::BackupOffline(dir, target);
  }
  if (text.ok()) Print(*text);
  return text.status();
}

absl::Status Rescue(const Args& args, const std::string& dir) {
  const std::string& what = args.words[0];
  const bool needs_directory = what == "backup" || what == "restore";
  if (!needs_directory && what != "recover") {
    return absl::InvalidArgumentError(absl::StrCat("gtrain head ", spec::Shown(what),
                                                   ": only backup DIR, restore DIR and recover are known"));
  }
  if (args.words.size() != (needs_directory ? 2u : 1u)) {
    return absl::InvalidArgumentError(absl::StrCat("say gtrain head ", what, needs_directory ? " DIR" : ""));
  }
  if (what == "backup") return Backup(dir, args.words[1]);
  absl::StatusOr<std::string> text;
  if (what == "restore") {
    GT_ASSIGN_OR_RETURN(const std::optional<int64_t> id, args.Int("id", 1, 1'000'000'000));
    text = head::RestoreCluster({.cluster_dir = dir,
                                 .backup_dir = args.words[1],
                                 .id = static_cast<uint32_t>(id.value_or(0)),
                                 .replace = args.Has("replace"),
                                 .accept_unsealed = args.Has("accept-unsealed")});
  } else {
    text = head::RecoverCluster(dir, args.Has("accept-unsealed"));
  }
  if (text.ok()) Print(*text);
  return text.status();
}

int RunHead(const Args& args) {
  const absl::StatusOr<std::string> dir = ClusterDir(args);
  if (!dir.ok()) return Report(dir.status());
  absl::Status status;
  if (args.Has("topology") && (!args.words.empty() || args.Has("init") || args.Has("token"))) {
    status = absl::InvalidArgumentError(
        "--topology is for the head that serves: give it to each start of gtrain head");
  } else if (!args.words.empty()) {
    status = Rescue(args, *dir);
  } else if (args.Has("init")) {
    status = Init(args, *dir);
  } else if (args.Has("token")) {
    status = PrintToken(args, *dir);
  } else {
    status = Serve(args, *dir);
  }
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb HeadVerb() {
  Verb verb;
  verb.name = "head";
  verb.summary = "Make a cluster, serve it, or print a join token for a new machine";
  verb.usage = "[--init | --token | backup DIR | restore DIR | recover] --context NAME [flags]";
  verb.details =
      "  gtrain head --init --context lab                         keys and a context, once\n"
      "  gtrain head --context lab --listen 10.0.0.1:7070         serve until SIGTERM; ranks are never ended "
      "by that\n"
      "  gtrain head --context lab --token                        one use, 15 minutes; for `gtrain agent "
      "--join FILE`\n"
      "  gtrain head backup DIR --context lab                     records and keys, while it serves or not\n"
      "  gtrain head restore DIR --context lab [--replace]        put the newest backup back\n"
      "  gtrain head recover --context lab                        records lost, no backup: begin again from "
      "what "
      "the agents hold";
  verb.actions = {"backup", "restore", "recover", "--init", "--token"};  // as shells offer them
  verb.words_max = 2;
  verb.flags = {
      {"init", '\0', "", "make the cluster's keys and the context, then exit"},
      {"token", '\0', "", "ask the running head for a join token"},
      {"context", '\0', "NAME", "name of the cluster"},
      {"dir", '\0', "DIR", "its directory; default $XDG_STATE_HOME/gtrain/NAME"},
      {"listen", '\0', "ADDRESS:PORT",
       "numeric address to serve at, default 127.0.0.1 and any port; repeatable", true},
      {"advertise", '\0', "HOST:PORT", "what agents and clients are told; default: the first --listen"},
      {"relays-from", '\0', "N",
       "from so many agents on, most reach the head through others, 64 through one (default 1024; 0: never)"},
      {"nodes", '\0', "N", "number of machines expected: then a job that fits on none fails at once"},
      {"lease", '\0', "TIME",
       "ranks without gtrain's library end after so long without this head, and nothing takes their place "
       "before; default 120s"},
      {"node-timeout", '\0', "TIME",
       "a machine that is silent for so long is lost, 300ms to 60s; default 10s; 2s where all machines are "
       "in one room"},
      {"topology", '\0', "FILE",
       "what the machines are and how they hang together (gtrain topology): ranks go where a step "
       "communicates least"},
      {"exit-when-idle", '\0', "", "end after the last job"},
      {"allow-root", '\0', "", "let root listen on other than loopback addresses, outside a container too"},
      {"connections-per-address", '\0', "N", "more from one address are closed at once; default 4096"},
      {"local", '\0', "", "this is the user's own local cluster (used by launch)"},
      {"replace", '\0', "", "restore: move the records that are there aside"},
      {"accept-unsealed", '\0', "",
       "restore, recover: believe every node's word for what was granted before gtrain signed its grants"},
      {"id", '\0', "N", "restore: this backup instead of the newest"},
      {"json", '\0', "", "--token as JSON"}};
  verb.run = RunHead;
  return verb;
}

}  // namespace gtrain::cli
