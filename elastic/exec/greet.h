// The all-gather in which the members of a generation meet, and what they make of it.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/port/communicator.h"
#include "elastic/exec/likeness.h"
#include "elastic/plan/agree.h"
#include "elastic/plan/greeting.h"
#include "elastic/plan/hand_over.h"

namespace gtrain::elastic {

// What the members of a generation have told each other.
struct Greeted {
  std::vector<MemberState> members;  // index = rank, as below
  std::vector<int> machines;
  std::vector<BatchShare> computed;
  std::vector<LikenessHashes> likeness;
  Greeting::Save newest;  // as if one had just begun where nobody knows of one
  int64_t carriers = 0;
  bool stop = false;
};

// Collective, an all-gather of sizeof(GreetingWords) bytes a rank. Fills in `machine` of `own`.
absl::StatusOr<Greeted> Greet(Communicator& comm, Greeting own);

// Collective, as Likeness::Check. `cells`: index = rank. Ranks are compared with the lowest that has the
// state, and in what follows from the part of the model with that of their own.
absl::Status CheckLikeness(const Likeness& likeness, Communicator& comm, const Greeted& all,
                           const Agreement& agreement, const std::vector<int>& cells);

}  // namespace gtrain::elastic
