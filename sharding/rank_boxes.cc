// Boxes are numbered in the order of their corners, so that equal placements give equal numbers on every
// rank. Along one dimension, that in which the fewest boxes meet, they are sorted: both the check and a
// search look only at boxes that meet in it. Disjoint boxes whose elements add up to the tensor's are the
// whole of it.
#include "sharding/rank_boxes.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "sharding/box.h"

namespace gtrain::sharding {
namespace {

// No real cut has more: 100,000 ranks in a cube have 200 million.
constexpr uint64_t kMeetingsMax = 1'000'000'000;

// Pairs of boxes that meet in dimension `d`, twice those that begin there at the same place.
uint64_t Meetings(const std::vector<Box>& boxes, size_t d) {
  std::vector<int64_t> begins;
  for (const Box& box : boxes) begins.push_back(box[d].begin);
  std::sort(begins.begin(), begins.end());
  uint64_t meetings = 0;
  for (const Box& box : boxes) {
    const auto from = std::lower_bound(begins.begin(), begins.end(), box[d].begin);
    const auto to = std::lower_bound(from, begins.end(), box[d].end());
    meetings += static_cast<uint64_t>(to - from) - 1;
  }
  return meetings;
}

}  // namespace

Box WholeBox(const std::vector<int64_t>& shape) {
  Box box;
  for (int64_t n : shape) box.push_back({0, n});
  return box;
}

uint64_t Elements(const Box& box) {
  uint64_t elements = 1;
  for (const Interval& i : box) elements *= static_cast<uint64_t>(i.size);
  return elements;
}

bool Overlaps(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.size(); ++d) {
    if (std::max(a[d].begin, b[d].begin) >= std::min(a[d].end(), b[d].end())) return false;
  }
  return true;
}

std::string Describe(const Box& box) {
  const auto range = [](std::string* out, const Interval& i) { absl::StrAppend(out, i.begin, ":", i.end()); };
  return absl::StrCat("[", absl::StrJoin(box, ",", range), "]");
}

absl::StatusOr<std::shared_ptr<const RankBoxes>> RankBoxes::Make(const std::vector<int64_t>& shape,
                                                                 absl::Span<const Box> by_rank) {
  std::shared_ptr<RankBoxes> out(new RankBoxes());
  out->shape_ = shape;
  const Box whole = WholeBox(shape);
  std::map<Box, std::vector<int32_t>> ranks_of;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const Box& box = by_rank[rank];
    bool inside = box.size() == whole.size(), empty = false;
    for (size_t d = 0; inside && d < box.size(); ++d) {
      inside = box[d].begin >= 0 && box[d].size >= 0 && box[d].begin <= shape[d] &&
               box[d].size <= shape[d] - box[d].begin;
      empty = empty || box[d].size == 0;
    }
    if (!inside) {
      return absl::InvalidArgumentError(absl::StrCat("the box ", Describe(box), " of rank ", rank,
                                                     " is not in the tensor ", Describe(whole)));
    }
    if (!empty) ranks_of[box].push_back(static_cast<int32_t>(rank));
  }
  out->cell_of_.assign(by_rank.size(), -1);
  out->replica_of_.assign(by_rank.size(), 0);
  uint64_t elements = 0;
  for (const auto& [box, ranks] : ranks_of) {
    for (size_t k = 0; k < ranks.size(); ++k) {
      out->cell_of_[static_cast<size_t>(ranks[k])] = static_cast<int32_t>(out->boxes_.size());
      out->replica_of_[static_cast<size_t>(ranks[k])] = static_cast<int32_t>(k);
    }
    out->first_.push_back(static_cast<int32_t>(out->ranks_.size()));
    out->ranks_.insert(out->ranks_.end(), ranks.begin(), ranks.end());
    out->boxes_.push_back(box);
    elements += Elements(box);
  }
  out->first_.push_back(static_cast<int32_t>(out->ranks_.size()));
  out->Sort();
  if (absl::Status disjoint = out->CheckDisjoint(); !disjoint.ok()) return disjoint;
  if (elements != Elements(whole)) {
    return absl::InvalidArgumentError(absl::StrCat("the boxes of ranks 0 to ", by_rank.size() - 1, " hold ",
                                                   elements, " of its ", Elements(whole),
                                                   " elements: together they must be the whole tensor"));
  }
  out->key_ = absl::StrCat("boxes ", absl::StrJoin(out->cell_of_, ","));
  return std::shared_ptr<const RankBoxes>(std::move(out));
}

void RankBoxes::Sort() {
  const size_t dims = shape_.size();
  for (size_t d = 0; d < dims; ++d) {
    const uint64_t meetings = Meetings(boxes_, d);
    if (d > 0 && meetings >= meetings_) continue;
    meetings_ = meetings;
    dim_ = d;
  }
  for (size_t cell = 0; cell < boxes_.size(); ++cell) by_begin_.push_back(static_cast<int32_t>(cell));
  if (dims == 0) return;  // there is one box
  std::stable_sort(by_begin_.begin(), by_begin_.end(),
                   [&](int32_t a, int32_t b) { return box(a)[dim_].begin < box(b)[dim_].begin; });
  for (int32_t cell : by_begin_) {
    const int64_t end = box(cell)[dim_].end();
    end_so_far_.push_back(end_so_far_.empty() ? end : std::max(end, end_so_far_.back()));
  }
}

absl::Status RankBoxes::CheckDisjoint() const {
  if (meetings_ > kMeetingsMax) {
    return absl::InvalidArgumentError(absl::StrCat(meetings_, " pairs of its ", boxes_.size(),
                                                   " boxes meet in each dimension, over ", kMeetingsMax,
                                                   ": cut it more regularly"));
  }
  for (size_t i = 0; i < end_so_far_.size(); ++i) {
    const Box& a = box(by_begin_[i]);
    for (size_t k = i + 1; k < by_begin_.size() && box(by_begin_[k])[dim_].begin < a[dim_].end(); ++k) {
      const Box& b = box(by_begin_[k]);
      if (!Overlaps(a, b)) continue;
      return absl::InvalidArgumentError(absl::StrCat("rank ", RankOf(by_begin_[i], 0), " holds ", Describe(a),
                                                     " and rank ", RankOf(by_begin_[k], 0), " ", Describe(b),
                                                     ": boxes must be equal or have nothing in common"));
    }
  }
  return absl::OkStatus();
}

void RankBoxes::Candidates(const Interval& wanted, size_t* first, size_t* last) const {
  *first = static_cast<size_t>(std::upper_bound(end_so_far_.begin(), end_so_far_.end(), wanted.begin) -
                               end_so_far_.begin());
  *last = static_cast<size_t>(
      std::partition_point(by_begin_.begin(), by_begin_.end(),
                           [&](int32_t cell) { return box(cell)[dim_].begin < wanted.end(); }) -
      by_begin_.begin());
}

void RankBoxes::ForEachOverlap(const Box& wanted, absl::FunctionRef<void(int64_t, const Box&)> found) const {
  if (end_so_far_.empty()) {
    if (!boxes_.empty()) found(0, boxes_[0]);
    return;
  }
  size_t first, last;
  Candidates(wanted[dim_], &first, &last);
  std::vector<int32_t> cells;
  for (size_t i = first; i < last; ++i) {
    if (Overlaps(box(by_begin_[i]), wanted)) cells.push_back(by_begin_[i]);
  }
  std::sort(cells.begin(), cells.end());
  for (int32_t cell : cells) found(cell, box(cell));
}

}  // namespace gtrain::sharding
