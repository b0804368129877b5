#include "launcher/cli/verbs.h"

namespace gtrain::cli {

std::vector<Verb> AllVerbs() {
  std::vector<Verb> verbs = {LaunchVerb(),  AttachVerb(), ValidateVerb(), PlanVerb(),       StatusVerb(),
                             WhyVerb(),     ReportVerb(), LogsVerb(),     StopVerb(),       ExecVerb(),
                             StackVerb(),   ActorsVerb(), ScaleVerb(),    ChaosVerb(),      NodesVerb(),
                             CkptVerb(),    DataVerb(),   BenchVerb(),    DoctorVerb(),     TopologyVerb(),
                             HeadVerb(),    AgentVerb(),  TokenVerb(),    NodeVerb(),       UserVerb(),
                             ContextVerb(), AuditVerb(),  VersionVerb(),  CompletionVerb(), LocalWatchVerb()};
  for (Verb& verb : verbs) {
    verb.flags.push_back({"color", '\0', "auto|always|never", "auto: on a terminal, unless NO_COLOR is set"});
    verb.flags.push_back({"help", 'h', "", "this text"});
  }
  return verbs;
}

}  // namespace gtrain::cli
