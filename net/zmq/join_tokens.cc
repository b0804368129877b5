#include "net/zmq/join_tokens.h"

#include <time.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "net/zmq/keys.h"

namespace gtrain::net {
namespace {

using nlohmann::json;

constexpr size_t kTokenFileBytesMax = 4 << 20;
constexpr size_t kTokensMax = 1000;

JoinTokenRecord FromJson(const json& j) {
  JoinTokenRecord token;
  token.id = j.at("id").get<std::string>();
  token.uses = j.at("uses").get<int>();
  token.spent_for = j.at("spent_for").get<std::vector<std::string>>();
  token.by = j.at("by").get<std::string>();
  token.made = {j.at("boot_id").get<std::string>(), absl::Milliseconds(j.at("boot_ms").get<int64_t>()),
                absl::FromUnixMillis(j.at("wall_ms").get<int64_t>())};
  token.life = absl::Milliseconds(j.at("life_ms").get<int64_t>());
  return token;
}

json ToJson(const JoinTokenRecord& token) {
  return {{"id", token.id},
          {"uses", token.uses},
          {"spent_for", token.spent_for},
          {"by", token.by},
          {"boot_id", token.made.boot_id},
          {"boot_ms", absl::ToInt64Milliseconds(token.made.since_boot)},
          {"wall_ms", absl::ToUnixMillis(token.made.wall)},
          {"life_ms", absl::ToInt64Milliseconds(token.life)}};
}

}  // namespace

BootTime BootTimeNow() {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  BootTime time{"", absl::DurationFromTimespec(now), absl::Now()};
  char id[64] = "";
  if (FILE* file = fopen("/proc/sys/kernel/random/boot_id", "re")) {
    if (fgets(id, sizeof(id), file) != nullptr) time.boot_id = std::string(absl::StripAsciiWhitespace(id));
    fclose(file);
  }
  return time;
}

absl::Duration JoinTokenRecord::Left(const BootTime& now) const {
  const bool same_boot = !made.boot_id.empty() && made.boot_id == now.boot_id;
  const absl::Duration passed = same_boot ? now.since_boot - made.since_boot : now.wall - made.wall;
  if (passed < absl::ZeroDuration() || passed >= life) return absl::ZeroDuration();
  return life - passed;
}

absl::Status JoinTokens::Load() {
  tokens_.clear();
  const absl::StatusOr<std::string> text = ReadFile(path_, kTokenFileBytesMax);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  if (!text.ok()) return text.status();
  try {
    const json all = json::parse(ShallowJson(*text));
    for (const json& one : all.at("tokens")) tokens_.push_back(FromJson(one));
  } catch (const json::exception& e) {
    return absl::DataLossError(absl::StrCat(path_, " is not a file of join tokens (", e.what(),
                                            "); remove it: unspent tokens are lost, nothing else"));
  }
  return absl::OkStatus();
}

absl::Status JoinTokens::Save() const {
  json all = {{"tokens", json::array()}};
  for (const JoinTokenRecord& token : tokens_) all["tokens"].push_back(ToJson(token));
  return WriteFileDurable(path_, all.dump(1) + "\n", 0600);
}

absl::Status JoinTokens::Add(absl::string_view public_key, int uses, absl::Duration life,
                             const std::string& by, const BootTime& now) {
  std::erase_if(tokens_, [&](const JoinTokenRecord& t) { return t.Left(now) == absl::ZeroDuration(); });
  if (tokens_.size() >= kTokensMax) {
    return absl::ResourceExhaustedError("too many join tokens; wait until some expire, or revoke some");
  }
  tokens_.push_back({KeyId(public_key), uses, {}, by, now, life});
  return Save();
}

absl::Status JoinTokens::Spend(const std::string& id, const std::string& node, const BootTime& now) {
  const auto token = std::find_if(tokens_.begin(), tokens_.end(), [&](const auto& t) { return t.id == id; });
  if (token == tokens_.end() || token->Left(now) == absl::ZeroDuration()) {
    return absl::PermissionDeniedError("this join token is too old or was revoked");
  }
  auto& spent = token->spent_for;
  if (std::find(spent.begin(), spent.end(), node) != spent.end()) return absl::OkStatus();
  if (token->uses_left() <= 0) return absl::PermissionDeniedError("this join token is used up");
  spent.push_back(node);
  return absl::OkStatus();
}

void JoinTokens::Forget(const std::set<std::string>& nodes_let_in) {
  for (JoinTokenRecord& token : tokens_)
    std::erase_if(token.spent_for, [&](const std::string& node) { return !nodes_let_in.contains(node); });
}

absl::Status JoinTokens::Revoke(const std::string& id) {
  if (std::erase_if(tokens_, [&](const JoinTokenRecord& t) { return t.id == id; }) == 0) {
    return absl::NotFoundError(absl::StrCat("no join token ", id, "; `gtrain token ls` lists them"));
  }
  return Save();
}

std::vector<JoinTokenRecord> JoinTokens::Live(const BootTime& now) const {
  std::vector<JoinTokenRecord> live;
  for (const JoinTokenRecord& token : tokens_) {
    if (token.Left(now) > absl::ZeroDuration()) live.push_back(token);
  }
  return live;
}

}  // namespace gtrain::net
