#include "elastic/exec/step_copies.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "base/status_macros.h"
#include "elastic/plan/hand_over.h"

namespace gtrain::elastic {
namespace {
constexpr int kSizesTag = 1, kStateTag = 2;
}  // namespace

StepCopies::StepCopies(std::vector<absl::Span<char>> own) : own_(std::move(own)) {}

std::vector<PartCopy> StepCopies::held() const {
  std::vector<PartCopy> held;
  for (const Slot& slot : slots_) held.push_back(slot.copy);
  return held;
}

void StepCopies::Forget(int64_t later_than) {
  if (undo_step_ > later_than) undo_step_ = -1;
  for (Slot& slot : slots_) {
    if (slot.copy.step > later_than) slot.copy = {};
  }
}

void StepCopies::Undo() {
  const char* at = undo_.data();
  for (const absl::Span<char> block : own_) {
    std::copy_n(at, block.size(), block.data());
    at += block.size();
  }
}

void StepCopies::TakeUndo(int64_t step) {
  undo_step_ = -1;
  undo_.resize(std::accumulate(own_.begin(), own_.end(), size_t{0},
                               [](size_t sum, absl::Span<char> block) { return sum + block.size(); }));
  char* at = undo_.data();
  for (const absl::Span<char> block : own_) at = std::copy(block.begin(), block.end(), at);
  undo_step_ = step;
}

absl::Status StepCopies::Meet(Communicator& comm, int cell, int copy, absl::Span<const int> cells,
                              absl::Span<const int> machines) {
  keeps_mine_ = cell_ = of_rank_ = -1;
  sizes_.clear();
  if (copy != 0) return absl::OkStatus();
  std::vector<int> first_ranks, first_machines;  // index = cell
  for (size_t rank = 0; rank < cells.size(); ++rank) {
    const auto of_rank = static_cast<size_t>(cells[rank]);
    if (of_rank >= first_ranks.size()) {
      first_ranks.resize(of_rank + 1, -1);
      first_machines.resize(of_rank + 1);
    }
    if (first_ranks[of_rank] >= 0) continue;
    first_ranks[of_rank] = static_cast<int>(rank);
    first_machines[of_rank] = machines[rank];
  }
  const std::vector<int> keepers = StepCopyKeepers(first_machines);
  if (keepers.empty()) return absl::OkStatus();
  cell_ = static_cast<int>(std::ranges::find(keepers, cell) - keepers.begin());
  of_rank_ = first_ranks[static_cast<size_t>(cell_)];
  keeps_mine_ = first_ranks[static_cast<size_t>(keepers[static_cast<size_t>(cell)])];
  return ExchangeSizes(comm);
}

absl::Status StepCopies::ExchangeSizes(Communicator& comm) {
  std::vector<int64_t> mine;
  for (const absl::Span<char> block : own_) mine.push_back(static_cast<int64_t>(block.size()));
  sizes_.assign(mine.size(), 0);
  const Message messages[] = {
      {Message::Kind::kReceive, sizes_.data(), sizes_.size(), DType::kInt64, of_rank_, kSizesTag},
      {Message::Kind::kSend, mine.data(), mine.size(), DType::kInt64, keeps_mine_, kSizesTag}};
  GT_ASSIGN_OR_RETURN(const std::shared_ptr<PendingMessages> pending, comm.Start(messages));
  return *pending->Wait(absl::InfiniteDuration());
}

StepCopies::Slot& StepCopies::Oldest() { return slots_[slots_[0].copy.step <= slots_[1].copy.step ? 0 : 1]; }

std::vector<absl::Span<char>> StepCopies::Slot::Blocks() {
  std::vector<absl::Span<char>> blocks;
  size_t at = 0;
  for (const int64_t size : sizes) {
    blocks.emplace_back(memory.data() + at, static_cast<size_t>(size));
    at += static_cast<size_t>(size);
  }
  return blocks;
}

std::vector<StateStream> StepCopies::Streams() {
  coming_ = nullptr;
  if (of_rank_ < 0) return {};
  coming_ = &Oldest();
  coming_->copy = {};
  coming_->sizes = sizes_;
  coming_->memory.resize(static_cast<size_t>(std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0})));
  return {{Message::Kind::kSend, keeps_mine_, kStateTag, PiecesOf(own_)},
          {Message::Kind::kReceive, of_rank_, kStateTag, PiecesOf(coming_->Blocks())}};
}

void StepCopies::Arrived(int64_t step) {
  if (coming_ != nullptr) coming_->copy = {cell_, step};
}

std::vector<absl::Span<char>> StepCopies::Pieces(int cell, int64_t step) {
  for (Slot& slot : slots_) {
    if (slot.copy == PartCopy{cell, step}) return PiecesOf(slot.Blocks());
  }
  return {};
}

}  // namespace gtrain::elastic
