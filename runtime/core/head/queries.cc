// Consoles (`gtrain exec -i`, `gtrain launch -i`): the head passes each turn to the agent of the rank's node
// and the answer back. It decides who may, and how many; everything else is between client and keeper, so a
// head that starts again goes on where it was.
#include "runtime/core/head/queries.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/probe.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/stalls.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

// With those that wait beside the ranks: they have logs and stacks, too.
int CountOf(const GenerationGrant& grant) {
  return static_cast<int>(grant.ranks.size() + grant.waiting.size());
}

using nlohmann::json;

constexpr size_t kExecBytesMax = 512 << 10;  // of a command's words: an agent takes messages of a mebibyte

}  // namespace

Queries::Queries(HeadContext& context, HeadModel& model, Stalls& stalls)
    : context_(context), model_(model), config_(context.config()), stalls_(stalls) {}

// True for a query of the head's own for a verdict, not for a client.
bool Queries::AsksForVerdict(const OpenQuery& open) {
  return open.query.kind == AgentQuery::Kind::kStacks && open.route.empty();
}

std::optional<Instant> Queries::NextDeadline() const {
  std::optional<Instant> next;
  for (const auto& [id, query] : queries_) next = std::min(next.value_or(query.deadline), query.deadline);
  return next;
}

// ---------------------------------------------------------------- asking

void Queries::Ask(const PeerMessage& event, const std::string& id, const NodeId& node, AgentQuery query,
                  Instant now) {
  query.epoch = model_.epoch();
  query.query = next_query_++;
  const std::string user = OwnerName(event.peer);
  OpenQuery open{event.route, event.peer.key_id, user, id, query, node, now + config_.query_timeout};
  const auto it = model_.nodes.find(node);
  if (it == model_.nodes.end() || it->second.route.empty() || it->second.state == NodeState::kDead) {
    queries_of_user_.Return(user);
    return AnswerFromMirror(open, absl::StrCat("node ", model_.Hostname(node), " is not connected"));
  }
  context_.Send(node, SendKind::kReply, query);
  open.query.console.input.clear();
  queries_[query.query] = std::move(open);
}

// Takes a place among the open questions, which EndQuery gives back.
absl::Status Queries::RoomToAsk(const PeerMessage& event) {
  return queries_of_user_.Take(OwnerName(event.peer), config_.queries_per_user_max, config_.queries_max,
                               "log reads and commands are open");
}

Queries::OpenQuery Queries::EndQuery(std::map<uint64_t, OpenQuery>::iterator query) {
  OpenQuery open = std::move(query->second);
  queries_.erase(query);
  if (!open.user.empty()) queries_of_user_.Return(open.user);
  return open;
}

absl::Status Queries::AskLogs(const PeerMessage& event, const std::string& id, const ClientLogs& logs,
                              Instant now) {
  const Job& job = *model_.FindJob(logs.job);
  if (!job.record.grant) {
    return absl::FailedPreconditionError(absl::StrCat("job ", logs.job.value, " has not started yet (",
                                                      job.record.reason, "): there are no logs"));
  }
  const Generation newest = job.record.grant->generation;
  const Generation generation{logs.generation.value_or(newest.value)};
  if (generation > newest) {
    return absl::NotFoundError(absl::StrCat("job ", logs.job.value, " has no generation ", generation.value,
                                            "; its newest is ", newest.value));
  }
  const GenerationGrant* grant = job.GrantOf(generation);
  if (grant == nullptr) {
    return absl::NotFoundError(absl::StrCat("where generation ", generation.value,
                                            " ran is not remembered; its logs are in ", job.record.run_dir,
                                            "/logs"));
  }
  const int ranks = CountOf(*grant);
  if (logs.rank < 0 || logs.rank >= ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", logs.rank, " of ", ranks, ": ranks are 0 to ", ranks - 1));
  }
  AgentQuery query;
  query.kind = AgentQuery::Kind::kReadLog;
  query.job = logs.job;
  query.generation = generation;
  query.rank = logs.rank;
  query.is_stderr = logs.is_stderr;
  query.offset = logs.offset;
  query.bytes_max = logs.bytes_max;
  GT_RETURN_IF_ERROR(RoomToAsk(event));
  Ask(event, id, PlaceOfRank(*grant, logs.rank).node, std::move(query), now);
  return absl::OkStatus();
}

// A command is run once for each request, also when the client asks again while it runs or because its answer
// got lost (fault H15). In memory only: after a restart of the head a repeated request runs it again.
bool Queries::RepeatedExec(const PeerMessage& event, const std::string& id) {
  for (auto& [number, open] : queries_) {
    if (open.client_key != event.peer.key_id || open.request_id != id) continue;
    open.route = event.route;
    ++context_.counters().deduplicated;
    return true;
  }
  for (const DoneExec& done : done_execs_) {
    if (done.client_key != event.peer.key_id || done.reply.id != id) continue;
    context_.Do(ReplyToClient{event.route, done.reply});
    ++context_.counters().deduplicated;
    return true;
  }
  return false;
}

absl::Status Queries::AskExec(const PeerMessage& event, const std::string& id, const ClientExec& exec,
                              Instant now) {
  if (RepeatedExec(event, id)) return absl::OkStatus();
  if (exec.argv.empty()) return absl::InvalidArgumentError("exec needs a command");
  size_t bytes = 0;
  for (const std::string& word : exec.argv) bytes += word.size();
  if (bytes > kExecBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("the command has ", bytes, " bytes and may have ",
                                                   kExecBytesMax, ": write it to a file and run that"));
  }
  AgentQuery query;
  query.kind = AgentQuery::Kind::kExec;
  query.argv = exec.argv;
  query.apart = exec.apart;
  return AskRank(event, id, *model_.FindJob(exec.job), exec.rank, std::move(query), now);
}

absl::Status Queries::AskStack(const PeerMessage& event, const std::string& id, const ClientStack& stack,
                               Instant now) {
  if (RepeatedExec(event, id)) return absl::OkStatus();
  AgentQuery query;
  query.kind = AgentQuery::Kind::kStacks;
  query.full = true;
  return AskRank(event, id, *model_.FindJob(stack.job), stack.rank, std::move(query), now);
}

absl::Status Queries::AskActors(const PeerMessage& event, const std::string& id, const ClientActors& actors,
                                Instant now) {
  if (RepeatedExec(event, id)) return absl::OkStatus();
  AgentQuery query;
  query.kind = AgentQuery::Kind::kActors;
  query.argv = {actors.question};
  return AskRank(event, id, *model_.FindJob(actors.job), actors.rank, std::move(query), now);
}

// Sends a query about a running rank to its agent.
absl::Status Queries::AskRank(const PeerMessage& event, const std::string& id, const Job& job, int rank,
                              AgentQuery query, Instant now) {
  const std::string& name = job.record.id.value;
  if (!job.Live()) return absl::FailedPreconditionError(absl::StrCat("job ", name, " has no running ranks"));
  if (rank < 0 || rank >= CountOf(*job.record.grant)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no rank ", rank, " in a world of ", job.record.grant->world_size));
  }
  query.job = job.record.id;
  query.generation = job.record.generation;
  query.rank = rank;
  GT_RETURN_IF_ERROR(RoomToAsk(event));
  Ask(event, id, PlaceOfRank(*job.record.grant, rank).node, std::move(query), now);
  return absl::OkStatus();
}

absl::Status Queries::AskConsole(const PeerMessage& event, const std::string& id,
                                 const ClientConsole& console, Instant now) {
  if (RepeatedExec(event, id)) return absl::OkStatus();
  const Job& job = *model_.FindJob(console.job);
  const std::string& name = job.record.id.value;
  if (console.turn.session.empty()) return absl::InvalidArgumentError("a console needs a session");
  if (!console.generation && !job.Live())
    return absl::FailedPreconditionError(absl::StrCat("job ", name, " has no running ranks"));
  const Generation generation{console.generation.value_or(job.record.generation.value)};
  const GenerationGrant* grant = job.GrantOf(generation);
  if (grant == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("generation ", generation.value, " of job ", name, " is over"));
  }
  if (console.rank < 0 || console.rank >= CountOf(*grant)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no rank ", console.rank, " in a world of ", grant->world_size));
  }
  const NodeId node = PlaceOfRank(*grant, console.rank).node;
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

void Queries::AskStacks(const Job& job, int culprit, Instant now) {
  for (const RankPlace& place : job.record.grant->ranks) {
    const auto it = model_.nodes.find(place.node);
    const bool reached =
        it != model_.nodes.end() && !it->second.route.empty() && it->second.state != NodeState::kDead;
    if (job.ExitOf(place.rank) != nullptr || !reached) continue;
    AgentQuery query;
    query.epoch = model_.epoch();
    query.query = next_query_++;
    query.kind = AgentQuery::Kind::kStacks;
    query.job = job.record.id;
    query.generation = job.record.generation;
    query.rank = place.rank;
    query.full = place.rank == culprit;
    context_.Send(place.node, SendKind::kReply, query);
    queries_[query.query] = {"", "", "", "", query, place.node, now + config_.query_timeout};
  }
}

bool Queries::AwaitsStacks(const JobId& job) const {
  return std::ranges::any_of(queries_, [&](const auto& item) {
    return AsksForVerdict(item.second) && item.second.query.job == job;
  });
}

// ---------------------------------------------------------------- answers

int Queries::WorldSizeOf(const AgentQuery& query) {
  const Job* job = model_.FindJob(query.job);
  const GenerationGrant* grant = job == nullptr ? nullptr : job->GrantOf(query.generation);
  return grant == nullptr ? 0 : CountOf(*grant);
}

void Queries::OnAnswer(const NodeId& node, const AgentAnswer& answer) {
  const auto it = queries_.find(answer.query);
  if (it == queries_.end() || it->second.node != node) {
    ++context_.counters().stale_dropped;
    return;
  }
  const OpenQuery open = EndQuery(it);
  if (AsksForVerdict(open)) return NoteStacks(open, answer.text);
  if (open.query.kind == AgentQuery::Kind::kConsole) return AnswerConsole(open, answer);
  if (!answer.ok) return AnswerFromMirror(open, answer.text);
  json document = {{"generation", open.query.generation.value},
                   {"rank", open.query.rank},
                   {"node", node.value},
                   {"hostname", model_.Hostname(node)},
                   {"text", answer.text}};
  if (open.query.kind == AgentQuery::Kind::kReadLog) {
    document["world_size"] = WorldSizeOf(open.query);
    document["next_offset"] = answer.next_offset;
    document["end"] = answer.end;
    document["mirrored"] = false;
  }
  if (open.query.kind == AgentQuery::Kind::kExec) {
    document["job"] = open.query.job.value;
    document["host"] = document["hostname"];  // the name that scripts know
    document["exit_code"] = answer.next_offset;
    document["timed_out"] = answer.timed_out;
    if (open.query.apart) {
      document["stdout"] = std::move(document["text"]);
      document.erase("text");
      document["stderr"] = answer.err;
    }
  }
  ClientReply reply = ReplyOf(open.request_id, OneLine(document));
  context_.Do(ReplyToClient{open.route, reply});
  if (open.query.kind != AgentQuery::Kind::kExec) return;
  constexpr size_t kDoneExecsKept = 16;  // of at most a mebibyte each
  done_execs_.push_back({open.client_key, std::move(reply)});
  if (done_execs_.size() > kDoneExecsKept) done_execs_.pop_front();
}

// Output is bytes, and a document is text: base64.
void Queries::AnswerConsole(const OpenQuery& open, const AgentAnswer& answer) {
  const std::string& session = open.query.console.session;
  if (answer.end || !answer.ok) consoles_.End(session);
  // A refusal of an agent or a keeper is final, unlike a node that is not connected.
  if (!answer.ok)
    return context_.Answer(open.route, open.request_id, absl::FailedPreconditionError(answer.text), "");
  nlohmann::json document = {{"job", open.query.job.value},
                             {"generation", open.query.generation.value},
                             {"rank", open.query.rank},
                             {"host", model_.Hostname(open.node)},
                             {"taken", answer.taken},
                             {"at", answer.at},
                             {"stdout", absl::Base64Escape(answer.text)},
                             {"stderr", absl::Base64Escape(answer.err)},
                             {"exit_code", nullptr}};
  if (answer.end) document["exit_code"] = answer.next_offset;
  context_.Answer(open.route, open.request_id, absl::OkStatus(),
                  document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

// Asked for by a stall verdict: they stand beside it in events.jsonl.
void Queries::NoteStacks(const OpenQuery& open, const std::string& text) {
  constexpr size_t kStacksBytes = 16 << 10;
  Job* job = model_.FindJob(open.query.job);
  if (job == nullptr || open.query.generation != job->record.generation) return;
  context_.Emit(*job, "stall",
                absl::StrCat("stacks of rank ", open.query.rank, " on ", model_.Hostname(open.node), ":\n",
                             Shortened(text, kStacksBytes)));
  context_.Dirty(*job);
  stalls_.CheckStalls(*job, context_.step_at());  // the kill waited for the last of them
}

// The node cannot answer: its last words were mirrored here.
void Queries::AnswerFromMirror(const OpenQuery& open, const std::string& why) {
  GT_PROBE("head.answers_from_mirror");
  if (open.query.kind != AgentQuery::Kind::kReadLog)
    return context_.Answer(open.route, open.request_id, absl::UnavailableError(why), "");
  ReplyFromSpill reply{.route = open.route,
                       .client_key = open.client_key,
                       .request_id = open.request_id,
                       .query = open.query,
                       .node = open.node,
                       .hostname = model_.Hostname(open.node),
                       .world_size = WorldSizeOf(open.query),
                       .why = why};
  if (const HeldTail* held = model_.tails.Find(TailOf(open.query))) reply.held = *held;
  if (!reply.held || reply.held->spilled > 0) return context_.Do(std::move(reply));
  context_.Do(ReplyToClient{open.route, Built(reply, std::nullopt)});
}

void Queries::ExpireQueries(Instant now) {
  std::vector<uint64_t> late;
  for (const auto& [id, open] : queries_) {
    if (open.deadline <= now) late.push_back(id);
  }
  for (const uint64_t id : late) {
    const OpenQuery open = EndQuery(queries_.find(id));
    const std::string why =
        absl::StrCat("the agent on ", model_.Hostname(open.node), " did not answer in ",
                     absl::FormatDuration(config_.query_timeout),
                     model_.store_full ? ": commands wait until the head can store again, and " : "",
                     model_.store_full ? model_.store_low.value_or("") : "");
    AsksForVerdict(open) ? NoteStacks(open, why) : AnswerFromMirror(open, why);
  }
}

}  // namespace gtrain::core
