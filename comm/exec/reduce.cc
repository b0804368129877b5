// Reduce-scatter and reduce. On one machine like all-reduce: in the posts, straight out of memory of
// Allocate(), or staged in chunks. With one rank on each machine one round of messages and a tree. With
// several ranks on several machines an all-reduce of which a rank keeps its part.
#include <cstring>

#include "base/status_macros.h"
#include "comm/exec/exec_communicator.h"

namespace gtrain::comm {

// ------------------------------------------------------------------ reduce-scatter

absl::Status ExecCommunicator::ReduceScatter(const void* input, void* output, size_t count, DType dtype,
                                             ReduceOp op) {
  const void* checked = output == nullptr ? nullptr : input;
  if (!TakesTwoSums(checked, count, dtype, op)) return ReduceScatterOnce(input, output, count, dtype, op);
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
  const void* checked = output == nullptr ? nullptr : input;
  const size_t bytes = count * DTypeSize(dtype);
  GT_RETURN_IF_ERROR(
      Call(record, checked, bytes * static_cast<size_t>(size()), [&](OpRecord& r, const Watch& watch) {
        const char* from = static_cast<const char*>(input);
        char* to = static_cast<char*>(output);
        if (nodes() == 1) return LocalReduceScatter(r, from, to, watch);
        return shm_ == nullptr ? FlatReduceScatter(r, from, to, watch)
                               : MixedReduceScatter(r, from, to, watch);
      }));
  if (size() == 1 && bytes > 0 && output != input) std::memmove(output, input, bytes);
  return absl::OkStatus();
}

absl::Status ExecCommunicator::LocalReduceScatter(const OpRecord& r, const char* input, char* output,
                                                  const Watch& watch) {
  const size_t element = DTypeSize(r.dtype), block = r.count * element;
  const int ranks = size(), self = rank();
  if (const size_t all = block * static_cast<size_t>(ranks); Inline(all)) {
    GT_RETURN_IF_ERROR(Enter(r, watch, input, all));
    sources_.clear();
    for (int i = 0; i < ranks; ++i) sources_.push_back(shm_->Payload(i) + static_cast<size_t>(self) * block);
    Combine(output, r.count, r, Divisor(r));
    return absl::OkStatus();
  }

  // Slot: what every other rank reduces of this rank's chunk.
  const uint64_t per_chunk = PerChunk(element), chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto elements = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk); };
  const auto place = [&](int of) { return static_cast<size_t>(of) * per_chunk * element; };
  const auto own = [&](int of, uint64_t c) {
    return input + static_cast<size_t>(of) * block + c * per_chunk * element;
  };
  const Stage in = [&](uint64_t c) {
    for (int step = 1; step < ranks; ++step) {
      const int to = (self + step) % ranks;
      std::memcpy(shm_->Slot(self, chunk_ + c) + place(to), own(to, c), elements(c) * element);
    }
    return absl::OkStatus();
  };
  const Stage out = [&](uint64_t c) {
    sources_.clear();
    for (int i = 0; i < ranks; ++i) {
      sources_.push_back(i == self ? own(self, c) : shm_->Slot(i, chunk_ + c) + place(self));
    }
    Combine(output + c * per_chunk * element, elements(c), r, Divisor(r));
    return absl::OkStatus();
  };
  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (!direct) return Pipeline(chunks, {in, out}, watch);
  sources_.clear();
  for (int i = 0; i < ranks; ++i) {
    GT_ASSIGN_OR_RETURN(char* theirs,
                        shm_->Resolve(shm_->Record(i), block * static_cast<size_t>(ranks), watch));
    sources_.push_back(theirs + static_cast<size_t>(self) * block);
  }
  Combine(output, r.count, r, Divisor(r));
  return shm_->Phase(watch);
}

absl::Status ExecCommunicator::FlatReduceScatter(const OpRecord& r, const char* input, char* output,
                                                 const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const size_t element = DTypeSize(r.dtype), own = static_cast<size_t>(rank()) * r.count * element;
  if (output != input + own && r.count > 0) std::memcpy(output, input + own, r.count * element);
  // The runner wants room for what all others send at once, so a large block goes in parts.
  const uint64_t per_part = std::max<uint64_t>(1, kScheduleBytes / element / static_cast<size_t>(size()));
  for (uint64_t at = 0; at < r.count; at += per_part) {
    Schedule schedule = DirectReduceScatter(rank(), size(), std::min(per_part, r.count - at));
    for (Round& round : schedule) {
      for (Action& a : round) {
        if (a.kind == ActionKind::kSend) a.offset = static_cast<uint64_t>(a.peer) * r.count;
      }
    }
    GT_RETURN_IF_ERROR(runner_.Run(schedule, input + at * element, output + at * element, r.dtype, r.op,
                                   rail_.get(), watch));
  }
  sources_.assign({output});
  if (Divisor(r) != 1) Combine(output, r.count, r, Divisor(r));
  return absl::OkStatus();
}

absl::Status ExecCommunicator::MixedReduceScatter(const OpRecord& r, const char* input, char* output,
                                                  const Watch& watch) {
  if (r.count == 0) return Enter(r, watch);
  const size_t element = DTypeSize(r.dtype), ranks = static_cast<size_t>(size());
  const uint64_t per_part = std::max<uint64_t>(1, kScheduleBytes / element / ranks);
  for (uint64_t at = 0; at < r.count; at += per_part) {
    OpRecord part = r;
    const size_t count = std::min(per_part, r.count - at), bytes = count * element;
    part.count = count * ranks;
    scratch_.resize(std::max(scratch_.size(), bytes * ranks));
    for (size_t i = 0; i < ranks; ++i) {
      std::memcpy(scratch_.data() + i * bytes, input + (i * r.count + at) * element, bytes);
    }
    GT_RETURN_IF_ERROR(ChunkedAllReduce(part, scratch_.data(), watch));
    std::memcpy(output + at * element, scratch_.data() + static_cast<size_t>(rank()) * bytes, bytes);
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------ reduce

absl::Status ExecCommunicator::Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) {
  if (!TakesTwoSums(data, count, dtype, op)) return ReduceOnce(data, count, dtype, op, root);
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
  return Call(record, data, count * DTypeSize(dtype), [&](OpRecord& r, const Watch& watch) {
    char* bytes = static_cast<char*>(data);
    if (nodes() == 1) return LocalReduce(r, bytes, watch);
    return shm_ == nullptr ? FlatReduce(r, bytes, watch) : MixedReduce(r, bytes, watch);
  });
}

absl::Status ExecCommunicator::LocalReduce(const OpRecord& r, char* data, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const int ranks = size(), self = rank();
  const bool roots = self == r.root;
  if (Inline(r.count * element)) {
    GT_RETURN_IF_ERROR(Enter(r, watch, data, r.count * element));
    sources_.clear();
    for (int i = 0; i < ranks; ++i) sources_.push_back(shm_->Payload(i));
    if (roots) Combine(data, r.count, r, Divisor(r));
    return absl::OkStatus();
  }

  const uint64_t per_chunk = kStagedChunkBytes / element, chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto elements = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk); };
  const auto at = [&](uint64_t c) { return data + c * per_chunk * element; };
  const Stage in = [&](uint64_t c) {
    std::memcpy(shm_->Slot(self, chunk_ + c), at(c), elements(c) * element);
    return absl::OkStatus();
  };
  const Stage reduce = [&](uint64_t c) {
    const Range p = EvenPart(elements(c), ranks, self, kPartAlign);
    sources_.clear();
    for (int i = 0; i < ranks; ++i) sources_.push_back(shm_->Slot(i, chunk_ + c) + p.begin * element);
    Combine(shm_->Result(chunk_ + c) + p.begin * element, p.count, r, Divisor(r));
    return absl::OkStatus();
  };
  const Stage out = [&](uint64_t c) {
    if (roots) std::memcpy(at(c), shm_->Result(chunk_ + c), elements(c) * element);
    return absl::OkStatus();
  };
  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (!direct) return Pipeline(chunks, {in, reduce, out}, watch);
  const Range part = EvenPart(r.count, ranks, self, kPartAlign);
  sources_.clear();
  char* target = nullptr;
  for (int i = 0; i < ranks; ++i) {
    GT_ASSIGN_OR_RETURN(char* theirs, shm_->Resolve(shm_->Record(i), r.count * element, watch));
    sources_.push_back(theirs + part.begin * element);
    if (i == r.root) target = theirs + part.begin * element;
  }
  Combine(target, part.count, r, Divisor(r));
  return shm_->Phase(watch);
}

// Only the root's data may change: the others lend a copy to the tree.
absl::Status ExecCommunicator::FlatReduce(const OpRecord& r, char* data, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_part = kScheduleBytes / element;
  for (uint64_t at = 0; at < r.count; at += per_part) {
    const uint64_t count = std::min(per_part, r.count - at);
    char* place = data + at * element;
    if (rank() != r.root) {
      scratch_.resize(std::max(scratch_.size(), count * element));
      std::memcpy(scratch_.data(), place, count * element);
      place = scratch_.data();
    }
    GT_RETURN_IF_ERROR(
        runner_.Run(TreeReduce(rank(), size(), r.root, count), place, r.dtype, r.op, rail_.get(), watch));
  }
  sources_.assign({data});
  if (rank() == r.root && Divisor(r) != 1) Combine(data, r.count, r, Divisor(r));
  return absl::OkStatus();
}

absl::Status ExecCommunicator::MixedReduce(const OpRecord& r, char* data, const Watch& watch) {
  if (r.count == 0) return Enter(r, watch);
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_part = kScheduleBytes / element;
  for (uint64_t at = 0; at < r.count; at += per_part) {
    OpRecord part = r;
    part.count = std::min(per_part, r.count - at);
    scratch_.resize(std::max(scratch_.size(), part.count * element));
    std::memcpy(scratch_.data(), data + at * element, part.count * element);
    GT_RETURN_IF_ERROR(ChunkedAllReduce(part, scratch_.data(), watch));
    if (rank() == r.root) std::memcpy(data + at * element, scratch_.data(), part.count * element);
  }
  return absl::OkStatus();
}

}  // namespace gtrain::comm
