// Which version of a function that Highway compiled for several instruction sets this CPU runs. Highway's own
// choice sits in a shared library that brings the shared libstdc++ into every rank: 4 ms of CPU at each
// start, a second for 256 of them. libc knows the CPU as well. A pointer a function, chosen in its first
// call.
//
// GT_SIMD_EXPORT(F) at the level of F's namespace, once; GT_SIMD_BEST(F) is the function then.
#pragma once
#include "hwy/highway.h"

#if defined(__x86_64__) && __has_include(<sys/platform/x86.h>)
#if defined(__clang__) && !defined(_Bool)
#define _Bool bool  // glibc's header says it; in C++ clang knows only the other word
#include <sys/platform/x86.h>
#undef _Bool
#else
#include <sys/platform/x86.h>
#endif

namespace gtrain::comm {

enum class SimdLevel { kBaseline, kSsse3, kSse4, kAvx2, kAvx3 };

// The best level whose CPU features, those of Highway's target of the same name, are there. libc knows them
// from the start; to ask the CPU again (libgcc's __builtin_cpu_supports does, in every program that has it)
// takes 0.05 ms in a virtual machine.
inline SimdLevel BestSimdLevel() {
  if (!CPU_FEATURE_ACTIVE(SSSE3)) return SimdLevel::kBaseline;
  if (!CPU_FEATURE_ACTIVE(SSE4_2) || !CPU_FEATURE_ACTIVE(AES) || !CPU_FEATURE_ACTIVE(PCLMULQDQ))
    return SimdLevel::kSsse3;
  if (!CPU_FEATURE_ACTIVE(AVX2) || !CPU_FEATURE_ACTIVE(BMI1) || !CPU_FEATURE_ACTIVE(BMI2) ||
      !CPU_FEATURE_ACTIVE(FMA) || !CPU_FEATURE_ACTIVE(F16C))
    return SimdLevel::kSse4;
  if (!CPU_FEATURE_ACTIVE(AVX512F) || !CPU_FEATURE_ACTIVE(AVX512VL) || !CPU_FEATURE_ACTIVE(AVX512DQ) ||
      !CPU_FEATURE_ACTIVE(AVX512BW))
    return SimdLevel::kAvx2;
  return SimdLevel::kAvx3;
}

}  // namespace gtrain::comm

// A version that was not compiled, since the whole program may be built for more, is a null pointer.
#define GT_SIMD_EXPORT(F)                                                                                \
  auto F##Best() {                                                                                       \
    using Function = decltype(&HWY_STATIC_DISPATCH(F));                                                  \
    static const Function best = [] {                                                                    \
      const Function versions[] = {nullptr, HWY_CHOOSE_SSSE3(F), HWY_CHOOSE_SSE4(F), HWY_CHOOSE_AVX2(F), \
                                   HWY_CHOOSE_AVX3(F)};                                                  \
      const Function chosen = versions[static_cast<int>(::gtrain::comm::BestSimdLevel())];               \
      return chosen != nullptr ? chosen : &HWY_STATIC_DISPATCH(F);                                       \
    }();                                                                                                 \
    return best;                                                                                         \
  }                                                                                                      \
  static_assert(true)
#define GT_SIMD_BEST(F) F##Best()

#else

#define GT_SIMD_EXPORT(F) HWY_EXPORT(F)
#define GT_SIMD_BEST(F) HWY_DYNAMIC_DISPATCH(F)

#endif
