// Schedules number the machines in the order in which they are gone through; blocks of memory and roots are
// those of ranks.
#include "comm/backends/flat/flat_backend.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/status_macros.h"
#include "comm/backends/staged_backend.h"
#include "comm/plan/cost.h"
#include "comm/plan/schedule.h"

namespace gtrain::comm {
namespace {

// Largest part of a buffer that one schedule works on: bounds the scratch memory.
constexpr size_t kScheduleBytes = 16 << 20;

class FlatBackend final : public CollectiveBackend {
 public:
  FlatBackend(const Hierarchy* hierarchy, BetweenMachines* between)
      : machine_(hierarchy->node),
        ranks_(static_cast<int>(hierarchy->nodes.size())),
        rank_of_(hierarchy->NodeMajor()),
        machine_of_(rank_of_.size()),
        between_(between),
        records_(rank_of_.size()) {
    for (int m = 0; m < ranks_; ++m) machine_of_[static_cast<size_t>(rank_of_[m])] = m;
    rank_ = rank_of_[static_cast<size_t>(machine_)];
  }

  absl::Status Enter(const OpRecord& record, const Watch& watch) override {
    return EnterWith(record, nullptr, 0, watch);
  }
  absl::Status AllReduce(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status Broadcast(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status AllGather(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status ReduceScatter(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status Reduce(const OpRecord& record, const Operands& operands, const Watch& watch) override;
  absl::Status AllToAll(const OpRecord& record, const Operands& operands, const Watch& watch) override;

 private:
  // Only when the record of a rank differs every rank gets the records of all. data[bytes] becomes the
  // reduction of all.
  absl::Status EnterWith(const OpRecord& record, char* data, size_t bytes, const Watch& watch);
  void Divide(char* data, const OpRecord& record) {
    const int divisor = DivisorOf(record, ranks_);
    if (divisor == 1) return;
    summands_.Clear();
    summands_.Add(data);
    summands_.Into(data, record.count, record, divisor);
  }

  // Where the block of the rank of each machine begins.
  void AtBlocks(uint64_t count, bool receives_too, Schedule& schedule) const {
    for (Round& round : schedule) {
      for (Action& a : round) {
        if (a.kind == ActionKind::kSend || receives_too)
          a.offset = static_cast<uint64_t>(rank_of_[static_cast<size_t>(a.peer)]) * count;
      }
    }
  }

  const int machine_, ranks_;
  const std::vector<int> rank_of_;  // [machine]
  std::vector<int> machine_of_;     // [rank]
  int rank_ = 0;
  BetweenMachines* const between_;
  std::vector<OpRecord> records_;  // where somebody differs
  Summands summands_;
  std::vector<char> scratch_;
};

absl::Status FlatBackend::EnterWith(const OpRecord& record, char* data, size_t bytes, const Watch& watch) {
  bool drifted = false;
  GT_ASSIGN_OR_RETURN(const bool same, between_->AllDo(record, true, watch, &drifted, data, bytes));
  if (same) return drifted ? between_->MeasureAgain(nullptr, watch) : absl::OkStatus();
  records_[static_cast<size_t>(rank_)] = record;
  GT_RETURN_IF_ERROR(between_->GatherRecords(absl::MakeSpan(records_), watch));
  return CompareRecords(records_);
}

absl::Status FlatBackend::AllReduce(const OpRecord& r, const Operands& operands, const Watch& watch) {
  char* const data = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(r.dtype), bytes = r.count * element;
  if (bytes <= kWithRecordsBytes &&
      GoesWithRecords(between_->wish().algorithm, between_->carriers().front().link, ranks_, bytes)) {
    GT_RETURN_IF_ERROR(EnterWith(r, data, bytes, watch));
    Divide(data, r);
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const uint64_t block = kScheduleBytes / element;
  for (uint64_t at = 0; at < r.count; at += block) {
    const uint64_t count = std::min(block, r.count - at);
    GT_RETURN_IF_ERROR(between_->AllReduce(r, data + at * element, count, DivisorOf(r, ranks_), watch));
  }
  return absl::OkStatus();
}

absl::Status FlatBackend::Broadcast(const OpRecord& r, const Operands& operands, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  return between_->Run(TreeBroadcast(machine_, ranks_, machine_of_[static_cast<size_t>(r.root)], r.count),
                       operands.output, r.dtype, ReduceOp::kSum, watch);
}

absl::Status FlatBackend::AllGather(const OpRecord& r, const Operands& operands, const Watch& watch) {
  const size_t bytes = r.count * DTypeSize(r.dtype);
  char* const output = static_cast<char*>(operands.output);
  char* const own = output + static_cast<size_t>(rank_) * bytes;
  GT_RETURN_IF_ERROR(Enter(r, watch));
  if (bytes > 0 && own != operands.input) std::memmove(own, operands.input, bytes);
  std::vector<Range> parts;
  for (const int rank : rank_of_) parts.push_back({static_cast<uint64_t>(rank) * r.count, r.count});
  return between_->Run(AllGatherSchedule(machine_, parts), output, r.dtype, ReduceOp::kSum, watch);
}

absl::Status FlatBackend::ReduceScatter(const OpRecord& r, const Operands& operands, const Watch& watch) {
  const char* const input = static_cast<const char*>(operands.input);
  char* const output = static_cast<char*>(operands.output);
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const size_t element = DTypeSize(r.dtype), own = static_cast<size_t>(rank_) * r.count * element;
  if (output != input + own && r.count > 0) std::memcpy(output, input + own, r.count * element);
  // The runner wants room for what all others send at once, so a large block goes in parts.
  const uint64_t per_part = std::max<uint64_t>(1, kScheduleBytes / element / static_cast<size_t>(ranks_));
  for (uint64_t at = 0; at < r.count; at += per_part) {
    Schedule schedule = DirectReduceScatter(machine_, ranks_, std::min(per_part, r.count - at));
    AtBlocks(r.count, /*receives_too=*/false, schedule);
    GT_RETURN_IF_ERROR(
        between_->Run(schedule, input + at * element, output + at * element, r.dtype, r.op, watch));
  }
  Divide(output, r);
  return absl::OkStatus();
}

// The others than the root lend a copy to the schedule.
absl::Status FlatBackend::Reduce(const OpRecord& r, const Operands& operands, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  char* const data = static_cast<char*>(operands.output);
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_part = kScheduleBytes / element;
  const int root = machine_of_[static_cast<size_t>(r.root)];
  for (uint64_t at = 0; at < r.count; at += per_part) {
    const uint64_t count = std::min(per_part, r.count - at);
    char* place = data + at * element;
    if (rank_ != r.root) {
      scratch_.resize(std::max(scratch_.size(), count * element));
      std::memcpy(scratch_.data(), place, count * element);
      place = scratch_.data();
    }
    const ReducePlan plan = PlanReduce(between_->carriers(), ranks_, count * element);
    GT_RETURN_IF_ERROR(
        between_->Run(MakeSchedule(plan, machine_, ranks_, root, count), place, r.dtype, r.op, watch));
  }
  if (rank_ == r.root) Divide(data, r);
  return absl::OkStatus();
}

absl::Status FlatBackend::AllToAll(const OpRecord& r, const Operands& operands, const Watch& watch) {
  const char* const input = static_cast<const char*>(operands.input);
  char* const output = static_cast<char*>(operands.output);
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const size_t block = r.count * DTypeSize(r.dtype), own = static_cast<size_t>(rank_) * block;
  if (block > 0) std::memcpy(output + own, input + own, block);
  Schedule schedule = DirectAllToAll(machine_, ranks_, r.count);
  AtBlocks(r.count, /*receives_too=*/true, schedule);
  return between_->Run(schedule, input, output, r.dtype, ReduceOp::kSum, watch);
}

}  // namespace

std::unique_ptr<CollectiveBackend> MakeFlatBackend(const Hierarchy* hierarchy, BetweenMachines* between) {
  return std::make_unique<FlatBackend>(hierarchy, between);
}

}  // namespace gtrain::comm
