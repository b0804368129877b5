#include "comm/exec/integer_mean.h"

#include "base/check.h"

namespace gtrain::comm {
namespace {

template <typename Body>
void WithType(DType dtype, const Body& body) {
  GT_CHECK(IsInteger(dtype));
  if (dtype == DType::kUint8) return body(uint8_t{});
  if (dtype == DType::kInt32) return body(int32_t{});
  body(int64_t{});
}

}  // namespace

void SplitForMean(const void* values, void* quotients, int64_t* remainders, size_t count, DType dtype,
                  int ranks) {
  WithType(dtype, [&]<typename T>(T) {
    const T* from = static_cast<const T*>(values);
    T* to = static_cast<T*>(quotients);
    for (size_t i = 0; i < count; ++i) {
      const int64_t value = from[i];
      to[i] = static_cast<T>(value / ranks);
      remainders[i] = value % ranks;
    }
  });
}

void JoinMean(void* quotients, const int64_t* remainders, size_t count, DType dtype, int ranks) {
  WithType(dtype, [&]<typename T>(T) {
    T* means = static_cast<T*>(quotients);
    for (size_t i = 0; i < count; ++i) {
      const int64_t near = means[i] + remainders[i] / ranks, rest = remainders[i] % ranks;
      means[i] = static_cast<T>(near < 0 && rest > 0 ? near + 1 : near > 0 && rest < 0 ? near - 1 : near);
    }
  });
}

}  // namespace gtrain::comm
