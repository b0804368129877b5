// The requests of clients to the head, as plain values. PURE. Part of messages.h, which says where the wire
// form is.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"

namespace gtrain::core {

// Each client request carries (client key, request id); the head answers a repeated id
// with the first answer (fault H15).
struct ClientSubmit {
  std::string spec_text;  // canonical YAML; the head parses it again
  std::map<std::string, std::string> env;
  std::string run_dir;
  std::string resume;  // "", "latest", "fresh", a step, or a uri
  bool end_with_client = false;
  bool takeover = false;  // although another live job saves to the same checkpoint directory
  bool operator==(const ClientSubmit&) const = default;
};
struct ClientStop {
  JobId job;
  bool now = false;
  std::string reason;
  bool operator==(const ClientStop&) const = default;
};
struct ClientStatus {
  static constexpr int kOverMax = 5'000;  // more would not fit into one answer
  JobId job;                              // empty: all that live, and the newest that are over
  int over = 0;                           // how many of those, of the reader and of all; 0: 100
  bool places = false;  // also what the ranks of each are bound to, which is always told of one job
  bool operator==(const ClientStatus&) const = default;
};
struct ClientWhy {
  JobId job;
  bool operator==(const ClientWhy&) const = default;
};
struct ClientNodes {
  bool operator==(const ClientNodes&) const = default;
};
struct ClientTopology {
  bool operator==(const ClientTopology&) const = default;
};
struct ClientLogs {
  JobId job;
  std::optional<uint64_t> generation;  // nullopt: newest
  int rank = 0;
  bool is_stderr = false;
  uint64_t offset = 0;
  uint64_t bytes_max = 0;  // of text; 0, and for daemons of before 0.6: as many as one answer takes
  bool operator==(const ClientLogs&) const = default;
};
struct ClientExec {
  JobId job;
  int rank = 0;
  std::vector<std::string> argv;
  bool apart = false;  // stdout and stderr in two
  bool operator==(const ClientExec&) const = default;
};
// One turn of a talk with a program that runs beside a rank (`argv`), or with a rank that takes input (no
// `argv`). A turn brings input and asks for output; both carry offsets, so that it may be repeated, overtaken
// and lost, and nothing between client and keeper remembers anything.
struct Console {
  std::string session;                  // 128 bits in hex, of the client
  bool start = false;                   // until the first answer: begins it where it is not known
  std::vector<std::string> argv;        // run once beside the rank, with its environment
  bool terminal = false;                // with `argv`: it gets a terminal
  std::string term;                     // $TERM
  int rows = 0, columns = 0;            // of the terminal; 0: as it is
  uint64_t input_offset = 0;            // of `input`: how much was taken before
  std::string input;                    // at most kConsoleBytes
  bool input_end = false;               // nothing comes after it
  uint64_t out_seen = 0, err_seen = 0;  // output up to there is not wanted again
  bool hang_up = false;                 // it is over for the client
  bool operator==(const Console&) const = default;
};
inline constexpr size_t kConsoleBytes = 64 << 10;  // of input, and of each stream of output, in a turn

struct ClientConsole {
  JobId job;
  std::optional<uint64_t> generation;  // nullopt: the newest
  int rank = 0;
  Console turn;
  bool operator==(const ClientConsole&) const = default;
};
// The stacks of a rank's threads, of its kernel, native and Python frames.
struct ClientStack {
  JobId job;
  int rank = 0;
  bool operator==(const ClientStack&) const = default;
};
// What the process of a rank says of its actors. It alone reads the question (actors/exec/listing.h).
struct ClientActors {
  JobId job;
  int rank = 0;
  std::string question;
  bool operator==(const ClientActors&) const = default;
};
inline constexpr size_t kQuestionBytesMax = 4 << 10;
// How many ranks it should have, or nodes where the job file counts these; within what the job file allows.
struct ClientScale {
  JobId job;
  int size = 1;
  bool now = false;  // do not wait for a checkpoint
  bool operator==(const ClientScale&) const = default;
};
struct ClientEvents {  // long poll: events of a job after `after`, waits up to `wait`
  JobId job;
  uint64_t after = 0;
  absl::Duration wait;
  bool operator==(const ClientEvents&) const = default;
};
// Administration: end the local cluster when no job is left, or now.
struct ClientShutdown {
  bool when_idle = true;
  bool operator==(const ClientShutdown&) const = default;
};
// Copies the head's records into a directory on the head's machine.
struct ClientBackup {
  std::string dir;
  bool operator==(const ClientBackup&) const = default;
};
// Keys and tokens; answered by the service, which owns their files.
struct ClientJoinToken {  // makes a token for `uses` new nodes
  int uses = 1;
  absl::Duration life = absl::Minutes(15);
  bool operator==(const ClientJoinToken&) const = default;
};
struct ClientTokens {  // that can still be used
  bool operator==(const ClientTokens&) const = default;
};
struct ClientRevokeToken {
  std::string token;  // its id
  bool operator==(const ClientRevokeToken&) const = default;
};
struct ClientAddUser {
  std::string name;
  std::string role;        // "admin", "user", "readonly"
  std::string public_key;  // Z85; the secret half never leaves the client
  bool operator==(const ClientAddUser&) const = default;
};
struct ClientUsers {
  bool operator==(const ClientUsers&) const = default;
};
struct ClientRevokeUser {
  std::string name;
  bool operator==(const ClientRevokeUser&) const = default;
};
struct ClientRevokeNode {
  std::string node;  // its id, or its host name if no other node has it
  std::string reason;
  bool operator==(const ClientRevokeNode&) const = default;
};

// Nothing new starts on the node, and jobs there are re-formed without it; until `undo`.
struct ClientDrainNode {
  std::string node;     // as ClientRevokeNode
  absl::Duration left;  // until its ranks must be gone
  std::string reason;
  bool undo = false;  // take the drain back, and what a cloud said
  // With `undo`: only a drain that the same client has asked for with the same reason, and no notice. A
  // program that drains by itself so gives back what is its own, whatever a person or a cloud said since.
  bool own = false;
  bool operator==(const ClientDrainNode&) const = default;
};

using ClientRequestBody =
    std::variant<ClientSubmit, ClientStop, ClientStatus, ClientWhy, ClientNodes, ClientLogs, ClientExec,
                 ClientEvents, ClientShutdown, ClientJoinToken, ClientTokens, ClientRevokeToken,
                 ClientAddUser, ClientUsers, ClientRevokeUser, ClientRevokeNode, ClientBackup,
                 ClientDrainNode, ClientStack, ClientScale, ClientConsole, ClientActors, ClientTopology>;

struct ClientRequest {
  std::string id;           // 128-bit, hex, made by the client
  absl::Duration deadline;  // relative; the head does nothing for what may have waited longer in its queue
  ClientRequestBody body;
  bool operator==(const ClientRequest&) const = default;
};

// `json` is one document whose shape docs/protocols/control-plane.md gives per request.
struct ClientReply {
  std::string id;
  bool ok = true;
  int code = 0;       // absl::StatusCode when !ok
  std::string error;  // what happened, where, what to do next
  std::string json;
  bool operator==(const ClientReply&) const = default;
};

}  // namespace gtrain::core
