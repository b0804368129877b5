// The logs of a job that runs, where they lie on this machine: they are there also when no agent or head
// answers, and when the head does not remember any more where a generation ran.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "launcher/cli/context.h"
#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

class LogFiles {
 public:
  // Like an agent, it does not read a run directory that belongs to another job or another user: it has none
  // then.
  LogFiles(const Cluster& cluster, const JobDoc& job);

  // Reads a piece of the stream from `offset` on. Whether the rank has ended no file says, so that `end` is
  // never set. nullopt: the generation has no folder of logs here, or the file cannot be read.
  std::optional<LogDoc> Read(uint64_t generation, int rank, bool is_stderr, uint64_t offset) const;

  // How many ranks may have written in the generation: one more than the highest that has a file. 0: none.
  int RanksOf(uint64_t generation) const;

 private:
  std::string run_dir_;  // empty: its files may not be read here
  std::string hostname_;
};

}  // namespace gtrain::cli
