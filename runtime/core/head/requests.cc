#include "runtime/core/head/requests.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/json_text.h"
#include "base/probe.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "base/utf8.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/directories.h"
#include "runtime/core/head/documents.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/membership.h"
#include "runtime/core/head/over_jobs.h"
#include "runtime/core/head/polls.h"
#include "runtime/core/head/queries.h"
#include "runtime/core/head/remembered_answers.h"
#include "runtime/core/head/sizing.h"

namespace gtrain::core {
namespace {

const JobId* JobOf(const ClientRequestBody& body) {
  if (const auto* b = std::get_if<ClientStop>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientStatus>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientWhy>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientLogs>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientExec>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientEvents>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientStack>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientActors>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientScale>(&body)) return &b->job;
  if (const auto* b = std::get_if<ClientConsole>(&body)) return &b->job;
  return nullptr;
}

}  // namespace

Requests::Requests(HeadContext& context, HeadModel& model, RememberedAnswers& answers, Queries& queries,
                   Polls& polls, JobLife& life, Sizing& sizing, Directories& directories,
                   Membership& membership, OverJobs& over)
    : context_(context),
      model_(model),
      config_(context.config()),
      answers_(answers),
      queries_(queries),
      polls_(polls),
      life_(life),
      sizing_(sizing),
      directories_(directories),
      membership_(membership),
      over_(over) {}

void Requests::Refuse(const Asked& asked, const absl::Status& status) {
  if (asked.rule.changes || absl::IsPermissionDenied(status))
    context_.Audit(asked.event, asked.rule.name, asked.target, status, asked.now);
  context_.Answer(asked.event.route, asked.request.id, status, "");
}

bool Requests::AnswersAgain(const Asked& asked) {
  const std::string& client_key = asked.event.peer.key_id;
  const ClientReply* answered = answers_.Find(client_key, asked.request.id);
  if (answered == nullptr) return false;
  GT_PROBE("head.request_repeated");
  ++context_.counters().deduplicated;
  context_.Do(ReplyToClient{asked.event.route, *answered, true, nullptr, client_key});
  return true;
}

// The client may have given up, and not expect the request to be executed any more. One that still waits asks
// again.
bool Requests::ComesTooLate(const Asked& asked) {
  const ClientRequest& request = asked.request;
  if (request.deadline <= absl::ZeroDuration() || asked.event.waited < request.deadline) return false;
  GT_PROBE("head.request_too_late");
  const absl::Status late = absl::DeadlineExceededError(absl::StrCat(
      "the request may have waited ", PrintDuration(absl::Floor(asked.event.waited, absl::Seconds(1))),
      " for this head, which was not running; its time was ", absl::FormatDuration(request.deadline),
      ": nothing was done, ask again"));
  context_.Answer(asked.event.route, request.id, late, "");
  return true;
}

// `job`: the one that is named, if there is one.
absl::Status Requests::MayAsk(const Asked& asked, Job* job) {
  if (asked.job != nullptr && !asked.job->empty() && job == nullptr)
    return absl::NotFoundError(absl::StrCat("no job ", asked.job->value, "; `gtrain status` lists them"));
  if (job == nullptr) return absl::OkStatus();
  if (absl::Status permit = Authorize(asked.event.peer, asked.request.body, &job->record.owner);
      !permit.ok()) {
    ++context_.counters().denied;
    return permit;
  }
  if (job->record.client_key == asked.event.peer.key_id) job->client_seen = asked.now;
  return absl::OkStatus();
}

void Requests::OnRequest(const PeerMessage& event, const ClientRequest& request, Instant now) {
  model_.active_at = now;
  const JobId* job_id = JobOf(request.body);
  const auto* drained = std::get_if<ClientDrainNode>(&request.body);
  const std::string target = drained != nullptr ? drained->node : job_id == nullptr ? "" : job_id->value;
  const Asked asked{event, request, RuleOf(request.body), job_id, target, now};
  if (absl::Status permit = Authorize(event.peer, request.body, nullptr); !permit.ok()) {
    ++context_.counters().denied;
    return Refuse(asked, permit);
  }
  if (AnswersAgain(asked) || ComesTooLate(asked)) return;
  Job* job = job_id == nullptr ? nullptr : model_.FindJob(*job_id);
  if (absl::Status may = MayAsk(asked, job); !may.ok()) return Refuse(asked, may);
  if (std::optional<absl::StatusOr<std::string>> changed = Change(asked))
    return AnswerChange(asked, *std::move(changed));
  if (!Show(asked, job)) AskAgent(asked);
}

// ---------------------------------------------------------------- changes

// nullopt: the request changes nothing that this head keeps itself.
std::optional<absl::StatusOr<std::string>> Requests::Change(const Asked& asked) {
  const PeerMessage& event = asked.event;
  const ClientRequestBody& body = asked.request.body;
  const Instant now = asked.now;
  if (const auto* submit = std::get_if<ClientSubmit>(&body))
    return Submit(event, asked.request.id, *submit, now);
  if (const auto* stop = std::get_if<ClientStop>(&body)) return Stop(event.peer, *stop, now);
  if (const auto* scale = std::get_if<ClientScale>(&body)) return sizing_.Scale(event.peer, *scale, now);
  if (const auto* shutdown = std::get_if<ClientShutdown>(&body)) return Shutdown(*shutdown, now);
  if (const auto* drain = std::get_if<ClientDrainNode>(&body))
    return membership_.Drain(event.peer, *drain, now);
  return std::nullopt;
}

void Requests::AnswerChange(const Asked& asked, absl::StatusOr<std::string> changed) {
  if (!changed.ok()) return Refuse(asked, changed.status());  // it changed nothing and may be made again
  const PeerMessage& event = asked.event;
  if (!std::holds_alternative<ClientSubmit>(asked.request.body))
    context_.Audit(event, asked.rule.name, asked.target, changed.status(), asked.now);
  const ClientReply reply = ReplyOf(asked.request.id, *std::move(changed));
  context_.Do(ReplyToClient{event.route, reply, true, nullptr, event.peer.key_id});
  answers_.Remember(event.peer, reply);
}

absl::Status Requests::RoomForJob(const ClientSubmit& submit, const std::string& owner) {
  if (model_.shutdown_when_idle)
    return absl::UnavailableError("the cluster is shutting down: start it again");
  if (model_.store_low) return absl::ResourceExhaustedError(absl::StrCat("no new jobs: ", *model_.store_low));
  const std::vector<Job*> live = model_.LiveJobs();
  if (static_cast<int>(live.size()) >= config_.live_jobs_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(config_.live_jobs_max, " jobs are live, the most this head takes: wait or stop some"));
  }
  int own = 0;
  size_t own_bytes = BytesOfUser(submit.spec_text, submit.env);
  for (const Job* job : live) {
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
  return absl::OkStatus();
}

JobRecord Requests::RecordOf(const PeerMessage& event, const std::string& id, const ClientSubmit& submit,
                             const std::string& name, Instant now) const {
  JobRecord record;
  record.number = model_.cluster.next_job;
  record.id = JobId(absl::StrCat(name.empty() ? "job" : name, "-", record.number));
  record.name = name;
  record.spec_text = submit.spec_text;
  record.env = submit.env;
  constexpr size_t kClusterLetters = 8;  // of 32
  const std::string cluster = config_.cluster.value.substr(0, kClusterLetters);
  record.run_dir = absl::StrReplaceAll(submit.run_dir, {{"{job}", record.id.value}, {"{cluster}", cluster}});
  record.resume = submit.resume;
  record.client_key = event.peer.key_id;
  record.owner = OwnerName(event.peer);
  record.request_id = id;
  record.end_with_client = submit.end_with_client;
  record.takeover = submit.takeover;
  record.takeover_own = submit.takeover && event.peer.role != Role::kAdmin;
  record.submitted_at = context_.Wall(now);
  record.reason = "just submitted";
  return record;
}

// Checks the record with the values for {job} filled in, as it will be read back.
absl::Status Requests::MayBeStored(const JobRecord& record) const {
  // It is shown to everybody who may see the job, in lines of terminals and logs.
  if (!IsPlainLine(record.run_dir)) {
    return absl::InvalidArgumentError(
        "the run directory's path has control characters, line ends or bytes that are no UTF-8: name "
        "another");
  }
  constexpr size_t kRunDirBytesMax = 3'500;  // room for what is made inside it
  if (record.run_dir.size() > kRunDirBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the run directory's path has more than ", kRunDirBytesMax, " bytes"));
  }
  if (!config_.check_record) return absl::OkStatus();
  if (absl::Status readable = config_.check_record(JobSubmission(record)); !readable.ok())
    return absl::InvalidArgumentError(absl::StrCat("this job cannot be stored: ", readable.message()));
  return absl::OkStatus();
}

absl::StatusOr<std::string> Requests::Submit(const PeerMessage& event, const std::string& id,
                                             const ClientSubmit& submit, Instant now) {
  const std::string owner = OwnerName(event.peer);
  GT_RETURN_IF_ERROR(RoomForJob(submit, owner));
  absl::StatusOr<spec::JobSpec> spec = config_.parse_job(submit.spec_text);
  if (!spec.ok()) return spec.status();
  GT_RETURN_IF_ERROR(submit.takeover ? directories_.MayTakeOver(event.peer, *spec)
                                     : directories_.CheckDirectory(*spec, owner, now));
  JobRecord record = RecordOf(event, id, submit, spec->name, now);
  GT_RETURN_IF_ERROR(MayBeStored(record));
  ++model_.cluster.next_job;
  Job& job = life_.AddJob(std::move(record), *std::move(spec), now);
  context_.Dirty(job);
  context_.Write(model_.cluster);
  context_.Emit(job, "state", "QUEUED: submitted");
  if (submit.takeover) directories_.SayWhoTakesOver(job, /*since_its_submit=*/false);
  over_.DropOldJobs();
  model_.fresh.push_back(job.record.id);
  context_.Say(absl::StrCat(job.record.id.value, " submitted"));
  context_.Audit(event, "submit", job.record.id.value, absl::OkStatus(), now);
  return OneLine({{"job", job.record.id.value}, {"run_dir", job.record.run_dir}});
}

// No generation lives, and none is being ended.
void Requests::StopBetween(Job& job, std::string reason, bool at_once) {
  if (at_once) return life_.Finish(job, JobState::kCancelled, std::move(reason));
  life_.FinishSaved(job, Ending::kCancel, std::move(reason));
}

// First stop: TERM and stop_grace, the ranks may save. Second: KILL.
absl::StatusOr<std::string> Requests::Stop(const Peer& peer, const ClientStop& stop, Instant now) {
  Job* job = model_.FindJob(stop.job);
  if (job == nullptr) return absl::InvalidArgumentError("the request names no job");
  JobRecord& record = job->record;
  const auto reply = [&](const char* what) {
    return OneLine({{"job", record.id.value}, {"state", Name(record.state)}, {"stop", what}});
  };
  if (IsFinal(record.state)) return reply("over");
  const std::string reason = absl::StrCat("stopped by ", OwnerName(peer), stop.reason.empty() ? "" : ": ",
                                          Shortened(stop.reason, 1 << 10));
  const bool again = record.ending == Ending::kCancel || record.after_save == Ending::kCancel;
  if (!job->Live() && record.ending == Ending::kNone) {
    StopBetween(*job, reason, again || stop.now);
    return reply(IsFinal(record.state) ? "over" : "graceful");
  }
  if (again) GT_PROBE("head.second_stop");
  if (!again && !job->Live()) GT_PROBE("head.stop_while_ending");
  const EndMode mode = again || stop.now ? EndMode::kStopNow : EndMode::kStop;
  const absl::Duration grace = mode == EndMode::kStop ? job->spec.stop_grace : absl::ZeroDuration();
  if (job->Live()) {
    life_.BeginEnding(*job, Ending::kCancel, mode, grace, reason, now);
  } else {
    record.ending = Ending::kCancel;
    if (!again) record.ending_reason = reason;  // the first is why it ends
    job->gone_deadline = now + grace + config_.gone_margin;
    for (const NodeId& node : record.unreleased) life_.SendRevoke(*job, node, mode, grace);
    life_.Move(*job, record.state, absl::StrCat(again ? "stopping now: " : "stopping: ", reason));
    life_.ContinueEnding(*job, now);
  }
  return reply(mode == EndMode::kStop ? "graceful" : "now");
}

absl::StatusOr<std::string> Requests::Shutdown(const ClientShutdown& shutdown, Instant now) {
  model_.shutdown_when_idle = true;
  const std::vector<Job*> live = model_.LiveJobs();
  if (!shutdown.when_idle) {
    for (Job* job : live) {
      if (job->Live()) {
        life_.BeginEnding(*job, Ending::kCancel, EndMode::kStopNow, absl::ZeroDuration(),
                          "the cluster is shut down", now);
      } else if (job->record.ending == Ending::kNone) {
        life_.Finish(*job, JobState::kCancelled, "the cluster is shut down");
      } else {
        job->record.ending = Ending::kCancel;
        job->record.ending_reason = "the cluster is shut down";
        for (const NodeId& node : job->record.unreleased) {
          life_.SendRevoke(*job, node, EndMode::kStopNow, absl::ZeroDuration());
        }
        context_.Dirty(*job);
      }
    }
  }
  return OneLine({{"live_jobs", live.size()}});
}

// ---------------------------------------------------------------- what changes nothing here

// False: it is for an agent.
bool Requests::Show(const Asked& asked, const Job* job) {
  const PeerMessage& event = asked.event;
  const ClientRequest& request = asked.request;
  const Instant now = context_.step_at();
  if (const auto* status = std::get_if<ClientStatus>(&request.body)) {
    context_.Answer(event, request.id, StatusOf(model_, config_.local, *status, OwnerName(event.peer), now));
  } else if (std::holds_alternative<ClientNodes>(request.body)) {
    context_.Answer(event, request.id, NodesOf(model_, now));
  } else if (std::holds_alternative<ClientTopology>(request.body)) {
    context_.Answer(event, request.id, TopologyOf(model_, config_.topology));
  } else if (const auto* revoke = std::get_if<ClientRevokeNode>(&request.body)) {
    membership_.RevokeNode(event, request, *revoke, asked.now);
  } else if (asked.job == nullptr) {  // keys and tokens
    context_.Do(ServiceRequest{event.peer, event.route, event.address, event.message});
  } else if (job == nullptr) {
    context_.Answer(event.route, request.id, absl::InvalidArgumentError("the request names no job"), "");
  } else if (std::holds_alternative<ClientWhy>(request.body)) {
    context_.Answer(event, request.id, WhyOf(*job, now));
  } else {
    return false;
  }
  return true;
}

void Requests::AskAgent(const Asked& asked) {
  const PeerMessage& event = asked.event;
  const std::string& id = asked.request.id;
  const ClientRequestBody& body = asked.request.body;
  absl::Status status;
  if (const auto* logs = std::get_if<ClientLogs>(&body))
    status = queries_.AskLogs(event, id, *logs, asked.now);
  if (const auto* exec = std::get_if<ClientExec>(&body))
    status = queries_.AskExec(event, id, *exec, asked.now);
  if (const auto* stack = std::get_if<ClientStack>(&body))
    status = queries_.AskStack(event, id, *stack, asked.now);
  if (const auto* actors = std::get_if<ClientActors>(&body))
    status = queries_.AskActors(event, id, *actors, asked.now);
  if (const auto* events = std::get_if<ClientEvents>(&body))
    status = polls_.Poll(event, id, *events, asked.now);
  const auto* console = std::get_if<ClientConsole>(&body);
  if (console != nullptr) status = queries_.AskConsole(event, id, *console, asked.now);
  if (!status.ok()) return Refuse(asked, status);
  if (asked.rule.changes && (console == nullptr || console->turn.start))
    context_.Audit(event, asked.rule.name, asked.target, status, asked.now);
}

}  // namespace gtrain::core
