#include "comm/backends/staged_backend.h"

#include <algorithm>
#include <cstring>

#include "base/status_macros.h"

namespace gtrain::comm {

absl::Status CompareRecords(absl::Span<const OpRecord> by_rank) {
  const absl::Status status = CheckAgreement(by_rank);
  return status.ok() ? status : KnownToAll(status);
}

absl::Status StagedBackend::CompareNeighbours(const OpRecord& record) const {
  bool same = true;
  for (int i = 0; i < shm_->size(); ++i) same &= SameOperation(shm_->Record(i), record);
  if (same) return absl::OkStatus();
  std::vector<OpRecord> records;
  for (int i = 0; i < shm_->size(); ++i) records.push_back(shm_->Record(i));
  return CompareRecords(records);
}

absl::Status StagedBackend::StagedBroadcast(const OpRecord& r, char* data, const Carry& carry, bool beside,
                                            const Watch& watch) {
  const uint64_t total = r.count * DTypeSize(r.dtype), chunks = (total + kSlotBytes - 1) / kSlotBytes;
  const bool roots = rank() == r.root;
  const auto bytes = [&](uint64_t c) { return std::min<uint64_t>(kSlotBytes, total - c * kSlotBytes); };

  const Pipeline::Work in = [&](uint64_t c) {
    if (roots) std::memcpy(pipeline_.Result(c), data + c * kSlotBytes, bytes(c));
    return absl::OkStatus();
  };
  const Pipeline::Work between = [&](uint64_t c) { return carry(c, bytes(c)); };
  const Pipeline::Work out = [&](uint64_t c) {
    if (!roots) std::memcpy(data + c * kSlotBytes, pipeline_.Result(c), bytes(c));
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_ASSIGN_OR_RETURN(const bool direct, pipeline_.Begin(r, in, chunks, enter, watch));
  if (direct) {
    if (!roots) {
      GT_ASSIGN_OR_RETURN(const char* source, shm_->Resolve(shm_->Record(r.root), total, watch));
      std::memcpy(data, source, total);
    }
    return shm_->Phase(watch);
  }
  if (nodes() == 1) return pipeline_.Run(chunks, {in, out}, watch);
  return pipeline_.Run(chunks, {in, {between, beside}, out}, watch);
}

absl::Status StagedBackend::StagedAllGather(const OpRecord& r, const char* input, char* output,
                                            const Carry& carry, bool beside, const Watch& watch) {
  const uint64_t total = r.count * DTypeSize(r.dtype);
  const uint64_t per_chunk = shm_->result_bytes() / order_.size() / 64 * 64;
  const uint64_t chunks = (total + per_chunk - 1) / per_chunk;
  const auto place = static_cast<size_t>(std::ranges::find(order_, rank()) - order_.begin());
  const auto bytes = [&](uint64_t c) { return std::min<uint64_t>(per_chunk, total - c * per_chunk); };

  const Pipeline::Work in = [&](uint64_t c) {
    std::memcpy(pipeline_.Result(c) + place * bytes(c), input + c * per_chunk, bytes(c));
    return absl::OkStatus();
  };
  const Pipeline::Work between = [&](uint64_t c) { return carry(c, bytes(c)); };
  const Pipeline::Work out = [&](uint64_t c) {
    for (size_t i = 0; i < order_.size(); ++i) {
      char* target = output + static_cast<size_t>(order_[i]) * total + c * per_chunk;
      // The caller may pass its own part of the output as input: it is in place already.
      if (target != input + c * per_chunk) std::memcpy(target, pipeline_.Result(c) + i * bytes(c), bytes(c));
    }
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_RETURN_IF_ERROR(pipeline_.Begin(r, in, chunks, enter, watch).status());
  if (nodes() == 1) return pipeline_.Run(chunks, {in, out}, watch);
  return pipeline_.Run(chunks, {in, {between, beside}, out}, watch);
}

}  // namespace gtrain::comm
