// Follows a job to its end: events, progress and output of its ranks, Ctrl-C, a closed terminal, a head that
// goes away and comes back.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/cli/context.h"
#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

// Returns the exit code: the job's, or 128+N when a signal ended the watching (the job goes on). `bare`, if
// given, gets the lines of output as the ranks wrote them, and they are shown like that.
int Follow(Cluster& cluster, const std::string& job_id, bool from_start,
           std::vector<std::string>* bare = nullptr);

enum class Without { kRefuse, kNewest };  // a word and a live job: the newest that is over will do

// `word` as an id, or as the name of the newest job of that name; "" = the only live job.
absl::StatusOr<JobDoc> FindJob(Cluster& cluster, const std::string& word, Without without = Without::kRefuse);

// The state of one job; NotFound when the head does not know it.
absl::StatusOr<JobDoc> AskJob(Cluster& cluster, const std::string& job_id, absl::Duration timeout);

}  // namespace gtrain::cli
