#include "runtime/core/head/over_jobs.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "runtime/core/head/head_records.h"

namespace gtrain::core {
namespace {

// The bytes, about, that a job that is over takes until it is forgotten: some 700 for each of n ranks, and
// the last output of the ranks.
size_t BytesKept(const Job& job) {
  const auto bytes_of = [](const GenerationGrant& grant) {
    return grant.ranks.size() * sizeof(RankPlace) + grant.nodes.size() * sizeof(NodePlace);
  };
  const JobRecord& record = job.record;
  size_t bytes = sizeof(Job) + 2 * job.user_bytes;  // the text and what was read from it
  bytes += record.reason.size() + record.ending_reason.size() + job.ranks.size() * (sizeof(RankLive) + 64);
  if (record.grant) bytes += bytes_of(*record.grant);
  for (const FaultRecord& fault : record.faults)
    bytes += sizeof(FaultRecord) + fault.message.size() + fault.tail.size() + fault.signature.size();
  for (const auto& [generation, grant] : job.past) bytes += bytes_of(grant);
  for (const RankExit& exit : record.exits)
    bytes += sizeof(RankExit) + exit.message.size() + exit.tail.size() + exit.storage.size();
  for (const std::shared_ptr<const EmitEvent>& event : job.events)
    bytes += sizeof(EmitEvent) + event->run_dir.size() + event->text.size() + event->goodput.size();
  return bytes;
}

}  // namespace

OverJobs::OverJobs(HeadContext& context, HeadModel& model, HeadRecords& records)
    : context_(context), model_(model), config_(context.config()), records_(records) {}

// Jobs that are over beyond the limits are forgotten: the oldest of the user with most of them, in number or
// in bytes. Costs nothing while both limits hold.
void OverJobs::DropOldJobs() {
  while (static_cast<int>(model_.jobs.size()) > config_.jobs_max) {
    if (!DropOfMost([](const OfUser& own) { return own.jobs.size(); })) break;
  }
  while (over_bytes_ > config_.jobs_bytes_max) {
    if (!DropOfMost([](const OfUser& own) { return own.bytes; })) break;
  }
}

// False: there is none. A job whose nodes have not all said that its ranks are gone is passed over: it keeps
// others away from them.
bool OverJobs::DropOfMost(absl::FunctionRef<size_t(const OfUser&)> what) {
  std::vector<const OfUser*> users;
  for (const auto& [owner, own] : over_of_user_) users.push_back(&own);
  std::ranges::sort(users, std::greater(), [&](const OfUser* own) { return what(*own); });
  for (const OfUser* own : users) {
    for (const uint64_t number : own->jobs) {
      if (model_.jobs.at(model_.job_order.at(number)).record.unreleased.empty())
        return DropOver(number), true;
    }
  }
  return false;
}

void OverJobs::CountOver(Job& job) {
  // The last output of the ranks explains a failure; that of 1,000 ranks whose job is well is megabytes.
  // Older heads stored it.
  if (job.record.state != JobState::kFailed) {
    for (RankExit& exit : job.record.exits) std::string().swap(exit.tail);  // clear() would keep the memory
  }
  job.kept_bytes = BytesKept(job);
  OfUser& own = over_of_user_[job.record.owner];
  own.bytes += job.kept_bytes;
  own.jobs.insert(job.record.number);
  over_bytes_ += job.kept_bytes;
}

void OverJobs::DropOver(uint64_t number) {
  const auto it = model_.job_order.find(number);
  const Job& job = model_.jobs.at(it->second);
  const auto own = over_of_user_.find(job.record.owner);
  own->second.bytes -= job.kept_bytes;
  own->second.jobs.erase(number);
  if (own->second.jobs.empty()) over_of_user_.erase(own);
  over_bytes_ -= job.kept_bytes;
  records_.DeleteJob(job);
  if (job.checkpoint) context_.Delete(KeyOf(*job.checkpoint));
  model_.tails.Forget(it->second);
  context_.Do(DropSpilled{it->second});
  context_.Forget(it->second);
  model_.live_jobs.erase(number);
  model_.jobs.erase(it->second);
  model_.job_order.erase(it);
}

}  // namespace gtrain::core
