#include "comm/exec/integer_mean.h"

#include <cstring>
#include <type_traits>

#include "base/check.h"

namespace gtrain::comm {
namespace {

template <typename Body>
void WithType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kInt8:
      return body(int8_t{});
    case DType::kInt16:
      return body(int16_t{});
    case DType::kInt32:
      return body(int32_t{});
    case DType::kInt64:
      return body(int64_t{});
    case DType::kUint8:
      return body(uint8_t{});
    case DType::kUint16:
      return body(uint16_t{});
    case DType::kUint32:
      return body(uint32_t{});
    case DType::kUint64:
      return body(uint64_t{});
    default:
      GT_CHECK(IsInteger(dtype));
  }
}

// Users' memory need not be aligned.
template <typename T>
T Get(const void* from, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + index * sizeof(T), sizeof(T));
  return value;
}
template <typename T>
void Put(T value, void* to, size_t index) {
  std::memcpy(static_cast<char*>(to) + index * sizeof(T), &value, sizeof(T));
}

// An integer type that holds every T, and its quotients and remainders.
template <typename T>
using Wide = std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t>;

}  // namespace

void SplitForMean(const void* values, void* quotients, int64_t* remainders, size_t count, DType dtype,
                  int ranks) {
  WithType(dtype, [&]<typename T>(T) {
    for (size_t i = 0; i < count; ++i) {
      const Wide<T> value = Get<T>(values, i), divisor = static_cast<Wide<T>>(ranks);
      Put(static_cast<T>(value / divisor), quotients, i);
      remainders[i] = static_cast<int64_t>(value % divisor);
    }
  });
}

void JoinMean(void* quotients, const int64_t* remainders, size_t count, DType dtype, int ranks) {
  WithType(dtype, [&]<typename T>(T) {
    for (size_t i = 0; i < count; ++i) {
      const int64_t rest = remainders[i] % ranks;  // never below zero without signs
      const Wide<T> near = Get<T>(quotients, i) + static_cast<Wide<T>>(remainders[i] / ranks);
      Put(static_cast<T>(near < 0 && rest > 0   ? near + 1
                         : near > 0 && rest < 0 ? near - 1
                                                : near),
          quotients, i);
    }
  });
}

}  // namespace gtrain::comm
