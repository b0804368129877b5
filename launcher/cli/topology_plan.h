// `gtrain plan JOB.yaml --topology FILE`: the placement of a job on a cluster that is only a file.
#pragma once
#include "absl/status/statusor.h"
#include "launcher/cli/args.h"
#include "launcher/cli/context.h"
#include "launcher/cli/job_input.h"
#include "topology/topology.h"

namespace gtrain::cli {

// Reads and checks a topology file. Errors name the file, and the line where there is one.
absl::StatusOr<topology::Topology> ReadTopology(const std::string& path);

// What the head of the cluster follows (gtrain head --topology, or labels of agents); no machines: nothing.
// `source`: gets "file", "labels" or "none".
absl::StatusOr<topology::Topology> TopologyOfHead(Cluster& cluster, std::string* source = nullptr);

// "tp=4GB,dp=400MB": what a rank sends a step along each axis.
absl::Status SetTraffic(const std::string& text, spec::JobSpec& job);

// The flags of plan that go with --topology, and --topology itself.
std::vector<Flag> TopologyFlags();

// Prints the plan. Returns the exit code.
absl::StatusOr<int> PlanOnTopology(const Args& args, const JobInput& input);

}  // namespace gtrain::cli
