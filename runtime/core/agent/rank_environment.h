// The environment, command and members file with which a rank starts. PURE. The contract is
// docs/protocols/rank-environment.md.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "job/spec/job_spec.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// Everything but GTRAIN_KEEPER_SOCKET, which the keeper adds. An error names the secret that cannot be had.
absl::StatusOr<std::map<std::string, std::string>> RankEnvironment(const AgentConfig& config,
                                                                   const GenerationGrant& grant,
                                                                   const spec::JobSpec& spec,
                                                                   const StartFacts& facts, int rank,
                                                                   const std::string& token);

// A variable that the client sends along: the file of `python3`, as the job names it, on the client's
// machine.
inline constexpr char kClientPython[] = "GTRAIN_CLIENT_PYTHON";

// Begins the last line on stderr of a rank whose node could not be set up.
inline constexpr char kSetupFailed[] = "gtrain: the setup step failed";
// argv of the rank's process: words, or bash for a script, or either behind the job's setup.
std::vector<std::string> RankCommand(const GenerationGrant& grant, const spec::JobSpec& spec,
                                     const NodeId& node, const std::string& job_hash);

// The job's GPUs on this node, ordered so that index LOCAL_RANK is the rank's own (its first).
std::vector<int> VisibleGpus(const GenerationGrant& grant, const NodeId& node);

// Where copies of checkpoints lie on this node that a job wants to be `near` (CheckpointPolicy); empty:
// nowhere.
std::string NearFolderOf(const AgentConfig& config, const std::string& near);

std::string MembersJson(const GenerationGrant& grant);

// Paths below the run directory, made of numbers only.
std::string MembersPath(const GenerationGrant& grant, const NodeId& node);
std::string ReportPath(const std::string& run_dir, Generation generation, int rank);
std::string NoticePath(const std::string& run_dir, Generation generation, int rank);

}  // namespace gtrain::core
