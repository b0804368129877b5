// One head: HeadCore, Outbox and JoinQueue as runtime/head runs them, over the simulated network and disk. A
// supervisor starts it again when it ends.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/head/head_core.h"
#include "runtime/core/head/join_queue.h"
#include "runtime/core/head/outbox.h"
#include "tests/sim/disk.h"
#include "tests/sim/network.h"

namespace gtrain::sim {

class Checker;

class HeadProcess {
 public:
  HeadProcess(Kernel& kernel, Network& network, Disk& disk, Checker& checker, core::HeadConfig config);

  void Start();
  void Kill(bool machine_too);   // and the supervisor starts it again
  void Pause(int64_t duration);  // SIGSTOP; the sockets stay
  bool serving() const { return core_ != nullptr && serving_; }
  bool paused() const { return paused_; }
  const core::HeadCore* core() const { return core_.get(); }
  const core::Outbox& outbox() const { return outbox_; }
  // Time this process and its forerunners were awake and serving.
  int64_t awake() const;
  uint64_t life() const { return life_; }
  int64_t restart_min = kSec / 2, restart_max = 10 * kSec;
  size_t inbox_max() const { return inbox_max_; }

 private:
  void Receive(const Connection& connection, core::Message message);
  void Step(const core::HeadEvent& event);
  void Do(std::vector<core::Effect> effects);
  void Perform(core::Effect& effect);
  void Reply(const std::string& route, core::ClientReply reply);
  void StartCommit();
  void PostCommit();
  void Committed(Disk::Outcome outcome);
  // Now, or when the process goes on.
  void WhenAwake(std::function<void()> then);
  void Join(const core::ServiceRequest& request);
  void StartJoins();
  void JoinsDone(const std::vector<core::JoinQueue::One>& batch, Disk::Outcome outcome);
  void AnswerWithoutStoring();
  void LookForRoom();
  void Wake();
  void Resume();
  void Recovered();
  void ComeBack();

  Kernel& kernel_;
  Network& network_;
  Disk& disk_;
  Checker& checker_;
  core::HeadConfig config_;
  std::unique_ptr<core::HeadCore> core_;
  core::Outbox outbox_;
  uint64_t life_ = 0;
  bool serving_ = false, paused_ = false;
  int64_t paused_at_ = 0;
  std::deque<core::PeerMessage> inbox_;
  std::deque<core::PeerGone> later_;
  bool tells_of_gone_ = false;                   // of later_
  std::string unsent_;                           // what could not be sent meanwhile
  std::optional<core::OutboxBatch> committing_;  // with the disk, or waiting for room there
  bool no_room_ = false;
  core::JoinQueue joins_;
  std::deque<std::function<void()>> completions_;
  std::optional<int64_t> wake_at_;
  int64_t awake_before_ = 0, awake_since_ = 0;
  size_t inbox_max_ = 0;
};

}  // namespace gtrain::sim
