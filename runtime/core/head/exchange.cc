#include "runtime/core/head/exchange.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gtrain::core {

absl::StatusOr<Exchange::Progress> Exchange::Add(const ExchangePart& part) {
  for (const Done& done : done_) {
    if (done.sequence == part.sequence) return Progress{&done.table, false, true};
  }
  if (!open_.contains(part.sequence) && open_.size() == kOpenMax) {
    return absl::ResourceExhaustedError(absl::StrCat("more than ", kOpenMax, " open exchanges"));
  }
  Open& open = open_[part.sequence];
  const size_t before = open.blobs.size();
  for (const auto& [rank, blob] : part.blobs) {
    if (rank < 0 || rank >= world_) {
      return absl::InvalidArgumentError(
          absl::StrCat("exchange part of rank ", rank, " in a world of ", world_));
    }
    if (const auto it = open.blobs.find(rank); it != open.blobs.end()) {
      if (it->second == blob) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " sent two different blobs for exchange ", part.sequence));
    }
    if (const size_t most = std::min(kTableBytesMax, bytes_max_); open.bytes + blob.size() > most)
      return absl::ResourceExhaustedError(absl::StrCat("the blobs of one exchange exceed ", most, " bytes"));
    if (bytes_ + blob.size() > bytes_max_) {
      return absl::ResourceExhaustedError(absl::StrCat("exchanged blobs exceed ", bytes_max_, " bytes"));
    }
    open.bytes += blob.size();
    bytes_ += blob.size();
    open.blobs.emplace(rank, blob);
  }
  if (static_cast<int>(open.blobs.size()) < world_)
    return Progress{nullptr, false, open.blobs.size() == before};
  Done done{part.sequence, {}};
  for (auto& [rank, blob] : open.blobs) done.table.push_back(std::move(blob));
  open_.erase(part.sequence);
  done_.push_back(std::move(done));
  if (done_.size() > kDoneKept) {
    for (const std::string& blob : done_.front().table) bytes_ -= blob.size();
    done_.pop_front();
  }
  return Progress{&done_.back().table, true};
}

std::vector<int> Exchange::Missing(uint64_t sequence) const {
  std::vector<int> missing;
  const auto open = open_.find(sequence);
  if (open == open_.end()) return missing;
  for (int rank = 0; rank < world_; ++rank) {
    if (!open->second.blobs.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

}  // namespace gtrain::core
