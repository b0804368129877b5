#include "runtime/core/values/job_records.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace gtrain::core {
namespace {

template <class T, class By>
void InsertBy(std::vector<T>& sorted, T value, By by) {
  const auto at = std::ranges::upper_bound(sorted, by(value), {}, by);
  sorted.insert(at, std::move(value));
}

// Adds a record to what is there of its job, which `job_of` finds. False: it is of something else.
template <class JobOf>
bool Gather(Record& record, const JobOf& job_of) {
  return std::visit(
      [&](auto& r) {
        using T = std::decay_t<decltype(r)>;
        if constexpr (std::is_same_v<T, JobRecord>) {
          job_of(r.id).whole = std::move(r);
        } else if constexpr (std::is_same_v<T, JobSubmission>) {
          job_of(r.id).submission = std::move(r);
        } else if constexpr (std::is_same_v<T, JobStatusRecord>) {
          job_of(r.job).status = std::move(r);
        } else if constexpr (std::is_same_v<T, JobGrantRecord>) {
          job_of(r.job).grant = std::move(r);
        } else if constexpr (std::is_same_v<T, JobUnreleasedRecord>) {
          job_of(r.job).unreleased = std::move(r);
        } else if constexpr (std::is_same_v<T, JobExitRecord>) {
          job_of(r.job).exits.push_back({r.index, std::move(r.exit)});
        } else if constexpr (std::is_same_v<T, JobExitsRecord>) {
          StoredJob& job = job_of(r.job);
          InsertBy(job.packed, std::move(r), [](const JobExitsRecord& e) { return e.first; });
        } else if constexpr (std::is_same_v<T, JobFaultRecord>) {
          StoredJob& job = job_of(r.job);
          InsertBy(job.faults, std::move(r), [](const JobFaultRecord& f) { return f.fault.generation; });
        } else {
          return false;
        }
        return true;
      },
      record);
}

absl::Status Missing(const Record& record) {
  return absl::DataLossError(absl::StrCat("its record \"", KeyOf(record), "\" is missing"));
}
absl::Status Stray(const Record& record) {
  return absl::DataLossError(
      absl::StrCat("its record \"", KeyOf(record), "\" does not belong to the others"));
}

// The exits of `packed` come first, without a gap; then single exits, in whatever order they were read.
absl::Status CheckExits(const StoredJob& stored, const JobStatusRecord& status) {
  const JobId& job = stored.id;
  int next = 0;
  for (const JobExitsRecord& packed : stored.packed) {
    if (next >= status.packed) return Stray(JobExitsRecord{job, packed.first, {}});
    if (packed.first != next) return Missing(JobExitsRecord{job, next, {}});
    next += static_cast<int>(packed.exits.size());
  }
  if (next < status.packed) return Missing(JobExitsRecord{job, next, {}});
  if (next > status.packed || next > status.exits)
    return Stray(JobExitsRecord{job, stored.packed.back().first, {}});

  std::vector<bool> there(static_cast<size_t>(status.exits - next));
  int stray = -1;
  for (const StoredJob::Exit& exit : stored.exits) {
    if (exit.index >= next && exit.index < status.exits) {
      there[static_cast<size_t>(exit.index - next)] = true;
    } else if (stray < 0 || exit.index < stray) {
      stray = exit.index;
    }
  }
  for (size_t i = 0; i < there.size(); ++i) {
    if (!there[i]) return Missing(JobExitRecord{job, next + static_cast<int>(i), {}});
  }
  return stray < 0 ? absl::OkStatus() : Stray(JobExitRecord{job, stray, {}});
}

std::vector<RankExit> TakeExits(StoredJob& stored) {
  std::vector<RankExit> exits;
  size_t next = 0;
  if (stored.packed.size() == 1) {
    exits = std::move(stored.packed[0].exits);
    next = exits.size();
  }
  exits.resize(static_cast<size_t>(stored.status->exits));
  if (stored.packed.size() > 1) {
    for (JobExitsRecord& packed : stored.packed) {
      for (RankExit& exit : packed.exits) exits[next++] = std::move(exit);
    }
  }
  for (StoredJob::Exit& exit : stored.exits) exits[static_cast<size_t>(exit.index)] = std::move(exit.exit);
  return exits;
}

}  // namespace

StoredJob& StoredRecords::JobOf(const JobId& id) {
  if (last_ != nullptr && last_->id == id) return *last_;
  if (last_ != nullptr) last_->exits.shrink_to_fit();  // it has grown by doubling
  last_ = &jobs.try_emplace(id, StoredJob{.id = id}).first->second;
  return *last_;
}

void StoredRecords::Add(Record record) {
  ++count;
  if (Gather(record, [this](const JobId& id) -> StoredJob& { return JobOf(id); })) return;
  if (auto* c = std::get_if<ClusterRecord>(&record)) cluster = std::move(*c);
  if (auto* node = std::get_if<NodeRecord>(&record)) nodes.push_back(std::move(*node));
  if (auto* request = std::get_if<RequestRecord>(&record)) requests.push_back(std::move(*request));
  if (auto* checkpoint = std::get_if<CheckpointRecord>(&record))
    checkpoints.push_back(std::move(*checkpoint));
}

void StoredRecords::SetAside(std::string key) {
  absl::string_view id = key;
  if (absl::ConsumePrefix(&id, "job/"))
    JobOf(JobId(std::string(id.substr(0, id.find('/'))))).unreadable.push_back(key);
  set_aside.push_back(std::move(key));
}

StoredJob GatherJob(const std::map<std::string, Record>& store, const JobId& job) {
  StoredJob stored{.id = job};
  const auto add = [&](Record record) { Gather(record, [&](const JobId&) -> StoredJob& { return stored; }); };
  const std::string key = absl::StrCat("job/", job.value);
  if (const auto it = store.find(key); it != store.end()) add(it->second);
  const std::string prefix = key + "/";
  for (auto it = store.lower_bound(prefix); it != store.end() && absl::StartsWith(it->first, prefix); ++it)
    add(it->second);
  return stored;
}

absl::Status CheckWhole(const StoredJob& stored) {
  if (stored.whole) return absl::OkStatus();
  if (!stored.unreadable.empty())
    return absl::DataLossError(absl::StrCat("its record \"", stored.unreadable[0], "\" cannot be read"));
  const JobId& job = stored.id;
  if (!stored.submission) return Missing(JobSubmission{job});
  if (!stored.status) return Missing(JobStatusRecord{job});
  const JobStatusRecord& status = *stored.status;

  const Generation grant = stored.grant ? stored.grant->grant.generation : Generation();
  if (!stored.grant && status.grant != grant) return Missing(JobGrantRecord{job, {}, {}});
  if (status.grant != grant) return Stray(*stored.grant);

  const size_t nodes = stored.unreleased ? stored.unreleased->nodes.size() : 0;
  if (!stored.unreleased && status.unreleased != 0) return Missing(JobUnreleasedRecord{job, {}});
  if (nodes != static_cast<size_t>(status.unreleased)) return Stray(*stored.unreleased);

  if (const absl::Status exits = CheckExits(stored, status); !exits.ok()) return exits;
  for (size_t i = 0; i < stored.faults.size() || i < status.faults.size(); ++i) {
    if (i >= status.faults.size()) return Stray(stored.faults[i]);
    if (i >= stored.faults.size() || stored.faults[i].fault.generation != status.faults[i])
      return Missing(JobFaultRecord{job, {.generation = status.faults[i]}});
  }
  return absl::OkStatus();
}

absl::StatusOr<JobRecord> JoinJob(StoredJob&& stored) {
  if (absl::Status whole = CheckWhole(stored); !whole.ok()) return whole;
  if (stored.whole) return *std::move(stored.whole);
  JobRecord record{*std::move(stored.submission), std::move(stored.status->status)};
  if (stored.grant) {
    record.grant = std::move(stored.grant->grant);
    record.kept = std::move(stored.grant->kept);
  }
  if (stored.unreleased) record.unreleased = std::move(stored.unreleased->nodes);
  record.exits = TakeExits(stored);
  record.faults.reserve(stored.faults.size());
  for (JobFaultRecord& fault : stored.faults) record.faults.push_back(std::move(fault.fault));
  return record;
}

std::vector<std::string> KeysOf(const StoredJob& stored) {
  std::vector<std::string> keys = stored.unreadable;
  const JobId& job = stored.id;
  if (stored.whole || stored.submission) keys.push_back(KeyOf(JobSubmission{job}));
  if (stored.status) keys.push_back(KeyOf(JobStatusRecord{job}));
  if (stored.grant) keys.push_back(KeyOf(JobGrantRecord{job, {}, {}}));
  if (stored.unreleased) keys.push_back(KeyOf(JobUnreleasedRecord{job, {}}));
  for (const JobExitsRecord& packed : stored.packed)
    keys.push_back(KeyOf(JobExitsRecord{job, packed.first, {}}));
  for (const StoredJob::Exit& exit : stored.exits) keys.push_back(KeyOf(JobExitRecord{job, exit.index, {}}));
  for (const JobFaultRecord& fault : stored.faults)
    keys.push_back(KeyOf(JobFaultRecord{job, {.generation = fault.fault.generation}}));
  return keys;
}

JobStatusRecord StatusRecordOf(const JobRecord& record, size_t packed) {
  JobStatusRecord status{.job = record.id, .status = record};
  if (record.grant) status.grant = record.grant->generation;
  status.exits = static_cast<int>(record.exits.size());
  status.packed = static_cast<int>(packed);
  for (const FaultRecord& fault : record.faults) status.faults.push_back(fault.generation);
  status.unreleased = static_cast<int>(record.unreleased.size());
  return status;
}

}  // namespace gtrain::core
