// Element types and reductions of collectives and checkpoints.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gtrain {

enum class DType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt32, kInt64, kUint8 };

// Bytes of one element.
constexpr size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUint8:
      return 1;
  }
  return 0;
}

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax };

}  // namespace gtrain
