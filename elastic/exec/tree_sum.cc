// What each rank has left of its own leaves is a short list of buffers. A round sends the first of them, and
// adds what arrives to the last. Rounds run piece by piece: a rank that has sent its part of one piece goes
// on to the next one, so that all levels of the tree are busy at once with a large gradient.
#include "elastic/exec/tree_sum.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "comm/codec/reduce.h"

namespace gtrain::elastic {
namespace {

constexpr size_t kLossFloats = sizeof(double) / sizeof(float);
constexpr size_t kPieceFloats = (1 << 20) / sizeof(float);
// The first steps of a generation begin when others are still busy with its start.
constexpr int kMeasureFrom = 10, kMeasureTo = 13;

double LossOf(const std::vector<float>& buffer) {
  double loss = 0;
  std::memcpy(&loss, buffer.data() + buffer.size() - kLossFloats, sizeof(loss));
  return loss;
}
void SetLoss(std::vector<float>& buffer, double loss) {
  std::memcpy(buffer.data() + buffer.size() - kLossFloats, &loss, sizeof(loss));
}

void AddFloats(float* left, const float* right, size_t count) {
  const void* const both[] = {left, right};
  comm::Reduce(left, both, 2, count, DType::kFloat32, ReduceOp::kSum);
}

}  // namespace

TreeSum::TreeSum(std::vector<absl::Span<float>> gradients, bool measures)
    : gradients_(std::move(gradients)), measures_(measures) {
  for (const absl::Span<float>& gradient : gradients_) floats_ += gradient.size();
}

size_t TreeSum::Values() const { return floats_ + kLossFloats; }

TreeSum::Buffer& TreeSum::Slot(size_t index) {
  while (slots_.size() <= index) slots_.emplace_back(Values());
  return slots_[index];
}

void TreeSum::Begin(int leaves, int rank, int ranks) {
  leaves_ = leaves;
  rank_ = rank;
  ranks_ = ranks;
  next_ = RunOf(leaves, rank, ranks).begin;
  blocks_.clear();
  folding_ = absl::ZeroDuration();
}

void TreeSum::AddBuffer(Buffer& left, const Buffer& right) const {
  AddFloats(left.data(), right.data(), floats_);
  SetLoss(left, LossOf(left) + LossOf(right));
}

void TreeSum::Add(double loss) {
  const Instant begin = RealClock().Now();
  // A right half is added where the left one lies, without a copy.
  const TreeBlock leaf{next_, next_ + 1};
  ++next_;
  const bool joins = !blocks_.empty() && AreSiblings(blocks_.back(), leaf, leaves_);
  Buffer& target = Slot(joins ? blocks_.size() - 1 : blocks_.size());
  size_t at = 0;
  for (const absl::Span<float>& gradient : gradients_) {
    if (joins) {
      AddFloats(target.data() + at, gradient.data(), gradient.size());
    } else {
      std::copy(gradient.begin(), gradient.end(), target.begin() + static_cast<ptrdiff_t>(at));
    }
    at += gradient.size();
  }
  SetLoss(target, joins ? LossOf(target) + loss : loss);
  blocks_.push_back(leaf);
  for (int merges = MergeEnd(blocks_, leaves_) - (joins ? 1 : 0); merges > 0; --merges) {
    const size_t right = blocks_.size() + static_cast<size_t>(merges) - 1;
    AddBuffer(slots_[right - 1], slots_[right]);
  }
  folding_ += RealClock().Now() - begin;
}

// One piece of the buffers through all rounds. The last piece holds the loss, whole.
absl::Status TreeSum::SumPiece(Communicator& comm, const std::vector<TreeRound>& rounds, size_t begin,
                               size_t end, float scale) {
  const size_t floats = std::min(end, floats_) - begin;
  const bool has_loss = end > floats_;
  const size_t bytes = (end - begin) * sizeof(float);
  const auto add = [&](Buffer& left, const float* right) {
    AddFloats(left.data() + begin, right, floats);
    if (!has_loss) return;
    double more = 0;
    std::memcpy(&more, right + floats, sizeof(more));
    SetLoss(left, LossOf(left) + more);
  };
  size_t first = 0, last = blocks_.size() - 1;
  for (const TreeRound& round : rounds) {
    std::vector<Message> messages;
    if (round.receive_from >= 0) {
      messages.push_back(
          {Message::Kind::kReceive, arriving_.data(), bytes, DType::kUint8, round.receive_from, round.level});
    }
    if (round.send_to >= 0) {
      messages.push_back({Message::Kind::kSend, slots_[first++].data() + begin, bytes, DType::kUint8,
                          round.send_to, round.level});
    }
    GT_ASSIGN_OR_RETURN(const std::shared_ptr<PendingMessages> pending, comm.Start(messages));
    GT_RETURN_IF_ERROR(*pending->Wait(absl::InfiniteDuration()));
    if (round.receive_from < 0) continue;
    add(slots_[last], arriving_.data());
    for (int merges = round.merges; merges > 0; --merges, --last)
      add(slots_[last - 1], slots_[last].data() + begin);
  }
  if (rank_ != 0) return absl::OkStatus();
  for (size_t i = begin; i < begin + floats; ++i) slots_[0][i] *= scale;
  return absl::OkStatus();
}

absl::Status TreeSum::SumOverRanks(Communicator& comm, float scale) {
  arriving_.resize(std::min(kPieceFloats, floats_) + kLossFloats);
  const std::vector<TreeRound> rounds = RoundsOf(leaves_, rank_, ranks_);
  for (size_t begin = 0; !blocks_.empty();) {
    const size_t end = begin + kPieceFloats < floats_ ? begin + kPieceFloats : Values();
    GT_RETURN_IF_ERROR(SumPiece(comm, rounds, begin, end, scale));
    if (end == Values()) break;
    begin = end;
  }
  return comm.Broadcast(Slot(0).data(), Values() * sizeof(float), DType::kUint8, 0);
}

// A barrier first, so that it is not the other ranks' computing that is measured.
absl::StatusOr<double> TreeSum::Finish(Communicator& comm, float scale) {
  const bool measures = measures_ && finished_ >= kMeasureFrom && finished_ < kMeasureTo;
  if (measures) GT_RETURN_IF_ERROR(comm.Barrier());
  const Instant begin = RealClock().Now();
  GT_RETURN_IF_ERROR(SumOverRanks(comm, scale));
  const Buffer& sum = slots_[0];
  const float* from = sum.data();
  for (const absl::Span<float>& gradient : gradients_) {
    std::copy(from, from + gradient.size(), gradient.begin());
    from += gradient.size();
  }
  const double loss = LossOf(sum);
  if (measures) GT_RETURN_IF_ERROR(Measure(comm, folding_ + (RealClock().Now() - begin)));
  ++finished_;
  return loss;
}

// The sum itself is what is all-reduced, in memory that nobody needs any more.
absl::Status TreeSum::Measure(Communicator& comm, absl::Duration tree) {
  const Instant begin = RealClock().Now();
  GT_RETURN_IF_ERROR(comm.AllReduce(slots_[0].data(), floats_, DType::kFloat32, ReduceOp::kSum));
  const absl::Duration all_reduce = RealClock().Now() - begin;
  const bool first = finished_ == kMeasureFrom;
  tree_ = first ? tree : std::min(tree_, tree);
  all_reduce_ = first ? all_reduce : std::min(all_reduce_, all_reduce);
  if (finished_ + 1 < kMeasureTo) return absl::OkStatus();
  cost_ = absl::StrFormat(
      "bitwise, a tree of %d virtual ranks over %d ranks: %.3g ms a step, an all-reduce takes %.3g ms",
      leaves_, ranks_, absl::ToDoubleMilliseconds(tree_), absl::ToDoubleMilliseconds(all_reduce_));
  if (rank_ == 0) comm.ReportCompression(cost_);
  return absl::OkStatus();
}

}  // namespace gtrain::elastic
