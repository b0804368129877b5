// Elements of tensors as numbers: for people who compare checkpoints.
#pragma once
#include <gtrain/types.h>

#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

// Element i of little-endian `bytes`, which hold more than i. 64-bit integers are rounded to a double.
std::complex<double> ElementAt(absl::string_view bytes, DType dtype, size_t i);

// Returns the exact difference of element i of `a` and `b`: two integers of 64 bits may be one number as
// doubles. Nullopt: `dtype` is no integer.
std::optional<uint64_t> IntegersDiffer(absl::string_view a, absl::string_view b, DType dtype, size_t i);

}  // namespace gtrain::ckpt
