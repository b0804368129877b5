// The replicated tensors are laid end to end, widest elements first (so that every tensor of every shard is
// aligned), and cut into world_size equal runs. A cut inside a small tensor moves to that tensor's nearer
// edge: other programs then find most tensors whole under their own name. Moving cuts is monotone, so runs
// stay disjoint and in order.
#include "checkpoint/plan/save_plan.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {
namespace {

constexpr uint64_t kCutBytes = 64;  // a multiple of every element size

// Indices of the replicated tensors in the order of their bytes.
std::vector<size_t> ReplicatedOrder(const std::vector<Registered>& registered) {
  std::vector<size_t> order;
  for (size_t i = 0; i < registered.size(); ++i) {
    if (registered[i].tensor.layout == Layout::kReplicated) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return DTypeSize(registered[a].tensor.dtype) > DTypeSize(registered[b].tensor.dtype);
  });
  return order;
}

// Where the run of rank k begins, in bytes of the whole.
uint64_t Cut(const std::vector<Registered>& registered, const std::vector<size_t>& order, uint64_t total,
             int k, int world_size) {
  if (k == world_size) return total;
  const auto ideal = static_cast<uint64_t>(static_cast<unsigned __int128>(total) * static_cast<unsigned>(k) /
                                           static_cast<unsigned>(world_size));
  uint64_t begin = 0;
  for (size_t i : order) {
    const uint64_t bytes = registered[i].bytes;
    if (ideal < begin + bytes) {
      const uint64_t inside = ideal - begin;
      if (bytes > kWholeTensorBytesMax) return begin + inside / kCutBytes * kCutBytes;
      return inside * 2 < bytes ? begin : begin + bytes;
    }
    begin += bytes;
  }
  return total;
}

void AddPiece(const std::vector<Registered>& registered, Piece piece, std::vector<TensorEntry>* entries,
              ShardPlan* plan) {
  const Registered& r = registered[piece.registered];
  TensorEntry entry{.name = r.tensor.name,
                    .dtype = r.tensor.dtype,
                    .shape = r.tensor.shape,
                    .begin = plan->data_bytes,
                    .end = plan->data_bytes + piece.bytes};
  if (r.tensor.layout == Layout::kPerRank) {
    entry.shape = {static_cast<int64_t>(piece.bytes)};
  } else if (piece.bytes != r.bytes) {
    const uint64_t width = DTypeSize(r.tensor.dtype);
    entry.name =
        absl::StrCat(entry.name, "[", piece.begin / width, ":", (piece.begin + piece.bytes) / width, "]");
    entry.shape = {static_cast<int64_t>(piece.bytes / width)};
  }
  entries->push_back(std::move(entry));
  plan->pieces.push_back(piece);
  plan->slices.push_back(
      {.tensor = r.tensor.name, .begin = piece.begin, .bytes = piece.bytes, .file_begin = plan->data_bytes});
  plan->data_bytes += piece.bytes;
}

}  // namespace

ShardPlan PlanShard(const std::vector<Registered>& registered, int rank, int world_size) {
  GT_CHECK(rank >= 0 && rank < world_size);
  const std::vector<size_t> order = ReplicatedOrder(registered);
  uint64_t total = 0;
  for (size_t i : order) total += registered[i].bytes;
  const uint64_t from = Cut(registered, order, total, rank, world_size);
  const uint64_t to = Cut(registered, order, total, rank + 1, world_size);

  ShardPlan plan;
  std::vector<TensorEntry> entries;
  uint64_t begin = 0;
  for (size_t i : order) {
    const uint64_t end = begin + registered[i].bytes;
    const uint64_t first = std::max(begin, from);
    const uint64_t last = std::min(end, to);
    if (first < last) AddPiece(registered, {i, first - begin, last - first}, &entries, &plan);
    // A tensor without bytes stands in rank 0's shard, so that other programs see its name and shape.
    if (begin == end && rank == 0) AddPiece(registered, {i, 0, 0}, &entries, &plan);
    begin = end;
  }
  for (size_t i = 0; i < registered.size(); ++i) {
    if (registered[i].tensor.layout == Layout::kPerRank)
      AddPiece(registered, {i, 0, registered[i].bytes}, &entries, &plan);
  }
  plan.header = PrintShardHeader(entries);
  for (Slice& slice : plan.slices) slice.file_begin += plan.header.size();
  return plan;
}

bool IsPieceName(absl::string_view name) {
  if (name.empty() || name.back() != ']') return false;
  name.remove_suffix(1);
  const auto take_digits = [&] {
    size_t n = 0;
    while (!name.empty() && absl::ascii_isdigit(static_cast<unsigned char>(name.back())))
      name.remove_suffix(1), ++n;
    return n > 0;
  };
  if (!take_digits() || name.empty() || name.back() != ':') return false;
  name.remove_suffix(1);
  return take_digits() && !name.empty() && name.back() == '[';
}

std::string RegistrationHash(const std::vector<Registered>& registered) {
  std::string text;
  for (const Registered& r : registered) {
    absl::StrAppend(&text, r.tensor.name, "\n",
                    r.tensor.layout == Layout::kReplicated ? "replicated" : "per-rank", " ",
                    DTypeName(r.tensor.dtype));
    for (int64_t dim : r.tensor.shape) absl::StrAppend(&text, " ", dim);
    text.push_back('\n');
  }
  return Xxh3Hex(text);
}

}  // namespace gtrain::ckpt
