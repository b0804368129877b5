// Consoles (`gtrain exec -i`, `gtrain launch -i`): the head passes each turn to the agent of the rank's node
// and the answer back. It decides who may, and how many; everything else is between client and keeper, so a
// head that starts again goes on where it was.
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_state.h"
#include "runtime/core/values/authority.h"

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

absl::Status HeadState::AskConsole(const PeerMessage& event, const std::string& id,
                                   const ClientConsole& console, Instant now) {
  if (RepeatedExec(event, id)) return absl::OkStatus();
  const Job& job = *FindJob(console.job);
  const std::string& name = job.record.id.value;
  if (console.turn.session.empty()) return absl::InvalidArgumentError("a console needs a session");
  if (!console.generation && !job.Live())
    return absl::FailedPreconditionError(absl::StrCat("job ", name, " has no running ranks"));
  const Generation generation{console.generation.value_or(job.record.generation.value)};
  const GenerationGrant* grant = GrantOf(job, generation);
  if (grant == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("generation ", generation.value, " of job ", name, " is over"));
  }
  if (console.rank < 0 || console.rank >= grant->world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("no rank ", console.rank, " in a world of ", grant->world_size));
  }
  const NodeId node = grant->ranks[static_cast<size_t>(console.rank)].node;
  AgentQuery query;
  query.kind = AgentQuery::Kind::kConsole;
  query.job = job.record.id;
  query.generation = generation;
  query.rank = console.rank;
  query.console = console.turn;
  GT_RETURN_IF_ERROR(consoles_.Turn(console.turn, OwnerName(event.peer), node, now));
  GT_RETURN_IF_ERROR(RoomToAsk(event));
  Ask(event, id, node, std::move(query), now);
  return absl::OkStatus();
}

// Output is bytes, and a document is text: base64.
void HeadState::AnswerConsole(const OpenQuery& open, const AgentAnswer& answer) {
  const std::string& session = open.query.console.session;
  if (answer.end || !answer.ok) consoles_.End(session);
  // What an agent or a keeper refuses stays refused, unlike a node that is not connected.
  if (!answer.ok) return Answer(open.route, open.request_id, absl::FailedPreconditionError(answer.text), "");
  nlohmann::json document = {{"job", open.query.job.value},
                             {"generation", open.query.generation.value},
                             {"rank", open.query.rank},
                             {"host", Hostname(open.node)},
                             {"taken", answer.taken},
                             {"at", answer.at},
                             {"stdout", absl::Base64Escape(answer.text)},
                             {"stderr", absl::Base64Escape(answer.err)},
                             {"exit_code", nullptr}};
  if (answer.end) document["exit_code"] = answer.next_offset;
  Answer(open.route, open.request_id, absl::OkStatus(),
         document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace gtrain::core
