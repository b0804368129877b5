// Who writes which bytes. Every rank computes every rank's share from the same registration, so a share needs
// no message; rank 0 compares what came back with what it would have planned.
#pragma once
#include <gtrain/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::ckpt {

// Tensors up to this size are written whole by one rank; larger ones may be cut, at multiples of 64 bytes.
inline constexpr uint64_t kWholeTensorBytesMax = 1 << 20;

// A tensor or blob as one rank registered it.
struct Registered {
  GlobalTensor tensor;
  uint64_t bytes = 0;  // replicated: of the whole tensor; per-rank: of this rank's blob
};

// A run of bytes of a registered tensor, in the order of the file.
struct Piece {
  size_t registered = 0;  // index into the registration
  uint64_t begin = 0;
  uint64_t bytes = 0;
  bool operator==(const Piece&) const = default;
};

struct ShardPlan {
  std::vector<Piece> pieces;
  std::string header;         // PrintShardHeader of them
  std::vector<Slice> slices;  // the same for the manifest
  uint64_t data_bytes = 0;
  uint64_t file_bytes() const { return header.size() + data_bytes; }
};

// What `rank` of `world_size` writes: its share of the replicated bytes and its own blobs. Shares are
// disjoint, cover everything, and differ by little more than one whole tensor. `registered` is in
// registration order, equal on all ranks but for the sizes of per-rank blobs.
ShardPlan PlanShard(const std::vector<Registered>& registered, int rank, int world_size);

// A name that PlanShard gives to a part of a tensor ("w[0:4096]", elements); users may not register such
// names.
bool IsPieceName(absl::string_view name);

// Hash of what must be equal on all ranks: names, layouts, types, shapes.
std::string RegistrationHash(const std::vector<Registered>& registered);

}  // namespace gtrain::ckpt
