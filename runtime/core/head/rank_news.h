// RankNews takes in what agents report about ranks. PURE. Private to runtime/core/head.
//
// Every message names its generation: one that is not the granted one is dropped and counted, except exits,
// which are always acknowledged so that nobody repeats them for ever. HeadState owns it; only the loop's
// thread uses it; it never blocks and has no state of its own. A status costs O(log n) in a job of n ranks.
#pragma once
#include <string>

#include "absl/strings/string_view.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class JobLife;
class Leaves;
class Newcomers;
class Progress;
class Recovery;
class Sizing;
class Stalls;

class RankNews {
 public:
  RankNews(HeadContext& context, HeadModel& model, JobLife& life, Faults& faults, Progress& progress,
           Stalls& stalls, Sizing& sizing, Leaves& leaves, Newcomers& newcomers, Recovery& recovery);

  // Returns the job whose granted generation a message belongs to, if this node is part of it; otherwise the
  // message is counted as stale, and the result is nullptr.
  Job* CurrentJob(const NodeId& node, const JobId& id, Generation generation);

  void OnRankStatus(const NodeId& node, const RankStatus& status, Instant now);
  void OnStarted(const NodeId& node, const RanksStarted& started, Instant now);
  void OnExited(const NodeId& node, const RankExit& exit, Instant now);
  void OnGone(Node& node, const GenerationGone& gone, Instant now);
  void OnExchange(const NodeId& node, const ExchangePart& part);
  void OnCheckpoint(const NodeId& node, const CheckpointReport& report);
  void OnNote(const NodeId& node, const AgentNote& note);
  // Takes the checkpoint that the ranks of a job taken up were told, if the head knows of no newer one.
  void TakeNewest(Job& job, const CheckpointReport& newest);
  // Tells the ranks that still run which ones ended with exit code 0, on `node` alone if there is one.
  void SayWhoLeft(const Job& job, const NodeId* node);

 private:
  void WarnOfDivergence(Job& job, const RankStatus& status);
  void TakeLastWords(Job& job, RankLive& rank, const RankExit& exit, Instant now);
  void RunningIfAllStarted(Job& job, Instant now);
  void SayWhoIsMissing(const Job& job, const NodeId& node, uint64_t sequence);
  void EmitNote(Job& job, const std::string& kind, std::string text);
  bool IsTold(const Job& job, const AgentNote& note, absl::string_view text) const;
  void TakeNote(Job& job, const NodeId& node, const AgentNote& note);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  JobLife& life_;
  Faults& faults_;
  Progress& progress_;
  Stalls& stalls_;
  Sizing& sizing_;
  Leaves& leaves_;
  Newcomers& newcomers_;
  Recovery& recovery_;
};

}  // namespace gtrain::core
