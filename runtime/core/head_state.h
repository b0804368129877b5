// HeadState: what HeadCore knows, and its decisions by concern. Private to runtime/core.
//
//   head_core.cc     steps, recovery, deadlines
//   head_nodes.cc    hello, heartbeat, silence: membership
//   head_ranks.cc    what agents report about ranks
//   head_jobs.cc     submit to end: scheduling, grants, revokes, restarts
//   head_clients.cc  requests, long polls, questions to agents
//   head_json.cc     documents for people
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/plan/place.h"
#include "runtime/core/exchange.h"
#include "runtime/core/failure_detector.h"
#include "runtime/core/gang.h"
#include "runtime/core/head_core.h"
#include "runtime/core/job_state.h"
#include "runtime/core/log_tails.h"

namespace gtrain::core {

struct Node {
  NodeRecord record;
  std::string route;      // newest; empty: none since this head started
  bool welcomed = false;  // said hello to this head
  NodeState state = NodeState::kUnknown;
  absl::Duration silence;  // when it became suspect or dead
  std::vector<int> free_ports;
  // A hello of another incarnation while this one was just heard: refused when this one speaks again,
  // accepted when it falls silent (fault N4).
  std::optional<PeerMessage> rival;

  bool Usable() const { return welcomed && state == NodeState::kAlive && !record.unclean; }
};

struct RankLive {
  RankStatus status;
  bool started = false;
  std::optional<Instant> stepped_at;  // when its step last grew
};

struct Job {
  JobRecord record;
  spec::JobSpec spec;
  plan::Demand demand;
  std::optional<CheckpointRecord> checkpoint;

  // Live, of record.generation.
  std::vector<RankLive> ranks;  // index = rank
  std::optional<Exchange> exchange;
  std::optional<Instant> start_deadline;  // all ranks started
  std::optional<Instant> gone_deadline;   // all nodes released
  std::optional<Instant> not_before;      // backoff
  bool any_started = false;
  bool checkpointed = false;                             // a checkpoint was committed in this generation
  std::optional<int64_t> top_step;                       // highest any rank reported
  std::optional<int64_t> low_step;                       // lowest of the ranks still running
  double steps_per_second = 0;                           // smoothed
  std::optional<std::pair<int64_t, Instant>> rate_from;  // low_step at the beginning of the stretch measured
  std::optional<Instant> progress_at;
  bool stall_reported = false;
  std::string placement_reason;

  std::vector<Instant> fault_times;  // parallel to record.faults
  std::vector<Blocker> blocked_by;
  std::optional<Instant> run_mark;  // run_time is counted up to here
  Instant client_seen;
  std::map<Generation, GenerationGrant> past;  // for logs of earlier generations, newest 16
  std::deque<EmitEvent> events;

  // A generation that is granted and not revoked.
  bool Live() const {
    return !IsFinal(record.state) && record.grant.has_value() && record.generation > record.revoked;
  }
  // Wants a generation and has none.
  bool Wanting() const { return !IsFinal(record.state) && !Live() && record.ending == Ending::kNone; }
  bool HoldsNode(const NodeId& node) const;
  const RankExit* ExitOf(int rank) const;
};

// A client's question that an agent answers.
struct OpenQuery {
  std::string route;
  std::string request_id;
  AgentQuery query;
  NodeId node;
  Instant deadline;
};

// A client waiting for events.
struct OpenPoll {
  std::string route;
  std::string request_id;
  std::string client_key;
  JobId job;
  uint64_t after = 0;
  Instant deadline;
};

// At most `bytes` of it, cut between characters: sentences in records are bounded.
std::string Shortened(std::string text, size_t bytes);

class HeadState {
 public:
  HeadState(HeadConfig config, Rng rng);

  absl::StatusOr<StepResult> Recover(const std::vector<Record>& records, Instant now);
  StepResult Step(const HeadEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const;
  HeadSnapshot Snapshot() const;
  HeadEpoch epoch() const { return cluster_.epoch; }
  const std::string* RouteOf(const NodeId& node) const;
  const HeadCounters& counters() const { return counters_; }

 private:
  // head_core.cc
  absl::Status Load(const std::vector<Record>& records, Instant now);
  void Adopt(Job& job, Instant now);
  void OnMessage(const PeerMessage& event, Instant now);
  void OnTick(Instant now);
  void CheckIdle(Instant now);
  StepResult Flush(Instant now);
  void Say(const std::string& why);
  void Emit(Job& job, const std::string& kind, std::string text);
  void Send(const NodeId& node, SendKind kind, Message message);
  void Dirty(const Job& job) { dirty_jobs_.insert(job.record.id); }
  void Write(const Record& record) { writes_.push_back({KeyOf(record), record}); }
  Job* FindJob(const JobId& id);
  const Job* FindJob(const JobId& id) const;
  std::vector<Job*> LiveJobs();  // not final, in order of submission

  // head_nodes.cc
  void OnHello(const PeerMessage& event, const AgentHello& hello, Instant now);
  std::string RefuseHello(const AgentHello& hello) const;
  void RefuseRival(Node& node);
  void Reconcile(Node& node, const AgentHello& hello, bool new_incarnation, Instant now);
  void EndForgotten(const NodeId& node, const HeldGeneration& held, bool known);
  void ReconcileJob(Job& job, const Node& node, const std::vector<const HeldGeneration*>& held,
                    bool new_incarnation, Instant now);
  void ResendEnding(Job& job, const NodeId& node, Instant now);
  void OnHeartbeat(Node& node, const AgentHeartbeat& heartbeat, Instant now);
  void Returned(Node& node, Instant now);
  void OnSilence(const FailureDetector::Change& change, Instant now);
  bool MayOnlyLackItsAgent(const Node& node, Instant now) const;
  void RanksLost(Job& job, const Node& node, const std::string& why, Instant now);
  bool Unreleased(const Job& job, const NodeId& node) const;
  void Release(Job& job, const NodeId& node, Instant now);
  std::string Hostname(const NodeId& id) const;

  // head_ranks.cc
  void OnRankStatus(const NodeId& node, const RankStatus& status, Instant now);
  void OnStarted(const NodeId& node, const RanksStarted& started, Instant now);
  void OnExited(const NodeId& node, const RankExit& exit, Instant now);
  void OnGone(Node& node, const GenerationGone& gone, Instant now);
  void OnExchange(const NodeId& node, const ExchangePart& part);
  void OnCheckpoint(const NodeId& node, const CheckpointReport& report);
  void OnNote(const NodeId& node, const AgentNote& note);
  Job* CurrentJob(const NodeId& node, const JobId& id, Generation generation);
  FaultRecord FaultOf(const Job& job, const RankExit& exit) const;
  void UpdateProgress(Job& job, Instant now);
  void CheckStall(Job& job, Instant now);
  void RunningIfAllStarted(Job& job, Instant now);

  // head_jobs.cc
  void Move(Job& job, JobState state, std::string reason);
  void Schedule(Instant now);
  void TryPlace(Job& job, Instant now);
  void NotPlaced(Job& job, const plan::Placement& placement, const std::vector<plan::NodeView>& views);
  std::vector<plan::NodeView> Views(const Job& wanting) const;
  void Grant(Job& job, const plan::Placement& placement, Instant now);
  int PickPort(const Job& job, const NodeId& node);
  void SendGrant(const Job& job, const NodeId& node);
  void ResetLive(Job& job, Instant now);
  void Fail(Job& job, FaultRecord fault, Instant now);  // revoke at once, then restart_policy
  void BeginEnding(Job& job, Ending ending, EndMode mode, absl::Duration grace, std::string reason,
                   Instant now);
  void SendRevoke(const Job& job, const NodeId& node, EndMode mode, absl::Duration grace);
  void ContinueEnding(Job& job, Instant now);
  void FinishEnding(Job& job, Instant now);
  void DecideAfterFault(Job& job, Instant now);
  void Finish(Job& job, JobState state, std::string reason);
  void JobTimers(Job& job, Instant now);
  std::optional<Instant> JobDeadline(const Job& job) const;
  absl::Duration RunTime(const Job& job, Instant now) const;

  // head_clients.cc
  void OnRequest(const PeerMessage& event, const ClientRequest& request, Instant now);
  absl::Status Permit(const Peer& peer, const ClientRequestBody& body) const;
  void Answer(const std::string& route, const std::string& id, const absl::Status& status, std::string json);
  void Remember(const Peer& peer, const ClientReply& reply);
  absl::StatusOr<std::string> Submit(const Peer& peer, const std::string& id, const ClientSubmit& submit,
                                     Instant now);
  absl::StatusOr<std::string> Stop(const Peer& peer, const ClientStop& stop, Instant now);
  absl::StatusOr<std::string> Shutdown(const ClientShutdown& shutdown, Instant now);
  absl::Status AskLogs(const PeerMessage& event, const std::string& id, const ClientLogs& logs, Instant now);
  absl::Status AskExec(const PeerMessage& event, const std::string& id, const ClientExec& exec, Instant now);
  absl::Status Poll(const PeerMessage& event, const std::string& id, const ClientEvents& events, Instant now);
  void Ask(const PeerMessage& event, const std::string& id, const NodeId& node, AgentQuery query,
           Instant now);
  void OnAnswer(const NodeId& node, const AgentAnswer& answer);
  void AnswerFromMirror(const OpenQuery& open, const std::string& why);
  void AnswerPolls(Instant now);
  void ExpireQueries(Instant now);
  void DropOldJobs();

  // head_json.cc
  std::string StatusJson(const JobId& id) const;
  std::string WhyJson(const Job& job) const;
  std::string NodesJson() const;
  std::string EventsJson(const Job& job, uint64_t after) const;
  std::string FailureJson(const Job& job) const;

  // Constant after construction.
  HeadConfig config_;

  // Durable (each change is marked for the next Persist).
  ClusterRecord cluster_;
  std::map<NodeId, Node> nodes_;
  std::map<JobId, Job> jobs_;
  std::map<uint64_t, JobId> job_order_;            // by number
  std::map<std::string, RequestRecord> requests_;  // by KeyOf
  std::map<uint64_t, std::string> request_order_;

  // Rebuilt.
  Rng rng_;
  FailureDetector detector_;
  LogTails tails_;
  std::map<uint64_t, OpenQuery> queries_;
  uint64_t next_query_ = 1;
  std::vector<OpenPoll> polls_;
  Instant active_at_;  // last request or end of a job
  bool any_job_seen_ = false;
  bool shutdown_when_idle_ = false;
  bool stopped_ = false;
  bool schedule_ = false;  // something changed that may let a job start
  HeadCounters counters_;

  // Of the step that is running.
  Instant step_at_;
  std::vector<Effect> out_;
  std::vector<RecordWrite> writes_;
  std::set<JobId> dirty_jobs_;
  std::string why_;
};

}  // namespace gtrain::core
