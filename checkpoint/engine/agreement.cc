#include "checkpoint/engine/agreement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/engine/storage_error.h"

namespace gtrain::ckpt {

absl::Status Agreement::Max(absl::Span<int64_t> values) {
  if (comm_ == nullptr) return absl::OkStatus();
  return comm_->AllReduce(values.data(), values.size(), DType::kInt64, ReduceOp::kMax);
}

absl::Status Agreement::Sum(absl::Span<int64_t> values) {
  if (comm_ == nullptr) return absl::OkStatus();
  return comm_->AllReduce(values.data(), values.size(), DType::kInt64, ReduceOp::kSum);
}

absl::StatusOr<std::vector<int64_t>> Agreement::Gather(int64_t value) {
  if (comm_ == nullptr) return std::vector<int64_t>{value};
  std::vector<int64_t> out(static_cast<size_t>(comm_->size()));
  GT_RETURN_IF_ERROR(comm_->AllGather(&value, out.data(), 1, DType::kInt64));
  return out;
}

absl::StatusOr<std::vector<int64_t>> Agreement::GatherAll(absl::Span<const int64_t> mine) {
  if (comm_ == nullptr) return std::vector<int64_t>(mine.begin(), mine.end());
  std::vector<int64_t> out(mine.size() * static_cast<size_t>(comm_->size()));
  if (mine.empty()) return out;
  GT_RETURN_IF_ERROR(comm_->AllGather(mine.data(), out.data(), mine.size(), DType::kInt64));
  return out;
}

absl::Status Agreement::Broadcast(std::string* text, int root, size_t bytes_max) {
  if (comm_ == nullptr) return absl::OkStatus();
  if (text->size() > bytes_max) text->resize(bytes_max);
  int64_t bytes = static_cast<int64_t>(text->size());
  GT_RETURN_IF_ERROR(comm_->Broadcast(&bytes, 1, DType::kInt64, root));
  if (bytes < 0 || static_cast<size_t>(bytes) > bytes_max) {
    return absl::InternalError("a broadcast text of impossible length");
  }
  text->resize(static_cast<size_t>(bytes));
  if (bytes == 0) return absl::OkStatus();
  return comm_->Broadcast(text->data(), text->size(), DType::kUint8, root);
}

absl::Status Agreement::AllOk(const absl::Status& mine) {
  if (comm_ == nullptr) return mine;
  GT_ASSIGN_OR_RETURN(
      const std::vector<int64_t> codes,
      Gather(static_cast<int64_t>(mine.code()) | (IsStorageError(mine) ? kStorageErrorMark : int64_t{0})));
  const auto failed = std::find_if(codes.begin(), codes.end(), [](int64_t code) { return code != 0; });
  if (failed == codes.end()) return absl::OkStatus();
  const int rank = static_cast<int>(failed - codes.begin());
  std::string message(mine.message());
  GT_RETURN_IF_ERROR(Broadcast(&message, rank));
  const absl::Status agreed(static_cast<absl::StatusCode>(*failed & ~kStorageErrorMark),
                            absl::StrCat("rank ", rank, ": ", message));
  return (*failed & kStorageErrorMark) != 0 ? StorageError(agreed) : agreed;
}

}  // namespace gtrain::ckpt
