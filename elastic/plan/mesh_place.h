// What the coordinates of a rank mean to a training run: which part of the model it holds, which samples it
// trains, and with whom it shares either. PURE.
//
// Along `dp` and `fsdp` ranks train different samples. Along every axis but `dp` they hold different parts
// of the model: ranks that differ along `dp` alone are copies of each other, of one cell.
#pragma once
#include <gtrain/sharding.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::elastic {

struct MeshPlace {
  int cell = 0, cells = 1;    // which part of the model
  int copy = 0, copies = 1;   // which of those that hold it: the coordinate along dp
  int share = 0, shares = 1;  // which part of each batch
  // Of the ranks that train the same samples the last one: it says for all what the loss is.
  bool speaks = true;
  bool operator==(const MeshPlace&) const = default;
};

// `rank` of the product of the sizes.
MeshPlace PlaceIn(const std::vector<MeshAxis>& mesh, int rank);

// A number that is equal on the ranks which differ from `rank` along `axis` alone, and on no others. Without
// such an axis: its own of each rank.
int GroupAlong(const std::vector<MeshAxis>& mesh, int rank, absl::string_view axis);

// OK if a job file may have such an axis.
absl::Status CheckAxis(const std::string& axis);

// The mesh with each axis that the cut names and that it lacks, of size 1: a program for tensor-parallel
// ranks runs by hand, too. InvalidArgument: there is no such axis.
absl::StatusOr<std::vector<MeshAxis>> MeshWith(std::vector<MeshAxis> mesh, const Sharding& cut);

// The part of a tensor of `shape` that this rank has. InvalidArgument: the cut names dp, whose ranks come and
// go with a copy each, or has no sense.
absl::StatusOr<LocalBox> LocalPartOf(const std::vector<MeshAxis>& mesh, int rank,
                                     const std::vector<int64_t>& shape, const Sharding& cut);

}  // namespace gtrain::elastic
