// The seal: number and digest of the newest acknowledged commit, in a small file beside the database and
// fsynced before the acknowledgement. A database that comes back with less than its seal says has lost
// acknowledged commits, however well it opens (faults H5-H7). docs/formats/records.md.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace gtrain::store {

// The state after a commit, told in a few bytes: how many commits so far, how many records are live, and the
// sum (modulo 2^64 in each half) of the checksums in front of all their values. The sum needs no order and is
// kept up to date by subtracting what a commit replaces.
struct Summary {
  uint64_t commit = 0;
  uint64_t records = 0;
  std::array<uint64_t, 2> digest = {0, 0};
  bool operator==(const Summary&) const = default;
};

std::string EncodeSummary(const Summary& summary);
absl::StatusOr<Summary> DecodeSummary(absl::string_view bytes);

// Thread-compatible; Write blocks on the disk.
class SealFile {
 public:
  // Opens or makes the file. `found` is unset when it was missing, and zero when nothing was ever sealed.
  // DataLoss: neither of its two slots is whole.
  static absl::StatusOr<SealFile> Open(const std::string& path);
  const std::optional<Summary>& found() const { return found_; }
  // Durable when it returns. The slot of the commit before stays as it is, so a torn write harms nothing.
  absl::Status Write(const Summary& summary);

 private:
  SealFile(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  std::string path_;
  UniqueFd fd_;
  std::optional<Summary> found_;
};

}  // namespace gtrain::store
