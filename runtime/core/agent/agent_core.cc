// The parts of the agent, and which of them an event concerns.
#include "runtime/core/agent/agent_core.h"

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/overloaded.h"
#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"
#include "runtime/core/agent/agent_queries.h"
#include "runtime/core/agent/exchanges.h"
#include "runtime/core/agent/generations.h"
#include "runtime/core/agent/head_talk.h"
#include "runtime/core/agent/idleness.h"
#include "runtime/core/agent/lease.h"
#include "runtime/core/agent/machine_notice.h"
#include "runtime/core/agent/near_copies.h"
#include "runtime/core/agent/rank_talk.h"
#include "runtime/core/agent/starter.h"
#include "runtime/core/agent/tails.h"
#include "runtime/core/values/message_table.h"

namespace gtrain::core {
// The parts know those that they need by reference, also where two of them need each other.
class AgentCore::Impl {
 public:
  explicit Impl(AgentConfig config)
      : context_(std::move(config)),
        lease_(context_, model_, generations_),
        notice_(context_),
        copies_(context_, model_),
        tails_(context_, model_),
        idleness_(context_, model_),
        exchanges_(context_, model_),
        queries_(context_, model_),
        starter_(context_, model_, generations_, lease_, copies_),
        generations_(context_, model_, starter_, lease_, copies_, tails_),
        head_(context_, model_, generations_, exchanges_, tails_, idleness_, lease_, notice_, copies_),
        ranks_(context_, model_, head_, exchanges_, tails_, idleness_) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  AgentStep Step(const AgentEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const { return head_.NextDeadline(); }
  bool HasLiveGeneration() const { return model_.HasLiveGeneration(); }
  std::string Snapshot() const;

 private:
  void OnMessage(const Message& message, const StartFacts& facts);
  void OnReport(const JobId& job, const keeper::Report& report);

  AgentContext context_;
  AgentModel model_;
  Lease lease_;
  MachineNotice notice_;
  NearCopies copies_;
  Tails tails_;
  Idleness idleness_;
  Exchanges exchanges_;
  AgentQueries queries_;
  Starter starter_;
  Generations generations_;
  HeadTalk head_;
  RankTalk ranks_;
};

AgentCore::AgentCore(AgentConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
AgentCore::~AgentCore() = default;
AgentCore::AgentCore(AgentCore&&) noexcept = default;
AgentCore& AgentCore::operator=(AgentCore&&) noexcept = default;
AgentStep AgentCore::Step(const AgentEvent& event, Instant now) { return impl_->Step(event, now); }
std::optional<Instant> AgentCore::NextDeadline() const { return impl_->NextDeadline(); }
bool AgentCore::HasLiveGeneration() const { return impl_->HasLiveGeneration(); }
std::string AgentCore::Snapshot() const { return impl_->Snapshot(); }

AgentStep AgentCore::Impl::Step(const AgentEvent& event, Instant now) {
  context_.Begin(now);
  head_.Begin();
  const Overloaded on{[&](const HeadUp& up) { head_.OnHeadUp(up); },
                      [&](const HeadDown&) { head_.OnHeadDown(); },
                      [&](const FromHead& said) { OnMessage(said.message, said.facts); },
                      [&](const FromKeeper& said) { OnReport(said.job, said.report); },
                      [&](const KeeperLost& lost) { generations_.OnKeeperLost(lost); },
                      [&](const FreePorts& ports) { head_.OnFreePorts(ports); },
                      [&](const RanksSeen& seen) { idleness_.OnRanksSeen(seen); },
                      [&](const CloudSays& says) { notice_.OnCloudSays(says); },
                      [&](const AgentTick&) { head_.OnTick(); }};
  std::visit(on, event);
  if (model_.leaving && !HasLiveGeneration()) {
    context_.Do(Leave{*model_.leaving, true});
    model_.leaving.reset();
  }
  return context_.TakeStep();
}

// Messages that are not for an agent are dropped, and so are all of a head of a lower epoch than the highest
// heard.
void AgentCore::Impl::OnMessage(const Message& message, const StartFacts& facts) {
  const Overloaded hear{[&](const AgentWelcome& m) { head_.OnWelcome(m); },
                        [&](const HeartbeatAck& m) { head_.OnHeartbeatAck(m); },
                        [&](const StartGeneration& m) {
                          starter_.OnGrant({m, facts});
                        },
                        [&](const Revoke& m) { generations_.OnRevoke(m); },
                        [&](const AckExit& m) { generations_.OnAckExit(m); },
                        [&](const ExchangeTable& m) { exchanges_.OnTable(m); },
                        [&](const ExchangeMissing& m) { exchanges_.OnMissing(m); },
                        [&](const RanksLeft& m) { generations_.OnRanksLeft(m); },
                        [&](const PauseRanks& m) { generations_.OnPauseRanks(m); },
                        [&](const ForgetJob& m) { generations_.OnForget(m); },
                        [&](const KeepCopies& m) { copies_.OnKeepCopies(m); },
                        [&](const AckNotice& m) { notice_.OnAck(m); },
                        [&](const RelayFor& m) { context_.Do(LetThrough{m.children}); },
                        [&](const ConnectVia& m) { context_.Do(GoThrough{m}); },
                        [&](const NoticeRanks& m) { generations_.OnNoticeRanks(m); },
                        [&](const AgentQuery& m) { queries_.OnQuery(m); },
                        [&](const AgentShutdown& m) { head_.OnShutdown(m); }};
  std::visit(
      [&](const auto& m) {
        using T = std::decay_t<decltype(m)>;
        if constexpr (std::is_same_v<T, AgentRefused>) {
          head_.OnRefused(m);
        } else if constexpr (kSenderOf<T> == Sender::kHead && !std::is_same_v<T, AgentJoined> &&
                             !std::is_same_v<T, ClientReply> &&
                             !std::is_same_v<T, RelayedDown>) {  // to others
          if (head_.Fresh(m.epoch)) {
            hear(m);
          } else {
            context_.Say(absl::StrCat("ignored a message of head epoch ", m.epoch.value, ": epoch ",
                                      head_.epoch().value, " has spoken already"));
          }
        }
      },
      message);
}

void AgentCore::Impl::OnReport(const JobId& job, const keeper::Report& report) {
  const Overloaded hear{[&](const keeper::State& r) { generations_.OnState(job, r); },
                        [&](const keeper::Started& r) { generations_.OnStarted(job, r); },
                        [&](const keeper::Exited& r) { generations_.OnExited(job, r); },
                        [&](const keeper::Gone& r) { generations_.OnGone(job, r); },
                        [&](const keeper::RelayUp& r) { ranks_.OnRelay(job, r); },
                        [&](const keeper::Output& r) { ranks_.OnOutput(job, r); },
                        [&](const keeper::ReportBytes& r) { ranks_.OnReport(job, r); },
                        [&](const keeper::ExecDone& r) { queries_.OnExecDone(r); },
                        [&](const keeper::ConsoleTurn& r) { queries_.OnConsoleTurn(r); },
                        [&](const keeper::Ready& r) { generations_.OnReady(job, r); }};
  std::visit(hear, report);
}

std::string AgentCore::Impl::Snapshot() const {
  std::vector<std::string> lines;
  for (const auto& [job, record] : model_.jobs) {
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

}  // namespace gtrain::core
