// Each piece is hashed first, which brings it into the cache, and then copied from there with stores that go
// past the cache: memory is read once and written once, as a large memcpy does it. The hash is that of the
// source, so a copy that went wrong has another one.
#include "checkpoint/engine/snapshot.h"

#include <algorithm>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {
namespace {

constexpr uint64_t kPieceBytes = 4 << 10;  // stays in the smallest cache until it is copied
constexpr size_t kChunksAtOnce = 1;        // what one thread takes: the others wait for the last one

// memcpy without reading what is overwritten.
void CopyPast(char* to, const char* from, uint64_t bytes) {
#if defined(__SSE2__)
  constexpr uint64_t kLine = 64;
  const uint64_t askew = std::min<uint64_t>((16 - reinterpret_cast<uintptr_t>(to) % 16) % 16, bytes);
  std::memcpy(to, from, askew);
  to += askew, from += askew, bytes -= askew;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    for (uint64_t i = 0; i < kLine; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

void Snapshot::SetSources(absl::string_view header, const std::vector<Source>& sources) {
  MutexLock lock(&mu_);
  header_ = std::string(header);
  bytes_ = 0;
  sources_.clear();
  chunks_.clear();
  uint64_t at = header_.size();  // in the file
  const auto begin_chunk = [&] { chunks_.push_back({sources_.size(), sources_.size(), bytes_}); };
  for (Source source : sources) {
    while (source.bytes > 0) {
      if (chunks_.empty() || at % kChunkBytes == 0) begin_chunk();
      const uint64_t bytes = std::min(source.bytes, kChunkBytes - at % kChunkBytes);
      sources_.push_back({source.from, bytes});
      chunks_.back().last = sources_.size();
      at += bytes;
      bytes_ += bytes;
      source.from += bytes;
      source.bytes -= bytes;
    }
  }
  hashes_.assign((at + kChunkBytes - 1) / kChunkBytes, {});
  // A header of many tensors may fill chunks of its own.
  for (size_t i = 0; i + chunks_.size() < hashes_.size(); ++i) {
    hashes_[i] = Xxh3Bytes(absl::string_view(header_).substr(i * kChunkBytes, kChunkBytes));
  }
  taken_ = copied_ = chunks_.size();
}

void Snapshot::Begin(char* to) {
  MutexLock lock(&mu_);
  to_ = to;
  taken_ = copied_ = 0;
}

void Snapshot::CopyChunk(size_t index, char* to) {
  const Chunk& chunk = chunks_[index];
  const size_t of_file = hashes_.size() - chunks_.size() + index;
  Xxh3 hash;
  if (index == 0) hash.Add(absl::string_view(header_).substr(of_file * kChunkBytes));
  to += chunk.offset;
  for (size_t i = chunk.first; i < chunk.last; ++i) {
    for (uint64_t at = 0; at < sources_[i].bytes;) {
      const uint64_t bytes = std::min(kPieceBytes, sources_[i].bytes - at);
      hash.Add({sources_[i].from + at, bytes});
      CopyPast(to, sources_[i].from + at, bytes);
      to += bytes;
      at += bytes;
    }
  }
#if defined(__SSE2__)
  _mm_sfence();  // the stores are there before anybody is told so
#endif
  hashes_[of_file] = hash.Bytes();
}

void Snapshot::Finish() {
  MutexLock lock(&mu_);
  while (taken_ < chunks_.size()) {
    const size_t first = taken_, last = std::min(first + kChunksAtOnce, chunks_.size());
    taken_ = last;
    char* const to = to_;
    mu_.Unlock();
    for (size_t i = first; i < last; ++i) CopyChunk(i, to);
    mu_.Lock();
    copied_ += last - first;
  }
  mu_.Await([this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return copied_ == chunks_.size(); });
}

}  // namespace gtrain::ckpt
