#include "runtime/core/head/console_sessions.h"

#include "absl/strings/str_cat.h"

namespace gtrain::core {

absl::Status ConsoleSessions::Turn(const Console& turn, const std::string& user, const NodeId& node,
                                   Instant now) {
  std::erase_if(open_, [&](const auto& item) { return now - item.second.heard > kSilenceMax; });
  if (const auto it = open_.find(turn.session); it != open_.end()) {
    it->second.heard = now;
    return absl::OkStatus();
  }
  int of_user = 0, on_node = 0;
  for (const auto& [id, session] : open_) {
    of_user += session.user == user ? 1 : 0;
    on_node += session.node == node ? 1 : 0;
  }
  const bool room = of_user < kOfUserMax && on_node < kOnNodeMax;
  if (!turn.start) {  // begun under a head before this one
    if (room) open_[turn.session] = {user, node, now};
    return absl::OkStatus();
  }
  if (of_user >= kOfUserMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(of_user, " consoles (`exec -i`, `launch -i`) of ", user,
                     " are open, the most this head takes of one user: end one of them"));
  }
  if (!room) {
    return absl::ResourceExhaustedError(
        absl::StrCat(on_node,
                     " consoles (`exec -i`, `launch -i`) are open on that machine, the most there "
                     "may be: wait until one of them ends"));
  }
  open_[turn.session] = {user, node, now};
  return absl::OkStatus();
}

}  // namespace gtrain::core
