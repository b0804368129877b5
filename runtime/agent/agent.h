// The agent service: one process per machine that offers it to a cluster. It keeps a connection to the head,
// inventories the machine, starts one keeper per job and lets AgentCore (runtime/core/agent_core.h) decide.
// It may crash and restart at any time: keepers found in its state directory are adopted again (fault P4).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "launcher/spec/job_spec.h"
#include "runtime/port/transport.h"

namespace gtrain::agent {

struct AgentOptions {
  std::string state_dir;  // lock, keepers, incarnation; one agent per directory
  ClusterId cluster;      // empty: taken from the first welcome
  NodeId node;            // of the node key that `connect` uses

  // The connection to the head, authenticated with this node's key. Called once at start; reconnects by
  // itself.
  std::function<absl::StatusOr<std::unique_ptr<port::ClientTransport>>()> connect;
  std::string head_host;  // numeric address of the head: the route to it tells our own data-plane address
  int head_port = 0;

  // Wire codec and job parser, passed in by the program that links them.
  std::function<std::string(const core::Message&)> encode;
  std::function<absl::StatusOr<core::Message>(absl::string_view)> decode;
  std::function<absl::StatusOr<spec::JobSpec>(absl::string_view)> parse_spec;

  std::string address;   // data-plane address; empty = local address of the socket that reaches the head
  std::string hostname;  // empty = the machine's
  std::map<std::string, std::string> labels;
  int fake_gpus = 0;          // tests: pretend that many GPUs instead of asking the driver
  int cpus = 0;               // 0 = those this process may use
  std::string keeper_binary;  // empty = gtrain-keeper beside this program
  absl::Duration keeper_lease = absl::Seconds(120);  // ranks survive a dead agent for this long
};

// Serves until AgentShutdown (OK), SIGTERM (OK; ranks keep running and are adopted by the next agent), a
// refusal by the head (FailedPrecondition with its reason), or an error of the state directory. Blocks; call
// once per process.
absl::Status RunAgent(const AgentOptions& options);

}  // namespace gtrain::agent
