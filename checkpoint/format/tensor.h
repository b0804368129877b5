// A registered tensor as the whole job sees it.
#pragma once
#include <gtrain/sharding.h>
#include <gtrain/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sharding/rank_boxes.h"

namespace gtrain::ckpt {

enum class Layout : uint8_t {
  kReplicated,  // equal on all ranks
  kPerRank,     // bytes of each rank's own
  kSharded,     // as `sharding` says, which splits or pins something
  kBoxes,       // as `boxes` says, rank by rank; since version 3
};

// A per-rank blob is kUint8 with an empty shape: its size may differ between ranks and stands in the files.
struct GlobalTensor {
  std::string name;
  Layout layout = Layout::kReplicated;
  DType dtype = DType::kUint8;
  std::vector<int64_t> shape;
  Sharding sharding;  // empty unless kSharded
  // Null unless kBoxes, and until the ranks have told each other. Shared by the tensors that are cut alike.
  std::shared_ptr<const sharding::RankBoxes> boxes;
  bool operator==(const GlobalTensor& other) const;
};

// Elements of `shape`; nullopt when a dimension is negative or the bytes would not fit 2^62.
std::optional<uint64_t> ElementCount(const std::vector<int64_t>& shape, DType dtype);

// "F32[600,1000]", "bytes of each rank", "F32[600,1000] split 0:tp 1:dp:chunk on dp=4 x tp=2",
// "F32[600,1000] in 4 boxes": for people.
std::string Describe(const GlobalTensor& tensor);

}  // namespace gtrain::ckpt
