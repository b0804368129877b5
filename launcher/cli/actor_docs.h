// What the processes of a job say of their actors (actors/exec/listing.h), read into plain values, and shown.
// It comes from a program of the user's: nothing in it is believed, and no byte reaches the terminal unshown.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::cli {

struct ActorDoc {
  int rank = 0;
  std::string hostname;
  uint64_t number = 0;
  std::string type, name, state, method;
  std::optional<absl::Duration> since;  // it is in that state
  int64_t thread = 0;                   // of the system, that is inside; 0: none
  uint64_t waiting = 0, waiting_bytes = 0, answered = 0, restarts = 0;
  double per_second = 0;
  absl::Duration half, most;
  bool kept = false;
  std::optional<int64_t> owner;
};

struct ClassDoc {
  uint64_t actors = 0, running = 0, awaiting = 0, waiting = 0, waiting_bytes = 0, answered = 0, restarts = 0;
  double per_second = 0;
};

struct RankActors {
  int rank = 0;
  std::string hostname;
  std::string error;  // why it said nothing
  bool has_actors = false;
  uint64_t count = 0;  // of actors that were asked for
  std::map<std::string, ClassDoc> classes;
  std::vector<ActorDoc> actors;
};
// `answer`: the head's, to ClientActors.
RankActors ParseRankActors(int rank, const absl::StatusOr<std::string>& answer);
// The same as one JSON object, as far as it could be read.
std::string JsonOf(const std::string& job, const std::vector<RankActors>& ranks, size_t limit);

// The `limit` busiest of all, the busiest first.
std::vector<ActorDoc> BusiestOf(const std::vector<RankActors>& ranks, size_t limit);
// Totals of each class, the busiest actors, and of ranks of which not all are shown, or that said nothing, a
// line each.
std::string ActorsText(const std::string& job, const std::vector<RankActors>& ranks, size_t limit);

// "3/17 (Shard ps/0) on gpu-7: running Push for 12s"
std::string ActorLine(const ActorDoc& actor);

// What names one: "RANK/NUMBER", else the name of its spawn.
struct ActorWord {
  std::optional<int> rank;
  uint64_t number = 0;
  std::string name;
};
absl::StatusOr<ActorWord> ParseActorWord(absl::string_view word);
// What the process is asked.
std::string QuestionFor(const ActorWord& word);
std::string QuestionFor(absl::string_view type, size_t limit);

// What stacks of a rank (runtime/keeper/stacks.cc) say of one thread; empty: nothing.
std::string StackOfThread(absl::string_view text, int64_t thread);

}  // namespace gtrain::cli
