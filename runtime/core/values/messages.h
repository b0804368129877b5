// Control-plane messages as plain values. PURE. The wire form is
// runtime/wire/control.capnp; docs/protocols/control-plane.md tells who sends what when.
//
// Authority never comes from a field here: the transport supplies the key-derived
// identity of the connection (Peer below) beside each message.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "net/port/peer.h"
#include "runtime/core/values/client_messages.h"
#include "runtime/core/values/inventory.h"
#include "runtime/core/values/relay_messages.h"

namespace gtrain::core {

inline constexpr int kProtocolVersion = 1;

using net::Peer;
using net::Role;

// ---------------------------------------------------------------- values

// Why a rank process ended, in the order of certainty.
enum class ExitCause {
  kExited,        // exit code
  kSignal,        // a signal nobody of ours sent
  kOom,           // killed by the kernel for memory (cgroup event seen)
  kStopped,       // ended by our own TERM/KILL on a stop, revoke or limit
  kStartFailed,   // never executed: message says why
  kAddressInUse,  // MASTER_PORT taken before start
  kLost,          // keeper died or node rebooted; exit status unknown
};

struct RankExit {
  JobId job;
  Generation generation;
  int rank = 0;
  int64_t pid = 0;
  ExitCause cause = ExitCause::kExited;
  int exit_code = 0;    // kExited
  int signal = 0;       // kSignal, kStopped
  std::string message;  // one sentence for people
  std::string tail;     // last lines of stderr, at most 64 KiB
  // The rank's newest note of kind `storage` before it ended; empty: its storage could be read. It travels
  // with the exit, so no loss or order of messages can part the two.
  std::string storage;
  // Fields of the rank's last status (RankStatus), which the next heartbeat would have reported.
  std::optional<int64_t> step;
  std::optional<double> loss;
  bool diverged = false;
  bool operator==(const RankExit&) const = default;
};

enum class RankState { kStarting, kRunning, kJoined, kExited };
// Whether the ranks of a program end a step together and stand still behind it when they are asked to
// (PauseRanks). One rank says it for all.
enum class RankPause { kNever, kMay, kPaused };

// Last known of a live rank; sent when it changed, at most once a heartbeat.
struct RankStatus {
  JobId job;
  Generation generation;
  int rank = 0;
  int64_t pid = 0;
  RankState state = RankState::kStarting;
  std::optional<int64_t> step;
  std::optional<double> loss;
  std::optional<double> samples_per_second;
  uint64_t collective_sequence = 0;  // last collective entered, for the hang verdict
  // The time in collectives that had to wait for other ranks, and the time since it joined, by the rank's own
  // clock: both or none.
  std::optional<double> waited_seconds, joined_seconds;
  // The time for which it has neither written nor stepped nor used the processor, when this was sent, and the
  // function of the kernel in which it waits (empty: unknown). Zero: it works, or has not rested for long.
  absl::Duration idle;
  std::string blocked_in;
  bool diverged = false;  // its newest loss is not a finite number, and `loss` is none
  bool stays = false;     // its program said that it can go on in another generation
  // The time for which checkpoints held it up since it joined, by its own clock; none of an older library.
  std::optional<double> stalled_seconds;
  RankPause pause = RankPause::kNever;
  // What the network libraries of its process were told to use when it was started: RDMA ports with commas
  // between, else an interface. Empty: nothing was said.
  std::string nics;
  bool operator==(const RankStatus&) const = default;
};

// A node's live generation of one job, for re-adoption after an agent or head restart.
struct HeldGeneration {
  JobId job;
  Generation generation;
  Generation revoked;  // highest revoked this node has seen for the job (0 = none)
  std::vector<RankStatus> live;
  std::vector<RankExit> exited;  // not yet acknowledged by a head
  bool stopping = false;         // one of those revokes was a person's stop
  bool operator==(const HeldGeneration&) const = default;
};

// A process of a rank that lives through generations (`elastic.mode: in-place`), by the rank as which it was
// started.
struct ProcessId {
  Generation generation;  // 0: none
  int rank = 0;
  auto operator<=>(const ProcessId&) const = default;
};

struct RankPlace {
  int rank = 0;
  int local_rank = 0;
  NodeId node;
  std::vector<int> cpus;  // hardware threads to bind to; empty = not bound
  std::vector<int> gpus;  // indices into the node's inventory
  // Goes on as this rank where the node still has it; else, and without one, a process is started.
  ProcessId process;
  // Of a process that waits and was a member: the part of the model that it holds, from 0 on. It is a member
  // again only as a rank r with r % MeshShape::model_ranks equal to that, for as long as it lives.
  std::optional<int> cell;
  bool operator==(const RankPlace&) const = default;
};

struct NodePlace {
  NodeId node;
  std::string address;  // data-plane address: the one whose socket reached the head
  std::string hostname;
  std::string zone, rack;  // its labels of these names
  int near_port = 0;       // where it serves copies of checkpoints; 0: nowhere
  std::string near_key;    // Z85, to expect there
  // Its position among the nodes in the order in which collectives go through them; 0 for all: that of their
  // lowest ranks.
  int fabric_order = 0;
  bool operator==(const NodePlace&) const = default;
};

struct CheckpointReport {
  JobId job;
  Generation generation;
  Timeline timeline;
  int64_t step = 0;
  std::string manifest;  // key of the committed manifest; empty for a program without the SDK
  std::string policy;    // how often the program saves and why, for people; may be empty
  bool operator==(const CheckpointReport&) const = default;
};

// One membership of one job: everything an agent needs to start its ranks.
struct GenerationGrant {
  JobId job;
  Generation generation;
  Timeline timeline;
  int restart_count = 0;                          // generations so far that ended in a failure
  std::string spec_text;                          // canonical YAML of the JobSpec
  std::map<std::string, std::string> client_env;  // inherited from the client, already filtered
  std::string run_dir;                            // where logs and reports go on each node
  // GTRAIN_RESUME: "latest", "fresh", a step, a uri, or empty: the identity rule decides. It is the user's
  // choice at the launch, and "latest" once a program without the SDK has a checkpoint.
  std::string resume;
  std::string master_address;
  int master_port = 0;
  int world_size = 0;
  std::vector<NodePlace> nodes;  // index = GROUP_RANK; also those where a rank only waits
  std::vector<RankPlace> ranks;  // index = rank
  // The agent does not use these; it gives them back to a head that has lost its records (fault H8).
  std::string client_key;
  std::string request_id;
  bool end_with_client = false;
  std::string owner;  // whose job it is; with the three above what a head that lost its records takes up
  // The secret that opens the copies of this job's checkpoints on all its machines: 64 hex digits, made by
  // the head, the same for each generation, in no record. Empty: the head knows none.
  std::string near_secret;
  // Machines outside the job that keep copies of its shards, or have some of the generation before, as
  // KeepCopies told them. The order says which of them keeps whose copies (near_peers.h).
  std::vector<NodePlace> holders;
  // The newest checkpoint that the head knows; only one with a manifest. A restore that does not find it
  // stops.
  std::optional<CheckpointReport> newest;
  bool takeover = false;  // the launch said --takeover: the ranks may take the directory from a live owner
  // This job, then the others of this cluster that are not over and may save, newest first, at most
  // kLiveJobsToldMax; empty: the head does not say. These are the jobs of the moment in which the grant
  // leaves; no record has them.
  std::vector<JobId> live_jobs;
  // Processes that have no part in this generation and come up beside it, for their place in the next one
  // (`elastic.mode: in-place`); numbered behind the ranks.
  std::vector<RankPlace> waiting;
  bool operator==(const GenerationGrant&) const = default;
};
// The place of a rank, or of one that waits. `number` is below the number of both.
inline const RankPlace& PlaceOfRank(const GenerationGrant& grant, int number) {
  const auto index = static_cast<size_t>(number);
  return index < grant.ranks.size() ? grant.ranks[index] : grant.waiting[index - grant.ranks.size()];
}
inline constexpr size_t kLiveJobsToldMax = 500;

// A grant in the bytes in which the head sent it, and the head's proof that it did. The agent keeps both as
// they are and gives them back to a head that has lost its records: without a proof such a head would run
// what any node claims to run (fault X4). It proves who granted, not that the grant is the newest.
struct GrantSeal {
  std::string bytes;  // wire::Encode of a StartGeneration without a seal; empty: no seal
  std::string mac;
  bool operator==(const GrantSeal&) const = default;
};

// A notice that a machine may be taken away, in the order of severity.
enum class NoticeKind {
  kNone,    // nothing, or it was withdrawn
  kAtRisk,  // the machine may go earlier than others: checkpoint soon, do not drain
  kFreeze,  // the machine stands still for a while and comes back
  kLeave,   // the machine goes at the deadline
};
const char* Name(NoticeKind kind);  // "none", "at-risk", "freeze", "leave"

struct NodeNotice {
  NoticeKind kind = NoticeKind::kNone;
  absl::Duration left;    // until it happens, when this was said; zero = now
  absl::Duration frozen;  // kFreeze: for how long
  std::string source;     // "aws spot interruption (terminate)", "drained by ann", ...
  std::string id;         // the same notice has the same id each time it is read
  std::string raw;        // the cloud's words, printable, cut
  bool operator==(const NodeNotice&) const = default;
};

// An alarm and no notice: the machine's agent cannot read what the cloud says, so the machine may go without
// a word (fault B12). It is at risk by that, which an older head knows as well.
inline constexpr char kNotHeardId[] = "not-heard";
inline bool IsNotHeard(const NodeNotice& notice) {
  return notice.kind == NoticeKind::kAtRisk && notice.id == kNotHeardId;
}

// ---------------------------------------------------------------- agent -> head

// Processes of a job that wait on this node for another generation.
struct KeptProcesses {
  JobId job;
  std::vector<ProcessId> processes;
  std::vector<ProcessId> coming;  // as in GenerationGone
  bool operator==(const KeptProcesses&) const = default;
};

struct AgentHello {
  ClusterId cluster;
  Incarnation incarnation;
  std::string boot_id;
  std::string hostname;
  std::string address;  // data-plane address
  std::string version;  // of gtrain
  int protocol = kProtocolVersion;
  Inventory inventory;
  std::map<std::string, std::string> labels;
  std::vector<int> free_ports;  // probed free, outside the ephemeral range; hints for MASTER_PORT
  std::vector<HeldGeneration> held;
  HeadEpoch epoch;          // highest head epoch heard, 0 = none (fault H9)
  std::string epoch_proof;  // as the head of that epoch gave it in its welcome
  // Grows from hello to hello of one boot, restarts of the agent included: of two, the head believes the
  // larger, in whatever order they arrive. 0 = an older agent's.
  uint64_t order = 0;
  int near_port = 0;  // as in NodePlace
  std::string near_key;
  bool takes_copies = false;     // it knows KeepCopies
  std::vector<JobId> copies_of;  // jobs of whose checkpoints it may have copies
  bool keeps_seals = false;      // it knows GrantSeal
  bool knows_fabric_order = false;
  std::vector<KeptProcesses> kept;
  bool knows_relays = false;  // it goes through another agent when it is told, and lets others go through it
  int relay_port = 0;         // where others may go through it; 0: nowhere yet
  std::string public_key;     // Z85; of the node, for the agent that it goes through
  bool operator==(const AgentHello&) const = default;
};

struct AgentHeartbeat {
  uint64_t sequence = 0;
  std::vector<RankStatus> changed;
  std::vector<int> free_ports;
  bool operator==(const AgentHeartbeat&) const = default;
};

struct RanksStarted {
  JobId job;
  Generation generation;
  std::vector<RankStatus> ranks;
  bool operator==(const RanksStarted&) const = default;
};

// Resent in every hello until AckExit names it.
struct RankExited {
  RankExit exit;
  bool operator==(const RankExited&) const = default;
};

// No process of this generation is left on the node (cgroup or process tree verified empty).
struct GenerationGone {
  JobId job;
  Generation generation;
  bool clean = true;  // false: something survived SIGKILL (state D); the node is not reused
  std::string message;
  std::vector<ProcessId> kept;    // wait there for another generation of the job
  std::vector<ProcessId> coming;  // were to wait beside this one and have not come up yet
  bool operator==(const GenerationGone&) const = default;
};

// Blobs of this node's ranks for one all-gather of the bootstrap exchange (0 = entry barrier).
struct ExchangePart {
  JobId job;
  Generation generation;
  uint64_t sequence = 0;
  std::vector<std::pair<int, std::string>> blobs;  // (rank, bytes)
  bool operator==(const ExchangePart&) const = default;
};

// The newest of a live rank's output, at most 64 KiB, each second in which there was any.
struct LogTail {
  JobId job;
  Generation generation;
  int rank = 0;
  bool is_stderr = false;
  uint64_t end_offset = 0;  // bytes of the log file so far
  std::string text;
  // 0: all of the tail, in place of the text sent before. n: the text after piece n - 1. Numbers and not
  // offsets, because the tail of a log that its disk refuses goes on and the offset does not.
  uint64_t piece = 0;
  bool operator==(const LogTail&) const = default;
};

// One for each held generation, after a welcome that asks for it: all a head needs that has lost its records
// or came back with older ones (fault H8).
struct GenerationDescribed {
  HeldGeneration held;
  GenerationGrant grant;
  std::optional<CheckpointReport> checkpoint;  // newest this agent has seen
  GrantSeal seal;                              // of `grant`, which a reader takes from it
  bool operator==(const GenerationDescribed&) const = default;
};

// A stall verdict or another finding of the agent worth an event line.
struct AgentNote {
  JobId job;
  Generation generation;
  int rank = -1;
  std::string kind;  // "stall", "notice", "log-dropped", ...
  std::string text;
  bool operator==(const AgentNote&) const = default;
};

// The notice of the node's cloud now; kNone after a notice takes it back. Repeated until AckNotice.
struct NoticeSeen {
  uint64_t sequence = 0;
  NodeNotice notice;
  bool operator==(const NoticeSeen&) const = default;
};

// A rank of this node waits for one of another node and has found that nothing gets there: repeated while it
// waits (fault W5).
struct LinkDown {
  JobId job;
  Generation generation;
  int rank = 0;
  int peer = 0;      // the rank it cannot reach
  std::string text;  // what was tried and what came of it
  bool operator==(const LinkDown&) const = default;
};

// Answer to AgentQuery.
struct AgentAnswer {
  uint64_t query = 0;
  bool ok = true;
  std::string text;          // payload or error sentence
  uint64_t next_offset = 0;  // for log reads; of a command: its exit code, or 128 + the signal it died of
  bool end = false;          // for log reads: the stream is complete
  std::string err;           // of a command with AgentQuery::apart
  bool timed_out = false;    // of a command: it was ended because its time was over
  uint64_t taken = 0;        // of a console: input up to there
  uint64_t at = 0;           // of a console: where in the output `text` begins
  bool operator==(const AgentAnswer&) const = default;
};

// ---------------------------------------------------------------- head -> agent

struct AgentWelcome {
  ClusterId cluster;
  HeadEpoch epoch;
  NodeId node;
  absl::Duration heartbeat_interval;
  absl::Duration fence_after;  // lease of restart-mode ranks without head contact
  std::string epoch_proof;     // only a head of this cluster can make it; repeated in later hellos
  bool describe = false;       // the head is rebuilding its records: send GenerationDescribed
  bool joins_pieces = false;   // it knows LogTail::piece; others get whole tails
  bool operator==(const AgentWelcome&) const = default;
};

struct AgentRefused {
  std::string reason;
  bool revoked = false;  // this node's key is gone for good: its ranks end, then the agent
  bool operator==(const AgentRefused&) const = default;
};

struct HeartbeatAck {
  HeadEpoch epoch;
  uint64_t sequence = 0;
  bool greet = false;  // a message to this node was lost: say hello on another connection, which settles it
  bool operator==(const HeartbeatAck&) const = default;
};

struct StartGeneration {  // a grant
  HeadEpoch epoch;
  GenerationGrant grant;
  GrantSeal seal;  // of `grant`, which a reader takes from it; none for an agent that keeps none
  bool operator==(const StartGeneration&) const = default;
};

enum class EndMode {
  kReform,   // another generation follows: TERM, short grace, KILL
  kStop,     // user's stop: TERM, stop_grace, KILL
  kStopNow,  // second stop: KILL
};

// Every generation <= `generation` of the job is over. Never waits for a disk.
struct Revoke {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  EndMode mode = EndMode::kReform;
  absl::Duration grace;
  std::string reason;
  bool keep = false;  // with kReform: processes that can go on in another generation are not ended
  bool operator==(const Revoke&) const = default;
};

struct AckExit {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  int rank = 0;
  bool operator==(const AckExit&) const = default;
};

// The answer to an exchange part that was sent again while others are still missing.
struct ExchangeMissing {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  uint64_t sequence = 0;
  std::vector<int> ranks;
  bool operator==(const ExchangeMissing&) const = default;
};

// Ranks that ended with exit code 0 while others of their generation still run: all of them, some time after,
// and again when there are more. A rank that waits for one of these waits in vain.
struct RanksLeft {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  std::vector<int> ranks;
  bool operator==(const RanksLeft&) const = default;
};

// To the node of rank 0: the generation is to be re-formed, and that loses nothing between two steps. The
// ranks pause behind one that all have made, for a moment; rank 0 says so, and the head revokes.
struct PauseRanks {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  bool operator==(const PauseRanks&) const = default;
};

struct ExchangeTable {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  uint64_t sequence = 0;
  std::vector<std::string> blobs;  // index = rank
  bool operator==(const ExchangeTable&) const = default;
};

// The job is over on this cluster: end the keeper, keep the run directory.
struct ForgetJob {
  HeadEpoch epoch;
  JobId job;
  bool operator==(const ForgetJob&) const = default;
};

// Tells a machine that runs no rank of the job to keep copies of its checkpoints until ForgetJob. Sent again
// after each hello.
struct KeepCopies {
  HeadEpoch epoch;
  JobId job;
  std::string near;    // where, as the job says: CheckpointPolicy::near
  std::string secret;  // GenerationGrant::near_secret
  bool operator==(const KeepCopies&) const = default;
};

// The notice is in the head's records.
struct AckNotice {
  HeadEpoch epoch;
  uint64_t sequence = 0;
  bool operator==(const AckNotice&) const = default;
};

// A machine of the job leaves in `left`: for the job's ranks on this node. Every node of the job is told,
// since it takes all ranks to save.
struct NoticeRanks {
  HeadEpoch epoch;
  JobId job;
  Generation generation;
  absl::Duration left;
  uint32_t notice = 1;  // counted in the generation: the ranks get the signal once for each
  bool operator==(const NoticeRanks&) const = default;
};

struct AgentQuery {
  enum class Kind { kReadLog, kStacks, kExec, kConsole, kActors };
  HeadEpoch epoch;
  uint64_t query = 0;
  Kind kind = Kind::kReadLog;
  JobId job;
  Generation generation;
  int rank = 0;
  bool is_stderr = false;  // kReadLog
  uint64_t offset = 0;     // kReadLog
  // kExec: run once beside the rank, with its environment. kActors: one word, ClientActors::question.
  std::vector<std::string> argv;
  uint64_t bytes_max = 0;  // kReadLog, as in ClientLogs
  bool apart = false;      // kExec: stderr in AgentAnswer::err
  bool full = false;       // kStacks: by debuggers, where there are some
  Console console;         // kConsole
  bool operator==(const AgentQuery&) const = default;
};

struct AgentShutdown {
  HeadEpoch epoch;
  std::string reason;
  bool operator==(const AgentShutdown&) const = default;
};

// ---------------------------------------------------------------- joining a cluster

// New node -> head, over a connection made with the key of a join token: registers the node's
// own key. The head answers AgentJoined or AgentRefused, and the token is spent.
struct AgentJoin {
  std::string public_key;  // Z85, 40 characters
  std::string hostname;    // for the comment beside the key
  bool operator==(const AgentJoin&) const = default;
};

struct AgentJoined {
  ClusterId cluster;
  NodeId node;
  bool operator==(const AgentJoined&) const = default;
};

// ---------------------------------------------------------------- the envelope

using Message =
    std::variant<AgentHello, AgentHeartbeat, RanksStarted, RankExited, GenerationGone, ExchangePart,
                 CheckpointReport, LogTail, AgentNote, AgentAnswer, AgentWelcome, AgentRefused, HeartbeatAck,
                 StartGeneration, Revoke, AckExit, ExchangeTable, ForgetJob, NoticeRanks, AgentQuery,
                 AgentShutdown, AgentJoin, AgentJoined, ClientRequest, ClientReply, GenerationDescribed,
                 NoticeSeen, AckNotice, ExchangeMissing, LinkDown, KeepCopies, RanksLeft, PauseRanks,
                 RelayedUp, RelayedDown, RelayReady, RelayFor, ConnectVia>;

}  // namespace gtrain::core
