// The audit log: who changed what, one JSON object a line, each with the hash of the line before it
// (docs/formats/audit.md). Not thread-safe, blocks on the disk: the head's store thread owns it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "runtime/core/values/effects.h"

namespace gtrain::head {

inline constexpr char kAuditFile[] = "audit.jsonl";
inline constexpr int kAuditFilesKept = 8;  // audit.jsonl.1 is the newest full one

class AuditLog {
 public:
  // Continues the chain of the file in `dir`, or begins one. A last line that a crash cut off is dropped.
  // DataLoss: the last line is whole but not one of ours; `gtrain audit --verify` says where it breaks.
  static absl::StatusOr<AuditLog> Open(const std::string& dir, uint64_t file_bytes_max = 16 << 20);

  // The lines are on disk when it returns. After an error nothing more can be written: the head must stop.
  absl::Status Append(const std::vector<core::AuditEntry>& entries, absl::Time now);

  uint64_t count() const { return count_; }
  const std::string& hash() const { return hash_; }  // of the last line; 64 zeros before the first

 private:
  absl::Status OpenFile();
  absl::Status Continue();
  absl::Status Rotate();

  std::string dir_;
  uint64_t file_bytes_max_ = 0;
  UniqueFd file_;
  uint64_t bytes_ = 0;  // of the open file
  uint64_t count_ = 0;  // lines ever written
  std::string hash_;
};

// The result of verifying the files of a directory, oldest first.
struct AuditVerdict {
  uint64_t first = 0, last = 0;  // numbers of the lines that are there
  std::string hash;              // of the last: noted elsewhere, it proves that nothing before it was changed
};
// Passes every line of the files in `dir`, in order, to `each` (may be null). DataLoss names the file and
// line where the chain breaks.
absl::StatusOr<AuditVerdict> ReadAudit(const std::string& dir, void (*each)(absl::string_view line));

}  // namespace gtrain::head
