// HeadCore: everything the head decides. PURE: no threads, sockets, files, clocks, env.
//
// One JobRecord per job is the durable truth, stored as several records (job_records.h); nodes, live ranks,
// log tails and open questions are rebuilt from what agents say. Effects come in order; Outbox decides when
// each may leave. docs/protocols/control-plane.md tells the conversation; golden traces in tests/golden show
// it.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "job/spec/job_spec.h"
#include "runtime/core/values/effects.h"
#include "runtime/core/values/job_records.h"
#include "topology/topology.h"

namespace gtrain::core {

// Begin the reason of a generation that ends to go on with more ranks, or with fewer.
inline constexpr char kGrows[] = "it grows from ";
inline constexpr char kShrinks[] = "it shrinks from ";
// Begins the cause of a fault of a planned resize; what happened follows.
inline constexpr char kGoesBack[] = "it goes back to ";

struct HeadConfig {
  ClusterId cluster;
  std::string version;  // of gtrain, for people
  int protocol = kProtocolVersion;
  bool local = false;           // the user's own local cluster: one node, oversubscribing cpus is allowed
  bool exit_when_idle = false;  // stop `idle_linger` after the last job ended and the last request
  // How many nodes belong to the cluster, if known: once that many have joined, a job that fits on
  // none of them fails at once; before, it waits. The local cluster knows it is 1.
  std::optional<int> expected_nodes;
  // What its machines are made of and how they hang together, which grants follow; null: what the labels of
  // nodes say, and without them grants are packed.
  std::shared_ptr<const topology::Topology> topology;

  absl::Duration heartbeat_interval = absl::Seconds(1);  // these three: SetNodeTimeout
  absl::Duration suspect_after = absl::Seconds(3);
  absl::Duration dead_after = absl::Seconds(10);
  // Silence of an agent alone is suspicion for this long while its ranks are seen to work on, or while no
  // other node could take the job: the agent may be restarting beside healthy ranks (fault P4).
  absl::Duration agent_grace = absl::Seconds(60);
  // A node that dies twice within flap_decay gets no ranks for quarantine_min, doubling with each death (N5).
  absl::Duration flap_decay = absl::Hours(1);
  absl::Duration quarantine_min = absl::Minutes(1);
  absl::Duration quarantine_max = absl::Hours(1);
  // The time from the first report of a broken link to the decision which node the job does without, and the
  // time for which it does (fault W5). Both sides of a link report within link_settle.
  absl::Duration link_settle = absl::Seconds(5);
  absl::Duration avoid_for = absl::Minutes(10);
  absl::Duration rejoin_window = absl::Seconds(20);  // after a head restart nobody is declared dead before
  absl::Duration fence_after = absl::Seconds(120);   // told to agents: lease of ranks without head contact
  absl::Duration fence_margin = absl::Seconds(10);   // from the end of a lease to that of the last rank
  absl::Duration grow_after = absl::Seconds(30);     // room that a job may grow into has been there as long
  absl::Duration grow_in_place_after = absl::Seconds(10);  // likewise, where processes go on
  // The time from failed growth to the next that no person asked for, doubling with each failure in a row.
  absl::Duration grow_again_after = absl::Minutes(10);
  absl::Duration reform_grace = absl::Seconds(3);  // TERM to KILL when another generation follows
  absl::Duration gone_margin = absl::Seconds(15);  // added to the grace before a node counts as not releasing
  absl::Duration start_timeout = absl::Seconds(60);  // grant to RanksStarted
  // Grant to the joining of processes that go on in it, and five steps more: one may be in the middle of its
  // step when it hears of the end.
  absl::Duration return_timeout = absl::Seconds(60);
  absl::Duration keep_wait = absl::Minutes(10);  // processes wait so long for a generation that finds no room
  absl::Duration query_timeout = absl::Seconds(10);    // AgentQuery to AgentAnswer
  absl::Duration events_wait_max = absl::Seconds(30);  // long poll
  absl::Duration client_lease = absl::Seconds(60);     // end_with_client: silence that ends the job
  absl::Duration idle_linger = absl::Seconds(10);
  // A rank that asks to be run again (exit code 75) may do so because of another one, whose own end takes a
  // moment more: it is waited for before the ranks are ended.
  absl::Duration cause_grace = absl::Seconds(1);
  absl::Duration recovery_window = absl::Hours(1);  // after a restore or recover: agents' word is taken

  // Plans of so many ranks and more are made beside the loop (plans.h).
  int plan_beside_from = 1024;
  // So many agents, and further ones go through others, which have relay_children each (relays.h). 0: never.
  int relay_from = 0;
  int relay_children = 64;
  // What a relay says of a child counts for so long after the child's own last word.
  absl::Duration relay_believed = absl::Seconds(60);

  int jobs_max = 10'000;                           // live and finished
  size_t jobs_bytes_max = 256 << 20;               // of all that is held of those that are over
  size_t live_jobs_bytes_per_user_max = 64 << 20;  // of the live ones of one user
  int live_jobs_max = 1'000;
  int live_jobs_per_user_max = 500;      // of those; not on a local cluster
  int requests_max = 10'000;             // remembered answers
  int requests_per_key_max = 2'500;      // of those, the newest of one client
  int polls_max = 10'000;                // clients that wait for events
  int polls_per_user_max = 1'000;        // of those
  int queries_max = 2'000;               // log reads and commands that agents are asked for
  int queries_per_user_max = 500;        // of those
  int notes_burst = 60;                  // of a job's ranks, told as events; then one a second
  int samples_burst = 500;               // of a job's records of samples; then one a second
  int events_kept_max = 1'000;           // a job, in memory
  size_t tail_bytes_max = 64 << 10;      // a rank and stream
  size_t tails_bytes_max = 16 << 20;     // all together
  size_t exchange_bytes_max = 64 << 20;  // open bootstrap blobs of a job

  // Tests and the simulator: every NextDeadline is compared with what a look at everything says.
  bool check_deadlines = false;

  // Canonical YAML -> JobSpec (job/spec); injected so that the core needs no YAML library.
  std::function<absl::StatusOr<spec::JobSpec>(absl::string_view)> parse_job;
  // Whether a record can be read back when it is stored as it is; null: always. A user's request is checked
  // with it before it is accepted.
  std::function<absl::Status(const Record&)> check_record;
  // A text that only a head of this cluster can make about an epoch, different at each start, and whether a
  // text is such a proof. Without them no head ever steps down (fault H9).
  std::function<std::string(HeadEpoch)> prove_epoch;
  std::function<bool(HeadEpoch, const std::string&)> proves_epoch;
  // Encodes a grant in the bytes in which it is sent, with a proof that only a head of this cluster can make;
  // and checks whether such a proof is ours. Without them, nothing is sealed and the descriptions of agents
  // are believed.
  std::function<GrantSeal(const GenerationGrant&)> seal_grant;
  std::function<bool(const GrantSeal&)> proves_grant;
  // The secret that opens the copies of a job's checkpoints on its machines: 64 hex digits, always the same
  // ones.
  std::function<std::string(const JobId&)> near_secret;
};

// A machine that is silent for `timeout`, of kNodeTimeoutMin to kNodeTimeoutMax, is lost. Agents speak ten
// times in that time, or each second: at n nodes the head hears n / interval words a second.
inline constexpr absl::Duration kNodeTimeoutMin = absl::Milliseconds(300), kNodeTimeoutMax = absl::Minutes(1);
void SetNodeTimeout(absl::Duration timeout, HeadConfig& config);

enum class NodeState { kUnknown, kAlive, kSuspect, kDead };

// For status pages, golden traces and checkers.
struct HeadSnapshot {
  struct Job {
    JobId id;
    JobState state;
    std::string reason;
    Generation generation;
    Generation revoked;
    Timeline timeline;
    std::vector<NodeId> rank_nodes;  // of the granted generation, index = rank
    int restarts = 0;
  };
  struct Node {
    NodeId id;
    std::string hostname;
    NodeState state;
    bool leaving = false;
    bool barred = false;  // leaves, is quarantined, or has a process that cannot be ended
  };
  HeadEpoch epoch;
  std::vector<Job> jobs;
  std::vector<Node> nodes;
};

// Counters for metrics; only ever grow.
struct HeadCounters {
  uint64_t steps = 0;
  uint64_t denied = 0;           // requests without the right role
  uint64_t stale_dropped = 0;    // messages of an old generation or of a node that never said hello
  uint64_t refused = 0;          // hellos
  uint64_t deduplicated = 0;     // repeated client requests
  uint64_t pauses_survived = 0;  // own pauses that would have looked like deaths (fault H12)
};

class HeadState;

// Loop-owned, not thread-safe, never blocks.
class HeadCore {
 public:
  HeadCore(HeadConfig config, Rng rng);
  ~HeadCore();
  HeadCore(const HeadCore&) = delete;
  HeadCore& operator=(const HeadCore&) = delete;

  // Called first, exactly once: empty records make a new cluster, others continue it. Persists HeadEpoch+1;
  // serve only when that is durable. Jobs of which a record was set aside or is missing are taken up as the
  // agents that hold them describe them. FailedPrecondition: the records are another cluster's. DataLoss: a
  // record contradicts another. `wall` is the wall-clock time at `now`; the age of a fault and the run time
  // of a job are counted by it across a restart.
  absl::StatusOr<StepResult> Recover(StoredRecords stored, Instant now, absl::Time wall);

  StepResult Step(const HeadEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const;
  HeadSnapshot Snapshot() const;
  // The record of a job as it is to be stored; nullptr: no such job. For checkers.
  const JobRecord* RecordOf(const JobId& job) const;

  HeadEpoch epoch() const;
  // Jobs that are over, oldest first, and where their results lie; empty for jobs of older versions, which
  // wrote none.
  std::vector<std::pair<JobId, std::string>> Finished() const;
  // The result file that would be written now of one of these jobs; nullopt: it is forgotten.
  std::optional<WriteResult> ResultOf(const JobId& job) const;
  // Newest route of a node's key; nullptr when it has none.
  const std::string* RouteOf(const NodeId& node) const;
  const HeadCounters& counters() const;

 private:
  std::unique_ptr<HeadState> state_;
};

}  // namespace gtrain::core
