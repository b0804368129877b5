// A registered tensor as the whole job sees it.
#pragma once
#include <gtrain/sharding.h>
#include <gtrain/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gtrain::ckpt {

enum class Layout : uint8_t {
  kReplicated,  // equal on all ranks
  kPerRank,     // bytes of each rank's own
  kSharded,     // as `sharding` says, which splits or pins something
};

// A per-rank blob is kUint8 with an empty shape: its size may differ between ranks and stands in the files.
struct GlobalTensor {
  std::string name;
  Layout layout = Layout::kReplicated;
  DType dtype = DType::kUint8;
  std::vector<int64_t> shape;
  Sharding sharding;  // empty unless kSharded
  bool operator==(const GlobalTensor&) const = default;
};

// Elements of `shape`; nullopt when a dimension is negative or the bytes would not fit 2^62.
std::optional<uint64_t> ElementCount(const std::vector<int64_t>& shape, DType dtype);

// "F32[600,1000]", "bytes of each rank", "F32[600,1000] split 0:tp 1:dp on dp=4 x tp=2": for people.
std::string Describe(const GlobalTensor& tensor);

}  // namespace gtrain::ckpt
