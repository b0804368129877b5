#include "runtime/core/values/effects.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "nlohmann/json.hpp"

namespace gtrain::core {

std::string WallText(absl::Time at) {
  if (at == absl::InfinitePast()) return "";
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", at, absl::UTCTimeZone());
}

ClientReply ReplyOf(const std::string& id, const absl::StatusOr<std::string>& json) {
  ClientReply reply{.id = id, .ok = json.ok(), .code = static_cast<int>(json.status().code())};
  reply.error = std::string(json.status().message());
  if (json.ok()) reply.json = *json;
  return reply;
}

ClientReply Built(const ReplyToClient& reply) {
  ClientReply built = reply.reply;
  if (reply.document != nullptr) built.json = reply.document->Json();
  return built;
}

ClientReply Built(const ReplyFromSpill& reply, const std::optional<SpilledTail>& spilled) {
  constexpr size_t kToldMax = 64 << 10;
  if (!reply.held && !spilled) return ReplyOf(reply.request_id, absl::UnavailableError(reply.why));
  HeldTail tail = Joined(spilled, reply.held, kToldMax);
  const uint64_t start = tail.end_offset - std::min<uint64_t>(tail.end_offset, tail.text.size());
  const AgentQuery& query = reply.query;
  if (query.offset > start) tail.text.erase(0, std::min<size_t>(tail.text.size(), query.offset - start));
  return ReplyOf(reply.request_id,
                 OneLine({{"generation", query.generation.value},
                          {"rank", query.rank},
                          {"world_size", reply.world_size},
                          {"node", reply.node.value},
                          {"hostname", reply.hostname},
                          {"text", tail.text},
                          {"next_offset", tail.end_offset},
                          {"end", true},
                          {"mirrored", true},
                          {"note", absl::StrCat(reply.why, "; these are the last lines it sent")}}));
}

}  // namespace gtrain::core
