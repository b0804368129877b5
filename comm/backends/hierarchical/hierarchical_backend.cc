// Buffers of a chunk that have something of every rank have it in the order of order_: machine by machine, so
// that what goes to one machine lies together.
#include "comm/backends/hierarchical/hierarchical_backend.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/status_macros.h"
#include "comm/backends/staged_backend.h"
#include "comm/plan/cost.h"
#include "comm/plan/schedule.h"

namespace gtrain::comm {
namespace {

class HierarchicalBackend final : public StagedBackend {
 public:
  HierarchicalBackend(const Hierarchy* hierarchy, ShmGroup* shm, BetweenMachines* between)
      : StagedBackend(hierarchy, shm),
        between_(between),
        place_(static_cast<size_t>(std::ranges::find(order_, rank()) - order_.begin())) {
    for (const auto& ranks : hierarchy_.nodes) {
      begins_.push_back(begins_.empty() ? 0 : begins_.back() + sizes_.back());
      sizes_.push_back(ranks.size());
    }
    most_ = *std::ranges::max_element(sizes_);
  }

  absl::Status Enter(const OpRecord& record, const Watch& watch) override;
  absl::Status AllReduce(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status Broadcast(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status AllGather(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status ReduceScatter(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status Reduce(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status AllToAll(const OpRecord& record, const Operands& operands, const Watch& watch) override;

 private:
  using Work = Pipeline::Work;
  static constexpr uint64_t kDrifted =
      1;  // OpRecord::choice of a leader that wants links to be measured again

  absl::Status FillRecords(const OpRecord& record, absl::Span<OpRecord> records, const Watch& watch);
  // Whether what so many rails carry goes on beside copies and sums on this rank. Where the ranks of a
  // machine have no core for a thread more each, all rails of it would only take the cores from each other; a
  // leader's gains.
  bool Beside(int rails) const { return hierarchy_.local < rails && (rails == 1 || !shm_->crowded()); }
  // Where each machine has `bytes` for each of its ranks, what this rank carries of every machine's.
  std::vector<Range> PartsOf(uint64_t bytes, int rails) const {
    std::vector<Range> parts;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      Range part = between_->PartOf(sizes_[i] * bytes, rails);
      part.begin += begins_[i] * bytes;
      parts.push_back(part);
    }
    return parts;
  }
  // Reduces data[count] of the ranks of the machine into Result(chunk), each rank its part.
  absl::Status ReduceHere(uint64_t chunk, uint64_t count, const OpRecord& record,
                          absl::Span<const char* const> from);
  absl::Status ExchangeBlocks(uint64_t chunk, uint64_t bytes, int rails, const Watch& watch);

  BetweenMachines* const between_;
  const size_t place_;                  // of this rank in order_
  std::vector<size_t> sizes_, begins_;  // ranks of each machine, and in order_ the first of them
  size_t most_ = 0;                     // ranks of a machine
  std::vector<const char*> from_;
};

// ------------------------------------------------------------------ comparing

absl::Status HierarchicalBackend::Enter(const OpRecord& record, const Watch& watch) {
  GT_RETURN_IF_ERROR(shm_->Enter(record, nullptr, 0, watch));
  absl::Span<OpRecord> records = shm_->Records();
  if (hierarchy_.leader()) GT_RETURN_IF_ERROR(FillRecords(record, records, watch));
  GT_RETURN_IF_ERROR(shm_->Phase(watch));
  GT_RETURN_IF_ERROR(CompareRecords(records));
  const bool drifted = std::ranges::any_of(records, [](const OpRecord& r) { return r.choice == kDrifted; });
  return drifted ? between_->MeasureAgain(pipeline_.Spare(), watch) : absl::OkStatus();
}

// Run by the leader. Among few machines the whole table is one round, among many a round for each: there all
// agree, by doubling, and only where they do not, every machine gets the records of all.
absl::Status HierarchicalBackend::FillRecords(const OpRecord& record, absl::Span<OpRecord> records,
                                              const Watch& watch) {
  bool same = true;
  for (int i = 0; i < shm_->size(); ++i) {
    OpRecord& of_rank = records[static_cast<size_t>(hierarchy_.peers()[static_cast<size_t>(i)])];
    of_rank = shm_->Record(i);
    of_rank.choice = i == 0 && between_->Drifted() ? kDrifted : 0;
    same = same && SameOperation(shm_->Record(i), record);
  }
  if (nodes() <= kDirectRanksMax) return between_->GatherRecords(records, watch);
  bool drifted = false;
  GT_ASSIGN_OR_RETURN(same, between_->AllDo(record, same, watch, &drifted));
  if (!same) return between_->GatherRecords(records, watch);
  std::ranges::fill(records, record);
  records[0].choice = drifted ? kDrifted : 0;
  return absl::OkStatus();
}

// ------------------------------------------------------------------ reductions

absl::Status HierarchicalBackend::ReduceHere(uint64_t chunk, uint64_t count, const OpRecord& record,
                                             absl::Span<const char* const> from) {
  const Range part = EvenPart(count, shm_->size(), hierarchy_.local, kPartAlign);
  const size_t at = part.begin * DTypeSize(record.dtype);
  summands_.Clear();
  for (const char* summand : from) summands_.Add(summand + at);
  summands_.Into(pipeline_.Result(chunk) + at, part.count, record, 1);
  return absl::OkStatus();
}

// It works also where other machines pass other memory: each machine gets data into the sums in its own way.
absl::Status HierarchicalBackend::AllReduce(const OpRecord& record, const Operands& operands,
                                            const Watch& watch) {
  char* const data = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(record.dtype);
  const uint64_t per_chunk = kSlotBytes / element, chunks = (record.count + per_chunk - 1) / per_chunk;
  const auto elements = [&](uint64_t c) {
    return std::min<uint64_t>(per_chunk, record.count - c * per_chunk);
  };
  const auto at = [&](uint64_t c) { return c * per_chunk * element; };
  OpRecord r = record;
  shm_->Locate(data, record.count * element, &r);

  bool direct = false;
  std::vector<const char*> theirs;  // all of each rank's data, if they are reached directly
  const Work in = [&](uint64_t c) {
    if (!direct) std::memcpy(pipeline_.Slot(hierarchy_.local, c), data + at(c), elements(c) * element);
    return absl::OkStatus();
  };
  const Work reduce = [&](uint64_t c) {
    from_.clear();
    for (int i = 0; i < shm_->size(); ++i)
      from_.push_back(direct ? theirs[static_cast<size_t>(i)] + at(c) : pipeline_.Slot(i, c));
    return ReduceHere(c, elements(c), r, from_);
  };
  const Work between = [&](uint64_t c) {
    return between_->AllReduce(r, pipeline_.Result(c), elements(c), Divisor(r), watch);
  };
  const Work out = [&](uint64_t c) {
    std::memcpy(data + at(c), pipeline_.Result(c), elements(c) * element);
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_ASSIGN_OR_RETURN(direct, pipeline_.Begin(r, in, chunks, enter, watch));
  for (int i = 0; direct && i < shm_->size(); ++i) {
    GT_ASSIGN_OR_RETURN(const char* memory, shm_->Resolve(shm_->Record(i), r.count * element, watch));
    theirs.push_back(memory);
  }
  if (chunks == 0) return absl::OkStatus();
  return pipeline_.Run(chunks, {in, reduce, {between, Beside(between_->RailsOf(r, elements(0)))}, out},
                       watch);
}

absl::Status HierarchicalBackend::ReduceScatter(const OpRecord& r, const Operands& operands,
                                                const Watch& watch) {
  const char* const input = static_cast<const char*>(operands.input);
  char* const output = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(r.dtype), block = r.count * element;
  const uint64_t per_chunk = kSlotBytes / element / order_.size();
  const uint64_t chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto elements = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk); };
  const auto rails = [&](uint64_t c) {
    return RailsOfExchange(between_->carriers(), nodes(), most_ * elements(c) * element);
  };

  const Work in = [&](uint64_t c) {
    const size_t bytes = elements(c) * element;
    char* const slot = pipeline_.Slot(hierarchy_.local, c);
    for (size_t i = 0; i < order_.size(); ++i) {
      std::memcpy(slot + i * bytes, input + static_cast<size_t>(order_[i]) * block + c * per_chunk * element,
                  bytes);
    }
    return absl::OkStatus();
  };
  const Work reduce = [&](uint64_t c) {
    from_.clear();
    for (int i = 0; i < shm_->size(); ++i) from_.push_back(pipeline_.Slot(i, c));
    return ReduceHere(c, elements(c) * order_.size(), r, from_);
  };
  const Work between = [&](uint64_t c) -> absl::Status {
    const std::vector<Range> parts = PartsOf(elements(c), rails(c));
    const Range own = parts[static_cast<size_t>(hierarchy_.node)];
    char* const result = pipeline_.Result(c);
    GT_RETURN_IF_ERROR(
        between_->Run(DirectReduceScatter(hierarchy_.node, parts), result, r.dtype, r.op, watch));
    if (Divisor(r) == 1) return absl::OkStatus();
    Summands mine;
    mine.Add(result + own.begin * element);
    mine.Into(result + own.begin * element, own.count, r, Divisor(r));
    return absl::OkStatus();
  };
  const Work out = [&](uint64_t c) {
    const size_t bytes = elements(c) * element;
    std::memcpy(output + c * per_chunk * element, pipeline_.Result(c) + place_ * bytes, bytes);
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_RETURN_IF_ERROR(pipeline_.Begin(r, in, chunks, enter, watch).status());
  if (chunks == 0) return absl::OkStatus();
  return pipeline_.Run(chunks, {in, reduce, {between, Beside(rails(0))}, out}, watch);
}

absl::Status HierarchicalBackend::Reduce(const OpRecord& r, const Operands& operands, const Watch& watch) {
  char* const data = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_chunk = kSlotBytes / element, chunks = (r.count + per_chunk - 1) / per_chunk;
  const int root = hierarchy_.NodeOf(r.root);
  const auto elements = [&](uint64_t c) { return std::min<uint64_t>(per_chunk, r.count - c * per_chunk); };
  const auto at = [&](uint64_t c) { return data + c * per_chunk * element; };
  const auto plan = [&](uint64_t c) {
    return PlanReduce(between_->carriers(), nodes(), elements(c) * element);
  };

  const Work in = [&](uint64_t c) {
    std::memcpy(pipeline_.Slot(hierarchy_.local, c), at(c), elements(c) * element);
    return absl::OkStatus();
  };
  const Work reduce = [&](uint64_t c) {
    from_.clear();
    for (int i = 0; i < shm_->size(); ++i) from_.push_back(pipeline_.Slot(i, c));
    return ReduceHere(c, elements(c), r, from_);
  };
  const Work between = [&](uint64_t c) -> absl::Status {
    const Range part = between_->PartOf(elements(c), plan(c).rails);
    char* const mine = pipeline_.Result(c) + part.begin * element;
    GT_RETURN_IF_ERROR(between_->Run(MakeSchedule(plan(c), hierarchy_.node, nodes(), root, part.count), mine,
                                     r.dtype, r.op, watch));
    if (hierarchy_.node != root || Divisor(r) == 1) return absl::OkStatus();
    Summands sum;
    sum.Add(mine);
    sum.Into(mine, part.count, r, Divisor(r));
    return absl::OkStatus();
  };
  const Work out = [&](uint64_t c) {
    if (rank() == r.root) std::memcpy(at(c), pipeline_.Result(c), elements(c) * element);
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_RETURN_IF_ERROR(pipeline_.Begin(r, in, chunks, enter, watch).status());
  if (chunks == 0) return absl::OkStatus();
  return pipeline_.Run(chunks, {in, reduce, {between, Beside(plan(0).rails)}, out}, watch);
}

// ------------------------------------------------------------------ what moves data alone

absl::Status HierarchicalBackend::Broadcast(const OpRecord& r, const Operands& operands, const Watch& watch) {
  const int root = hierarchy_.NodeOf(r.root);
  const auto rails = [&](uint64_t bytes) { return RailsOfBroadcast(between_->carriers(), nodes(), bytes); };
  const Carry carry = [&](uint64_t c, uint64_t bytes) {
    const Range part = between_->PartOf(bytes, rails(bytes));
    return between_->Run(TreeBroadcast(hierarchy_.node, nodes(), root, part.count),
                         pipeline_.Result(c) + part.begin, DType::kUint8, ReduceOp::kSum, watch);
  };
  const uint64_t first = std::min<uint64_t>(kSlotBytes, r.count * DTypeSize(r.dtype));
  return StagedBroadcast(r, static_cast<char*>(operands.output), carry, Beside(rails(first)), watch);
}

absl::Status HierarchicalBackend::AllGather(const OpRecord& r, const Operands& operands, const Watch& watch) {
  const auto rails = [&](uint64_t bytes) {
    return RailsOfAllGather(between_->carriers(), nodes(), most_ * bytes);
  };
  const Carry carry = [&](uint64_t c, uint64_t bytes) {
    return between_->Run(AllGatherSchedule(hierarchy_.node, PartsOf(bytes, rails(bytes))),
                         pipeline_.Result(c), DType::kUint8, ReduceOp::kSum, watch);
  };
  const uint64_t first =
      std::min<uint64_t>(r.count * DTypeSize(r.dtype), shm_->result_bytes() / order_.size());
  return StagedAllGather(r, static_cast<const char*>(operands.input), static_cast<char*>(operands.output),
                         carry, Beside(rails(first)), watch);
}

// Between the machines: what the ranks of this one have put down for ranks of others, `bytes` for each, and
// the other way round. The slots of ranks beyond the number of rails are carried by the rails in turns.
absl::Status HierarchicalBackend::ExchangeBlocks(uint64_t c, uint64_t bytes, int rails, const Watch& watch) {
  const size_t self = static_cast<size_t>(hierarchy_.node), own = sizes_[self], machines = sizes_.size();
  const auto mine = static_cast<size_t>(hierarchy_.local), step = static_cast<size_t>(rails);
  if (mine >= step) return absl::OkStatus();
  const char* const slots = pipeline_.Slot(0, c);
  const auto slot_of = [&](size_t local) {
    return static_cast<uint64_t>(pipeline_.Slot(static_cast<int>(local), c) - slots);
  };
  Round round;
  for (size_t distance = 1; distance < machines; ++distance) {
    const size_t from = (self + machines - distance) % machines, to = (self + distance) % machines;
    for (size_t local = mine; local < sizes_[from]; local += step) {
      round.push_back(
          {ActionKind::kReceive, static_cast<int>(from), (begins_[from] + local) * own * bytes, own * bytes});
    }
    for (size_t local = mine; local < own; local += step) {
      round.push_back({ActionKind::kSend, static_cast<int>(to), slot_of(local) + begins_[to] * bytes,
                       sizes_[to] * bytes});
    }
  }
  return between_->Run({round}, slots, pipeline_.Result(c), DType::kUint8, ReduceOp::kSum, watch);
}

// Slot: this rank's chunk for every rank. Result: for each rank of another machine what it sends to each of
// this one.
absl::Status HierarchicalBackend::AllToAll(const OpRecord& r, const Operands& operands, const Watch& watch) {
  const char* const input = static_cast<const char*>(operands.input);
  char* const output = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(r.dtype), block = r.count * element, ranks = order_.size();
  const size_t self = static_cast<size_t>(hierarchy_.node), own = sizes_[self], first = begins_[self];
  const auto local = static_cast<size_t>(hierarchy_.local);
  // The chunks are the same on all machines, however many ranks are on each.
  const uint64_t per_chunk =
      std::max<uint64_t>(1, std::min(kSlotBytes / ranks, shm_->result_bytes() / (ranks * most_)) / element);
  const uint64_t chunks = (r.count + per_chunk - 1) / per_chunk;
  const auto bytes = [&](uint64_t c) { return std::min(per_chunk, r.count - c * per_chunk) * element; };
  const auto rails = [&](uint64_t c) {
    return RailsOfExchange(between_->carriers(), nodes(), most_ * most_ * bytes(c));
  };

  const Work in = [&](uint64_t c) {
    const size_t at = c * per_chunk * element;
    char* const slot = pipeline_.Slot(hierarchy_.local, c);
    for (size_t i = 0; i < ranks; ++i) {
      const size_t of = static_cast<size_t>(order_[i]) * block + at;
      if (i != place_) std::memcpy(slot + i * bytes(c), input + of, bytes(c));
    }
    return absl::OkStatus();
  };
  const Work between = [&](uint64_t c) { return ExchangeBlocks(c, bytes(c), rails(c), watch); };
  const Work out = [&](uint64_t c) {
    for (size_t i = 0; i < ranks; ++i) {
      const size_t of = static_cast<size_t>(order_[i]) * block + c * per_chunk * element;
      const bool here = i >= first && i < first + own;
      const char* const from = i == place_ ? input + of
                               : here ? pipeline_.Slot(static_cast<int>(i - first), c) + place_ * bytes(c)
                                      : pipeline_.Result(c) + (i * own + local) * bytes(c);
      std::memcpy(output + of, from, bytes(c));
    }
    return absl::OkStatus();
  };

  const auto enter = [&] { return Enter(r, watch); };
  GT_RETURN_IF_ERROR(pipeline_.Begin(r, in, chunks, enter, watch).status());
  if (chunks == 0) return absl::OkStatus();
  return pipeline_.Run(chunks, {in, {between, Beside(rails(0))}, out}, watch);
}

}  // namespace

std::unique_ptr<CollectiveBackend> MakeHierarchicalBackend(const Hierarchy* hierarchy, ShmGroup* shm,
                                                           BetweenMachines* between) {
  return std::make_unique<HierarchicalBackend>(hierarchy, shm, between);
}

}  // namespace gtrain::comm
