// The options of the program and of the environment, merged once.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "checkpoint/engine/checkpoint.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/near_module.h"

namespace gtrain::ckpt {

// Value of an environment variable, nullopt when unset.
using Environment = std::function<std::optional<std::string>(const char* name)>;

// This process's own (engine/open.cc).
std::optional<std::string> ProcessEnvironment(const char* name);

enum class OnError {
  kWarn,   // a failed save is logged; training goes on
  kRetry,  // a shard that cannot be written is tried again, then as kWarn
  kFail,   // the next Save returns its error
};

// When ranks compare the hashes of what they hold alike (CheckpointOptions::verify_replicas).
struct VerifyReplicas {
  bool first = true;
  std::optional<int> every = 100;  // of the saves; the first one counts
};

enum class Resume {
  kIfSameJob,  // the newest, unless it is of a different job
  kLatest,     // the newest, whatever wrote it
  kFresh,      // only what this job wrote itself
  kStep,       // this step
  kUri,        // another directory, or one manifest of it
};

// Where this machine keeps copies of shards, and who has more.
struct NearPlace {
  std::string folder;
  uint64_t bytes_max = 0;             // of all jobs
  std::vector<port::NearPeer> peers;  // other machines of the job
  size_t holders = 0;                 // the first so many of them get copies of this machine's shards
  std::string secret;                 // for them
};

struct Settings {
  std::string uri;
  std::string node;  // of this machine's ranks; empty outside gtrain
  int keep = 3;
  std::optional<int64_t> every_steps;
  std::optional<absl::Duration> every;  // both unset: automatic
  OnError on_error = OnError::kWarn;
  absl::Duration commit_timeout = absl::Minutes(10);
  std::optional<CheckpointOptions::LastSave> last_save;
  std::optional<uint64_t> device;
  bool lazy = false;
  std::optional<NearPlace> near;
  std::function<absl::Status()> before_save;
  // With `every` automatic: since when this job has been running, as far as this machine knows.
  absl::Time job_began = absl::Now();
  Resume resume = Resume::kIfSameJob;
  int64_t resume_step = 0;                // with kStep
  std::string resume_uri;                 // with kUri: a directory
  std::optional<SaveId> resume_manifest;  // with kUri: this one of it
  Identity identity;                      // without the job, which the session knows
  bool read_only = false;
  bool takeover = false;
  int max_rollback = 1;
  // The most memory for the snapshots of all ranks of this job on one machine; unset: what the machine has
  // available.
  std::optional<uint64_t> memory_max;
  VerifyReplicas verify_replicas;
  // The newest checkpoint of this job that the head knows: a restore that does not find it stops (fault S7).
  std::optional<SaveId> newest;
  // Other jobs of the cluster that are not over. Unset outside gtrain and under agents that do not say.
  std::optional<std::set<std::string>> live_jobs;
};

// $GTRAIN_CHECKPOINT_* win over `options`: the job file speaks last. InvalidArgument names the variable.
absl::StatusOr<Settings> MergeSettings(const CheckpointOptions& options, const Environment& environment);

// Makes a location absolute, for programs of another working directory.
std::string AbsoluteLocation(const std::string& location);

// $GTRAIN_CHECKPOINT_NEAR and _PEERS, for a writer outside the rank too.
absl::StatusOr<std::optional<NearPlace>> ReadNear(const Environment& environment);

}  // namespace gtrain::ckpt
