#include "elastic/plan/mesh_place.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "sharding/local_box.h"

namespace gtrain::elastic {
namespace {

constexpr absl::string_view kCopies = "dp", kShards = "fsdp";

// The number of a rank among those of the axes for which `counts` holds, the last one fastest.
template <typename Counts>
int Index(const std::vector<MeshAxis>& mesh, int rank, const Counts& counts, int* count) {
  const std::vector<int64_t> at = MeshCoordinates(mesh, rank);
  int64_t index = 0, size = 1;
  for (size_t i = 0; i < mesh.size(); ++i) {
    if (!counts(mesh[i].name)) continue;
    index = index * mesh[i].size + at[i];
    size *= mesh[i].size;
  }
  *count = static_cast<int>(size);
  return static_cast<int>(index);
}

}  // namespace

MeshPlace PlaceIn(const std::vector<MeshAxis>& mesh, int rank) {
  const auto has_samples = [](absl::string_view axis) { return axis == kCopies || axis == kShards; };
  MeshPlace place;
  place.cell = Index(
      mesh, rank, [](absl::string_view axis) { return axis != kCopies; }, &place.cells);
  place.copy = Index(
      mesh, rank, [](absl::string_view axis) { return axis == kCopies; }, &place.copies);
  place.share = Index(mesh, rank, has_samples, &place.shares);
  int alike = 1;
  const int at = Index(
      mesh, rank, [&](absl::string_view axis) { return !has_samples(axis); }, &alike);
  place.speaks = at == alike - 1;
  return place;
}

int GroupAlong(const std::vector<MeshAxis>& mesh, int rank, absl::string_view axis) {
  int groups = 0;
  return Index(
      mesh, rank, [&](absl::string_view name) { return name != axis; }, &groups);
}

absl::Status CheckAxis(const std::string& axis) {
  if (absl::c_linear_search(kMeshAxes, axis)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there is no axis ", axis, ": they are ", absl::StrJoin(kMeshAxes, ", ")));
}

absl::StatusOr<std::vector<MeshAxis>> MeshWith(std::vector<MeshAxis> mesh, const Sharding& cut) {
  const auto add = [&](const std::string& axis) {
    const auto is_it = [&](const MeshAxis& one) { return one.name == axis; };
    if (absl::c_none_of(mesh, is_it)) mesh.push_back({axis, 1});
    return CheckAxis(axis);
  };
  for (const Split& split : cut.splits) GT_RETURN_IF_ERROR(add(split.axis));
  for (const Only& only : cut.only) GT_RETURN_IF_ERROR(add(only.axis));
  return mesh;
}

absl::StatusOr<LocalBox> LocalPartOf(const std::vector<MeshAxis>& mesh, int rank,
                                     const std::vector<int64_t>& shape, const Sharding& cut) {
  const auto along_copies = [](const auto& part) { return part.axis == kCopies; };
  if (absl::c_any_of(cut.splits, along_copies) || absl::c_any_of(cut.only, along_copies))
    return absl::InvalidArgumentError(
        "a state is not cut along dp, whose ranks come and go: each of them has a copy");
  Sharding whole = cut;
  GT_ASSIGN_OR_RETURN(whole.mesh, MeshWith(mesh, cut));
  return LocalBoxOf(shape, whole, rank);
}

}  // namespace gtrain::elastic
