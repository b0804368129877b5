// The header is padded with spaces to a multiple of 8, so data_begin is aligned and, because callers put wide
// element types first, so is every tensor. Data has neither holes nor overlaps: that is what the reference
// reader demands, and it leaves no byte of a file that nobody describes.
#include "checkpoint/format/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/format/strict_json.h"
#include "checkpoint/format/tensor.h"

namespace gtrain::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::pair<DType, absl::string_view> kNames[] = {
    {DType::kFloat32, "F32"},   {DType::kFloat64, "F64"},        {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"}, {DType::kInt32, "I32"},          {DType::kInt64, "I64"},
    {DType::kUint8, "U8"},      {DType::kBool, "BOOL"},          {DType::kInt8, "I8"},
    {DType::kInt16, "I16"},     {DType::kUint16, "U16"},         {DType::kUint32, "U32"},
    {DType::kUint64, "U64"},    {DType::kFloat8E4M3, "F8_E4M3"}, {DType::kFloat8E5M2, "F8_E5M2"},
    {DType::kComplex64, "C64"}};

constexpr size_t kLengthBytes = 8;

absl::StatusOr<TensorEntry> ParseTensor(const std::string& name, const ParsedJson& value) {
  if (!IsTensorName(name, kEntryNameBytesMax)) return absl::DataLossError("a tensor with an impossible name");
  const auto fail = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat("tensor \"", name, "\": ", what));
  };
  GT_RETURN_IF_ERROR(CheckFields(value, {"dtype", "shape", "data_offsets"}));
  GT_ASSIGN_OR_RETURN(const std::string dtype_name, GetString(value, "dtype", 16));
  const std::optional<DType> dtype = ParseDType(dtype_name);
  if (!dtype) return fail("unknown dtype");
  TensorEntry entry{.name = name, .dtype = *dtype};
  GT_ASSIGN_OR_RETURN(const ParsedJson* shape, GetArray(value, "shape", kDimsMax));
  for (const ParsedJson& dim : *shape) {
    if (!dim.is_number_unsigned() || dim.get<uint64_t>() > kTensorBytesMax) return fail("impossible shape");
    entry.shape.push_back(dim.get<int64_t>());
  }
  GT_ASSIGN_OR_RETURN(const ParsedJson* offsets, GetArray(value, "data_offsets", 2));
  if (offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() || !(*offsets)[1].is_number_unsigned()) {
    return fail("data_offsets is not a pair of offsets");
  }
  entry.begin = (*offsets)[0].get<uint64_t>();
  entry.end = (*offsets)[1].get<uint64_t>();
  const std::optional<uint64_t> count = ElementCount(entry.shape, entry.dtype);
  if (!count || entry.begin > entry.end || entry.end - entry.begin != *count * DTypeSize(entry.dtype)) {
    return fail("its bytes do not match its shape");
  }
  return entry;
}

absl::Status CheckMetadata(const ParsedJson& value) {
  if (!value.is_object()) return absl::DataLossError("__metadata__ is not an object");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) return absl::DataLossError("__metadata__ holds something that is not a string");
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view DTypeName(DType dtype) {
  for (const auto& [value, name] : kNames) {
    if (value == dtype) return name;
  }
  GT_CHECK(false);
}

std::optional<DType> ParseDType(absl::string_view name) {
  for (const auto& [value, text] : kNames) {
    if (text == name) return value;
  }
  return std::nullopt;
}

bool IsTensorName(absl::string_view name, size_t bytes_max) {
  if (name.empty() || name.size() > bytes_max || name == "__metadata__") return false;
  return std::all_of(name.begin(), name.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
}

std::string PrintShardHeader(const std::vector<TensorEntry>& tensors, size_t alignment) {
  // Entry by entry: an ordered object looks through all its names to add one.
  std::string json = R"({"__metadata__":{"format":"gtrain"})";
  absl::flat_hash_set<absl::string_view> names;
  uint64_t expected = 0;
  for (const TensorEntry& t : tensors) {
    GT_CHECK(t.begin == expected && t.end >= t.begin && names.insert(t.name).second);
    expected = t.end;
    const Json entry = {{"dtype", std::string(DTypeName(t.dtype))},
                        {"shape", t.shape},
                        {"data_offsets", std::vector<uint64_t>{t.begin, t.end}}};
    absl::StrAppend(&json, ",", Json(t.name).dump(), ":", entry.dump());
  }
  json.push_back('}');
  json.append((alignment - (kLengthBytes + json.size()) % alignment) % alignment, ' ');
  std::string length;
  for (size_t i = 0; i < kLengthBytes; ++i) length.push_back(static_cast<char>(json.size() >> (8 * i)));
  return absl::StrCat(length, json);
}

absl::StatusOr<uint64_t> HeaderBytes(absl::string_view prefix, uint64_t file_bytes) {
  if (file_bytes < kLengthBytes || prefix.size() < kLengthBytes) {
    return absl::DataLossError("shorter than the 8 bytes of the header length");
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{static_cast<uint8_t>(prefix[i])} << (8 * i);
  if (length > kHeaderBytesMax) {
    return absl::DataLossError(
        absl::StrCat("header of ", length, " bytes, over the limit of ", kHeaderBytesMax));
  }
  if (length > file_bytes - kLengthBytes)
    return absl::DataLossError("the header ends past the end of the file");
  return kLengthBytes + length;
}

bool LiesBefore(const TensorEntry& a, const TensorEntry& b) {
  return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
}

absl::StatusOr<ShardHeader> ParseShardHeader(absl::string_view prefix, uint64_t file_bytes) {
  GT_ASSIGN_OR_RETURN(const uint64_t data_begin, HeaderBytes(prefix, file_bytes));
  if (prefix.size() < data_begin) return absl::ResourceExhaustedError("more of the header is needed");
  if (data_begin % kLengthBytes != 0) return absl::DataLossError("the data is not aligned to 8 bytes");
  GT_ASSIGN_OR_RETURN(
      const ParsedJson object,
      ParseStrictJson(prefix.substr(kLengthBytes, data_begin - kLengthBytes), kHeaderBytesMax));
  if (object.size() > kTensorsMax + 1) return absl::DataLossError("too many tensors");
  ShardHeader header{.data_begin = data_begin, .file_bytes = file_bytes};
  for (const auto& [name, value] : object.items()) {
    if (name == "__metadata__") {
      GT_RETURN_IF_ERROR(CheckMetadata(value));
      continue;
    }
    GT_ASSIGN_OR_RETURN(TensorEntry entry, ParseTensor(name, value));
    header.tensors.push_back(std::move(entry));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), &LiesBefore);
  uint64_t expected = 0;
  for (const TensorEntry& t : header.tensors) {
    if (t.begin != expected) {
      return absl::DataLossError(absl::StrCat("tensor \"", t.name, "\": a hole or an overlap before it"));
    }
    expected = t.end;
  }
  if (expected != file_bytes - data_begin) {
    return absl::DataLossError("the tensors do not cover the file to its end");
  }
  return header;
}

}  // namespace gtrain::ckpt
