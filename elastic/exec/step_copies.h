// Copies of state that exists once. A part of the model that one rank alone holds (`dp: 1`, or the last one
// along dp) would be lost with it back to the newest checkpoint. So after each step the first rank of each
// part sends its state to that of another part, on another machine where there is one, while both compute the
// next step; and each keeps its own state of the step before, to go back to where a copy was not whole yet.
//
//   after a generation has agreed: Forget, Undo where it says so, Meet
//   before a step is computed: Streams, to run beside it; when they have run: Arrived
//   when the gradients are reduced, all streams have run, and the update is not made: TakeUndo
//
// Who leaves the barrier of step k + 1 knows that all copies of the state after k are whole. So when a rank
// is lost, either the newest step or the one before it is whole everywhere, in the memory of some rank:
// elastic/plan/agree.h chooses. A second loss that comes before the next copies are whole, of a rank and of
// the one that keeps its copy, costs the steps since the newest checkpoint.
//
// Costs three times the part in memory, a copy of the part a step, and the part once over the network a step,
// beside computing. One message more a generation. Not thread-safe; Arrived may be called by the thread of
// the streams while nothing else is.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/port/communicator.h"
#include "elastic/exec/state_streams.h"
#include "elastic/plan/agree.h"

namespace gtrain::elastic {

class StepCopies {
 public:
  // The state of this rank, which is the caller's and outlives this.
  explicit StepCopies(std::vector<absl::Span<char>> own);

  int64_t undo_step() const { return undo_step_; }
  // Of parts of other ranks; a step of -1: nothing.
  std::vector<PartCopy> held() const;

  // Lets go of what is of a later step: it was undone, and that step will be made again, maybe otherwise.
  void Forget(int64_t later_than);
  // The state becomes what it was after undo_step().
  void Undo();
  void TakeUndo(int64_t step);

  // Of the ranks of a part those of copy 0 take part: `cell` and `copy` are this rank's. `cells` and
  // `machines`: index = rank. Blocks for one message.
  absl::Status Meet(Communicator& comm, int cell, int copy, absl::Span<const int> cells,
                    absl::Span<const int> machines);
  // Of the state as it is now, after `step`. The copy of the oldest step is overwritten.
  std::vector<StateStream> Streams();
  void Arrived(int64_t step);

  // The pieces of a copy that held() has.
  std::vector<absl::Span<char>> Pieces(int cell, int64_t step);

 private:
  struct Slot {
    PartCopy copy;
    std::vector<int64_t> sizes;  // of its blocks
    std::vector<char> memory;
    std::vector<absl::Span<char>> Blocks();
  };
  absl::Status ExchangeSizes(Communicator& comm);
  Slot& Oldest();

  const std::vector<absl::Span<char>> own_;
  std::vector<char> undo_;
  int64_t undo_step_ = -1;
  int keeps_mine_ = -1, cell_ = -1, of_rank_ = -1;
  std::vector<int64_t> sizes_;  // of the blocks of `of_rank_`
  std::array<Slot, 2> slots_;
  Slot* coming_ = nullptr;  // what Streams receives
};

}  // namespace gtrain::elastic
