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
      const int64_t value = from[i], cut = value / ranks, rest = value % ranks;
      to[i] = static_cast<T>(rest < 0 ? cut - 1 : cut);
      remainders[i] = rest < 0 ? rest + ranks : rest;
    }
  });
}

void JoinMean(void* quotients, const int64_t* remainders, size_t count, DType dtype, int ranks) {
  WithType(dtype, [&]<typename T>(T) {
    T* means = static_cast<T*>(quotients);
    for (size_t i = 0; i < count; ++i) {
      const int64_t below = means[i] + remainders[i] / ranks;
      means[i] = static_cast<T>(below < 0 && remainders[i] % ranks != 0 ? below + 1 : below);
    }
  });
}

}  // namespace gtrain::comm
