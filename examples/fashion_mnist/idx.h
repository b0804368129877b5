// Reader of gzip-compressed IDX files, the format of the MNIST family.
#pragma once
#include <gtrain/status.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gtrain::examples {

// Unsigned bytes of shape `dims`, the first dimension counting samples.
struct IdxArray {
  std::vector<int64_t> dims;
  std::vector<uint8_t> data;
};

// Reads and checks the whole file. `want_dims` is 1 for labels and 3 for images.
Result<IdxArray> ReadIdxGz(const std::string& path, size_t want_dims);

}  // namespace gtrain::examples
