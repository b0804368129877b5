// What really happened to the actors of a simulated job, and what their callers were told: the promises of
// docs/actors.md are checked whenever something is added. A violation is named by the number of its promise.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "actors/exec/host.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

class ActorTruth {
 public:
  // What the methods of the one class do: add the call to the state, tell the state, throw.
  enum Method { kAdd, kRead, kThrow, kMethods };

  // An object of the class.
  struct Life {
    size_t index = 0;
    int actor = 0, process = 0;
    bool alive = true;
    bool begun = false;            // it has run a call
    std::vector<size_t> done;      // the calls in its state, in their order
    std::map<int, uint64_t> last;  // of each caller
  };
  struct Actor {
    int owner = 0, restarts = 0;
    bool kept = false;
    std::optional<absl::Status> spawned;
    actors::ActorRef ref;
    bool ended = false;  // by its owner
    int throws = 0;
    std::set<int> places;  // processes that have had it
    size_t alive = 0;
    std::set<size_t> heard;        // calls that somebody knows to be in its state
    std::set<size_t> never;        // calls that somebody knows not to be
    std::map<int, uint64_t> last;  // of each caller, over all lives
    // By life: the first and the last call whose caller was told that it was done.
    std::map<size_t, std::pair<uint64_t, uint64_t>> told;
  };
  struct Call {
    int actor = 0, caller = 0, method = kAdd;
    uint64_t order = 0;  // of the calls of its caller
    int64_t deadline = 0;
    uint64_t ran = 0;  // when, as a number; 0: it has not
    bool answered = false;
    absl::StatusCode code = absl::StatusCode::kOk;
  };

  explicit ActorTruth(Kernel& kernel) : kernel_(kernel) {}

  // ---- processes
  int NewProcess();
  // Its generation goes on without it; `dead`: and it does nothing more.
  void Lost(int process, bool dead);
  // It does nothing until then.
  void Pause(int process, int64_t until) { processes_[static_cast<size_t>(process)].paused_until = until; }
  bool IsLost(int process) const { return processes_[static_cast<size_t>(process)].lost; }

  // ---- what is asked, and what it came to
  int NewActor(int owner, bool kept, int restarts);
  void Spawned(int actor, const absl::Status& status, absl::string_view result);
  void LetGo(int actor) { actors_[static_cast<size_t>(actor)].ended = true; }
  size_t NewCall(int actor, int caller, int method, int64_t deadline);
  void Answered(size_t call, const absl::Status& status, absl::string_view result);

  // ---- what runs
  Life* Made(int actor, int process);
  absl::Status Load(Life& life, absl::string_view state);
  std::string Save(const Life& life) const;
  // The result.
  std::string Run(Life& life, size_t call);
  void Threw(Life& life, size_t call);
  void Destroyed(Life& life);

  // Faults are over, and all that was asked is answered.
  void CheckRest();
  // It is known to its owner, which is there, and has not been lost more often than it may.
  bool ShouldLive(int actor) const;
  // The object that it is, when all is at rest.
  const Life* Only(int actor) const;

  const std::vector<Actor>& actors() const { return actors_; }
  const std::vector<Call>& calls() const { return calls_; }
  size_t unanswered() const { return unanswered_; }

 private:
  struct Process {
    bool lost = false, dead = false;
    int64_t paused_until = 0;
    uint64_t calls = 0;
  };
  template <typename... Words>
  void Fail(const char* promise, const Words&... words) {
    kernel_.Fail(absl::StrCat("actors ", promise), absl::StrCat(words...));
  }
  std::string Say(size_t call) const;
  Actor& ActorOf(int actor) { return actors_[static_cast<size_t>(actor)]; }
  void CheckOk(size_t number, absl::string_view result);
  void CheckError(size_t number, const absl::Status& status);
  void CheckState(const Life& life, const char* when);
  void CheckTold(Actor& actor, const Life& life, uint64_t ran, size_t call);
  void CheckActorAtRest(int number);

  Kernel& kernel_;
  std::vector<Process> processes_;
  std::vector<Actor> actors_;
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<Life>> lives_;
  uint64_t ran_ = 0;
  int any_lost_ = 0;
  size_t unanswered_ = 0;
};

}  // namespace gtrain::sim
