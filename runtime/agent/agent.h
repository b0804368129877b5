// The agent service: one process per machine that offers it to a cluster. It keeps a connection to the head,
// inventories the machine, starts one keeper per job and lets AgentCore (runtime/core/agent/agent_core.h)
// decide. It may crash and restart at any time: keepers found in its state directory are adopted again (fault
// P4).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "net/port/transport.h"
#include "runtime/agent/notice_watch.h"

namespace gtrain::agent {

struct AgentOptions {
  std::string state_dir;  // lock, node.key, cluster.json, keepers; made if missing; one agent per directory

  // How to reach the head: a join token (net/zmq/keys.h) the first time; afterwards cluster.json
  // remembers. An administrator who registered <state_dir>/node.key by hand gives endpoint and head key
  // instead.
  std::string join_token;
  std::string head_endpoint;       // "host:port"; overrides what cluster.json says
  std::vector<std::string> heads;  // "host:port", to be looked at first and put into cluster.json
  std::string head_public_key;     // Z85; overrides likewise
  ClusterId cluster;               // empty: from cluster.json, else from the first welcome
  NodeId node;                     // tests only; empty = of node.key

  std::string address;   // data-plane address; empty = local address of the route that reaches the head
  std::string hostname;  // empty = the machine's
  std::map<std::string, std::string> labels;
  NoticeOptions notices;  // of the machine's cloud; off by default
  int fake_gpus = 0;      // tests: pretend that many GPUs instead of asking the driver
  std::string fake_gpu_model = "Fake";
  int cpus = 0;  // 0 = those this process may use
  // The most that copies of checkpoints may take, in memory and in each folder that jobs name; unset: a
  // quarter of the machine's memory; 0: none are kept.
  std::optional<uint64_t> near_bytes_max;
  bool share_copies = true;   // of checkpoints, with other machines of a job; the local cluster has none
  std::string keeper_binary;  // empty = gtrain-keeper beside this program
  absl::Duration keeper_lease = absl::Seconds(120);  // ranks survive a dead agent for this long
  // An agent without a head and without a keeper ends after this long; never by default. The local cluster
  // sets it, because nobody else would end its agent after a head that died or whose farewell was lost.
  std::optional<absl::Duration> leave_without_head;

  // Tests replace the connection; everything above about the head is then unused.
  std::function<absl::StatusOr<std::unique_ptr<port::ClientTransport>>()> connect;
};

// An agent of root runs ranks as root, and what users submit would own the machine: refused but for the local
// cluster (the user's own programs), in a container, or where the administrator said --allow-root (fault X7).
absl::Status RootMayRunRanks(bool root, bool local, bool container, bool allow_root);

// Loads or makes <state_dir>/node.key and returns its public half (Z85): for registering a node before its
// start.
absl::StatusOr<std::string> NodePublicKey(const std::string& state_dir);

// Serves until AgentShutdown (OK), leave_without_head (OK), SIGTERM (OK; ranks keep running and are adopted
// by the next agent), a refusal by the head (FailedPrecondition with its reason), or an error of the state
// directory. Blocks; call once per process.
absl::Status RunAgent(const AgentOptions& options);

}  // namespace gtrain::agent
