// How the state of a part of the model gets from the ranks that have it to those that need it
// (elastic/plan/hand_over.h says who sends what).
#pragma once
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/port/communicator.h"
#include "elastic/exec/state_streams.h"
#include "elastic/plan/hand_over.h"

namespace gtrain::elastic {

// What `rank`, one of the sources, sends; to be run beside the program. `pieces`: of the whole part.
std::vector<StateStream> GiveStreams(const PartHandOver& hand_over, int rank,
                                     absl::Span<const absl::Span<char>> pieces);

// Called by every taker; `rank` is this one. `among` has the takers in their order, and may be null where
// there is one. Blocks until all pieces are there. Errors of RunStreams.
absl::Status TakePieces(const PartHandOver& hand_over, int rank, absl::Span<const absl::Span<char>> pieces,
                        Communicator& comm, Communicator* among);

}  // namespace gtrain::elastic
