// The mesh of a job and what its ranks send along each axis in a step. PURE.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::topology {

// Who sends to whom along an axis: rings of collectives, the stages of a pipeline, everybody to everybody.
enum class Pattern { kRing, kChain, kAllToAll };

struct Axis {
  std::string name;
  int size = 1;
  Pattern pattern = Pattern::kRing;
  // GB that a rank sends a step: on the edge to the next of its ring; half of it to each neighbour of its
  // chain; to all others together.
  double gb = 0;
};

// Ranks lie row by row, the last axis varies fastest, as in the job file.
struct Mesh {
  std::vector<Axis> axes;

  int64_t ranks() const {
    int64_t count = 1;
    for (const Axis& axis : axes) count *= axis.size;
    return count;
  }
  int64_t StrideOf(size_t axis) const {
    int64_t stride = 1;
    for (size_t i = axis + 1; i < axes.size(); ++i) stride *= axes[i].size;
    return stride;
  }
};

// The slots with coordinates shifted along each axis, so that rank 0 is where `rank` was. Rings and exchanges
// of all with all cost the same as before. What comes behind the ranks stays.
inline std::vector<int32_t> Shifted(const Mesh& mesh, const std::vector<int32_t>& slots, int64_t rank) {
  std::vector<int32_t> shifted = slots;
  for (int64_t to = 0; to < mesh.ranks(); ++to) {
    int64_t from = 0;
    for (size_t axis = 0; axis < mesh.axes.size(); ++axis) {
      const int64_t stride = mesh.StrideOf(axis), size = mesh.axes[axis].size;
      from += (to / stride % size + rank / stride % size) % size * stride;
    }
    shifted[to] = slots[from];
  }
  return shifted;
}

// An axis of the job file with the traffic assumed for it: tp 4 GB a step, cp 2, ep 1, fsdp 0.8, dp 0.4, pp
// 0.08, which is what a model of some billion parameters sends. Only their ratios decide a placement.
inline Axis AxisNamed(absl::string_view name, int size) {
  const Pattern pattern = name == "pp" ? Pattern::kChain : name == "ep" ? Pattern::kAllToAll : Pattern::kRing;
  const double gb = name == "tp"     ? 4
                    : name == "cp"   ? 2
                    : name == "ep"   ? 1
                    : name == "fsdp" ? 0.8
                    : name == "pp"   ? 0.08
                                     : 0.4;
  return {std::string(name), size, pattern, gb};
}

// GB a step that leave a domain along one axis, for each rank in it, when the domain holds no more than
// `room` ranks and cuts lines of that axis into pieces of `extent` ranks on average: fixed + per_piece /
// extent. Exact for pieces of equal size; for others a lower bound (place/bound.cc has the proof).
struct CutLaw {
  double fixed = 0, per_piece = 0;
  double extent_max = 1;
  double At(double extent) const { return fixed + per_piece / extent; }
};

inline CutLaw CutLawOf(const Axis& axis, double room) {
  const double size = axis.size, most = std::min(size, room);
  if (axis.size <= 1) return {};
  switch (axis.pattern) {
    case Pattern::kChain:
      return {-axis.gb / size, axis.gb, most};
    case Pattern::kAllToAll:
      return {axis.gb * (size - most - 1) / (size - 1), axis.gb * most / (size - 1), most};
    case Pattern::kRing:
      break;
  }
  if (room < size) return {0, axis.gb, most};
  return {-axis.gb / (size - 1), axis.gb * size / (size - 1), most};
}

}  // namespace gtrain::topology
