// Towards the head: hello and welcome, epochs, heartbeats, repeats, queries. What must not get lost is kept
// until it is acknowledged and said again after each welcome; everything else is dropped while no head
// listens.
#include "runtime/core/agent/agent_core.h"

#include <algorithm>
#include <csignal>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/agent/agent_core_impl.h"
#include "runtime/core/agent/rank_environment.h"

namespace gtrain::core {

namespace {

constexpr absl::Duration kHelloEvery = absl::Seconds(2);
constexpr absl::Duration kRepeatEvery = absl::Seconds(5);
constexpr size_t kHeartbeatsUnanswered = 1000;
constexpr size_t kJobsMax = 4096;  // remembered; the oldest without a live generation goes

int SignalNumber(const std::string& name) {
  static const std::map<std::string, int> kNumbers = {
      {"SIGTERM", SIGTERM}, {"SIGINT", SIGINT},   {"SIGUSR1", SIGUSR1}, {"SIGUSR2", SIGUSR2},
      {"SIGHUP", SIGHUP},   {"SIGQUIT", SIGQUIT}, {"SIGCONT", SIGCONT}, {"SIGALRM", SIGALRM}};
  const auto it = kNumbers.find(name);
  return it == kNumbers.end() ? SIGTERM : it->second;
}

}  // namespace

AgentCore::AgentCore(AgentConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
AgentCore::~AgentCore() = default;
AgentCore::AgentCore(AgentCore&&) noexcept = default;
AgentCore& AgentCore::operator=(AgentCore&&) noexcept = default;
AgentStep AgentCore::Step(const AgentEvent& event, Instant now) { return impl_->Step(event, now); }
std::optional<Instant> AgentCore::NextDeadline() const { return impl_->NextDeadline(); }
bool AgentCore::HasLiveGeneration() const { return impl_->HasLiveGeneration(); }
std::string AgentCore::Snapshot() const { return impl_->Snapshot(); }

AgentStep AgentCore::Impl::Step(const AgentEvent& event, Instant now) {
  now_ = now;
  if (!heard_at_) heard_at_ = lease_from_ = now;
  effects_.clear();
  why_.clear();
  std::visit([this](const auto& value) { On(value); }, event);
  if (leaving_ && !HasLiveGeneration()) {
    effects_.push_back(Leave{*leaving_, true});
    leaving_.reset();
  }
  return {std::move(effects_), std::move(why_)};
}

std::optional<Instant> AgentCore::Impl::NextDeadline() const {
  if (connected_ && !welcomed_) return next_hello_;
  return welcomed_ ? std::min(next_repeat_, next_heartbeat_) : next_repeat_;
}

bool AgentCore::Impl::HasLiveGeneration() const {
  for (const auto& [job, record] : jobs_) {
    for (const auto& [number, generation] : record.generations) {
      if (!generation.gone) return true;
    }
  }
  return false;
}

std::string AgentCore::Impl::Snapshot() const {
  std::vector<std::string> lines;
  for (const auto& [job, record] : jobs_) {
    std::string line = absl::StrCat(job.value, " revoked ", record.revoked.value);
    for (const auto& [number, generation] : record.generations) {
      absl::StrAppend(&line, "; generation ", number.value, generation.gone ? " gone" : "",
                      generation.ended ? " ended" : "");
      for (const auto& [rank, info] : generation.ranks) {
        absl::StrAppend(&line, " ", rank, info.exit ? "=exited" : info.sdk ? "=joined" : "=live");
      }
    }
    lines.push_back(std::move(line));
  }
  return absl::StrJoin(lines, "\n");
}

// ---------------------------------------------------------------- connection

void AgentCore::Impl::On(const HeadUp& event) {
  address_ = event.address;
  connected_ = true;
  welcomed_ = false;
  SayHello();
}

void AgentCore::Impl::On(const HeadDown&) {
  connected_ = welcomed_ = false;
  hello_at_.reset();
  heartbeats_sent_.clear();
}

void AgentCore::Impl::On(const FreePorts& event) { free_ports_ = event.ports; }

// The same notice again is news only when it comes nearer, an answer without one only after one, or once: the
// head may remember a notice that was taken back while no agent was running.
void AgentCore::Impl::On(const CloudSays& event) {
  constexpr absl::Duration kNearer = absl::Seconds(1);
  const NodeNotice& notice = event.notice;
  const bool same = notice.kind == notice_.kind && notice.id == notice_.id;
  if (notice_sequence_ > 0 && same && now_ + notice.left + kNearer > notice_at_) return;
  notice_ = notice;
  notice_at_ = now_ + notice.left;
  ++notice_sequence_;
  notice_acked_ = false;
  if (notice.kind != NoticeKind::kNone || notice_sequence_ > 1) {
    why_ = absl::StrCat("the cloud says: ",
                        notice.kind == NoticeKind::kNone
                            ? "the notice is taken back"
                            : absl::StrCat(notice.source, ", ", Name(notice.kind), " in ",
                                           PrintDuration(absl::Floor(notice.left, absl::Seconds(1)))));
  }
  TellNotice();
}

void AgentCore::Impl::TellNotice() {
  if (notice_sequence_ == 0 || notice_acked_) return;
  NodeNotice notice = notice_;
  notice.left = std::max(absl::ZeroDuration(), notice_at_ - now_);
  Tell(NoticeSeen{notice_sequence_, std::move(notice)});
}

void AgentCore::Impl::Hear(const AckNotice& ack) {
  if (ack.sequence == notice_sequence_) notice_acked_ = true;
}

void AgentCore::Impl::SayHello() {
  next_hello_ = now_ + kHelloEvery;
  if (!hello_at_) hello_at_ = now_;
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
  for (const auto& [job, folder] : copies_) hello.copies_of.push_back(job);
  hello.epoch = epoch_;
  hello.epoch_proof = epoch_proof_;
  hello.order = last_hello_ = std::max(last_hello_ + 1, static_cast<uint64_t>(now_.ns));
  hello.held = Held();
  effects_.push_back(ToHead{std::move(hello)});
}

std::vector<HeldGeneration> AgentCore::Impl::Held() const {
  std::vector<HeldGeneration> all;
  for (const auto& [job, record] : jobs_) {
    for (const auto& [number, generation] : record.generations) {
      HeldGeneration held;
      held.job = job;
      held.generation = number;
      held.revoked = record.revoked;
      held.stopping = record.stopping;
      for (const auto& [rank, info] : generation.ranks) {
        if (!info.exit) held.live.push_back(info.status);
        if (info.exit && !info.acked) held.exited.push_back(*info.exit);
      }
      if (!held.live.empty() || !held.exited.empty() || !generation.gone) all.push_back(std::move(held));
    }
  }
  return all;
}

// The head has lost its records, or came back with older ones; exits it once acknowledged are news to it
// again.
void AgentCore::Impl::Describe() {
  std::vector<HeldGeneration> all = Held();
  std::reverse(all.begin(), all.end());  // the newest generation of a job first
  for (HeldGeneration& held : all) {
    const AgentGeneration& generation = jobs_.at(held.job).generations.at(held.generation);
    if (generation.grant.ranks.empty()) continue;  // adopted from a keeper of an older agent
    for (const auto& [rank, info] : generation.ranks) {
      if (info.exit && info.acked) held.exited.push_back(*info.exit);
    }
    Tell(GenerationDescribed{std::move(held), generation.grant, generation.checkpoint, generation.seal});
  }
}

void AgentCore::Impl::Tell(Message message) {
  if (welcomed_) effects_.push_back(ToHead{std::move(message)});
}

void AgentCore::Impl::Command(const JobId& job, keeper::Command command) {
  effects_.push_back(ToKeeper{job, std::move(command)});
}

bool AgentCore::Impl::Fresh(HeadEpoch epoch) {
  if (epoch < epoch_) {
    GT_PROBE("agent.old_epoch_ignored");
    return false;
  }
  epoch_ = epoch;
  heard_at_ = now_;
  return true;
}

void AgentCore::Impl::On(const FromHead& event) {
  std::visit(
      [this](const auto& message) {
        using T = std::decay_t<decltype(message)>;
        if constexpr (std::is_same_v<T, AgentRefused>) {
          Hear(message);
        } else if constexpr (requires {
                               Hear(message);
                               message.epoch;
                             }) {
          if (Fresh(message.epoch)) {
            Hear(message);
          } else {
            why_ = absl::StrCat("ignored a message of head epoch ", message.epoch.value, ": epoch ",
                                epoch_.value, " has spoken already");
          }
        }
      },
      event.message);
}

void AgentCore::Impl::Hear(const AgentWelcome& welcome) {
  if (welcomed_) return;
  welcomed_ = true;
  if (config_.cluster.empty()) config_.cluster = welcome.cluster;
  heartbeat_interval_ = std::clamp(welcome.heartbeat_interval, absl::Milliseconds(50), absl::Seconds(30));
  fence_after_ = welcome.fence_after;
  joins_pieces_ = welcome.joins_pieces;
  lease_known_ = true;
  if (hello_at_) ExtendLease(*std::exchange(hello_at_, std::nullopt));
  next_heartbeat_ = now_ + heartbeat_interval_;
  why_ = absl::StrCat("welcomed by the head, epoch ", welcome.epoch.value);
  if (welcome.epoch_proof != epoch_proof_) {
    epoch_proof_ = welcome.epoch_proof;
    if (!config_.epoch_path.empty()) {
      effects_.push_back(WriteFile{config_.epoch_path, absl::StrCat(epoch_.value, "\n", epoch_proof_, "\n",
                                                                    config_.cluster.value, "\n")});
    }
  }
  if (welcome.describe) Describe();
  notice_acked_ = false;
  RepeatUnacknowledged();
  for (auto& [job, record] : jobs_) {
    for (auto& [number, generation] : record.generations) {
      generation.gone_told = false;
      for (auto& [rank, info] : generation.ranks) info.out.next_piece = info.err.next_piece = 0;
    }
    TellGone(job, record);
    for (auto& [number, generation] : record.generations) {
      // Committed while no head listened, it pays for faults as any other (restart_policy.h).
      if (generation.checkpoint) Tell(*generation.checkpoint);
      if (generation.gone) continue;
      for (const auto& [sequence, exchange] : generation.exchanges)
        SendExchangePart(job, generation, sequence);
      for (const auto& [kind, note] : generation.notes) Tell(note);  // a head that starts knows none
      for (auto& [rank, info] : generation.ranks) {
        info.status_changed = !info.exit;
        info.out.changed = info.err.changed = true;
      }
    }
    if (record.forgotten) FinishIfSettled(job);
  }
}

void AgentCore::Impl::Hear(const AgentRefused& refused) {
  welcomed_ = false;
  why_ = absl::StrCat("refused: ", refused.reason);
  const std::string sentence = absl::StrCat("the head refused this node: ", refused.reason);
  if (!refused.revoked) {
    effects_.push_back(Leave{absl::FailedPreconditionError(sentence)});
    return;
  }
  if (leaving_) return;
  leaving_ = absl::PermissionDeniedError(sentence);
  for (auto& [job, record] : jobs_) Command(job, keeper::Quit{refused.reason});
}

void AgentCore::Impl::Hear(const HeartbeatAck& ack) {
  std::optional<Instant> sent;
  while (!heartbeats_sent_.empty() && heartbeats_sent_.front().first <= ack.sequence) {
    sent = heartbeats_sent_.front().second;
    heartbeats_sent_.pop_front();
  }
  if (sent) ExtendLease(*sent);
  if (!ack.greet) return;
  GT_PROBE("agent.reconnects_when_asked");
  why_ = "the head has lost a message to this node: connects anew";
  effects_.push_back(Reconnect{});
}

// From the sending of what the head has answered: the head counts from when it heard that, which is later. It
// costs a frame a job every twelfth of a lease, however many ranks.
void AgentCore::Impl::ExtendLease(Instant sent) {
  lease_from_ = std::max(lease_from_, sent);
  if (fence_after_ <= absl::ZeroDuration() || now_ < next_fence_) return;
  next_fence_ = now_ + fence_after_ / 12;
  for (const auto& [job, record] : jobs_) {
    const bool live = std::any_of(record.generations.begin(), record.generations.end(),
                                  [](const auto& item) { return !item.second.gone && !item.second.ended; });
    if (live) TellLease(job);
  }
}

void AgentCore::Impl::TellLease(const JobId& job) {
  if (fence_after_ <= absl::ZeroDuration() || fence_after_ == absl::InfiniteDuration()) return;
  Command(job, keeper::Fence{(lease_from_ + fence_after_).ns / 1'000'000});
}

// ---------------------------------------------------------------- time

void AgentCore::Impl::On(const AgentTick&) {
  CheckLease();
  if (connected_ && !welcomed_ && now_ >= next_hello_) SayHello();
  if (welcomed_ && now_ - *heard_at_ > std::max(10 * heartbeat_interval_, absl::Seconds(10))) {
    GT_PROBE("agent.greets_again");
    welcomed_ = false;  // it forgot us, or the connection is dead and does not know it: greet again
    SayHello();
  }
  if (welcomed_ && now_ >= next_heartbeat_) {
    LookForIdle();
    Heartbeat();
    MirrorTails();  // an idle agent wakes up once for both
  }
  if (now_ >= next_repeat_) {
    next_repeat_ = now_ + kRepeatEvery;
    RepeatUnacknowledged();
  }
}

void AgentCore::Impl::Heartbeat() {
  next_heartbeat_ = now_ + heartbeat_interval_;
  AgentHeartbeat beat;
  beat.sequence = ++heartbeat_sequence_;
  heartbeats_sent_.emplace_back(beat.sequence, now_);
  if (heartbeats_sent_.size() > kHeartbeatsUnanswered) heartbeats_sent_.pop_front();
  beat.free_ports = free_ports_;
  for (auto& [job, record] : jobs_) {
    for (auto& [number, generation] : record.generations) {
      for (auto& [rank, info] : generation.ranks) {
        if (info.status_changed && !info.exit) beat.changed.push_back(info.status);
        info.status_changed = false;
      }
    }
  }
  Tell(std::move(beat));
}

void AgentCore::Impl::MirrorTails() {
  if (!welcomed_) return;
  for (auto& [job, record] : jobs_) {
    for (auto& [number, generation] : record.generations) {
      for (auto& [rank, info] : generation.ranks) {
        for (bool is_stderr : {false, true}) {
          AgentTail& tail = is_stderr ? info.err : info.out;
          if (!tail.changed || tail.text.empty()) continue;
          tail.changed = false;
          // A rank of much output has written all of its tail anew by then.
          if (!joins_pieces_ || tail.unsent >= tail.text.size()) tail.next_piece = 0;
          Tell(LogTail{job, number, rank, is_stderr, tail.end_offset,
                       tail.next_piece == 0 ? tail.text : tail.text.substr(tail.text.size() - tail.unsent),
                       tail.next_piece++});
          tail.unsent = 0;
        }
      }
    }
  }
}

void AgentCore::Impl::RepeatUnacknowledged() {
  TellNotice();
  for (const auto& [job, record] : jobs_) {
    for (const auto& [number, generation] : record.generations) {
      for (const auto& [rank, info] : generation.ranks) {
        if (info.exit && !info.acked) Tell(RankExited{*info.exit});
      }
    }
  }
}

// Generations and commits fence programs with the SDK; a program without it could run twice, so it has a
// lease. The keeper ends it, too, whatever becomes of this agent; one of an older version does not.
void AgentCore::Impl::CheckLease() {
  if (!lease_known_) return;  // its length is the head's word, and the keeper has what an earlier agent heard
  const absl::Duration silent = now_ - lease_from_;
  if (fence_after_ <= absl::ZeroDuration() || silent <= fence_after_) return;
  for (auto& [job, record] : jobs_) {
    for (auto& [number, generation] : record.generations) {
      const bool fenced = std::all_of(generation.ranks.begin(), generation.ranks.end(),
                                      [](const auto& item) { return item.second.sdk || item.second.exit; });
      if (generation.ended || generation.gone || fenced) continue;
      GT_PROBE("agent.lease_ends_ranks");
      End(job, record, number, EndMode::kReform, absl::Seconds(5),
          absl::StrCat("no word from the head for ", PrintDuration(absl::Floor(silent, absl::Seconds(1)))));
      break;
    }
  }
}

// ---------------------------------------------------------------- orders

void AgentCore::Impl::Hear(const StartGeneration& start) {
  if (leaving_) return;
  Start(start);
  while (jobs_.size() > kJobsMax) {
    const auto old = std::find_if(job_order_.begin(), job_order_.end(),
                                  [this](const JobId& job) { return jobs_[job].generations.empty(); });
    if (old == job_order_.end()) break;
    jobs_.erase(*old);
    job_order_.erase(old);
  }
}

void AgentCore::Impl::Hear(const Revoke& revoke) {
  const auto [it, fresh] = jobs_.try_emplace(revoke.job);
  if (fresh) job_order_.push_back(revoke.job);
  AgentJob& record = it->second;
  record.revoked = std::max(record.revoked, revoke.generation);
  record.stopping = record.stopping || revoke.mode != EndMode::kReform;
  End(revoke.job, record, revoke.generation, revoke.mode, revoke.grace, revoke.reason);
  if (record.generations.count(revoke.generation) == 0) {  // never started here, or over long ago
    GT_PROBE("agent.revoke_of_unknown");
    OweGone(revoke.job, record, revoke.generation, "");
  }
}

void AgentCore::Impl::Hear(const AckExit& ack) {
  AgentRank* rank = Find(ack.job, ack.generation, ack.rank);
  if (rank == nullptr || !rank->exit) return;
  rank->acked = true;
  Command(ack.job, keeper::AckExit{ack.generation.value, ack.rank});
  FinishIfSettled(ack.job);
}

void AgentCore::Impl::Hear(const ExchangeTable& table) {
  AgentGeneration* generation = Find(table.job, table.generation);
  if (generation == nullptr || generation->gone || generation->exchanges.count(table.sequence) == 0) return;
  CompleteExchange(table.job, *generation, table.sequence, table.blobs);
}

void AgentCore::Impl::Hear(const ExchangeMissing& missing) {
  const AgentGeneration* generation = Find(missing.job, missing.generation);
  if (generation == nullptr || generation->gone || generation->exchanges.count(missing.sequence) == 0) return;
  const std::string text = MissingText(missing.sequence, missing.ranks);
  for (const auto& [rank, info] : generation->ranks) {
    Command(missing.job, keeper::Relay{missing.generation.value, rank, text});
  }
}

void AgentCore::Impl::Hear(const RanksLeft& left) {
  const AgentGeneration* generation = Find(left.job, left.generation);
  if (generation == nullptr || generation->gone) return;
  const std::string text = LeftText(left.ranks);
  for (const auto& [rank, info] : generation->ranks) {
    Command(left.job, keeper::Relay{left.generation.value, rank, text});
  }
}

void AgentCore::Impl::Hear(const ForgetJob& forget) {
  if (const auto copies = copies_.find(forget.job); copies != copies_.end()) {
    effects_.push_back(DropCopies{forget.job, copies->second});
    copies_.erase(copies);
  }
  const auto it = jobs_.find(forget.job);
  if (it == jobs_.end()) return;
  it->second.forgotten = true;
  for (auto& [number, generation] : it->second.generations) {
    for (auto& [rank, info] : generation.ranks) info.acked = true;
  }
  Command(forget.job, keeper::Quit{"the job is over"});
  FinishIfSettled(forget.job);
}

void AgentCore::Impl::Hear(const KeepCopies& keep) {
  const std::string folder = NearFolderOf(config_, keep.near);
  if (leaving_ || folder.empty()) return;
  if (copies_.size() >= kJobsMax && !copies_.contains(keep.job)) {
    why_ = absl::StrCat("keeps no copies for ", keep.job.value, ": it does for ", kJobsMax, " jobs already");
    return;
  }
  copies_[keep.job] = folder;
  effects_.push_back(ShareCopies{keep.job, folder, keep.secret});
  why_ = absl::StrCat("keeps copies of checkpoints of ", keep.job.value);
}

void AgentCore::Impl::Hear(const NoticeRanks& notice) {
  AgentGeneration* generation = Find(notice.job, notice.generation);
  if (generation == nullptr || generation->gone) return;
  const auto seconds = std::clamp<int64_t>(absl::ToInt64Seconds(notice.left), 0, 1'000'000);
  // A head that restarted, or a connection that broke, makes it come again: the signal is given once. After a
  // restart of this agent the keeper knows.
  const bool anew = notice.notice > generation->noticed;
  const int signal = anew ? SignalNumber(generation->spec.preempt.signal) : 0;
  if (anew) generation->noticed = notice.notice;
  Command(notice.job,
          keeper::Notice{notice.generation.value, static_cast<uint32_t>(seconds), signal, notice.notice});
}

void AgentCore::Impl::Answer(uint64_t query, bool ok, const std::string& text) {
  Tell(AgentAnswer{query, ok, text, 0, true});
}

namespace {

keeper::Console ConsoleTurnOf(const AgentQuery& query) {
  const Console& turn = query.console;
  return {.id = query.query,
          .generation = query.generation.value,
          .rank = query.rank,
          .session = turn.session,
          .start = turn.start,
          .argv = turn.argv,
          .terminal = turn.terminal,
          .term = turn.term,
          .rows = turn.rows,
          .columns = turn.columns,
          .input_offset = turn.input_offset,
          .input = turn.input,
          .input_end = turn.input_end,
          .out_seen = turn.out_seen,
          .err_seen = turn.err_seen,
          .hang_up = turn.hang_up};
}

}  // namespace

void AgentCore::Impl::Hear(const AgentQuery& query) {
  const auto job = jobs_.find(query.job);
  const AgentGeneration* generation = Find(query.job, query.generation);
  if (query.kind == AgentQuery::Kind::kReadLog) {
    if (job == jobs_.end() || job->second.run_dir.empty()) {
      return Answer(query.query, false,
                    absl::StrCat("node ", config_.hostname, " knows no job ", query.job.value));
    }
    const std::string& run_dir = generation != nullptr ? generation->run_dir : job->second.run_dir;
    effects_.push_back(ReadLog{query.query, query.job,
                               RankLogPath(run_dir, query.generation, query.rank, query.is_stderr),
                               query.offset, generation == nullptr || generation->gone, query.bytes_max});
    return;
  }
  if (query.kind == AgentQuery::Kind::kConsole && generation != nullptr && !generation->gone)
    return Command(query.job, ConsoleTurnOf(query));  // of a rank that ended there may be words to tell
  const AgentRank* rank = Find(query.job, query.generation, query.rank);
  if (rank == nullptr || rank->exit || query.kind == AgentQuery::Kind::kConsole) {
    return Answer(
        query.query, false,
        absl::StrCat("rank ", query.rank, " of ", query.job.value, " is not running on ", config_.hostname));
  }
  // Nobody waits for it after the head's HeadConfig::query_timeout. A second less, so that the head still
  // hears what it wrote until then.
  constexpr uint64_t kExecMs = 9'000;
  keeper::Exec exec{query.query, query.generation.value, query.rank, query.argv, kExecMs, query.apart};
  if (query.kind == AgentQuery::Kind::kStacks) {
    if (!query.full || config_.keeper_program.empty())
      return effects_.push_back(ReadStacks{query.query, rank->status.pid});
    exec.argv = {config_.keeper_program, "--stacks", absl::StrCat(rank->status.pid)};
  }
  Command(query.job, std::move(exec));
}

void AgentCore::Impl::Hear(const AgentShutdown& shutdown) {
  leaving_ = absl::OkStatus();
  why_ = absl::StrCat("shutting down: ", shutdown.reason);
  for (auto& [job, record] : jobs_) Command(job, keeper::Quit{shutdown.reason});
}

}  // namespace gtrain::core
