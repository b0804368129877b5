#include "runtime/capi/sharding.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::capi {
namespace {

constexpr int kDimensionsMax = 32;
constexpr int kAxesMax = 64;

// An array of the caller's, each item by `item`.
template <typename In, typename Out, typename Item>
absl::Status ReadArray(const In* in, int count, std::vector<Out>* out, Item item) {
  if (count < 0 || count > kAxesMax || (count > 0 && in == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("an array of gtrain_sharding has 0 to ", kAxesMax, " items"));
  }
  for (int i = 0; i < count; ++i) out->push_back(item(in[i]));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ShapeFrom(const int64_t* shape, int dimensions) {
  if (dimensions < 0 || dimensions > kDimensionsMax || (dimensions > 0 && shape == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("a tensor has 0 to ", kDimensionsMax, " dimensions"));
  }
  return std::vector<int64_t>(shape, shape + dimensions);
}

absl::StatusOr<Sharding> ShardingFrom(const gtrain_sharding* in) {
  if (in == nullptr || in->size < sizeof(gtrain_sharding)) {
    return absl::InvalidArgumentError("`size` of gtrain_sharding is not its sizeof");
  }
  Sharding out;
  const auto text = [](const char* name) { return std::string(name == nullptr ? "" : name); };
  GT_RETURN_IF_ERROR(ReadArray(in->mesh, in->axes, &out.mesh, [&](const gtrain_mesh_axis& a) {
    return MeshAxis{text(a.name), a.size};
  }));
  GT_RETURN_IF_ERROR(ReadArray(in->splits, in->split_count, &out.splits, [&](const gtrain_split& s) {
    return Split{s.dimension, text(s.axis), static_cast<SplitRule>(s.rule)};
  }));
  for (int i = 0; i < in->split_count; ++i) {
    if (in->splits[i].rule == GTRAIN_SPLIT_BALANCED || in->splits[i].rule == GTRAIN_SPLIT_CHUNK) continue;
    return absl::InvalidArgumentError(absl::StrCat("no such split rule: ", in->splits[i].rule));
  }
  GT_RETURN_IF_ERROR(ReadArray(in->only, in->only_count, &out.only, [&](const gtrain_only& o) {
    return Only{text(o.axis), o.index};
  }));
  return out;
}

absl::Status LocalBoxTo(
    const int64_t* shape, int dimensions, const gtrain_sharding* sharding, int64_t* begin,
    int64_t* local_shape, int* holds,
    absl::FunctionRef<absl::StatusOr<LocalBox>(const std::vector<int64_t>&, const Sharding&)> compute) {
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> global, ShapeFrom(shape, dimensions));
  if (dimensions > 0 && (begin == nullptr || local_shape == nullptr))
    return absl::InvalidArgumentError("`begin` or `local_shape` is NULL");
  GT_ASSIGN_OR_RETURN(const Sharding how, ShardingFrom(sharding));
  GT_ASSIGN_OR_RETURN(const LocalBox box, compute(global, how));
  std::copy(box.begin.begin(), box.begin.end(), begin);
  std::copy(box.shape.begin(), box.shape.end(), local_shape);
  if (holds != nullptr) *holds = box.holds ? 1 : 0;
  return absl::OkStatus();
}

}  // namespace gtrain::capi
