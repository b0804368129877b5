// Dimensions are taken from the innermost outwards. As long as the shared part is the whole width of both
// boxes the run grows; from the first dimension that is narrower on, each further dimension repeats runs at a
// fixed step. Offsets of runs therefore ascend, and finding the run at an offset is one division a dimension.
#include "sharding/overlap.h"

#include <algorithm>

namespace gtrain::sharding {

Overlap Overlap::Of(const Box& from, const Box& to, uint64_t width) {
  Overlap out;
  uint64_t runs = 1, run = width, from_step = width, to_step = width;
  bool together = true;
  for (size_t d = from.size(); d-- > 0;) {
    const int64_t begin = std::max(from[d].begin, to[d].begin);
    const int64_t size = std::min(from[d].end(), to[d].end()) - begin;
    if (size <= 0) return Overlap();
    out.first_.from += static_cast<uint64_t>(begin - from[d].begin) * from_step;
    out.first_.to += static_cast<uint64_t>(begin - to[d].begin) * to_step;
    if (together) {
      run *= static_cast<uint64_t>(size);
    } else if (size > 1) {
      out.dims_.push_back({static_cast<uint64_t>(size), from_step, to_step});
      runs *= static_cast<uint64_t>(size);
    }
    together = together && size == from[d].size && size == to[d].size;
    from_step *= static_cast<uint64_t>(from[d].size);
    to_step *= static_cast<uint64_t>(to[d].size);
  }
  std::reverse(out.dims_.begin(), out.dims_.end());
  out.runs_ = runs;
  out.run_bytes_ = run;
  out.end_ = out.RunAt(runs - 1).from + run;
  return out;
}

Overlap::Run Overlap::RunAt(uint64_t index) const {
  Run run = first_;
  for (auto dim = dims_.rbegin(); dim != dims_.rend(); ++dim) {
    const uint64_t i = index % dim->count;
    run.from += i * dim->from_step;
    run.to += i * dim->to_step;
    index /= dim->count;
  }
  return run;
}

uint64_t Overlap::RunsBefore(uint64_t from_offset) const {
  uint64_t base = first_.from;
  if (runs_ == 0 || from_offset <= base) return 0;
  uint64_t before = 0, inner = runs_;
  for (const Dim& dim : dims_) {
    inner /= dim.count;
    const uint64_t i = std::min(dim.count - 1, (from_offset - 1 - base) / dim.from_step);
    before += i * inner;
    base += i * dim.from_step;
  }
  return before + 1;
}

uint64_t Overlap::FirstRunEndingAfter(uint64_t from_offset) const {
  const uint64_t begun = RunsBefore(from_offset + 1);
  if (begun == 0) return 0;
  return RunAt(begun - 1).from + run_bytes_ > from_offset ? begun - 1 : begun;
}

uint64_t Overlap::BytesIn(uint64_t begin, uint64_t end) const {
  if (begin >= end) return 0;
  const uint64_t first = FirstRunEndingAfter(begin), last = RunsBefore(end);
  if (first >= last) return 0;
  uint64_t bytes = (last - first) * run_bytes_;
  const uint64_t first_begin = RunAt(first).from, last_end = RunAt(last - 1).from + run_bytes_;
  if (first_begin < begin) bytes -= begin - first_begin;
  if (last_end > end) bytes -= last_end - end;
  return bytes;
}

void Overlap::ForEachRun(uint64_t begin, uint64_t end,
                         absl::FunctionRef<void(uint64_t, uint64_t, uint64_t)> visit) const {
  if (begin >= end) return;
  const uint64_t last = RunsBefore(end);
  for (uint64_t i = FirstRunEndingAfter(begin); i < last; ++i) {
    const Run run = RunAt(i);
    const uint64_t from = std::max(run.from, begin);
    visit(from, run.to + (from - run.from), std::min(run.from + run_bytes_, end) - from);
  }
}

}  // namespace gtrain::sharding
