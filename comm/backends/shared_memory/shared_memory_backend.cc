// A rank reduces one part of the elements for all: each element is read once from every rank and written once
// to every rank, in one place and one order, so the results are the same bits.
#include "comm/backends/shared_memory/shared_memory_backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "comm/backends/staged_backend.h"
#include "comm/plan/schedule.h"
#include "comm/plan/two_ways.h"

namespace gtrain::comm {
namespace {

// The bytes that all ranks together read out of the posts in one small collective: bounds the time that a
// machine with many ranks spends on what two stages would do better.
constexpr size_t kInlineTotal = 128 << 10;

void Hand(bool around, void* to, const void* from, size_t bytes) {
  around ? CopyAroundCaches(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
}

class SharedMemoryBackend final : public StagedBackend {
 public:
  SharedMemoryBackend(const Hierarchy* hierarchy, ShmGroup* shm) : StagedBackend(hierarchy, shm) {}

  absl::Status Enter(const OpRecord& record, const Watch& watch) override {
    return EnterWith(record, nullptr, 0, watch);
  }
  absl::Status AllReduce(const OpRecord& record, const Operands& operands, const Watch& watch) override {
    const size_t bytes = record.count * DTypeSize(record.dtype);
    char* const data = static_cast<char*>(operands.output);
    if (Inline(bytes)) return InlineAllReduce(record, data, watch);
    return StagedAllReduce(Located(record, data, bytes), data, watch);
  }
  absl::Status Broadcast(const OpRecord& record, const Operands& operands, const Watch& watch) override {
    const size_t bytes = record.count * DTypeSize(record.dtype);
    return StagedBroadcast(Located(record, operands.output, bytes), static_cast<char*>(operands.output),
                           nullptr, false, watch);
  }
  absl::Status AllGather(const OpRecord& record, const Operands& operands, const Watch& watch) override {
    return StagedAllGather(record, static_cast<const char*>(operands.input),
                           static_cast<char*>(operands.output), nullptr, false, watch);
  }
  absl::Status ReduceScatter(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status Reduce(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status AllToAll(const OpRecord& record, const Operands& operands, const Watch& watch) override;

 private:
  using Work = Pipeline::Work;

  // Data of this size travels in the posts of the shared-memory group.
  bool Inline(size_t bytes) const {
    return bytes <= std::min(kInlineBytes, kInlineTotal / static_cast<size_t>(world()));
  }
  // The payload is for Inline() sizes alone.
  absl::Status EnterWith(const OpRecord& record, const void* payload, size_t bytes, const Watch& watch) {
    GT_RETURN_IF_ERROR(shm_->Enter(record, payload, bytes, watch));
    return CompareNeighbours(record);
  }
  OpRecord Located(OpRecord record, const void* data, size_t bytes) const {
    shm_->Locate(data, bytes, &record);
    return record;
  }
  // Elements of each rank's block that are staged at once.
  uint64_t PerChunk(size_t element) const {
    return std::max<uint64_t>(kPartAlign, kStagedChunkBytes / element / static_cast<size_t>(world()));
  }

  absl::Status InlineAllReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status DirectAllReduce(const OpRecord& record, const Watch& watch);
  absl::Status StagedAllReduce(OpRecord record, char* data, const Watch& watch);

  std::vector<void*> outputs_;
  TwoWays ways_;         // of the first rank: through the caches or around them
  uint64_t choice_ = 0;  // of the first rank, as all saw it in the staged all-reduce before
};

// ------------------------------------------------------------------ all-reduce

absl::Status SharedMemoryBackend::InlineAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  GT_RETURN_IF_ERROR(EnterWith(r, data, r.count * DTypeSize(r.dtype), watch));
  summands_.Clear();
  for (int i = 0; i < world(); ++i) summands_.Add(shm_->Payload(i));
  summands_.Into(data, r.count, r, Divisor(r));
  return absl::OkStatus();
}

absl::Status SharedMemoryBackend::DirectAllReduce(const OpRecord& r, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const Range part = EvenPart(r.count, world(), rank(), kPartAlign);
  summands_.Clear();
  outputs_.clear();
  for (int i = 0; i < world(); ++i) {
    GT_ASSIGN_OR_RETURN(char* data, shm_->Resolve(shm_->Record(i), r.count * element, watch));
    summands_.Add(data + part.begin * element);
    outputs_.push_back(data + part.begin * element);
  }
  summands_.Into(outputs_, part.count, r, Divisor(r));
  return shm_->Phase(watch);
}

// Chunks go through the arena: a rank puts down what others reduce, reduces its own part out of its memory
// and what they put down, and takes over what they reduced.
//
// Cores that share a cache hand such data over twice as fast through it as through memory. Cores that share
// none take eight times as long to fetch what lies changed in the other's cache, and which of them a virtual
// machine runs on changes by the minute. So the first rank measures both and says what the next one does.
absl::Status SharedMemoryBackend::StagedAllReduce(OpRecord r, char* data, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_chunk = kStagedChunkBytes / element;
  const uint64_t chunks = (r.count + per_chunk - 1) / per_chunk;
  const int ranks = world(), self = rank();
  const bool around = TwoWays::Second(choice_, r.count * element);
  r.choice = ways_.choice();
  const auto part = [&](uint64_t c, int i) {
    return EvenPart(std::min(per_chunk, r.count - c * per_chunk), ranks, i, kPartAlign);
  };
  const auto at = [&](uint64_t c) { return data + c * per_chunk * element; };

  const Work in = [&](uint64_t c) {
    for (int i = 0; i < ranks; ++i) {
      const Range p = part(c, i);
      if (i == self || p.count == 0) continue;
      Hand(around, pipeline_.Slot(self, c) + p.begin * element, at(c) + p.begin * element, p.count * element);
    }
    return absl::OkStatus();
  };
  const Work reduce = [&](uint64_t c) {
    const Range p = part(c, self);
    summands_.Clear();
    for (int i = 0; i < ranks; ++i)
      summands_.Add((i == self ? at(c) : pipeline_.Slot(i, c)) + p.begin * element);
    char *own = at(c) + p.begin * element, *result = pipeline_.Result(c) + p.begin * element;
    if (around) {
      summands_.Into(own, p.count, r, Divisor(r));
      CopyAroundCaches(result, own, p.count * element);
      return absl::OkStatus();
    }
    summands_.Into(std::array<void*, 2>{own, result}, p.count, r, Divisor(r));
    return absl::OkStatus();
  };
  const Work out = [&](uint64_t c) {
    for (int step = 1; step < ranks; ++step) {
      const Range p = part(c, (self + step) % ranks);
      if (p.count == 0) continue;
      std::memcpy(at(c) + p.begin * element, pipeline_.Result(c) + p.begin * element, p.count * element);
    }
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_ASSIGN_OR_RETURN(const bool direct, pipeline_.Begin(r, in, chunks, enter, watch));
  choice_ = shm_->Record(0).choice;
  if (direct) return DirectAllReduce(r, watch);
  const Instant start = RealClock().Now();
  GT_RETURN_IF_ERROR(pipeline_.Run(chunks, {in, reduce, out}, watch));
  if (self == 0) ways_.Took(around, r.count * element, absl::ToInt64Nanoseconds(RealClock().Now() - start));
  return absl::OkStatus();
}

// ------------------------------------------------------------------ reduce-scatter, reduce

absl::Status SharedMemoryBackend::ReduceScatter(const OpRecord& record, const Operands& operands,
                                                const Watch& watch) {
  const char* const input = static_cast<const char*>(operands.input);
  char* const output = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(record.dtype), block = record.count * element;
  const int ranks = world(), self = rank();
  const size_t all = block * static_cast<size_t>(ranks);
  if (Inline(all)) {
    GT_RETURN_IF_ERROR(EnterWith(record, input, all, watch));
    summands_.Clear();
    for (int i = 0; i < ranks; ++i) summands_.Add(shm_->Payload(i) + static_cast<size_t>(self) * block);
    summands_.Into(output, record.count, record, Divisor(record));
    return absl::OkStatus();
  }

  // Slot: what every other rank reduces of this rank's chunk.
  const OpRecord r = Located(record, input, all);
  const uint64_t per_chunk = PerChunk(element), chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto elements = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk); };
  const auto place = [&](int of) { return static_cast<size_t>(of) * per_chunk * element; };
  const auto own = [&](int of, uint64_t c) {
    return input + static_cast<size_t>(of) * block + c * per_chunk * element;
  };
  const Work in = [&](uint64_t c) {
    for (int step = 1; step < ranks; ++step) {
      const int to = (self + step) % ranks;
      std::memcpy(pipeline_.Slot(self, c) + place(to), own(to, c), elements(c) * element);
    }
    return absl::OkStatus();
  };
  const Work out = [&](uint64_t c) {
    summands_.Clear();
    for (int i = 0; i < ranks; ++i)
      summands_.Add(i == self ? own(self, c) : pipeline_.Slot(i, c) + place(self));
    summands_.Into(output + c * per_chunk * element, elements(c), r, Divisor(r));
    return absl::OkStatus();
  };
  const auto enter = [&] { return Enter(r, watch); };
  GT_ASSIGN_OR_RETURN(const bool direct, pipeline_.Begin(r, in, chunks, enter, watch));
  if (!direct) return pipeline_.Run(chunks, {in, out}, watch);
  summands_.Clear();
  for (int i = 0; i < ranks; ++i) {
    GT_ASSIGN_OR_RETURN(const char* theirs, shm_->Resolve(shm_->Record(i), all, watch));
    summands_.Add(theirs + static_cast<size_t>(self) * block);
  }
  summands_.Into(output, r.count, r, Divisor(r));
  return shm_->Phase(watch);
}

absl::Status SharedMemoryBackend::Reduce(const OpRecord& record, const Operands& operands,
                                         const Watch& watch) {
  char* const data = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(record.dtype), all = record.count * element;
  const int ranks = world(), self = rank();
  const bool roots = self == record.root;
  if (Inline(all)) {
    GT_RETURN_IF_ERROR(EnterWith(record, data, all, watch));
    summands_.Clear();
    for (int i = 0; i < ranks; ++i) summands_.Add(shm_->Payload(i));
    if (roots) summands_.Into(data, record.count, record, Divisor(record));
    return absl::OkStatus();
  }

  const OpRecord r = Located(record, data, all);
  const uint64_t per_chunk = kStagedChunkBytes / element, chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto elements = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk); };
  const auto at = [&](uint64_t c) { return data + c * per_chunk * element; };
  const Work in = [&](uint64_t c) {
    std::memcpy(pipeline_.Slot(self, c), at(c), elements(c) * element);
    return absl::OkStatus();
  };
  const Work reduce = [&](uint64_t c) {
    const Range p = EvenPart(elements(c), ranks, self, kPartAlign);
    summands_.Clear();
    for (int i = 0; i < ranks; ++i) summands_.Add(pipeline_.Slot(i, c) + p.begin * element);
    summands_.Into(pipeline_.Result(c) + p.begin * element, p.count, r, Divisor(r));
    return absl::OkStatus();
  };
  const Work out = [&](uint64_t c) {
    if (roots) std::memcpy(at(c), pipeline_.Result(c), elements(c) * element);
    return absl::OkStatus();
  };
  const auto enter = [&] { return Enter(r, watch); };
  GT_ASSIGN_OR_RETURN(const bool direct, pipeline_.Begin(r, in, chunks, enter, watch));
  if (!direct) return pipeline_.Run(chunks, {in, reduce, out}, watch);
  const Range part = EvenPart(r.count, ranks, self, kPartAlign);
  summands_.Clear();
  char* target = nullptr;
  for (int i = 0; i < ranks; ++i) {
    GT_ASSIGN_OR_RETURN(char* theirs, shm_->Resolve(shm_->Record(i), all, watch));
    summands_.Add(theirs + part.begin * element);
    if (i == r.root) target = theirs + part.begin * element;
  }
  summands_.Into(target, part.count, r, Divisor(r));
  return shm_->Phase(watch);
}

// ------------------------------------------------------------------ all-to-all

absl::Status SharedMemoryBackend::AllToAll(const OpRecord& record, const Operands& operands,
                                           const Watch& watch) {
  const char* const input = static_cast<const char*>(operands.input);
  char* const output = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(record.dtype), block = record.count * element;
  const int ranks = world(), self = rank();
  const auto nth = [&](int i) { return static_cast<size_t>(i) * block; };
  if (Inline(nth(ranks))) {
    GT_RETURN_IF_ERROR(EnterWith(record, input, nth(ranks), watch));
    for (int i = 0; block > 0 && i < ranks; ++i)
      std::memcpy(output + nth(i), shm_->Payload(i) + nth(self), block);
    return absl::OkStatus();
  }

  const OpRecord r = Located(record, input, nth(ranks));
  const uint64_t per_chunk = PerChunk(element), chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto bytes = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk) * element; };
  const auto place = [&](int of) { return static_cast<size_t>(of) * per_chunk * element; };
  const Work in = [&](uint64_t c) {
    const size_t at = c * per_chunk * element;
    for (int step = 1; step < ranks; ++step) {
      const int to = (self + step) % ranks;
      std::memcpy(pipeline_.Slot(self, c) + place(to), input + nth(to) + at, bytes(c));
    }
    return absl::OkStatus();
  };
  const Work out = [&](uint64_t c) {
    const size_t own = nth(self) + c * per_chunk * element;
    std::memcpy(output + own, input + own, bytes(c));
    for (int step = 1; step < ranks; ++step) {
      const int from = (self + step) % ranks;
      std::memcpy(output + nth(from) + c * per_chunk * element, pipeline_.Slot(from, c) + place(self),
                  bytes(c));
    }
    return absl::OkStatus();
  };
  const auto enter = [&] { return Enter(r, watch); };
  GT_ASSIGN_OR_RETURN(const bool direct, pipeline_.Begin(r, in, chunks, enter, watch));
  if (!direct) return pipeline_.Run(chunks, {in, out}, watch);
  for (int step = 0; step < ranks; ++step) {
    const int from = (self + step) % ranks;
    GT_ASSIGN_OR_RETURN(const char* theirs, shm_->Resolve(shm_->Record(from), nth(ranks), watch));
    std::memcpy(output + nth(from), theirs + nth(self), block);
  }
  return shm_->Phase(watch);
}

}  // namespace

std::unique_ptr<CollectiveBackend> MakeSharedMemoryBackend(const Hierarchy* hierarchy, ShmGroup* shm) {
  return std::make_unique<SharedMemoryBackend>(hierarchy, shm);
}

}  // namespace gtrain::comm
