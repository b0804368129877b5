// Requests. The role comes from the connection's key; a changing request is remembered with its answer, so
// a client that lost the reply and asks again gets the same one (fault H15). Logs and exec are questions
// to an agent: the reply follows when the agent answers or its time is up.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/json_text.h"
#include "base/probe.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "base/utf8.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_state.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

using nlohmann::json;

constexpr size_t kExecBytesMax = 512 << 10;  // of a command's words: an agent takes messages of a mebibyte

const JobId* JobOf(const ClientRequestBody& body) {
  if (const auto* b = std::get_if<ClientStop>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientStatus>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientWhy>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientLogs>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientExec>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientEvents>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientStack>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientScale>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientConsole>(&body)) return &b->job;
  return nullptr;
}

}  // namespace

// Refusals are bounded, so that who may do nothing cannot fill the log; how many were left out is said.
void HeadState::Audit(const PeerMessage& event, absl::string_view action, std::string target,
                      const absl::Status& status, Instant now) {
  constexpr int kRefusalsPerMinute = 60;
  AuditEntry entry{event.peer, event.address, std::string(action), std::move(target)};
  if (const auto* request = std::get_if<ClientRequest>(&event.message))
    entry.reason = ReasonOf(request->body);
  if (!status.ok()) {
    if (now - refusals_since_ >= absl::Minutes(1)) {
      refusals_since_ = now;
      refusals_ = 0;
    }
    if (++refusals_ > kRefusalsPerMinute) return (void)++refusals_left_out_;
    entry.outcome = Shortened(
        absl::StrCat(absl::IsPermissionDenied(status) ? "denied: " : "failed: ", status.message()), 1 << 10);
  }
  if (refusals_left_out_ > 0) {
    absl::StrAppend(&entry.outcome, " (", refusals_left_out_, " refusals before this are not listed)");
    refusals_left_out_ = 0;
  }
  audit_.push_back(std::move(entry));
}

void HeadState::Answer(const std::string& route, const std::string& id, const absl::Status& status,
                       std::string json) {
  out_.push_back(ReplyToClient{route, status.ok() ? ReplyOf(id, std::move(json)) : ReplyOf(id, status)});
}

// A document is built by whoever delivers it.
void HeadState::Answer(const PeerMessage& event, const std::string& id,
                       std::shared_ptr<const Document> document) {
  out_.push_back(
      ReplyToClient{event.route, ClientReply{.id = id}, false, std::move(document), event.peer.key_id});
}

void HeadState::Remember(const Peer& peer, const ClientReply& reply) {
  RequestRecord record{peer.key_id, reply.id, cluster_.next_request++, reply};
  const std::string key = KeyOf(record);
  if (requests_.contains(key)) ForgetRequest(requests_.at(key).number);  // of a job that is taken up again
  request_order_[record.number] = key;
  std::set<uint64_t>& own = requests_of_key_[peer.key_id];
  own.insert(record.number);
  Write(record);
  Write(cluster_);
  requests_[key] = std::move(record);
  if (static_cast<int>(own.size()) > config_.requests_per_key_max) ForgetRequest(*own.begin());
  if (static_cast<int>(requests_.size()) <= config_.requests_max) return;
  // The oldest of who has most: what one client asks for never takes the answers of others.
  const auto most = std::max_element(
      requests_of_key_.begin(), requests_of_key_.end(),
      [](const auto& one, const auto& other) { return one.second.size() < other.second.size(); });
  ForgetRequest(*most->second.begin());
}

void HeadState::ForgetRequest(uint64_t number) {
  const std::string key = request_order_.at(number);
  Delete(key);
  const std::string client = requests_.at(key).client_key;
  requests_.erase(key);
  request_order_.erase(number);
  requests_of_key_[client].erase(number);
  if (requests_of_key_[client].empty()) requests_of_key_.erase(client);
}

void HeadState::OnRequest(const PeerMessage& event, const ClientRequest& request, Instant now) {
  active_at_ = now;
  const std::string& route = event.route;
  const RequestRule& rule = RuleOf(request.body);
  const JobId* job_id = JobOf(request.body);
  const auto* drained = std::get_if<ClientDrainNode>(&request.body);
  const std::string target = drained != nullptr ? drained->node : job_id == nullptr ? "" : job_id->value;
  const auto refuse = [&](const absl::Status& status) {
    if (rule.changes || absl::IsPermissionDenied(status)) Audit(event, rule.name, target, status, now);
    Answer(route, request.id, status, "");
  };
  if (absl::Status permit = Authorize(event.peer, request.body, nullptr); !permit.ok()) {
    ++counters_.denied;
    return refuse(permit);
  }
  const auto repeated = requests_.find(KeyOf(RequestRecord{event.peer.key_id, request.id}));
  if (repeated != requests_.end()) {
    GT_PROBE("head.request_repeated");
    ++counters_.deduplicated;
    out_.push_back(ReplyToClient{route, repeated->second.reply, true, nullptr, event.peer.key_id});
    return;
  }
  // Who asked may have given up, and not expect any more that it is done. Who still waits asks again.
  if (request.deadline > absl::ZeroDuration() && event.waited >= request.deadline) {
    GT_PROBE("head.request_too_late");
    return Answer(
        route, request.id,
        absl::DeadlineExceededError(absl::StrCat(
            "the request may have waited ", PrintDuration(absl::Floor(event.waited, absl::Seconds(1))),
            " for this head, which was not running; its time was ", absl::FormatDuration(request.deadline),
            ": nothing was done, ask again")),
        "");
  }
  Job* job = job_id == nullptr ? nullptr : FindJob(*job_id);
  if (job_id != nullptr && !job_id->empty() && job == nullptr) {
    return refuse(
        absl::NotFoundError(absl::StrCat("no job ", job_id->value, "; `gtrain status` lists them")));
  }
  if (job != nullptr) {
    if (absl::Status permit = Authorize(event.peer, request.body, &job->record.owner); !permit.ok()) {
      ++counters_.denied;
      return refuse(permit);
    }
    if (job->record.client_key == event.peer.key_id) job->client_seen = now;
  }

  absl::StatusOr<std::string> changed = absl::UnknownError("");
  if (const auto* submit = std::get_if<ClientSubmit>(&request.body)) {
    changed = Submit(event, request.id, *submit, now);
  } else if (const auto* stop = std::get_if<ClientStop>(&request.body)) {
    changed = Stop(event.peer, *stop, now);
  } else if (const auto* scale = std::get_if<ClientScale>(&request.body)) {
    changed = Scale(event.peer, *scale, now);
  } else if (const auto* shutdown = std::get_if<ClientShutdown>(&request.body)) {
    changed = Shutdown(*shutdown, now);
  } else if (drained != nullptr) {
    changed = Drain(event.peer, *drained, now);
  } else if (const auto* status = std::get_if<ClientStatus>(&request.body)) {
    return Answer(event, request.id, StatusOf(*status, OwnerName(event.peer)));
  } else if (std::holds_alternative<ClientNodes>(request.body)) {
    return Answer(event, request.id, NodesNow());
  } else if (const auto* revoke = std::get_if<ClientRevokeNode>(&request.body)) {
    return RevokeNode(event, request, *revoke, now);
  } else if (job_id == nullptr) {  // keys and tokens
    out_.push_back(ServiceRequest{event.peer, route, event.address, event.message});
    return;
  } else if (job == nullptr) {
    return Answer(route, request.id, absl::InvalidArgumentError("the request names no job"), "");
  } else if (std::holds_alternative<ClientWhy>(request.body)) {
    return Answer(event, request.id, WhyOf(*job));
  } else {
    absl::Status asked;
    if (const auto* logs = std::get_if<ClientLogs>(&request.body))
      asked = AskLogs(event, request.id, *logs, now);
    if (const auto* exec = std::get_if<ClientExec>(&request.body))
      asked = AskExec(event, request.id, *exec, now);
    if (const auto* stack = std::get_if<ClientStack>(&request.body))
      asked = AskStack(event, request.id, *stack, now);
    if (const auto* events = std::get_if<ClientEvents>(&request.body))
      asked = Poll(event, request.id, *events, now);
    const auto* console = std::get_if<ClientConsole>(&request.body);
    if (console != nullptr) asked = AskConsole(event, request.id, *console, now);
    if (!asked.ok()) return refuse(asked);
    if (rule.changes && (console == nullptr || console->turn.start))
      Audit(event, rule.name, target, asked, now);
    return;
  }
  if (!changed.ok()) return refuse(changed.status());  // it changed nothing and may be made again
  if (!std::holds_alternative<ClientSubmit>(request.body))
    Audit(event, rule.name, target, changed.status(), now);
  out_.push_back(
      ReplyToClient{route, ReplyOf(request.id, std::move(*changed)), true, nullptr, event.peer.key_id});
  Remember(event.peer, std::get<ReplyToClient>(out_.back()).reply);
}

// ---------------------------------------------------------------- changes

absl::StatusOr<std::string> HeadState::Submit(const PeerMessage& event, const std::string& id,
                                              const ClientSubmit& submit, Instant now) {
  if (shutdown_when_idle_) return absl::UnavailableError("the cluster is shutting down: start it again");
  if (store_low_) return absl::ResourceExhaustedError(absl::StrCat("no new jobs: ", *store_low_));
  if (static_cast<int>(LiveJobs().size()) >= config_.live_jobs_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(config_.live_jobs_max, " jobs are live, the most this head takes: wait or stop some"));
  }
  const std::string owner = OwnerName(event.peer);
  int own = 0;
  size_t own_bytes = BytesOfUser(submit.spec_text, submit.env);
  for (const Job* job : LiveJobs()) {
    if (job->record.owner != owner) continue;
    ++own;
    own_bytes += job->user_bytes;
  }
  if (own_bytes > config_.live_jobs_bytes_per_user_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job files and environments of the ", own, " live jobs of ", owner,
                     " and of this one are more than the ", config_.live_jobs_bytes_per_user_max >> 20,
                     " MiB that this head takes of one user: wait or stop some"));
  }
  if (own >= config_.live_jobs_per_user_max && !config_.local) {
    return absl::ResourceExhaustedError(absl::StrCat(
        own, " jobs of ", owner, " are live, the most this head takes of one user: wait or stop some"));
  }
  absl::StatusOr<spec::JobSpec> spec = config_.parse_job(submit.spec_text);
  if (!spec.ok()) return spec.status();
  if (absl::Status free =
          submit.takeover ? MayTakeOver(event.peer, *spec) : CheckDirectory(*spec, owner, now);
      !free.ok()) {
    return free;
  }
  JobRecord record;
  record.number = cluster_.next_job;
  record.id = JobId(absl::StrCat(spec->name.empty() ? "job" : spec->name, "-", record.number));
  record.name = spec->name;
  record.spec_text = submit.spec_text;
  record.env = submit.env;
  constexpr size_t kClusterLetters = 8;  // of 32
  const std::string cluster = config_.cluster.value.substr(0, kClusterLetters);
  record.run_dir = absl::StrReplaceAll(submit.run_dir, {{"{job}", record.id.value}, {"{cluster}", cluster}});
  record.resume = submit.resume;
  record.client_key = event.peer.key_id;
  record.owner = owner;
  record.request_id = id;
  record.end_with_client = submit.end_with_client;
  record.takeover = submit.takeover;
  record.takeover_own = submit.takeover && event.peer.role != Role::kAdmin;
  record.submitted_at = Wall(now);
  record.reason = "just submitted";
  // It is shown to everybody who may see the job, in lines of terminals and logs.
  if (!IsPlainLine(record.run_dir)) {
    return absl::InvalidArgumentError(
        "the run directory's path has control characters, line ends or bytes that are no UTF-8: name "
        "another");
  }
  // As it is with what stands for {job} put in, and as it will be read back.
  constexpr size_t kRunDirBytesMax = 3'500;  // room for what is made inside it
  if (record.run_dir.size() > kRunDirBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the run directory's path has more than ", kRunDirBytesMax, " bytes"));
  }
  if (config_.check_record) {
    if (absl::Status readable = config_.check_record(JobSubmission(record)); !readable.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("this job cannot be stored: ", readable.message()));
    }
  }
  ++cluster_.next_job;
  Job& job = AddJob(std::move(record), *std::move(spec), now);
  Dirty(job);
  Write(cluster_);
  Emit(job, "state", "QUEUED: submitted");
  if (submit.takeover) SayWhoTakesOver(job, /*since_its_submit=*/false);
  DropOldJobs();
  fresh_.push_back(job.record.id);
  Say(absl::StrCat(job.record.id.value, " submitted"));
  Audit(event, "submit", job.record.id.value, absl::OkStatus(), now);
  return OneLine({{"job", job.record.id.value}, {"run_dir", job.record.run_dir}});
}

// Jobs that are over beyond the limits are forgotten: the oldest of who has most of them, in number or in
// bytes. Costs nothing while both limits hold.
void HeadState::DropOldJobs() {
  while (static_cast<int>(jobs_.size()) > config_.jobs_max) {
    if (!DropOfMost([](const JobsOver& own) { return own.jobs.size(); })) break;
  }
  while (over_bytes_ > config_.jobs_bytes_max) {
    if (!DropOfMost([](const JobsOver& own) { return own.bytes; })) break;
  }
}

// False: there is none. A job whose nodes have not all said that its ranks are gone is passed over: it keeps
// others away from them.
bool HeadState::DropOfMost(absl::FunctionRef<size_t(const JobsOver&)> what) {
  std::vector<const JobsOver*> users;
  for (const auto& [owner, own] : over_of_user_) users.push_back(&own);
  std::ranges::sort(users, std::greater(), [&](const JobsOver* own) { return what(*own); });
  for (const JobsOver* own : users) {
    for (const uint64_t number : own->jobs) {
      if (jobs_.at(job_order_.at(number)).record.unreleased.empty()) return DropOver(number), true;
    }
  }
  return false;
}

// What a job that is over holds until it is forgotten, about. Of n ranks some 700 bytes each, and what they
// wrote last.
size_t HeadState::BytesKept(const Job& job) {
  const auto bytes_of = [](const GenerationGrant& grant) {
    return grant.ranks.size() * sizeof(RankPlace) + grant.nodes.size() * sizeof(NodePlace);
  };
  const JobRecord& record = job.record;
  size_t bytes = sizeof(Job) + 2 * job.user_bytes;  // the text and what was read from it
  bytes += record.reason.size() + record.ending_reason.size() + job.ranks.size() * (sizeof(RankLive) + 64);
  if (record.grant) bytes += bytes_of(*record.grant);
  for (const FaultRecord& fault : record.faults)
    bytes += sizeof(FaultRecord) + fault.message.size() + fault.tail.size() + fault.signature.size();
  for (const auto& [generation, grant] : job.past) bytes += bytes_of(grant);
  for (const RankExit& exit : record.exits)
    bytes += sizeof(RankExit) + exit.message.size() + exit.tail.size() + exit.storage.size();
  for (const std::shared_ptr<const EmitEvent>& event : job.events)
    bytes += sizeof(EmitEvent) + event->run_dir.size() + event->text.size();
  return bytes;
}

void HeadState::CountOver(Job& job) {
  // What ranks said last explains a failure; that of 1,000 whose job is well is megabytes. Older heads stored
  // it.
  if (job.record.state != JobState::kFailed) {
    for (RankExit& exit : job.record.exits) std::string().swap(exit.tail);  // clear() would keep the memory
  }
  job.kept_bytes = BytesKept(job);
  JobsOver& own = over_of_user_[job.record.owner];
  own.bytes += job.kept_bytes;
  own.jobs.insert(job.record.number);
  over_bytes_ += job.kept_bytes;
}

void HeadState::DropOver(uint64_t number) {
  const auto it = job_order_.find(number);
  const Job& job = jobs_.at(it->second);
  const auto own = over_of_user_.find(job.record.owner);
  own->second.bytes -= job.kept_bytes;
  own->second.jobs.erase(number);
  if (own->second.jobs.empty()) over_of_user_.erase(own);
  over_bytes_ -= job.kept_bytes;
  DeleteJob(job);
  if (job.checkpoint) Delete(KeyOf(*job.checkpoint));
  tails_.Forget(it->second);
  out_.push_back(DropSpilled{it->second});
  dirty_jobs_.erase(it->second);
  news_.insert(it->second);
  live_jobs_.erase(number);
  jobs_.erase(it->second);
  job_order_.erase(it);
}

// First stop: TERM and stop_grace, the ranks may save. Second: KILL.
absl::StatusOr<std::string> HeadState::Stop(const Peer& peer, const ClientStop& stop, Instant now) {
  Job* job = FindJob(stop.job);
  if (job == nullptr) return absl::InvalidArgumentError("the request names no job");
  JobRecord& record = job->record;
  const auto reply = [&](const char* what) {
    return OneLine({{"job", record.id.value}, {"state", Name(record.state)}, {"stop", what}});
  };
  if (IsFinal(record.state)) return reply("over");
  const std::string reason = absl::StrCat("stopped by ", OwnerName(peer), stop.reason.empty() ? "" : ": ",
                                          Shortened(stop.reason, 1 << 10));
  if (!job->Live() && record.ending == Ending::kNone) {
    Finish(*job, JobState::kCancelled, reason);
    return reply("over");
  }
  const bool again = record.ending == Ending::kCancel;
  if (again) GT_PROBE("head.second_stop");
  if (!again && !job->Live()) GT_PROBE("head.stop_while_ending");
  const EndMode mode = again || stop.now ? EndMode::kStopNow : EndMode::kStop;
  const absl::Duration grace = mode == EndMode::kStop ? job->spec.stop_grace : absl::ZeroDuration();
  if (job->Live()) {
    BeginEnding(*job, Ending::kCancel, mode, grace, reason, now);
  } else {
    record.ending = Ending::kCancel;
    if (!again) record.ending_reason = reason;  // the first is why it ends
    job->gone_deadline = now + grace + config_.gone_margin;
    for (const NodeId& node : record.unreleased) SendRevoke(*job, node, mode, grace);
    Move(*job, record.state, absl::StrCat(again ? "stopping now: " : "stopping: ", reason));
    ContinueEnding(*job, now);
  }
  return reply(mode == EndMode::kStop ? "graceful" : "now");
}

absl::StatusOr<std::string> HeadState::Shutdown(const ClientShutdown& shutdown, Instant now) {
  shutdown_when_idle_ = true;
  const std::vector<Job*> live = LiveJobs();
  if (!shutdown.when_idle) {
    for (Job* job : live) {
      if (job->Live()) {
        BeginEnding(*job, Ending::kCancel, EndMode::kStopNow, absl::ZeroDuration(),
                    "the cluster is shut down", now);
      } else if (job->record.ending == Ending::kNone) {
        Finish(*job, JobState::kCancelled, "the cluster is shut down");
      } else {
        job->record.ending = Ending::kCancel;
        job->record.ending_reason = "the cluster is shut down";
        for (const NodeId& node : job->record.unreleased) {
          SendRevoke(*job, node, EndMode::kStopNow, absl::ZeroDuration());
        }
        Dirty(*job);
      }
    }
  }
  return OneLine({{"live_jobs", live.size()}});
}

// ---------------------------------------------------------------- questions to agents

void HeadState::Ask(const PeerMessage& event, const std::string& id, const NodeId& node, AgentQuery query,
                    Instant now) {
  query.epoch = epoch();
  query.query = next_query_++;
  const std::string user = OwnerName(event.peer);
  OpenQuery open{event.route, event.peer.key_id, user, id, query, node, now + config_.query_timeout};
  const auto it = nodes_.find(node);
  if (it == nodes_.end() || it->second.route.empty() || it->second.state == NodeState::kDead) {
    queries_of_user_.Return(user);
    return AnswerFromMirror(open, absl::StrCat("node ", Hostname(node), " is not connected"));
  }
  Send(node, SendKind::kReply, query);
  open.query.console.input.clear();
  queries_[query.query] = std::move(open);
}

// Takes a place among the open questions, which EndQuery gives back.
absl::Status HeadState::RoomToAsk(const PeerMessage& event) {
  return queries_of_user_.Take(OwnerName(event.peer), config_.queries_per_user_max, config_.queries_max,
                               "log reads and commands are open");
}

OpenQuery HeadState::EndQuery(std::map<uint64_t, OpenQuery>::iterator query) {
  OpenQuery open = std::move(query->second);
  queries_.erase(query);
  if (!open.user.empty()) queries_of_user_.Return(open.user);
  return open;
}

absl::Status HeadState::AskLogs(const PeerMessage& event, const std::string& id, const ClientLogs& logs,
                                Instant now) {
  const Job& job = *FindJob(logs.job);
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
  const GenerationGrant* grant = GrantOf(job, generation);
  if (grant == nullptr) {
    return absl::NotFoundError(absl::StrCat("where generation ", generation.value,
                                            " ran is not remembered; its logs are in ", job.record.run_dir,
                                            "/logs"));
  }
  if (logs.rank < 0 || logs.rank >= grant->world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", logs.rank, " of ", grant->world_size,
                                                   ": ranks are 0 to ", grant->world_size - 1));
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
  Ask(event, id, grant->ranks[logs.rank].node, std::move(query), now);
  return absl::OkStatus();
}

// A command is run once for each request, also when the client asks again while it runs or because its answer
// got lost (fault H15). In memory only: after a restart of the head a repeated request runs it again.
bool HeadState::RepeatedExec(const PeerMessage& event, const std::string& id) {
  for (auto& [number, open] : queries_) {
    if (open.client_key != event.peer.key_id || open.request_id != id) continue;
    open.route = event.route;
    ++counters_.deduplicated;
    return true;
  }
  for (const DoneExec& done : done_execs_) {
    if (done.client_key != event.peer.key_id || done.reply.id != id) continue;
    out_.push_back(ReplyToClient{event.route, done.reply});
    ++counters_.deduplicated;
    return true;
  }
  return false;
}

absl::Status HeadState::AskExec(const PeerMessage& event, const std::string& id, const ClientExec& exec,
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
  return AskRank(event, id, *FindJob(exec.job), exec.rank, std::move(query), now);
}

absl::Status HeadState::AskStack(const PeerMessage& event, const std::string& id, const ClientStack& stack,
                                 Instant now) {
  if (RepeatedExec(event, id)) return absl::OkStatus();
  AgentQuery query;
  query.kind = AgentQuery::Kind::kStacks;
  query.full = true;
  return AskRank(event, id, *FindJob(stack.job), stack.rank, std::move(query), now);
}

// Of a rank that runs.
absl::Status HeadState::AskRank(const PeerMessage& event, const std::string& id, const Job& job, int rank,
                                AgentQuery query, Instant now) {
  const std::string& name = job.record.id.value;
  if (!job.Live()) return absl::FailedPreconditionError(absl::StrCat("job ", name, " has no running ranks"));
  if (rank < 0 || rank >= job.record.grant->world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("no rank ", rank, " in a world of ", job.record.grant->world_size));
  }
  query.job = job.record.id;
  query.generation = job.record.generation;
  query.rank = rank;
  GT_RETURN_IF_ERROR(RoomToAsk(event));
  Ask(event, id, job.record.grant->ranks[rank].node, std::move(query), now);
  return absl::OkStatus();
}

const GenerationGrant* HeadState::GrantOf(const Job& job, Generation generation) const {
  if (job.record.grant && job.record.grant->generation == generation) return &*job.record.grant;
  const auto past = job.past.find(generation);
  return past == job.past.end() ? nullptr : &past->second;
}

int HeadState::WorldSizeOf(const AgentQuery& query) {
  const Job* job = FindJob(query.job);
  const GenerationGrant* grant = job == nullptr ? nullptr : GrantOf(*job, query.generation);
  return grant == nullptr ? 0 : grant->world_size;
}

void HeadState::OnAnswer(const NodeId& node, const AgentAnswer& answer) {
  const auto it = queries_.find(answer.query);
  if (it == queries_.end() || it->second.node != node) {
    ++counters_.stale_dropped;
    return;
  }
  const OpenQuery open = EndQuery(it);
  if (AsksForVerdict(open)) return NoteStacks(open, answer.text);
  if (open.query.kind == AgentQuery::Kind::kConsole) return AnswerConsole(open, answer);
  if (!answer.ok) return AnswerFromMirror(open, answer.text);
  json document = {{"generation", open.query.generation.value},
                   {"rank", open.query.rank},
                   {"node", node.value},
                   {"hostname", Hostname(node)},
                   {"text", answer.text}};
  if (open.query.kind == AgentQuery::Kind::kReadLog) {
    document["world_size"] = WorldSizeOf(open.query);
    document["next_offset"] = answer.next_offset;
    document["end"] = answer.end;
    document["mirrored"] = false;
  }
  if (open.query.kind == AgentQuery::Kind::kExec) {
    document["job"] = open.query.job.value;
    document["exit_code"] = answer.next_offset;
    document["timed_out"] = answer.timed_out;
    if (open.query.apart) {
      document["stdout"] = std::move(document["text"]);
      document.erase("text");
      document["stderr"] = answer.err;
    }
  }
  Answer(open.route, open.request_id, absl::OkStatus(), OneLine(document));
  if (open.query.kind != AgentQuery::Kind::kExec) return;
  constexpr size_t kDoneExecsKept = 16;  // of at most a mebibyte each
  done_execs_.push_back({open.client_key, std::get<ReplyToClient>(out_.back()).reply});
  if (done_execs_.size() > kDoneExecsKept) done_execs_.pop_front();
}

// Asked for by a stall verdict: they stand beside it in events.jsonl.
void HeadState::NoteStacks(const OpenQuery& open, const std::string& text) {
  constexpr size_t kStacksBytes = 16 << 10;
  Job* job = FindJob(open.query.job);
  if (job == nullptr || open.query.generation != job->record.generation) return;
  Emit(*job, "stall",
       absl::StrCat("stacks of rank ", open.query.rank, " on ", Hostname(open.node), ":\n",
                    Shortened(text, kStacksBytes)));
  Dirty(*job);
  CheckStalls(*job, step_at_);  // the kill waited for the last of them
}

// The node cannot answer: its last words were mirrored here.
void HeadState::AnswerFromMirror(const OpenQuery& open, const std::string& why) {
  GT_PROBE("head.answers_from_mirror");
  if (open.query.kind != AgentQuery::Kind::kReadLog)
    return Answer(open.route, open.request_id, absl::UnavailableError(why), "");
  ReplyFromSpill reply{.route = open.route,
                       .client_key = open.client_key,
                       .request_id = open.request_id,
                       .query = open.query,
                       .node = open.node,
                       .hostname = Hostname(open.node),
                       .world_size = WorldSizeOf(open.query),
                       .why = why};
  if (const HeldTail* held = tails_.Find(TailOf(open.query))) reply.held = *held;
  if (!reply.held || reply.held->spilled > 0) return out_.push_back(std::move(reply));
  out_.push_back(ReplyToClient{open.route, Built(reply, std::nullopt)});
}

void HeadState::ExpireQueries(Instant now) {
  std::vector<uint64_t> late;
  for (const auto& [id, open] : queries_) {
    if (open.deadline <= now) late.push_back(id);
  }
  for (const uint64_t id : late) {
    const OpenQuery open = EndQuery(queries_.find(id));
    const std::string why =
        absl::StrCat("the agent on ", Hostname(open.node), " did not answer in ",
                     absl::FormatDuration(config_.query_timeout),
                     store_full_ ? ": commands wait until the head can store again, and " : "",
                     store_full_ ? store_low_.value_or("") : "");
    AsksForVerdict(open) ? NoteStacks(open, why) : AnswerFromMirror(open, why);
  }
}

// ---------------------------------------------------------------- events

absl::Status HeadState::Poll(const PeerMessage& event, const std::string& id, const ClientEvents& events,
                             Instant now) {
  const std::string user = OwnerName(event.peer);
  GT_RETURN_IF_ERROR(
      polls_of_user_.Take(user, config_.polls_per_user_max, config_.polls_max, "requests wait for events"));
  const Instant deadline = now + std::clamp(events.wait, absl::ZeroDuration(), config_.events_wait_max);
  OpenPoll poll{event.route, id, event.peer.key_id, user, events.job, events.after, deadline};
  if (AnswerPoll(poll, now)) return absl::OkStatus();  // it has said something since
  polls_[events.job].emplace(deadline, std::move(poll));
  poll_deadlines_.insert({deadline, events.job});
  return absl::OkStatus();
}

// All that wait for news of a job that has some, and of the others those whose time is up.
void HeadState::AnswerPolls(Instant now) {
  const auto answer = [&](const JobId& job, bool all) {
    const auto it = polls_.find(job);
    if (it == polls_.end()) return;
    std::multimap<Instant, OpenPoll>& polls = it->second;
    for (auto poll = polls.begin(); poll != polls.end() && (all || poll->first <= now);) {
      if (!AnswerPoll(poll->second, now)) {
        ++poll;
        continue;
      }
      poll_deadlines_.erase(poll_deadlines_.find({poll->first, job}));
      poll = polls.erase(poll);
    }
    if (polls.empty()) polls_.erase(it);
  };
  for (const JobId& job : std::exchange(news_, {})) answer(job, /*all=*/true);
  while (!poll_deadlines_.empty() && poll_deadlines_.begin()->first <= now)
    answer(JobId(poll_deadlines_.begin()->second), /*all=*/false);
}

// False: it goes on waiting.
bool HeadState::AnswerPoll(const OpenPoll& poll, Instant now) {
  Job* job = FindJob(poll.job);
  const bool due = job == nullptr || poll.deadline <= now || IsFinal(job->record.state) ||
                   (!job->events.empty() && job->events.back()->sequence > poll.after);
  if (!due) return false;
  if (job == nullptr) {
    Answer(poll.route, poll.request_id, absl::NotFoundError("the job is forgotten"), "");
  } else {
    if (job->record.client_key == poll.client_key) job->client_seen = now;
    AnswerEvents(poll, *job);
  }
  polls_of_user_.Return(poll.user);
  active_at_ = now;
  return true;
}

// A few events are built here: many may wait for the same one, and none of them is to be told that too many
// read. A stall of many ranks brings megabytes of stacks.
void HeadState::AnswerEvents(const OpenPoll& poll, const Job& job) {
  constexpr size_t kBytesBuiltHere = 64 << 10;
  const auto [document, bytes] = EventsAfter(job, poll.after);
  ReplyToClient reply{poll.route, ClientReply{.id = poll.request_id}, false, document, poll.client_key};
  if (bytes <= kBytesBuiltHere) reply = {poll.route, Built(reply)};
  out_.push_back(std::move(reply));
}

// A client that waits for events of its job is there.
bool HeadState::ClientWaits(const Job& job) const {
  const auto polls = polls_.find(job.record.id);
  return polls != polls_.end() &&
         std::any_of(polls->second.begin(), polls->second.end(),
                     [&](const auto& poll) { return poll.second.client_key == job.record.client_key; });
}

}  // namespace gtrain::core
