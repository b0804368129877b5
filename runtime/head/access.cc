#include "runtime/head/access.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/status_macros.h"

namespace gtrain::head {
namespace {

using nlohmann::json;

constexpr absl::Duration kTokenLifeMax = absl::Hours(24 * 7);
constexpr size_t kNameBytesMax = 64;

// A name is a word: it stands first in the comment of a line and owns jobs.
bool GoodName(const std::string& name) {
  constexpr absl::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@-";
  return !name.empty() && name.size() <= kNameBytesMax &&
         absl::string_view(name).find_first_not_of(kLetters) == absl::string_view::npos;
}

bool IsPerson(const net::AllowedKey& key) { return !key.revoked && key.role != core::Role::kNode; }

}  // namespace

Access::Access(const net::ClusterFiles& files, std::shared_ptr<net::KeyRegistry> registry,
               std::shared_ptr<const Clock> clock)
    : files_(files), registry_(std::move(registry)), clock_(std::move(clock)), tokens_(files.tokens_path()) {}

absl::Status Access::Load() {
  GT_RETURN_IF_ERROR(tokens_.Load());
  GT_ASSIGN_OR_RETURN(const std::vector<net::AllowedKey> keys,
                      net::ReadAllowedKeys(files_.authorized_path()));
  std::set<std::string> nodes;
  for (const net::AllowedKey& key : keys) nodes.insert(net::KeyId(key.public_key));
  tokens_.Forget(nodes);
  ShowTokens();
  return Refresh();
}

absl::Status Access::Refresh() { return registry_->Reload(files_.authorized_path()); }

void Access::ShowTokens() {
  const net::BootTime boot = net::BootTimeNow();
  const Instant now = clock_->Now();
  std::map<std::string, Instant, std::less<>> expires;
  for (const net::JoinTokenRecord& token : tokens_.Live(boot)) {
    if (token.uses_left() > 0) expires[token.id] = now + token.Left(boot);
  }
  registry_->ReplaceJoinKeys(std::move(expires));
}

absl::StatusOr<std::string> Access::Answer(const core::ClientRequestBody& body, const std::string& endpoint,
                                           const std::string& by) {
  endpoint_ = endpoint;
  by_ = by;
  return std::visit([this](const auto& request) { return Do(request); }, body);
}

template <typename Other>
absl::StatusOr<std::string> Access::Do(const Other&) {
  return absl::InternalError("this request is not about keys");
}

absl::StatusOr<std::string> Access::Do(const core::ClientJoinToken& request) {
  if (request.life <= absl::ZeroDuration() || request.life > kTokenLifeMax) {
    return absl::InvalidArgumentError("a join token lives for up to 7 days");
  }
  const net::KeyPair keys = net::MakeKeyPair();
  GT_RETURN_IF_ERROR(tokens_.Add(keys.public_key, request.uses, request.life, by_, net::BootTimeNow()));
  ShowTokens();
  return OneLine({{"token", net::PrintJoinToken({endpoint_, files_.head.public_key, keys.secret_key})},
                  {"id", net::KeyId(keys.public_key)},
                  {"endpoint", endpoint_},
                  {"uses", request.uses},
                  {"expires_seconds", absl::ToInt64Seconds(request.life)}});
}

absl::StatusOr<std::string> Access::Do(const core::ClientTokens&) {
  const net::BootTime now = net::BootTimeNow();
  json list = json::array();
  for (const net::JoinTokenRecord& token : tokens_.Live(now)) {
    list.push_back({{"id", token.id},
                    {"uses", token.uses},
                    {"uses_left", token.uses_left()},
                    {"by", token.by},
                    {"nodes", token.spent_for},
                    {"expires_seconds", absl::ToInt64Seconds(token.Left(now))}});
  }
  json all = json::object();
  all["tokens"] = std::move(list);
  return OneLine(all);
}

absl::StatusOr<std::string> Access::Do(const core::ClientRevokeToken& request) {
  registry_->Drop(request.token);
  GT_RETURN_IF_ERROR(tokens_.Revoke(request.token));
  json done = json::object();
  done["revoked"] = request.token;
  return OneLine(done);
}

absl::StatusOr<std::string> Access::Do(const core::ClientAddUser& request) {
  const std::optional<core::Role> role = net::RoleOf(request.role);
  if (!role || *role == core::Role::kNode) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", request.role, "\" is not a role of people: admin, user or readonly"));
  }
  if (!GoodName(request.name)) {
    return absl::InvalidArgumentError("a user's name has letters, digits and . _ @ - only, at most 64");
  }
  if (!net::ValidKey(request.public_key)) return absl::InvalidArgumentError("that is not a public key");
  GT_ASSIGN_OR_RETURN(const std::vector<net::AllowedKey> keys,
                      net::ReadAllowedKeys(files_.authorized_path()));
  for (const net::AllowedKey& key : keys) {
    if (key.public_key == request.public_key) return absl::AlreadyExistsError("this key is listed already");
    if (IsPerson(key) && net::NameOf(key) == request.name) {
      return absl::AlreadyExistsError(absl::StrCat("there is a user ", request.name,
                                                   " already; take the old key away first: gtrain user ",
                                                   "revoke ", request.name));
    }
  }
  GT_RETURN_IF_ERROR(net::AddAllowedKey(files_.authorized_path(), {*role, request.public_key, request.name}));
  GT_RETURN_IF_ERROR(Refresh());
  return OneLine({{"name", request.name},
                  {"role", request.role},
                  {"key", net::KeyId(request.public_key)},
                  {"endpoint", endpoint_},
                  {"head_public_key", files_.head.public_key}});
}

absl::StatusOr<std::string> Access::Do(const core::ClientUsers&) {
  GT_ASSIGN_OR_RETURN(const std::vector<net::AllowedKey> keys,
                      net::ReadAllowedKeys(files_.authorized_path()));
  json list = json::array();
  for (const net::AllowedKey& key : keys) {
    if (!IsPerson(key)) continue;
    list.push_back({{"name", net::NameOf(key)},
                    {"role", std::string(net::RoleName(key.role))},
                    {"key", net::KeyId(key.public_key)}});
  }
  json all = json::object();
  all["users"] = std::move(list);
  return OneLine(all);
}

absl::Status Access::Revoke(const net::AllowedKey& key) {
  registry_->Drop(net::KeyId(key.public_key));
  net::AllowedKey revoked = key;
  revoked.revoked = true;
  GT_RETURN_IF_ERROR(net::AddAllowedKey(files_.authorized_path(), revoked));
  return Refresh();
}

absl::StatusOr<std::string> Access::Do(const core::ClientRevokeUser& request) {
  GT_ASSIGN_OR_RETURN(const std::vector<net::AllowedKey> keys,
                      net::ReadAllowedKeys(files_.authorized_path()));
  std::vector<net::AllowedKey> found;
  int other_admins = 0;
  for (const net::AllowedKey& key : keys) {
    if (!IsPerson(key)) continue;
    const bool meant = net::NameOf(key) == request.name || net::KeyId(key.public_key) == request.name;
    if (meant) found.push_back(key);
    if (!meant && key.role == core::Role::kAdmin) ++other_admins;
  }
  if (found.empty()) {
    return absl::NotFoundError(absl::StrCat("no user ", request.name, "; `gtrain user ls` lists them"));
  }
  if (other_admins == 0) {
    return absl::FailedPreconditionError("no admin would be left: add another one first");
  }
  for (const net::AllowedKey& key : found) GT_RETURN_IF_ERROR(Revoke(key));
  json done = json::object();
  done["revoked"] = request.name;
  return OneLine(done);
}

// Finds the node by its id, or by the host name it joined with. Repeating it is harmless.
absl::StatusOr<std::string> Access::Do(const core::ClientRevokeNode& request) {
  GT_ASSIGN_OR_RETURN(const std::vector<net::AllowedKey> keys,
                      net::ReadAllowedKeys(files_.authorized_path()));
  std::vector<net::AllowedKey> named;
  std::optional<net::AllowedKey> found;
  for (const net::AllowedKey& key : keys) {
    if (key.role != core::Role::kNode && !key.revoked) continue;
    if (net::KeyId(key.public_key) == request.node) found = key;
    if (!key.revoked && net::NameOf(key) == request.node) named.push_back(key);
  }
  if (!found && named.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(named.size(), " nodes joined as ", request.node,
                                                   ": give the id that `gtrain nodes` shows"));
  }
  if (!found && !named.empty()) found = named[0];
  if (!found)
    return absl::NotFoundError(absl::StrCat("no node ", request.node, "; `gtrain nodes` lists them"));
  if (!found->revoked) GT_RETURN_IF_ERROR(Revoke(*found));
  json done = json::object();
  done["revoked"] = net::KeyId(found->public_key);
  return OneLine(done);
}

std::vector<absl::StatusOr<NodeId>> Access::Join(absl::Span<const Joiner> joiners) {
  const absl::StatusOr<std::vector<net::AllowedKey>> keys = net::ReadAllowedKeys(files_.authorized_path());
  if (!keys.ok()) return std::vector<absl::StatusOr<NodeId>>(joiners.size(), keys.status());
  std::map<absl::string_view, const net::AllowedKey*> known;
  for (const net::AllowedKey& key : *keys) known.insert_or_assign(key.public_key, &key);
  const net::BootTime now = net::BootTimeNow();
  std::vector<absl::StatusOr<NodeId>> answers;
  std::map<absl::string_view, net::AllowedKey> added;
  bool spent = false;
  for (const Joiner& joiner : joiners) {
    answers.push_back(MayJoin(joiner, known, now));
    if (!answers.back().ok()) continue;
    spent = true;
    const absl::string_view key = joiner.join.public_key;
    if (known.contains(key)) continue;
    added.try_emplace(key, net::AllowedKey{core::Role::kNode, std::string(key), joiner.join.hostname});
  }
  std::vector<net::AllowedKey> lines;
  for (auto& [key, line] : added) lines.push_back(std::move(line));
  // The tokens first: a crash behind that is mended when the head starts again, a use given away is not.
  absl::Status status = spent ? tokens_.Save() : absl::OkStatus();
  if (status.ok() && !lines.empty()) status = net::AddAllowedKeys(files_.authorized_path(), lines);
  if (status.ok()) status = Refresh();
  if (!status.ok()) {  // nobody was let in, and whoever asks again needs the token
    std::set<std::string> nodes;
    for (const auto& [key, line] : known) nodes.insert(net::KeyId(key));
    tokens_.Forget(nodes);
  }
  ShowTokens();
  for (absl::StatusOr<NodeId>& answer : answers) {
    if (answer.ok() && !status.ok()) answer = status;
  }
  return answers;
}

absl::StatusOr<NodeId> Access::MayJoin(const Joiner& joiner,
                                       const std::map<absl::string_view, const net::AllowedKey*>& known,
                                       const net::BootTime& now) {
  if (!net::ValidKey(joiner.join.public_key)) return absl::InvalidArgumentError("that is not a public key");
  NodeId node(net::KeyId(joiner.join.public_key));
  if (const auto it = known.find(joiner.join.public_key); it != known.end()) {
    if (it->second->revoked) {
      return absl::PermissionDeniedError(
          "the key of this node was revoked; remove node.key in the agent's --dir to join as a new node");
    }
    if (it->second->role != core::Role::kNode) {
      return absl::PermissionDeniedError("this key already has another role");
    }
  }
  GT_RETURN_IF_ERROR(tokens_.Spend(joiner.token_id, node.value, now));
  return node;
}

}  // namespace gtrain::head
