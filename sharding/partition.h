// A Sharding with its names looked up, as planners compute with it: which ranks hold the same box, and which
// box.
#pragma once
#include <gtrain/sharding.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "sharding/box.h"
#include "sharding/rank_boxes.h"

namespace gtrain::sharding {

inline constexpr size_t kAxesMax = 8;
inline constexpr size_t kAxisNameBytesMax = 32;

// Part i of n elements cut into `parts`; where it is empty, it begins at the end of the one before.
Interval Part(int64_t n, int64_t parts, int64_t i, SplitRule rule = SplitRule::kBalanced);
// Which part holds element x, 0 <= x < n.
int64_t PartHolding(int64_t n, int64_t parts, int64_t x, SplitRule rule = SplitRule::kBalanced);

// A cell is a distinct box: 0 <= cell < cells(). Its replicas are the ranks that hold it, in rank order.
// Every rank is one replica of one cell, or holds nothing (Sharding::only, or no box of a RankBoxes).
class Partition {
 public:
  // InvalidArgument says what is wrong with `sharding` for a tensor of `dimensions`.
  static absl::StatusOr<Partition> Make(const Sharding& sharding, size_t dimensions, int world_size);
  // Every rank holds everything.
  static Partition Replicated(int world_size);
  // Builds the partition from the boxes that each rank gave for itself.
  static Partition Of(std::shared_ptr<const RankBoxes> boxes);

  bool Holds(int rank) const;
  int64_t cells() const { return boxes_ != nullptr ? boxes_->cells() : cells_; }
  int64_t replicas(int64_t cell) const { return boxes_ != nullptr ? boxes_->replicas(cell) : replicas_; }
  // Both are for a rank that Holds.
  int64_t CellOf(int rank) const {
    return boxes_ != nullptr ? boxes_->CellOf(rank) : Digits(cell_axes_, rank);
  }
  int64_t ReplicaOf(int rank) const {
    return boxes_ != nullptr ? boxes_->ReplicaOf(rank) : Digits(replica_axes_, rank);
  }
  int RankOf(int64_t cell, int64_t replica) const;

  Box BoxOf(const std::vector<int64_t>& shape, int64_t cell) const;
  // Elements(BoxOf(shape, cell)), faster.
  uint64_t ElementsOf(const std::vector<int64_t>& shape, int64_t cell) const;
  // Calls `found` with each cell whose box shares elements with `wanted`, and that box.
  void ForEachOverlap(const std::vector<int64_t>& shape, const Box& wanted,
                      absl::FunctionRef<void(int64_t cell, const Box& box)> found) const;

  // Equal for partitions whose cells have the same ranks, whatever dimensions are cut.
  std::string Key() const;

 private:
  struct Axis {
    int64_t size = 1;
    int64_t stride = 1;  // the coordinate of a rank is rank / stride % size
  };
  struct Cut {
    int dim = 0;
    int64_t parts = 1;
    int64_t cell_stride = 1;  // the part of a cell is cell / cell_stride % parts
    SplitRule rule = SplitRule::kBalanced;
  };
  struct Pin {
    Axis axis;
    int64_t index = 0;
  };
  using Axes = absl::InlinedVector<Axis, 4>;

  static int64_t Digits(const Axes& axes, int64_t rank);
  static int64_t Spread(const Axes& axes, int64_t number);
  void Descend(size_t cut, int64_t cell, const Box& wanted, Box* box,
               absl::FunctionRef<void(int64_t, const Box&)> found) const;

  std::shared_ptr<const RankBoxes> boxes_;  // not null: they say everything, and nothing below does
  Axes cell_axes_;                          // split over; slowest first
  Axes replica_axes_;                       // the others
  absl::InlinedVector<Cut, 4> cuts_;
  absl::InlinedVector<Pin, 2> pins_;
  int64_t first_rank_ = 0;  // with all free coordinates 0
  int64_t cells_ = 1;
  int64_t replicas_ = 1;
};

}  // namespace gtrain::sharding
