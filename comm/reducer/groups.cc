#include "comm/reducer/groups.h"

#include "absl/strings/str_cat.h"
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

void Groups::Abort(const absl::Status& why) {
  for (Communicator* group : {machine_.get(), leaders_.get(), all_}) {
    if (group != nullptr) group->Abort(why);
  }
}

absl::Status AgreeOn(Communicator& communicator, const absl::Status& own) {
  int32_t first = own.ok() ? communicator.size() : communicator.rank();
  GT_RETURN_IF_ERROR(communicator.AllReduce(&first, 1, DType::kInt32, ReduceOp::kMin));
  if (first == communicator.size()) return absl::OkStatus();
  struct {
    int32_t code = 0;
    char words[508] = {};
  } error;
  error.code = own.raw_code();
  if (!own.ok()) own.message().copy(error.words, sizeof(error.words) - 1);
  GT_RETURN_IF_ERROR(communicator.Broadcast(&error, sizeof(error), DType::kUint8, first));
  if (!own.ok()) return own;
  return absl::Status(static_cast<absl::StatusCode>(error.code),
                      absl::StrCat("rank ", first, ": ", error.words));
}

}  // namespace gtrain::comm
