// All-reduce. On one machine a rank reduces one part of the elements for all: each element is read once from
// every rank and written once to every rank, in one place and one order, so the results are the same bits.
#include <algorithm>
#include <cstring>

#include "base/status_macros.h"
#include "comm/codec/reduce.h"
#include "comm/exec/exec_communicator.h"

namespace gtrain::comm {
namespace {

void Hand(bool around, void* to, const void* from, size_t bytes) {
  around ? CopyAroundCaches(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
}

}  // namespace

absl::Status ExecCommunicator::AllReduce(void* data, size_t count, DType dtype, ReduceOp op) {
  if (!TakesTwoSums(data, count, dtype, op)) return AllReduceOnce(data, count, dtype, op);
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
  return Call(record, data, count * DTypeSize(dtype), [&](OpRecord& r, const Watch& watch) {
    char* bytes = static_cast<char*>(data);
    if (nodes() == 1) return LocalAllReduce(r, bytes, watch);
    return shm_ != nullptr ? ChunkedAllReduce(r, bytes, watch) : FlatAllReduce(r, bytes, watch);
  });
}

absl::Status ExecCommunicator::LocalAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  if (Inline(r.count * DTypeSize(r.dtype))) return InlineAllReduce(r, data, watch);
  return StagedAllReduce(r, data, watch);
}

absl::Status ExecCommunicator::InlineAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch, data, r.count * DTypeSize(r.dtype)));
  sources_.clear();
  for (int i = 0; i < shm_->size(); ++i) sources_.push_back(shm_->Payload(i));
  Combine(data, r.count, r, Divisor(r));
  return absl::OkStatus();
}

absl::Status ExecCommunicator::DirectAllReduce(const OpRecord& r, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const Range part = EvenPart(r.count, shm_->size(), hierarchy_.local, kPartAlign);
  sources_.clear();
  outputs_.clear();
  for (int i = 0; i < shm_->size(); ++i) {
    GT_ASSIGN_OR_RETURN(char* data, shm_->Resolve(shm_->Record(i), r.count * element, watch));
    sources_.push_back(data + part.begin * element);
    outputs_.push_back(data + part.begin * element);
  }
  ReduceInto(outputs_.data(), outputs_.size(), sources_.data(), sources_.size(),
             {part.count, r.dtype, r.op, Divisor(r)});
  return shm_->Phase(watch);
}

// Chunks go through the arena: a rank puts down what others reduce, reduces its own part out of its memory
// and what they put down, and takes over what they reduced.
//
// Cores that share a cache hand such data over twice as fast through it as through memory. Cores that share
// none take eight times as long to fetch what lies changed in the other's cache, and which of them a virtual
// machine runs on changes by the minute. So the first rank measures both and says what the next one does.
absl::Status ExecCommunicator::StagedAllReduce(OpRecord r, char* data, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_chunk = kStagedChunkBytes / element;
  const uint64_t chunks = (r.count + per_chunk - 1) / per_chunk;
  const int ranks = shm_->size(), self = hierarchy_.local;
  const bool around = TwoWays::Second(choice_, r.count * element);
  r.choice = ways_.choice();
  const auto part = [&](uint64_t c, int i) {
    return EvenPart(std::min(per_chunk, r.count - c * per_chunk), ranks, i, kPartAlign);
  };
  const auto at = [&](uint64_t c) { return data + c * per_chunk * element; };

  const Stage in = [&](uint64_t c) {
    for (int i = 0; i < ranks; ++i) {
      const Range p = part(c, i);
      if (i == self || p.count == 0) continue;
      Hand(around, shm_->Slot(self, chunk_ + c) + p.begin * element, at(c) + p.begin * element,
           p.count * element);
    }
    return absl::OkStatus();
  };
  const Stage reduce = [&](uint64_t c) {
    const Range p = part(c, self);
    sources_.clear();
    for (int i = 0; i < ranks; ++i) {
      sources_.push_back((i == self ? at(c) : shm_->Slot(i, chunk_ + c)) + p.begin * element);
    }
    char *own = at(c) + p.begin * element, *result = shm_->Result(chunk_ + c) + p.begin * element;
    if (around) {
      Combine(own, p.count, r, Divisor(r));
      CopyAroundCaches(result, own, p.count * element);
      return absl::OkStatus();
    }
    outputs_.assign({own, result});
    ReduceInto(outputs_.data(), outputs_.size(), sources_.data(), sources_.size(),
               {p.count, r.dtype, r.op, Divisor(r)});
    return absl::OkStatus();
  };
  const Stage out = [&](uint64_t c) {
    for (int step = 1; step < ranks; ++step) {
      const Range p = part(c, (self + step) % ranks);
      if (p.count == 0) continue;
      std::memcpy(at(c) + p.begin * element, shm_->Result(chunk_ + c) + p.begin * element, p.count * element);
    }
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  choice_ = shm_->Record(0).choice;
  if (direct) return DirectAllReduce(r, watch);
  const Instant start = RealClock().Now();
  GT_RETURN_IF_ERROR(Pipeline(chunks, {in, reduce, out}, watch));
  if (self == 0) ways_.Took(around, r.count * element, absl::ToInt64Nanoseconds(RealClock().Now() - start));
  return absl::OkStatus();
}

// Several machines.
absl::Status ExecCommunicator::ChunkedAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_chunk = kSlotBytes / element, chunks = (r.count + per_chunk - 1) / per_chunk;
  const int local_ranks = shm_->size();
  auto elements = [&](uint64_t c) { return std::min<uint64_t>(per_chunk, r.count - c * per_chunk); };

  const Stage in = [&](uint64_t c) {
    std::memcpy(shm_->Slot(hierarchy_.local, chunk_ + c), data + c * per_chunk * element,
                elements(c) * element);
    return absl::OkStatus();
  };
  const Stage reduce = [&](uint64_t c) {
    const Range part = EvenPart(elements(c), local_ranks, hierarchy_.local, kPartAlign);
    sources_.clear();
    for (int i = 0; i < local_ranks; ++i) {
      sources_.push_back(shm_->Slot(i, chunk_ + c) + part.begin * element);
    }
    Combine(shm_->Result(chunk_ + c) + part.begin * element, part.count, r, 1);
    return absl::OkStatus();
  };
  const Stage between = [&](uint64_t c) {
    return ReduceBetweenMachines(r, shm_->Result(chunk_ + c), elements(c), watch);
  };
  const Stage out = [&](uint64_t c) {
    std::memcpy(data + c * per_chunk * element, shm_->Result(chunk_ + c), elements(c) * element);
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  return Pipeline(chunks, {in, reduce, between, out}, watch);
}

absl::Status ExecCommunicator::ReduceBetweenMachines(const OpRecord& r, char* data, uint64_t count,
                                                     const Watch& watch) {
  const AllReducePlan plan = PlanAllReduce(wish_.algorithm, carriers_, nodes(), count * DTypeSize(r.dtype));
  const Range part = RailPart(count, plan.rails, hierarchy_.local);
  char* const mine = data + part.begin * DTypeSize(r.dtype);
  GT_RETURN_IF_ERROR(runner_.Run(MakeSchedule(plan, hierarchy_.node, nodes(), part.count), mine, r.dtype,
                                 r.op, rail_.get(), watch));
  sources_.assign({mine});
  if (Divisor(r) != 1) Combine(mine, part.count, r, Divisor(r));
  return absl::OkStatus();
}

absl::Status ExecCommunicator::FlatAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype), bytes = r.count * element;
  if (bytes <= kWithRecordsBytes &&
      GoesWithRecords(wish_.algorithm, carriers_.front().link, nodes(), bytes)) {
    GT_RETURN_IF_ERROR(Agree(r, watch, data, bytes));
    sources_.assign({data});
    if (Divisor(r) != 1) Combine(data, r.count, r, Divisor(r));
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const uint64_t block = kScheduleBytes / element;
  for (uint64_t at = 0; at < r.count; at += block) {
    const uint64_t count = std::min(block, r.count - at);
    GT_RETURN_IF_ERROR(ReduceBetweenMachines(r, data + at * element, count, watch));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::comm
