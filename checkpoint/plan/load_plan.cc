// A tensor at a time, in the order of the files, so that the copies of a file come out in its order: the
// boxes as they were saved that overlap the box this rank wants, then the pieces of each of them, then the
// chunks that hold bytes which are really wanted. Runs of bytes are never listed: an Overlap stands for all
// of a piece.
#include "checkpoint/plan/load_plan.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace gtrain::ckpt {
namespace {

using sharding::Box;
using sharding::Overlap;
using sharding::Partition;

constexpr size_t kDifferencesMax = 20;

std::string ShapeText(const GlobalTensor& t) {
  if (t.layout == Layout::kPerRank) return Describe(t);
  return absl::StrCat(DTypeName(t.dtype), "[", absl::StrJoin(t.shape, ","), "]");
}

bool Fits(const GlobalTensor& stored, const GlobalTensor& wanted) {
  return (stored.layout == Layout::kPerRank) == (wanted.layout == Layout::kPerRank) &&
         stored.dtype == wanted.dtype && stored.shape == wanted.shape;
}

std::vector<GlobalTensor> TensorsOf(const std::vector<Registered>& registered) {
  std::vector<GlobalTensor> tensors;
  for (const Registered& r : registered) tensors.push_back(r.tensor);
  return tensors;
}

// Bytes without any order of their own: a blob.
Overlap AllOf(uint64_t bytes) {
  const Box whole = {{0, static_cast<int64_t>(bytes)}};
  return Overlap::Of(whole, whole, 1);
}

void MarkChunk(uint64_t chunk, std::vector<ChunkRange>* chunks) {
  if (chunks->empty() || chunk > chunks->back().first + chunks->back().count) {
    chunks->push_back({chunk, 1});
  } else if (chunk == chunks->back().first + chunks->back().count) {
    ++chunks->back().count;
  }
}

// Chunks that hold bytes which are wanted. `copies` ascend, and so do the chunks.
std::vector<ChunkRange> ChunksOf(const std::vector<Copy>& copies) {
  std::vector<ChunkRange> chunks;
  for (const Copy& copy : copies) {
    const uint64_t last = (copy.file_begin + copy.bytes - 1) / kChunkBytes;
    for (uint64_t c = copy.file_begin / kChunkBytes; c <= last; ++c) {
      const uint64_t from = std::max(c * kChunkBytes, copy.file_begin) - copy.file_begin;
      const uint64_t to = std::min((c + 1) * kChunkBytes - copy.file_begin, copy.bytes);
      const bool all = copy.needed == copy.bytes || (from == 0 && to == copy.bytes);
      if (all || copy.overlap.BytesIn(copy.begin + from, copy.begin + to) > 0) MarkChunk(c, &chunks);
    }
  }
  return chunks;
}

uint64_t BytesOf(const std::vector<ChunkRange>& chunks, uint64_t file_bytes) {
  uint64_t bytes = 0;
  for (const ChunkRange& range : chunks) {
    const uint64_t end = std::min((range.first + range.count) * kChunkBytes, file_bytes);
    bytes += end - range.first * kChunkBytes;
  }
  return bytes;
}

absl::Status DoesNotFit(std::vector<std::string> differences) {
  const size_t count = differences.size();
  differences.resize(std::min(count, kDifferencesMax));
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint does not fit this program: ", absl::StrJoin(differences, "; "),
                   count > kDifferencesMax ? absl::StrCat("; and ", count - kDifferencesMax, " more") : ""));
}

}  // namespace

struct LoadPlanner::Building {
  LoadPlan plan;
  absl::flat_hash_map<int, size_t> reads;  // of each file: index into plan.reads
};

LoadPlanner::LoadPlanner(const Manifest* manifest, std::vector<Registered> registered, int world_size)
    : manifest_(manifest),
      registered_(std::move(registered)),
      world_size_(world_size),
      saved_(*Shares::Make(manifest->tensors, manifest->world_size)),
      stored_as_(registered_.size()) {
  const absl::StatusOr<Shares> wanted = Shares::Make(TensorsOf(registered_), world_size);
  GT_CHECK(wanted.ok());
  absl::flat_hash_map<absl::string_view, size_t> by_name;
  for (size_t i = 0; i < registered_.size(); ++i) {
    wanted_.push_back(wanted->partition(i));
    by_name[registered_[i].tensor.name] = i;
  }
  std::vector<std::optional<size_t>> registered_as(manifest->tensors.size());
  for (size_t t = 0; t < manifest->tensors.size(); ++t) {
    const auto it = by_name.find(manifest->tensors[t].name);
    if (it == by_name.end()) {
      unknown_.push_back(manifest->tensors[t].name);
    } else {
      registered_as[t] = it->second;
      stored_as_[it->second] = t;
    }
  }
  absl::flat_hash_map<std::string, size_t> place_of;
  for (size_t t : saved_.order()) {
    if (!registered_as[t] || registered_[*registered_as[t]].tensor.layout == Layout::kPerRank) continue;
    order_.push_back(*registered_as[t]);
    const auto [it, added] = place_of.emplace(wanted_[order_.back()].Key(), places_.size());
    if (added) places_.push_back(order_.back());
    place_.push_back(it->second);
  }
  for (size_t i = 0; i < registered_.size(); ++i) {
    if (registered_[i].tensor.layout == Layout::kPerRank) blobs_.push_back(i);
  }
  for (int f = 0; f < manifest->world_size; ++f) {
    for (const Slice& slice : manifest->files[f].slices) slices_[slice.tensor].emplace_back(f, &slice);
  }
  FindDifferences();
}

void LoadPlanner::FindDifferences() {
  for (size_t i = 0; i < registered_.size(); ++i) {
    const GlobalTensor& here = registered_[i].tensor;
    if (!stored_as_[i]) {
      if (here.layout != Layout::kPerRank)
        differences_.push_back(absl::StrCat("\"", here.name, "\" is not in it"));
      continue;
    }
    const GlobalTensor& there = manifest_->tensors[*stored_as_[i]];
    if (Fits(there, here)) continue;
    differences_.push_back(
        absl::StrCat("\"", here.name, "\" is ", ShapeText(there), " there and ", ShapeText(here), " here"));
  }
}

void LoadPlanner::AddPiece(int file, const Copy& copy, Building* building) const {
  const uint64_t end = copy.begin + copy.bytes;
  const bool all = copy.begin <= copy.overlap.begin() && copy.overlap.end() <= end;
  const uint64_t needed = all ? copy.overlap.bytes() : copy.overlap.BytesIn(copy.begin, end);
  if (needed == 0) return;
  std::vector<FileRead>& reads = building->plan.reads;
  const auto [it, added] = building->reads.emplace(file, reads.size());
  if (added) reads.push_back({.file = file});
  building->plan.needed_bytes += needed;
  reads[it->second].copies.push_back(copy);
  reads[it->second].copies.back().needed = needed;
}

void LoadPlanner::AddTensor(size_t registered, int rank, Building* building) {
  const GlobalTensor& tensor = registered_[registered].tensor;
  const Partition& wanted = wanted_[registered];
  const uint64_t width = DTypeSize(tensor.dtype);
  const Box box = wanted.BoxOf(tensor.shape, wanted.CellOf(rank));
  if (manifest_->version == 1) {
    const Overlap overlap = Overlap::Of(sharding::WholeBox(tensor.shape), box, width);
    for (const auto& [file, slice] : slices_[tensor.name])
      AddPiece(file, {registered, slice->begin, slice->bytes, slice->file_begin, 0, overlap}, building);
    return;
  }
  const size_t stored = *stored_as_[registered];
  saved_.partition(stored).ForEachOverlap(tensor.shape, box, [&](int64_t cell, const Box& saved) {
    const Overlap overlap = Overlap::Of(saved, box, width);
    saved_.FindPieces(stored, cell, overlap.begin(), overlap.end(), [&](int file, const Piece& piece) {
      const uint64_t file_begin = manifest_->files[file].data_begin + piece.offset;
      AddPiece(file, {registered, piece.begin, piece.bytes, file_begin, 0, overlap}, building);
    });
  });
}

absl::Status LoadPlanner::AddBlob(size_t registered, int rank, Building* building) {
  const Registered& r = registered_[registered];
  if (!stored_as_[registered] || manifest_->tensors[*stored_as_[registered]].layout != Layout::kPerRank ||
      rank >= manifest_->world_size) {
    return absl::OkStatus();
  }
  const ShardFile& file = manifest_->files[rank];
  uint64_t bytes = 0, file_begin = 0;
  if (manifest_->version == 1) {
    const auto mine = std::find_if(file.slices.begin(), file.slices.end(),
                                   [&](const Slice& s) { return s.tensor == r.tensor.name; });
    if (mine == file.slices.end()) return absl::OkStatus();
    bytes = mine->bytes;
    file_begin = mine->file_begin;
  } else {
    file_begin = file.data_begin + saved_.DataBytes(rank);
    size_t blob = 0;
    for (size_t t = 0; t < *stored_as_[registered]; ++t) {
      if (manifest_->tensors[t].layout == Layout::kPerRank) file_begin += file.per_rank[blob++];
    }
    bytes = file.per_rank[blob];
  }
  if (bytes != r.bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("per-rank \"", r.tensor.name, "\" has ", bytes, " bytes there and ", r.bytes, " here"));
  }
  building->plan.restored[registered] = true;
  AddPiece(rank, {registered, 0, bytes, file_begin, 0, AllOf(bytes)}, building);
  return absl::OkStatus();
}

void LoadPlanner::AddTensors(int rank, size_t first, size_t last, Building* building) {
  // Of thousands of tensors a rank holds those of its stage: the others are not even looked at.
  std::vector<bool> holds;
  for (size_t i : places_) holds.push_back(wanted_[i].Holds(rank));
  for (size_t k = 0; k < order_.size(); ++k) {
    if (order_[k] < first || order_[k] >= last) continue;
    building->plan.restored[order_[k]] = true;
    if (holds[place_[k]]) AddTensor(order_[k], rank, building);
  }
}

std::vector<int> LoadPlanner::FilesFor(int rank, size_t first, size_t last) {
  GT_CHECK(rank >= 0 && rank < world_size_);
  Building building;
  building.plan.restored.assign(registered_.size(), false);
  if (differences_.empty()) AddTensors(rank, first, last, &building);
  std::vector<int> files;
  for (const FileRead& read : building.plan.reads) files.push_back(read.file);
  const bool blobs = std::any_of(blobs_.begin(), blobs_.end(), [&](size_t i) {
    return i >= first && i < last && stored_as_[i].has_value();
  });
  if (blobs && rank < manifest_->world_size) files.push_back(rank);
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

absl::StatusOr<LoadPlan> LoadPlanner::Plan(int rank) { return Plan(rank, 0, registered_.size()); }

absl::StatusOr<LoadPlan> LoadPlanner::Plan(int rank, size_t first, size_t last) {
  GT_CHECK(rank >= 0 && rank < world_size_);
  std::vector<std::string> differences = differences_;
  Building building;
  building.plan.restored.assign(registered_.size(), false);
  building.plan.unknown = unknown_;
  if (differences.empty()) AddTensors(rank, first, last, &building);
  for (size_t i : blobs_) {
    if (i < first || i >= last) continue;
    const absl::Status added = AddBlob(i, rank, &building);
    if (!added.ok()) differences.emplace_back(added.message());
  }
  if (!differences.empty()) return DoesNotFit(std::move(differences));
  const auto by_place = [](const Copy& a, const Copy& b) { return a.file_begin < b.file_begin; };
  std::sort(building.plan.reads.begin(), building.plan.reads.end(),
            [](const FileRead& a, const FileRead& b) { return a.file < b.file; });
  for (FileRead& read : building.plan.reads) {
    GT_CHECK(manifest_->Has(read.file));
    // Tensors came in the order of version 2; blobs come in the order of this program.
    if (!std::is_sorted(read.copies.begin(), read.copies.end(), by_place))
      std::sort(read.copies.begin(), read.copies.end(), by_place);
    read.chunks = ChunksOf(read.copies);
    building.plan.read_bytes += BytesOf(read.chunks, manifest_->files[read.file].bytes);
  }
  return std::move(building.plan);
}

absl::StatusOr<LoadPlan> PlanLoad(const Manifest& manifest, const std::vector<Registered>& registered,
                                  int rank, int world_size) {
  return LoadPlanner(&manifest, registered, world_size).Plan(rank);
}

}  // namespace gtrain::ckpt
