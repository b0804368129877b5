// Axes of a mesh have strides as the dimensions of an array do, so everything about a rank is division by the
// strides of some axes: those a tensor is split over number its cells, those it is replicated over number the
// replicas of a cell, and those it is pinned to leave the other ranks out. An axis of size 1 changes nothing
// and is dropped, so that equal placements compare equal.
#include "sharding/partition.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "sharding/local_box.h"

namespace gtrain::sharding {
namespace {

constexpr int64_t kRanksMax = int64_t{1} << 31;  // more than any world has

std::string Describe(const std::vector<MeshAxis>& mesh) {
  if (mesh.empty()) return "(no axes)";
  return absl::StrJoin(mesh, " x ", [](std::string* out, const MeshAxis& axis) {
    absl::StrAppend(out, axis.name.substr(0, kAxisNameBytesMax), "=", axis.size);
  });
}

bool IsAxisName(const std::string& name) {
  return !name.empty() && name.size() <= kAxisNameBytesMax &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return absl::ascii_isalnum(c) || c == '_' || c == '-'; });
}

absl::Status CheckMesh(const std::vector<MeshAxis>& mesh, int world_size) {
  if (mesh.size() > kAxesMax) {
    return absl::InvalidArgumentError(absl::StrCat("a mesh of ", mesh.size(), " axes, over ", kAxesMax));
  }
  int64_t ranks = 1;
  for (size_t i = 0; i < mesh.size(); ++i) {
    if (!IsAxisName(mesh[i].name)) {
      return absl::InvalidArgumentError("an axis has an impossible name: 1 to 32 of a-z, A-Z, 0-9, _ and -");
    }
    for (size_t j = 0; j < i; ++j) {
      if (mesh[j].name == mesh[i].name)
        return absl::InvalidArgumentError(absl::StrCat("axis \"", mesh[i].name, "\" twice"));
    }
    if (mesh[i].size < 1 || mesh[i].size > kRanksMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("axis \"", mesh[i].name, "\" has the size ", mesh[i].size));
    }
    ranks = std::min(ranks * mesh[i].size, kRanksMax);
  }
  if (ranks == world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the mesh ", Describe(mesh), " has ", ranks, " ranks, the job has ", world_size));
}

// Index of the axis in the mesh; marks it used.
absl::StatusOr<size_t> TakeAxis(const std::vector<MeshAxis>& mesh, const std::string& name,
                                std::vector<bool>* used) {
  for (size_t i = 0; i < mesh.size(); ++i) {
    if (mesh[i].name != name) continue;
    if ((*used)[i]) return absl::InvalidArgumentError(absl::StrCat("axis \"", name, "\" is used twice"));
    (*used)[i] = true;
    return i;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no axis \"", name.substr(0, kAxisNameBytesMax), "\" in the mesh ", Describe(mesh)));
}

}  // namespace

Interval Part(int64_t n, int64_t parts, int64_t i, SplitRule rule) {
  const int64_t each = n / parts, larger = n % parts;
  if (rule == SplitRule::kChunk) {
    const int64_t chunk = each + (larger > 0 ? 1 : 0);
    const int64_t begin = std::min(i * chunk, n);
    return {begin, std::min(chunk, n - begin)};
  }
  return {i * each + std::min(i, larger), each + (i < larger ? 1 : 0)};
}

int64_t PartHolding(int64_t n, int64_t parts, int64_t x, SplitRule rule) {
  const int64_t each = n / parts, larger = n % parts;
  if (rule == SplitRule::kChunk) return x / (each + (larger > 0 ? 1 : 0));
  const int64_t in_larger = larger * (each + 1);
  return x < in_larger ? x / (each + 1) : larger + (x - in_larger) / each;
}

Partition Partition::Replicated(int world_size) {
  Partition p;
  if (world_size > 1) p.replica_axes_ = {{.size = world_size, .stride = 1}};
  p.replicas_ = world_size;
  return p;
}

Partition Partition::Of(std::shared_ptr<const RankBoxes> boxes) {
  Partition p;
  p.boxes_ = std::move(boxes);
  return p;
}

absl::StatusOr<Partition> Partition::Make(const Sharding& sharding, size_t dimensions, int world_size) {
  const std::vector<MeshAxis>& mesh = sharding.mesh;
  if (absl::Status status = CheckMesh(mesh, world_size); !status.ok()) return status;
  std::vector<int64_t> strides(mesh.size(), 1);
  for (size_t i = mesh.size(); i-- > 1;) strides[i - 1] = strides[i] * mesh[i].size;

  Partition p;
  std::vector<bool> split(mesh.size(), false), used(mesh.size(), false);
  std::vector<size_t> axis_of_cut;
  for (const Split& s : sharding.splits) {
    if (s.dim < 0 || static_cast<size_t>(s.dim) >= dimensions) {
      return absl::InvalidArgumentError(
          absl::StrCat("dimension ", s.dim, " is split, but the tensor has ", dimensions));
    }
    const absl::StatusOr<size_t> axis = TakeAxis(mesh, s.axis, &used);
    if (!axis.ok()) return axis.status();
    split[*axis] = true;
    if (mesh[*axis].size == 1) continue;
    p.cuts_.push_back({.dim = s.dim, .parts = mesh[*axis].size, .rule = s.rule});
    axis_of_cut.push_back(*axis);
  }
  for (const Only& only : sharding.only) {
    const absl::StatusOr<size_t> axis = TakeAxis(mesh, only.axis, &used);
    if (!axis.ok()) return axis.status();
    if (only.index < 0 || only.index >= mesh[*axis].size) {
      return absl::InvalidArgumentError(absl::StrCat("coordinate ", only.index, " of axis \"", only.axis,
                                                     "\", which has the size ", mesh[*axis].size));
    }
    if (mesh[*axis].size == 1) continue;
    p.pins_.push_back({{mesh[*axis].size, strides[*axis]}, only.index});
    p.first_rank_ += only.index * strides[*axis];
  }
  std::sort(p.pins_.begin(), p.pins_.end(),
            [](const Pin& a, const Pin& b) { return a.axis.stride > b.axis.stride; });
  for (size_t i = 0; i < mesh.size(); ++i) {
    if (mesh[i].size == 1) continue;
    if (split[i]) {
      p.cell_axes_.push_back({mesh[i].size, strides[i]});
      p.cells_ *= mesh[i].size;
    } else if (!used[i]) {
      p.replica_axes_.push_back({mesh[i].size, strides[i]});
      p.replicas_ *= mesh[i].size;
    }
  }
  for (size_t c = 0; c < p.cuts_.size(); ++c) {
    for (const Axis& axis : p.cell_axes_) {
      if (axis.stride < strides[axis_of_cut[c]]) p.cuts_[c].cell_stride *= axis.size;
    }
  }
  return p;
}

bool Partition::Holds(int rank) const {
  if (boxes_ != nullptr) return boxes_->Holds(rank);
  for (const Pin& pin : pins_) {
    if (rank / pin.axis.stride % pin.axis.size != pin.index) return false;
  }
  return true;
}

int64_t Partition::Digits(const Axes& axes, int64_t rank) {
  int64_t number = 0;
  for (const Axis& axis : axes) number = number * axis.size + rank / axis.stride % axis.size;
  return number;
}

int64_t Partition::Spread(const Axes& axes, int64_t number) {
  int64_t rank = 0;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    rank += number % axis->size * axis->stride;
    number /= axis->size;
  }
  return rank;
}

int Partition::RankOf(int64_t cell, int64_t replica) const {
  if (boxes_ != nullptr) return boxes_->RankOf(cell, replica);
  return static_cast<int>(first_rank_ + Spread(cell_axes_, cell) + Spread(replica_axes_, replica));
}

Box Partition::BoxOf(const std::vector<int64_t>& shape, int64_t cell) const {
  if (boxes_ != nullptr) return boxes_->box(cell);
  Box box = WholeBox(shape);
  for (const Cut& cut : cuts_) {
    Interval& interval = box[cut.dim];
    const Interval part = Part(interval.size, cut.parts, cell / cut.cell_stride % cut.parts, cut.rule);
    interval = {interval.begin + part.begin, part.size};
  }
  return box;
}

uint64_t Partition::ElementsOf(const std::vector<int64_t>& shape, int64_t cell) const {
  if (cuts_.size() != 1) return Elements(BoxOf(shape, cell));
  uint64_t others = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (static_cast<int>(d) != cuts_[0].dim) others *= static_cast<uint64_t>(shape[d]);
  }
  return others * static_cast<uint64_t>(Part(shape[cuts_[0].dim], cuts_[0].parts, cell, cuts_[0].rule).size);
}

void Partition::ForEachOverlap(const std::vector<int64_t>& shape, const Box& wanted,
                               absl::FunctionRef<void(int64_t, const Box&)> found) const {
  if (Elements(wanted) == 0) return;
  if (boxes_ != nullptr) return boxes_->ForEachOverlap(wanted, found);
  Box box = WholeBox(shape);
  Descend(0, 0, wanted, &box, found);
}

// `box` overlaps `wanted` and is what the cuts before `cut` left; each part that still overlaps goes on.
void Partition::Descend(size_t cut, int64_t cell, const Box& wanted, Box* box,
                        absl::FunctionRef<void(int64_t, const Box&)> found) const {
  if (cut == cuts_.size()) return found(cell, *box);
  const Cut& c = cuts_[cut];
  const Interval whole = (*box)[c.dim];
  const int64_t first = std::max(wanted[c.dim].begin, whole.begin) - whole.begin;
  const int64_t last = std::min(wanted[c.dim].end(), whole.end()) - whole.begin - 1;
  const int64_t last_part = PartHolding(whole.size, c.parts, last, c.rule);
  for (int64_t i = PartHolding(whole.size, c.parts, first, c.rule); i <= last_part; ++i) {
    const Interval part = Part(whole.size, c.parts, i, c.rule);
    (*box)[c.dim] = {whole.begin + part.begin, part.size};
    Descend(cut + 1, cell + i * c.cell_stride, wanted, box, found);
  }
  (*box)[c.dim] = whole;
}

std::string Partition::Key() const {
  if (boxes_ != nullptr) return boxes_->key();
  std::string key;
  for (const Axis& axis : cell_axes_) absl::StrAppend(&key, "/", axis.stride, "%", axis.size);
  for (const Pin& pin : pins_)
    absl::StrAppend(&key, "/", pin.axis.stride, "%", pin.axis.size, "=", pin.index);
  return key;
}

}  // namespace gtrain::sharding

namespace gtrain {

absl::StatusOr<LocalBox> LocalBoxOf(const std::vector<int64_t>& shape, const Sharding& sharding, int rank) {
  int64_t ranks = 1;
  for (const MeshAxis& axis : sharding.mesh) {
    if (axis.size < 1 || axis.size > INT32_MAX / ranks)
      return absl::InvalidArgumentError(absl::StrCat("axis \"", axis.name, "\" has the size ", axis.size));
    ranks *= axis.size;
  }
  const absl::StatusOr<sharding::Partition> partition =
      sharding::Partition::Make(sharding, shape.size(), static_cast<int>(ranks));
  if (!partition.ok()) return partition.status();
  if (rank < 0 || rank >= ranks) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " in a mesh of ", ranks, " ranks"));
  }
  for (int64_t n : shape) {
    if (n < 0) return absl::InvalidArgumentError(absl::StrCat("a dimension of the size ", n));
  }
  LocalBox out{.begin = std::vector<int64_t>(shape.size(), 0),
               .shape = std::vector<int64_t>(shape.size(), 0),
               .holds = partition->Holds(rank)};
  if (!out.holds) return out;
  const sharding::Box box = partition->BoxOf(shape, partition->CellOf(rank));
  for (size_t d = 0; d < box.size(); ++d) {
    out.begin[d] = box[d].begin;
    out.shape[d] = box[d].size;
  }
  return out;
}

std::vector<int64_t> MeshCoordinates(const std::vector<MeshAxis>& mesh, int rank) {
  std::vector<int64_t> coordinates(mesh.size());
  int64_t rest = rank;
  for (size_t i = mesh.size(); i-- > 0;) {
    const int64_t size = std::max<int64_t>(mesh[i].size, 1);
    coordinates[i] = rest % size;
    rest /= size;
  }
  return coordinates;
}

}  // namespace gtrain
