// Words of collectives and checkpoints: element types, reductions, rules.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gtrain {

// Every type of safetensors with whole bytes. Checkpoints and the collectives that only move data take all of
// them; reductions take the first seven (IsReducible). The numbers are part of the C interface and of what
// ranks tell each other: new types are appended.
enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kUint8,
  kBool,  // one byte
  kInt8,
  kInt16,
  kUint16,
  kUint32,
  kUint64,
  kFloat8E4M3,  // without infinities: 0x7f and 0xff are NaN
  kFloat8E5M2,
  kComplex64,  // two float32
};

// Bytes of one element; 0 of a number that is no type.
constexpr size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUint64:
    case DType::kComplex64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUint32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUint16:
      return 2;
    case DType::kUint8:
    case DType::kBool:
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
  }
  return 0;
}

// Whether all-reduce, reduce and reduce-scatter take it. They refuse the others with InvalidArgument.
constexpr bool IsReducible(DType dtype) { return dtype <= DType::kUint8; }

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax };

// What becomes of the state of ranks that a smaller world does not have any more. It is said in the log.
enum class PerRankRule : uint8_t {
  kDrop,   // it is left out, here and in the checkpoints to come
  kKeep,   // carried along, by rank `old rank % world size`, until a world has that rank again
  kMerge,  // AddBytes only: `load` is called with it too, in the order of ranks, on rank `old rank % world
           // size`
};

}  // namespace gtrain
