// AgentCore: what an agent does, decided without doing it. PURE.
//
// Events of the head's connection, of keepers and of time go in; messages to the head, commands to keepers
// and files to write come out. runtime/agent performs the effects in order. Thread-compatible; never blocks.
//
// Rules it keeps: a head of a lower epoch than the highest seen is ignored; `Revoke(g)` ends every generation
// <= g and none of them is ever started again; an exit is repeated until the head acknowledged it;
// "generation gone" is said only after the keeper saw the last process disappear; silence of the head ends
// only programs without the SDK, after the lease the head gave (docs/protocols/control-plane.md).
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/ids.h"
#include "job/spec/job_spec.h"
#include "runtime/core/values/keeper_messages.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

struct AgentConfig {
  ClusterId cluster;
  NodeId node;
  Incarnation incarnation;
  std::string boot_id;
  std::string hostname;
  std::string version;
  int protocol = kProtocolVersion;
  uint32_t keeper_protocol = keeper::kAgentProtocol;
  std::string keeper_program;  // also reads stacks with debuggers (`--stacks PID`); empty: nothing does
  Inventory inventory;
  int64_t pid_max = 0;        // of the machine; 0 = unknown
  bool limits_memory = true;  // keepers may make control groups that hold a rank to `resources.memory`
  std::map<std::string, std::string> labels;
  std::map<std::string, std::string> own_env;  // of the agent: PATH, HOME.. of programs, and secrets by env
  absl::Duration heartbeat_interval = absl::Seconds(1);  // until a welcome says otherwise

  // Where copies of checkpoints lie for jobs with `near: memory`; empty: this machine has no such memory.
  std::string near_memory;
  uint64_t near_bytes_max = 0;  // of all copies, here and in each folder that a job names
  int near_port = 0;            // where this agent serves them; 0: nowhere
  std::string near_key;
  std::string public_key;  // Z85; of this node. Empty: it neither goes through others nor lets them through
  int relay_port = 0;      // where others may go through it already; 0: nowhere
  std::vector<JobId>
      near_left;  // jobs of whose copies there were some in near_memory when this agent started

  // Of a value alone, but for find_program, which looks into the folders of PATH.
  std::function<absl::StatusOr<spec::JobSpec>(absl::string_view)> parse_spec;
  std::function<std::string(const spec::JobSpec&)> job_hash;
  std::function<std::string(const std::string& name, const std::string& path)> find_program;  // agent/node.h
  std::function<std::string()> make_token;  // 32 random hex digits
  // The sentence with which so many ranks are refused; empty: this machine can hold them.
  std::function<std::string(size_t ranks)> too_many_ranks;

  // A grant as text and back, for the note that a keeper holds. Without them a restarted agent cannot
  // describe what it adopted.
  std::function<std::string(const GenerationGrant&)> pack_grant;
  std::function<absl::StatusOr<GenerationGrant>(const std::string&)> unpack_grant;

  // The highest head epoch heard outlives the agent in this file; empty: it does not.
  std::string epoch_path;
  HeadEpoch epoch;
  std::string epoch_proof;
};

// ---------------------------------------------------------------- events

struct HeadUp {
  std::string address;   // data-plane address of this node
  bool relayed = false;  // through another agent, which tells the head that this one is there (Beat)
};
struct HeadDown {};
// What the agent's process has found out and made before the core hears of a grant, which may have taken its
// file systems a while.
struct StartFacts {
  std::map<std::string, absl::StatusOr<std::string>> secrets;  // by file: those that the job names
  absl::Status run_dir;      // its directories for the generation are there, or why ranks cannot be started
  bool port_is_free = true;  // the grant's master_port, where rank 0 is here
  // As it is now: a port may have gone down since the agent started. None: it is as in the inventory.
  std::optional<Network> network = {};
};
struct FromHead {
  Message message;
  StartFacts facts = {};  // of a StartGeneration
};
struct FromKeeper {  // keeper::State is the first report of each connection
  JobId job;
  keeper::Report report;
};
struct KeeperLost {  // died or never started; the service has ended its ranks as far as it could
  JobId job;
  bool clean = true;
  std::string reason;
};
struct FreePorts {  // newly probed
  std::vector<int> ports;
};
struct RankSeen {
  int rank = 0;
  uint64_t cpu_ms = 0;     // used since it started, with all that it started
  std::string blocked_in;  // the function of the kernel in which it waits; empty: it runs, or nobody knows
  bool operator==(const RankSeen&) const = default;
};
struct RanksSeen {  // answer to LookAtRanks
  JobId job;
  Generation generation;
  std::vector<RankSeen> ranks;
};
struct CloudSays {  // what the cloud says of this machine now; kNone: nothing. Only when it answered
  NodeNotice notice;
};
struct AgentTick {};

using AgentEvent = std::variant<HeadUp, HeadDown, FromHead, FromKeeper, KeeperLost, FreePorts, RanksSeen,
                                CloudSays, AgentTick>;

// ---------------------------------------------------------------- effects

struct ToHead {
  Message message;
};
struct ToKeeper {  // starts the job's keeper if it has none
  JobId job;
  keeper::Command command;
};
// Files in the directory of a job may take for ever to write; later BeginGeneration and StartRank of that job
// wait for it, nothing else does.
struct WriteFile {  // replaced atomically; its directory is there
  std::string path;
  std::string data;
  JobId job;  // empty: of the agent itself
};
struct ReadLog {  // answered by AgentAnswer{query}
  uint64_t query = 0;
  JobId job;
  std::string path;
  uint64_t offset = 0;
  bool ended = false;      // no process writes the stream any more
  uint64_t bytes_max = 0;  // 0: a whole piece
};
struct ReadStacks {  // answered by AgentAnswer{query}
  uint64_t query = 0;
  int64_t pid = 0;
};
struct LookAtRanks {  // what their processes do: answered by RanksSeen
  JobId job;
  Generation generation;
  std::vector<std::pair<int, int64_t>> ranks;  // and their processes
};
struct ShareCopies {  // of checkpoints of a job, with who has its secret
  JobId job;
  std::string folder;
  std::string secret;
};
struct DropCopies {  // of checkpoints, of a job that is over
  JobId job;
  std::string folder;
};
// Connects anew: messages sent on this connection may not have arrived, though it lives. The first hello of a
// connection settles all of it.
struct Reconnect {};
// Through another agent: a heartbeat that says nothing but that this agent is there.
struct Beat {};
// Lets these agents, and no others, reach the head through this one; answered by RelayReady to the head.
struct LetThrough {
  std::vector<RelayChild> children;
};
// Reaches the head through that agent where this works. The connection that is there stays until then.
struct GoThrough {
  ConnectVia via;
};
struct Leave {  // the agent ends: refused or shut down
  absl::Status status;
  bool after_keepers = false;  // they were told to quit
};

using AgentEffect = std::variant<ToHead, ToKeeper, WriteFile, ReadLog, ReadStacks, LookAtRanks, ShareCopies,
                                 DropCopies, Reconnect, Beat, LetThrough, GoThrough, Leave>;

struct AgentStep {
  std::vector<AgentEffect> effects;
  std::string why;  // one sentence; empty for nothing worth a line
};

class AgentCore {
 public:
  explicit AgentCore(AgentConfig config);
  ~AgentCore();
  AgentCore(AgentCore&&) noexcept;
  AgentCore& operator=(AgentCore&&) noexcept;

  AgentStep Step(const AgentEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const;

  bool HasLiveGeneration() const;
  std::string Snapshot() const;  // one line per job, for logs and golden traces

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Log file of one stream, below the run directory.
std::string RankLogPath(const std::string& run_dir, Generation generation, int rank, bool is_stderr);

}  // namespace gtrain::core
