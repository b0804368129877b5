// Models have thousands of tensors and few ways to cut them, so first it is found out which tensors are cut
// alike, on all ranks: each rank hashes shape, its number and its box of a tensor, and the sums of the hashes
// over all ranks are equal exactly where all boxes are (but for 2^-128). Then one box for each way is told.
#include "checkpoint/engine/boxes.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {
namespace {

using Hash = std::pair<int64_t, int64_t>;

Hash HashOf(const std::vector<int64_t>& shape, int rank, const sharding::Box& box) {
  Xxh3 hash;
  hash.Add(absl::StrCat(absl::StrJoin(shape, ","), " of rank ", rank, " ", sharding::Describe(box)));
  const std::string hex = hash.Hex();
  const auto half = [&](size_t at) {
    return static_cast<int64_t>(std::stoull(hex.substr(at, 16), nullptr, 16));
  };
  return {half(0), half(16)};
}

}  // namespace

absl::Status ShareBoxes(Agreement* agree, absl::Span<const OwnBox> own, std::vector<Registered>* registered) {
  if (own.empty()) return absl::OkStatus();
  std::vector<int64_t> hashes;
  for (const OwnBox& o : own) {
    const Hash hash = HashOf((*registered)[o.registered].tensor.shape, agree->rank(), o.box);
    hashes.push_back(hash.first);
    hashes.push_back(hash.second);
  }
  GT_RETURN_IF_ERROR(agree->Sum(absl::MakeSpan(hashes)));
  std::map<Hash, size_t> way_of;
  std::vector<size_t> first;     // of each way, the first in `own`
  std::vector<size_t> ways;      // of each in `own`
  std::vector<int64_t> numbers;  // this rank's box of each way
  for (size_t i = 0; i < own.size(); ++i) {
    const auto [way, added] = way_of.emplace(Hash{hashes[2 * i], hashes[2 * i + 1]}, first.size());
    ways.push_back(way->second);
    if (!added) continue;
    first.push_back(i);
    for (const sharding::Interval& interval : own[i].box) {
      numbers.push_back(interval.begin);
      numbers.push_back(interval.size);
    }
  }
  const auto world = static_cast<size_t>(agree->size());
  if (first.size() * world > kBoxRanksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensors are cut in ", first.size(), " ways of their own (\"",
                     (*registered)[own[first.back()].registered].tensor.name, "\" is of the last) over ",
                     world, " ranks, more than ", kBoxRanksMax / world, "; use AddSharded for regular cuts"));
  }
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> all, agree->GatherAll(numbers));
  std::vector<std::shared_ptr<const sharding::RankBoxes>> lists;
  size_t at = 0;  // of this way in the numbers of a rank
  for (size_t i : first) {
    const GlobalTensor& tensor = (*registered)[own[i].registered].tensor;
    std::vector<sharding::Box> by_rank(world, sharding::Box(tensor.shape.size()));
    for (size_t rank = 0; rank < world; ++rank) {
      for (size_t d = 0; d < tensor.shape.size(); ++d) {
        const size_t place = rank * numbers.size() + at + 2 * d;
        by_rank[rank][d] = {all[place], all[place + 1]};
      }
    }
    at += 2 * tensor.shape.size();
    auto made = sharding::RankBoxes::Make(tensor.shape, by_rank);
    if (!made.ok())
      return absl::InvalidArgumentError(absl::StrCat("\"", tensor.name, "\": ", made.status().message()));
    lists.push_back(*std::move(made));
  }
  for (size_t i = 0; i < own.size(); ++i) (*registered)[own[i].registered].tensor.boxes = lists[ways[i]];
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
