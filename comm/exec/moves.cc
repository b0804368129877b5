// Broadcast, all-gather and all-to-all.
#include <algorithm>
#include <cstring>

#include "base/status_macros.h"
#include "comm/exec/exec_communicator.h"

namespace gtrain::comm {

// ------------------------------------------------------------------ broadcast

absl::Status ExecCommunicator::Broadcast(void* data, size_t count, DType dtype, int root) {
  const OpRecord record{.count = count, .kind = OpKind::kBroadcast, .dtype = dtype, .root = root};
  return Call(record, data, count * DTypeSize(dtype), [&](OpRecord& r, const Watch& watch) -> absl::Status {
    if (shm_ != nullptr) return SharedBroadcast(r, static_cast<char*>(data), watch);
    GT_RETURN_IF_ERROR(Enter(r, watch));
    return runner_.Run(TreeBroadcast(hierarchy_.node, nodes(), hierarchy_.NodeOf(root), count), data, dtype,
                       ReduceOp::kSum, rail_.get(), watch);
  });
}

absl::Status ExecCommunicator::SharedBroadcast(const OpRecord& r, char* data, const Watch& watch) {
  const uint64_t total = r.count * DTypeSize(r.dtype), chunks = (total + kSlotBytes - 1) / kSlotBytes;
  const int root_node = hierarchy_.NodeOf(r.root);
  auto bytes = [&](uint64_t c) { return std::min<uint64_t>(kSlotBytes, total - c * kSlotBytes); };

  const Stage in = [&](uint64_t c) {
    if (rank() == r.root) std::memcpy(shm_->Result(chunk_ + c), data + c * kSlotBytes, bytes(c));
    return absl::OkStatus();
  };
  const Stage between = [&](uint64_t c) {
    const int rails = RailsOfBroadcast(carriers_, nodes(), bytes(c));
    const Range part = RailPart(bytes(c), rails, hierarchy_.local);
    return runner_.Run(TreeBroadcast(hierarchy_.node, nodes(), root_node, part.count),
                       shm_->Result(chunk_ + c) + part.begin, DType::kUint8, ReduceOp::kSum, rail_.get(),
                       watch);
  };
  const Stage out = [&](uint64_t c) {
    if (rank() != r.root) std::memcpy(data + c * kSlotBytes, shm_->Result(chunk_ + c), bytes(c));
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (direct) {
    if (rank() != r.root) {
      GT_ASSIGN_OR_RETURN(char* source, shm_->Resolve(shm_->Record(r.root), total, watch));
      std::memcpy(data, source, total);
    }
    return shm_->Phase(watch);
  }
  if (nodes() == 1) return Pipeline(chunks, {in, out}, watch);
  return Pipeline(chunks, {in, between, out}, watch);
}

// ------------------------------------------------------------------ all-gather, barrier

absl::Status ExecCommunicator::AllGather(const void* input, void* output, size_t count, DType dtype) {
  const OpRecord record{.count = count, .kind = OpKind::kAllGather, .dtype = dtype};
  const size_t bytes = count * DTypeSize(dtype);
  const void* checked = output == nullptr ? nullptr : input;
  char* own = static_cast<char*>(output) + (count > 0 ? static_cast<size_t>(rank()) * bytes : 0);
  GT_RETURN_IF_ERROR(Call(record, checked, 0, [&](OpRecord& r, const Watch& watch) {
    r.arena = 0;
    const char* source = static_cast<const char*>(input);
    if (shm_ != nullptr) return SharedAllGather(r, source, static_cast<char*>(output), watch);
    if (bytes > 0 && own != source) std::memmove(own, source, bytes);
    return FlatAllGather(r, static_cast<char*>(output), watch);
  }));
  if (size() == 1 && bytes > 0 && own != input) std::memmove(own, input, bytes);
  return absl::OkStatus();
}

// One result buffer holds a chunk of every rank, node by node.
absl::Status ExecCommunicator::SharedAllGather(const OpRecord& r, const char* input, char* output,
                                               const Watch& watch) {
  const std::vector<int> order = hierarchy_.NodeMajor();
  const uint64_t total = r.count * DTypeSize(r.dtype);
  const uint64_t per_chunk = shm_->result_bytes() / order.size() / 64 * 64;
  const uint64_t chunks = (total + per_chunk - 1) / per_chunk;
  const size_t place = static_cast<size_t>(std::find(order.begin(), order.end(), rank()) - order.begin());
  auto bytes = [&](uint64_t c) { return std::min<uint64_t>(per_chunk, total - c * per_chunk); };
  size_t most = 0;  // ranks of a machine
  for (const auto& ranks : hierarchy_.nodes) most = std::max(most, ranks.size());

  const Stage in = [&](uint64_t c) {
    std::memcpy(shm_->Result(chunk_ + c) + place * bytes(c), input + c * per_chunk, bytes(c));
    return absl::OkStatus();
  };
  const Stage between = [&](uint64_t c) {
    const int rails = RailsOfAllGather(carriers_, nodes(), most * bytes(c));
    std::vector<Range> parts;
    uint64_t at = 0;
    for (const auto& ranks : hierarchy_.nodes) {
      const uint64_t of_machine = ranks.size() * bytes(c);
      Range part = RailPart(of_machine, rails, hierarchy_.local);
      part.begin += at;
      at += of_machine;
      parts.push_back(part);
    }
    return runner_.Run(AllGatherSchedule(hierarchy_.node, parts), shm_->Result(chunk_ + c), DType::kUint8,
                       ReduceOp::kSum, rail_.get(), watch);
  };
  const Stage out = [&](uint64_t c) {
    for (size_t i = 0; i < order.size(); ++i) {
      char* target = output + static_cast<size_t>(order[i]) * total + c * per_chunk;
      // The caller may pass its own part of the output as input: it is in place already.
      if (target != input + c * per_chunk)
        std::memcpy(target, shm_->Result(chunk_ + c) + i * bytes(c), bytes(c));
    }
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (nodes() == 1) return Pipeline(chunks, {in, out}, watch);
  return Pipeline(chunks, {in, between, out}, watch);
}

absl::Status ExecCommunicator::FlatAllGather(const OpRecord& r, char* output, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  // With one rank on each machine node order is rank order.
  std::vector<Range> parts;
  for (size_t i = 0; i < static_cast<size_t>(size()); ++i) parts.push_back({i * r.count, r.count});
  return runner_.Run(AllGatherSchedule(hierarchy_.node, parts), output, r.dtype, ReduceOp::kSum, rail_.get(),
                     watch);
}

// ------------------------------------------------------------------ all-to-all

absl::Status ExecCommunicator::AllToAll(const void* input, void* output, size_t count, DType dtype) {
  const OpRecord record{.count = count, .kind = OpKind::kAllToAll, .dtype = dtype};
  const void* checked = output == nullptr ? nullptr : input;
  const size_t bytes = count * DTypeSize(dtype);
  GT_RETURN_IF_ERROR(
      Call(record, checked, bytes * static_cast<size_t>(size()), [&](OpRecord& r, const Watch& watch) {
        const char* from = static_cast<const char*>(input);
        char* to = static_cast<char*>(output);
        if (nodes() == 1) return LocalAllToAll(r, from, to, watch);
        return shm_ == nullptr ? FlatAllToAll(r, from, to, watch) : MixedAllToAll(r, from, to, watch);
      }));
  if (size() == 1 && bytes > 0) std::memcpy(output, input, bytes);
  return absl::OkStatus();
}

absl::Status ExecCommunicator::LocalAllToAll(const OpRecord& r, const char* input, char* output,
                                             const Watch& watch) {
  const size_t element = DTypeSize(r.dtype), block = r.count * element;
  const int ranks = size(), self = rank();
  const auto nth = [&](int i) { return static_cast<size_t>(i) * block; };
  if (const size_t all = nth(ranks); Inline(all)) {
    GT_RETURN_IF_ERROR(Enter(r, watch, input, all));
    for (int i = 0; block > 0 && i < ranks; ++i) {
      std::memcpy(output + nth(i), shm_->Payload(i) + nth(self), block);
    }
    return absl::OkStatus();
  }

  const uint64_t per_chunk = PerChunk(element), chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto bytes = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk) * element; };
  const auto place = [&](int of) { return static_cast<size_t>(of) * per_chunk * element; };
  const Stage in = [&](uint64_t c) {
    const size_t at = c * per_chunk * element;
    std::memcpy(output + nth(self) + at, input + nth(self) + at, bytes(c));
    for (int step = 1; step < ranks; ++step) {
      const int to = (self + step) % ranks;
      std::memcpy(shm_->Slot(self, chunk_ + c) + place(to), input + nth(to) + at, bytes(c));
    }
    return absl::OkStatus();
  };
  const Stage out = [&](uint64_t c) {
    for (int step = 1; step < ranks; ++step) {
      const int from = (self + step) % ranks;
      std::memcpy(output + nth(from) + c * per_chunk * element, shm_->Slot(from, chunk_ + c) + place(self),
                  bytes(c));
    }
    return absl::OkStatus();
  };
  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (!direct) return Pipeline(chunks, {in, out}, watch);
  for (int step = 0; step < ranks; ++step) {
    const int from = (self + step) % ranks;
    GT_ASSIGN_OR_RETURN(const char* theirs, shm_->Resolve(shm_->Record(from), nth(ranks), watch));
    std::memcpy(output + nth(from), theirs + nth(self), block);
  }
  return shm_->Phase(watch);
}

absl::Status ExecCommunicator::FlatAllToAll(const OpRecord& r, const char* input, char* output,
                                            const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const size_t block = r.count * DTypeSize(r.dtype), own = static_cast<size_t>(rank()) * block;
  if (block > 0) std::memcpy(output + own, input + own, block);
  return runner_.Run(DirectAllToAll(rank(), size(), r.count), input, output, r.dtype, ReduceOp::kSum,
                     rail_.get(), watch);
}

// Straight between the ranks, which each then have a connection to all of other machines. Among more
// everybody gets everything and keeps its part, over the leaders alone.
absl::Status ExecCommunicator::MixedAllToAll(const OpRecord& r, const char* input, char* output,
                                             const Watch& watch) {
  if (r.count == 0) return Enter(r, watch);
  const size_t element = DTypeSize(r.dtype), ranks = static_cast<size_t>(size());
  if (size() <= kDirectAllToAllMax) {
    GT_RETURN_IF_ERROR(Enter(r, watch));
    const size_t own = static_cast<size_t>(rank()) * r.count * element;
    std::memcpy(output + own, input + own, r.count * element);
    const std::vector<size_t> counts(ranks, r.count);
    return MoveBlocks(input, counts, output, counts, r.dtype);
  }
  const uint64_t per_part = std::max<uint64_t>(1, kScheduleBytes / element / ranks / ranks);
  std::vector<char> mine;
  for (uint64_t at = 0; at < r.count; at += per_part) {
    const size_t bytes = std::min(per_part, r.count - at) * element;
    mine.resize(ranks * bytes);
    for (size_t i = 0; i < ranks; ++i) {
      std::memcpy(mine.data() + i * bytes, input + (i * r.count + at) * element, bytes);
    }
    scratch_.resize(std::max(scratch_.size(), ranks * mine.size()));
    OpRecord part = r;
    part.count = mine.size() / element;
    GT_RETURN_IF_ERROR(SharedAllGather(part, mine.data(), scratch_.data(), watch));
    for (size_t i = 0; i < ranks; ++i) {
      std::memcpy(output + (i * r.count + at) * element,
                  scratch_.data() + i * mine.size() + static_cast<size_t>(rank()) * bytes, bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace gtrain::comm
