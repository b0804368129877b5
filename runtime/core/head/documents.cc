#include "runtime/core/head/documents.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/json_text.h"
#include "job/plan/by_topology.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/progress.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/head/stalls.h"
#include "runtime/core/values/rank_notes.h"
#include "topology/json.h"

namespace gtrain::core {
namespace {

using nlohmann::json;

template <typename T>
json OrNull(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

json TimeOrNull(absl::Time at) { return at == absl::InfinitePast() ? json(nullptr) : json(WallText(at)); }

const char* StateOf(const Job& job, size_t rank) {
  if (job.ExitOf(static_cast<int>(rank)) != nullptr) return "exited";
  if (!job.Live()) return "ending";
  switch (job.ranks[rank].status.state) {
    case RankState::kJoined:
      return "joined";
    case RankState::kExited:
      return "exited";
    case RankState::kRunning:
      return "running";
    case RankState::kStarting:
      break;
  }
  return job.ranks[rank].started ? "running" : "starting";
}

const char* NameOf(NodeState state) {
  switch (state) {
    case NodeState::kAlive:
      return "alive";
    case NodeState::kSuspect:
      return "suspect";
    case NodeState::kDead:
      return "dead";
    case NodeState::kUnknown:
      break;
  }
  return "unknown";
}

// The part of a fault that is shown to clients.
FaultRecord Told(const FaultRecord& fault, bool with_tail) {
  FaultRecord told{fault.generation, fault.kind,      fault.rank,   fault.node,   fault.hostname,
                   fault.cause,      fault.exit_code, fault.signal, fault.message};
  if (with_tail) told.tail = fault.tail;
  told.step = fault.step;
  told.tries = fault.tries;
  return told;
}

json FaultDocument(const FaultRecord& fault) {
  return {{"generation", fault.generation.value},
          {"kind", Name(fault.kind)},
          {"tries", fault.tries},
          {"rank", fault.rank < 0 ? json(nullptr) : json(fault.rank)},
          {"node", fault.node.value},
          {"hostname", fault.hostname},
          {"cause", Name(fault.cause)},
          {"exit_code", fault.exit_code},
          {"signal", fault.signal},
          {"step", OrNull(fault.step)},
          {"message", fault.message},
          {"tail", fault.tail}};
}

json BlockerDocuments(const std::vector<Blocker>& blocked_by) {
  json documents = json::array();
  for (const Blocker& blocker : blocked_by) {
    documents.push_back({{"node", blocker.node},
                         {"constraint", blocker.constraint},
                         {"room", blocker.room},
                         {"held_by", blocker.held_by},
                         {"unblocked_by", blocker.unblocked_by}});
  }
  return documents;
}

std::string HostOf(const std::map<NodeId, Node>& nodes, const NodeId& id) {
  const auto node = nodes.find(id);
  return node == nodes.end() ? id.value : node->second.record.hostname;
}

// ---------------------------------------------------------------- one job

struct NamedNode {
  NodeId id;
  std::string hostname;
};

struct RankNow {
  int rank = 0, local_rank = 0;
  size_t node = 0;              // in JobNow::nodes
  const char* state = nullptr;  // it, pid, step and busy: of a generation that this head has seen
  int64_t pid = 0;              // 0: not known
  std::optional<int64_t> step;
  std::optional<double> busy;
  std::vector<int> gpus;
  std::vector<int> cpus, numa;  // where the ranks' places were asked for, with `nics`
  std::string nics;
  struct End {
    ExitCause cause;
    int exit_code, signal;
  };
  std::optional<End> end;
};

// Found when the document is made, as kStuckNote is.
constexpr char kNewcomersNote[] = "newcomers";  // when those that are to join are tried again
constexpr char kSparesNote[] = "spares";        // why there are fewer than the job file asks for
constexpr char kWaitsNote[] = "waits";          // for which rank the others stand still before a first step
constexpr std::array kNotes = {kCompressionNote, kRestoreNote, kOwnerNote,    kStorageNote,
                               kSavesNote,       kLogsNote,    kProgressNote, kNewcomersNote,
                               kSparesNote,      kWaitsNote,   kStuckNote};

// The notes of the ranks of this generation or, where they have none, of an earlier one.
using Notes = std::array<std::string, kNotes.size()>;

Notes NotesOf(const Job& job, Instant now) {
  Notes notes;
  for (size_t i = 0; i < kNotes.size(); ++i) {
    const auto said = job.rank_notes.find(kNotes[i]), before = job.notes_before.find(kNotes[i]);
    if (said != job.rank_notes.end()) {
      notes[i] = said->second;
    } else if (before != job.notes_before.end()) {
      notes[i] = before->second;
    }
  }
  if (!job.Live()) return notes;
  notes[notes.size() - 4] = NewcomersText(job, now);
  notes[notes.size() - 3] = SparesText(job, now);
  notes[notes.size() - 2] = AwaitedText(job);
  notes.back() = StuckText(job, now);
  return notes;
}

struct GoodputNow {
  absl::Time since;
  Generation generation;
  GoodputTotals totals;
};

// None of a job that was over before any head counted.
std::optional<GoodputNow> GoodputOf(const Job& job, Instant now) {
  const JobRecord& record = job.record;
  if (record.goodput.since == absl::InfinitePast()) return std::nullopt;
  return GoodputNow{record.goodput.since, record.generation, job.goodput.Totals(now)};
}

json GoodputDocument(const std::optional<GoodputNow>& now) {
  if (!now) return nullptr;
  const GoodputTotals& totals = now->totals;
  json seconds = json::object();
  for (size_t i = 0; i < kTimeLabels; ++i) {
    if (totals.seconds[i]) seconds[Name(static_cast<TimeLabel>(i))] = *totals.seconds[i];
  }
  return {{"since", TimeOrNull(now->since)},
          {"wanted", totals.wanted},
          {"rank_seconds", totals.all},
          {"goodput", OrNull(totals.goodput)},
          {"seconds", std::move(seconds)},
          {"generations", now->generation.value},
          {"losses", totals.losses},
          {"steps",
           {{"first", OrNull(totals.first)},
            {"last", OrNull(totals.top)},
            {"applied", OrNull(totals.applied)},
            {"recomputed", OrNull(totals.redone)}}}};
}

struct JobNow {
  JobId id;
  std::string name, reason, run_dir, policy;
  std::map<std::string, std::string> labels;
  JobState state = JobState::kQueued;
  Generation generation;
  Timeline timeline;
  int world_size = 0, restarts = 0;
  std::optional<int> exit_code;
  std::string user;
  absl::Time submitted_at, started_at, ended_at;
  absl::Duration run_time;
  uint64_t event_sequence = 0;
  std::optional<int64_t> step, steps_total;
  std::optional<double> loss, samples_per_second, steps_per_second, eta_seconds;
  bool diverged = false;  // the loss is not a finite number
  Notes notes;
  std::optional<GoodputNow> goodput;
  std::optional<CheckpointRecord> checkpoint;
  std::optional<FaultRecord> first_fault, last_fault;
  std::vector<Blocker> blocked_by;
  std::vector<std::pair<NamedNode, std::string>> avoided;  // and why
  std::vector<std::pair<NamedNode, double>> slow;          // and the score
  std::vector<NamedNode> holders;
  bool places = false;           // what ranks are bound to is told, too
  std::vector<NamedNode> nodes;  // of `ranks`; neighbours share one
  std::vector<RankNow> ranks;
};

// The hardware threads as the operating system counts them, and their NUMA nodes. A place has indices of what
// its machine told; those of one that has gone say nothing any more.
void AddPlace(const RankPlace& place, const std::map<NodeId, Node>& nodes, RankNow& rank) {
  const auto node = nodes.find(place.node);
  if (node == nodes.end()) return;
  const std::vector<CpuInfo>& infos = node->second.record.inventory.cpu_infos;
  for (const int cpu : place.cpus) {
    const auto index = static_cast<size_t>(cpu);
    if (infos.empty()) rank.cpus.push_back(cpu);
    if (index >= infos.size()) continue;  // nor is it bound to that
    rank.cpus.push_back(infos[index].id);
    if (infos[index].numa >= 0) rank.numa.push_back(infos[index].numa);
  }
  std::ranges::sort(rank.cpus);
  std::ranges::sort(rank.numa);
  rank.numa.erase(std::unique(rank.numa.begin(), rank.numa.end()), rank.numa.end());
}

// Neighbours share one entry of `nodes`.
RankNow& AddRank(const RankPlace& place, const std::map<NodeId, Node>& nodes, JobNow& now) {
  if (now.nodes.empty() || now.nodes.back().id != place.node)
    now.nodes.push_back({place.node, HostOf(nodes, place.node)});
  RankNow& rank = now.ranks.emplace_back();
  rank.rank = place.rank;
  rank.local_rank = place.local_rank;
  rank.node = now.nodes.size() - 1;
  rank.gpus = place.gpus;
  if (now.places) AddPlace(place, nodes, rank);
  return rank;
}

// Those that come up beside the ranks, numbered behind them.
void AddWaiting(const Job& job, const std::map<NodeId, Node>& nodes, JobNow& now) {
  if (!job.Live()) return;
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    const WaitingRank& one = job.waiting[i];
    RankNow& rank = AddRank(job.record.grant->waiting[i], nodes, now);
    const bool ready = one.status.state == RankState::kJoined;
    rank.state = one.over ? "exited" : ready ? "waiting" : "starting";
    rank.pid = one.status.pid;
    rank.nics = one.status.nics;
  }
}

void AddRanks(const Job& job, const std::map<NodeId, Node>& nodes, JobNow& now) {
  if (!job.record.grant) return;
  std::vector<const RankExit*> exits(job.record.grant->ranks.size());
  for (const RankExit& exit : job.record.exits) {
    const size_t rank = static_cast<size_t>(exit.rank);
    if (rank < exits.size() && exits[rank] == nullptr) exits[rank] = &exit;
  }
  for (const RankPlace& place : job.record.grant->ranks) {
    RankNow& rank = AddRank(place, nodes, now);
    const size_t number = static_cast<size_t>(place.rank);
    if (number < job.ranks.size()) {
      const RankStatus& status = job.ranks[number].status;
      rank.state = StateOf(job, number);
      rank.pid = status.pid;
      rank.step = status.step;
      rank.busy = job.ranks[number].busy;
      rank.nics = status.nics;
    }
    if (number < exits.size() && exits[number] != nullptr)
      rank.end = {exits[number]->cause, exits[number]->exit_code, exits[number]->signal};
  }
  AddWaiting(job, nodes, now);
}

// Without a step for three times as long as one took and at least this, the job has no speed.
constexpr absl::Duration kPause = absl::Seconds(10);

// The time left; nullopt where a program has gone beyond the steps of its job file, since nobody knows its
// end.
std::optional<double> SecondsLeft(const JobNow& now) {
  if (!now.step || !now.steps_total || !now.steps_per_second || *now.step > *now.steps_total)
    return std::nullopt;
  return static_cast<double>(*now.steps_total - *now.step) / *now.steps_per_second;
}

// Adds the loss of the lowest rank that reports one, and samples per second of all ranks together. For a job
// that is over these are the last values reported, also to an earlier head.
void AddProgress(const Job& job, JobNow& now, Instant at) {
  now.step = job.low_step ? job.low_step : job.top_step;
  // A speed is of steps that come: in a pause there is none, and no end in sight.
  const bool pauses = job.low_step && job.Live() && job.progress_at &&
                      at - *job.progress_at > std::max(kPause, 3 * BetweenSteps(job));
  if (job.steps_per_second > 0 && !pauses) now.steps_per_second = job.steps_per_second;
  const bool some_run = job.record.exits.size() < job.ranks.size();
  for (const RankLive& rank : job.ranks) {
    if (some_run && rank.exit >= 0) continue;
    if (!now.loss && !now.diverged) {
      now.loss = rank.status.loss;
      now.diverged = rank.status.diverged;
    }
    if (rank.status.samples_per_second && !pauses)
      now.samples_per_second = now.samples_per_second.value_or(0) + *rank.status.samples_per_second;
  }
  now.steps_total = job.spec.progress.steps;
  if (job.Live()) now.eta_seconds = SecondsLeft(now);
  if (!IsFinal(job.record.state)) return;
  if (!now.step) now.step = job.record.last_step;
  if (now.loss || now.diverged) return;
  now.loss = job.record.last_loss;
  now.diverged = job.record.diverged;
}

// `whole`: of one job; the list of all jobs leaves out tails and the ranks of finished jobs.
// `places`: with what its ranks are bound to, as of one job.
JobNow NowOf(const Job& job, const std::map<NodeId, Node>& nodes, bool whole, bool places, Instant at) {
  const JobRecord& record = job.record;
  JobNow now;
  now.places = whole || places;
  now.id = record.id;
  now.name = record.name;
  now.labels = job.spec.labels;
  now.reason = record.reason;
  now.run_dir = record.run_dir;
  now.policy = job.checkpoint_policy;
  now.state = record.state;
  now.generation = record.generation;
  now.timeline = record.timeline;
  now.world_size = record.grant ? record.grant->world_size : 0;
  now.restarts = record.restarts;
  if (IsFinal(record.state)) now.exit_code = record.exit_code;
  now.user = record.owner;
  now.submitted_at = record.submitted_at;
  now.started_at = record.started_at;
  now.ended_at = record.ended_at;
  now.run_time = job.RunTime(at);
  now.event_sequence = record.event_sequence;
  now.notes = NotesOf(job, at);
  now.goodput = GoodputOf(job, at);
  now.checkpoint = job.checkpoint;
  if (const FaultRecord* first = FirstFault(record.faults)) {
    now.first_fault = Told(*first, whole);
    now.last_fault = Told(*LastFault(record.faults), whole);
  }
  now.blocked_by = job.blocked_by;
  for (const AvoidedNode& avoided : record.avoided)
    now.avoided.push_back({{avoided.node, HostOf(nodes, avoided.node)}, avoided.why});
  for (const auto& [id, pace] : job.paces) {
    if (pace.slow && job.Live()) now.slow.push_back({{id, HostOf(nodes, id)}, pace.score});
  }
  if (record.grant && !IsFinal(record.state)) {
    for (const NodePlace& place : record.grant->holders) now.holders.push_back({place.node, place.hostname});
  }
  if (whole || !IsFinal(record.state)) AddRanks(job, nodes, now);
  AddProgress(job, now, at);
  return now;
}

// `with_pids`: not of a job that is over, since the numbers may be those of other processes by then.
json RankDocuments(const JobNow& job, bool with_pids) {
  json ranks = json::array();
  for (const RankNow& now : job.ranks) {
    json rank = {{"rank", now.rank},
                 {"local_rank", now.local_rank},
                 {"node", job.nodes[now.node].id.value},
                 {"hostname", job.nodes[now.node].hostname}};
    if (!now.gpus.empty()) rank["gpus"] = now.gpus;
    if (now.state != nullptr) {
      rank["state"] = now.state;
      // A head that has just started does not know it, and `kill -9 0` kills the caller's own processes.
      if (with_pids) rank["pid"] = now.pid > 0 ? json(now.pid) : json(nullptr);
      rank["step"] = OrNull(now.step);
      rank["busy"] = OrNull(now.busy);
    }
    if (job.places) {
      rank["cpus"] = now.cpus;
      rank["numa"] = now.numa;
      rank["gpus"] = now.gpus;
      rank["nics"] = json::array();
      for (const absl::string_view nic : absl::StrSplit(now.nics, ',', absl::SkipEmpty()))
        rank["nics"].push_back(nic);
    }
    if (now.end) {
      rank["state"] = "exited";
      rank["cause"] = Name(now.end->cause);
      rank["exit_code"] = now.end->exit_code;
      rank["signal"] = now.end->signal;
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

void AddNotes(const Notes& notes, json& document) {
  for (size_t i = 0; i < kNotes.size(); ++i) document[kNotes[i]] = notes[i];
}

json JobDocument(const JobNow& job) {
  json avoided = json::array(), slow = json::array(), holders = json::array();
  for (const auto& [node, why] : job.avoided)
    avoided.push_back({{"node", node.id.value}, {"hostname", node.hostname}, {"why", why}});
  for (const auto& [node, score] : job.slow)
    slow.push_back({{"node", node.id.value}, {"hostname", node.hostname}, {"score", score}});
  for (const NamedNode& node : job.holders)
    holders.push_back({{"node", node.id.value}, {"hostname", node.hostname}});
  json document = {{"id", job.id.value},
                   {"name", job.name},
                   {"labels", job.labels},
                   {"state", Name(job.state)},
                   {"reason", job.reason},
                   {"generation", job.generation.value},
                   {"timeline", job.timeline.value},
                   {"world_size", job.world_size},
                   {"ranks", RankDocuments(job, !IsFinal(job.state))},
                   {"restarts", job.restarts},
                   {"last_checkpoint", nullptr},
                   {"checkpoint_policy", job.policy},
                   {"first_fault", nullptr},
                   {"last_fault", nullptr},
                   {"blocked_by", BlockerDocuments(job.blocked_by)},
                   {"avoided", std::move(avoided)},
                   {"slow", std::move(slow)},
                   {"holders", std::move(holders)},
                   {"run_dir", job.run_dir},
                   {"exit_code", OrNull(job.exit_code)},
                   {"user", job.user},
                   {"submitted", TimeOrNull(job.submitted_at)},
                   {"started", TimeOrNull(job.started_at)},
                   {"ended", TimeOrNull(job.ended_at)},
                   {"run_seconds", absl::ToDoubleSeconds(job.run_time)},
                   {"event", job.event_sequence},
                   {"step", OrNull(job.step)},
                   {"steps_total", OrNull(job.steps_total)},
                   {"eta_seconds", OrNull(job.eta_seconds)},
                   {"loss", OrNull(job.loss)},
                   {"diverged", job.diverged},
                   {"samples_per_second", OrNull(job.samples_per_second)},
                   {"steps_per_second", OrNull(job.steps_per_second)}};
  document["goodput"] = GoodputDocument(job.goodput);
  AddNotes(job.notes, document);
  if (job.checkpoint) {
    document["last_checkpoint"] = {{"step", job.checkpoint->step},
                                   {"timeline", job.checkpoint->timeline.value},
                                   {"generation", job.checkpoint->generation.value},
                                   {"manifest", job.checkpoint->manifest},
                                   {"count", job.checkpoint->count}};
  }
  if (job.first_fault) {
    document["first_fault"] = FaultDocument(*job.first_fault);
    document["last_fault"] = FaultDocument(*job.last_fault);
  }
  return document;
}

struct StatusDocument : Document {
  ClusterId cluster;
  HeadEpoch epoch;
  bool local = false;
  size_t nodes = 0, omitted = 0;
  std::vector<JobNow> jobs;

  std::string Json() const override {
    json documents = json::array();
    for (const JobNow& job : jobs) documents.push_back(JobDocument(job));
    return OneLine({{"cluster", cluster.value},
                    {"epoch", epoch.value},
                    {"local", local},
                    {"nodes", nodes},
                    {"jobs", std::move(documents)},
                    {"omitted", omitted}});
  }
};

struct FailureDocument : Document {
  JobNow job;
  std::vector<FaultRecord> faults;
  std::vector<std::string> last_lines;  // parallel to job.ranks

  std::string Json() const override {
    json ranks = RankDocuments(job, /*with_pids=*/true), documents = json::array();
    for (size_t i = 0; i < last_lines.size(); ++i) ranks[i]["last_lines"] = last_lines[i];
    for (const FaultRecord& fault : faults) documents.push_back(FaultDocument(fault));
    const FaultRecord* first = FirstFault(faults);
    return OneLine({{"job", job.id.value},
                    {"name", job.name},
                    {"state", Name(job.state)},
                    {"reason", job.reason},
                    {"generation", job.generation.value},
                    {"timeline", job.timeline.value},
                    {"restarts", job.restarts},
                    {"exit_code", OrNull(job.exit_code)},
                    {"first_fault", first == nullptr ? json(nullptr) : FaultDocument(*first)},
                    {"faults", std::move(documents)},
                    {"ranks", std::move(ranks)}});
  }
};

// Everything that `status` and `why` say about a job that is over, in one document; the service adds its
// events, which are in a file.
struct ResultDocument : Document {
  ClusterId cluster;
  JobNow job;
  std::string placement;

  std::string Json() const override {
    json document = JobDocument(job);
    document["cluster"] = cluster.value;
    document["placement"] = placement;
    return OneLine(document);
  }
};

// ---------------------------------------------------------------- events

using Events = std::vector<std::shared_ptr<const EmitEvent>>;

json EventDocument(const EmitEvent& event) {
  json document = {{"time", WallText(event.at)},
                   {"sequence", event.sequence},
                   {"generation", event.generation.value},
                   {"kind", event.kind},
                   {"text", event.text}};
  if (!event.goodput.empty()) document["goodput"] = json::parse(event.goodput, nullptr, false);
  return document;
}

// Of a job that is over the placement alone: nothing waits any more.
std::string PlacesNow(const Job& job) { return job.Live() ? PlacesText(job) : job.placement_reason; }

struct WhyDocument : Document {
  JobId id;
  JobState state = JobState::kQueued;
  std::string reason, placement;
  std::vector<Blocker> blocked_by;
  std::optional<FaultRecord> first_fault, last_fault;
  std::optional<FaultRecord> size_fault;  // for which it does not grow by itself
  Notes notes;
  Events events;

  std::string Json() const override {
    json documents = json::array();
    for (const auto& event : events) documents.push_back(EventDocument(*event));
    json document = {{"id", id.value},
                     {"state", Name(state)},
                     {"reason", reason},
                     {"placement", placement},
                     {"blocked_by", BlockerDocuments(blocked_by)},
                     {"first_fault", first_fault ? FaultDocument(*first_fault) : json(nullptr)},
                     {"last_fault", last_fault ? FaultDocument(*last_fault) : json(nullptr)},
                     {"size_fault", size_fault ? FaultDocument(*size_fault) : json(nullptr)},
                     {"events", std::move(documents)}};
    AddNotes(notes, document);
    return OneLine(document);
  }
};

struct EventsDocument : Document {
  JobId id;
  JobState state = JobState::kQueued;
  uint64_t next = 0;
  Events events;

  std::string Json() const override {
    json documents = json::array();
    for (const auto& event : events) documents.push_back(EventDocument(*event));
    return OneLine({{"job", id.value},
                    {"state", Name(state)},
                    {"final", IsFinal(state)},
                    {"next", next},
                    {"events", std::move(documents)}});
  }
};

// ---------------------------------------------------------------- nodes

// A notice about the machine, by its cloud or by a person.
struct NoticeNow {
  NoticeKind kind;
  std::string source;
  double left_seconds;
};

struct NodeNow {
  std::shared_ptr<const NodeRecord> record;  // of it, what an agent says about its machine
  NodeState state = NodeState::kUnknown;
  bool unclean = false;
  std::vector<NoticeNow> notices;
  std::optional<std::string> quarantine;
  std::string unusable;  // why nothing is placed there; empty: it is used
  std::string via;       // the node through which it reaches the head; empty: none
};

struct RankHoldingNow {
  size_t node = 0;  // its place in NodesDocument::nodes
  std::vector<int> cpus, gpus;
};

// A job that runs, or may still run something, and the resources it holds; nodes are places in
// NodesDocument::nodes.
struct HoldingNow {
  JobId id;
  plan::Demand demand;  // what Occupy reads of it
  std::vector<size_t> nodes;
  std::vector<std::pair<size_t, double>> slow;  // and the score
  std::vector<RankHoldingNow> of_ranks;
};

std::vector<NoticeNow> NoticesOf(const Node& node, Instant now) {
  std::vector<NoticeNow> notices;
  const auto add = [&](const NodeNotice& notice, const std::optional<Instant>& at) {
    if (notice.kind == NoticeKind::kNone || !at) return;
    notices.push_back({notice.kind, notice.source, std::max(0.0, absl::ToDoubleSeconds(*at - now))});
  };
  add(node.record.notice, node.notice_at);
  add(node.record.drain, node.drain_at);
  return notices;
}

std::shared_ptr<const NodeRecord> SharedRecord(const Node& node) {
  if (node.shared == nullptr || node.shared_revision != node.revision) {
    node.shared = std::make_shared<const NodeRecord>(node.record);
    node.shared_revision = node.revision;
  }
  return node.shared;
}

// The last part of the way to a PCI device.
std::string AddressIn(const std::string& pci_path) { return pci_path.substr(pci_path.rfind('/') + 1); }

const char* NameOf(NicKind kind) {
  switch (kind) {
    case NicKind::kInfiniband:
      return "infiniband";
    case NicKind::kRoce:
      return "roce";
    case NicKind::kEfa:
      break;
  }
  return "efa";
}

json NicDocuments(const Network& network) {
  json documents = json::array();
  for (const NicInfo& nic : network.nics) {
    documents.push_back({{"name", nic.name},
                         {"kind", NameOf(nic.kind)},
                         {"unusable", nic.unusable},
                         {"interfaces", nic.interfaces},
                         {"gb_s", static_cast<double>(nic.mbit_s) / 8000},
                         {"numa", nic.numa},
                         {"pci", AddressIn(nic.pci_path)}});
  }
  return documents;
}

json InterfaceDocuments(const Network& network) {
  json documents = json::array();
  for (const InterfaceInfo& interface : network.interfaces)
    documents.push_back({{"name", interface.name}, {"addresses", interface.addresses}});
  return documents;
}

json NodeDocument(const NodeNow& node, const plan::NodeView& view) {
  json gpus = json::array(), notices = json::array(), shares = json::array();
  for (const auto& [gpu, taken] : view.gpu_shares) shares.push_back({{"gpu", gpu}, {"taken", taken}});
  for (const GpuInfo& gpu : node.record->inventory.gpus) {
    gpus.push_back({{"uuid", gpu.uuid},
                    {"model", gpu.model},
                    {"memory_bytes", gpu.memory_bytes},
                    {"numa", gpu.numa},
                    {"pci", AddressIn(gpu.pci_path)}});
  }
  for (const NoticeNow& notice : node.notices) {
    notices.push_back(
        {{"kind", Name(notice.kind)}, {"source", notice.source}, {"left_seconds", notice.left_seconds}});
  }
  return {{"id", node.record->id.value},
          {"hostname", node.record->hostname},
          {"address", node.record->address},
          {"state", NameOf(node.state)},
          {"unclean", node.unclean},
          {"notices", std::move(notices)},
          {"quarantine", OrNull(node.quarantine)},
          {"via", node.via.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(node.via)},
          {"unusable", node.unusable},
          {"slow", json::array()},
          {"version", node.record->version},
          {"cpus", view.cpus},
          {"cpus_free", view.cpus_free},
          {"cpus_bound", view.cpus_bound},
          {"cpu_numa", view.cpu_numa},
          {"memory_bytes", view.memory_bytes},
          {"memory_free_bytes", view.memory_free_bytes},
          {"gpus", std::move(gpus)},
          {"gpus_free", view.gpus_free},
          {"gpu_shares", std::move(shares)},
          {"nics", NicDocuments(node.record->inventory.network)},
          {"interfaces", InterfaceDocuments(node.record->inventory.network)},
          {"labels", node.record->labels},
          {"jobs", json::array()}};
}

struct NodesDocument : Document {
  std::vector<NodeNow> nodes;
  std::vector<HoldingNow> jobs;

  std::string Json() const override {
    std::vector<plan::NodeView> views;
    for (const NodeNow& node : nodes) views.push_back(ViewOf(*node.record));
    for (const HoldingNow& job : jobs) {
      for (const RankHoldingNow& held : job.of_ranks)
        Occupy(views[held.node], {.cpus = held.cpus, .gpus = held.gpus}, job.demand);
    }
    json documents = json::array();
    for (size_t i = 0; i < nodes.size(); ++i) documents.push_back(NodeDocument(nodes[i], views[i]));
    for (const HoldingNow& job : jobs) {
      for (const size_t node : job.nodes) documents[node]["jobs"].push_back(job.id.value);
      for (const auto& [node, score] : job.slow)
        documents[node]["slow"].push_back({{"job", job.id.value}, {"score", score}});
    }
    return OneLine({{"nodes", std::move(documents)}});
  }
};

struct TopologyDocument : Document {
  std::shared_ptr<const topology::Topology> topology;
  bool given = false;

  std::string Json() const override {
    const bool any = !topology->machines.empty();
    return OneLine({{"source", given ? "file"
                               : any ? "labels"
                                     : "none"},
                    {"topology", any ? json::parse(topology::PrintTopology(*topology)) : json()}});
  }
};

}  // namespace

// Other people's push nobody's own out of the list.
std::shared_ptr<const Document> StatusOf(const HeadModel& model, bool local, const ClientStatus& asked,
                                         const std::string& reader, Instant now) {
  constexpr int kOverShown = 100;
  const JobId& id = asked.job;
  const auto over_shown = static_cast<size_t>(asked.over > 0 ? asked.over : kOverShown);
  auto status = std::make_shared<StatusDocument>();
  status->cluster = model.cluster.cluster;
  status->epoch = model.cluster.epoch;
  status->local = local;
  status->nodes = model.nodes.size();
  if (!id.empty()) {
    if (const Job* job = model.FindJob(id)) status->jobs.push_back(NowOf(*job, model.nodes, true, true, now));
    return status;
  }
  std::vector<const Job*> over;
  for (auto it = model.job_order.rbegin(); it != model.job_order.rend(); ++it) {
    if (const Job& job = model.jobs.at(it->second); IsFinal(job.record.state)) over.push_back(&job);
  }
  // A long job that has just ended is news, however many began after it.
  if (over.size() > over_shown) {
    std::stable_sort(over.begin(), over.end(), [](const Job* one, const Job* other) {
      return one->record.ended_at > other->record.ended_at;
    });
  }
  std::set<const Job*> left_out;
  size_t own = 0;
  for (size_t i = 0; i < over.size(); ++i) {
    const bool readers = over[i]->record.owner == reader && ++own <= over_shown;
    if (!readers && i >= over_shown) left_out.insert(over[i]);
  }
  status->omitted = left_out.size();
  for (const auto& [number, job_id] : model.job_order) {  // in order of submission
    const Job& job = model.jobs.at(job_id);
    if (!left_out.contains(&job)) status->jobs.push_back(NowOf(job, model.nodes, false, asked.places, now));
  }
  return status;
}

std::shared_ptr<const Document> WhyOf(const Job& job, Instant now) {
  auto why = std::make_shared<WhyDocument>();
  why->id = job.record.id;
  why->state = job.record.state;
  why->reason = job.record.reason;
  why->placement = PlacesNow(job);
  why->blocked_by = job.blocked_by;
  const std::vector<FaultRecord>& faults = job.record.faults;
  if (const FaultRecord* first = FirstFault(faults)) {
    why->first_fault = *first;
    why->last_fault = *LastFault(faults);
  }
  if (job.Live() && job.sizing.failed) {
    const auto back = std::find_if(faults.rbegin(), faults.rend(), [](const FaultRecord& fault) {
      return absl::StartsWith(fault.message, kGoesBack);
    });
    if (back != faults.rend()) why->size_fault = *back;
  }
  why->notes = NotesOf(job, now);
  why->events.assign(job.events.begin(), job.events.end());
  return why;
}

std::shared_ptr<const Document> TopologyOf(const HeadModel& model,
                                           const std::shared_ptr<const topology::Topology>& given) {
  auto now = std::make_shared<TopologyDocument>();
  now->given = given != nullptr;
  now->topology = given;
  if (given != nullptr) return now;
  std::vector<plan::NodeView> views;
  for (const auto& [id, node] : model.nodes) {
    if (node.state != NodeState::kDead) views.push_back(ViewOf(node.record));
  }
  now->topology = std::make_shared<const topology::Topology>(plan::TopologyOfLabels(views));
  return now;
}

std::shared_ptr<const Document> NodesOf(const HeadModel& model, Instant at) {
  auto now = std::make_shared<NodesDocument>();
  absl::flat_hash_map<NodeId, size_t> places;
  for (const auto& [id, node] : model.nodes) {
    places[id] = now->nodes.size();
    NodeNow& one = now->nodes.emplace_back();
    one.record = SharedRecord(node);
    one.state = node.state;
    one.unclean = node.record.unclean;
    one.notices = NoticesOf(node, at);
    if (node.quarantined_until) one.quarantine = node.quarantine;
    one.unusable = node.state == NodeState::kDead ? "dead"
                   : !node.welcomed               ? "its agent has not been heard since the head started"
                                                  : node.WhyUnusable();
    one.via = node.via.value;
  }
  const auto with_place = [&](const NodeId& id, const auto& add) {
    if (const auto it = places.find(id); it != places.end()) add(it->second);
  };
  for (const auto& [id, job] : model.jobs) {
    if (!job.record.grant || (!job.Occupies() && job.record.unreleased.empty())) continue;
    HoldingNow& holding = now->jobs.emplace_back();
    holding.id = id;
    holding.demand.cpus = job.demand.cpus;
    holding.demand.memory_bytes = job.demand.memory_bytes;
    holding.demand.gpu_share = job.demand.gpu_share;
    for (const NodePlace& place : job.record.grant->nodes) {
      if (!job.HoldsRoomOn(place.node)) continue;
      with_place(place.node, [&, &job = job](size_t node) {
        holding.nodes.push_back(node);
        const auto pace = job.paces.find(place.node);
        if (pace != job.paces.end() && pace->second.slow) holding.slow.push_back({node, pace->second.score});
      });
    }
    for (const auto* ranks : {&job.record.grant->ranks, &job.record.grant->waiting}) {
      for (const RankPlace& rank : *ranks) {
        if (!job.HoldsRoomOn(rank.node)) continue;
        with_place(rank.node, [&](size_t node) { holding.of_ranks.push_back({node, rank.cpus, rank.gpus}); });
      }
    }
  }
  return now;
}

std::pair<std::shared_ptr<const Document>, size_t> EventsAfter(const Job& job, uint64_t after) {
  auto events = std::make_shared<EventsDocument>();
  events->id = job.record.id;
  events->state = job.record.state;
  events->next = job.record.event_sequence;
  size_t bytes = 0;
  for (const auto& event : job.events) {
    if (event->sequence <= after) continue;
    events->events.push_back(event);
    bytes += event->text.size();
  }
  return {events, bytes};
}

std::string GoodputText(const Job& job, Instant now) {
  const std::optional<GoodputNow> goodput = GoodputOf(job, now);
  return goodput ? OneLine(GoodputDocument(goodput)) : "";
}

std::shared_ptr<const Document> FailureOf(const HeadModel& model, const Job& job, Instant now) {
  auto failure = std::make_shared<FailureDocument>();
  failure->job = NowOf(job, model.nodes, true, true, now);
  failure->faults = job.record.faults;
  for (const RankNow& rank : failure->job.ranks) {
    const RankExit* exit = job.ExitOf(rank.rank);
    const HeldTail* tail = model.tails.Find({job.record.id, job.record.generation, rank.rank, true});
    failure->last_lines.push_back(exit != nullptr && !exit->tail.empty() ? exit->tail
                                  : tail != nullptr                      ? tail->text
                                                                         : "");
  }
  return failure;
}

std::optional<WriteResult> ResultOf(const HeadModel& model, const JobId& id, Instant now) {
  const Job* job = model.FindJob(id);
  if (job == nullptr || !IsFinal(job->record.state)) return std::nullopt;
  auto result = std::make_shared<ResultDocument>();
  result->cluster = model.cluster.cluster;
  result->job = NowOf(*job, model.nodes, true, true, now);
  result->placement = PlacesNow(*job);
  return WriteResult{id, job->record.run_dir, std::move(result)};
}

}  // namespace gtrain::core
