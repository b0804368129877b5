// The lease file of an owner of a checkpoint directory, which is there while the owner is at work. Bytes:
// docs/formats/checkpoint.md.
#pragma once
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/names.h"

namespace gtrain::ckpt {

// A process, as other processes can recognise it.
struct Holder {
  std::string host;      // for people
  uint64_t machine = 0;  // equal for processes that see each other in /proc; 0: unknown
  uint64_t pid = 0;
  uint64_t started = 0;  // field 22 of /proc/<pid>/stat: tells a recycled pid
  uint64_t nonce = 0;    // tells two openings of one process
  bool operator==(const Holder&) const = default;
};

struct LeaseMark {
  LeaseName name;
  uint64_t since = 0;  // Unix seconds on the holder's clock; for people
  uint64_t generation = 0;
  Holder holder;
  bool operator==(const LeaseMark&) const = default;
};

inline constexpr size_t kLeaseBytesMax = 4096;

std::string Print(const LeaseMark& mark);
// DataLoss for anything that no writer here would produce. `key` is where the text was found.
absl::StatusOr<LeaseMark> ParseLeaseMark(absl::string_view key, absl::string_view text);

}  // namespace gtrain::ckpt
