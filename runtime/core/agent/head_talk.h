// HeadTalk talks with the head: hello and welcome, epochs, heartbeats, repeats. PURE. Private to
// runtime/core/agent.
//
// It repeats what must not get lost after each welcome until the head has acknowledged it; everything else
// is dropped while no head listens. AgentCore owns it; only the loop's thread uses it, and it never blocks.
// A heartbeat costs a look at each rank of this machine.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Exchanges;
class Generations;
class Idleness;
class Lease;
class MachineNotice;
class NearCopies;
class Tails;

class HeadTalk {
 public:
  HeadTalk(AgentContext& context, AgentModel& model, Generations& generations, Exchanges& exchanges,
           Tails& tails, Idleness& idleness, Lease& lease, MachineNotice& notice, NearCopies& copies);

  void Begin();  // with each step
  void OnHeadUp(const HeadUp& event);
  void OnHeadDown();
  void OnFreePorts(const FreePorts& event) { free_ports_ = event.ports; }
  void OnTick();
  std::optional<Instant> NextDeadline() const;

  // True when a message of this epoch counts, since no higher one has spoken.
  bool Fresh(HeadEpoch epoch);
  HeadEpoch epoch() const { return epoch_; }
  void OnWelcome(const AgentWelcome& welcome);
  void OnRefused(const AgentRefused& refused);
  void OnHeartbeatAck(const HeartbeatAck& ack);
  void OnShutdown(const AgentShutdown& shutdown);

  void HurryHeartbeat() { next_heartbeat_ = context_.now(); }

 private:
  void SayHello();
  void Describe();
  void Heartbeat();
  absl::Duration OwnWordEvery() const;
  absl::Duration SilenceMax() const;
  void RepeatRecords();
  void RepeatUnacknowledged();
  void RepeatToNewHead();

  AgentContext& context_;
  AgentModel& model_;
  const AgentConfig& config_;
  Generations& generations_;
  Exchanges& exchanges_;
  Tails& tails_;
  Idleness& idleness_;
  Lease& lease_;
  MachineNotice& notice_;
  NearCopies& copies_;

  bool connected_ = false;
  bool relayed_ = false;
  std::string address_;
  HeadEpoch epoch_;
  std::string epoch_proof_;
  absl::Duration heartbeat_interval_ = absl::Seconds(1);
  std::optional<Instant> heard_at_;                           // the head, last
  std::optional<Instant> hello_at_;                           // of the first hello that is not answered
  std::deque<std::pair<uint64_t, Instant>> heartbeats_sent_;  // not answered, oldest first
  Instant next_hello_, next_heartbeat_, next_repeat_;
  uint64_t heartbeat_sequence_ = 0;
  uint64_t last_hello_ = 0;  // its order: the clock of the boot goes on where an earlier agent stopped
  std::vector<int> free_ports_, told_ports_;
  Instant next_own_word_;  // of this connection, where beats go through a relay
};

}  // namespace gtrain::core
