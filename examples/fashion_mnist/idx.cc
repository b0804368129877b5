// An IDX file is a magic number {0, 0, type, dimensions}, one big-endian 32-bit size a
// dimension, then the elements in row-major order. Only unsigned bytes (type 8) occur here.
#include "examples/fashion_mnist/idx.h"

#include <zlib.h>

#include <algorithm>
#include <memory>

namespace gtrain::examples {
namespace {

constexpr uint8_t kUnsignedByte = 8;
constexpr int64_t kElementsMax = int64_t{1} << 31;  // a damaged header must not ask for all memory

struct CloseGz {
  void operator()(gzFile_s* file) const { gzclose(file); }
};
using GzFile = std::unique_ptr<gzFile_s, CloseGz>;

Status Damaged(const std::string& path, const std::string& why) {
  return Status(StatusCode::kDataLoss, path + ": " + why);
}

Status ReadExactly(gzFile_s* file, const std::string& path, uint8_t* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    unsigned chunk = static_cast<unsigned>(std::min<size_t>(bytes - done, 1 << 24));
    int n = gzread(file, out + done, chunk);
    if (n < 0) {
      int code = 0;
      return Damaged(path, gzerror(file, &code));
    }
    if (n == 0)
      return Damaged(path, "ends after " + std::to_string(done) + " of " + std::to_string(bytes) + " bytes");
    done += static_cast<size_t>(n);
  }
  return {};
}

}  // namespace

Result<IdxArray> ReadIdxGz(const std::string& path, size_t want_dims) {
  GzFile file(gzopen(path.c_str(), "rb"));
  if (file == nullptr) {
    return Status(StatusCode::kNotFound,
                  "cannot open " + path + ": install dataset-fashion-mnist or pass --data DIR");
  }
  uint8_t magic[4];
  if (Status s = ReadExactly(file.get(), path, magic, sizeof(magic)); !s.ok()) return s;
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != kUnsignedByte || magic[3] != want_dims) {
    return Damaged(path,
                   "not an IDX file of unsigned bytes with " + std::to_string(want_dims) + " dimension(s)");
  }
  IdxArray array;
  int64_t elements = 1;
  for (size_t d = 0; d < want_dims; ++d) {
    uint8_t b[4];
    if (Status s = ReadExactly(file.get(), path, b, sizeof(b)); !s.ok()) return s;
    int64_t size = int64_t{b[0]} << 24 | int64_t{b[1]} << 16 | int64_t{b[2]} << 8 | int64_t{b[3]};
    if (size == 0 || size > kElementsMax / elements) {
      return Damaged(path,
                     "dimension " + std::to_string(d) + " has the impossible size " + std::to_string(size));
    }
    array.dims.push_back(size);
    elements *= size;
  }
  array.data.resize(static_cast<size_t>(elements));
  if (Status s = ReadExactly(file.get(), path, array.data.data(), array.data.size()); !s.ok()) return s;
  return array;
}

}  // namespace gtrain::examples
