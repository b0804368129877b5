// Names of objects, arrays of bytes that stay where they were made, and what processes ask each other about
// them. PURE.
#pragma once
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "actors/plan/call_ledger.h"

namespace gtrain::actors {

// What travels. Nobody else gets the number of an owner, so a name means the same bytes for ever.
struct ObjectRef {
  CallerId owner;
  uint64_t id = 0;
  uint64_t bytes = 0;
  // Where the owner's memory is for processes that see the same /proc: nothing is believed of what lies there
  // before it has said that it is this object.
  uint32_t pid = 0, descriptor = 0;
  bool operator==(const ObjectRef&) const = default;
};
inline constexpr size_t kObjectRefBytes = 40;
std::string PrintObject(const ObjectRef& ref);
// InvalidArgument: it is no name.
absl::StatusOr<ObjectRef> ParseObject(absl::string_view bytes);

inline constexpr uint64_t kObjectPartBytes = uint64_t{1} << 20;  // that one call fetches at most
// Some of the bytes of an object, asked of its owner.
struct PartRequest {
  ObjectRef ref;
  uint64_t from = 0, size = 0;
  bool operator==(const PartRequest&) const = default;
};
std::string PrintPart(const PartRequest& request);
// InvalidArgument: it is none, or asks for what no object has.
absl::StatusOr<PartRequest> ParsePart(absl::string_view bytes);

}  // namespace gtrain::actors
