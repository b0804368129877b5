// How many ranks the mesh of a job file has.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "job/spec/job_spec.h"

namespace gtrain::spec {

struct MeshShape {
  int64_t ranks = 1;        // of the axes whose size is known
  int64_t model_ranks = 1;  // that one copy of the model is spread over: all axes but dp
  // Copies of the model that train on samples of their own; nullopt: they follow the number of ranks.
  std::optional<int> data_ranks = 1;
};

inline MeshShape ShapeOf(const std::vector<MeshAxis>& mesh) {
  constexpr int64_t kEnough = int64_t{1} << 40;  // far above all that is allowed, and no overflow behind it
  MeshShape shape;
  for (const MeshAxis& axis : mesh) {
    const bool data = axis.name == kDataAxis;
    if (data) shape.data_ranks = axis.size;
    if (axis.size && shape.ranks < kEnough) shape.ranks *= *axis.size;
    if (axis.size && !data && shape.model_ranks < kEnough) shape.model_ranks *= *axis.size;
  }
  return shape;
}

// Whether ranks lie along that axis: without a mesh they are data-parallel.
inline bool HasAxis(const std::vector<MeshAxis>& mesh, const std::string& name) {
  if (mesh.empty()) return name == kDataAxis;
  return std::any_of(mesh.begin(), mesh.end(), [&](const MeshAxis& axis) { return axis.name == name; });
}

}  // namespace gtrain::spec
