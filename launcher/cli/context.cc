#include "launcher/cli/context.h"

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/exec/contexts.h"
#include "runtime/core/values/authority.h"

namespace gtrain::cli {

Flag ContextFlag() {
  return {"context", '\0', "NAME", "the cluster to talk to; default: the current one, else local"};
}

absl::StatusOr<std::unique_ptr<exec::ClusterBackend>> ChosenBackend(const Args& args) {
  const char* const set = std::getenv("GTRAIN_CONTEXT");
  std::string name = args.Get("context", set == nullptr ? "" : set);
  if (name.empty()) {
    GT_ASSIGN_OR_RETURN(const exec::Contexts contexts, exec::ReadContexts());
    name = contexts.current;
  }
  return exec::BackendOf(name);
}

absl::StatusOr<Cluster> OpenCluster(const Args& args, Start start) {
  constexpr absl::Duration kHeadPatience = absl::Seconds(10);
  Cluster cluster;
  GT_ASSIGN_OR_RETURN(cluster.backend, ChosenBackend(args));
  GT_ASSIGN_OR_RETURN(cluster.head, cluster.backend->Find(start, kHeadPatience));
  GT_ASSIGN_OR_RETURN(cluster.client, net::ControlClient::Connect(cluster.head.options));
  return cluster;
}

absl::Status Reconnect(Cluster& cluster, Start start) {
  GT_ASSIGN_OR_RETURN(exec::RunningHead head, cluster.backend->Find(start, absl::ZeroDuration()));
  if (head.pid == cluster.head.pid && head.options.endpoint == cluster.head.options.endpoint) {
    return absl::OkStatus();
  }
  cluster.head = std::move(head);
  GT_ASSIGN_OR_RETURN(cluster.client, net::ControlClient::Connect(cluster.head.options));
  return absl::OkStatus();
}

absl::StatusOr<std::string> HeadDirectory(const Args& args) {
  if (args.Has("dir")) return args.Get("dir");
  GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
  return backend->HeadDirectory();
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
      "the head of context ", cluster.name(), " does not answer: nothing listens at ",
      cluster.head.options.endpoint, ". Ranks go on without it. Start it again there: gtrain head --context ",
      cluster.name(),
      cluster.head.dir.empty() ? "" : absl::StrCat(" (its directory is ", cluster.head.dir, ")")));
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
