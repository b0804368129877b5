// HeadModel: the jobs, the nodes and the cluster's record, as plain data that all parts of the head read and
// write. PURE. Private to runtime/core/head.
//
// HeadState owns it, and only the loop's thread uses it. A part that changes something that is stored tells
// HeadContext (Write, Dirty).
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/job.h"
#include "runtime/core/head/node.h"
#include "runtime/core/values/log_tails.h"

namespace gtrain::core {

struct HeadModel {
  explicit HeadModel(const HeadConfig& config) : tails(config.tail_bytes_max, config.tails_bytes_max) {}

  HeadEpoch epoch() const { return cluster.epoch; }
  Job* FindJob(const JobId& id);  // nullptr: there is none
  const Job* FindJob(const JobId& id) const;
  // The jobs that are not final, in order of submission. O(live jobs).
  std::vector<Job*> LiveJobs();
  // Whether each node of the newest generation was heard within `time`: who runs is not interrupted of free
  // will while a node may be lost, for the others would wait for it. O(nodes of the job).
  bool AllAreHeard(const Job& job, absl::Duration time, Instant now) const;
  // The node of this id, made if there is none; and no longer one.
  Node& AddNode(const NodeId& id);
  void DropNode(const NodeId& id);
  // nullptr: there is none. Each word of a node begins with this, so it takes no search through the map.
  Node* FindNode(const NodeId& id) const {
    const auto it = by_id_.find(id);
    return it == by_id_.end() ? nullptr : it->second;
  }
  std::string Hostname(const NodeId& id) const;  // the id of a node that is not known

  ClusterRecord cluster;
  std::map<NodeId, Node> nodes;  // changed by AddNode and DropNode alone
  std::map<JobId, Job> jobs;
  std::map<uint64_t, JobId> job_order;  // by number
  std::map<uint64_t, Job*> live_jobs;   // by number; what ended since LiveJobs() is there, too
  LogTails tails;
  std::set<NodeId> quarantined;  // those that are, and some that were
  uint64_t revisions = 0;        // the newest Node::revision
  bool schedule = false;         // something changed that may let a job start
  // Jobs that are tried in this step, though a pass over all is held back: submitted, or between two
  // generations with the place that they had.
  std::vector<JobId> fresh;

  std::optional<std::string> store_low;  // why no new job is taken
  bool store_full = false;

  Instant active_at;  // last request or end of a job
  bool any_job_seen = false;
  bool shutdown_when_idle = false;
  bool stopped = false;

 private:
  absl::flat_hash_map<NodeId, Node*> by_id_;
};

}  // namespace gtrain::core
