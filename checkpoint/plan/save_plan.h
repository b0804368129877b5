// Plans which rank writes which bytes. Every rank computes every rank's share from the same registration, so
// a share needs no message; rank 0 compares the indices of the ranks with its own plan of them.
#pragma once
#include <gtrain/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/format/shares.h"

namespace gtrain::ckpt {

// A tensor or blob as one rank registered it.
struct Registered {
  GlobalTensor tensor;
  uint64_t bytes = 0;  // of this rank's memory: its box of the tensor, or its blob; 0 with any_length
  PerRankRule rule = PerRankRule::kDrop;  // of a blob
  bool any_length = false;                // a blob whose length is said by each save
};

struct ShardPlan {
  std::vector<Piece> pieces;       // in the order of the file; `tensor` is the index into the registration
  std::vector<uint64_t> per_rank;  // as ShardFile says it
  std::vector<KeptBlob> kept;      // likewise; their pieces come last
  std::string header;              // PrintShardHeader of the pieces
  uint64_t data_bytes = 0;
  uint64_t file_bytes() const { return header.size() + data_bytes; }
};

// Whether the part of a rank's save besides its tensors may change between saves. Then each save says it
// (SaveTail), and headers are whole blocks (kTailHeaderBytes), so that data always lies alike in its file.
bool HasTail(const std::vector<Registered>& registered);
inline constexpr size_t kTailHeaderBytes = 4096;

// Plans the file of `rank` of `world_size`: its share of the tensors that it holds (format/shares.h) and its
// own blobs. `registered` is in registration order, equal on all ranks but for sizes; every sharding in it is
// possible in this world.
ShardPlan PlanShard(const std::vector<Registered>& registered, int rank, int world_size);
// Plans the file for one save of a registration that HasTail.
ShardPlan PlanShard(const std::vector<Registered>& registered, int rank, int world_size,
                    const SaveTail& tail);

// The entries of the file of `rank`, for its header; its pieces go to `pieces` when that is not null.
std::vector<TensorEntry> PlanEntries(const std::vector<GlobalTensor>& tensors, Shares* shares, int rank,
                                     const SaveTail& tail, std::vector<Piece>* pieces);

// A name that PlanShard gives to a part of a tensor: "w[0:4,8:16]" a box, "w[0:4096]" elements row by row,
// "w[0:4,8:16][0:32]" elements of a box, "rng[@12]" state of a rank that the world has not; users may not
// register such names.
bool IsPieceName(absl::string_view name);

// Hash of what must be equal on all ranks: names, layouts, shardings, types, shapes.
std::string RegistrationHash(const std::vector<Registered>& registered);

}  // namespace gtrain::ckpt
