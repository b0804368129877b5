#include "tests/sim/kernel.h"

#include <algorithm>
#include <cstdio>
#include <functional>

namespace gtrain::sim {

void Kernel::At(int64_t when, absl::AnyInvocable<void()> run) {
  heap_.push_back({std::max(when, now_), order_++, std::move(run)});
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

bool Kernel::RunOne(int64_t until) {
  if (heap_.empty() || heap_.front().at > until) {
    now_ = std::max(now_, until);
    return false;
  }
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  Event event = std::move(heap_.back());
  heap_.pop_back();
  now_ = event.at;
  ++events_;
  event.run();
  return true;
}

void Kernel::Keep(std::string line) {
  line = absl::StrFormat("%10.4f  %s", static_cast<double>(now_) / 1e9, line);
  if (echo_) std::printf("%s\n", line.c_str());
  trace_.push_back(std::move(line));
  if (trace_.size() > trace_lines_) trace_.pop_front();
}

void Kernel::Fail(std::string id, std::string text) {
  Note(0xFA11, "VIOLATION ", id, ": ", text);
  if (violations_.size() < 8) violations_.push_back({std::move(id), std::move(text), now_});
}

}  // namespace gtrain::sim
