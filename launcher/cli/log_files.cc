#include "launcher/cli/log_files.h"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include "base/unique_fd.h"
#include "launcher/cli/left.h"
#include "runtime/agent/node.h"
#include "runtime/core/agent/agent_core.h"

namespace gtrain::cli {
namespace {

std::string FolderOf(const std::string& log) { return std::filesystem::path(log).parent_path(); }

}  // namespace

LogFiles::LogFiles(const Cluster& cluster, const JobDoc& job) {
  if (!cluster.backend->on_this_machine() || job.run_dir.empty()) return;
  const std::string log = core::RankLogPath(job.run_dir, Generation{job.generation}, 0, false);
  if (!agent::CheckRunDirOfLog(log, ClusterId(job.cluster), JobId(job.id)).ok()) return;
  run_dir_ = job.run_dir;
  if (!job.ranks.empty()) hostname_ = job.ranks[0].hostname;
}

std::optional<LogDoc> LogFiles::Read(uint64_t generation, int rank, bool is_stderr, uint64_t offset) const {
  if (run_dir_.empty()) return std::nullopt;
  const std::string path = core::RankLogPath(run_dir_, Generation{generation}, rank, is_stderr);
  LogDoc log{.next_offset = offset, .hostname = hostname_};
  const absl::StatusOr<UniqueFd> file = agent::OpenLog(path);
  if (absl::IsNotFound(file.status()) && access(FolderOf(path).c_str(), F_OK) == 0) return log;
  if (!file.ok()) return std::nullopt;
  agent::LogPiece piece;
  if (!agent::ReadLogPiece(*file, path, offset, 0, &piece).ok()) return std::nullopt;
  log.text = std::move(piece.text);
  log.next_offset = piece.next_offset;
  return log;
}

int LogFiles::RanksOf(uint64_t generation) const {
  return run_dir_.empty() ? 0 : RanksLogged(run_dir_, generation);
}

}  // namespace gtrain::cli
