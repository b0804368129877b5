// What HeadCore knows, and its decisions by concern. Private to runtime/core. head_core.cc: steps, deadlines
//   head_nodes.cc    hello, heartbeat, silence: membership
//   head_records.cc  jobs from their records and into them
//   head_recovery.cc lost records, older records, newer heads
//   head_notices.cc  machines that leave
//   head_links.cc    nodes that cannot reach each other
//   head_pace.cc     nodes for which others wait
//   head_copies.cc   machines outside a job that keep copies of its checkpoints
//   head_ranks.cc    what agents report about ranks
//   head_directories.cc  whose a checkpoint directory is
//   head_jobs.cc     submit to end: scheduling, grants, revokes, restarts
//   head_clients.cc  requests, long polls, questions to agents
//   head_console.cc  the way between a client's terminal and a program beside a rank
//   head_json.cc     documents for people
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/rate_limit.h"
#include "job/plan/place.h"
#include "runtime/core/head/exchange.h"
#include "runtime/core/head/failure_detector.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/head_queries.h"
#include "runtime/core/head/job_sizing.h"
#include "runtime/core/head/user_shares.h"
#include "runtime/core/values/job_state.h"
#include "runtime/core/values/log_tails.h"

namespace gtrain::core {

struct Node {
  NodeRecord record;
  uint64_t revision = 0;  // of what an agent says about its machine in `record`; never used again
  // `record` as of a revision, for documents that are built elsewhere; made when one is asked for.
  mutable std::shared_ptr<const NodeRecord> shared;
  mutable uint64_t shared_revision = 0;
  std::string route;      // newest; empty: none since this head started
  bool welcomed = false;  // said hello to this head
  bool missed = false;    // a message sent to it on this connection was lost
  uint64_t hello_order = 0;
  NodeState state = NodeState::kUnknown;
  Instant heard_at;        // last; the start of this head, if not since then
  absl::Duration silence;  // when it became suspect or dead
  std::vector<int> free_ports;
  int near_port = 0;  // as it said in its hello
  std::string near_key;
  bool takes_copies = false;
  bool keeps_seals = false;
  // A hello of another incarnation while this one was just heard: refused when this one speaks again,
  // accepted when it falls silent (fault N4).
  std::optional<PeerMessage> rival;
  // Deaths by silence, halved for every flap_decay without one, and what they cost it (fault N5).
  int flaps = 0;
  Instant flapped_at;
  std::optional<Instant> quarantined_until;
  std::string quarantine;  // why, for people

  // When record.notice and record.drain happen, of those that are something.
  std::optional<Instant> notice_at, drain_at;

  bool Leaving() const {
    return record.notice.kind == NoticeKind::kLeave || record.drain.kind == NoticeKind::kLeave;
  }
  const NodeNotice& Parting() const;  // while Leaving(): the one that happens first
  std::optional<Instant> PartsAt() const;

  bool Usable() const {
    return welcomed && state == NodeState::kAlive && !record.unclean && !quarantined_until && !Leaving();
  }
};

struct RankLive {
  RankStatus status;
  bool started = false;
  int exit = -1;                        // its place in record.exits; -1: it has not ended
  std::optional<Instant> stepped_at;    // when its step was last another
  bool began_anew = false;              // its step fell since Job::low_step
  std::optional<Instant> idle_since;    // while its agent says that it rests
  std::optional<RankStatus> pace_from;  // at the beginning of the stretch that is measured
  std::optional<double> busy;           // share of the last whole stretch in which it did not wait for others
  bool busy_new = false;                // since nodes were compared
};

NodePlace PlaceOf(const Node& node);

// How the ranks of a node compare with those of the others of their job (head_pace.cc).
struct NodePace {
  double score = 1;  // their own time a step over the others'
  int above = 0;     // comparisons in a row that found it slow; below zero: that did not
  bool slow = false;
};

// A node of a live generation that leaves, and what becomes of the ranks when (head_notices.cc).
struct JobLeave {
  NodeId node;
  std::string hostname, source;
  Instant at;       // the machine goes
  Instant tell_at;  // the ranks are told
  Instant end_at;   // the generation ends
};

// What of a job's record the store holds once the step that runs is written, so that a change is written at
// the cost of what changed. Where a part can change without growing, whoever changes it says so here.
struct JobWritten {
  bool status = false;                // there is one, and what it counts
  bool submission = false;            // as in the record
  bool unreleased = true;             // as in the record; none is written of no nodes
  bool newest_fault = true;           // as in the record
  Generation grant;                   // whose it is; 0: none
  size_t exits = 0;                   // the first of them
  size_t packed = 0;                  // of these, how many lie in JobExitsRecords
  std::vector<Generation> faults;     // of these
  std::vector<std::string> obsolete;  // keys beside those of the record, to be deleted with the next write
};

// A job that stands still, since when, and for people which ranks are to blame.
struct StallVerdict {
  Instant since;
  std::string text;
};

// Keys of `status` and `why` beside the notes that ranks write of themselves (worker_core.h).
inline constexpr char kStuckNote[] = "stuck";  // that the job stands still, and who holds it up
inline constexpr char kProgressNote[] =
    "progress";  // what the job file says of progress and cannot be measured

struct Job {
  JobRecord record;
  JobWritten written;
  spec::JobSpec spec;
  plan::Demand demand;
  std::optional<CheckpointRecord> checkpoint;
  std::string checkpoint_policy;                    // as the newest report said it
  std::map<std::string, std::string> notes_before;  // of earlier generations, of the owner and the storage
  std::map<std::string, std::string> rank_notes;    // of this generation: kind -> newest (worker_core.h)
  std::optional<RateLimit> note_rate;               // of the events that its ranks cause by what they say
  int notes_left_out = 0;                           // since the last one that was told

  // Live, of record.generation.
  std::vector<RankLive> ranks;  // index = rank
  // Of the ranks that have not ended: how many reported each step, and how many were not started. Kept with
  // each change, so that a round of n ranks costs n log n here and not n * n.
  std::map<int64_t, int> steps;
  int not_started = 0;
  std::optional<Exchange> exchange;
  std::optional<Instant> start_deadline;  // all ranks started
  std::optional<Instant> gone_deadline;   // all nodes released
  std::optional<Instant> fenced_at;       // until then ranks of a node that does not answer may write
  std::optional<Instant> not_before;      // backoff
  std::optional<Instant> left_at;         // the others are told which ranks ended with exit code 0
  std::optional<Instant> cause_at;        // a rank has said 75: until then another one may say why
  bool any_started = false;
  bool granted_here = false;  // by this head, since its start
  bool checkpointed = false;  // a checkpoint was committed in this generation
  std::optional<JobLeave> leave;
  uint32_t notices = 0;                  // that the ranks of this generation were told
  std::optional<Instant> told_at;        // of the leave that stands: when it comes, as the ranks know
  std::optional<Instant> excused_until;  // of one that was taken back: ranks may still act on it
  bool saved_since_told = false;         // a checkpoint was committed since they were told
  JobSizing sizing;
  std::optional<int64_t> top_step;  // highest any rank reported
  std::optional<int64_t> low_step;  // lowest of the ranks still running
  int began_anew = 0;               // of these, whose step fell since low_step
  double steps_per_second = 0;
  std::deque<std::pair<int64_t, Instant>>
      rate_over;  // low_step and when, of the stretch that it is measured over
  std::optional<Instant> progress_at;
  int idle = 0;                                // ranks that rest
  Instant idle_from;                           // the last of them did from then on
  std::optional<StallVerdict> stalled, stuck;  // no step; neither output nor processor time
  std::string placement_reason;
  std::map<std::pair<NodeId, NodeId>, std::string> broken_links;  // smaller id first; what a rank said
  std::map<NodeId, NodePace> paces;
  std::optional<Instant> links_at;  // which node to do without is decided then

  std::string location;   // where it saves checkpoints, one name for each directory; empty: nowhere
  size_t user_bytes = 0;  // of its job file and environment
  size_t kept_bytes = 0;  // once it is over: what HeadState::over_bytes_ holds of it

  std::vector<Instant> fault_times;    // parallel to record.faults
  std::vector<Instant> avoided_until;  // parallel to record.avoided
  std::vector<Blocker> blocked_by;
  std::optional<Instant> run_mark;  // run_time is counted up to here
  Instant client_seen;
  std::map<Generation, GenerationGrant> past;           // for logs of earlier generations, newest 16
  std::deque<std::shared_ptr<const EmitEvent>> events;  // shared with the documents that tell them

  // Between two generations, and its nodes stay its own.
  bool KeepsPlace() const { return record.state == JobState::kReconfiguring || record.waits_for_storage; }
  // A generation that is granted and not revoked.
  bool Live() const {
    return !IsFinal(record.state) && record.grant.has_value() && record.generation > record.revoked;
  }
  // Wants a generation and has none.
  bool AllIdle() const { return idle > 0 && idle == static_cast<int>(ranks.size() - record.exits.size()); }
  bool Wanting() const { return !IsFinal(record.state) && !Live() && record.ending == Ending::kNone; }
  bool HoldsNode(const NodeId& node) const;
  const RankExit* ExitOf(int rank) const;
  void SetStarted(RankLive& rank);
  void SetStatus(RankLive& rank, const RankStatus& status);
  void SetExit(RankLive& rank, RankExit exit);
  void CountStep(const RankLive& rank, int count);
};

// What is kept of the jobs of one user that are over.
struct JobsOver {
  size_t bytes = 0;
  std::set<uint64_t> jobs;  // by number: the oldest first
};

// The bytes of a job that its user chose.
size_t BytesOfUser(const std::string& spec_text, const std::map<std::string, std::string>& env);
// Where a job saves its checkpoints, one name for each directory; empty: nowhere, perhaps because it only
// reads.
std::string LocationOf(const spec::JobSpec& spec);

absl::Duration BetweenSteps(const Job& job);  // from one report of another step to the next; zero: not known
// "seems stuck: ...", as it is now; empty: it does not seem so.
std::string StuckText(const Job& job, Instant now);

// At most `bytes` of it, cut between characters: sentences in records are bounded.
std::string Shortened(std::string text, size_t bytes);

class HeadState {
 public:
  HeadState(HeadConfig config, Rng rng);

  absl::StatusOr<StepResult> Recover(StoredRecords stored, Instant now, absl::Time wall);
  StepResult Step(const HeadEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const;
  HeadSnapshot Snapshot() const;
  const JobRecord* RecordOf(const JobId& job) const;
  HeadEpoch epoch() const { return cluster_.epoch; }
  const std::string* RouteOf(const NodeId& node) const;
  std::vector<std::pair<JobId, std::string>> Finished() const;
  std::optional<WriteResult> ResultOf(const JobId& job) const;
  const HeadCounters& counters() const { return counters_; }

 private:
  // head_core.cc
  absl::Status Load(StoredRecords& stored, Instant now);
  void Adopt(Job& job, Instant now);
  void OnMessage(const PeerMessage& event, Instant now);
  void OnTick(Instant now);
  void CheckIdle(Instant now);
  std::optional<Instant> FirstDeadline() const;
  void KeepDeadline(const HeadEvent& event, bool changed);
  StepResult Flush(Instant now);
  void Say(const std::string& why);
  Job& AddJob(JobRecord record, spec::JobSpec spec, Instant now);  // submitted, or taken up from its ranks
  void TakeSpec(Job& job, spec::JobSpec spec);
  void Emit(Job& job, const std::string& kind, std::string text);
  void Send(const NodeId& node, SendKind kind, Message message);
  void Dirty(const Job& job) { dirty_jobs_.insert(job.record.id); }
  void Write(Record record) {
    std::string key = KeyOf(record);
    writes_.push_back({std::move(key), std::move(record)});
  }
  void Delete(std::string key) { writes_.push_back({std::move(key), std::nullopt}); }
  Job* FindJob(const JobId& id);
  const Job* FindJob(const JobId& id) const;
  std::vector<Job*> LiveJobs();  // not final, in order of submission

  // head_nodes.cc
  void OnHello(const PeerMessage& event, const AgentHello& hello, Instant now);
  std::string RefuseHello(const AgentHello& hello) const;
  bool IsLate(const Node& node, const AgentHello& hello) const;
  void RefuseRival(Node& node);
  bool HoldsRanks(const NodeId& id) const;
  void Reconcile(Node& node, const AgentHello& hello, bool new_incarnation, bool repeated, Instant now);
  void EndForgotten(const NodeId& node, const HeldGeneration& held, bool known);
  void ReconcileJob(Job& job, const Node& node, const std::vector<const HeldGeneration*>& held,
                    bool new_incarnation, Instant now);
  void ResendEnding(Job& job, const NodeId& node, Instant now);
  void OnHeartbeat(Node& node, const AgentHeartbeat& heartbeat, Instant now);
  void Returned(Node& node, Instant now);
  void OnSilence(const FailureDetector::Change& change, Instant now);
  void CountFlap(Node& node, Instant now);
  void EndQuarantines(Instant now);
  bool MayOnlyLackItsAgent(const Node& node, Instant now) const;
  void RevokeNode(const PeerMessage& event, const ClientRequest& request, const ClientRevokeNode& revoke,
                  Instant now);
  void DropNode(const NodeId& id, const std::string& why, Instant now);
  NodeId NodeCalled(const std::string& text) const;
  void RanksLost(Job& job, const Node& node, const std::string& why, Instant now);
  bool Unreleased(const Job& job, const NodeId& node) const;
  void Release(Job& job, const NodeId& node, Instant now);
  std::string Hostname(const NodeId& id) const;

  // head_records.cc
  absl::Status LoadJobs(std::map<JobId, StoredJob>& jobs);
  void WriteJob(Job& job);
  void WriteExits(Job& job);
  void DeleteExits(const Job& job);
  void DeleteJob(const Job& job);

  // head_recovery.cc
  bool Outranked(const AgentHello& hello) const;
  void StepDown(const AgentHello& hello);
  bool Settled(Instant now) const;
  bool TakesUp(const JobId& job) const;
  bool AwaitsDescription(const HeldGeneration& held) const;
  void OnDescribed(Node& node, const GenerationDescribed& described, Instant now);
  bool Proven(const GrantSeal& seal) const;
  void AwaitWord(const Node& node, const GenerationDescribed& described);
  bool AwaitsWord(const JobId& job) const;
  Job* TakeJob(const GenerationDescribed& described, Instant now);
  void TakeGeneration(Job& job, const GenerationDescribed& described, Instant now);
  void ExpectNodes(const GenerationGrant& grant, Instant now);
  void RevokeStray(Job& job, const NodeId& node, const HeldGeneration& held, Instant now);
  void RecoveryTimers(Instant now);
  void TakeOff(absl::Duration slept, Instant now);

  // head_stalls.cc
  Instant StallVerdictAt(const Job& job) const;
  std::optional<Instant> StallDeadline(const Job& job) const;
  void CheckStalls(Job& job, Instant now);
  void CountIdle(Job& job, RankLive& rank, Instant now);
  void CheckStuck(Job& job, Instant now);
  std::string WhoWaits(const Job& job) const;
  std::optional<Instant> SourceVerdictAt(const Job& job) const;
  void CheckSource(Job& job, Instant now);
  std::pair<int, std::string> Culprit(const Job& job) const;
  void CheckSteps(Job& job, Instant now);
  void AskStacks(const Job& job, int culprit, Instant now);

  // head_notices.cc
  void RestoreNotices(Node& node, Instant now);
  void AllowFreeze(const Node& node);
  void OnNoticeSeen(Node& node, const NoticeSeen& seen, Instant now);
  void TakeNotice(Node& node, NodeNotice& slot, std::optional<Instant>& at, NodeNotice notice, Instant now);
  bool NeedsNode(const Job& job, const NodeId& node) const;
  void FindLeave(Job& job, Instant now);
  void LeaveStep(Job& job, Instant now);
  void TellRanks(const Job& job, const NodeId& node, Instant now);
  std::optional<Instant> LeaveDeadline(const Job& job) const;
  absl::Duration LeaveGrace(const Job& job, Instant now) const;
  void WithdrawNotice(Job& job, Instant now);
  bool MayActOnNotice(const Job& job, Instant now) const;
  void Excuse(const Job& job, FaultRecord& fault, Instant now) const;
  absl::StatusOr<std::string> Drain(const Peer& peer, const ClientDrainNode& drain, Instant now);

  // head_resize.cc
  static int SizeOf(const Job& job);
  bool NeedsRoom(const Job& other) const;
  int RanksItWouldHave(const Job& job);
  void Want(Job& job, int size);
  void LookAround(Instant now);
  void LookForRoom(Job& job, Instant now);
  void ResizeBehindCheckpoint(Job& job, Instant now);
  void Resize(Job& job, Instant now);
  void KeepWhatWorked(Job& job, Instant now);
  bool GoesBack(Job& job, Instant now);
  void MayGrowAgain(Job& job, Instant now);
  SizeTried Tried(size_t ranks, const std::vector<NodeId>& nodes) const;
  std::string TooManyFor(const plan::Placement& placement) const;
  bool CouldGrow(const Job& job);
  std::string PendingText(const Job& job);
  std::string RunningReason(const Job& job);
  void SayHowItRuns(Job& job);

  // head_links.cc
  void OnLinkDown(const NodeId& node, const LinkDown& report, Instant now);
  void LinkStep(Job& job, Instant now);
  void ForgetLinks(const NodeId& node);
  std::optional<NodeId> NodeToAvoid(const Job& job) const;
  void Avoid(Job& job, const NodeId& node, std::string why, Instant now);
  void EndAvoidance(Job& job, const NodeId& node, const std::string& why);
  void EndAvoidances(const NodeId& node, const std::string& why);

  // head_pace.cc
  void MeasurePace(Job& job, RankLive& rank);
  void ComparePaces(Job& job);

  // head_copies.cc
  std::vector<NodePlace> HoldersOutside(const Job& job, const std::vector<NodePlace>& of_job) const;
  void TellHolder(const Job& job, const NodeId& id);
  void SettleCopies(const NodeId& node, const AgentHello& hello);

  // head_ranks.cc
  void OnRankStatus(const NodeId& node, const RankStatus& status, Instant now);
  void OnStarted(const NodeId& node, const RanksStarted& started, Instant now);
  void OnExited(const NodeId& node, const RankExit& exit, Instant now);
  void OnGone(Node& node, const GenerationGone& gone, Instant now);
  void OnExchange(const NodeId& node, const ExchangePart& part);
  void SayWhoLeft(const Job& job, const NodeId* node);
  void SayWhoIsMissing(const Job& job, const NodeId& node, uint64_t sequence);
  void OnCheckpoint(const NodeId& node, const CheckpointReport& report);
  void TakeNewest(Job& job, const CheckpointReport& newest);
  void OnNote(const NodeId& node, const AgentNote& note);
  Job* CurrentJob(const NodeId& node, const JobId& id, Generation generation);
  bool AwaitsCause(Job& job, const RankExit& exit, Instant now);
  void FailBy75(Job& job, Instant now);
  FaultRecord FaultOf(const Job& job, const RankExit& exit) const;
  void TakeNote(Job& job, const NodeId& node, const AgentNote& note);
  void EmitNote(Job& job, const std::string& kind, std::string text);
  bool AllBeganAnew(Job& job);
  void UpdateProgress(Job& job, Instant now);
  void WarnOfDivergence(Job& job, const RankStatus& status);
  void TakeLastWords(Job& job, RankLive& rank, const RankExit& exit, Instant now);
  void RunningIfAllStarted(Job& job, Instant now);

  // head_jobs.cc
  void Move(Job& job, JobState state, std::string reason);
  void Schedule(Instant now);
  bool TryPlace(Job& job, Instant now);
  void NotPlaced(Job& job, const plan::Placement& placement);
  std::string Unusable(const Node& node) const;
  bool Occupies(const Job& job) const;
  bool HoldsRoomOn(const Job& job, const NodeId& node) const;
  bool TakesPart(const Job& job) const;
  // Makes views_ true again: before PlacementFor and NotPlaced.
  void CheckViews();
  std::vector<plan::NodeView> ViewsWithout(const Job& wanting) const;
  plan::Placement PlacementFor(const Job& job);
  void Grant(Job& job, const plan::Placement& placement, Instant now);
  int PickPort(const Job& job, const NodeId& node);
  void SendGrant(const Job& job, const std::vector<NodeId>& nodes);
  void ResetLive(Job& job, Instant now);
  void Fail(Job& job, FaultRecord fault, Instant now);  // revoke at once, then restart_policy
  void BeginEnding(Job& job, Ending ending, EndMode mode, absl::Duration grace, std::string reason,
                   Instant now);
  void SendRevoke(const Job& job, const NodeId& node, EndMode mode, absl::Duration grace);
  Instant MayWriteUntil(const Job& job, const Node& node) const;
  void ContinueEnding(Job& job, Instant now);
  void AwaitFence(Job& job, const std::string& hostnames, Instant now);
  void FinishEnding(Job& job, Instant now);
  void DecideAfterFault(Job& job, Instant now);
  void FindStorageFault(Job& job);
  void FindCauseOfExit75(Job& job);
  void ChargeUnlessEarned(Job& job);
  void WaitForStorage(Job& job, absl::Duration delay, Instant now);
  void Finish(Job& job, JobState state, std::string reason);
  void KeepProgress(Job& job);
  void JobTimers(Job& job, Instant now);
  bool EndIfItsTimeIsUp(Job& job, Instant now);
  std::optional<Instant> JobDeadline(const Job& job) const;
  absl::Duration RunTime(const Job& job, Instant now) const;
  absl::Time Wall(Instant now) const { return wall_ + (now - wall_read_at_); }
  absl::Duration Since(absl::Time then, Instant now) const;

  // head_directories.cc
  absl::Status CheckDirectory(const spec::JobSpec& spec, const std::string& owner, Instant now);
  absl::Status DirectoryInUse(const Job& other, const std::string& owner_of_new, Instant now) const;
  absl::Status MayTakeOver(const Peer& peer, const spec::JobSpec& spec);
  bool DirectoryIsFree(Job& job, Instant now);
  void SayWhoTakesOver(Job& taker, bool since_its_submit);
  std::vector<Job*> OthersIn(const std::string& location, const JobId& but);
  std::vector<JobId> LiveJobsToTell(const Job& job) const;

  // head_clients.cc
  void OnRequest(const PeerMessage& event, const ClientRequest& request, Instant now);
  void Audit(const PeerMessage& event, absl::string_view action, std::string target,
             const absl::Status& status, Instant now);
  void Answer(const std::string& route, const std::string& id, const absl::Status& status, std::string json);
  void Answer(const PeerMessage& event, const std::string& id, std::shared_ptr<const Document> document);
  void Remember(const Peer& peer, const ClientReply& reply);
  void ForgetRequest(uint64_t number);
  absl::StatusOr<std::string> Submit(const PeerMessage& event, const std::string& id,
                                     const ClientSubmit& submit, Instant now);
  absl::StatusOr<std::string> Stop(const Peer& peer, const ClientStop& stop, Instant now);
  absl::StatusOr<std::string> Scale(const Peer& peer, const ClientScale& scale, Instant now);
  absl::StatusOr<std::string> Shutdown(const ClientShutdown& shutdown, Instant now);
  absl::Status RoomToAsk(const PeerMessage& event);
  // nullptr: it is not remembered.
  const GenerationGrant* GrantOf(const Job& job, Generation generation) const;
  int WorldSizeOf(const AgentQuery& query);  // of the generation asked about; 0: it is not known
  absl::Status AskLogs(const PeerMessage& event, const std::string& id, const ClientLogs& logs, Instant now);
  absl::Status AskExec(const PeerMessage& event, const std::string& id, const ClientExec& exec, Instant now);
  // head_console.cc
  absl::Status AskConsole(const PeerMessage& event, const std::string& id, const ClientConsole& console,
                          Instant now);
  void AnswerConsole(const OpenQuery& open, const AgentAnswer& answer);
  absl::Status Poll(const PeerMessage& event, const std::string& id, const ClientEvents& events, Instant now);
  void Ask(const PeerMessage& event, const std::string& id, const NodeId& node, AgentQuery query,
           Instant now);
  absl::Status AskStack(const PeerMessage& event, const std::string& id, const ClientStack& stack,
                        Instant now);
  absl::Status AskRank(const PeerMessage& event, const std::string& id, const Job& job, int rank,
                       AgentQuery query, Instant now);
  bool RepeatedExec(const PeerMessage& event, const std::string& id);
  void OnAnswer(const NodeId& node, const AgentAnswer& answer);
  void NoteStacks(const OpenQuery& open, const std::string& text);
  void AnswerFromMirror(const OpenQuery& open, const std::string& why);
  void AnswerPolls(Instant now);
  bool AnswerPoll(const OpenPoll& poll, Instant now);
  void AnswerEvents(const OpenPoll& poll, const Job& job);
  bool ClientWaits(const Job& job) const;
  void ExpireQueries(Instant now);
  OpenQuery EndQuery(std::map<uint64_t, OpenQuery>::iterator query);
  void DropOldJobs();
  static size_t BytesKept(const Job& job);
  void CountOver(Job& job);
  void DropOver(uint64_t number);
  bool DropOfMost(absl::FunctionRef<size_t(const JobsOver&)> what);

  // head_json.cc
  std::shared_ptr<const Document> StatusOf(const ClientStatus& asked, const std::string& reader) const;
  std::shared_ptr<const Document> WhyOf(const Job& job) const;
  std::shared_ptr<const Document> NodesNow() const;
  // With the bytes of the events' texts.
  std::pair<std::shared_ptr<const Document>, size_t> EventsAfter(const Job& job, uint64_t after) const;
  std::shared_ptr<const Document> FailureOf(const Job& job) const;

  // Constant after construction.
  HeadConfig config_;

  // Durable (each change is marked for the next Persist).
  ClusterRecord cluster_;
  std::map<NodeId, Node> nodes_;
  std::map<NodeId, std::string> revoked_;  // by this head, and what its agent is told
  std::map<JobId, Job> jobs_;
  std::map<uint64_t, JobId> job_order_;  // by number
  std::map<uint64_t, Job*> live_jobs_;   // by number; what ended since LiveJobs() is there, too
  size_t over_bytes_ = 0;                // of the others
  std::map<std::string, JobsOver> over_of_user_;
  std::map<std::string, RequestRecord> requests_;  // by KeyOf
  std::map<uint64_t, std::string> request_order_;
  std::map<std::string, std::set<uint64_t>> requests_of_key_;  // numbers of each client's

  // Rebuilt.
  Rng rng_;
  FailureDetector detector_;
  LogTails tails_;
  std::map<uint64_t, OpenQuery> queries_;
  UserShares queries_of_user_;  // of those that clients asked
  std::deque<DoneExec> done_execs_;
  ConsoleSessions consoles_;
  uint64_t next_query_ = 1;
  // Looked at when their job says something, or the first of all is over: never all of them at each message.
  std::map<JobId, std::multimap<Instant, OpenPoll>> polls_;  // by deadline
  UserShares polls_of_user_;
  std::multiset<std::pair<Instant, JobId>> poll_deadlines_;  // of each
  std::set<JobId> news_;                                     // jobs with new events, or forgotten
  Instant active_at_;                                        // last request or end of a job
  bool any_job_seen_ = false;
  bool shutdown_when_idle_ = false;
  bool stopped_ = false;
  Instant settle_at_, recover_until_;  // while cluster_.recovering
  // Whose records are not all there or cannot all be read, with the keys of those that are there.
  std::map<JobId, std::vector<std::string>> set_aside_;
  std::set<std::pair<JobId, NodeId>> unsettled_;  // the node holds nothing of the job; judged at settle_at_
  // Held without a seal by a node: neither taken up nor granted anew before somebody says so.
  std::map<std::pair<JobId, NodeId>, HeldGeneration> unproven_;
  std::optional<std::string> store_low_;  // why no new job is taken
  bool store_full_ = false;
  // What views_ was made of. Compared before it is used, so that no change anywhere can be forgotten.
  struct ViewsKey {
    struct OfNode {
      uint64_t revision = 0;
      std::string unusable;
      bool operator==(const OfNode&) const = default;
    };
    struct OfJob {
      uint64_t number = 0;
      Generation generation;
      bool holds = false;
      std::vector<NodeId> unreleased;
      bool operator==(const OfJob&) const = default;
    };
    std::vector<OfNode> nodes;
    std::vector<OfJob> jobs;
    bool operator==(const ViewsKey&) const = default;
  };
  ViewsKey CurrentViewsKey() const;
  ViewsKey views_key_;
  uint64_t revisions_ = 0;
  std::vector<plan::NodeView> views_, empty_views_;  // what each node has left; as if no job held anything
  std::optional<Instant> next_pass_;                 // not before then over all jobs
  bool schedule_ = false;                            // something changed that may let a job start
  size_t looks_owed_ = 0;   // of live jobs, since that changed: is there room for more ranks of them?
  uint64_t looked_at_ = 0;  // the job that was looked at last, by number
  std::optional<Instant> next_look_;  // at the next of them, while there are many
  std::vector<JobId> fresh_;  // submitted since: they are tried even when nothing changed for the others
  HeadCounters counters_;
  Instant refusals_since_;  // audit lines of refusals are limited
  int refusals_ = 0, refusals_left_out_ = 0;

  // FirstDeadline() or earlier; forgotten by all steps but those that thousands of agents cause each second.
  mutable std::optional<std::optional<Instant>> first_deadline_;

  // Of the step that is running.
  Instant wall_read_at_;
  absl::Time wall_;  // then
  Instant step_at_;
  std::vector<Effect> out_;
  std::vector<RecordWrite> writes_;
  std::vector<AuditEntry> audit_;
  std::set<JobId> dirty_jobs_;
  std::string why_;
};

}  // namespace gtrain::core
