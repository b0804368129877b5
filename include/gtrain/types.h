// Words of collectives and checkpoints: element types, reductions, rules.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gtrain {

// Every type of safetensors with whole bytes. Checkpoints and the collectives that only move data take all of
// them; IsReducible says which reductions a type has. The numbers are part of the C interface and of what
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

// True for integers; bool is none.
constexpr bool IsInteger(DType dtype) {
  switch (dtype) {
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUint8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kUint16:
    case DType::kUint32:
    case DType::kUint64:
      return true;
    default:
      return false;
  }
}

// Sums and products of integers wrap around; their mean is that of the exact sum, cut off towards zero. For
// bool every byte but 0 is true and results are 0 or 1; sum, max and kBitOr are "or", product, min and
// kBitAnd are "and". In a minimum or maximum of floats a NaN wins. 8-bit and 16-bit floats are computed in
// float and rounded to nearest, ties to even, inside a machine once, between machines at each hop. A result
// that is too large for float8_e4m3, which has no infinity, becomes 448 with its sign; in the other types it
// becomes infinity. A rank alone leaves its data as they are. The numbers are part of the C interface and of
// the messages between ranks: new ones are appended.
enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax, kProduct, kBitAnd, kBitOr, kBitXor };

// Whether all-reduce, reduce and reduce-scatter take this type with this operation. They refuse other pairs
// with InvalidArgument.
constexpr bool IsReducible(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return DTypeSize(dtype) != 0;
    case ReduceOp::kMean:
      return DTypeSize(dtype) != 0 && dtype != DType::kBool;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return DTypeSize(dtype) != 0 && dtype != DType::kComplex64;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return IsInteger(dtype) || dtype == DType::kBool;
  }
  return false;
}

// What happens to the state of ranks that a smaller world does not have any more. The log says it too.
enum class PerRankRule : uint8_t {
  kDrop,   // it is left out, here and in the checkpoints to come
  kKeep,   // carried along, by rank `old rank % world size`, until a world has that rank again
  kMerge,  // AddBytes only: `load` is called with it too, in the order of ranks, on rank `old rank % world
           // size`
};

}  // namespace gtrain
