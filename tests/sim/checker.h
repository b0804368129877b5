// The invariants of docs/protocols/invariants.md, checked as events touch their subjects. The checker sees
// both what the control plane says and what is really so, and changes neither.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "job/spec/job_spec.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/outbox.h"
#include "tests/sim/disk.h"
#include "tests/sim/ranks.h"

namespace gtrain::sim {

class Machine;

// For messages.
inline std::string G(const JobId& job, uint64_t generation) {
  return absl::StrCat(job.value, " g", generation);
}

class Checker {
 public:
  Checker(Kernel& kernel, Disk& disk);

  // Facts that only the world knows.
  std::function<const spec::JobSpec*(const std::string& text)> spec_of;
  std::function<int(const NodeId&)> cpus_of;
  std::function<bool(const JobId&, uint64_t timeline, int64_t step)> committed;
  // Whether ranks on the two nodes could not talk at some moment after `then`.
  std::function<bool(const NodeId&, const NodeId&, int64_t then)> link_was_cut;
  // Whether a process of the generation's ranks hangs or stands still.
  std::function<bool(const JobId&, uint64_t generation)> somebody_hangs;
  std::function<NodeId(const std::string& hostname)> node_called;
  std::function<NodeId(int machine)> node_on;
  std::function<bool(int machine)> shares_key;  // another machine has a copy of its state (fault N4)
  core::HeadConfig config;

  // The head's process.
  void HeadServes(const core::HeadCore& core, int64_t awake);
  void HeadHears(const core::PeerMessage& message, int64_t awake);
  void HeadDecided(const core::HeadCore& core, const core::StepResult& result, int64_t awake);
  void HeadSends(const core::SendToNode& send, int64_t awake);
  void HeadReplies(const core::ClientReply& reply);
  void HeadTells(const core::EmitEvent& event);

  // Agents, keepers, machines.
  void AgentStarts(const Machine& machine);
  void AgentHears(const Machine& machine, const core::Message& message);
  void AgentSays(const Machine& machine, const core::Message& message);
  void AgentOrders(const Machine& machine, const core::ToKeeper& order);
  void AgentSends(const Machine& machine, const core::ToKeeper& order);  // what was ordered, maybe later
  void AgentLeaves(const Machine& machine, const absl::Status& status);
  void KeeperDies(const Machine& machine, const JobId& job);
  void KeeperSwept(const Machine& machine, const JobId& job);  // its agent knows, and its processes are gone
  void MachineDies(const Machine& machine);
  // The time when the machine goes; nullopt: the notice is taken back.
  void MachineAnnounced(const Machine& machine, std::optional<int64_t> leaves_at);
  void LeaseEnds(const JobId& job, uint64_t generation);

  // Processes.
  void RankStarts(const RankProcess& rank, const Gang& gang);
  void RankEnds(const RankProcess& rank, keeper::Cause cause, int code);
  // A process between two generations (`elastic.mode: in-place`): it leaves the one, and is in the other.
  // Beside its generation: a process starts, could go on, or waits beside another one.
  void StartsBeside(const RankProcess& rank);
  void ComesUp(const RankProcess& rank);
  void WaitsOn(const RankProcess& rank);
  void RankKept(const RankProcess& rank);
  void RankGoesOn(const RankProcess& rank, const Gang& gang);
  // How many processes of the job wait between two generations.
  int Kept(const JobId& job) const;
  void RankMeetsStorageFault(const RankProcess& rank);        // it says so and is about to end
  void RankIsDone(const RankProcess& rank);                   // it says that nothing is left of its data
  void CheckRecords();                                        // at rest
  void RankNeverRuns(const JobId& job, uint64_t generation);  // its process died while it waited
  void GangSteps(const Gang& gang);
  void RankLies(const RankProcess& rank, int64_t step);  // it says that it has made this step
  // And INV-14.
  void BarrierPassed(const RankProcess& rank, const std::vector<std::string>& blobs);

  // Clients.
  void ClientHears(const core::ClientReply& reply);

  int64_t acknowledged() const { return static_cast<int64_t>(acknowledged_.size()); }
  int64_t granted() const { return static_cast<int64_t>(generations_.size()); }
  bool Granted(const JobId& job, uint64_t generation) const {
    const auto it = generations_.find({job, generation});
    return it != generations_.end() && it->second.content != 0;
  }
  // The newest epoch that the agent has heard, 0 at its start.
  uint64_t EpochHeard(int machine) const { return agents_.contains(machine) ? agents_.at(machine).epoch : 0; }
  // Whether a person asked for the job's end.
  bool StopAsked(const JobId& job) const { return jobs_.contains(job) && jobs_.at(job).stop_heard; }

 private:
  struct GenerationTruth {
    bool saves = false;  // what is left saves in it, and it starts nothing
    uint64_t content = 0;
    core::GenerationGrant grant;
    std::optional<int64_t> decided_awake;  // the head made it; it leaves when the disk has it
    std::optional<int64_t> placed_awake;   // its places were chosen, maybe by an earlier head
    int64_t granted_at = 0;
    bool revoked = false;
    bool bad_end = false;              // a rank ended other than well without being asked to
    std::optional<int> storage_fault;  // the rank that met one
    bool said_done = false;            // rank 0 said that nothing is left of its data
    bool told_done = false;            // that is an event of the job
    bool other_fault = false;          // another rank than that ended so, or for another reason
    bool lost = false;                 // a keeper or a machine of it died, or a lease ended it
    int started = 0, running = 0;
    int up_beside = 0;          // of those that wait
    bool ended_beside = false;  // one of them ended, or was lost
    std::optional<int64_t> all_started_at;
    int64_t stepped_at = 0;
    int64_t stalled = 0;  // before that step: the head may hear of it while it ends the gang for it
    std::optional<uint64_t> table;
  };
  struct JobTruth {
    bool judged = false;  // it is to fail, and why was looked at
    bool stop_heard = false;
    bool scale_heard = false;
    // The generation that was last ended for another size, and the epoch of the head that did.
    std::optional<std::pair<uint64_t, uint64_t>> resized;
    std::optional<uint64_t> stop_acknowledged_at;  // the generation then
    std::optional<core::JobState> final_state;
    uint64_t generation = 0, revoked = 0, timeline = 0;
    int restarts = 0;
    std::optional<int> wanted;  // ranks; 0: that has changed
    int64_t checkpoint_step = -1;
    uint64_t checkpoint_timeline = 0;
    int64_t checkpoint_at = 0;               // when the head's record of it was durable
    std::set<uint64_t> noticed_in;           // generations that a notice has ended
    int64_t highest_step = -1;               // of all durable checkpoints
    int64_t step_in_memory = -1;             // the highest that processes of a job in place have, or say so
    uint64_t fault_decided = 0;              // the generation of the newest fault that was judged
    std::map<NodeId, uint64_t> revoke_left;  // to this node, by this life of the head
  };
  struct NodeTruth {
    int64_t heard_awake = 0;     // newest message of its own, not of a clone
    int64_t renewed_awake = -1;  // said hello with a new incarnation
    bool clone_heard = false;
    bool drained = false;                    // by hand, the head was asked
    bool heard_leave = false;                // the head's newest word of it, maybe taken back meanwhile
    std::optional<int64_t> announced_until;  // a notice; max while it stands
    int64_t leaves_at = 0;                   // as the head understood the newest that it heard
    std::string leave;                       // of its record: which notices to leave stand
    int64_t leave_since = 0;                 // and since when
    Incarnation incarnation;
    std::map<JobId, int64_t> keeper_died;  // when, or when it was swept up
    std::map<std::string, bool> clone_routes;
  };
  struct AgentTruth {
    uint64_t epoch = 0;
    std::map<JobId, uint64_t> revoked, gone_said;
    std::set<JobId> forgotten;
    bool shutdown = false;
    std::map<uint64_t, int64_t> beats_sent;  // not answered
    std::optional<int64_t> hello_sent;       // likewise, the first
    int64_t leased_from = 0;                 // when it sent what the head has answered last
    std::optional<std::pair<JobId, uint64_t>> stale_grant;
  };
  struct Asked {
    std::string client_key;
    bool submit = false, stop = false;
    JobId job;
  };

  bool CloudKeptItsMachine(int machine) const;
  void CheckNewest(const core::GenerationGrant& grant);
  void KeepsItsPart(const RankProcess& rank);
  void CheckResize(const core::JobRecord& record);
  void CheckGoodput(const core::JobRecord& record);
  void CheckPlacement(const core::HeadCore& head, const core::GenerationGrant& grant);
  void CheckMemory(const core::HeadCore& head, const core::GenerationGrant& grant);
  void CheckWritten(const core::HeadCore& head, const core::Persist& persist);
  void Durable(const std::vector<core::RecordWrite>& writes);
  void DurableJob(const core::JobRecord& record);
  void NoteLeave(const core::NodeRecord& record);
  void CheckDrained(const core::JobFaultRecord& record);
  void CheckCharges(const core::JobRecord& record);
  void NeverStarted(const core::RankExit& exit);
  void CheckGrant(const NodeId& node, const core::StartGeneration& start);
  void CheckRevoke(const NodeId& node, const core::Revoke& revoke, int64_t awake);
  std::optional<std::string> Unjustified(const GenerationTruth& truth, const core::JobRecord* record,
                                         const std::string& reason, int64_t awake);
  void CheckCommitted(const core::JobRecord& record, int64_t highest_before);
  void CheckBudgets(const core::JobRecord& record);
  void CheckRoom(const core::JobRecord& record);
  void CheckTrueRoom(const RankProcess& rank, int cpus);
  void CheckProcesses(const core::GenerationGrant& grant);
  bool IsTooFew(const core::GenerationGrant& grant) const;  // for what its job file asks for
  void CheckTooFew(const core::GenerationGrant& grant);
  void HoldsRank(const RankProcess& rank, const Gang& gang);
  void HoldsPlace(const RankProcess& rank);
  const spec::JobSpec* SpecOf(const JobId& job) const;
  const core::JobRecord* Record(const JobId& job) const;

  Kernel& kernel_;
  Disk& disk_;
  int64_t head_served_awake_ = 0;
  uint64_t epoch_ = 0;
  std::map<std::string, core::Record> written_;  // what the disk holds and what waits for it
  std::map<JobId, JobTruth> jobs_;
  // The part of the model that a process has, by the generation and rank as which it was started.
  std::map<std::tuple<JobId, uint64_t, int>, int> parts_;
  std::map<std::pair<JobId, uint64_t>, GenerationTruth> generations_;
  std::map<NodeId, NodeTruth> nodes_;
  std::map<int, AgentTruth> agents_;
  std::map<std::string, Asked> asked_;
  std::map<std::string, core::ClientReply> acknowledged_;
  std::map<std::string, JobId> job_of_request_;
  std::map<std::tuple<JobId, uint64_t, int>, int> alive_;
  std::map<int64_t, const RankProcess*> kept_;              // processes between two generations, by pid
  std::map<JobId, std::set<const RankProcess*>> unfenced_;  // alive, of programs without the SDK
  std::map<int, std::map<const RankProcess*, int>> cpus_;   // of the living ones of a machine
};

}  // namespace gtrain::sim
