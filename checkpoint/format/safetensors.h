// The bytes of a shard: 8 bytes little-endian header length, a JSON header, data. As other programs read it
// (https://huggingface.co/docs/safetensors), with stricter limits on what we accept.
#pragma once
#include <gtrain/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

inline constexpr size_t kHeaderAlignment = 8;
inline constexpr size_t kHeaderBytesMax = 64 << 20;
inline constexpr size_t kTensorsMax = 1'000'000;  // in one file
inline constexpr size_t kTensorNameBytesMax = 512;
inline constexpr size_t kEntryNameBytesMax = 2048;  // in a file, with what says which part it is
inline constexpr size_t kDimsMax = 16;
inline constexpr uint64_t kTensorBytesMax = uint64_t{1} << 62;

// "F32", "BF16", "U8" ...
absl::string_view DTypeName(DType dtype);
std::optional<DType> ParseDType(absl::string_view name);

// Printable ASCII, 1 to `bytes_max` bytes, not "__metadata__": safe in every header, log and file.
bool IsTensorName(absl::string_view name, size_t bytes_max = kTensorNameBytesMax);

struct TensorEntry {
  std::string name;
  DType dtype = DType::kUint8;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes from the start of the data, not of the file
  uint64_t end = 0;
  bool operator==(const TensorEntry&) const = default;
};

// Orders tensors by their data; those without any by name.
bool LiesBefore(const TensorEntry& a, const TensorEntry& b);

struct ShardHeader {
  std::vector<TensorEntry> tensors;  // as LiesBefore has them
  uint64_t data_begin = 0;           // offset of the data in the file; a multiple of 8
  uint64_t file_bytes = 0;
  bool operator==(const ShardHeader&) const = default;
};

// Length field and header of a shard that holds `tensors` one after the other, in this order. Their begin and
// end must already say so (GT_CHECK). Its length is a multiple of `alignment`, which is one of 8. Equal input
// gives equal bytes.
std::string PrintShardHeader(const std::vector<TensorEntry>& tensors, size_t alignment = kHeaderAlignment);

// Parses the header from the first bytes of a file of `file_bytes`. DataLoss for anything that is not exactly
// a valid shard: names twice, unknown types, shapes that do not match their bytes, holes, overlaps, bytes
// left over. ResourceExhausted: `prefix` ends inside the header; read HeaderBytes() of it and call again.
// Costs n log n for n tensors.
absl::StatusOr<ShardHeader> ParseShardHeader(absl::string_view prefix, uint64_t file_bytes);

// 8 + length of the header, from the first 8 bytes; DataLoss over the limit or past the end of the file.
absl::StatusOr<uint64_t> HeaderBytes(absl::string_view prefix, uint64_t file_bytes);

}  // namespace gtrain::ckpt
