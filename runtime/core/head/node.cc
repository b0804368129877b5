#include "runtime/core/head/node.h"

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace gtrain::core {

std::string Rounded(absl::Duration left) { return PrintDuration(absl::Floor(left, absl::Seconds(1))); }

// The one that goes first.
const NodeNotice& Node::Parting() const {
  if (record.drain.kind != NoticeKind::kLeave) return record.notice;
  if (record.notice.kind != NoticeKind::kLeave) return record.drain;
  return *notice_at <= *drain_at ? record.notice : record.drain;
}

std::optional<Instant> Node::PartsAt() const {
  if (!Leaving()) return std::nullopt;
  return &Parting() == &record.notice ? notice_at : drain_at;
}

std::string Node::WhyUnusable() const {
  if (state == NodeState::kSuspect) return "suspect: it has fallen silent";
  if (rival) return "another agent has said hello with its key";
  if (Leaving()) return absl::StrCat("leaving: ", Parting().source);
  if (quarantined_until) return quarantine;
  return record.unclean ? "a process survived SIGKILL there" : "";
}

NodePlace PlaceOf(const Node& node) {
  const auto label = [&](const char* name) {
    const auto it = node.record.labels.find(name);
    return it == node.record.labels.end() ? std::string() : it->second;
  };
  return {node.record.id, node.record.address, node.record.hostname, label("zone"),
          label("rack"),  node.near_port,      node.near_key};
}

}  // namespace gtrain::core
