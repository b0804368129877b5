// `gtrain topology measure`: a topology of what machines measure between each other.
#pragma once
#include "absl/status/status.h"
#include "launcher/cli/args.h"
#include "topology/topology.h"

namespace gtrain::cli {

// The flags that only measure has.
std::vector<Flag> MeasureFlags();

// Writes a text file durably; through a symbolic link. InvalidArgument: there is something that is no regular
// file.
absl::Status WriteText(const std::string& path, const std::string& text);

// Runs gtrain-bench as a job on machines that no other job uses, one rank on each, and makes a topology of
// what they say. FailedPrecondition: fewer than two machines are free.
absl::StatusOr<topology::Topology> MeasuredTopology(const Args& args, const topology::Shape& shape);

}  // namespace gtrain::cli
