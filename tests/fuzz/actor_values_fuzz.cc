// Fuzzes the values of calls (I1): whatever bytes come, values are taken up to where they are wrong, and
// those packed anew are the same.
#include <cmath>
#include <string>
#include <vector>

#include "actors/values/values.h"
#include "base/check.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

void PackAnew(const actors::Value& value, actors::Packer& packer) {
  switch (value.kind) {
    case actors::ValueKind::kNil:
      return packer.Nil();
    case actors::ValueKind::kBool:
      return packer.Bool(value.integer != 0);
    case actors::ValueKind::kInt:
      return packer.Int(value.integer);
    case actors::ValueKind::kUint:
      return packer.Uint(value.natural);
    case actors::ValueKind::kFloat:
      return packer.Float(value.number);
    case actors::ValueKind::kString:
      return packer.String(value.bytes);
    case actors::ValueKind::kBytes:
      return packer.Bytes(value.bytes);
    case actors::ValueKind::kNumbers:
      return packer.Numbers(value.dtype, value.bytes);
    case actors::ValueKind::kArray:
    case actors::ValueKind::kMap:
      return;  // its head alone is no value
  }
}

}  // namespace

GT_FUZZ_RUN(actor_values) {
  absl::string_view left = bytes;
  actors::Value value;
  while (!left.empty()) {
    const size_t before = left.size();
    if (!actors::TakeValue(&left, &value).ok()) {
      GT_CHECK(left.size() == before);
      return;
    }
    GT_CHECK(left.size() < before);
    GT_CHECK(!actors::Describe(value).empty());
    const bool many = value.kind == actors::ValueKind::kArray || value.kind == actors::ValueKind::kMap;
    GT_CHECK(!many || value.count <= left.size());
    if (many || (value.kind == actors::ValueKind::kFloat && std::isnan(value.number))) continue;
    actors::Packer packer;
    PackAnew(value, packer);
    absl::string_view packed = packer.bytes();
    actors::Value back;
    GT_CHECK(actors::TakeValue(&packed, &back).ok() && packed.empty());
    GT_CHECK(back.kind == value.kind && back.integer == value.integer && back.natural == value.natural);
    GT_CHECK(back.number == value.number && back.bytes == value.bytes && back.count == value.count);
  }
}

GT_FUZZ_SEEDS(actor_values) {
  actors::Packer packer;
  packer.Array(3);
  packer.Int(-70'000);
  packer.String("a string");
  packer.Numbers(DType::kFloat32, std::string(12, 'x'));
  packer.Map(1);
  packer.Uint(~uint64_t{0});
  packer.Float(0.1);
  packer.Bytes(std::string(300, 'y'));
  packer.Bool(true);
  packer.Nil();
  return {packer.bytes(), "\xdd\xff\xff\xff\xff", "\xc9\xff\xff\xff\xff", "\xc7\x7f"};
}

}  // namespace gtrain::fuzz
