#include "checkpoint/format/tensor_fields.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "sharding/partition.h"

namespace gtrain::ckpt {
namespace {

constexpr std::pair<Layout, absl::string_view> kLayouts[] = {{Layout::kReplicated, "replicated"},
                                                             {Layout::kPerRank, "per-rank"},
                                                             {Layout::kSharded, "sharded"},
                                                             {Layout::kBoxes, "boxes"}};
constexpr char kChunkRule[] = "chunk";
constexpr int kVersionOfBoxes = 3;  // the first with boxes, chunks, kept, and all types

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

}  // namespace

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

}  // namespace gtrain::ckpt
