#include "elastic/plan/greeting.h"

#include <cstddef>

namespace gtrain::elastic {

GreetingWords WriteGreeting(const Greeting& g) {
  const auto copy = [&](size_t i) { return i < g.state.copies.size() ? g.state.copies[i] : PartCopy(); };
  return {g.state.applied,
          g.state.held,
          g.state.as_made ? 1 : 0,
          g.state.undo,
          copy(0).cell,
          copy(0).step,
          copy(1).cell,
          copy(1).step,
          g.state.line,
          g.computed.share,
          g.computed.shares,
          g.save ? g.save->step : 0,
          g.save ? g.save->milliseconds_ago : -1,
          g.machine,
          g.stop ? 1 : 0,
          g.carries_over ? 1 : 0,
          static_cast<int64_t>(g.likeness.program),
          static_cast<int64_t>(g.likeness.gradients),
          static_cast<int64_t>(g.likeness.machine)};
}

Greeting ReadGreeting(const GreetingWords& w) {
  const auto copy = [&](size_t at) { return PartCopy{static_cast<int>(w[at]), w[at + 1]}; };
  Greeting g;
  g.state = {w[0], w[1], w[2] != 0, w[3], {copy(4), copy(6)}, w[8]};
  g.computed = {static_cast<int>(w[9]), static_cast<int>(w[10])};
  if (w[12] >= 0) g.save = Greeting::Save{w[11], w[12]};
  g.machine = static_cast<int>(w[13]);
  g.stop = w[14] != 0;
  g.carries_over = w[15] != 0;
  g.likeness = {static_cast<uint64_t>(w[16]), static_cast<uint64_t>(w[17]), static_cast<uint64_t>(w[18])};
  return g;
}

}  // namespace gtrain::elastic
