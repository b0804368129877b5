#include "runtime/core/agent/agent_queries.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
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

void AgentQueries::Answer(uint64_t query, bool ok, const std::string& text) {
  context_.Tell(AgentAnswer{query, ok, text, 0, true});
}

void AgentQueries::OnQuery(const AgentQuery& query) {
  const auto job = model_.jobs.find(query.job);
  const AgentGeneration* generation = model_.Find(query.job, query.generation);
  if (query.kind == AgentQuery::Kind::kReadLog) {
    if (job == model_.jobs.end() || job->second.run_dir.empty()) {
      return Answer(query.query, false,
                    absl::StrCat("node ", config_.hostname, " knows no job ", query.job.value));
    }
    const std::string& run_dir = generation != nullptr ? generation->run_dir : job->second.run_dir;
    context_.Do(ReadLog{query.query, query.job,
                        RankLogPath(run_dir, query.generation, query.rank, query.is_stderr), query.offset,
                        generation == nullptr || generation->gone, query.bytes_max});
    return;
  }
  if (query.kind == AgentQuery::Kind::kConsole && generation != nullptr && !generation->gone)
    return context_.Command(query.job,
                            ConsoleTurnOf(query));  // of a rank that ended there may be words to tell
  const AgentRank* rank = model_.Find(query.job, query.generation, query.rank);
  if (rank == nullptr || rank->exit || query.kind == AgentQuery::Kind::kConsole) {
    return Answer(
        query.query, false,
        absl::StrCat("rank ", query.rank, " of ", query.job.value, " is not running on ", config_.hostname));
  }
  constexpr uint64_t kAskMs = 5'000;
  if (query.kind == AgentQuery::Kind::kActors) {
    const std::string question = query.argv.empty() ? "" : query.argv[0];
    return context_.Command(query.job,
                            keeper::Ask{query.query, query.generation.value, query.rank, question, kAskMs});
  }
  // Nobody waits for it after the head's HeadConfig::query_timeout. A second less, so that the head still
  // hears what it wrote until then.
  constexpr uint64_t kExecMs = 9'000;
  keeper::Exec exec{query.query, query.generation.value, query.rank, query.argv, kExecMs, query.apart};
  if (query.kind == AgentQuery::Kind::kStacks) {
    if (!query.full || config_.keeper_program.empty())
      return context_.Do(ReadStacks{query.query, rank->status.pid});
    exec.argv = {config_.keeper_program, "--stacks", absl::StrCat(rank->status.pid)};
  }
  context_.Command(query.job, std::move(exec));
}

void AgentQueries::OnExecDone(const keeper::ExecDone& done) {
  context_.Tell(AgentAnswer{done.id, done.ok, done.output, static_cast<uint64_t>(done.status), true, done.err,
                            done.timed_out});
}

void AgentQueries::OnConsoleTurn(const keeper::ConsoleTurn& turn) {
  context_.Tell(AgentAnswer{.query = turn.id,
                            .ok = turn.ok,
                            .text = turn.out,
                            .next_offset = static_cast<uint64_t>(turn.status),
                            .end = turn.over || !turn.ok,
                            .err = turn.err,
                            .taken = turn.taken,
                            .at = turn.out_at});
}

}  // namespace gtrain::core
