// The job that a verb acts on (attach, stop, exec, stack, scale): of the head, or, where no local cluster
// runs any more, what the job left. Such a job is over, and is said to be.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "launcher/cli/args.h"
#include "launcher/cli/context.h"
#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

struct Target {
  std::optional<Cluster> cluster;  // none: the job is over and no head knows it
  JobDoc job;
};

// InvalidArgument for a word that the head would not even read as an id, before the head is asked: `what`
// says what the word should be, `lists` is the command that lists the existing ones.
absl::Status CheckId(absl::string_view word, absl::string_view what, absl::string_view lists);
// CheckId of the JOB of a verb that takes one. A run directory, which has a / in it, and none at all pass.
absl::Status CheckJobWord(const Verb& verb, const Args& args);

// The first word of `args` names the job; without one it is the only live one.
absl::StatusOr<Target> FindTarget(const Args& args);

// Like FindTarget, for verbs that need running ranks: FailedPrecondition when the job is over.
absl::StatusOr<Target> FindLiveTarget(const Args& args);

// The rank that --rank names, or all that have not ended: FailedPrecondition where none is left.
absl::StatusOr<std::vector<int>> RanksAsked(const JobDoc& job, const Args& args);

// "train-3 is over: SUCCEEDED"
std::string OverText(const JobDoc& job);

}  // namespace gtrain::cli
