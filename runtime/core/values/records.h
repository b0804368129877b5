// The records that the head keeps on disk, as plain values. PURE. runtime/wire encodes exactly these structs;
// the key of each record is KeyOf(record). Nothing here is an Instant: monotonic time does not survive a
// restart, so durations are what is stored.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "runtime/core/values/goodput.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// Edges are checked by CanMove in job_state.h, which also draws the machine.
enum class JobState {
  kQueued,
  kWaiting,
  kStarting,
  kRunning,
  kReconfiguring,
  kSucceeded,
  kFailed,
  kCancelled
};

// What happens to the job once no process of its revoked generation is left.
enum class Ending {
  kNone,     // nothing is being ended
  kReform,   // restart_policy decides about another generation
  kReplace,  // another generation at once, free of charge (address in use, node lost)
  kCancel,   // a person's stop
  kFail,     // time limit, budget known to be spent
};

// Which budget a generation's failure was charged to.
// kStorage: a rank could not read the storage of its checkpoints. The job waits for the storage, and nothing
// is charged.
enum class FaultKind { kCrash, kOom, kInfrastructure, kSaved, kAddressInUse, kPreempted, kStorage };

// The first fault of one generation, with the evidence people see.
struct FaultRecord {
  Generation generation;
  FaultKind kind = FaultKind::kCrash;
  int rank = -1;  // -1: a node, not a rank
  NodeId node;
  std::string hostname;
  ExitCause cause = ExitCause::kExited;
  int exit_code = 0;
  int signal = 0;
  std::string message;          // one sentence
  std::string tail;             // last lines of stderr, at most 16 KiB
  std::string signature;        // equal for "the same error"
  std::optional<int64_t> step;  // where the generation was, if it ever reported one
  bool progressed = false;      // it passed a first step or committed a checkpoint
  // For kStorage: generations in a row that met it without progress between them; they share this record.
  int tries = 1;
  // The highest step of a checkpoint that the job had committed when this generation was over, or that
  // processes had reached which went on in the next one.
  std::optional<int64_t> committed;
  absl::Time at = absl::InfinitePast();  // by the clock on the wall of the head that saw it; past: not known
  bool operator==(const FaultRecord&) const = default;
};

// A node that a job does without for a while, because another of its nodes cannot reach it (fault W5).
struct AvoidedNode {
  NodeId node;
  std::string why;  // one sentence
  bool operator==(const AvoidedNode&) const = default;
};

// Key "job/<id>". The submission; changes only when a job is taken up again from its ranks.
struct JobSubmission {
  JobId id;
  uint64_t number = 0;  // order of submission
  std::string name;
  std::string spec_text;  // canonical YAML
  std::map<std::string, std::string> env;
  std::string run_dir;
  std::string resume;      // as the client asked for generation 1
  std::string client_key;  // who submitted
  std::string owner;       // whose job it is: OwnerName in authority.h
  std::string request_id;
  bool end_with_client = false;
  bool takeover = false;      // as the client asked: GenerationGrant::takeover
  bool takeover_own = false;  // and no administrator asked: from no job of another user that has run
  absl::Time submitted_at = absl::InfinitePast();  // by the head's clock on the wall; past: not known
  bool operator==(const JobSubmission&) const = default;
};

// The fields that change with nearly every event of a job. Their size is bounded, however many ranks it has.
struct JobStatus {
  JobState state = JobState::kQueued;
  std::string reason;     // one sentence: why this state
  Generation generation;  // newest granted
  Generation revoked;     // every generation <= this is over
  Timeline timeline;
  Ending ending = Ending::kNone;
  std::string ending_reason;
  int restarts = 0;                               // generations that ended in a failure
  absl::Duration run_time;                        // since the first grant, for limits.time
  absl::Time run_time_at = absl::InfinitePast();  // when that was so, as FaultRecord::at
  // A rank of any generation has joined: the program uses the SDK, and its commits keep older generations
  // out.
  bool sdk = false;
  std::optional<int> exit_code;  // of a finished job
  uint64_t event_sequence = 0;   // events up to here may have been given out
  std::vector<AvoidedNode> avoided;
  bool waits_for_storage = false;  // WAITING until the next try after a storage fault; its nodes stay its own
  absl::Time started_at = absl::InfinitePast();  // first granted, and over: as submitted_at
  absl::Time ended_at = absl::InfinitePast();
  std::optional<int64_t> last_step;  // what ranks of earlier generations, or of a finished job, said last
  std::optional<double> last_loss;
  int size_wanted = 0;    // of ranks, or nodes where the job file counts these; 0: as many as it allows
  bool diverged = false;  // with last_loss: the loss said last was not a finite number
  GoodputRecord goodput;
  // How the job ends, or has ended, and why, once the ranks that are left of it have saved; kNone: not so.
  Ending after_save = Ending::kNone;
  std::string after_save_reason;
  bool saves = false;  // the newest generation is there for that, and may have too few ranks
  bool operator==(const JobStatus&) const = default;
};

// The whole truth about one job. It is stored as the records below, so that what a change costs does not grow
// with the job (job_records.h). Older heads stored it as one record with key "job/<id>", which is still read.
struct JobRecord : JobSubmission, JobStatus {
  std::optional<GenerationGrant> grant;  // the newest; spec_text, client_env and run_dir left empty
  std::vector<RankExit> exits;           // of `grant`, in the order they were heard; tails cut to 2 KiB
  std::vector<NodeId> unreleased;        // nodes not yet known to be free of processes of <= revoked
  std::vector<NodeId> kept;  // that hold a keeper or copies of this job: they get ForgetJob when it ends
  std::vector<FaultRecord> faults;  // newest last, at most one a generation and 32 in all
  bool operator==(const JobRecord&) const = default;
};

// Key "job/<id>/status". Also says which other records the job has, so that none can be missing unnoticed.
struct JobStatusRecord {
  JobId job;
  JobStatus status;
  Generation grant;                // of its JobGrantRecord; 0: it has none
  int exits = 0;                   // how many
  int packed = 0;                  // how many of these in JobExitsRecords, the others in JobExitRecords
  std::vector<Generation> faults;  // of its JobFaultRecords, ascending
  int unreleased = 0;              // nodes in its JobUnreleasedRecord; 0: it has none
  bool operator==(const JobStatusRecord&) const = default;
};

// Key "job/<id>/grant". As long as the job has ranks; changes with each generation, and `kept` with it.
struct JobGrantRecord {
  JobId job;
  GenerationGrant grant;
  std::vector<NodeId> kept;
  bool operator==(const JobGrantRecord&) const = default;
};

// Key "job/<id>/exit/<index>". Never changes; deleted with the next grant, or when it is packed.
struct JobExitRecord {
  JobId job;
  int index = 0;  // in JobRecord::exits
  RankExit exit;
  bool operator==(const JobExitRecord&) const = default;
};

// Key "job/<id>/exits/<first>". Takes the place of the JobExitRecords of a job that is over: a head keeps
// jobs of the past by the thousand, and each record costs it time and memory at its start.
struct JobExitsRecord {
  JobId job;
  int first = 0;  // index of the first of them
  std::vector<RankExit> exits;
  bool operator==(const JobExitsRecord&) const = default;
};

// Key "job/<id>/fault/<generation>". Only that of the newest changes, when all exits are known.
struct JobFaultRecord {
  JobId job;
  FaultRecord fault;
  bool operator==(const JobFaultRecord&) const = default;
};

// Key "job/<id>/unreleased". Only while a generation is being ended.
struct JobUnreleasedRecord {
  JobId job;
  std::vector<NodeId> nodes;
  bool operator==(const JobUnreleasedRecord&) const = default;
};

// Key "node/<id>". The facts by which the head recognises a node after its own restart.
struct NodeRecord {
  NodeId id;
  Incarnation incarnation;
  std::string boot_id;
  std::string hostname;
  std::string address;
  std::string version;
  Inventory inventory;
  std::map<std::string, std::string> labels;
  bool unclean = false;  // a process survived SIGKILL there: not used until a new incarnation
  NodeNotice notice;     // of its cloud; gone with a new incarnation
  NodeNotice drain;      // by a person; stays until taken back
  bool operator==(const NodeRecord&) const = default;
};

// Key "cluster".
struct ClusterRecord {
  ClusterId cluster;
  HeadEpoch epoch;
  uint64_t next_job = 1;
  uint64_t next_request = 1;
  bool recovering = false;       // restored or lost records: adopt what agents describe (fault H8)
  bool accept_unsealed = false;  // of these also what has no seal, because an administrator said so
  HeadEpoch superseded;          // a newer head of this cluster was seen: serve no more (fault H9)
  bool operator==(const ClusterRecord&) const = default;
};

// Key "request/<client key>/<request id>". The first answer to a changing request, given again to
// a repeated one (fault H15).
struct RequestRecord {
  std::string client_key;
  std::string request_id;
  uint64_t number = 0;  // order, for dropping the oldest
  ClientReply reply;
  bool operator==(const RequestRecord&) const = default;
};

// Key "checkpoint/<job>". The newest committed checkpoint the head was told of; the manifest key in
// the store is the truth, this is an index.
struct CheckpointRecord {
  JobId job;
  Generation generation;
  Timeline timeline;
  int64_t step = 0;
  std::string manifest;
  uint64_t count = 0;  // committed so far
  bool operator==(const CheckpointRecord&) const = default;
};

using Record = std::variant<ClusterRecord, NodeRecord, JobRecord, RequestRecord, CheckpointRecord,
                            JobSubmission, JobStatusRecord, JobGrantRecord, JobExitRecord, JobFaultRecord,
                            JobUnreleasedRecord, JobExitsRecord>;

std::string KeyOf(const Record& record);

// Adds the machines of the grant to `kept`.
void Keep(JobRecord& record, const GenerationGrant& grant);

// One put (record) or delete (nullopt) of a batch that is applied atomically.
struct RecordWrite {
  std::string key;
  std::optional<Record> record;
  bool operator==(const RecordWrite&) const = default;
};

const char* Name(JobState state);   // "QUEUED"
const char* Name(ExitCause cause);  // "exited", "signal", ...
const char* Name(FaultKind kind);   // "crash", "oom", ...

}  // namespace gtrain::core
