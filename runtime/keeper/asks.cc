#include "runtime/keeper/asks.h"

#include <algorithm>
#include <utility>

#include "runtime/keeper/rank_protocol.h"

namespace gtrain::keeper {

namespace {

constexpr size_t kAsksMax = 256;
constexpr int kUnansweredMax = 8;                 // of a process: one that is stopped reads none of them
constexpr size_t kAnswerMax = (1u << 20) - 1024;  // what an agent says at once, with what is beside it

}  // namespace

void Asks::Refuse(const Open& open, const std::string& why) {
  context_.agent.Tell(ExecDone{open.id, false, 0, "rank " + std::to_string(open.rank) + " " + why});
}

void Asks::Take(Ask& ask) {
  Open open{.id = ask.id, .generation = ask.generation, .rank = ask.rank, .number = ++last_};
  const RankProcess* rank = context_.generations.FindRank(ask.generation, ask.rank);
  if (rank == nullptr || rank->exit) return Refuse(open, "is not running here");
  RankConnection* connection = connections_.Of(ask.generation, ask.rank);
  if (connection == nullptr || !connection->answers)
    return context_.agent.Tell(ExecDone{ask.id, true, 0, ""});
  if (open_.size() >= kAsksMax)
    return Refuse(open, "is not asked: " + std::to_string(kAsksMax) +
                            " questions to ranks of this job on this machine are open. Try again");
  if (connection->unanswered >= kUnansweredMax)
    return Refuse(open, "has not answered the last " + std::to_string(kUnansweredMax) +
                            " questions: its process is stopped, or has no processor time");
  ++connection->unanswered;
  open.limit_ms = static_cast<int64_t>(std::clamp<uint64_t>(ask.timeout_ms, 1, 60000));
  open.deadline_ms = context_.now_ms + open.limit_ms;
  const RankQuestion question{open.number};
  connection->Send(kKeeperAsks,
                   std::string(reinterpret_cast<const char*>(&question), sizeof(question)) + ask.question);
  open_.push_back(open);
  context_.tick_wanted = true;
}

void Asks::OnAnswer(RankConnection& connection, uint64_t id, std::string text) {
  connection.unanswered = std::max(0, connection.unanswered - 1);
  const auto it = std::find_if(open_.begin(), open_.end(), [&](const Open& open) {
    return open.number == id && open.generation == connection.generation && open.rank == connection.rank;
  });
  if (it == open_.end()) return;  // its time was over
  if (text.size() > kAnswerMax) {
    Refuse(*it, "answers with " + std::to_string(text.size()) + " bytes, and " + std::to_string(kAnswerMax) +
                    " are the most");
  } else {
    context_.agent.Tell(ExecDone{it->id, true, 0, std::move(text)});
  }
  open_.erase(it);
}

void Asks::Expire() {
  std::erase_if(open_, [this](const Open& open) {
    const RankProcess* rank = context_.generations.FindRank(open.generation, open.rank);
    if (rank == nullptr || rank->exit) {
      Refuse(open, "has ended");
    } else if (context_.now_ms >= open.deadline_ms) {
      Refuse(open, "does not answer within " + std::to_string(open.limit_ms / 1000) +
                       " s: its process is stopped, or has no processor time");
    } else {
      return false;
    }
    return true;
  });
}

}  // namespace gtrain::keeper
