// Keeps what a process has measured of its links to other machines for its later communicators: its fabric
// has it as text. Ranks that have all measured together have it alike, and need not measure again, also where
// some of them are gone. Used within calls of a communicator, one at a time; nothing blocks but Learn.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "comm/backends/between_machines.h"
#include "comm/port/bootstrap.h"
#include "comm/port/watch.h"

namespace gtrain::comm {

class LinkMemory {
 public:
  static constexpr size_t kMarkBytes = 16;

  // Nothing is remembered before this is called. The fabric is that of `bootstrap`, which outlives this, once
  // it is open.
  void KeepWith(Bootstrap* bootstrap) { bootstrap_ = bootstrap; }

  // A mark of what this process has measured, kMarkBytes digits that the others are told: all have it alike
  // who measured together. Learn takes just that, whatever another communicator measures meanwhile.
  std::string Mark();
  // `marks`: of all ranks.
  void TakeMarks(const std::vector<std::string>& marks);
  // Gives `between` what all have measured together, or has it measure, which is collective. `memory`:
  // BetweenMachines::Measure.
  absl::Status Learn(BetweenMachines* between, char* memory, const Watch& watch);
  void Remember(const BetweenMachines& between);

 private:
  Bootstrap* bootstrap_ = nullptr;
  std::string known_;      // when Mark was asked
  bool all_know_ = false;  // the same
};

}  // namespace gtrain::comm
