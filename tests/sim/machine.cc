#include "tests/sim/machine.h"

#include <algorithm>

#include "base/check.h"
#include "tests/sim/checker.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kKeeperLease = 120 * kSec;

}  // namespace

Machine::Machine(Kernel& kernel, Network& network, Ranks& ranks, Checker& checker, MachineConfig config,
                 ParseSpec parse)
    : kernel_(kernel),
      network_(network),
      ranks_(ranks),
      checker_(checker),
      config_(std::move(config)),
      parse_(std::move(parse)) {}

void Machine::StartAgent() {
  if (core_ != nullptr || !powered_ || retired_) return;
  ++life_;
  core::AgentConfig config;
  config.cluster = ClusterId("sim");
  config.node = config_.node;
  config.boot_id = absl::StrCat(config_.clone ? "clone" : "boot", config_.index, "-", boot_);
  // The same boot with living keepers is the same incarnation, as runtime/agent decides it.
  if (keepers_.empty() || incarnation_.empty()) {
    incarnation_ = Incarnation(absl::StrCat(config.boot_id, "-", ++incarnations_));
  }
  config.incarnation = incarnation_;
  config.hostname = config_.hostname;
  config.version = "sim";
  if (kernel_.now() < other_agent_until_) config.keeper_protocol += 2;
  config.inventory.cpus = config.inventory.cores = config_.cpus;
  config.inventory.memory_bytes = uint64_t{64} << 30;
  config.labels = {{"zone", absl::StrCat("z", config_.index % 3)}};
  config.near_memory = "/memory";
  config.near_bytes_max = uint64_t{1} << 30;
  config.near_port = 7000;
  config.near_key = "key";
  config.near_left.assign(copies_.begin(), copies_.end());
  config.parse_spec = parse_;
  config.job_hash = [](const spec::JobSpec&) { return "hash"; };
  config.make_token = [] { return std::string(32, 'a'); };
  core_ = std::make_unique<core::AgentCore>(std::move(config));
  inbox_.clear();
  done_.clear();
  files_.clear();
  order_ = core::KeeperOrder();
  handles_.clear();
  wake_at_.reset();
  paused_ = false;
  connection_ = nullptr;
  started_at_ = kernel_.now();
  kernel_.Note(0xA6E27, "m", config_.index, " agent starts, incarnation ", incarnation_.value, ", ",
               keepers_.size(), " keepers");
  checker_.AgentStarts(*this);
  std::vector<int> ports;
  for (int i = 0; i < 4; ++i) ports.push_back(20000 + static_cast<int>(kernel_.rng.Below(10000)));
  Step(core::FreePorts{ports});
  for (const auto& [job, keeper] : keepers_) {
    handles_[job];
    AttachKeeper(job);
  }
  for (auto& [job, dead] : dead_keepers_) {
    handles_[job];
    dead.reason = "the keeper died while no agent was running";
    SweepSoon(job);
  }
  kernel_.After(kernel_.Between(10 * kMs, 300 * kMs), [this, life = life_] {
    if (Mine(life)) TryConnect();
  });
  Watch();
}

void Machine::CloudSays(std::optional<int64_t> left, core::NoticeKind kind, int64_t frozen) {
  if (!left && !noticed_for_) return;
  ++notices_;
  noticed_for_ = left ? std::optional<int64_t>(kernel_.now() + *left) : std::nullopt;
  notice_kind_ = left ? kind : core::NoticeKind::kNone;
  notice_frozen_ = frozen;
  kernel_.Note(0x5907, "m", config_.index, " notice: ", core::Name(notice_kind_), " in ",
               left.value_or(0) / kMs, " ms");
  checker_.MachineAnnounced(*this, notice_kind_ == core::NoticeKind::kLeave ? noticed_for_ : std::nullopt);
  Watch();
}

void Machine::Freeze(int64_t duration) {
  if (!powered_) return;
  ranks_.FreezeMachine(config_.index, duration);
  PauseAgent(duration);
}

// The agent's poller reads this notice within its period.
void Machine::Watch() {
  kernel_.After(kernel_.Between(kMs, 1200 * kMs), [this, life = life_] {
    if (!Mine(life)) return;
    core::NodeNotice notice;
    if (noticed_for_) {
      notice.kind = notice_kind_;
      notice.left = absl::Nanoseconds(std::max<int64_t>(0, *noticed_for_ - kernel_.now()));
      notice.frozen = absl::Nanoseconds(notice_frozen_);
      notice.source = absl::StrCat("sim ", core::Name(notice_kind_));
      notice.id = absl::StrCat("notice-", notices_);
    }
    Handle_(core::CloudSays{std::move(notice)});
  });
}

void Machine::KillAgent(int64_t down) {
  if (core_ == nullptr) return;
  kernel_.Note(0xA6E28, "m", config_.index, " agent dies");
  core_.reset();
  ++life_;
  paused_ = false;
  if (connection_ != nullptr) network_.CloseNear(*connection_, !powered_);
  connection_ = nullptr;
  for (auto& [job, keeper] : keepers_) keeper->Detach();
  handles_.clear();
  inbox_.clear();
  done_.clear();
  files_.clear();
  kernel_.After(down, [this] { StartAgent(); });
}

void Machine::PauseAgent(int64_t duration) {
  if (core_ == nullptr || paused_) return;
  paused_ = true;
  kernel_.Note(0xA6E29, "m", config_.index, " agent stands still for ", duration / kMs, " ms");
  const uint64_t life = life_;
  if (duration > 3 * kSec) {
    kernel_.After(3 * kSec + kernel_.Between(0, kSec), [this, life] {
      if (Mine(life) && paused_ && connection_ != nullptr) network_.BreakHalfOpen(config_.index);
    });
  }
  kernel_.After(duration, [this, life] {
    if (!Mine(life) || !paused_) return;
    paused_ = false;
    kernel_.Note(0xA6E30, "m", config_.index, " agent goes on with ", inbox_.size(), " events");
    std::deque<std::function<void()>> done;
    done.swap(done_);
    for (const std::function<void()>& function : done) {
      if (Mine(life)) function();
    }
    std::deque<core::AgentEvent> inbox;
    inbox.swap(inbox_);
    for (core::AgentEvent& event : inbox) {
      if (Mine(life)) Take(std::move(event));
    }
    if (Mine(life)) Step(core::AgentTick{});
  });
}

void Machine::KillKeeper(const JobId& job) {
  const auto it = keepers_.find(job);
  if (it == keepers_.end()) return;
  const std::shared_ptr<KeeperModel> keeper = it->second;
  keepers_.erase(it);
  kernel_.Note(0xCEE9, "m", config_.index, " keeper of ", job.value, " is killed");
  checker_.KeeperDies(*this, job);
  DeadKeeper dead{{}, keeper->Processes(), "the keeper was killed"};
  dead.records = keeper->Die();
  Bury(job, std::move(dead));
}

void Machine::DropKeeperLink(const JobId& job, int64_t stalled) {
  const auto handle = handles_.find(job);
  if (core_ == nullptr || paused_ || handle == handles_.end() || !handle->second.up) return;
  handle->second.last_down = handle->second.last_up = kernel_.now() + stalled;
  kernel_.After(stalled, [this, job, life = life_, link = handle->second.link] {
    const auto now = handles_.find(job);
    const auto keeper = keepers_.find(job);
    if (!Mine(life) || now == handles_.end() || keeper == keepers_.end()) return;
    if (now->second.link != link || !now->second.up) return;
    kernel_.Note(0xCEEA, "m", config_.index, " keeper of ", job.value, " drops its agent");
    now->second.up = false;
    ++now->second.link;
    keeper->second->Detach();
    AttachKeeper(job);
  });
}

void Machine::InstallOtherAgent(int64_t duration) {
  other_agent_until_ = kernel_.now() + duration;
  KillAgent(supervisor_delay);
}

// The leftovers of a dead keeper lie there until an agent has swept them up.
void Machine::Bury(const JobId& job, DeadKeeper dead) {
  dead_keepers_[job] = std::move(dead);
  if (core_ != nullptr) SweepSoon(job);
}

// The agent ends what the keeper left, reads its records, and says so; until then it has a handle on it, so
// that nothing new begins there.
void Machine::SweepSoon(const JobId& job) {
  kernel_.After(kernel_.Between(kMs, 200 * kMs), [this, life = life_, job] {
    if (!Mine(life)) return;
    if (paused_) return SweepSoon(job);
    const auto it = dead_keepers_.find(job);
    if (it == dead_keepers_.end()) return;
    const DeadKeeper dead = std::move(it->second);
    dead_keepers_.erase(it);
    handles_.erase(job);
    checker_.KeeperSwept(*this, job);
    for (const RankPtr& process : dead.processes) ranks_.KillProcess(process, keeper::Cause::kLost, 0, 9);
    for (const keeper::Exited& exit : dead.records) Handle_(core::FromKeeper{job, exit});
    Handle_(core::KeeperLost{job, true, dead.reason});
  });
}

void Machine::PowerOff(int64_t down) {
  if (!powered_) return;
  kernel_.Note(0x90FF, "m", config_.index, " loses power");
  powered_ = false;
  checker_.MachineDies(*this);
  KillAgent(1000 * kMin);
  for (const auto& [job, keeper] : keepers_) {
    for (const RankPtr& process : keeper->Processes()) {
      process->exited = nullptr;
      process->stuck = false;
      ranks_.KillProcess(process, keeper::Cause::kLost, 0, 9);
    }
    (void)keeper->Die();
  }
  keepers_.clear();
  copies_.clear();
  slow_files_.clear();
  for (auto& [job, dead] : dead_keepers_) {
    for (const RankPtr& process : dead.processes) ranks_.KillProcess(process, keeper::Cause::kLost, 0, 9);
  }
  dead_keepers_.clear();
  if (noticed_for_) CloudSays(std::nullopt);
  kernel_.After(down, [this] {
    powered_ = true;
    ++boot_;
    StartAgent();
  });
}

// ---------------------------------------------------------------- the agent's loop

void Machine::Handle_(core::AgentEvent event) {
  if (core_ == nullptr) return;
  if (paused_) {
    inbox_.push_back(std::move(event));
    inbox_max_ = std::max(inbox_max_, inbox_.size());
    return;
  }
  Take(std::move(event));
}

void Machine::Take(core::AgentEvent event) {
  if (std::holds_alternative<core::HeadUp>(event)) order_.Connected();
  auto* from = std::get_if<core::FromHead>(&event);
  auto* start = from == nullptr ? nullptr : std::get_if<core::StartGeneration>(&from->message);
  if (start != nullptr) return Prepare(std::move(*start));
  Step(event);
}

void Machine::Step(const core::AgentEvent& event) {
  const uint64_t life = life_;
  if (const auto* from = std::get_if<core::FromHead>(&event)) checker_.AgentHears(*this, from->message);
  if (const auto* lost = std::get_if<core::KeeperLost>(&event)) order_.KeeperLost(lost->job);
  core::AgentStep step = core_->Step(event, kernel_.Now());
  if (!step.why.empty()) kernel_.Note(0xA6, "m", config_.index, " agent: ", step.why);
  for (core::AgentEffect& effect : step.effects) {
    if (!Mine(life)) return;
    std::visit([this](auto& value) { Do(value); }, effect);
  }
  if (Mine(life)) Wake();
}

void Machine::Wake() {
  const std::optional<Instant> next = core_->NextDeadline();
  if (!next) return;
  const int64_t at = std::max(next->ns, kernel_.now() + kMs);
  if (wake_at_ && *wake_at_ <= at) return;
  wake_at_ = at;
  kernel_.At(at, [this, at, life = life_] {
    if (!Mine(life) || wake_at_ != at) return;
    wake_at_.reset();
    if (paused_) return;
    const std::optional<Instant> due = core_->NextDeadline();
    if (due && due->ns <= kernel_.now()) return Step(core::AgentTick{});
    Wake();
  });
}

// The generations of the keepers must be in the first hello.
bool Machine::KnowsItsKeepers() const {
  if (kernel_.now() - started_at_ >= 5 * kSec) return true;
  return std::all_of(handles_.begin(), handles_.end(), [](const auto& item) { return item.second.stated; });
}

void Machine::TryConnect() {
  if (connection_ != nullptr && connection_->near) return;
  const uint64_t life = life_;
  const auto again = [this, life] {
    if (Mine(life)) TryConnect();
  };
  if (paused_ || !KnowsItsKeepers() || !network_.CanConnect(config_.index))
    return kernel_.After(kernel_.Between(100 * kMs, 2 * kSec), again);
  connection_ = network_.Connect(config_.index, {core::Role::kNode, config_.node.value});
  connection_->deliver = [this, life](core::Message message) {
    if (Mine(life)) Handle_(core::FromHead{std::move(message)});
  };
  connection_->closed = [this, life, again] {
    if (!Mine(life)) return;
    Handle_(core::HeadDown{});
    kernel_.After(kernel_.Between(100 * kMs, 2 * kSec), again);
  };
  Handle_(core::HeadUp{absl::StrCat("10.1.", config_.index / 250, ".", config_.index % 250)});
}

// ---------------------------------------------------------------- files of jobs

void Machine::SlowFiles(const JobId& job, int64_t each) {
  kernel_.Note(0xF11E5, "m", config_.index, " files of ", job.value,
               each == 0        ? " are well"
               : each == kNever ? " do not answer"
                                : absl::StrCat(" take ", each / kMs, " ms"));
  slow_files_.erase(job);
  if (each > 0) slow_files_[job] = each;
  if (files_.contains(job)) Work(job);
}

void Machine::Post(const JobId& job, bool touches, std::function<void()> done) {
  Files& files = files_[job];
  files.work.push_back({touches, std::move(done)});
  if (files.work.size() == 1) Work(job);
}

void Machine::Work(const JobId& job) {
  Files& files = files_.at(job);
  const auto slow = slow_files_.find(job);
  int64_t takes = 0;
  if (files.work.front().touches)
    takes = slow != slow_files_.end() ? slow->second : kernel_.Between(kMs / 20, 2 * kMs);
  const uint64_t turn = files.turn = ++file_turns_;
  if (takes == kNever) return;
  kernel_.After(takes, [this, job, turn, life = life_] {
    if (Mine(life)) WorkDone(job, turn);
  });
}

void Machine::WorkDone(const JobId& job, uint64_t turn) {
  const auto it = files_.find(job);
  if (it == files_.end() || it->second.turn != turn) return;
  const std::function<void()> done = std::move(it->second.work.front().done);
  it->second.work.pop_front();
  if (it->second.work.empty()) {
    files_.erase(it);
  } else {
    Work(job);
  }
  if (paused_) return done_.push_back(done);
  done();
}

void Machine::Prepare(core::StartGeneration start) {
  const JobId job = start.grant.job;
  Post(job, true, [this, connection = order_.connection(), start = std::move(start)] {
    if (!order_.GrantHolds(connection)) return;
    core::StartFacts facts;
    const core::GenerationGrant& grant = start.grant;
    const bool first_is_here =
        !grant.ranks.empty() && grant.ranks[0].node == config_.node && grant.master_port > 0;
    facts.port_is_free = !first_is_here || !kernel_.rng.Chance(port_taken);
    Step(core::FromHead{start, std::move(facts)});
  });
}

void Machine::Do(core::WriteFile& effect) {
  if (!effect.job.empty()) Post(effect.job, true, [] {});
}

void Machine::Do(core::DropCopies& effect) {
  Post(effect.job, true, [this, job = effect.job] { copies_.erase(job); });
}

void Machine::Do(core::ReadLog& effect) {
  Post(effect.job, true, [this, query = effect.query, offset = effect.offset, ended = effect.ended] {
    core::ToHead reply{core::AgentAnswer{query, true, "log", offset + 3, ended}};
    Do(reply);
  });
}

// ---------------------------------------------------------------- the head

void Machine::Do(core::ToHead& effect) {
  checker_.AgentSays(*this, effect.message);
  if (connection_ == nullptr || network_.Send(*connection_, std::move(effect.message))) return;
  core::Reconnect reconnect;
  Do(reconnect);
}

// Reconnects as runtime/agent does, after the step.
void Machine::Do(core::Reconnect&) {
  kernel_.After(kMs, [this, life = life_, connection = connection_] {
    if (!Mine(life) || connection == nullptr || connection != connection_) return;
    network_.CloseNear(*connection, false);
    connection_ = nullptr;
    ++kernel_.counts["agent connects anew"];
    Handle_(core::HeadDown{});
    kernel_.After(kernel_.Between(100 * kMs, 2 * kSec), [this, life] {
      if (Mine(life)) TryConnect();
    });
  });
}

void Machine::Do(core::ReadStacks& effect) {
  core::ToHead reply{core::AgentAnswer{effect.query, true, "stacks", 0, true}};
  Do(reply);
}

// Refused or shut down: the supervisor tries again; a clone's owner does not.
void Machine::Do(core::Leave& effect) {
  kernel_.Note(0x1EA4E, "m", config_.index, " agent leaves: ", std::string(effect.status.message()));
  checker_.AgentLeaves(*this, effect.status);
  if (config_.clone) retired_ = true;
  KillAgent(supervisor_delay + kernel_.Between(0, 3 * kSec));
}

// ---------------------------------------------------------------- keepers

void Machine::Do(core::ToKeeper& effect) {
  checker_.AgentOrders(*this, effect);
  const core::KeeperOrder::Way way =
      order_.Send(effect, files_.contains(effect.job), handles_.contains(effect.job));
  if (way.now) SendKeeper(effect);
  if (!way.ticket) return;
  Post(effect.job, false, [this, ticket = *way.ticket, order = effect] {
    if (order_.Passes(order, ticket)) SendKeeper(order);
  });
}

void Machine::SendKeeper(const core::ToKeeper& effect) {
  checker_.AgentSends(*this, effect);
  auto it = handles_.find(effect.job);
  if (it == handles_.end()) {
    if (!std::holds_alternative<keeper::BeginGeneration>(effect.command)) return;
    it = handles_.emplace(effect.job, Handle{}).first;
    if (kernel_.rng.Chance(keeper_start_fails)) {
      ++kernel_.counts["keeper start failed"];
      checker_.KeeperDies(*this, effect.job);
      return Bury(effect.job, {{}, {}, "the keeper cannot be started"});
    }
    auto keeper = std::make_shared<KeeperModel>(kernel_, ranks_, checker_, effect.job, config_.index);
    if (keepers_.contains(effect.job)) {
      kernel_.Fail("INV-2",
                   absl::StrCat("m", config_.index, " starts a second keeper of ", effect.job.value));
    }
    keepers_[effect.job] = keeper;
    AttachKeeper(effect.job);
  }
  Handle& handle = it->second;
  if (std::holds_alternative<keeper::Quit>(effect.command)) handle.quitting = true;
  if (handle.up) {
    ToKeeperSoon(effect.job, handle, effect.command);
  } else {
    handle.pending.push_back(effect.command);
  }
}

void Machine::AttachKeeper(const JobId& job) {
  const std::weak_ptr<KeeperModel> weak = keepers_.at(job);
  keepers_.at(job)->left = [this, job, weak] {
    const auto it = keepers_.find(job);
    if (it == keepers_.end() || it->second != weak.lock()) return;
    kernel_.After(0, [job, keep = it->second] { (void)keep; });
    keepers_.erase(it);
    if (core_ != nullptr && handles_.contains(job)) Bury(job, {{}, {}, "the keeper has left"});
  };
  kernel_.After(kernel_.Between(kMs, 40 * kMs), [this, life = life_, job, weak] {
    const auto keeper = weak.lock();
    if (!Mine(life) || keeper == nullptr || !keeper->alive()) return;
    const auto it = handles_.find(job);
    if (it == handles_.end()) return;
    it->second.up = true;
    keeper->Attach(
        [this, life, job, link = it->second.link](keeper::Report report) {
          if (!Mine(life) || !handles_.contains(job) || handles_.at(job).link != link) return;
          Handle& handle = handles_.at(job);
          handle.last_up = std::max(handle.last_up + 1000, kernel_.now() + kernel_.Between(kMs / 20, kMs));
          kernel_.At(handle.last_up, [this, life, job, report = std::move(report)]() mutable {
            if (!Mine(life)) return;
            if (handles_.contains(job)) handles_.at(job).stated = true;
            Handle_(core::FromKeeper{job, std::move(report)});
          });
        },
        kKeeperLease);
    std::deque<keeper::Command> pending;
    pending.swap(it->second.pending);
    for (keeper::Command& command : pending) ToKeeperSoon(job, it->second, std::move(command));
  });
}

void Machine::ToKeeperSoon(const JobId& job, Handle& handle, keeper::Command command) {
  const auto keeper = keepers_.find(job);
  if (keeper == keepers_.end()) return;
  handle.last_down = std::max(handle.last_down + 1000, kernel_.now() + kernel_.Between(kMs / 20, kMs));
  kernel_.At(handle.last_down, [this, job, life = life_, link = handle.link, keeper = keeper->second,
                                command = std::move(command)] {
    const auto now = handles_.find(job);
    if (life == life_ && now != handles_.end() && now->second.link != link) return;  // it was not read
    // A command that the agent wrote before it died may have reached the socket or not.
    if (life == life_ || kernel_.rng.Chance(0.5)) keeper->Do(command);
  });
}

}  // namespace gtrain::sim
