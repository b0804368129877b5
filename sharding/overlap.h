// The common part of two boxes of one tensor, as runs of bytes that lie together in the memory of both.
#pragma once
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "sharding/partition.h"

namespace gtrain::sharding {

// Runs of `run_bytes` each, in the order of both memories. One takes constant memory, whatever it describes.
class Overlap {
 public:
  // Elements of `width` bytes. Without common elements there are no runs.
  static Overlap Of(const Box& from, const Box& to, uint64_t width);

  uint64_t runs() const { return runs_; }
  uint64_t bytes() const { return runs_ * run_bytes_; }
  // All of it lies in [begin, end) of the memory of `from`.
  uint64_t begin() const { return first_.from; }
  uint64_t end() const { return end_; }
  // How many of its bytes lie in [begin, end) of the memory of `from`.
  uint64_t BytesIn(uint64_t begin, uint64_t end) const;
  // Each run, or what [begin, end) of the memory of `from` holds of it, in order.
  void ForEachRun(uint64_t begin, uint64_t end,
                  absl::FunctionRef<void(uint64_t from, uint64_t to, uint64_t bytes)> visit) const;

  bool operator==(const Overlap&) const = default;

 private:
  struct Dim {
    uint64_t count = 1;
    uint64_t from_step = 0;
    uint64_t to_step = 0;
    bool operator==(const Dim&) const = default;
  };
  struct Run {
    uint64_t from = 0;
    uint64_t to = 0;
    bool operator==(const Run&) const = default;
  };
  Run RunAt(uint64_t index) const;
  uint64_t RunsBefore(uint64_t from_offset) const;  // that begin before it
  uint64_t FirstRunEndingAfter(uint64_t from_offset) const;

  uint64_t runs_ = 0;
  uint64_t run_bytes_ = 0;
  uint64_t end_ = 0;
  Run first_;
  absl::InlinedVector<Dim, 2> dims_;  // outermost first, each of more than one
};

}  // namespace gtrain::sharding
