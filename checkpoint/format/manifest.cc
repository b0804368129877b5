// Field names are written and read in this file only, each pair of functions side by side. Reading builds the
// value and then asks whether its numbers derive the key it was found under; names of files are never taken
// from the text but compared with the derived ones.
#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/shares.h"
#include "checkpoint/format/strict_json.h"

namespace gtrain::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kManifestFormat[] = "gtrain-checkpoint";
constexpr char kAbortFormat[] = "gtrain-checkpoint-aborted";
constexpr char kPartFormat[] = "gtrain-checkpoint-part";
constexpr char kIndexFormat[] = "gtrain-shard-index";
constexpr char kOwnerFormat[] = "gtrain-checkpoint-owner";
constexpr char kOrderFormat[] = "gtrain-save-order";
constexpr char kTailFormat[] = "gtrain-save-tail";
constexpr uint64_t kSmallVersion = 1;        // of abort markers and claims
constexpr uint64_t kOldestIndexVersion = 2;  // of a writer that an upgrade has not replaced yet
constexpr uint64_t kPartsVersion = 3;        // the first with parts
constexpr std::pair<Layout, absl::string_view> kLayouts[] = {{Layout::kReplicated, "replicated"},
                                                             {Layout::kPerRank, "per-rank"},
                                                             {Layout::kSharded, "sharded"},
                                                             {Layout::kBoxes, "boxes"}};
constexpr char kChunkRule[] = "chunk";
constexpr int kVersionOfBoxes = 3;  // the first with boxes, chunks, kept, and all types
constexpr size_t kReasonBytesMax = 4096;
constexpr size_t kLocationBytesMax = 4096;
constexpr uint64_t kOrderNumberMax = INT32_MAX;  // keep, tries, milliseconds

// Words for people, when written and when read: others' files must not reach a terminal as they are (fault
// B7).
std::string BoundedWords(absl::string_view text) {
  std::string out(text.substr(0, kReasonBytesMax - 8));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

Json Head(const char* format, uint64_t version = kSmallVersion) {
  return Json{{"format", format}, {"version", version}};
}

// The version, from `oldest` to `newest`.
absl::StatusOr<int> ReadHead(const ParsedJson& object, absl::string_view format,
                             uint64_t oldest = kSmallVersion, uint64_t newest = kSmallVersion) {
  GT_ASSIGN_OR_RETURN(const std::string found, GetString(object, "format", 64));
  if (found != format)
    return absl::DataLossError(absl::StrCat("format is \"", found, "\", not \"", format, "\""));
  GT_ASSIGN_OR_RETURN(const uint64_t version, GetUint(object, "version", UINT32_MAX));
  if (version > newest) {
    return absl::FailedPreconditionError(
        absl::StrCat("written by a newer gtrain (version ", version, "); this one reads ", oldest,
                     oldest < newest ? absl::StrCat(" to ", newest) : "", ": use the newer one"));
  }
  if (version < oldest) return absl::DataLossError(absl::StrCat("impossible version ", version));
  return static_cast<int>(version);
}

void AddId(const SaveId& id, Json* out) {
  (*out)["epoch"] = id.epoch;
  (*out)["timeline"] = id.timeline;
  (*out)["generation"] = id.generation;
  (*out)["step"] = id.step;
  (*out)["attempt"] = id.attempt;
}

absl::StatusOr<SaveId> ReadId(const ParsedJson& object) {
  SaveId id;
  GT_ASSIGN_OR_RETURN(id.epoch, GetUint(object, "epoch", kCounterMax));
  GT_ASSIGN_OR_RETURN(id.timeline, GetUint(object, "timeline", kCounterMax));
  GT_ASSIGN_OR_RETURN(id.generation, GetUint(object, "generation", kCounterMax));
  GT_ASSIGN_OR_RETURN(const uint64_t step, GetUint(object, "step", kStepMax));
  id.step = static_cast<int64_t>(step);
  GT_ASSIGN_OR_RETURN(id.attempt, GetUint(object, "attempt", kCounterMax));
  if (!IsValid(id)) return absl::DataLossError("its numbers are out of range");
  return id;
}

void AddIdentity(const Identity& owner, Json* out) {
  (*out)["cluster"] = owner.cluster;
  (*out)["job"] = owner.job;
  (*out)["job_hash"] = owner.job_hash;
}

absl::StatusOr<Identity> ReadIdentity(const ParsedJson& object) {
  Identity owner;
  GT_ASSIGN_OR_RETURN(owner.cluster, GetString(object, "cluster", kIdentityBytesMax));
  GT_ASSIGN_OR_RETURN(owner.job, GetString(object, "job", kIdentityBytesMax));
  GT_ASSIGN_OR_RETURN(owner.job_hash, GetString(object, "job_hash", kIdentityBytesMax));
  return owner;
}

Json KeptToJson(const std::vector<KeptBlob>& kept) {
  Json out = Json::array();
  for (const KeptBlob& k : kept) out.push_back(Json::array({k.blob, k.rank, k.bytes}));
  return out;
}

absl::StatusOr<std::vector<uint64_t>> ReadSizes(const ParsedJson& object, const char* name) {
  GT_ASSIGN_OR_RETURN(const ParsedJson* sizes, GetArray(object, name, kTensorsMax));
  std::vector<uint64_t> out;
  for (const ParsedJson& size : *sizes) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > kFileBytesMax)
      return absl::DataLossError(absl::StrCat("impossible bytes in ", name));
    out.push_back(size.get<uint64_t>());
  }
  return out;
}

absl::StatusOr<std::vector<KeptBlob>> ReadKept(const ParsedJson& object) {
  std::vector<KeptBlob> out;
  if (!object.contains("kept")) return out;
  GT_ASSIGN_OR_RETURN(const ParsedJson* items, GetArray(object, "kept", kTensorsMax));
  for (const ParsedJson& item : *items) {
    const auto number = [&](size_t i, uint64_t value_max) {
      return item[i].is_number_unsigned() && item[i].get<uint64_t>() <= value_max;
    };
    if (!item.is_array() || item.size() != 3 || !number(0, kTensorsMax) || !number(1, kWorldSizeMax) ||
        !number(2, kFileBytesMax)) {
      return absl::DataLossError("kept: not an entry, a rank and bytes");
    }
    out.push_back({item[0].get<uint64_t>(), item[1].get<int>(), item[2].get<uint64_t>()});
    if (out.size() > 1 && !(out[out.size() - 2] < out.back()))
      return absl::DataLossError("kept: not in order");
  }
  return out;
}

Json FileToJson(const ShardFile& file, int version) {
  Json out = {{"name", file.name}, {"bytes", file.bytes}};
  if (version < 3) out["xxh3_128"] = file.xxh3;
  out["chunk_bytes"] = kChunkBytes;
  out["chunks"] = file.chunks;
  out["finite"] = file.finite;
  if (version > 1) {
    out["data_begin"] = file.data_begin;
    out["per_rank"] = file.per_rank;
    if (!file.kept.empty()) out["kept"] = KeptToJson(file.kept);
    return out;
  }
  Json slices = Json::array();
  for (const Slice& s : file.slices) {
    slices.push_back(
        {{"tensor", s.tensor}, {"begin", s.begin}, {"bytes", s.bytes}, {"file_begin", s.file_begin}});
  }
  out["slices"] = std::move(slices);
  return out;
}

absl::StatusOr<Slice> ReadSlice(const ParsedJson& object) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"tensor", "begin", "bytes", "file_begin"}));
  Slice s;
  GT_ASSIGN_OR_RETURN(s.tensor, GetString(object, "tensor", kTensorNameBytesMax));
  GT_ASSIGN_OR_RETURN(s.begin, GetUint(object, "begin", UINT64_MAX / 4));
  GT_ASSIGN_OR_RETURN(s.bytes, GetUint(object, "bytes", kFileBytesMax));
  GT_ASSIGN_OR_RETURN(s.file_begin, GetUint(object, "file_begin", kFileBytesMax));
  return s;
}

// Where its data lies, as each version says it.
absl::Status ReadPlaces(const ParsedJson& object, int version, ShardFile* file) {
  if (version > 1) {
    GT_ASSIGN_OR_RETURN(file->data_begin, GetUint(object, "data_begin", kFileBytesMax));
    GT_ASSIGN_OR_RETURN(file->per_rank, ReadSizes(object, "per_rank"));
    GT_ASSIGN_OR_RETURN(file->kept, ReadKept(object));  // versions without it refuse the field
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const ParsedJson* slices, GetArray(object, "slices", kTensorsMax));
  for (const ParsedJson& item : *slices) {
    GT_ASSIGN_OR_RETURN(Slice slice, ReadSlice(item));
    file->slices.push_back(std::move(slice));
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardFile> ReadFileEntry(const ParsedJson& object, int version) {
  if (version > 2) {
    GT_RETURN_IF_ERROR(CheckFields(
        object, {"name", "bytes", "chunk_bytes", "chunks", "finite", "data_begin", "per_rank", "kept"}));
  } else if (version == 2) {
    GT_RETURN_IF_ERROR(CheckFields(
        object, {"name", "bytes", "xxh3_128", "chunk_bytes", "chunks", "finite", "data_begin", "per_rank"}));
  } else {
    GT_RETURN_IF_ERROR(
        CheckFields(object, {"name", "bytes", "xxh3_128", "chunk_bytes", "chunks", "finite", "slices"}));
  }
  ShardFile file;
  GT_ASSIGN_OR_RETURN(file.name, GetString(object, "name", 64));
  GT_ASSIGN_OR_RETURN(file.bytes, GetUint(object, "bytes", kFileBytesMax));
  if (version < 3) {
    GT_ASSIGN_OR_RETURN(file.xxh3, GetString(object, "xxh3_128", 32));
  }
  GT_ASSIGN_OR_RETURN(const uint64_t chunk_bytes, GetUint(object, "chunk_bytes", kFileBytesMax));
  if (chunk_bytes != kChunkBytes) return absl::DataLossError("chunk_bytes is not what this format uses");
  GT_ASSIGN_OR_RETURN(const ParsedJson* chunks, GetArray(object, "chunks", kManifestBytesMax / 32));
  for (const ParsedJson& chunk : *chunks) {
    if (!chunk.is_string()) return absl::DataLossError("a chunk's hash is not a string");
    file.chunks.push_back(chunk.get<std::string>());
  }
  GT_ASSIGN_OR_RETURN(file.finite, GetBool(object, "finite"));
  GT_RETURN_IF_ERROR(ReadPlaces(object, version, &file));
  return file;
}

std::string LayoutName(Layout layout) {
  for (const auto& [value, name] : kLayouts) {
    if (value == layout) return std::string(name);
  }
  GT_CHECK(false);
}

absl::StatusOr<Layout> ParseLayout(absl::string_view text, int version) {
  for (const auto& [value, name] : kLayouts) {
    if (name != text) continue;
    if (version < kVersionOfBoxes && value == Layout::kBoxes) break;
    if (version > 1 || value != Layout::kSharded) return value;
  }
  return absl::DataLossError("unknown layout");
}

// Lists of boxes, each once however many tensors are cut by it.
using BoxLists = std::vector<std::shared_ptr<const sharding::RankBoxes>>;

size_t IndexOf(const std::shared_ptr<const sharding::RankBoxes>& boxes, BoxLists* lists) {
  const auto known = std::find_if(lists->begin(), lists->end(),
                                  [&](const auto& list) { return list == boxes || *list == *boxes; });
  if (known != lists->end()) return static_cast<size_t>(known - lists->begin());
  lists->push_back(boxes);
  return lists->size() - 1;
}

Json TensorToJson(const GlobalTensor& t, BoxLists* lists) {
  Json out = {{"name", t.name}, {"layout", LayoutName(t.layout)}};
  out["dtype"] = std::string(DTypeName(t.dtype));
  out["shape"] = t.shape;
  if (t.layout == Layout::kBoxes) out["boxes"] = IndexOf(t.boxes, lists);
  if (t.layout != Layout::kSharded) return out;
  out["mesh"] = Json::array();
  for (const MeshAxis& axis : t.sharding.mesh) out["mesh"].push_back(Json::array({axis.name, axis.size}));
  out["splits"] = Json::array();
  for (const Split& split : t.sharding.splits) {
    out["splits"].push_back(Json::array({split.dim, split.axis}));
    if (split.rule == SplitRule::kChunk) out["splits"].back().push_back(kChunkRule);
  }
  out["only"] = Json::array();
  for (const Only& only : t.sharding.only) out["only"].push_back(Json::array({only.axis, only.index}));
  return out;
}

Json BoxListToJson(const sharding::RankBoxes& list) {
  Json out = {{"shape", list.shape()}, {"boxes", Json::array()}, {"ranks", Json::array()}};
  for (int64_t cell = 0; cell < list.cells(); ++cell) {
    Json box = Json::array();
    for (const sharding::Interval& i : list.box(cell)) {
      box.push_back(i.begin);
      box.push_back(i.size);
    }
    out["boxes"].push_back(std::move(box));
  }
  for (int rank = 0; rank < list.world_size(); ++rank) out["ranks"].push_back(list.CellOf(rank));
  return out;
}

// "tensors", and "boxes" if some need them.
void AddTensors(const std::vector<GlobalTensor>& tensors, Json* out) {
  BoxLists lists;
  Json all = Json::array();
  for (const GlobalTensor& t : tensors) all.push_back(TensorToJson(t, &lists));
  (*out)["tensors"] = std::move(all);
  if (lists.empty()) return;
  Json boxes = Json::array();
  for (const auto& list : lists) boxes.push_back(BoxListToJson(*list));
  (*out)["boxes"] = std::move(boxes);
}

absl::StatusOr<std::vector<int64_t>> ReadNumbers(const ParsedJson& array, size_t count_max, int64_t least) {
  if (!array.is_array() || array.size() > count_max)
    return absl::DataLossError("boxes: not an array of numbers");
  std::vector<int64_t> out;
  for (const ParsedJson& n : array) {
    if (!n.is_number_integer() || n.is_number_float() ||
        (n.is_number_unsigned() && n.get<uint64_t>() > INT64_MAX) || n.get<int64_t>() < least) {
      return absl::DataLossError("boxes: an impossible number");
    }
    out.push_back(n.get<int64_t>());
  }
  return out;
}

// Numbers of boxes as the writer gives them, so that equal lists have equal text.
absl::StatusOr<std::shared_ptr<const sharding::RankBoxes>> ReadBoxList(const ParsedJson& object,
                                                                       size_t ranks_max) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"shape", "boxes", "ranks"}));
  GT_ASSIGN_OR_RETURN(const ParsedJson* shape_json, GetArray(object, "shape", kDimsMax));
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> shape, ReadNumbers(*shape_json, kDimsMax, 0));
  if (!ElementCount(shape, DType::kFloat64)) return absl::DataLossError("boxes: impossible shape");
  GT_ASSIGN_OR_RETURN(const ParsedJson* boxes, GetArray(object, "boxes", ranks_max));
  GT_ASSIGN_OR_RETURN(const ParsedJson* ranks_json, GetArray(object, "ranks", ranks_max));
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> ranks, ReadNumbers(*ranks_json, ranks_max, -1));
  std::vector<sharding::Box> cells;
  for (const ParsedJson& item : *boxes) {
    GT_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, ReadNumbers(item, 2 * kDimsMax, 0));
    if (numbers.size() != 2 * shape.size()) return absl::DataLossError("boxes: a box of other dimensions");
    cells.emplace_back();
    for (size_t d = 0; d < shape.size(); ++d) cells.back().push_back({numbers[2 * d], numbers[2 * d + 1]});
  }
  std::vector<sharding::Box> by_rank;
  for (int64_t cell : ranks) {
    if (cell >= static_cast<int64_t>(cells.size())) return absl::DataLossError("boxes: a rank of no box");
    by_rank.push_back(cell < 0 ? sharding::Box(shape.size()) : cells[static_cast<size_t>(cell)]);
  }
  auto made = sharding::RankBoxes::Make(shape, by_rank);
  if (!made.ok()) return absl::DataLossError(absl::StrCat("boxes: ", made.status().message()));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if ((*made)->CellOf(static_cast<int>(rank)) != ranks[rank])
      return absl::DataLossError("boxes: not in their order");
  }
  if (static_cast<size_t>((*made)->cells()) != cells.size())
    return absl::DataLossError("boxes: one of no rank");
  return *std::move(made);
}

absl::StatusOr<BoxLists> ReadBoxLists(const ParsedJson& object, int version) {
  BoxLists lists;
  if (!object.contains("boxes")) return lists;
  if (version < kVersionOfBoxes) return absl::DataLossError("boxes in a version without them");
  GT_ASSIGN_OR_RETURN(const ParsedJson* items, GetArray(object, "boxes", kTensorsMax));
  size_t ranks = 0;
  for (const ParsedJson& item : *items) {
    GT_ASSIGN_OR_RETURN(auto list, ReadBoxList(item, kBoxRanksMax - ranks));
    ranks += static_cast<size_t>(list->world_size());
    lists.push_back(std::move(list));
  }
  return lists;
}

// Pairs of a word and a number, in this order; Shares::Make judges what they say.
absl::StatusOr<std::vector<std::pair<std::string, int64_t>>> ReadPairs(const ParsedJson& object,
                                                                       const char* name) {
  GT_ASSIGN_OR_RETURN(const ParsedJson* pairs, GetArray(object, name, sharding::kAxesMax));
  std::vector<std::pair<std::string, int64_t>> out;
  for (const ParsedJson& pair : *pairs) {
    if (!pair.is_array() || pair.size() != 2) return absl::DataLossError(absl::StrCat(name, ": not a pair"));
    const ParsedJson &word = pair[0], &number = pair[1];
    if (!word.is_string() || !number.is_number_unsigned() || number.get<uint64_t>() > INT32_MAX)
      return absl::DataLossError(absl::StrCat(name, ": not a word and a number"));
    out.emplace_back(word.get<std::string>(), number.get<int64_t>());
  }
  return out;
}

absl::StatusOr<std::vector<Split>> ReadSplits(const ParsedJson& object, int version) {
  GT_ASSIGN_OR_RETURN(const ParsedJson* items, GetArray(object, "splits", sharding::kAxesMax));
  std::vector<Split> out;
  for (const ParsedJson& item : *items) {
    const bool chunk = item.is_array() && item.size() == 3 && item[2] == kChunkRule;
    if (!item.is_array() || (item.size() != 2 && !(chunk && version >= kVersionOfBoxes)) ||
        !item[0].is_number_unsigned() || item[0].get<uint64_t>() > INT32_MAX || !item[1].is_string()) {
      return absl::DataLossError("splits: not a dimension, an axis and a rule");
    }
    out.push_back(
        {item[0].get<int>(), item[1].get<std::string>(), chunk ? SplitRule::kChunk : SplitRule::kBalanced});
  }
  return out;
}

absl::StatusOr<Sharding> ReadSharding(const ParsedJson& object, int version) {
  Sharding out;
  GT_ASSIGN_OR_RETURN(const auto mesh, ReadPairs(object, "mesh"));
  for (const auto& [name, size] : mesh) out.mesh.push_back({name, size});
  GT_ASSIGN_OR_RETURN(out.splits, ReadSplits(object, version));
  GT_ASSIGN_OR_RETURN(const auto only, ReadPairs(object, "only"));
  for (const auto& [axis, index] : only) out.only.push_back({axis, index});
  return out;
}

absl::StatusOr<GlobalTensor> ReadTensor(const ParsedJson& object, int version, const BoxLists& lists) {
  GlobalTensor t;
  GT_ASSIGN_OR_RETURN(t.name, GetString(object, "name", kTensorNameBytesMax));
  GT_ASSIGN_OR_RETURN(const std::string layout, GetString(object, "layout", 16));
  GT_ASSIGN_OR_RETURN(t.layout, ParseLayout(layout, version));
  if (t.layout == Layout::kSharded) {
    GT_RETURN_IF_ERROR(CheckFields(object, {"name", "layout", "dtype", "shape", "mesh", "splits", "only"}));
    GT_ASSIGN_OR_RETURN(t.sharding, ReadSharding(object, version));
  } else if (t.layout == Layout::kBoxes) {
    GT_RETURN_IF_ERROR(CheckFields(object, {"name", "layout", "dtype", "shape", "boxes"}));
    GT_ASSIGN_OR_RETURN(const uint64_t index, GetUint(object, "boxes", kTensorsMax));
    if (index >= lists.size()) return absl::DataLossError("a tensor in no list of boxes");
    t.boxes = lists[index];
  } else {
    GT_RETURN_IF_ERROR(CheckFields(object, {"name", "layout", "dtype", "shape"}));
  }
  GT_ASSIGN_OR_RETURN(const std::string dtype, GetString(object, "dtype", 16));
  const std::optional<DType> parsed = ParseDType(dtype);
  const bool known = parsed && (version >= kVersionOfBoxes || parsed.value() <= DType::kUint8);
  if (!known) return absl::DataLossError("unknown dtype");
  t.dtype = *parsed;
  GT_ASSIGN_OR_RETURN(const ParsedJson* shape, GetArray(object, "shape", kDimsMax));
  for (const ParsedJson& dim : *shape) {
    if (!dim.is_number_unsigned() || dim.get<uint64_t>() > INT64_MAX)
      return absl::DataLossError("impossible shape");
    t.shape.push_back(dim.get<int64_t>());
  }
  return t;
}

absl::StatusOr<std::vector<GlobalTensor>> ReadTensors(const ParsedJson& object, int version) {
  GT_ASSIGN_OR_RETURN(const BoxLists lists, ReadBoxLists(object, version));
  GT_ASSIGN_OR_RETURN(const ParsedJson* items, GetArray(object, "tensors", kTensorsMax));
  std::vector<GlobalTensor> tensors;
  for (const ParsedJson& item : *items) {
    GT_ASSIGN_OR_RETURN(GlobalTensor t, ReadTensor(item, version, lists));
    tensors.push_back(std::move(t));
  }
  return tensors;
}

Json PartToJson(const PartRef& part) {
  Json out = {{"bytes", part.bytes},
              {"xxh3_128", part.xxh3},
              {"finite", part.finite},
              {"file_bytes", part.file_bytes},
              {"chunks", part.chunks}};
  if (part.kept > 0) out["kept"] = part.kept;
  return out;
}

absl::StatusOr<PartRef> ReadPartRef(const ParsedJson& object) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"bytes", "xxh3_128", "finite", "file_bytes", "chunks", "kept"}));
  PartRef part;
  GT_ASSIGN_OR_RETURN(part.bytes, GetUint(object, "bytes", kPartBytesMax));
  GT_ASSIGN_OR_RETURN(part.xxh3, GetString(object, "xxh3_128", 32));
  GT_ASSIGN_OR_RETURN(part.finite, GetBool(object, "finite"));
  GT_ASSIGN_OR_RETURN(part.file_bytes, GetUint(object, "file_bytes", kPartRanks * kFileBytesMax));
  GT_ASSIGN_OR_RETURN(part.chunks, GetUint(object, "chunks", kPartRanks * kFileBytesMax));
  if (object.contains("kept")) {
    GT_ASSIGN_OR_RETURN(part.kept, GetUint(object, "kept", kPartBytesMax));
    if (part.kept == 0) return absl::DataLossError("kept is none");
  }
  return part;
}

// The files or, since version 3, the parts instead.
absl::Status ReadFiles(const ParsedJson& object, Manifest* m) {
  if (object.contains("files") == object.contains("parts"))
    return absl::DataLossError("neither files nor parts");
  if (object.contains("files")) {
    GT_ASSIGN_OR_RETURN(const ParsedJson* files, GetArray(object, "files", kShardsMax));
    for (const ParsedJson& item : *files) {
      GT_ASSIGN_OR_RETURN(ShardFile file, ReadFileEntry(item, m->version));
      m->files.push_back(std::move(file));
    }
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const ParsedJson* parts, GetArray(object, "parts", kShardsMax));
  for (const ParsedJson& item : *parts) {
    GT_ASSIGN_OR_RETURN(PartRef part, ReadPartRef(item));
    m->parts.push_back(std::move(part));
  }
  m->files.resize(static_cast<size_t>(m->world_size));
  return absl::OkStatus();
}

absl::StatusOr<Manifest> ReadManifest(const ParsedJson& object) {
  Manifest m;
  GT_ASSIGN_OR_RETURN(m.version, ReadHead(object, kManifestFormat, 1, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "cluster", "job", "job_hash", "epoch", "timeline", "generation", "step",
               "attempt", "world_size", "finite", "tensors", "boxes", "files", "parts"}));
  GT_ASSIGN_OR_RETURN(m.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(m.owner, ReadIdentity(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  m.world_size = static_cast<int>(world);
  GT_ASSIGN_OR_RETURN(m.tensors, ReadTensors(object, m.version));
  GT_RETURN_IF_ERROR(ReadFiles(object, &m));
  GT_ASSIGN_OR_RETURN(const bool finite, GetBool(object, "finite"));
  if (finite != m.finite()) return absl::DataLossError("\"finite\" does not match its files");
  GT_RETURN_IF_ERROR(Validate(m));
  return m;
}

absl::StatusOr<AbortMarker> ReadAbortMarker(const ParsedJson& object) {
  GT_RETURN_IF_ERROR(ReadHead(object, kAbortFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "epoch", "timeline", "generation", "step", "attempt", "reason"}));
  AbortMarker marker;
  GT_ASSIGN_OR_RETURN(marker.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(const std::string reason, GetString(object, "reason", kReasonBytesMax));
  marker.reason = BoundedWords(reason);
  return marker;
}

// Byte ranges of one tensor collected over all files.
using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

absl::Status CheckCovered(const GlobalTensor& tensor, Ranges ranges) {
  std::sort(ranges.begin(), ranges.end());
  uint64_t expected = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != expected) {
      return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": bytes ",
                                              std::min(begin, expected), " to ", std::max(begin, expected),
                                              begin > expected ? " are in no shard" : " are in two shards"));
    }
    expected = end;
  }
  const std::optional<uint64_t> count = ElementCount(tensor.shape, tensor.dtype);
  if (!count) return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": impossible shape"));
  if (expected != *count * DTypeSize(tensor.dtype)) {
    return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": the shards hold ", expected,
                                            " of its ", *count * DTypeSize(tensor.dtype), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const std::vector<GlobalTensor>& tensors) {
  absl::flat_hash_set<absl::string_view> names;
  for (const GlobalTensor& t : tensors) {
    if (!IsTensorName(t.name)) return absl::DataLossError("a tensor with an impossible name");
    if (!names.insert(t.name).second)
      return absl::DataLossError(absl::StrCat("tensor \"", t.name, "\" twice"));
    if (t.layout == Layout::kPerRank && (t.dtype != DType::kUint8 || !t.shape.empty())) {
      return absl::DataLossError(absl::StrCat("per-rank \"", t.name, "\" has a type or a shape"));
    }
  }
  return absl::OkStatus();
}

// Version 1: every byte of every replicated tensor in exactly one slice.
absl::Status CheckSlices(const Manifest& m) {
  absl::flat_hash_map<absl::string_view, const GlobalTensor*> by_name;
  for (const GlobalTensor& t : m.tensors) {
    by_name[t.name] = &t;
    if (t.layout == Layout::kSharded) return absl::DataLossError("a sharded tensor in version 1");
  }
  absl::flat_hash_map<absl::string_view, Ranges> replicated;
  for (const ShardFile& file : m.files) {
    std::map<absl::string_view, int> blobs;
    for (const Slice& s : file.slices) {
      const auto it = by_name.find(s.tensor);
      if (it == by_name.end())
        return absl::DataLossError(absl::StrCat(file.name, ": a slice of an unknown tensor"));
      if (it->second->layout == Layout::kReplicated) {
        if (s.bytes > 0) replicated[it->first].emplace_back(s.begin, s.begin + s.bytes);
      } else if (s.begin != 0 || ++blobs[it->first] > 1) {
        return absl::DataLossError(absl::StrCat(file.name, ": per-rank \"", s.tensor, "\" in pieces"));
      }
    }
  }
  for (const GlobalTensor& t : m.tensors) {
    if (t.layout == Layout::kReplicated) GT_RETURN_IF_ERROR(CheckCovered(t, std::move(replicated[t.name])));
  }
  return absl::OkStatus();
}

// Since version 2: the shares of the ranks are disjoint and complete by construction; each file must have the
// length that follows from them.
class ShareCheck {
 public:
  static absl::StatusOr<ShareCheck> Make(const std::vector<GlobalTensor>& tensors, int world_size) {
    absl::StatusOr<Shares> shares = Shares::Make(tensors, world_size);
    if (!shares.ok()) return absl::DataLossError(shares.status().message());
    size_t blobs = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      blobs += tensors[t].layout == Layout::kPerRank ? 1 : 0;
      if (tensors[t].layout == Layout::kSharded && shares->partition(t).Key().empty()) {
        return absl::DataLossError(
            absl::StrCat("tensor \"", tensors[t].name, "\" is sharded, but equal on all ranks"));
      }
    }
    return ShareCheck(*std::move(shares), blobs, world_size);
  }

  absl::Status Check(const ShardFile& file, int rank) {
    if (!file.slices.empty()) return absl::DataLossError(absl::StrCat(file.name, ": slices since version 2"));
    if (file.per_rank.size() != blobs_) {
      return absl::DataLossError(
          absl::StrCat(file.name, ": per_rank does not match the tensors of single ranks"));
    }
    unsigned __int128 bytes = file.data_begin;
    bytes += shares_.DataBytes(rank);
    for (uint64_t blob : file.per_rank) bytes += blob;
    for (size_t i = 0; i < file.kept.size(); ++i) {
      const KeptBlob& k = file.kept[i];
      // One place for each, so that nobody has to look at all files to know that none has it twice.
      const bool possible = k.blob < blobs_ && k.rank >= world_size_ && k.rank % world_size_ == rank;
      const auto which = [&](size_t at) { return std::pair(file.kept[at].blob, file.kept[at].rank); };
      if (!possible || (i > 0 && which(i - 1) >= which(i))) {
        return absl::DataLossError(absl::StrCat(file.name, ": it keeps state of rank ", k.rank,
                                                ", which is there already or is not kept here"));
      }
      bytes += k.bytes;
    }
    if (bytes == file.bytes) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat(file.name, ": ", file.bytes, " bytes are not what its rank holds of the tensors"));
  }

 private:
  ShareCheck(Shares shares, size_t blobs, int world_size)
      : shares_(std::move(shares)), blobs_(blobs), world_size_(world_size) {}
  Shares shares_;
  size_t blobs_;  // tensors of single ranks
  int world_size_;
};

// How many ranks part `part` has.
int PartSize(int part, int world_size) { return std::min(kPartRanks, world_size - part * kPartRanks); }

absl::Status CheckParts(const Manifest& m) {
  if (m.version < static_cast<int>(kPartsVersion)) {
    return m.parts.empty() ? absl::OkStatus() : absl::DataLossError("parts before version 3");
  }
  if (m.parts.empty()) {
    return m.world_size <= kPartRanks ? absl::OkStatus()
                                      : absl::DataLossError("files of so many ranks without parts");
  }
  if (m.parts.size() != static_cast<size_t>(PartCount(m.world_size))) {
    return absl::DataLossError(absl::StrCat("world size ", m.world_size, " but ", m.parts.size(), " parts"));
  }
  for (size_t i = 0; i < m.parts.size(); ++i) {
    const auto ranks = static_cast<uint64_t>(PartSize(static_cast<int>(i), m.world_size));
    const PartRef& part = m.parts[i];
    const bool possible = part.bytes > 0 && part.bytes <= kPartBytesMax && IsHashHex(part.xxh3) &&
                          part.file_bytes <= ranks * kFileBytesMax &&
                          part.chunks <= part.file_bytes / kChunkBytes + ranks && part.kept <= part.bytes;
    if (!possible) return absl::DataLossError(absl::StrCat("part ", i, " is impossible"));
  }
  return absl::OkStatus();
}

bool IsVerifiedName(absl::string_view verified) {
  return verified.empty() || ParseAttemptName(verified).has_value();
}

absl::Status CheckPartFiles(const ManifestPart& part) {
  if (part.part < 0 || part.part >= PartCount(part.world_size))
    return absl::DataLossError("part outside the world");
  if (part.files.size() != static_cast<size_t>(PartSize(part.part, part.world_size)))
    return absl::DataLossError("a part with another number of files than its ranks");
  for (size_t i = 0; i < part.files.size(); ++i) {
    GT_RETURN_IF_ERROR(
        ValidateFile(part.files[i], part.part * kPartRanks + static_cast<int>(i), part.world_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadVerified(const ParsedJson& object) {
  GT_ASSIGN_OR_RETURN(std::string verified, GetString(object, "verified", 128));
  if (!IsVerifiedName(verified)) return absl::DataLossError("verified is no attempt");
  return verified;
}

absl::Status CheckKey(absl::string_view found, absl::string_view derived) {
  if (found == derived) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("its numbers derive the name ", derived, ", it was found as ", found));
}

}  // namespace

bool Manifest::finite() const {
  const auto is_finite = [](const auto& f) { return f.finite; };
  if (!parts.empty()) return std::all_of(parts.begin(), parts.end(), is_finite);
  return std::all_of(files.begin(), files.end(), is_finite);
}

uint64_t Manifest::file_bytes() const {
  uint64_t bytes = 0;
  for (const PartRef& part : parts) bytes += part.file_bytes;
  if (parts.empty()) {
    for (const ShardFile& file : files) bytes += file.bytes;
  }
  return bytes;
}

uint64_t Manifest::chunk_count() const {
  uint64_t chunks = 0;
  for (const PartRef& part : parts) chunks += part.chunks;
  if (parts.empty()) {
    for (const ShardFile& file : files) chunks += file.chunks.size();
  }
  return chunks;
}

uint64_t Manifest::ChunksBefore(int rank) const {
  const int part = parts.empty() ? 0 : PartOf(rank);
  uint64_t chunks = 0;
  for (int i = 0; i < part; ++i) chunks += parts[static_cast<size_t>(i)].chunks;
  for (int r = part * kPartRanks; r < rank; ++r) chunks += files[static_cast<size_t>(r)].chunks.size();
  return chunks;
}

absl::Status ValidateFile(const ShardFile& file, int rank, int world_size, int version) {
  if (file.name != ShardName(rank, world_size)) {
    return absl::DataLossError(
        absl::StrCat("file ", rank, " has another name than ", ShardName(rank, world_size)));
  }
  const auto fail = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(file.name, ": ", what));
  };
  if (file.bytes > kFileBytesMax) return fail("impossible length");
  if (version < 3 ? !IsHashHex(file.xxh3) : !file.xxh3.empty()) return fail("xxh3_128 is not a hash");
  if (file.data_begin > file.bytes || file.data_begin % 8 != 0)
    return fail("its data begins where it cannot");
  if (file.chunks.size() != (file.bytes + kChunkBytes - 1) / kChunkBytes)
    return fail("chunks do not match its length");
  for (const std::string& chunk : file.chunks) {
    if (!IsHashHex(chunk)) return fail("a chunk's hash is not a hash");
  }
  uint64_t at = 0;
  for (const Slice& s : file.slices) {
    if (s.file_begin > file.bytes || s.bytes > file.bytes - s.file_begin)
      return fail("a slice ends past its end");
    if (s.file_begin < at) return fail("slices overlap or are out of order");
    at = s.file_begin + s.bytes;
  }
  return absl::OkStatus();
}

absl::Status Validate(const Manifest& m) {
  if (m.version < 1 || m.version > kManifestVersion) return absl::DataLossError("impossible version");
  if (!IsValid(m.id)) return absl::DataLossError("its numbers are out of range");
  if (m.world_size < 1 || m.world_size > kWorldSizeMax ||
      m.files.size() != static_cast<size_t>(m.world_size)) {
    return absl::DataLossError(absl::StrCat("world size ", m.world_size, " but ", m.files.size(), " files"));
  }
  GT_RETURN_IF_ERROR(CheckTensors(m.tensors));
  GT_RETURN_IF_ERROR(CheckParts(m));
  for (int rank = 0; rank < m.world_size; ++rank) {
    if (m.parts.empty() || m.Has(rank))
      GT_RETURN_IF_ERROR(ValidateFile(m.files[rank], rank, m.world_size, m.version));
  }
  if (m.version == 1) return CheckSlices(m);
  GT_ASSIGN_OR_RETURN(ShareCheck shares, ShareCheck::Make(m.tensors, m.world_size));
  for (int rank = 0; rank < m.world_size; ++rank) {
    if (m.Has(rank)) GT_RETURN_IF_ERROR(shares.Check(m.files[rank], rank));
  }
  return absl::OkStatus();
}

absl::Status ValidateFiles(const std::vector<GlobalTensor>& tensors, int world_size, int first_rank,
                           const std::vector<ShardFile>& files) {
  GT_ASSIGN_OR_RETURN(ShareCheck shares, ShareCheck::Make(tensors, world_size));
  for (size_t i = 0; i < files.size(); ++i) {
    const int rank = first_rank + static_cast<int>(i);
    GT_RETURN_IF_ERROR(ValidateFile(files[i], rank, world_size));
    GT_RETURN_IF_ERROR(shares.Check(files[i], rank));
  }
  return absl::OkStatus();
}

PartRef RefOf(const ManifestPart& part, absl::string_view text) {
  PartRef ref{.bytes = text.size(), .xxh3 = Xxh3Hex(text)};
  for (const ShardFile& file : part.files) {
    ref.finite = ref.finite && file.finite;
    ref.file_bytes += file.bytes;
    ref.chunks += file.chunks.size();
    ref.kept += file.kept.size();
  }
  return ref;
}

absl::Status AddParts(const std::vector<PartText>& parts, Manifest* manifest) {
  GT_ASSIGN_OR_RETURN(ShareCheck shares, ShareCheck::Make(manifest->tensors, manifest->world_size));
  for (const auto& [number, text] : parts) {
    GT_CHECK(number >= 0 && static_cast<size_t>(number) < manifest->parts.size());
    const std::string key = AttemptKey(manifest->id, PartName(number, PartCount(manifest->world_size)));
    const auto damaged = [&](absl::string_view what) {
      return absl::DataLossError(absl::StrCat(key, ": ", what));
    };
    const PartRef& ref = manifest->parts[static_cast<size_t>(number)];
    if (text.size() != ref.bytes || Xxh3Hex(text) != ref.xxh3)
      return damaged("is not the part that the manifest names");
    absl::StatusOr<ManifestPart> part = ParseManifestPart(key, text);
    if (!part.ok())
      return absl::Status(part.status().code(), absl::StrCat(key, ": ", part.status().message()));
    if (!part->error.empty() || RefOf(*part, text) != ref)
      return damaged("says something else than the manifest");
    for (size_t i = 0; i < part->files.size(); ++i) {
      const int rank = number * kPartRanks + static_cast<int>(i);
      if (const absl::Status sound = shares.Check(part->files[i], rank); !sound.ok())
        return damaged(sound.message());
    }
    std::move(part->files.begin(), part->files.end(), manifest->files.begin() + number * kPartRanks);
  }
  return absl::OkStatus();
}

std::string Print(const Manifest& m) {
  GT_CHECK(Validate(m).ok());
  Json out = Head(kManifestFormat, static_cast<uint64_t>(m.version));
  AddIdentity(m.owner, &out);
  AddId(m.id, &out);
  out["world_size"] = m.world_size;
  out["finite"] = m.finite();
  AddTensors(m.tensors, &out);
  const char* const list = m.parts.empty() ? "files" : "parts";
  out[list] = Json::array();
  for (const PartRef& part : m.parts) out[list].push_back(PartToJson(part));
  if (m.parts.empty()) {
    for (const ShardFile& file : m.files) out[list].push_back(FileToJson(file, m.version));
  }
  return PrintSealed(out);
}

std::string Print(const AbortMarker& marker) {
  GT_CHECK(IsValid(marker.id));
  Json out = Head(kAbortFormat);
  AddId(marker.id, &out);
  out["reason"] = BoundedWords(marker.reason);
  return PrintSealed(out);
}

std::string Print(const ManifestPart& part) {
  GT_CHECK(IsValid(part.id) && IsVerifiedName(part.verified));
  GT_CHECK(!part.error.empty() || CheckPartFiles(part).ok());
  Json out = Head(kPartFormat, kManifestVersion);
  AddId(part.id, &out);
  out["world_size"] = part.world_size;
  out["part"] = part.part;
  if (!part.error.empty()) {
    out["error"] = BoundedWords(part.error);
    return PrintSealed(out);
  }
  out["verified"] = part.verified;
  out["files"] = Json::array();
  for (const ShardFile& file : part.files) out["files"].push_back(FileToJson(file, kManifestVersion));
  return PrintSealed(out);
}

std::string Print(const ShardIndex& index) {
  GT_CHECK(IsValid(index.id) && IsVerifiedName(index.verified));
  GT_CHECK(!index.error.empty() || ValidateFile(index.file, index.rank, index.world_size).ok());
  Json out = Head(kIndexFormat, kManifestVersion);
  AddId(index.id, &out);
  out["rank"] = index.rank;
  out["world_size"] = index.world_size;
  if (index.error.empty()) {
    out["file"] = FileToJson(index.file, kManifestVersion);
    out["verified"] = index.verified;
  } else {
    out["error"] = BoundedWords(index.error);
  }
  return PrintSealed(out);
}

std::string Print(const OwnerClaim& claim) {
  Json out = Head(kOwnerFormat);
  out["epoch"] = claim.epoch;
  AddIdentity(claim.owner, &out);
  return PrintSealed(out);
}

std::string Print(const SaveOrder& order) {
  Json out = Head(kOrderFormat);
  out["location"] = order.location;
  AddIdentity(order.owner, &out);
  out["epoch"] = order.epoch;
  out["rank"] = order.rank;
  out["world_size"] = order.world_size;
  out["keep"] = order.keep;
  out["shard_tries"] = order.shard_tries;
  out["commit_timeout_ms"] = order.commit_timeout_ms;
  AddTensors(order.tensors, &out);
  out["bytes"] = order.bytes;
  if (order.has_tail) out["has_tail"] = true;  // not to writers that do not know it and need not
  return PrintSealed(out);
}

std::string Print(const SaveTail& tail) {
  Json out = Head(kTailFormat);
  out["per_rank"] = tail.per_rank;
  if (!tail.kept.empty()) out["kept"] = KeptToJson(tail.kept);
  return PrintSealed(out);
}

absl::StatusOr<SaveTail> ParseSaveTail(absl::string_view text, const SaveOrder& order) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kTailTextBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kTailFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "per_rank", "kept"}));
  SaveTail tail;
  GT_ASSIGN_OR_RETURN(tail.per_rank, ReadSizes(object, "per_rank"));
  GT_ASSIGN_OR_RETURN(tail.kept, ReadKept(object));
  const auto blobs =
      static_cast<size_t>(std::count_if(order.tensors.begin(), order.tensors.end(),
                                        [](const GlobalTensor& t) { return t.layout == Layout::kPerRank; }));
  if (tail.per_rank.size() != blobs) return absl::DataLossError("per_rank does not match the order");
  for (const KeptBlob& k : tail.kept) {
    if (k.blob >= blobs || k.rank < order.world_size || k.rank % order.world_size != order.rank)
      return absl::DataLossError("kept: an impossible entry");
  }
  return tail;
}

absl::StatusOr<SaveOrder> ParseSaveOrder(absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kManifestBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kOrderFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "location", "cluster", "job", "job_hash", "epoch", "rank", "world_size",
               "keep", "shard_tries", "commit_timeout_ms", "tensors", "boxes", "bytes", "has_tail"}));
  SaveOrder order;
  if (object.contains("has_tail")) {
    GT_ASSIGN_OR_RETURN(order.has_tail, GetBool(object, "has_tail"));
  }
  GT_ASSIGN_OR_RETURN(order.location, GetString(object, "location", kLocationBytesMax));
  GT_ASSIGN_OR_RETURN(order.owner, ReadIdentity(object));
  GT_ASSIGN_OR_RETURN(order.epoch, GetUint(object, "epoch", kCounterMax));
  const auto number = [&](const char* name, uint64_t value_max, int* out) -> absl::Status {
    GT_ASSIGN_OR_RETURN(const uint64_t value, GetUint(object, name, value_max));
    *out = static_cast<int>(value);
    return absl::OkStatus();
  };
  GT_RETURN_IF_ERROR(number("world_size", kWorldSizeMax, &order.world_size));
  GT_RETURN_IF_ERROR(number("rank", kWorldSizeMax, &order.rank));
  GT_RETURN_IF_ERROR(number("keep", kOrderNumberMax, &order.keep));
  GT_RETURN_IF_ERROR(number("shard_tries", kOrderNumberMax, &order.shard_tries));
  GT_ASSIGN_OR_RETURN(order.commit_timeout_ms, GetUint(object, "commit_timeout_ms", kOrderNumberMax));
  if (order.rank >= order.world_size) return absl::DataLossError("rank outside the world");
  GT_ASSIGN_OR_RETURN(order.tensors, ReadTensors(object, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckTensors(order.tensors));
  const absl::Status possible = Shares::Make(order.tensors, order.world_size).status();
  if (!possible.ok()) return absl::DataLossError(possible.message());
  GT_ASSIGN_OR_RETURN(order.bytes, ReadSizes(object, "bytes"));
  if (order.bytes.size() != order.tensors.size())
    return absl::DataLossError("bytes do not match the tensors");
  return order;
}

absl::StatusOr<std::variant<Manifest, AbortMarker>> ParseManifest(absl::string_view key,
                                                                  absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kManifestBytesMax));
  GT_ASSIGN_OR_RETURN(const std::string format, GetString(object, "format", 64));
  if (format == kAbortFormat) {
    GT_ASSIGN_OR_RETURN(AbortMarker marker, ReadAbortMarker(object));
    GT_RETURN_IF_ERROR(CheckKey(key, ManifestKey(marker.id)));
    return marker;
  }
  GT_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(object));
  GT_RETURN_IF_ERROR(CheckKey(key, ManifestKey(manifest.id)));
  return manifest;
}

absl::StatusOr<ManifestPart> ParseManifestPart(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kPartBytesMax));
  GT_ASSIGN_OR_RETURN(const int version, ReadHead(object, kPartFormat, kPartsVersion, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "timeline", "generation", "step",
                                          "attempt", "world_size", "part", "error", "verified", "files"}));
  ManifestPart part;
  GT_ASSIGN_OR_RETURN(part.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  GT_ASSIGN_OR_RETURN(const uint64_t number, GetUint(object, "part", kWorldSizeMax));
  part.world_size = static_cast<int>(world);
  part.part = static_cast<int>(number);
  if (part.part >= PartCount(part.world_size)) return absl::DataLossError("part outside the world");
  GT_RETURN_IF_ERROR(CheckKey(key, AttemptKey(part.id, PartName(part.part, PartCount(part.world_size)))));
  if (object.contains("error") == object.contains("files"))
    return absl::DataLossError("neither files nor an error");
  if (object.contains("error")) {
    if (object.contains("verified")) return absl::DataLossError("an error that verified something");
    GT_ASSIGN_OR_RETURN(const std::string error, GetString(object, "error", kReasonBytesMax));
    part.error = error.empty() ? "unknown error" : BoundedWords(error);
    return part;
  }
  GT_ASSIGN_OR_RETURN(part.verified, ReadVerified(object));
  GT_ASSIGN_OR_RETURN(const ParsedJson* files, GetArray(object, "files", kPartRanks));
  for (const ParsedJson& item : *files) {
    GT_ASSIGN_OR_RETURN(ShardFile file, ReadFileEntry(item, version));
    part.files.push_back(std::move(file));
  }
  GT_RETURN_IF_ERROR(CheckPartFiles(part));
  return part;
}

absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kManifestBytesMax));
  GT_ASSIGN_OR_RETURN(const int version,
                      ReadHead(object, kIndexFormat, kOldestIndexVersion, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "timeline", "generation", "step",
                                          "attempt", "rank", "world_size", "file", "error", "verified"}));
  ShardIndex index;
  GT_ASSIGN_OR_RETURN(index.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  GT_ASSIGN_OR_RETURN(const uint64_t rank, GetUint(object, "rank", kWorldSizeMax));
  if (rank >= world) return absl::DataLossError("rank outside the world");
  index.world_size = static_cast<int>(world);
  index.rank = static_cast<int>(rank);
  GT_RETURN_IF_ERROR(CheckKey(key, AttemptKey(index.id, IndexName(index.rank, index.world_size))));
  if (object.contains("error") == object.contains("file"))
    return absl::DataLossError("neither a file nor an error");
  if (object.contains("error")) {
    GT_ASSIGN_OR_RETURN(const std::string error, GetString(object, "error", kReasonBytesMax));
    index.error = error.empty() ? "unknown error" : BoundedWords(error);
    if (object.contains("verified")) return absl::DataLossError("an error that verified something");
    return index;
  }
  GT_ASSIGN_OR_RETURN(index.file, ReadFileEntry(object["file"], version));
  index.file.xxh3.clear();  // of version 2; what is written now does not say it
  if (version >= 3) {
    GT_ASSIGN_OR_RETURN(index.verified, ReadVerified(object));
  }
  GT_RETURN_IF_ERROR(ValidateFile(index.file, index.rank, index.world_size));
  return index;
}

absl::StatusOr<OwnerClaim> ParseOwnerClaim(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kSmallFileBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kOwnerFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "cluster", "job", "job_hash"}));
  OwnerClaim claim;
  GT_ASSIGN_OR_RETURN(claim.epoch, GetUint(object, "epoch", kCounterMax));
  GT_ASSIGN_OR_RETURN(claim.owner, ReadIdentity(object));
  GT_RETURN_IF_ERROR(CheckKey(key, OwnerKey(claim.epoch)));
  return claim;
}

}  // namespace gtrain::ckpt
