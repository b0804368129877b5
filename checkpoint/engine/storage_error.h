// Errors of the storage itself, told apart from damage of the files in it. A call that fails with an I/O
// error, a 503 or a 403 says nothing about a checkpoint: code that takes it for damage gives up a good one.
#pragma once
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Returns the same error, marked as one of the storage. OK stays OK.
absl::Status StorageError(const absl::Status& status);
// Whether `status` was marked, here or on another rank (Agreement::AllOk carries the mark).
bool IsStorageError(const absl::Status& status);
// Beside a status code in a number that ranks exchange: the error is the storage's.
inline constexpr int32_t kStorageErrorMark = 1 << 8;

// Every error of `base` that is no answer about a key comes back marked. An answer is NotFound,
// AlreadyExists, OutOfRange, InvalidArgument (no key) or FailedPrecondition (the store cannot do what is
// asked).
std::unique_ptr<port::BlobStore> MarkStorageErrors(std::unique_ptr<port::BlobStore> base);

}  // namespace gtrain::ckpt
