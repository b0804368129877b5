#include "runtime/core/agent/near_copies.h"

#include "absl/strings/str_cat.h"
#include "runtime/core/agent/rank_environment.h"

namespace gtrain::core {

NearCopies::NearCopies(AgentContext& context, AgentModel& model)
    : context_(context), model_(model), config_(context.config()) {
  for (const JobId& job : config_.near_left) copies_[job] = config_.near_memory;
}

void NearCopies::ShareNear(const JobId& job, const AgentGeneration& generation) {
  const spec::CheckpointPolicy& policy = generation.spec.checkpoint;
  const std::string folder = policy.uri.empty() ? "" : NearFolderOf(config_, policy.near);
  if (folder.empty()) return;
  copies_[job] = folder;
  if (policy.replicas == 0 || generation.grant.near_secret.empty()) return;
  context_.Do(ShareCopies{job, folder, generation.grant.near_secret});
}

void NearCopies::OnKeepCopies(const KeepCopies& keep) {
  const std::string folder = NearFolderOf(config_, keep.near);
  if (model_.leaving || folder.empty()) return;
  if (copies_.size() >= kJobsMax && !copies_.contains(keep.job)) {
    context_.Say(
        absl::StrCat("keeps no copies for ", keep.job.value, ": it does for ", kJobsMax, " jobs already"));
    return;
  }
  copies_[keep.job] = folder;
  context_.Do(ShareCopies{keep.job, folder, keep.secret});
  context_.Say(absl::StrCat("keeps copies of checkpoints of ", keep.job.value));
}

void NearCopies::Drop(const JobId& job) {
  const auto copies = copies_.find(job);
  if (copies == copies_.end()) return;
  context_.Do(DropCopies{job, copies->second});
  copies_.erase(copies);
}

}  // namespace gtrain::core
