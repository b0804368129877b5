// Shares says which bytes of its boxes a rank writes; here they get names. A box that is not the whole tensor
// carries its coordinates in its name, so that a file explains itself to programs that know nothing of us.
#include "checkpoint/plan/save_plan.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {
namespace {

using sharding::Box;
using sharding::Interval;

std::string Range(uint64_t begin, uint64_t end) { return absl::StrCat(begin, ":", end); }

TensorEntry EntryOf(const GlobalTensor& tensor, const sharding::Partition& partition, int rank,
                    const Piece& piece) {
  TensorEntry entry{.name = tensor.name,
                    .dtype = tensor.dtype,
                    .shape = tensor.shape,
                    .begin = piece.offset,
                    .end = piece.offset + piece.bytes};
  const uint64_t width = DTypeSize(tensor.dtype);
  const Box box = partition.BoxOf(tensor.shape, partition.CellOf(rank));
  if (piece.bytes > 0 && box != sharding::WholeBox(tensor.shape)) {
    entry.shape.clear();
    for (const Interval& i : box) entry.shape.push_back(i.size);
    const auto range = [](std::string* out, const Interval& i) {
      absl::StrAppend(out, Range(static_cast<uint64_t>(i.begin), static_cast<uint64_t>(i.end())));
    };
    absl::StrAppend(&entry.name, "[", absl::StrJoin(box, ",", range), "]");
  }
  if (piece.bytes != sharding::Elements(box) * width && piece.bytes > 0) {
    absl::StrAppend(&entry.name, "[", Range(piece.begin / width, (piece.begin + piece.bytes) / width), "]");
    entry.shape = {static_cast<int64_t>(piece.bytes / width)};
  }
  return entry;
}

}  // namespace

bool HasTail(const std::vector<Registered>& registered) {
  return std::any_of(registered.begin(), registered.end(),
                     [](const Registered& r) { return r.any_length || r.rule == PerRankRule::kKeep; });
}

std::vector<TensorEntry> PlanEntries(const std::vector<GlobalTensor>& tensors, Shares* shares, int rank,
                                     const SaveTail& tail, std::vector<Piece>* pieces) {
  std::vector<Piece> all = shares->PiecesOf(rank);
  std::vector<TensorEntry> entries;
  for (const Piece& piece : all)
    entries.push_back(EntryOf(tensors[piece.tensor], shares->partition(piece.tensor), rank, piece));
  uint64_t offset = shares->DataBytes(rank);
  std::vector<size_t> blobs;
  const auto add = [&](size_t tensor, std::string name, uint64_t bytes) {
    all.push_back({tensor, 0, bytes, offset});
    entries.push_back({.name = std::move(name),
                       .shape = {static_cast<int64_t>(bytes)},
                       .begin = offset,
                       .end = offset + bytes});
    offset += bytes;
  };
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].layout != Layout::kPerRank) continue;
    blobs.push_back(t);
    add(t, tensors[t].name, tail.per_rank[blobs.size() - 1]);
  }
  for (const KeptBlob& kept : tail.kept) {
    const size_t t = blobs[kept.blob];
    add(t, absl::StrCat(tensors[t].name, "[@", kept.rank, "]"), kept.bytes);
  }
  if (pieces != nullptr) *pieces = std::move(all);
  return entries;
}

ShardPlan PlanShard(const std::vector<Registered>& registered, int rank, int world_size) {
  SaveTail tail;
  for (const Registered& r : registered) {
    if (r.tensor.layout == Layout::kPerRank) tail.per_rank.push_back(r.bytes);
  }
  return PlanShard(registered, rank, world_size, tail);
}

ShardPlan PlanShard(const std::vector<Registered>& registered, int rank, int world_size,
                    const SaveTail& tail) {
  GT_CHECK(rank >= 0 && rank < world_size);
  ShardPlan plan{.per_rank = tail.per_rank, .kept = tail.kept};
  std::vector<GlobalTensor> tensors;
  for (const Registered& r : registered) tensors.push_back(r.tensor);
  absl::StatusOr<Shares> shares = Shares::Make(tensors, world_size);
  GT_CHECK(shares.ok());
  const std::vector<TensorEntry> entries = PlanEntries(tensors, &*shares, rank, tail, &plan.pieces);
  if (!entries.empty()) plan.data_bytes = entries.back().end;
  plan.header = PrintShardHeader(entries, HasTail(registered) ? kTailHeaderBytes : kHeaderAlignment);
  return plan;
}

bool IsPieceName(absl::string_view name) {
  if (name.empty() || name.back() != ']') return false;
  const size_t open = name.rfind("[@");
  if (open != name.npos && open + 3 < name.size() &&
      name.find_first_not_of("0123456789", open + 2) == name.size() - 1) {
    return true;
  }
  const auto take_number = [&] {
    const size_t before = name.size();
    while (!name.empty() && absl::ascii_isdigit(static_cast<unsigned char>(name.back())))
      name.remove_suffix(1);
    return name.size() < before && !name.empty();
  };
  do {
    name.remove_suffix(1);  // what closes a range: "]" or ","
    if (!take_number() || name.back() != ':') return false;
    name.remove_suffix(1);
    if (!take_number()) return false;
  } while (name.back() == ',');
  return name.back() == '[';
}

std::string RegistrationHash(const std::vector<Registered>& registered) {
  std::string text;
  for (const Registered& r : registered) {
    const GlobalTensor& t = r.tensor;
    absl::StrAppend(&text, t.name, "\n", static_cast<int>(t.layout), " ", Describe(t), " ",
                    static_cast<int>(r.rule), r.any_length ? " of any length" : "", "\n");
  }
  return Xxh3Hex(text);
}

}  // namespace gtrain::ckpt
