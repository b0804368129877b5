#include "actors/exec/news.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace gtrain::actors {

void News::Add(std::string text) {
  MutexLock lock(&mutex_);
  if (waiting_.size() < kAtOnce) return waiting_.push_back(std::move(text));
  ++left_out_;
}

std::optional<std::string> News::Take() {
  MutexLock lock(&mutex_);
  if ((waiting_.empty() && left_out_ == 0) || !rate_.Take(clock_.Now())) return std::nullopt;
  if (waiting_.empty())
    return absl::StrCat(std::exchange(left_out_, 0), " more actors threw or were lost with their process");
  std::string text = std::move(waiting_.front());
  waiting_.pop_front();
  return text;
}

}  // namespace gtrain::actors
