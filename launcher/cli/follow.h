// Follows a job to its end: events, progress and output of its ranks, Ctrl-C, a closed terminal, a head that
// goes away and comes back.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/cli/context.h"
#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

struct FollowOptions {
  bool from_start = false;    // false: events before now are old news
  bool ctrl_c_stops = false;  // false: Ctrl-C detaches; the job goes on
  bool tell_restore = false;  // say once what a program that chose its own folder resumed from
  // The part of rank 0's output of this generation that was shown already.
  uint64_t shown_generation = 0, shown_bytes = 0;
  // If given, it gets the lines of output as the ranks wrote them, and they are shown like that.
  std::vector<std::string>* bare = nullptr;
  bool show = true;  // false: only rank 0's stdout goes to `bare`, and none is shown
};

// Returns the exit code: the job's, or 128+N when a signal ended the watching (the job goes on).
int Follow(Cluster& cluster, const std::string& job_id, const FollowOptions& options);

// Chooses as ChooseJob does, also among the jobs that are over and too old for the head's list.
absl::StatusOr<JobDoc> FindJob(Cluster& cluster, const std::string& word, Without without = Without::kRefuse);

// docs/cli.md: a rank's own code is in the report; here only those with a meaning of their own survive.
int ExitCodeOf(const JobDoc& job);

// The state of one job; NotFound when the head does not know it.
absl::StatusOr<JobDoc> AskJob(Cluster& cluster, const std::string& job_id, absl::Duration timeout);

}  // namespace gtrain::cli
