// An IDX file is a magic number {0, 0, type, dimensions}, one big-endian 32-bit size a
// dimension, then the elements in row-major order. Only unsigned bytes (type 8) occur here.
#include "examples/fashion_mnist/idx.h"

#include <zlib.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"

namespace gtrain::examples {
namespace {

constexpr uint8_t kUnsignedByte = 8;
constexpr int64_t kElementsMax = int64_t{1} << 31;  // a damaged header must not ask for all memory

struct CloseGz {
  void operator()(gzFile_s* file) const { gzclose(file); }
};
using GzFile = std::unique_ptr<gzFile_s, CloseGz>;

absl::Status ReadExactly(gzFile_s* file, const std::string& path, uint8_t* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    unsigned chunk = static_cast<unsigned>(std::min<size_t>(bytes - done, 1 << 24));
    int n = gzread(file, out + done, chunk);
    if (n < 0) {
      int code = 0;
      return absl::DataLossError(absl::StrCat(path, ": ", gzerror(file, &code)));
    }
    if (n == 0)
      return absl::DataLossError(absl::StrCat(path, ": ends after ", done, " of ", bytes, " bytes"));
    done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<IdxArray> ReadIdxGz(const std::string& path, size_t want_dims) {
  GzFile file(gzopen(path.c_str(), "rb"));
  if (file == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("cannot open ", path, ": install dataset-fashion-mnist or pass --data DIR"));
  }
  uint8_t magic[4];
  if (absl::Status s = ReadExactly(file.get(), path, magic, sizeof(magic)); !s.ok()) return s;
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != kUnsignedByte || magic[3] != want_dims) {
    return absl::DataLossError(
        absl::StrCat(path, ": not an IDX file of unsigned bytes with ", want_dims, " dimension(s)"));
  }
  IdxArray array;
  int64_t elements = 1;
  for (size_t d = 0; d < want_dims; ++d) {
    uint8_t b[4];
    if (absl::Status s = ReadExactly(file.get(), path, b, sizeof(b)); !s.ok()) return s;
    int64_t size = int64_t{b[0]} << 24 | int64_t{b[1]} << 16 | int64_t{b[2]} << 8 | int64_t{b[3]};
    if (size == 0 || size > kElementsMax / elements) {
      return absl::DataLossError(absl::StrCat(path, ": dimension ", d, " has the impossible size ", size));
    }
    array.dims.push_back(size);
    elements *= size;
  }
  array.data.resize(static_cast<size_t>(elements));
  if (absl::Status s = ReadExactly(file.get(), path, array.data.data(), array.data.size()); !s.ok()) return s;
  return array;
}

}  // namespace gtrain::examples
