// Which box of a tensor each rank holds, said box by box: for cuts that no Sharding describes.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sharding/box.h"

namespace gtrain::sharding {

// Immutable, so it is shared between the tensors that are cut alike. About 100 bytes for each rank.
class RankBoxes {
 public:
  // `by_rank`: a box for each rank, empty where the rank holds nothing. They must lie in `shape`, which has
  // elements; two of them are equal or disjoint, and together they are the whole tensor: InvalidArgument
  // names the ranks. Takes n log n comparisons, and one for each two boxes that meet in the dimension in
  // which the fewest do: none for n ranks whose boxes follow each other along one dimension. Over 1,000
  // million of them is InvalidArgument, too.
  static absl::StatusOr<std::shared_ptr<const RankBoxes>> Make(const std::vector<int64_t>& shape,
                                                               absl::Span<const Box> by_rank);

  const std::vector<int64_t>& shape() const { return shape_; }
  int world_size() const { return static_cast<int>(cell_of_.size()); }
  // Distinct boxes, none of them empty, in the order of their corners.
  int64_t cells() const { return static_cast<int64_t>(boxes_.size()); }
  const Box& box(int64_t cell) const { return boxes_[static_cast<size_t>(cell)]; }
  bool Holds(int rank) const { return cell_of_[static_cast<size_t>(rank)] >= 0; }
  int64_t CellOf(int rank) const { return cell_of_[static_cast<size_t>(rank)]; }  // -1: it holds nothing
  int64_t ReplicaOf(int rank) const { return replica_of_[static_cast<size_t>(rank)]; }
  int64_t replicas(int64_t cell) const {
    return first_[static_cast<size_t>(cell) + 1] - first_[static_cast<size_t>(cell)];
  }
  int RankOf(int64_t cell, int64_t replica) const {
    return ranks_[static_cast<size_t>(first_[static_cast<size_t>(cell)] + replica)];
  }
  // Calls `found` with each cell that shares elements with `wanted`, in the order of cells. Looks only at the
  // boxes that meet it in that dimension.
  void ForEachOverlap(const Box& wanted, absl::FunctionRef<void(int64_t cell, const Box& box)> found) const;
  // Equal where each cell has the same ranks, whatever the boxes are.
  const std::string& key() const { return key_; }

  bool operator==(const RankBoxes& other) const {
    return shape_ == other.shape_ && cell_of_ == other.cell_of_ && boxes_ == other.boxes_;
  }

 private:
  RankBoxes() = default;
  void Sort();
  absl::Status CheckDisjoint() const;
  // The cells in by_begin_ that may meet `wanted` in dim_: [first, last).
  void Candidates(const Interval& wanted, size_t* first, size_t* last) const;

  std::vector<int64_t> shape_;
  std::vector<Box> boxes_;
  std::vector<int32_t> cell_of_;  // of each rank
  std::vector<int32_t> replica_of_;
  std::vector<int32_t> ranks_;       // of each cell, one after the other
  std::vector<int32_t> first_;       // where the ranks of each cell begin in ranks_, and the end
  size_t dim_ = 0;                   // the dimension in which the fewest boxes meet
  uint64_t meetings_ = 0;            // pairs of them, in it
  std::vector<int32_t> by_begin_;    // cells in the order of their begin in dim_
  std::vector<int64_t> end_so_far_;  // the greatest end in dim_ of the cells up to each in by_begin_
  std::string key_;
};

}  // namespace gtrain::sharding
