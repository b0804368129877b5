#include "checkpoint/engine/snapshot.h"

#include <algorithm>
#include <cstring>

namespace gtrain::ckpt {
namespace {

// Large enough that memcpy writes past the caches (a tenth faster), small enough to share and to wait for.
constexpr uint64_t kBlockBytes = 32 << 20;

}  // namespace

void Snapshot::SetSources(const std::vector<Source>& sources) {
  MutexLock lock(&mu_);
  bytes_ = 0;
  sources_.clear();
  blocks_.clear();
  uint64_t filled = kBlockBytes;  // of the last block
  for (Source source : sources) {
    while (source.bytes > 0) {
      if (filled == kBlockBytes) {
        blocks_.push_back({sources_.size(), sources_.size(), bytes_});
        filled = 0;
      }
      const uint64_t bytes = std::min(source.bytes, kBlockBytes - filled);
      sources_.push_back({source.from, bytes});
      blocks_.back().last = sources_.size();
      filled += bytes;
      bytes_ += bytes;
      source.from += bytes;
      source.bytes -= bytes;
    }
  }
  taken_ = copied_ = blocks_.size();
}

void Snapshot::Begin(char* to) {
  MutexLock lock(&mu_);
  to_ = to;
  taken_ = copied_ = 0;
}

void Snapshot::CopyBlock(const Block& block, char* to) const {
  to += block.offset;
  for (size_t i = block.first; i < block.last; ++i) {
    std::memcpy(to, sources_[i].from, sources_[i].bytes);
    to += sources_[i].bytes;
  }
}

void Snapshot::Finish() {
  MutexLock lock(&mu_);
  while (taken_ < blocks_.size()) {
    const Block& block = blocks_[taken_++];
    char* const to = to_;
    mu_.Unlock();
    CopyBlock(block, to);
    mu_.Lock();
    ++copied_;
  }
  mu_.Await([this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return copied_ == blocks_.size(); });
}

}  // namespace gtrain::ckpt
