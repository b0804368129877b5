// JobLife moves a job through its states, from its submission to its end. PURE. Private to
// runtime/core/head.
//
// A generation is taken away by Revoke, which leaves at once; the record follows. Between the two,
// BeginEnding notes what shall become of the job (`ending`) and which nodes may still run its processes
// (`unreleased`); when the last of them has released it, is dead, or its time is up, FinishEnding acts on
// the note.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. An end
// costs a message for each node of the job.
#pragma once
#include <string>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class OverJobs;
class Recovery;

class JobLife {
 public:
  JobLife(HeadContext& context, HeadModel& model, Faults& faults, Recovery& recovery, OverJobs& over);

  Job& AddJob(JobRecord record, spec::JobSpec spec, Instant now);  // submitted, or taken up from its ranks
  void TakeSpec(Job& job, spec::JobSpec spec);
  void Move(Job& job, JobState state, std::string reason);
  void KeepProgress(Job& job);
  void Finish(Job& job, JobState state, std::string reason);
  // Ends a job between two generations. Where processes that wait know what no checkpoint has, they save it
  // before that (SurvivorSave).
  void FinishSaved(Job& job, Ending ending, std::string reason);
  void FinishAfterSave(Job& job);

  void BeginEnding(Job& job, Ending ending, EndMode mode, absl::Duration grace, std::string reason,
                   Instant now);
  void SendRevoke(const Job& job, const NodeId& node, EndMode mode, absl::Duration grace);
  // Tells a node again that a generation is over, since it still has processes of it and may not have heard.
  // They keep what is left of their grace.
  void ResendEnding(Job& job, const NodeId& node, Instant now);
  void Release(Job& job, const NodeId& node, Instant now);
  // No generation goes on with the processes that the node keeps of the job.
  void EndKept(const Job& job, const NodeId& node);
  void ContinueEnding(Job& job, Instant now);

 private:
  static int ExitCodeOf(const JobRecord& record);  // of a job that has failed
  Instant MayWriteUntil(const Job& job, const Node& node) const;
  void AwaitFence(Job& job, const std::string& hostnames, Instant now);
  void SayWhoEndedMeanwhile(Job& job, Ending ending);
  void FinishEnding(Job& job, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Faults& faults_;
  Recovery& recovery_;
  OverJobs& over_;
};

}  // namespace gtrain::core
