// Everything is printed as it leaves the outbox, so the log shows what a slow disk holds back. Heartbeats
// and their acknowledgements are left out: they are the clock of the conversation, not its content.
#include "tests/golden/trace_world.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/units.h"
#include "job/spec/parse.h"
#include "nlohmann/json.hpp"

namespace gtrain::golden {
namespace {

using nlohmann::json;

std::string RanksOn(const core::GenerationGrant& grant, const std::string& node) {
  std::vector<std::string> ranks;
  for (const core::RankPlace& place : grant.ranks) {
    if (place.node.value == node) ranks.push_back(absl::StrCat(place.rank));
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ","), " of ",
                      grant.world_size);
}

const char* ModeName(core::EndMode mode) {
  switch (mode) {
    case core::EndMode::kReform:
      return "reform";
    case core::EndMode::kStop:
      return "stop";
    case core::EndMode::kStopNow:
      return "stop-now";
  }
  return "?";
}

template <typename M>
inline constexpr bool kLeftOut = false;
#define GT_LEFT_OUT(Type) \
  template <>             \
  inline constexpr bool kLeftOut<core::Type> = true;
GT_LEFT_OUT(AgentHeartbeat)
GT_LEFT_OUT(HeartbeatAck)
GT_LEFT_OUT(ExchangePart)
GT_LEFT_OUT(ExchangeTable)
GT_LEFT_OUT(LogTail)
GT_LEFT_OUT(LinkDown)
GT_LEFT_OUT(AgentNote)
GT_LEFT_OUT(AgentQuery)
GT_LEFT_OUT(AgentAnswer)
GT_LEFT_OUT(AgentRefused)
GT_LEFT_OUT(AgentJoin)
GT_LEFT_OUT(AgentJoined)
GT_LEFT_OUT(GenerationDescribed)
GT_LEFT_OUT(ClientRequest)
GT_LEFT_OUT(ClientReply)
GT_LEFT_OUT(RelayedUp)
GT_LEFT_OUT(RelayedDown)
GT_LEFT_OUT(RelayReady)
GT_LEFT_OUT(RelayFor)
GT_LEFT_OUT(ConnectVia)
#undef GT_LEFT_OUT

struct Printer {
  const std::string& node;
  std::string operator()(const core::AgentWelcome& m) const {
    return absl::StrCat("Welcome epoch ", m.epoch.value);
  }
  std::string operator()(const core::StartGeneration& m) const {
    std::string text = absl::StrCat(
        "StartGeneration ", m.grant.job.value, " g", m.grant.generation.value, " t", m.grant.timeline.value,
        ": ", RanksOn(m.grant, node), ", master ", m.grant.master_address, ":", m.grant.master_port,
        m.grant.resume.empty() ? "" : ", resume ", m.grant.resume, m.grant.newest ? ", newest " : "",
        m.grant.newest ? m.grant.newest->manifest : "");
    for (const core::NodePlace& holder : m.grant.holders)
      absl::StrAppend(&text, ", copies on ", holder.hostname);
    return text;
  }
  std::string operator()(const core::Revoke& m) const {
    return absl::StrCat("Revoke ", m.job.value, " <= g", m.generation.value, " ", ModeName(m.mode), " grace ",
                        PrintDuration(m.grace), ": ", m.reason);
  }
  std::string operator()(const core::AckExit& m) const {
    return absl::StrCat("AckExit ", m.job.value, " g", m.generation.value, " rank ", m.rank);
  }
  std::string operator()(const core::ExchangeMissing& m) const {
    return absl::StrCat("ExchangeMissing ", m.generation.value, " #", m.sequence, ": ", PrintRanks(m.ranks));
  }
  std::string operator()(const core::RanksLeft& m) const {
    return absl::StrCat("RanksLeft ", m.job.value, " g", m.generation.value, ": ", PrintRanks(m.ranks));
  }
  std::string operator()(const core::PauseRanks& m) const {
    return absl::StrCat("PauseRanks ", m.job.value, " g", m.generation.value);
  }
  std::string operator()(const core::AckNotice& m) const { return absl::StrCat("AckNotice ", m.sequence); }
  std::string operator()(const core::NoticeRanks& m) const {
    return absl::StrCat("NoticeRanks ", m.job.value, " g", m.generation.value, ": ", PrintDuration(m.left),
                        " left");
  }
  std::string operator()(const core::NoticeSeen& m) const {
    return absl::StrCat("NoticeSeen ", m.sequence, ": ", core::Name(m.notice.kind), " in ",
                        PrintDuration(m.notice.left));
  }
  std::string operator()(const core::ForgetJob& m) const { return absl::StrCat("ForgetJob ", m.job.value); }
  std::string operator()(const core::KeepCopies& m) const {
    return absl::StrCat("KeepCopies ", m.job.value, " in ", m.near);
  }
  std::string operator()(const core::AgentShutdown& m) const { return absl::StrCat("Shutdown: ", m.reason); }
  std::string operator()(const core::AgentHello& m) const {
    std::string text =
        absl::StrCat("Hello incarnation ", m.incarnation.value, ", ", m.inventory.cpus, " cpus");
    for (const core::HeldGeneration& held : m.held) {
      absl::StrAppend(&text, ", holds ", held.job.value, " g", held.generation.value, " (", held.live.size(),
                      " live, ", held.exited.size(), " exited)");
    }
    for (const JobId& job : m.copies_of) absl::StrAppend(&text, ", has copies of ", job.value);
    return text;
  }
  std::string operator()(const core::RanksStarted& m) const {
    return absl::StrCat("RanksStarted ", m.job.value, " g", m.generation.value, " (", m.ranks.size(), ")");
  }
  std::string operator()(const core::RankExited& m) const {
    const core::RankExit& e = m.exit;
    return absl::StrCat("RankExited ", e.job.value, " g", e.generation.value, " rank ", e.rank, " ",
                        core::Name(e.cause),
                        e.cause == core::ExitCause::kExited ? absl::StrCat(" ", e.exit_code) : "",
                        e.signal > 0 ? absl::StrCat(" ", e.signal) : "");
  }
  std::string operator()(const core::GenerationGone& m) const {
    return absl::StrCat("GenerationGone ", m.job.value, " g", m.generation.value);
  }
  std::string operator()(const core::CheckpointReport& m) const {
    return absl::StrCat("CheckpointReport ", m.job.value, " g", m.generation.value, " step ", m.step);
  }
  template <typename Other>
  std::string operator()(const Other&) const {
    static_assert(kLeftOut<Other>, "print it, or say above that traces do without it");
    return "";
  }
};

std::string Describe(const core::RecordWrite& write) {
  if (!write.record) return absl::StrCat("delete ", write.key);
  const auto* record = std::get_if<core::JobStatusRecord>(&*write.record);
  if (record == nullptr) return write.key;
  const core::JobStatus& job = record->status;
  return absl::StrCat(write.key, " {", core::Name(job.state), " g", job.generation.value, " t",
                      job.timeline.value,
                      job.revoked.value > 0 ? absl::StrCat(" revoked ", job.revoked.value) : "", "}");
}

}  // namespace

std::string Command::Option(const std::string& key, std::string otherwise) const {
  const auto it = options.find(key);
  return it == options.end() ? otherwise : it->second;
}

int Command::Number(const std::string& key, int otherwise) const {
  int number = otherwise;
  const auto it = options.find(key);
  if (it != options.end()) GT_CHECK(absl::SimpleAtoi(it->second, &number));
  return number;
}

std::vector<Command> ParseCommands(absl::string_view text) {
  std::vector<Command> commands;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (line.empty()) continue;
    if (line.substr(0, 2) == "  ") {
      GT_CHECK(!commands.empty());
      absl::StrAppend(&commands.back().body, line.substr(2), "\n");
      continue;
    }
    Command command;
    for (absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
      const std::vector<std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
      if (parts.size() == 2) {
        command.options[parts[0]] = parts[1];
      } else if (command.verb.empty()) {
        command.verb = parts[0];
      } else {
        command.words.push_back(parts[0]);
      }
    }
    commands.push_back(std::move(command));
  }
  return commands;
}

const std::map<std::string, TraceWorld::Handler>& TraceWorld::Handlers() {
  static const std::map<std::string, Handler> handlers = {
      {"head", &TraceWorld::Head}, {"node", &TraceWorld::NodeUp},           {"cut", &TraceWorld::Cut},
      {"heal", &TraceWorld::Heal}, {"submit", &TraceWorld::Submit},         {"exit", &TraceWorld::Exit},
      {"step", &TraceWorld::Step}, {"checkpoint", &TraceWorld::Checkpoint}, {"advance", &TraceWorld::Advance},
      {"stop", &TraceWorld::Stop}, {"status", &TraceWorld::Status},         {"why", &TraceWorld::Why},
      {"disk", &TraceWorld::Disk}, {"notice", &TraceWorld::Notice},         {"drain", &TraceWorld::Drain}};
  return handlers;
}

std::string TraceWorld::Run(const Command& command) {
  log_.clear();
  const auto handler = Handlers().find(command.verb);
  if (handler == Handlers().end()) return absl::StrCat("no such command: ", command.verb, "\n");
  (this->*handler->second)(command);
  return log_.empty() ? "ok\n" : log_;
}

// ---------------------------------------------------------------- commands

// head [local] [nodes=N]: starts the head, or kills and restarts it.
void TraceWorld::Head(const Command& command) {
  if (head_ == nullptr) {
    config_.cluster = ClusterId("trace");
    config_.local = command.Word(0) == "local";
    config_.exit_when_idle = config_.local;
    if (command.options.contains("nodes")) config_.expected_nodes = command.Number("nodes", 1);
    config_.near_secret = [](const JobId&) { return std::string(64, '5'); };
    config_.parse_job = [](absl::string_view text) -> absl::StatusOr<spec::JobSpec> {
      const spec::ParseResult result = spec::ParseJob(text, "job.yaml");
      if (!result.ok()) return absl::InvalidArgumentError(spec::FormatError(result.errors[0]));
      return result.spec;
    };
  }
  Boot();
  for (auto& [name, agent] : agents_) {
    if (agent.linked) Hello(agent);
  }
  DrainAgents();
}

void TraceWorld::Boot() {
  head_ = std::make_unique<core::HeadCore>(config_, Rng(1));
  outbox_ = core::Outbox();
  answers_.clear();
  core::StoredRecords stored;
  for (const auto& [key, record] : disk_) stored.Add(record);
  auto recovered = head_->Recover(std::move(stored), clock_.Now(), clock_.WallNow());
  if (!recovered.ok()) return Line(recovered.status().ToString());
  Do(*std::move(recovered));
}

// node NAME [cpus=N] [incarnation=I] [zone=Z]
void TraceWorld::NodeUp(const Command& command) {
  ScriptedAgent& agent = agents_[command.Word(0)];
  agent.name = command.Word(0);
  agent.cpus = command.Number("cpus", agent.cpus);
  const std::string incarnation = command.Option("incarnation", agent.incarnation);
  if (incarnation != agent.incarnation) agent.held.clear();
  agent.zone = command.Option("zone", agent.zone);
  agent.incarnation = incarnation;
  agent.linked = true;
  Hello(agent);
  DrainAgents();
}

void TraceWorld::Cut(const Command& command) { agents_.at(command.Word(0)).linked = false; }

void TraceWorld::Heal(const Command& command) {
  ScriptedAgent& agent = agents_.at(command.Word(0));
  agent.linked = true;
  Hello(agent);
  DrainAgents();
}

void TraceWorld::Submit(const Command& command) {
  const core::ClientReply reply = Ask(core::ClientSubmit{command.body, {}, "/runs/{job}"});
  Line(absl::StrCat("client: ", reply.ok ? reply.json : reply.error));
  DrainAgents();
}

// exit JOB RANK [code=N] [signal=N] [tail=WORD] [storage=WORD], or exit JOB all
void TraceWorld::Exit(const Command& command) {
  const bool all = command.Word(1) == "all";
  int first = 0, last = 0;
  if (all) {
    last = 1023;
  } else {
    GT_CHECK(absl::SimpleAtoi(command.Word(1), &first));
    last = first;
  }
  for (int rank = first; rank <= last; ++rank) {
    ScriptedAgent* agent = nullptr;
    ScriptedAgent::Held* held = Holder(Job(command), rank, &agent);
    if (held == nullptr) {
      if (!all) Line("no such live rank");
      break;
    }
    core::RankExit exit;
    exit.job = Job(command);
    exit.generation = held->grant.generation;
    exit.rank = rank;
    exit.exit_code = command.Number("code", 0);
    exit.signal = command.Number("signal", 0);
    if (exit.signal > 0) exit.cause = core::ExitCause::kSignal;
    exit.tail = command.Option("tail", "");
    exit.storage = command.Option("storage", "");
    held->live.erase(rank);
    held->unacknowledged.push_back(exit);
    FromAgent(*agent, core::RankExited{exit});
  }
  DrainAgents();
}

// step JOB N: every live rank reports step N
void TraceWorld::Step(const Command& command) {
  int step = 0;
  GT_CHECK(absl::SimpleAtoi(command.Word(1), &step));
  for (auto& [name, agent] : agents_) {
    core::AgentHeartbeat beat{++agent.beats, {}, {}};
    for (auto& [key, held] : agent.held) {
      for (auto& [rank, status] : held.live) {
        if (key.first != Job(command)) continue;
        status.step = step;
        beat.changed.push_back(status);
      }
    }
    if (!beat.changed.empty()) FromAgent(agent, std::move(beat));
  }
  DrainAgents();
}

// checkpoint JOB STEP
void TraceWorld::Checkpoint(const Command& command) {
  ScriptedAgent* agent = nullptr;
  const ScriptedAgent::Held* held = Holder(Job(command), 0, &agent);
  if (held == nullptr) return Line("no such live rank");
  core::CheckpointReport report{Job(command), held->grant.generation, held->grant.timeline, 0, "manifest"};
  GT_CHECK(absl::SimpleAtoi(command.Word(1), &report.step));
  FromAgent(*agent, std::move(report));
  DrainAgents();
}

// advance TIME: in steps of half a second, linked agents beating
void TraceWorld::Advance(const Command& command) {
  const auto time = ParseDuration(command.Word(0));
  GT_CHECK(time.ok());
  const Instant end = clock_.Now() + *time;
  while (clock_.Now() < end) {
    clock_.Advance(absl::Milliseconds(500));
    for (auto& [name, agent] : agents_) {
      if (agent.linked) FromAgent(agent, core::AgentHeartbeat{++agent.beats, {}, {}});
    }
    Do(head_->Step(core::Tick{}, clock_.Now()));
    DrainAgents();
  }
}

// notice NODE KIND [left=TIME] [id=WORD]: what its cloud says; KIND none takes it back
void TraceWorld::Notice(const Command& command) {
  ScriptedAgent& agent = agents_.at(command.Word(0));
  core::NodeNotice notice;
  for (const core::NoticeKind kind :
       {core::NoticeKind::kAtRisk, core::NoticeKind::kFreeze, core::NoticeKind::kLeave}) {
    if (command.Word(1) == core::Name(kind)) notice.kind = kind;
  }
  if (notice.kind != core::NoticeKind::kNone) {
    const auto left = ParseDuration(command.Option("left", "2m"));
    GT_CHECK(left.ok());
    notice.left = *left;
    notice.source = "spot interruption";
    notice.id = command.Option("id", "1");
  }
  FromAgent(agent, core::NoticeSeen{++agent.notices, std::move(notice)});
  DrainAgents();
}

// drain NODE [left=TIME] | drain NODE undo
void TraceWorld::Drain(const Command& command) {
  const auto left = ParseDuration(command.Option("left", "2m"));
  GT_CHECK(left.ok());
  const core::ClientReply reply =
      Ask(core::ClientDrainNode{command.Word(0), *left, "", command.Word(1) == "undo"}, core::Role::kAdmin);
  Line(absl::StrCat("client: ", reply.ok ? reply.json : reply.error));
  DrainAgents();
}

void TraceWorld::Stop(const Command& command) {
  const core::ClientReply reply =
      Ask(core::ClientStop{Job(command), command.Word(1) == "now", "asked by a person"});
  Line(absl::StrCat("client: ", reply.ok ? reply.json : reply.error));
  DrainAgents();
}

void TraceWorld::Status(const Command& command) {
  const core::ClientReply reply = Ask(core::ClientStatus{Job(command)});
  if (!reply.ok) return Line(absl::StrCat("client: ", reply.error));
  const json document = json::parse(reply.json);
  for (const json& job : document.at("jobs")) {
    std::string line =
        absl::StrCat(job.at("id").get<std::string>(), " ", job.at("state").get<std::string>(), " g",
                     job.at("generation").get<int>(), " t", job.at("timeline").get<int>(), " world ",
                     job.at("world_size").get<int>(), " restarts ", job.at("restarts").get<int>());
    if (!job.at("step").is_null()) absl::StrAppend(&line, " step ", job.at("step").get<int>());
    if (!job.at("exit_code").is_null()) absl::StrAppend(&line, " exit ", job.at("exit_code").get<int>());
    Line(line);
    Line(absl::StrCat("  reason: ", job.at("reason").get<std::string>()));
    if (!job.at("first_fault").is_null()) {
      Line(absl::StrCat("  first fault: ", job.at("first_fault").at("message").get<std::string>()));
    }
    for (const json& rank : job.at("ranks")) {
      Line(absl::StrCat("  rank ", rank.at("rank").get<int>(), " on ", rank.at("hostname").get<std::string>(),
                        " ", rank.at("state").get<std::string>()));
    }
  }
}

void TraceWorld::Why(const Command& command) {
  const core::ClientReply reply = Ask(core::ClientWhy{Job(command)});
  if (!reply.ok) return Line(absl::StrCat("client: ", reply.error));
  const json why = json::parse(reply.json);
  Line(absl::StrCat(why.at("state").get<std::string>(), ": ", why.at("reason").get<std::string>()));
  for (const json& blocker : why.at("blocked_by")) {
    Line(absl::StrCat("  ", blocker.at("node").get<std::string>(), ": ",
                      blocker.at("constraint").get<std::string>(), "; held by ", blocker.at("held_by").dump(),
                      "; ", blocker.at("unblocked_by").get<std::string>()));
  }
}

// disk slow | disk ok
void TraceWorld::Disk(const Command& command) {
  disk_works_ = command.Word(0) == "ok";
  Commit();
  DrainAgents();
}

// ---------------------------------------------------------------- head

void TraceWorld::Do(core::StepResult result) {
  if (!result.why.empty()) Line(absl::StrCat("head: ", result.why));
  for (const core::Effect& effect : outbox_.Add(std::move(result))) Perform(effect);
  Commit();
}

void TraceWorld::Commit() {
  if (!disk_works_) return;
  while (auto batch = outbox_.NextBatch()) {
    std::vector<std::string> keys;
    for (const core::RecordWrite& write : batch->writes) {
      keys.push_back(Describe(write));
      if (write.record) {
        disk_[write.key] = *write.record;
      } else {
        disk_.erase(write.key);
      }
    }
    Line(absl::StrCat("disk: ", absl::StrJoin(keys, ", ")));
    for (const core::Effect& effect : outbox_.Durable(batch->sequence)) Perform(effect);
  }
}

void TraceWorld::Perform(const core::Effect& effect) {
  if (const auto* send = std::get_if<core::SendToNode>(&effect)) return ToAgent(*send);
  if (const auto* reply = std::get_if<core::ReplyToClient>(&effect))
    replies_[reply->reply.id] = Built(*reply);
  if (const auto* reply = std::get_if<core::ReplyFromSpill>(&effect))
    replies_[reply->request_id] = Built(*reply, std::nullopt);
  if (const auto* refuse = std::get_if<core::RefusePeer>(&effect)) {
    Line(absl::StrCat("-> ", refuse->route, " Refused: ", refuse->reason));
  }
  if (const auto* event = std::get_if<core::EmitEvent>(&effect)) {
    Line(
        absl::StrCat("event ", event->job.value, " #", event->sequence, " ", event->kind, ": ", event->text));
  }
  if (const auto* failure = std::get_if<core::WriteFailure>(&effect)) {
    const json report = json::parse(failure->document->Json());
    Line(absl::StrCat("write ", failure->run_dir, "/failure.json: first fault ",
                      report.at("first_fault").is_null()
                          ? "none"
                          : report.at("first_fault").at("message").get<std::string>()));
  }
  if (const auto* stop = std::get_if<core::StopHead>(&effect))
    Line(absl::StrCat("head ends: ", stop->reason));
}

void TraceWorld::ToAgent(const core::SendToNode& send) {
  if (!send.route.empty()) {
    return Line(absl::StrCat("-> ", send.route, " ", std::visit(Printer{send.route}, *send.message)));
  }
  ScriptedAgent& agent = agents_.at(send.node.value);
  const std::string text = std::visit(Printer{agent.name}, *send.message);
  if (!text.empty()) Line(absl::StrCat("-> ", agent.name, " ", text, agent.linked ? "" : "   (lost)"));
  if (!agent.linked) return;
  if (const auto* start = std::get_if<core::StartGeneration>(&*send.message)) Start(agent, start->grant);
  if (const auto* revoke = std::get_if<core::Revoke>(&*send.message)) End(agent, *revoke);
  if (const auto* keep = std::get_if<core::KeepCopies>(&*send.message)) agent.copies.insert(keep->job);
  if (const auto* forget = std::get_if<core::ForgetJob>(&*send.message)) agent.copies.erase(forget->job);
  if (const auto* ack = std::get_if<core::AckExit>(&*send.message)) {
    const auto held = agent.held.find({ack->job, ack->generation});
    if (held == agent.held.end()) return;
    std::erase_if(held->second.unacknowledged,
                  [&](const core::RankExit& exit) { return exit.rank == ack->rank; });
    if (held->second.live.empty() && held->second.unacknowledged.empty()) agent.held.erase(held);
  }
}

core::ClientReply TraceWorld::Ask(core::ClientRequestBody body, core::Role role) {
  const std::string id = absl::StrCat("request-", ++requests_);
  Do(head_->Step(
      core::PeerMessage{
          {role, "ann"}, "client", "10.0.0.9", core::ClientRequest{id, absl::Seconds(5), std::move(body)}},
      clock_.Now()));
  const auto reply = replies_.find(id);
  if (reply == replies_.end()) return {id, false, 0, "(the reply waits for the disk)", ""};
  return reply->second;
}

JobId TraceWorld::Job(const Command& command) const { return JobId(command.Word(0)); }

// ---------------------------------------------------------------- agents

void TraceWorld::FromAgent(ScriptedAgent& agent, core::Message message) {
  const std::string text = std::visit(Printer{agent.name}, message);
  if (!text.empty()) Line(absl::StrCat("<- ", agent.name, " ", text, agent.linked ? "" : "   (lost)"));
  if (!agent.linked) return;
  Do(head_->Step(
      core::PeerMessage{{core::Role::kNode, agent.name}, agent.Route(), "10.0.0.1", std::move(message)},
      clock_.Now()));
}

void TraceWorld::Hello(ScriptedAgent& agent) {
  ++agent.routes;
  core::AgentHello hello;
  hello.cluster = config_.cluster;
  hello.incarnation = Incarnation(agent.incarnation);
  hello.hostname = agent.name;
  hello.address = "addr-" + agent.name;
  hello.inventory.cpus = agent.cpus;
  hello.inventory.memory_bytes = uint64_t{16} << 30;
  hello.free_ports = {25001, 25002, 25003};
  if (!agent.zone.empty()) {
    hello.labels = {{"zone", agent.zone}};
    hello.near_port = 7000;
    hello.near_key = "key-" + agent.name;
    hello.takes_copies = true;
  }
  hello.copies_of.assign(agent.copies.begin(), agent.copies.end());
  for (const auto& [key, held] : agent.held) {
    core::HeldGeneration generation{key.first, key.second, agent.revoked[key.first], {}, held.unacknowledged};
    for (const auto& [rank, status] : held.live) generation.live.push_back(status);
    hello.held.push_back(std::move(generation));
  }
  FromAgent(agent, std::move(hello));
}

void TraceWorld::Start(ScriptedAgent& agent, const core::GenerationGrant& grant) {
  const auto [it, fresh] = agent.held.try_emplace({grant.job, grant.generation});
  if (!fresh) return;
  it->second.grant = grant;
  core::RanksStarted started{grant.job, grant.generation, {}};
  for (const core::RankPlace& place : grant.ranks) {
    if (place.node.value != agent.name) continue;
    core::RankStatus status{grant.job, grant.generation, place.rank, 1000 + place.rank,
                            core::RankState::kRunning};
    it->second.live[place.rank] = status;
    started.ranks.push_back(status);
  }
  answers_.emplace_back(agent.name, std::move(started));
}

void TraceWorld::End(ScriptedAgent& agent, const core::Revoke& revoke) {
  agent.revoked[revoke.job] = std::max(agent.revoked[revoke.job], revoke.generation);
  for (auto& [key, held] : agent.held) {
    if (key.first != revoke.job || key.second > revoke.generation) continue;
    for (const auto& [rank, status] : held.live) {
      core::RankExit exit;
      exit.job = key.first;
      exit.generation = key.second;
      exit.rank = rank;
      exit.cause = core::ExitCause::kStopped;
      exit.signal = 15;
      held.unacknowledged.push_back(exit);
      answers_.emplace_back(agent.name, core::RankExited{exit});
    }
    held.live.clear();
  }
  answers_.emplace_back(agent.name, core::GenerationGone{revoke.job, revoke.generation});
}

void TraceWorld::DrainAgents() {
  while (!answers_.empty()) {
    std::vector<std::pair<std::string, core::Message>> answers;
    answers.swap(answers_);
    for (auto& [name, message] : answers) FromAgent(agents_.at(name), std::move(message));
  }
}

ScriptedAgent::Held* TraceWorld::Holder(const JobId& job, int rank, ScriptedAgent** agent) {
  for (auto& [name, candidate] : agents_) {
    for (auto& [key, held] : candidate.held) {
      if (key.first != job || !held.live.contains(rank)) continue;
      *agent = &candidate;
      return &held;
    }
  }
  return nullptr;
}

}  // namespace gtrain::golden
