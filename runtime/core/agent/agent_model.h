// AgentModel: the jobs that run or have left something on this machine, as plain data that all parts of the
// agent read and write. PURE. Private to runtime/core/agent.
//
// AgentCore owns it, and only the loop's thread uses it.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/core/agent/rank_reports.h"

namespace gtrain::core {

struct AgentTail {
  std::string text;  // at most 64 KiB
  uint64_t end_offset = 0;
  bool changed = false;
  size_t unsent = 0;        // bytes at its end that were not told since the welcome
  uint64_t next_piece = 0;  // LogTail::piece of what is told next
  LineCutter lines{16 << 10};
};

struct AgentRank {
  RankStatus status;
  bool status_changed = false;
  bool sdk = false;
  std::optional<RankExit> exit;
  bool acked = false;
  AgentTail out, err;
  LineCutter report_lines{16 << 10};
  uint64_t dropped_told = 0;
  int out_refused = 0, err_refused = 0;  // errno of the disk that takes no log of it now
  double samples = 0;                    // since `samples_at`
  std::optional<Instant> samples_at;
  // Whether it rests (idleness.h).
  Instant heard_at;                              // it wrote, or its step grew
  std::optional<uint64_t> cpu_ms;                // as seen last
  Instant seen_at, rests_since;                  // since then it used no processor time
  std::map<uint64_t, uint64_t> exchange_relays;  // sequence -> relay id to acknowledge
  // The rank's last message about its storage, which goes with its exit. The keeper keeps the message until
  // there is another, so that an agent which restarts hears it again.
  std::string storage;
  std::optional<uint64_t> storage_relay;
};

// What a rank said of its data. It goes to each head until one has acknowledged the rank's exit, which
// follows behind it, and the keeper holds it for an agent that restarts.
struct AgentRecord {
  AgentNote note;
  uint64_t relay = 0;
};
// Of a generation. Programs say two for each of their ledgers; of more the newest are kept.
inline constexpr size_t kRecordsMax = 64;

struct AgentExchange {
  std::map<int, std::string> blobs;  // of local ranks
};

struct AgentGeneration {
  Generation generation;
  Timeline timeline;
  std::string run_dir;
  int world_size = 0;
  GenerationGrant grant;
  GrantSeal seal;                              // as it came, for a head that lost its records
  std::optional<CheckpointReport> checkpoint;  // newest
  std::map<std::string, AgentNote> notes;      // the newest of each kind that ranks said of themselves
  std::vector<AgentRecord> records;            // kSamplesNote, in the order in which they were said
  spec::JobSpec spec;
  ProgressPatterns patterns;
  std::map<int, std::string> nics;                      // RankStatus::nics of each local one
  std::map<int, AgentRank> ranks;                       // local ones, and behind them those that wait
  std::map<uint64_t, AgentExchange> exchanges;          // open
  std::map<uint64_t, std::vector<std::string>> tables;  // newest few, for repeats
  bool stepped = false;                                 // one of its ranks has told a step
  bool asked_to_pause = false;                          // the head waits for its rank 0
  bool ended = false;                                   // we told the keeper
  uint32_t noticed = 0;                                 // the newest notice that its ranks know
  bool gone = false;
  bool clean = true;
  bool gone_told = false;
  std::string gone_message;
  Instant started;
  Instant looked_at;  // at what its ranks do

  bool IsMember(int rank) const { return world_size == 0 || rank < world_size; }
  // True while what the rank said of its data has to reach the head before its exit, which may end the job.
  bool OwesRecords(int rank) const;
  // Of `ranks`, those that have a part in it. Costs a step for each of the others.
  size_t Members() const;
};

struct PreparedStart {
  StartGeneration start;
  StartFacts facts;
};

struct AgentJob {
  Generation revoked;
  Generation over;  // the newest that was here and is gone, as the head was told
  std::string run_dir;
  bool stopping = false;                    // a person's stop was heard
  bool forgotten = false;                   // leave once nothing is left of it
  bool keeper_leaves = false;               // told to go with nothing left; a grant waits for the next keeper
  std::optional<PreparedStart> next;        // that waits
  std::vector<ProcessId> kept;              // wait here for another generation
  std::vector<ProcessId> coming;            // likewise, and have not come up yet
  std::map<ProcessId, std::string> nics;    // RankStatus::nics of those that were started last or went on
  std::optional<GenerationGone> owes_gone;  // of a generation that never ran here, until older ones are gone
  std::map<Generation, AgentGeneration> generations;

  bool Waits() const { return !kept.empty() || !coming.empty(); }
  void LoseWaiting() {
    kept.clear();
    coming.clear();
  }
};

inline constexpr size_t kJobsMax = 4096;  // remembered; the oldest without a live generation goes

struct AgentModel {
  // The record of the job, made if there is none.
  AgentJob& RecordOf(const JobId& job);
  AgentGeneration* Find(const JobId& job, Generation generation);
  AgentRank* Find(const JobId& job, Generation generation, int rank);
  bool HasLiveGeneration() const;
  // The generations that are here and those that the head has not acknowledged, as a hello tells them. A rank
  // of which the head has to hear something before its exit counts as one that runs.
  std::vector<HeldGeneration> Held() const;
  std::vector<KeptProcesses> Kept() const;

  std::map<JobId, AgentJob> jobs;
  std::vector<JobId> job_order;         // oldest first, bounds jobs
  std::optional<absl::Status> leaving;  // with this, once no generation lives here
};

}  // namespace gtrain::core
