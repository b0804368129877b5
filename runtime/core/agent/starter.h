// Starter makes ranks of a grant. PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it; it has no state of its own, and blocks no longer than
// AgentConfig::find_program.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Generations;
class Lease;
class NearCopies;

class Starter {
 public:
  Starter(AgentContext& context, AgentModel& model, Generations& generations, Lease& lease,
          NearCopies& copies);

  void OnGrant(const PreparedStart& start);
  void Start(const PreparedStart& prepared);

 private:
  // The reason why no process is started.
  struct Failure {
    ExitCause cause;
    std::string message;
  };

  bool MayBegin(AgentJob& record, const PreparedStart& prepared);
  AgentGeneration& AddGeneration(AgentJob& record, const StartGeneration& message);
  std::optional<Failure> Prepare(AgentGeneration& generation, const StartFacts& facts);
  static void RememberNics(AgentJob& record, AgentGeneration& generation,
                           const std::vector<keeper::StartRank>& starts);
  absl::StatusOr<keeper::StartRank> StartOf(const AgentGeneration& generation, const StartFacts& facts,
                                            int number, const std::string& hash, bool compare);
  void FailStart(AgentGeneration& generation, const Failure& failure);
  uint64_t ProcessesMax(const spec::JobSpec& spec) const;
  void CompareProgram(const GenerationGrant& grant, const AgentGeneration& generation,
                      const std::map<std::string, std::string>& env);
  void SayUnlimitedMemory(const GenerationGrant& grant, const AgentGeneration& generation);

  AgentContext& context_;
  AgentModel& model_;
  const AgentConfig& config_;
  Generations& generations_;
  Lease& lease_;
  NearCopies& copies_;
};

}  // namespace gtrain::core
