#include "actors/values/values.h"

#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#define MSGPACK_NO_BOOST
#include <msgpack.hpp>

namespace gtrain::actors {
namespace {

constexpr size_t kSizeMax = std::numeric_limits<uint32_t>::max();

absl::Status Bad(const char* why) {
  return absl::DataLossError(absl::StrCat("these bytes are no value: ", why));
}

// Takes one value, and of an array or a map its head: it stops before the first of what is inside.
class TakeOne : public msgpack::null_visitor {
 public:
  explicit TakeOne(Value* out) : out_(*out) {}

  bool visit_nil() { return true; }
  bool visit_boolean(bool value) {
    out_.kind = ValueKind::kBool;
    out_.integer = value ? 1 : 0;
    return true;
  }
  bool visit_positive_integer(uint64_t value) {
    out_.kind = ValueKind::kUint;
    out_.natural = value;
    return true;
  }
  bool visit_negative_integer(int64_t value) {
    if (value >= 0) return visit_positive_integer(static_cast<uint64_t>(value));  // packed as signed
    out_.kind = ValueKind::kInt;
    out_.integer = value;
    return true;
  }
  bool visit_float32(float value) { return visit_float64(value); }
  bool visit_float64(double value) {
    out_.kind = ValueKind::kFloat;
    out_.number = value;
    return true;
  }
  bool visit_str(const char* data, uint32_t size) { return Bytes(ValueKind::kString, data, size); }
  bool visit_bin(const char* data, uint32_t size) { return Bytes(ValueKind::kBytes, data, size); }
  bool visit_ext(const char* data, uint32_t size) {  // its type comes first
    return Bytes(ValueKind::kNumbers, data, size);
  }
  bool start_array(uint32_t count) { return Many(ValueKind::kArray, count); }
  bool start_map(uint32_t count) { return Many(ValueKind::kMap, count); }
  bool start_array_item() { return false; }
  bool start_map_key() { return false; }
  void parse_error(size_t /*at*/, size_t /*end*/) { whole_ = false; }
  void insufficient_bytes(size_t /*at*/, size_t /*end*/) { whole_ = false; }

  bool whole() const { return whole_; }

 private:
  bool Bytes(ValueKind kind, const char* data, uint32_t size) {
    out_.kind = kind;
    out_.bytes = {data, size};
    return true;
  }
  bool Many(ValueKind kind, uint32_t count) {
    out_.kind = kind;
    out_.count = count;
    return true;
  }

  Value& out_;
  bool whole_ = true;
};

absl::Status CheckNumbers(Value* value) {
  const int type = static_cast<signed char>(value->bytes[0]);
  value->bytes.remove_prefix(1);
  if (type < 0 || type > static_cast<int>(DType::kComplex64)) return Bad("an extension of an unknown type");
  value->dtype = static_cast<DType>(type);
  const size_t size = DTypeSize(value->dtype);
  const absl::string_view zeros = value->bytes.substr(0, value->bytes.size() % size);
  const bool are_zeros = zeros.find_first_not_of('\0') == absl::string_view::npos;
  if (!zeros.empty() && (zeros.size() == value->bytes.size() || !are_zeros))
    return Bad("an array of numbers ends within a number");
  value->bytes.remove_prefix(zeros.size());
  value->count = value->bytes.size() / size;
  return absl::OkStatus();
}

absl::Status Check(size_t left, Value* value) {
  if (value->kind == ValueKind::kNumbers) return CheckNumbers(value);
  const bool map = value->kind == ValueKind::kMap;
  if (!map && value->kind != ValueKind::kArray) return absl::OkStatus();
  // Each of its values has one byte at least.
  return value->count <= left / (map ? 2 : 1) ? absl::OkStatus() : Bad("an array or a map is cut off");
}

// Of an extension: its length, in which there are five kinds, and its type.
size_t HeadSize(size_t size) {
  if (size == 1 || size == 2 || size == 4 || size == 8 || size == 16) return 2;
  return size < 256 ? 3 : size < 65'536 ? 4 : 6;
}

// How many zeros before an array of numbers align it, when it begins at `at`.
size_t Padding(size_t at, size_t bytes, size_t number) {
  for (size_t zeros = 0; zeros < number && bytes > 0; ++zeros)
    if ((at + HeadSize(bytes + zeros) + zeros) % number == 0) return zeros;
  return 0;
}

}  // namespace

// What msgpack-cxx packs into.
class Packer::Into {
 public:
  explicit Into(std::string& bytes) : bytes_(bytes) {}
  void write(const char* data, size_t size) { bytes_.append(data, size); }  // the name is msgpack's

 private:
  std::string& bytes_;
};

template <typename Function>
void Packer::Pack(const Function& function) {
  Into into(bytes_);
  msgpack::packer<Into> packer(into);
  function(packer);
}

bool Packer::Fits(size_t size) {
  if (size < kSizeMax) return true;
  too_large_ = size;
  return false;
}

void Packer::Nil() {
  Pack([](auto& to) { to.pack_nil(); });
}
void Packer::Bool(bool value) {
  Pack([&](auto& to) { value ? to.pack_true() : to.pack_false(); });
}
void Packer::Int(int64_t value) {
  Pack([&](auto& to) { to.pack_int64(value); });
}
void Packer::Uint(uint64_t value) {
  Pack([&](auto& to) { to.pack_uint64(value); });
}
// msgpack-cxx packs 2.0 as the integer 2, and -0.0 as 0.
void Packer::Float(double value) {
  static_assert(std::endian::native == std::endian::little);
  const uint64_t bits = __builtin_bswap64(std::bit_cast<uint64_t>(value));
  bytes_.push_back('\xcb');
  bytes_.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
}
void Packer::String(absl::string_view text) {
  if (!Fits(text.size())) return;
  Pack([&](auto& to) {
    to.pack_str(static_cast<uint32_t>(text.size()));
    to.pack_str_body(text.data(), static_cast<uint32_t>(text.size()));
  });
}
void Packer::Bytes(absl::string_view bytes) {
  if (!Fits(bytes.size())) return;
  Pack([&](auto& to) {
    to.pack_bin(static_cast<uint32_t>(bytes.size()));
    to.pack_bin_body(bytes.data(), static_cast<uint32_t>(bytes.size()));
  });
}
void Packer::Numbers(DType dtype, absl::string_view bytes) {
  const size_t number = DTypeSize(dtype);
  if (!Fits(bytes.size() + number)) return;
  const size_t zeros = Padding(bytes_.size(), bytes.size(), number);
  Pack([&](auto& to) {
    to.pack_ext(zeros + bytes.size(), static_cast<int8_t>(dtype));
    bytes_.append(zeros, '\0');
    to.pack_ext_body(bytes.data(), static_cast<uint32_t>(bytes.size()));
  });
}
void Packer::Array(size_t count) {
  if (!Fits(count)) return;
  Pack([&](auto& to) { to.pack_array(static_cast<uint32_t>(count)); });
}
void Packer::Map(size_t count) {
  if (!Fits(count)) return;
  Pack([&](auto& to) { to.pack_map(static_cast<uint32_t>(count)); });
}
void Packer::Clear() {
  bytes_.clear();
  too_large_ = 0;
}
std::string Packer::Take() {
  std::string taken = std::move(bytes_);
  Clear();
  return taken;
}

absl::Status Packer::status() const {
  if (too_large_ == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("a value of ", too_large_, " bytes or elements: 4 GiB are the most that one can have"));
}

absl::Status TakeValue(absl::string_view* bytes, Value* out) {
  *out = Value();
  if (bytes->empty()) return Bad("they end where a value should begin");
  TakeOne visitor(out);
  size_t taken = 0;
  try {
    msgpack::parse(bytes->data(), bytes->size(), taken, visitor);
  } catch (const msgpack::parse_error&) {  // a size that a size_t cannot say
    return Bad("a size is too large");
  }
  if (!visitor.whole()) return Bad("they are cut off, or begin with a byte that nothing begins with");
  const absl::string_view after = bytes->substr(taken);
  const absl::Status status = Check(after.size(), out);
  if (status.ok()) *bytes = after;
  return status;
}

std::string Describe(const Value& value) {
  switch (value.kind) {
    case ValueKind::kNil:
      return "nothing";
    case ValueKind::kBool:
      return "a bool";
    case ValueKind::kInt:
      return absl::StrCat("the integer ", value.integer);
    case ValueKind::kUint:
      return absl::StrCat("the integer ", value.natural);
    case ValueKind::kFloat:
      return absl::StrCat("the number ", value.number);
    case ValueKind::kString:
      return absl::StrCat("a string of ", value.bytes.size(), " bytes");
    case ValueKind::kBytes:
      return absl::StrCat(value.bytes.size(), " bytes");
    case ValueKind::kNumbers:
      return absl::StrCat("an array of ", value.count, " numbers");
    case ValueKind::kArray:
      return absl::StrCat("an array of ", value.count, " values");
    case ValueKind::kMap:
      return absl::StrCat("a map of ", value.count, " pairs");
  }
  return "";
}

}  // namespace gtrain::actors
