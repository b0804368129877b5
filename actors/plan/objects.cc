#include "actors/plan/objects.h"

#include "absl/strings/str_cat.h"
#include "actors/plan/bytes.h"

namespace gtrain::actors {
std::string PrintObject(const ObjectRef& ref) {
  std::string bytes;
  for (const uint64_t number : {ref.owner.high, ref.owner.low, ref.id, ref.bytes}) PutNumber(number, &bytes);
  for (const uint32_t number : {ref.pid, ref.descriptor}) PutNumber(number, &bytes);
  return bytes;
}

absl::StatusOr<ObjectRef> ParseObject(absl::string_view bytes) {
  if (bytes.empty())
    return absl::InvalidArgumentError("the reference is nobody's: no object was ever given to it");
  if (bytes.size() != kObjectRefBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of an object has ", kObjectRefBytes, " bytes, and this one ", bytes.size()));
  }
  ObjectRef ref;
  for (uint64_t* number : {&ref.owner.high, &ref.owner.low, &ref.id, &ref.bytes}) TakeNumber(&bytes, number);
  for (uint32_t* number : {&ref.pid, &ref.descriptor}) TakeNumber(&bytes, number);
  return ref;
}

std::string PrintPart(const PartRequest& request) {
  std::string bytes = PrintObject(request.ref);
  PutNumber(request.from, &bytes);
  PutNumber(request.size, &bytes);
  return bytes;
}

absl::StatusOr<PartRequest> ParsePart(absl::string_view bytes) {
  if (bytes.size() != kObjectRefBytes + 2 * sizeof(uint64_t))
    return absl::InvalidArgumentError("what is asked of an object has another size");
  PartRequest request;
  const absl::StatusOr<ObjectRef> ref = ParseObject(bytes.substr(0, kObjectRefBytes));
  if (!ref.ok()) return ref.status();
  request.ref = *ref;
  bytes.remove_prefix(kObjectRefBytes);
  TakeNumber(&bytes, &request.from);
  TakeNumber(&bytes, &request.size);
  if (request.size > kObjectPartBytes || request.from > request.ref.bytes ||
      request.size > request.ref.bytes - request.from)
    return absl::InvalidArgumentError("what is asked for is not in the object");
  return request;
}

}  // namespace gtrain::actors
