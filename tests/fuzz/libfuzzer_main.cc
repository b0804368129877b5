// The entry points of libFuzzer; compiled once a target with GTRAIN_FUZZ_TARGET naming it.
#include <cstdint>

#include "base/check.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const gtrain::fuzz::Target* const target = gtrain::fuzz::Find(GTRAIN_FUZZ_TARGET);
  GT_CHECK(target != nullptr);
  target->run({reinterpret_cast<const char*>(data), size});
  return 0;
}
