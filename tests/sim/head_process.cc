#include "tests/sim/head_process.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "tests/sim/checker.h"

namespace gtrain::sim {
namespace {

constexpr int kMostGone = 100'000;  // in one step: a message to each node or two, and no end of it else

}  // namespace

HeadProcess::HeadProcess(Kernel& kernel, Network& network, Disk& disk, Checker& checker,
                         core::HeadConfig config)
    : kernel_(kernel), network_(network), disk_(disk), checker_(checker), config_(std::move(config)) {}

int64_t HeadProcess::awake() const {
  return awake_before_ + (serving_ && !paused_ ? kernel_.now() - awake_since_ : 0);
}

void HeadProcess::Start() {
  GT_CHECK(core_ == nullptr);
  ++life_;
  core_ = std::make_unique<core::HeadCore>(config_, Rng(kernel_.rng.Next()));
  outbox_ = core::Outbox();
  joins_ = core::JoinQueue();
  inbox_.clear();
  later_.clear();
  completions_.clear();
  committing_.reset();
  no_room_ = false;
  wake_at_.reset();
  core::StoredRecords stored;
  for (const auto& [key, record] : disk_.durable()) stored.Add(record);
  auto recovered = core_->Recover(std::move(stored), kernel_.Now(), ManualWall(kernel_.Now()));
  if (!recovered.ok()) {
    return kernel_.Fail("INV-3",
                        absl::StrCat("the head cannot read its own records: ", recovered.status().message()));
  }
  kernel_.Note(0x4EAD, "head starts: ", recovered->why);
  (void)outbox_.Add(*std::move(recovered));  // nobody is connected yet
  Recovered();
}

// Nothing is served before the new epoch is durable (fault H9).
void HeadProcess::Recovered() {
  std::optional<core::OutboxBatch> batch = outbox_.NextBatch();
  if (batch) {
    const uint64_t sequence = batch->sequence;
    return disk_.Commit(*std::move(batch), [this, sequence](Disk::Outcome outcome) {
      if (outcome != Disk::Outcome::kDurable) return Kill(false);  // no head starts on a full disk
      (void)outbox_.Durable(sequence);
      Recovered();
    });
  }
  serving_ = true;
  awake_since_ = kernel_.now();
  checker_.HeadServes(*core_, awake());
  network_.Serve({life_, [this](const Connection& connection, core::Message message) {
                    Receive(connection, std::move(message));
                  }});
  Wake();
}

void HeadProcess::Kill(bool machine_too) {
  if (core_ == nullptr) return;
  awake_before_ = awake();
  if (serving_) network_.HeadGone(machine_too);
  serving_ = paused_ = false;
  core_.reset();
  disk_.Lose(machine_too);
  kernel_.Note(0x4EAE, machine_too ? "the head's machine loses power" : "the head dies");
  ComeBack();
}

void HeadProcess::ComeBack() {
  kernel_.After(kernel_.Between(restart_min, restart_max), [this] {
    if (core_ == nullptr) Start();
  });
}

void HeadProcess::Pause(int64_t duration) {
  if (!serving() || paused_) return;
  // It cannot tell the first second from having had nothing to do.
  awake_before_ = awake() + std::min(duration, kSec);
  paused_ = true;
  paused_at_ = kernel_.now();
  kernel_.Note(0x4EAF, "the head stands still for ", duration / kMs, " ms");
  const uint64_t life = life_;
  if (duration > 3 * kSec) network_.HeadStalled();
  kernel_.After(duration, [this, life] {
    if (life == life_ && paused_) Resume();
  });
}

void HeadProcess::Resume() {
  paused_ = false;
  awake_since_ = kernel_.now();
  const absl::Duration waited =
      absl::Nanoseconds(kernel_.now() - paused_at_);  // at most, as the service knows it
  kernel_.Note(0x4EB0, "the head goes on with ", inbox_.size(), " messages");
  const uint64_t life = life_;
  // The order is that of the loop: input, then what the disk finished, then the timers.
  while (!inbox_.empty() && life == life_ && core_ != nullptr) {
    core::PeerMessage message = std::move(inbox_.front());
    inbox_.pop_front();
    message.waited = waited;
    Step(message);
  }
  while (!completions_.empty() && life == life_ && core_ != nullptr) {
    const std::function<void()> done = std::move(completions_.front());
    completions_.pop_front();
    done();
  }
  if (life == life_ && core_ != nullptr) Wake();
}

void HeadProcess::Receive(const Connection& connection, core::Message message) {
  core::PeerMessage event{connection.peer, connection.route, "10.0.0.1", std::move(message)};
  if (paused_) {
    inbox_.push_back(std::move(event));
    inbox_max_ = std::max(inbox_max_, inbox_.size());
    return;
  }
  Step(event);
}

void HeadProcess::Step(const core::HeadEvent& event) {
  const auto* message = std::get_if<core::PeerMessage>(&event);
  if (message != nullptr) checker_.HeadHears(*message, awake());
  core::StepResult result = core_->Step(event, kernel_.Now());
  if (!result.why.empty()) kernel_.Note(0x3A7, "head: ", result.why);
  const bool quiet = result.effects.empty() ||
                     (message != nullptr && std::holds_alternative<core::AgentHeartbeat>(message->message) &&
                      result.effects.size() == 1);
  checker_.HeadDecided(*core_, result, awake());
  Do(outbox_.Add(std::move(result)));
  AnswerWithoutStoring();
  StartCommit();
  StartJoins();
  // A beat makes no deadline earlier; asking after every one would cost more than handling it.
  if (core_ != nullptr && !(quiet && wake_at_)) Wake();
  // One that is gone may make the head send to another one that is. Told within each other, the thousands
  // that a cut rack has queued would overflow the stack.
  if (std::exchange(tells_of_gone_, true)) return;
  for (int told = 0; core_ != nullptr && !later_.empty(); ++told) {
    core::PeerGone gone = std::move(later_.front());
    later_.pop_front();
    if (told == kMostGone) {
      kernel_.Fail("INV-8",
                   absl::StrCat("the head answers each word of a node that is gone with messages to ",
                                "such nodes, at last to ", gone.route));
      break;
    }
    Step(gone);
  }
  tells_of_gone_ = false;
}

void HeadProcess::Wake() {
  const std::optional<Instant> next = core_->NextDeadline();
  if (!next) return;
  const int64_t at = std::max(next->ns, kernel_.now());
  if (wake_at_ && *wake_at_ <= at) return;
  wake_at_ = at;
  kernel_.At(at, [this, at, life = life_] {
    if (life != life_ || core_ == nullptr || wake_at_ != at) return;
    wake_at_.reset();
    if (paused_) return;
    const std::optional<Instant> due = core_->NextDeadline();
    if (due && due->ns <= kernel_.now()) {
      Step(core::Tick{});
      if (core_ != nullptr) {
        const std::optional<Instant> again = core_->NextDeadline();
        if (again && again->ns <= kernel_.now()) {
          // A deadline a tick does not clear would be a busy loop.
          return kernel_.Fail("INV-8", "the head asks for a tick at a time that is over, after a tick");
        }
        if (!wake_at_) Wake();
      }
    } else {
      Wake();
    }
  });
}

void HeadProcess::StartCommit() {
  if (core_ == nullptr) return;
  std::optional<core::OutboxBatch> batch = outbox_.NextBatch();
  if (!batch) return;
  committing_ = std::move(batch);
  PostCommit();
}

void HeadProcess::PostCommit() {
  disk_.Commit(*committing_,
               [this](Disk::Outcome outcome) { WhenAwake([this, outcome] { Committed(outcome); }); });
}

void HeadProcess::WhenAwake(std::function<void()> then) {
  if (paused_) return completions_.push_back(std::move(then));
  then();
}

// Does what HeadService does with nodes that ask to be let in.
void HeadProcess::Join(const core::ServiceRequest& request) {
  const auto* join = std::get_if<core::AgentJoin>(&request.message);
  if (join == nullptr) return;
  if (no_room_) return (void)network_.SendTo(request.route, core::AgentRefused{"the disk is full"});
  if (!joins_.Add({request.route, request.address, request.peer.key_id, *join}, kernel_.Now()))
    ++kernel_.counts["join-dropped"];
}

void HeadProcess::StartJoins() {
  if (core_ == nullptr) return;
  const std::vector<core::JoinQueue::One> batch = joins_.Take();
  if (batch.empty()) return;
  std::vector<std::string> keys;
  for (const core::JoinQueue::One& one : batch) keys.push_back(one.join.public_key);
  ++kernel_.counts["batches of joins"];
  disk_.Join(std::move(keys), [this, batch](Disk::Outcome outcome) {
    WhenAwake([this, batch, outcome] { JoinsDone(batch, outcome); });
  });
}

void HeadProcess::JoinsDone(const std::vector<core::JoinQueue::One>& batch, Disk::Outcome outcome) {
  const std::vector<std::string> routes = joins_.Done();
  for (size_t i = 0; i < routes.size(); ++i) {
    const NodeId node = Disk::NodeOf(batch[i].join.public_key);
    if (outcome == Disk::Outcome::kDurable) {
      (void)network_.SendTo(routes[i], core::AgentJoined{config_.cluster, node});
    } else {
      (void)network_.SendTo(routes[i], core::AgentRefused{"the disk is full"});
    }
  }
  StartJoins();
}

void HeadProcess::Committed(Disk::Outcome outcome) {
  if (outcome == Disk::Outcome::kError) return Kill(false);  // the outcome is unknown (fault H4)
  if (outcome == Disk::Outcome::kNoRoom) {                   // as HeadService::OnNoRoom (fault H3)
    no_room_ = true;
    ++kernel_.counts["batch waits for room"];
    kernel_.Note(0xD15E, "the head goes on, and stores nothing");
    AnswerWithoutStoring();
    return LookForRoom();
  }
  const uint64_t sequence = committing_->sequence;
  committing_.reset();
  Do(outbox_.Durable(sequence));
  StartCommit();
}

void HeadProcess::AnswerWithoutStoring() {
  if (!no_room_) return;
  for (core::Effect& effect : outbox_.TakeAnswers()) {
    if (auto* reply = std::get_if<core::ReplyToClient>(&effect); reply != nullptr && reply->changes) {
      reply->reply = core::ReplyOf(reply->reply.id, absl::AbortedError("it is done, but not stored"));
    }
    Perform(effect);
  }
}

// Does what the service's housekeeping does every two seconds.
void HeadProcess::LookForRoom() {
  kernel_.After(2 * kSec, [this, life = life_] {
    if (life != life_ || core_ == nullptr) return;
    if (paused_) return LookForRoom();
    const bool full = disk_.full();
    if (full) {
      LookForRoom();
    } else {
      no_room_ = false;
      PostCommit();
    }
    Step(core::StoreRoom{.low = full, .text = full ? "the disk is full" : "", .full = full});
  });
}

void HeadProcess::Do(std::vector<core::Effect> effects) {
  for (core::Effect& effect : effects) {
    if (core_ != nullptr) Perform(effect);
  }
}

void HeadProcess::Reply(const std::string& route, core::ClientReply reply) {
  checker_.HeadReplies(reply);
  (void)network_.SendTo(route, std::move(reply));
}

void HeadProcess::Perform(core::Effect& effect) {
  if (auto* send = std::get_if<core::SendToNode>(&effect)) {
    checker_.HeadSends(*send, awake());
    if (!send->route.empty()) return (void)network_.SendTo(send->route, *send->message);
    const std::string* route = core_->RouteOf(send->node);
    if (route == nullptr) return;
    if (!network_.SendTo(*route, *send->message)) {
      later_.push_back({{core::Role::kNode, send->node.value}, *route});
    }
  } else if (auto* reply = std::get_if<core::ReplyToClient>(&effect)) {
    Reply(reply->route, Built(*reply));
  } else if (const auto* read = std::get_if<core::ReplyFromSpill>(&effect)) {
    Reply(read->route, Built(*read, std::nullopt));  // as if the disk had lost all that was spilled
  } else if (const auto* make = std::get_if<core::MakePlan>(&effect)) {
    // Beside the loop, for as long as it takes.
    kernel_.After(static_cast<int64_t>(kernel_.rng.Below(static_cast<uint64_t>(kSec))),
                  [this, life = life_, work = make->work] {
                    if (life != life_ || core_ == nullptr) return;
                    ++kernel_.counts["plan made beside the loop"];
                    work->Make();
                    WhenAwake([this, work] { Step(core::PlanMade{work}); });
                  });
  } else if (const auto* event = std::get_if<core::EmitEvent>(&effect)) {
    checker_.HeadTells(*event);
  } else if (const auto* request = std::get_if<core::ServiceRequest>(&effect)) {
    Join(*request);
  } else if (auto* refuse = std::get_if<core::RefusePeer>(&effect)) {
    (void)network_.SendTo(refuse->route, core::AgentRefused{refuse->reason});
  }
}

}  // namespace gtrain::sim
