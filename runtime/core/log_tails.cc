#include "runtime/core/log_tails.h"

namespace gtrain::core {

void LogTails::Put(LogTail tail) {
  if (tail.text.size() > each_bytes_max_) tail.text.erase(0, tail.text.size() - each_bytes_max_);
  const Key key{tail.job, tail.generation, tail.rank, tail.is_stderr};
  if (const auto it = index_.find(key); it != index_.end()) {
    bytes_ -= it->second->second.text.size();
    by_age_.erase(it->second);
    index_.erase(it);
  }
  bytes_ += tail.text.size();
  by_age_.emplace_back(key, std::move(tail));
  index_[key] = std::prev(by_age_.end());
  while (bytes_ > total_bytes_max_ && by_age_.size() > 1) {
    bytes_ -= by_age_.front().second.text.size();
    index_.erase(by_age_.front().first);
    by_age_.pop_front();
  }
}

const LogTail* LogTails::Find(const JobId& job, Generation generation, int rank, bool is_stderr) const {
  const auto it = index_.find(Key{job, generation, rank, is_stderr});
  return it == index_.end() ? nullptr : &it->second->second;
}

}  // namespace gtrain::core
