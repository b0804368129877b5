// Inside of AgentCore, shared by its .cc files only.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/agent/agent_core.h"
#include "runtime/core/agent/rank_reports.h"

namespace gtrain::core {

struct AgentTail {
  std::string text;  // at most 64 KiB
  uint64_t end_offset = 0;
  bool changed = false;
  size_t unsent = 0;        // bytes at its end that were not told since the welcome
  uint64_t next_piece = 0;  // LogTail::piece of what is told next
  LineCutter lines{16 << 10};
};

struct AgentRank {
  RankStatus status;
  bool status_changed = false;
  bool sdk = false;
  std::optional<RankExit> exit;
  bool acked = false;
  AgentTail out, err;
  LineCutter report_lines{16 << 10};
  uint64_t dropped_told = 0;
  int out_refused = 0, err_refused = 0;  // errno of the disk that takes no log of it now
  double samples = 0;                    // since `samples_at`
  std::optional<Instant> samples_at;
  // Whether it rests (agent_idle.cc).
  Instant heard_at;                              // it wrote, or its step grew
  std::optional<uint64_t> cpu_ms;                // as seen last
  Instant seen_at, rests_since;                  // since then it used no processor time
  std::map<uint64_t, uint64_t> exchange_relays;  // sequence -> relay id to acknowledge
  // What it said last of its storage goes with its exit. The keeper keeps the message until there is another,
  // so that an agent which restarts hears it again.
  std::string storage;
  std::optional<uint64_t> storage_relay;
};

struct AgentExchange {
  std::map<int, std::string> blobs;  // of local ranks
};

struct AgentGeneration {
  Generation generation;
  Timeline timeline;
  std::string run_dir;
  int world_size = 0;
  GenerationGrant grant;
  GrantSeal seal;                              // as it came, for a head that lost its records
  std::optional<CheckpointReport> checkpoint;  // newest
  std::map<std::string, AgentNote> notes;      // the newest of each kind that ranks said of themselves
  spec::JobSpec spec;
  ProgressPatterns patterns;
  std::map<int, AgentRank> ranks;                       // local ones
  std::map<uint64_t, AgentExchange> exchanges;          // open
  std::map<uint64_t, std::vector<std::string>> tables;  // newest few, for repeats
  bool ended = false;                                   // we told the keeper
  uint32_t noticed = 0;                                 // the newest notice that its ranks know
  bool gone = false;
  bool clean = true;
  bool gone_told = false;
  std::string gone_message;
  Instant started;
  Instant looked_at;  // at what its ranks do
};

struct AgentJob {
  Generation revoked;
  Generation over;  // the newest that was here and is gone, as the head was told
  std::string run_dir;
  bool stopping = false;                    // a person's stop was heard
  bool forgotten = false;                   // leave once nothing is left of it
  bool keeper_leaves = false;               // told to go with nothing left; a grant waits for the next keeper
  std::optional<StartGeneration> next;      // that waits
  std::optional<GenerationGone> owes_gone;  // of a generation that never ran here, until older ones are gone
  std::map<Generation, AgentGeneration> generations;
};

class AgentCore::Impl {
 public:
  explicit Impl(AgentConfig config)
      : config_(std::move(config)), epoch_(config_.epoch), epoch_proof_(config_.epoch_proof) {
    for (const JobId& job : config_.near_left) copies_[job] = config_.near_memory;
  }

  AgentStep Step(const AgentEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const;
  bool HasLiveGeneration() const;
  std::string Snapshot() const;

 private:
  // agent_core.cc: the head
  void On(const HeadUp& event);
  void On(const HeadDown& event);
  void On(const FromHead& event);
  void On(const FromKeeper& event);
  void On(const KeeperLost& event);
  void On(const FreePorts& event);
  void On(const RanksSeen& event);
  void On(const CloudSays& event);
  void On(const AgentTick& event);
  bool Fresh(HeadEpoch epoch);
  void Hear(const AgentWelcome& welcome);
  void Hear(const AgentRefused& refused);
  void Hear(const HeartbeatAck& ack);
  void Hear(const StartGeneration& start);
  void Hear(const Revoke& revoke);
  void Hear(const AckExit& ack);
  void Hear(const ExchangeTable& table);
  void Hear(const ExchangeMissing& missing);
  void Hear(const RanksLeft& left);
  void Hear(const ForgetJob& forget);
  void Hear(const KeepCopies& keep);
  void Hear(const AckNotice& ack);
  void Hear(const NoticeRanks& notice);
  void Hear(const AgentQuery& query);
  void Hear(const AgentShutdown& shutdown);
  void SayHello();
  std::vector<HeldGeneration> Held() const;
  void Describe();
  void Tell(Message message);  // dropped unless welcomed; what matters is repeated after the welcome
  void Command(const JobId& job, keeper::Command command);
  void RepeatUnacknowledged();
  void TellNotice();
  void CheckLease();
  void ExtendLease(Instant sent);
  void TellLease(const JobId& job);
  void MirrorTails();
  void Heartbeat();

  // agent_idle.cc: ranks that rest
  void LookForIdle();
  void Heard(AgentRank& rank);

  // agent_generation.cc: one generation's life
  uint64_t ProcessesMax(const spec::JobSpec& spec) const;
  void ShareNear(const JobId& job, const AgentGeneration& generation);
  void CompareProgram(const GenerationGrant& grant, const AgentGeneration& generation,
                      const std::map<std::string, std::string>& env);
  void SayUnlimitedMemory(const GenerationGrant& grant, const AgentGeneration& generation);
  void Start(const StartGeneration& message);
  void FailStart(AgentGeneration& generation, const GenerationGrant& grant, ExitCause cause,
                 const std::string& message);
  void End(const JobId& job, AgentJob& record, Generation up_to, EndMode mode, absl::Duration grace,
           const std::string& reason);
  AgentGeneration* AdoptOne(const JobId& job, const keeper::GenerationHeld& held);
  void Hear(const JobId& job, const keeper::State& state);
  void Hear(const JobId& job, const keeper::Started& started);
  void Hear(const JobId& job, const keeper::Exited& exited);
  void Hear(const JobId& job, const keeper::Gone& gone);
  void Hear(const JobId& job, const keeper::RelayUp& relay);
  void Hear(const JobId& job, const keeper::Output& output);
  void Hear(const JobId& job, const keeper::ReportBytes& report);
  void Hear(const JobId& job, const keeper::ExecDone& done);
  void Hear(const JobId& job, const keeper::ConsoleTurn& turn);
  void Apply(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said);
  void TakeRefusal(const JobId& job, AgentGeneration& generation, int number, const keeper::Output& output);
  void TakeNote(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said);
  void Exchange(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said,
                uint64_t relay);
  void CompleteExchange(const JobId& job, AgentGeneration& generation, uint64_t sequence,
                        const std::vector<std::string>& blobs);
  void SayWhoIsMissing(const JobId& job, const AgentGeneration& generation, int number, uint64_t sequence);
  void SendExchangePart(const JobId& job, const AgentGeneration& generation, uint64_t sequence);
  void FinishIfSettled(const JobId& job);
  void OweGone(const JobId& job, AgentJob& record, Generation generation, const std::string& message);
  void TellGone(const JobId& job, AgentJob& record);
  AgentGeneration* Find(const JobId& job, Generation generation);
  AgentRank* Find(const JobId& job, Generation generation, int rank);
  void Answer(uint64_t query, bool ok, const std::string& text);

  AgentConfig config_;
  Instant now_;
  std::vector<AgentEffect> effects_;
  std::string why_;

  bool connected_ = false;
  bool welcomed_ = false;
  std::optional<absl::Status> leaving_;  // with this, once no generation lives here
  std::string address_;
  HeadEpoch epoch_;
  std::string epoch_proof_;
  absl::Duration heartbeat_interval_ = absl::Seconds(1);
  absl::Duration fence_after_ = absl::Seconds(120);
  bool joins_pieces_ = false;        // the head does
  std::optional<Instant> heard_at_;  // the head, last
  // The head has answered what was sent then: ranks without the SDK may run for fence_after_ from there.
  Instant lease_from_;
  bool lease_known_ = false;                                  // a head has said fence_after_ to this agent
  std::optional<Instant> hello_at_;                           // of the first hello that is not answered
  std::deque<std::pair<uint64_t, Instant>> heartbeats_sent_;  // not answered, oldest first
  Instant next_fence_;
  Instant next_hello_, next_heartbeat_, next_repeat_;
  uint64_t heartbeat_sequence_ = 0;
  uint64_t last_hello_ = 0;  // its order: the clock of the boot goes on where an earlier agent stopped
  std::vector<int> free_ports_;
  NodeNotice notice_;  // what the cloud said last
  Instant notice_at_;  // when it happens
  uint64_t notice_sequence_ = 0;
  bool notice_acked_ = false;
  std::map<JobId, AgentJob> jobs_;
  std::map<JobId, std::string> copies_;  // jobs of whose checkpoints there may be some -> in which folder
  std::vector<JobId> job_order_;         // oldest first, bounds jobs_
};

}  // namespace gtrain::core
