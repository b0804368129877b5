// Documents for people and scripts; docs/protocols/control-plane.md gives their shapes.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head_state.h"
#include "runtime/core/worker_core.h"

namespace gtrain::core {
namespace {

using nlohmann::json;

std::string Dump(const json& document) {
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

template <typename T>
json OrNull(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

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

json FaultDocument(const FaultRecord& fault, bool with_tail) {
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
          {"tail", with_tail ? fault.tail : ""}};
}

json BlockerDocuments(const Job& job) {
  json documents = json::array();
  for (const Blocker& blocker : job.blocked_by) {
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

json AvoidedDocuments(const Job& job, const std::map<NodeId, Node>& nodes) {
  json documents = json::array();
  for (const AvoidedNode& avoided : job.record.avoided) {
    documents.push_back(
        {{"node", avoided.node.value}, {"hostname", HostOf(nodes, avoided.node)}, {"why", avoided.why}});
  }
  return documents;
}

json HolderDocuments(const Job& job) {
  json documents = json::array();
  if (!job.record.grant || IsFinal(job.record.state)) return documents;
  for (const NodePlace& place : job.record.grant->holders)
    documents.push_back({{"node", place.node.value}, {"hostname", place.hostname}});
  return documents;
}

json SlowDocuments(const Job& job, const std::map<NodeId, Node>& nodes) {
  json documents = json::array();
  for (const auto& [id, pace] : job.paces) {
    if (!pace.slow || !job.Live()) continue;
    documents.push_back({{"node", id.value}, {"hostname", HostOf(nodes, id)}, {"score", pace.score}});
  }
  return documents;
}

json RankDocuments(const Job& job, const std::map<NodeId, Node>& nodes) {
  json ranks = json::array();
  if (!job.record.grant) return ranks;
  for (const RankPlace& place : job.record.grant->ranks) {
    json rank = {{"rank", place.rank},
                 {"local_rank", place.local_rank},
                 {"node", place.node.value},
                 {"hostname", HostOf(nodes, place.node)}};
    if (static_cast<size_t>(place.rank) < job.ranks.size()) {
      const RankStatus& status = job.ranks[place.rank].status;
      rank["state"] = StateOf(job, place.rank);
      rank["pid"] = status.pid;
      rank["step"] = OrNull(status.step);
      rank["busy"] = OrNull(job.ranks[place.rank].busy);
    }
    if (const RankExit* exit = job.ExitOf(place.rank)) {
      rank["state"] = "exited";
      rank["cause"] = Name(exit->cause);
      rank["exit_code"] = exit->exit_code;
      rank["signal"] = exit->signal;
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

// What is said of the machine: by its cloud, by a person.
json NoticeDocuments(const Node& node, Instant now) {
  json documents = json::array();
  const auto add = [&](const NodeNotice& notice, const std::optional<Instant>& at) {
    if (notice.kind == NoticeKind::kNone || !at) return;
    documents.push_back({{"kind", Name(notice.kind)},
                         {"source", notice.source},
                         {"left_seconds", std::max(0.0, absl::ToDoubleSeconds(*at - now))}});
  };
  add(node.record.notice, node.notice_at);
  add(node.record.drain, node.drain_at);
  return documents;
}

// Loss of the lowest rank that reports one; samples per second of all ranks together.
void AddProgress(const Job& job, json& document) {
  document["step"] = OrNull(job.low_step ? job.low_step : job.top_step);
  document["loss"] = nullptr;
  document["samples_per_second"] = nullptr;
  document["steps_per_second"] = job.steps_per_second > 0 ? json(job.steps_per_second) : json(nullptr);
  double samples = 0;
  for (const RankLive& rank : job.ranks) {
    if (rank.status.loss && document["loss"].is_null()) document["loss"] = *rank.status.loss;
    if (rank.status.samples_per_second) {
      samples += *rank.status.samples_per_second;
      document["samples_per_second"] = samples;
    }
  }
}

// What the ranks of this generation say of themselves, or those of an earlier one said.
void AddNotes(const Job& job, json& document) {
  for (const char* kind : {kCompressionNote, kRestoreNote, kOwnerNote, kStorageNote, kSavesNote, kLogsNote}) {
    const auto said = job.rank_notes.find(kind), before = job.notes_before.find(kind);
    document[kind] = said != job.rank_notes.end()       ? said->second
                     : before != job.notes_before.end() ? before->second
                                                        : "";
  }
}

// `whole`: of one job; the list of all jobs leaves out tails and the ranks of finished jobs.
json JobDocument(const Job& job, const std::map<NodeId, Node>& nodes, bool whole) {
  const JobRecord& record = job.record;
  json document = {{"id", record.id.value},
                   {"name", record.name},
                   {"state", Name(record.state)},
                   {"reason", record.reason},
                   {"generation", record.generation.value},
                   {"timeline", record.timeline.value},
                   {"world_size", record.grant ? record.grant->world_size : 0},
                   {"ranks", whole || !IsFinal(record.state) ? RankDocuments(job, nodes) : json::array()},
                   {"restarts", record.restarts},
                   {"last_checkpoint", nullptr},
                   {"checkpoint_policy", job.checkpoint_policy},
                   {"first_fault", nullptr},
                   {"last_fault", nullptr},
                   {"blocked_by", BlockerDocuments(job)},
                   {"avoided", AvoidedDocuments(job, nodes)},
                   {"slow", SlowDocuments(job, nodes)},
                   {"holders", HolderDocuments(job)},
                   {"run_dir", record.run_dir},
                   {"exit_code", OrNull(record.exit_code)},
                   {"event", record.event_sequence}};
  AddProgress(job, document);
  AddNotes(job, document);
  if (job.checkpoint) {
    document["last_checkpoint"] = {{"step", job.checkpoint->step},
                                   {"timeline", job.checkpoint->timeline.value},
                                   {"generation", job.checkpoint->generation.value},
                                   {"manifest", job.checkpoint->manifest},
                                   {"count", job.checkpoint->count}};
  }
  if (!record.faults.empty()) {
    document["first_fault"] = FaultDocument(record.faults.front(), whole);
    document["last_fault"] = FaultDocument(record.faults.back(), whole);
  }
  return document;
}

}  // namespace

std::string HeadState::StatusJson(const JobId& id) const {
  constexpr size_t kFinishedShown = 100;  // newest
  json jobs = json::array();
  size_t finished = 0, omitted = 0;
  for (auto it = job_order_.rbegin(); it != job_order_.rend(); ++it) {
    const Job& job = jobs_.at(it->second);
    if (!id.empty() && id != it->second) continue;
    if (IsFinal(job.record.state) && ++finished > kFinishedShown) {
      ++omitted;
    } else {
      jobs.push_back(JobDocument(job, nodes_, !id.empty()));
    }
  }
  std::reverse(jobs.begin(), jobs.end());  // in order of submission
  return Dump({{"cluster", cluster_.cluster.value},
               {"epoch", cluster_.epoch.value},
               {"local", config_.local},
               {"nodes", nodes_.size()},
               {"jobs", std::move(jobs)},
               {"omitted", omitted}});
}

std::string HeadState::WhyJson(const Job& job) const {
  json events = json::array();
  for (const EmitEvent& event : job.events) {
    events.push_back({{"sequence", event.sequence}, {"kind", event.kind}, {"text", event.text}});
  }
  json document = {{"id", job.record.id.value},           {"state", Name(job.record.state)},
                   {"reason", job.record.reason},         {"placement", job.placement_reason},
                   {"blocked_by", BlockerDocuments(job)}, {"events", std::move(events)}};
  AddNotes(job, document);
  return Dump(document);
}

std::string HeadState::NodesJson() const {
  json nodes = json::array();
  for (const auto& [id, node] : nodes_) {
    plan::NodeView view = ViewOf(node.record);
    json jobs = json::array(), slow = json::array();
    for (const auto& [job_id, job] : jobs_) {
      if (!job.Live() || !job.HoldsNode(id)) continue;
      jobs.push_back(job_id.value);
      const auto pace = job.paces.find(id);
      if (pace != job.paces.end() && pace->second.slow)
        slow.push_back({{"job", job_id.value}, {"score", pace->second.score}});
      for (const RankPlace& rank : job.record.grant->ranks) {
        if (rank.node == id) Occupy(view, rank, job.demand);
      }
    }
    json gpus = json::array();
    for (const GpuInfo& gpu : node.record.inventory.gpus) {
      gpus.push_back({{"uuid", gpu.uuid}, {"model", gpu.model}, {"memory_bytes", gpu.memory_bytes}});
    }
    nodes.push_back({{"id", id.value},
                     {"hostname", node.record.hostname},
                     {"address", node.record.address},
                     {"state", NameOf(node.state)},
                     {"unclean", node.record.unclean},
                     {"notices", NoticeDocuments(node, step_at_)},
                     {"quarantine", node.quarantined_until ? json(node.quarantine) : json(nullptr)},
                     {"slow", std::move(slow)},
                     {"version", node.record.version},
                     {"cpus", view.cpus},
                     {"cpus_free", view.cpus_free},
                     {"memory_bytes", view.memory_bytes},
                     {"memory_free_bytes", view.memory_free_bytes},
                     {"gpus", std::move(gpus)},
                     {"gpus_free", view.gpus_free},
                     {"labels", node.record.labels},
                     {"jobs", std::move(jobs)}});
  }
  return Dump({{"nodes", std::move(nodes)}});
}

std::string HeadState::EventsJson(const Job& job, uint64_t after) const {
  json events = json::array();
  for (const EmitEvent& event : job.events) {
    if (event.sequence <= after) continue;
    events.push_back({{"sequence", event.sequence},
                      {"generation", event.generation.value},
                      {"kind", event.kind},
                      {"text", event.text}});
  }
  return Dump({{"job", job.record.id.value},
               {"state", Name(job.record.state)},
               {"final", IsFinal(job.record.state)},
               {"next", job.record.event_sequence},
               {"events", std::move(events)}});
}

std::string HeadState::FailureJson(const Job& job) const {
  const JobRecord& record = job.record;
  json ranks = RankDocuments(job, nodes_);
  for (json& rank : ranks) {
    const int number = rank["rank"].get<int>();
    const RankExit* exit = job.ExitOf(number);
    const LogTail* tail = tails_.Find(record.id, record.generation, number, true);
    rank["last_lines"] = exit != nullptr && !exit->tail.empty() ? exit->tail
                         : tail != nullptr                      ? tail->text
                                                                : "";
  }
  json faults = json::array();
  for (const FaultRecord& fault : record.faults) faults.push_back(FaultDocument(fault, true));
  return Dump({{"job", record.id.value},
               {"name", record.name},
               {"state", Name(record.state)},
               {"reason", record.reason},
               {"generation", record.generation.value},
               {"timeline", record.timeline.value},
               {"restarts", record.restarts},
               {"exit_code", OrNull(record.exit_code)},
               {"first_fault", faults.empty() ? json(nullptr) : faults.front()},
               {"faults", std::move(faults)},
               {"ranks", std::move(ranks)}});
}

}  // namespace gtrain::core
