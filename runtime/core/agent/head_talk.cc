#include "runtime/core/agent/head_talk.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/agent/exchanges.h"
#include "runtime/core/agent/generations.h"
#include "runtime/core/agent/idleness.h"
#include "runtime/core/agent/lease.h"
#include "runtime/core/agent/machine_notice.h"
#include "runtime/core/agent/near_copies.h"
#include "runtime/core/agent/tails.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kHelloEvery = absl::Seconds(2);
constexpr absl::Duration kRepeatEvery = absl::Seconds(5);
constexpr size_t kHeartbeatsUnanswered = 1000;
// Through a relay a heartbeat goes to the head itself when it has something to say, and after this many
// intervals or a quarter of the lease: the head answers those alone, and they alone extend the lease.
constexpr int kRelayedEvery = 20;

}  // namespace

HeadTalk::HeadTalk(AgentContext& context, AgentModel& model, Generations& generations, Exchanges& exchanges,
                   Tails& tails, Idleness& idleness, Lease& lease, MachineNotice& notice, NearCopies& copies)
    : context_(context),
      model_(model),
      config_(context.config()),
      generations_(generations),
      exchanges_(exchanges),
      tails_(tails),
      idleness_(idleness),
      lease_(lease),
      notice_(notice),
      copies_(copies),
      epoch_(config_.epoch),
      epoch_proof_(config_.epoch_proof) {}

// The head's silence is counted from the first step.
void HeadTalk::Begin() {
  if (heard_at_) return;
  heard_at_ = context_.now();
  lease_.Start(context_.now());
}

std::optional<Instant> HeadTalk::NextDeadline() const {
  if (connected_ && !context_.welcomed()) return next_hello_;
  return context_.welcomed() ? std::min(next_repeat_, next_heartbeat_) : next_repeat_;
}

// ---------------------------------------------------------------- connection

void HeadTalk::OnHeadUp(const HeadUp& event) {
  address_ = event.address;
  connected_ = true;
  relayed_ = event.relayed;
  context_.SetWelcomed(false);
  SayHello();
}

void HeadTalk::OnHeadDown() {
  connected_ = false;
  context_.SetWelcomed(false);
  hello_at_.reset();
  heartbeats_sent_.clear();
}

void HeadTalk::SayHello() {
  next_hello_ = context_.now() + kHelloEvery;
  if (!hello_at_) hello_at_ = context_.now();
  AgentHello hello;
  hello.cluster = config_.cluster;
  hello.incarnation = config_.incarnation;
  hello.boot_id = config_.boot_id;
  hello.hostname = config_.hostname;
  hello.address = address_;
  hello.version = config_.version;
  hello.protocol = config_.protocol;
  hello.inventory = config_.inventory;
  hello.labels = config_.labels;
  hello.free_ports = free_ports_;
  hello.near_port = config_.near_port;
  hello.near_key = config_.near_key;
  hello.takes_copies = config_.near_port > 0;
  hello.keeps_seals = true;
  hello.knows_fabric_order = true;
  hello.knows_relays = !config_.public_key.empty();
  hello.public_key = config_.public_key;
  hello.relay_port = config_.relay_port;
  hello.kept = model_.Kept();
  if (!hello.kept.empty()) GT_PROBE("agent.tells_what_is_kept");
  for (const auto& [job, folder] : copies_.folders()) hello.copies_of.push_back(job);
  hello.epoch = epoch_;
  hello.epoch_proof = epoch_proof_;
  hello.order = last_hello_ = std::max(last_hello_ + 1, static_cast<uint64_t>(context_.now().ns));
  hello.held = model_.Held();
  context_.Do(ToHead{std::move(hello)});
}

// The head has lost its records, or came back with older ones; exits it once acknowledged are news to it
// again.
void HeadTalk::Describe() {
  std::vector<HeldGeneration> all = model_.Held();
  std::reverse(all.begin(), all.end());  // the newest generation of a job first
  for (HeldGeneration& held : all) {
    const AgentGeneration& generation = model_.jobs.at(held.job).generations.at(held.generation);
    if (generation.grant.ranks.empty()) continue;  // adopted from a keeper of an older agent
    for (const auto& [rank, info] : generation.ranks) {
      if (info.exit && info.acked) held.exited.push_back(*info.exit);
    }
    context_.Tell(
        GenerationDescribed{std::move(held), generation.grant, generation.checkpoint, generation.seal});
  }
}

bool HeadTalk::Fresh(HeadEpoch epoch) {
  if (epoch < epoch_) {
    GT_PROBE("agent.old_epoch_ignored");
    return false;
  }
  epoch_ = epoch;
  heard_at_ = context_.now();
  return true;
}

void HeadTalk::OnWelcome(const AgentWelcome& welcome) {
  if (context_.welcomed()) return;
  context_.SetWelcomed(true);
  if (config_.cluster.empty()) context_.SetCluster(welcome.cluster);
  heartbeat_interval_ = std::clamp(welcome.heartbeat_interval, absl::Milliseconds(50), absl::Seconds(30));
  lease_.SetLength(welcome.fence_after);
  tails_.SetJoinsPieces(welcome.joins_pieces);
  if (hello_at_) lease_.ExtendLease(*std::exchange(hello_at_, std::nullopt));
  next_heartbeat_ = context_.now() + heartbeat_interval_;
  context_.Say(absl::StrCat("welcomed by the head, epoch ", welcome.epoch.value));
  if (welcome.epoch_proof != epoch_proof_) {
    epoch_proof_ = welcome.epoch_proof;
    if (!config_.epoch_path.empty()) {
      context_.Do(WriteFile{config_.epoch_path, absl::StrCat(epoch_.value, "\n", epoch_proof_, "\n",
                                                             config_.cluster.value, "\n")});
    }
  }
  if (welcome.describe) Describe();
  notice_.ForgetAck();
  RepeatRecords();
  RepeatUnacknowledged();
  RepeatToNewHead();
}

// Whatever is gone: exits follow, and the last of them makes the job final. All of them in their order, since
// the head that heard them may have died before it kept them.
void HeadTalk::RepeatRecords() {
  for (const auto& [job, record] : model_.jobs) {
    for (const auto& [number, generation] : record.generations) {
      for (const AgentRecord& said : generation.records) {
        const auto rank = generation.ranks.find(said.note.rank);
        if (rank == generation.ranks.end() || !rank->second.acked) context_.Tell(said.note);
      }
    }
  }
}

// A head that starts does not know what is gone, nor checkpoints, exchanges, notes, states and last words.
void HeadTalk::RepeatToNewHead() {
  for (auto& [job, record] : model_.jobs) {
    for (auto& [number, generation] : record.generations) {
      generation.gone_told = false;
      for (auto& [rank, info] : generation.ranks) info.out.next_piece = info.err.next_piece = 0;
    }
    generations_.TellGone(job, record);
    for (auto& [number, generation] : record.generations) {
      // Committed while no head listened, it pays for faults as any other (restart_policy.h).
      if (generation.checkpoint) context_.Tell(*generation.checkpoint);
      if (generation.gone) continue;
      for (const auto& [sequence, exchange] : generation.exchanges)
        exchanges_.SendExchangePart(job, generation, sequence);
      for (const auto& [kind, note] : generation.notes) context_.Tell(note);
      for (auto& [rank, info] : generation.ranks) {
        info.status_changed = !info.exit;
        info.out.changed = info.err.changed = true;
      }
    }
    if (record.forgotten) generations_.FinishIfSettled(job);
  }
}

void HeadTalk::OnRefused(const AgentRefused& refused) {
  context_.SetWelcomed(false);
  context_.Say(absl::StrCat("refused: ", refused.reason));
  const std::string sentence = absl::StrCat("the head refused this node: ", refused.reason);
  if (!refused.revoked) return context_.Do(Leave{absl::FailedPreconditionError(sentence)});
  if (model_.leaving) return;
  model_.leaving = absl::PermissionDeniedError(sentence);
  for (auto& [job, record] : model_.jobs) context_.Command(job, keeper::Quit{refused.reason});
}

void HeadTalk::OnHeartbeatAck(const HeartbeatAck& ack) {
  std::optional<Instant> sent;
  while (!heartbeats_sent_.empty() && heartbeats_sent_.front().first <= ack.sequence) {
    sent = heartbeats_sent_.front().second;
    heartbeats_sent_.pop_front();
  }
  if (sent) lease_.ExtendLease(*sent);
  if (!ack.greet) return;
  GT_PROBE("agent.reconnects_when_asked");
  context_.Say("the head has lost a message to this node: connects anew");
  context_.Do(Reconnect{});
}

void HeadTalk::OnShutdown(const AgentShutdown& shutdown) {
  model_.leaving = absl::OkStatus();
  context_.Say(absl::StrCat("shutting down: ", shutdown.reason));
  for (auto& [job, record] : model_.jobs) context_.Command(job, keeper::Quit{shutdown.reason});
}

// ---------------------------------------------------------------- time

void HeadTalk::OnTick() {
  lease_.CheckLease();
  if (connected_ && !context_.welcomed() && context_.now() >= next_hello_) SayHello();
  if (context_.welcomed() && context_.now() - *heard_at_ > SilenceMax()) {
    GT_PROBE("agent.greets_again");
    context_.SetWelcomed(false);  // it forgot us, or the connection is dead and does not know it: greet again
    SayHello();
  }
  if (context_.welcomed() && context_.now() >= next_heartbeat_) {
    idleness_.LookForIdle();
    Heartbeat();
    tails_.MirrorTails();  // an idle agent wakes up once for both
  }
  if (context_.now() >= next_repeat_) {
    next_repeat_ = context_.now() + kRepeatEvery;
    RepeatUnacknowledged();
  }
}

absl::Duration HeadTalk::OwnWordEvery() const {
  const absl::Duration often = kRelayedEvery * heartbeat_interval_;
  return lease_.length() > absl::ZeroDuration() ? std::min(often, lease_.length() / 4) : often;
}

absl::Duration HeadTalk::SilenceMax() const {
  const absl::Duration direct = std::max(10 * heartbeat_interval_, absl::Seconds(10));
  return relayed_ ? std::max(direct, 3 * OwnWordEvery()) : direct;
}

void HeadTalk::Heartbeat() {
  next_heartbeat_ = context_.now() + heartbeat_interval_;
  AgentHeartbeat beat;
  if (free_ports_ != told_ports_) beat.free_ports = free_ports_;
  for (auto& [job, record] : model_.jobs) {
    for (auto& [number, generation] : record.generations) {
      for (auto& [rank, info] : generation.ranks) {
        if (info.status_changed && !info.exit) beat.changed.push_back(info.status);
        info.status_changed = false;
      }
    }
  }
  const bool something = !beat.changed.empty() || !beat.free_ports.empty();
  if (relayed_ && !something && context_.now() < next_own_word_) {
    GT_PROBE("agent.beats_through_a_relay");
    return context_.Do(Beat{});
  }
  if (relayed_) context_.Do(Beat{});  // the relay hears nothing of what is sealed
  next_own_word_ = context_.now() + OwnWordEvery();
  beat.sequence = ++heartbeat_sequence_;
  beat.free_ports = told_ports_ = free_ports_;
  heartbeats_sent_.emplace_back(beat.sequence, context_.now());
  if (heartbeats_sent_.size() > kHeartbeatsUnanswered) heartbeats_sent_.pop_front();
  context_.Tell(std::move(beat));
}

void HeadTalk::RepeatUnacknowledged() {
  notice_.TellNotice();
  for (const auto& [job, record] : model_.jobs) {
    for (const auto& [number, generation] : record.generations) {
      for (const auto& [rank, info] : generation.ranks) {
        if (info.exit && !info.acked) context_.Tell(RankExited{*info.exit});
      }
    }
  }
}

}  // namespace gtrain::core
