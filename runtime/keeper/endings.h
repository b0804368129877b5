// How a generation ends, in phases: kEnding (asked, within the grace), kKilling (SIGKILL to every descendant
// until a scan finds none), kWriting (its logs), kGone. Processes that are kept for another generation leave
// between the first two (kept_ranks.h). The keeper is the subreaper of all, so whatever
// escaped by double fork and setsid is still its descendant (fault P6).
//
// Owner thread only; nothing blocks. A scan of the process table, every 15 ms while a generation is killed,
// costs about as much as the machine has processes.
#pragma once
#include <stdint.h>
#include <sys/types.h>

#include <string>

#include "runtime/keeper/arenas.h"
#include "runtime/keeper/children.h"
#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/kept_ranks.h"
#include "runtime/keeper/outputs.h"
#include "runtime/keeper/ranks.h"

namespace gtrain::keeper {

class Endings {
 public:
  Endings(Context& context, Children& children, Connections& connections, Outputs& outputs, Ranks& ranks,
          KeptRanks& kept, Arenas& arenas)
      : context_(context),
        children_(children),
        connections_(connections),
        outputs_(outputs),
        ranks_(ranks),
        kept_(kept),
        arenas_(arenas) {}

  struct How {
    End mode = End::kReform;
    int64_t grace_ms = 0;
    std::string reason;
    bool ordered = true;  // not because all ranks have exited
    bool keep = false;    // EndGeneration::keep
  };
  // Begins the end, or makes it harder.
  void Begin(GenerationRecord& record, const How& how);
  // Goes on with what is due; begins the end of a generation whose ranks have all exited.
  void Advance(GenerationRecord& record);

 private:
  void TermRanks(GenerationRecord& record, bool also_sdk);
  bool GraceIsOver(GenerationRecord& record);
  void KillLeftovers(GenerationRecord& record);
  bool Owns(const GenerationRecord& record, pid_t pid, pid_t top) const;
  void Finish(GenerationRecord& record, bool clean, const std::string& message);
  void AwaitLogs(GenerationRecord& record);

  Context& context_;
  Children& children_;
  Connections& connections_;
  Outputs& outputs_;
  Ranks& ranks_;
  KeptRanks& kept_;
  Arenas& arenas_;
};

}  // namespace gtrain::keeper
