// A tensor at a time, in the order of the files, so that the copies of a file come out in its order: the
// boxes as they were saved that overlap the box this rank wants, then the pieces of each of them, then the
// chunks that hold bytes which are really wanted. Runs of bytes are never listed: an Overlap stands for all
// of a piece.
#include "checkpoint/plan/load_plan.h"

#include <algorithm>
#include <numeric>

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
constexpr size_t kRanksShownMax = 16;

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

LoadPlanner::LoadPlanner(const Manifest* manifest, std::vector<Registered> registered, int world_size,
                         std::vector<std::string> may_be_missing)
    : manifest_(manifest),
      registered_(std::move(registered)),
      world_size_(world_size),
      saved_(*Shares::Make(manifest->tensors, manifest->world_size)),
      stored_as_(registered_.size()),
      may_be_missing_(std::move(may_be_missing)) {
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
  FindKept();
  FindOrphans();
  FindDifferences();
}

void LoadPlanner::FindDifferences() {
  for (size_t i = 0; i < registered_.size(); ++i) {
    const GlobalTensor& here = registered_[i].tensor;
    if (!stored_as_[i]) {
      const bool may = std::any_of(may_be_missing_.begin(), may_be_missing_.end(),
                                   [&](const std::string& p) { return MatchesGlob(here.name, p); });
      if (may) {
        missing_.push_back(here.name);
      } else if (here.layout != Layout::kPerRank) {
        differences_.push_back(absl::StrCat("\"", here.name, "\" is not in it"));
      }
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

std::optional<LoadPlanner::Place> LoadPlanner::FindSlice(size_t stored, int rank) const {
  const auto slices = slices_.find(manifest_->tensors[stored].name);
  if (slices == slices_.end()) return std::nullopt;
  for (const auto& [file, slice] : slices->second) {
    if (file == rank) return Place{file, slice->file_begin, slice->bytes};
  }
  return std::nullopt;
}

std::optional<LoadPlanner::Place> LoadPlanner::FindBlob(size_t stored, int rank) {
  if (manifest_->version == 1) return FindSlice(stored, rank);
  if (rank >= manifest_->world_size) {
    const auto of_tensor = kept_.find(stored);
    if (of_tensor == kept_.end()) return std::nullopt;
    const auto kept = of_tensor->second.find(rank);
    return kept == of_tensor->second.end() ? std::nullopt : std::optional<Place>(kept->second);
  }
  const ShardFile& file = manifest_->files[rank];
  Place place{rank, file.data_begin + saved_.DataBytes(rank), 0};
  size_t blob = 0;
  for (size_t t = 0; t < stored; ++t) {
    if (manifest_->tensors[t].layout == Layout::kPerRank) place.begin += file.per_rank[blob++];
  }
  place.bytes = file.per_rank[blob];
  return place;
}

// Finds, for each registered blob, the state of earlier worlds in the files of this checkpoint.
void LoadPlanner::FindKept() {
  std::vector<size_t> blobs;
  for (size_t t = 0; t < manifest_->tensors.size(); ++t) {
    if (manifest_->tensors[t].layout == Layout::kPerRank) blobs.push_back(t);
  }
  for (int f = 0; f < manifest_->world_size; ++f) {
    const ShardFile& file = manifest_->files[f];
    if (file.kept.empty()) continue;
    uint64_t begin = file.data_begin + saved_.DataBytes(f);
    for (uint64_t bytes : file.per_rank) begin += bytes;
    for (const KeptBlob& kept : file.kept) {
      kept_[blobs[kept.blob]][kept.rank] = {f, begin, kept.bytes};
      begin += kept.bytes;
    }
  }
}

// The lines about ranks that are no more, for the log.
void LoadPlanner::FindOrphans() {
  for (size_t i : blobs_) {
    if (!stored_as_[i]) continue;
    std::vector<int> ranks;
    for (int rank = world_size_; rank < manifest_->world_size; ++rank) {
      if (manifest_->version > 1 || FindSlice(*stored_as_[i], rank)) ranks.push_back(rank);
    }
    for (const auto& [rank, place] : kept_[*stored_as_[i]]) {
      if (rank >= world_size_) ranks.push_back(rank);
    }
    if (ranks.empty()) continue;
    const PerRankRule rule = registered_[i].rule;
    const size_t count = ranks.size();
    ranks.resize(std::min(count, kRanksShownMax));
    orphans_.push_back(absl::StrCat(
        "\"", registered_[i].tensor.name, "\" of rank", count > 1 ? "s " : " ", absl::StrJoin(ranks, ","),
        count > ranks.size() ? absl::StrCat(" and ", count - ranks.size(), " more") : "",
        ", not in this world, is ",
        rule == PerRankRule::kDrop   ? "dropped"
        : rule == PerRankRule::kKeep ? "kept for a world that has them"
                                     : "merged into that of the others"));
  }
}

void LoadPlanner::AddBlob(size_t registered, int rank, const Place& place, Building* building) const {
  const size_t target = registered_.size() + building->plan.blobs.size();
  building->plan.blobs.push_back({registered, rank, place.bytes});
  AddPiece(place.file, {target, 0, place.bytes, place.begin, 0, AllOf(place.bytes)}, building);
}

absl::Status LoadPlanner::AddBlobs(size_t registered, int rank, Building* building) {
  const Registered& r = registered_[registered];
  if (!stored_as_[registered]) return absl::OkStatus();
  const size_t stored = *stored_as_[registered];
  if (manifest_->tensors[stored].layout != Layout::kPerRank) return absl::OkStatus();
  if (const std::optional<Place> own = FindBlob(stored, rank)) {
    if (own->bytes != r.bytes && !r.any_length) {
      return absl::FailedPreconditionError(absl::StrCat("per-rank \"", r.tensor.name, "\" has ", own->bytes,
                                                        " bytes there and ", r.bytes, " here"));
    }
    building->plan.restored[registered] = true;
    AddBlob(registered, rank, *own, building);
  }
  if (r.rule == PerRankRule::kDrop) return absl::OkStatus();
  // The orphans are the ranks rank + world, rank + 2 * world, ...
  for (int orphan = rank + world_size_; orphan < manifest_->world_size; orphan += world_size_) {
    if (const std::optional<Place> place = FindBlob(stored, orphan))
      AddBlob(registered, orphan, *place, building);
  }
  for (const auto& [orphan, place] : kept_[stored]) {
    if (orphan >= world_size_ && orphan % world_size_ == rank) AddBlob(registered, orphan, place, building);
  }
  return absl::OkStatus();
}

void LoadPlanner::AddTensors(int rank, size_t first, size_t last, Building* building) {
  // A rank holds only the tensors of its stage, of thousands: the others are not even looked at.
  std::vector<bool> holds;
  for (size_t i : places_) holds.push_back(wanted_[i].Holds(rank));
  for (size_t k = 0; k < order_.size(); ++k) {
    if (order_[k] < first || order_[k] >= last) continue;
    building->plan.restored[order_[k]] = true;
    if (holds[place_[k]]) AddTensor(order_[k], rank, building);
  }
}

// Files that keep nothing are not needed for that; of those in parts only the part says how many do.
void LoadPlanner::AddFilesOfBlobs(int rank, size_t first, size_t last, std::vector<int>* files) {
  bool any = false, orphans = false;
  for (size_t i : blobs_) {
    if (i < first || i >= last || !stored_as_[i]) continue;
    any = true;
    orphans = orphans || registered_[i].rule != PerRankRule::kDrop;
  }
  if (!any) return;
  const int there = manifest_->world_size;
  if (rank < there) files->push_back(rank);
  for (int orphan = rank + world_size_; orphans && orphan < there; orphan += world_size_)
    files->push_back(orphan);
  const auto keeps = [&](int file) {
    return manifest_->parts.empty() ? !manifest_->files[static_cast<size_t>(file)].kept.empty()
                                    : manifest_->parts[static_cast<size_t>(PartOf(file))].kept > 0;
  };
  // State of rank o lies in file o mod `there` and goes to rank o mod world_size_: one may have such of the
  // other where both leave the same of what divides both.
  const int alike = std::gcd(there, world_size_);
  for (int file = 0; file < there; ++file) {
    const bool own = rank >= there && rank % there == file;
    const bool needed = own || rank == 0 || (orphans && file % alike == rank % alike);
    if (needed && keeps(file)) files->push_back(file);
  }
}

std::vector<int> LoadPlanner::FilesFor(int rank, size_t first, size_t last) {
  GT_CHECK(rank >= 0 && rank < world_size_);
  Building building;
  building.plan.restored.assign(registered_.size(), false);
  if (differences_.empty()) AddTensors(rank, first, last, &building);
  std::vector<int> files;
  for (const FileRead& read : building.plan.reads) files.push_back(read.file);
  AddFilesOfBlobs(rank, first, last, &files);
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
  building.plan.missing = missing_;
  building.plan.orphans = orphans_;
  if (differences.empty()) AddTensors(rank, first, last, &building);
  for (size_t i : blobs_) {
    if (i < first || i >= last) continue;
    const absl::Status added = AddBlobs(i, rank, &building);
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
                                  int rank, int world_size, const std::vector<std::string>& may_be_missing) {
  return LoadPlanner(&manifest, registered, world_size, may_be_missing).Plan(rank);
}

bool MatchesGlob(absl::string_view name, absl::string_view pattern) {
  // At a mismatch the last `*` takes one character more.
  size_t n = 0, p = 0, star = pattern.npos, star_end = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_end = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != pattern.npos) {
      p = star + 1;
      n = ++star_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == pattern.npos;
}

}  // namespace gtrain::ckpt
