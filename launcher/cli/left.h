// The files that finished jobs left, for when no head answers: the index of the local cluster's runs and the
// result in each run directory (docs/formats/run-directory.md). The head's store is never opened.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "launcher/cli/args.h"
#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

// `word` names a run directory, and so a job that no head need be asked for.
bool IsRunDirectory(const std::string& word);

// The document of all jobs in the index, in the head's shape. NotFound: the cluster has none.
absl::StatusOr<std::string> LeftJobs(const Args& args);
// The result of one, which is a job and a `why` in the head's shapes: by its id, its name (the newest), its
// run directory, or "" for the newest of all. NotFound: nothing is left of it.
absl::StatusOr<std::string> LeftJob(const Args& args, const std::string& word);

// Reads the result of the job `id`, whose run directory this is.
absl::StatusOr<JobDoc> LeftResult(const std::string& run_dir, const std::string& id);

struct LeftAnswer {
  std::string json;
  std::string note;  // a sentence: why this and not the head's
};
// Replaces an answer that did not come by the result that the job left, or for "" those of all jobs if `all`.
// Otherwise the error says why there is neither.
absl::StatusOr<LeftAnswer> LeftInstead(const absl::Status& asked, const Args& args, const std::string& word,
                                       bool all = false);

// Whether the logs of the job's ranks lie where they can be read from here.
bool HasLogs(const std::string& run_dir);
// The newest generation before `generation` of which a rank has written anything, as far as its logs lie
// here.
std::optional<uint64_t> NewestWritten(const std::string& run_dir, uint64_t generation);

// One more than the highest rank that has a log of the generation there, 0: none has. Who wrote nothing, and
// who waited beside the ranks and did, nobody else remembers.
int RanksLogged(const std::string& run_dir, uint64_t generation);

// Reads the output of a rank, from `offset` on, at most a piece. Of one that has no log it is empty.
absl::StatusOr<LogDoc> ReadLeftLog(const JobDoc& job, std::optional<uint64_t> generation, int rank,
                                   bool is_stderr, uint64_t offset);

}  // namespace gtrain::cli
