// Every verb of the program, one function a file (cmd_<verb>.cc).
#pragma once
#include <vector>

#include "absl/status/status.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

// Exit codes; docs/cli.md is their reference.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;
inline constexpr int kDoNotRestart = 93;

Verb LaunchVerb();
Verb AttachVerb();
Verb ValidateVerb();
Verb PlanVerb();
Verb StatusVerb();
Verb WhyVerb();
Verb ReportVerb();
Verb LogsVerb();
Verb StopVerb();
Verb ExecVerb();
Verb StackVerb();
Verb ActorsVerb();
Verb ScaleVerb();
Verb ChaosVerb();
Verb NodesVerb();
Verb NodeVerb();
Verb TokenVerb();
Verb UserVerb();
Verb ContextVerb();
Verb AuditVerb();
Verb CkptVerb();
Verb DataVerb();
Verb BenchVerb();
Verb DoctorVerb();
Verb TopologyVerb();
Verb HeadVerb();
Verb AgentVerb();
Verb LocalWatchVerb();
Verb VersionVerb();
Verb CompletionVerb();

// Lists the verbs in the order in which help shows them.
std::vector<Verb> AllVerbs();

// Prints a failed status and gives the exit code: 2 for InvalidArgument, 1 otherwise.
int Report(const absl::Status& status);

}  // namespace gtrain::cli
