// How a tensor lies on the ranks of a job: a mesh of named axes, and which dimensions are split over which
// axis.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace gtrain {

struct MeshAxis {
  std::string name;  // "dp", "pp", "tp": 1 to 32 of a-z, A-Z, 0-9, _ and -
  int64_t size = 1;
  bool operator==(const MeshAxis&) const = default;
};

// The axes that the mesh of a job file may have. One that it has not is of size 1 to a program.
inline constexpr std::array<const char*, 6> kMeshAxes = {"dp", "pp", "tp", "cp", "ep", "fsdp"};

// How n elements are cut into p parts.
enum class SplitRule : uint8_t {
  kBalanced,  // part i has n / p elements, and one more if i < n % p: 10 over 4 is 3, 3, 2, 2
  kChunk,     // n / p rounded up, until there are none left, as torch.chunk and DTensor do: 3, 3, 3, 1
};

// Dimension `dim` is cut into as many parts as `axis` has coordinates; coordinate i holds part i.
struct Split {
  int dim = 0;
  std::string axis;
  SplitRule rule = SplitRule::kBalanced;
  bool operator==(const Split&) const = default;
};

// The tensor exists only on the ranks with this coordinate: a layer of one pipeline stage.
struct Only {
  std::string axis;
  int64_t index = 0;
  bool operator==(const Only&) const = default;
};

// The ranks are laid out row by row: the last axis varies fastest, so with {dp 4, tp 2} rank 5 is dp 2, tp 1.
// The sizes multiply to the world size. Splits apply in order; a second one of the same dimension cuts the
// part that the first one left. Over axes that are not named the tensor is replicated. No axis twice.
struct Sharding {
  std::vector<MeshAxis> mesh = {};
  std::vector<Split> splits = {};
  std::vector<Only> only = {};
  bool operator==(const Sharding&) const = default;
};

// The part of a tensor that one rank holds, in the tensor's own coordinates.
struct LocalBox {
  std::vector<int64_t> begin;
  std::vector<int64_t> shape;
  bool holds = true;  // false: the tensor is `only` on other ranks, and begin and shape are zeros
  bool operator==(const LocalBox&) const = default;
};

}  // namespace gtrain
