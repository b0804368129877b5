#include "launcher/cli/context.h"

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/nearest.h"
#include "job/spec/values.h"
#include "job/spec/words.h"
#include "launcher/cli/local_cluster.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/core/values/authority.h"

namespace gtrain::cli {
namespace {

constexpr size_t kContextsBytesMax = 1 << 20;
constexpr absl::Duration kHeadPoll = absl::Milliseconds(50);

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<Contexts> ParseContexts(const std::string& text, const std::string& path) {
  const nlohmann::json root = nlohmann::json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a JSON object; repair or remove it"));
  }
  Contexts out;
  out.current = TextOf(root, "current");
  const auto contexts = root.find("contexts");
  if (contexts == root.end() || !contexts->is_object()) return out;
  for (const auto& [name, value] : contexts->items()) {
    if (!value.is_object()) continue;
    out.contexts.push_back({name, TextOf(value, "dir"), TextOf(value, "endpoint"),
                            TextOf(value, "head_public_key"), TextOf(value, "key_file")});
  }
  return out;
}

absl::StatusOr<Context> FindContext(const std::string& name) {
  GT_ASSIGN_OR_RETURN(const Contexts contexts, ReadContexts());
  std::vector<std::string> names;
  for (const Context& context : contexts.contexts) {
    if (context.name == name) return context;
    names.push_back(context.name);
  }
  const std::string nearest = spec::Nearest(name, names);
  return absl::InvalidArgumentError(absl::StrCat(
      "no context ", spec::Shown(name), nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"),
      names.empty() ? "; there are none yet. `gtrain head --init --context NAME` makes one"
                    : absl::StrCat(". There are: ", absl::StrJoin(names, ", "))));
}

absl::StatusOr<std::string> ChosenName(const Args& args) {
  std::string name = args.Get("context", Env("GTRAIN_CONTEXT"));
  if (name.empty()) {
    GT_ASSIGN_OR_RETURN(const Contexts contexts, ReadContexts());
    name = contexts.current;
  }
  return name.empty() ? "local" : name;
}

// A head that was killed leaves its file, which nobody holds then; it may just be started again.
absl::Status AwaitHead(const Context& context, absl::StatusOr<net::Endpoint>& endpoint) {
  const std::string path = context.dir + "/endpoint.json";
  const RealClock clock;
  const Instant deadline = clock.Now() + kDeadHeadPatience;
  while (endpoint.ok() && endpoint->IsHere() && !IsLocked(path)) {
    if (clock.Now() >= deadline) {
      return absl::UnavailableError(absl::StrCat(
          "the head of context ", context.name, " (process ", endpoint->pid, ", at ", endpoint->endpoint,
          ") has died. Ranks go on without it. Start it again: gtrain head --context ", context.name));
    }
    absl::SleepFor(kHeadPoll);
    endpoint = net::ReadEndpoint(path);
  }
  return endpoint.status();
}

absl::Status FillFromContext(const Context& context, Cluster& cluster) {
  cluster.dir = context.dir;
  cluster.options.endpoint = context.endpoint;
  cluster.options.server_public_key = context.head_public_key;
  if (!context.dir.empty()) {
    absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(context.dir + "/endpoint.json");
    if (!endpoint.ok()) {
      return absl::UnavailableError(absl::StrCat("the head of context ", context.name, " does not run (",
                                                 endpoint.status().message(),
                                                 "); start it with: gtrain head --context ", context.name));
    }
    GT_RETURN_IF_ERROR(AwaitHead(context, endpoint));
    cluster.options.endpoint = endpoint->endpoint;
    cluster.options.server_public_key = endpoint->head_public_key;
  }
  const std::string key_file = context.key_file.empty() ? context.dir + "/admin.key" : context.key_file;
  GT_ASSIGN_OR_RETURN(cluster.options.keys, net::LoadKeyPair(key_file));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ContextsPath() {
  const std::string config = Env("XDG_CONFIG_HOME");
  if (!config.empty()) return config + "/gtrain/contexts.json";
  const std::string home = Env("HOME");
  if (home.empty()) {
    return absl::FailedPreconditionError(
        "there is no directory for the list of contexts: neither XDG_CONFIG_HOME nor HOME names one. Set one "
        "of them to an absolute path: XDG_CONFIG_HOME=/DIR gtrain ...");
  }
  return home + "/.config/gtrain/contexts.json";
}

absl::StatusOr<Contexts> ReadContexts() {
  GT_ASSIGN_OR_RETURN(const std::string path, ContextsPath());
  const absl::StatusOr<std::string> text = ReadFile(path, kContextsBytesMax);
  if (absl::IsNotFound(text.status())) return Contexts();
  if (!text.ok()) return text.status();
  return ParseContexts(*text, path);
}

namespace {

absl::Status WriteContexts(const Contexts& contexts) {
  GT_ASSIGN_OR_RETURN(const std::string path, ContextsPath());
  nlohmann::json all = nlohmann::json::object();
  for (const Context& c : contexts.contexts) {
    nlohmann::json one = nlohmann::json::object();
    if (!c.dir.empty()) one["dir"] = c.dir;
    if (!c.endpoint.empty()) one["endpoint"] = c.endpoint;
    if (!c.head_public_key.empty()) one["head_public_key"] = c.head_public_key;
    if (!c.key_file.empty()) one["key_file"] = c.key_file;
    all[c.name] = one;
  }
  const nlohmann::json root = {{"current", contexts.current}, {"contexts", all}};
  GT_RETURN_IF_ERROR(MakeDirs(path.substr(0, path.rfind('/'))));
  return WriteFileDurable(path, root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n",
                          0600);
}

}  // namespace

absl::Status SaveContext(const Context& context, MakeCurrent make_current) {
  GT_ASSIGN_OR_RETURN(Contexts contexts, ReadContexts());
  if (make_current == MakeCurrent::kYes) contexts.current = context.name;
  std::erase_if(contexts.contexts, [&](const Context& c) { return c.name == context.name; });
  contexts.contexts.push_back(context);
  return WriteContexts(contexts);
}

absl::Status UseLocalContext() {
  GT_ASSIGN_OR_RETURN(Contexts contexts, ReadContexts());
  contexts.current.clear();
  return WriteContexts(contexts);
}

Flag ContextFlag() {
  return {"context", '\0', "NAME", "the cluster to talk to; default: the current one, else local"};
}

absl::StatusOr<bool> UsesLocalCluster(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::string name, ChosenName(args));
  return name == "local";
}

namespace {

absl::StatusOr<LocalCluster> OpenLocal(Start start, absl::Duration patience) {
  switch (start) {
    case Start::kNever:
      return FindLocalCluster(patience);
    case Start::kIfDied:
      return ReviveLocalCluster();
    case Start::kIfNeeded:
      return EnsureLocalCluster();
  }
  return absl::InternalError("no such way to start");
}

}  // namespace

absl::StatusOr<Cluster> OpenCluster(const Args& args, Start start) {
  constexpr absl::Duration kHeadPatience = absl::Seconds(10);
  Cluster cluster;
  GT_ASSIGN_OR_RETURN(cluster.name, ChosenName(args));
  if (cluster.name == "local") {
    cluster.local = true;
    GT_ASSIGN_OR_RETURN(LocalCluster local, OpenLocal(start, kHeadPatience));
    cluster.dir = std::move(local.dir);
    cluster.head_pid = local.head_pid;
    cluster.options = std::move(local.options);
  } else {
    GT_ASSIGN_OR_RETURN(const Context context, FindContext(cluster.name));
    GT_RETURN_IF_ERROR(FillFromContext(context, cluster));
  }
  GT_ASSIGN_OR_RETURN(cluster.client, net::ControlClient::Connect(cluster.options));
  return cluster;
}

absl::Status Reconnect(Cluster& cluster, Start start) {
  GT_ASSIGN_OR_RETURN(LocalCluster local, OpenLocal(start, absl::ZeroDuration()));
  if (local.head_pid == cluster.head_pid && local.options.endpoint == cluster.options.endpoint) {
    return absl::OkStatus();
  }
  cluster.head_pid = local.head_pid;
  cluster.options = std::move(local.options);
  GT_ASSIGN_OR_RETURN(cluster.client, net::ControlClient::Connect(cluster.options));
  return absl::OkStatus();
}

absl::StatusOr<std::string> HeadDirectory(const Args& args) {
  if (args.Has("dir")) return args.Get("dir");
  GT_ASSIGN_OR_RETURN(const std::string name, ChosenName(args));
  if (name == "local") return LocalClusterDir();
  GT_ASSIGN_OR_RETURN(const Context context, FindContext(name));
  if (!context.dir.empty()) return context.dir;
  return absl::FailedPreconditionError(
      absl::StrCat("the head of context ", name, " is not on this machine: run this there"));
}

absl::Status ExpectKey(const std::string& text, const std::string& key) {
  const nlohmann::json answer = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (answer.is_object() && answer.contains(key)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the head's answer has no \"", key, "\""));
}

namespace {

absl::StatusOr<std::string> JsonOf(absl::StatusOr<core::ClientReply> reply) {
  if (!reply.ok()) return reply.status();
  if (!reply->ok) {
    const auto code =
        reply->code == 0 ? absl::StatusCode::kUnknown : static_cast<absl::StatusCode>(reply->code);
    return absl::Status(code, reply->error);
  }
  return std::move(reply->json);
}

}  // namespace

absl::Status NobodyListens(const Cluster& cluster) {
  return absl::UnavailableError(absl::StrCat(
      "the head of context ", cluster.name, " does not answer: nothing listens at ", cluster.options.endpoint,
      ". Ranks go on without it. Start it again there: gtrain head --context ", cluster.name,
      cluster.dir.empty() ? "" : absl::StrCat(" (its directory is ", cluster.dir, ")")));
}

// A request that only reads does not wait long where nothing listens; a head that takes the connection is
// given its time.
absl::StatusOr<std::string> Ask(Cluster& cluster, core::ClientRequestBody body, absl::Duration timeout) {
  core::ClientRequest request{.id = net::NewRequestId(), .body = std::move(body)};
  if (core::RuleOf(request.body).changes || timeout <= kDeadHeadPatience)
    return JsonOf(cluster.client->Call(std::move(request), timeout));
  absl::StatusOr<core::ClientReply> reply = cluster.client->Call(request, kDeadHeadPatience);
  if (absl::IsUnavailable(reply.status())) return NobodyListens(cluster);
  if (absl::IsDeadlineExceeded(reply.status()))
    reply = cluster.client->Call(std::move(request), timeout - kDeadHeadPatience, kDeadHeadPatience);
  return JsonOf(std::move(reply));
}

std::vector<absl::StatusOr<std::string>> AskAll(Cluster& cluster, std::vector<core::ClientRequestBody> bodies,
                                                absl::Duration timeout) {
  std::vector<core::ClientRequest> requests(bodies.size());
  for (size_t i = 0; i < bodies.size(); ++i) requests[i].body = std::move(bodies[i]);
  std::vector<absl::StatusOr<std::string>> answers;
  for (auto& reply : cluster.client->CallAll(std::move(requests), timeout)) {
    answers.push_back(JsonOf(std::move(reply)));
  }
  return answers;
}

}  // namespace gtrain::cli
