// Elements of tensors as numbers: for people who compare checkpoints.
#pragma once
#include <gtrain/types.h>

#include <complex>
#include <cstddef>

#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

// Element i of little-endian `bytes`, which hold more than i. 64-bit integers are rounded to a double.
std::complex<double> ElementAt(absl::string_view bytes, DType dtype, size_t i);

}  // namespace gtrain::ckpt
