// Agreement among the ranks before one of them acts. All calls are collective; with one rank they are local.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/port/communicator.h"

namespace gtrain::ckpt {

// Not thread-safe; blocks as its communicator does. `comm` may be null when there is one rank, and must
// outlive it.
class Agreement {
 public:
  explicit Agreement(Communicator* comm) : comm_(comm) {}

  int rank() const { return comm_ == nullptr ? 0 : comm_->rank(); }
  int size() const { return comm_ == nullptr ? 1 : comm_->size(); }
  absl::Status Max(absl::Span<int64_t> values);
  // Wraps around.
  absl::Status Sum(absl::Span<int64_t> values);
  absl::StatusOr<std::vector<int64_t>> Gather(int64_t value);
  // Gathers the values of all ranks, as many from each as `mine` has, in rank order.
  absl::StatusOr<std::vector<int64_t>> GatherAll(absl::Span<const int64_t> mine);
  // Broadcasts the text of `root`; the part over `bytes_max` is cut off.
  absl::Status Broadcast(std::string* text, int root = 0, size_t bytes_max = 64 << 10);
  // Returns OK when every rank's status is OK. Else each rank returns an error of the lowest rank that has
  // one: its code, message and whether it is the storage's (IsStorageError), with the rank named.
  absl::Status AllOk(const absl::Status& mine);

 private:
  Communicator* const comm_;
};

}  // namespace gtrain::ckpt
