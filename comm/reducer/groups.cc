#include "comm/reducer/groups.h"

#include "base/status_macros.h"

namespace gtrain::comm {

absl::Status Groups::Open(bool compressed) {
  if (!compressed || machine_ != nullptr) return absl::OkStatus();
  if (machines_ == 0) {
    int32_t machines = all_->machine() + 1;
    GT_RETURN_IF_ERROR(all_->AllReduce(&machines, 1, DType::kInt32, ReduceOp::kMax));
    machines_ = machines;
  }
  if (machines_ == 1 || machines_ == all_->size()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(machine_, all_->Split(all_->machine(), all_->rank()));
  GT_ASSIGN_OR_RETURN(leaders_, all_->Split(machine_->rank() == 0 ? 0 : -1, all_->rank()));
  return absl::OkStatus();
}

}  // namespace gtrain::comm
