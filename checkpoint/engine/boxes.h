// Ranks tell each other which boxes they hold (Checkpointer::AddBox).
#pragma once
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/engine/agreement.h"
#include "checkpoint/plan/save_plan.h"
#include "sharding/box.h"

namespace gtrain::ckpt {

// This rank's box of a tensor that was registered with Layout::kBoxes.
struct OwnBox {
  size_t registered = 0;
  sharding::Box box;
};

// Collective; tensors and their shapes are equal on all ranks. Fills in GlobalTensor::boxes, one list for all
// tensors that are cut alike. InvalidArgument, the same on all ranks, names the tensor and ranks whose boxes
// overlap, or says that they leave a part of it to nobody, or that there are too many ways to cut
// (kBoxRanksMax). A rank sends 16 bytes a tensor into a sum over all ranks, and then 16 bytes a dimension for
// each way to cut, to all.
absl::Status ShareBoxes(Agreement* agree, absl::Span<const OwnBox> own, std::vector<Registered>* registered);

}  // namespace gtrain::ckpt
