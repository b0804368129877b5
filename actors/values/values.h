// Values of calls in MessagePack, packed and taken one token at a time (msgpack-cxx). Arrays of numbers of
// one type are an extension of that dtype, so that they are one copy. PURE: bytes in, bytes out.
//
// A Packer belongs to one thread at a time. Taking a value allocates nothing, and no count of an array or a
// map is larger than what is left of the bytes could hold.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gtrain/types.h"

namespace gtrain::actors {

class Packer {
 public:
  void Nil();
  void Bool(bool value);
  void Int(int64_t value);
  void Uint(uint64_t value);
  void Float(double value);
  void String(absl::string_view text);
  void Bytes(absl::string_view bytes);
  // `bytes` are elements of this type, as they lie in memory. They are aligned within what is packed, but
  // where MessagePack's heads of other lengths are in the way.
  void Numbers(DType dtype, absl::string_view bytes);
  void Array(size_t count);
  void Map(size_t count);
  void Clear();
  // What is packed; nothing is, behind it.
  std::string Take();

  // kResourceExhausted: more than 4 GiB - 1 were given at once, and what is packed is of no use.
  absl::Status status() const;
  const std::string& bytes() const { return bytes_; }

 private:
  class Into;
  // False: the size is more than MessagePack can say.
  bool Fits(size_t size);
  template <typename Function>
  void Pack(const Function& function);

  std::string bytes_;
  size_t too_large_ = 0;
};

enum class ValueKind { kNil, kBool, kInt, kUint, kFloat, kString, kBytes, kNumbers, kArray, kMap };

struct Value {
  ValueKind kind = ValueKind::kNil;
  int64_t integer = 0;      // kBool, and kInt: below 0
  uint64_t natural = 0;     // kUint
  double number = 0;        // kFloat
  absl::string_view bytes;  // kString, kBytes, kNumbers
  DType dtype = DType::kFloat32;
  size_t count = 0;  // kArray: values that follow, kMap: pairs
};

// Takes the next value from the front of `bytes`. kDataLoss: these are no value, or they end too early;
// `bytes` is unchanged then.
absl::Status TakeValue(absl::string_view* bytes, Value* out);

// "a string of 12 bytes", for messages.
std::string Describe(const Value& value);

}  // namespace gtrain::actors
