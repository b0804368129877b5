#include "runtime/core/job_records.h"

#include <algorithm>
#include <type_traits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace gtrain::core {
namespace {

// Adds a record to what is there of its job, which `job_of` finds; records of other things are left out.
template <class JobOf>
void Gather(const Record& record, const JobOf& job_of) {
  std::visit(
      [&](const auto& r) {
        using T = std::decay_t<decltype(r)>;
        if constexpr (std::is_same_v<T, JobRecord>) job_of(r.id).whole = &r;
        if constexpr (std::is_same_v<T, JobSubmission>) job_of(r.id).submission = &r;
        if constexpr (std::is_same_v<T, JobStatusRecord>) job_of(r.job).status = &r;
        if constexpr (std::is_same_v<T, JobGrantRecord>) job_of(r.job).grant = &r;
        if constexpr (std::is_same_v<T, JobExitRecord>) job_of(r.job).exits.push_back(&r);
        if constexpr (std::is_same_v<T, JobFaultRecord>) job_of(r.job).faults.push_back(&r);
        if constexpr (std::is_same_v<T, JobUnreleasedRecord>) job_of(r.job).unreleased = &r;
      },
      record);
}

// A store lists them by key, "10" before "2".
void Sort(StoredJob& stored) {
  std::ranges::sort(stored.exits, {}, &JobExitRecord::index);
  std::ranges::sort(stored.faults, {}, [](const JobFaultRecord* r) { return r->fault.generation; });
}

absl::Status Missing(const Record& record) {
  return absl::DataLossError(absl::StrCat("its record \"", KeyOf(record), "\" is missing"));
}
absl::Status Stray(const Record& record) {
  return absl::DataLossError(
      absl::StrCat("its record \"", KeyOf(record), "\" does not belong to the others"));
}

}  // namespace

std::map<JobId, StoredJob> GatherJobs(const std::vector<Record>& records,
                                      const std::vector<std::string>& unreadable) {
  std::map<JobId, StoredJob> jobs;
  const auto job_of = [&](const JobId& id) -> StoredJob& {
    return jobs.try_emplace(id, StoredJob{.id = id}).first->second;
  };
  for (const Record& record : records) Gather(record, job_of);
  for (const std::string& key : unreadable) {
    absl::string_view id = key;
    if (absl::ConsumePrefix(&id, "job/"))
      job_of(JobId(std::string(id.substr(0, id.find('/'))))).unreadable.push_back(key);
  }
  for (auto& [id, stored] : jobs) Sort(stored);
  return jobs;
}

StoredJob GatherJob(const std::map<std::string, Record>& store, const JobId& job) {
  StoredJob stored{.id = job};
  const auto job_of = [&](const JobId&) -> StoredJob& { return stored; };
  const std::string key = absl::StrCat("job/", job.value);
  if (const auto it = store.find(key); it != store.end()) Gather(it->second, job_of);
  const std::string prefix = key + "/";
  for (auto it = store.lower_bound(prefix); it != store.end() && absl::StartsWith(it->first, prefix); ++it)
    Gather(it->second, job_of);
  Sort(stored);
  return stored;
}

absl::Status CheckWhole(const StoredJob& stored) {
  if (stored.whole != nullptr) return absl::OkStatus();
  if (!stored.unreadable.empty())
    return absl::DataLossError(absl::StrCat("its record \"", stored.unreadable[0], "\" cannot be read"));
  const JobId& job = stored.id;
  if (stored.submission == nullptr) return Missing(JobSubmission{job});
  if (stored.status == nullptr) return Missing(JobStatusRecord{job});
  const JobStatusRecord& status = *stored.status;

  const Generation grant = stored.grant == nullptr ? Generation() : stored.grant->grant.generation;
  if (stored.grant == nullptr && status.grant != grant) return Missing(JobGrantRecord{job});
  if (status.grant != grant) return Stray(*stored.grant);

  const size_t nodes = stored.unreleased == nullptr ? 0 : stored.unreleased->nodes.size();
  if (stored.unreleased == nullptr && status.unreleased != 0) return Missing(JobUnreleasedRecord{job});
  if (nodes != static_cast<size_t>(status.unreleased)) return Stray(*stored.unreleased);

  for (size_t i = 0; i < stored.exits.size() || i < static_cast<size_t>(status.exits); ++i) {
    if (i >= static_cast<size_t>(status.exits)) return Stray(*stored.exits[i]);
    if (i >= stored.exits.size() || static_cast<size_t>(stored.exits[i]->index) != i)
      return Missing(JobExitRecord{job, static_cast<int>(i)});
  }
  for (size_t i = 0; i < stored.faults.size() || i < status.faults.size(); ++i) {
    if (i >= status.faults.size()) return Stray(*stored.faults[i]);
    if (i >= stored.faults.size() || stored.faults[i]->fault.generation != status.faults[i])
      return Missing(JobFaultRecord{job, {.generation = status.faults[i]}});
  }
  return absl::OkStatus();
}

absl::StatusOr<JobRecord> JoinJob(const StoredJob& stored) {
  if (absl::Status whole = CheckWhole(stored); !whole.ok()) return whole;
  if (stored.whole != nullptr) return *stored.whole;
  JobRecord record{*stored.submission, stored.status->status};
  if (stored.grant != nullptr) {
    record.grant = stored.grant->grant;
    record.kept = stored.grant->kept;
  }
  if (stored.unreleased != nullptr) record.unreleased = stored.unreleased->nodes;
  record.exits.reserve(stored.exits.size());
  for (const JobExitRecord* exit : stored.exits) record.exits.push_back(exit->exit);
  for (const JobFaultRecord* fault : stored.faults) record.faults.push_back(fault->fault);
  return record;
}

std::vector<std::string> KeysOf(const StoredJob& stored) {
  std::vector<std::string> keys = stored.unreadable;
  const auto add = [&](const auto* record) {
    if (record != nullptr) keys.push_back(KeyOf(*record));
  };
  add(stored.whole);
  add(stored.submission);
  add(stored.status);
  add(stored.grant);
  add(stored.unreleased);
  for (const JobExitRecord* exit : stored.exits) add(exit);
  for (const JobFaultRecord* fault : stored.faults) add(fault);
  return keys;
}

JobStatusRecord StatusRecordOf(const JobRecord& record) {
  JobStatusRecord status{.job = record.id, .status = record};
  if (record.grant) status.grant = record.grant->generation;
  status.exits = static_cast<int>(record.exits.size());
  for (const FaultRecord& fault : record.faults) status.faults.push_back(fault.generation);
  status.unreleased = static_cast<int>(record.unreleased.size());
  return status;
}

}  // namespace gtrain::core
