// The ranks of one machine: they share its memory, so what one of them reads the others need not read.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/engine/agreement.h"

namespace gtrain::ckpt {

struct Mates {
  std::vector<int> ranks;  // of this machine, this one too, ascending; empty: not known yet
  bool any = false;        // on some machine there are several ranks
};

// Collective. `node` is what tells machines apart besides what they say of themselves (MachineKey).
absl::StatusOr<Mates> FindMates(Agreement* agree, const std::string& node);

}  // namespace gtrain::ckpt
