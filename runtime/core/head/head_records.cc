#include "runtime/core/head/head_records.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "runtime/core/head/recovery.h"

namespace gtrain::core {
namespace {

std::vector<Generation> GenerationsOf(const std::vector<FaultRecord>& faults) {
  std::vector<Generation> generations;
  for (const FaultRecord& fault : faults) generations.push_back(fault.generation);
  return generations;
}

bool Contains(const std::vector<Generation>& generations, Generation generation) {
  return std::find(generations.begin(), generations.end(), generation) != generations.end();
}

std::string ExitKey(const JobId& job, size_t index) {
  return KeyOf(JobExitRecord{job, static_cast<int>(index)});
}

std::string FaultKey(const JobId& job, Generation generation) {
  return KeyOf(JobFaultRecord{job, {.generation = generation}});
}

}  // namespace

HeadRecords::HeadRecords(HeadContext& context, HeadModel& model, Recovery& recovery)
    : context_(context), model_(model), recovery_(recovery) {}

// Leaves `jobs` empty: what is taken out of a job makes room for the next.
absl::Status HeadRecords::LoadJobs(std::map<JobId, StoredJob>& jobs) {
  for (; !jobs.empty(); jobs.erase(jobs.begin())) {
    auto& [id, stored] = *jobs.begin();
    const bool whole = stored.whole.has_value();
    std::vector<std::string> obsolete = whole ? KeysOf(stored) : std::vector<std::string>();
    const size_t packed = stored.status ? static_cast<size_t>(stored.status->packed) : 0;
    absl::StatusOr<JobRecord> record = JoinJob(std::move(stored));
    if (!record.ok()) {
      context_.Say(absl::StrCat(id.value, " is set aside: ", record.status().message()));
      recovery_.SetAside(id, KeysOf(jobs.begin()->second));  // an error leaves it as it was
      continue;
    }
    if (record->revoked > record->generation) {
      return absl::DataLossError(
          absl::StrCat("record of job ", id.value, " has revoked what was never granted"));
    }
    if (record->owner.empty()) record->owner = record->client_key;  // of an older version
    model_.job_order[record->number] = id;
    Job& job = model_.jobs[id];
    job.record = *std::move(record);
    if (whole) {  // all of it is written with its next change, in place of this
      job.written.unreleased = job.record.unreleased.empty();
      job.written.obsolete = std::move(obsolete);
      continue;
    }
    job.written.submission = job.written.status = true;
    if (job.record.grant) job.written.grant = job.record.grant->generation;
    job.written.exits = job.record.exits.size();
    job.written.packed = packed;
    job.written.faults = GenerationsOf(job.record.faults);
  }
  return absl::OkStatus();
}

void HeadRecords::WriteDirtyJobs(Instant now) {
  for (const JobId& id : context_.TakeDirty()) {
    Job* job = model_.FindJob(id);
    if (job == nullptr) continue;
    job->record.run_time = job->RunTime(now);
    job->record.run_time_at = job->run_mark ? context_.Wall(now) : absl::InfinitePast();
    if (job->run_mark) job->run_mark = now;
    // All that a step changes happens at one moment.
    job->goodput.Advance(now);
    job->goodput.SetPlaces(PlacesOf(*job));
    job->record.goodput = job->goodput.record();
    job->record.goodput.at = context_.Wall(now);
    WriteJob(*job);
  }
}

void HeadRecords::WriteJob(Job& job) {
  const JobRecord& record = job.record;
  const JobId& id = record.id;
  JobWritten& written = job.written;
  // A write below under one of these keys replaces the deletion.
  for (std::string& key : std::exchange(written.obsolete, {})) context_.Delete(std::move(key));
  if (!std::exchange(written.submission, true)) context_.Write(JobSubmission(record));

  if (record.grant && written.grant != record.grant->generation) {
    written.grant = record.grant->generation;
    context_.Write(JobGrantRecord{id, *record.grant, record.kept});
    DeleteExits(job);  // what is written below in the place of one replaces its deletion
    written.exits = written.packed = 0;
  }
  WriteExits(job);

  std::vector<Generation> faults = GenerationsOf(record.faults);
  for (const Generation generation : written.faults) {
    if (!Contains(faults, generation)) context_.Delete(FaultKey(id, generation));
  }
  const bool newest = std::exchange(written.newest_fault, true);
  for (const FaultRecord& fault : record.faults) {
    const bool changed = &fault == &record.faults.back() && !newest;
    if (changed || !Contains(written.faults, fault.generation)) context_.Write(JobFaultRecord{id, fault});
  }
  written.faults = std::move(faults);

  if (!std::exchange(written.unreleased, true)) {
    JobUnreleasedRecord unreleased{id, record.unreleased};
    if (unreleased.nodes.empty()) {
      context_.Delete(KeyOf(unreleased));
    } else {
      context_.Write(std::move(unreleased));
    }
  }
  context_.Write(StatusRecordOf(record, written.packed));
  written.status = true;
}

// When the job is over all that is there is packed, once: exits that come after that are few.
void HeadRecords::WriteExits(Job& job) {
  const JobRecord& record = job.record;
  const JobId& id = record.id;
  JobWritten& written = job.written;
  if (IsFinal(record.state) && written.packed == 0 && !record.exits.empty()) {
    for (size_t i = 0; i < written.exits; ++i) context_.Delete(ExitKey(id, i));
    for (size_t first = 0; first < record.exits.size(); first += kExitsPerRecord) {
      const auto begin = record.exits.begin() + static_cast<ptrdiff_t>(first);
      const size_t count = std::min(kExitsPerRecord, record.exits.size() - first);
      context_.Write(
          JobExitsRecord{id, static_cast<int>(first), {begin, begin + static_cast<ptrdiff_t>(count)}});
    }
    written.exits = written.packed = record.exits.size();
  }
  for (; written.exits < record.exits.size(); ++written.exits) {
    context_.Write(JobExitRecord{id, static_cast<int>(written.exits), record.exits[written.exits]});
  }
}

void HeadRecords::DeleteExits(const Job& job) {
  const JobId& id = job.record.id;
  for (size_t first = 0; first < job.written.packed; first += kExitsPerRecord)
    context_.Delete(KeyOf(JobExitsRecord{id, static_cast<int>(first), {}}));
  for (size_t i = job.written.packed; i < job.written.exits; ++i) context_.Delete(ExitKey(id, i));
}

void HeadRecords::DeleteJob(const Job& job) {
  const JobId& id = job.record.id;
  const JobWritten& written = job.written;
  for (const std::string& key : written.obsolete) context_.Delete(key);
  if (!written.status) return;
  context_.Delete(KeyOf(JobSubmission{id}));
  context_.Delete(KeyOf(JobStatusRecord{id}));
  if (written.grant != Generation()) context_.Delete(KeyOf(JobGrantRecord{id, {}, {}}));
  DeleteExits(job);
  for (const Generation generation : written.faults) context_.Delete(FaultKey(id, generation));
  if (!written.unreleased || !job.record.unreleased.empty())
    context_.Delete(KeyOf(JobUnreleasedRecord{id, {}}));
}

}  // namespace gtrain::core
