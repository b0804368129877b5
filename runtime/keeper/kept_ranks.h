// Processes between two generations (`elastic.mode: in-place`). A process that can go on in another
// generation and has let go of the one that ended waits here, until it is given its place in the next one or
// is ended because there is none for it. So does one that was started beside a generation, come up or not.
//
// Owner thread only; nothing blocks. A turn looks at each process that waits, which are at most the ranks of
// one generation on this machine, and only while some are being ended or it is time to see how long they
// wait.
#pragma once
#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/keeper/children.h"
#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/outputs.h"
#include "runtime/keeper/ranks.h"

namespace gtrain::keeper {

class KeptRanks final : public ChildOwner {
 public:
  KeptRanks(Context& context, Connections& connections, Outputs& outputs, Ranks& ranks)
      : context_(context), connections_(connections), outputs_(outputs), ranks_(ranks) {}

  // Takes the processes that have let go of the generation out of it.
  void Take(GenerationRecord& record);
  // The process that `start` names goes on as that rank. False: it is not here, or cannot be told.
  bool GoOn(GenerationRecord& record, StartRank& start);
  // What became of a process that cannot go on, as an exit of whichever rank it was to be: a loss, however it
  // ended.
  Exited TakeDeath(const Kept& born);
  // Every rank of the newest generation has its process: those that wait and those that are dead are
  // nobody's.
  void LeaveOut(uint64_t generation);
  // Ends those that were in no generation later than this.
  void End(uint64_t generation, int64_t grace_ms);
  // Kills those whose grace is over, and what the dead have left behind.
  void Advance();

  // Those that can go on as members, or those that have not come up yet.
  std::vector<Kept> List(bool ready) const;
  Gone TellOf(uint64_t generation, bool clean, const std::string& message) const {
    return {generation, clean, message, List(true), List(false)};
  }
  // nullptr: it does not wait here. A number is that of a rank of kNoGeneration.
  RankProcess* Find(int number);
  std::optional<int> NumberOf(const Kept& born) const;
  // Whether an orphan with this $GTRAIN_TOKEN was started by a process that waits.
  bool OwnsToken(const std::string& token) const;
  bool empty() const { return kept_.empty(); }
  bool AnyEnding() const { return ending_ > 0; }

  bool OnDied(const siginfo_t& info) override;
  std::optional<uint64_t> GenerationOf(pid_t child) override;

 private:
  struct Waiting {
    std::unique_ptr<RankProcess> rank;
    uint64_t generation = 0;  // that it was in last
    int64_t since_ms = 0;
    int64_t kill_at_ms = 0;  // 0: it may wait
    bool killed = false;
  };

  // Of those that are not ended.
  std::map<int, Waiting>::iterator Find(const Kept& born);
  void End(Waiting& waiting, int64_t grace_ms, std::vector<ProcessEntry>* processes);
  void EndOrphans();
  void EndForgotten();

  Context& context_;
  Connections& connections_;
  Outputs& outputs_;
  Ranks& ranks_;
  std::map<int, Waiting> kept_;  // by a number, under which Connections has it as a rank of kNoGeneration
  int next_ = 0;
  size_t ending_ = 0;
  int64_t next_look_ms_ = 0;    // at how long they have waited
  std::set<std::string> dead_;  // tokens of those that have died, whose orphans are to be ended
  // What became of those that died while they waited, until a generation has begun without them.
  std::vector<std::pair<Kept, Exited>> deaths_;
};

}  // namespace gtrain::keeper
