// Directories decides whose a checkpoint directory is, as far as the head can know. PURE. Private to
// runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A submit
// and a first generation cost O(live jobs).
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class JobLife;

class Directories {
 public:
  Directories(HeadContext& context, HeadModel& model, JobLife& life);

  // FailedPrecondition: another job of this cluster saves there.
  absl::Status CheckDirectory(const spec::JobSpec& spec, const std::string& owner_of_new, Instant now);
  // PermissionDenied: to take the directory of a running job is to end it, which is for its owner and for
  // administrators.
  absl::Status MayTakeOver(const Peer& peer, const spec::JobSpec& spec);
  // Called before a job's first generation. False: another user's job runs there by now, and this one is
  // over.
  bool DirectoryIsFree(Job& job, Instant now);
  void SayWhoTakesOver(Job& taker, bool since_its_submit);
  std::vector<JobId> LiveJobsToTell(const Job& job) const;

 private:
  absl::Status DirectoryInUse(const Job& other, const std::string& owner_of_new, Instant now) const;
  std::vector<Job*> OthersIn(const std::string& location, const JobId& but);

  HeadContext& context_;
  HeadModel& model_;
  JobLife& life_;
};

}  // namespace gtrain::core
