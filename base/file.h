// Small whole-file helpers with bounds and durable writes.
#pragma once
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain {

// Turns errno into a Status whose message is "<what>: <strerror>". NotFound for ENOENT,
// PermissionDenied for EACCES/EPERM, AlreadyExists for EEXIST, ResourceExhausted for ENOSPC/EMFILE/ENFILE,
// Unavailable for EAGAIN/ECONNREFUSED/EPIPE, Internal otherwise.
absl::Status ErrnoStatus(int error, absl::string_view what);

// Reads a regular file of at most `bytes_max`. Opens without blocking; directories, FIFOs and
// devices are InvalidArgument, larger files ResourceExhausted (fault J13).
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t bytes_max);

// Atomic and durable: temporary file beside it, fsync, rename, fsync of the directory.
absl::Status WriteFileDurable(const std::string& path, absl::string_view data, int mode = 0600);

// fsync of a directory: what was made, renamed or removed in it stays so.
absl::Status SyncFolder(const std::string& path);

// mkdir -p with `mode` for what it creates.
absl::Status MakeDirs(const std::string& path, int mode = 0700);

}  // namespace gtrain
