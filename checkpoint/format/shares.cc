// Tensors whose boxes lie on the same ranks form a stream. In it, the boxes of one cell are laid end to end
// and cut into equal runs, one for each replica that holds them; a cut inside a small box moves to the box's
// nearer edge, so that most boxes are found whole in some file. Moving cuts is monotone: runs stay disjoint
// and in order. A file is the runs of its rank, stream after stream, wide elements first, so everything is
// aligned. Since a run is one range of its line, a byte of a tensor is found in a file without going through
// the file.
#include "checkpoint/format/shares.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace gtrain::ckpt {
namespace {

using sharding::Partition;

constexpr uint64_t kCutBytes = 64;  // a multiple of every element size
constexpr size_t kRememberedMax = 8 << 20;

absl::StatusOr<Partition> PartitionFor(const GlobalTensor& tensor, int world_size) {
  if (tensor.layout == Layout::kReplicated) return Partition::Replicated(world_size);
  if (tensor.layout == Layout::kBoxes) {
    if (tensor.boxes == nullptr || tensor.boxes->world_size() != world_size ||
        tensor.boxes->shape() != tensor.shape) {
      return absl::InvalidArgumentError(absl::StrCat("its boxes are not those of ", world_size, " ranks"));
    }
    return Partition::Of(tensor.boxes);
  }
  return Partition::Make(tensor.sharding, tensor.shape.size(), world_size);
}

}  // namespace

absl::StatusOr<Shares> Shares::Make(const std::vector<GlobalTensor>& tensors, int world_size) {
  Shares shares;
  shares.tensors_ = tensors;
  shares.place_.resize(tensors.size());
  absl::flat_hash_map<std::string, size_t> stream_of;
  uint64_t boxes = 0, bytes = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    shares.partitions_.push_back(Partition::Replicated(world_size));
    if (tensors[t].layout == Layout::kPerRank) continue;
    const auto fail = [&](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", tensors[t].name, "\": ", what));
    };
    const std::optional<uint64_t> count = ElementCount(tensors[t].shape, tensors[t].dtype);
    if (!count) return fail("impossible shape");
    bytes += *count * DTypeSize(tensors[t].dtype);  // neither summand is over 2^62
    if (bytes > kStateBytesMax) return fail("more bytes than there can be");
    absl::StatusOr<Partition> partition = PartitionFor(tensors[t], world_size);
    if (!partition.ok()) return fail(partition.status().message());
    boxes += static_cast<uint64_t>(partition->cells());
    const uint64_t width = DTypeSize(tensors[t].dtype);
    const auto [it, added] = stream_of.emplace(absl::StrCat(width, partition->Key()), shares.streams_.size());
    if (added) {
      shares.streams_.push_back({.width = width});
      boxes += static_cast<uint64_t>(world_size);
    }
    if (boxes > kBoxesMax) return fail("too many parts of tensors");
    shares.streams_[it->second].tensors.push_back(t);
    shares.partitions_.back() = *std::move(partition);
  }
  std::stable_sort(shares.streams_.begin(), shares.streams_.end(),
                   [](const Stream& a, const Stream& b) { return a.width > b.width; });
  for (size_t s = 0; s < shares.streams_.size(); ++s) {
    const std::vector<size_t>& members = shares.streams_[s].tensors;
    for (size_t i = 0; i < members.size(); ++i) shares.place_[members[i]] = {s, i};
    shares.order_.insert(shares.order_.end(), members.begin(), members.end());
  }
  return shares;
}

uint64_t Shares::BytesOn(size_t tensor, int rank) const {
  const Partition& partition = partitions_[tensor];
  if (!partition.Holds(rank)) return 0;
  return partition.ElementsOf(tensors_[tensor].shape, partition.CellOf(rank)) *
         DTypeSize(tensors_[tensor].dtype);
}

void Shares::Forget() {
  if (remembered_ < kRememberedMax) return;
  lines_.clear();
  bases_.clear();
  remembered_ = 0;
}

Shares::Line Shares::MakeLine(const Stream& stream, int64_t cell) const {
  Line line;
  line.offsets.reserve(stream.tensors.size() + 1);
  uint64_t total = 0;
  for (size_t t : stream.tensors) {
    line.offsets.push_back(total);
    total += partitions_[t].ElementsOf(tensors_[t].shape, cell) * stream.width;
  }
  line.offsets.push_back(total);
  const auto replicas = static_cast<uint64_t>(PartitionOf(stream).replicas(cell));
  line.cuts.reserve(replicas + 1);
  size_t i = 0;
  for (uint64_t k = 0; k < replicas; ++k) {
    const auto ideal = static_cast<uint64_t>(static_cast<unsigned __int128>(total) * k / replicas);
    while (i < stream.tensors.size() && line.offsets[i + 1] <= ideal) ++i;
    if (i == stream.tensors.size()) {  // nothing in the stream has bytes
      line.cuts.push_back(total);
      continue;
    }
    const uint64_t begin = line.offsets[i], bytes = line.offsets[i + 1] - begin, inside = ideal - begin;
    if (bytes > kWholeBoxBytesMax) {
      line.cuts.push_back(begin + inside / kCutBytes * kCutBytes);
    } else {
      line.cuts.push_back(inside * 2 < bytes ? begin : begin + bytes);
    }
  }
  line.cuts.push_back(total);
  return line;
}

const Shares::Line& Shares::LineOf(size_t stream, int64_t cell) {
  std::unique_ptr<const Line>& line = lines_[{stream, cell}];
  if (line == nullptr) {
    line = std::make_unique<const Line>(MakeLine(streams_[stream], cell));
    remembered_ += line->offsets.size() + line->cuts.size();
  }
  return *line;
}

std::pair<uint64_t, uint64_t> Shares::RunOf(size_t stream, int rank) {
  const Partition& partition = PartitionOf(streams_[stream]);
  if (!partition.Holds(rank)) return {0, 0};
  const Line& line = LineOf(stream, partition.CellOf(rank));
  const auto replica = static_cast<size_t>(partition.ReplicaOf(rank));
  return {line.cuts[replica], line.cuts[replica + 1]};
}

const std::vector<uint64_t>& Shares::BasesOf(int rank) {
  const auto known = bases_.find(rank);
  if (known != bases_.end()) return *known->second;
  std::vector<uint64_t> bases = {0};
  for (size_t s = 0; s < streams_.size(); ++s) {
    const auto [begin, end] = RunOf(s, rank);
    bases.push_back(bases.back() + (end - begin));
  }
  remembered_ += bases.size();
  return *(bases_[rank] = std::make_unique<const std::vector<uint64_t>>(std::move(bases)));
}

uint64_t Shares::DataBytes(int rank) {
  Forget();
  return BasesOf(rank).back();
}

std::vector<Piece> Shares::PiecesOf(int rank) {
  Forget();
  std::vector<Piece> pieces;
  uint64_t offset = 0;
  for (size_t s = 0; s < streams_.size(); ++s) {
    const std::vector<size_t>& tensors = streams_[s].tensors;
    const Partition& partition = PartitionOf(streams_[s]);
    if (!partition.Holds(rank)) continue;
    // A tensor without elements stands in the file of its first rank, so that other programs see its name.
    for (size_t t : tensors) {
      if (rank == partition.RankOf(0, 0) && *ElementCount(tensors_[t].shape, tensors_[t].dtype) == 0)
        pieces.push_back({t, 0, 0, offset});
    }
    const auto [from, to] = RunOf(s, rank);
    const std::vector<uint64_t>& offsets = LineOf(s, partition.CellOf(rank)).offsets;
    size_t i =
        static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end(), from) - offsets.begin()) - 1;
    for (; i < tensors.size() && offsets[i] < to; ++i) {
      const uint64_t begin = std::max(offsets[i], from), end = std::min(offsets[i + 1], to);
      if (begin >= end) continue;
      pieces.push_back({tensors[i], begin - offsets[i], end - begin, offset});
      offset += end - begin;
    }
  }
  return pieces;
}

void Shares::FindPieces(size_t tensor, int64_t cell, uint64_t begin, uint64_t end,
                        absl::FunctionRef<void(int, const Piece&)> found) {
  Forget();
  if (begin >= end) return;
  const auto [stream, index] = place_[tensor];
  const Line& line = LineOf(stream, cell);
  const uint64_t first = line.offsets[index], last = line.offsets[index + 1];
  GT_CHECK(end <= last - first);
  const auto run = std::upper_bound(line.cuts.begin(), line.cuts.end(), first + begin) - 1;
  for (auto k = run; *k < first + end; ++k) {
    const uint64_t from = std::max(*k, first), to = std::min(*(k + 1), last);
    if (from >= to) continue;
    const int rank = partitions_[tensor].RankOf(cell, k - line.cuts.begin());
    found(rank, {tensor, from - first, to - from, BasesOf(rank)[stream] + (from - *k)});
  }
}

}  // namespace gtrain::ckpt
