#include "runtime/core/values/records.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
namespace {

struct KeyVisitor {
  std::string operator()(const ClusterRecord&) const { return "cluster"; }
  std::string operator()(const NodeRecord& r) const { return absl::StrCat("node/", r.id.value); }
  std::string operator()(const JobRecord& r) const { return absl::StrCat("job/", r.id.value); }
  std::string operator()(const JobSubmission& r) const { return absl::StrCat("job/", r.id.value); }
  std::string operator()(const JobStatusRecord& r) const {
    return absl::StrCat("job/", r.job.value, "/status");
  }
  std::string operator()(const JobGrantRecord& r) const {
    return absl::StrCat("job/", r.job.value, "/grant");
  }
  std::string operator()(const JobExitRecord& r) const {
    return absl::StrCat("job/", r.job.value, "/exit/", r.index);
  }
  std::string operator()(const JobExitsRecord& r) const {
    return absl::StrCat("job/", r.job.value, "/exits/", r.first);
  }
  std::string operator()(const JobFaultRecord& r) const {
    return absl::StrCat("job/", r.job.value, "/fault/", r.fault.generation.value);
  }
  std::string operator()(const JobUnreleasedRecord& r) const {
    return absl::StrCat("job/", r.job.value, "/unreleased");
  }
  std::string operator()(const RequestRecord& r) const {
    return absl::StrCat("request/", r.client_key, "/", r.request_id);
  }
  std::string operator()(const CheckpointRecord& r) const { return absl::StrCat("checkpoint/", r.job.value); }
};

}  // namespace

std::string KeyOf(const Record& record) { return std::visit(KeyVisitor{}, record); }

const char* Name(JobState state) {
  switch (state) {
    case JobState::kQueued:
      return "QUEUED";
    case JobState::kWaiting:
      return "WAITING";
    case JobState::kStarting:
      return "STARTING";
    case JobState::kRunning:
      return "RUNNING";
    case JobState::kReconfiguring:
      return "RECONFIGURING";
    case JobState::kSucceeded:
      return "SUCCEEDED";
    case JobState::kFailed:
      return "FAILED";
    case JobState::kCancelled:
      return "CANCELLED";
  }
  return "UNKNOWN";
}

const char* Name(ExitCause cause) {
  switch (cause) {
    case ExitCause::kExited:
      return "exited";
    case ExitCause::kSignal:
      return "signal";
    case ExitCause::kOom:
      return "oom";
    case ExitCause::kStopped:
      return "stopped";
    case ExitCause::kStartFailed:
      return "start-failed";
    case ExitCause::kAddressInUse:
      return "address-in-use";
    case ExitCause::kLost:
      return "lost";
  }
  return "unknown";
}

const char* Name(NoticeKind kind) {
  switch (kind) {
    case NoticeKind::kNone:
      return "none";
    case NoticeKind::kAtRisk:
      return "at-risk";
    case NoticeKind::kFreeze:
      return "freeze";
    case NoticeKind::kLeave:
      return "leave";
  }
  return "unknown";
}

void Keep(JobRecord& record, const GenerationGrant& grant) {
  for (const std::vector<NodePlace>* places : {&grant.nodes, &grant.holders}) {
    for (const NodePlace& place : *places) {
      if (std::find(record.kept.begin(), record.kept.end(), place.node) == record.kept.end())
        record.kept.push_back(place.node);
    }
  }
}

const char* Name(FaultKind kind) {
  switch (kind) {
    case FaultKind::kCrash:
      return "crash";
    case FaultKind::kOom:
      return "oom";
    case FaultKind::kInfrastructure:
      return "infrastructure";
    case FaultKind::kSaved:
      return "saved";
    case FaultKind::kAddressInUse:
      return "address-in-use";
    case FaultKind::kPreempted:
      return "preempted";
    case FaultKind::kStorage:
      return "storage";
  }
  return "unknown";
}

}  // namespace gtrain::core
