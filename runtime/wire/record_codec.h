// The head's records <-> bytes, as strict as the codec of messages. Pure functions, thread-safe. The store
// puts its own versioned, checksummed header in front (docs/formats/records.md).
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/core/values/records.h"

namespace gtrain::wire {

std::string EncodeRecord(const core::Record& record);

// DataLoss names the first field that is wrong. A record that decodes belongs under KeyOf(record): the caller
// compares that with the key it was found under.
absl::StatusOr<core::Record> DecodeRecord(absl::string_view bytes);

}  // namespace gtrain::wire
