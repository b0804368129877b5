// The head service: HeadCore between the network and the disk. `gtrain head` calls RunHead.
//
// One loop thread owns the core and the transport, one disk thread commits batches and writes run
// directories, one thread inside the transport answers ZAP. The loop never touches a disk (fault H11).
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
#include "job/spec/job_spec.h"
#include "topology/topology.h"

namespace gtrain::head {

// Of PrintTopology(HeadOptions::topology): it is one answer.
inline constexpr size_t kTopologyTextMax = 8 << 20;

// So many agents a head holds directly at some hundredths of a core for their heartbeats (bench_scale).
inline constexpr int kRelayFrom = 1024;

struct HeadOptions {
  std::string cluster_dir;          // made by net::InitCluster (`gtrain head --init`)
  std::vector<std::string> listen;  // numeric "address:port", port 0 = any free one; default "127.0.0.1:0"
  std::string advertise;  // "host:port" put into endpoint.json and join tokens; "" = first bound address
  bool allow_root =
      false;  // outside a container, root may listen on other than loopback addresses only with this
  int connections_per_address_max = 4096;  // fault B4
  bool local = false;                      // the user's own local cluster
  bool exit_when_idle = false;             // end after the last job
  std::function<void()> at_idle_end;       // called once when it ends because no job is left
  std::optional<int> expected_nodes;
  std::shared_ptr<const topology::Topology> topology;  // core::HeadConfig::topology
  std::optional<absl::Duration> lease;                 // core::HeadConfig::fence_after; at least 10 s
  // core::HeadConfig::dead_after, with what goes with it (SetNodeTimeout).
  std::optional<absl::Duration> node_timeout;
  int relay_from = kRelayFrom;  // core::HeadConfig::relay_from; never in a local cluster
  // Canonical YAML -> JobSpec (job/spec).
  std::function<absl::StatusOr<spec::JobSpec>(absl::string_view)> parse_job;
};

// Serves until SIGTERM, SIGINT or the core asks to stop; then OK, without ending any rank. Blocks; once a
// process. An error of the store ends it at once (fault H4): start it again.
absl::Status RunHead(const HeadOptions& options);

}  // namespace gtrain::head
