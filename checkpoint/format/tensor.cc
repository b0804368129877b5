#include "checkpoint/format/tensor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::ckpt {

std::optional<uint64_t> ElementCount(const std::vector<int64_t>& shape, DType dtype) {
  if (shape.size() > kDimsMax) return std::nullopt;
  unsigned __int128 count = 1;
  bool empty = false;
  for (int64_t dim : shape) {
    if (dim < 0) return std::nullopt;
    if (dim == 0) empty = true;
    count *= static_cast<uint64_t>(std::max<int64_t>(dim, 1));
    if (count * DTypeSize(dtype) > kTensorBytesMax) return std::nullopt;
  }
  return empty ? 0 : static_cast<uint64_t>(count);
}

bool GlobalTensor::operator==(const GlobalTensor& other) const {
  const bool same_boxes =
      boxes == other.boxes || (boxes != nullptr && other.boxes != nullptr && *boxes == *other.boxes);
  return name == other.name && layout == other.layout && dtype == other.dtype && shape == other.shape &&
         sharding == other.sharding && same_boxes;
}

std::string Describe(const GlobalTensor& tensor) {
  if (tensor.layout == Layout::kPerRank) return "bytes of each rank";
  std::string out = absl::StrCat(DTypeName(tensor.dtype), "[", absl::StrJoin(tensor.shape, ","), "]");
  if (tensor.layout == Layout::kReplicated) return out;
  if (tensor.layout == Layout::kBoxes) {
    return tensor.boxes == nullptr ? absl::StrCat(out, " in boxes")
                                   : absl::StrCat(out, " in ", tensor.boxes->cells(), " boxes");
  }
  const Sharding& s = tensor.sharding;
  if (!s.splits.empty()) absl::StrAppend(&out, " split");
  for (const Split& split : s.splits) {
    absl::StrAppend(&out, " ", split.dim, ":", split.axis, split.rule == SplitRule::kChunk ? ":chunk" : "");
  }
  for (const Only& only : s.only) absl::StrAppend(&out, " only ", only.axis, "=", only.index);
  const auto axis = [](std::string* text, const MeshAxis& a) { absl::StrAppend(text, a.name, "=", a.size); };
  return absl::StrCat(out, " on ", absl::StrJoin(s.mesh, " x ", axis));
}

}  // namespace gtrain::ckpt
