// CRC32C as S3 takes it for what is put (x-amz-checksum-crc32c): ISA-L's, with the processor's instructions.
#pragma once
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gtrain::ckpt {

// False: this gtrain was built without ISA-L, and the function below must not be called.
bool HaveCrc32c();

// The CRC32C of the concatenation of `parts`: base64 of its four bytes, most significant first.
std::string Crc32cBase64(absl::Span<const absl::string_view> parts);

}  // namespace gtrain::ckpt
