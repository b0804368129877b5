// Owns one mmap. Moves, never copies. Keeps no descriptor; independent of the number of ranks.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"

namespace gtrain::comm {

class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        only_of_(other.only_of_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    Mapping old(std::move(*this));
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    only_of_ = other.only_of_;
    return *this;
  }
  ~Mapping();

  // All of the shared file behind `fd`, which must hold at least `bytes`.
  static absl::StatusOr<Mapping> OfFile(int fd, size_t bytes);
  static absl::StatusOr<Mapping> Private(size_t bytes);

  // Processes that are forked from now on (data loaders) do not have it: what they write by mistake would be
  // in the memory of other ranks, and they would hold it for as long as they live.
  void KeepFromChildren();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(char* data, size_t bytes) : data_(data), bytes_(bytes) {}
  char* data_ = nullptr;
  size_t bytes_ = 0;
  pid_t only_of_ = 0;  // in another process there may be something else by now; 0: in all
};

}  // namespace gtrain::comm
