// Which rank writes which bytes. It is part of the format since version 2, where a manifest says how tensors
// lie on ranks and not which bytes each file holds. Writers and readers both compute that here
// (docs/formats/checkpoint.md).
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "checkpoint/format/tensor.h"
#include "sharding/partition.h"

namespace gtrain::ckpt {

inline constexpr uint64_t kStateBytesMax = uint64_t{1} << 62;  // of all tensors together

// Boxes up to this size are written whole by one rank; larger ones may be cut, at multiples of 64 bytes.
inline constexpr uint64_t kWholeBoxBytesMax = 1 << 20;
// Boxes of all tensors together: 4,096 ranks that each hold a part of 10,000 tensors are 41 million.
inline constexpr uint64_t kBoxesMax = 200'000'000;

// Bytes [begin, begin + bytes) of the box that a rank holds of a tensor, at `offset` of its file's data.
struct Piece {
  size_t tensor = 0;
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t offset = 0;
  bool operator==(const Piece&) const = default;
};

// The pieces of tensors on the ranks of one world; state of single ranks has no part in it. Every byte of
// every box is in exactly one piece. Not thread-safe: it remembers what it computed, up to a bound of about
// 64 MiB.
class Shares {
 public:
  // InvalidArgument names the first tensor with an impossible shape or sharding.
  static absl::StatusOr<Shares> Make(const std::vector<GlobalTensor>& tensors, int world_size);

  // Tensors in the order of their bytes in every file: wide elements first.
  const std::vector<size_t>& order() const { return order_; }
  const sharding::Partition& partition(size_t tensor) const { return partitions_[tensor]; }
  // Bytes of the box that `rank` holds; 0 where it holds none.
  uint64_t BytesOn(size_t tensor, int rank) const;

  // Bytes of all pieces of `rank`.
  uint64_t DataBytes(int rank);
  // The pieces of `rank` in the order of the file, one after the other. At most one a tensor.
  std::vector<Piece> PiecesOf(int rank);
  // The pieces that hold bytes [begin, end) of a cell's box, in the order of those bytes.
  void FindPieces(size_t tensor, int64_t cell, uint64_t begin, uint64_t end,
                  absl::FunctionRef<void(int rank, const Piece& piece)> found);

 private:
  // Tensors of one element width whose cells have the same ranks: the boxes of a cell are laid end to end and
  // cut into a run for each replica.
  struct Stream {
    uint64_t width = 1;
    std::vector<size_t> tensors;
  };
  // The boxes of one cell of a stream.
  struct Line {
    std::vector<uint64_t> offsets;  // of each tensor, and the end
    std::vector<uint64_t> cuts;     // where the run of each replica begins, and the end
  };

  Shares() = default;
  const sharding::Partition& PartitionOf(const Stream& stream) const {
    return partitions_[stream.tensors[0]];
  }
  void Forget();
  const Line& LineOf(size_t stream, int64_t cell);
  Line MakeLine(const Stream& stream, int64_t cell) const;
  std::pair<uint64_t, uint64_t> RunOf(size_t stream, int rank);  // in its line; nothing where not held
  const std::vector<uint64_t>& BasesOf(int rank);  // where each stream begins in the data, and the end

  std::vector<GlobalTensor> tensors_;
  std::vector<sharding::Partition> partitions_;  // of each tensor
  std::vector<Stream> streams_;
  std::vector<size_t> order_;
  std::vector<std::pair<size_t, size_t>> place_;  // of each tensor: stream, index in it
  absl::flat_hash_map<std::pair<size_t, int64_t>, std::unique_ptr<const Line>> lines_;
  absl::flat_hash_map<int, std::unique_ptr<const std::vector<uint64_t>>> bases_;
  size_t remembered_ = 0;  // numbers in both; forgotten between calls only, so references live through one
};

}  // namespace gtrain::ckpt
