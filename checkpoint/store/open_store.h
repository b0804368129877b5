// A store by its location.
#pragma once
#include <memory>
#include <string>

#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// "/dir", "file:///dir" or "s3://bucket/prefix" in the form the rest of the code uses: a path without scheme,
// or the s3:// URI; no slash at the end. InvalidArgument: another scheme, or one with a single slash.
absl::StatusOr<std::string> ParseLocation(absl::string_view uri);

// Whether two of these are one place. Directories may be written in different ways; one that is not there is
// no other's.
bool SamePlace(const std::string& a, const std::string& b);

// The store at what ParseLocation gave. The s3:// one is loaded on demand (libgtrain_s3.so or
// $GTRAIN_S3_MODULE).
absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenStore(const std::string& location);

}  // namespace gtrain::ckpt
