// The collectives of equal parts: their calls of the backend, and their work for one rank alone.
#include <cstring>
#include <vector>

#include "base/status_macros.h"
#include "comm/exec/exec_communicator.h"
#include "comm/exec/integer_mean.h"

namespace gtrain::comm {
namespace {

Operands InPlace(void* data) { return {.input = data, .output = data}; }

// Whether a mean takes two sums (comm/exec/integer_mean.h). A call that cannot be is left to the first of
// them.
bool TakesTwoSums(const void* data, size_t count, DType dtype, ReduceOp op, int ranks) {
  return op == ReduceOp::kMean && IsInteger(dtype) && ranks > 1 && data != nullptr && count > 0;
}

}  // namespace

absl::Status ExecCommunicator::AllReduce(void* data, size_t count, DType dtype, ReduceOp op) {
  if (!TakesTwoSums(data, count, dtype, op, size())) return AllReduceOnce(data, count, dtype, op);
  const OpRecord record{.count = count, .kind = OpKind::kAllReduce, .dtype = dtype, .op = op};
  return TwoSums(record, data, [&]() -> absl::Status {
    std::vector<int64_t> remainders(count);
    SplitForMean(data, data, remainders.data(), count, dtype, size());
    GT_RETURN_IF_ERROR(AllReduceOnce(data, count, dtype, op));
    GT_RETURN_IF_ERROR(AllReduceOnce(remainders.data(), count, DType::kInt64, ReduceOp::kSum));
    JoinMean(data, remainders.data(), count, dtype, size());
    return absl::OkStatus();
  });
}

absl::Status ExecCommunicator::AllReduceOnce(void* data, size_t count, DType dtype, ReduceOp op) {
  const OpRecord record{.count = count, .kind = OpKind::kAllReduce, .dtype = dtype, .op = op};
  return Call(record, data, [&](const OpRecord& r, const Watch& watch) {
    return backend_->AllReduce(r, InPlace(data), watch);
  });
}

absl::Status ExecCommunicator::Broadcast(void* data, size_t count, DType dtype, int root) {
  const OpRecord record{.count = count, .kind = OpKind::kBroadcast, .dtype = dtype, .root = root};
  return Call(record, data, [&](const OpRecord& r, const Watch& watch) {
    return backend_->Broadcast(r, InPlace(data), watch);
  });
}

absl::Status ExecCommunicator::AllGather(const void* input, void* output, size_t count, DType dtype) {
  const OpRecord record{.count = count, .kind = OpKind::kAllGather, .dtype = dtype};
  GT_RETURN_IF_ERROR(
      Call(record, output == nullptr ? nullptr : input, [&](const OpRecord& r, const Watch& watch) {
        return backend_->AllGather(r, {.input = input, .output = output}, watch);
      }));
  if (size() == 1 && count > 0 && output != input) std::memmove(output, input, count * DTypeSize(dtype));
  return absl::OkStatus();
}

absl::Status ExecCommunicator::ReduceScatter(const void* input, void* output, size_t count, DType dtype,
                                             ReduceOp op) {
  const void* checked = output == nullptr ? nullptr : input;
  if (!TakesTwoSums(checked, count, dtype, op, size()))
    return ReduceScatterOnce(input, output, count, dtype, op);
  const OpRecord record{.count = count, .kind = OpKind::kReduceScatter, .dtype = dtype, .op = op};
  return TwoSums(record, input, [&]() -> absl::Status {
    const size_t all = count * static_cast<size_t>(size());
    std::vector<int64_t> remainders(all), mine(count);
    std::vector<char> quotients(all * DTypeSize(dtype));
    SplitForMean(input, quotients.data(), remainders.data(), all, dtype, size());
    GT_RETURN_IF_ERROR(ReduceScatterOnce(quotients.data(), output, count, dtype, op));
    GT_RETURN_IF_ERROR(
        ReduceScatterOnce(remainders.data(), mine.data(), count, DType::kInt64, ReduceOp::kSum));
    JoinMean(output, mine.data(), count, dtype, size());
    return absl::OkStatus();
  });
}

absl::Status ExecCommunicator::ReduceScatterOnce(const void* input, void* output, size_t count, DType dtype,
                                                 ReduceOp op) {
  const OpRecord record{.count = count, .kind = OpKind::kReduceScatter, .dtype = dtype, .op = op};
  GT_RETURN_IF_ERROR(
      Call(record, output == nullptr ? nullptr : input, [&](const OpRecord& r, const Watch& watch) {
        return backend_->ReduceScatter(r, {.input = input, .output = output}, watch);
      }));
  if (size() == 1 && count > 0 && output != input) std::memmove(output, input, count * DTypeSize(dtype));
  return absl::OkStatus();
}

absl::Status ExecCommunicator::Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) {
  if (!TakesTwoSums(data, count, dtype, op, size())) return ReduceOnce(data, count, dtype, op, root);
  const OpRecord record{.count = count, .kind = OpKind::kReduce, .dtype = dtype, .op = op, .root = root};
  return TwoSums(record, data, [&]() -> absl::Status {
    std::vector<int64_t> remainders(count);
    std::vector<char> quotients(count * DTypeSize(dtype));  // what others than the root gave stays as it is
    SplitForMean(data, quotients.data(), remainders.data(), count, dtype, size());
    GT_RETURN_IF_ERROR(ReduceOnce(quotients.data(), count, dtype, op, root));
    GT_RETURN_IF_ERROR(ReduceOnce(remainders.data(), count, DType::kInt64, ReduceOp::kSum, root));
    if (rank() != root) return absl::OkStatus();
    JoinMean(quotients.data(), remainders.data(), count, dtype, size());
    std::memcpy(data, quotients.data(), quotients.size());
    return absl::OkStatus();
  });
}

absl::Status ExecCommunicator::ReduceOnce(void* data, size_t count, DType dtype, ReduceOp op, int root) {
  const OpRecord record{.count = count, .kind = OpKind::kReduce, .dtype = dtype, .op = op, .root = root};
  return Call(record, data, [&](const OpRecord& r, const Watch& watch) {
    return backend_->Reduce(r, InPlace(data), watch);
  });
}

absl::Status ExecCommunicator::AllToAll(const void* input, void* output, size_t count, DType dtype) {
  const OpRecord record{.count = count, .kind = OpKind::kAllToAll, .dtype = dtype};
  GT_RETURN_IF_ERROR(
      Call(record, output == nullptr ? nullptr : input, [&](const OpRecord& r, const Watch& watch) {
        return backend_->AllToAll(r, {.input = input, .output = output}, watch);
      }));
  if (size() == 1 && count > 0) std::memcpy(output, input, count * DTypeSize(dtype));
  return absl::OkStatus();
}

}  // namespace gtrain::comm
